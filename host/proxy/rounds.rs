//! One round after another: events to the engine, its decisions to NICs and kernels. No policy, no thread, no sleep.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::ProxyError;
use super::fixed::{ArmedSlot, FixedQueue, FixedStreams};
use super::local::{LocalCells, LocalMoves};
use super::ports::{Backlog, Port};
use crate::borrow::RingCounters;
use crate::channel::ProxyEnd;
use crate::credit::{CreditEvent, CreditInbox, ReturnInbox};
use crate::doorbell::{Class, Doorbell};
use crate::engine::call::Call;
use crate::engine::slots::SlotLayout;
use crate::engine::{Engine, Publish};
use crate::hw::{Clock, Herald, Mover, Nanos, Nic, NicEvent, PathNews, RemoteKey, Teller};
use crate::load::{Beat, LoadLine, LoadTable};
use crate::owner::PathCounters;
use crate::signals::SignalInbox;
use crate::topo::{NicIdx, Rank};

/// A rank's lots of one NIC, by class.
pub type LotPtrs = [u64; Class::ALL.len()];

/// What one rank's proxy works with.
pub struct ProxyParts {
    /// The state machine.
    pub engine: Engine,
    /// Time.
    pub clock: Box<dyn Clock>,
    /// Rings to and from kernels.
    pub channel: ProxyEnd,
    /// Called when something was written there.
    pub tell_kernels: Teller,
    /// NICs of the server, by index.
    pub ports: Vec<Port>,
    /// Where this rank's lots of each NIC's relay memory lie for this GPU, by class; 0: not there.
    pub lot_dev_ptrs: Vec<LotPtrs>,
    /// Keys of the lots beside each NIC of the job that are there from the start, by
    /// [number](crate::engine::slots::SlotLayout::part_number) of their parts.
    pub lot_keys: Vec<Vec<RemoteKey>>,
    /// Slots of each server's relay memory.
    pub slots: Vec<SlotLayout>,
    /// Copies from one send slot to another.
    pub mover: Box<dyn Mover>,
    /// Carries words about paths when no path does.
    pub herald: Box<dyn Herald>,
    /// How often it is listened to.
    pub herald_ns: Nanos,
    /// Key of each server's segment at each NIC of the job.
    pub segment_keys: Vec<RemoteKey>,
    /// Credits granted to this rank.
    pub inbox: CreditInbox,
    /// Credits that others return to it.
    pub returns: ReturnInbox,
    /// Called when memory that was asked back is not used any more. It does not block.
    pub on_lot_returned: Box<dyn FnMut(NicIdx, Class) + Send>,
    /// What messages that come do to signals.
    pub signals: SignalInbox,
    /// What the server's ranks say of their traffic.
    pub load: LoadTable,
    /// While a plan runs, its NICs are leased for this long at a time.
    pub lease_ns: Nanos,
    /// Longest sleep while there is work, and when there has been none for a while.
    pub sleep: [Duration; 2],
}

/// What a proxy does, round by round. The thread in `proxy.rs` runs it in real time, `sim` in virtual time.
pub struct Rounds {
    pub(super) p: ProxyParts,
    /// By NIC: work that it had no room for.
    pub(super) backlog: Vec<Backlog>,
    events: Vec<NicEvent>,
    lines: Vec<LoadLine>,
    /// Calls whose turn has not come yet.
    to_open: VecDeque<Box<Call>>,
    local: Option<LocalMoves>,
    pub(super) fixed: FixedStreams,
    class: Class,
    /// Copies under way: the engine's ticket and the mover's.
    pub(super) moving: Vec<(u64, u64)>,
    /// Kept between rounds, so that looking allocates nothing.
    lines_recalled: Vec<(Class, Rank, NicIdx)>,
    beat: Beat,
    idle_rounds: u32,
    worked_at: Nanos,
    beaten_at: Nanos,
    heard_at: Nanos,
    leave_by: Option<Nanos>,
}

/// Doorbells taken in one round, so that no ring keeps the others waiting.
const DOORBELL_BATCH: usize = 32;
/// After this long without work a proxy looks less often.
const QUIET_NS: Nanos = 20_000_000;
/// How long a proxy that is told to stop goes on for others.
const LEAVE_WITHIN_NS: Nanos = 5_000_000_000;
/// A heartbeat is due this often.
const BEAT_NS: Nanos = 50_000_000;

