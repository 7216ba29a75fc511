//! The sending half: lanes, send slots, credits held, messages on the way.

use std::collections::VecDeque;

use super::call::{Call, Run, messages};
use super::route::{self, Candidate, NicState};
use super::{Arm, EngineConfig, EngineError, NicView, Post, Sent, WaitsFor};
use crate::doorbell::Class;
use crate::engine::immediate::Immediate;
use crate::hw::WorkError;
use crate::topo::{NicIdx, Rank};

/// A message that has a slot at both ends.
#[derive(Clone, Copy, Debug)]
struct Message {
    idx: u64,
    class: Class,
    dst: Rank,
    seq: u64,
    bytes: u32,
    egress: NicIdx,
    send_slot: u32,
    ingress: NicIdx,
    recv_slot: u32,
}

#[derive(Debug, Default)]
struct Lane {
    /// Index of the next message to arm.
    next_idx: u64,
    runs: VecDeque<Run>,
    /// Messages of the first run that are armed already.
    run_messages: u64,
    armed: VecDeque<Message>,
}

/// Credits that stand at this rank for one receiver, class and ingress NIC.
#[derive(Debug, Default, Clone)]
struct Credits {
    slots: VecDeque<u32>,
    state: NicState,
}

/// What lies in a send slot's life between arming and completion.
#[derive(Debug)]
struct Slab {
    items: Vec<Option<Message>>,
    free: Vec<usize>,
}

impl Slab {
    fn insert(&mut self, message: Message) -> u64 {
        let at = self.free.pop().unwrap_or_else(|| {
            self.items.push(None);
            self.items.len() - 1
        });
        self.items[at] = Some(message);
        at as u64
    }

    fn remove(&mut self, cookie: u64) -> Option<Message> {
        let at = usize::try_from(cookie).ok()?;
        let message = self.items.get_mut(at)?.take()?;
        self.free.push(at);
        Some(message)
    }
}

#[derive(Debug)]
pub(super) struct Sender {
    lanes: Vec<Lane>,
    /// Lanes with runs left or messages armed, in turn.
    active: Vec<u32>,
    next_active: usize,
    /// `[class][egress]`.
    free_slots: Vec<Vec<u32>>,
    /// `[class][dst][ingress]`.
    credits: Vec<Credits>,
    /// `[class][dst]`: sequence of the first message of the present call.
    seq_base: Vec<u64>,
    /// `[class][dst]`: messages of the present call.
    seq_count: Vec<u64>,
    on_the_way: Slab,
    /// `[egress]`, from arming to completion.
    own_bytes: Vec<u64>,
    unsent_bytes: u64,
    sent: Sent,
    message_bytes: u32,
    ranks: usize,
    max_nics: usize,
}

impl Sender {
    pub(super) fn new(config: &EngineConfig) -> Self {
        let ranks = config.cluster.ranks() as usize;
        let max_nics = config.cluster.servers().iter().map(|s| s.nics.len()).max().unwrap_or(0);
        let nics = config.nics();
        let classes = Class::ALL.len();
        Self {
            lanes: (0..config.lanes()).map(|_| Lane::default()).collect(),
            active: Vec::new(),
            next_active: 0,
            free_slots: vec![(0..config.slots.config().send_slots).rev().collect(); classes * nics],
            credits: vec![Credits::default(); classes * ranks * max_nics],
            seq_base: vec![0; classes * ranks],
            seq_count: vec![0; classes * ranks],
            on_the_way: Slab { items: Vec::new(), free: Vec::new() },
            own_bytes: vec![0; nics],
            unsent_bytes: 0,
            sent: Sent::default(),
            message_bytes: 0,
            ranks,
            max_nics,
        }
    }

    fn credit_at(&self, class: Class, dst: Rank, ingress: NicIdx) -> usize {
        (class as usize * self.ranks + dst.idx()) * self.max_nics + ingress.idx()
    }

    fn slot_at(&self, class: Class, egress: NicIdx) -> usize {
        class as usize * self.own_bytes.len() + egress.idx()
    }

    /// Messages and bytes that have not left yet, for the load table and for the wait report.
    pub(super) fn unsent_bytes(&self) -> u64 {
        self.unsent_bytes
    }

    pub(super) fn own_bytes(&self, egress: NicIdx) -> u64 {
        self.own_bytes[egress.idx()]
    }

