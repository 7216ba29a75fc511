//! What kernels do with words that the host writes, and with each other's (kernels/relay.cuh, device.cuh, all_to_all.cu),
//! word for word and fence for fence, against the host's own code where that is in `ring.rs`.

use loom::sync::Arc;
use loom::thread;

use super::{Payload, check};
use crate::ring::{WORD_MAX, lap, write_entry};
use crate::words::{AtomicU64, Ordering, Words, fence, heap_words};

type Memory = std::sync::Arc<[AtomicU64]>;

/// `fl_fence_sys`.
fn fence_sys() {
    fence(Ordering::AcqRel);
}

/// A ring of entries of two words that the host writes and kernels claim, with what it orders:
/// the words of entry `i` from `2 * (i % capacity)`, then `next`, then one word per message that says it is done with.
#[derive(Clone)]
struct Claims {
    memory: Memory,
    capacity: u64,
    messages: u64,
}

impl Claims {
    fn new(capacity: u64, messages: u64) -> Self {
        Self { memory: heap_words((2 * capacity + 1 + messages) as usize), capacity, messages }
    }

    fn next(&self) -> &AtomicU64 {
        self.memory.word(2 * self.capacity as usize)
    }

    fn done(&self, message: u64) -> &AtomicU64 {
        self.memory.word((2 * self.capacity + 1 + message) as usize)
    }

    /// `fl_claim_slot` with `fl_armed_slot`; `fl_claim_arrival` differs in that it fences after the claim.
    fn claim(&self) -> Option<u64> {
        let idx = self.next().load(Ordering::Acquire);
        if idx == self.messages {
            return None;
        }
        let first = 2 * (idx % self.capacity) as usize;
        let words = [first, first + 1].map(|at| self.memory.word(at).load(Ordering::Relaxed));
        if words.iter().any(|w| w >> 63 != lap(idx, self.capacity)) {
            return None;
        }
        fence_sys();
        self.next().compare_exchange(idx, idx + 1, Ordering::AcqRel, Ordering::Relaxed).ok()?;
        assert_eq!(words.map(|w| w & WORD_MAX), [idx, idx], "the entry of another lap");
        Some(idx)
    }

    /// What a kernel does with a slot, and its doorbell.
    fn fill(&self, slots: &Payload, idx: u64) {
        slots.write(idx % self.capacity);
        fence_sys();
        self.done(idx).store(1, Ordering::Relaxed);
    }

    fn fill_all(&self, slots: &Payload) {
        while self.next().load(Ordering::Relaxed) < self.messages {
            match self.claim() {
                Some(idx) => self.fill(slots, idx),
                None => thread::yield_now(),
            }
        }
    }

    /// The host: arms what has a place, reads what is done, arms that place again.
    fn host(&self, slots: &Payload) {
        for idx in 0..self.messages {
            if let Some(before) = idx.checked_sub(self.capacity) {
                self.take(slots, before);
            }
            write_entry(&self.memory, 0, idx, self.capacity, &[idx, idx]);
        }
        (self.messages.saturating_sub(self.capacity)..self.messages).for_each(|idx| self.take(slots, idx));
    }

    fn take(&self, slots: &Payload, idx: u64) {
        while self.done(idx).load(Ordering::Relaxed) == 0 {
            thread::yield_now();
        }
        fence(Ordering::Acquire);
        slots.assert_written(idx % self.capacity);
    }
}

/// A slot is written only after its last message was read, and read only after it was written.
#[test]
fn armed_slots_hand_memory_to_and_fro() {
    check(|| {
        let (claims, slots) = (Claims::new(2, 4), Payload::new(2));
        let filler = {
            let (claims, slots) = (claims.clone(), slots.clone());
            thread::spawn(move || claims.fill_all(&slots))
        };
        claims.host(&slots);
        filler.join().unwrap();
        assert_eq!(claims.next().load(Ordering::Relaxed), 4);
    });
}

/// Three messages through one place: a claimer that still saw the entry two laps back would take it for its own. Whoever
/// arms takes at once, so that nobody waits and there is an end to the schedules.
#[test]
fn claimers_do_not_take_the_entry_of_two_laps_before() {
    check(|| {
        let claims = Claims::new(1, 3);
        let passer_by = {
            let claims = claims.clone();
            thread::spawn(move || claims.claim())
        };
        let mut taken = 0;
        for idx in 0..3 {
            write_entry(&claims.memory, 0, idx, 1, &[idx, idx]);
            taken += u64::from(claims.claim().is_some());
        }
        let passed = passer_by.join().unwrap();
        assert_eq!(taken + u64::from(passed.is_some()), 3);
    });
}

