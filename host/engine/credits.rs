//! Credits that a sender holds, and what it knows of those it has spent.

use super::call::CallId;
use super::route::NicState;
use super::sender::Message;
use super::{Answer, LINE_SLOTS, Lent, Returned};
use crate::topo::NicIdx;

/// Credits that stand at this rank for one receiver, class and ingress NIC.
#[derive(Debug, Default, Clone)]
pub(super) struct Credits {
    /// Few, oldest first.
    pub(super) slots: Vec<Lent>,
    /// What the receiver last said of its NIC, and for which call: it may be ahead of this rank.
    pub(super) state: (CallId, NicState),
    /// What it last said of messages that came.
    pub(super) answer: Answer,
    /// What came back unused of the last recall.
    pub(super) returned: Returned,
    /// By slot of the line: one past the position of the newest credit received.
    newest: [u64; LINE_SLOTS],
}

impl Credits {
    /// Place of the first slot for messages of a transfer (or outside of any) of its own NIC, or of another.
    pub(super) fn position(&self, transfer: Option<u32>, instead_of: Option<NicIdx>) -> Option<usize> {
        self.slots.iter().position(|lent| lent.transfer == transfer && lent.instead_of == instead_of)
    }

    pub(super) fn serves(&self, transfer: Option<u32>, instead_of: Option<NicIdx>) -> bool {
        self.position(transfer, instead_of).is_some()
    }

    /// Whether any stands for another NIC than its own.
    pub(super) fn stand_for_others(&self) -> bool {
        self.slots.iter().any(|lent| lent.instead_of.is_some())
    }

    /// How many stand.
    pub(super) fn held(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn take(&mut self, transfer: Option<u32>, instead_of: Option<NicIdx>) -> Option<Lent> {
        let at = self.position(transfer, instead_of)?;
        Some(self.slots.remove(at))
    }

    /// For a message that may spend any: one of its own if there is one, else the oldest.
    pub(super) fn take_any(&mut self, transfer: Option<u32>, instead_of: Option<NicIdx>) -> Option<Lent> {
        let at = self.position(transfer, instead_of).or((!self.slots.is_empty()).then_some(0))?;
        Some(self.slots.remove(at))
    }

    /// A credit came. True if it goes straight back.
    #[must_use]
    pub(super) fn receive(&mut self, lent: Lent, line_slot: usize) -> bool {
        self.newest[line_slot] = lent.position + 1;
        self.put(lent, line_slot)
    }

    /// Whether the message that spent a credit of this line has come; `None`: this rank has not been told yet.
    ///
    /// A slot that was lent again has been used, unless its credit was called in: whoever hears of that settles first.
    pub(super) fn has_come(&self, message: &Message, line_slot: usize, fence: Option<u32>) -> Option<bool> {
        if message.come.is_some() {
            return message.come;
        }
        if self.newest[line_slot] > message.lent.position + 1 {
            return Some(true);
        }
        let answered = fence.is_some_and(|fence| self.answer.fence >= fence);
        answered.then(|| self.answer.has_come(line_slot, message.lent.epoch))
    }

    /// A credit that may be spent, unless it was called in. True if it was recalled: its receiver is to be told that it came
    /// back.
    #[must_use]
    pub(super) fn put(&mut self, lent: Lent, line_slot: usize) -> bool {
        if lent.position < self.answer.called_in_before {
            return false;
        }
        if lent.position < self.returned.before {
            self.returned.slots |= 1 << line_slot;
            return true;
        }
        self.slots.push(lent);
        false
    }

    /// Credits before a position are asked back. True if any that this rank holds goes.
    #[must_use]
    pub(super) fn recall(&mut self, before: u64, line_slot: impl Fn(&Lent) -> usize) -> bool {
        if before <= self.returned.before {
            return false;
        }
        self.returned = Returned { before, slots: 0 };
        let mut slots = 0;
        self.slots.retain(|lent| {
            let goes = lent.position < before;
            slots |= if goes { 1 << line_slot(lent) } else { 0 };
            !goes
        });
        self.returned.slots = slots;
        slots != 0
    }

    /// False for an answer that is older than the one held.
    pub(super) fn learn(&mut self, answer: Answer) -> bool {
        if answer.fence < self.answer.fence {
            return false;
        }
        self.answer = answer;
        self.slots.retain(|lent| lent.position >= answer.called_in_before);
        true
    }
}
