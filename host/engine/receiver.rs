//! The receiving half: credits granted, slots filled, arrivals in order of sequence number.

use std::collections::VecDeque;

use super::call::{Call, messages};
use super::immediate::{self, Immediate};
use super::lots;
use super::route::NicState;
use super::stream::{self, InOrder};
use super::{Answer, CreditWrite, EngineConfig, EngineError, LINE_SLOTS, Lent, NicView, Publish, WaitsFor};
use crate::doorbell::Class;
use crate::hw::RemoteKey;
use crate::topo::{NicIdx, Rank, ServerId};

/// A receive slot's life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SlotState {
    Free,
    Granted,
    Arrived,
}

/// What one remote rank may send through one NIC, in one class.
#[derive(Debug, Clone, Default)]
pub(super) struct Line {
    /// Credits ever granted: the place of the next one in the sender's ring.
    pub(super) granted: u64,
    pub(super) free: Vec<u32>,
    /// Credits that are out: what counts when the sender must be told again.
    pub(super) out: Vec<Lent>,
    /// By slot: how often it was lent.
    epochs: [u8; LINE_SLOTS],
    /// What the sender was last told of messages that came.
    answer: Answer,
    /// By slot: the epoch of the last message that came.
    arrived: [u8; LINE_SLOTS],
    /// Where the slots lie, or lay, if they were lent after the start, told as long as credits there may be; and what of it
    /// the sender is still to hear.
    pub(super) memory: Option<RemoteKey>,
    pub(super) to_tell: Option<RemoteKey>,
    /// Credits before this position are asked back.
    pub(super) recalled_before: u64,
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
    pub(super) lines: Vec<Line>,
    /// `[class][nic]`: there is memory for its slots, and it is not asked back.
    pub(super) has_lot: Vec<bool>,
    /// Lines whose senders may hold credits that are asked back.
    pub(super) recalled: Vec<usize>,
    /// `[class][nic][slot]`.
    slots: Vec<SlotState>,
    /// `[class][sender]`.
    streams: Vec<Stream>,
    /// Arrivals of a call that is not open here yet.
    early: Vec<Publish>,
    publish: VecDeque<Publish>,
    pub(super) credits: VecDeque<CreditWrite>,
    /// Plan lines with allowance left.
    waiting: Vec<usize>,
    /// `[nic][server]`: no path from there is open.
    cut_off: Vec<bool>,
    /// Paths have failed in this call: turns do not count.
    pub(super) detours: bool,
    /// What senders were last told of each NIC.
    pub(super) told: Vec<Option<NicState>>,
    expected_bytes: u64,
    /// Senders of the present call.
    senders: Vec<Rank>,
    pub(super) puts: InOrder,
    ranks: usize,
    nics: usize,
}

impl Receiver {
    pub(super) fn new(config: &EngineConfig) -> Self {
        let (ranks, nics, classes) = (config.cluster.ranks() as usize, config.nics(), Class::ALL.len());
        let layout = config.slots;
        let mut lines = vec![Line::default(); classes * ranks * nics];
        for (at, line) in lines.iter_mut().enumerate() {
            let sender = Rank((at / nics % ranks) as u32);
            if config.is_remote(sender) {
                let first = layout.first_slot_of(sender);
                line.free = (first..first + layout.config().recv_slots).rev().collect();
            }
        }
        Self {
            lines,
            has_lot: lots::all(nics).map(|(class, nic)| config.starts_with(class, nic)).collect(),
            recalled: Vec::new(),
            slots: vec![SlotState::Free; classes * nics * layout.slots_per_class() as usize],
            streams: vec![Stream::default(); classes * ranks],
            early: Vec::new(),
            publish: VecDeque::new(),
            credits: VecDeque::new(),
            waiting: Vec::new(),
            cut_off: vec![false; nics * config.cluster.server_count() as usize],
            detours: false,
            told: vec![None; nics],
            expected_bytes: 0,
            senders: Vec::new(),
            puts: InOrder::new(ranks),
            ranks,
            nics,
        }
    }

    pub(super) fn lot_at(&self, class: Class, nic: NicIdx) -> usize {
        class as usize * self.nics + nic.idx()
    }

