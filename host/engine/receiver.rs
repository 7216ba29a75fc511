//! The receiving half: credits granted, slots filled, arrivals in order of sequence number.

use std::collections::VecDeque;

use super::call::{Call, messages};
use super::immediate::{self, Immediate};
use super::route::NicState;
use super::{CreditWrite, EngineConfig, EngineError, NicView, Publish, WaitsFor};
use crate::doorbell::Class;
use crate::topo::{NicIdx, Rank};

/// A receive slot's life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SlotState {
    Free,
    Granted,
    Arrived,
}

/// What one remote rank may send through one NIC, in one class.
#[derive(Debug, Clone)]
struct Line {
    /// Credits ever granted: the place of the next one in the sender's ring.
    granted: u64,
    free: Vec<u32>,
    /// Plan class: messages still to be credited, by transfer, in list order.
    allowance: VecDeque<(Option<u32>, u64)>,
}

/// One sender, one class.
#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    /// Sequence of the first message of the present call.
    base: u64,
    /// Messages of the present call.
    expected: u64,
    arrived: u64,
    /// One past the highest sequence seen: what cut sequence numbers are near to.
    high: u64,
}

#[derive(Debug)]
pub(super) struct Receiver {
    /// `[class][sender][nic]`.
    lines: Vec<Line>,
    /// `[class][nic][slot]`.
    slots: Vec<SlotState>,
    /// `[class][sender]`.
    streams: Vec<Stream>,
    /// Arrivals of a call that is not open here yet.
    early: Vec<Publish>,
    publish: VecDeque<Publish>,
    credits: VecDeque<CreditWrite>,
    /// Plan lines with allowance left.
    waiting: Vec<usize>,
    /// What senders were last told of each NIC.
    told: Vec<NicState>,
    expected_bytes: u64,
    /// Senders of the present call.
    senders: Vec<Rank>,
    ranks: usize,
    nics: usize,
}

impl Receiver {
    pub(super) fn new(config: &EngineConfig) -> Self {
        let (ranks, nics, classes) = (config.cluster.ranks() as usize, config.nics(), Class::ALL.len());
        let layout = config.slots;
        let line = Line { granted: 0, free: Vec::new(), allowance: VecDeque::new() };
        let mut lines = vec![line; classes * ranks * nics];
        for (at, line) in lines.iter_mut().enumerate() {
            let sender = Rank((at / nics % ranks) as u32);
            if config.is_remote(sender) {
                let first = layout.first_slot_of(sender);
                line.free = (first..first + layout.config().recv_slots).rev().collect();
            }
        }
        Self {
            lines,
            slots: vec![SlotState::Free; classes * nics * layout.slots_per_class() as usize],
            streams: vec![Stream::default(); classes * ranks],
            early: Vec::new(),
            publish: VecDeque::new(),
            credits: VecDeque::new(),
            waiting: Vec::new(),
            told: vec![NicState::Busy; nics],
            expected_bytes: 0,
            senders: Vec::new(),
            ranks,
            nics,
        }
    }

    fn line_at(&self, class: Class, sender: Rank, nic: NicIdx) -> usize {
        (class as usize * self.ranks + sender.idx()) * self.nics + nic.idx()
    }

    fn slot_at(&self, config: &EngineConfig, class: Class, nic: NicIdx, slot: u32) -> Option<usize> {
        let per_class = config.slots.slots_per_class();
        let within = slot < per_class && nic.idx() < self.nics;
        within.then(|| (class as usize * self.nics + nic.idx()) * per_class as usize + slot as usize)
    }

    /// Grants every credit that may stand before any call: those of the put class, on NICs that are up.
    pub(super) fn grant_standing(&mut self, config: &EngineConfig) {
        for sender in (0..self.ranks as u32).map(Rank).filter(|&r| config.is_remote(r)) {
            for nic in (0..self.nics as u32).map(NicIdx).filter(|&k| config.is_up(k)) {
                let at = self.line_at(Class::Put, sender, nic);
                while !self.lines[at].free.is_empty() {
                    self.grant(config, at, None);
                }
            }
        }
    }

