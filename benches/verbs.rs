//! What the library does to post a message over verbs and to see its end, but for the device: time, instructions (counted by
//! valgrind, where it is installed) and completions, by messages per doorbell. One JSON line each.
//! `cargo bench --features verbs --bench verbs`.

mod instructions;
mod machine;

use std::time::Instant;

use fuselink::verbs::rehearse;

const MESSAGES: u32 = 100_000;
const RUNS: usize = 51;
/// What a run to be counted is called with.
const COUNT: &str = "--count";

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if let Some(at) = args.iter().position(|a| a == COUNT) {
        let number =
            |i: usize| args.get(at + i).and_then(|a| a.parse().ok()).expect("--count MESSAGES BATCH");
        rehearse(number(1), number(2));
        return;
    }
    for batch in [1, 4, 16, 64] {
        report(batch);
    }
}

fn report(batch: u32) {
    let completions = rehearse(MESSAGES, batch);
    let mut ns: Vec<f64> = (0..RUNS).map(|_| ns_per_message(batch)).collect();
    ns.sort_by(f64::total_cmp);
    let counted = |messages: u32| instructions::of(&[COUNT, &messages.to_string(), &batch.to_string()]);
    let more = counted(60_000).zip(counted(20_000)).map(|(many, few)| (many - few) as f64 / 40_000.0);
    let each = instructions::json(more);
    println!(
        "{{\"bench\":\"verbs-post\",\"batch\":{batch},\"ns_per_message\":{{\"p50\":{:.1},\"p99\":{:.1}}},\
         \"instructions_per_message\":{each},\"completions_per_message\":{:.4},\"machine\":\"{}\"}}",
        ns[RUNS / 2],
        ns[RUNS * 99 / 100],
        f64::from(completions) / f64::from(MESSAGES),
        machine::name()
    );
}

fn ns_per_message(batch: u32) -> f64 {
    let begin = Instant::now();
    rehearse(MESSAGES, batch);
    begin.elapsed().as_nanos() as f64 / f64::from(MESSAGES)
}