    pub(super) fn remote_ranks<'a>(&self, config: &'a EngineConfig) -> impl Iterator<Item = Rank> + use<'a> {
        (0..self.ranks as u32).map(Rank).filter(|&r| config.is_remote(r))
    }

    pub(super) fn line_at(&self, class: Class, sender: Rank, nic: NicIdx) -> usize {
        (class as usize * self.ranks + sender.idx()) * self.nics + nic.idx()
    }

    fn slot_at(&self, config: &EngineConfig, class: Class, nic: NicIdx, slot: u32) -> Option<usize> {
        let per_class = config.slots.slots_per_class();
        let within = slot < per_class && nic.idx() < self.nics;
        within.then(|| (class as usize * self.nics + nic.idx()) * per_class as usize + slot as usize)
    }

    /// Grants every credit that may stand before any call, on NICs that are up.
    pub(super) fn grant_standing(&mut self, config: &EngineConfig) {
        for class in Class::ALL.into_iter().filter(|&c| stream::credits_stand(config, c)) {
            for sender in self.remote_ranks(config) {
                for nic in (0..self.nics as u32).map(NicIdx).filter(|&k| config.is_up(k)) {
                    if self.has_lot[self.lot_at(class, nic)] {
                        self.grant_all(config, self.line_at(class, sender, nic));
                    }
                }
            }
        }
    }

    /// Grants every free slot of a line.
    pub(super) fn grant_all(&mut self, config: &EngineConfig, at: usize) {
        while !self.lines[at].free.is_empty() {
            self.grant(config, at, None, None);
        }
    }

    /// Class, sender and NIC of a line.
    pub(super) fn line_of(&self, at: usize) -> (Class, Rank, NicIdx) {
        let class = Class::ALL[at / self.nics / self.ranks];
        (class, Rank((at / self.nics % self.ranks) as u32), NicIdx((at % self.nics) as u32))
    }

    fn grant(&mut self, config: &EngineConfig, at: usize, transfer: Option<u32>, instead_of: Option<NicIdx>) {
        let (class, sender, nic) = self.line_of(at);
        let line = &mut self.lines[at];
        let Some(slot) = line.free.pop() else { return };
        if let Some(key) = line.to_tell.take() {
            self.credits.push_back(CreditWrite::Memory { to: sender, class, nic, key });
        }
        let line_slot = (slot % config.slots.config().recv_slots) as usize;
        line.epochs[line_slot] = line.epochs[line_slot].wrapping_add(1);
        let lent = Lent { position: line.granted, slot, epoch: line.epochs[line_slot], transfer, instead_of };
        line.granted += 1;
        line.out.push(lent);
        self.credits.push_back(CreditWrite::Slot { to: sender, class, nic, lent });
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
        // Until it is told, a sender takes a NIC for busy.
        self.told.fill(Some(NicState::Busy));
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
        if self.slots[at] != SlotState::Granted || bytes > config.slots.config().bytes_of(class) {
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
        let line = self.line_at(class, src, nic);
        let line = &mut self.lines[line];
        line.out.retain(|lent| lent.slot != slot);
        let line_slot = (slot % config.slots.config().recv_slots) as usize;
        line.arrived[line_slot] = line.epochs[line_slot];
        let arrival = Publish { class, src, seq, bytes, nic, slot };
        if class == Class::LowLatency {
            self.puts.arrived(arrival).map_err(|()| bad)
        } else {
            self.publish_or_hold(arrival);
            Ok(())
        }
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
        if stream::credits_stand(config, class) && config.is_up(nic) && self.has_lot[self.lot_at(class, nic)]
        {
            self.grant(config, line, None, None);
        }
        Ok(())
    }

    /// A slot that was granted and not used.
    pub(super) fn free(&mut self, config: &EngineConfig, class: Class, nic: NicIdx, slot: u32) {
        if let Some(at) = self.slot_at(config, class, nic, slot) {
            self.slots[at] = SlotState::Free;
        }
        let line = self.line_at(class, config.slots.sender_of(slot), nic);
        self.lines[line].free.push(slot);
    }

    /// Credits whose transfer has its turn.
    fn grant_turns(&mut self, config: &EngineConfig, views: &[NicView]) {
        let mut i = 0;
        while i < self.waiting.len() {
            let at = self.waiting[i];
            let turn = views[at % self.nics].ingress_turn;
            while let Some(&(transfer, count)) = self.lines[at].allowance.front() {
                if !self.detours && !turn.allows(config.call, transfer) {
                    break;
                }
                let Some(on) = self.line_to_grant_on(config, at) else { break };
                let nic = NicIdx((at % self.nics) as u32);
                self.grant(config, on, transfer, (on != at).then_some(nic));
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

    /// The line itself, or, while its NIC cannot be used by the sender, one that can; if it has a free slot.
    fn line_to_grant_on(&self, config: &EngineConfig, at: usize) -> Option<usize> {
        let (class, sender, nic) = self.line_of(at);
        let usable = |nic| !self.is_cut_off(config, nic, sender) && self.has_lot[self.lot_at(class, nic)];
        if usable(nic) {
            return (!self.lines[at].free.is_empty()).then_some(at);
        }
        let nics = (0..self.nics as u32).map(NicIdx);
        let works = |&k: &NicIdx| config.is_up(k) && usable(k);
        let lines = nics.filter(works).map(|k| self.line_at(class, sender, k));
        lines.max_by_key(|&at| self.lines[at].free.len()).filter(|&at| !self.lines[at].free.is_empty())
    }

    /// Whether every message due comes in by a NIC that its sender reaches, into memory that is there.
    pub(super) fn is_settled(&self, config: &EngineConfig, call: &Call) -> bool {
        let has_lot = |nic| self.has_lot[self.lot_at(call.class, nic)];
        let works = |nic, src| !self.is_cut_off(config, nic, src) && has_lot(nic);
        call.incoming.iter().all(|p| p.ingress.is_none_or(|nic| works(nic, p.src)))
    }

    fn is_cut_off(&self, config: &EngineConfig, nic: NicIdx, sender: Rank) -> bool {
        let servers = config.cluster.server_count() as usize;
        self.cut_off[nic.idx() * servers + config.cluster.server_of(sender).idx()]
    }

    /// A path to a NIC is closed: nothing more can come in over it. Its server's senders are told what has.
    pub(super) fn on_fenced(
        &mut self,
        config: &EngineConfig,
        nic: NicIdx,
        server: ServerId,
        fence: u32,
        all_closed: bool,
    ) {
        let servers = config.cluster.server_count() as usize;
        self.cut_off[nic.idx() * servers + server.idx()] |= all_closed;
        for sender in config.cluster.ranks_of(server) {
            for class in Class::ALL {
                let at = self.line_at(class, sender, nic);
                if all_closed && class == Class::Plan {
                    self.call_in(config, at);
                }
                let line = &mut self.lines[at];
                (line.answer.fence, line.answer.arrived) = (fence, line.arrived);
                let answer = line.answer;
                self.credits.push_back(CreditWrite::Answer { to: sender, class, nic, answer });
            }
        }
    }

    /// Takes back the credits of a line that can be reached by no path, to grant them on others.
    fn call_in(&mut self, config: &EngineConfig, at: usize) {
        let (class, _, nic) = self.line_of(at);
        self.lines[at].answer.called_in_before = self.lines[at].granted;
        for lent in std::mem::take(&mut self.lines[at].out) {
            self.free(config, class, nic, lent.slot);
            let due = at - nic.idx() + lent.instead_of.unwrap_or(nic).idx();
            self.lines[due].allowance.push_front((lent.transfer, 1));
            if !self.waiting.contains(&due) {
                self.waiting.push(due);
            }
        }
    }

    /// A path from a server to a NIC is open again.
    pub(super) fn on_path_up(&mut self, config: &EngineConfig, nic: NicIdx, server: ServerId) {
        let servers = config.cluster.server_count() as usize;
        self.cut_off[nic.idx() * servers + server.idx()] = false;
    }

    /// Tells a server's senders all that counts once more, before anything newer: words may have been lost.
    pub(super) fn tell_again(&mut self, config: &EngineConfig, server: ServerId) {
        let mut words = VecDeque::new();
        for sender in config.cluster.ranks_of(server) {
            for (class, nic) in
                Class::ALL.iter().flat_map(|&c| (0..self.nics as u32).map(move |k| (c, NicIdx(k))))
            {
                let line = &self.lines[self.line_at(class, sender, nic)];
                if let Some(key) = line.memory.filter(|_| line.to_tell.is_none()) {
                    words.push_back(CreditWrite::Memory { to: sender, class, nic, key });
                }
                if line.answer != Answer::default() {
                    words.push_back(CreditWrite::Answer { to: sender, class, nic, answer: line.answer });
                }
                // Older ones have been read: later ones were used. Their words may be taken by newer ones.
                let unread = |lent: &&Lent| lent.position + LINE_SLOTS as u64 >= line.granted;
                let slot = |&lent: &Lent| CreditWrite::Slot { to: sender, class, nic, lent };
                let slots = line.out.iter().filter(unread).map(slot);
                words.extend(slots);
                if line.recalled_before > 0 {
                    let before = line.recalled_before;
                    words.push_back(CreditWrite::Recall { to: sender, class, nic, before });
                }
            }
        }
        words.append(&mut self.credits);
        self.credits = words;
        self.told.fill(None);
    }

    /// Tells the senders of this call which of the other GPUs' NICs they may come in by.
    fn tell_states(&mut self, config: &EngineConfig, views: &[NicView]) {
        for (k, view) in views.iter().enumerate().take(self.nics) {
            let has_lot = self.has_lot[self.lot_at(Class::Put, NicIdx(k as u32))];
            let state = if has_lot { view.ingress.state } else { NicState::Down };
            if Some(state) == self.told[k] || config.direct_nic == Some(NicIdx(k as u32)) {
                continue;
            }
            self.told[k] = Some(state);
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
