//! One-sided puts: what a user's kernels are given, and how they are launched.

use std::sync::Arc;

use super::device::Device;
use super::memory::Mapped;
use super::{Buffer, CommError, Communicator};
use crate::abi::FlStream;
use crate::channel::StreamLimits;
use crate::doorbell::Class;
use crate::emu::EmuKernel;
use crate::hw::{Gpu, Kernel, Launch};

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

    /// Gives the emulated GPU a kernel of the user's, built as C++. Real GPUs have their own kernels: nothing is done there.
    ///
    /// # Safety
    /// As [`EmuGpu::add_kernel`](crate::emu::EmuGpu::add_kernel).
    pub unsafe fn add_kernel(&self, name: &'static str, entry: EmuKernel) {
        match self.machine.gpu() {
            // SAFETY: contract of this function.
            Device::Emu(gpu) => unsafe { gpu.add_kernel(name, entry) },
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => {}
        }
    }

    /// Launches a user's kernel, behind what was launched before, and returns.
    ///
    /// # Errors
    /// [`CommError::Dead`], [`CommError::Hw`].
    pub fn launch(&mut self, launch: UserLaunch<'_>) -> Result<(), CommError> {
        self.bootstrap()?;
        let gpu = self.machine.gpu();
        let bytes = launch.params.len() as u64;
        let params = Arc::new(self.with_room(bytes, |gpu| Mapped::create(gpu, bytes))?);
        gpu.write(params.dev_ptr(), launch.params)?;
        let kernel = Kernel::Custom { name: launch.name, params_bytes: launch.params.len() as u64 };
        self.relay.kernels_start();
        gpu.launch(Launch { kernel, blocks: launch.blocks, params_dev_ptr: params.dev_ptr() })?;
        self.in_use.extend(launch.buffers.iter().flat_map(|b| b.maps()).chain([params]));
        Ok(())
    }

    /// Waits until all kernels that were launched have ended.
    ///
    /// # Errors
    /// [`CommError`]: why one gave up. Then the communicator is dead.
    pub fn synchronize(&mut self) -> Result<(), CommError> {
        self.finish()
    }
}
