//! One message, from credit to arrival: the state machine of a rank. Pure: events and time come in (`on_*`,
//! `handle_timeout`), decisions go out (`poll_*`); it owns no memory, thread or clock, so the proxy thread runs it on
//! real or emulated hardware and a simulator can run it in virtual time.
//!
//! | in | out |
//! |---|---|
//! | [`open`](Engine::open) a call | [`poll_arm`](Engine::poll_arm): slot for the next message |
//! | a kernel [filled](Engine::on_doorbell) a slot | [`poll_post`](Engine::poll_post): work for a NIC |
//! | a NIC [completed](Engine::on_completed) it | |
//! | a message [arrived](Engine::on_arrival) | [`poll_publish`](Engine::poll_publish): arrival for the kernel |
//! | a kernel [drained](Engine::on_doorbell) a slot, a turn came | [`poll_credit`](Engine::poll_credit): leave for a sender |

#![forbid(unsafe_code)]

pub mod call;
mod error;
pub mod immediate;
pub mod route;
pub mod slots;
pub mod turns;

mod receiver;
mod sender;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;

use crate::doorbell::{Class, Doorbell};
use crate::hw::{Nanos, WorkError};
use crate::topo::{Cluster, NicIdx, Rank, ServerId};
pub use error::{EngineError, WaitsFor};

use call::{Call, CallId, Direction};
use immediate::Immediate;
use receiver::Receiver;
use route::{NicState, RouteLimits};
use sender::Sender;
use slots::SlotLayout;
use turns::TurnKeeper;

/// What an engine is made for.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// This rank.
    pub rank: Rank,
    /// The job.
    pub cluster: Arc<Cluster>,
    /// Slots of this server.
    pub slots: SlotLayout,
    /// Queues of armed slots for kernels that walk a plan.
    pub work_queues: u32,
    /// Slots armed ahead per queue; a power of two.
    pub armed_depth: u32,
    /// Bounds for choosing NICs.
    pub limits: RouteLimits,
    /// A transfer's successor is let in when this much of it is left: NIC rate times the way of a credit.
    pub lookahead_bytes: u64,
    /// This rank's NIC when nobody chooses. `None`: all NICs of the server are down.
    pub direct_nic: Option<NicIdx>,
    /// The present call; kept by the engine.
    pub call: CallId,
}

impl EngineConfig {
    fn server(&self) -> ServerId {
        self.cluster.server_of(self.rank)
    }

    /// NICs of this server.
    pub fn nics(&self) -> usize {
        self.cluster.server(self.server()).nics.len()
    }

    /// Queues of armed slots: those for plans, then one per destination for puts.
    pub fn queues(&self) -> u32 {
        self.work_queues + self.cluster.ranks()
    }

    /// The queue for puts to a rank.
    pub fn put_queue(&self, dst: Rank) -> u32 {
        self.work_queues + dst.0
    }

    fn is_remote(&self, rank: Rank) -> bool {
        self.cluster.server_of(rank) != self.server()
    }

    fn is_up(&self, nic: NicIdx) -> bool {
        self.cluster.server(self.server()).nics[nic.idx()].mbit_per_s > 0
    }

    fn owns(&self, nic: NicIdx) -> bool {
        self.cluster.owner_of(self.cluster.nic_id(self.server(), nic)) == self.rank
    }
}

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
    /// the call, for it could not count them before.
    pub fn allows(self, call: CallId, transfer: Option<u32>) -> bool {
        self.call == call && transfer.is_none_or(|t| t <= self.through)
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

/// Something to write into a sender's credit line.
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
        /// How many were granted on the line before.
        position: u64,
        /// The receive slot.
        slot: u32,
        /// The transfer that it is for; `None`: any message outside of transfers.
        transfer: Option<u32>,
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

/// A slot that a receiver has lent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lent {
    /// The receive slot.
    pub slot: u32,
    /// The transfer that it is for; `None`: any message outside of transfers.
    pub transfer: Option<u32>,
}

/// The state machine of one rank.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    class: Class,
    sender: Sender,
    receiver: Receiver,
    views: Vec<NicView>,
    /// `[nic][direction]`, for NICs this rank owns.
    turns: Vec<[TurnKeeper; 2]>,
    posts: VecDeque<Post>,
    last_progress: Nanos,
    timeout_ns: Nanos,
}

