//! The sending half: pieces to send, send slots, credits held, messages on the way.
//!
//! What goes next is decided here, message by message, so that no piece waits behind another that cannot go. Where the
//! NIC is prescribed, of the pieces that may go the one with most left does: all destinations of a transfer advance
//! together, which keeps redistribution at the receivers spread. Where it is not, destinations take turns: the short
//! ones end soon, and their NICs fall idle for the others.

use std::collections::VecDeque;

use super::call::{Call, CallId, Run, messages};
use super::credits::Credits;
use super::immediate::Immediate;
use super::lots;
use super::recovery::{Paths, Recovery, Slab};
use super::route::{self, Ask, Candidate, NicState, Rail, RouteLimits};
use super::stream::{self, PutStreams};
use super::{Arm, CreditWrite, EngineConfig, EngineError, Lent, NicView, Post, Sent, WaitsFor};
use crate::doorbell::{Class, Signal};
use crate::hw::WorkError;
use crate::topo::{NicIdx, Rank};

/// A message that has a slot at both ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message {
    pub(super) idx: u64,
    pub(super) class: Class,
    pub(super) dst: Rank,
    pub(super) seq: u64,
    pub(super) bytes: u32,
    pub(super) egress: NicIdx,
    pub(super) send_slot: u32,
    /// Whether its send slot may be used again: not when a device that does not answer may still read it.
    pub(super) slot_is_sound: bool,
    pub(super) ingress: NicIdx,
    /// The credit that it spends.
    pub(super) lent: Lent,
    /// How often it has been sent in vain.
    pub(super) attempts: u32,
    /// Whether it has come, once that is known before its way is closed; false also where its credit was called in before it
    /// was sent.
    pub(super) come: Option<bool>,
    /// What it does to a signal of its receiver.
    pub(super) signal: Option<Signal>,
}

/// What a kernel says of an armed slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Filled {
    pub(super) queue: u32,
    pub(super) idx: u64,
    pub(super) bytes: u64,
    pub(super) signal: Option<Signal>,
}

/// A ring of armed slots, as the engine knows it.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) next_idx: u64,
    pub(super) armed: Vec<Message>,
}

impl Queue {
    /// Places from the oldest that is not filled yet: the ring's reader may still be there.
    pub(super) fn places(&self) -> u64 {
        self.armed.iter().map(|m| m.idx).min().map_or(0, |oldest| self.next_idx - oldest)
    }
}

/// A piece, and how many of its messages are armed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) run: Run,
    pub(super) next_part: u64,
    left_bytes: u64,
}

#[derive(Debug)]
pub(super) struct Sender {
    pub(super) queues: Vec<Queue>,
    /// Pieces with messages left, by egress NIC and, last, those whose NIC is not prescribed; by transfer.
    pub(super) groups: Vec<VecDeque<Piece>>,
    pub(super) next_group: usize,
    /// `[class][egress]`: of lots that may be used.
    pub(super) free_slots: Vec<Vec<u32>>,
    /// `[class][egress]`: slots of a lot that is asked back which nothing lies in any more. `None`: it is not.
    pub(super) parked: Vec<Option<u32>>,
    /// Words for receivers.
    pub(super) words: VecDeque<CreditWrite>,
    /// `[class][dst][ingress]`.
    pub(super) credits: Vec<Credits>,
    /// `[class][dst]`: sequence of the first message of the present call.
    seq_base: Vec<u64>,
    /// `[class][dst]`: messages of the present call.
    seq_count: Vec<u64>,
    /// Between a doorbell and its completion.
    pub(super) on_the_way: Slab<Message>,
    pub(super) paths: Paths,
    pub(super) recovery: Recovery,
    /// Messages to hand to a NIC.
    pub(super) posts: VecDeque<Post>,
    /// `[egress]`, from arming to completion.
    pub(super) own_bytes: Vec<u64>,
    unsent_bytes: u64,
    sent: Sent,
    /// Paths have failed in this call: prescribed ways and turns are preferences only.
    pub(super) detours: bool,
    /// By server: it has called in planned credits of this call, or granted others in their place, so none of its ranks counts
    /// planned bytes by NIC any more.
    pub(super) alike: Vec<bool>,
    pub(super) message_bytes: u32,
    pub(super) puts: PutStreams,
    ranks: usize,
    max_nics: usize,
}

