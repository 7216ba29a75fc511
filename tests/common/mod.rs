//! Ranks as threads of the test process.
#![allow(dead_code)] // Each test crate uses its part.

pub mod bulk;
pub mod emu;
pub mod exchange;
pub mod fixed;
pub mod fused;
pub mod kernels;
pub mod plans;
pub mod replay;
pub mod scatter;
#[cfg(feature = "verbs")]
pub mod verbs;

use std::net::TcpListener;
use std::time::Duration;

use fuselink::comm::bootstrap::{Bootstrap, BootstrapConfig};
use fuselink::comm::secret::Secret;
use fuselink::comm::{AllToAll, Buffer, CommConfig, CommError, Communicator, EmuOptions, GpuKind, Nics};
use fuselink::hw::{Gpu, NicCounters};
use fuselink::payload::{POISON, Pattern};
use fuselink::plan::{self, CostModel, Demand, Method, Schedule};
use fuselink::topo::{Cluster, NicId, Rank};

pub const TIMEOUT: Duration = Duration::from_secs(60);

pub fn config(cluster: &Cluster, scale: u64, slot_bytes: u32) -> CommConfig {
    CommConfig {
        cluster: cluster.clone(),
        secret: Secret::generate().unwrap(),
        slot_bytes,
        put_bytes: 0,
        relay_bytes: 256 << 20,
        timeout: TIMEOUT,
        model: CostModel { message_bytes: slot_bytes.into(), ..CostModel::default() },
        gpu: GpuKind::default(),
        blocks: None,
        emulation: EmuOptions::at_scale(scale),
        nics: Nics::Emulated,
    }
}

/// Runs `rank` on a thread for each rank and returns what they return.
pub fn run_ranks<T: Send>(config: &CommConfig, rank: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    each_rank(config, |_| {}, |comm| rank(comm.unwrap()))
}

/// Connects ranks whose configurations `change` has changed; returns their errors.
pub fn connect_ranks(
    config: &CommConfig,
    change: impl Fn(Rank, &mut CommConfig) + Sync,
) -> Vec<Option<String>> {
    let change_own = |rank_config: &mut (Rank, CommConfig)| change(rank_config.0, &mut rank_config.1);
    each_rank(config, change_own, |comm| comm.err().map(|e| e.to_string()))
}

fn each_rank<T: Send>(
    config: &CommConfig,
    change: impl Fn(&mut (Rank, CommConfig)) + Sync,
    rank: impl Fn(Result<Communicator, CommError>) -> T + Sync,
) -> Vec<T> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let root = listener.local_addr().unwrap();
    let size = config.cluster.ranks();
    let connect = |r: u32, listener: Option<TcpListener>| {
        let secret = config.secret.clone();
        let boot = BootstrapConfig { rank: Rank(r), size, root, secret, deadline: config.timeout };
        let bootstrap = match listener {
            Some(listener) => Bootstrap::listen(&boot, listener).unwrap(),
            None => Bootstrap::connect(&boot).unwrap(),
        };
        let mut own = (Rank(r), config.clone());
        change(&mut own);
        Communicator::connect(own.1, bootstrap)
    };
    std::thread::scope(|scope| {
        let mut listener = Some(listener);
        let threads: Vec<_> = (0..size)
            .map(|r| {
                let (listener, connect, rank) = (listener.take(), &connect, &rank);
                scope.spawn(move || rank(connect(r, listener)))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Fills the send buffer and poisons the receive buffer.
pub fn prepare(
    comm: &Communicator,
    plan: &AllToAll,
    demand: &Demand,
    send: &Buffer,
    recv: &Buffer,
    iteration: u64,
) {
    for dst in (0..demand.ranks()).map(Rank) {
        let mut bytes = vec![0; demand.cell(comm.rank(), dst) as usize];
        Pattern::new(1, iteration, comm.rank(), dst).fill(0, &mut bytes);
        comm.gpu().write(send.dev_ptr() + plan.send_at()[dst.idx()], &bytes).unwrap();
    }
    comm.gpu().write(recv.dev_ptr(), &vec![POISON; plan.recv_bytes() as usize]).unwrap();
}

/// Wrong bytes in the receive buffer.
pub fn mismatches(
    comm: &Communicator,
    plan: &AllToAll,
    demand: &Demand,
    recv: &Buffer,
    iteration: u64,
) -> u64 {
    let cell = |src: Rank| {
        let mut bytes = vec![0; demand.cell(src, comm.rank()) as usize];
        comm.gpu().read(recv.dev_ptr() + plan.recv_at()[src.idx()], &mut bytes).unwrap();
        Pattern::new(1, iteration, src, comm.rank()).mismatches(0, &bytes)
    };
    (0..demand.ranks()).map(|r| cell(Rank(r))).sum()
}

/// What one all-to-all left in the NICs' counters.
pub struct Outcome {
    pub schedule: Schedule,
    pub nics: Vec<NicCounters>,
    /// By rank.
    pub relayed_bytes: Vec<u64>,
    pub mismatches: u64,
}

/// Runs a demand twice with a method; the counters are those of the second time.
pub fn run(config: &CommConfig, demand: &Demand, method: Method) -> Result<Outcome, CommError> {
    let nics = config.cluster.nics();
    let results = run_ranks(config, |mut comm| {
        let plan = comm.plan_demand(demand, method)?;
        let (send, recv) = (comm.alloc(plan.send_bytes())?, comm.alloc(plan.recv_bytes())?);
        let mut wrong = 0;
        let mut counted = Vec::new();
        for iteration in 0..2 {
            prepare(&comm, &plan, demand, &send, &recv, iteration);
            let counters =
                |comm: &Communicator| (0..nics).map(|n| comm.nic_counters(NicId(n))).collect::<Vec<_>>();
            counted = vec![(counters(&comm), comm.sent())];
            comm.barrier()?;
            comm.all_to_all(&plan, &send, &recv)?;
            wrong += mismatches(&comm, &plan, demand, &recv, iteration);
            comm.barrier()?;
            counted.push((counters(&comm), comm.sent()));
            // Nobody sends again, or takes the wire away, before all have read the counters.
            comm.barrier()?;
        }
        let [(nics_before, sent_before), (nics, sent)] = counted.try_into().unwrap();
        let difference = |(a, b): (&NicCounters, &NicCounters)| NicCounters {
            tx_bytes: a.tx_bytes - b.tx_bytes,
            rx_bytes: a.rx_bytes - b.rx_bytes,
        };
        let nics: Vec<_> = nics.iter().zip(&nics_before).map(difference).collect();
        let schedule = plan::schedule(comm.cluster(), demand, method, &config.model)?;
        assert_eq!(schedule.method, plan.method());
        Ok((schedule, nics, sent.relayed_bytes - sent_before.relayed_bytes, wrong))
    });
    let results = results.into_iter().collect::<Result<Vec<_>, CommError>>()?;
    let mismatches = results.iter().map(|r| r.3).sum();
    let relayed_bytes = results.iter().map(|r| r.2).collect();
    let (schedule, nics, ..) = results.into_iter().next().unwrap();
    Ok(Outcome { schedule, nics, relayed_bytes, mismatches })
}
