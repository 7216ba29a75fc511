//! The two ends of the lots of one pool, with words under way between them in any interleaving.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::{Answer, Borrowings, Lender, Made, Recall, Refusal};
use crate::doorbell::Class;
use crate::engine::call::CallId;
use crate::engine::slots::Lot;
use crate::topo::{GpuIdx, NicIdx};

const BYTES: u64 = 2 << 20;
const PERMANENT: u64 = 3 * BYTES;
const GPUS: u32 = 3;
const NICS: [NicIdx; 2] = [NicIdx(0), NicIdx(1)];
const CLASSES: [Class; 2] = [Class::Plan, Class::Put];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Word {
    Ask,
    Lent,
    Refused,
    Recall,
    Returned,
}

/// An owner and its borrowers. Memory is real as far as counting goes: made when it is made, gone when it is freed.
struct World {
    cap: u64,
    now: u64,
    call: u64,
    lender: Lender,
    borrowers: Vec<Borrowings>,
    to_lender: Vec<VecDeque<(Lot, u32, Word)>>,
    to_borrower: Vec<VecDeque<(Lot, u32, Word)>>,
    making: Vec<(Lot, u32)>,
    freeing: Vec<Lot>,
    memory: BTreeMap<Lot, u64>,
    /// Lots that a borrower has mapped, and those that it must let go of.
    mapped: BTreeMap<Lot, u32>,
    leaving: Vec<Lot>,
    offered: Vec<(Lot, u32)>,
}

impl World {
    fn new(cap_lots: u64) -> Self {
        let queues = || (0..GPUS).map(|_| VecDeque::new()).collect();
        Self {
            cap: PERMANENT + cap_lots * BYTES,
            now: 1,
            call: 0,
            lender: Lender::new(PERMANENT + cap_lots * BYTES, PERMANENT),
            borrowers: (0..GPUS).map(|_| Borrowings::default()).collect(),
            to_lender: queues(),
            to_borrower: queues(),
            making: Vec::new(),
            freeing: Vec::new(),
            memory: BTreeMap::new(),
            mapped: BTreeMap::new(),
            leaving: Vec::new(),
            offered: Vec::new(),
        }
    }

    fn tell(&mut self, lot: Lot, ask: u32, word: Word) {
        let queues = if matches!(word, Word::Ask | Word::Returned) {
            &mut self.to_lender
        } else {
            &mut self.to_borrower
        };
        queues[lot.gpu.idx()].push_back((lot, ask, word));
    }

    fn want(&mut self, gpu: u32) {
        self.call += 1;
        let all: Vec<_> = NICS.iter().flat_map(|&nic| CLASSES.map(|class| (nic, class))).collect();
        for ((nic, class), ask) in self.borrowers[gpu as usize].want(&all, CallId(self.call)) {
            self.tell(Lot { nic, gpu: GpuIdx(gpu), class }, ask, Word::Ask);
        }
    }

    fn recall(&mut self, bytes: u64) {
        for (lot, ask) in self.lender.recall(bytes, self.now) {
            self.tell(lot, ask, Word::Recall);
        }
    }

    fn lender_hears(&mut self, gpu: usize) -> bool {
        let Some((lot, ask, word)) = self.to_lender[gpu].pop_front() else { return false };
        match word {
            Word::Ask => {
                match self.lender.on_ask(lot, ask, BYTES, self.now).expect("asked while it has it") {
                    Answer::Make => self.making.push((lot, ask)),
                    Answer::Refuse(_) => self.tell(lot, ask, Word::Refused),
                }
            }
            Word::Returned => {
                assert!(self.lender.on_returned(lot, ask), "returned what it had not");
                self.freeing.push(lot);
            }
            _ => unreachable!(),
        }
        true
    }

