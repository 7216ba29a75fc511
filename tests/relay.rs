//! Relay memory that comes and goes under a job's feet: lent when a call wants it, refused at the cap, taken back when
//! somebody needs the memory; and every byte arrives all the same.

mod common;

use std::time::Duration;

use common::{config, mismatches, prepare, run_ranks};
use fuselink::comm::{CommConfig, CommError, Communicator, Refusal, RelayCounters};
use fuselink::plan::{Demand, Method};
use fuselink::topo::{Cluster, Server};

const SLOT: u32 = 8192;
const CHUNK: u64 = 2 << 20;
const GPUS: u32 = 4;
/// Lots of one class that a GPU can lend: one to each other rank of its server, but for the one whose spare its NIC is.
const OTHERS: u64 = GPUS as u64 - 2;
/// A call goes on without lots whose owners are late; so many calls are enough for any host.
const CALLS: u64 = 50;

fn cluster() -> Cluster {
    Cluster::uniform(2, Server::new(GPUS, &[400_000; GPUS as usize], 450_000))
}

fn demand() -> Demand {
    let cells = (0..64).map(|n| 20_000 + 977 * n % 30_000);
    Demand::new(2 * GPUS, cells.collect(), 1).unwrap()
}

/// Runs calls until `done`, the same number on all ranks; returns wrong bytes.
fn calls(
    comm: &mut Communicator,
    method: Method,
    most: u64,
    done: impl Fn(&Communicator) -> bool,
) -> Result<u64, CommError> {
    let demand = demand();
    let plan = comm.plan_demand(&demand, method)?;
    let (send, recv) = (comm.alloc(plan.send_bytes())?, comm.alloc(plan.recv_bytes())?);
    let mut wrong = 0;
    for iteration in 0..most {
        prepare(comm, &plan, &demand, &send, &recv, iteration);
        comm.barrier()?;
        comm.all_to_all(&plan, &send, &recv)?;
        wrong += mismatches(comm, &plan, &demand, &recv, iteration);
        let all = comm.bootstrap()?.allgather(&[u8::from(done(comm))])?;
        if all.iter().all(|done| done == &[1]) {
            break;
        }
    }
    Ok(wrong)
}

fn grow(comm: &mut Communicator, method: Method) {
    let grown = |comm: &Communicator| lent_now(comm) >= OTHERS;
    assert_eq!(calls(comm, method, CALLS, grown).unwrap(), 0);
    assert!(lent_now(comm) >= OTHERS, "{:?}", comm.relay_counters());
}

fn lent_now(comm: &Communicator) -> u64 {
    let c = comm.relay_counters();
    c.lent - c.returned
}

fn config_with(relay_bytes: u64) -> CommConfig {
    CommConfig { relay_bytes, ..config(&cluster(), 1000, SLOT) }
}

/// Every owner with its own lots and those of one more rank: one of class plan and one of class put each.
const PERMANENT: u64 = 4 * CHUNK;

#[test]
fn relay_memory_grows_when_it_is_wanted_and_not_before() {
    let counters = run_ranks(&config_with(256 << 20), |mut comm| {
        assert_eq!(calls(&mut comm, Method::Static, 2, |_| false).unwrap(), 0);
        let at_first = comm.relay_counters();
        grow(&mut comm, Method::Spray);
        let after_spray = comm.relay_counters();
        assert_eq!(calls(&mut comm, Method::FuseLink, 2, |_| false).unwrap(), 0);
        let after_fuselink = comm.relay_counters();
        let with_plans = |comm: &Communicator| lent_now(comm) > OTHERS;
        assert_eq!(calls(&mut comm, Method::Birkhoff, 2, with_plans).unwrap(), 0);
        comm.barrier().unwrap();
        [at_first, after_spray, after_fuselink, comm.relay_counters()]
    });
    for [at_first, after_spray, after_fuselink, at_last] in counters {
        let nothing = RelayCounters { bytes: PERMANENT, most_bytes: PERMANENT, ..Default::default() };
        assert_eq!(at_first, nothing, "static wants nothing");
        assert_eq!((after_spray.lent, after_spray.bytes), (OTHERS, PERMANENT + OTHERS * CHUNK));
        assert_eq!(after_fuselink.lent, OTHERS, "what is lent stays, and serves the next method");
        assert!(at_last.lent > OTHERS && at_last.bytes == PERMANENT + at_last.lent * CHUNK, "{at_last:?}");
        assert_eq!((at_last.refused, at_last.returned), ([0; 3], 0));
    }
}

