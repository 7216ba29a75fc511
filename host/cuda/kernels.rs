//! The kernels, loaded before anything runs.
//!
//! By default the driver loads a kernel at its first launch, and waits for the GPU to do so. While other kernels wait for
//! this process that would be for ever; so all of them are loaded here.

use std::ptr::null_mut;
use std::sync::Arc;

use cust::module::Module;

use super::call::{Context, check};
use super::stream::Stream;
use super::sys;
use crate::hw::{HwError, Kernel, Launch};

/// Threads of a block. Registers of the kernels at this size are in docs/cuda.md.
pub const BLOCK_THREADS: u32 = 512;

/// nvcc's output: machine code for each GPU generation, and PTX for later ones.
const IMAGES: [&[u8]; 2] = [
    include_bytes!(concat!(env!("OUT_DIR"), "/all_to_all.fatbin")),
    include_bytes!(concat!(env!("OUT_DIR"), "/put.fatbin")),
];

struct Loaded {
    kernel: Kernel,
    function: sys::CUfunction,
}

/// Modules and their kernels.
pub struct Kernels {
    context: Arc<Context>,
    loaded: Vec<Loaded>,
    modules: Vec<Module>,
}

// SAFETY: functions may be launched by any thread; nothing changes after loading.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Loads all kernels.
    ///
    /// # Errors
    /// [`HwError::Driver`]: the driver refuses an image, or an image lacks a kernel.
    pub fn load(context: &Arc<Context>) -> Result<Self, HwError> {
        let _entered = context.enter()?;
        let refuse = |e| HwError::Driver {
            gpu: context.gpu(),
            operation: "load the kernels",
            source: std::io::Error::other(e),
        };
        let modules = IMAGES.map(|image| Module::from_fatbin(image, &[]));
        let modules = modules.into_iter().collect::<Result<Vec<_>, _>>().map_err(refuse)?;
        let find = |kernel: Kernel| {
            let functions = modules.iter().map(|m| m.get_function(kernel.name()));
            functions.reduce(Result::or).map(|f| f.map_err(refuse))
        };
        let mut loaded = Vec::new();
        for kernel in Kernel::ALL {
            let Some(function) = find(kernel) else { continue };
            let function: sys::CUfunction = function?.to_raw().cast();
            // SAFETY: a function of a module that is loaded and stays so.
            check(unsafe { sys::cuFuncLoad(function) })
                .map_err(|e| context.error("load a kernel ahead of its launch", e))?;
            loaded.push(Loaded { kernel, function });
        }
        Ok(Self { context: Arc::clone(context), loaded, modules })
    }

    /// Queues a kernel.
    ///
    /// # Safety
    /// The kernel's parameters at `params_dev_ptr`, and what they point to, are mapped while it runs.
    ///
    /// # Errors
    /// [`HwError::Launch`].
    pub unsafe fn launch(&self, launch: Launch, stream: &Stream) -> Result<(), HwError> {
        let kernel = launch.kernel.name();
        let refuse = |reason: String| HwError::Launch { gpu: self.context.gpu(), kernel, reason };
        let loaded = self.loaded.iter().find(|l| l.kernel == launch.kernel);
        let function = loaded.ok_or_else(|| refuse("it is not loaded".to_owned()))?.function;
        let mut params = launch.params_dev_ptr;
        let mut arguments = [(&raw mut params).cast()];
        let _entered = self.context.enter()?;
        let (blocks, threads, raw) = (launch.blocks, BLOCK_THREADS, stream.raw());
        // SAFETY: the kernel takes one pointer, which the call copies; the rest is the contract above.
        check(unsafe {
            sys::cuLaunchKernel(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                raw,
                arguments.as_mut_ptr(),
                null_mut(),
            )
        })
        .map_err(|e| refuse(e.to_string()))
    }
}

impl Drop for Kernels {
    /// A module unloads itself, but only while its context is current.
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            self.modules.clear();
        }
    }
}