    pub(super) fn open(&mut self, call: &Call) -> Result<(), EngineError> {
        if self.active.iter().any(|&l| !self.lanes[l as usize].runs.is_empty()) {
            return Err(EngineError::CallOpen { call: call.id });
        }
        self.active.clear();
        for dst in 0..self.ranks {
            let at = call.class as usize * self.ranks + dst;
            self.seq_base[at] += self.seq_count[at];
            self.seq_count[at] = 0;
        }
        self.message_bytes = call.message_bytes;
        for work in &call.lanes {
            let lane =
                self.lanes.get_mut(work.lane as usize).ok_or(EngineError::NoSuchLane { lane: work.lane })?;
            lane.runs = work.runs.iter().copied().filter(|r| r.bytes > 0).collect();
            lane.run_messages = 0;
            for run in &lane.runs {
                let at = call.class as usize * self.ranks + run.dst.idx();
                self.seq_count[at] += messages(run.bytes, call.message_bytes);
                self.unsent_bytes += run.bytes;
            }
            if !lane.runs.is_empty() {
                self.active.push(work.lane);
            }
        }
        Ok(())
    }

    pub(super) fn on_credit(&mut self, class: Class, from: Rank, ingress: NicIdx, slot: u32) {
        let at = self.credit_at(class, from, ingress);
        self.credits[at].slots.push_back(slot);
    }

    pub(super) fn on_peer_nic_state(&mut self, from: Rank, ingress: NicIdx, state: NicState) {
        let at = self.credit_at(Class::Put, from, ingress);
        self.credits[at].state = state;
    }

    /// What the peers said of their NICs belonged to the call before.
    pub(super) fn forget_peer_states(&mut self) {
        for credits in &mut self.credits {
            credits.state = NicState::Busy;
        }
    }

    /// Arms the next message of the first lane, in turn, that has all it needs.
    pub(super) fn poll_arm(&mut self, config: &EngineConfig, class: Class, views: &[NicView]) -> Option<Arm> {
        for _ in 0..self.active.len() {
            let at = self.next_active % self.active.len();
            self.next_active = at + 1;
            let lane_idx = self.active[at];
            if let Some(arm) = self.arm_lane(config, class, views, lane_idx) {
                return Some(arm);
            }
        }
        None
    }

    fn arm_lane(
        &mut self,
        config: &EngineConfig,
        class: Class,
        views: &[NicView],
        lane_idx: u32,
    ) -> Option<Arm> {
        let lane = &self.lanes[lane_idx as usize];
        let run = *lane.runs.front()?;
        if lane.armed.len() >= config.armed_depth as usize {
            return None;
        }
        let done = lane.run_messages * u64::from(self.message_bytes);
        let bytes = (run.bytes - done).min(self.message_bytes.into()) as u32;
        let (egress, ingress) = self.route(config, class, views, &run, bytes.into())?;
        let slot_at = self.slot_at(class, egress);
        let credit_at = self.credit_at(class, run.dst, ingress);
        let send_slot = self.free_slots[slot_at].pop()?;
        let Some(recv_slot) = self.credits[credit_at].slots.pop_front() else {
            self.free_slots[slot_at].push(send_slot);
            return None;
        };
        let base = self.seq_base[class as usize * self.ranks + run.dst.idx()];
        let lane = &mut self.lanes[lane_idx as usize];
        let seq = base + u64::from(run.first_seq) + lane.run_messages;
        let message = Message {
            idx: lane.next_idx,
            class,
            dst: run.dst,
            seq,
            bytes,
            egress,
            send_slot,
            ingress,
            recv_slot,
        };
        lane.next_idx += 1;
        lane.run_messages += 1;
        if done + u64::from(bytes) == run.bytes {
            lane.runs.pop_front();
            lane.run_messages = 0;
        }
        lane.armed.push_back(message);
        self.own_bytes[egress.idx()] += u64::from(bytes);
        self.unsent_bytes -= u64::from(bytes);
        self.count(config, &message);
        Some(Arm { lane: lane_idx, idx: message.idx, class, nic: egress, slot: send_slot, bytes })
    }

