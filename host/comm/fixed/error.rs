//! What a fixed window refuses.

use std::time::Duration;

use crate::doorbell::Signal;
use crate::engine::slots::CHUNK_BYTES;
use crate::topo::Rank;

/// A fixed window cannot be had, or cannot do what is asked of it now. The communicator lives on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FixedError {
    /// A slot is no whole chunk, so it cannot be mapped by itself.
    #[error(
        "fixed windows need slots of whole chunks, but CommConfig::put_bytes is {put_bytes}; set it to a multiple of {CHUNK_BYTES} on every rank, such as {}",
        u64::from(*.put_bytes).next_multiple_of(CHUNK_BYTES)
    )]
    PartialChunks {
        /// Bytes of a slot.
        put_bytes: u32,
    },
    /// Messages within a server take no NIC.
    #[error("{peer} is no rank of another server; fixed windows are for those")]
    SameServer {
        /// The rank.
        peer: Rank,
    },
    /// Kernels have used the stream.
    #[error(
        "kernels have used {messages} slots of the stream with {peer}; a stream is for kernels or for a fixed window, from its first message on"
    )]
    KernelsUse {
        /// Its other end.
        peer: Rank,
        /// Slots or messages that they have claimed.
        messages: u64,
    },
    /// There is a window already.
    #[error("the stream with {peer} has a fixed window already; drop it first")]
    Open {
        /// Its other end.
        peer: Rank,
    },
    /// Windows are of the communicator that made them.
    #[error("the fixed window of the stream with {peer} is of another communicator")]
    OtherCommunicator {
        /// The stream's other end.
        peer: Rank,
    },
    /// Nothing is placed.
    #[error(
        "the fixed window of the stream to {dst} is not placed; place it before each message that is written there"
    )]
    NotPlaced {
        /// Destination.
        dst: Rank,
    },
    /// Nothing is accepted.
    #[error("the fixed window of the stream from {src} shows no message; accept one before it is released")]
    NotAccepted {
        /// Source.
        src: Rank,
    },
    /// The message before is still in use.
    #[error(
        "the fixed window of the stream from {src} shows a message; release it before the next is accepted"
    )]
    NotReleased {
        /// Source.
        src: Rank,
    },
    /// A message does not fit its slot.
    #[error("a message of {bytes} bytes is longer than a slot of {most}; raise CommConfig::put_bytes")]
    TooLong {
        /// Its length.
        bytes: u64,
        /// The longest.
        most: u64,
    },
    /// No signal can do that.
    #[error("there is no such signal or value: {signal:?}; a rank has {signals} signals of 63 bits")]
    NoSuchSignal {
        /// What was asked for.
        signal: Signal,
        /// How many there are.
        signals: u32,
    },
    /// Kernels that this communicator has launched do not end.
    #[error(
        "a fixed window is mapped, sent and released between kernels only, and kernels that were launched did not end within {waited:?}"
    )]
    KernelsRun {
        /// How long was waited.
        waited: Duration,
    },
    /// No NIC, no credit or no send slot is free for the stream's next message.
    #[error(
        "no slot for the next message to {dst} within {waited:?}: its receiver gives no slots back, or no path is open"
    )]
    NoSlot {
        /// Destination.
        dst: Rank,
        /// How long was waited.
        waited: Duration,
    },
    /// Nothing comes.
    #[error("no message from {src} within {waited:?}")]
    NoMessage {
        /// Source.
        src: Rank,
        /// How long was waited.
        waited: Duration,
    },
    /// Messages do not arrive.
    #[error("{missing} messages to {dst} have not come within {waited:?}")]
    NotFlushed {
        /// Destination.
        dst: Rank,
        /// How many.
        missing: u64,
        /// How long was waited.
        waited: Duration,
    },
}