#[test]
fn at_the_cap_calls_make_do_with_what_is_permanent() {
    let results = run_ranks(&config_with(PERMANENT), |mut comm| {
        let mut wrong = 0;
        for method in [Method::Spray, Method::FuseLink, Method::Birkhoff, Method::Loose] {
            wrong += calls(&mut comm, method, 2, |_| false).unwrap();
        }
        comm.barrier().unwrap();
        (wrong, comm.relay_counters())
    });
    for (wrong, counters) in results {
        assert_eq!((wrong, counters.lent), (0, 0));
        assert!(counters.refused[Refusal::Cap as usize] > 0, "{counters:?}");
        assert_eq!((counters.bytes, counters.most_bytes), (PERMANENT, PERMANENT));
    }
}

#[test]
fn a_cap_between_lends_some_and_never_passes_it() {
    let cap = PERMANENT + CHUNK;
    let results = run_ranks(&config_with(cap), |mut comm| {
        let one = |comm: &Communicator| lent_now(comm) == 1;
        let mut wrong = calls(&mut comm, Method::Spray, CALLS, one).unwrap();
        wrong += calls(&mut comm, Method::FuseLink, 2, |_| false).unwrap();
        comm.barrier().unwrap();
        (wrong, comm.relay_counters())
    });
    for (wrong, counters) in results {
        assert_eq!((wrong, counters.lent, counters.most_bytes), (0, 1, cap));
        assert!(counters.refused[Refusal::Cap as usize] > 0, "{counters:?}");
    }
}

/// Too little for the permanent lots: an error before anything is made.
#[test]
fn a_cap_below_the_permanent_lots_is_refused() {
    let errors = common::connect_ranks(&config_with(PERMANENT - 1), |_, _| {});
    assert!(errors.iter().all(|e| e.as_ref().unwrap().contains("FUSELINK_RELAY_BYTES")), "{errors:?}");
}

#[test]
fn reclaimed_memory_comes_back_between_calls_and_is_lent_again() {
    let results = run_ranks(&config_with(256 << 20), |mut comm| {
        let mut wrong = 0;
        let mut got = Vec::new();
        for _ in 0..3 {
            grow(&mut comm, Method::Spray);
            comm.barrier().unwrap();
            got.push(comm.reclaim_relay(Duration::from_secs(20)));
            // At once: nothing is lent back yet, and the calls make do.
            wrong += calls(&mut comm, Method::Spray, 1, |_| false).unwrap();
            wrong += calls(&mut comm, Method::FuseLink, 2, |_| false).unwrap();
        }
        comm.barrier().unwrap();
        (wrong, got, comm.relay_counters())
    });
    for (wrong, got, counters) in results {
        assert_eq!(wrong, 0);
        assert!(got.iter().all(|r| r.bytes == OTHERS * CHUNK && r.still_lent.is_empty()), "{got:?}");
        assert!(counters.recalled == 3 * OTHERS && counters.returned == 3 * OTHERS, "{counters:?}");
        assert!(counters.most_bytes <= PERMANENT + OTHERS * CHUNK, "{counters:?}");
    }
}

