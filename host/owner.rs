//! A NIC in the process that owns it: the owner's own work first, then what borrowers hand over, within a bound; then
//! completions and arrivals go back to whom they belong.

use std::collections::VecDeque;
use std::sync::Arc;

mod lots;
mod posted;

pub use lots::LotKeys;
use posted::{InFlight, Posted};

use crate::borrow::{BadHandover, BorrowerPort};
use crate::doorbell::Class;
use crate::engine::call::Direction;
use crate::engine::immediate::Immediate;
use crate::engine::path::{PathKeeper, PathStep, PathTiming, PathWord};
use crate::engine::slots::{Lot, SlotLayout};
use crate::hw::{HwError, LinkState, Nanos, Nic, NicDevice, NicEvent, PathId, Work, WorkError, WorkOp};
use crate::topo::{Cluster, GpuIdx, NicId, NicIdx, ServerId};
use crate::words::{Ordering, WordSlice, Words};

/// Completions of control words come only when they fail; their cookie is this and the peer's NIC.
const CONTROL_COOKIE: u64 = 1 << 61;

/// What a NIC's owner needs to know.
pub struct OwnedNicConfig {
    /// The job.
    pub cluster: Arc<Cluster>,
    /// This server.
    pub server: ServerId,
    /// This process's GPU.
    pub owner: GpuIdx,
    /// Slots beside the NIC.
    pub slots: SlotLayout,
    /// The lots of the relay memory beside it that are registered with the device.
    pub lots: LotKeys,
    /// Path to each NIC of the job, where one is open.
    pub paths: Vec<Option<PathId>>,
    /// Bytes of borrowers, outside of plans, that may be with the device: the longest that the owner waits for them.
    pub borrow_bytes: u64,
    /// Times for closing and opening paths.
    pub timing: PathTiming,
    /// Where the owners at the other ends of the NIC's paths write their words, by NIC of the job.
    pub path_words: WordSlice,
}

struct Borrower {
    port: BorrowerPort,
    /// Events that found its ring full.
    kept: VecDeque<NicEvent>,
}

/// Payload of a plan moved through the NIC, for the turns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moved {
    /// Which way.
    pub direction: Direction,
    /// The other server.
    pub peer: ServerId,
    /// Payload.
    pub bytes: u64,
}

/// The NIC, its device and its borrowers.
pub struct OwnedNic {
    device: Box<dyn NicDevice>,
    config: OwnedNicConfig,
    borrowers: Vec<Borrower>,
    posted: Posted,
    borrowed_bytes: u64,
    moved: Vec<Moved>,
    events: Vec<NicEvent>,
    keeper: PathKeeper,
    /// Words for the owners at the other ends.
    words: Vec<(NicId, PathWord)>,
    /// Events of the owner's own that came about outside of `poll`.
    own: Vec<NicEvent>,
    looked_at: Nanos,
    counters: PathCounters,
    /// Kept between posts, so that posting allocates nothing.
    batch: Vec<Work>,
}

/// What has happened to a NIC's paths.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct PathCounters {
    /// Paths closed.
    pub closed: u64,
    /// Paths opened again.
    pub opened: u64,
    /// Paths whose device did not drain.
    pub quarantined: u64,
    /// Work that was not done or not known to be done.
    pub failed_work: u64,
    /// Arrivals and completions of paths that had been given up.
    pub late: u64,
}

impl PathCounters {
    /// Of two NICs together.
    pub fn plus(self, other: Self) -> Self {
        Self {
            closed: self.closed + other.closed,
            opened: self.opened + other.opened,
            quarantined: self.quarantined + other.quarantined,
            failed_work: self.failed_work + other.failed_work,
            late: self.late + other.late,
        }
    }
}

impl OwnedNic {
    /// A NIC with its borrowers' rings.
    pub fn new(device: Box<dyn NicDevice>, config: OwnedNicConfig, ports: Vec<BorrowerPort>) -> Self {
        let borrowers = ports.into_iter().map(|port| Borrower { port, kept: VecDeque::new() }).collect();
        let cluster = &config.cluster;
        let peers = config.paths.iter().enumerate().filter(|(_, path)| path.is_some());
        let peers = peers.map(|(n, _)| (NicId(n as u32), cluster.server_of_nic(NicId(n as u32))));
        let keeper = PathKeeper::new(peers, cluster.server_count(), config.timing);
        Self {
            device,
            keeper,
            config,
            borrowers,
            posted: Posted::default(),
            borrowed_bytes: 0,
            moved: Vec::new(),
            events: Vec::new(),
            words: Vec::new(),
            own: Vec::new(),
            looked_at: 0,
            counters: PathCounters::default(),
            batch: Vec::new(),
        }
    }

