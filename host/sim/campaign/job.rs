//! A job in virtual time: the proxies of all ranks, on simulated NICs, with kernels that fill and drain.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use super::fault::{Fault, FaultRates, Mutant, Mutation};
use super::kernel::{Kernel, Wrong, relay_dev_ptr};
use super::nic::SimNic;
use super::random::Random;
use super::trace::{Lines, Trace};
use super::wire::{SimWire, WireTimes};
use super::work::{MESSAGE_BYTES, RankWork};
use crate::borrow::{BorrowedNic, BorrowerPort};
use crate::channel::{Channel, ChannelConfig, StreamConfig};
use crate::credit::{CreditInbox, ReturnInbox};
use crate::doorbell::Class;
use crate::engine::call::{Call, CallId};
use crate::engine::lots::LotsAtStart;
use crate::engine::path::PathTiming;
use crate::engine::route::{Policy, RouteLimits};
use crate::engine::slots::{Lot, SlotConfig, SlotLayout};
use crate::engine::{Engine, EngineConfig};
use crate::hw::{Clock, Herald, HwError, LocalKey, MappedHost, Mover, Nanos, NicDevice, PathId, RemoteKey};
use crate::load::{LoadConfig, LoadTable};
use crate::owner::{LotKeys, OwnedNic, OwnedNicConfig};
use crate::proxy::{LotPtrs, Port, ProxyError, ProxyParts, Rounds};
use crate::segment::SegmentLayout;
use crate::shm::SharedMemory;
use crate::signals::SignalInbox;
use crate::topo::{Cluster, GpuIdx, NicId, NicIdx, Rank, ServerId};

/// What a job is made of.
#[derive(Clone)]
pub(super) struct JobConfig {
    pub(super) cluster: Cluster,
    pub(super) seed: u64,
    pub(super) slots: SlotConfig,
    pub(super) times: WireTimes,
    pub(super) faults: FaultRates,
    pub(super) mutation: Option<Mutation>,
    pub(super) lines: Option<Lines>,
}

/// Short, as everything on this wire is.
pub(super) const TIMING: PathTiming =
    PathTiming { completion_ns: 3_000_000, drain_ns: 600_000, repeat_ns: 100_000, hold_down_ns: 150_000 };
const WORK_QUEUES: u32 = 2;
const ARMED_DEPTH: u32 = 4;
const DOORBELL_RINGS: u32 = 2;

/// One rank.
pub(super) struct RankWorld {
    rounds: Rounds,
    pub(super) kernel: Kernel,
    pub(super) state: RankState,
}

/// How a rank fares.
#[derive(Debug)]
pub(super) enum RankState {
    Alive,
    /// Its process was killed.
    Dead,
    /// Its proxy gave up.
    Failed(ProxyError),
    /// Its kernel saw what must not be.
    Wrong(Wrong),
}

pub(super) struct Job {
    pub(super) cluster: Arc<Cluster>,
    pub(super) wire: SimWire,
    pub(super) ranks: Vec<RankWorld>,
    random: Random,
    _segments: Vec<Arc<SharedMemory>>,
}

struct SimClock(SimWire);

impl Clock for SimClock {
    fn now(&self) -> Nanos {
        self.0.now()
    }
}

/// Words about paths, one in four of which is lost.
#[derive(Clone)]
struct SimHerald {
    words: Arc<Mutex<Vec<(NicId, NicId, u64)>>>,
    cluster: Arc<Cluster>,
    rank: Rank,
    random: Random,
}

impl Herald for SimHerald {
    fn tell(&mut self, from: NicId, to: NicId, word: u64) {
        if !self.random.one_in(4) {
            self.words.lock().unwrap_or_else(PoisonError::into_inner).push((from, to, word));
        }
    }

    fn hear(&mut self) -> Option<(NicId, NicId, u64)> {
        let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        let at = words.iter().position(|&(_, to, _)| self.cluster.owner_of(to) == self.rank)?;
        Some(words.swap_remove(at))
    }
}

/// Copies take effect at once and are done later.
struct SimMover {
    wire: SimWire,
    random: Random,
    done_at: Vec<Nanos>,
}

impl Mover for SimMover {
    fn start(&mut self, dst_dev_ptr: u64, src_dev_ptr: u64, bytes: u64) -> Result<u64, HwError> {
        let place = |ptr: u64| (NicId((ptr >> 32) as u32 - 1), ptr & 0xffff_ffff);
        let ((from, at), (to, into)) = (place(src_dev_ptr), place(dst_dev_ptr));
        let moved = self.wire.read(from, at, bytes as usize);
        self.wire.write(to, into, &moved);
        self.done_at.push(self.wire.now() + self.random.between(500, 10_000));
        Ok(self.done_at.len() as u64 - 1)
    }