/// The others are in the call when rank 0 wants its memory back; they cannot finish before it joins.
#[test]
fn reclaiming_while_others_are_in_a_call_disturbs_nobody() {
    for method in [Method::Spray, Method::FuseLink, Method::Birkhoff] {
        let results = run_ranks(&config_with(256 << 20), |mut comm| {
            let grown = |comm: &Communicator| lent_now(comm) > 0;
            let mut wrong = calls(&mut comm, method, CALLS, grown).unwrap();
            let demand = demand();
            let plan = comm.plan_demand(&demand, method).unwrap();
            let (send, recv) =
                (comm.alloc(plan.send_bytes()).unwrap(), comm.alloc(plan.recv_bytes()).unwrap());
            for iteration in 0..5 {
                prepare(&comm, &plan, &demand, &send, &recv, iteration);
                comm.barrier().unwrap();
                if comm.rank().0 == 0 {
                    let soon = comm.reclaim_relay(Duration::from_millis(30));
                    assert!(soon.still_lent.iter().all(|l| l.rank.0 < GPUS), "{soon:?}");
                }
                comm.all_to_all(&plan, &send, &recv).unwrap();
                wrong += mismatches(&comm, &plan, &demand, &recv, iteration);
            }
            comm.barrier().unwrap();
            let last = comm.reclaim_relay(Duration::from_secs(20));
            comm.barrier().unwrap();
            (wrong, last.still_lent, comm.relay_counters())
        });
        for (wrong, still_lent, counters) in results {
            assert_eq!((wrong, still_lent), (0, vec![]), "{method}: {counters:?}");
            assert_eq!((counters.lent, counters.bytes), (counters.returned, PERMANENT), "{method}");
        }
    }
}

/// Memory for what is there at the start (launch parameters too), one plan, its buffers, all lots and three chunks more.
#[test]
fn an_allocation_takes_lots_back_where_the_gpu_is_full() {
    let mut config = config_with(256 << 20);
    let (control, params, plan, buffers) = (CHUNK, CHUNK, CHUNK, 2 * CHUNK);
    let at_start = control + params + PERMANENT;
    config.emulation.memory_bytes = Some(at_start + plan + buffers + OTHERS * CHUNK + 3 * CHUNK);
    let results = run_ranks(&config, |mut comm| {
        let demand = demand();
        let plan = comm.plan_demand(&demand, Method::Spray).unwrap();
        let (send, recv) = (comm.alloc(plan.send_bytes()).unwrap(), comm.alloc(plan.recv_bytes()).unwrap());
        let mut wrong = 0;
        let mut call = |comm: &mut Communicator, iteration| {
            prepare(comm, &plan, &demand, &send, &recv, iteration);
            comm.barrier().unwrap();
            comm.all_to_all(&plan, &send, &recv).unwrap();
            wrong += mismatches(comm, &plan, &demand, &recv, iteration);
            let grown = [u8::from(lent_now(comm) == OTHERS)];
            comm.bootstrap().unwrap().allgather(&grown).unwrap().iter().all(|grown| grown == &[1])
        };
        let grown = (0..CALLS).any(|iteration| call(&mut comm, iteration));
        assert!(grown, "{:?}", comm.relay_counters());
        // Three fit, the others take the place of the lots.
        let more: Vec<_> = (0..3 + OTHERS).map(|_| comm.alloc(CHUNK).unwrap()).collect();
        let full = comm.relay_counters();
        (0..3)
            .for_each(|iteration| assert!(!call(&mut comm, CALLS + iteration), "there is no memory to lend"));
        let Err(none) = comm.alloc(CHUNK).map(drop) else { panic!("there was memory") };
        drop(more);
        comm.barrier().unwrap();
        let grown = (0..200 * CALLS).any(|iteration| call(&mut comm, 2 * CALLS + iteration));
        comm.barrier().unwrap();
        (wrong, full, none.to_string(), grown)
    });
    for (wrong, full, none, grown) in results {
        assert_eq!((wrong, full.returned, full.bytes), (0, OTHERS, PERMANENT), "{full:?}");
        assert!(none.contains("cannot create 2097152 bytes"), "{none}");
        assert!(grown, "lent again when there is memory");
    }
}
