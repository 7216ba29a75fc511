//! The stand-in enforces the driver's rules: each misuse is refused, and is not refused once its rule is switched off.
//!
//! A misuse runs in a process of its own, since afterwards the driver may be in any state.

use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::time::Duration;

use cust::context::Context;
use cust::device::Device;
use cust::sys as driver;
use fuselink::cuda::sys::{self, CUDA_SUCCESS, CUresult};
use fuselink::hw::contract::rig::{Rig, RigConfig, Stream};
use fuselink::hw::{Gpu, Kernel, Window};

use crate::{on_gpu, standin};

const GRANULE: usize = 2 << 20;
const FD: u32 = sys::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const DMA_BUF: u32 = sys::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;

/// Which misuse a child is to try.
const MISUSE: &str = "FL_MISUSE";
const REFUSED: i32 = 10;
const NOT_REFUSED: i32 = 11;

/// Misuse and the rule that it breaks.
struct Misuse {
    name: &'static str,
    rule: &'static str,
    run: fn() -> CUresult,
}

macro_rules! misuses {
    ($($name:ident breaks $rule:literal)+) => {
        const ALL: &[Misuse] = &[$(Misuse { name: stringify!($name), rule: $rule, run: tries::$name }),+];
        mod each {
            $(#[test] fn $name() { super::check(stringify!($name)); })+
        }
    };
}

misuses! {
    a_context_before_the_start breaks "init"
    a_call_without_context breaks "context"
    a_device_that_is_not_there breaks "ordinal"
    an_image_that_is_none breaks "image"
    memory_of_odd_size breaks "create-granularity"
    a_handle_released_twice breaks "released-handle"
    a_released_handle_mapped breaks "released-handle"
    a_handle_released_while_mapped breaks "unmap-before-release"
    addresses_of_odd_size breaks "reserve-granularity"
    a_part_of_a_reservation_freed breaks "free-whole"
    addresses_freed_while_mapped breaks "unmap-before-free"
    a_mapping_at_an_odd_address breaks "map-granularity"
    a_mapping_of_a_part breaks "map-whole"
    a_mapping_where_nothing_is_reserved breaks "map-reserved"
    a_mapping_over_another breaks "map-free"
    a_copy_before_access breaks "access-before-use"
    a_part_unmapped breaks "unmap-whole"
    access_to_nothing breaks "access-mapped"
    access_to_a_gpu_out_of_reach breaks "peer-access"
    an_export_of_another_kind breaks "handle-type"
    an_import_of_a_file breaks "import-kind"
    a_dma_buf_of_odd_size breaks "dma-buf-pages"
    a_dma_buf_of_nothing breaks "dma-buf-mapped"
    a_dma_buf_of_memory_not_for_nics breaks "rdma-capable"
    host_memory_pinned_twice breaks "register-once"
    host_memory_unpinned_twice breaks "unregister-registered"
    a_device_address_of_memory_not_mapped breaks "device-map"
    a_grid_of_no_blocks breaks "launch-shape"
    the_context_waited_for breaks "wait-for-kernels"
    a_stream_waited_for breaks "wait-for-kernels"
    memory_allocated_beside_a_kernel breaks "wait-for-kernels"
    memory_freed_beside_a_kernel breaks "wait-for-kernels"
    a_mapping_taken_beside_a_kernel breaks "wait-for-kernels"
    access_given_beside_a_kernel breaks "wait-for-kernels"
    host_memory_pinned_beside_a_kernel breaks "wait-for-kernels"
    a_module_loaded_beside_a_kernel breaks "wait-for-kernels"
    a_blocking_copy_beside_a_kernel breaks "wait-for-kernels"
    an_unpinned_copy_beside_a_kernel breaks "pinned-copies"
    a_kernel_first_launched_beside_another breaks "load-ahead"
}

/// Tries one and ends the process.
#[test]
#[ignore = "run by the tests below, on the stand-in"]
fn attempt() {
    let name = std::env::var(MISUSE).expect("which misuse");
    let misuse = ALL.iter().find(|m| m.name == name).expect("a misuse");
    let code = (misuse.run)();
    println!("{name}: {code}");
    std::process::exit(if code == CUDA_SUCCESS { NOT_REFUSED } else { REFUSED });
}

fn try_with(misuse: &Misuse, without: Option<&str>) -> (Option<i32>, String) {
    let mut command = standin::command(&["misuse::attempt", "--exact"]);
    command.env(MISUSE, misuse.name);
    command.envs(without.map(|rule| ("FL_STANDIN_WITHOUT", rule)));
    if misuse.rule == "peer-access" {
        command.env("FL_STANDIN_PEERS", "0");
    }
    let output = standin::output(&mut command);
    (output.status.code(), standin::said(&output))
}

#[track_caller]
fn check(name: &str) {
    let misuse = ALL.iter().find(|m| m.name == name).unwrap();
    let (code, said) = try_with(misuse, None);
    assert_eq!(code, Some(REFUSED), "{said}");
    assert!(
        said.contains(&format!("libcuda stand-in: {}:", misuse.rule)),
        "refused for another reason:\n{said}"
    );
    let (code, said) = try_with(misuse, Some(misuse.rule));
    assert_eq!(code, Some(NOT_REFUSED), "refused without its rule `{}`:\n{said}", misuse.rule);
}

/// No rule of the stand-in goes without a misuse.
#[test]
fn every_rule_has_a_misuse() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda_standin");
    let mut rules = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let source = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        let calls =
            ["breaks(", "MAY_WAIT_BY(", "on(\""].into_iter().flat_map(|call| source.match_indices(call));
        for (at, _) in calls {
            let call = &source[at..source[at..].find(';').map_or(source.len(), |end| at + end)];
            // A rule is the first text of the call; declarations have none.
            let Some(rule) = call.split('"').nth(1) else { continue };
            rules += 1;
            assert!(ALL.iter().any(|m| m.rule == rule), "no misuse breaks `{rule}`");
        }
    }
    assert!(rules > 30, "the rules are not where this test looks: {rules}");
}