/// `[class][egress]`.
fn free_slots(config: &EngineConfig) -> Vec<Vec<u32>> {
    let of =
        |(class, nic)| if config.starts_with(class, nic) { send_slots(config, class) } else { Vec::new() };
    lots::all(config.nics()).map(of).collect()
}

/// `[class][egress]`: a lot that is not there counts as given up.
fn parked(config: &EngineConfig) -> Vec<Option<u32>> {
    let of = |(class, nic)| (!config.starts_with(class, nic)).then(|| config.slots.send_slots(class));
    lots::all(config.nics()).map(of).collect()
}

pub(super) fn send_slots(config: &EngineConfig, class: Class) -> Vec<u32> {
    (0..config.slots.send_slots(class)).rev().collect()
}

impl Sender {
    pub(super) fn new(config: &EngineConfig) -> Self {
        let ranks = config.cluster.ranks() as usize;
        let max_nics = config.cluster.servers().iter().map(|s| s.nics.len()).max().unwrap_or(0);
        let (nics, classes) = (config.nics(), Class::ALL.len());
        Self {
            queues: (0..config.queues()).map(|_| Queue::default()).collect(),
            groups: vec![VecDeque::new(); nics + 1],
            next_group: 0,
            free_slots: free_slots(config),
            parked: parked(config),
            words: VecDeque::new(),
            credits: vec![Credits::default(); classes * ranks * max_nics],
            seq_base: vec![0; classes * ranks],
            seq_count: vec![0; classes * ranks],
            on_the_way: Slab::default(),
            paths: Paths::new(config),
            recovery: Recovery::default(),
            posts: VecDeque::new(),
            own_bytes: vec![0; nics],
            unsent_bytes: 0,
            sent: Sent::default(),
            detours: false,
            alike: vec![false; config.cluster.server_count() as usize],
            message_bytes: 0,
            puts: PutStreams::new(config),
            ranks,
            max_nics,
        }
    }

    pub(super) fn credit_at(&self, class: Class, dst: Rank, ingress: NicIdx) -> usize {
        (class as usize * self.ranks + dst.idx()) * self.max_nics + ingress.idx()
    }

    pub(super) fn slot_at(&self, class: Class, egress: NicIdx) -> usize {
        class as usize * self.own_bytes.len() + egress.idx()
    }

    /// Payload that is not armed yet.
    pub(super) fn unsent_bytes(&self) -> u64 {
        self.unsent_bytes
    }

    /// Payload at a NIC, from arming to completion.
    pub(super) fn own_bytes(&self, egress: NicIdx) -> u64 {
        self.own_bytes[egress.idx()]
    }

    pub(super) fn sent(&self) -> Sent {
        self.sent
    }

    pub(super) fn open(&mut self, config: &EngineConfig, call: &Call) -> Result<(), EngineError> {
        if self.unsent_bytes > 0 {
            return Err(EngineError::CallOpen { call: call.id });
        }
        for dst in 0..self.ranks {
            let at = call.class as usize * self.ranks + dst;
            self.seq_base[at] += self.seq_count[at];
            self.seq_count[at] = 0;
        }
        self.message_bytes = call.message_bytes;
        self.look_for_stand_ins(config);
        for &run in call.sends.iter().filter(|r| r.bytes > 0) {
            if run.queue.is_some_and(|q| q >= config.queues()) {
                return Err(EngineError::NoSuchQueue { queue: run.queue.unwrap_or(0) });
            }
            self.seq_count[call.class as usize * self.ranks + run.dst.idx()] +=
                messages(run.bytes, call.message_bytes);
            self.unsent_bytes += run.bytes;
            let any = self.groups.len() - 1;
            let group = run.egress.map_or(any, |nic| nic.idx().min(any));
            self.groups[group].push_back(Piece { run, next_part: 0, left_bytes: run.bytes });
        }
        for group in &mut self.groups {
            group.make_contiguous().sort_by_key(|p| transfer_order(p.run.transfer));
        }
        Ok(())
    }

