//! Emulated GPU memory: chunks are memfds, windows are reserved addresses.

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::mm::{MapFlags, ProtFlags};

use crate::hw::{Chunk, HwError, MappedHost, Window};
use crate::space::{AddressMap, Parts};
use crate::topo::GpuIdx;

/// Chunk sizes and mapping offsets are multiples of this, as on the GPUs that are emulated.
pub const GRANULARITY_BYTES: u64 = 2 << 20;

/// Physical memory of an emulated GPU.
#[derive(Debug)]
pub struct EmuChunk {
    fd: OwnedFd,
    gpu: GpuIdx,
    bytes: u64,
    /// What it takes of its GPU; whoever imports it takes nothing.
    _charge: Option<Charge>,
}

/// How much memory an emulated GPU has, and how much of it is taken.
#[derive(Debug, Default)]
pub(super) struct Capacity {
    most_bytes: Option<u64>,
    taken_bytes: Mutex<u64>,
}

impl Capacity {
    pub fn new(most_bytes: Option<u64>) -> Arc<Self> {
        Arc::new(Self { most_bytes, taken_bytes: Mutex::default() })
    }

    fn take(self: &Arc<Self>, bytes: u64) -> Option<Charge> {
        let mut taken = self.taken_bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let after = taken.checked_add(bytes)?;
        if self.most_bytes.is_some_and(|most| after > most) {
            return None;
        }
        *taken = after;
        Some(Charge { of: Arc::clone(self), bytes })
    }

    pub fn taken_bytes(&self) -> u64 {
        *self.taken_bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory that is taken until this goes.
#[derive(Debug)]
struct Charge {
    of: Arc<Capacity>,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        *self.of.taken_bytes.lock().unwrap_or_else(PoisonError::into_inner) -= self.bytes;
    }
}

impl EmuChunk {
    pub(super) fn create(gpu: GpuIdx, bytes: u64, capacity: &Arc<Capacity>) -> Result<Self, HwError> {
        let bytes = bytes.max(1).next_multiple_of(GRANULARITY_BYTES);
        let full = || HwError::CreateChunk { gpu, bytes, source: std::io::ErrorKind::OutOfMemory.into() };
        let charge = capacity.take(bytes).ok_or_else(full)?;
        let fd = crate::shm::memfd("fuselink-gpu", bytes).map_err(|e| match e {
            HwError::Os { source, .. } => HwError::CreateChunk { gpu, bytes, source },
            other => other,
        })?;
        Ok(Self { fd, gpu, bytes, _charge: Some(charge) })
    }

    pub(super) fn import(fd: OwnedFd, gpu: GpuIdx, bytes: u64) -> Result<Self, HwError> {
        let bytes = bytes.max(1).next_multiple_of(GRANULARITY_BYTES);
        let refuse = |source| HwError::ImportChunk { gpu, bytes, source };
        let size = rustix::fs::fstat(&fd).map_err(|e| refuse(e.into()))?.st_size as u64;
        if size < bytes {
            return Err(refuse(std::io::Error::other(format!("the descriptor holds {size} bytes"))));
        }
        Ok(Self { fd, gpu, bytes, _charge: None })
    }
}

impl AsFd for EmuChunk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Chunk for EmuChunk {
    fn gpu(&self) -> GpuIdx {
        self.gpu
    }
    fn bytes(&self) -> u64 {
        self.bytes
    }
    fn export(&self) -> Result<OwnedFd, HwError> {
        self.fd.try_clone().map_err(|source| HwError::Export { gpu: self.gpu, source })
    }
}

/// Reserved addresses of an emulated GPU.
pub struct EmuWindow {
    base: *mut c_void,
    mapped: Parts<Arc<EmuChunk>>,
    addresses: Arc<AddressMap>,
}

// SAFETY: the pointer is only an address of this process; mapping calls take &mut self.
unsafe impl Send for EmuWindow {}
// SAFETY: shared references only read its bounds.
unsafe impl Sync for EmuWindow {}

impl EmuWindow {
    pub(super) fn reserve(bytes: u64, addresses: Arc<AddressMap>) -> Result<Self, HwError> {
        let bytes = bytes.max(1).next_multiple_of(GRANULARITY_BYTES);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice aliases nothing.
        let base =
            unsafe { rustix::mm::mmap_anonymous(null_mut(), bytes as usize, ProtFlags::empty(), flags) }
                .map_err(|e| HwError::Reserve { bytes, source: e.into() })?;
        Ok(Self { base, mapped: Parts::new(bytes, GRANULARITY_BYTES), addresses })
    }

