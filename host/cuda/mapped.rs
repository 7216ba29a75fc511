//! Host memory that kernels see: pages of this process, pinned and mapped into the GPU.

use std::ptr::null_mut;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags};

use super::call::{Context, check};
use super::sys;
use crate::hw::{HwError, MappedHost};
use crate::space::AddressMap;

const PAGE_BYTES: usize = 4096;

/// Anonymous pages, given back when this goes.
struct Pages {
    host_ptr: *mut u8,
    bytes: usize,
}

impl Pages {
    fn new(bytes: usize) -> Result<Self, HwError> {
        let bytes = bytes.max(1).next_multiple_of(PAGE_BYTES);
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice aliases nothing.
        let host_ptr = unsafe { rustix::mm::mmap_anonymous(null_mut(), bytes, prot, flags) }
            .map_err(|e| HwError::Os { operation: "map host memory", source: e.into() })?;
        Ok(Self { host_ptr: host_ptr.cast(), bytes })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's own.
        if let Err(e) = unsafe { rustix::mm::munmap(self.host_ptr.cast(), self.bytes) } {
            eprintln!("fuselink: cannot unmap host memory: {e}");
        }
    }
}

/// Pages that the driver has pinned; unpinned when this goes.
struct Pinned {
    context: Arc<Context>,
    pages: Pages,
}

impl Pinned {
    fn new(context: &Arc<Context>, pages: Pages) -> Result<Self, HwError> {
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the pages are mapped and outlive the registration, which `Drop` takes back first.
        check(unsafe { sys::cuMemHostRegister_v2(pages.host_ptr.cast(), pages.bytes, flags) })
            .map_err(|e| context.error("pin host memory", e))?;
        Ok(Self { context: Arc::clone(context), pages })
    }

    fn dev_ptr(&self) -> Result<u64, HwError> {
        let mut dev_ptr = 0;
        // SAFETY: the pages are registered for mapping; the call writes one address.
        check(unsafe { sys::cuMemHostGetDevicePointer_v2(&mut dev_ptr, self.pages.host_ptr.cast(), 0) })
            .map_err(|e| self.context.error("map host memory into the GPU", e))?;
        Ok(dev_ptr)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        // SAFETY: registered by `new`; whoever drops it has ended the kernels that use it.
        if let Err(e) = check(unsafe { sys::cuMemHostUnregister(self.pages.host_ptr.cast()) }) {
            eprintln!("fuselink: cannot unpin host memory of {}: {e}", self.context.gpu());
        }
    }
}

/// Host memory that kernels of one GPU see.
pub struct CudaMapped {
    pinned: Pinned,
    mapped_dev_ptr: u64,
    addresses: Arc<AddressMap>,
}

// SAFETY: the memory is reached through atomics or by one side at a time, as rings and flags are.
unsafe impl Send for CudaMapped {}
// SAFETY: as above.
unsafe impl Sync for CudaMapped {}

impl CudaMapped {
    pub(super) fn new(
        context: &Arc<Context>,
        bytes: usize,
        addresses: Arc<AddressMap>,
    ) -> Result<Self, HwError> {
        let _entered = context.enter()?;
        let pinned = Pinned::new(context, Pages::new(bytes)?)?;
        let mapped_dev_ptr = pinned.dev_ptr()?;
        addresses.insert(mapped_dev_ptr, pinned.pages.bytes as u64, None);
        Ok(Self { pinned, mapped_dev_ptr, addresses })
    }
}

impl MappedHost for CudaMapped {
    fn host_ptr(&self) -> *mut u8 {
        self.pinned.pages.host_ptr
    }
    fn mapped_dev_ptr(&self) -> u64 {
        self.mapped_dev_ptr
    }
    fn bytes(&self) -> usize {
        self.pinned.pages.bytes
    }
}

impl Drop for CudaMapped {
    fn drop(&mut self) {
        self.addresses.remove(self.mapped_dev_ptr);
    }
}
