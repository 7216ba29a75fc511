//! GPU memory by the driver's virtual memory management: handles (physical), reservations (addresses) and mappings
//! that join them. Each is a guard, and undoes itself after those that depend on it.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use cust::device::Device;

use super::call::{Context, Failure, check};
use super::sys;
use crate::hw::{Chunk, HwError, Window};
use crate::space::{AddressMap, Parts};
use crate::topo::GpuIdx;

const FD: sys::CUmemAllocationHandleType = sys::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// How NICs reach a device's memory.
#[derive(Clone, Copy)]
pub struct ForNics {
    /// Memory that is mapped by page can be made reachable for them at all.
    pub rdma: bool,
    /// As a dma-buf; else by its address (nvidia-peermem).
    pub dma_buf: bool,
}

/// A device as memory calls see it.
#[derive(Clone)]
pub struct MemoryDevice {
    pub context: Arc<Context>,
    pub device: Device,
    pub for_nics: ForNics,
    pub granularity_bytes: u64,
    pub addresses: Arc<AddressMap>,
}

/// Memory on a device that other processes can import, and NICs can reach where that is possible.
fn properties(device: Device, for_nics: ForNics) -> sys::CUmemAllocationProp {
    let location = sys::CUmemLocation { type_: sys::CU_MEM_LOCATION_TYPE_DEVICE, id: device.as_raw() };
    let mut properties = sys::CUmemAllocationProp {
        type_: sys::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: FD,
        location,
        ..Default::default()
    };
    properties.allocFlags.gpuDirectRDMACapable = for_nics.rdma.into();
    properties
}

/// What sizes and offsets are multiples of.
///
/// # Errors
/// [`HwError::Driver`].
pub fn granularity_bytes(context: &Context, device: Device, for_nics: ForNics) -> Result<u64, HwError> {
    let _entered = context.enter()?;
    let mut bytes = 0;
    let option = sys::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    // SAFETY: the call reads the properties and writes one number.
    check(unsafe { sys::cuMemGetAllocationGranularity(&mut bytes, &properties(device, for_nics), option) })
        .map_err(|e| context.error("ask for the granularity of memory", e))?;
    Ok(bytes as u64)
}

/// Physical memory.
struct Handle {
    context: Arc<Context>,
    raw: sys::CUmemGenericAllocationHandle,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        // SAFETY: the handle is this object's own, and mappings of it keep it alive.
        if let Err(e) = check(unsafe { sys::cuMemRelease(self.raw) }) {
            eprintln!("fuselink: cannot release memory of {}: {e}", self.context.gpu());
        }
    }
}

/// Addresses of the GPU.
struct Reservation {
    context: Arc<Context>,
    dev_ptr: u64,
    bytes: u64,
}

impl Reservation {
    fn new(on: &MemoryDevice, bytes: u64) -> Result<Self, HwError> {
        let bytes = bytes.max(1).next_multiple_of(on.granularity_bytes);
        let mut dev_ptr = 0;
        let _entered = on.context.enter()?;
        // SAFETY: the call writes one address.
        check(unsafe {
            sys::cuMemAddressReserve(&mut dev_ptr, bytes as usize, on.granularity_bytes as usize, 0, 0)
        })
        .map_err(|e| HwError::Reserve { bytes, source: e.into() })?;
        Ok(Self { context: Arc::clone(&on.context), dev_ptr, bytes })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        // SAFETY: the reservation is this object's own, and mappings in it keep it alive.
        if let Err(e) = check(unsafe { sys::cuMemAddressFree(self.dev_ptr, self.bytes as usize) }) {
            eprintln!("fuselink: cannot free addresses of {}: {e}", self.context.gpu());
        }
    }
}

/// A whole handle, mapped with access for the context's own GPU.
struct Mapping {
    dev_ptr: u64,
    bytes: u64,
    mapped: bool,
    // Dropped after the unmap below.
    reservation: Arc<Reservation>,
    _handle: Arc<Handle>,
}

