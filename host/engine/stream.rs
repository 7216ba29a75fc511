//! Streams of one-sided puts: messages that no call announces. Slots are armed ahead for every destination, the doorbell says
//! how much was written, and the receiver hands messages on in their order.
//!
//! Their class has slots and credits of its own, so calls and puts do not wait for each other. A slot armed for one
//! destination is of no use to another, so every destination may have `AHEAD` of them whatever the others have: there are
//! as many send slots beside each NIC. Failed paths are gone round as in calls (`detour.rs`): a message is a message.
//!
//! Messages that wait for one that is missing keep their slots. So that the missing one can come by any NIC, the last credit of
//! each line is kept for it (unless a line has one only), and the last send slot beside each NIC for messages that go again.
//!
//! Handing on in order is also what makes signals count once (each sequence is handed on once, however often its message was
//! sent), and what bounds how far a stream runs ahead: all messages after one that is missing keep their receive slots.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::sender::{Message, Sender};
use super::{Arm, EngineConfig, NicView, Publish};
use crate::doorbell::{Class, Signal};
use crate::topo::{NicIdx, Rank};

/// Slots that a destination may have armed.
pub(super) const AHEAD: u32 = 4;
const CLASS: Class = Class::LowLatency;

/// Whether a class's credits stand from the start, and again as soon as a slot was read.
pub(super) fn credits_stand(config: &EngineConfig, class: Class) -> bool {
    match class {
        Class::Plan => false,
        Class::Put => true,
        Class::LowLatency => is_on(config),
    }
}

fn is_on(config: &EngineConfig) -> bool {
    config.slots.config().put_bytes > 0
}

/// Whether nobody waits for an armed slot to be filled.
pub(super) fn is_idle(armed: &Message) -> bool {
    armed.class == CLASS
}

/// Whether a kernel may have filled an armed slot so.
pub(super) fn may_hold(armed: &Message, bytes: u64, signal: Option<Signal>) -> bool {
    let whole = u64::from(armed.bytes);
    if armed.class == CLASS { bytes <= whole } else { bytes == whole && signal.is_none() }
}

/// The sending end: what is told of which messages have come.
#[derive(Debug, Default)]
pub(super) struct PutStreams {
    /// Destinations take turns.
    next_dst: u32,
    /// By rank.
    done: Vec<Done>,
    flushed: VecDeque<Rank>,
}

/// Messages that have come: all below `through`, and some beyond.
#[derive(Debug, Default, Clone)]
struct Done {
    through: u64,
    beyond: BTreeSet<u64>,
}

impl PutStreams {
    pub(super) fn new(config: &EngineConfig) -> Self {
        let done = vec![Done::default(); config.cluster.ranks() as usize];
        Self { done, ..Self::default() }
    }

    /// A message is in its destination's memory.
    pub(super) fn done(&mut self, message: &Message) {
        if message.class != CLASS {
            return;
        }
        let done = &mut self.done[message.dst.idx()];
        done.beyond.insert(message.seq);
        let before = done.through;
        while done.beyond.remove(&done.through) {
            done.through += 1;
        }
        if done.through > before && !self.flushed.contains(&message.dst) {
            self.flushed.push_back(message.dst);
        }
    }

    pub(super) fn poll_flushed(&mut self) -> Option<(Rank, u64)> {
        let dst = self.flushed.pop_front()?;
        Some((dst, self.done[dst.idx()].through))
    }
}

impl Sender {
    /// Arms the next slot for puts, if a destination lacks one that can have one.
    pub(super) fn poll_stream(&mut self, config: &EngineConfig, views: &[NicView]) -> Option<Arm> {
        if !is_on(config) {
            return None;
        }
        let ranks = config.cluster.ranks();
        for n in 0..ranks {
            let dst = Rank((self.puts.next_dst + n) % ranks);
            if let Some((egress, ingress)) = self.stream_way(config, views, dst) {
                self.puts.next_dst = (dst.0 + 1) % ranks;
                return self.arm_stream(config, dst, egress, ingress);
            }
        }
        None
    }

