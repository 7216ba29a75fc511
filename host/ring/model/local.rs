//! Streams within a server (kernels/local.cuh), word for word and fence for fence: claims, the front that messages pass in their
//! order, entries, signals, and slots that come back.

use loom::thread;

use super::{Payload, check};
use crate::ring::{WORD_MAX, lap};
use crate::words::{AtomicU64, Ordering, Words, fence, heap_words};

type Memory = std::sync::Arc<[AtomicU64]>;

/// `fl_fence_sys`.
fn fence_sys() {
    fence(Ordering::AcqRel);
}

/// One stream: `next`, `front`, `shown`, `taken`, `signal`, then `released`, `sends` and the inbox, by place.
#[derive(Clone)]
struct Stream {
    memory: Memory,
    depth: u64,
    /// By slot; its last message is what was written there.
    slots: Payload,
}

const FIXED: usize = 5;

impl Stream {
    fn new(depth: u64) -> Self {
        Self { memory: heap_words(FIXED + 4 * depth as usize), depth, slots: Payload::new(depth) }
    }

    fn word(&self, fixed: usize) -> &AtomicU64 {
        self.memory.word(fixed)
    }
    fn next(&self) -> &AtomicU64 {
        self.word(0)
    }
    fn front(&self) -> &AtomicU64 {
        self.word(1)
    }
    fn shown(&self) -> &AtomicU64 {
        self.word(2)
    }
    fn taken(&self) -> &AtomicU64 {
        self.word(3)
    }
    fn signal(&self) -> &AtomicU64 {
        self.word(4)
    }
    /// `FL_LOCAL_FRONT_SHIFT`: as small as it may be.
    fn front_shift(&self) -> u64 {
        self.depth + 1
    }
    fn at(&self, array: u64, place: u64) -> &AtomicU64 {
        self.memory.word(FIXED + (array * self.depth + place % self.depth) as usize)
    }
    fn released(&self, seq: u64) -> &AtomicU64 {
        self.at(0, seq)
    }
    fn sends(&self, seq: u64) -> &AtomicU64 {
        self.at(1, seq)
    }
    fn inbox(&self, n: u64) -> [&AtomicU64; 2] {
        [self.at(2, n), self.at(3, n)]
    }

    /// `fl_claim_local_slot`.
    fn claim_slot(&self) -> Option<u64> {
        let idx = self.next().load(Ordering::Acquire);
        if idx >= self.depth && self.released(idx).load(Ordering::Relaxed) != idx - self.depth + 1 {
            return None;
        }
        self.next().compare_exchange(idx, idx + 1, Ordering::AcqRel, Ordering::Relaxed).ok()?;
        fence_sys();
        Some(idx)
    }

    /// `fl_is_next_local`.
    fn is_next(&self, seq: u64) -> bool {
        loop {
            let seen = self.front().load(Ordering::Acquire);
            let ahead = seq - (seen >> self.front_shift());
            if ahead == 0 {
                return true;
            }
            let filled = seen | 1 << ahead;
            if self.front().compare_exchange(seen, filled, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return false;
            }
        }
    }

    /// `fl_show_local`; every message has bytes and adds 1 to the signal.
    fn show(&self, seq: u64) {
        let bytes = self.sends(seq).load(Ordering::Relaxed);
        fence_sys();
        let n = self.shown().load(Ordering::Relaxed);
        let with_lap = |value: u64| value | lap(n, self.depth) << 63;
        let [first, second] = self.inbox(n);
        first.store(with_lap(seq), Ordering::Relaxed);
        second.store(with_lap(bytes), Ordering::Relaxed);
        self.shown().store(n + 1, Ordering::Relaxed);
        self.signal().fetch_add(1, Ordering::Release);
    }

    /// `fl_move_front_on`.
    fn move_front_on(&self) -> bool {
        loop {
            let seen = self.front().load(Ordering::Relaxed);
            let filled = (seen & ((1 << self.front_shift()) - 1)) >> 1;
            let moved = ((seen >> self.front_shift()) + 1) << self.front_shift() | filled;
            if self.front().compare_exchange(seen, moved, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return filled & 1 == 1;
            }
        }
    }

    /// A kernel that fills a slot and sends it: `fl_send_local`.
    fn send(&self, mut seq: u64) {
        self.slots.write(seq % self.depth);
        self.sends(seq).store(100 + seq, Ordering::Relaxed);
        if !self.is_next(seq) {
            return;
        }
        loop {
            self.show(seq);
            seq += 1;
            if !self.move_front_on() {
                return;
            }
        }
    }

