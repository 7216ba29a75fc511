//! Words outside of rings, word for word and fence for fence: credit lines (`credit.rs`) and the load table (`load.rs`).

use loom::thread;

use super::{Payload, check};
use crate::ring::{WORD_MAX, lap, with_lap};
use crate::words::{AtomicU64, Ordering, Words, fence, heap_words};

type Memory = std::sync::Arc<[AtomicU64]>;

const CALLED_IN: usize = 0;
const ANSWER: usize = 1;
const ARRIVED: usize = 2;
const RING: usize = 3;
/// Words of the ring, of which half may be out.
const CAPACITY: u64 = 2;

fn line() -> Memory {
    heap_words(RING + CAPACITY as usize)
}

/// A receiver's inline write: what its proxy has acquired, and what was written before on the path, comes first.
fn tell(line: &Memory, at: usize, word: u64) {
    fence(Ordering::Release);
    line.word(at).store(word, Ordering::Relaxed);
}

fn grant(line: &Memory, position: u64) {
    tell(line, RING + (position % CAPACITY) as usize, with_lap(position, position, CAPACITY));
}

/// `InboxLine::take_slot`.
fn take_slot(line: &Memory, next: u64) -> bool {
    let word = line.word(RING + (next % CAPACITY) as usize).load(Ordering::Relaxed);
    if word >> 63 != lap(next, CAPACITY) {
        return false;
    }
    fence(Ordering::Acquire);
    assert_eq!(word & WORD_MAX, next, "the credit of another lap");
    true
}

/// `InboxLine::take_answer`: the last fence answered to, what was called in, and what had come.
fn take_answer(line: &Memory) -> [u64; 3] {
    let answer = line.word(ANSWER).load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    let called_in = line.word(CALLED_IN).load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    [answer, called_in, line.word(ARRIVED).load(Ordering::Relaxed)]
}

/// A receiver's answer (`write_ops`): all three words grow with each fence here.
fn answer(line: &Memory, fence: u64) {
    [ARRIVED, CALLED_IN, ANSWER].into_iter().for_each(|at| tell(line, at, fence));
}

/// One slot, lent again and again: the sender writes it only after the receiver has read it.
#[test]
fn a_slot_is_written_after_it_was_read() {
    check(|| {
        const MESSAGES: u64 = 3;
        let (line, slot) = (line(), Payload::new(1));
        let receiver = {
            let (line, slot) = (line.clone(), slot.clone());
            thread::spawn(move || {
                for position in 0..MESSAGES {
                    grant(&line, position);
                    while line.word(ARRIVED).load(Ordering::Acquire) <= position {
                        thread::yield_now();
                    }
                    slot.assert_written(0);
                }
            })
        };
        for position in 0..MESSAGES {
            while !take_slot(&line, position) {
                thread::yield_now();
            }
            slot.write(0);
            line.word(ARRIVED).store(position + 1, Ordering::Release);
        }
        receiver.join().unwrap();
    });
}

/// A credit that was granted after others were called in is not taken before they are known to be void.
#[test]
fn what_is_void_is_known_before_what_is_granted_after_it() {
    check(|| {
        let line = line();
        let receiver = {
            let line = line.clone();
            thread::spawn(move || {
                grant(&line, 0);
                answer(&line, 1);
                grant(&line, 1);
            })
        };
        for _ in 0..2 {
            // `InboxLine::poll`: ring words first, then the answer, which is told before them.
            let granted = take_slot(&line, 1);
            let [answer, called_in, _] = take_answer(&line);
            assert!(!granted || [answer, called_in] == [1, 1], "{answer} {called_in}");
            assert!(answer == 0 || called_in == 1, "an answer without what it voids");
            thread::yield_now();
        }
        receiver.join().unwrap();
    });
}

/// A void is never seen without what had come before it: a message that has come would go again.
#[test]
fn what_has_come_is_known_before_what_is_void() {
    check(|| {
        let line = line();
        let receiver = {
            let line = line.clone();
            thread::spawn(move || (1..=2).for_each(|fence| answer(&line, fence)))
        };
        for _ in 0..2 {
            let [answer, called_in, arrived] = take_answer(&line);
            assert!(answer <= called_in && called_in <= arrived, "{answer} {called_in} {arrived}");
            thread::yield_now();
        }
        receiver.join().unwrap();
    });
}

/// `LoadTable::publish` and `beat` against `say` and `borrowed`: who sees a process in a call sees what it declared:
/// its use of its direct NIC, its loans, its lease.
#[test]
fn who_sees_the_call_sees_what_was_said_for_it() {
    check(|| {
        const BUSY: usize = 0;
        const ROW: usize = 1;
        const LEASE: usize = 2;
        const CALL: usize = 3;
        let table = heap_words(4);
        let process = {
            let table = table.clone();
            thread::spawn(move || {
                for call in 1..=2 {
                    for word in [BUSY, ROW, LEASE] {
                        table.word(word).store(100 * call, Ordering::Relaxed);
                    }
                    table.word(CALL).store(call, Ordering::Release);
                }
            })
        };
        for _ in 0..2 {
            let call = table.word(CALL).load(Ordering::Acquire);
            for word in [BUSY, ROW, LEASE] {
                let said = table.word(word).load(Ordering::Relaxed);
                assert!(said >= 100 * call, "call {call}, but word {word} says {said}");
            }
            thread::yield_now();
        }
        process.join().unwrap();
    });
}
