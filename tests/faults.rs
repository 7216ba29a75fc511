//! Fault campaigns in virtual time (`host/sim/campaign`): whole jobs on NICs that fail.

use fuselink::sim::campaign::{Mutation, Run, RunOptions, Verdict, run};

/// Runs in `cargo test`; `FUSELINK_FAULT_RUNS` asks for more.
const RUNS: u64 = 2000;

fn runs() -> u64 {
    std::env::var("FUSELINK_FAULT_RUNS").ok().and_then(|n| n.parse().ok()).unwrap_or(RUNS)
}

fn do_run(seed: u64, mutation: Option<Mutation>) -> Run {
    run(RunOptions { seed, mutation, trace: false }).expect("memory for a small job")
}

/// Two halves of the seeds, on a thread each.
fn campaign(part: u64, parts: u64) {
    for seed in (part..runs()).step_by(parts as usize) {
        let run = do_run(seed, None);
        assert!(
            run.is_good(),
            "{:?}\n  {}\n  {:?}\n  repeat: fuselink sim faults --seed {seed} --runs 1 --trace",
            run.verdict,
            run.machine,
            run.blows
        );
    }
}

#[test]
fn no_byte_is_lost_doubled_or_changed_even_seeds() {
    campaign(0, 2);
}

#[test]
fn no_byte_is_lost_doubled_or_changed_odd_seeds() {
    campaign(1, 2);
}

/// How many seeds it takes until a campaign finds what was left out.
#[track_caller]
fn is_found(mutation: Mutation) {
    let found = (0..runs()).any(|seed| matches!(do_run(seed, Some(mutation)).verdict, Verdict::Broken(_)));
    assert!(found, "{} runs found nothing wrong without it", runs());
}

#[test]
fn a_missing_fence_is_found() {
    is_found(Mutation::NoFence);
}

#[test]
fn a_missing_flush_is_found() {
    is_found(Mutation::NoFlush);
}

#[test]
fn a_missing_generation_check_is_found() {
    is_found(Mutation::NoGeneration);
}

#[test]
fn memory_that_is_taken_back_in_use_is_found() {
    is_found(Mutation::NoRecall);
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in 0..20 {
        let runs = [0, 1].map(|_| run(RunOptions { seed, trace: true, mutation: None }).expect("memory"));
        assert_eq!(runs[0], runs[1]);
    }
}
