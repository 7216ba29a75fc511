//! Driver calls with their errors, and the context that they are made in.

use std::ffi::{CStr, c_char};
use std::marker::PhantomData;
use std::ptr::null_mut;

use cust::context::Context as PrimaryContext;
use cust::device::Device;

use super::sys;
use crate::hw::HwError;
use crate::topo::GpuIdx;

unsafe extern "C" {
    fn fl_why_no_driver() -> *const c_char;
}

/// What a driver call answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Failure(pub sys::CUresult);

impl Failure {
    fn text(
        self,
        call: unsafe extern "C" fn(sys::CUresult, *mut *const c_char) -> sys::CUresult,
    ) -> Option<String> {
        let mut text = std::ptr::null();
        // SAFETY: the call writes one pointer, to a string that lives as long as the driver, or null.
        let code = unsafe { call(self.0, &mut text) };
        if code != sys::CUDA_SUCCESS || text.is_null() {
            return None;
        }
        // SAFETY: a string of the driver, checked above.
        Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match (self.text(sys::cuGetErrorName), self.text(sys::cuGetErrorString)) {
            (Some(name), Some(text)) => write!(f, "{name} ({text})"),
            _ => write!(f, "driver error {}", self.0),
        }
    }
}

impl std::error::Error for Failure {}

impl From<Failure> for std::io::Error {
    fn from(failure: Failure) -> Self {
        match failure.0 {
            sys::CUDA_ERROR_OUT_OF_MEMORY => Self::new(std::io::ErrorKind::OutOfMemory, failure),
            _ => Self::other(failure),
        }
    }
}

/// Makes an error of anything but success.
pub fn check(code: sys::CUresult) -> Result<(), Failure> {
    if code == sys::CUDA_SUCCESS { Ok(()) } else { Err(Failure(code)) }
}

/// The context of a GPU: the one that the calling program works in, or else the device's primary one.
pub struct Context {
    raw: sys::CUcontext,
    /// Keeps the primary context alive; a context of the program's is the program's to keep.
    _primary: Option<PrimaryContext>,
    gpu: GpuIdx,
}

// SAFETY: contexts may be made current in any thread.
unsafe impl Send for Context {}
// SAFETY: as above; the handle is never changed.
unsafe impl Sync for Context {}

impl Context {
    /// For a device that `cuInit` has shown.
    ///
    /// # Errors
    /// [`HwError::Driver`].
    pub fn of(device: Device, gpu: GpuIdx) -> Result<Self, HwError> {
        if let Some(raw) = current_on(device) {
            return Ok(Self { raw, _primary: None, gpu });
        }
        let before = current();
        let primary = PrimaryContext::new(device).map_err(|e| HwError::Driver {
            gpu,
            operation: "retain the primary context",
            source: std::io::Error::other(e),
        })?;
        // cust makes the context current; the thread's own context is left as it was.
        let context = Self { raw: primary.as_raw().cast(), _primary: Some(primary), gpu };
        restore(before);
        Ok(context)
    }

    /// Whose context it is.
    pub fn gpu(&self) -> GpuIdx {
        self.gpu
    }

    /// An error of a call in it.
    pub fn error(&self, operation: &'static str, failure: Failure) -> HwError {
        HwError::Driver { gpu: self.gpu, operation, source: failure.into() }
    }

    /// Makes it current in this thread until the guard goes. A program that captures a graph meanwhile, in this thread or
    /// another, is not disturbed: nothing that the library calls works on a stream of the program's.
    ///
    /// # Errors
    /// [`HwError::Driver`].
    pub fn enter(&self) -> Result<Entered, HwError> {
        // SAFETY: the context lives as long as self, hence longer than any call made under the guard.
        check(unsafe { sys::cuCtxPushCurrent_v2(self.raw) })
            .map_err(|e| self.error("enter the context", e))?;
        let capture_mode = exchange_capture_mode(sys::CU_STREAM_CAPTURE_MODE_RELAXED);
        Ok(Entered { capture_mode, _this_thread: PhantomData })
    }
}

