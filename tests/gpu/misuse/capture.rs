//! Calls that a capture does not see, and captures that go wrong.

use super::*;
use crate::driver::{self, CaptureMode, Graph};

/// A stream that is being captured.
fn capturing() -> sys::CUstream {
    start();
    let stream = stream();
    good(driver::begin_capture(stream, CaptureMode::GLOBAL));
    stream
}

pub fn a_capture_of_the_default_stream() -> CUresult {
    start();
    driver::begin_capture(null_mut(), CaptureMode::GLOBAL)
}

pub fn a_stream_captured_twice() -> CUresult {
    driver::begin_capture(capturing(), CaptureMode::GLOBAL)
}

pub fn a_capture_ended_before_it_began() -> CUresult {
    start();
    driver::end_capture(stream()).0
}

pub fn a_capture_ended_in_another_thread() -> CUresult {
    let stream = capturing() as usize;
    let elsewhere = std::thread::spawn(move || {
        start();
        driver::end_capture(stream as sys::CUstream).0
    });
    elsewhere.join().unwrap()
}

pub fn a_capturing_stream_asked() -> CUresult {
    let stream = capturing();
    relax();
    // SAFETY: a stream that is alive.
    unsafe { sys::cuStreamQuery(stream) }
}

/// Calls that a capture does not see are allowed in this thread from here on.
fn relax() {
    let mut mode = sys::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: exchanges a number.
    good(unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) });
}

pub fn memory_allocated_during_a_capture() -> CUresult {
    capturing();
    let mut at = 0;
    // SAFETY: writes an address.
    unsafe { cust::sys::cuMemAlloc_v2(&mut at, 4096) as CUresult }
}

/// As the library's proxy would, in a thread of its own, but for its mode.
pub fn another_stream_asked_during_a_capture() -> CUresult {
    capturing();
    let elsewhere = std::thread::spawn(|| {
        start();
        // SAFETY: a stream that is alive.
        unsafe { sys::cuStreamQuery(stream()) }
    });
    elsewhere.join().unwrap()
}

pub fn a_blocking_copy_during_a_capture() -> CUresult {
    start();
    let (mut at, mut bytes) = (0, [0u8; 8]);
    // SAFETY: writes an address.
    good(unsafe { cust::sys::cuMemAlloc_v2(&mut at, 4096) } as CUresult);
    good(driver::begin_capture(stream(), CaptureMode::GLOBAL));
    // SAFETY: the buffer lives during the call.
    unsafe { cust::sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), at, 8) as CUresult }
}

pub fn a_spoiled_capture_used() -> CUresult {
    let stream = capturing();
    let mut at = 0;
    // SAFETY: writes an address.
    assert_ne!(unsafe { cust::sys::cuMemAlloc_v2(&mut at, 4096) } as CUresult, CUDA_SUCCESS);
    driver::end_capture(stream).0
}

pub fn a_destroyed_graph_launched() -> CUresult {
    let stream = capturing();
    let (code, graph) = driver::end_capture(stream);
    good(code);
    let executable = Graph::instantiate(graph).into_raw();
    good(driver::destroy(executable));
    driver::launch(executable, stream)
}
