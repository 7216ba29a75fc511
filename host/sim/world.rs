//! Servers around engines: kernels that fill and drain slots, NICs, scale-up links, load tables and delays.
//!
//! What is modelled: links (scale-up per GPU and direction, NICs per direction), shared max-min fairly; the order of a
//! NIC's paths (each sends its messages in order, at most [`WINDOW`] at a time, so that they share the NIC); blocks
//! that fill or drain one message at a time; and fixed delays ([`Delays`]). What is not: PCIe, fabrics between NICs, the
//! host's own time beyond the delays.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;

use super::fluid::{FlowId, Fluid};
use super::machine::{engine_config, load_config, load_memory, nic_link, rates};
use super::relay::{Relay, SlotCopy};
use crate::doorbell::{Class, Doorbell};
use crate::engine::call::{self, Call, CallId, Direction};
use crate::engine::route::RouteLimits;
use crate::engine::slots::{SlotConfig, SlotLayout};
use crate::engine::{Arm, CreditWrite, Engine, EngineError, Post, Publish};
use crate::hw::{HwError, Nanos};
use crate::load::{Beat, LoadLine, LoadTable};
use crate::topo::{Cluster, NicId, NicIdx, Rank, ServerId};

/// Messages of one path that are on the way at once.
pub const WINDOW: usize = 2;

/// Fixed delays, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Delays {
    /// From a kernel's doorbell to the work at the NIC: the ring over PCIe, the proxy's round, the post.
    pub doorbell_ns: Nanos,
    /// From the last byte at the receiving NIC to the arrival that a kernel sees: completion, flush, publication.
    pub arrival_ns: Nanos,
    /// From the last byte to the completion at the sender.
    pub completion_ns: Nanos,
    /// From a grant to the credit that a sender sees.
    pub credit_ns: Nanos,
    /// From arming to the kernel that begins to fill the slot.
    pub arm_ns: Nanos,
    /// A proxy with work looks at the load table this often when nothing else wakes it.
    pub look_ns: Nanos,
}

impl Default for Delays {
    /// Of the order that the FuseLink paper reports for its steps (post and pull 0.8 to 1.4 us each).
    fn default() -> Self {
        Self {
            doorbell_ns: 2_000,
            arrival_ns: 3_000,
            completion_ns: 2_000,
            credit_ns: 3_000,
            arm_ns: 1_000,
            look_ns: 2_000,
        }
    }
}

/// What a world is made of.
#[derive(Clone, Debug)]
pub struct WorldConfig {
    /// The servers.
    pub cluster: Cluster,
    /// Slots.
    pub slots: SlotConfig,
    /// Bounds of the choice of NICs.
    pub limits: RouteLimits,
    /// An owner's traffic must have rested this long before its NIC counts as idle.
    pub idle_after_ns: Nanos,
    /// Blocks per GPU that send, and as many that drain.
    pub blocks: u32,
    /// Slots armed ahead per block.
    pub armed_depth: u32,
    /// A transfer's successor is let in when this much is left.
    pub lookahead_bytes: u64,
    /// Delays.
    pub delays: Delays,
    /// How payload comes beside the NIC of another GPU.
    pub relay: Relay,
}

