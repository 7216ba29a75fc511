//! Relay memory as one rank holds it: the lots that it uses, beside any NIC of its server, and those on its own GPU.

use std::collections::BTreeMap;

use super::memory::Mapped;
use crate::doorbell::Class;
use crate::engine::slots::Lot;
use crate::proxy::LotPtrs;
use crate::topo::{GpuIdx, NicIdx};

/// Lots by NIC, GPU and class.
#[derive(Default)]
pub(super) struct RelayMemory {
    /// Those that this rank uses, and those on its GPU that others use: a NIC registers what its owner has mapped.
    lots: BTreeMap<Lot, Mapped>,
}

impl RelayMemory {
    pub fn add(&mut self, lot: Lot, memory: Mapped) {
        self.lots.insert(lot, memory);
    }

    pub fn lot(&self, lot: Lot) -> Option<&Mapped> {
        self.lots.get(&lot)
    }

    /// Where a GPU's lots of one NIC lie; 0: not there.
    pub fn dev_ptrs(&self, nic: NicIdx, gpu: GpuIdx) -> LotPtrs {
        Class::ALL.map(|class| self.lot(Lot { nic, gpu, class }).map_or(0, Mapped::dev_ptr))
    }
}
