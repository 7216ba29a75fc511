//! Buffers of programs that use rustacuda.

use std::net::TcpListener;

use fuselink::comm::bootstrap::{Bootstrap, BootstrapConfig};
use fuselink::comm::{CommConfig, CommError, Communicator, GpuKind};
use fuselink::hw::HwError;
use fuselink::plan::Method;
use fuselink::topo::{Cluster, Rank, Server};
use rustacuda::context::{Context, ContextFlags};
use rustacuda::memory::{CopyDestination, DeviceBuffer, DeviceSlice};

use crate::{common, on_gpu};

const BYTES: usize = 100_001;

/// A job of one rank, in this thread: what is current here counts.
fn alone(gpu: GpuKind) -> Communicator {
    let config = common::config(&Cluster::uniform(1, Server::new(1, &[400_000], 450_000)), 1000, 16_384);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (root, secret) = (listener.local_addr().unwrap(), config.secret.clone());
    let boot = BootstrapConfig { rank: Rank(0), size: 1, root, secret, deadline: config.timeout };
    let bootstrap = Bootstrap::listen(&boot, listener).unwrap();
    Communicator::connect(CommConfig { gpu, ..config }, bootstrap).unwrap()
}

/// The context of a program that knows nothing of this library.
fn program() -> Context {
    rustacuda::init(rustacuda::CudaFlags::empty()).unwrap();
    let device = rustacuda::device::Device::get_device(0).unwrap();
    Context::create_and_push(ContextFlags::MAP_HOST, device).unwrap()
}

pub fn a_buffer_of_rustacuda_is_sent() {
    let _turn = on_gpu::turn();
    let _context = program();
    let bytes: Vec<u8> = (0..BYTES).map(|i| (i * 31 % 251) as u8).collect();
    let send = DeviceBuffer::from_slice(&bytes).unwrap();
    let mut comm = alone(GpuKind::Cuda { ordinal: Some(0) });
    let plan = comm.plan_all_to_all(&[BYTES as u64], Method::Auto).unwrap();
    let recv = comm.alloc(plan.recv_bytes()).unwrap();
    comm.all_to_all(&plan, &send, &recv).unwrap();
    // Its own calls read what came, in place.
    let mut got = vec![0; BYTES];
    // SAFETY: the buffer is that long and lives.
    let received: &DeviceSlice<u8> = unsafe { DeviceSlice::from_raw_parts(recv.rustacuda_ptr(), BYTES) };
    received.copy_to(&mut got).unwrap();
    assert!(got == bytes, "the bytes are not as sent");
}

/// Its address means nothing to an emulated GPU.
pub fn an_emulated_gpu_does_not_take_it() {
    let _turn = on_gpu::turn();
    let _context = program();
    let send = DeviceBuffer::from_slice(&[1u8; 64]).unwrap();
    let mut comm = alone(GpuKind::Emu);
    let plan = comm.plan_all_to_all(&[64], Method::Auto).unwrap();
    let recv = comm.alloc(plan.recv_bytes()).unwrap();
    let result = comm.all_to_all(&plan, &send, &recv);
    assert!(matches!(result, Err(CommError::Hw(HwError::NotMapped { .. }))), "{result:?}");
}
