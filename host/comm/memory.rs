//! Device memory as comm uses it: a chunk with the window through which kernels see it.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::device::{Device, DeviceChunk, DeviceWindow};
use crate::abi::{FlAllToAll, FlChannel};
use crate::hw::{Chunk, Gpu, HwError, Window};
use crate::topo::GpuIdx;

/// A chunk mapped as a whole.
pub(super) struct Mapped {
    pub chunk: Arc<DeviceChunk>,
    window: DeviceWindow,
}

impl Mapped {
    /// Maps it.
    pub fn of(gpu: &Device, chunk: Arc<DeviceChunk>) -> Result<Self, HwError> {
        let mut window = gpu.reserve_window(chunk.bytes())?;
        window.map(0, &chunk)?;
        Ok(Self { chunk, window })
    }

    /// New memory on this rank's GPU.
    pub fn create(gpu: &Device, bytes: u64) -> Result<Self, HwError> {
        Self::of(gpu, gpu.create_chunk(bytes)?)
    }

    /// Memory that a local peer exported.
    pub fn import(gpu: &Device, fd: OwnedFd, owner: GpuIdx, bytes: u64) -> Result<Self, HwError> {
        Self::of(gpu, gpu.import_chunk(fd, owner, bytes)?)
    }

    pub fn dev_ptr(&self) -> u64 {
        self.window.dev_ptr()
    }

    pub fn bytes(&self) -> u64 {
        self.chunk.bytes()
    }
}

/// Lays out arrays one after the other in one piece of device memory.
#[derive(Default)]
pub(super) struct Image {
    bytes: Vec<u8>,
}

impl Image {
    /// Appends words and returns where they start.
    pub fn words(&mut self, words: impl IntoIterator<Item = u64>) -> u64 {
        let at = self.align();
        words.into_iter().for_each(|w| self.bytes.extend(w.to_ne_bytes()));
        at
    }

    /// Appends bytes and returns where they start.
    pub fn raw(&mut self, bytes: &[u8]) -> u64 {
        let at = self.align();
        self.bytes.extend(bytes);
        at
    }

    /// Appends zeroes and returns where they start.
    pub fn zeroes(&mut self, bytes: usize) -> u64 {
        let at = self.align();
        self.bytes.resize(self.bytes.len() + bytes, 0);
        at
    }

    fn align(&mut self) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(64), 0);
        self.bytes.len() as u64
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// A struct of `kernels/abi.h` without padding.
///
/// # Safety
/// Every byte of the type belongs to a field.
pub(super) unsafe trait Plain: Copy {}
// SAFETY: words only.
unsafe impl Plain for FlAllToAll {}
// SAFETY: six 32-bit fields, then words.
unsafe impl Plain for FlChannel {}

/// The words of a struct.
pub(super) fn words_of<T: Plain, const N: usize>(value: T) -> [u64; N] {
    const { assert!(size_of::<T>() == 8 * N) };
    // SAFETY: same size (checked), and every byte is initialised (`Plain`); u64 has no invalid values.
    unsafe { std::mem::transmute_copy(&value) }
}
