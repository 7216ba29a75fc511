//! Credits that senders return unused: a word per receiver, class, sender and NIC in the segment of the receiver's server.

use crate::doorbell::Class;
use crate::engine::Returned;
use crate::segment::SegmentLayout;
use crate::topo::{Cluster, GpuIdx, NicIdx, Rank};
use crate::words::{Ordering, WordSlice, Words};

/// The recall in the upper bits, a bit for each slot in the lowest 8. Zero says nothing: nothing is recalled before position 0.
pub(super) fn encode(returned: Returned) -> u64 {
    returned.before << 8 | u64::from(returned.slots)
}

fn decode(word: u64) -> Returned {
    Returned { before: word >> 8, slots: word as u8 }
}

/// What senders return to one receiver.
pub struct ReturnInbox {
    words: WordSlice,
    layout: SegmentLayout,
    receiver: GpuIdx,
}

impl ReturnInbox {
    /// The words of a receiver in its server's segment.
    pub fn new(words: WordSlice, cluster: &Cluster, receiver: Rank) -> Self {
        let layout = SegmentLayout::new(cluster, cluster.server_of(receiver));
        Self { words, layout, receiver: cluster.gpu_of(receiver) }
    }

    /// What a sender said last. Relaxed: the word says all by itself.
    pub fn of(&self, class: Class, sender: Rank, nic: NicIdx) -> Returned {
        decode(
            self.words.word(self.layout.return_at(self.receiver, class, sender, nic)).load(Ordering::Relaxed),
        )
    }
}
