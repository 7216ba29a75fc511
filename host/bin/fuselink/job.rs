//! What the ranks of a run do: plan, fill, exchange, check, count. The same code in processes and in threads.

use std::net::TcpListener;
use std::num::NonZeroU16;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use fuselink::comm::bootstrap::{Bootstrap, BootstrapConfig};
use fuselink::comm::{
    AllToAll, Buffer, CommConfig, Communicator, EmuOptions, GpuKind, NicBackend, Nics, RelayCounters, RunTime,
};
use fuselink::emu::host::CpuTime;
use fuselink::hw::{Gpu, NicCounters};
use fuselink::payload::{POISON, Pattern};
use fuselink::plan::{CostModel, Demand, Method};
use fuselink::topo::{Cluster, NicId, Rank};
use serde::{Deserialize, Serialize};

use crate::environment;

/// A method as it is asked for, and how it is planned.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunMethod {
    /// As on the command line.
    pub name: String,
}

impl RunMethod {
    /// `fast` is the best plan there is; every other name is the planner's.
    pub fn plan(&self) -> Result<Method, fuselink::plan::PlanError> {
        if self.name == "fast" { Ok(Method::Auto) } else { self.name.parse() }
    }
}

/// Everything that the ranks of a run must know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JobSpec {
    pub cluster: Cluster,
    /// Bytes, row by row.
    pub cells: Vec<u64>,
    pub unit_bytes: u64,
    pub methods: Vec<RunMethod>,
    /// Timed iterations of each method.
    pub iterations: u32,
    pub seed: u64,
    pub start_ns: u64,
    pub scale: u64,
    pub slot_bytes: u32,
    pub relay_bytes: u64,
    pub gpu: GpuKind,
    /// Blocks of the library's grids, where it is set.
    pub blocks: Option<NonZeroU16>,
    pub timeout_ms: u64,
    pub nic: NicBackend,
    /// Servers are hosts with clocks of their own.
    pub joined: bool,
}

/// What a run tells while it goes on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Event {
    /// An iteration is done: of which method, how many of all iterations so far.
    Progress { method: String, done: u32, of: u32 },
    /// All is done.
    Report(Box<Report>),
}

/// What a run measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    pub methods: Vec<MethodReport>,
}

/// One method's part of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MethodReport {
    pub name: String,
    /// What the planner took.
    pub planned: String,
    /// From the first rank's launch to the last rank's end, by iteration; of the slowest server where clocks differ.
    pub ns: Vec<u64>,
    /// Of the last iteration, by NIC of the job.
    pub nics: Vec<NicCounters>,
    pub relayed_bytes: u64,
    pub verified_bytes: u64,
    pub mismatched_bytes: u64,
    /// Relay memory of all GPUs, warm-up and all.
    pub relay: RelayCounters,
    /// Part of the host that was busy while the clock ran; `None` when it ran too shortly to tell.
    pub host_busy: Option<f64>,
}

/// What one rank tells the others of a method.
#[derive(Serialize, Deserialize)]
struct RankReport {
    times: Vec<RunTime>,
    /// Of NICs that it owns, in the last iteration.
    nics: Vec<(NicId, NicCounters)>,
    relayed_bytes: u64,
    verified_bytes: u64,
    mismatched_bytes: u64,
    relay: RelayCounters,
}

/// Untimed iterations before the others: memory is touched, rings are warm.
const WARM_UP: u32 = 1;
/// Bytes that are made or checked at a time; fits a core's cache.
const BLOCK: usize = 256 << 10;

/// Runs one rank. Rank 0 reports through `tell`, and gets the job's listening socket where there is one.
pub fn run_rank(
    spec: &JobSpec,
    bootstrap: Bootstrap,
    secret: &fuselink::comm::secret::Secret,
    mut tell: impl FnMut(Event) -> Result<()>,
) -> Result<()> {
    let model =
        CostModel { start_ns: spec.start_ns, message_bytes: spec.slot_bytes.into(), ..CostModel::default() };
    let config = CommConfig {
        cluster: spec.cluster.clone(),
        secret: secret.clone(),
        slot_bytes: spec.slot_bytes,
        put_bytes: 0,
        relay_bytes: spec.relay_bytes,
        timeout: Duration::from_millis(spec.timeout_ms),
        model,
        gpu: spec.gpu,
        blocks: spec.blocks,
        emulation: EmuOptions::at_scale(spec.scale),
        nics: nics(spec.nic)?,
    };
    let comm = Communicator::connect(config, bootstrap)?;
    let demand = Demand::new(spec.cluster.ranks(), spec.cells.clone(), spec.unit_bytes)?;
    let mut worker = Worker::new(spec, comm, demand)?;
    let mut methods = Vec::new();
    for (i, method) in spec.methods.iter().enumerate() {
        let per_method = spec.iterations + WARM_UP;
        let of = per_method * spec.methods.len() as u32;
        let report = worker.run_method(method, |done| {
            tell(Event::Progress { method: method.name.clone(), done: i as u32 * per_method + done, of })
        })?;
        methods.push(report);
    }
    // Rank 0 holds the wire: nobody leaves before all have read their counters.
    worker.comm.barrier()?;
    if worker.comm.rank() == Rank(0) {
        tell(Event::Report(Box::new(Report { methods })))?;
    }
    Ok(())
}

