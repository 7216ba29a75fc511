//! Handles, reservations, mappings, exports, and pinned memory.

use super::*;

pub const GRANULE: usize = 2 << 20;
const FD: u32 = sys::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const DMA_BUF: u32 = sys::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;

fn properties() -> sys::CUmemAllocationProp {
    let location = sys::CUmemLocation { type_: sys::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };
    let type_ = sys::CU_MEM_ALLOCATION_TYPE_PINNED;
    let mut properties =
        sys::CUmemAllocationProp { type_, requestedHandleTypes: FD, location, ..Default::default() };
    properties.allocFlags.gpuDirectRDMACapable = 1;
    properties
}

fn create_with(bytes: usize, properties: &sys::CUmemAllocationProp) -> (CUresult, u64) {
    let mut handle = 0;
    // SAFETY: reads the properties, writes a handle.
    (unsafe { sys::cuMemCreate(&mut handle, bytes, properties, 0) }, handle)
}

/// A handle of two granules.
fn create() -> u64 {
    let (code, handle) = create_with(2 * GRANULE, &properties());
    good(code);
    handle
}

fn release(handle: u64) -> CUresult {
    // SAFETY: no Rust object lies in it.
    unsafe { sys::cuMemRelease(handle) }
}

pub fn reserve_of(bytes: usize) -> (CUresult, u64) {
    let mut at = 0;
    // SAFETY: writes an address.
    (unsafe { sys::cuMemAddressReserve(&mut at, bytes, GRANULE, 0, 0) }, at)
}

/// Addresses of eight granules.
fn reserve() -> u64 {
    let (code, at) = reserve_of(8 * GRANULE);
    good(code);
    at
}

fn free(at: u64, bytes: usize) -> CUresult {
    // SAFETY: no Rust object lies there.
    unsafe { sys::cuMemAddressFree(at, bytes) }
}

fn map(at: u64, bytes: usize, handle: u64) -> CUresult {
    // SAFETY: no Rust object lies there.
    unsafe { sys::cuMemMap(at, bytes, 0, handle, 0) }
}

pub fn unmap(at: u64, bytes: usize) -> CUresult {
    // SAFETY: no Rust object lies there.
    unsafe { sys::cuMemUnmap(at, bytes) }
}