    /// The owner makes a lot, or fails before or after it had memory.
    fn make(&mut self, luck: u8) -> bool {
        let Some((lot, ask)) = self.making.pop() else { return false };
        if luck == 0 {
            self.lender.on_failed(lot, self.now);
            self.lender.on_freed(lot);
            self.tell(lot, ask, Word::Refused);
            return true;
        }
        self.memory.insert(lot, BYTES);
        if luck == 1 {
            self.lender.on_failed(lot, self.now);
            self.freeing.push(lot);
            self.tell(lot, ask, Word::Refused);
            return true;
        }
        match self.lender.on_made(lot) {
            Made::Lend => self.tell(lot, ask, Word::Lent),
            Made::Free(_) => {
                self.freeing.push(lot);
                self.tell(lot, ask, Word::Refused);
            }
        }
        true
    }

    fn free(&mut self) -> bool {
        let Some(lot) = self.freeing.pop() else { return false };
        assert!(!self.mapped.contains_key(&lot), "freed while the borrower may use it");
        self.memory.remove(&lot);
        self.lender.on_freed(lot);
        true
    }

    fn borrower_hears(&mut self, gpu: usize) -> bool {
        let Some((lot, ask, word)) = self.to_borrower[gpu].pop_front() else { return false };
        let place = (lot.nic, lot.class);
        let borrower = &mut self.borrowers[gpu];
        match word {
            Word::Lent => {
                assert!(borrower.on_lent(place, ask));
                self.offered.push((lot, ask));
            }
            Word::Refused => assert!(borrower.on_refused(place, ask)),
            Word::Recall => match borrower.on_recall(place, ask) {
                Recall::Begin => self.leaving.push(lot),
                Recall::NotUsed => self.tell(lot, ask, Word::Returned),
                Recall::NotHere => {}
            },
            _ => unreachable!(),
        }
        true
    }

    fn map(&mut self, luck: u8) -> bool {
        let Some((lot, ask)) = self.offered.pop() else { return false };
        let (place, borrower) = ((lot.nic, lot.class), &mut self.borrowers[lot.gpu.idx()]);
        if !borrower.is_offered(place, ask) {
            return true; // Recalled meanwhile.
        }
        if luck == 0 {
            borrower.on_unusable(place, ask);
            self.tell(lot, ask, Word::Returned);
        } else {
            borrower.on_mapped(place, ask);
            self.mapped.insert(lot, ask);
        }
        true
    }

    fn leave(&mut self) -> bool {
        let Some(lot) = self.leaving.pop() else { return false };
        self.mapped.remove(&lot);
        let ask = self.borrowers[lot.gpu.idx()].on_returned((lot.nic, lot.class)).expect("recalled");
        self.tell(lot, ask, Word::Returned);
        true
    }

    fn step(&mut self, (what, gpu, luck): (u8, u8, u8)) {
        let gpu = usize::from(gpu) % GPUS as usize;
        match what % 10 {
            0 => self.want(gpu as u32),
            1 => self.recall(u64::MAX),
            2 => self.recall(BYTES),
            3 => drop(self.lender_hears(gpu)),
            4 => drop(self.make(luck)),
            5 => drop(self.free()),
            6 => drop(self.borrower_hears(gpu)),
            7 => drop(self.map(luck)),
            8 => drop(self.leave()),
            _ => self.now += 5_000_000 * u64::from(luck),
        }
        self.check();
    }

    fn check(&self) {
        let held = PERMANENT + self.memory.values().sum::<u64>();
        let counted = self.lender.counters().bytes;
        assert!(
            held <= counted && counted <= self.cap,
            "{held} bytes, {counted} counted, {} allowed",
            self.cap
        );
        assert!(self.mapped.keys().all(|lot| self.memory.contains_key(lot)), "mapped without memory");
    }

    /// Everything that is under way comes to its end.
    fn settle(&mut self) {
        for _ in 0..10_000 {
            let mut any = self.make(9) | self.free() | self.leave() | self.map(9);
            for gpu in 0..GPUS as usize {
                any |= self.lender_hears(gpu) | self.borrower_hears(gpu);
            }
            self.check();
            if !any {
                return;
            }
        }
        panic!("words without end");
    }
}