/// The NICs of this rank's server.
fn nics(backend: NicBackend) -> Result<Nics> {
    Ok(match backend {
        NicBackend::Emu => Nics::Emulated,
        NicBackend::Verbs => Nics::Verbs(environment::settings()?.verbs),
    })
}

/// Meets the job: rank 0 on a socket that is bound already, where there is one.
pub fn meet(config: &BootstrapConfig, listener: Option<TcpListener>) -> Result<Bootstrap> {
    Ok(match listener {
        Some(listener) => Bootstrap::listen(config, listener)?,
        None => Bootstrap::connect(config)?,
    })
}

struct Worker<'a> {
    spec: &'a JobSpec,
    comm: Communicator,
    demand: Demand,
    send: Buffer,
    recv: Buffer,
    block: Vec<u8>,
    /// Iterations of the whole run so far: each has bytes of its own.
    iteration: u64,
}

impl<'a> Worker<'a> {
    fn new(spec: &'a JobSpec, comm: Communicator, demand: Demand) -> Result<Self> {
        let ranks = || (0..demand.ranks()).map(Rank);
        let sent: u64 = ranks().map(|r| demand.cell(comm.rank(), r)).sum();
        let received: u64 = ranks().map(|r| demand.cell(r, comm.rank())).sum();
        let (send, recv) = (comm.alloc(sent)?, comm.alloc(received)?);
        Ok(Self { spec, comm, demand, send, recv, block: vec![0; BLOCK], iteration: 0 })
    }

    fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.demand.ranks()).map(Rank)
    }

    fn run_method(
        &mut self,
        method: &RunMethod,
        mut done: impl FnMut(u32) -> Result<()>,
    ) -> Result<MethodReport> {
        let plan = self.comm.plan_demand(&self.demand, method.plan()?)?;
        let mut own = RankReport {
            times: Vec::new(),
            nics: Vec::new(),
            relayed_bytes: 0,
            verified_bytes: 0,
            mismatched_bytes: 0,
            relay: RelayCounters::default(),
        };
        let relay_before = self.comm.relay_counters();
        let mut before = (Vec::new(), 0);
        let mut host = CpuTime::default();
        for i in 0..WARM_UP + self.spec.iterations {
            if i + 1 == WARM_UP + self.spec.iterations {
                before = (self.own_nics(), self.comm.sent().relayed_bytes);
            }
            let (time, spent, wrong) = self.iterate(&plan)?;
            own.mismatched_bytes += wrong;
            if i >= WARM_UP {
                own.times.push(time);
                host = host.plus(spent);
                own.verified_bytes += plan.recv_bytes();
            }
            if self.comm.rank() == Rank(0) {
                done(i + 1)?;
            }
        }
        let after = self.own_nics();
        own.nics = before.0.iter().zip(after).map(|(b, a)| (a.0, difference(a.1, b.1))).collect();
        own.relay = self.comm.relay_counters().since(relay_before);
        own.relayed_bytes = self.comm.sent().relayed_bytes - before.1;
        let all = self.comm.bootstrap()?.allgather(&serde_json::to_vec(&own)?)?;
        let all = all.iter().map(|r| serde_json::from_slice(r)).collect::<Result<Vec<RankReport>, _>>();
        let all = all.context("a rank reported nonsense")?;
        self.merge(method, &plan, &all, host)
    }

    fn own_nics(&self) -> Vec<(NicId, NicCounters)> {
        let cluster = self.comm.cluster();
        let owned = (0..cluster.nics()).map(NicId).filter(|&n| cluster.owner_of(n) == self.comm.rank());
        owned.map(|n| (n, self.comm.nic_counters(n))).collect()
    }

    /// One exchange: time, what the host spent meanwhile, wrong bytes.
    fn iterate(&mut self, plan: &AllToAll) -> Result<(RunTime, CpuTime, u64)> {
        self.fill(plan)?;
        self.comm.barrier_around(plan)?;
        let before = CpuTime::now();
        let time = self.comm.all_to_all(plan, &self.send, &self.recv)?;
        // Checking would take the host's time from ranks that are not done yet.
        self.comm.barrier_around(plan)?;
        let spent = before.zip(CpuTime::now()).map(|(b, a)| a.since(b)).unwrap_or_default();
        let wrong = self.check(plan)?;
        self.comm.barrier_around(plan)?;
        self.iteration += 1;
        Ok((time, spent, wrong))
    }

    fn pattern(&self, src: Rank, dst: Rank) -> Pattern {
        Pattern::new(self.spec.seed, self.iteration, src, dst)
    }

    fn fill(&mut self, plan: &AllToAll) -> Result<()> {
        let rank = self.comm.rank();
        for dst in self.ranks() {
            let (pattern, start) = (self.pattern(rank, dst), self.send.dev_ptr() + plan.send_at()[dst.idx()]);
            for (at, len) in blocks(self.demand.cell(rank, dst)) {
                pattern.fill(at, &mut self.block[..len]);
                self.comm.gpu().write(start + at, &self.block[..len])?;
            }
        }
        self.block.fill(POISON);
        for (at, len) in blocks(plan.recv_bytes()) {
            self.comm.gpu().write(self.recv.dev_ptr() + at, &self.block[..len])?;
        }
        Ok(())
    }

    fn check(&mut self, plan: &AllToAll) -> Result<u64> {
        let rank = self.comm.rank();
        let mut wrong = 0;
        for src in self.ranks() {
            let (pattern, start) = (self.pattern(src, rank), self.recv.dev_ptr() + plan.recv_at()[src.idx()]);
            for (at, len) in blocks(self.demand.cell(src, rank)) {
                self.comm.gpu().read(start + at, &mut self.block[..len])?;
                wrong += pattern.mismatches(at, &self.block[..len]);
            }
        }
        Ok(wrong)
    }

    /// The ranks' reports, server by server.
    fn servers<'r>(&self, all: &'r [RankReport]) -> impl Iterator<Item = &'r [RankReport]> + use<'r> {
        let cluster = self.comm.cluster();
        let gpus: Vec<usize> = cluster.servers().iter().map(|s| s.gpus as usize).collect();
        let mut rest = all;
        gpus.into_iter().map(move |gpus| {
            let (ranks, others) = rest.split_at(gpus.min(rest.len()));
            rest = others;
            ranks
        })
    }

    fn merge(
        &self,
        method: &RunMethod,
        plan: &AllToAll,
        all: &[RankReport],
        host: CpuTime,
    ) -> Result<MethodReport> {
        let iterations = self.spec.iterations as usize;
        if all.iter().any(|r| r.times.len() != iterations) {
            return Err(anyhow!("a rank ran another number of iterations"));
        }
        let span_of = |ranks: &[RankReport], i: usize| {
            let begin = ranks.iter().map(|r| r.times[i].begin_ns).min().unwrap_or(0);
            ranks.iter().map(|r| r.times[i].end_ns).max().unwrap_or(0) - begin
        };
        // Clocks of several hosts cannot be compared: there the longest time of a server counts. All begin at a barrier.
        let span = |i: usize| match self.spec.joined {
            false => span_of(all, i),
            true => self.servers(all).map(|ranks| span_of(ranks, i)).max().unwrap_or(0),
        };
        let mut nics = vec![NicCounters::default(); self.comm.cluster().nics() as usize];
        for &(nic, c) in all.iter().flat_map(|r| &r.nics) {
            nics[nic.idx()] = c;
        }
        Ok(MethodReport {
            name: method.name.clone(),
            planned: plan.method().to_string(),
            ns: (0..iterations).map(span).collect(),
            nics,
            relayed_bytes: all.iter().map(|r| r.relayed_bytes).sum(),
            verified_bytes: all.iter().map(|r| r.verified_bytes).sum(),
            mismatched_bytes: all.iter().map(|r| r.mismatched_bytes).sum(),
            relay: all.iter().fold(RelayCounters::default(), |sum, r| sum.plus(r.relay)),
            host_busy: host.busy_fraction(),
        })
    }
}

fn difference(after: NicCounters, before: NicCounters) -> NicCounters {
    NicCounters { tx_bytes: after.tx_bytes - before.tx_bytes, rx_bytes: after.rx_bytes - before.rx_bytes }
}

/// Offsets and lengths of the blocks of `bytes`.
fn blocks(bytes: u64) -> impl Iterator<Item = (u64, usize)> {
    (0..bytes).step_by(BLOCK).map(move |at| (at, (bytes - at).min(BLOCK as u64) as usize))
}
