//! The stand-in enforces the driver's rules: each misuse is refused, and is not refused once its rule is switched off.
//!
//! A misuse runs in a process of its own, since afterwards the driver may be in any state.

mod basics;
mod capture;
mod memory;
mod waiting;

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
    ($($subject:ident { $($name:ident breaks $rule:literal)+ })+) => {
        const ALL: &[Misuse] =
            &[$($(Misuse { name: stringify!($name), rule: $rule, run: $subject::$name }),+),+];
        mod each {
            $($(#[test] fn $name() { super::check(stringify!($name)); })+)+
        }
    };
}

misuses! {
    basics {
        a_context_before_the_start breaks "init"
        a_call_without_context breaks "context"
        a_device_that_is_not_there breaks "ordinal"
        an_image_that_is_none breaks "image"
        a_grid_of_no_blocks breaks "launch-shape"
    }
    memory {
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
    }
    waiting {
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
    capture {
        a_capture_of_the_default_stream breaks "capture-default"
        a_stream_captured_twice breaks "capture-once"
        a_capture_ended_before_it_began breaks "capture-begun"
        a_capture_ended_in_another_thread breaks "capture-thread"
        a_capturing_stream_asked breaks "capture-asked"
        memory_allocated_during_a_capture breaks "capture-escaped"
        another_stream_asked_during_a_capture breaks "capture-escaped"
        a_blocking_copy_during_a_capture breaks "capture-implicit"
        a_spoiled_capture_used breaks "capture-spoiled"
        a_destroyed_graph_launched breaks "graph-alive"
    }
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