/// The run went wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// An engine refused an event.
    #[error("{rank} at {at_ns} ns: {source}")]
    Engine {
        /// Whose.
        rank: Rank,
        /// When.
        at_ns: Nanos,
        /// Why.
        source: EngineError,
    },
    /// Nothing is due, and a call is not done.
    #[error("nothing is due at {at_ns} ns, but {rank} is not done")]
    Stuck {
        /// Who waits.
        rank: Rank,
        /// When.
        at_ns: Nanos,
    },
    /// The load table's memory could not be had.
    #[error(transparent)]
    Hw(#[from] HwError),
    /// The cluster needs more slots than there can be.
    #[error(transparent)]
    Slots(#[from] crate::engine::slots::SlotError),
    /// The load table could not be opened.
    #[error(transparent)]
    Table(#[from] crate::load::BadTable),
    /// An experiment's demand could not be made.
    #[error(transparent)]
    Demand(#[from] crate::plan::DemandError),
    /// An experiment's demand could not be planned.
    #[error(transparent)]
    Plan(#[from] crate::plan::PlanError),
}

/// Something that comes after a delay.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// A block sees the slot that was armed.
    Armed(Rank, Arm),
    /// Work reaches its NIC.
    Posted(Rank, Post),
    /// A NIC reports a completion.
    Completed(Rank, NicIdx, u64),
    /// A kernel may see a message.
    Arrived(Rank, Post, Rank),
    /// A sender sees a credit.
    Credit(Rank, CreditWrite),
    /// Somebody outside asked to be woken.
    Wake,
    /// A proxy looks at its server's load table, though nothing happened to its own rank.
    Look(Rank),
}

/// What a flow that ends was for.
#[derive(Clone, Copy, Debug)]
enum Moving {
    /// With the stage of its copy.
    Filling(Rank, Arm, u32),
    Sending(Rank, Post),
    /// With the stage of its copy.
    Draining(Rank, Publish, u32),
}

/// A GPU's blocks: some fill slots, each those of its own queues in their order; as many others drain, whichever comes.
struct Blocks {
    filling: Vec<bool>,
    fill: Vec<VecDeque<Arm>>,
    drain: VecDeque<Publish>,
    draining: u32,
}

impl Blocks {
    fn new(blocks: u32) -> Self {
        let n = blocks as usize;
        Self { filling: vec![false; n], fill: vec![VecDeque::new(); n], drain: VecDeque::new(), draining: 0 }
    }

    fn of(&self, queue: u32) -> usize {
        queue as usize % self.fill.len()
    }
}

#[derive(Default)]
struct Path {
    queue: VecDeque<(Rank, Post)>,
    on_the_way: usize,
}

/// A rank's call, from opening to the last message drained.
#[derive(Clone, Copy, Debug)]
struct Pending {
    left: u64,
    opened_at: Nanos,
}

/// The servers in virtual time.
pub struct World {
    config: WorldConfig,
    cluster: Arc<Cluster>,
    engines: Vec<Engine>,
    tables: Vec<LoadTable>,
    lines: Vec<Vec<LoadLine>>,
    blocks: Vec<Blocks>,
    paths: BTreeMap<(NicId, NicId), Path>,
    fluid: Fluid,
    moving: HashMap<FlowId, Moving>,
    events: BinaryHeap<Reverse<(Nanos, u64, usize)>>,
    due: Vec<Option<Event>>,
    free: Vec<usize>,
    sequence: u64,
    now: Nanos,
    pending: Vec<Option<Pending>>,
    done: Vec<(Rank, Nanos)>,
    calls: Vec<u64>,
    /// Ranks that something happened to since they were last asked.
    touched: Vec<bool>,
    /// Ranks whose next look is due.
    looks: Vec<bool>,
    /// Ranks whose call leaves the choice of NICs to the engine: only these watch how NICs fare.
    chooses: Vec<bool>,
    /// When something other than a look last happened.
    active_at: Nanos,
    beaten_at: Option<Nanos>,
    nic_tx_bytes: Vec<u64>,
}

impl World {
    /// A world at rest, all standing credits on their way.
    ///
    /// # Errors
    /// [`SimError`] when the configuration does not fit, or there is no memory for the load tables.
    pub fn new(config: WorldConfig) -> Result<Self, SimError> {
        let cluster = Arc::new(config.cluster.clone());
        let ranks = cluster.ranks() as usize;
        let mut engines = Vec::new();
        let mut tables = Vec::new();
        for server in (0..cluster.server_count()).map(ServerId) {
            let slots = SlotLayout::new(&cluster, server, config.slots)?;
            let memory = load_memory(&cluster, server)?;
            for rank in cluster.ranks_of(server) {
                engines.push(Engine::new(engine_config(&config, &cluster, rank, slots)));
                let own = cluster.gpu_of(rank);
                tables.push(LoadTable::open(memory.words(), load_config(&config, &cluster, server), own)?);
            }
        }
        let nics = |r: usize| cluster.server(cluster.server_of(Rank(r as u32))).nics.len();
        let mut world = Self {
            fluid: Fluid::new(rates(&cluster)),
            lines: (0..ranks).map(|r| vec![LoadLine::default(); nics(r)]).collect(),
            blocks: (0..ranks).map(|_| Blocks::new(config.blocks)).collect(),
            nic_tx_bytes: vec![0; cluster.nics() as usize],
            pending: vec![None; ranks],
            calls: vec![0; ranks],
            touched: vec![true; ranks],
            looks: vec![false; ranks],
            chooses: vec![false; ranks],
            active_at: 0,
            beaten_at: None,
            config,
            cluster,
            engines,
            tables,
            paths: BTreeMap::new(),
            moving: HashMap::new(),
            events: BinaryHeap::new(),
            due: Vec::new(),
            free: Vec::new(),
            sequence: 0,
            now: 0,
            done: Vec::new(),
        };
        world.poll()?;
        Ok(world)
    }

    /// Virtual time.
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// The cluster.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Payload that a NIC has sent.
    pub fn nic_tx_bytes(&self, nic: NicId) -> u64 {
        self.nic_tx_bytes[nic.idx()]
    }

    /// Opens a rank's next call; its `id` is filled in. Returns when it ends through [`run_until_done`](Self::run_until_done).
    ///
    /// # Errors
    /// [`SimError::Engine`].
    pub fn open(&mut self, rank: Rank, mut opened: Call) -> Result<(), SimError> {
        self.calls[rank.idx()] += 1;
        opened.id = CallId(self.calls[rank.idx()]);
        let left = opened.incoming.iter().map(|p| call::messages(p.bytes, opened.message_bytes)).sum();
        let free = opened.sends.iter().any(|r| r.egress.is_none() || r.ingress.is_none());
        self.chooses[rank.idx()] = free || opened.incoming.iter().any(|p| p.ingress.is_none());
        self.pending[rank.idx()] = (left > 0).then_some(Pending { left, opened_at: self.now });
        self.engine(rank, |e, now| e.open(&opened, now))?;
        self.poll()
    }

    /// Has [`step`](Self::step) return at that time at the latest.
    pub fn wake_at(&mut self, at: Nanos) {
        self.schedule(at.saturating_sub(self.now), Event::Wake);
    }

    /// Ranks whose calls ended since the last time, with how long each took from its opening.
    pub fn take_done(&mut self) -> Vec<(Rank, Nanos)> {
        std::mem::take(&mut self.done)
    }

    /// Goes on until no call is open.
    ///
    /// # Errors
    /// [`SimError`].
    pub fn run_until_done(&mut self) -> Result<(), SimError> {
        while self.pending.iter().any(Option::is_some) {
            self.step()?;
        }
        Ok(())
    }

    /// Does what comes next.
    ///
    /// # Errors
    /// [`SimError::Stuck`] when nothing does and a call is open.
    pub fn step(&mut self) -> Result<(), SimError> {
        let event_at = self.events.peek().map(|Reverse((at, ..))| *at);
        let flow_at = self.fluid.next_end();
        // Looks go on for ever: a while of nothing else is the end.
        let only_looks = flow_at.is_none() && self.events.len() == self.looks.iter().filter(|&&l| l).count();
        let patience = self.active_at + self.config.idle_after_ns + GIVE_UP_NS;
        let due = event_at.into_iter().chain(flow_at).min().filter(|&at| !only_looks || at <= patience);
        let Some(next) = due else {
            let stuck = self.pending.iter().position(Option::is_some);
            return match stuck {
                Some(r) => Err(SimError::Stuck { rank: Rank(r as u32), at_ns: self.now }),
                None => Ok(()),
            };
        };
        self.now = next;
        for flow in self.fluid.take_ended(next) {
            if let Some(moving) = self.moving.remove(&flow) {
                self.active_at = self.now;
                self.moved(moving)?;
            }
        }
        while let Some(Reverse((_, _, at))) =
            self.events.peek().copied().filter(|Reverse((at, ..))| *at <= next)
        {
            self.events.pop();
            self.free.push(at);
            if let Some(event) = self.due[at].take() {
                self.handle(event)?;
            }
        }
        self.poll()
    }

    fn schedule(&mut self, after: Nanos, event: Event) {
        let at = self.free.pop().unwrap_or_else(|| {
            self.due.push(None);
            self.due.len() - 1
        });
        self.due[at] = Some(event);
        self.sequence += 1;
        self.events.push(Reverse((self.now + after, self.sequence, at)));
    }

    fn engine(
        &mut self,
        rank: Rank,
        event: impl FnOnce(&mut Engine, Nanos) -> Result<(), EngineError>,
    ) -> Result<(), SimError> {
        let now = self.now;
        self.touched[rank.idx()] = true;
        event(&mut self.engines[rank.idx()], now).map_err(|source| SimError::Engine {
            rank,
            at_ns: now,
            source,
        })
    }

    fn handle(&mut self, event: Event) -> Result<(), SimError> {
        if !matches!(event, Event::Look(_)) {
            self.active_at = self.now;
        }
        match event {
            Event::Look(rank) => {
                self.looks[rank.idx()] = false;
                self.touched[rank.idx()] = true;
            }
            Event::Armed(rank, arm) => {
                let block = self.blocks[rank.idx()].of(arm.queue);
                self.blocks[rank.idx()].fill[block].push_back(arm);
                self.fill_next(rank, block);
            }
            Event::Posted(rank, post) => self.enqueue(rank, post),
            Event::Completed(rank, nic, cookie) => {
                self.engine(rank, |e, now| e.on_completed(cookie, Ok(()), now))?;
                self.lines[rank.idx()][nic.idx()].last_ns[0] = self.now;
            }
            Event::Arrived(rank, post, src) => self.arrived(rank, post, src)?,
            Event::Credit(from, word) => self.engine(word.to(), |e, now| e.on_word(from, word, now))?,
            Event::Wake => {}
        }
        Ok(())
    }

    fn moved(&mut self, moving: Moving) -> Result<(), SimError> {
        match moving {
            Moving::Filling(rank, arm, stage) => {
                if !self.copy(Moving::Filling(rank, arm, stage + 1)) {
                    self.filled(rank, arm)?;
                }
            }
            Moving::Sending(rank, post) => self.sent(rank, post),
            Moving::Draining(rank, arrival, stage) => {
                if !self.copy(Moving::Draining(rank, arrival, stage + 1)) {
                    self.drained(rank, arrival)?;
                }
            }
        }
        Ok(())
    }

    fn filled(&mut self, rank: Rank, arm: Arm) -> Result<(), SimError> {
        let Arm { class, queue, idx, bytes, .. } = arm;
        let block = self.blocks[rank.idx()].of(queue);
        self.blocks[rank.idx()].filling[block] = false;
        let doorbell = Doorbell::Send { class, queue, idx, bytes: bytes.into(), signal: None };
        self.engine(rank, |e, now| e.on_doorbell(doorbell, now))?;
        self.fill_next(rank, block);
        Ok(())
    }

    fn drained(&mut self, rank: Rank, p: Publish) -> Result<(), SimError> {
        self.blocks[rank.idx()].draining -= 1;
        let doorbell = Doorbell::Drained { class: p.class, nic: p.nic, slot: p.slot };
        self.engine(rank, |e, now| e.on_doorbell(doorbell, now))?;
        self.count_drained(rank);
        self.drain_next(rank);
        Ok(())
    }

    fn count_drained(&mut self, rank: Rank) {
        let Some(pending) = &mut self.pending[rank.idx()] else { return };
        pending.left -= 1;
        if pending.left == 0 {
            self.done.push((rank, self.now - pending.opened_at));
            self.pending[rank.idx()] = None;
        }
    }

    /// What the engines have decided; load tables first, so that all see the same. Ranks that nothing happened to look
    /// again a little later, as proxies do.
    fn poll(&mut self) -> Result<(), SimError> {
        let beat = self.beaten_at.is_none_or(|at| self.now - at > BEAT_NS);
        for r in 0..self.engines.len() {
            if beat || self.touched[r] {
                self.publish_load(r);
            }
        }
        if beat {
            self.beaten_at = Some(self.now);
        }
        for r in 0..self.engines.len() {
            if std::mem::take(&mut self.touched[r]) {
                self.poll_rank(Rank(r as u32));
            }
            if self.chooses[r] && self.engines[r].is_busy() {
                self.look_later(r);
            }
        }
        Ok(())
    }

    fn look_later(&mut self, r: usize) {
        if !std::mem::replace(&mut self.looks[r], true) {
            self.schedule(self.config.delays.look_ns, Event::Look(Rank(r as u32)));
        }
    }

    fn publish_load(&mut self, r: usize) {
        let engine = &self.engines[r];
        let mut new_turns = false;
        for (k, line) in self.lines[r].iter_mut().enumerate() {
            let nic = NicIdx(k as u32);
            line.bytes = [engine.egress_bytes(nic), engine.ingress_bytes(nic)];
            let turns = engine.turns(nic);
            new_turns |= turns != line.turns;
            line.turns = turns;
            self.tables[r].publish(nic, line);
        }
        // Every rank is told to be in every call: here they number their own.
        self.tables[r].beat(self.now, Beat { call: CallId(u64::MAX >> 1), ..Beat::default() });
        if new_turns {
            let server = self.cluster.server_of(Rank(r as u32));
            self.cluster.ranks_of(server).for_each(|rank| self.look_later(rank.idx()));
        }
    }

    fn poll_rank(&mut self, rank: Rank) {
        let r = rank.idx();
        let call = self.engines[r].config().call;
        self.tables[r].views(call, self.now, self.engines[r].views_mut());
        let delays = self.config.delays;
        while let Some(arm) = self.engines[r].poll_arm() {
            self.schedule(delays.arm_ns, Event::Armed(rank, arm));
        }
        while let Some(post) = self.engines[r].poll_post() {
            self.schedule(delays.doorbell_ns, Event::Posted(rank, post));
        }
        while let Some(control) = self.engines[r].poll_credit() {
            self.schedule(delays.credit_ns, Event::Credit(rank, control.write));
        }
        while let Some(arrival) = self.engines[r].poll_publish() {
            self.blocks[r].drain.push_back(arrival);
            self.drain_next(rank);
        }
    }

    // ---- kernels ----

    fn fill_next(&mut self, rank: Rank, block: usize) {
        let blocks = &mut self.blocks[rank.idx()];
        if blocks.filling[block] {
            return;
        }
        let Some(arm) = blocks.fill[block].pop_front() else { return };
        blocks.filling[block] = true;
        self.copy(Moving::Filling(rank, arm, 0));
    }

    fn drain_next(&mut self, rank: Rank) {
        let blocks = &mut self.blocks[rank.idx()];
        if blocks.draining >= self.config.blocks {
            return;
        }
        let Some(arrival) = blocks.drain.pop_front() else { return };
        blocks.draining += 1;
        self.copy(Moving::Draining(rank, arrival, 0));
    }

    /// Begins a stage of a copy; `false`: there is none any more.
    fn copy(&mut self, moving: Moving) -> bool {
        let (rank, nic, bytes, fills, nth) = match moving {
            Moving::Filling(rank, arm, nth) => (rank, arm.nic, arm.bytes, true, nth),
            Moving::Draining(rank, arrival, nth) => (rank, arrival.nic, arrival.bytes, false, nth),
            Moving::Sending(..) => return false,
        };
        let (server, gpu) = (self.cluster.server_of(rank), self.cluster.gpu_of(rank));
        let copy = SlotCopy { server, gpu, nic, fills, bytes: bytes.into() };
        let Some(stage) = self.config.relay.stage(&self.cluster, copy, nth) else { return false };
        let flow = self.fluid.start(stage.links(), stage.bytes, self.now);
        self.moving.insert(flow, moving);
        true
    }

    // ---- NICs ----

    fn way(&self, rank: Rank, post: &Post) -> (NicId, NicId) {
        let from = self.cluster.nic_id(self.cluster.server_of(rank), post.nic);
        (from, self.cluster.nic_id(self.cluster.server_of(post.dst), post.dst_nic))
    }

    fn enqueue(&mut self, rank: Rank, post: Post) {
        let way = self.way(rank, &post);
        self.paths.entry(way).or_default().queue.push_back((rank, post));
        self.send_next(way);
    }

    fn send_next(&mut self, way: (NicId, NicId)) {
        let Some(path) = self.paths.get_mut(&way) else { return };
        while path.on_the_way < WINDOW {
            let Some((rank, post)) = path.queue.pop_front() else { return };
            path.on_the_way += 1;
            let mut links = vec![nic_link(&self.cluster, way.0, false), nic_link(&self.cluster, way.1, true)];
            links.extend(self.config.relay.nic_crosses(&self.cluster, rank, post.nic, false));
            links.extend(self.config.relay.nic_crosses(&self.cluster, post.dst, post.dst_nic, true));
            let flow = self.fluid.start(&links, post.bytes.into(), self.now);
            self.moving.insert(flow, Moving::Sending(rank, post));
        }
    }

    fn sent(&mut self, rank: Rank, post: Post) {
        let way = self.way(rank, &post);
        if let Some(path) = self.paths.get_mut(&way) {
            path.on_the_way -= 1;
        }
        self.nic_tx_bytes[way.0.idx()] += u64::from(post.bytes);
        let peer = self.cluster.server_of(post.dst);
        self.tell_turn(way.0, Direction::Egress, &post, peer);
        self.schedule(self.config.delays.completion_ns, Event::Completed(rank, post.nic, post.cookie));
        self.schedule(self.config.delays.arrival_ns, Event::Arrived(post.dst, post, rank));
        self.send_next(way);
    }

    fn arrived(&mut self, rank: Rank, post: Post, src: Rank) -> Result<(), SimError> {
        let nic = self.cluster.nic_id(self.cluster.server_of(rank), post.dst_nic);
        self.tell_turn(nic, Direction::Ingress, &post, self.cluster.server_of(src));
        self.lines[rank.idx()][post.dst_nic.idx()].last_ns[1] = self.now;
        self.engine(rank, |e, now| e.on_arrival(post.dst_nic, post.imm, post.bytes, now))
    }

    fn tell_turn(&mut self, nic: NicId, direction: Direction, post: &Post, peer: ServerId) {
        if post.class == Class::Plan {
            let owner = self.cluster.owner_of(nic);
            let idx = self.cluster.nic_idx(nic);
            // Others wait for what it says of its NIC, even when it has nothing to do itself.
            self.touched[owner.idx()] = true;
            self.engines[owner.idx()].on_nic_moved(idx, direction, peer, post.bytes.into());
        }
    }
}

/// When only looks have happened for this long, nothing will.
const GIVE_UP_NS: Nanos = 1_000_000;
/// Ranks say that they live this often: well within what the load table waits for.
const BEAT_NS: Nanos = 500_000_000;