    /// Words to write to the owners at the other ends of paths since the last call.
    pub fn take_words(&mut self) -> impl Iterator<Item = (NicId, PathWord)> + '_ {
        self.words.drain(..)
    }

    /// Whether the NIC's link carries nothing.
    pub fn is_link_down(&self) -> bool {
        self.keeper.link() == LinkState::Down
    }

    /// What has happened to its paths.
    pub fn path_counters(&self) -> PathCounters {
        self.counters
    }

    /// What moved since the last call.
    pub fn take_moved(&mut self) -> impl Iterator<Item = Moved> + '_ {
        self.moved.drain(..)
    }

    /// Whether nothing is with the device, and no borrower has handed over or is owed anything.
    pub fn is_quiet(&mut self) -> bool {
        let quiet = |b: &mut Borrower| b.kept.is_empty() && matches!(b.port.peek(), Ok(None));
        self.posted.iter().next().is_none() && self.borrowers.iter_mut().all(quiet)
    }

    /// The device, for its counters.
    pub fn device(&self) -> &dyn NicDevice {
        &*self.device
    }

    fn bad(&self, field: &'static str, value: u64) -> HwError {
        HwError::BadWork { nic: self.device.idx(), field, value }
    }

    /// Checks an item from anybody and makes it the device's.
    fn translate(&mut self, work: &Work, borrower: Option<usize>, now: Nanos) -> Result<Work, HwError> {
        let peer = NicId(work.path.0);
        let path = self.config.paths.get(peer.idx()).copied().flatten();
        let path = path.ok_or(self.bad("path", peer.0.into()))?;
        let WorkOp::Write { mut local, remote, imm } = work.op else {
            return Ok(Work { path, cookie: CONTROL_COOKIE | u64::from(peer.0), ..*work });
        };
        let class = Immediate::decode(imm).map(|i| i.class).ok_or(self.bad("immediate", imm.into()))?;
        let gpu = borrower.map_or(self.config.owner, |b| self.borrowers[b].port.gpu);
        if !self.config.slots.is_send_span(class, local.offset, local.bytes) {
            return Err(self.bad("send slot", local.offset));
        }
        let lot = Lot { nic: self.device.idx(), gpu, class };
        local.key = self.config.lots.key(lot).ok_or(self.bad("lot", lot.number() as u64))?;
        let cookie = self.posted.insert(InFlight {
            borrower,
            cookie: work.cookie,
            peer,
            bytes: local.bytes.into(),
            class,
            posted_at: now,
        });
        Ok(Work { path, op: WorkOp::Write { local, remote, imm }, cookie })
    }

    fn post_one(&mut self, work: &Work, borrower: Option<usize>, now: Nanos) -> Result<bool, HwError> {
        let translated = self.translate(work, borrower, now)?;
        let peer = NicId(work.path.0);
        if !self.keeper.is_up(peer) {
            if let Some(item) = self.posted.remove(translated.cookie) {
                self.counters.failed_work += 1;
                let result = Err(WorkError::Refused);
                self.give(item.borrower, NicEvent::Completed { cookie: item.cookie, result });
            }
            return Ok(true); // A control word is lost: whoever wrote it tells it again over another path.
        }
        let taken = self.device.post(&[translated], now)? == 1;
        if !taken {
            self.posted.remove(translated.cookie);
        }
        Ok(taken)
    }

    /// Items whose paths are up go to the device in runs, so that it rings its doorbell once for each run.
    fn post_in_batches(
        &mut self,
        work: &[Work],
        now: Nanos,
        batch: &mut Vec<Work>,
    ) -> Result<usize, HwError> {
        let mut done = 0;
        while done < work.len() {
            batch.clear();
            let mut bad = None;
            for item in &work[done..] {
                if !self.keeper.is_up(NicId(item.path.0)) {
                    break;
                }
                match self.translate(item, None, now) {
                    Ok(item) => batch.push(item),
                    Err(e) => {
                        bad = Some(e);
                        break;
                    }
                }
            }
            if batch.is_empty() && bad.is_none() {
                self.post_one(&work[done], None, now)?; // Refused, and told so.
                done += 1;
                continue;
            }
            let taken = self.device.post(batch, now)?;
            for item in &batch[taken..] {
                self.posted.remove(item.cookie);
            }
            done += taken;
            if taken < batch.len() {
                break;
            }
            if let Some(e) = bad {
                return Err(e);
            }
        }
        Ok(done)
    }

    /// Takes work from borrowers, one item of each in turn, while it is within the bound. True if any was taken.
    ///
    /// # Errors
    /// [`HwError::BadWork`] for what no borrower of this library writes.
    pub fn serve_borrowers(&mut self, now: Nanos) -> Result<bool, HwError> {
        let mut any = false;
        let mut more = true;
        while more {
            more = false;
            for b in 0..self.borrowers.len() {
                more |= self.serve_one(b, now)?;
            }
            any |= more;
        }
        Ok(any)
    }

    fn serve_one(&mut self, b: usize, now: Nanos) -> Result<bool, HwError> {
        let peeked = self.borrowers[b].port.peek();
        let work = match peeked {
            Ok(Some(work)) => work,
            Ok(None) => return Ok(false),
            Err(BadHandover { words, .. }) => return Err(self.bad("borrowed work", words[0])),
        };
        let bounded = bounded_bytes(&work);
        if bounded > 0 && self.borrowed_bytes > 0 && self.borrowed_bytes + bounded > self.config.borrow_bytes
        {
            return Ok(false);
        }
        let open = self.keeper.is_up(NicId(work.path.0));
        if !self.post_one(&work, Some(b), now)? {
            return Ok(false);
        }
        self.borrowed_bytes += if open { bounded } else { 0 };
        self.borrowers[b].port.take();
        Ok(true)
    }

    fn completed(&mut self, cookie: u64, result: Result<(), WorkError>, now: Nanos) -> Result<(), HwError> {
        if cookie & CONTROL_COOKIE != 0 {
            if result.is_err() {
                self.keeper.on_trouble(NicId(cookie as u32), now);
            }
            return Ok(());
        }
        let Some(item) = self.posted.remove(cookie) else {
            if self.counters.quarantined == 0 {
                return Err(self.bad("completion", cookie));
            }
            self.counters.late += 1;
            return Ok(());
        };
        if result.is_err() {
            self.counters.failed_work += 1;
            self.keeper.on_trouble(item.peer, now);
        }
        self.finish(item, result);
        Ok(())
    }

    /// Work has left the device.
    fn finish(&mut self, item: InFlight, result: Result<(), WorkError>) {
        match item.class {
            Class::Plan if result.is_ok() => {
                let peer = self.config.cluster.server_of_nic(item.peer);
                self.moved.push(Moved { direction: Direction::Egress, peer, bytes: item.bytes });
            }
            Class::Plan => {}
            _ if item.borrower.is_some() => self.borrowed_bytes -= item.bytes,
            _ => {}
        }
        self.give(item.borrower, NicEvent::Completed { cookie: item.cookie, result });
    }

    fn arrived(&mut self, from: NicId, imm: u32, bytes: u32) -> Result<(), HwError> {
        if !self.keeper.may_arrive(from) {
            self.counters.late += 1;
            return Ok(()); // Its path was given up: the sender has been told that it did not come.
        }
        let decoded = Immediate::decode(imm).ok_or(self.bad("immediate", imm.into()))?;
        if decoded.class == Class::Plan {
            let peer = self.config.cluster.server_of_nic(from);
            self.moved.push(Moved { direction: Direction::Ingress, peer, bytes: bytes.into() });
        }
        let event = NicEvent::Arrived { from, imm, bytes };
        if decoded.gpu == self.config.owner {
            self.own.push(event);
            return Ok(());
        }
        let to = self.borrowers.iter().position(|b| b.port.gpu == decoded.gpu);
        let to = to.ok_or(self.bad("destination GPU", decoded.gpu.0.into()))?;
        self.give(Some(to), event);
        Ok(())
    }

    /// Hands an event to a borrower, behind those kept for it, or to the owner.
    fn give(&mut self, to: Option<usize>, event: NicEvent) {
        let Some(b) = to else { return self.own.push(event) };
        let borrower = &mut self.borrowers[b];
        if !borrower.kept.is_empty() || borrower.port.give(&event).is_err() {
            borrower.kept.push_back(event);
        }
    }

    fn give_all(&mut self, event: NicEvent) {
        self.own.push(event);
        (0..self.borrowers.len()).for_each(|b| self.give(Some(b), event));
    }

    // ---- paths ----

    /// Hears the other ends, looks for work that never completes, and does what the keeper wants.
    fn keep_paths(&mut self, now: Nanos) -> Result<(), HwError> {
        self.take_steps()?;
        if self.keeper.all_up() && now.saturating_sub(self.looked_at) < self.config.timing.repeat_ns / 4 {
            return Ok(());
        }
        self.looked_at = now;
        self.hear(now);
        self.look_for_overdue_work(now);
        self.take_steps()?; // Paths that close now are fenced before they may be found drained.
        self.look_for_drained_paths(now);
        self.keeper.handle_timeout(now);
        self.take_steps()
    }

    /// A word of another owner that came beside the NICs.
    pub fn on_word(&mut self, peer: NicId, word: u64, now: Nanos) {
        self.keeper.on_word(peer, PathWord::decode(word), now);
    }

    fn hear(&mut self, now: Nanos) {
        for n in 0..self.config.paths.len() {
            // Relaxed: a word says all by itself.
            let word = self.config.path_words.word(n).load(Ordering::Relaxed);
            if word != 0 {
                self.keeper.on_word(NicId(n as u32), PathWord::decode(word), now);
            }
        }
    }

    fn broken(&mut self, path: PathId, now: Nanos) {
        if let Some(n) = self.config.paths.iter().position(|&p| p == Some(path)) {
            self.keeper.on_trouble(NicId(n as u32), now);
        }
    }

    fn look_for_overdue_work(&mut self, now: Nanos) {
        let limit = self.config.timing.completion_ns;
        let overdue = |i: &InFlight| now.saturating_sub(i.posted_at) > limit;
        let peers: Vec<_> = self.posted.iter().filter(|(_, i)| overdue(i)).map(|(_, i)| i.peer).collect();
        peers.into_iter().for_each(|peer| self.keeper.on_trouble(peer, now));
    }

    fn look_for_drained_paths(&mut self, now: Nanos) {
        let draining: Vec<_> = self.keeper.draining().collect();
        for peer in draining {
            let Some(path) = self.config.paths[peer.idx()] else { continue };
            let held = self.posted.iter().any(|(_, i)| i.peer == peer);
            if !held && self.device.is_drained(path) {
                self.keeper.on_drained(peer, now);
            }
        }
    }

    fn take_steps(&mut self) -> Result<(), HwError> {
        while let Some(step) = self.keeper.poll() {
            match step {
                PathStep::Fence(peer) => {
                    self.counters.closed += 1;
                    if let Some(path) = self.config.paths[peer.idx()] {
                        self.device.fence(path)?;
                    }
                }
                PathStep::Reopen(peer) => {
                    if let Some(path) = self.config.paths[peer.idx()] {
                        self.device.reopen(path)?;
                    }
                }
                PathStep::Quarantine(peer) => self.quarantine(peer),
                PathStep::Tell(peer, word) => self.words.push((peer, word)),
                PathStep::News(peer, news) => {
                    self.counters.opened += u64::from(matches!(news, crate::hw::PathNews::Up { .. }));
                    self.give_all(NicEvent::Path { peer, news });
                }
            }
        }
        Ok(())
    }

    /// The device does not answer: its work has failed as far as anybody can tell.
    fn quarantine(&mut self, peer: NicId) {
        self.counters.quarantined += 1;
        let held: Vec<_> =
            self.posted.iter().filter(|(_, i)| i.peer == peer).map(|(cookie, _)| cookie).collect();
        for item in held.into_iter().filter_map(|cookie| self.posted.remove(cookie)).collect::<Vec<_>>() {
            self.counters.failed_work += 1;
            self.finish(item, Err(WorkError::Quarantined));
        }
    }

    fn give_kept(&mut self) {
        for borrower in &mut self.borrowers {
            while let Some(event) = borrower.kept.front() {
                if borrower.port.give(event).is_err() {
                    break;
                }
                borrower.kept.pop_front();
            }
        }
    }
}