    pub(super) fn on_credit(
        &mut self,
        config: &EngineConfig,
        class: Class,
        from: Rank,
        ingress: NicIdx,
        lent: Lent,
    ) {
        let at = self.credit_at(class, from, ingress);
        if lent.instead_of.is_some() {
            self.alike[config.cluster.server_of(from).idx()] = true;
        }
        if self.credits[at].receive(lent, line_slot(config, &lent)) {
            self.tell_returned(class, from, ingress);
        }
        if !self.recovery.doubts.is_empty() {
            self.settle(config);
        }
    }

    pub(super) fn on_peer_nic_state(&mut self, from: Rank, ingress: NicIdx, call: CallId, state: NicState) {
        let at = self.credit_at(Class::Put, from, ingress);
        self.credits[at].state = (call, state);
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.queues.iter().flat_map(|q| &q.armed).all(stream::is_idle)
            && self.on_the_way.is_empty()
            && self.recovery.is_empty()
            && self.posts.is_empty()
    }

    /// Arms the next message: NICs take turns, and on each the best piece goes.
    pub(super) fn poll_arm(&mut self, config: &EngineConfig, class: Class, views: &[NicView]) -> Option<Arm> {
        if self.detours {
            return self.poll_detour(config, class, views);
        }
        for _ in 0..self.groups.len() {
            let group = self.next_group;
            self.next_group = if self.is_prescribed(group) { group + 1 } else { 0 };
            if self.groups[group].is_empty() {
                continue;
            }
            let Some(egress) = self.egress_of(config, class, views, group) else { continue };
            if let Some((at, queue, ingress)) = self.best_piece(config, class, views, group, egress) {
                return Some(self.arm(config, class, (group, at), queue, egress, ingress));
            }
        }
        None
    }

    /// The last group's pieces may leave by any NIC.
    pub(super) fn is_prescribed(&self, group: usize) -> bool {
        group + 1 < self.groups.len()
    }

    /// The NIC by which a group's next message leaves, if it has a free slot.
    fn egress_of(
        &self,
        config: &EngineConfig,
        class: Class,
        views: &[NicView],
        group: usize,
    ) -> Option<NicIdx> {
        if !self.is_prescribed(group) {
            return self.choose_egress(config, class, views, self.message_bytes);
        }
        let egress = NicIdx(group as u32);
        (!self.free_slots[self.slot_at(class, egress)].is_empty()).then_some(egress)
    }

    /// Of the pieces of a group that may go by `egress` now, the best; with the queue and the ingress NIC it takes.
    fn best_piece(
        &self,
        config: &EngineConfig,
        class: Class,
        views: &[NicView],
        group: usize,
        egress: NicIdx,
    ) -> Option<(usize, u32, NicIdx)> {
        let turn = views[egress.idx()].egress_turn;
        let prescribed = self.is_prescribed(group);
        let mut best: Option<(usize, u32, NicIdx)> = None;
        for (at, piece) in self.groups[group].iter().enumerate() {
            if let Some((b, ..)) = best {
                let b = &self.groups[group][b];
                if !prescribed || transfer_order(piece.run.transfer) > transfer_order(b.run.transfer) {
                    break;
                }
                if piece.left_bytes <= b.left_bytes {
                    continue;
                }
            }
            if class == Class::Plan && !turn.allows(config.call, piece.run.transfer) {
                continue;
            }
            let Some(queue) = self.queue_for(config, &piece.run, egress) else { continue };
            if let Some(ingress) = self.ingress_of(config, class, &piece.run, egress) {
                best = Some((at, queue, ingress));
            }
        }
        best
    }

    /// The emptiest work queue, or the one that is prescribed, if it has a place.
    pub(super) fn queue_for(&self, config: &EngineConfig, run: &Run, egress: NicIdx) -> Option<u32> {
        let queue = match run.queue {
            Some(queue) => queue,
            None => self.emptiest_queue(config, run.egress.is_none() && is_relayed(config, egress))?,
        };
        (self.places(queue) < config.armed_depth.into()).then_some(queue)
    }

    /// Relayed messages leave a quarter of the queues alone: filling them takes scale-up's time, and a direct message
    /// behind them would leave its NIC idle for as long.
    fn emptiest_queue(&self, config: &EngineConfig, relayed: bool) -> Option<u32> {
        let spared = if relayed && config.limits.policy.bounded { config.work_queues / 4 } else { 0 };
        // From the last one on, so that direct messages find the spared ones first.
        (0..config.work_queues - spared).rev().min_by_key(|&q| self.places(q))
    }

