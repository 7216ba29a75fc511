//! Shared memory without names: memfd, handed on as descriptors, so that nothing is left behind however a job ends.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, Mode, SealFlags};

use crate::hw::HwError;
use crate::words::WordSlice;

/// A mapped memfd.
pub struct SharedMemory {
    file: File,
    map: MmapRaw,
}

fn os(operation: &'static str) -> impl FnOnce(rustix::io::Errno) -> HwError {
    move |e| HwError::Os { operation, source: e.into() }
}

/// A zeroed memfd of `bytes`, close-on-exec, mode 0600.
///
/// # Errors
/// [`HwError::Os`].
pub fn memfd(name: &str, bytes: u64) -> Result<OwnedFd, HwError> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(os("create shared memory"))?;
    rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR).map_err(os("protect shared memory"))?;
    rustix::fs::ftruncate(&fd, bytes).map_err(os("size shared memory"))?;
    // Who has mapped it must not fault because somebody else cut it short.
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)
        .map_err(os("seal shared memory"))?;
    Ok(fd)
}

impl SharedMemory {
    /// New memory of `words` words, all zero.
    ///
    /// # Errors
    /// [`HwError::Os`].
    pub fn create(name: &str, words: usize) -> Result<Arc<Self>, HwError> {
        Self::open(memfd(name, words as u64 * 8)?, words)
    }

    /// Memory that another process created.
    ///
    /// # Errors
    /// [`HwError::Os`], also when it is smaller than `words` words: a mapping past its end would fault.
    pub fn open(fd: OwnedFd, words: usize) -> Result<Arc<Self>, HwError> {
        let operation = "map shared memory";
        let size = rustix::fs::fstat(&fd).map_err(os(operation))?.st_size;
        if size < words as i64 * 8 {
            let source = std::io::Error::other(format!("it holds {size} bytes, {} are needed", words * 8));
            return Err(HwError::Os { operation, source });
        }
        let file = File::from(fd);
        let map = MmapOptions::new()
            .len(words * 8)
            .map_raw(&file)
            .map_err(|source| HwError::Os { operation, source })?;
        Ok(Arc::new(Self { file, map }))
    }

    /// The words of the mapping.
    pub fn words(self: &Arc<Self>) -> WordSlice {
        let keep: Arc<Self> = Arc::clone(self);
        // SAFETY: the map is page aligned, of that length, and lives in `keep`; it is only reached as words.
        unsafe { WordSlice::new(self.map.as_ptr(), self.map.len() / 8, keep) }
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
