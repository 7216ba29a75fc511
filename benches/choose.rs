//! What it costs to ask how a server's NICs fare, and to choose one. One JSON line. `cargo bench --bench choose`.

mod machine;

use std::hint::black_box;
use std::time::Instant;

use fuselink::engine::call::CallId;
use fuselink::engine::route::{Candidate, RouteLimits, choose};
use fuselink::load::{Beat, LoadConfig, LoadLine, LoadTable};
use fuselink::shm::SharedMemory;
use fuselink::topo::{GpuIdx, NicIdx};

const NICS: u32 = 8;
const NOW: u64 = 1_000_000;
const CALL: CallId = CallId(1);
/// Choices per sample, so that the clock's own cost does not count.
const BATCH: u32 = 1000;
const SAMPLES: usize = 1001;

/// Eight processes that own a NIC each, all with traffic, so that nothing is skipped.
fn table() -> LoadTable {
    let memory =
        SharedMemory::create("fuselink-bench", LoadTable::words(NICS, NICS as usize)).expect("memory");
    LoadTable::init(&memory.words(), NICS, NICS as usize);
    let config = LoadConfig {
        owners: (0..NICS).map(GpuIdx).collect(),
        users: (0..NICS).map(|n| vec![GpuIdx(n)]).collect(),
        up: vec![true; NICS as usize],
        processes: NICS,
        idle_after_ns: 1000,
    };
    let open = |p| LoadTable::open(memory.words(), config.clone(), GpuIdx(p)).expect("table");
    for p in 0..NICS {
        let table = open(p);
        table.beat(NOW, Beat { call: CALL, ..Beat::default() });
        for nic in 0..NICS {
            let line = LoadLine { bytes: [u64::from(p != nic) * 4096, 4096], ..LoadLine::default() };
            table.publish(NicIdx(nic), &line);
        }
    }
    open(0)
}

/// The NIC for one message, all NICs asked anew.
fn ask_and_choose(table: &LoadTable, now: u64) -> Option<NicIdx> {
    let candidate = |n| {
        let load = table.view(NicIdx(n), CALL, now).egress;
        Candidate {
            nic: NicIdx(n),
            available: true,
            state: load.state,
            own_bytes: 1 << 20,
            borrowed_bytes: load.borrowed_bytes,
        }
    };
    pick((0..NICS).map(candidate))
}

fn pick(candidates: impl Iterator<Item = Candidate>) -> Option<NicIdx> {
    choose(NicIdx(0), candidates, 65_536, RouteLimits { direct_bytes: 65_536, borrow_bytes: 1 << 20 })
}

/// Median and 99th percentile of ns per call.
fn measure(mut run: impl FnMut()) -> [f64; 2] {
    let mut ns: Vec<_> = (0..SAMPLES)
        .map(|_| {
            let begin = Instant::now();
            (0..BATCH).for_each(|_| run());
            begin.elapsed().as_nanos() as f64 / f64::from(BATCH)
        })
        .collect();
    ns.sort_by(f64::total_cmp);
    [ns[SAMPLES / 2], ns[SAMPLES * 99 / 100]]
}

fn main() {
    let table = table();
    let [both, both_p99] = measure(|| {
        black_box(ask_and_choose(&table, black_box(NOW)));
    });
    let [view, view_p99] = measure(|| {
        black_box(table.view(black_box(NicIdx(3)), CALL, black_box(NOW)));
    });
    let states = (0..NICS).map(|n| table.view(NicIdx(n), CALL, NOW).egress);
    let seen: Vec<_> = states
        .enumerate()
        .map(|(n, load)| Candidate {
            nic: NicIdx(n as u32),
            available: true,
            state: load.state,
            own_bytes: 1 << 20,
            borrowed_bytes: load.borrowed_bytes,
        })
        .collect();
    let [choice, choice_p99] = measure(|| {
        black_box(pick(black_box(&seen).iter().copied()));
    });
    println!(
        "{{\"name\":\"choose\",\"nics\":{NICS},\"processes\":{NICS},\"ask_all_and_choose_p50_ns\":{both:.1},\
         \"ask_all_and_choose_p99_ns\":{both_p99:.1},\"ask_one_p50_ns\":{view:.1},\"ask_one_p99_ns\":{view_p99:.1},\
         \"choose_p50_ns\":{choice:.1},\"choose_p99_ns\":{choice_p99:.1},\"machine\":\"{}\"}}",
        machine::name()
    );
}