    fn places(&self, queue: u32) -> u64 {
        self.queues[queue as usize].places()
    }

    /// The NIC by which a message comes in, if its receiver has granted a slot there.
    fn ingress_of(&self, config: &EngineConfig, class: Class, run: &Run, egress: NicIdx) -> Option<NicIdx> {
        match run.ingress {
            None => {
                let rail = Rail { nic: egress, relayed: is_relayed(config, egress) };
                self.choose_ingress(config, class, run.dst, rail)
            }
            Some(nic) => self.prescribed_ingress(config, class, run, (egress, nic)),
        }
    }

    /// The prescribed NIC if it has a credit; while the receiver has no memory beside it, one that stands for it.
    fn prescribed_ingress(
        &self,
        config: &EngineConfig,
        class: Class,
        run: &Run,
        (egress, nic): (NicIdx, NicIdx),
    ) -> Option<NicIdx> {
        let credits = &self.credits[self.credit_at(class, run.dst, nic)];
        if credits.serves(run.transfer, None) {
            return Some(nic);
        }
        let is_down = credits.state == (config.call, NicState::Down);
        if class == Class::Put && is_down {
            let rail = Rail { nic: egress, relayed: is_relayed(config, egress) };
            return self.choose_ingress(config, class, run.dst, rail);
        }
        let alike = self.alike[config.cluster.server_of(run.dst).idx()];
        self.stand_in(config, class, run, nic).filter(|_| alike)
    }

    /// A NIC with a credit that stands for another.
    fn stand_in(&self, config: &EngineConfig, class: Class, run: &Run, nic: NicIdx) -> Option<NicIdx> {
        let nics = config.cluster.server(config.cluster.server_of(run.dst)).nics.len() as u32;
        let serves = |&k: &NicIdx| {
            self.credits[self.credit_at(class, run.dst, k)]
                .serves(run.transfer, instead_of(class, Some(nic), k))
        };
        (0..nics).map(NicIdx).filter(|&k| k != nic).find(serves)
    }

    pub(super) fn choose_egress(
        &self,
        config: &EngineConfig,
        class: Class,
        views: &[NicView],
        message_bytes: u32,
    ) -> Option<NicIdx> {
        let queue = self.emptiest_queue(config, true);
        let may_relay = queue.is_some_and(|q| self.places(q) < config.armed_depth.into());
        let nics = views.len();
        let free_slots = &self.free_slots[self.slot_at(class, NicIdx(0))..][..nics];
        let own_bytes = &self.own_bytes[..nics];
        let candidates = (0..nics).map(|k| {
            let nic = NicIdx(k as u32);
            let queued = may_relay || !is_relayed(config, nic);
            Candidate {
                nic,
                available: queued && !free_slots[k].is_empty(),
                state: views[k].egress.state,
                own_bytes: own_bytes[k],
                borrowed_bytes: views[k].egress.borrowed_bytes,
            }
        });
        let (direct, bytes) = (config.direct_nic?, message_bytes.into());
        route::choose(Ask { direct, rail: None, bytes, limits: config.limits }, candidates)
    }

    fn choose_ingress(&self, config: &EngineConfig, class: Class, dst: Rank, rail: Rail) -> Option<NicIdx> {
        let bytes = u64::from(self.message_bytes);
        let server = config.cluster.server_of(dst);
        let direct = config.cluster.direct_nic(dst)?;
        let held = config.slots.config().recv_slots as usize;
        let nics = &config.cluster.server(server).nics;
        let lines = &self.credits[self.credit_at(class, dst, NicIdx(0))..][..nics.len()];
        let candidates = (0..nics.len()).map(|k| {
            let (spec, credits) = (&nics[k], &lines[k]);
            // Credits that do not stand are messages on the way or not drained yet: this rank's share of the NIC.
            let out = held.saturating_sub(credits.held()) as u64 * bytes;
            let state = match credits.state {
                _ if spec.mbit_per_s == 0 => NicState::Down,
                (call, state) if call == config.call => state,
                _ => NicState::Busy,
            };
            Candidate {
                nic: NicIdx(k as u32),
                available: credits.serves(None, None),
                state,
                own_bytes: out,
                borrowed_bytes: out,
            }
        });
        // Many may send to one receiver: each counts its direct NIC as idle for one message at a time.
        let limits = RouteLimits { direct_bytes: bytes, ..config.limits };
        route::choose(Ask { direct, rail: Some(rail), bytes, limits }, candidates)
    }

