//! Pacing by reservation: who wants to move bytes over a link takes the next free span of its time. Links are words in
//! shared memory, so processes share them fairly, first come first served, and no link passes its rate.

use crate::hw::Nanos;
use crate::topo::GpuIdx;
use crate::words::{AtomicU64, Ordering, WordSlice, Words};

/// Nanoseconds that `bytes` take at a rate. Rounded up: a link is never faster than it says.
pub fn duration_ns(bytes: u64, byte_per_s: u64) -> Nanos {
    (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(byte_per_s.max(1))) as Nanos
}

/// Takes the next `duration` of a link's time that starts no earlier than `from`; returns when it ends.
pub fn reserve(free_at: &AtomicU64, from: Nanos, duration: Nanos) -> Nanos {
    let mut free = free_at.load(Ordering::Relaxed);
    loop {
        let end = free.max(from) + duration;
        // Relaxed: the word is the whole message; nothing else is published with it.
        match free_at.compare_exchange_weak(free, end, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return end,
            Err(now) => free = now,
        }
    }
}

/// Words per link direction: a cache line each.
const LINE: usize = 8;

/// The scale-up links of one server: one port per GPU, both directions.
#[derive(Clone)]
pub struct ScaleupLinks {
    words: WordSlice,
    byte_per_s: u64,
}

impl ScaleupLinks {
    /// Words that the links of `gpus` GPUs take.
    pub fn words(gpus: u32) -> usize {
        2 * LINE * gpus as usize
    }

    /// Links in zeroed shared words, each of `byte_per_s` per direction.
    pub fn new(words: WordSlice, byte_per_s: u64) -> Self {
        Self { words, byte_per_s }
    }

    /// Bytes that have left a GPU's memory by its port so far.
    pub fn sent_bytes(&self, from: GpuIdx) -> u64 {
        self.words.word(2 * LINE * from.idx() + 1).load(Ordering::Relaxed)
    }

    /// Reserves the way from one GPU's memory to another's and returns when the last byte is there.
    pub fn reserve(&self, from: GpuIdx, to: GpuIdx, bytes: u64, now: Nanos) -> Nanos {
        let duration = duration_ns(bytes, self.byte_per_s);
        let out = self.words.word(2 * LINE * from.idx());
        // Relaxed: a count, read when nothing moves.
        self.words.word(2 * LINE * from.idx() + 1).fetch_add(bytes, Ordering::Relaxed);
        let into = self.words.word(2 * LINE * to.idx() + LINE);
        let sent = reserve(out, now, duration);
        reserve(into, sent - duration, duration)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_do_not_overlap() {
        let link = AtomicU64::new(0);
        assert_eq!(reserve(&link, 100, 10), 110);
        assert_eq!(reserve(&link, 100, 10), 120);
        assert_eq!(reserve(&link, 500, 10), 510);
    }

    #[test]
    fn durations_round_up() {
        assert_eq!(duration_ns(1, 3_000_000_000), 1);
        assert_eq!(duration_ns(50, 50_000_000), 1_000);
        assert_eq!(duration_ns(0, 1), 0);
    }
}
