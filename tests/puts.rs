//! One-sided puts by users' kernels on emulated clusters: real proxies, engines, NICs and owners; every byte of every message.

mod common;

use std::time::{Duration, Instant};

use common::{config, mismatches, prepare, run_ranks};
use fuselink::abi::FlStream;
use fuselink::comm::{CommConfig, CommError, Communicator, UserLaunch};
use fuselink::emu::gpu::Block;
use fuselink::hw::{Gpu, LinkState};
use fuselink::payload::Pattern;
use fuselink::plan::{Demand, Method};
use fuselink::topo::{Cluster, NicId, Rank, Server};

unsafe extern "C" {
    fn test_exchange(block: *const Block, params_dev_ptr: u64);
}

const GBIT_400: u64 = 400_000;
const PUT_BYTES: u32 = 1024;
const PATIENCE: Duration = Duration::from_secs(60);

/// Mirrors `Exchange` of tests/kernels/exchange.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Exchange {
    stream: FlStream,
    send_ptr: u64,
    recv_ptr: u64,
    sent_ptr: u64,
    taken_ptr: u64,
    bytes: u64,
    messages: u64,
}

fn put_config(cluster: &Cluster) -> CommConfig {
    CommConfig { put_bytes: PUT_BYTES, ..config(cluster, 1000, 8192) }
}

/// Everybody exchanges messages with all ranks, itself among them, and checks what came.
fn exchange(comm: &mut Communicator, messages: u64, iteration: u64) -> Result<u64, CommError> {
    let (ranks, bytes) = (u64::from(comm.cluster().ranks()), u64::from(PUT_BYTES));
    let cell = messages * bytes;
    let send = comm.alloc(ranks * cell)?;
    let recv = comm.alloc(ranks * cell)?;
    let counters = comm.alloc(16 * ranks)?;
    let all: Vec<_> = (0..comm.cluster().ranks()).map(Rank).collect();
    for &dst in &all {
        let mut data = vec![0; cell as usize];
        Pattern::new(1, iteration, comm.rank(), dst).fill(0, &mut data);
        comm.gpu().write(send.dev_ptr() + u64::from(dst.0) * cell, &data)?;
    }
    let params = Exchange {
        stream: comm.stream()?,
        send_ptr: send.dev_ptr(),
        recv_ptr: recv.dev_ptr(),
        sent_ptr: counters.dev_ptr(),
        taken_ptr: counters.dev_ptr() + 8 * ranks,
        bytes,
        messages,
    };
    // SAFETY: no padding: words, and pairs of 32-bit fields.
    let params: [u8; size_of::<Exchange>()] = unsafe { std::mem::transmute(params) };
    // SAFETY: tests/kernels/exchange.cu defines it for an Exchange.
    unsafe { comm.add_kernel("test_exchange", test_exchange) };
    let buffers = [&send, &recv, &counters];
    comm.launch(UserLaunch { name: "test_exchange", blocks: 1, params: &params, buffers: &buffers })?;
    comm.synchronize()?;
    let mut wrong = 0;
    for &src in &all {
        let mut data = vec![0; cell as usize];
        comm.gpu().read(recv.dev_ptr() + u64::from(src.0) * cell, &mut data)?;
        for i in 0..messages {
            let (at, length) = (i * bytes, bytes - i % bytes);
            let message = &data[at as usize..(at + length) as usize];
            wrong += Pattern::new(1, iteration, src, comm.rank()).mismatches(at, message);
        }
    }
    comm.barrier()?;
    Ok(wrong)
}

/// Several launches, over the laps of all rings.
fn run_exchange(cluster: &Cluster, messages: u64) {
    let wrong = run_ranks(&put_config(cluster), |mut comm| -> Result<u64, CommError> {
        (0..3).try_fold(0, |wrong, iteration| Ok(wrong + exchange(&mut comm, messages, iteration)?))
    });
    for (rank, wrong) in wrong.into_iter().enumerate() {
        assert_eq!(wrong.unwrap(), 0, "rank {rank}");
    }
}

#[test]
fn everybody_puts_to_everybody() {
    run_exchange(&Cluster::uniform(2, Server::new(2, &[GBIT_400; 2], 450_000)), 60);
}

#[test]
fn servers_of_different_size_and_a_nic_down() {
    let cluster = Cluster::new(vec![
        Server::new(3, &[GBIT_400, 0, 200_000], 450_000),
        Server::new(2, &[100_000, GBIT_400], 450_000),
        Server::new(1, &[GBIT_400; 2], 450_000),
    ]);
    run_exchange(&cluster, 25);
}

/// Nothing but scale-up: no message has a NIC.
#[test]
fn within_one_server() {
    run_exchange(&Cluster::uniform(1, Server::new(3, &[GBIT_400; 2], 450_000)), 60);
    run_exchange(&Cluster::uniform(1, Server::new(1, &[GBIT_400], 450_000)), 60);
}

#[test]
fn one_nic_for_all_gpus() {
    run_exchange(&Cluster::uniform(2, Server::new(3, &[GBIT_400], 450_000)), 25);
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
            let begin = Instant::now();
            let result = exchange(&mut comm, 60, 0).map(drop);
            assert!(begin.elapsed() < common::TIMEOUT / 2, "waited for its own time-out");
            return result;
        }
        // The allocations that rank 0's exchange makes together with this rank.
        let _buffers = [comm.alloc(1)?, comm.alloc(1)?, comm.alloc(1)?];
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
            exchange(&mut comm, 60, 0)?;
        }
        let _with_those_of_the_exchange = [comm.alloc(1)?, comm.alloc(1)?, comm.alloc(1)?];
        comm.bootstrap()?.barrier_within(Duration::from_secs(60))?;
        Ok(())
    });
    let errors: Vec<_> = errors.into_iter().map(|e| e.unwrap_err().to_string()).collect();
    assert!(errors.iter().any(|e| e.contains("did not come in time")), "{errors:?}");
}