    fn is_done(&mut self, copy: u64) -> Result<bool, HwError> {
        Ok(self.done_at[copy as usize] <= self.wire.now())
    }
}

/// Host-mapped memory of a rank.
struct SimMapped(Box<[u64]>);

// SAFETY: the words are reached through `WordSlice` only, as atomics.
unsafe impl Sync for SimMapped {}

impl MappedHost for SimMapped {
    fn host_ptr(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut().cast()
    }

    fn mapped_dev_ptr(&self) -> u64 {
        0
    }

    fn bytes(&self) -> usize {
        8 * self.0.len()
    }
}

impl RankWorld {
    /// Where it is, in words.
    pub(super) fn describe(&self) -> String {
        let (engine, rings) = (self.rounds.engine().describe(), self.rounds.ring_counters());
        format!("{engine}; {}; {rings}", self.kernel.describe())
    }
}

impl Job {
    pub(super) fn new(config: &JobConfig) -> Result<Self, HwError> {
        let cluster = Arc::new(config.cluster.clone());
        let mut random = Random::new(config.seed);
        let layouts: Vec<SlotLayout> = (0..cluster.server_count())
            .map(|s| SlotLayout::new(&cluster, ServerId(s), config.slots).expect("small clusters fit"))
            .collect();
        let rate = |n: u32| cluster.nic(NicId(n)).mbit_per_s / 8;
        let relay = |n: u32| lots_of(&cluster, &layouts, NicId(n)).bytes;
        let nics: Vec<_> = (0..cluster.nics()).map(|n| (rate(n), relay(n))).collect();
        let wire = SimWire::new(random.draw(), config.times, &nics);
        if config.mutation == Some(Mutation::NoGeneration) {
            wire.forget_fences();
        }
        let mut segments = Vec::new();
        for server in (0..cluster.server_count()).map(ServerId) {
            let layout = SegmentLayout::new(&cluster, server);
            let memory = SharedMemory::create("fuselink-sim-segment", layout.words())?;
            let spec = cluster.server(server);
            LoadTable::init(&memory.words(), spec.gpus, spec.nics.len());
            let first = layout.path_words_at(NicIdx(0));
            let end = layout.path_words_at(NicIdx(spec.nics.len() as u32));
            wire.add_segment(memory.words(), first..end);
            segments.push(memory);
        }
        let words = Arc::default();
        let herald = |rank, seed| SimHerald {
            words: Arc::clone(&words),
            cluster: Arc::clone(&cluster),
            rank,
            random: Random::new(seed),
        };
        let mut builder =
            Builder { config, cluster: &cluster, wire: &wire, layouts: &layouts, segments: &segments };
        let ranks = (0..cluster.ranks())
            .map(Rank)
            .map(|r| builder.rank(r, Box::new(herald(r, random.draw())), &mut random));
        let ranks = ranks.collect();
        Ok(Self { ranks, random: Random::new(random.draw()), wire, cluster, _segments: segments })
    }

    /// Opens a call at one rank.
    pub(super) fn open(&mut self, rank: Rank, call: Call, work: RankWork) {
        let world = &mut self.ranks[rank.idx()];
        world.kernel.launch(work);
        world.rounds.open(Box::new(call));
    }

    /// The rank's process is gone, and its NICs with it.
    pub(super) fn kill(&mut self, rank: Rank) {
        self.ranks[rank.idx()].state = RankState::Dead;
        self.silence(rank);
    }

    fn silence(&mut self, rank: Rank) {
        for nic in (0..self.cluster.nics()).map(NicId).filter(|&n| self.cluster.owner_of(n) == rank) {
            self.wire.kill(nic);
        }
    }

    /// Lets every living rank do what it can, in an order of chance; returns whether anything was done.
    pub(super) fn step(&mut self) -> bool {
        let now = self.wire.now();
        let mut order: Vec<usize> = (0..self.ranks.len()).collect();
        self.random.shuffle(&mut order);
        let mut worked = false;
        for r in order {
            let world = &mut self.ranks[r];
            if !matches!(world.state, RankState::Alive) {
                continue;
            }
            if let Err(wrong) = world.kernel.step(&self.wire, now) {
                world.state = RankState::Wrong(wrong);
                continue;
            }
            match world.rounds.round() {
                Ok(any) => worked |= any,
                Err(e) => {
                    world.state = RankState::Failed(e);
                    self.silence(Rank(r as u32));
                }
            }
        }
        worked
    }

    /// Goes on in time: a little after work, else to whatever is due next, but not past `at_most`.
    pub(super) fn advance(&mut self, worked: bool, at_most: Nanos) {
        let now = self.wire.now();
        let next = if worked {
            now + self.random.between(500, 5_000)
        } else {
            let kernels = self.ranks.iter().filter_map(|w| w.kernel.next_due());
            let due = kernels.chain(self.wire.next_due()).min().unwrap_or(Nanos::MAX);
            due.clamp(now + 500, now + TIMING.repeat_ns / 2)
        };
        self.wire.advance(next.min(at_most).max(now + 1));
    }

