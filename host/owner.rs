//! A NIC in the process that owns it: the owner's own work first, then what borrowers hand over, within a bound; then
//! completions and arrivals go back to whom they belong.

use std::sync::Arc;

mod borrowers;
mod lots;
mod paths;
mod posted;
mod posting;
mod service;
#[cfg(test)]
mod tests;

pub use lots::LotKeys;
pub use paths::PathCounters;

use borrowers::Borrowers;
use posted::{InFlight, Posted};
use service::Round;

use crate::borrow::{BorrowerPort, RingCounters};
use crate::doorbell::Class;
use crate::engine::call::Direction;
use crate::engine::immediate::Immediate;
use crate::engine::path::{PathKeeper, PathTiming, PathWord};
use crate::engine::slots::SlotLayout;
use crate::hw::{HwError, LinkState, Nanos, Nic, NicDevice, NicEvent, PathId, Work, WorkError};
use crate::topo::{Cluster, GpuIdx, NicId, NicIdx, ServerId};
use crate::words::WordSlice;

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
    /// Bytes of borrowers' calls outside of plans that may be with the device, and of their one-sided puts a quarter as many:
    /// together the longest that the owner waits for them.
    pub borrow_bytes: u64,
    /// Times for closing and opening paths.
    pub timing: PathTiming,
    /// Where the owners at the other ends of the NIC's paths write their words, by NIC of the job.
    pub path_words: WordSlice,
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
    borrowers: Borrowers,
    posted: Posted,
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
    round: Round,
}

impl OwnedNic {
    /// A NIC with its borrowers' rings.
    pub fn new(device: Box<dyn NicDevice>, config: OwnedNicConfig, ports: Vec<BorrowerPort>) -> Self {
        let borrowers = Borrowers::new(ports, config.borrow_bytes, config.paths.len());
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
            moved: Vec::new(),
            events: Vec::new(),
            words: Vec::new(),
            own: Vec::new(),
            looked_at: 0,
            counters: PathCounters::default(),
            batch: Vec::new(),
            round: Round::default(),
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

    /// What went through the rings of its borrowers.
    pub fn ring_counters(&self) -> RingCounters {
        self.borrowers.counters()
    }

    /// Whether nothing is with the device, and no borrower has handed over or is owed anything.
    pub fn is_quiet(&self) -> bool {
        self.posted.iter().next().is_none() && self.borrowers.are_quiet()
    }

    /// The device, for its counters.
    pub fn device(&self) -> &dyn NicDevice {
        &*self.device
    }

    fn bad(&self, field: &'static str, value: u64) -> HwError {
        HwError::BadWork { nic: self.device.idx(), field, value }
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
        if item.class == Class::Plan && result.is_ok() {
            let peer = self.config.cluster.server_of_nic(item.peer);
            self.moved.push(Moved { direction: Direction::Egress, peer, bytes: item.bytes });
        }
        if item.borrower.is_some() {
            self.borrowers.release(item.class.into(), item.bytes);
        }
        self.give(item.borrower, item.class, NicEvent::Completed { cookie: item.cookie, result });
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
        let to = self.borrowers.of_gpu(decoded.gpu);
        let to = to.ok_or(self.bad("destination GPU", decoded.gpu.0.into()))?;
        self.borrowers.give(to, decoded.class, event);
        Ok(())
    }

    /// Hands an event of a class to a borrower, or to the owner.
    fn give(&mut self, to: Option<usize>, class: Class, event: NicEvent) {
        match to {
            Some(b) => self.borrowers.give(b, class, event),
            None => self.own.push(event),
        }
    }

    fn tell_all(&mut self, news: NicEvent) {
        self.own.push(news);
        self.borrowers.tell_all(news);
    }
}

/// The owner's own use of it; path numbers are the peers' NIC numbers, as on a borrowed NIC.
impl Nic for OwnedNic {
    fn idx(&self) -> NicIdx {
        self.device.idx()
    }

    fn post(&mut self, work: &[Work], now: Nanos) -> Result<usize, HwError> {
        let mut batch = std::mem::take(&mut self.batch);
        let result = self.post_own(work, now, &mut batch);
        self.batch = batch;
        result
    }

    fn poll(&mut self, now: Nanos, own: &mut Vec<NicEvent>) -> Result<(), HwError> {
        self.borrowers.give_kept();
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
                    self.tell_all(event);
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
