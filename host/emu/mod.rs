//! An emulated cluster: real bytes, real time, no GPU and no RDMA device.
//!
//! - GPU memory is a memfd; a window is reserved addresses into which memfds are mapped ([`memory`]).
//! - A GPU is a few host threads, one per resident block, that run `kernels/*.cu` built as C++ ([`gpu`]).
//! - Scale-up links and NICs are *paced*: a byte that crosses them takes its time on a clock that all processes share
//!   ([`pacer`]). Rates keep the ratio of the machine described, divided by a *scale* that the host can carry
//!   ([`calibrate`]).
//! - NICs of all servers meet on one [`wire`]; it is the only thing that ranks of different servers share, and a NIC
//!   ([`nic`]) writes to the peer's memory through a descriptor, so that no rank ever maps another server's memory.
//!
//! What it does not show: latencies (the host's own scheduling stands in for them), and anything that depends on the
//! weak memory order of GPUs.

mod block_order;
pub mod calibrate;
pub mod clock;
mod gate;
pub mod gpu;
pub mod host;
mod in_place;
pub mod memory;
pub mod nic;
pub mod pacer;
mod registrations;
pub mod staging;
pub mod wire;

pub use block_order::BlockOrder;
pub use clock::MonotonicClock;
pub use gpu::{EmuGpu, EmuGpuConfig, EmuKernel};
pub use nic::EmuNic;
pub use pacer::ScaleupLinks;
pub use wire::{Wire, WireConfig};
