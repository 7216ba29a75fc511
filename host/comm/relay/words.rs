//! What the ranks of a server tell each other of lots. One datagram is one letter: its lot, the number of the ask it is
//! about, and a word. Whatever comes in is hostile until parsed.

use crate::doorbell::Class;
use crate::engine::relay::Refusal;
use crate::engine::slots::Lot;
use crate::hw::RemoteKey;
use crate::topo::{GpuIdx, NicIdx};

/// Bytes of a letter: kind, class, reason and 0; sender, NIC, GPU, ask (4 bytes each); 4 of 0; the key (24). Little-endian.
pub const LETTER_BYTES: usize = 48;

/// What is said of a lot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Word {
    /// Borrower: I would like it.
    Ask,
    /// Owner: it is yours, at this key; its descriptor comes along.
    Lent(RemoteKey),
    /// Owner: not now.
    Refused(Refusal),
    /// Owner: I want it back.
    Recall,
    /// Borrower: I neither use nor map it any more.
    Returned,
}

/// A word with what it is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Letter {
    /// Who says it.
    pub from: GpuIdx,
    /// The lot; its GPU is the borrower's.
    pub lot: Lot,
    /// The number of the borrower's ask.
    pub ask: u32,
    /// What.
    pub word: Word,
}

/// What a letter must not say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BadField(pub &'static str, pub u64);

impl Letter {
    /// As it travels.
    pub fn encode(&self) -> [u8; LETTER_BYTES] {
        let (kind, reason, key) = match self.word {
            Word::Ask => (0, 0, None),
            Word::Lent(key) => (1, 0, Some(key)),
            Word::Refused(refusal) => (2, refusal as u8, None),
            Word::Recall => (3, 0, None),
            Word::Returned => (4, 0, None),
        };
        let mut bytes = [0; LETTER_BYTES];
        bytes[..3].copy_from_slice(&[kind, self.lot.class as u8, reason]);
        let numbers = [self.from.0, self.lot.nic.0, self.lot.gpu.0, self.ask];
        for (n, number) in numbers.into_iter().enumerate() {
            bytes[4 + 4 * n..][..4].copy_from_slice(&number.to_le_bytes());
        }
        if let Some(RemoteKey { remote_addr, rkey, bytes: size }) = key {
            for (n, number) in [remote_addr, rkey, size].into_iter().enumerate() {
                bytes[24 + 8 * n..][..8].copy_from_slice(&number.to_le_bytes());
            }
        }
        bytes
    }

    /// Reads one.
    ///
    /// # Errors
    /// [`BadField`] for what no rank of this version writes. Whether sender and lot exist, and fit each other, is the
    /// reader's to check.
    pub fn decode(bytes: &[u8]) -> Result<Self, BadField> {
        let bytes: &[u8; LETTER_BYTES] =
            bytes.try_into().map_err(|_| BadField("length", bytes.len() as u64))?;
        let number = |n: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[4 + 4 * n + i]));
        let long = |n: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[24 + 8 * n + i]));
        let class = Class::ALL.get(usize::from(bytes[1])).ok_or(BadField("class", bytes[1].into()))?;
        let refusal = Refusal::ALL.get(usize::from(bytes[2])).ok_or(BadField("reason", bytes[2].into()))?;
        let word = match bytes[0] {
            0 => Word::Ask,
            1 => Word::Lent(RemoteKey { remote_addr: long(0), rkey: long(1), bytes: long(2) }),
            2 => Word::Refused(*refusal),
            3 => Word::Recall,
            4 => Word::Returned,
            kind => return Err(BadField("kind", kind.into())),
        };
        let (nic, gpu) = (NicIdx(number(1)), GpuIdx(number(2)));
        let letter =
            Self { from: GpuIdx(number(0)), lot: Lot { nic, gpu, class: *class }, ask: number(3), word };
        // What a word does not use is 0.
        if letter.encode() == *bytes { Ok(letter) } else { Err(BadField("padding", 1)) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn hostile_bytes_are_refused_or_mean_one_thing(
            mut bytes in proptest::collection::vec(0u8..=255, LETTER_BYTES - 1..LETTER_BYTES + 2),
            kind in 0u8..6,
            class in 0u8..4,
        ) {
            (bytes[0], bytes[1], bytes[2], bytes[3]) = (kind, class, 0, 0);
            bytes[20..24].fill(0);
            if let Ok(letter) = Letter::decode(&bytes) {
                prop_assert_eq!(&letter.encode()[..], &bytes[..]);
            }
        }

        #[test]
        fn letters_come_as_they_were_sent(from in 0u32..64, nic in 0u32..64, ask in 0u32..=u32::MAX, rkey in 0u64..=u64::MAX) {
            let lot = Lot { nic: NicIdx(nic), gpu: GpuIdx(from ^ 1), class: Class::Put };
            let key = RemoteKey { remote_addr: rkey ^ 7, rkey, bytes: 1 << 21 };
            let refused = Refusal::ALL.map(Word::Refused);
            for word in [Word::Ask, Word::Lent(key), Word::Recall, Word::Returned].into_iter().chain(refused) {
                let letter = Letter { from: GpuIdx(from), lot, ask, word };
                prop_assert_eq!(Letter::decode(&letter.encode()), Ok(letter));
            }
        }
    }
}
