//! One collective as the engine sees it: what leaves on which lane, what comes in from whom.

use crate::doorbell::Class;
use crate::hw::Nanos;
use crate::topo::{NicIdx, Rank, ServerId};

/// Number of a collective; the same on every rank, from 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash)]
pub struct CallId(pub u64);

/// A piece that leaves, cut into messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// Its number in the caller's table, told to the kernel with each armed slot.
    pub piece: u32,
    /// Where to.
    pub dst: Rank,
    /// Sequence of its first message among this call's messages to `dst`.
    pub first_seq: u32,
    /// Its bytes; not 0.
    pub bytes: u64,
    /// The NIC it leaves by; `None`: the engine chooses.
    pub egress: Option<NicIdx>,
    /// The NIC it comes in by; likewise.
    pub ingress: Option<NicIdx>,
    /// The transfer whose turn it waits for.
    pub transfer: Option<u32>,
    /// The queue of armed slots that its kernel fills; `None`: any work queue.
    pub queue: Option<u32>,
}

/// A piece that comes in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Incoming {
    /// From whom.
    pub src: Rank,
    /// Its bytes; not 0.
    pub bytes: u64,
    /// The NIC it comes in by; `None`: the sender's engine chooses.
    pub ingress: Option<NicIdx>,
    /// The transfer it belongs to.
    pub transfer: Option<u32>,
}

/// Which way a NIC carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Direction {
    /// Out of the server.
    Egress = 0,
    /// Into it.
    Ingress = 1,
}

/// What one transfer moves over one NIC that this rank owns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turn {
    /// The NIC.
    pub nic: NicIdx,
    /// Which way.
    pub direction: Direction,
    /// Place in the schedule's list.
    pub transfer: u32,
    /// The other server.
    pub peer: ServerId,
    /// Payload.
    pub bytes: u64,
}

/// Everything that one rank does in one collective.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Call {
    /// Its number.
    pub id: CallId,
    /// Class of all of its messages.
    pub class: Class,
    /// Longest message; pieces are cut into it.
    pub message_bytes: u32,
    /// Longest time without progress while something is due.
    pub timeout_ns: Nanos,
    /// What leaves.
    pub sends: Vec<Run>,
    /// What comes in.
    pub incoming: Vec<Incoming>,
    /// The turns of this rank's NICs, in list order per NIC and direction.
    pub turns: Vec<Turn>,
}

/// Messages that a piece is cut into.
pub fn messages(bytes: u64, message_bytes: u32) -> u64 {
    bytes.div_ceil(message_bytes.into())
}
