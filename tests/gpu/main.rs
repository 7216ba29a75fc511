//! The CUDA backend.
//!
//! - `gpu::*` needs a GPU: `cargo test --features cuda --test gpu -- --ignored gpu::`, or `.ci/pack-gpu` for machines
//!   without cargo.
//! - All else builds a stand-in for the driver (tests/cuda_standin) and runs the same tests, and misuse of the driver,
//!   in processes of their own on it.

#[path = "../common/mod.rs"]
mod common;

mod beside;
mod blocks;
mod collective;
mod driver;
mod failures;
mod figures;
mod graphs;
mod misuse;
mod on_gpu;
#[cfg(feature = "rustacuda")]
mod other_crate;
mod standin;
mod users;

/// What needs a GPU, or the stand-in for one.
mod gpu {
    mod memory {
        fuselink::contract!(memory, *crate::on_gpu::gpus(), [#[ignore = "needs a GPU"]]);
    }
    mod kernels {
        fuselink::contract!(kernels, *crate::on_gpu::gpus(), [#[ignore = "needs a GPU"]]);
    }

    macro_rules! tests {
        ($from:ident: $($name:ident)+) => {
            mod $from {
                $(#[test] #[ignore = "needs a GPU"] fn $name() { crate::$from::$name(); })+
            }
        };
    }
    tests!(beside: copies_do_not_wait_for_kernels a_mover_refuses_what_is_not_mapped);
    tests!(blocks: the_default_leaves_room_for_computation);
    tests!(collective: all_to_all_by_a_plan all_to_all_by_idle_nics all_to_all_over_relays all_to_all_inside_a_server
        all_to_all_by_any_number_of_blocks);
    tests!(users: puts_between_servers puts_over_one_nic puts_within_a_server puts_of_anybody_to_anybody
        one_address_while_nics_change a_product_is_read_where_it_arrives every_token_reaches_its_expert tiles_go_by_bulk_copies
        what_cannot_be_loaded_is_named nothing_is_loaded_beside_a_kernel);
    tests!(graphs: puts_are_replayed puts_within_a_server_are_replayed a_stream_kernel_is_replayed);
    #[cfg(feature = "rustacuda")]
    tests!(other_crate: a_buffer_of_rustacuda_is_sent an_emulated_gpu_does_not_take_it);
    tests!(figures: doorbell_cost put_bandwidth remap_time);
}
