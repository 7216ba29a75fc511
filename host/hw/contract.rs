//! The rules that every implementation of the traits must keep, as functions that its tests call.
//!
//! Each rule is named for what goes wrong without it, takes a fixture, and panics with what it saw. An implementation
//! writes its fixtures ([`Gpus`], [`NicPair`]) and has all rules of a part as tests of their own:
//!
//! ```ignore
//! mod memory {
//!     fuselink::contract!(memory, my_gpus(), [#[ignore = "needs two GPUs"]]);
//! }
//! ```

pub mod fence;
pub mod kernels;
pub mod link;
pub mod memory;
pub mod nic;
mod pair;
pub mod registrar;
pub mod rig;

pub use pair::{Cable, End, NicPair, Third};

use std::time::Duration;

use crate::hw::Gpu;

/// Longest wait for something that takes an instant when it works.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Two GPUs of one server, each as its own process would see it.
pub struct Gpus<G: Gpu> {
    /// The GPU under test.
    pub gpu: G,
    /// Another one, which it reaches over scale-up.
    pub peer: G,
}

/// One `#[test]` for each rule of a part (`memory`, `kernels`, `nic`, `registrar`, `link`, `fence` or `paths`), each with a fresh fixture from the
/// expression given. The attributes in brackets go to every test.
#[macro_export]
macro_rules! contract {
    (memory, $fixture:expr, $attrs:tt) => {
        $crate::contract! { @each memory, $fixture, $attrs,
            fresh_memory_is_zero
            sizes_are_rounded_up_to_the_granularity
            an_unaligned_mapping_is_refused
            a_mapping_outside_of_the_window_is_refused
            an_overlapping_mapping_is_refused
            a_mapping_goes_as_a_whole
            unmapped_addresses_can_be_mapped_again
            one_chunk_in_two_windows_is_the_same_memory
            remap_keeps_the_address_and_swaps_the_bytes
            remap_to_another_size_is_refused_and_the_old_stays
            remap_of_nothing_is_refused
            an_imported_chunk_is_the_same_memory
            an_import_of_too_few_bytes_is_refused
            memory_outlives_the_chunk_that_was_mapped
            host_access_outside_of_mappings_is_refused
            host_access_runs_over_neighbouring_mappings
            mapped_host_memory_is_seen_by_the_gpu
        }
    };
    (kernels, $fixture:expr, $attrs:tt) => {
        $crate::contract! { @each kernels, $fixture, $attrs,
            parameters_outside_of_memory_are_refused
            parameters_past_the_end_of_memory_are_refused
            a_grid_without_blocks_is_refused
            a_launch_waits_for_the_one_before
            more_blocks_than_can_be_resident_all_run
            a_launch_can_be_repeated_with_its_parameters
            synchronize_gives_up_and_kernels_can_be_told_to
        }
    };
    (nic, $fixture:expr, $attrs:tt) => {
        $crate::contract! { @each nic, $fixture, $attrs,
            bytes_are_there_before_their_arrival
            bytes_are_there_before_the_completion
            immediate_and_length_come_intact
            work_is_done_in_order_on_a_path
            a_full_queue_takes_a_prefix_and_loses_nothing
            both_ends_send_at_once
            a_bad_path_is_refused
            a_bad_key_is_refused
            a_span_outside_of_its_memory_is_refused
            an_inline_write_that_is_too_long_is_refused
            work_before_a_bad_item_is_done
            a_remote_address_out_of_range_completes_with_an_error
            an_unknown_remote_key_completes_with_an_error
            memory_that_is_not_beside_the_nic_is_refused
            a_path_to_an_endpoint_of_another_nic_is_refused
            an_inline_write_is_there_before_the_write_after_it
            inline_writes_land_whole_and_unannounced
            counters_count_payload_in_both_directions
        }
    };
    (registrar, $fixture:expr, $attrs:tt) => {
        $crate::contract! { @each registrar, $fixture, $attrs,
            memory_registered_by_another_thread_carries
            a_key_that_was_taken_back_is_refused
            a_write_to_memory_that_was_taken_back_fails
            a_key_does_not_open_what_is_registered_after_it
            a_key_is_taken_back_once
        }
    };
    (link, $fixture:expr, $attrs:tt) => {
        $crate::contract! { @each link, $fixture, $attrs,
            nothing_passes_a_link_that_is_down
            queued_work_completes_when_the_link_goes_down
            inline_writes_complete_when_the_link_is_down
            a_peer_whose_link_is_down_is_not_reached
            each_change_of_the_link_is_reported_once
            a_link_that_is_back_carries_again
        }
    };
    (fence, $fixture:expr, $attrs:tt) => {
        $crate::contract! { @each fence, $fixture, $attrs,
            an_idle_path_drains
            each_item_ends_once_before_its_path_has_drained
            nothing_lands_after_a_path_has_drained
            nothing_lands_at_an_end_that_closed_alone
            work_on_a_closed_path_fails_and_does_nothing
            ends_close_and_open_in_any_order
            a_path_closes_again_and_again
        }
    };
    (paths, $fixture:expr, $attrs:tt) => {
        $crate::contract! { @each fence, $fixture, $attrs, other_paths_go_on }
    };
    (@each $part:ident, $fixture:expr, $attrs:tt, $($rule:ident)+) => {
        $( $crate::contract! { @one $part, $fixture, $attrs, $rule } )+
    };
    (@one $part:ident, $fixture:expr, [$(#[$attr:meta])*], $rule:ident) => {
        #[test]
        $(#[$attr])*
        fn $rule() {
            $crate::hw::contract::$part::$rule(&mut $fixture);
        }
    };
}