impl Engine {
    /// An engine with nothing to do; standing credits are granted at once.
    pub fn new(config: EngineConfig) -> Self {
        let nics = config.nics();
        let mut receiver = Receiver::new(&config);
        receiver.grant_standing(&config);
        Self {
            sender: Sender::new(&config),
            receiver,
            class: Class::Put,
            views: vec![NicView::default(); nics],
            turns: (0..nics).map(|_| Default::default()).collect(),
            posts: VecDeque::new(),
            last_progress: 0,
            timeout_ns: Nanos::MAX,
            config,
        }
    }

    /// What it was made for.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Begins a collective. The one before must be done here: all of its messages armed and received.
    ///
    /// # Errors
    /// [`EngineError::CallOpen`], [`EngineError::NoSuchQueue`].
    pub fn open(&mut self, call: &Call, now: Nanos) -> Result<(), EngineError> {
        self.config.call = call.id;
        self.class = call.class;
        self.last_progress = now;
        self.timeout_ns = call.timeout_ns;
        self.sender.open(&self.config, call)?;
        self.receiver.open(call)?;
        for (k, keepers) in self.turns.iter_mut().enumerate() {
            for direction in [Direction::Egress, Direction::Ingress] {
                let of = |t: &&call::Turn| t.nic.idx() == k && t.direction == direction;
                let turns = call.turns.iter().filter(of).copied();
                keepers[direction as usize] = TurnKeeper::new(turns, self.config.lookahead_bytes);
            }
        }
        Ok(())
    }

    /// What the load table says of a NIC.
    pub fn update_nic(&mut self, nic: NicIdx, view: NicView) {
        self.views[nic.idx()] = view;
    }

    /// What is known of the NICs, for who tells of all of them at once.
    pub fn views_mut(&mut self) -> &mut [NicView] {
        &mut self.views
    }

    /// A kernel's word.
    ///
    /// # Errors
    /// [`EngineError::BadDoorbell`], [`EngineError::BadDrain`].
    pub fn on_doorbell(&mut self, doorbell: Doorbell, now: Nanos) -> Result<(), EngineError> {
        self.last_progress = now;
        match doorbell {
            Doorbell::Send { queue, idx, bytes, .. } => {
                let post = self.sender.on_filled(&self.config, queue, idx, bytes)?;
                self.posts.push_back(post);
                Ok(())
            }
            Doorbell::Drained { class, nic, slot } => {
                self.receiver.on_drained(&self.config, class, nic, slot)
            }
        }
    }

    /// A NIC is done with a post.
    ///
    /// # Errors
    /// [`EngineError::WriteFailed`], [`EngineError::BadCompletion`].
    pub fn on_completed(
        &mut self,
        cookie: u64,
        result: Result<(), WorkError>,
        now: Nanos,
    ) -> Result<(), EngineError> {
        self.last_progress = now;
        self.sender.on_completed(cookie, result)
    }

    /// A message for this rank came in by a NIC of its server.
    ///
    /// # Errors
    /// [`EngineError::BadArrival`], [`EngineError::BadImmediate`].
    pub fn on_arrival(&mut self, nic: NicIdx, imm: u32, bytes: u32, now: Nanos) -> Result<(), EngineError> {
        self.last_progress = now;
        let decoded = Immediate::decode(imm).ok_or(EngineError::BadImmediate { nic, imm })?;
        self.receiver.on_arrival(&self.config, nic, decoded, bytes)
    }

    /// A receiver granted a slot.
    ///
    /// # Errors
    /// [`EngineError::BadCredit`] for a slot that is not lent to this rank.
    pub fn on_credit(
        &mut self,
        class: Class,
        from: Rank,
        ingress: NicIdx,
        lent: Lent,
        now: Nanos,
    ) -> Result<(), EngineError> {
        self.last_progress = now;
        let server = self.config.cluster.server_of(from);
        let (first, gpus) = (self.config.cluster.first_rank(server), self.config.cluster.server(server).gpus);
        let sender = if self.config.rank < first { self.config.rank.0 } else { self.config.rank.0 - gpus };
        let recv_slots = self.config.slots.config().recv_slots;
        if lent.slot / recv_slots != sender {
            return Err(EngineError::BadCredit { from, nic: ingress, slot: lent.slot });
        }
        self.sender.on_credit(class, from, ingress, lent);
        Ok(())
    }

