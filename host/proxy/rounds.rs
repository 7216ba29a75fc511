//! One round after another: events to the engine, its decisions to NICs and kernels. No policy, no thread, no sleep.

use std::collections::VecDeque;
use std::time::Duration;

use super::ProxyError;
use super::local::{LocalCells, LocalMoves};
use crate::borrow::BorrowedNic;
use crate::channel::ProxyEnd;
use crate::credit::{self, CreditEvent, CreditInbox, ReturnInbox};
use crate::doorbell::{Class, Doorbell, Signal};
use crate::engine::call::Call;
use crate::engine::slots::{Lot, SlotLayout};
use crate::engine::{Control, Engine, EngineError, Post};
use crate::hw::{
    Clock, Herald, LocalKey, LocalSpan, Mover, Nanos, Nic, NicEvent, PathId, RemoteKey, RemoteSpan, Teller,
    Work, WorkOp,
};
use crate::load::{Beat, LoadLine, LoadTable};
use crate::owner::{OwnedNic, PathCounters};
use crate::segment::SegmentLayout;
use crate::signals::{self, SignalInbox};
use crate::topo::{NicIdx, Rank};

/// A NIC of the server, as this rank reaches it.
pub enum Port {
    /// This rank owns it.
    Owned(Box<OwnedNic>),
    /// Another rank does.
    Borrowed(BorrowedNic),
    /// It is down.
    Down,
}

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
    /// Keys of the lots beside each NIC of the job that are there from the start, by [number](crate::engine::slots::Lot::number).
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
    p: ProxyParts,
    /// Work that a NIC had no room for.
    backlog: Vec<VecDeque<Work>>,
    events: Vec<NicEvent>,
    lines: Vec<LoadLine>,
    /// Calls whose turn has not come yet.
    to_open: VecDeque<Box<Call>>,
    local: Option<LocalMoves>,
    class: Class,
    /// Copies under way: the engine's ticket and the mover's.
    moving: Vec<(u64, u64)>,
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
            backlog: vec![VecDeque::new(); nics],
            events: Vec::new(),
            lines: vec![LoadLine::default(); nics],
            to_open: VecDeque::new(),
            local: None,
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
    fn move_cells(&mut self) -> Result<bool, ProxyError> {
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
        let quiet = |port: &mut Port| match port {
            Port::Owned(nic) => nic.is_quiet(),
            _ => true,
        };
        let backlog = self.backlog.iter().all(VecDeque::is_empty);
        let done = backlog
            && self.p.engine.is_quiet()
            && self.p.engine.turns_finished()
            && self.p.ports.iter_mut().all(quiet);
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
                self.p.engine.on_doorbell(Doorbell::decode(words)?, now)?;
                any = true;
            }
            ring.publish();
        }
        Ok(any)
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
            NicEvent::Path { peer, news } => self.p.engine.on_path(nic, peer, news, now),
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

    /// What the engine has decided.
    fn carry_out(&mut self) -> Result<bool, ProxyError> {
        let mut any = false;
        let mut told = false;
        any |= self.move_slots()?;
        any |= self.move_cells()?;
        while let Some(arm) = self.p.engine.poll_arm() {
            let slot_dev_ptr = self.send_slot_dev_ptr(arm.nic, arm.class, arm.slot);
            let message = u64::from(arm.piece) << 32 | u64::from(arm.part);
            self.p.channel.arm(arm.queue, arm.idx, slot_dev_ptr, message);
            told = true;
        }
        while let Some(post) = self.p.engine.poll_post() {
            let signal = post.signal.map(|signal| self.signal_of(&post, signal));
            let work = self.work_of(&post);
            self.backlog[post.nic.idx()].extend(signal.into_iter().chain([work]));
        }
        while let Some(control) = self.p.engine.poll_credit() {
            self.queue_control(&control);
        }
        self.queue_path_words();
        any |= self.post_backlog()?;
        any |= self.serve_borrowers()?;
        while let Some(arrival) = self.p.engine.poll_publish() {
            let slot_dev_ptr = self.recv_slot_dev_ptr(arrival.nic, arrival.class, arrival.slot);
            self.p.channel.publish(&arrival, slot_dev_ptr);
            told = true;
        }
        told |= self.hand_on_puts()?;
        if told {
            (self.p.tell_kernels)();
        }
        Ok(any || told)
    }

    fn work_of(&self, post: &Post) -> Work {
        let config = self.p.engine.config();
        let cluster = &config.cluster;
        let offset = config.slots.send_offset(post.class, post.slot);
        let local = LocalSpan { key: LocalKey(0), offset, bytes: post.bytes };
        let server = cluster.server_of(post.dst);
        let peer = cluster.nic_id(server, post.dst_nic);
        let lot = Lot { nic: post.dst_nic, gpu: cluster.gpu_of(post.dst), class: post.class };
        let lent_since = self.p.inbox.memory(post.class, post.dst, post.dst_nic);
        let key = lent_since.unwrap_or(self.p.lot_keys[peer.idx()][lot.number()]);
        let into = self.p.slots[server.idx()].recv_offset(post.class, post.dst_slot);
        let remote = RemoteSpan { rkey: key.rkey, remote_addr: key.remote_addr + into };
        Work { path: PathId(peer.0), op: WorkOp::Write { local, remote, imm: post.imm }, cookie: post.cookie }
    }

    /// Goes ahead of its message, on its path: a resent message brings its signal again.
    fn signal_of(&self, post: &Post, signal: Signal) -> Work {
        let config = self.p.engine.config();
        let peer = config.cluster.nic_id(config.cluster.server_of(post.dst), post.dst_nic);
        let key = self.p.segment_keys[peer.idx()];
        let op = signals::write_op(&config.cluster, config.rank, post.dst, post.seq, signal, key);
        Work { path: PathId(peer.0), op, cookie: 0 }
    }

    /// Shows kernels what came by puts, and what of theirs has come.
    fn hand_on_puts(&mut self) -> Result<bool, ProxyError> {
        let mut any = false;
        while let Some((dst, messages)) = self.p.engine.poll_flushed() {
            self.p.channel.complete(dst, messages);
            any = true;
        }
        while let Some(arrival) = self.p.engine.poll_stream_arrival() {
            let signal = self.p.signals.of(arrival.src, arrival.seq);
            let (class, nic, slot) = (arrival.class, arrival.nic, arrival.slot);
            if arrival.bytes > 0 {
                let slot_dev_ptr = self.recv_slot_dev_ptr(nic, class, slot);
                self.p.channel.publish_in_order(&arrival, slot_dev_ptr);
            } else {
                self.p.engine.on_doorbell(Doorbell::Drained { class, nic, slot }, self.now())?;
            }
            if let Some(signal) = signal {
                let (src, number) = (arrival.src, signal.number);
                self.p.channel.signal(signal).ok_or(EngineError::BadSignal { src, number })?;
            }
            any = true;
        }
        Ok(any)
    }

    /// Messages whose way has failed are copied to where another begins.
    fn move_slots(&mut self) -> Result<bool, ProxyError> {
        let mut any = false;
        while let Some(m) = self.p.engine.poll_move() {
            let [to, from] = [m.to, m.from].map(|(nic, slot)| self.send_slot_dev_ptr(nic, m.class, slot));
            self.moving.push((m.ticket, self.p.mover.start(to, from, m.bytes.into())?));
            any = true;
        }
        let mut i = 0;
        while i < self.moving.len() {
            let (ticket, copy) = self.moving[i];
            if self.p.mover.is_done(copy)? {
                self.moving.swap_remove(i);
                self.p.engine.on_moved(ticket);
                any = true;
            } else {
                i += 1;
            }
        }
        Ok(any)
    }

    fn send_slot_dev_ptr(&self, nic: NicIdx, class: Class, slot: u32) -> u64 {
        self.p.lot_dev_ptrs[nic.idx()][class as usize] + self.p.engine.config().slots.send_offset(class, slot)
    }

    fn recv_slot_dev_ptr(&self, nic: NicIdx, class: Class, slot: u32) -> u64 {
        self.p.lot_dev_ptrs[nic.idx()][class as usize] + self.p.engine.config().slots.recv_offset(class, slot)
    }

    fn queue_control(&mut self, &Control { via, peer, write }: &Control) {
        let config = self.p.engine.config();
        let key = self.p.segment_keys[peer.idx()];
        for op in credit::write_ops(&config.cluster, config.rank, write, key) {
            self.backlog[via.idx()].push_back(Work { path: PathId(peer.0), op, cookie: 0 });
        }
    }

    /// What this rank's NICs tell the other ends of their paths: by the herald, and over an open path if there is one.
    fn queue_path_words(&mut self) {
        for k in 0..self.p.ports.len() {
            let Port::Owned(nic) = &mut self.p.ports[k] else { continue };
            let cluster = &self.p.engine.config().cluster;
            let server = cluster.server_of(self.p.engine.config().rank);
            let own = cluster.nic_id(server, NicIdx(k as u32));
            for (peer, word) in nic.take_words() {
                self.p.herald.tell(own, peer, word.encode());
                let there = cluster.server_of_nic(peer);
                let Some((via, entry)) = self.p.engine.path_to(there) else { continue };
                let at = SegmentLayout::new(cluster, there).path_word(cluster.nic_idx(peer), own);
                let op = credit::write_word(self.p.segment_keys[entry.idx()], at, word.encode());
                self.backlog[via.idx()].push_back(Work { path: PathId(entry.0), op, cookie: 0 });
            }
        }
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

    /// Work is posted at the time it is posted, not at that of the round's beginning: a device may reckon from it.
    fn post_backlog(&mut self) -> Result<bool, ProxyError> {
        let now = self.p.clock.now();
        let mut any = false;
        for (port, backlog) in self.p.ports.iter_mut().zip(&mut self.backlog) {
            if backlog.is_empty() {
                continue;
            }
            let work = backlog.make_contiguous();
            let taken = match port {
                Port::Owned(nic) => nic.post(work, now)?,
                Port::Borrowed(nic) => nic.post(work, now)?,
                Port::Down => 0,
            };
            backlog.drain(..taken);
            any |= taken > 0;
        }
        Ok(any)
    }

    /// After the owner's own work.
    fn serve_borrowers(&mut self) -> Result<bool, ProxyError> {
        let now = self.p.clock.now();
        let mut any = false;
        for port in &mut self.p.ports {
            if let Port::Owned(nic) = port {
                any |= nic.serve_borrowers(now)?;
            }
        }
        Ok(any)
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