impl Rounds {
    /// Nothing is open yet.
    pub fn new(p: ProxyParts) -> Self {
        let nics = p.ports.len();
        Self {
            p,
            backlog: (0..nics).map(|_| Backlog::default()).collect(),
            events: Vec::new(),
            lines: vec![LoadLine::default(); nics],
            to_open: VecDeque::new(),
            local: None,
            fixed: FixedStreams::default(),
            class: Class::Put,
            moving: Vec::new(),
            lines_recalled: Vec::new(),
            beat: Beat::default(),
            idle_rounds: 0,
            worked_at: 0,
            beaten_at: 0,
            heard_at: 0,
            leave_by: None,
        }
    }

    /// Begins a call as soon as the one before is over.
    pub fn open(&mut self, call: Box<Call>) {
        self.to_open.push_back(call);
    }

    /// Moves the cells of a call that stay in the server.
    pub fn move_local(&mut self, cells: LocalCells) {
        self.local = Some(LocalMoves::new(cells));
    }

    /// Goes on with them.
    pub(super) fn move_cells(&mut self) -> Result<bool, ProxyError> {
        let Some(moves) = &mut self.local else { return Ok(false) };
        let (load, call) = (&self.p.load, moves.call());
        // A peer that has come to the call has given its receive buffer to it.
        let any = moves.step(&mut *self.p.mover, |peer| load.call_of(peer) >= call)?;
        if moves.is_done() {
            self.local = None;
        }
        Ok(any)
    }

    /// The state machine.
    pub fn engine(&self) -> &Engine {
        &self.p.engine
    }

    /// What has happened to the paths of the NICs that this rank owns.
    pub fn path_counters(&self) -> PathCounters {
        let owned = self.p.ports.iter().filter_map(|port| match port {
            Port::Owned(nic) => Some(nic.path_counters()),
            _ => None,
        });
        owned.fold(PathCounters::default(), PathCounters::plus)
    }

    /// What went through the rings to and from the owners of NICs that it borrows, and the borrowers of those that it owns.
    pub fn ring_counters(&self) -> RingCounters {
        self.p.ports.iter().map(Port::ring_counters).fold(RingCounters::default(), RingCounters::plus)
    }

