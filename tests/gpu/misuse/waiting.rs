//! Calls that wait for a kernel which waits for the host.

use super::memory::{GRANULE, mapped, set_access, unmap};
use super::*;

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
