//! One CUDA device as the library sees it.

use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cust::device::{Device, DeviceAttribute};

use super::call::{self, Context, check};
use super::kernels::Kernels;
use super::mapped::CudaMapped;
use super::memory::{self, CudaChunk, CudaWindow, ForNics, MemoryDevice};
use super::stream::{Copier, CudaMover, Stream};
use super::sys;
use crate::hw::{Gpu, HwError, Kernel, Launch, Mover, Teller};
use crate::space::AddressMap;
use crate::topo::GpuIdx;

/// Which GPU.
#[derive(Clone, Copy, Debug)]
pub struct CudaGpuConfig {
    /// Its place in the server.
    pub idx: GpuIdx,
    /// Its number among the devices that this process sees (`CUDA_VISIBLE_DEVICES`).
    pub ordinal: u32,
}

/// A CUDA device with the library's kernels on it.
pub struct CudaGpu {
    // Dropped in this order: the kernels' modules after whatever may still run.
    work: Option<Work>,
    copier: Mutex<Copier>,
    /// For copies that nobody waits for.
    moves: Arc<Stream>,
    memory: MemoryDevice,
}

/// What must not go while kernels run.
struct Work {
    stream: Stream,
    kernels: Kernels,
}

/// What a device must have, and in which words it is said to be missing.
const NEEDED: [(sys::CUdevice_attribute, &str); 2] = [
    (sys::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management"),
    (
        sys::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        "memory that can be handed to other processes as a descriptor",
    ),
];

/// A device's answer to a yes-or-no attribute; one that an older driver does not know is no.
fn has(device: Device, attribute: sys::CUdevice_attribute) -> bool {
    let mut answer = 0;
    // SAFETY: the call writes one number.
    let code = check(unsafe { sys::cuDeviceGetAttribute(&mut answer, attribute, device.as_raw()) });
    code.is_ok() && answer != 0
}

fn check_capable(device: Device, ordinal: u32) -> Result<(), HwError> {
    match NEEDED.iter().find(|(attribute, _)| !has(device, *attribute)) {
        Some(&(_, what)) => Err(HwError::GpuLacks { ordinal, what }),
        None => Ok(()),
    }
}

/// Blocks that move bytes as fast as NVLink and the NICs carry them: each has three loads of 16 bytes by 512 threads under way,
/// 24 KiB, which come in about a microsecond, so that 24 blocks move some 590 GB/s. The fastest links carry 450, and
/// a GPU's share of the NICs is 50 in each direction.
const BLOCKS: u32 = 24;
/// The library never takes more than this part of what can be resident, by its own choice.
const LARGEST_SHARE: u32 = 4;

/// How many blocks the library takes of a GPU on which `resident` can run at once: enough to move bytes at the links' speed
/// ([`BLOCKS`]), and at most a quarter, so that the user's computation has the rest. One block is always enough to make
/// progress.
fn suitable_blocks(resident: u32) -> u32 {
    BLOCKS.min(resident / LARGEST_SHARE).max(1)
}

impl CudaGpu {
    /// Opens a device, in the context that the calling thread works in when that is one of this device, else in its
    /// primary context; loads the kernels.
    ///
    /// # Errors
    /// [`HwError::NoDriver`], [`HwError::DriverTooOld`], [`HwError::NoGpu`], [`HwError::GpuLacks`],
    /// [`HwError::Driver`].
    pub fn new(config: CudaGpuConfig) -> Result<Self, HwError> {
        let CudaGpuConfig { idx, ordinal } = config;
        call::start_driver(ordinal)?;
        let count = Device::num_devices().unwrap_or(0);
        let device = Device::get_device(ordinal).map_err(|_| HwError::NoGpu { ordinal, count })?;
        check_capable(device, ordinal)?;
        let context = Arc::new(Context::of(device, idx)?);
        let for_nics = ForNics {
            rdma: has(device, sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),
            dma_buf: has(device, sys::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED),
        };
        let granularity_bytes = memory::granularity_bytes(&context, device, for_nics)?;
        let kernels = Kernels::load(&context)?;
        let work = Some(Work { stream: Stream::new(&context)?, kernels });
        let copier = Mutex::new(Copier::new(&context)?);
        let moves = Arc::new(Stream::new(&context)?);
        let addresses = Arc::new(AddressMap::default());
        let memory = MemoryDevice { context, device, for_nics, granularity_bytes, addresses };
        let gpu = Self { work, copier, moves, memory };
        gpu.warm_up()?;
        Ok(gpu)
    }

    /// The driver has kernels of its own for clearing and copying, and loads them when they are first used: each is, before
    /// any kernel waits for the host.
    fn warm_up(&self) -> Result<(), HwError> {
        let chunk = self.create_chunk(1)?;
        let (at, mut line) = (chunk.home_dev_ptr(), [0; 64]);
        let mut copier = self.copier();
        // SAFETY: the chunk is mapped at home for its whole life, and is at least a granule.
        unsafe { copier.write(at, &line) }?;
        // SAFETY: as above; the two places are different.
        unsafe { copier.copy(at + 64, at, 64) }?;
        // SAFETY: as above.
        unsafe { copier.read(at, &mut line) }
    }

    /// The device, for programs that ask cust more about it.
    pub fn device(&self) -> Device {
        self.memory.device
    }

    /// How many multiprocessors it has.
    pub fn multiprocessors(&self) -> u32 {
        let count = self.memory.device.get_attribute(DeviceAttribute::MultiprocessorCount);
        count.map_or(1, |n| n as u32)
    }

    /// How many blocks of the library's grids suit it: enough for the speed of the links, at most a quarter of what fits.
    ///
    /// # Errors
    /// [`HwError::Driver`].
    pub fn suitable_blocks(&self) -> Result<u32, HwError> {
        let Some(work) = &self.work else { return Ok(1) };
        let each = work.kernels.blocks_per_multiprocessor(Kernel::AllToAll)?;
        Ok(suitable_blocks(self.multiprocessors() * each))
    }

    /// Loads kernels of the user's, for [`Kernel::Custom`] of their names: all of them or none, at once, since a kernel that
    /// is loaded when it is first launched would wait for those that run. The image is what nvcc makes: a fatbin, a
    /// cubin or PTX, whole. A later kernel of the same name takes the place of an earlier one, which stays loaded.
    ///
    /// # Errors
    /// [`HwError::Image`] when it is none of these, is cut short, or has no code for this GPU; [`HwError::NoKernel`] when it
    /// lacks a kernel, or has one that cannot be launched; [`HwError::KernelsRun`].
    ///
    /// # Safety
    /// Each is defined by `FL_KERNEL(name, Params)`, or takes one pointer to such parameters.
    pub unsafe fn add_kernels(&self, image: &[u8], names: &[&'static str]) -> Result<(), HwError> {
        let Some(work) = &self.work else { return Ok(()) };
        if !work.stream.is_idle()? {
            return Err(HwError::KernelsRun { gpu: self.idx(), operation: "load kernels" });
        }
        work.kernels.add(image, names)
    }

    /// Whether a program captures that stream in a graph: then launches are part of it and do not run.
    ///
    /// # Errors
    /// [`HwError::Driver`].
    pub fn is_capturing(&self) -> Result<bool, HwError> {
        self.work.as_ref().map_or(Ok(false), |work| work.stream.is_capturing())
    }

    /// The stream on which kernels are launched (`CUstream`, which is `cudaStream_t`), for programs that order work of their
    /// own with it or capture it. It does not wait for the default stream, and lives as long as this GPU.
    pub fn raw_stream(&self) -> *mut c_void {
        self.work.as_ref().map_or(null_mut(), |work| work.stream.raw().cast())
    }

    /// Whether memory that the program has got from the driver lies on this GPU.
    ///
    /// # Errors
    /// [`HwError::NotMapped`] when the driver knows no such memory of this GPU.
    pub fn check_own(&self, dev_ptr: u64, bytes: u64) -> Result<(), HwError> {
        let not_mapped = HwError::NotMapped { gpu: self.idx(), dev_ptr, bytes };
        let _entered = self.memory.context.enter()?;
        let ask = |attribute| {
            let mut answer = 0u64;
            // SAFETY: each attribute asked for here is an address, a size or a number of at most 8 bytes.
            let code =
                check(unsafe { sys::cuPointerGetAttribute((&raw mut answer).cast(), attribute, dev_ptr) });
            code.ok().map(|()| answer)
        };
        let on = ask(sys::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
        let start = ask(sys::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
        let size = ask(sys::CU_POINTER_ATTRIBUTE_RANGE_SIZE);
        let (Some(on), Some(start), Some(size)) = (on, start, size) else { return Err(not_mapped) };
        let inside = dev_ptr.checked_add(bytes).is_some_and(|end| end <= start + size);
        let own = on as u32 == self.memory.device.as_raw() as u32;
        if own && inside { Ok(()) } else { Err(not_mapped) }
    }

    /// Copies between two places of device memory. Not ordered with kernels that run.
    ///
    /// # Errors
    /// [`HwError::NotMapped`], [`HwError::CopyTimeout`].
    pub fn copy(&self, to_dev_ptr: u64, from_dev_ptr: u64, bytes: u64) -> Result<(), HwError> {
        self.check_mapped(to_dev_ptr, bytes)?;
        self.check_mapped(from_dev_ptr, bytes)?;
        // SAFETY: mapped (checked); windows are unmapped only while nobody uses them (contract of `Window`).
        unsafe { self.copier().copy(to_dev_ptr, from_dev_ptr, bytes) }
    }

    fn check_mapped(&self, dev_ptr: u64, bytes: u64) -> Result<(), HwError> {
        match self.memory.addresses.owner(dev_ptr, bytes) {
            Some(_) => Ok(()),
            None => Err(HwError::NotMapped { gpu: self.idx(), dev_ptr, bytes }),
        }
    }

    fn copier(&self) -> MutexGuard<'_, Copier> {
        self.copier.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refuse(&self, launch: &Launch, reason: &str) -> HwError {
        HwError::Launch { gpu: self.idx(), kernel: launch.kernel.name(), reason: reason.to_owned() }
    }

    fn work(&self, launch: &Launch) -> Result<&Work, HwError> {
        self.work.as_ref().ok_or_else(|| self.refuse(launch, "the GPU is going away"))
    }
}

impl Gpu for CudaGpu {
    type Chunk = CudaChunk;
    type Window = CudaWindow;
    type Mapped = CudaMapped;

    fn idx(&self) -> GpuIdx {
        self.memory.context.gpu()
    }

    fn granularity_bytes(&self) -> u64 {
        self.memory.granularity_bytes
    }

    fn create_chunk(&self, bytes: u64) -> Result<Arc<CudaChunk>, HwError> {
        let chunk = CudaChunk::create(&self.memory, bytes)?;
        // The driver does not promise zeroes.
        // SAFETY: the chunk is mapped at home for its whole life.
        unsafe { self.copier().zero(chunk.home_dev_ptr(), crate::hw::Chunk::bytes(&chunk)) }?;
        Ok(Arc::new(chunk))
    }

    fn import_chunk(&self, fd: OwnedFd, owner: GpuIdx, bytes: u64) -> Result<Arc<CudaChunk>, HwError> {
        CudaChunk::import(&self.memory, &fd, owner, bytes).map(Arc::new)
    }

    fn reserve_window(&self, bytes: u64) -> Result<CudaWindow, HwError> {
        CudaWindow::reserve(&self.memory, bytes)
    }

    fn map_host(&self, bytes: usize) -> Result<CudaMapped, HwError> {
        CudaMapped::new(&self.memory.context, bytes, Arc::clone(&self.memory.addresses))
    }

    fn write(&self, dev_ptr: u64, bytes: &[u8]) -> Result<(), HwError> {
        self.check_mapped(dev_ptr, bytes.len() as u64)?;
        // SAFETY: mapped (checked); windows are unmapped only while nobody uses them (contract of `Window`).
        unsafe { self.copier().write(dev_ptr, bytes) }
    }

    fn read(&self, dev_ptr: u64, bytes: &mut [u8]) -> Result<(), HwError> {
        self.check_mapped(dev_ptr, bytes.len() as u64)?;
        // SAFETY: as in `write`.
        unsafe { self.copier().read(dev_ptr, bytes) }
    }

    fn teller(&self) -> Teller {
        Box::new(|| ())
    }

    fn mover(&self) -> Box<dyn Mover> {
        let (stream, addresses) = (Arc::clone(&self.moves), Arc::clone(&self.memory.addresses));
        Box::new(CudaMover { stream, addresses, gpu: self.idx(), started: 0 })
    }

    fn launch(&self, launch: Launch) -> Result<(), HwError> {
        if launch.blocks == 0 {
            return Err(self.refuse(&launch, "a grid needs at least one block"));
        }
        self.check_mapped(launch.params_dev_ptr, launch.kernel.params_bytes())
            .map_err(|_| self.refuse(&launch, "its parameters are not in device memory"))?;
        let work = self.work(&launch)?;
        // SAFETY: the parameters are mapped (checked); what they point to is the caller's, as on any GPU.
        unsafe { work.kernels.launch(launch, &work.stream) }
    }

    fn synchronize(&self, timeout: Duration) -> Result<(), HwError> {
        let Some(work) = &self.work else { return Ok(()) };
        match work.stream.wait(timeout)? {
            true => Ok(()),
            false => Err(HwError::KernelTimeout { gpu: self.idx(), waited: timeout }),
        }
    }
}

impl Drop for CudaGpu {
    /// Kernels must have ended (the owner aborts them first). What still runs keeps its module: unloading it would wait.
    fn drop(&mut self) {
        let Some(work) = self.work.take() else { return };
        if !matches!(work.stream.is_idle(), Ok(true)) {
            eprintln!("fuselink: {} still runs kernels; they are left behind", self.idx());
            std::mem::forget(work);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_leave_room_for_computation() {
        // Two blocks on each multiprocessor of an H200, an A100 and a slice of one; a GPU that says nothing.
        let resident = [2 * 132, 2 * 108, 2 * 14, 3, 0];
        assert_eq!(resident.map(suitable_blocks), [24, 24, 7, 1, 1]);
    }
}
