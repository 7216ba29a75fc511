//! What the host does while a kernel waits for it.

use std::time::{Duration, Instant};

use fuselink::hw::contract::PATIENCE;
use fuselink::hw::contract::rig::{Rig, RigConfig, Stream};
use fuselink::hw::{Gpu, HwError, Kernel};

use crate::on_gpu;

/// Copies in all directions end while the kernel goes on waiting.
pub fn copies_do_not_wait_for_kernels() {
    let gpus = on_gpu::gpus();
    let gpu = &gpus.gpu;
    let config = RigConfig { data_bytes: 8 << 20, ..RigConfig::default() };
    let mut rig = Rig::new(gpu, config);
    let mut mover = gpu.mover();
    rig.launch(Kernel::Put, 1, Stream { offset: 0, bytes: 64, message_bytes: 64 }).unwrap();
    let bytes: Vec<u8> = (0..5_000_001u32).map(|i| (i * 7 % 251) as u8).collect();
    gpu.write(rig.data_dev_ptr(), &bytes).unwrap();
    let copy = mover.start(rig.slots_dev_ptr(), rig.data_dev_ptr(), bytes.len() as u64).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while !mover.is_done(copy).unwrap() {
        assert!(Instant::now() < deadline, "the copy waits for the kernel");
        std::thread::yield_now();
    }
    let mut got = vec![0; bytes.len()];
    gpu.read(rig.slots_dev_ptr(), &mut got).unwrap();
    assert!(got == bytes, "the bytes are not as written");
    let waits = gpu.synchronize(Duration::from_millis(1));
    assert!(matches!(waits, Err(HwError::KernelTimeout { .. })), "the kernel has ended: {waits:?}");
}

/// What is not mapped is refused before the driver is asked.
pub fn a_mover_refuses_what_is_not_mapped() {
    let gpus = on_gpu::gpus();
    let rig = Rig::new(&gpus.gpu, RigConfig::default());
    let mut mover = gpus.gpu.mover();
    for (to, from) in [(rig.data_dev_ptr(), 0x1000), (0x1000, rig.data_dev_ptr())] {
        let result = mover.start(to, from, 64);
        assert!(matches!(result, Err(HwError::NotMapped { dev_ptr: 0x1000, .. })), "{result:?}");
    }
}
