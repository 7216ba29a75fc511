//! The NICs of the server as one rank reaches them, and its work that they had no room for.

use std::collections::VecDeque;

use super::ProxyError;
use super::rounds::Rounds;
use crate::borrow::{BorrowedNic, RingCounters};
use crate::hw::{HwError, Lane, Nanos, Nic, Work, WorkError, WorkOp};
use crate::owner::OwnedNic;
use crate::topo::{NicId, NicIdx};

/// A NIC of the server, as this rank reaches it.
pub enum Port {
    /// This rank owns it.
    Owned(Box<OwnedNic>),
    /// Another rank does.
    Borrowed(Box<BorrowedNic>),
    /// It is down.
    Down,
}

impl Port {
    fn post(&mut self, work: &[Work], now: Nanos) -> Result<usize, HwError> {
        match self {
            Self::Owned(nic) => nic.post(work, now),
            Self::Borrowed(nic) => nic.post(work, now),
            Self::Down => Ok(0),
        }
    }

    pub(super) fn ring_counters(&self) -> RingCounters {
        match self {
            Self::Owned(nic) => nic.ring_counters(),
            Self::Borrowed(nic) => RingCounters { handed_over: nic.counts(), ..RingCounters::default() },
            Self::Down => RingCounters::default(),
        }
    }
}

/// Work for one NIC, in order; a lane that finds no room keeps no other one waiting.
#[derive(Default)]
pub(super) struct Backlog([VecDeque<Work>; Lane::COUNT]);

impl Backlog {
    pub(super) fn push(&mut self, work: Work) {
        self.0[work.lane as usize].push_back(work);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(VecDeque::is_empty)
    }

    fn post(&mut self, port: &mut Port, now: Nanos) -> Result<bool, HwError> {
        let mut any = false;
        for lane in self.0.iter_mut().filter(|lane| !lane.is_empty()) {
            let taken = port.post(lane.make_contiguous(), now)?;
            lane.drain(..taken);
            any |= taken > 0;
        }
        Ok(any)
    }

    /// Takes out what was to go to `peer`.
    fn take(&mut self, peer: NicId) -> Vec<Work> {
        let mut out = Vec::new();
        for lane in &mut self.0 {
            out.extend(lane.iter().filter(|work| work.path.0 == peer.0));
            lane.retain(|work| work.path.0 != peer.0);
        }
        out
    }
}

impl Rounds {
    /// Work is posted at the time it is posted, not at that of the round's beginning: a device may reckon from it.
    pub(super) fn post_backlog(&mut self) -> Result<bool, ProxyError> {
        let now = self.now();
        let mut any = false;
        for (port, backlog) in self.p.ports.iter_mut().zip(&mut self.backlog) {
            any |= backlog.post(port, now)?;
        }
        Ok(any)
    }

    /// After the owner's own work.
    pub(super) fn serve_borrowers(&mut self) -> Result<bool, ProxyError> {
        let now = self.now();
        let mut any = false;
        for port in &mut self.p.ports {
            if let Port::Owned(nic) = port {
                any |= nic.serve_borrowers(now)?;
            }
        }
        Ok(any)
    }

    /// A path was closed: what was to go over it must not go when it is opened again, for then other credits count. Control
    /// words are told again over another path.
    pub(super) fn refuse_backlog(&mut self, nic: NicIdx, peer: NicId, now: Nanos) -> Result<(), ProxyError> {
        for work in self.backlog[nic.idx()].take(peer) {
            if let WorkOp::Write { .. } = work.op {
                self.p.engine.on_completed(work.cookie, Err(WorkError::Refused), now)?;
            }
        }
        Ok(())
    }
}
