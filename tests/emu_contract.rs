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

mod link {
    fuselink::contract!(link, super::Pair::new(), []);
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
