//! NVIDIA GPUs, by the driver's interface (feature `cuda`).
//!
//! - `cust` has the device, its context and the modules with the library's kernels; what it lacks is called directly
//!   ([`sys`], bindgen output): virtual memory, dma-buf export, pinned host memory, streams that wait for nothing but
//!   themselves.
//! - A chunk is a `cuMemCreate` handle that NICs can reach, mapped once for its whole life; a window is reserved
//!   addresses into which handles are mapped as a whole (`memory.rs`).
//! - Rings live in pinned pages of the host that the GPU sees (`mapped.rs`).
//! - Kernels wait for the host, so the host may not wait for kernels: copies have a stream of their own, every wait is a
//!   poll with a deadline (`stream.rs`), and kernels are loaded before the first one runs, users' too (`kernels.rs`;
//!   `image.rs` checks what they hand in).
//! - Calls go through a table that is filled when the program starts, so that it also runs where there is no driver
//!   (`libcuda.c`).
//!
//! docs/cuda.md says what was tried on what.

mod call;
mod gpu;
mod image;
mod kernels;
mod mapped;
mod memory;
mod stream;
pub mod sys;

pub use call::Failure;
pub use gpu::{CudaGpu, CudaGpuConfig};
pub use image::ImageError;
pub use kernels::BLOCK_THREADS;
pub use mapped::CudaMapped;
pub use memory::{CudaChunk, CudaWindow};
