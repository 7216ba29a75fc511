//! A rank's place in a job: its GPU, its NICs, its proxy, and the collectives.

use std::num::NonZeroU16;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::CommError;
use super::bootstrap::Bootstrap;
use super::device::GpuKind;
use super::fixed::FixedStreams;
use super::local::LocalGroup;
use super::machine::{Cables, EmuOptions, Machine, Nics};
use super::memory::Mapped;
use super::puts::LaunchParams;
use super::relay::RelayKeeper;
use super::secret::Secret;
use super::setup::{self, ServerMemory};
use crate::borrow::RingCounters;
use crate::channel::{Channel, KernelStatus};
use crate::engine::Sent;
use crate::engine::call::CallId;
use crate::engine::slots::SlotLayout;
use crate::hw::{Chunk, Clock, Gpu, HwError, NicCounters};
use crate::load::LoadTable;
use crate::owner::PathCounters;
use crate::plan::{CostModel, Planner};
use crate::proxy::Proxy;
use crate::topo::{Cluster, NicId, Rank, ServerId};

/// What a communicator is made of; the same on every rank.
#[derive(Clone, Debug)]
pub struct CommConfig {
    /// The servers.
    pub cluster: Cluster,
    /// Proven among the ranks of a server.
    pub secret: Secret,
    /// Longest message, in bytes.
    pub slot_bytes: u32,
    /// Longest message of a one-sided put, in bytes; 0: kernels cannot put, and no memory is kept for it. With a multiple of
    /// 2 MiB each slot is a chunk of its own, and there may be [fixed windows](Communicator::fixed_send).
    pub put_bytes: u32,
    /// Cap of the relay memory of one GPU.
    pub relay_bytes: u64,
    /// Longest time without progress.
    pub timeout: Duration,
    /// What plans reckon with.
    pub model: CostModel,
    /// The GPUs.
    pub gpu: GpuKind,
    /// Blocks of the library's grids; `None`: as many as suit the GPU (docs/cuda.md), of emulated ones
    /// [`EmuOptions::blocks`]. Any number works, and ranks may differ.
    pub blocks: Option<NonZeroU16>,
    /// The emulated machine.
    pub emulation: EmuOptions,
    /// What carries messages between servers.
    pub nics: Nics,
}

/// A rank's place in a job.
///
/// Collectives are called by all ranks in the same order. When one fails, so do all, and the communicator is dead.
pub struct Communicator {
    // Dropped in this order: the proxy before the memory it works on, the machine's threads before their windows.
    pub(super) proxy: Arc<Proxy>,
    pub(super) bootstrap: Option<Bootstrap>,
    pub(super) local: LocalGroup,
    pub(super) machine: Machine,
    pub(super) memory: ServerMemory,
    /// Holds a proxy until it is stopped, and then the memory.
    pub(super) relay: RelayKeeper,
    /// What the kernels that were launched last work on: it outlives them even when its owners let go.
    pub(super) in_use: Vec<Arc<Mapped>>,
    pub(super) params: LaunchParams,
    pub(super) channel: Arc<Channel>,
    pub(super) channel_dev_ptr: u64,
    pub(super) cluster: Arc<Cluster>,
    pub(super) rank: Rank,
    pub(super) server: ServerId,
    pub(super) message_bytes: u32,
    pub(super) put_bytes: u32,
    pub(super) slots: SlotLayout,
    pub(super) fixed: FixedStreams,
    pub(super) timeout: Duration,
    pub(super) model: CostModel,
    /// Kept from call to call, with its memory and the last list.
    pub(super) planner: Planner,
    pub(super) clock: Box<dyn Clock>,
    /// For marks; the proxy has a handle of its own.
    pub(super) load: LoadTable,
    pub(super) calls: u64,
    pub(super) dead: bool,
}

/// Device memory for collectives, known to the server's other ranks.
pub struct Buffer {
    own: usize,
    bytes: u64,
    /// By local rank; this rank's own among them.
    maps: Vec<Arc<Mapped>>,
}

impl Buffer {
    /// Its first address, as this rank's kernels see it.
    pub fn dev_ptr(&self) -> u64 {
        self.maps[self.own].dev_ptr()
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The local ranks' buffers of the same allocation, as this rank's kernels see them.
    pub(super) fn peer_dev_ptrs(&self) -> impl Iterator<Item = u64> + '_ {
        self.maps.iter().map(|m| m.dev_ptr())
    }

