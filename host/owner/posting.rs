//! Work on its way to the device: checked, made the device's, or refused where its path is closed.

use super::posted::InFlight;
use super::{CONTROL_COOKIE, OwnedNic};
use crate::doorbell::Class;
use crate::engine::immediate::Immediate;
use crate::engine::slots::Lot;
use crate::hw::{HwError, Lane, LocalSpan, Nanos, NicEvent, PathId, Work, WorkError, WorkOp};
use crate::topo::NicId;

/// The NIC at the other end: borrowers and owners name paths by it.
pub(super) fn peer_of(work: &Work) -> NicId {
    NicId(work.path.0)
}

impl OwnedNic {
    /// Checks every field of an item from anybody; its path, and the class of a message.
    fn check(&self, work: &Work) -> Result<(PathId, Option<Class>), HwError> {
        let peer = peer_of(work);
        let path = self.config.paths.get(peer.idx()).copied().flatten();
        let path = path.ok_or(self.bad("path", peer.0.into()))?;
        match work.op {
            WorkOp::Write { local, imm, .. } => {
                let class = self.check_message(work.lane, local, imm)?;
                Ok((path, Some(class)))
            }
            WorkOp::Inline { .. } if matches!(work.lane, Lane::Control | Lane::LowLatency) => {
                Ok((path, None))
            }
            WorkOp::Inline { .. } => Err(self.bad("lane", work.lane as u64)),
        }
    }

    fn check_message(&self, lane: Lane, local: LocalSpan, imm: u32) -> Result<Class, HwError> {
        let class = Immediate::decode(imm).ok_or(self.bad("immediate", imm.into()))?.class;
        if lane != class.into() {
            return Err(self.bad("lane", lane as u64));
        }
        if !self.config.slots.is_send_span(class, local.offset, local.bytes) {
            return Err(self.bad("send slot", local.offset));
        }
        Ok(class)
    }

    /// Makes an item the device's.
    pub(super) fn translate(
        &mut self,
        work: &Work,
        borrower: Option<usize>,
        now: Nanos,
    ) -> Result<Work, HwError> {
        let (path, class) = self.check(work)?;
        let peer = peer_of(work);
        let (WorkOp::Write { mut local, remote, imm }, Some(class)) = (work.op, class) else {
            return Ok(Work { path, cookie: CONTROL_COOKIE | u64::from(peer.0), ..*work });
        };
        let gpu = borrower.map_or(self.config.owner, |b| self.borrowers.gpu(b));
        let lot = Lot { nic: self.device.idx(), gpu, class };
        let (part, offset) = self.config.slots.part_of(class, local.offset);
        let number = self.config.slots.part_number(lot, part) as u64;
        local.key = self.config.lots.key(lot, part).ok_or(self.bad("lot", number))?;
        local.offset = offset;
        let bytes = local.bytes.into();
        if borrower.is_some() {
            self.borrowers.hold(work.lane, bytes);
        }
        let item = InFlight { borrower, cookie: work.cookie, peer, bytes, class, posted_at: now };
        let cookie = self.posted.insert(item);
        Ok(Work { path, op: WorkOp::Write { local, remote, imm }, cookie, ..*work })
    }

    /// The device had no room for items that were translated.
    pub(super) fn take_back(&mut self, work: &[Work]) {
        for item in work.iter().filter_map(|w| self.posted.remove(w.cookie)).collect::<Vec<_>>() {
            if item.borrower.is_some() {
                self.borrowers.release(item.class.into(), item.bytes);
            }
        }
    }

    /// The item's path is closed: a message was never sent, and a control word is lost: whoever wrote it tells it again over
    /// another path.
    pub(super) fn refuse(&mut self, work: &Work, borrower: Option<usize>) -> Result<(), HwError> {
        if let (_, Some(class)) = self.check(work)? {
            self.counters.failed_work += 1;
            let result = Err(WorkError::Refused);
            self.give(borrower, class, NicEvent::Completed { cookie: work.cookie, result });
        }
        Ok(())
    }

    /// The owner's own items whose paths are up go to the device in runs, so that it rings its doorbell once for each run.
    pub(super) fn post_own(
        &mut self,
        work: &[Work],
        now: Nanos,
        batch: &mut Vec<Work>,
    ) -> Result<usize, HwError> {
        let mut done = 0;
        while done < work.len() {
            if !self.keeper.is_up(peer_of(&work[done])) {
                self.refuse(&work[done], None)?;
                done += 1;
                continue;
            }
            batch.clear();
            let bad = self.translate_run(&work[done..], now, batch).err();
            let taken = self.device.post(batch, now)?;
            self.take_back(&batch[taken..]);
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

    /// Up to the first item whose path is closed, or that is bad.
    fn translate_run(&mut self, work: &[Work], now: Nanos, batch: &mut Vec<Work>) -> Result<(), HwError> {
        for item in work {
            if !self.keeper.is_up(peer_of(item)) {
                break;
            }
            batch.push(self.translate(item, None, now)?);
        }
        Ok(())
    }
}
