//! What a kernel stores or loads without a copy of the emulator's: known only when it sends the slot or gives it back. Then
//! what copies have moved there since is taken off, and scale-up is charged for the rest.

use std::collections::VecDeque;

/// Copies to and from slots that one block has made lately. A slot is one block's between its claim and its end.
#[derive(Debug, Default)]
pub(super) struct Moved {
    /// First address and length.
    spans: VecDeque<(u64, u64)>,
}

/// More than a block has in hand at once. What is forgotten is charged twice.
const SPANS: usize = 64;

impl Moved {
    pub(super) fn note(&mut self, dev_ptr: u64, bytes: u64) {
        if self.spans.len() == SPANS {
            self.spans.pop_front();
        }
        self.spans.push_back((dev_ptr, bytes));
    }

    /// How many of `bytes` from `dev_ptr` on no copy has moved; copies there are forgotten.
    pub(super) fn take_rest(&mut self, dev_ptr: u64, bytes: u64) -> u64 {
        let end = dev_ptr + bytes;
        let mut moved = 0;
        self.spans.retain(|&(first, length)| {
            let within = first >= dev_ptr && first < end;
            moved += if within { length } else { 0 };
            !within
        });
        bytes.saturating_sub(moved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_taken_off_once() {
        let mut moved = Moved::default();
        moved.note(1000, 100);
        moved.note(1100, 20);
        moved.note(2000, 50);
        assert_eq!(moved.take_rest(1000, 200), 80);
        assert_eq!(moved.take_rest(1000, 200), 200);
        assert_eq!(moved.take_rest(2000, 50), 0);
        assert_eq!(moved.take_rest(3000, 0), 0);
    }

    #[test]
    fn what_is_noted_is_bounded() {
        let mut moved = Moved::default();
        (0..1000).for_each(|i| moved.note(i, 1));
        assert_eq!(moved.spans.len(), SPANS);
    }
}