    pub(super) fn maps(&self) -> impl Iterator<Item = Arc<Mapped>> + '_ {
        self.maps.iter().cloned()
    }
}

/// How long kernels may take to notice that they are to stop.
const ABORT_GRACE: Duration = Duration::from_secs(5);
/// How often a waiting rank looks for failures.
const WATCH_EVERY: Duration = Duration::from_millis(20);

impl Communicator {
    /// Joins the job that `bootstrap` has met. Collective.
    ///
    /// # Errors
    /// [`CommError`].
    pub fn connect(config: CommConfig, bootstrap: Bootstrap) -> Result<Self, CommError> {
        match setup::connect(&config, &bootstrap) {
            Ok(mut comm) => {
                comm.bootstrap = Some(bootstrap);
                Ok(comm)
            }
            Err(error) => {
                // The others learn the reason, and not just that a rank has gone.
                bootstrap.abort(&error.to_string());
                Err(error)
            }
        }
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The servers.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The control plane, for the caller's own exchanges.
    ///
    /// # Errors
    /// [`CommError::Dead`].
    pub fn bootstrap(&self) -> Result<&Bootstrap, CommError> {
        if self.dead { Err(CommError::Dead) } else { self.bootstrap.as_ref().ok_or(CommError::Dead) }
    }

    /// This rank runs a collective of its own on the scale-up links, for at most so long: until then the server's other
    /// ranks leave the NICs beside its GPU alone, since what they relay would cross the same links. Zero ends it. Not
    /// collective; nobody waits.
    pub fn mark_scaleup_busy(&self, how_long: Duration) {
        let ns = u64::try_from(how_long.as_nanos()).unwrap_or(u64::MAX);
        self.load.mark_scaleup_busy(self.clock.now().saturating_add(ns));
    }

    /// Longest message.
    pub fn message_bytes(&self) -> u32 {
        self.message_bytes
    }

    /// The GPU, for reading and writing buffers from the host.
    pub fn gpu(&self) -> &impl Gpu {
        self.machine.gpu()
    }

    /// What a NIC of the job has carried so far; of NICs over verbs only the rank that owns one knows.
    pub fn nic_counters(&self, nic: NicId) -> NicCounters {
        self.machine.counters(nic)
    }

    /// What has happened to the paths of this rank's NICs so far.
    pub fn path_counters(&self) -> PathCounters {
        self.proxy.path_counters()
    }

    /// What went through the rings between the server's processes so far, as this rank sees them: work and events by lane, and
    /// how often the next one had to wait.
    pub fn ring_counters(&self) -> RingCounters {
        self.proxy.ring_counters()
    }

    /// The cables of the job's NICs, where these are emulated: pull one, and see what the job does.
    pub fn cables(&self) -> Option<Cables> {
        self.machine.cables()
    }

    /// What this rank has sent so far.
    pub fn sent(&self) -> Sent {
        self.proxy.sent()
    }

    /// Device memory of at least `bytes` on this rank's GPU that local peers can write to. Where the GPU has none left, relay
    /// memory that it has lent makes room. Collective over the server; sizes may differ.
    ///
    /// # Errors
    /// [`CommError::Hw`], also while kernels of this rank run; [`CommError::NoBuffer`] where another rank's part fails,
    /// [`CommError::Local`].
    pub fn alloc(&self, bytes: u64) -> Result<Buffer, CommError> {
        self.check_idle("allocate memory")?;
        let chunk = self.with_room(bytes, |gpu| gpu.create_chunk(bytes));
        let made = chunk.and_then(|chunk| Ok((chunk.export()?, chunk)));
        // Who has none says so: the others must not wait for it.
        let fds: Vec<_> = made.iter().map(|(fd, _)| fd.as_fd()).collect();
        let size = made.as_ref().map_or(0, |(_, chunk)| chunk.bytes());
        let answers = self.local.allgather_fds(&fds, &size.to_le_bytes())?;
        let (_, chunk) = made?;
        let (gpu, own) = (self.machine.gpu(), self.cluster.gpu_of(self.rank).idx());
        let mut maps = Vec::new();
        for (peer, (fds, bytes)) in self.cluster.ranks_of(self.server).zip(answers) {
            let bad = || CommError::BadAnswer { rank: peer };
            let bytes = u64::from_le_bytes(bytes.try_into().map_err(|_| bad())?);
            let fd = fds.into_iter().next().ok_or(CommError::NoBuffer { rank: peer })?;
            maps.push(Arc::new(if peer == self.rank {
                Mapped::of(gpu, Arc::clone(&chunk))?
            } else {
                Mapped::import(gpu, fd, self.cluster.gpu_of(peer), bytes)?
            }));
        }
        Ok(Buffer { own, bytes: maps[own].bytes(), maps })
    }

    pub(super) fn next_call(&mut self) -> Result<CallId, CommError> {
        self.bootstrap()?;
        self.calls += 1;
        Ok(CallId(self.calls))
    }

    /// Waits for the kernels, watching for whatever makes waiting useless.
    pub(super) fn finish(&mut self) -> Result<(), CommError> {
        let mut give_up: Option<Instant> = None;
        loop {
            match self.machine.gpu().synchronize(WATCH_EVERY) {
                Ok(()) => break,
                Err(HwError::KernelTimeout { .. }) => {}
                Err(e) => return Err(self.fail(e.into())),
            }
            if self.has_failed() && give_up.is_none() {
                self.channel.abort();
                give_up = Some(Instant::now() + ABORT_GRACE);
            }
            if give_up.is_some_and(|at| Instant::now() > at) {
                let stuck = CommError::KernelsStuck { waited: ABORT_GRACE };
                let cause = self.cause().unwrap_or(stuck);
                return Err(self.fail(cause));
            }
        }
        self.in_use.clear();
        self.params.give_back();
        self.relay.kernels_ended();
        match self.cause() {
            None => Ok(()),
            Some(e) => Err(self.fail(e)),
        }
    }

    /// Whether waiting for kernels is useless; [`finish`](Self::finish) knows why.
    pub(super) fn has_failed(&self) -> bool {
        self.proxy.has_failed()
            || self.relay.has_failed()
            || self.job_failed()
            || self.channel.status().is_some()
    }

    fn job_failed(&self) -> bool {
        self.bootstrap.as_ref().is_some_and(|b| b.failure_flag().load(Ordering::Acquire))
    }

    /// Why the collective failed, the root before what follows from it.
    fn cause(&self) -> Option<CommError> {
        if let Some(e) = self.bootstrap.as_ref().and_then(Bootstrap::failure) {
            return Some(e.into());
        }
        let status = self.channel.status().filter(|s| *s != KernelStatus::Aborted);
        if let Some(broken) = status.filter(|s| !s.is_timeout()) {
            return Some(broken.into());
        }
        if let Some(e) = self.relay.take_error() {
            return Some(e.into());
        }
        // Of two that waited too long, the proxy knows better what for.
        self.proxy.take_error().map(CommError::from).or(status.map(CommError::from))
    }

    /// Ends the communicator and tells the others why.
    pub(super) fn fail(&mut self, error: CommError) -> CommError {
        self.dead = true;
        self.proxy.abandon();
        if let (Some(bootstrap), false) = (&self.bootstrap, matches!(error, CommError::Bootstrap(_))) {
            bootstrap.abort(&error.to_string());
        }
        error
    }

    /// Keeps what kernels use for the rest of the process: unmapping it would wait for them.
    fn leave_memory(&mut self) {
        self.in_use.push(self.params.memory());
        std::mem::forget(std::mem::take(&mut self.in_use));
        std::mem::forget(std::mem::take(&mut self.memory.control));
        std::mem::forget(std::mem::take(&mut self.memory.relay));
        self.relay.leave_memory();
        std::mem::forget(Arc::clone(&self.channel));
    }

    /// Waits for all ranks.
    ///
    /// # Errors
    /// [`CommError::Bootstrap`].
    pub fn barrier(&self) -> Result<(), CommError> {
        Ok(self.bootstrap()?.barrier()?)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // Kernels that still run would touch memory that is about to go.
        self.channel.abort();
        let stuck = self.machine.gpu().synchronize(ABORT_GRACE).is_err();
        // It holds the proxy, which is to go first of all.
        self.relay.stop();
        if stuck {
            eprintln!("fuselink: {} leaves kernels behind that do not stop", self.rank);
            self.leave_memory();
        }
    }
}
