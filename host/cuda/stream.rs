//! Streams, and copies between host and GPU that wait for nothing but themselves.
//!
//! While kernels wait for the host, a call that waits for the kernels would never return. So nothing here uses the default
//! stream or a blocking copy: copies go through a pinned buffer on a stream of their own, and waits are polls with
//! a deadline.

use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::call::{Context, check};
use super::mapped::CudaMapped;
use super::sys;
use crate::hw::{HwError, MappedHost, Mover};
use crate::space::AddressMap;
use crate::topo::GpuIdx;

/// A stream that does not wait for the default stream. (cust has only such as do.)
pub struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
}

// SAFETY: streams may be used by any thread; the driver locks.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// Looks that follow each other at once, before the thread yields, and before it sleeps between them.
const EAGER: Duration = Duration::from_micros(20);
const YIELDING: Duration = Duration::from_micros(500);
const NAP: Duration = Duration::from_micros(50);

impl Stream {
    /// A new stream.
    ///
    /// # Errors
    /// [`HwError::Driver`].
    pub fn new(context: &Arc<Context>) -> Result<Self, HwError> {
        let _entered = context.enter()?;
        let mut raw = null_mut();
        // SAFETY: the context is current; the call writes one handle.
        check(unsafe { sys::cuStreamCreate(&mut raw, sys::CU_STREAM_NON_BLOCKING) })
            .map_err(|e| context.error("create a stream", e))?;
        Ok(Self { context: Arc::clone(context), raw })
    }