    /// NICs that this rank owns whose link carries nothing.
    pub fn links_down(&self) -> impl Iterator<Item = NicIdx> + '_ {
        let down = |(k, port): (usize, &Port)| match port {
            Port::Owned(nic) if nic.is_link_down() => Some(NicIdx(k as u32)),
            _ => None,
        };
        self.p.ports.iter().enumerate().filter_map(down)
    }

    /// Does all that can be done now; returns whether anything was.
    ///
    /// # Errors
    /// [`ProxyError`]; then it does nothing any more.
    pub fn round(&mut self) -> Result<bool, ProxyError> {
        let now = self.now();
        let mut worked = self.open_next(now)?;
        worked |= self.take_doorbells(now)?;
        self.hear_herald(now);
        worked |= self.poll_nics(now)?;
        worked |= self.poll_credits(now)?;
        self.poll_returns();
        self.update_views(now);
        worked |= self.carry_out()?;
        self.hand_back_lots();
        if worked || now - self.beaten_at > BEAT_NS {
            self.publish_load(now);
            self.beaten_at = now;
        }
        self.p.engine.handle_timeout(now)?;
        self.note_work(worked, now);
        Ok(worked)
    }

    pub(super) fn now(&self) -> Nanos {
        self.p.clock.now()
    }

    /// A rank that is done still has others' work: its own sends must reach their peers, and NICs that it owns carry
    /// borrowers' bytes. Bounded, since a peer may be gone.
    pub(super) fn may_leave(&mut self) -> bool {
        let quiet = |port: &Port| match port {
            Port::Owned(nic) => nic.is_quiet(),
            _ => true,
        };
        let done = self.backlog.iter().all(Backlog::is_empty)
            && self.p.engine.is_quiet()
            && self.p.engine.turns_finished()
            && self.p.ports.iter().all(quiet);
        let now = self.now();
        done || now > *self.leave_by.get_or_insert(now + LEAVE_WITHIN_NS)
    }

    fn note_work(&mut self, worked: bool, now: Nanos) {
        if worked {
            (self.idle_rounds, self.worked_at) = (0, now);
        } else {
            self.idle_rounds = self.idle_rounds.saturating_add(1);
        }
    }

    /// How long to sleep before the next round: not at all after work.
    pub(super) fn rest(&self) -> Option<Duration> {
        let longest = self.p.sleep[usize::from(self.now() - self.worked_at > QUIET_NS)];
        match self.idle_rounds {
            0 => None,
            1 => Some(longest / 2),
            _ => Some(longest),
        }
    }

    fn open_next(&mut self, now: Nanos) -> Result<bool, ProxyError> {
        // The server's other ranks may still need this rank's NICs in the call before.
        if !self.p.engine.turns_finished() {
            return Ok(false);
        }
        match self.to_open.pop_front() {
            None => Ok(false),
            Some(call) => {
                // What the kernels of the call before rang must be heard before its queues are used again.
                while self.take_doorbells(now)? {}
                self.p.engine.open(&call, now)?;
                self.class = call.class;
                Ok(true)
            }
        }
    }

    fn take_doorbells(&mut self, now: Nanos) -> Result<bool, ProxyError> {
        let mut any = false;
        for ring in &mut self.p.channel.doorbells {
            for _ in 0..DOORBELL_BATCH {
                let Some(words) = ring.pop() else { break };
                let doorbell = Doorbell::decode(words)?;
                if let Some(peer) = self.fixed.trespass(self.p.engine.config(), &doorbell) {
                    return Err(ProxyError::FixedStream { peer });
                }
                self.p.engine.on_doorbell(doorbell, now)?;
                any = true;
            }
            ring.publish();
        }
        Ok(any)
    }

    /// A user's thread rings in a kernel's place.
    pub(super) fn ring(&mut self, doorbell: Doorbell) -> Result<(), ProxyError> {
        let now = self.now();
        Ok(self.p.engine.on_doorbell(doorbell, now)?)
    }

    /// Slots for messages to a rank go to a user's thread from now on.
    pub(super) fn fix_send(&mut self, dst: Rank, slots: Arc<FixedQueue<ArmedSlot>>) {
        self.p.engine.armed_ahead(dst).for_each(|arm| {
            slots.push(ArmedSlot { idx: arm.idx, nic: arm.nic, slot: arm.slot });
        });
        self.fixed.fix_send(dst, slots);
    }

    /// Messages from a rank do.
    pub(super) fn fix_recv(&mut self, src: Rank, arrivals: Arc<FixedQueue<Publish>>) {
        self.p.channel.shown(src).for_each(|arrival| arrivals.push(arrival));
        self.fixed.fix_recv(src, arrivals);
    }

    fn poll_nics(&mut self, now: Nanos) -> Result<bool, ProxyError> {
        let mut any = false;
        for k in 0..self.p.ports.len() {
            let mut events = std::mem::take(&mut self.events);
            match &mut self.p.ports[k] {
                Port::Owned(nic) => {
                    nic.poll(now, &mut events)?;
                    for moved in nic.take_moved() {
                        let nic = NicIdx(k as u32);
                        self.p.engine.on_nic_moved(nic, moved.direction, moved.peer, moved.bytes);
                        any = true;
                    }
                }
                Port::Borrowed(nic) => nic.poll(now, &mut events)?,
                Port::Down => {}
            }
            any |= !events.is_empty();
            for event in events.drain(..) {
                self.on_event(NicIdx(k as u32), event, now)?;
            }
            self.events = events;
        }
        Ok(any)
    }

    fn on_event(&mut self, nic: NicIdx, event: NicEvent, now: Nanos) -> Result<(), ProxyError> {
        match event {
            NicEvent::Completed { cookie, result } => {
                self.p.engine.on_completed(cookie, result, now)?;
                self.lines[nic.idx()].last_ns[0] = now;
            }
            NicEvent::Arrived { imm, bytes, .. } => {
                self.p.engine.on_arrival(nic, imm, bytes, now)?;
                self.lines[nic.idx()].last_ns[1] = now;
            }
            NicEvent::Path { peer, news } => {
                self.p.engine.on_path(nic, peer, news, now);
                if news == PathNews::Down {
                    self.refuse_backlog(nic, peer, now)?;
                }
            }
            // The NIC's owner closes its paths.
            NicEvent::Link(_) | NicEvent::Broken(_) => {}
        }
        Ok(())
    }

    fn poll_credits(&mut self, now: Nanos) -> Result<bool, ProxyError> {
        let engine = &mut self.p.engine;
        let mut bad = None;
        let any = self.p.inbox.poll(|event| match event {
            CreditEvent::Slot { class, from, nic, lent } => {
                if let Err(e) = engine.on_credit(class, from, nic, lent, now) {
                    bad = Some(e);
                }
            }
            CreditEvent::Answer { class, from, nic, answer } => {
                engine.on_answer(class, from, nic, answer, now);
            }
            CreditEvent::Recall { class, from, nic, before } => engine.on_recall(class, from, nic, before),
            CreditEvent::State { from, nic, call, state } => engine.on_peer_nic_state(from, nic, call, state),
        });
        match bad {
            None => Ok(any),
            Some(e) => Err(e.into()),
        }
    }

    /// What senders return of credits that are asked back.
    fn poll_returns(&mut self) {
        self.lines_recalled.clear();
        self.lines_recalled.extend(self.p.engine.recalled_lines());
        for &(class, from, nic) in &self.lines_recalled {
            self.p.engine.on_returned(class, from, nic, self.p.returns.of(class, from, nic));
        }
    }

    /// Memory for this rank's slots of a class beside a NIC lies at `dev_ptr`; remote ranks write there by `key`.
    pub fn lot_lent(&mut self, nic: NicIdx, class: Class, dev_ptr: u64, key: RemoteKey) {
        self.p.lot_dev_ptrs[nic.idx()][class as usize] = dev_ptr;
        self.p.engine.on_lot_lent(nic, class, key);
    }

    /// It is asked back.
    pub fn recall_lot(&mut self, nic: NicIdx, class: Class) {
        self.p.engine.recall_lot(nic, class);
    }

    fn hand_back_lots(&mut self) {
        while let Some((nic, class)) = self.p.engine.poll_returned_lot() {
            self.p.lot_dev_ptrs[nic.idx()][class as usize] = 0;
            (self.p.on_lot_returned)(nic, class);
        }
    }

    fn update_views(&mut self, now: Nanos) {
        let call = self.p.engine.config().call;
        self.p.load.views(call, now, self.p.engine.views_mut());
        self.p.engine.update_server(self.p.load.server_view(call, now));
    }

    fn hear_herald(&mut self, now: Nanos) {
        if now - self.heard_at < self.p.herald_ns {
            return;
        }
        self.heard_at = now;
        while let Some((from, to, word)) = self.p.herald.hear() {
            let config = self.p.engine.config();
            if config.cluster.server_of_nic(to) != config.cluster.server_of(config.rank) {
                continue;
            }
            if let Port::Owned(nic) = &mut self.p.ports[config.cluster.nic_idx(to).idx()] {
                nic.on_word(from, word, now);
            }
        }
    }

    fn publish_load(&mut self, now: Nanos) {
        let engine = &self.p.engine;
        for (k, line) in self.lines.iter_mut().enumerate() {
            let nic = NicIdx(k as u32);
            line.bytes = [engine.egress_bytes(nic), engine.ingress_bytes(nic)];
            line.turns = engine.turns(nic);
            line.link_down = matches!(&self.p.ports[k], Port::Owned(nic) if nic.is_link_down());
            self.p.load.publish(nic, line);
        }
        let call = engine.config().call;
        if engine.is_quiet() {
            self.beat.done = call;
        }
        if engine.detours() {
            self.beat.detours = call;
        }
        self.beat.call = call;
        let leased = self.class == Class::Plan && engine.is_busy();
        self.beat.lease_until_ns = if leased { now + self.p.lease_ns } else { 0 };
        self.p.load.beat(now, self.beat);
    }
}
