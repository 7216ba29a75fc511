//! Memory for streams within a server: `FlLocalEnd` and what follows it, on every GPU of the server. Kernels alone use it
//! (`kernels/local.cuh`); the host says where it is.

use super::StreamConfig;
use crate::abi::{FL_LOCAL_DEPTH, FlLocalEnd};

/// Where the parts lie, in bytes from the start; the same on every GPU of a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct LocalLayout {
    pub(super) signals: u64,
    pub(super) slots: u64,
    /// In all; 0: ranks of the server have no streams.
    pub(super) bytes: u64,
}

/// What the memory starts at, and each slot when its size is such a multiple.
pub(super) const ALIGN: u64 = 128;

impl LocalLayout {
    pub(super) fn new(streams: &StreamConfig) -> Self {
        let ranks = u64::from(streams.local_ranks);
        if ranks == 0 {
            return Self::default();
        }
        let signals = ranks * size_of::<FlLocalEnd>() as u64;
        let slots = (signals + 8 * u64::from(streams.signals)).next_multiple_of(ALIGN);
        let slot_bytes = u64::from(streams.local_depth) * u64::from(streams.local_slot_bytes);
        Self { signals, slots, bytes: slots + ranks * slot_bytes }
    }
}

/// Places of a stream, as many as the layout has.
pub const LOCAL_DEPTH: u32 = FL_LOCAL_DEPTH;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_ranks_there_is_no_memory() {
        assert_eq!(LocalLayout::new(&StreamConfig { signals: 9, ..StreamConfig::default() }).bytes, 0);
    }

    #[test]
    fn parts_follow_each_other() {
        let streams = StreamConfig {
            signals: 5,
            local_ranks: 3,
            local_depth: 4,
            local_slot_bytes: 192,
            ..StreamConfig::default()
        };
        let layout = LocalLayout::new(&streams);
        assert_eq!(layout.signals, 3 * size_of::<FlLocalEnd>() as u64);
        assert!(layout.slots >= layout.signals + 5 * 8 && layout.slots.is_multiple_of(ALIGN));
        assert_eq!(layout.bytes, layout.slots + 3 * 4 * 192);
    }
}
