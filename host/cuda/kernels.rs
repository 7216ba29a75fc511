//! The kernels, loaded before anything runs.
//!
//! By default the driver loads a kernel at its first launch, and waits for the GPU to do so. While other kernels wait for
//! this process that would be for ever; so all of them are loaded here.

use std::collections::HashMap;
use std::ptr::null_mut;
use std::sync::{Arc, PoisonError, RwLock};

use cust::module::Module;

use super::call::{Context, check};
use super::image::Image;
use super::stream::Stream;
use super::sys;
use crate::hw::{HwError, Kernel, Launch};

/// Threads of a block. Registers of the kernels at this size are in docs/cuda.md.
pub const BLOCK_THREADS: u32 = 512;

/// nvcc's output: machine code for each GPU generation, and PTX for later ones; and the kernels in it.
const IMAGES: [(&[u8], &[Kernel]); 2] = [
    (include_bytes!(concat!(env!("OUT_DIR"), "/all_to_all.fatbin")), &[Kernel::AllToAll]),
    (include_bytes!(concat!(env!("OUT_DIR"), "/put.fatbin")), &[Kernel::Put, Kernel::Take]),
];

/// Loads a kernel now, and not at its first launch. Its context is current.
fn load_function(context: &Context, function: sys::CUfunction) -> Result<(), HwError> {
    // SAFETY: a function of a module that is loaded and stays so.
    check(unsafe { sys::cuFuncLoad(function) })
        .map_err(|e| context.error("load a kernel ahead of its launch", e))
}

/// Whether a kernel has the parameters that it will be given: one, of 8 bytes.
fn takes_one_pointer(function: sys::CUfunction) -> bool {
    let bytes_of = |parameter| {
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: a function that is loaded; the call writes two numbers, and refuses a parameter that is not there.
        check(unsafe { sys::cuFuncGetParamInfo(function, parameter, &mut offset, &mut bytes) })
            .map_or(0, |()| bytes)
    };
    bytes_of(0) == 8 && bytes_of(1) == 0
}

/// A function's attribute, 0 where the driver has no answer.
fn attribute(function: sys::CUfunction, attribute: sys::CUfunction_attribute) -> u32 {
    let mut value = 0;
    // SAFETY: a function that is loaded; the call writes one number.
    let code = check(unsafe { sys::cuFuncGetAttribute(&mut value, attribute, function) });
    code.map_or(0, |()| value as u32)
}

/// Functions by name, and the modules that hold them.
#[derive(Default)]
struct Loaded {
    functions: HashMap<&'static str, sys::CUfunction>,
    modules: Vec<Module>,
}

/// The library's kernels, and those of the user's.
pub struct Kernels {
    context: Arc<Context>,
    own: Loaded,
    users: RwLock<Loaded>,
}

// SAFETY: functions may be launched by any thread, and stay loaded as long as this lives.
unsafe impl Send for Kernels {}
// SAFETY: as above; what changes is behind a lock.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Loads the library's kernels.
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
        let mut own = Loaded::default();
        for (image, kernels) in IMAGES {
            let module = Module::from_fatbin(image, &[]).map_err(refuse)?;
            for kernel in kernels {
                let function = module.get_function(kernel.name()).map_err(refuse)?.to_raw().cast();
                load_function(context, function)?;
                own.functions.insert(kernel.name(), function);
            }
            own.modules.push(module);
        }
        Ok(Self { context: Arc::clone(context), own, users: RwLock::default() })
    }

    /// Loads kernels of the user's, all or none. They stay as long as this does; a later one of the same name takes the
    /// place of an earlier one.
    ///
    /// # Errors
    /// [`HwError::Image`], [`HwError::NoKernel`], [`HwError::Driver`].
    pub fn add(&self, image: &[u8], names: &[&'static str]) -> Result<(), HwError> {
        let gpu = self.context.gpu();
        let refuse = |reason| HwError::Image { gpu, reason };
        let image = Image::parse(image).map_err(|e| refuse(e.to_string()))?;
        let _entered = self.context.enter()?;
        let module = image.load().map_err(|e| refuse(format!("is refused by the driver: {e}")))?;
        let found = names.iter().map(|name| Ok((*name, self.find(&module, name)?)));
        let found = found.collect::<Result<Vec<_>, HwError>>()?;
        let mut users = self.users.write().unwrap_or_else(PoisonError::into_inner);
        users.functions.extend(found);
        users.modules.push(module);
        Ok(())
    }

    /// A kernel of the user's, loaded ahead, if it is one that this library can launch.
    fn find(&self, module: &Module, name: &'static str) -> Result<sys::CUfunction, HwError> {
        let refuse = |reason| HwError::NoKernel { gpu: self.context.gpu(), kernel: name, reason };
        let function = module.get_function(name);
        let function: sys::CUfunction = function
            .map_err(|e| {
                refuse(format!(
                    "the image has none of that name ({e}); is it FL_KERNEL or extern \"C\" __global__?"
                ))
            })?
            .to_raw()
            .cast();
        if !takes_one_pointer(function) {
            return Err(refuse("its one parameter must be a pointer".to_owned()));
        }
        let threads = attribute(function, sys::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
        if threads < BLOCK_THREADS {
            let needs =
                format!("a block of it has at most {threads} threads, and {BLOCK_THREADS} are launched");
            return Err(refuse(needs));
        }
        load_function(&self.context, function)?;
        Ok(function)
    }

    fn function(&self, kernel: Kernel) -> Option<sys::CUfunction> {
        let name = kernel.name();
        match kernel {
            Kernel::Custom { .. } => {
                self.users.read().unwrap_or_else(PoisonError::into_inner).functions.get(name).copied()
            }
            _ => self.own.functions.get(name).copied(),
        }
    }

    /// How many blocks of a kernel fit a multiprocessor at once.
    ///
    /// # Errors
    /// [`HwError::Driver`].
    pub fn blocks_per_multiprocessor(&self, kernel: Kernel) -> Result<u32, HwError> {
        let Some(function) = self.function(kernel) else { return Ok(0) };
        let _entered = self.context.enter()?;
        let mut blocks = 0;
        let threads = BLOCK_THREADS as i32;
        // SAFETY: a function that is loaded; the call writes one number.
        check(unsafe { sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, function, threads, 0) })
            .map_err(|e| self.context.error("ask how many blocks fit", e))?;
        Ok(blocks as u32)
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
        let function = self
            .function(launch.kernel)
            .ok_or_else(|| refuse("this GPU was given no kernel of that name (add_kernels)".to_owned()))?;
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
            self.users.get_mut().unwrap_or_else(PoisonError::into_inner).modules.clear();
            self.own.modules.clear();
        }
    }
}