    fn count(&mut self, config: &EngineConfig, message: &Message) {
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

    pub(super) fn sent(&self) -> Sent {
        self.sent
    }

    /// Both NICs of the next message of a run, or `None` for later.
    fn route(
        &self,
        config: &EngineConfig,
        class: Class,
        views: &[NicView],
        run: &Run,
        bytes: u64,
    ) -> Option<(NicIdx, NicIdx)> {
        let egress = match run.egress {
            Some(egress) => {
                let turn =
                    run.transfer.is_none_or(|t| views[egress.idx()].egress_turn.allows(config.call, t));
                turn.then_some(egress)?
            }
            None => self.choose_egress(config, class, views, bytes)?,
        };
        let ingress = match run.ingress {
            Some(ingress) => ingress,
            None => self.choose_ingress(config, class, run.dst, bytes)?,
        };
        Some((egress, ingress))
    }

    fn choose_egress(
        &self,
        config: &EngineConfig,
        class: Class,
        views: &[NicView],
        bytes: u64,
    ) -> Option<NicIdx> {
        let candidates = views.iter().enumerate().map(|(k, view)| {
            let nic = NicIdx(k as u32);
            Candidate {
                nic,
                available: !self.free_slots[self.slot_at(class, nic)].is_empty(),
                state: view.egress.state,
                own_bytes: self.own_bytes[k],
                borrowed_bytes: view.egress.borrowed_bytes,
            }
        });
        route::choose(config.direct_nic?, candidates, bytes, config.limits)
    }

    fn choose_ingress(&self, config: &EngineConfig, class: Class, dst: Rank, bytes: u64) -> Option<NicIdx> {
        let server = config.cluster.server_of(dst);
        let direct = config.cluster.direct_nic(dst)?;
        let held = u64::from(config.slots.config().recv_slots);
        let candidates = config.cluster.server(server).nics.iter().enumerate().map(|(k, spec)| {
            let nic = NicIdx(k as u32);
            let credits = &self.credits[self.credit_at(class, dst, nic)];
            let down = spec.mbit_per_s == 0;
            Candidate {
                nic,
                available: !credits.slots.is_empty(),
                state: if down { NicState::Down } else { credits.state },
                own_bytes: 0,
                // Credits that are out are messages on the way: fewer of them standing means a fuller NIC.
                borrowed_bytes: held.saturating_sub(credits.slots.len() as u64) * bytes,
            }
        });
        route::choose(direct, candidates, bytes, config.limits)
    }

    /// A kernel has filled an armed slot.
    pub(super) fn on_filled(
        &mut self,
        config: &EngineConfig,
        lane_idx: u32,
        idx: u64,
        bytes: u64,
    ) -> Result<Post, EngineError> {
        let unknown = || EngineError::BadDoorbell { lane: lane_idx, idx, bytes };
        let lane = self.lanes.get_mut(lane_idx as usize).ok_or_else(unknown)?;
        let at = lane.armed.iter().position(|m| m.idx == idx).ok_or_else(unknown)?;
        if u64::from(lane.armed[at].bytes) != bytes {
            return Err(unknown());
        }
        let message = lane.armed.remove(at).ok_or_else(unknown)?;
        let gpu = config.cluster.gpu_of(message.dst);
        let imm = Immediate::new(message.class, gpu, message.recv_slot, message.seq).encode();
        Ok(Post {
            class: message.class,
            nic: message.egress,
            slot: message.send_slot,
            bytes: message.bytes,
            dst: message.dst,
            dst_nic: message.ingress,
            dst_slot: message.recv_slot,
            imm,
            cookie: self.on_the_way.insert(message),
        })
    }

    /// A NIC has reported; returns the NIC and bytes that are free again.
    pub(super) fn on_completed(
        &mut self,
        cookie: u64,
        result: Result<(), WorkError>,
    ) -> Result<NicIdx, EngineError> {
        let message = self.on_the_way.remove(cookie).ok_or(EngineError::BadCompletion { cookie })?;
        if let Err(source) = result {
            let (nic, dst, dst_nic) = (message.egress, message.dst, message.ingress);
            return Err(EngineError::WriteFailed { nic, dst, dst_nic, seq: message.seq, source });
        }
        self.own_bytes[message.egress.idx()] -= u64::from(message.bytes);
        let at = self.slot_at(message.class, message.egress);
        self.free_slots[at].push(message.send_slot);
        Ok(message.egress)
    }

    /// What the first lane that cannot go on waits for.
    pub(super) fn waits_for(
        &self,
        config: &EngineConfig,
        class: Class,
        views: &[NicView],
    ) -> Option<WaitsFor> {
        if let Some(m) = self.on_the_way.items.iter().flatten().next() {
            return Some(WaitsFor::Completion {
                nic: m.egress,
                dst: m.dst,
                dst_nic: m.ingress,
                slot: m.send_slot,
            });
        }
        for &lane in &self.active {
            let l = &self.lanes[lane as usize];
            if let Some(m) = l.armed.front() {
                return Some(WaitsFor::Kernel { lane, idx: m.idx, nic: m.egress, slot: m.send_slot });
            }
            let Some(run) = l.runs.front() else { continue };
            let bytes = run.bytes.min(self.message_bytes.into());
            return Some(match self.route(config, class, views, run, bytes) {
                None => WaitsFor::Route { lane, dst: run.dst, transfer: run.transfer, egress: run.egress },
                Some((egress, ingress)) if self.free_slots[self.slot_at(class, egress)].is_empty() => {
                    WaitsFor::SendSlot { lane, dst: run.dst, egress, ingress }
                }
                Some((egress, ingress)) => WaitsFor::Credit { lane, dst: run.dst, egress, ingress },
            });
        }
        None
    }
}
