//! Rings of fixed-size entries in shared memory, many producers and one consumer, without a shared index on the
//! consumer's side of the fast path: every word of an entry carries a lap bit (`kernels/abi.h`).
//!
//! The same ring is used by kernels (doorbells; the producer is `kernels/doorbell.cuh`), by processes (borrowers and
//! NIC owners) and by the emulated wire. The model checked under loom is this file.

use crate::abi::FL_LAP_SHIFT;
use crate::words::{Ordering, Words, fence};

/// The largest value that a ring word can hold.
pub const WORD_MAX: u64 = (1 << FL_LAP_SHIFT) - 1;

/// The lap bit of an index: 1 in the first lap, so that zeroed memory is an empty ring.
#[inline]
pub fn lap(idx: u64, capacity: u64) -> u64 {
    ((idx / capacity) & 1) ^ 1
}

/// A value with the lap bit of its index.
#[inline]
pub fn with_lap(value: u64, idx: u64, capacity: u64) -> u64 {
    debug_assert!(value <= WORD_MAX);
    (value & WORD_MAX) | lap(idx, capacity) << FL_LAP_SHIFT
}

/// Where the parts of a ring lie in its memory, in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    /// Next index to claim; written by producers.
    pub prod_idx_at: usize,
    /// Everything below has been read; written by the consumer.
    pub cons_idx_at: usize,
    /// First word of entry 0.
    pub entries_at: usize,
    /// Entries, a power of two.
    pub capacity: u64,
}

/// Words per cache line, so that the two indices do not share one.
const LINE: usize = 8;

impl RingLayout {
    /// A self-contained ring that starts at word `at`: two index lines, then the entries.
    pub fn at(at: usize, capacity: u64) -> Self {
        assert!(capacity.is_power_of_two(), "ring capacity {capacity}");
        Self { prod_idx_at: at, cons_idx_at: at + LINE, entries_at: at + 2 * LINE, capacity }
    }

    /// Words that `at(0, capacity)` with entries of `n` words takes.
    pub fn words(n: usize, capacity: u64) -> usize {
        2 * LINE + n * capacity as usize
    }
}

/// The ring has no room now; try again when the consumer has gone on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("ring full")]
pub struct Full;

/// Writes entry `idx` of a ring whose entries start at word `entries_at`. The place must be free. Memory written before
/// is visible to whoever sees the entry.
pub fn write_entry<M: Words, const N: usize>(
    memory: &M,
    entries_at: usize,
    idx: u64,
    capacity: u64,
    entry: &[u64; N],
) {
    let first = entries_at + N * (idx % capacity) as usize;
    // Pairs with the acquire fence in `Consumer::peek` and with fl_fence_sys after a kernel's claim.
    fence(Ordering::Release);
    for (i, &value) in entry.iter().enumerate() {
        // Relaxed: the fence above orders payload before each word, and the words need no order among themselves.
        memory.word(first + i).store(with_lap(value, idx, capacity), Ordering::Relaxed);
    }
}

/// The writing side. Several may exist, in several processes.
#[derive(Clone)]
pub struct Producer<M, const N: usize> {
    memory: M,
    layout: RingLayout,
}

impl<M: Words, const N: usize> Producer<M, N> {
    /// The producer side of a ring in `memory`.
    pub fn new(memory: M, layout: RingLayout) -> Self {
        assert!(
            layout.entries_at + N * layout.capacity as usize <= memory.word_count(),
            "ring outside of its memory"
        );
        Self { memory, layout }
    }

    /// Appends an entry. Memory written before is visible to the consumer once it sees the entry.
    ///
    /// # Errors
    /// [`Full`] when the consumer has not yet read what lies in the next place.
    pub fn push(&self, entry: &[u64; N]) -> Result<(), Full> {
        let idx = self.claim()?;
        write_entry(&self.memory, self.layout.entries_at, idx, self.layout.capacity, entry);
        Ok(())
    }

    /// Whether a push would find room now; with other producers about, it still may not.
    pub fn has_room(&self) -> bool {
        let prod = self.memory.word(self.layout.prod_idx_at).load(Ordering::Relaxed);
        let cons = self.memory.word(self.layout.cons_idx_at).load(Ordering::Relaxed);
        prod.wrapping_sub(cons) < self.layout.capacity
    }

    fn claim(&self) -> Result<u64, Full> {
        let prod = self.memory.word(self.layout.prod_idx_at);
        let cons = self.memory.word(self.layout.cons_idx_at);
        let mut idx = prod.load(Ordering::Relaxed);
        loop {
            // Acquire: pairs with the release in `Consumer::publish`, so that our stores come after its reads.
            // Wrapping: between the two loads other producers and the consumer may have gone on, past `idx`.
            let used = idx.wrapping_sub(cons.load(Ordering::Acquire));
            if used >= self.layout.capacity && used <= u64::MAX / 2 {
                return Err(Full);
            }
            // Relaxed: the claim publishes nothing; the words do.
            match prod.compare_exchange_weak(idx, idx.wrapping_add(1), Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Ok(idx),
                Err(now) => idx = now,
            }
        }
    }
}

/// The reading side. There is one.
pub struct Consumer<M, const N: usize> {
    memory: M,
    layout: RingLayout,
    cons_idx: u64,
    published_idx: u64,
}

impl<M: Words, const N: usize> Consumer<M, N> {
    /// The consumer side of a fresh ring in `memory`.
    pub fn new(memory: M, layout: RingLayout) -> Self {
        assert!(
            layout.entries_at + N * layout.capacity as usize <= memory.word_count(),
            "ring outside of its memory"
        );
        Self { memory, layout, cons_idx: 0, published_idx: 0 }
    }

