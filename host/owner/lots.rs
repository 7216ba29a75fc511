//! Which lots of a NIC's relay memory are registered with its device. The proxy reads this for every message; whoever lends
//! and takes back writes it, from another thread.

use std::sync::Arc;

use crate::engine::slots::{Lot, SlotLayout};
use crate::hw::LocalKey;
use crate::words::{AtomicU64, Ordering};

/// The registered lots of one NIC, part by part.
#[derive(Clone, Debug)]
pub struct LotKeys {
    slots: SlotLayout,
    keys: Arc<[AtomicU64]>,
}

impl LotKeys {
    /// None yet, beside a NIC of a server with such slots.
    pub fn new(slots: SlotLayout) -> Self {
        Self { slots, keys: (0..slots.part_count()).map(|_| AtomicU64::new(0)).collect() }
    }

    /// A part of a lot is registered, or (`None`) is not any more.
    ///
    /// Relaxed: the borrower uses a lot after it was told, by a message that its owner sent after this; and nothing lies
    /// behind the key but what the device knows.
    pub fn set(&self, lot: Lot, part: u32, key: Option<LocalKey>) {
        let word = key.map_or(0, |key| u64::from(key.0) + 1);
        self.keys[self.slots.part_number(lot, part)].store(word, Ordering::Relaxed);
    }

    /// Its key, if it is registered. Relaxed: as above.
    pub fn key(&self, lot: Lot, part: u32) -> Option<LocalKey> {
        let word = self.keys.get(self.slots.part_number(lot, part))?.load(Ordering::Relaxed);
        word.checked_sub(1).map(|key| LocalKey(key as u32))
    }
}