    fn grant(&mut self, config: &EngineConfig, at: usize, transfer: Option<u32>) {
        let line = &mut self.lines[at];
        let Some(slot) = line.free.pop() else { return };
        let class = Class::ALL[at / self.nics / self.ranks];
        let (sender, nic) = (Rank((at / self.nics % self.ranks) as u32), NicIdx((at % self.nics) as u32));
        self.credits.push_back(CreditWrite::Slot {
            to: sender,
            class,
            nic,
            position: line.granted,
            slot,
            transfer,
        });
        line.granted += 1;
        if let Some(at) = self.slot_at(config, class, nic, slot) {
            self.slots[at] = SlotState::Granted;
        }
    }

    pub(super) fn open(&mut self, call: &Call) -> Result<(), EngineError> {
        let streams = call.class as usize * self.ranks;
        for stream in &mut self.streams[streams..streams + self.ranks] {
            if stream.arrived < stream.expected {
                return Err(EngineError::CallOpen { call: call.id });
            }
            stream.base += stream.expected;
            (stream.expected, stream.arrived) = (0, 0);
        }
        self.expected_bytes = 0;
        self.told.fill(NicState::Busy);
        self.senders.clear();
        for piece in call.incoming.iter().filter(|p| p.bytes > 0) {
            let count = messages(piece.bytes, call.message_bytes);
            let stream = &mut self.streams[streams + piece.src.idx()];
            if stream.expected == 0 {
                self.senders.push(piece.src);
            }
            stream.expected += count;
            self.expected_bytes += piece.bytes;
            if let (Class::Plan, Some(nic)) = (call.class, piece.ingress) {
                let at = self.line_at(Class::Plan, piece.src, nic);
                self.lines[at].allowance.push_back((piece.transfer, count));
            }
        }
        self.waiting = (0..self.lines.len()).filter(|&at| !self.lines[at].allowance.is_empty()).collect();
        for &at in &self.waiting {
            // Loose pieces (no transfer) need no turn and must not wait behind those that do.
            let line = self.lines[at].allowance.make_contiguous();
            line.sort_by_key(|&(transfer, _)| transfer.map_or(0, |t| u64::from(t) + 1));
        }
        self.publish_early(call.class);
        Ok(())
    }

    fn publish_early(&mut self, class: Class) {
        let early = std::mem::take(&mut self.early);
        for arrival in early {
            if arrival.class == class {
                self.publish_or_hold(arrival);
            } else {
                self.early.push(arrival);
            }
        }
    }

    /// `arrival.seq` counts from the start of all calls here; what is published counts from the start of this one.
    fn publish_or_hold(&mut self, mut arrival: Publish) {
        let stream = &mut self.streams[arrival.class as usize * self.ranks + arrival.src.idx()];
        if arrival.seq >= stream.base + stream.expected {
            self.early.push(arrival);
            return;
        }
        stream.arrived += 1;
        self.expected_bytes = self.expected_bytes.saturating_sub(arrival.bytes.into());
        arrival.seq -= stream.base;
        self.publish.push_back(arrival);
    }

    pub(super) fn on_arrival(
        &mut self,
        config: &EngineConfig,
        nic: NicIdx,
        imm: Immediate,
        bytes: u32,
    ) -> Result<(), EngineError> {
        let Immediate { class, slot, seq_low, .. } = imm;
        let bad = EngineError::BadArrival { nic, slot, seq_low, bytes };
        let Some(at) = self.slot_at(config, class, nic, slot) else { return Err(bad) };
        if self.slots[at] != SlotState::Granted || bytes > config.slots.config().slot_bytes {
            return Err(bad);
        }
        let src = config.slots.sender_of(slot);
        let stream = &mut self.streams[class as usize * self.ranks + src.idx()];
        let seq = immediate::extend_seq(seq_low, stream.high);
        if seq < stream.base {
            return Err(bad);
        }
        stream.high = stream.high.max(seq + 1);
        self.slots[at] = SlotState::Arrived;
        self.publish_or_hold(Publish { class, src, seq, bytes, nic, slot });
        Ok(())
    }

