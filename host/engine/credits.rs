//! Credits that a sender holds, and what it knows of those it has spent.

use std::collections::VecDeque;

use super::call::CallId;
use super::route::NicState;
use super::sender::Message;
use super::{Answer, LINE_SLOTS, Lent};
use crate::topo::NicIdx;

/// Credits that stand at this rank for one receiver, class and ingress NIC.
#[derive(Debug, Default, Clone)]
pub(super) struct Credits {
    pub(super) slots: VecDeque<Lent>,
    /// What the receiver last said of its NIC, and for which call: it may be ahead of this rank.
    pub(super) state: (CallId, NicState),
    /// What it last said of messages that came.
    pub(super) answer: Answer,
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

    /// How many stand.
    pub(super) fn held(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn take(&mut self, transfer: Option<u32>, instead_of: Option<NicIdx>) -> Option<Lent> {
        let at = self.position(transfer, instead_of)?;
        self.slots.remove(at)
    }

    /// A credit came.
    pub(super) fn receive(&mut self, lent: Lent, line_slot: usize) {
        self.newest[line_slot] = lent.position + 1;
        self.put(lent);
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

    /// Credits that were called in are not used any more.
    pub(super) fn put(&mut self, lent: Lent) {
        if lent.position >= self.answer.called_in_before {
            self.slots.push_back(lent);
        }
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
