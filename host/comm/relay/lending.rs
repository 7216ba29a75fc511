//! The owner's hands: makes a lot, so that its NIC and its borrower can reach it, and takes it back.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use crate::comm::device::Device;
use crate::comm::memory::Mapped;
use crate::engine::slots::Lot;
use crate::hw::{Chunk, Gpu, HwError, LocalKey, Registrable, Registrar, RemoteKey};
use crate::owner::LotKeys;
use crate::topo::NicIdx;

/// A NIC that this rank owns, as lots need it.
pub struct OwnedNicLots {
    pub registrar: Box<dyn Registrar>,
    pub keys: LotKeys,
}

/// A lot that was lent.
struct LentLot {
    memory: Mapped,
    key: LocalKey,
}

/// Lots on this rank's GPU that others use.
pub struct Lending {
    // Registered memory goes after its registration.
    nics: BTreeMap<NicIdx, OwnedNicLots>,
    lots: BTreeMap<Lot, LentLot>,
}

/// What a borrower needs of a lot.
pub struct Offer {
    pub key: RemoteKey,
    pub fd: OwnedFd,
}

impl Lending {
    pub fn new(nics: BTreeMap<NicIdx, OwnedNicLots>) -> Self {
        Self { nics, lots: BTreeMap::new() }
    }

    /// Makes a lot. What there is of it goes when a step fails. Between kernels only: it maps memory.
    pub fn make(&mut self, gpu: &Device, lot: Lot, bytes: u64) -> Result<Offer, HwError> {
        let unknown = HwError::Deregister { nic: lot.nic, key: 0 };
        let nic = self.nics.get_mut(&lot.nic).ok_or(unknown)?;
        let memory = Mapped::of(gpu, gpu.create_chunk(bytes)?)?;
        let fd = memory.chunk.export()?;
        let for_nic = memory.chunk.export_for_nic()?;
        let (dev_ptr, bytes) = (memory.dev_ptr(), memory.bytes());
        let registrable = Registrable::Device { fd: for_nic.as_fd(), gpu: gpu.idx(), dev_ptr, bytes };
        let (key, remote) = nic.registrar.register(&registrable)?;
        nic.keys.set(lot, Some(key));
        self.lots.insert(lot, LentLot { memory, key });
        Ok(Offer { key: remote, fd })
    }

    /// The NIC reaches a lot no more. What is left is to be dropped between kernels.
    pub fn take_back(&mut self, lot: Lot) -> Result<Option<Mapped>, HwError> {
        let Some(LentLot { memory, key }) = self.lots.remove(&lot) else { return Ok(None) };
        if let Some(nic) = self.nics.get_mut(&lot.nic) {
            nic.keys.set(lot, None);
            nic.registrar.deregister(key)?;
        }
        Ok(Some(memory))
    }
}