    /// Whether a living rank's call is over, and nothing of it is in doubt.
    pub(super) fn is_done(&self, rank: Rank) -> bool {
        let world = &self.ranks[rank.idx()];
        world.kernel.is_done()
    }

    /// Whether nothing is left on the way from a rank.
    pub(super) fn is_quiet(&self, rank: Rank) -> bool {
        self.ranks[rank.idx()].rounds.engine().is_quiet()
    }
}

struct Builder<'a> {
    config: &'a JobConfig,
    cluster: &'a Arc<Cluster>,
    wire: &'a SimWire,
    layouts: &'a [SlotLayout],
    segments: &'a [Arc<SharedMemory>],
}

impl Builder<'_> {
    fn rank(&mut self, rank: Rank, herald: Box<dyn Herald>, random: &mut Random) -> RankWorld {
        let server = self.cluster.server_of(rank);
        let engine = Engine::new(self.engine_config(rank, server));
        let queues = engine.config().queues();
        let channel = self.channel(rank, server, queues);
        let words = self.segments[server.idx()].words();
        let nics = self.cluster.server(server).nics.len() as u32;
        let id = |k: u32| self.cluster.nic_id(server, NicIdx(k));
        let (at, count) = SegmentLayout::new(self.cluster, server).load_table();
        let load =
            LoadTable::open(words.part(at, count), self.load_config(server), self.cluster.gpu_of(rank));
        let all_nics = || (0..self.cluster.nics()).map(NicId);
        let parts = ProxyParts {
            engine,
            clock: Box::new(SimClock(self.wire.clone())),
            channel: channel.proxy_end(),
            tell_kernels: Box::new(|| {}),
            ports: (0..nics).map(|k| self.port(rank, NicIdx(k), random)).collect(),
            lot_dev_ptrs: (0..nics).map(|k| self.lot_dev_ptrs(rank, id(k))).collect(),
            lot_keys: all_nics().map(|n| self.lots(n).keys(n)).collect(),
            slots: self.layouts.to_vec(),
            mover: Box::new(SimMover {
                wire: self.wire.clone(),
                random: Random::new(random.draw()),
                done_at: Vec::new(),
            }),
            herald,
            herald_ns: TIMING.repeat_ns / 4,
            segment_keys: all_nics().map(|n| key(self.cluster.server_of_nic(n).0.into())).collect(),
            signals: SignalInbox::new(words.clone(), self.cluster, rank),
            on_lot_returned: Box::new(|_, _| {}),
            returns: ReturnInbox::new(words.clone(), self.cluster, rank),
            inbox: CreditInbox::new(words, self.cluster, rank),
            load: load.expect("made with this version"),
            lease_ns: 1_000_000,
            sleep: [Duration::ZERO; 2],
        };
        let kernel = Kernel::new(rank, channel.kernel_end(), queues, DOORBELL_RINGS, random.draw());
        RankWorld { rounds: Rounds::new(parts), kernel, state: RankState::Alive }
    }

    fn engine_config(&self, rank: Rank, server: ServerId) -> EngineConfig {
        let message = u64::from(MESSAGE_BYTES);
        EngineConfig {
            rank,
            cluster: Arc::clone(self.cluster),
            slots: self.layouts[server.idx()],
            work_queues: WORK_QUEUES,
            armed_depth: ARMED_DEPTH,
            limits: RouteLimits {
                direct_bytes: 3 * message,
                borrow_bytes: 8 * message,
                policy: Policy::WHOLE,
            },
            lookahead_bytes: 2 * message,
            direct_nic: self.cluster.direct_nic(rank),
            lots: LotsAtStart::All,
            call: CallId(0),
        }
    }

    fn channel(&self, rank: Rank, server: ServerId, queues: u32) -> Channel {
        let spec = self.cluster.server(server);
        let slots =
            Class::ALL.len() * spec.nics.len() * self.layouts[server.idx()].slots_per_class() as usize;
        let config = ChannelConfig {
            rank: rank.0,
            local_ranks: spec.gpus,
            doorbell_rings: DOORBELL_RINGS,
            doorbell_capacity: 16,
            queues,
            work_queues: WORK_QUEUES,
            armed_depth: ARMED_DEPTH,
            arrival_capacity: (slots as u32).next_power_of_two(),
            streams: StreamConfig::default(),
        };
        let words = Channel::host_bytes(&config) / 8;
        Channel::new(config, Arc::new(SimMapped(vec![0; words].into())))
    }

    fn load_config(&self, server: ServerId) -> LoadConfig {
        let spec = self.cluster.server(server);
        let users = |k: usize| {
            let nic = Some(NicIdx(k as u32));
            (0..spec.gpus).map(GpuIdx).filter(|&g| spec.direct_nic(g) == nic).collect()
        };
        LoadConfig {
            owners: spec.nics.iter().map(|n| n.relay_gpu).collect(),
            users: (0..spec.nics.len()).map(users).collect(),
            up: spec.nics.iter().map(|n| n.mbit_per_s > 0).collect(),
            processes: spec.gpus,
            idle_after_ns: 10_000,
        }
    }

    fn port(&self, rank: Rank, idx: NicIdx, random: &mut Random) -> Port {
        let server = self.cluster.server_of(rank);
        let nic = self.cluster.nic_id(server, idx);
        let gpu = self.cluster.gpu_of(rank);
        let layout = SegmentLayout::new(self.cluster, server);
        let words = self.segments[server.idx()].words();
        if self.cluster.owner_of(nic) != rank {
            return Port::Borrowed(Box::new(BorrowedNic::new(&words, layout, gpu, idx)));
        }
        let there = |n: u32| self.cluster.server_of_nic(NicId(n)) != server;
        let paths = (0..self.cluster.nics()).map(|n| there(n).then_some(PathId(n))).collect();
        let others = self.cluster.ranks_of(server).map(|r| self.cluster.gpu_of(r)).filter(|&g| g != gpu);
        let ports = others.map(|g| BorrowerPort::new(&words, layout, g, idx)).collect();
        let config = OwnedNicConfig {
            cluster: Arc::clone(self.cluster),
            server,
            owner: gpu,
            slots: self.layouts[server.idx()],
            lots: self.lots(nic).registered(),
            paths,
            borrow_bytes: 8 * u64::from(MESSAGE_BYTES),
            timing: TIMING,
            path_words: words.part(layout.path_words_at(idx), self.cluster.nics() as usize),
        };
        Port::Owned(Box::new(OwnedNic::new(self.device(nic, idx, gpu, random), config, ports)))
    }

    fn lots(&self, nic: NicId) -> Lots {
        lots_of(self.cluster, self.layouts, nic)
    }

    fn lot_dev_ptrs(&self, rank: Rank, nic: NicId) -> LotPtrs {
        let (lots, idx, gpu) = (self.lots(nic), self.cluster.nic_idx(nic), self.cluster.gpu_of(rank));
        Class::ALL.map(|class| relay_dev_ptr(nic, lots.offset(Lot { nic: idx, gpu, class })))
    }

    fn device(&self, nic: NicId, idx: NicIdx, gpu: GpuIdx, random: &mut Random) -> Box<dyn NicDevice> {
        let sim = SimNic::new(self.wire.clone(), nic, idx, gpu);
        let faulty = Fault::new(sim, self.config.faults, random.draw());
        let mutant = Mutant::new(faulty, self.config.mutation);
        Box::new(Trace::new(mutant, nic, self.config.lines.clone()))
    }
}

