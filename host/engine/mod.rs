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
mod control;
mod credits;
mod detour;
mod error;
pub mod immediate;
pub mod lots;
pub mod path;
pub mod relay;
pub mod route;
pub mod slots;
pub mod turns;

mod receiver;
mod recovery;
mod sender;
pub mod stream;
#[cfg(test)]
mod tests;
mod words;

use std::sync::Arc;

use crate::doorbell::{Class, Doorbell};
use crate::hw::{Nanos, PathNews, WorkError};
use crate::topo::{Cluster, NicId, NicIdx, Rank, ServerId};
pub use error::{EngineError, WaitsFor};
pub use words::{
    Answer, Arm, Control, CreditWrite, LINE_SLOTS, Lent, Move, NicLoad, NicView, Post, Publish, Returned,
    Sent, ServerView, TurnView,
};

use call::{Call, CallId, Direction};
use control::ControlWays;
use immediate::Immediate;
use lots::LotsAtStart;
use receiver::Receiver;
use route::{NicState, RouteLimits};
use sender::{Filled, Sender};
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
    /// Relay memory that is there from the start.
    pub lots: LotsAtStart,
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
    ways: ControlWays,
    /// `[class][nic]`.
    lots: Vec<lots::Phase>,
    server: ServerView,
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
            ways: ControlWays::new(&config),
            lots: lots::at_start(&config),
            server: ServerView::default(),
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
        self.give_up_due_lots();
        self.config.call = call.id;
        self.class = call.class;
        self.last_progress = now;
        self.timeout_ns = call.timeout_ns;
        self.sender.open(&self.config, call)?;
        self.receiver.open(call)?;
        self.server = ServerView::default();
        let settled =
            self.sender.is_settled(&self.config, call) && self.receiver.is_settled(&self.config, call);
        let settled = settled && self.sender.has_lots_for(&self.config, call);
        self.set_detours(!settled);
        for (k, keepers) in self.turns.iter_mut().enumerate() {
            for direction in [Direction::Egress, Direction::Ingress] {
                let of = |t: &&call::Turn| t.nic.idx() == k && t.direction == direction;
                let turns = call.turns.iter().filter(of).copied();
                keepers[direction as usize] = TurnKeeper::new(turns, self.config.lookahead_bytes);
            }
        }
        Ok(())
    }

    /// Prescribed ways and turns are preferences from now on, until the next call.
    fn set_detours(&mut self, detours: bool) {
        self.sender.detours = detours;
        self.receiver.detours = detours;
    }

    /// Whether this rank sends round failed paths in the present call, or its server's others do.
    pub fn detours(&self) -> bool {
        self.sender.detours
    }

    /// What the load table says of the server's processes.
    pub fn update_server(&mut self, view: ServerView) {
        self.server = view;
        if view.detours && !self.sender.detours {
            self.set_detours(true);
        }
    }

    /// News of a path from a NIC of this server.
    pub fn on_path(&mut self, nic: NicIdx, peer: NicId, news: PathNews, now: Nanos) {
        self.last_progress = now;
        let server = self.config.cluster.server_of_nic(peer);
        match news {
            PathNews::Down => {
                self.sender.paths.close(nic, peer);
                self.ways.on_down(server, nic, peer);
                self.set_detours(true);
            }
            PathNews::Fenced { fence, all_closed } => {
                self.receiver.on_fenced(&self.config, nic, server, fence, all_closed);
            }
            PathNews::PeerFenced { fence } => {
                self.sender.on_peer_fenced(&self.config, nic, peer, fence);
                self.ways.on_peer_fenced(&self.config, &self.sender.paths, server, nic, peer);
            }
            PathNews::Up { fence } => {
                self.sender.paths.open(nic, peer, fence);
                self.receiver.on_path_up(&self.config, nic, server);
                self.ways.on_up(&self.config, &self.sender.paths, server, (nic, peer));
            }
        }
        while let Some(server) = self.ways.take_anew() {
            self.receiver.tell_again(&self.config, server);
            self.sender.tell_again(&self.config, server);
        }
    }

    /// A receiver said what has come.
    pub fn on_answer(&mut self, class: Class, from: Rank, ingress: NicIdx, answer: Answer, now: Nanos) {
        self.last_progress = now;
        self.sender.on_answer(&self.config, class, from, ingress, answer);
    }

    /// The bytes of a [`Move`] lie in their new place.
    pub fn on_moved(&mut self, ticket: u64) {
        self.sender.on_moved(&self.config, ticket);
    }

    /// The next message to copy from one send slot to another.
    pub fn poll_move(&mut self) -> Option<Move> {
        self.sender.poll_move(&self.config, &self.views)
    }

    /// An open path to a server, for the words of NIC owners about paths.
    pub fn path_to(&self, server: ServerId) -> Option<(NicIdx, NicId)> {
        control::any_open(&self.config, &self.sender.paths, server)
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
            Doorbell::Send { queue, idx, bytes, signal, .. } => {
                self.sender.on_filled(&self.config, Filled { queue, idx, bytes, signal })
            }
            Doorbell::Drained { class, nic, slot } => {
                self.receiver.on_drained(&self.config, class, nic, slot)
            }
        }
    }

    /// A NIC is done with a post.
    ///
    /// # Errors
    /// [`EngineError::WriteFailed`] for a message that has failed too often, [`EngineError::BadCompletion`].
    pub fn on_completed(
        &mut self,
        cookie: u64,
        result: Result<(), WorkError>,
        now: Nanos,
    ) -> Result<(), EngineError> {
        self.last_progress = now;
        self.sender.on_completed(&self.config, cookie, result)
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
        self.sender.on_credit(&self.config, class, from, ingress, lent);
        Ok(())
    }

    /// A word as another rank's engine gave it, for worlds that carry words whole.
    ///
    /// # Errors
    /// As [`on_credit`](Self::on_credit).
    pub fn on_word(&mut self, from: Rank, word: CreditWrite, now: Nanos) -> Result<(), EngineError> {
        match word {
            CreditWrite::Slot { class, nic, lent, .. } => return self.on_credit(class, from, nic, lent, now),
            CreditWrite::Answer { class, nic, answer, .. } => self.on_answer(class, from, nic, answer, now),
            CreditWrite::Recall { class, nic, before, .. } => self.on_recall(class, from, nic, before),
            CreditWrite::Returned { class, nic, returned, .. } => {
                self.on_returned(class, from, nic, returned)
            }
            CreditWrite::State { nic, call, state, .. } => self.on_peer_nic_state(from, nic, call, state),
            // For who addresses the write.
            CreditWrite::Memory { .. } => {}
        }
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
    /// included. The next call's turns replace these, so it must not open before. Where messages went other ways than
    /// planned nobody can count them: then all ranks of the server must be done.
    pub fn turns_finished(&self) -> bool {
        let counted = || self.turns.iter().flatten().all(TurnKeeper::is_finished);
        if self.detours() { self.server.all_done } else { counted() }
    }

    /// Whether nothing of this rank's is due, armed, in doubt or on the way.
    pub fn is_quiet(&self) -> bool {
        !self.is_busy() && self.sender.is_quiet()
    }

    /// The turns of a NIC that this rank owns, for the load table.
    pub fn turns(&self, nic: NicIdx) -> [TurnView; 2] {
        let owned = self.config.owns(nic);
        let through = |k: &TurnKeeper| if self.detours() { turns::ALL_TRANSFERS } else { k.through() };
        let view = |k: &TurnKeeper| TurnView { call: self.config.call, through: through(k) };
        if owned { self.turns[nic.idx()].each_ref().map(view) } else { Default::default() }
    }

    /// The next slot to arm.
    pub fn poll_arm(&mut self) -> Option<Arm> {
        match self.sender.poll_arm(&self.config, self.class, &self.views) {
            Some(arm) => {
                if self.config.direct_nic != Some(arm.nic) {
                    // The table will say so only after the next round; the bound must hold within this one.
                    self.views[arm.nic.idx()].egress.borrowed_bytes += u64::from(arm.bytes);
                }
                Some(arm)
            }
            None => self.sender.poll_stream(&self.config, &self.views),
        }
    }

    /// Slots that are armed for puts to a rank and not filled, in their order.
    pub fn armed_ahead(&self, dst: Rank) -> impl Iterator<Item = Arm> + use<> {
        self.sender.armed_ahead(&self.config, dst).into_iter()
    }

    /// All messages of a stream below a number are in their destination's memory, told when the number grows.
    pub fn poll_flushed(&mut self) -> Option<(Rank, u64)> {
        self.sender.puts.poll_flushed()
    }

    /// The next message of a stream, in order for each source. Its signal is to be applied, and then the message shown to
    /// kernels; one of 0 bytes is only its signal, and [`given back`](Engine::on_doorbell) at once.
    pub fn poll_stream_arrival(&mut self) -> Option<Publish> {
        self.receiver.puts.poll_arrival()
    }

    /// The next work for a NIC.
    pub fn poll_post(&mut self) -> Option<Post> {
        self.sender.posts.pop_front()
    }

    /// The next control word to write to a sender. While there is no way to its server none is given: all that counts is
    /// told again when there is one.
    pub fn poll_credit(&mut self) -> Option<Control> {
        loop {
            let word = self.sender.words.pop_front();
            let write = match word {
                Some(word) => word,
                None => self.receiver.poll_credit(&self.config, self.class, &self.views)?,
            };
            let server = self.config.cluster.server_of(write.to());
            if let Some((via, peer)) = self.ways.to(server) {
                return Some(Control { via, peer, write });
            }
        }
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

    /// What this rank waits for, the nearest to done first; `None`: nothing is due.
    pub fn waits_for(&self) -> Option<WaitsFor> {
        let sends = self.sender.waits_for(&self.config, self.class, &self.views);
        sends.or_else(|| self.receiver.waits_for(&self.config, self.class))
    }

    /// The state in words, for an error or a person: the call, what it waits for, what is left.
    pub fn describe(&self) -> String {
        let waits_for = self.waits_for().map_or("nothing".to_owned(), |w| w.to_string());
        let turns = self.turns.iter().enumerate().flat_map(|(k, t)| t.iter().map(move |t| (k, t)));
        let turns =
            turns.filter(|(_, t)| !t.is_finished()).map(|(k, t)| format!("{} of {}", t, NicIdx(k as u32)));
        let turns: Vec<_> = turns.collect();
        format!(
            "call {}{}: waits for {waits_for}; {} bytes to send, {} to receive; open turns: {}{}",
            self.config.call.0,
            if self.detours() { " (with detours)" } else { "" },
            self.sender.unsent_bytes(),
            self.receiver.expected_bytes(),
            if turns.is_empty() { "none".to_owned() } else { turns.join(", ") },
            self.describe_lots()
        )
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
        match self.waits_for() {
            None => Ok(()),
            Some(waits_for) => Err(EngineError::Stalled { after_ns, waits_for }),
        }
    }
}