    /// The pair of NICs by which the next put to a rank goes, if it may have a slot.
    fn stream_way(&self, config: &EngineConfig, views: &[NicView], dst: Rank) -> Option<(NicIdx, NicIdx)> {
        let places = self.queues[config.put_queue(dst) as usize].places();
        if !config.is_remote(dst) || places >= AHEAD.min(config.armed_depth).into() {
            return None;
        }
        let preferred = config.cluster.direct_nic(dst)?;
        let ingress = |egress| {
            let nic = self.detour_ingress(config, CLASS, dst, None, egress, preferred);
            nic.filter(|&nic| self.has_spare_credit(config, dst, nic))
        };
        // The last one is for messages that go again.
        let may_take = |egress: &NicIdx| self.free_slots[self.slot_at(CLASS, *egress)].len() > 1;
        let untroubled = self.paths.is_untroubled();
        let chosen = || self.choose_egress(config, CLASS, views, config.slots.config().put_bytes);
        if let Some(egress) = chosen().filter(|_| untroubled).filter(may_take) {
            return Some((egress, ingress(egress)?));
        }
        let mut others = self.egress_nics(config, CLASS, views, None).filter(may_take);
        others.find_map(|egress| Some((egress, ingress(egress)?)))
    }

    fn has_spare_credit(&self, config: &EngineConfig, dst: Rank, ingress: NicIdx) -> bool {
        let kept = usize::from(config.slots.config().recv_slots > 1);
        self.credits[self.credit_at(CLASS, dst, ingress)].held() > kept
    }

    /// Whether a message that goes again may spend a credit of a line: the last one only if all before it have come, for
    /// then it is handed on at once, and its slot lent again.
    pub(super) fn may_spend(&self, config: &EngineConfig, m: &Message, ingress: NicIdx) -> bool {
        let is_next = || m.seq == self.puts.done[m.dst.idx()].through;
        m.class != CLASS || is_next() || self.has_spare_credit(config, m.dst, ingress)
    }

    fn arm_stream(
        &mut self,
        config: &EngineConfig,
        dst: Rank,
        egress: NicIdx,
        ingress: NicIdx,
    ) -> Option<Arm> {
        let slot_at = self.slot_at(CLASS, egress);
        let credit_at = self.credit_at(CLASS, dst, ingress);
        let lent = self.credits[credit_at].take(None, None)?;
        let send_slot = self.free_slots[slot_at].pop()?;
        let bytes = config.slots.config().put_bytes;
        let queue = config.put_queue(dst);
        let place = &mut self.queues[queue as usize];
        let idx = place.next_idx;
        place.next_idx += 1;
        place.armed.push(Message {
            idx,
            class: CLASS,
            dst,
            // Only puts use the queue: its places are their sequence.
            seq: idx,
            bytes,
            egress,
            send_slot,
            slot_is_sound: true,
            ingress,
            lent,
            attempts: 0,
            come: None,
            signal: None,
        });
        place.armed.last().map(|message| arm_of(queue, message))
    }

    pub(super) fn armed_ahead(&self, config: &EngineConfig, dst: Rank) -> Vec<Arm> {
        let queue = config.put_queue(dst);
        let mut arms: Vec<_> = self.queues[queue as usize].armed.iter().map(|m| arm_of(queue, m)).collect();
        arms.sort_by_key(|arm| arm.idx);
        arms
    }

    /// A message as its kernel has filled it.
    pub(super) fn filled(
        &mut self,
        config: &EngineConfig,
        armed: Message,
        bytes: u32,
        signal: Option<Signal>,
    ) -> Message {
        let message = Message { bytes, signal, ..armed };
        if message.class == CLASS {
            // An armed slot is no load; from here on it is one.
            self.own_bytes[message.egress.idx()] += u64::from(bytes);
            self.count(config, &message);
        }
        message
    }
}

fn arm_of(queue: u32, message: &Message) -> Arm {
    Arm {
        queue,
        idx: message.idx,
        class: CLASS,
        nic: message.egress,
        slot: message.send_slot,
        bytes: message.bytes,
        piece: 0,
        part: message.idx as u32,
    }
}

/// The receiving end: messages that came before others of their source wait for those.
#[derive(Debug)]
pub(super) struct InOrder {
    /// By source: the next sequence to hand on, and what came beyond it.
    sources: Vec<(u64, BTreeMap<u64, Publish>)>,
    arrivals: VecDeque<Publish>,
}

impl InOrder {
    pub(super) fn new(ranks: usize) -> Self {
        Self { sources: vec![(0, BTreeMap::new()); ranks], arrivals: VecDeque::new() }
    }

    /// Takes a message; `Err` when its sequence has been before.
    pub(super) fn arrived(&mut self, arrival: Publish) -> Result<(), ()> {
        let (next, beyond) = &mut self.sources[arrival.src.idx()];
        if arrival.seq < *next || beyond.insert(arrival.seq, arrival).is_some() {
            return Err(());
        }
        while let Some(arrival) = beyond.remove(next) {
            *next += 1;
            self.arrivals.push_back(arrival);
        }
        Ok(())
    }

    pub(super) fn poll_arrival(&mut self) -> Option<Publish> {
        self.arrivals.pop_front()
    }
}

#[cfg(test)]
mod tests;
