//! Which lots of a NIC's relay memory are registered with its device. The proxy reads this for every message; whoever lends
//! and takes back writes it, from another thread.

use std::sync::Arc;

use crate::engine::slots::Lot;
use crate::hw::LocalKey;
use crate::words::{AtomicU64, Ordering};

/// The registered lots of one NIC.
#[derive(Clone, Debug)]
pub struct LotKeys(Arc<[AtomicU64]>);

impl LotKeys {
    /// None yet, of a server with so many GPUs.
    pub fn new(gpus: u32) -> Self {
        Self((0..Lot::count(gpus)).map(|_| AtomicU64::new(0)).collect())
    }

    /// A lot is registered, or (`None`) is not any more.
    ///
    /// Relaxed: the borrower uses a lot after it was told, by a message that its owner sent after this; and nothing lies
    /// behind the key but what the device knows.
    pub fn set(&self, lot: Lot, key: Option<LocalKey>) {
        let word = key.map_or(0, |key| u64::from(key.0) + 1);
        self.0[lot.number()].store(word, Ordering::Relaxed);
    }

    /// Its key, if it is registered. Relaxed: as above.
    pub fn key(&self, lot: Lot) -> Option<LocalKey> {
        let word = self.0.get(lot.number())?.load(Ordering::Relaxed);
        word.checked_sub(1).map(|key| LocalKey(key as u32))
    }
}