impl Mapping {
    /// The range lies in the reservation and is free.
    fn new(
        on: &MemoryDevice,
        reservation: &Arc<Reservation>,
        offset: u64,
        handle: &Arc<Handle>,
        bytes: u64,
    ) -> Result<Self, Failure> {
        let dev_ptr = reservation.dev_ptr + offset;
        // SAFETY: the range is reserved (contract above), and nothing is mapped there.
        check(unsafe { sys::cuMemMap(dev_ptr, bytes as usize, 0, handle.raw, 0) })?;
        let (reservation, handle) = (Arc::clone(reservation), Arc::clone(handle));
        // From here on the guard unmaps.
        let mapping = Self { dev_ptr, bytes, mapped: true, reservation, _handle: handle };
        let location = sys::CUmemLocation { type_: sys::CU_MEM_LOCATION_TYPE_DEVICE, id: on.device.as_raw() };
        let access = sys::CUmemAccessDesc { location, flags: sys::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        // SAFETY: the range has just been mapped as a whole; the call reads one description.
        check(unsafe { sys::cuMemSetAccess(dev_ptr, bytes as usize, &access, 1) })?;
        Ok(mapping)
    }
}

impl Mapping {
    /// Unmaps it where the driver can be asked; whoever does so says that no kernel touches it.
    fn unmap(&mut self) -> Result<(), Failure> {
        // SAFETY: mapped as a whole by `new`, and not unmapped since; no kernel touches it (contract above).
        check(unsafe { sys::cuMemUnmap(self.dev_ptr, self.bytes as usize) })?;
        self.mapped = false;
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let context = Arc::clone(&self.reservation.context);
        let Ok(_entered) = context.enter() else { return };
        if self.mapped
            && let Err(e) = self.unmap()
        {
            eprintln!("fuselink: cannot unmap memory of {}: {e}", context.gpu());
        }
    }
}

/// Physical memory of a GPU, mapped once where it stays: NICs are registered with that mapping.
pub struct CudaChunk {
    gpu: GpuIdx,
    bytes: u64,
    for_nics: ForNics,
    home: Mapping,
    handle: Arc<Handle>,
}

impl CudaChunk {
    /// New memory on the device, not cleared.
    ///
    /// # Errors
    /// [`HwError::CreateChunk`], [`HwError::Reserve`].
    pub(super) fn create(on: &MemoryDevice, bytes: u64) -> Result<Self, HwError> {
        let gpu = on.context.gpu();
        let bytes = bytes.max(1).next_multiple_of(on.granularity_bytes);
        let refuse = |e: Failure| HwError::CreateChunk { gpu, bytes, source: e.into() };
        let _entered = on.context.enter()?;
        let mut raw = 0;
        // SAFETY: the call reads the properties and writes one handle.
        check(unsafe { sys::cuMemCreate(&mut raw, bytes as usize, &properties(on.device, on.for_nics), 0) })
            .map_err(refuse)?;
        let handle = Arc::new(Handle { context: Arc::clone(&on.context), raw });
        let home = at_home(on, &handle, bytes)?.map_err(refuse)?;
        Ok(Self { gpu, bytes, for_nics: on.for_nics, home, handle })
    }

    /// Memory of the GPU `owner`, which its process has exported.
    ///
    /// # Errors
    /// [`HwError::ImportChunk`], [`HwError::NoPeerAccess`], [`HwError::Reserve`].
    pub(super) fn import(
        on: &MemoryDevice,
        fd: &OwnedFd,
        owner: GpuIdx,
        bytes: u64,
    ) -> Result<Self, HwError> {
        let bytes = bytes.max(1).next_multiple_of(on.granularity_bytes);
        let refuse = |e: Failure| HwError::ImportChunk { gpu: owner, bytes, source: e.into() };
        let _entered = on.context.enter()?;
        let mut raw = 0;
        // The driver takes the number itself where other kinds of handles have a pointer.
        let number = fd.as_raw_fd() as usize as *mut c_void;
        // SAFETY: an open descriptor, which the driver does not keep; the call writes one handle.
        check(unsafe { sys::cuMemImportFromShareableHandle(&mut raw, number, FD) }).map_err(refuse)?;
        let handle = Arc::new(Handle { context: Arc::clone(&on.context), raw });
        check_reachable(on, &handle).map_err(refuse)??;
        // The driver does not say how large a handle is: it refuses to map more than there is.
        let home = at_home(on, &handle, bytes)?.map_err(refuse)?;
        Ok(Self { gpu: owner, bytes, for_nics: on.for_nics, home, handle })
    }

    /// Where it is mapped for its whole life.
    pub(super) fn home_dev_ptr(&self) -> u64 {
        self.home.dev_ptr
    }

    fn export_error(&self, failure: Failure) -> HwError {
        HwError::Export { gpu: self.gpu, source: failure.into() }
    }

