//! Bytes that say where they belong: a function of seed, iteration, source, destination and offset, so that a receiver
//! can tell every byte that is wrong, missing, stale or in the wrong place.

use crate::topo::Rank;

/// One cell's bytes in one iteration.
#[derive(Clone, Copy, Debug)]
pub struct Pattern {
    key: u64,
}

/// What buffers are filled with before each iteration, so that bytes of the one before cannot pass for new ones.
pub const POISON: u8 = 0xa5;

/// Odd, with bits spread: offsets that differ give words that differ.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

fn mix(mut x: u64) -> u64 {
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

impl Pattern {
    /// The bytes from `src` to `dst`.
    pub fn new(seed: u64, iteration: u64, src: Rank, dst: Rank) -> Self {
        let pair = u64::from(src.0) << 32 | u64::from(dst.0);
        Self { key: mix(mix(mix(seed).wrapping_add(iteration)).wrapping_add(pair)) }
    }

    #[inline]
    fn word(self, idx: u64) -> u64 {
        let x = self.key.wrapping_add(idx.wrapping_mul(STEP));
        x ^ x >> 29
    }

    fn bytes_from(self, offset: u64, len: usize) -> impl Iterator<Item = u8> {
        (offset..offset + len as u64).map(move |at| self.word(at / 8).to_le_bytes()[(at % 8) as usize])
    }

    /// Fills `out` with the bytes from `offset`, a multiple of 8.
    pub fn fill(self, offset: u64, out: &mut [u8]) {
        debug_assert!(offset.is_multiple_of(8));
        let (words, tail) = out.as_chunks_mut::<8>();
        let first = offset / 8;
        for (i, word) in words.iter_mut().enumerate() {
            *word = self.word(first + i as u64).to_le_bytes();
        }
        let done = offset + 8 * words.len() as u64;
        tail.iter_mut().zip(self.bytes_from(done, 8)).for_each(|(t, b)| *t = b);
    }

    /// How many of `bytes`, which lie from `offset` (a multiple of 8) on, are not as they should be.
    pub fn mismatches(self, offset: u64, bytes: &[u8]) -> u64 {
        let (words, tail) = bytes.as_chunks::<8>();
        let first = offset / 8;
        let mut wrong = 0;
        for (i, word) in words.iter().enumerate() {
            let difference = u64::from_le_bytes(*word) ^ self.word(first + i as u64);
            if difference != 0 {
                wrong += difference.to_le_bytes().iter().filter(|&&b| b != 0).count() as u64;
            }
        }
        let done = offset + 8 * words.len() as u64;
        wrong + tail.iter().zip(self.bytes_from(done, 8)).filter(|(a, b)| **a != *b).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: fn(u64, u32) -> Pattern = |iteration, dst| Pattern::new(7, iteration, Rank(1), Rank(dst));

    #[test]
    fn fills_in_parts_as_in_whole() {
        let mut whole = vec![0; 1003];
        P(1, 2).fill(0, &mut whole);
        let mut parts = vec![0; 1003];
        P(1, 2).fill(0, &mut parts[..504]);
        P(1, 2).fill(504, &mut parts[504..]);
        assert_eq!(whole, parts);
        assert_eq!(P(1, 2).mismatches(0, &whole), 0);
        assert_eq!(P(1, 2).mismatches(504, &whole[504..]), 0);
    }

    #[test]
    fn sees_each_wrong_byte() {
        let mut bytes = vec![0; 803];
        P(1, 2).fill(0, &mut bytes);
        for at in [0, 9, 802] {
            bytes[at] ^= 1;
        }
        assert_eq!(P(1, 2).mismatches(0, &bytes), 3);
    }

    #[test]
    fn sees_bytes_of_elsewhere() {
        let mut bytes = vec![0; 4096];
        P(1, 2).fill(0, &mut bytes);
        for other in
            [P(2, 2), P(1, 3), Pattern::new(8, 1, Rank(1), Rank(2)), Pattern::new(7, 1, Rank(2), Rank(1))]
        {
            assert!(other.mismatches(0, &bytes) > 3900);
        }
        assert!(P(1, 2).mismatches(8, &bytes) > 3900, "shifted");
        assert!(P(1, 2).mismatches(0, &[POISON; 4096]) > 3900);
    }
}