    /// A receiver told how one of its NICs fares, for some call.
    pub fn on_peer_nic_state(&mut self, from: Rank, ingress: NicIdx, call: CallId, state: NicState) {
        self.sender.on_peer_nic_state(from, ingress, call, state);
    }

    /// Payload of the plan class moved through a NIC that this rank owns, to or from a server.
    pub fn on_nic_moved(&mut self, nic: NicIdx, direction: Direction, peer: ServerId, bytes: u64) {
        self.turns[nic.idx()][direction as usize].moved(peer, bytes);
    }

    /// Whether all transfers of the present call have moved through this rank's NICs, its server's other ranks'
    /// included. The next call's turns replace these, so it must not open before.
    pub fn turns_finished(&self) -> bool {
        self.turns.iter().flatten().all(TurnKeeper::is_finished)
    }

    /// Whether nothing of this rank's is armed or on the way.
    pub fn is_quiet(&self) -> bool {
        !self.is_busy() && self.posts.is_empty() && self.sender.is_quiet()
    }

    /// The turns of a NIC that this rank owns, for the load table.
    pub fn turns(&self, nic: NicIdx) -> [TurnView; 2] {
        let owned = self.config.owns(nic);
        let view = |k: &TurnKeeper| TurnView { call: self.config.call, through: k.through() };
        if owned { self.turns[nic.idx()].each_ref().map(view) } else { Default::default() }
    }

    /// The next slot to arm.
    pub fn poll_arm(&mut self) -> Option<Arm> {
        let arm = self.sender.poll_arm(&self.config, self.class, &self.views)?;
        if self.config.direct_nic != Some(arm.nic) {
            // The table will say so only after the next round; the bound must hold within this one.
            self.views[arm.nic.idx()].egress.borrowed_bytes += u64::from(arm.bytes);
        }
        Some(arm)
    }

    /// The next work for a NIC.
    pub fn poll_post(&mut self) -> Option<Post> {
        self.posts.pop_front()
    }

    /// The next credit to write to a sender.
    pub fn poll_credit(&mut self) -> Option<CreditWrite> {
        self.receiver.poll_credit(&self.config, self.class, &self.views)
    }

    /// The next arrival for the kernel.
    pub fn poll_publish(&mut self) -> Option<Publish> {
        self.receiver.poll_publish()
    }

    /// This rank's bytes at a NIC, sending: what it has still to send counts at its direct NIC.
    pub fn egress_bytes(&self, nic: NicIdx) -> u64 {
        let unsent = if self.config.direct_nic == Some(nic) { self.sender.unsent_bytes() } else { 0 };
        self.sender.own_bytes(nic) + unsent
    }

    /// This rank's bytes at a NIC, receiving: what is still due counts at its direct NIC.
    pub fn ingress_bytes(&self, nic: NicIdx) -> u64 {
        if self.config.direct_nic == Some(nic) { self.receiver.expected_bytes() } else { 0 }
    }

    /// Whether the present call has messages to send or receive.
    pub fn is_busy(&self) -> bool {
        self.sender.unsent_bytes() > 0 || self.receiver.expected_bytes() > 0
    }

    /// What was sent so far.
    pub fn sent(&self) -> Sent {
        self.sender.sent()
    }

    /// Checks the deadline.
    ///
    /// # Errors
    /// [`EngineError::Stalled`] when something is due and nothing happened for the time-out.
    pub fn handle_timeout(&mut self, now: Nanos) -> Result<(), EngineError> {
        let after_ns = now.saturating_sub(self.last_progress);
        if after_ns < self.timeout_ns {
            return Ok(());
        }
        let sends = self.sender.waits_for(&self.config, self.class, &self.views);
        match sends.or_else(|| self.receiver.waits_for(&self.config, self.class)) {
            None => Ok(()),
            Some(waits_for) => Err(EngineError::Stalled { after_ns, waits_for }),
        }
    }
}
