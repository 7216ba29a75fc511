//! Doorbells: what kernels tell the host. The ring is `ring.rs`; here descriptors become values. Every field is taken
//! as hostile: a kernel is the user's code too.

use crate::abi::{
    FL_CLASSES, FL_MAX_SIGNALS, FL_OP_DRAINED, FL_OP_SEND, FL_SIGNAL_ADD, FL_SIGNAL_BITS, FL_SIGNAL_SET,
};
use crate::topo::NicIdx;

/// Message classes (`FlClass`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Class {
    /// Messages of a schedule.
    Plan = 0,
    /// Calls without a schedule.
    #[default]
    Put = 1,
    /// One-sided puts of users' kernels.
    LowLatency = 2,
}

impl Class {
    /// All of them, in the order of their number.
    pub const ALL: [Self; FL_CLASSES as usize] = [Self::Plan, Self::Put, Self::LowLatency];

    /// The class of a number from a descriptor or an immediate.
    pub fn from_number(n: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(n).ok()?).copied()
    }
}

/// What a message does to a signal of its receiver.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum SignalOp {
    /// Adds to it; sums wrap at 64 bits.
    Add,
    /// Sets it.
    Set,
}

/// A signal that a message carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Signal {
    /// Which of the receiver's signals.
    pub number: u32,
    /// What to do.
    pub op: SignalOp,
    /// With this; 63 bits.
    pub value: u64,
}

impl Signal {
    /// What becomes of a signal's present value.
    pub fn apply(self, present: u64) -> u64 {
        match self.op {
            SignalOp::Add => present.wrapping_add(self.value),
            SignalOp::Set => self.value,
        }
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
        /// What the message does to a signal, besides.
        signal: Option<Signal>,
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
                let signal = decode_signal(words).ok_or(bad("signal", words[0] >> 12))?;
                let queue = (words[0] >> QUEUE_SHIFT) as u32;
                Ok(Self::Send { class, queue, idx: words[1], bytes: words[2], signal })
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
            Self::Send { class, queue, idx, bytes, signal } => {
                let (bits, value) = signal.map_or((0, 0), encode_signal);
                let word0 =
                    u64::from(FL_OP_SEND) | (class as u64) << 8 | u64::from(queue) << QUEUE_SHIFT | bits;
                [word0, idx, bytes, value]
            }
            Self::Drained { class, nic, slot } => {
                [u64::from(FL_OP_DRAINED) | (class as u64) << 8, slot.into(), nic.0.into(), 0]
            }
        }
    }
}

const OP_SHIFT: u32 = 12;
const QUEUE_SHIFT: u32 = 16;
const SIGNAL_SHIFT: u32 = 48;
const _: () = assert!(SIGNAL_SHIFT + FL_SIGNAL_BITS == crate::abi::FL_LAP_SHIFT);

/// `Some(None)`: the descriptor carries no signal. `None`: it carries something that is none.
fn decode_signal(words: [u64; 4]) -> Option<Option<Signal>> {
    let op = (words[0] >> OP_SHIFT) as u32 & 0xf;
    let Some(number) = ((words[0] >> SIGNAL_SHIFT) as u32).checked_sub(1) else {
        return (op == 0 && words[3] == 0).then_some(None);
    };
    let op = match op {
        FL_SIGNAL_ADD => SignalOp::Add,
        FL_SIGNAL_SET => SignalOp::Set,
        _ => return None,
    };
    (number < FL_MAX_SIGNALS).then_some(Some(Signal { number, op, value: words[3] }))
}

/// Its bits of word 0, and its value.
fn encode_signal(signal: Signal) -> (u64, u64) {
    let op = match signal.op {
        SignalOp::Add => FL_SIGNAL_ADD,
        SignalOp::Set => FL_SIGNAL_SET,
    };
    (u64::from(signal.number + 1) << SIGNAL_SHIFT | u64::from(op) << OP_SHIFT, signal.value)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_signal() -> impl Strategy<Value = Option<Signal>> {
        let op = prop_oneof![Just(SignalOp::Add), Just(SignalOp::Set)];
        let signal = (0..FL_MAX_SIGNALS, op, 0..1u64 << 63);
        proptest::option::of(signal.prop_map(|(number, op, value)| Signal { number, op, value }))
    }

    proptest! {
        #[test]
        fn any_words_decode_or_are_refused(words in any::<[u64; 4]>(), op in 0u64..4, signal in 0u64..3) {
            let plausible = [op | signal << SIGNAL_SHIFT | (words[0] & 0xffff_ffff_f100), words[1], words[2], words[3]];
            for words in [words, plausible] {
                if let Ok(d) = Doorbell::decode(words) {
                    prop_assert_eq!(Doorbell::decode(d.encode()), Ok(d));
                }
            }
        }

        #[test]
        fn sends_survive_the_ring(queue in any::<u32>(), idx in 0..1u64 << 63, bytes in 0..1u64 << 63, signal in any_signal()) {
            let d = Doorbell::Send { class: Class::Put, queue, idx, bytes, signal };
            let words = d.encode();
            prop_assert!(words.iter().all(|w| w >> 63 == 0), "the lap bit is the ring's");
            prop_assert_eq!(Doorbell::decode(words), Ok(d));
        }
    }

    #[test]
    fn offsets_past_4_gib_survive() {
        let d =
            Doorbell::Send { class: Class::Put, queue: 70_000, idx: 1 << 40, bytes: 1 << 35, signal: None };
        assert_eq!(Doorbell::decode(d.encode()), Ok(d));
    }
}
