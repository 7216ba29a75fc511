//! A rank's kernels in virtual time: one block per queue of armed slots, and one that drains.

use std::collections::{HashMap, HashSet};

use super::random::Random;
use super::wire::SimWire;
use super::work::{Part, RankWork, payload};
use crate::channel::{KernelArrival, KernelEnd};
use crate::doorbell::{Class, Doorbell};
use crate::hw::Nanos;
use crate::topo::{NicId, NicIdx, Rank};

/// Where a place in a NIC's relay memory lies in the address space of every GPU.
pub(super) fn relay_dev_ptr(nic: NicId, offset: u64) -> u64 {
    (u64::from(nic.0 + 1) << 32) + offset
}

fn place_of(dev_ptr: u64) -> (NicId, u64) {
    (NicId((dev_ptr >> 32) as u32 - 1), dev_ptr & 0xffff_ffff)
}

/// A kernel saw what must not be.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Wrong {
    /// Other bytes than were sent.
    #[error("message {seq} of {src} came with wrong bytes")]
    Changed {
        /// Source.
        src: Rank,
        /// Its number in the call.
        seq: u64,
    },
    /// A message came twice.
    #[error("message {seq} of {src} came twice")]
    Doubled {
        /// Source.
        src: Rank,
        /// Its number in the call.
        seq: u64,
    },
    /// A message that nobody sent.
    #[error("message {seq} of {src} is not in the call")]
    Unknown {
        /// Source.
        src: Rank,
        /// Its number in the call.
        seq: u64,
    },
    /// A slot was armed for a message that is not to be sent.
    #[error("a slot was armed for piece {piece}, message {part}, which is not in the call")]
    BadArm {
        /// Piece.
        piece: u32,
        /// Message of the piece.
        part: u32,
    },
}

/// The blocks of one rank.
pub(super) struct Kernel {
    rank: Rank,
    end: KernelEnd,
    rings: u32,
    random: Random,
    /// By queue: place of the next armed slot, and what is being filled.
    queues: Vec<(u64, Option<Filling>)>,
    draining: Vec<(Nanos, KernelArrival)>,
    /// Words that found their doorbell ring full.
    unrung: Vec<[u64; 4]>,
    work: RankWork,
    parts: HashMap<(u32, u32), Part>,
    sent: u64,
    seen: HashSet<(Rank, u64)>,
}

#[derive(Clone, Copy)]
struct Filling {
    at: Nanos,
    dev_ptr: u64,
    part: Part,
}

/// How long a block takes for a message.
const BLOCK_NS: (Nanos, Nanos) = (500, 8_000);

impl Kernel {
    pub(super) fn new(rank: Rank, end: KernelEnd, queues: u32, rings: u32, seed: u64) -> Self {
        Self {
            rank,
            end,
            rings,
            random: Random::new(seed),
            queues: vec![(0, None); queues as usize],
            draining: Vec::new(),
            unrung: Vec::new(),
            work: RankWork::default(),
            parts: HashMap::new(),
            sent: 0,
            seen: HashSet::new(),
        }
    }

    /// Begins a call.
    pub(super) fn launch(&mut self, work: RankWork) {
        self.parts = work.parts().collect();
        self.work = work;
        self.sent = 0;
        self.seen.clear();
    }

    /// Whether all is sent and drained.
    pub(super) fn is_done(&self) -> bool {
        let all = self.sent == self.parts.len() as u64 && self.seen.len() as u64 == self.work.expected;
        all && self.draining.is_empty() && self.unrung.is_empty()
    }

    pub(super) fn describe(&self) -> String {
        let (sent, seen) = (self.sent, self.seen.len());
        format!("kernel: {sent} of {} sent, {seen} of {} drained", self.parts.len(), self.work.expected)
    }

    pub(super) fn next_due(&self) -> Option<Nanos> {
        let fills = self.queues.iter().filter_map(|(_, f)| f.map(|f| f.at));
        fills.chain(self.draining.iter().map(|&(at, _)| at)).min()
    }

    /// Does what is due.
    pub(super) fn step(&mut self, wire: &SimWire, now: Nanos) -> Result<(), Wrong> {
        for words in std::mem::take(&mut self.unrung) {
            self.ring(words);
        }
        for queue in 0..self.queues.len() {
            self.fill(wire, queue, now)?;
        }
        while let Some(arrival) = self.end.take_arrival() {
            self.draining.push((now + self.random.between(BLOCK_NS.0, BLOCK_NS.1), arrival));
        }
        if self.draining.iter().all(|&(at, _)| at > now) {
            return Ok(());
        }
        let (ready, rest): (Vec<_>, Vec<_>) = self.draining.drain(..).partition(|&(at, _)| at <= now);
        self.draining = rest;
        ready.into_iter().try_for_each(|(_, arrival)| self.drain(wire, &arrival))
    }

    fn ring(&mut self, words: [u64; 4]) {
        let ring = self.random.below(self.rings.into()) as u32;
        if self.end.ring(ring, words).is_err() {
            self.unrung.push(words);
        }
    }

    fn fill(&mut self, wire: &SimWire, queue: usize, now: Nanos) -> Result<(), Wrong> {
        let (idx, filling) = self.queues[queue];
        if let Some(Filling { at, dev_ptr, part }) = filling {
            if at > now {
                return Ok(());
            }
            let (nic, offset) = place_of(dev_ptr);
            wire.write(nic, offset, &payload(self.work.call, self.rank, part.dst, part.seq, part.bytes));
            let bytes = part.bytes.into();
            self.ring(
                Doorbell::Send { class: self.work.class, queue: queue as u32, idx, bytes, signal: None }
                    .encode(),
            );
            self.queues[queue] = (idx + 1, None);
            self.sent += 1;
        }
        let (idx, _) = self.queues[queue];
        if let Some([dev_ptr, message]) = self.end.armed(queue as u32, idx) {
            let (piece, number) = ((message >> 32) as u32, message as u32);
            let part = self.parts.get(&(piece, number)).ok_or(Wrong::BadArm { piece, part: number })?;
            let at = now + self.random.between(BLOCK_NS.0, BLOCK_NS.1);
            self.queues[queue].1 = Some(Filling { at, dev_ptr, part: *part });
        }
        Ok(())
    }

    fn drain(&mut self, wire: &SimWire, arrival: &KernelArrival) -> Result<(), Wrong> {
        let (src, seq) = (Rank(arrival.src), arrival.seq);
        let (nic, offset) = place_of(arrival.dev_ptr);
        let bytes = wire.read(nic, offset, arrival.bytes as usize);
        let expected = self.work.bytes_of(src, seq).ok_or(Wrong::Unknown { src, seq })?;
        if bytes != payload(self.work.call, src, self.rank, seq, expected) {
            return Err(Wrong::Changed { src, seq });
        }
        if !self.seen.insert((src, seq)) {
            return Err(Wrong::Doubled { src, seq });
        }
        let class = Class::from_number(arrival.slot >> 60).unwrap_or(Class::Put);
        let nic = NicIdx((arrival.slot >> 32) as u32 & 0xfff_ffff);
        self.ring(Doorbell::Drained { class, nic, slot: arrival.slot as u32 }.encode());
        Ok(())
    }
}
