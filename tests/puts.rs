//! One-sided puts by users' kernels on emulated clusters: real proxies, engines, NICs and owners; every byte of every message.

mod common;

use std::time::{Duration, Instant};

use common::exchange::{Exchange, PUT_BYTES, exchange, put_config, run_exchange};
use common::{config, kernels, mismatches, prepare, replay, run_ranks};
use fuselink::comm::{CommConfig, CommError, Communicator, UserLaunch};
use fuselink::hw::{HwError, LinkState};
use fuselink::plan::{Demand, Method};
use fuselink::topo::{Cluster, NicId, Rank, Server};

const GBIT_400: u64 = 400_000;
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn everybody_puts_to_everybody() {
    run_exchange(&put_config(&Cluster::uniform(2, Server::new(2, &[GBIT_400; 2], 450_000))), 60);
}

#[test]
fn servers_of_different_size_and_a_nic_down() {
    let cluster = Cluster::new(vec![
        Server::new(3, &[GBIT_400, 0, 200_000], 450_000),
        Server::new(2, &[100_000, GBIT_400], 450_000),
        Server::new(1, &[GBIT_400; 2], 450_000),
    ]);
    run_exchange(&put_config(&cluster), 25);
}

/// Nothing but scale-up: no message has a NIC.
#[test]
fn within_one_server() {
    run_exchange(&put_config(&Cluster::uniform(1, Server::new(3, &[GBIT_400; 2], 450_000))), 60);
    run_exchange(&put_config(&Cluster::uniform(1, Server::new(1, &[GBIT_400], 450_000))), 60);
}

#[test]
fn one_nic_for_all_gpus() {
    run_exchange(&put_config(&Cluster::uniform(2, Server::new(3, &[GBIT_400], 450_000))), 25);
}