/// `ProxyEnd::publish` and `fl_claim_arrival`: payload, entry, claim, fence, payload.
#[test]
fn arrivals_carry_their_payload() {
    check(|| {
        let (claims, payload) = (Claims::new(2, 2), Payload::new(2));
        let (passing, seen) = (claims.clone(), payload.clone());
        let passer_by = thread::spawn(move || {
            if let Some(idx) = passing.claim() {
                seen.assert_written(idx);
            }
        });
        let (taking, taken) = (claims.clone(), payload.clone());
        let taker = thread::spawn(move || {
            while taking.next().load(Ordering::Relaxed) < 2 {
                match taking.claim() {
                    Some(idx) => taken.assert_written(idx),
                    None => thread::yield_now(),
                }
            }
        });
        for idx in 0..2 {
            payload.write(idx);
            write_entry(&claims.memory, 0, idx, 2, &[idx, idx]);
        }
        passer_by.join().unwrap();
        taker.join().unwrap();
    });
}

/// A word that one side stores and the other polls.
fn flag_publishes(store: fn(&AtomicU64), see: fn(&AtomicU64) -> bool) {
    check(move || {
        let (flag, payload) = (Arc::new(AtomicU64::new(0)), Payload::new(1));
        let (seen, written) = (flag.clone(), payload.clone());
        let reader = thread::spawn(move || {
            while !see(&seen) {
                thread::yield_now();
            }
            written.assert_written(0);
        });
        payload.write(0);
        store(&flag);
        reader.join().unwrap();
    });
}

fn sees_one(word: &AtomicU64) -> bool {
    let seen = word.load(Ordering::Relaxed) == 1;
    fence_sys();
    seen
}

/// `ProxyEnd::signal`; `fl_wait` and `fl_poll`.
#[test]
fn a_signal_comes_after_what_it_tells_of() {
    let signal = |word: &AtomicU64| {
        fence(Ordering::Release);
        word.store(1, Ordering::Relaxed);
    };
    flag_publishes(signal, sees_one);
}

/// `ProxyEnd::complete`; `fl_flush`. And `st.release.sys` of the peers' flags; `local_one`, `unfinished_peer`.
#[test]
fn a_released_flag_comes_after_what_it_tells_of() {
    flag_publishes(|word| word.store(1, Ordering::Release), sees_one);
}

/// Two blocks write into a peer's memory; the one that is last says so for both (`local_done`, `announce_done`).
#[test]
fn the_last_block_speaks_for_all() {
    check(|| {
        let local_done = Arc::new(AtomicU64::new(0));
        let done = Arc::new(AtomicU64::new(0));
        let payload = Payload::new(2);
        let blocks: Vec<_> = (0..2)
            .map(|block| {
                let (local_done, done, payload) = (local_done.clone(), done.clone(), payload.clone());
                thread::spawn(move || {
                    payload.write(block);
                    fence_sys();
                    if local_done.fetch_add(1, Ordering::AcqRel) + 1 == 2 {
                        fence_sys();
                        done.store(1, Ordering::Release);
                    }
                })
            })
            .collect();
        while !sees_one(&done) {
            thread::yield_now();
        }
        payload.assert_written(0);
        payload.assert_written(1);
        blocks.into_iter().for_each(|t| t.join().unwrap());
    });
}

/// `fl_give_up`: the first reason stays, and its details are those that the host reads once the kernel has ended.
#[test]
fn the_first_reason_stays() {
    check(|| {
        let status: Arc<[AtomicU64; 2]> = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let blocks: Vec<_> = (1..3)
            .map(|code| {
                let status = status.clone();
                thread::spawn(move || {
                    let first = status[0].compare_exchange(0, code, Ordering::Relaxed, Ordering::Relaxed);
                    if first.is_ok() {
                        status[1].store(10 * code, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        blocks.into_iter().for_each(|t| t.join().unwrap());
        let [code, detail] = [0, 1].map(|i| status[i].load(Ordering::Acquire));
        assert_eq!(detail, 10 * code);
    });
}