    /// A kernel has read a slot.
    pub(super) fn on_drained(
        &mut self,
        config: &EngineConfig,
        class: Class,
        nic: NicIdx,
        slot: u32,
    ) -> Result<(), EngineError> {
        let at = self.slot_at(config, class, nic, slot).filter(|&at| self.slots[at] == SlotState::Arrived);
        let at = at.ok_or(EngineError::BadDrain { nic, slot })?;
        self.slots[at] = SlotState::Free;
        let line = self.line_at(class, config.slots.sender_of(slot), nic);
        self.lines[line].free.push(slot);
        if class == Class::Put && config.is_up(nic) {
            self.grant(config, line, None);
        }
        Ok(())
    }

    /// Credits whose transfer has its turn.
    fn grant_turns(&mut self, config: &EngineConfig, views: &[NicView]) {
        let mut i = 0;
        while i < self.waiting.len() {
            let at = self.waiting[i];
            let turn = views[at % self.nics].ingress_turn;
            while let Some(&(transfer, count)) = self.lines[at].allowance.front() {
                if !turn.allows(config.call, transfer) || self.lines[at].free.is_empty() {
                    break;
                }
                self.grant(config, at, transfer);
                if count > 1 {
                    self.lines[at].allowance[0].1 -= 1;
                } else {
                    self.lines[at].allowance.pop_front();
                }
            }
            if self.lines[at].allowance.is_empty() {
                self.waiting.swap_remove(i);
            } else {
                i += 1;
            }
        }
    }

    /// Tells the senders of this call which of the other GPUs' NICs they may come in by.
    fn tell_states(&mut self, config: &EngineConfig, views: &[NicView]) {
        for (k, view) in views.iter().enumerate().take(self.nics) {
            let state = view.ingress.state;
            if state == self.told[k] || config.direct_nic == Some(NicIdx(k as u32)) {
                continue;
            }
            self.told[k] = state;
            for &to in &self.senders {
                let nic = NicIdx(k as u32);
                self.credits.push_back(CreditWrite::State { to, nic, call: config.call, state });
            }
        }
    }

    pub(super) fn poll_credit(
        &mut self,
        config: &EngineConfig,
        class: Class,
        views: &[NicView],
    ) -> Option<CreditWrite> {
        if self.credits.is_empty() {
            self.grant_turns(config, views);
            if class == Class::Put && self.expected_bytes > 0 {
                self.tell_states(config, views);
            }
        }
        self.credits.pop_front()
    }

    pub(super) fn poll_publish(&mut self) -> Option<Publish> {
        self.publish.pop_front()
    }

    /// Payload of the present call that has not come in yet.
    pub(super) fn expected_bytes(&self) -> u64 {
        self.expected_bytes
    }

    pub(super) fn waits_for(&self, config: &EngineConfig, class: Class) -> Option<WaitsFor> {
        let streams = &self.streams[class as usize * self.ranks..][..self.ranks];
        let (src, stream) = streams.iter().enumerate().find(|(_, s)| s.arrived < s.expected)?;
        let src = Rank(src as u32);
        let line = |k: usize| &self.lines[self.line_at(class, src, NicIdx(k as u32))];
        let uncredited = (0..self.nics).find(|&k| !line(k).allowance.is_empty());
        let standing = config.slots.config().recv_slots as usize * self.nics;
        let free: usize = (0..self.nics).map(|k| line(k).free.len()).sum();
        Some(WaitsFor::Arrival {
            src,
            arrived: stream.arrived,
            expected: stream.expected,
            uncredited: uncredited.map(|k| NicIdx(k as u32)),
            slots_out: standing - free,
        })
    }
}