/// A device with its primary context current.
fn start() -> CUresult {
    // SAFETY: no requirement.
    assert_eq!(unsafe { sys::cuInit(0) }, CUDA_SUCCESS);
    // Kept for the rest of the process.
    std::mem::forget(Context::new(Device::get_device(0).unwrap()).unwrap());
    CUDA_SUCCESS
}

#[track_caller]
fn good(code: CUresult) {
    assert_eq!(code, CUDA_SUCCESS);
}

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

fn reserve_of(bytes: usize) -> (CUresult, u64) {
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

fn unmap(at: u64, bytes: usize) -> CUresult {
    // SAFETY: no Rust object lies there.
    unsafe { sys::cuMemUnmap(at, bytes) }
}

fn set_access(at: u64, bytes: usize, device: i32) -> CUresult {
    let location = sys::CUmemLocation { type_: sys::CU_MEM_LOCATION_TYPE_DEVICE, id: device };
    let access = sys::CUmemAccessDesc { location, flags: sys::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    // SAFETY: reads one description.
    unsafe { sys::cuMemSetAccess(at, bytes, &access, 1) }
}

/// Two granules, mapped with access.
fn mapped() -> u64 {
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

/// A page of this process.
fn page() -> *mut c_void {
    Box::leak(vec![0u8; 3 * 4096].into_boxed_slice())
        .as_mut_ptr()
        .map_addr(|a| a.next_multiple_of(4096))
        .cast()
}

fn pin(page: *mut c_void, flags: u32) -> CUresult {
    // SAFETY: the page lives for ever.
    unsafe { sys::cuMemHostRegister_v2(page, 4096, flags) }
}

fn stream() -> sys::CUstream {
    let mut stream = null_mut();
    // SAFETY: writes a handle.
    good(unsafe { sys::cuStreamCreate(&mut stream, 0) });
    stream
}

fn load_module(image: &'static [u8]) -> (CUresult, driver::CUmodule) {
    let mut module = null_mut();
    // SAFETY: an image of the size that its header says; the stand-in reads no further.
    let code =
        unsafe { driver::cuModuleLoadDataEx(&mut module, image.as_ptr().cast(), 0, null_mut(), null_mut()) };
    (code as CUresult, module)
}

const FATBIN: &[u8] = &0xba55_ed50_u32.to_le_bytes();

fn function(name: &str) -> sys::CUfunction {
    let (code, module) = load_module(FATBIN);
    good(code);
    let (mut function, name) = (null_mut(), CString::new(name).unwrap());
    // SAFETY: writes a handle.
    good(unsafe { driver::cuModuleGetFunction(&mut function, module, name.as_ptr()) } as CUresult);
    function.cast()
}

fn launch(function: sys::CUfunction, blocks: u32, params_dev_ptr: u64, stream: sys::CUstream) -> CUresult {
    let mut params = params_dev_ptr;
    let mut arguments = [(&raw mut params).cast()];
    let list = arguments.as_mut_ptr();
    // SAFETY: a kernel with one parameter, which the call copies.
    unsafe { sys::cuLaunchKernel(function, blocks, 1, 1, 32, 1, 1, 0, stream, list, null_mut()) }
}

/// Misuse beside a kernel that waits, of which it learns where the parameters are.
fn beside_a_kernel(misuse: impl FnOnce(u64) -> CUresult) -> CUresult {
    start();
    let gpu = on_gpu::open(0, 0);
    let mut rig = Rig::new(&gpu, RigConfig::default());
    let stream = Stream { offset: 0, bytes: 64, message_bytes: 64 };
    let params_dev_ptr = rig.launch(Kernel::Put, 1, stream).unwrap();
    assert!(gpu.synchronize(Duration::from_millis(1)).is_err(), "the kernel waits");
    let code = misuse(params_dev_ptr);
    // Nothing is taken down: the process ends.
    std::mem::forget(rig);
    std::mem::forget(gpu);
    code
}

mod tries {
    use super::*;

    pub fn a_context_before_the_start() -> CUresult {
        let mut context = null_mut();
        // SAFETY: writes a handle.
        unsafe { driver::cuDevicePrimaryCtxRetain(&mut context, 0) as CUresult }
    }

    pub fn a_call_without_context() -> CUresult {
        // SAFETY: no requirement.
        good(unsafe { sys::cuInit(0) });
        reserve_of(GRANULE).0
    }

    pub fn a_device_that_is_not_there() -> CUresult {
        start();
        let mut device = 0;
        // SAFETY: writes a number.
        unsafe { driver::cuDeviceGet(&mut device, 2) as CUresult }
    }

    pub fn an_image_that_is_none() -> CUresult {
        start();
        load_module(b"\0\0\0\0").0
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

    pub fn a_grid_of_no_blocks() -> CUresult {
        start();
        launch(function("fl_take"), 0, 0, stream())
    }

    pub fn the_context_waited_for() -> CUresult {
        // SAFETY: no requirement.
        beside_a_kernel(|_| unsafe { driver::cuCtxSynchronize() as CUresult })
    }

    pub fn a_stream_waited_for() -> CUresult {
        start();
        let (take, stream) = (function("fl_take"), stream());
        // SAFETY: a function of a module that is loaded.
        good(unsafe { sys::cuFuncLoad(take) });
        beside_a_kernel(|params_dev_ptr| {
            good(launch(take, 1, params_dev_ptr, stream));
            // SAFETY: a stream that is alive.
            unsafe { driver::cuStreamSynchronize(stream.cast()) as CUresult }
        })
    }

    pub fn memory_allocated_beside_a_kernel() -> CUresult {
        let mut at = 0;
        // SAFETY: writes an address.
        beside_a_kernel(|_| unsafe { driver::cuMemAlloc_v2(&mut at, 4096) as CUresult })
    }

    pub fn memory_freed_beside_a_kernel() -> CUresult {
        start();
        let mut at = 0;
        // SAFETY: writes an address.
        good(unsafe { driver::cuMemAlloc_v2(&mut at, 4096) } as CUresult);
        // SAFETY: nobody uses it.
        beside_a_kernel(|_| unsafe { driver::cuMemFree_v2(at) as CUresult })
    }

    pub fn a_mapping_taken_beside_a_kernel() -> CUresult {
        start();
        let at = mapped();
        beside_a_kernel(|_| unmap(at, 2 * GRANULE))
    }

    pub fn access_given_beside_a_kernel() -> CUresult {
        start();
        let at = mapped();
        beside_a_kernel(|_| set_access(at, 2 * GRANULE, 1))
    }

    pub fn host_memory_pinned_beside_a_kernel() -> CUresult {
        beside_a_kernel(|_| pin(page(), 0))
    }

    pub fn a_module_loaded_beside_a_kernel() -> CUresult {
        beside_a_kernel(|_| load_module(FATBIN).0)
    }

    /// The default stream waits for streams that are not made to ignore it.
    pub fn a_blocking_copy_beside_a_kernel() -> CUresult {
        start();
        let (take, stream) = (function("fl_take"), stream());
        // SAFETY: a function of a module that is loaded.
        good(unsafe { sys::cuFuncLoad(take) });
        beside_a_kernel(|params_dev_ptr| {
            good(launch(take, 1, params_dev_ptr, stream));
            let mut bytes = [0u8; 8];
            // SAFETY: the buffer lives during the call.
            unsafe { driver::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), params_dev_ptr, 8) as CUresult }
        })
    }

    pub fn an_unpinned_copy_beside_a_kernel() -> CUresult {
        start();
        let stream = stream();
        beside_a_kernel(|params_dev_ptr| {
            let page = page();
            // SAFETY: the page lives for ever.
            unsafe { sys::cuMemcpyDtoHAsync_v2(page, params_dev_ptr, 8, stream) }
        })
    }

    pub fn a_kernel_first_launched_beside_another() -> CUresult {
        start();
        let (take, stream) = (function("fl_take"), stream());
        beside_a_kernel(|params_dev_ptr| launch(take, 1, params_dev_ptr, stream))
    }
}

/// The library itself does none of this: a window goes, and a chunk with it, without a complaint.
#[test]
#[ignore = "run by the test below, on the stand-in"]
fn good_manners() {
    let gpu = on_gpu::open(0, 0);
    let chunk = gpu.create_chunk(1).unwrap();
    let mut window = gpu.reserve_window(1).unwrap();
    window.map(0, &chunk).unwrap();
    drop(chunk);
    window.unmap(0).unwrap();
}

#[test]
fn what_the_library_does_is_no_misuse() {
    let output = standin::output(&mut standin::command(&["misuse::good_manners"]));
    let said = standin::said(&output);
    assert!(output.status.success() && !said.contains("stand-in:"), "{said}");
}
