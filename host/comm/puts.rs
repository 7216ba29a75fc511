//! One-sided puts: what a user's kernels are given, and how they are launched.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use super::device::{Device, UserKernels};
use super::memory::Mapped;
use super::{Buffer, CommError, Communicator};
use crate::abi::FlStream;
use crate::channel::StreamLimits;
use crate::doorbell::Class;
use crate::hw::{Gpu, HwError, Kernel, Launch};

/// A launch of a user's kernel.
#[derive(Clone, Copy)]
pub struct UserLaunch<'a> {
    /// Its name.
    pub name: &'static str,
    /// Blocks of its grid.
    pub blocks: u32,
    /// Its parameters, as they lie in memory: a `repr(C)` struct without padding, `FlStream` first as a rule.
    pub params: &'a [u8],
    /// What it works on; kept until it has ended.
    pub buffers: &'a [&'a Buffer],
}

impl UserLaunch<'_> {
    fn kernel(&self) -> Kernel {
        Kernel::Custom { name: self.name, params_bytes: self.params.len() as u64 }
    }

    fn at(&self, params_dev_ptr: u64) -> Launch {
        Launch { kernel: self.kernel(), blocks: self.blocks, params_dev_ptr }
    }

    fn refuse(&self, gpu: &Device, reason: &str) -> HwError {
        HwError::Launch { gpu: gpu.idx(), kernel: self.name, reason: reason.to_owned() }
    }
}

/// A launch that can be made any number of times. What it works on lives as long as it does: it must outlive the graphs that
/// have captured it.
pub struct PreparedLaunch {
    launch: Launch,
    in_use: Vec<Arc<Mapped>>,
}

impl PreparedLaunch {
    /// Where the kernel's parameters are, for programs that launch it themselves.
    pub fn params_dev_ptr(&self) -> u64 {
        self.launch.params_dev_ptr
    }
}

/// Parameters of launches: while kernels run no memory can be mapped, so it is there before.
pub(super) struct LaunchParams {
    memory: Arc<Mapped>,
    used: u64,
}

impl LaunchParams {
    const BYTES: u64 = 64 << 10;
    /// A line of their own each, so that the host writes none that a kernel reads.
    const ALIGN: u64 = 128;

    pub fn new(gpu: &Device) -> Result<Self, CommError> {
        Ok(Self { memory: Arc::new(Mapped::create(gpu, Self::BYTES)?), used: 0 })
    }

    pub fn memory(&self) -> Arc<Mapped> {
        Arc::clone(&self.memory)
    }

    /// Room for the parameters of one more launch.
    fn take(&mut self, bytes: u64) -> Option<u64> {
        let end = self.used.checked_add(bytes.max(1).checked_next_multiple_of(Self::ALIGN)?)?;
        let at = self.memory.dev_ptr() + self.used;
        (end <= self.memory.bytes()).then(|| self.used = end).map(|()| at)
    }

    /// All kernels have ended.
    pub fn give_back(&mut self) {
        self.used = 0;
    }
}

impl Communicator {
    /// What kernels are given for one-sided puts (`kernels/device.cuh`): this rank's ends of the streams to and from all
    /// ranks. The same for every launch.
    ///
    /// # Errors
    /// [`CommError::NoPuts`] when the communicator was made without memory for them.
    pub fn stream(&self) -> Result<FlStream, CommError> {
        if self.put_bytes == 0 {
            return Err(CommError::NoPuts);
        }
        let timeout_ns = u64::try_from(self.timeout.as_nanos()).unwrap_or(u64::MAX);
        let limits = StreamLimits { class: Class::LowLatency, slot_bytes: self.put_bytes, timeout_ns };
        Ok(self.channel.stream(self.channel_dev_ptr, limits))
    }

    /// Gives the GPU kernels of the user's, to be launched by name ([`launch`](Self::launch)): all of them, or none. A later
    /// kernel of the same name takes the place of an earlier one.
    ///
    /// # Errors
    /// [`HwError::Image`] when the image is none, is cut short, or is for other GPUs; [`HwError::NoKernel`] when a kernel is
    /// not in it or was not built for this kind of GPU; [`HwError::KernelsRun`] while kernels run: loading may wait for
    /// them, and they wait for the host.
    ///
    /// # Safety
    /// Each is what `FL_KERNEL(name, Params)` defines, and its launches have such parameters.
    pub unsafe fn add_kernels(&self, kernels: UserKernels<'_>) -> Result<(), CommError> {
        let gpu = self.machine.gpu();
        self.check_idle("load kernels")?;
        // SAFETY: contract of this function.
        Ok(unsafe { gpu.add_kernels(kernels) }?)
    }

