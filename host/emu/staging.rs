//! How an emulated NIC reaches memory that the host cannot map: a real GPU's. Each registration has a *stage*, host memory
//! of the same size; a message is copied there before it is sent, and from there when it has arrived.
//!
//! It is for tests of real GPUs without real NICs, and as slow as it sounds. Only whole messages are carried: an inline
//! write to such memory would not be noticed, and control words always go to host memory.

use std::sync::Arc;

use crate::hw::{Gpu, HwError};

/// Copies between the host and a GPU's memory, without waiting for kernels.
pub trait DeviceCopies: Send + Sync {
    /// Host to GPU.
    ///
    /// # Errors
    /// As [`Gpu::write`].
    fn put(&self, dev_ptr: u64, bytes: &[u8]) -> Result<(), HwError>;
    /// GPU to host.
    ///
    /// # Errors
    /// As [`Gpu::read`].
    fn take(&self, dev_ptr: u64, bytes: &mut [u8]) -> Result<(), HwError>;
}

impl<G: Gpu> DeviceCopies for G {
    fn put(&self, dev_ptr: u64, bytes: &[u8]) -> Result<(), HwError> {
        self.write(dev_ptr, bytes)
    }
    fn take(&self, dev_ptr: u64, bytes: &mut [u8]) -> Result<(), HwError> {
        self.read(dev_ptr, bytes)
    }
}

/// Where a registration's memory really is.
pub(super) struct Behind {
    pub copies: Arc<dyn DeviceCopies>,
    pub dev_ptr: u64,
}

impl Behind {
    /// Fills `stage`, which lies at `offset` of the registration, from the GPU.
    pub fn fetch(&self, offset: u64, stage: &mut [u8]) -> Result<(), HwError> {
        if stage.is_empty() { Ok(()) } else { self.copies.take(self.dev_ptr + offset, stage) }
    }

    /// Brings `stage`, which lies at `offset` of the registration, to the GPU.
    pub fn deliver(&self, offset: u64, stage: &[u8]) -> Result<(), HwError> {
        if stage.is_empty() { Ok(()) } else { self.copies.put(self.dev_ptr + offset, stage) }
    }
}
