//! Memory that a NIC may read and write.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::advice::{Operation, advise};
use super::raw::{Domain, Region};
use crate::hw::{HwError, LocalKey, Registrable, Registrar, RemoteKey};
use crate::topo::{GpuIdx, NicIdx};

/// How memory came to be known to the NIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Via {
    /// By its address: host memory, or GPU memory through nvidia-peermem.
    Address,
    /// By its dma-buf.
    DmaBuf,
}

/// Registered memory.
pub(super) struct Memory {
    region: Region,
    /// First address, as the NIC knows it.
    start: u64,
    bytes: u64,
    pub via: Via,
}

/// What work needs to know of registered memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Registered {
    start: u64,
    bytes: u64,
    lkey: u32,
    rkey: u32,
}

impl Registered {
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    pub fn start(&self) -> u64 {
        self.start
    }

    /// The address of a part of it, if it lies within.
    pub fn address(&self, offset: u64, bytes: u32) -> Option<u64> {
        let end = offset.checked_add(bytes.into())?;
        (end <= self.bytes).then(|| self.start + offset)
    }
}

/// GPU memory as it is offered.
#[derive(Clone, Copy)]
pub(super) struct DeviceMemory<'a> {
    pub fd: BorrowedFd<'a>,
    /// Its address in this process; 0 when it is not mapped.
    pub dev_ptr: u64,
    pub bytes: u64,
}

impl Memory {
    /// Memory at an address of this process.
    pub fn at_address(domain: &Arc<Domain>, start: u64, bytes: u64) -> io::Result<Self> {
        let region = Region::of_address(domain, start, bytes);
        let region = region.map_err(|e| advise(Operation::RegisterAddress, e))?;
        Ok(Self { region, start, bytes, via: Via::Address })
    }

    fn of_dma_buf(domain: &Arc<Domain>, memory: DeviceMemory<'_>) -> io::Result<Self> {
        // The NIC's addresses are the process's where it has any: they need only differ between registrations.
        let DeviceMemory { fd, dev_ptr: start, bytes } = memory;
        let region = Region::of_dma_buf(domain, fd, bytes, start);
        let region = region.map_err(|e| advise(Operation::RegisterDmaBuf, e))?;
        Ok(Self { region, start, bytes, via: Via::DmaBuf })
    }

    /// GPU memory: by dma-buf, else by its address (nvidia-peermem, or an emulated GPU's host memory).
    pub fn of_device(domain: &Arc<Domain>, memory: DeviceMemory<'_>, dma_buf: bool) -> io::Result<Self> {
        let refused = match dma_buf.then(|| Self::of_dma_buf(domain, memory)) {
            Some(Ok(memory)) => return Ok(memory),
            Some(Err(e)) => format!("by dma-buf: {e}; "),
            None => String::new(),
        };
        if memory.dev_ptr == 0 {
            return Err(io::Error::other(format!(
                "{refused}by address: it is mapped nowhere in this process"
            )));
        }
        Self::at_address(domain, memory.dev_ptr, memory.bytes)
            .map_err(|e| io::Error::other(format!("{refused}by address: {e}")))
    }

    /// What a peer needs.
    pub fn remote_key(&self) -> RemoteKey {
        RemoteKey { remote_addr: self.start, rkey: self.region.rkey().into(), bytes: self.bytes }
    }

    pub fn lkey(&self) -> u32 {
        self.region.lkey()
    }

    pub fn rkey(&self) -> u32 {
        self.region.rkey()
    }

    pub fn start(&self) -> u64 {
        self.start
    }

    fn registered(&self) -> Registered {
        Registered { start: self.start, bytes: self.bytes, lkey: self.lkey(), rkey: self.rkey() }
    }
}

/// A NIC's registrations. The NIC's thread and its registrar share them.
#[derive(Clone)]
pub(super) struct Registrations {
    nic: NicIdx,
    beside: GpuIdx,
    dma_buf: bool,
    domain: Arc<Domain>,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    books: Mutex<Books>,
    /// Counts changes, so that the NIC's thread looks only after one.
    changes: AtomicU64,
}

#[derive(Default)]
struct Books {
    by_key: BTreeMap<u32, Memory>,
    next_key: u32,
}

impl Registrations {
    pub fn new(domain: &Arc<Domain>, nic: NicIdx, beside: GpuIdx, dma_buf: bool) -> Self {
        Self { nic, beside, dma_buf, domain: Arc::clone(domain), shared: Arc::default() }
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.shared.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make(&self, memory: &Registrable<'_>) -> Result<Memory, HwError> {
        let (made, bytes) = match *memory {
            Registrable::Device { gpu, .. } if gpu != self.beside => {
                return Err(HwError::NotBeside { nic: self.nic, gpu, beside: self.beside });
            }
            Registrable::Device { fd, dev_ptr, bytes, .. } => {
                let memory = DeviceMemory { fd, dev_ptr, bytes };
                (Memory::of_device(&self.domain, memory, self.dma_buf), bytes)
            }
            Registrable::Host { host_ptr, bytes, .. } => {
                (Memory::at_address(&self.domain, host_ptr as u64, bytes), bytes)
            }
        };
        made.map_err(|source| HwError::Register { nic: self.nic, bytes, source })
    }

    /// How many went by dma-buf, and how many by address.
    pub fn count(&self) -> (usize, usize) {
        let books = self.books();
        let by_dma_buf = books.by_key.values().filter(|m| m.via == Via::DmaBuf).count();
        (by_dma_buf, books.by_key.len() - by_dma_buf)
    }

    /// Brings a copy of the places up to date.
    pub fn refresh(&self, seen: &mut u64, places: &mut BTreeMap<u32, Registered>) {
        // Acquire: pairs with `changed`; the places themselves come under the lock.
        let changes = self.shared.changes.load(Ordering::Acquire);
        if *seen != changes {
            *seen = changes;
            *places = self.books().by_key.iter().map(|(&key, m)| (key, m.registered())).collect();
        }
    }

    fn changed(&self) {
        self.shared.changes.fetch_add(1, Ordering::Release);
    }
}

impl Registrar for Registrations {
    fn register(&mut self, memory: &Registrable<'_>) -> Result<(LocalKey, RemoteKey), HwError> {
        let memory = self.make(memory)?; // Pins pages: not under the lock.
        let remote = memory.remote_key();
        let mut books = self.books();
        let key = books.next_key;
        books.next_key += 1;
        books.by_key.insert(key, memory);
        drop(books);
        self.changed();
        Ok((LocalKey(key), remote))
    }

    fn deregister(&mut self, key: LocalKey) -> Result<(), HwError> {
        let memory = self.books().by_key.remove(&key.0);
        self.changed();
        memory.map(drop).ok_or(HwError::Deregister { nic: self.nic, key: key.0 })
    }
}

/// Host memory of this process's own, registered for as long as it lives.
pub(super) struct HostMemory {
    // Dropped before the bytes.
    memory: Memory,
    words: Box<[AtomicU64]>,
}

impl HostMemory {
    /// Zeroed.
    pub fn new(domain: &Arc<Domain>, words: usize) -> io::Result<Self> {
        let words: Box<[_]> = (0..words.max(1)).map(|_| AtomicU64::new(0)).collect();
        let memory = Memory::at_address(domain, words.as_ptr() as u64, words.len() as u64 * 8)?;
        Ok(Self { memory, words })
    }

    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    pub fn words(&self) -> &[AtomicU64] {
        &self.words
    }
}