/// Bytes that count against the bound: a plan has leased its NICs, and control words are small.
fn bounded_bytes(work: &Work) -> u64 {
    match work.op {
        WorkOp::Write { local, imm, .. } => match Immediate::decode(imm) {
            Some(Immediate { class: Class::Plan, .. }) => 0,
            _ => local.bytes.into(),
        },
        WorkOp::Inline { .. } => 0,
    }
}

/// The owner's own use of it; path numbers are the peers' NIC numbers, as on a borrowed NIC.
impl Nic for OwnedNic {
    fn idx(&self) -> NicIdx {
        self.device.idx()
    }

    fn post(&mut self, work: &[Work], now: Nanos) -> Result<usize, HwError> {
        let mut batch = std::mem::take(&mut self.batch);
        let result = self.post_in_batches(work, now, &mut batch);
        self.batch = batch;
        result
    }

    fn poll(&mut self, now: Nanos, own: &mut Vec<NicEvent>) -> Result<(), HwError> {
        self.give_kept();
        let mut events = std::mem::take(&mut self.events);
        self.device.poll(now, &mut events)?;
        if events.iter().any(|e| matches!(e, NicEvent::Arrived { .. })) {
            self.device.flush()?; // Once per batch, before anybody is told.
        }
        for event in events.drain(..) {
            match event {
                NicEvent::Completed { cookie, result } => self.completed(cookie, result, now)?,
                NicEvent::Arrived { from, imm, bytes } => self.arrived(from, imm, bytes)?,
                NicEvent::Link(link) => {
                    self.give_all(event);
                    self.keeper.on_link(link, now);
                }
                NicEvent::Broken(path) => self.broken(path, now),
                NicEvent::Path { .. } => {}
            }
        }
        self.events = events;
        self.keep_paths(now)?;
        own.append(&mut self.own);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), HwError> {
        self.device.flush()
    }
}
