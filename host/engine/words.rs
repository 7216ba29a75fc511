//! What goes into an engine besides events, and what comes out: views of NICs, slots to arm, messages to post, words to
//! write, messages to show.

use super::call::CallId;
use super::route::NicState;
use crate::doorbell::{Class, Signal};
use crate::hw::RemoteKey;
use crate::topo::{NicId, NicIdx, Rank};

/// One direction of a NIC, as the load table tells it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NicLoad {
    /// For others than its owner.
    pub state: NicState,
    /// Bytes of all borrowers on the way.
    pub borrowed_bytes: u64,
}

/// Through which transfer of which call a NIC's server may go.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TurnView {
    /// The call; 0 = none yet.
    pub call: CallId,
    /// The last transfer allowed.
    pub through: u32,
}

impl TurnView {
    /// Whether messages of a call may run: those of a transfer in its turn, loose ones once the NIC's owner has come to
    /// the call, for it could not count them before. An owner in a later call is done with this one.
    pub fn allows(self, call: CallId, transfer: Option<u32>) -> bool {
        self.call > call || self.call == call && transfer.is_none_or(|t| t <= self.through)
    }
}

/// A NIC of this server, as the load table tells it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NicView {
    /// Sending.
    pub egress: NicLoad,
    /// Receiving.
    pub ingress: NicLoad,
    /// Whose turn it is to be sent.
    pub egress_turn: TurnView,
    /// Whose turn it is to be received.
    pub ingress_turn: TurnView,
}

/// A slot for a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arm {
    /// The queue.
    pub queue: u32,
    /// The place in it.
    pub idx: u64,
    /// Its class.
    pub class: Class,
    /// The NIC beside which the slot lies.
    pub nic: NicIdx,
    /// The send slot.
    pub slot: u32,
    /// Bytes of the message.
    pub bytes: u32,
    /// Which piece it is of.
    pub piece: u32,
    /// Which of the piece's messages.
    pub part: u32,
}

/// A message to hand to a NIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Post {
    /// Class.
    pub class: Class,
    /// The NIC.
    pub nic: NicIdx,
    /// The send slot beside it.
    pub slot: u32,
    /// Payload.
    pub bytes: u32,
    /// Destination.
    pub dst: Rank,
    /// Its server's NIC.
    pub dst_nic: NicIdx,
    /// The receive slot beside that.
    pub dst_slot: u32,
    /// Immediate.
    pub imm: u32,
    /// Its sequence among all from this rank to its destination, in its class.
    pub seq: u64,
    /// What it does to a signal of its destination: to be written ahead of it, on the same path.
    pub signal: Option<Signal>,
    /// For the completion.
    pub cookie: u64,
}

/// Totals of what a rank has sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Sent {
    /// Messages.
    pub messages: u64,
    /// Payload.
    pub bytes: u64,
    /// Payload that went through the memory of a GPU other than its source and its destination.
    pub relayed_bytes: u64,
}

/// A word between a receiver and a sender. All but one go to the sender's credit line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CreditWrite {
    /// The `position`-th credit of the line.
    Slot {
        /// The sender.
        to: Rank,
        /// Class.
        class: Class,
        /// This server's NIC.
        nic: NicIdx,
        /// The credit.
        lent: Lent,
    },
    /// Which messages had come when a path to a NIC was closed.
    Answer {
        /// The sender.
        to: Rank,
        /// Class.
        class: Class,
        /// This server's NIC.
        nic: NicIdx,
        /// The answer.
        answer: Answer,
    },
    /// Where the slots of a line lie: told ahead of its first credit when their memory was lent after the start.
    Memory {
        /// The sender.
        to: Rank,
        /// Class.
        class: Class,
        /// This server's NIC.
        nic: NicIdx,
        /// Key of the lot.
        key: RemoteKey,
    },
    /// Credits that were not spent are to be returned.
    Recall {
        /// The sender.
        to: Rank,
        /// Class.
        class: Class,
        /// This server's NIC.
        nic: NicIdx,
        /// Those before this position.
        before: u64,
    },
    /// From a sender to its receiver: credits of a recall that came back unused.
    Returned {
        /// The receiver.
        to: Rank,
        /// Class.
        class: Class,
        /// The receiver's NIC.
        nic: NicIdx,
        /// Which credits.
        returned: Returned,
    },
    /// How a NIC of this server fares, for this call.
    State {
        /// The sender.
        to: Rank,
        /// This server's NIC.
        nic: NicIdx,
        /// The call it is true for.
        call: CallId,
        /// For others than its owner.
        state: NicState,
    },
}

