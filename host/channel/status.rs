//! Why a kernel gave up: `FlStatus`, decoded.

use crate::abi::{
    FL_STATUS_ABORTED, FL_STATUS_BAD_ARRIVAL, FL_STATUS_BAD_MESSAGE, FL_STATUS_BAD_PUT,
    FL_STATUS_NO_ARMED_SLOT, FL_STATUS_NO_ARRIVAL, FL_STATUS_NO_MESSAGE, FL_STATUS_NO_SIGNAL,
    FL_STATUS_NO_SLOT, FL_STATUS_NOT_FLUSHED, FL_STATUS_OK, FL_STATUS_PEER_SILENT, FL_STATUS_RING_FULL,
};

/// A kernel gave up; what it said.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelStatus {
    /// The host told it to.
    #[error("the kernel was told to stop")]
    Aborted,
    /// No slot was armed in time.
    #[error("the kernel waited too long for a send slot: {sent} of {expected} messages were sent")]
    NoArmedSlot {
        /// Messages sent.
        sent: u64,
        /// Messages to send.
        expected: u64,
    },
    /// Not all messages came in time.
    #[error("the kernel waited too long for messages: {drained} of {expected} came")]
    NoArrival {
        /// Messages drained.
        drained: u64,
        /// Messages due.
        expected: u64,
    },
    /// The host did not empty a doorbell ring.
    #[error("doorbell ring {ring} stayed full at descriptor {idx}")]
    RingFull {
        /// The ring.
        ring: u64,
        /// The descriptor.
        idx: u64,
    },
    /// A local peer was not ready, or did not finish.
    #[error("local rank {local_rank} did not take part in call {call} in time")]
    PeerSilent {
        /// Which one.
        local_rank: u64,
        /// The call.
        call: u64,
    },
    /// A message that is not in the plan.
    #[error("message {seq} of rank {src} is not in the plan, or has another size")]
    BadArrival {
        /// Source.
        src: u64,
        /// Sequence in the call.
        seq: u64,
    },
    /// An armed slot names a message that is not in the plan.
    #[error("queue {queue} asked for message {message:#x}, which is not in the plan")]
    BadMessage {
        /// The queue.
        queue: u64,
        /// Piece and part.
        message: u64,
    },
    /// No slot came for a put.
    #[error(
        "no send slot came for message {idx} to rank {dst} in time: the receiver takes no messages, or its path is stuck"
    )]
    NoSlot {
        /// Destination.
        dst: u64,
        /// Which of its messages.
        idx: u64,
    },
    /// No message of a source came.
    #[error("message {seq} of rank {src} did not come in time")]
    NoMessage {
        /// Source.
        src: u64,
        /// Which of its messages.
        seq: u64,
    },
    /// A signal did not get there.
    #[error("signal {number} did not reach {value} in time")]
    NoSignal {
        /// The signal.
        number: u64,
        /// What was waited for.
        value: u64,
    },
    /// A flush did not end.
    #[error("the {messages} messages to rank {dst} did not all reach it in time")]
    NotFlushed {
        /// Destination.
        dst: u64,
        /// All messages below this.
        messages: u64,
    },
    /// A kernel asked for what is not there.
    #[error(
        "a put of {bytes} bytes names rank or signal {which}, which is not there, or is longer than its slot"
    )]
    BadPut {
        /// Rank or signal.
        which: u64,
        /// Bytes of the message.
        bytes: u64,
    },
    /// A code that this library does not know.
    #[error("the kernel stopped with unknown status {code}")]
    Unknown {
        /// The code.
        code: u64,
    },
}

impl KernelStatus {
    /// Whether it only says that something did not come.
    pub fn is_timeout(self) -> bool {
        matches!(
            self,
            Self::NoArmedSlot { .. }
                | Self::NoArrival { .. }
                | Self::RingFull { .. }
                | Self::PeerSilent { .. }
                | Self::NoSlot { .. }
                | Self::NoMessage { .. }
                | Self::NoSignal { .. }
                | Self::NotFlushed { .. }
        )
    }

    /// The words of a status; `None` while no kernel has given up.
    pub(super) fn decode(code: u64, a: u64, b: u64) -> Option<Self> {
        Some(match code as u32 {
            FL_STATUS_OK => return None,
            FL_STATUS_ABORTED => Self::Aborted,
            FL_STATUS_NO_ARMED_SLOT => Self::NoArmedSlot { sent: a, expected: b },
            FL_STATUS_NO_ARRIVAL => Self::NoArrival { drained: a, expected: b },
            FL_STATUS_RING_FULL => Self::RingFull { ring: a, idx: b },
            FL_STATUS_PEER_SILENT => Self::PeerSilent { local_rank: a, call: b },
            FL_STATUS_BAD_ARRIVAL => Self::BadArrival { src: a, seq: b },
            FL_STATUS_BAD_MESSAGE => Self::BadMessage { queue: a, message: b },
            FL_STATUS_NO_SLOT => Self::NoSlot { dst: a, idx: b },
            FL_STATUS_NO_MESSAGE => Self::NoMessage { src: a, seq: b },
            FL_STATUS_NO_SIGNAL => Self::NoSignal { number: a, value: b },
            FL_STATUS_NOT_FLUSHED => Self::NotFlushed { dst: a, messages: b },
            FL_STATUS_BAD_PUT => Self::BadPut { which: a, bytes: b },
            _ => Self::Unknown { code },
        })
    }
}
