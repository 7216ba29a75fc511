//! Rows of bits: which servers are meant, one bit each.

/// Rows of equally many bits.
#[derive(Clone, Debug, Default)]
pub(super) struct Bits {
    words: usize,
    bits: Vec<u64>,
}

impl Bits {
    /// `rows` of `n` bits, all unset.
    pub fn reset(&mut self, rows: usize, n: usize) {
        self.words = n.div_ceil(64);
        self.bits.clear();
        self.bits.resize(rows * self.words, 0);
    }

    pub fn copy_from(&mut self, other: &Self) {
        self.words = other.words;
        self.bits.clear();
        self.bits.extend_from_slice(&other.bits);
    }

    #[inline]
    pub fn set(&mut self, row: usize, bit: usize) {
        self.bits[row * self.words + bit / 64] |= 1 << (bit % 64);
    }

    #[inline]
    pub fn unset(&mut self, row: usize, bit: usize) {
        self.bits[row * self.words + bit / 64] &= !(1 << (bit % 64));
    }

    #[inline]
    pub fn has(&self, row: usize, bit: usize) -> bool {
        self.bits[row * self.words + bit / 64] >> (bit % 64) & 1 == 1
    }

    #[inline]
    pub fn row(&self, row: usize) -> &[u64] {
        &self.bits[row * self.words..(row + 1) * self.words]
    }

    /// How many bits of a row are set.
    pub fn count(&self, row: usize) -> usize {
        self.row(row).iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The bits set both in a row and in the only row of `other`, ascending.
    #[inline]
    pub fn for_each_common(&self, row: usize, other: &Self, mut visit: impl FnMut(usize)) {
        for (word, (a, b)) in self.row(row).iter().zip(&other.bits).enumerate() {
            let mut common = a & b;
            while common != 0 {
                visit(word * 64 + common.trailing_zeros() as usize);
                common &= common - 1;
            }
        }
    }

    /// The lowest bit set in a row.
    #[inline]
    pub fn first(&self, row: usize) -> Option<usize> {
        let found = self.row(row).iter().enumerate().find(|(_, word)| **word != 0)?;
        Some(found.0 * 64 + found.1.trailing_zeros() as usize)
    }

    /// The lowest bit set in a row of each of two.
    #[inline]
    pub fn first_common(&self, row: usize, other: &Self, other_row: usize) -> Option<usize> {
        let pairs = self.row(row).iter().zip(other.row(other_row)).map(|(a, b)| a & b);
        pairs
            .enumerate()
            .find(|(_, word)| *word != 0)
            .map(|(i, word)| i * 64 + word.trailing_zeros() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_wider_than_a_word() {
        let (mut a, mut b) = (Bits::default(), Bits::default());
        a.reset(2, 130);
        b.reset(1, 130);
        for bit in [3, 64, 129] {
            a.set(1, bit);
        }
        for bit in [64, 129] {
            b.set(0, bit);
        }
        a.unset(1, 3);
        a.set(1, 5);
        assert_eq!((a.count(0), a.count(1), a.first(0), a.first(1)), (0, 3, None, Some(5)));
        assert!(a.has(1, 129) && !a.has(0, 129));
        assert_eq!((a.first_common(1, &b, 0), a.first_common(0, &b, 0)), (Some(64), None));
        let mut common = Vec::new();
        a.for_each_common(1, &b, |bit| common.push(bit));
        assert_eq!(common, [64, 129]);
    }
}
