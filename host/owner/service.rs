//! In what order borrowers' work is posted.
//!
//! The owner's proxy posts its own work, then serves borrowers, once per round; it never waits for one. A round goes through the
//! lanes in their order. In a lane borrowers take turns, an item each, beginning with the one whose turn it was when the round
//! before ended, until none of them has work that may go or each has had [`SHARE`] items. What a lane's turns give goes to the
//! device in one batch, in that order.
//!
//! - *The owner's wait is bounded.* Between two rounds at most [`SHARE`] items of each borrower and lane are posted, and of calls
//!   outside of plans and puts no more bytes are with the device than their bounds, or a single message (a plan has leased
//!   the NIC).
//! - *So is a lane's.* It is served in every round, whatever the others hold. Work that may not go (its lane's bytes are with the
//!   device, or the device has no room) is left in its ring, where only work of its own lane is behind it.
//! - *So is a borrower's.* While its next item may go, no other one gets two items further in that lane: one whose turn it is
//!   keeps it while it waits for bytes of its lane to leave the device, so that the short messages of others do not overtake a
//!   long one for ever. Where the device has no room on the path of one, the others go on.

use super::OwnedNic;
use super::posting::peer_of;
use crate::borrow::BadHandover;
use crate::hw::{HwError, Lane, Nanos, Work, WorkOp};

/// Items of a borrower in one lane and round: a message of every path for any plan, and few enough for the owner.
pub(super) const SHARE: u64 = 32;

/// A lane's part of a round; kept, so that it allocates nothing.
#[derive(Default)]
pub(super) struct Round {
    /// By borrower: items that it may still hand over.
    left: Vec<u64>,
    /// By borrower: its items in the batch, which are still in its ring.
    ahead: Vec<u64>,
    batch: Vec<Work>,
    /// By item of the batch: the borrower.
    whose: Vec<usize>,
    /// The first that found no room on its path.
    stuck: Option<usize>,
}

impl Round {
    fn begin(&mut self, borrowers: usize) {
        self.left.clear();
        self.left.resize(borrowers, SHARE);
        self.stuck = None;
    }

    fn begin_batch(&mut self) {
        self.ahead.clear();
        self.ahead.resize(self.left.len(), 0);
        self.batch.clear();
        self.whose.clear();
    }

    fn add(&mut self, b: usize, work: Work) {
        self.batch.push(work);
        self.whose.push(b);
        self.ahead[b] += 1;
    }
}

/// What was met while a batch was made.
#[derive(Clone, Copy, Default)]
struct Gathered {
    /// Work whose path is closed.
    refused: bool,
    /// The one whose turn it is has to wait for bytes to leave the device.
    too_much: bool,
}

/// What a borrower has to post.
enum Next {
    Nothing,
    Work(Work),
    /// Its path is closed; it was told so.
    Refused,
    /// Not while so much of its lane is with the device.
    TooMuch,
}

impl OwnedNic {
    /// Posts what borrowers have handed over: a round. True if there was anything.
    ///
    /// # Errors
    /// [`HwError::BadWork`] for what no borrower of this library writes.
    pub fn serve_borrowers(&mut self, now: Nanos) -> Result<bool, HwError> {
        let mut round = std::mem::take(&mut self.round);
        let mut any = false;
        for lane in Lane::ALL {
            round.begin(self.borrowers.len());
            any |= self.serve_lane(lane, &mut round, now)?;
        }
        self.round = round;
        Ok(any)
    }

    fn serve_lane(&mut self, lane: Lane, round: &mut Round, now: Nanos) -> Result<bool, HwError> {
        let mut any = false;
        loop {
            let gathered = self.gather(lane, round, now)?;
            any |= gathered.refused;
            let taken = if round.batch.is_empty() { 0 } else { self.device.post(&round.batch, now)? };
            any |= taken > 0;
            self.settle(lane, round, taken);
            // What the device did not take leaves bytes to others.
            if taken == round.batch.len() && (taken == 0 || gathered.too_much) {
                self.end_lane(lane, round, gathered.too_much);
                return Ok(any);
            }
        }
    }

    /// The device took the first `taken` items of a batch.
    fn settle(&mut self, lane: Lane, round: &mut Round, taken: usize) {
        self.take_back(&round.batch[taken..]);
        for &b in &round.whose[..taken] {
            self.borrowers.take(b, lane);
            round.left[b] -= 1;
        }
        if let Some(&b) = round.whose.get(taken) {
            round.left[b] = 0; // The path of its next item has no room.
            round.stuck.get_or_insert(b);
        }
    }

    /// Who found no room is first in the next round.
    fn end_lane(&mut self, lane: Lane, round: &Round, too_much: bool) {
        if let Some(b) = round.stuck {
            self.borrowers.set_turn(lane, b);
        }
        if too_much || round.stuck.is_some() {
            self.borrowers.has_to_wait(lane);
        }
    }

    /// Makes the next batch of a lane.
    fn gather(&mut self, lane: Lane, round: &mut Round, now: Nanos) -> Result<Gathered, HwError> {
        round.begin_batch();
        let borrowers = self.borrowers.len();
        let mut b = self.borrowers.turn(lane);
        let (mut gathered, mut idle) = (Gathered::default(), 0);
        while idle < borrowers {
            idle += 1;
            match self.next_of(b, lane, round, now)? {
                Next::Nothing => {}
                Next::Work(work) => {
                    round.add(b, work);
                    idle = 0;
                }
                Next::Refused => {
                    round.left[b] -= 1;
                    (gathered.refused, idle) = (true, 0);
                }
                Next::TooMuch => {
                    gathered.too_much = true;
                    break;
                }
            }
            b = (b + 1) % borrowers;
        }
        self.borrowers.set_turn(lane, b);
        Ok(gathered)
    }

    fn next_of(&mut self, b: usize, lane: Lane, round: &Round, now: Nanos) -> Result<Next, HwError> {
        let ahead = round.ahead[b];
        if ahead >= round.left[b] {
            return Ok(Next::Nothing);
        }
        let handover = match self.borrowers.peek(b, lane, ahead) {
            Ok(Some(handover)) => handover,
            Ok(None) => return Ok(Next::Nothing),
            Err(BadHandover { words, .. }) => return Err(self.bad("borrowed work", words[0])),
        };
        let (work, peer) = (handover.work, peer_of(&handover.work));
        if !self.keeper.is_up(peer) || !self.borrowers.knows_path(peer, handover.heard) {
            if ahead > 0 {
                return Ok(Next::Nothing); // What it handed over before comes first.
            }
            self.refuse(&work, Some(b))?;
            self.borrowers.take(b, lane);
            return Ok(Next::Refused);
        }
        if matches!(work.op, WorkOp::Write { local, .. } if !self.borrowers.has_share(lane, local.bytes.into()))
        {
            return Ok(Next::TooMuch);
        }
        Ok(Next::Work(self.translate(&work, Some(b), now)?))
    }
}