    pub fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Whether everything on it is done.
    ///
    /// # Errors
    /// [`HwError::Driver`]: also when a kernel has faulted.
    pub fn is_idle(&self) -> Result<bool, HwError> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream is this object's own and alive.
        match unsafe { sys::cuStreamQuery(self.raw) } {
            sys::CUDA_ERROR_NOT_READY => Ok(false),
            code => check(code).map(|()| true).map_err(|e| self.context.error("run kernels", e)),
        }
    }

    /// Whether what is queued on it goes into a graph.
    ///
    /// # Errors
    /// [`HwError::Driver`].
    pub fn is_capturing(&self) -> Result<bool, HwError> {
        let _entered = self.context.enter()?;
        let mut status = sys::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is this object's own and alive; the call writes one number.
        check(unsafe { sys::cuStreamIsCapturing(self.raw, &mut status) })
            .map_err(|e| self.context.error("ask whether a stream is captured", e))?;
        Ok(status != sys::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Waits until everything on it is done; false when `timeout` passes first.
    ///
    /// # Errors
    /// As [`is_idle`](Self::is_idle).
    pub fn wait(&self, timeout: Duration) -> Result<bool, HwError> {
        let begin = Instant::now();
        while !self.is_idle()? {
            match begin.elapsed() {
                waited if waited >= timeout => return Ok(false),
                waited if waited < EAGER => std::hint::spin_loop(),
                waited if waited < YIELDING => std::thread::yield_now(),
                waited => std::thread::sleep(NAP.min(timeout.saturating_sub(waited))),
            }
        }
        Ok(true)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        // SAFETY: the stream is this object's own; what is still on it goes on, as the driver promises.
        if let Err(e) = check(unsafe { sys::cuStreamDestroy_v2(self.raw) }) {
            eprintln!("fuselink: cannot give back a stream of {}: {e}", self.context.gpu());
        }
    }
}

/// Copies that are begun and asked after. They are done in order.
pub struct CudaMover {
    pub(super) stream: Arc<Stream>,
    pub(super) addresses: Arc<AddressMap>,
    pub(super) gpu: GpuIdx,
    pub(super) started: u64,
}

impl Mover for CudaMover {
    fn start(&mut self, dst_dev_ptr: u64, src_dev_ptr: u64, bytes: u64) -> Result<u64, HwError> {
        for dev_ptr in [dst_dev_ptr, src_dev_ptr] {
            let not_mapped = HwError::NotMapped { gpu: self.gpu, dev_ptr, bytes };
            self.addresses.owner(dev_ptr, bytes).ok_or(not_mapped)?;
        }
        let context = &self.stream.context;
        let _entered = context.enter()?;
        // SAFETY: both are mapped (checked), and stay so until the copy is done (contract of `Mover`).
        check(unsafe {
            sys::cuMemcpyDtoDAsync_v2(dst_dev_ptr, src_dev_ptr, bytes as usize, self.stream.raw)
        })
        .map_err(|e| context.error("copy device memory", e))?;
        self.started += 1;
        Ok(self.started - 1)
    }

    /// Done when all that were begun are: failed messages are few, and none is held up for long.
    fn is_done(&mut self, _copy: u64) -> Result<bool, HwError> {
        self.stream.is_idle()
    }
}

/// The pinned buffer that copies pass through.
const STAGING_BYTES: usize = 1 << 20;
/// Longest that one part of a copy may take: many times what the slowest link needs for it.
const PATIENCE: Duration = Duration::from_secs(10);

/// Copies on a stream of their own. One at a time.
pub struct Copier {
    stream: Stream,
    staging: CudaMapped,
}

impl Copier {
    /// A copier with its pinned buffer.
    ///
    /// # Errors
    /// [`HwError::Driver`], [`HwError::Os`].
    pub fn new(context: &Arc<Context>) -> Result<Self, HwError> {
        let stream = Stream::new(context)?;
        let staging = CudaMapped::new(context, STAGING_BYTES, Arc::new(AddressMap::default()))?;
        Ok(Self { stream, staging })
    }

    fn finish(&self, bytes: usize) -> Result<(), HwError> {
        if self.stream.wait(PATIENCE)? {
            return Ok(());
        }
        let gpu = self.stream.context.gpu();
        Err(HwError::CopyTimeout { gpu, bytes: bytes as u64, waited: PATIENCE })
    }

    /// Copies to device memory.
    ///
    /// # Safety
    /// `bytes` from `dev_ptr` are mapped on the GPU with access, and stay so during the call.
    ///
    /// # Errors
    /// [`HwError::Driver`], [`HwError::CopyTimeout`].
    pub unsafe fn write(&mut self, dev_ptr: u64, bytes: &[u8]) -> Result<(), HwError> {
        let context = Arc::clone(&self.stream.context);
        let _entered = context.enter()?;
        for (i, part) in bytes.chunks(STAGING_BYTES).enumerate() {
            let staging = self.staging.host_ptr();
            let to = dev_ptr + (i * STAGING_BYTES) as u64;
            // SAFETY: the buffer is at least that long, this object's own, and its last copy is finished.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), staging, part.len()) };
            // SAFETY: the destination is mapped (contract above); the source is pinned and lives as long as the stream.
            check(unsafe { sys::cuMemcpyHtoDAsync_v2(to, staging.cast(), part.len(), self.stream.raw) })
                .map_err(|e| context.error("copy to device memory", e))?;
            self.finish(part.len())?;
        }
        Ok(())
    }

    /// Copies from device memory.
    ///
    /// # Safety
    /// As [`write`](Self::write).
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub unsafe fn read(&mut self, dev_ptr: u64, bytes: &mut [u8]) -> Result<(), HwError> {
        let context = Arc::clone(&self.stream.context);
        let _entered = context.enter()?;
        for (i, part) in bytes.chunks_mut(STAGING_BYTES).enumerate() {
            let staging = self.staging.host_ptr();
            let from = dev_ptr + (i * STAGING_BYTES) as u64;
            // SAFETY: the source is mapped (contract above); the destination is pinned and lives as long as the stream.
            check(unsafe { sys::cuMemcpyDtoHAsync_v2(staging.cast(), from, part.len(), self.stream.raw) })
                .map_err(|e| context.error("copy from device memory", e))?;
            self.finish(part.len())?;
            // SAFETY: the buffer is at least that long, this object's own, and the copy into it is finished.
            unsafe { std::ptr::copy_nonoverlapping(staging, part.as_mut_ptr(), part.len()) };
        }
        Ok(())
    }

    /// Copies within device memory.
    ///
    /// # Safety
    /// As [`write`](Self::write), for both places.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub unsafe fn copy(&mut self, to_dev_ptr: u64, from_dev_ptr: u64, bytes: u64) -> Result<(), HwError> {
        let context = Arc::clone(&self.stream.context);
        let _entered = context.enter()?;
        // SAFETY: both are mapped (contract above).
        check(unsafe {
            sys::cuMemcpyDtoDAsync_v2(to_dev_ptr, from_dev_ptr, bytes as usize, self.stream.raw)
        })
        .map_err(|e| context.error("copy device memory", e))?;
        self.finish(bytes as usize)
    }

    /// Sets device memory to zero.
    ///
    /// # Safety
    /// As [`write`](Self::write).
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub unsafe fn zero(&mut self, dev_ptr: u64, bytes: u64) -> Result<(), HwError> {
        let context = Arc::clone(&self.stream.context);
        let _entered = context.enter()?;
        // SAFETY: mapped (contract above).
        check(unsafe { sys::cuMemsetD8Async(dev_ptr, 0, bytes as usize, self.stream.raw) })
            .map_err(|e| context.error("clear device memory", e))?;
        self.finish(bytes as usize)
    }
}