    /// The oldest entry, if it is complete.
    #[inline]
    pub fn peek(&self) -> Option<[u64; N]> {
        self.peek_ahead(0)
    }

    /// The entry `ahead` places behind the oldest one, if it is complete; those before it stay in the ring as well.
    #[inline]
    pub fn peek_ahead(&self, ahead: u64) -> Option<[u64; N]> {
        debug_assert!(ahead < self.layout.capacity);
        let idx = self.cons_idx + ahead;
        let first = self.layout.entries_at + N * (idx % self.layout.capacity) as usize;
        let due = lap(idx, self.layout.capacity);
        let mut entry = [0; N];
        for (i, value) in entry.iter_mut().enumerate() {
            // Relaxed: the fence below orders all of them before anything the caller reads.
            let word = self.memory.word(first + i).load(Ordering::Relaxed);
            if word >> FL_LAP_SHIFT != due {
                return None;
            }
            *value = word & WORD_MAX;
        }
        // Pairs with the producer's release fence (Rust) or fl_fence_sys (kernels).
        fence(Ordering::Acquire);
        Some(entry)
    }

    /// Goes past the entry that `peek` returned.
    #[inline]
    pub fn advance(&mut self) {
        self.cons_idx += 1;
        if self.cons_idx - self.published_idx >= self.layout.capacity / 4 {
            self.publish();
        }
    }

    /// Takes the oldest entry.
    #[inline]
    pub fn pop(&mut self) -> Option<[u64; N]> {
        let entry = self.peek()?;
        self.advance();
        Some(entry)
    }

    /// How many entries have been read so far.
    pub fn read(&self) -> u64 {
        self.cons_idx
    }

    /// How many entries producers have claimed so far; some may not be complete yet.
    pub fn claimed(&self) -> u64 {
        // Acquire: pairs with nothing here; callers order it by what told them to look.
        self.memory.word(self.layout.prod_idx_at).load(Ordering::Acquire)
    }

    /// Lets producers reuse what has been read. Called by itself every quarter lap; call it when the ring runs dry.
    #[inline]
    pub fn publish(&mut self) {
        if self.published_idx != self.cons_idx {
            // Release: our reads of the entries come before any producer's next stores to them.
            self.memory.word(self.layout.cons_idx_at).store(self.cons_idx, Ordering::Release);
            self.published_idx = self.cons_idx;
        }
    }
}

#[cfg(all(test, loom))]
mod model;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::words::{AtomicU64, heap_words};

    type Heap = std::sync::Arc<[AtomicU64]>;

    fn ring(capacity: u64) -> (Producer<Heap, 4>, Consumer<Heap, 4>) {
        let memory = heap_words(RingLayout::words(4, capacity));
        let layout = RingLayout::at(0, capacity);
        (Producer::new(memory.clone(), layout), Consumer::new(memory, layout))
    }

    #[test]
    fn zeroed_memory_is_empty() {
        let (_, c) = ring(4);
        assert_eq!(c.peek(), None);
    }

    #[test]
    fn wraps_at_the_lap_boundary() {
        let (p, mut c) = ring(4);
        for i in 0..64 {
            p.push(&[i, i + 1, WORD_MAX, 0]).unwrap();
            assert_eq!(c.pop(), Some([i, i + 1, WORD_MAX, 0]));
            assert_eq!(c.pop(), None);
        }
    }

    #[test]
    fn full_until_published() {
        let (p, mut c) = ring(8);
        for i in 0..8 {
            p.push(&[i; 4]).unwrap();
        }
        assert_eq!(p.push(&[8; 4]), Err(Full));
        assert_eq!(c.pop(), Some([0; 4]));
        c.publish();
        p.push(&[8; 4]).unwrap();
        assert_eq!(p.push(&[9; 4]), Err(Full));
    }

    #[test]
    fn a_torn_entry_is_not_there_yet() {
        let (p, c) = ring(4);
        p.push(&[7; 4]).unwrap();
        c.memory.word(c.layout.entries_at + 2).store(7, Ordering::Relaxed);
        assert_eq!(c.peek(), None);
    }

    #[test]
    fn looking_ahead_takes_nothing_and_stops_where_the_ring_ends() {
        let (p, mut c) = ring(4);
        for begin in 0..9 {
            (begin..begin + 3).for_each(|i| p.push(&[i; 4]).unwrap());
            let seen: Vec<_> = (0..4).map_while(|ahead| c.peek_ahead(ahead)).collect();
            assert_eq!(
                seen,
                [begin, begin + 1, begin + 2].map(|i| [i; 4]),
                "an entry of the lap before is none"
            );
            (begin..begin + 3).for_each(|i| assert_eq!(c.pop(), Some([i; 4])));
            c.publish();
        }
    }

    #[test]
    fn producers_on_threads_lose_and_double_nothing() {
        let (p, mut c) = ring(16);
        let each = 20_000u64;
        std::thread::scope(|s| {
            for t in 0..3u64 {
                let p = p.clone();
                s.spawn(move || {
                    for i in 0..each {
                        while p.push(&[t, i, t * each + i, 0]).is_err() {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let mut next = [0u64; 3];
            while next.iter().sum::<u64>() < 3 * each {
                match c.pop() {
                    Some([t, i, sum, _]) => {
                        assert_eq!((i, sum), (next[t as usize], t * each + i));
                        next[t as usize] += 1;
                    }
                    None => {
                        c.publish();
                        std::thread::yield_now();
                    }
                }
            }
        });
        assert_eq!(c.pop(), None);
    }
}
