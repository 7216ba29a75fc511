//! Why an engine cannot go on, and what it waited for.

use std::fmt;

use super::call::CallId;
use crate::hw::{Nanos, WorkError};
use crate::topo::{NicIdx, Rank};

/// What a rank waits for: the subject of a time-out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitsFor {
    /// A completion of a NIC.
    Completion {
        /// The NIC.
        nic: NicIdx,
        /// Destination.
        dst: Rank,
        /// Its NIC.
        dst_nic: NicIdx,
        /// The send slot.
        slot: u32,
    },
    /// A kernel that should fill an armed slot.
    Kernel {
        /// The queue.
        queue: u32,
        /// The place in it.
        idx: u64,
        /// The NIC.
        nic: NicIdx,
        /// The send slot.
        slot: u32,
    },
    /// Any NIC that may be used.
    Route {
        /// Destination.
        dst: Rank,
    },
    /// A transfer's turn.
    Turn {
        /// Destination.
        dst: Rank,
        /// The transfer; `None`: for its owner to come to the call.
        transfer: Option<u32>,
        /// The NIC.
        egress: NicIdx,
    },
    /// A free send slot.
    SendSlot {
        /// Destination.
        dst: Rank,
        /// The NIC.
        egress: NicIdx,
    },
    /// A credit of the destination.
    Credit {
        /// Destination.
        dst: Rank,
        /// The NIC.
        egress: NicIdx,
        /// The destination's; `None`: any of them.
        ingress: Option<NicIdx>,
    },
    /// Both ends of a failed path to be closed.
    Fence {
        /// The NIC.
        egress: NicIdx,
        /// Destination of a message that was on it.
        dst: Rank,
        /// Its NIC.
        dst_nic: NicIdx,
    },
    /// A receiver to say which messages came before a path was closed.
    Answer {
        /// The receiver.
        dst: Rank,
        /// Its NIC.
        dst_nic: NicIdx,
        /// Number of the fence.
        fence: u32,
    },
    /// Another way for a message whose path failed: an open path, a credit and a free slot.
    Detour {
        /// Destination.
        dst: Rank,
        /// Sequence.
        seq: u64,
        /// The NIC beside which it lies.
        lies_at: NicIdx,
    },
    /// Messages of a peer.
    Arrival {
        /// The peer.
        src: Rank,
        /// Messages that have come.
        arrived: u64,
        /// Messages due.
        expected: u64,
        /// A NIC on which credits are still held back.
        uncredited: Option<NicIdx>,
        /// Slots granted or not yet drained.
        slots_out: usize,
    },
}

impl fmt::Display for WaitsFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Completion { nic, dst, dst_nic, slot } => {
                write!(f, "{nic} to complete the send of slot {slot} to {dst} (its {dst_nic})")
            }
            Self::Kernel { queue, idx, nic, slot } => {
                write!(f, "the kernel to fill slot {slot} at {nic} (queue {queue}, place {idx})")
            }
            Self::Route { dst } => write!(f, "a usable NIC for messages to {dst}"),
            Self::Turn { dst, transfer: None, egress } => {
                write!(f, "the owner of {egress} to come to this call (to {dst})")
            }
            Self::Turn { dst, transfer: Some(transfer), egress } => {
                write!(f, "the turn of transfer {transfer} on {egress} (to {dst})")
            }
            Self::SendSlot { dst, egress } => write!(f, "a free send slot at {egress} (to {dst})"),
            Self::Credit { dst, egress, ingress: Some(ingress) } => {
                write!(f, "a credit from {dst} on its {ingress} (leaving by {egress})")
            }
            Self::Credit { dst, egress, ingress: None } => {
                write!(f, "a credit from {dst} (leaving by {egress})")
            }
            Self::Fence { egress, dst, dst_nic } => {
                write!(f, "the failed path from {egress} to {dst_nic} of {dst} to be closed at both ends")
            }
            Self::Answer { dst, dst_nic, fence } => {
                write!(f, "{dst} to say what came in by its {dst_nic} before fence {fence}")
            }
            Self::Detour { dst, seq, lies_at } => write!(
                f,
                "an open path, a credit and a free slot to send message {seq} to {dst} again (it lies at {lies_at})"
            ),
            Self::Arrival { src, arrived, expected, uncredited, slots_out } => {
                write!(f, "messages from {src} ({arrived} of {expected} have come, {slots_out} slots out")?;
                match uncredited {
                    Some(nic) => write!(f, ", credits on {nic} held back for a transfer's turn)"),
                    None => write!(f, ")"),
                }
            }
        }
    }
}

