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
use super::machine::{engine_config, load_config, load_memory, memory_link, nic_link, rates, scaleup_links};
use crate::doorbell::{Class, Doorbell};
use crate::engine::call::{self, Call, CallId, Direction};
use crate::engine::route::RouteLimits;
use crate::engine::slots::{SlotConfig, SlotLayout};
use crate::engine::{Arm, CreditWrite, Engine, EngineError, Post, Publish};
use crate::hw::{HwError, Nanos};
use crate::load::{Beat, LoadLine, LoadTable};
use crate::topo::{Cluster, GpuIdx, NicId, NicIdx, Rank, ServerId};

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
}

impl Default for Delays {
    /// Of the order that the FuseLink paper reports for its steps (post and pull 0.8 to 1.4 us each).
    fn default() -> Self {
        Self { doorbell_ns: 2_000, arrival_ns: 3_000, completion_ns: 2_000, credit_ns: 3_000, arm_ns: 1_000 }
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
}

/// What a flow that ends was for.
#[derive(Clone, Copy, Debug)]
enum Moving {
    Filling(Rank, Arm),
    Sending(Rank, Post),
    Draining(Rank, Publish),
}

#[derive(Default)]
struct Blocks {
    busy: u32,
    fill: VecDeque<Arm>,
    drain: VecDeque<Publish>,
    draining: u32,
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
            blocks: (0..ranks).map(|_| Blocks::default()).collect(),
            nic_tx_bytes: vec![0; cluster.nics() as usize],
            pending: vec![None; ranks],
            calls: vec![0; ranks],
            touched: vec![true; ranks],
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
        let next = match (event_at, flow_at) {
            (Some(a), Some(b)) => a.min(b),
            (Some(at), None) | (None, Some(at)) => at,
            (None, None) => {
                let stuck = self.pending.iter().position(Option::is_some);
                return match stuck {
                    Some(r) => Err(SimError::Stuck { rank: Rank(r as u32), at_ns: self.now }),
                    None => Ok(()),
                };
            }
        };
        self.now = next;
        for flow in self.fluid.take_ended(next) {
            if let Some(moving) = self.moving.remove(&flow) {
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
        match event {
            Event::Armed(rank, arm) => {
                self.blocks[rank.idx()].fill.push_back(arm);
                self.fill_next(rank);
            }
            Event::Posted(rank, post) => self.enqueue(rank, post),
            Event::Completed(rank, nic, cookie) => {
                self.engine(rank, |e, now| e.on_completed(cookie, Ok(()), now))?;
                self.lines[rank.idx()][nic.idx()].last_ns[0] = self.now;
            }
            Event::Arrived(rank, post, src) => self.arrived(rank, post, src)?,
            Event::Credit(from, CreditWrite::Slot { to, class, nic, lent }) => {
                self.engine(to, |e, now| e.on_credit(class, from, nic, lent, now))?;
            }
            // No path fails in this world.
            Event::Credit(_, CreditWrite::Answer { .. }) => {}
            Event::Credit(from, CreditWrite::State { to, nic, call, state }) => {
                self.engine(to, |e, _| {
                    e.on_peer_nic_state(from, nic, call, state);
                    Ok(())
                })?;
            }
            Event::Wake => {}
        }
        Ok(())
    }

    fn moved(&mut self, moving: Moving) -> Result<(), SimError> {
        match moving {
            Moving::Filling(rank, arm) => {
                self.blocks[rank.idx()].busy -= 1;
                let Arm { class, queue, idx, bytes, .. } = arm;
                let doorbell = Doorbell::Send { class, queue, idx, bytes: bytes.into() };
                self.engine(rank, |e, now| e.on_doorbell(doorbell, now))?;
                self.fill_next(rank);
            }
            Moving::Sending(rank, post) => self.sent(rank, post),
            Moving::Draining(rank, p) => {
                self.blocks[rank.idx()].draining -= 1;
                let doorbell = Doorbell::Drained { class: p.class, nic: p.nic, slot: p.slot };
                self.engine(rank, |e, now| e.on_doorbell(doorbell, now))?;
                self.count_drained(rank);
                self.drain_next(rank);
            }
        }
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

    /// What the engines have decided; load tables first, so that all see the same.
    fn poll(&mut self) -> Result<(), SimError> {
        let beat = self.beaten_at.is_none_or(|at| self.now - at > BEAT_NS);
        let at_work = |w: &Self, r: usize| w.touched[r] || w.engines[r].is_busy();
        for r in (0..self.engines.len()).filter(|&r| beat || at_work(self, r)).collect::<Vec<_>>() {
            self.publish_load(r);
        }
        if beat {
            self.beaten_at = Some(self.now);
        }
        for r in (0..self.engines.len()).filter(|&r| at_work(self, r)).collect::<Vec<_>>() {
            self.touched[r] = false;
            self.poll_rank(Rank(r as u32));
        }
        Ok(())
    }

    fn publish_load(&mut self, r: usize) {
        let engine = &self.engines[r];
        for (k, line) in self.lines[r].iter_mut().enumerate() {
            let nic = NicIdx(k as u32);
            line.bytes = [engine.egress_bytes(nic), engine.ingress_bytes(nic)];
            line.turns = engine.turns(nic);
            self.tables[r].publish(nic, line);
        }
        // Every rank is told to be in every call: here they number their own.
        self.tables[r].beat(self.now, Beat { call: CallId(u64::MAX >> 1), ..Beat::default() });
    }

    fn poll_rank(&mut self, rank: Rank) {
        let r = rank.idx();
        for nic in (0..self.lines[r].len() as u32).map(NicIdx) {
            let view = self.tables[r].view(nic, self.engines[r].config().call, self.now);
            self.engines[r].update_nic(nic, view);
        }
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

    fn fill_next(&mut self, rank: Rank) {
        let blocks = &mut self.blocks[rank.idx()];
        if blocks.busy >= self.config.blocks {
            return;
        }
        let Some(arm) = blocks.fill.pop_front() else { return };
        blocks.busy += 1;
        let gpu = self.cluster.gpu_of(rank);
        let server = self.cluster.server_of(rank);
        let relay = self.cluster.server(server).nics[arm.nic.idx()].relay_gpu;
        self.copy(server, gpu, relay, arm.bytes, Moving::Filling(rank, arm));
    }

    fn drain_next(&mut self, rank: Rank) {
        let blocks = &mut self.blocks[rank.idx()];
        if blocks.draining >= self.config.blocks {
            return;
        }
        let Some(arrival) = blocks.drain.pop_front() else { return };
        blocks.draining += 1;
        let gpu = self.cluster.gpu_of(rank);
        let server = self.cluster.server_of(rank);
        let relay = self.cluster.server(server).nics[arrival.nic.idx()].relay_gpu;
        self.copy(server, relay, gpu, arrival.bytes, Moving::Draining(rank, arrival));
    }

    fn copy(&mut self, server: ServerId, from: GpuIdx, to: GpuIdx, bytes: u32, moving: Moving) {
        let links = if from == to {
            vec![memory_link(self.cluster.rank_of(server, from))]
        } else {
            let [out, _] = scaleup_links(self.cluster.rank_of(server, from));
            let [_, into] = scaleup_links(self.cluster.rank_of(server, to));
            vec![out, into]
        };
        let flow = self.fluid.start(links, bytes.into(), self.now);
        self.moving.insert(flow, moving);
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
            let links = vec![nic_link(&self.cluster, way.0, false), nic_link(&self.cluster, way.1, true)];
            let flow = self.fluid.start(links, post.bytes.into(), self.now);
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

/// Ranks say that they live this often: well within what the load table waits for.
const BEAT_NS: Nanos = 500_000_000;
