//! Doorbells: what kernels tell the host. The ring is `ring.rs`; here descriptors become values. Every field is taken
//! as hostile: a kernel is the user's code too.

use crate::abi::{FL_CLASSES, FL_OP_DRAINED, FL_OP_SEND};
use crate::topo::NicIdx;

/// Message classes (`FlClass`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Class {
    /// Messages of a schedule.
    Plan = 0,
    /// Everything else.
    #[default]
    Put = 1,
}

impl Class {
    /// All of them, in the order of their number.
    pub const ALL: [Self; FL_CLASSES as usize] = [Self::Plan, Self::Put];

    /// The class of a number from a descriptor or an immediate.
    pub fn from_number(n: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(n).ok()?).copied()
    }
}

/// A descriptor, decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Doorbell {
    /// The armed slot at place `idx` of a queue is filled.
    Send {
        /// Class of the message.
        class: Class,
        /// Queue of armed slots.
        queue: u32,
        /// Place in it.
        idx: u64,
        /// Payload bytes.
        bytes: u64,
    },
    /// An arrived slot has been read.
    Drained {
        /// Class of the slot.
        class: Class,
        /// NIC it is beside.
        nic: NicIdx,
        /// Slot number.
        slot: u32,
    },
}

/// A descriptor that no kernel of this library writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("doorbell with a bad {field} {value} (words {words:x?}); a kernel has overwritten the ring")]
pub struct BadDoorbell {
    /// Which field.
    pub field: &'static str,
    /// What it said.
    pub value: u64,
    /// The whole descriptor.
    pub words: [u64; 4],
}

impl Doorbell {
    /// Decodes the four words of a descriptor, lap bits removed.
    ///
    /// # Errors
    /// [`BadDoorbell`] for an unknown operation or class, or a number out of its range.
    pub fn decode(words: [u64; 4]) -> Result<Self, BadDoorbell> {
        let bad = |field, value| BadDoorbell { field, value, words };
        let class_number = words[0] >> 8 & 0xf;
        let class = Class::from_number(class_number).ok_or(bad("class", class_number))?;
        match words[0] as u32 & 0xff {
            FL_OP_SEND => {
                Ok(Self::Send { class, queue: (words[0] >> 16) as u32, idx: words[1], bytes: words[2] })
            }
            FL_OP_DRAINED => {
                let nic = u16::try_from(words[2]).map_err(|_| bad("NIC", words[2]))?;
                let slot = u32::try_from(words[1]).map_err(|_| bad("slot", words[1]))?;
                Ok(Self::Drained { class, nic: NicIdx(nic.into()), slot })
            }
            op => Err(bad("operation", op.into())),
        }
    }

    /// The words that `kernels/doorbell.cuh` writes for this descriptor.
    pub fn encode(self) -> [u64; 4] {
        match self {
            Self::Send { class, queue, idx, bytes } => {
                [u64::from(FL_OP_SEND) | (class as u64) << 8 | u64::from(queue) << 16, idx, bytes, 0]
            }
            Self::Drained { class, nic, slot } => {
                [u64::from(FL_OP_DRAINED) | (class as u64) << 8, slot.into(), nic.0.into(), 0]
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_words_decode_or_are_refused(words in any::<[u64; 4]>()) {
            if let Ok(d) = Doorbell::decode(words) {
                prop_assert_eq!(Doorbell::decode(d.encode()), Ok(d));
            }
        }
    }

    #[test]
    fn offsets_past_4_gib_survive() {
        let d = Doorbell::Send { class: Class::Put, queue: 70_000, idx: 1 << 40, bytes: 1 << 35 };
        assert_eq!(Doorbell::decode(d.encode()), Ok(d));
    }
}