    /// Commits the choice: takes the slots at both ends.
    pub(super) fn arm(
        &mut self,
        config: &EngineConfig,
        class: Class,
        (group, at): (usize, usize),
        queue: u32,
        egress: NicIdx,
        ingress: NicIdx,
    ) -> Arm {
        let (slot_at, dst) = (self.slot_at(class, egress), self.groups[group][at].run.dst);
        let piece = &mut self.groups[group][at];
        let (run, part) = (piece.run, piece.next_part);
        let bytes = piece.left_bytes.min(self.message_bytes.into()) as u32;
        piece.next_part += 1;
        piece.left_bytes -= u64::from(bytes);
        let done = piece.left_bytes == 0;
        if done || !self.is_prescribed(group) {
            let piece = self.groups[group].remove(at);
            self.groups[group].extend(piece.filter(|_| !done));
        }
        // The choice has seen that both are there.
        let send_slot = self.free_slots[slot_at].pop().unwrap_or_default();
        let serves = instead_of(class, run.ingress, ingress);
        let lent = self.spend(config, (class, dst, ingress), (run.transfer, serves));
        let seq = self.seq_of(class, &run, part);
        let place = &mut self.queues[queue as usize];
        let idx = place.next_idx;
        place.next_idx += 1;
        let message = Message {
            idx,
            class,
            dst: run.dst,
            seq,
            bytes,
            egress,
            send_slot,
            slot_is_sound: true,
            ingress,
            lent,
            attempts: 0,
            come: None,
            signal: None,
        };
        place.armed.push(message);
        self.own_bytes[egress.idx()] += u64::from(bytes);
        self.unsent_bytes -= u64::from(bytes);
        self.count(config, &message);
        Arm { queue, idx, class, nic: egress, slot: send_slot, bytes, piece: run.piece, part: part as u32 }
    }

    /// Sequence of a message of a piece among all from this rank to its destination.
    pub(super) fn seq_of(&self, class: Class, run: &Run, part: u64) -> u64 {
        self.seq_base[class as usize * self.ranks + run.dst.idx()] + u64::from(run.first_seq) + part
    }

    pub(super) fn count(&mut self, config: &EngineConfig, message: &Message) {
        let cluster = &config.cluster;
        let beside = |rank: Rank, nic: NicIdx| {
            cluster.server(cluster.server_of(rank)).nics[nic.idx()].relay_gpu == cluster.gpu_of(rank)
        };
        self.sent.messages += 1;
        self.sent.bytes += u64::from(message.bytes);
        if !beside(config.rank, message.egress) || !beside(message.dst, message.ingress) {
            self.sent.relayed_bytes += u64::from(message.bytes);
        }
    }

    /// A kernel has filled an armed slot.
    pub(super) fn on_filled(&mut self, config: &EngineConfig, filled: Filled) -> Result<(), EngineError> {
        let Filled { queue, idx, bytes, signal } = filled;
        let unknown = EngineError::BadDoorbell { queue, idx, bytes };
        let armed = &mut self.queues.get_mut(queue as usize).ok_or(unknown)?.armed;
        let fits = |m: &Message| m.idx == idx && stream::may_hold(m, bytes, signal);
        let at = armed.iter().position(fits).ok_or(unknown)?;
        let message = armed.swap_remove(at);
        let message = self.filled(config, message, bytes as u32, signal);
        self.post(config, message);
        Ok(())
    }

    /// Hands a message that lies in its send slot to its NIC; one whose credit was called in meanwhile needs another.
    pub(super) fn post(&mut self, config: &EngineConfig, message: Message) {
        if message.come == Some(false) {
            return self.recovery.again.push(Message { come: None, ..message });
        }
        let gpu = config.cluster.gpu_of(message.dst);
        let imm = Immediate::new(message.class, gpu, message.lent.slot, message.seq).encode();
        self.posts.push_back(Post {
            class: message.class,
            nic: message.egress,
            slot: message.send_slot,
            bytes: message.bytes,
            dst: message.dst,
            dst_nic: message.ingress,
            dst_slot: message.lent.slot,
            imm,
            seq: message.seq,
            signal: message.signal,
            cookie: self.on_the_way.insert(message),
        });
    }

