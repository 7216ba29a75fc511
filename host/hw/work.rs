//! What a NIC is asked to do, and why it may not be done.

use super::{LocalKey, PathId};

/// Bytes of local registered memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct LocalSpan {
    /// Which registration.
    pub key: LocalKey,
    /// First byte in it.
    pub offset: u64,
    /// How many.
    pub bytes: u32,
}

/// Where a write goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct RemoteSpan {
    /// Which registration of the peer.
    pub rkey: u64,
    /// First address.
    pub remote_addr: u64,
}

/// Longest inline write.
pub const INLINE_BYTES: usize = 16;

/// What a NIC is asked to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub enum WorkOp {
    /// RDMA write, with an immediate that the peer sees as an arrival.
    Write {
        /// From here.
        local: LocalSpan,
        /// To there.
        remote: RemoteSpan,
        /// Told to the peer after the bytes are in its memory.
        imm: u32,
    },
    /// A small RDMA write of host bytes, ahead of bulk data. The peer is not told, and it completes only when it fails. It
    /// is in the peer's memory before a write that is posted after it on the same path arrives there.
    Inline {
        /// To there.
        remote: RemoteSpan,
        /// The bytes; `len` of them count.
        data: [u8; INLINE_BYTES],
        /// How many.
        len: u8,
    },
}

/// Work of one lane keeps its order and never waits for that of another, on its way to a device that another process
/// drives: a class of messages each, with what goes ahead of a message on its path, and one for control words. Devices keep
/// the order of each path, whatever the lanes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum Lane {
    /// Credits, answers, states, owners' words: inline writes alone, so that nothing but the device holds it up.
    Control = 0,
    /// One-sided puts of users' kernels, and their signals.
    LowLatency = 1,
    /// Messages of a schedule.
    Plan = 2,
    /// Calls without a schedule.
    Put = 3,
}

impl Lane {
    /// How many there are.
    pub const COUNT: usize = 4;
    /// All of them, in the order in which they are served.
    pub const ALL: [Self; Self::COUNT] = [Self::Control, Self::LowLatency, Self::Plan, Self::Put];
}

/// One item of work.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct Work {
    /// On which connection.
    pub path: PathId,
    /// Beside which other work it waits.
    pub lane: Lane,
    /// What.
    pub op: WorkOp,
    /// Given back in the completion.
    pub cookie: u64,
}

/// Why an item of work did not reach the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum WorkError {
    /// The peer refused the address or key.
    #[error("the peer refused the address")]
    RemoteAccess,
    /// The link is down here or there.
    #[error("link down")]
    LinkDown,
    /// The peer does not answer.
    #[error("retries exhausted")]
    RetryExceeded,
    /// An earlier failure on the path flushed it.
    #[error("flushed by an earlier failure on the path")]
    Flushed,
    /// The path was closed, so the work was never posted: nothing of it can have reached the peer.
    #[error("the path is closed")]
    Refused,
    /// The device was given up while it held the work: its local memory must not be used again.
    #[error("the device does not answer")]
    Quarantined,
}

impl WorkError {
    /// Whether the bytes may be in the peer's memory all the same.
    pub fn is_in_doubt(self) -> bool {
        self != Self::Refused
    }
}
