//! Before and around everything else: start, contexts, devices, images, shapes of grids.

use super::*;

pub fn a_context_before_the_start() -> CUresult {
    let mut context = null_mut();
    // SAFETY: writes a handle.
    unsafe { driver::cuDevicePrimaryCtxRetain(&mut context, 0) as CUresult }
}

pub fn a_call_without_context() -> CUresult {
    // SAFETY: no requirement.
    good(unsafe { sys::cuInit(0) });
    memory::reserve_of(memory::GRANULE).0
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

pub fn a_grid_of_no_blocks() -> CUresult {
    start();
    launch(function("fl_take"), 0, 0, stream())
}