/// What this thread may do while graphs are captured; returns what it might before. By default even asking whether a copy is
/// done is refused, and spoils the capture.
fn exchange_capture_mode(mode: sys::CUstreamCaptureMode) -> sys::CUstreamCaptureMode {
    let mut exchanged = mode;
    // SAFETY: the call reads and writes one number. It fails for a bad one only.
    let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut exchanged) };
    exchanged
}

/// A context is current in this thread; the one before comes back when this goes.
pub struct Entered {
    capture_mode: sys::CUstreamCaptureMode,
    _this_thread: PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        exchange_capture_mode(self.capture_mode);
        let mut context = null_mut();
        // SAFETY: pops what `enter` pushed; the call writes one pointer.
        if let Err(e) = check(unsafe { sys::cuCtxPopCurrent_v2(&mut context) }) {
            eprintln!("fuselink: cannot leave a CUDA context: {e}");
        }
    }
}

fn current() -> sys::CUcontext {
    let mut context = null_mut();
    // SAFETY: the call writes one pointer; on failure it stays null.
    let _ = unsafe { sys::cuCtxGetCurrent(&mut context) };
    context
}

fn restore(context: sys::CUcontext) {
    let mut ours = null_mut();
    // SAFETY: takes the context that cust has just made current off this thread's stack.
    let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut ours) };
    if !context.is_null() {
        // SAFETY: it was current before, so it is the caller's and alive.
        let _ = unsafe { sys::cuCtxPushCurrent_v2(context) };
    }
}

/// The calling thread's context, if it is on this device.
fn current_on(device: Device) -> Option<sys::CUcontext> {
    let context = current();
    if context.is_null() {
        return None;
    }
    let mut on = -1;
    // SAFETY: a context is current; the call writes one number.
    check(unsafe { sys::cuCtxGetDevice(&mut on) }).ok()?;
    (on == device.as_raw()).then_some(context)
}

/// Starts the driver and checks that it can do what this build needs.
///
/// # Errors
/// [`HwError::NoDriver`], [`HwError::DriverTooOld`], [`HwError::NoGpu`].
pub fn start_driver(ordinal: u32) -> Result<(), HwError> {
    // SAFETY: no requirement.
    match check(unsafe { sys::cuInit(0) }) {
        Ok(()) => {}
        Err(Failure(sys::CUDA_ERROR_NO_DEVICE)) => return Err(HwError::NoGpu { ordinal, count: 0 }),
        Err(failure) => return Err(HwError::NoDriver { reason: why_no_driver(failure) }),
    }
    let mut version = 0;
    // SAFETY: the call writes one number.
    check(unsafe { sys::cuDriverGetVersion(&mut version) })
        .map_err(|e| HwError::NoDriver { reason: e.to_string() })?;
    if version < NEEDED_VERSION {
        return Err(HwError::DriverTooOld { has: dotted(version), needs: dotted(NEEDED_VERSION) });
    }
    Ok(())
}

/// `cuFuncLoad`, the newest call in use, is of CUDA 12.4; kernels run on drivers of the major version of their compiler
/// (which build.rs has asked) or a later one.
const NEEDED_VERSION: i32 = {
    let compiler = match i32::from_str_radix(env!("FUSELINK_NVCC_MAJOR"), 10) {
        Ok(major) => major * 1000,
        Err(_) => panic!("build.rs gives the major version of nvcc as a number"),
    };
    if compiler > 12_040 { compiler } else { 12_040 }
};

fn dotted(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn why_no_driver(failure: Failure) -> String {
    // SAFETY: null, or a string that lives as long as the program.
    let why = unsafe { fl_why_no_driver() };
    if why.is_null() {
        return failure.to_string();
    }
    // SAFETY: a string, checked above.
    unsafe { CStr::from_ptr(why) }.to_string_lossy().into_owned()
}