pub fn set_access(at: u64, bytes: usize, device: i32) -> CUresult {
    let location = sys::CUmemLocation { type_: sys::CU_MEM_LOCATION_TYPE_DEVICE, id: device };
    let access = sys::CUmemAccessDesc { location, flags: sys::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    // SAFETY: reads one description.
    unsafe { sys::cuMemSetAccess(at, bytes, &access, 1) }
}

/// Two granules, mapped with access.
pub fn mapped() -> u64 {
    let at = reserve();
    good(map(at, 2 * GRANULE, create()));
    good(set_access(at, 2 * GRANULE, 0));
    at
}

fn dma_buf(at: u64, bytes: usize) -> CUresult {
    let mut fd = -1;
    // SAFETY: writes a descriptor.
    unsafe { sys::cuMemGetHandleForAddressRange((&raw mut fd).cast(), at, bytes, DMA_BUF, 0) }
}

pub fn memory_of_odd_size() -> CUresult {
    start();
    create_with(GRANULE + 4096, &properties()).0
}

pub fn a_handle_released_twice() -> CUresult {
    start();
    let handle = create();
    good(release(handle));
    release(handle)
}

pub fn a_released_handle_mapped() -> CUresult {
    start();
    let (at, handle) = (reserve(), create());
    good(release(handle));
    map(at, 2 * GRANULE, handle)
}

pub fn a_handle_released_while_mapped() -> CUresult {
    start();
    let (at, handle) = (reserve(), create());
    good(map(at, 2 * GRANULE, handle));
    release(handle)
}

pub fn addresses_of_odd_size() -> CUresult {
    start();
    reserve_of(GRANULE + 1).0
}

pub fn a_part_of_a_reservation_freed() -> CUresult {
    start();
    free(reserve(), GRANULE)
}

pub fn addresses_freed_while_mapped() -> CUresult {
    start();
    let at = reserve();
    good(map(at + GRANULE as u64, 2 * GRANULE, create()));
    free(at, 8 * GRANULE)
}

pub fn a_mapping_at_an_odd_address() -> CUresult {
    start();
    map(reserve() + 4096, 2 * GRANULE, create())
}

pub fn a_mapping_of_a_part() -> CUresult {
    start();
    map(reserve(), GRANULE, create())
}

pub fn a_mapping_where_nothing_is_reserved() -> CUresult {
    start();
    map(reserve() + 7 * GRANULE as u64, 2 * GRANULE, create())
}

pub fn a_mapping_over_another() -> CUresult {
    start();
    let at = mapped();
    map(at + GRANULE as u64, 2 * GRANULE, create())
}

pub fn a_copy_before_access() -> CUresult {
    start();
    let (at, page) = (reserve(), page());
    good(map(at, 2 * GRANULE, create()));
    good(pin(page, sys::CU_MEMHOSTREGISTER_DEVICEMAP));
    // SAFETY: the page lives for ever.
    unsafe { sys::cuMemcpyHtoDAsync_v2(at, page, 64, stream()) }
}

pub fn a_part_unmapped() -> CUresult {
    start();
    unmap(mapped(), GRANULE)
}

pub fn access_to_nothing() -> CUresult {
    start();
    set_access(reserve(), GRANULE, 0)
}

pub fn access_to_a_gpu_out_of_reach() -> CUresult {
    start();
    set_access(mapped(), 2 * GRANULE, 1)
}

pub fn an_export_of_another_kind() -> CUresult {
    start();
    let none = sys::CUmemAllocationProp { requestedHandleTypes: 0, ..properties() };
    let (code, handle) = create_with(GRANULE, &none);
    good(code);
    let mut fd = -1;
    // SAFETY: writes a descriptor.
    unsafe { sys::cuMemExportToShareableHandle((&raw mut fd).cast(), handle, FD, 0) }
}

pub fn an_import_of_a_file() -> CUresult {
    use std::os::fd::AsRawFd;
    start();
    let file = tempfile::tempfile().unwrap();
    let (mut handle, number) = (0, file.as_raw_fd() as usize as *mut c_void);
    // SAFETY: an open descriptor; writes a handle.
    unsafe { sys::cuMemImportFromShareableHandle(&mut handle, number, FD) }
}

pub fn a_dma_buf_of_odd_size() -> CUresult {
    start();
    dma_buf(mapped(), 100)
}

pub fn a_dma_buf_of_nothing() -> CUresult {
    start();
    dma_buf(mapped() + GRANULE as u64, 2 * GRANULE)
}

pub fn a_dma_buf_of_memory_not_for_nics() -> CUresult {
    start();
    let mut plain = properties();
    plain.allocFlags.gpuDirectRDMACapable = 0;
    let ((code, handle), at) = (create_with(GRANULE, &plain), reserve());
    good(code);
    good(map(at, GRANULE, handle));
    dma_buf(at, GRANULE)
}

pub fn host_memory_pinned_twice() -> CUresult {
    start();
    let page = page();
    good(pin(page, 0));
    pin(page, 0)
}

pub fn host_memory_unpinned_twice() -> CUresult {
    start();
    // SAFETY: nobody uses the page.
    unsafe { sys::cuMemHostUnregister(page()) }
}

pub fn a_device_address_of_memory_not_mapped() -> CUresult {
    start();
    let (page, mut at) = (page(), 0);
    good(pin(page, 0));
    // SAFETY: writes an address.
    unsafe { sys::cuMemHostGetDevicePointer_v2(&mut at, page, 0) }
}
