//! The GPU of a rank: an emulated one, or a CUDA device.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "cuda")]
use crate::cuda::{CudaChunk, CudaGpu, CudaMapped, CudaWindow};
use crate::emu::EmuGpu;
use crate::emu::memory::{EmuChunk, EmuMapped, EmuWindow};
use crate::hw::{Chunk, Gpu, HwError, Launch, MappedHost, Mover, Teller, Window};
use crate::topo::GpuIdx;

/// Which GPUs a job runs on. The same kind on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub enum GpuKind {
    /// Emulated ones: nothing is needed.
    #[default]
    Emu,
    /// CUDA devices; the build needs the feature `cuda`.
    Cuda {
        /// Which of those that this process sees; `None`: the one whose number is the GPU's place in its server. Ranks
        /// share a device only when they all name it.
        ordinal: Option<u32>,
    },
}

impl GpuKind {
    /// As it is written in settings and reports, without the device.
    pub fn name(self) -> &'static str {
        match self {
            Self::Emu => "emu",
            Self::Cuda { .. } => "cuda",
        }
    }

    /// Reads `emu`, `cuda` or `cuda:N`.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "emu" => Some(Self::Emu),
            "cuda" => Some(Self::Cuda { ordinal: None }),
            _ => text.strip_prefix("cuda:")?.parse().ok().map(|n| Self::Cuda { ordinal: Some(n) }),
        }
    }
}

/// The GPUs of this build.
pub enum Device {
    /// Emulated.
    Emu(EmuGpu),
    /// Real.
    #[cfg(feature = "cuda")]
    Cuda(CudaGpu),
}

/// Its memory.
pub enum DeviceChunk {
    /// Emulated.
    Emu(Arc<EmuChunk>),
    /// Real.
    #[cfg(feature = "cuda")]
    Cuda(Arc<CudaChunk>),
}

/// Its addresses.
pub enum DeviceWindow {
    /// Emulated.
    Emu(EmuWindow),
    /// Real.
    #[cfg(feature = "cuda")]
    Cuda(CudaWindow),
}

/// Host memory that its kernels see.
pub enum DeviceMapped {
    /// Emulated.
    Emu(EmuMapped),
    /// Real.
    #[cfg(feature = "cuda")]
    Cuda(CudaMapped),
}

/// The same call on whichever it is.
macro_rules! on {
    ($self:expr, $it:ident => $call:expr) => {
        match $self {
            Self::Emu($it) => $call,
            #[cfg(feature = "cuda")]
            Self::Cuda($it) => $call,
        }
    };
}

/// The same call on whichever it is, its result wrapped as the same kind of another type.
macro_rules! make {
    ($self:expr, $wrap:ident, $it:ident => $call:expr) => {
        match $self {
            Self::Emu($it) => $call.map($wrap::Emu),
            #[cfg(feature = "cuda")]
            Self::Cuda($it) => $call.map($wrap::Cuda),
        }
    };
}

impl Gpu for Device {
    type Chunk = DeviceChunk;
    type Window = DeviceWindow;
    type Mapped = DeviceMapped;

    fn idx(&self) -> GpuIdx {
        on!(self, gpu => gpu.idx())
    }
    fn granularity_bytes(&self) -> u64 {
        on!(self, gpu => gpu.granularity_bytes())
    }
    fn create_chunk(&self, bytes: u64) -> Result<Arc<DeviceChunk>, HwError> {
        make!(self, DeviceChunk, gpu => gpu.create_chunk(bytes)).map(Arc::new)
    }
    fn import_chunk(&self, fd: OwnedFd, owner: GpuIdx, bytes: u64) -> Result<Arc<DeviceChunk>, HwError> {
        make!(self, DeviceChunk, gpu => gpu.import_chunk(fd, owner, bytes)).map(Arc::new)
    }
    fn reserve_window(&self, bytes: u64) -> Result<DeviceWindow, HwError> {
        make!(self, DeviceWindow, gpu => gpu.reserve_window(bytes))
    }
    fn map_host(&self, bytes: usize) -> Result<DeviceMapped, HwError> {
        make!(self, DeviceMapped, gpu => gpu.map_host(bytes))
    }
    fn write(&self, dev_ptr: u64, bytes: &[u8]) -> Result<(), HwError> {
        on!(self, gpu => gpu.write(dev_ptr, bytes))
    }
    fn read(&self, dev_ptr: u64, bytes: &mut [u8]) -> Result<(), HwError> {
        on!(self, gpu => gpu.read(dev_ptr, bytes))
    }
    fn teller(&self) -> Teller {
        on!(self, gpu => gpu.teller())
    }
    fn mover(&self) -> Box<dyn Mover> {
        on!(self, gpu => gpu.mover())
    }
    fn launch(&self, launch: Launch) -> Result<(), HwError> {
        on!(self, gpu => gpu.launch(launch))
    }
    fn synchronize(&self, timeout: Duration) -> Result<(), HwError> {
        on!(self, gpu => gpu.synchronize(timeout))
    }
}

impl Chunk for DeviceChunk {
    fn gpu(&self) -> GpuIdx {
        on!(self, chunk => chunk.gpu())
    }
    fn bytes(&self) -> u64 {
        on!(self, chunk => chunk.bytes())
    }
    fn export(&self) -> Result<OwnedFd, HwError> {
        on!(self, chunk => chunk.export())
    }
    fn export_for_nic(&self) -> Result<OwnedFd, HwError> {
        on!(self, chunk => chunk.export_for_nic())
    }
}

impl DeviceWindow {
    fn place(&mut self, offset: u64, chunk: &DeviceChunk, remap: bool) -> Result<(), HwError> {
        match (self, chunk) {
            (Self::Emu(window), DeviceChunk::Emu(chunk)) if remap => window.remap(offset, chunk),
            (Self::Emu(window), DeviceChunk::Emu(chunk)) => window.map(offset, chunk),
            #[cfg(feature = "cuda")]
            (Self::Cuda(window), DeviceChunk::Cuda(chunk)) if remap => window.remap(offset, chunk),
            #[cfg(feature = "cuda")]
            (Self::Cuda(window), DeviceChunk::Cuda(chunk)) => window.map(offset, chunk),
            #[cfg(feature = "cuda")]
            (_, chunk) => {
                let (operation, rule) = ("map", "the chunk is of another kind of GPU");
                let end = offset.saturating_add(chunk.bytes());
                Err(HwError::WindowRule { operation, offset, end, rule })
            }
        }
    }
}

impl Window for DeviceWindow {
    type Chunk = DeviceChunk;

    fn dev_ptr(&self) -> u64 {
        on!(self, window => window.dev_ptr())
    }
    fn bytes(&self) -> u64 {
        on!(self, window => window.bytes())
    }
    fn map(&mut self, offset: u64, chunk: &Arc<DeviceChunk>) -> Result<(), HwError> {
        self.place(offset, chunk, false)
    }
    fn unmap(&mut self, offset: u64) -> Result<(), HwError> {
        on!(self, window => window.unmap(offset))
    }
    fn remap(&mut self, offset: u64, chunk: &Arc<DeviceChunk>) -> Result<(), HwError> {
        self.place(offset, chunk, true)
    }
}

impl MappedHost for DeviceMapped {
    fn host_ptr(&self) -> *mut u8 {
        on!(self, memory => memory.host_ptr())
    }
    fn mapped_dev_ptr(&self) -> u64 {
        on!(self, memory => memory.mapped_dev_ptr())
    }
    fn bytes(&self) -> usize {
        on!(self, memory => memory.bytes())
    }
}
