//! GPUs for tests, one test at a time: a test that frees memory would wait for the kernels of another.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cust::context::Context;
use cust::device::Device;
use fuselink::cuda::{CudaGpu, CudaGpuConfig, sys};
use fuselink::hw::contract::Gpus;
use fuselink::topo::GpuIdx;

static ONE_TEST: Mutex<()> = Mutex::new(());

/// Nobody else's turn until this goes.
pub fn turn() -> MutexGuard<'static, ()> {
    ONE_TEST.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Two GPUs, and the turn to use them.
pub struct Fixture {
    // Dropped before the turn ends.
    gpus: Gpus<CudaGpu>,
    _turn: MutexGuard<'static, ()>,
}

impl Deref for Fixture {
    type Target = Gpus<CudaGpu>;
    fn deref(&self) -> &Gpus<CudaGpu> {
        &self.gpus
    }
}

impl DerefMut for Fixture {
    fn deref_mut(&mut self) -> &mut Gpus<CudaGpu> {
        &mut self.gpus
    }
}

/// One GPU of this machine, at a place of its server.
pub fn open(idx: u32, ordinal: u32) -> CudaGpu {
    CudaGpu::new(CudaGpuConfig { idx: GpuIdx(idx), ordinal }).unwrap_or_else(|e| panic!("{e}"))
}

/// The first two GPUs; where there is one, it plays both.
pub fn gpus() -> Fixture {
    let turn = turn();
    let gpu = open(0, 0);
    Fixture { gpus: Gpus { gpu, peer: open(1, (count() - 1).min(1)) }, _turn: turn }
}

/// How many GPUs there are.
pub fn count() -> u32 {
    start_driver();
    Device::num_devices().unwrap()
}

/// The first GPU's primary context, current in this thread, as in a program that uses the GPU for itself.
pub fn program_context() -> Context {
    start_driver();
    Context::new(Device::get_device(0).unwrap()).unwrap()
}

fn start_driver() {
    // SAFETY: no requirement.
    assert_eq!(unsafe { sys::cuInit(0) }, sys::CUDA_SUCCESS, "start the driver");
}