/// The engine cannot go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A message changes a signal that is not there.
    #[error("a message of {src} changes signal {number}, which is not there")]
    BadSignal {
        /// Source.
        src: Rank,
        /// The signal.
        number: u32,
    },
    /// A call was opened while the one before still has work.
    #[error("call {} opened before the one before it was done", call.0)]
    CallOpen {
        /// The new call.
        call: CallId,
    },
    /// A call names a queue that does not exist.
    #[error("the call names queue {queue}, which does not exist")]
    NoSuchQueue {
        /// The queue.
        queue: u32,
    },
    /// A doorbell names a message that is not armed.
    #[error(
        "doorbell for queue {queue}, place {idx}, {bytes} bytes: no such slot is armed; a kernel sent out of turn"
    )]
    BadDoorbell {
        /// The queue.
        queue: u32,
        /// The place in it.
        idx: u64,
        /// Bytes.
        bytes: u64,
    },
    /// A doorbell gives back a slot that holds no message.
    #[error("doorbell gives back slot {slot} at {nic}, which holds no message")]
    BadDrain {
        /// The NIC.
        nic: NicIdx,
        /// The slot.
        slot: u32,
    },
    /// A credit for a slot that is not this rank's to fill.
    #[error("{from} granted slot {slot} at its {nic}, which is not lent to this rank")]
    BadCredit {
        /// The receiver.
        from: Rank,
        /// Its NIC.
        nic: NicIdx,
        /// The slot.
        slot: u32,
    },
    /// A credit for a slot of which the receiver has not said where it lies.
    #[error("{from} granted slot {slot} at its {nic} and has not said where it lies")]
    NoMemory {
        /// The receiver.
        from: Rank,
        /// Its NIC.
        nic: NicIdx,
        /// The slot.
        slot: u32,
    },
    /// A message came into a slot that was not granted.
    #[error("{bytes} bytes arrived in slot {slot} at {nic} (sequence ..{seq_low}), which was not granted")]
    BadArrival {
        /// The NIC.
        nic: NicIdx,
        /// The slot.
        slot: u32,
        /// Low bits of the sequence.
        seq_low: u32,
        /// Bytes.
        bytes: u32,
    },
    /// An arrival with an immediate that this library does not write.
    #[error("arrival at {nic} with an unknown immediate {imm:#010x}")]
    BadImmediate {
        /// The NIC.
        nic: NicIdx,
        /// The immediate.
        imm: u32,
    },
    /// A completion for work that was not posted.
    #[error("completion {cookie} for work that was not posted")]
    BadCompletion {
        /// Its cookie.
        cookie: u64,
    },
    /// A write did not reach its peer.
    #[error("{nic} could not write message {seq} to {dst} (its {dst_nic}): {source}")]
    WriteFailed {
        /// The NIC.
        nic: NicIdx,
        /// Destination.
        dst: Rank,
        /// Its NIC.
        dst_nic: NicIdx,
        /// Sequence.
        seq: u64,
        /// Why.
        source: WorkError,
    },
    /// Nothing happened for too long.
    #[error("no progress for {} ms: waited for {waits_for}", after_ns / 1_000_000)]
    Stalled {
        /// How long.
        after_ns: Nanos,
        /// What for.
        waits_for: WaitsFor,
    },
}