proptest! {
    /// Memory stays below the cap, nothing is freed while it is mapped, and once all words are heard both ends say the same.
    #[test]
    fn any_interleaving_ends_quiet_and_agreed(
        cap in 0u64..8,
        steps in proptest::collection::vec((0u8..10, 0u8..3, 0u8..5), 0..300),
    ) {
        let mut world = World::new(cap);
        steps.into_iter().for_each(|step| world.step(step));
        world.settle();
        prop_assert_eq!(world.memory.keys().collect::<Vec<_>>(), world.mapped.keys().collect::<Vec<_>>());
        for (lot, ask) in &world.mapped {
            let borrower = &world.borrowers[lot.gpu.idx()];
            prop_assert!(borrower.is_lent((lot.nic, lot.class)), "{:?} {}", lot, ask);
        }
        prop_assert_eq!(world.lender.coming_bytes(), 0);
        // And a recall of everything brings everything back.
        world.recall(u64::MAX);
        world.settle();
        prop_assert_eq!(world.lender.counters().bytes, PERMANENT);
        prop_assert!(world.memory.is_empty() && world.mapped.is_empty());
        let c = world.lender.counters();
        prop_assert_eq!(c.asked, c.lent + c.refused.iter().sum::<u64>());
        prop_assert_eq!(c.lent, c.returned);
    }

    /// Words nobody would write change nothing.
    #[test]
    fn stale_words_are_harmless(ask in 0u32..4, returned in 0u32..4) {
        let lot = Lot { nic: NicIdx(0), gpu: GpuIdx(1), class: Class::Put };
        let place = (lot.nic, lot.class);
        let mut b = Borrowings::default();
        assert_eq!(b.want(&[place], CallId(1)), [(place, 1)]);
        prop_assert!(!b.is_offered(place, ask));
        prop_assert!(ask == 1 || !b.on_refused(place, ask));
        prop_assert_eq!(b.on_recall(place, ask), Recall::NotHere);
        prop_assert_eq!(b.on_lent(place, ask), ask == 1);
        prop_assert_eq!(b.on_returned(place), None);
        let mut l = Lender::new(BYTES, 0);
        assert_eq!(l.on_ask(lot, 1, BYTES, 0), Some(Answer::Make));
        prop_assert!(!l.on_returned(lot, returned), "it is not lent yet");
        l.on_freed(lot);
        assert_eq!(l.on_made(lot), Made::Lend);
        prop_assert_eq!(l.on_ask(lot, 2, BYTES, 0), None);
        prop_assert_eq!(l.on_returned(lot, returned), returned == 1);
    }
}

fn lot(gpu: u32) -> Lot {
    Lot { nic: NicIdx(0), gpu: GpuIdx(gpu), class: Class::Plan }
}

#[test]
fn lending_is_held_back_after_a_recall_and_longer_each_time() {
    let mut l = Lender::new(0, 0);
    let mut now = 10_000_000_000;
    let mut waits = Vec::new();
    for ask in 0..10 {
        l.recall(u64::MAX, now);
        let begin = now;
        // The pool has no room: what is refused for that reason is not held back.
        while l.on_ask(lot(0), ask, BYTES, now) == Some(Answer::Refuse(Refusal::HeldBack)) {
            now += 1_000_000;
        }
        waits.push((now - begin) / 1_000_000);
    }
    assert_eq!(waits, [20, 40, 80, 160, 320, 640, 1280, 2000, 2000, 2000]);
    now += 2_000_000_001;
    l.recall(u64::MAX, now);
    assert_eq!(l.on_ask(lot(0), 0, BYTES, now + 20_000_000), Some(Answer::Refuse(Refusal::Cap)), "forgotten");
}

#[test]
fn a_refused_lot_is_asked_for_after_1_2_4_and_at_most_64_calls() {
    let (mut b, place) = (Borrowings::default(), (NicIdx(0), Class::Put));
    let mut asked = Vec::new();
    for call in 1..400 {
        if let [(_, ask)] = b.want(&[place], CallId(call))[..] {
            asked.push(call);
            assert!(b.on_refused(place, ask));
        }
    }
    let gaps: Vec<_> = asked.windows(2).map(|w| w[1] - w[0]).collect();
    assert_eq!(gaps, [1, 2, 4, 8, 16, 32, 64, 64, 64, 64, 64]);
}
