//! Servers around engines: kernels that fill and drain slots, NICs, scale-up links, load tables and delays.
//!
//! What is modelled: links (scale-up per GPU and direction, NICs per direction), shared max-min fairly; the order of a
//! NIC's paths (each sends its messages in order, at most [`WINDOW`] at a time, so that they share the NIC); blocks
//! that fill or drain one message at a time; and fixed delays ([`Delays`]). What is not: PCIe, fabrics between NICs, the
//! host's own time beyond the delays.

mod config;
mod kernels;
mod nics;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::sync::Arc;

pub use config::{Delays, SimError, WorldConfig};
use kernels::Blocks;
use nics::Path;
pub use nics::WINDOW;

use super::fluid::{FlowId, Fluid};
use super::machine::{engine_config, load_memory, rates};
use crate::engine::call::{self, Call, CallId};
use crate::engine::slots::SlotLayout;
use crate::engine::{Arm, CreditWrite, Engine, EngineError, Post, Publish};
use crate::hw::Nanos;
use crate::load::{Beat, LoadConfig, LoadLine, LoadTable};
use crate::topo::{Cluster, NicId, NicIdx, Rank, ServerId};

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
                let load = LoadConfig::of(cluster.server(server), config.idle_after_ns);
                tables.push(LoadTable::open(memory.words(), load, own)?);
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
            Event::Armed(rank, arm) => self.armed(rank, arm),
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

    /// A stage of a copy or a transmission has ended.
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
            self.published(rank, arrival);
        }
    }
}

/// When only looks have happened for this long, nothing will.
const GIVE_UP_NS: Nanos = 1_000_000;
/// Ranks say that they live this often: well within what the load table waits for.
const BEAT_NS: Nanos = 500_000_000;
