//! The emulated machine keeps the rules of `hw`.

mod common;

use std::time::Duration;

use common::emu::{Pair, gpus};
use fuselink::hw::contract::rig::{PUT_QUEUE, Rig, RigConfig, Stream};
use fuselink::hw::{Gpu, HwError, Kernel, Window};

mod memory {
    fuselink::contract!(memory, super::gpus(), []);
}

mod kernels {
    fuselink::contract!(kernels, super::gpus(), []);
}

mod nic {
    fuselink::contract!(nic, super::Pair::new(), []);
}

/// All rules but that of inline writes, which do not reach memory behind a stage.
mod staged_nic {
    fuselink::contract!(@each nic, super::Pair::staged(), [],
        bytes_are_there_before_their_arrival
        bytes_are_there_before_the_completion
        immediate_and_length_come_intact
        work_is_done_in_order_on_a_path
        a_full_queue_takes_a_prefix_and_loses_nothing
        both_ends_send_at_once
        a_bad_path_is_refused
        a_bad_key_is_refused
        a_span_outside_of_its_memory_is_refused
        work_before_a_bad_item_is_done
        a_remote_address_out_of_range_completes_with_an_error
        an_unknown_remote_key_completes_with_an_error
        memory_that_is_not_beside_the_nic_is_refused
        counters_count_payload_in_both_directions
    );
}

mod registrar {
    fuselink::contract!(registrar, super::Pair::new(), []);
}

mod staged_registrar {
    fuselink::contract!(registrar, super::Pair::staged(), []);
}

mod link {
    fuselink::contract!(link, super::Pair::new(), []);
}

mod fence {
    fuselink::contract!(fence, super::Pair::new(), []);
}

mod staged_fence {
    fuselink::contract!(@each fence, super::Pair::staged(), [],
        an_idle_path_drains
        each_item_ends_once_before_its_path_has_drained
        nothing_lands_after_a_path_has_drained
    );
}

mod paths {
    fuselink::contract!(paths, super::Pair::new(), []);
}

/// A real GPU faults; the emulated one says where.
#[test]
fn a_kernel_that_touches_unmapped_memory_is_reported() {
    let gpus = gpus();
    let mut rig = Rig::new(&gpus.gpu, RigConfig::default());
    let nowhere = gpus.gpu.reserve_window(1).unwrap();
    rig.proxy.arm(PUT_QUEUE, 0, nowhere.dev_ptr(), 0);
    rig.launch(Kernel::Put, 1, Stream { offset: 0, bytes: 64, message_bytes: 64 }).unwrap();
    let result = gpus.gpu.synchronize(Duration::from_secs(20));
    let at = nowhere.dev_ptr();
    assert!(matches!(result, Err(HwError::NotMapped { dev_ptr, .. }) if dev_ptr == at), "{result:?}");
}