impl CreditWrite {
    /// Whom it is for.
    pub fn to(&self) -> Rank {
        match *self {
            Self::Slot { to, .. }
            | Self::Answer { to, .. }
            | Self::Memory { to, .. }
            | Self::Recall { to, .. }
            | Self::Returned { to, .. }
            | Self::State { to, .. } => to,
        }
    }
}

/// A message for the kernel. `seq` counts from the start of the call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Publish {
    /// Class.
    pub class: Class,
    /// Source.
    pub src: Rank,
    /// Which of its messages.
    pub seq: u64,
    /// Payload.
    pub bytes: u32,
    /// The NIC beside which it lies.
    pub nic: NicIdx,
    /// The receive slot.
    pub slot: u32,
}

/// A slot that a receiver has lent: one credit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Lent {
    /// How many credits were granted on the line before.
    pub position: u64,
    /// The receive slot.
    pub slot: u32,
    /// How often the slot was lent, this time included; counts modulo 256.
    pub epoch: u8,
    /// The transfer that it is for; `None`: any message outside of transfers.
    pub transfer: Option<u32>,
    /// It is for messages that were to come in by this NIC, which cannot be reached. `None`: for those of its own.
    pub instead_of: Option<NicIdx>,
}

/// Receive slots of one credit line at most: as many as fit an answer.
pub const LINE_SLOTS: usize = 8;

/// What a receiver says of the slots of one credit line when a path to their NIC was closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Answer {
    /// The last fence it takes into account.
    pub fence: u32,
    /// By slot of the line: the epoch of the last message that came; 0 before the first.
    pub arrived: [u8; LINE_SLOTS],
    /// Credits before this position that were not used then are void.
    pub called_in_before: u64,
}

impl Answer {
    /// Whether the message that was sent with a credit of the line has come.
    pub fn has_come(&self, line_slot: usize, epoch: u8) -> bool {
        // A slot may be lent and called in many times between two messages that come.
        self.arrived[line_slot].wrapping_sub(epoch) < 0x80
    }
}

/// Credits of a line that a sender held when they were recalled, or got back later: it will not spend them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Returned {
    /// The recall: credits before this position.
    pub before: u64,
    /// A bit per slot of the line; for one recall bits are only ever added.
    pub slots: u8,
}

const _: () = assert!(LINE_SLOTS <= u8::BITS as usize, "a bit for each slot of a line");

/// A message that lies beside one NIC and has to leave by another: its bytes are to be copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Move {
    /// For [`Engine::on_moved`](super::Engine::on_moved).
    pub ticket: u64,
    /// Class.
    pub class: Class,
    /// NIC and send slot where it lies.
    pub from: (NicIdx, u32),
    /// NIC and send slot where it should be.
    pub to: (NicIdx, u32),
    /// Payload.
    pub bytes: u32,
}

/// A control word and its way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Control {
    /// This server's NIC.
    pub via: NicIdx,
    /// The NIC of the other server by which it comes in.
    pub peer: NicId,
    /// What to write.
    pub write: CreditWrite,
}

/// What the load table says of the server's processes, with regard to this rank's call.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ServerView {
    /// All are done with it.
    pub all_done: bool,
    /// One at least sends round failed paths in it.
    pub detours: bool,
}
