//! The driver's calls for graphs, as a program makes them that has the driver by itself and nothing of this library.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use fuselink::cuda::sys::{CUDA_SUCCESS, CUresult, CUstream, CUstreamCaptureMode};

unsafe extern "C" {
    fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

const RTLD_NOW: c_int = 2;

/// How a program's capture treats calls in this and other threads that it does not see.
pub struct CaptureMode;

impl CaptureMode {
    /// The strictest, and what frameworks use unless told otherwise.
    pub const GLOBAL: CUstreamCaptureMode = fuselink::cuda::sys::CU_STREAM_CAPTURE_MODE_GLOBAL;
}

/// Where a call of the driver is.
fn address(name: &str) -> *mut c_void {
    static DRIVER: OnceLock<usize> = OnceLock::new();
    // SAFETY: a name that ends with a zero.
    let open = || unsafe { dlopen(c"libcuda.so.1".as_ptr(), RTLD_NOW) } as usize;
    let library = *DRIVER.get_or_init(open) as *mut c_void;
    assert!(!library.is_null(), "no libcuda.so.1");
    let name = CString::new(name).unwrap();
    // SAFETY: a library that is open, and a name that ends with a zero.
    let address = unsafe { dlsym(library, name.as_ptr()) };
    assert!(!address.is_null(), "the driver has no {name:?}");
    address
}

macro_rules! call {
    ($name:literal: $($argument:expr => $type:ty),+) => {{
        // SAFETY: the driver's call of that name takes these arguments (cuda.h).
        let call: unsafe extern "C" fn($($type),+) -> CUresult = unsafe { std::mem::transmute(address($name)) };
        // SAFETY: handles of this program's; results go to variables that live during the call.
        unsafe { call($($argument),+) }
    }};
}

/// A graph or its executable form.
pub type Handle = *mut c_void;

pub fn begin_capture(stream: CUstream, mode: CUstreamCaptureMode) -> CUresult {
    call!("cuStreamBeginCapture_v2": stream => CUstream, mode => CUstreamCaptureMode)
}

pub fn end_capture(stream: CUstream) -> (CUresult, Handle) {
    let mut graph = null_mut();
    let code = call!("cuStreamEndCapture": stream => CUstream, &raw mut graph => *mut Handle);
    (code, graph)
}

pub fn launch(executable: Handle, stream: CUstream) -> CUresult {
    call!("cuGraphLaunch": executable => Handle, stream => CUstream)
}

pub fn destroy(executable: Handle) -> CUresult {
    call!("cuGraphExecDestroy": executable => Handle)
}

/// A graph that can be launched. Destroyed with the value, when it has ended.
pub struct Graph {
    executable: Handle,
}

impl Graph {
    /// What `work` queues on a stream.
    pub fn capture(stream: CUstream, work: impl FnOnce()) -> Self {
        assert_eq!(begin_capture(stream, CaptureMode::GLOBAL), CUDA_SUCCESS, "begin");
        work();
        let (code, graph) = end_capture(stream);
        assert_eq!(code, CUDA_SUCCESS, "the capture is spoiled");
        Self::instantiate(graph)
    }

    pub fn instantiate(graph: Handle) -> Self {
        let (mut executable, flags) = (null_mut(), 0u64);
        let code = call!("cuGraphInstantiateWithFlags":
            &raw mut executable => *mut Handle, graph => Handle, flags => u64);
        assert_eq!(code, CUDA_SUCCESS, "instantiate");
        assert_eq!(call!("cuGraphDestroy": graph => Handle), CUDA_SUCCESS, "destroy");
        Self { executable }
    }

    pub fn launch(&self, stream: CUstream) {
        assert_eq!(launch(self.executable, stream), CUDA_SUCCESS, "launch");
    }

    pub fn into_raw(self) -> Handle {
        std::mem::ManuallyDrop::new(self).executable
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        assert_eq!(destroy(self.executable), CUDA_SUCCESS, "destroy");
    }
}