    /// A NIC has reported: the message is done, goes again, or is in doubt.
    pub(super) fn on_completed(
        &mut self,
        config: &EngineConfig,
        cookie: u64,
        result: Result<(), WorkError>,
    ) -> Result<(), EngineError> {
        let message = self.on_the_way.remove(cookie).ok_or(EngineError::BadCompletion { cookie })?;
        match result {
            Ok(()) => self.done(&message),
            Err(source) => self.failed(config, message, source)?,
        }
        Ok(())
    }

    /// The message has come: its slot is free again.
    pub(super) fn done(&mut self, message: &Message) {
        self.own_bytes[message.egress.idx()] -= u64::from(message.bytes);
        self.puts.done(message);
        self.free_slot(message.class, (message.egress, message.send_slot), message.slot_is_sound);
    }

    pub(super) fn free_slot(&mut self, class: Class, (nic, slot): (NicIdx, u32), is_sound: bool) {
        let at = self.slot_at(class, nic);
        match &mut self.parked[at] {
            _ if !is_sound => {}
            Some(parked) => *parked += 1,
            None => self.free_slots[at].push(slot),
        }
    }

    /// What sending waits for, the nearest to done first.
    pub(super) fn waits_for(
        &self,
        config: &EngineConfig,
        class: Class,
        views: &[NicView],
    ) -> Option<WaitsFor> {
        if let Some(waits_for) = self.recovery_waits_for() {
            return Some(waits_for);
        }
        if let Some(m) = self.on_the_way.iter().next() {
            return Some(WaitsFor::Completion {
                nic: m.egress,
                dst: m.dst,
                dst_nic: m.ingress,
                slot: m.send_slot,
            });
        }
        let due = |queue: &'_ Queue| queue.armed.iter().find(|m| !stream::is_idle(m)).copied();
        let armed = self.queues.iter().enumerate().find_map(|(q, queue)| Some((q, due(queue)?)));
        if let Some((queue, m)) = armed {
            return Some(WaitsFor::Kernel {
                queue: queue as u32,
                idx: m.idx,
                nic: m.egress,
                slot: m.send_slot,
            });
        }
        let run = self.groups.iter().find_map(|g| g.front())?.run;
        let Some(egress) =
            run.egress.or_else(|| self.choose_egress(config, class, views, self.message_bytes))
        else {
            return Some(WaitsFor::Route { dst: run.dst });
        };
        let turn = views[egress.idx()].egress_turn;
        Some(match (run.transfer, run.ingress) {
            (transfer, _) if class == Class::Plan && !self.detours && !turn.allows(config.call, transfer) => {
                WaitsFor::Turn { dst: run.dst, transfer, egress }
            }
            _ if self.free_slots[self.slot_at(class, egress)].is_empty() => {
                WaitsFor::SendSlot { dst: run.dst, egress }
            }
            (_, ingress) => WaitsFor::Credit { dst: run.dst, egress, ingress },
        })
    }
}

/// Which credits of a NIC serve a message that is to come in by `prescribed`: planned ones are counted by NIC, so those
/// that the receiver has granted in its place.
pub(super) fn instead_of(class: Class, prescribed: Option<NicIdx>, nic: NicIdx) -> Option<NicIdx> {
    prescribed.filter(|&p| class == Class::Plan && p != nic)
}

/// Whether a slot beside the NIC is filled over scale-up.
fn is_relayed(config: &EngineConfig, egress: NicIdx) -> bool {
    config.direct_nic != Some(egress)
}

/// Place of a receive slot among those of its credit line.
pub(super) fn line_slot(config: &EngineConfig, lent: &Lent) -> usize {
    (lent.slot % config.slots.config().recv_slots) as usize
}

/// List order; what belongs to no transfer comes last.
pub(super) fn transfer_order(transfer: Option<u32>) -> u64 {
    transfer.map_or(u64::MAX, u64::from)
}
