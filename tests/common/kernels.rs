//! Users' kernels as tests hand them in: what the C++ compiler made of their sources, and what nvcc did in builds for real GPUs.

use fuselink::comm::{Communicator, UserKernel, UserKernels};
use fuselink::emu::gpu::Block;

#[cfg(feature = "cuda")]
macro_rules! image {
    ($source:literal) => {
        Some(include_bytes!(concat!(env!("OUT_DIR"), "/user/", $source, ".fatbin")))
    };
}
#[cfg(not(feature = "cuda"))]
macro_rules! image {
    ($source:literal) => {
        None
    };
}

macro_rules! user_kernels {
    ($($function:ident of $source:literal: $($kernel:ident)+;)+) => {
        unsafe extern "C" {
            $($(fn $kernel(block: *const Block, params_dev_ptr: u64);)+)+
        }
        $(pub fn $function() -> UserKernels<'static> {
            const KERNELS: &[UserKernel] =
                &[$(UserKernel { name: stringify!($kernel), emulated: Some($kernel) }),+];
            UserKernels { kernels: KERNELS, image: image!($source) }
        })+
    };
}

user_kernels! {
    exchange of "exchange": test_exchange;
    fixed of "fixed": test_fixed_write test_fixed_read test_fixed_hold;
    puts of "puts": test_put test_take test_wait;
    fused of "fused": tutorial_gemm_put tutorial_row_sums tutorial_dispatch;
    bulk of "bulk": tutorial_bulk_put tutorial_bulk_sums;
    take_any of "take_any": test_take_any;
    scatter of "scatter": test_scatter;
    replay of "replay": test_replay_put test_replay_take;
}

/// Gives a rank's GPU kernels of this file.
pub fn add(comm: &Communicator, kernels: UserKernels<'_>) {
    // SAFETY: FL_KERNEL defines them; tests launch them with the structs that their sources name.
    unsafe { comm.add_kernels(kernels) }.unwrap_or_else(|e| panic!("{e}"));
}

/// Parameter structs: words and pairs of 32-bit fields, no padding.
pub trait Params: Copy {
    fn bytes(&self) -> &[u8] {
        // SAFETY: every byte of the structs that implement this belongs to a field.
        unsafe { std::slice::from_raw_parts((&raw const *self).cast(), size_of::<Self>()) }
    }
}
