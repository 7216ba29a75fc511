//! The GPU of a rank: an emulated one, or a CUDA device.

use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "cuda")]
use crate::cuda::{CudaChunk, CudaGpu, CudaMapped, CudaWindow};
use crate::emu::memory::{EmuChunk, EmuMapped, EmuWindow};
use crate::emu::{EmuGpu, EmuKernel};
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

/// A kernel of the user's, by name.
#[derive(Clone, Copy)]
pub struct UserKernel {
    /// The name in its source: `FL_KERNEL(name, Params)`.
    pub name: &'static str,
    /// What a C++ compiler made of it, for emulated GPUs; `None`: it is for real ones only.
    pub emulated: Option<EmuKernel>,
}

/// Kernels of the user's in the forms in which GPUs run them, made of the same sources. Each kind of GPU takes its own.
#[derive(Clone, Copy)]
pub struct UserKernels<'a> {
    /// Which.
    pub kernels: &'a [UserKernel],
    /// What nvcc made of them, for real GPUs: a fatbin, a cubin or PTX; `None`: they are for emulated ones only.
    pub image: Option<&'a [u8]>,
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

impl Device {
    /// Gives the GPU kernels of the user's, all or none.
    ///
    /// # Errors
    /// [`HwError::Image`], [`HwError::NoKernel`], [`HwError::KernelsRun`].
    ///
    /// # Safety
    /// Each is what `FL_KERNEL(name, Params)` defines, and its launches have such parameters.
    pub unsafe fn add_kernels(&self, user: UserKernels<'_>) -> Result<(), HwError> {
        match self {
            Self::Emu(gpu) => {
                let entries = user.kernels.iter().map(|kernel| emulated(gpu.idx(), kernel));
                for (name, entry) in entries.collect::<Result<Vec<_>, _>>()? {
                    // SAFETY: contract of this function.
                    unsafe { gpu.add_kernel(name, entry) };
                }
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => {
                let none = HwError::Image { gpu: gpu.idx(), reason: "is missing: real GPUs need one".into() };
                let names: Vec<_> = user.kernels.iter().map(|kernel| kernel.name).collect();
                // SAFETY: contract of this function.
                unsafe { gpu.add_kernels(user.image.ok_or(none)?, &names) }
            }
        }
    }

    /// How many blocks of the library's grids suit the GPU; `emulated` on an emulated one, which has no say.
    ///
    /// # Errors
    /// [`HwError::Driver`].
    pub fn suitable_blocks(&self, emulated: u32) -> Result<u32, HwError> {
        match self {
            Self::Emu(_) => Ok(emulated),
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => gpu.suitable_blocks(),
        }
    }

    /// Whether a program captures the stream on which kernels are launched.
    ///
    /// # Errors
    /// [`HwError::Driver`].
    pub fn is_capturing(&self) -> Result<bool, HwError> {
        match self {
            Self::Emu(_) => Ok(false),
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => gpu.is_capturing(),
        }
    }

    /// The stream of a real GPU on which kernels are launched.
    pub fn cuda_stream(&self) -> Option<*mut c_void> {
        match self {
            Self::Emu(_) => None,
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => Some(gpu.raw_stream()),
        }
    }
}

/// A kernel as an emulated GPU runs it.
fn emulated(gpu: GpuIdx, kernel: &UserKernel) -> Result<(&'static str, EmuKernel), HwError> {
    let reason = "it was not built for emulated GPUs";
    let missing = || HwError::NoKernel { gpu, kernel: kernel.name, reason: reason.to_owned() };
    kernel.emulated.map(|entry| (kernel.name, entry)).ok_or_else(missing)
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