    /// Launches a user's kernel, behind what was launched before, and returns. For graphs there is
    /// [`prepare`](Self::prepare): these parameters are gone when the kernel has ended.
    ///
    /// # Errors
    /// [`CommError::Dead`], [`CommError::Hw`].
    pub fn launch(&mut self, launch: UserLaunch<'_>) -> Result<(), CommError> {
        self.bootstrap()?;
        self.check_not_capturing("launch with parameters of the moment")?;
        let gpu = self.machine.gpu();
        let place = self.params.take(launch.params.len() as u64);
        let params_dev_ptr = place.ok_or_else(|| {
            launch.refuse(gpu, "the launches before have taken all room for parameters; synchronize first")
        })?;
        gpu.write(params_dev_ptr, launch.params)?;
        self.relay.kernels_start();
        gpu.launch(launch.at(params_dev_ptr))?;
        self.in_use.extend(launch.buffers.iter().flat_map(|b| b.maps()));
        Ok(())
    }

    /// Makes a launch ready to be repeated, or captured in a graph: its parameters lie in device memory of their own, and stay as
    /// the kernel leaves them.
    ///
    /// # Errors
    /// [`CommError::Dead`], [`CommError::Hw`]; [`HwError::KernelsRun`] while kernels run, since memory is mapped.
    pub fn prepare(&self, launch: UserLaunch<'_>) -> Result<PreparedLaunch, CommError> {
        self.bootstrap()?;
        self.check_idle("prepare a launch")?;
        let gpu = self.machine.gpu();
        let bytes = launch.params.len() as u64;
        let params = Arc::new(self.with_room(bytes, |gpu| Mapped::create(gpu, bytes))?);
        gpu.write(params.dev_ptr(), launch.params)?;
        let at = launch.at(params.dev_ptr());
        let in_use = launch.buffers.iter().flat_map(|b| b.maps()).chain([params]).collect();
        Ok(PreparedLaunch { launch: at, in_use })
    }

    /// Launches what was prepared, behind what was launched before. The host writes nothing, so that a graph that has captured
    /// this call does on each replay what the call does.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub fn launch_prepared(&mut self, prepared: &PreparedLaunch) -> Result<(), CommError> {
        self.bootstrap()?;
        self.relay.kernels_start();
        self.machine.gpu().launch(prepared.launch)?;
        self.in_use.extend(prepared.in_use.iter().cloned());
        Ok(())
    }

    /// The stream on which kernels are launched, where the GPU is real: a `CUstream`, which is a `cudaStream_t`. Programs may order
    /// work of their own with it, launch on it, and capture it. It lives as long as the communicator.
    pub fn cuda_stream(&self) -> Option<*mut c_void> {
        self.machine.gpu().cuda_stream()
    }

    /// Whatever a graph cannot repeat is refused while one is captured.
    pub(super) fn check_not_capturing(&self, operation: &'static str) -> Result<(), HwError> {
        let gpu = self.machine.gpu();
        if gpu.is_capturing()? { Err(HwError::Capturing { gpu: gpu.idx(), operation }) } else { Ok(()) }
    }

    /// What maps memory or loads code may wait for kernels, which wait for the host.
    pub(super) fn check_idle(&self, operation: &'static str) -> Result<(), HwError> {
        self.check_not_capturing(operation)?;
        let gpu = self.machine.gpu();
        match gpu.synchronize(Duration::ZERO) {
            Err(HwError::KernelTimeout { .. }) => Err(HwError::KernelsRun { gpu: gpu.idx(), operation }),
            other => other,
        }
    }

    /// Waits until all kernels that were launched have ended.
    ///
    /// # Errors
    /// [`CommError`]: why one gave up. Then the communicator is dead.
    pub fn synchronize(&mut self) -> Result<(), CommError> {
        self.check_not_capturing("wait for kernels")?;
        self.finish()
    }
}