    fn enter(&self) -> Result<super::call::Entered, HwError> {
        self.handle.context.enter()
    }
}

/// A mapping of its own for a handle.
fn at_home(on: &MemoryDevice, handle: &Arc<Handle>, bytes: u64) -> Result<Result<Mapping, Failure>, HwError> {
    let reservation = Arc::new(Reservation::new(on, bytes)?);
    Ok(Mapping::new(on, &reservation, 0, handle, bytes))
}

/// Whether this GPU can reach the GPU on which a handle's memory lies.
fn check_reachable(on: &MemoryDevice, handle: &Handle) -> Result<Result<(), HwError>, Failure> {
    let mut properties = sys::CUmemAllocationProp::default();
    // SAFETY: a live handle; the call writes the properties.
    check(unsafe { sys::cuMemGetAllocationPropertiesFromHandle(&mut properties, handle.raw) })?;
    let (own, peer) = (on.device.as_raw(), properties.location.id);
    if own == peer {
        return Ok(Ok(()));
    }
    let mut can = 0;
    // SAFETY: the call writes one number.
    check(unsafe { sys::cuDeviceCanAccessPeer(&mut can, own, peer) })?;
    let refused = HwError::NoPeerAccess { gpu: on.context.gpu(), peer: peer as u32 };
    Ok(if can == 0 { Err(refused) } else { Ok(()) })
}

impl Chunk for CudaChunk {
    fn gpu(&self) -> GpuIdx {
        self.gpu
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn export(&self) -> Result<OwnedFd, HwError> {
        let _entered = self.enter()?;
        let mut fd = -1;
        // SAFETY: for this kind of handle the call writes one descriptor.
        check(unsafe { sys::cuMemExportToShareableHandle((&raw mut fd).cast(), self.handle.raw, FD, 0) })
            .map_err(|e| self.export_error(e))?;
        // SAFETY: the driver has opened it for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// A dma-buf of the mapping that never moves. Where the driver has none, the descriptor for processes, which no NIC
    /// registers: it is left to the address.
    fn export_for_nic(&self) -> Result<OwnedFd, HwError> {
        if !self.for_nics.dma_buf {
            return self.export();
        }
        let _entered = self.enter()?;
        let (mut fd, kind) = (-1, sys::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD);
        let (at, bytes) = (self.home.dev_ptr, self.bytes as usize);
        // SAFETY: the range is mapped as long as self lives; for this kind the call writes one descriptor.
        check(unsafe { sys::cuMemGetHandleForAddressRange((&raw mut fd).cast(), at, bytes, kind, 0) })
            .map_err(|e| self.export_error(e))?;
        // SAFETY: the driver has opened it for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

/// A mapping in a window, and the chunk it shows.
struct Placed {
    mapping: Mapping,
    chunk: Arc<CudaChunk>,
}

/// Reserved addresses of a GPU.
pub struct CudaWindow {
    on: MemoryDevice,
    // Dropped before the reservation: each part unmaps itself.
    parts: Parts<Placed>,
    reservation: Arc<Reservation>,
}

impl CudaWindow {
    pub(super) fn reserve(on: &MemoryDevice, bytes: u64) -> Result<Self, HwError> {
        let reservation = Arc::new(Reservation::new(on, bytes)?);
        let parts = Parts::new(reservation.bytes, on.granularity_bytes);
        Ok(Self { on: on.clone(), parts, reservation })
    }

    /// The part is free in the window's books.
    fn place(&mut self, operation: &'static str, offset: u64, chunk: &Arc<CudaChunk>) -> Result<(), HwError> {
        let bytes = chunk.bytes;
        let _entered = self.on.context.enter()?;
        let mapping = Mapping::new(&self.on, &self.reservation, offset, &chunk.handle, bytes)
            .map_err(|e| HwError::WindowCall { operation, offset, end: offset + bytes, source: e.into() })?;
        self.on.addresses.insert(mapping.dev_ptr, bytes, Some(chunk.gpu));
        self.parts.insert(offset, bytes, Placed { mapping, chunk: Arc::clone(chunk) });
        Ok(())
    }

    /// Unmaps a part; where the driver refuses, it stays mapped.
    fn take(&mut self, operation: &'static str, offset: u64) -> Result<Option<Arc<CudaChunk>>, HwError> {
        let _entered = self.on.context.enter()?;
        let Some(mut placed) = self.parts.remove(offset) else { return Ok(None) };
        let bytes = placed.chunk.bytes;
        if let Err(e) = placed.mapping.unmap() {
            self.parts.insert(offset, bytes, placed);
            return Err(HwError::WindowCall { operation, offset, end: offset + bytes, source: e.into() });
        }
        self.on.addresses.remove(self.reservation.dev_ptr + offset);
        Ok(Some(placed.chunk))
    }
}

impl Window for CudaWindow {
    type Chunk = CudaChunk;

    fn dev_ptr(&self) -> u64 {
        self.reservation.dev_ptr
    }

    fn bytes(&self) -> u64 {
        self.parts.bytes()
    }

    fn map(&mut self, offset: u64, chunk: &Arc<CudaChunk>) -> Result<(), HwError> {
        self.parts.check_free(offset, chunk.bytes)?;
        self.place("map", offset, chunk)
    }

    fn unmap(&mut self, offset: u64) -> Result<(), HwError> {
        self.parts.check_unmap(offset)?;
        self.take("unmap", offset).map(drop)
    }

    fn remap(&mut self, offset: u64, chunk: &Arc<CudaChunk>) -> Result<(), HwError> {
        self.parts.check_remap(offset, chunk.bytes)?;
        let old = self.take("remap", offset)?;
        self.place("remap", offset, chunk).inspect_err(|_| {
            // The old memory comes back; should that fail too, the part is unmapped, and the first error says why.
            if let Some(old) = old {
                let _ = self.place("remap", offset, &old);
            }
        })
    }
}

impl Drop for CudaWindow {
    fn drop(&mut self) {
        for offset in self.parts.offsets() {
            self.on.addresses.remove(self.reservation.dev_ptr + offset);
        }
    }
}
