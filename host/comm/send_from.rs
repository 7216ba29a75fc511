//! What a collective may send from: memory of this library, or of a program that uses rustacuda.
//!
//! Only this rank's kernels read a send buffer, so any memory of its GPU will do. A receive buffer is written by the
//! kernels of the server's other ranks, which need it exported: it is always a [`Buffer`].

use std::sync::Arc;

use super::communicator::Buffer;
use super::device::Device;
use super::memory::Mapped;
use crate::hw::HwError;

/// Device memory to send from. Made from `&Buffer`, and with the feature `rustacuda` from that crate's `&DeviceBuffer` and
/// `&DeviceSlice`.
#[derive(Clone, Copy)]
pub struct SendFrom<'a> {
    dev_ptr: u64,
    bytes: u64,
    memory: Memory<'a>,
}

#[derive(Clone, Copy)]
enum Memory<'a> {
    Own(&'a Buffer),
    /// Borrowed from its owner for as long as the collective runs.
    #[cfg(feature = "rustacuda")]
    Foreign(std::marker::PhantomData<&'a ()>),
}

impl<'a> From<&'a Buffer> for SendFrom<'a> {
    fn from(buffer: &'a Buffer) -> Self {
        Self { dev_ptr: buffer.dev_ptr(), bytes: buffer.bytes(), memory: Memory::Own(buffer) }
    }
}

impl SendFrom<'_> {
    /// Its first address.
    pub fn dev_ptr(&self) -> u64 {
        self.dev_ptr
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What must live while kernels read it.
    pub(super) fn maps(&self) -> Vec<Arc<Mapped>> {
        match self.memory {
            Memory::Own(buffer) => buffer.maps().collect(),
            #[cfg(feature = "rustacuda")]
            Memory::Foreign(_) => Vec::new(),
        }
    }

    /// Whether this rank's kernels can read it.
    pub(super) fn check(&self, gpu: &Device) -> Result<(), HwError> {
        match (self.memory, gpu) {
            (Memory::Own(_), _) => Ok(()),
            #[cfg(feature = "rustacuda")]
            (Memory::Foreign(_), Device::Cuda(gpu)) => gpu.check_own(self.dev_ptr, self.bytes),
            #[cfg(feature = "rustacuda")]
            (Memory::Foreign(_), Device::Emu(gpu)) => {
                let (gpu, dev_ptr, bytes) = (crate::hw::Gpu::idx(gpu), self.dev_ptr, self.bytes);
                Err(HwError::NotMapped { gpu, dev_ptr, bytes })
            }
        }
    }
}

#[cfg(feature = "rustacuda")]
mod rustacuda_buffers {
    use std::marker::PhantomData;

    use rustacuda::memory::{DeviceBuffer, DevicePointer, DeviceSlice};

    use super::{Buffer, Memory, SendFrom};

    impl<'a, T> From<&'a DeviceSlice<T>> for SendFrom<'a> {
        fn from(slice: &'a DeviceSlice<T>) -> Self {
            let bytes = (slice.len() * size_of::<T>()) as u64;
            Self { dev_ptr: slice.as_ptr() as u64, bytes, memory: Memory::Foreign(PhantomData) }
        }
    }

    impl<'a, T> From<&'a DeviceBuffer<T>> for SendFrom<'a> {
        fn from(buffer: &'a DeviceBuffer<T>) -> Self {
            Self::from(&**buffer)
        }
    }

    impl Buffer {
        /// Its first byte, for rustacuda's calls. Valid as long as the buffer lives.
        pub fn rustacuda_ptr(&self) -> DevicePointer<u8> {
            // SAFETY: an address of this GPU; using it is rustacuda's, whose calls that do are unsafe.
            unsafe { DevicePointer::wrap(self.dev_ptr() as *mut u8) }
        }
    }
}
