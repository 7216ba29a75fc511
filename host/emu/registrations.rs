//! Memory that an emulated NIC may touch. The owner's thread and its registrar share the books; peers find the memory in a
//! table on the wire, which says of each place how often it was used, so that a key of memory that is gone opens nothing.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use memmap2::{MmapOptions, MmapRaw};

use super::gate;
use super::staging::{Behind, DeviceCopies};
use super::wire::{self, REGISTRATIONS, Wire};
use crate::hw::{HwError, LocalKey, Registrable, Registrar, RemoteKey};
use crate::topo::{GpuIdx, NicId, NicIdx};
use crate::words::{Ordering, fence};

/// Longest wait for a peer inside the gate: a write takes far less, and one who died inside does not come out.
const LONGEST_WRITE: Duration = Duration::from_secs(1);

/// Registered memory as its own NIC sees it.
pub(super) struct LocalMemory {
    pub map: MmapRaw,
    /// Keeps the number that the table on the wire names.
    _fd: OwnedFd,
    /// Set when `map` is only a stage.
    pub behind: Option<Behind>,
    /// Where it stands in the table.
    place: usize,
}

impl LocalMemory {
    /// # Safety
    /// The span is inside the memory, and nobody else touches it while the result lives.
    #[allow(clippy::mut_from_ref)] // It is memory that others share, as a NIC's always is.
    pub unsafe fn span(&self, offset: u64, bytes: usize) -> &mut [u8] {
        // SAFETY: inside the mapping, which lives as long as self (contract above).
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(offset as usize), bytes) }
    }
}

/// Whose memory it is.
#[derive(Clone)]
pub(super) struct Place {
    pub wire: Wire,
    pub id: NicId,
    pub idx: NicIdx,
    pub relay_gpu: GpuIdx,
    /// For memory that the host cannot map.
    pub copies: Option<Arc<dyn DeviceCopies>>,
}

#[derive(Default)]
struct Books {
    by_key: HashMap<u32, Arc<LocalMemory>>,
    next_key: u32,
    free_places: Vec<usize>,
    /// Places that were never used begin here.
    fresh_place: usize,
}

/// A NIC's registrations.
#[derive(Clone)]
pub(super) struct Registrations {
    at: Place,
    books: Arc<Mutex<Books>>,
}

impl Registrations {
    pub fn new(at: Place) -> Self {
        Self { at, books: Arc::default() }
    }

    fn books(&self) -> std::sync::MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn local(&self, key: LocalKey) -> Option<Arc<LocalMemory>> {
        self.books().by_key.get(&key.0).cloned()
    }

    /// The memory at a place of the table.
    pub fn at_place(&self, place: u64) -> Option<Arc<LocalMemory>> {
        self.books().by_key.values().find(|m| m.place as u64 == place).cloned()
    }

    pub fn add(&self, memory: &Registrable<'_>) -> Result<(LocalKey, RemoteKey), HwError> {
        let nic = self.at.idx;
        let (fd, bytes, dev_ptr) = match *memory {
            Registrable::Device { gpu, .. } if gpu != self.at.relay_gpu => {
                return Err(HwError::NotBeside { nic, gpu, beside: self.at.relay_gpu });
            }
            Registrable::Device { fd, bytes, dev_ptr, .. } => (fd, bytes, Some(dev_ptr)),
            Registrable::Host { fd, bytes, .. } => (fd, bytes, None),
        };
        let refuse = |source| HwError::Register { nic, bytes, source };
        let behind = self.at.copies.clone().zip(dev_ptr).map(|(copies, dev_ptr)| Behind { copies, dev_ptr });
        let fd = match behind {
            Some(_) => crate::shm::memfd("fuselink-stage", bytes)?,
            None => fd.try_clone_to_owned().map_err(refuse)?,
        };
        let map = MmapOptions::new().len(bytes as usize).map_raw(&fd).map_err(refuse)?;
        let mut books = self.books();
        let place =
            books.take_place().ok_or_else(|| refuse(std::io::Error::other("the NIC has no key left")))?;
        let [generation, address] = self.at.wire.registration(self.at.id, place);
        // Release: pairs with `find`. Who sees the generation sees the address.
        address.store(wire::fd_address(fd.as_fd()), Ordering::Relaxed);
        let count = generation.load(Ordering::Relaxed) + 1;
        generation.store(count, Ordering::Release);
        let key = books.next_key;
        books.next_key += 1;
        books.by_key.insert(key, Arc::new(LocalMemory { map, _fd: fd, behind, place }));
        Ok((LocalKey(key), RemoteKey { remote_addr: 0, rkey: count << 32 | place as u64, bytes }))
    }

    /// Peers' writes that have begun are waited for; none begins any more.
    pub fn remove(&self, key: LocalKey) -> Result<(), HwError> {
        let unknown = HwError::Deregister { nic: self.at.idx, key: key.0 };
        let memory = self.books().by_key.remove(&key.0).ok_or(unknown)?;
        let [generation, _] = self.at.wire.registration(self.at.id, memory.place);
        generation.fetch_add(1, Ordering::Relaxed);
        // Pairs with the fence in `gate::pass`: who is inside is seen here, or has seen the new generation.
        fence(Ordering::SeqCst);
        let until = Instant::now() + LONGEST_WRITE;
        for from in (0..self.at.wire.nics()).map(NicId) {
            while !gate::is_empty(self.at.wire.gate(from, self.at.id)) && Instant::now() < until {
                std::thread::yield_now();
            }
        }
        self.books().free_places.push(memory.place);
        Ok(())
    }
}

impl Books {
    fn take_place(&mut self) -> Option<usize> {
        if let Some(place) = self.free_places.pop() {
            return Some(place);
        }
        let place = self.fresh_place;
        self.fresh_place += usize::from(place < REGISTRATIONS);
        (place < REGISTRATIONS).then_some(place)
    }
}

/// The address of a peer's memory, if the key is still good. To be asked inside the gate.
pub(super) fn find(wire: &Wire, nic: NicId, rkey: u64) -> Option<u64> {
    let place = (rkey & 0xffff_ffff) as usize;
    if place >= REGISTRATIONS || (rkey >> 32).is_multiple_of(2) {
        return None;
    }
    let [generation, address] = wire.registration(nic, place);
    // Acquire: pairs with `add`.
    (generation.load(Ordering::Acquire) == rkey >> 32).then(|| address.load(Ordering::Relaxed))
}

/// The registrar of an emulated NIC.
pub(super) struct EmuRegistrar(pub Registrations);

impl Registrar for EmuRegistrar {
    fn register(&mut self, memory: &Registrable<'_>) -> Result<(LocalKey, RemoteKey), HwError> {
        self.0.add(memory)
    }
    fn deregister(&mut self, key: LocalKey) -> Result<(), HwError> {
        self.0.remove(key)
    }
}
