//! Launches.

use std::time::{Duration, Instant};

use super::rig::{PUT_QUEUE, Rig, RigConfig, Stream};
use super::{Gpus, PATIENCE};
use crate::abi::FlPut;
use crate::channel::KernelStatus;
use crate::doorbell::{Class, Doorbell};
use crate::hw::{Gpu, HwError, Kernel, Launch, Window};

const MESSAGE: u64 = 4096;

fn message(at: u64) -> Stream {
    Stream { offset: at * MESSAGE, bytes: MESSAGE, message_bytes: MESSAGE }
}

fn send(idx: u64) -> Doorbell {
    Doorbell::Send { class: Class::Put, queue: PUT_QUEUE, idx, bytes: MESSAGE, signal: None }
}

#[track_caller]
fn assert_refused(result: Result<(), HwError>) {
    assert!(matches!(result, Err(HwError::Launch { .. })), "{result:?}");
}

fn launch(blocks: u32, params_dev_ptr: u64) -> Launch {
    Launch { kernel: Kernel::Put, blocks, params_dev_ptr }
}

/// A wild pointer must not reach a kernel.
pub fn parameters_outside_of_memory_are_refused<G: Gpu>(gpus: &mut Gpus<G>) {
    let reserved = gpus.gpu.reserve_window(1).expect("addresses");
    for at in [0, reserved.dev_ptr(), u64::MAX] {
        assert_refused(gpus.gpu.launch(launch(1, at)));
    }
    gpus.gpu.synchronize(PATIENCE).expect("nothing runs");
}

/// Nor one whose parameters are cut off by the end of the memory.
pub fn parameters_past_the_end_of_memory_are_refused<G: Gpu>(gpus: &mut Gpus<G>) {
    let gpu = &gpus.gpu;
    let mut window = gpu.reserve_window(2 * gpu.granularity_bytes()).expect("addresses");
    window.map(0, &gpu.create_chunk(1).expect("memory")).expect("map");
    let end = window.dev_ptr() + gpu.granularity_bytes();
    assert_refused(gpu.launch(launch(1, end - size_of::<FlPut>() as u64 + 8)));
    gpu.synchronize(PATIENCE).expect("nothing runs");
}

/// It would never finish, or finish before it began.
pub fn a_grid_without_blocks_is_refused<G: Gpu>(gpus: &mut Gpus<G>) {
    let mut rig = Rig::new(&gpus.gpu, RigConfig::default());
    assert_refused(rig.launch(Kernel::Put, 0, message(0)).map(drop));
    gpus.gpu.synchronize(PATIENCE).expect("nothing runs");
}

/// Kernels of one stream share a queue: two at once would take the same messages.
pub fn a_launch_waits_for_the_one_before<G: Gpu>(gpus: &mut Gpus<G>) {
    let gpu = &gpus.gpu;
    let mut rig = Rig::new(gpu, RigConfig::default());
    let order = [2u8, 0, 1];
    for (value, at) in order.iter().map(|&n| (n + 1, u64::from(n))) {
        gpu.write(rig.data_dev_ptr() + at * MESSAGE, &[value; MESSAGE as usize]).expect("write");
        rig.launch(Kernel::Put, 2, message(at)).expect("launch");
    }
    for (idx, value) in order.iter().map(|n| n + 1).enumerate() {
        let idx = idx as u64;
        rig.arm(idx, idx * MESSAGE);
        assert_eq!(rig.await_doorbell(), send(idx));
        let mut slot = [0; MESSAGE as usize];
        gpu.read(rig.slots_dev_ptr() + idx * MESSAGE, &mut slot).expect("read");
        assert_eq!(slot, [value; MESSAGE as usize], "message {idx}");
    }
    gpu.synchronize(PATIENCE).expect("all done");
    assert_eq!(rig.status(), None);
}

/// Grids are larger than the machine; blocks that wait must not keep out those that could go on forever.
pub fn more_blocks_than_can_be_resident_all_run<G: Gpu>(gpus: &mut Gpus<G>) {
    let gpu = &gpus.gpu;
    let mut rig = Rig::new(gpu, RigConfig::default());
    let messages = 100;
    let stream = Stream { offset: 0, bytes: messages * MESSAGE, message_bytes: MESSAGE };
    let params = rig.launch(Kernel::Put, 100_000, stream).expect("launch");
    let mut heard = [false; 100];
    for idx in 0..messages {
        rig.arm(idx, idx % 8 * MESSAGE);
        let Doorbell::Send { idx, .. } = rig.await_doorbell() else { panic!("not a send") };
        assert!(!std::mem::replace(&mut heard[idx as usize], true), "message {idx} rang twice");
    }
    gpu.synchronize(PATIENCE).expect("all done");
    // The last block to ask for a message that was not there has made the parameters as they were: all blocks ran.
    assert_eq!(scratch(gpu, params), [0; 2]);
}

/// What a launch of `fl_put` or `fl_take` counts in its parameters: `next` and `moved`.
fn scratch<G: Gpu>(gpu: &G, params_dev_ptr: u64) -> [u64; 2] {
    [std::mem::offset_of!(FlPut, next), std::mem::offset_of!(FlPut, moved)].map(|at| {
        let mut word = [0; 8];
        gpu.read(params_dev_ptr + at as u64, &mut word).expect("read");
        u64::from_ne_bytes(word)
    })
}

/// A graph replays what it has captured: nobody writes new parameters.
pub fn a_launch_can_be_repeated_with_its_parameters<G: Gpu>(gpus: &mut Gpus<G>) {
    let gpu = &gpus.gpu;
    let mut rig = Rig::new(gpu, RigConfig::default());
    let (blocks, messages, launches) = (3, 5, 7);
    let stream = Stream { offset: 0, bytes: messages * MESSAGE, message_bytes: MESSAGE };
    let params = rig.launch(Kernel::Put, blocks, stream).expect("launch");
    (1..launches).for_each(|_| gpu.launch(launch(blocks, params)).expect("again"));
    for n in 0..launches {
        let mut rung: Vec<u64> = (n * messages..(n + 1) * messages)
            .map(|idx| {
                rig.arm(idx, idx % 8 * MESSAGE);
                let Doorbell::Send { idx, .. } = rig.await_doorbell() else { panic!("not a send") };
                idx
            })
            .collect();
        rung.sort_unstable();
        assert!(rung.into_iter().eq(n * messages..(n + 1) * messages), "launch {n}");
    }
    gpu.synchronize(PATIENCE).expect("all done");
    assert_eq!((scratch(gpu, params), rig.status()), ([0; 2], None));
}

/// A wait for kernels is bounded, and kernels that wait for the host can be stopped.
pub fn synchronize_gives_up_and_kernels_can_be_told_to<G: Gpu>(gpus: &mut Gpus<G>) {
    let gpu = &gpus.gpu;
    let mut rig = Rig::new(gpu, RigConfig::default());
    rig.launch(Kernel::Put, 1, message(0)).expect("launch");
    let (begin, wait) = (Instant::now(), Duration::from_millis(20));
    let result = gpu.synchronize(wait);
    assert!(matches!(result, Err(HwError::KernelTimeout { .. })), "{result:?}");
    assert!(begin.elapsed() >= wait);
    rig.abort();
    gpu.synchronize(PATIENCE).expect("stopped");
    assert_eq!(rig.status(), Some(KernelStatus::Aborted));
}
