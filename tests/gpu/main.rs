//! The CUDA backend.
//!
//! - `gpu::*` needs a GPU: `cargo test --features cuda --test gpu -- --ignored gpu::`, or `.ci/pack-gpu` for machines
//!   without cargo.
//! - All else builds a stand-in for the driver (tests/cuda_standin) and runs the same tests, and misuse of the driver,
//!   in processes of their own on it.

#[path = "../common/mod.rs"]
mod common;

mod failures;
mod misuse;
mod on_gpu;
mod standin;

/// What needs a GPU, or the stand-in for one.
mod gpu {
    mod memory {
        fuselink::contract!(memory, *crate::on_gpu::gpus(), [#[ignore = "needs a GPU"]]);
    }
    mod kernels {
        fuselink::contract!(kernels, *crate::on_gpu::gpus(), [#[ignore = "needs a GPU"]]);
    }
}