/// Where the lots of one NIC lie in its relay memory.
struct Lots {
    layout: SlotLayout,
    nic: NicIdx,
    gpus: u32,
    bytes: u64,
}

fn lots_of(cluster: &Cluster, layouts: &[SlotLayout], nic: NicId) -> Lots {
    let server = cluster.server_of_nic(nic);
    let (layout, gpus) = (layouts[server.idx()], cluster.server(server).gpus);
    let of_a_gpu = Class::ALL.iter().map(|&class| layout.lot_bytes(class)).sum::<u64>();
    Lots { layout, nic: cluster.nic_idx(nic), gpus, bytes: u64::from(gpus) * of_a_gpu }
}

impl Lots {
    fn all(&self) -> impl Iterator<Item = Lot> + '_ {
        let nic = self.nic;
        let of = move |gpu| Class::ALL.into_iter().map(move |class| Lot { nic, gpu, class });
        (0..self.gpus).map(GpuIdx).flat_map(of)
    }

    fn offset(&self, lot: Lot) -> u64 {
        self.all().take_while(|&l| l != lot).map(|l| self.layout.lot_bytes(l.class)).sum()
    }

    fn keys(&self, nic: NicId) -> Vec<RemoteKey> {
        let key = |lot| RemoteKey {
            remote_addr: self.offset(lot),
            rkey: SimWire::relay_key(nic),
            bytes: self.layout.lot_bytes(lot.class),
        };
        self.all().map(key).collect()
    }

    /// A simulated NIC takes the place of a lot for its key.
    fn registered(&self) -> LotKeys {
        let keys = LotKeys::new(self.gpus);
        self.all().for_each(|lot| keys.set(lot, Some(LocalKey(self.offset(lot) as u32))));
        keys
    }
}

fn key(rkey: u64) -> RemoteKey {
    RemoteKey { remote_addr: 0, rkey, bytes: 0 }
}