    /// `fl_claim_local_message`.
    fn claim_message(&self) -> Option<u64> {
        let n = self.taken().load(Ordering::Acquire);
        let words = self.inbox(n).map(|word| word.load(Ordering::Relaxed));
        if words.iter().any(|w| w >> 63 != lap(n, self.depth)) {
            return None;
        }
        self.taken().compare_exchange(n, n + 1, Ordering::AcqRel, Ordering::Relaxed).ok()?;
        fence_sys();
        let [seq, bytes] = words.map(|w| w & WORD_MAX);
        assert_eq!((seq, bytes), (n, 100 + n), "in order, and whole");
        self.slots.assert_written(seq % self.depth);
        Some(seq)
    }

    /// `fl_release_local`.
    fn release(&self, seq: u64) {
        fence_sys();
        self.released(seq).store(seq + 1, Ordering::Relaxed);
    }

    fn take(&self, messages: u64) {
        for _ in 0..messages {
            let seq = loop {
                match self.claim_message() {
                    Some(seq) => break seq,
                    None => thread::yield_now(),
                }
            };
            self.release(seq);
        }
    }
}

/// A slot is written only after its last message was read, and read only after it was written.
#[test]
fn local_slots_go_to_and_fro() {
    check(|| {
        let stream = Stream::new(1);
        let sender = stream.clone();
        let sending = thread::spawn(move || {
            for _ in 0..3 {
                let seq = loop {
                    match sender.claim_slot() {
                        Some(seq) => break seq,
                        None => thread::yield_now(),
                    }
                };
                sender.send(seq);
            }
        });
        stream.take(3);
        sending.join().unwrap();
    });
}

/// One slot: a second block may fill it again when the first has shown its message and not moved the front on yet. The
/// receiver looks once, in the second block's place, so that nobody waits and there is an end to the schedules.
#[test]
fn a_slot_may_be_filled_again_before_the_front_has_moved() {
    check(|| {
        let stream = Stream::new(1);
        let first = stream.claim_slot().unwrap();
        let other = stream.clone();
        let second = thread::spawn(move || {
            let Some(seq) = other.claim_message() else { return false };
            other.release(seq);
            other.send(other.claim_slot().unwrap());
            true
        });
        stream.send(first);
        let sent = 1 + u64::from(second.join().unwrap());
        assert_eq!(stream.front().load(Ordering::Relaxed), sent << stream.front_shift());
        assert_eq!(stream.claim_message(), Some(sent - 1));
    });
}

/// Two blocks fill the two slots in any order: both messages are shown, the first one first, by whichever block.
#[test]
fn local_messages_are_shown_in_order_and_none_is_left() {
    check(|| {
        let stream = Stream::new(2);
        let blocks: Vec<_> = (0..2)
            .map(|_| {
                let stream = stream.clone();
                thread::spawn(move || {
                    // A block that loses the claim to the other finds the next slot free.
                    let seq = stream.claim_slot().or_else(|| stream.claim_slot()).unwrap();
                    stream.send(seq);
                })
            })
            .collect();
        let early = stream.claim_message();
        blocks.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(stream.front().load(Ordering::Relaxed), 2 << stream.front_shift());
        let later: Vec<_> = std::iter::from_fn(|| stream.claim_message()).collect();
        assert_eq!(early.into_iter().chain(later).collect::<Vec<_>>(), [0, 1]);
    });
}

/// Whoever sees a signal finds the messages up to it.
#[test]
fn a_local_signal_comes_after_its_message() {
    check(|| {
        let stream = Stream::new(2);
        let sender = stream.clone();
        let sending = thread::spawn(move || {
            for _ in 0..2 {
                let seq = sender.claim_slot().unwrap();
                sender.send(seq);
            }
        });
        // `fl_poll`.
        let signal = stream.signal().load(Ordering::Relaxed);
        fence_sys();
        for _ in 0..signal {
            stream.claim_message().expect("what the signal tells of");
        }
        sending.join().unwrap();
    });
}

/// `fl_flush`: what is below the front is in the receiver's memory, whoever has shown it.
#[test]
fn a_local_flush_comes_after_the_payload() {
    check(|| {
        let stream = Stream::new(2);
        let blocks: Vec<_> = (0..2)
            .map(|_| {
                let stream = stream.clone();
                thread::spawn(move || {
                    let seq = stream.claim_slot().or_else(|| stream.claim_slot()).unwrap();
                    stream.send(seq);
                })
            })
            .collect();
        let flushed = stream.front().load(Ordering::Acquire) >> stream.front_shift();
        fence_sys();
        (0..flushed).for_each(|slot| stream.slots.assert_written(slot));
        blocks.into_iter().for_each(|t| t.join().unwrap());
    });
}