    fn address(&self, offset: u64) -> *mut c_void {
        self.base.wrapping_byte_add(offset as usize)
    }

    fn place(&mut self, operation: &'static str, offset: u64, chunk: &Arc<EmuChunk>) -> Result<(), HwError> {
        let (bytes, address) = (chunk.bytes, self.address(offset));
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: [offset, offset + bytes) lies in this window's own reservation (checked by the callers), which
        // holds no Rust object.
        unsafe { rustix::mm::mmap(address, bytes as usize, prot, flags, chunk.as_fd(), 0) }
            .map_err(|e| HwError::WindowCall { operation, offset, end: offset + bytes, source: e.into() })?;
        self.addresses.insert(address as u64, bytes, Some(chunk.gpu));
        self.mapped.insert(offset, bytes, Arc::clone(chunk));
        Ok(())
    }
}

impl Window for EmuWindow {
    type Chunk = EmuChunk;

    fn dev_ptr(&self) -> u64 {
        self.base as u64
    }

    fn bytes(&self) -> u64 {
        self.mapped.bytes()
    }

    fn map(&mut self, offset: u64, chunk: &Arc<EmuChunk>) -> Result<(), HwError> {
        self.mapped.check_free(offset, chunk.bytes)?;
        self.place("map", offset, chunk)
    }

    fn unmap(&mut self, offset: u64) -> Result<(), HwError> {
        let (bytes, address) = (self.mapped.check_unmap(offset)?, self.address(offset));
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the part is inside this window and the caller says that no kernel touches it; inaccessible
        // reserved addresses take its place.
        unsafe { rustix::mm::mmap_anonymous(address, bytes as usize, ProtFlags::empty(), flags) }.map_err(
            |e| HwError::WindowCall { operation: "unmap", offset, end: offset + bytes, source: e.into() },
        )?;
        self.addresses.remove(address as u64);
        self.mapped.remove(offset);
        Ok(())
    }

    fn remap(&mut self, offset: u64, chunk: &Arc<EmuChunk>) -> Result<(), HwError> {
        self.mapped.check_remap(offset, chunk.bytes)?;
        self.place("remap", offset, chunk)
    }
}

impl Drop for EmuWindow {
    fn drop(&mut self) {
        for offset in self.mapped.offsets() {
            self.addresses.remove(self.address(offset) as u64);
        }
        // SAFETY: the reservation is this window's own; whoever drops it has ended the kernels that use it.
        if let Err(e) = unsafe { rustix::mm::munmap(self.base, self.mapped.bytes() as usize) } {
            eprintln!("fuselink: cannot give back a window: {e}");
        }
    }
}

/// Host memory that the emulated GPU sees under the same address.
pub struct EmuMapped {
    host_ptr: *mut u8,
    bytes: usize,
    addresses: Arc<AddressMap>,
}

// SAFETY: the memory is reached through atomics or by one side at a time, as rings and flags are.
unsafe impl Send for EmuMapped {}
// SAFETY: as above.
unsafe impl Sync for EmuMapped {}

impl EmuMapped {
    pub(super) fn new(bytes: usize, addresses: Arc<AddressMap>) -> Result<Self, HwError> {
        let bytes = bytes.max(1).next_multiple_of(4096);
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice aliases nothing.
        let host_ptr = unsafe { rustix::mm::mmap_anonymous(null_mut(), bytes, prot, MapFlags::PRIVATE) }
            .map_err(|e| HwError::Os { operation: "map host memory", source: e.into() })?
            .cast::<u8>();
        addresses.insert(host_ptr as u64, bytes as u64, None);
        Ok(Self { host_ptr, bytes, addresses })
    }
}

impl MappedHost for EmuMapped {
    fn host_ptr(&self) -> *mut u8 {
        self.host_ptr
    }
    fn mapped_dev_ptr(&self) -> u64 {
        self.host_ptr as u64
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for EmuMapped {
    fn drop(&mut self) {
        self.addresses.remove(self.host_ptr as u64);
        // SAFETY: the mapping is this object's own.
        if let Err(e) = unsafe { rustix::mm::munmap(self.host_ptr.cast(), self.bytes) } {
            eprintln!("fuselink: cannot unmap host memory: {e}");
        }
    }
}
