//! Memory that a NIC may read and write.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::advice::{Operation, advise};
use super::raw::{Domain, Region};
use crate::hw::RemoteKey;

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

    /// The address of a part of it, if it lies within.
    pub fn address(&self, offset: u64, bytes: u32) -> Option<u64> {
        let end = offset.checked_add(bytes.into())?;
        (end <= self.bytes).then(|| self.start + offset)
    }
}

/// Host memory of this process's own, registered for as long as it lives.
pub(super) struct HostMemory {
    // Dropped before the bytes.
    memory: Memory,
    words: Box<[std::sync::atomic::AtomicU64]>,
}

impl HostMemory {
    /// Zeroed.
    pub fn new(domain: &Arc<Domain>, words: usize) -> io::Result<Self> {
        let words: Box<[_]> = (0..words.max(1)).map(|_| std::sync::atomic::AtomicU64::new(0)).collect();
        let memory = Memory::at_address(domain, words.as_ptr() as u64, words.len() as u64 * 8)?;
        Ok(Self { memory, words })
    }

    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    pub fn words(&self) -> &[std::sync::atomic::AtomicU64] {
        &self.words
    }
}