/// Waits for something that a proxy or NIC does.
fn wait(what: &str, done: impl Fn() -> bool) {
    let by = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < by, "waited for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A cable is pulled while kernels put, and put back while they go on: each message comes once, its signal counts once (the
/// kernels end only when signals and flushes say that all is there).
#[test]
fn a_cable_that_is_pulled_loses_and_doubles_nothing() {
    let cluster = Cluster::uniform(2, Server::new(2, &[GBIT_400; 2], 450_000));
    // Slow enough that the cable is pulled in the midst.
    let config = CommConfig { put_bytes: PUT_BYTES, ..config(&cluster, 100_000, 8192) };
    let victim = NicId(1);
    let wrong = run_ranks(&config, |mut comm| -> Result<u64, CommError> {
        let cables = comm.cables().expect("emulated NICs have cables");
        std::thread::scope(|scope| {
            if comm.rank() == Rank(0) {
                scope.spawn(move || {
                    let tx = |nic: NicId| cables.counters(nic).tx_bytes;
                    wait("the first bytes", || tx(victim) > 0);
                    cables.set(victim, LinkState::Down);
                    let at = tx(NicId(0));
                    wait("bytes on another NIC", || tx(NicId(0)) > at + 10 * u64::from(PUT_BYTES));
                    cables.set(victim, LinkState::Up);
                });
            }
            (0..3).try_fold(0, |wrong, iteration| Ok(wrong + exchange(&mut comm, 60, iteration)?))
        })
    });
    for (rank, wrong) in wrong.into_iter().enumerate() {
        assert_eq!(wrong.unwrap(), 0, "rank {rank}");
    }
}

/// Payload leaves by NICs, once, and puts and calls go on one communicator in any order.
#[test]
fn puts_and_calls_take_turns() {
    let cluster = Cluster::uniform(2, Server::new(2, &[GBIT_400; 2], 450_000));
    let demand = Demand::new(4, (0..16).map(|i| 20_000 + 3_001 * (i % 5)).collect(), 1).unwrap();
    let outcomes = run_ranks(&put_config(&cluster), |mut comm| -> Result<(u64, u64), CommError> {
        let plan = comm.plan_demand(&demand, Method::FuseLink)?;
        let (send, recv) = (comm.alloc(plan.send_bytes())?, comm.alloc(plan.recv_bytes())?);
        let mut wrong = 0;
        let tx = |comm: &Communicator| (0..4).map(|n| comm.nic_counters(NicId(n)).tx_bytes).sum::<u64>();
        let mut by_puts = 0;
        for iteration in 0..3 {
            prepare(&comm, &plan, &demand, &send, &recv, iteration);
            comm.barrier()?;
            comm.all_to_all(&plan, &send, &recv)?;
            wrong += mismatches(&comm, &plan, &demand, &recv, iteration);
            comm.barrier()?;
            let before = tx(&comm);
            comm.barrier()?;
            wrong += exchange(&mut comm, 20, iteration)?;
            by_puts = tx(&comm) - before;
            comm.barrier()?;
        }
        Ok((wrong, by_puts))
    });
    // Each rank sends 20 messages, each a byte shorter than the one before, to two ranks of the other server; what it sends
    // to its own goes by no NIC.
    let each: u64 = (0..20).map(|i| u64::from(PUT_BYTES) - i).sum();
    for outcome in outcomes {
        assert_eq!(outcome.unwrap(), (0, 4 * 2 * each));
    }
}

/// Without memory for puts there is no stream, and nothing else changes.
#[test]
fn without_memory_for_puts_there_is_no_stream() {
    let cluster = Cluster::uniform(2, Server::new(1, &[GBIT_400], 450_000));
    let errors = run_ranks(&config(&cluster, 1000, 8192), |comm| comm.stream().unwrap_err().to_string());
    assert!(errors.iter().all(|e| e.contains("put_bytes")), "{errors:?}");
}

/// A rank that nobody takes messages of is told what it waited for.
#[test]
fn a_put_that_nobody_takes_ends_with_a_reason() {
    ends_with_a_reason(&Cluster::uniform(2, Server::new(1, &[GBIT_400], 450_000)));
    ends_with_a_reason(&Cluster::uniform(1, Server::new(2, &[GBIT_400; 2], 450_000)));
}

/// A rank that fails stops the kernels that wait for it, long before their own time-out.
#[test]
fn a_peer_that_fails_stops_kernels_of_its_server() {
    let cluster = Cluster::uniform(1, Server::new(2, &[GBIT_400; 2], 450_000));
    let errors = run_ranks(&put_config(&cluster), |mut comm| -> Result<(), CommError> {
        if comm.rank() == Rank(0) {
            let exchange = Exchange::new(&comm, 60, 0)?;
            exchange.launch(&mut comm, 60)?;
            comm.barrier()?;
            let begin = Instant::now();
            let result = exchange.finish(&mut comm).map(drop);
            assert!(begin.elapsed() < common::TIMEOUT / 2, "waited for its own time-out");
            return result;
        }
        // The allocations that rank 0's exchange makes together with this rank.
        let _buffers = [comm.alloc(1)?, comm.alloc(1)?, comm.alloc(1)?];
        comm.barrier()?;
        comm.bootstrap()?.abort("out of luck");
        Ok(())
    });
    let errors: Vec<_> = errors.into_iter().map(|e| e.map_err(|e| e.to_string())).collect();
    assert!(errors[0].as_ref().is_err_and(|e| e.contains("out of luck")), "{errors:?}");
}

fn ends_with_a_reason(cluster: &Cluster) {
    let mut config = put_config(cluster);
    config.timeout = Duration::from_secs(1);
    let errors = run_ranks(&config, |mut comm| -> Result<(), CommError> {
        if comm.rank() == Rank(0) {
            Exchange::new(&comm, 60, 0)?.run(&mut comm)?;
        }
        let _with_those_of_the_exchange = [comm.alloc(1)?, comm.alloc(1)?, comm.alloc(1)?];
        comm.bootstrap()?.barrier_within(Duration::from_secs(60))?;
        Ok(())
    });
    let errors: Vec<_> = errors.into_iter().map(|e| e.unwrap_err().to_string()).collect();
    assert!(errors.iter().any(|e| e.contains("did not come in time")), "{errors:?}");
}

/// What a graph does when it is replayed.
#[test]
fn a_launch_is_repeated_with_the_same_parameters() {
    for servers in [2, 1] {
        replay::run(&replay::replay_config(servers), |comm, launch| {
            (0..replay::ROUNDS).try_for_each(|_| comm.launch_prepared(launch))
        });
    }
}

/// A kernel of rank 0's waits for rank 1's, which has not begun.
fn beside_a_kernel(in_the_meantime: impl Fn(&mut Communicator, &Exchange) + Sync) {
    let cluster = Cluster::uniform(2, Server::new(1, &[GBIT_400], 450_000));
    let messages = 20;
    let wrong = run_ranks(&put_config(&cluster), |mut comm| -> Result<u64, CommError> {
        let exchange = Exchange::new(&comm, messages, 0)?;
        comm.barrier()?;
        if comm.rank() == Rank(0) {
            exchange.launch(&mut comm, messages)?;
            in_the_meantime(&mut comm, &exchange);
        }
        comm.barrier()?;
        if comm.rank() == Rank(1) {
            exchange.launch(&mut comm, messages)?;
        }
        let wrong = exchange.finish(&mut comm)?;
        // Whatever was refused is possible again.
        exchange.launch(&mut comm, 0)?;
        comm.synchronize()?;
        comm.alloc(1)?;
        comm.barrier()?;
        Ok(wrong)
    });
    assert!(wrong.into_iter().all(|wrong| wrong.unwrap() == 0));
}

/// While a kernel waits for the host, nothing is done that might wait for the kernel.
#[test]
fn what_may_wait_for_kernels_is_refused_beside_them() {
    beside_a_kernel(|comm, _| {
        let launch = UserLaunch { name: "test_exchange", blocks: 1, params: &[0; 8], buffers: &[] };
        // SAFETY: the kernel that it has already.
        let added = unsafe { comm.add_kernels(kernels::exchange()) };
        for result in [added, comm.prepare(launch).map(drop), comm.alloc(1).map(drop)] {
            assert!(matches!(result, Err(CommError::Hw(HwError::KernelsRun { .. }))), "{result:?}");
        }
    });
}

/// Parameters of launches that have not ended have a bounded room, which is free again when they have.
#[test]
fn launches_that_have_no_room_are_refused() {
    beside_a_kernel(|comm, exchange| {
        let refused = (0..10_000).find_map(|_| exchange.launch(comm, 0).err()).expect("an end");
        assert!(refused.to_string().contains("room for parameters; synchronize first"), "{refused}");
    });
}
