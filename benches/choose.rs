//! What it costs to ask how a server's NICs fare, and to choose one; while nobody writes, and while another thread
//! writes what seven busy proxies would. One JSON line. `cargo bench --bench choose`.
//!
//! Where valgrind is installed, instructions are counted too: times depend on the machine and its neighbours.

mod instructions;
mod machine;

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use fuselink::engine::NicView;
use fuselink::engine::call::CallId;
use fuselink::engine::route::{Ask, Candidate, Policy, RouteLimits, choose};
use fuselink::load::{Beat, LoadConfig, LoadLine, LoadTable};
use fuselink::shm::SharedMemory;
use fuselink::topo::{GpuIdx, NicIdx, Server};
use rustix::thread::{CpuSet, sched_setaffinity};

const NICS: u32 = 8;
const NOW: u64 = 1_000_000;
const CALL: CallId = CallId(1);
/// Choices per sample, so that the clock's own cost does not count.
const BATCH: u32 = 1000;
const SAMPLES: usize = 1001;

/// Eight processes that own a NIC each.
fn tables() -> Vec<LoadTable> {
    let memory =
        SharedMemory::create("fuselink-bench", LoadTable::words(NICS, NICS as usize)).expect("memory");
    LoadTable::init(&memory.words(), NICS, NICS as usize);
    let config = LoadConfig::of(&Server::new(NICS, &[400_000; NICS as usize], 450_000), 1000);
    let open = |p| LoadTable::open(memory.words(), config.clone(), GpuIdx(p)).expect("table");
    (0..NICS).map(open).collect()
}

/// What a proxy writes after a round with work: in each it has other loans at all NICs than in the one before.
fn write(table: &LoadTable, own: u32, round: u64) {
    for nic in (0..NICS).map(NicIdx) {
        let borrowed = u64::from(own != nic.0) * (1 + round % 8) * 4096;
        table.publish(nic, &LoadLine { bytes: [borrowed, 0], ..LoadLine::default() });
    }
    table.beat(NOW, Beat { call: CALL, ..Beat::default() });
}

/// The NIC for one message, all NICs asked anew.
fn ask_and_choose(table: &LoadTable, now: u64, views: &mut [NicView; NICS as usize]) -> Option<NicIdx> {
    table.views(CALL, now, views);
    pick(views)
}

/// Its own NIC is busy, so the others are compared.
fn pick(views: &[NicView; NICS as usize]) -> Option<NicIdx> {
    let candidate = |(n, view): (usize, &NicView)| Candidate {
        nic: NicIdx(n as u32),
        available: true,
        state: view.egress.state,
        own_bytes: 1 << 20,
        borrowed_bytes: view.egress.borrowed_bytes,
    };
    let limits = RouteLimits { direct_bytes: 65_536, borrow_bytes: 1 << 20, policy: Policy::WHOLE };
    let ask = Ask { direct: NicIdx(0), rail: None, bytes: 65_536, limits };
    choose(ask, views.iter().enumerate().map(candidate))
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

/// Has this thread run on one processor, where there are several: else two threads may take turns on one and never
/// take a line from each other.
fn pin(processor: usize) {
    let mut set = CpuSet::new();
    set.set(processor);
    // A machine that forbids it, or has one processor only, measures what it can.
    let _ = sched_setaffinity(None, &set);
}

/// The same while seven others' lines change, and how often each did per us.
fn measure_while_others_write(tables: &[LoadTable], run: impl FnMut()) -> ([f64; 2], f64) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        pin(0);
        let others = || {
            pin(1);
            let (begin, mut rounds) = (Instant::now(), 0u64);
            while !stop.load(Ordering::Relaxed) {
                for (table, own) in tables[1..].iter().zip(1..) {
                    write(table, own, rounds);
                }
                rounds += 1;
            }
            rounds as f64 / begin.elapsed().as_micros() as f64
        };
        let others = scope.spawn(others);
        let measured = measure(run);
        stop.store(true, Ordering::Relaxed);
        (measured, others.join().expect("writer"))
    })
}

fn main() {
    let tables = tables();
    for (table, own) in tables.iter().zip(0..) {
        write(table, own, 0);
    }
    let mut views = [NicView::default(); NICS as usize];
    let mut both = || {
        black_box(ask_and_choose(&tables[0], black_box(NOW), &mut views));
    };
    if let Some(rounds) = instructions::rounds_asked() {
        return (0..rounds).for_each(|_| both());
    }
    let instructions = instructions::json(instructions::per_round(1_000, 11_000));
    let [quiet, quiet_p99] = measure(&mut both);
    let ([busy, busy_p99], rounds_per_us) = measure_while_others_write(&tables, &mut both);
    let mut round = 0;
    let [publish, _] = measure(|| {
        round += 1;
        write(black_box(&tables[0]), 0, round);
    });
    let [choice, choice_p99] = measure(|| {
        black_box(pick(black_box(&views)));
    });
    println!(
        "{{\"name\":\"choose\",\"nics\":{NICS},\"processes\":{NICS},\"ask_all_and_choose_p50_ns\":{quiet:.1},\
         \"ask_all_and_choose_p99_ns\":{quiet_p99:.1},\"instructions\":{instructions},\
         \"while_others_write_p50_ns\":{busy:.1},\"while_others_write_p99_ns\":{busy_p99:.1},\
         \"others_rounds_per_us\":{rounds_per_us:.2},\"choose_p50_ns\":{choice:.1},\"choose_p99_ns\":{choice_p99:.1},\
         \"publish_p50_ns\":{publish:.1},\"machine\":\"{}\"}}",
        machine::name()
    );
}
