//! Launches that a program captures in a graph and replays: every byte and every signal of every round.

use std::sync::Mutex;

use fuselink::comm::{CommError, Communicator, UserLaunch};
use fuselink::cuda::sys::CUstream;
use fuselink::doorbell::Doorbell;
use fuselink::hw::contract::PATIENCE;
use fuselink::hw::contract::rig::{Rig, RigConfig, Stream};
use fuselink::hw::{Gpu, HwError, Kernel, Launch};

use crate::collective::on_cuda;
use crate::common::replay;
use crate::driver::Graph;
use crate::on_gpu;

/// Rounds in one graph.
const IN_GRAPH: u64 = 4;

pub fn puts_are_replayed() {
    replay_puts(2);
}

/// From kernel to kernel.
pub fn puts_within_a_server_are_replayed() {
    replay_puts(1);
}

/// Kernels with the device header, over real proxies. The capture is of the strictest kind while the proxies of all ranks work on
/// streams of their own.
fn replay_puts(servers: u32) {
    let _turn = on_gpu::turn();
    // Instantiating may wait for kernels of the other rank: one at a time, and a barrier before any launch.
    let capturing = Mutex::new(());
    replay::run(&on_cuda(replay::replay_config(servers)), |comm, launch| {
        let _context = on_gpu::program_context();
        let stream = comm.cuda_stream().expect("a real GPU has one") as CUstream;
        let one_at_a_time = capturing.lock().unwrap();
        let graph = Graph::capture(stream, || {
            (0..IN_GRAPH).for_each(|_| comm.launch_prepared(launch).unwrap());
            assert_refused(comm);
        });
        drop(one_at_a_time);
        comm.barrier()?;
        (0..replay::ROUNDS / IN_GRAPH).for_each(|_| graph.launch(stream));
        comm.synchronize()?;
        comm.barrier()
    });
}

/// What a graph cannot repeat is refused, and leaves the capture as it was.
fn assert_refused(comm: &mut Communicator) {
    let launch = UserLaunch { name: "test_replay_put", blocks: 1, params: &[0; 8], buffers: &[] };
    let refusals =
        [comm.launch(launch), comm.prepare(launch).map(drop), comm.alloc(1).map(drop), comm.synchronize()];
    for refusal in refusals {
        assert!(matches!(refusal, Err(CommError::Hw(HwError::Capturing { .. }))), "{refusal:?}");
    }
}

/// The library's own kernel of a stream, whose host is the test.
pub fn a_stream_kernel_is_replayed() {
    const MESSAGE: u64 = 4096;
    let gpus = on_gpu::gpus();
    let _context = on_gpu::program_context();
    let gpu = &gpus.gpu;
    let mut rig = Rig::new(gpu, RigConfig::default());
    let (messages, replays) = (5, 8);
    let whole = Stream { offset: 0, bytes: messages * MESSAGE, message_bytes: MESSAGE };
    let stream = gpu.raw_stream() as CUstream;
    let mut params_dev_ptr = 0;
    let graph = Graph::capture(stream, || {
        params_dev_ptr = rig.launch(Kernel::Put, 2, whole).unwrap();
        gpu.launch(Launch { kernel: Kernel::Put, blocks: 3, params_dev_ptr }).unwrap();
    });
    (0..replays).for_each(|_| graph.launch(stream));
    // Each replay is the stream twice.
    for replay in 0..2 * replays {
        let round = replay * messages..(replay + 1) * messages;
        let bytes: Vec<u8> = (0..messages * MESSAGE).map(|i| (i * 7 + i / 251 + replay) as u8).collect();
        gpu.write(rig.data_dev_ptr(), &bytes).unwrap();
        for idx in round.clone() {
            rig.arm(idx, (idx - round.start) * MESSAGE);
        }
        for _ in round.clone() {
            let Doorbell::Send { idx, bytes: MESSAGE, .. } = rig.await_doorbell() else {
                panic!("not a send")
            };
            assert!(round.contains(&idx), "message {idx} in {round:?}");
        }
        let mut sent = vec![0; bytes.len()];
        gpu.read(rig.slots_dev_ptr(), &mut sent).unwrap();
        assert!(sent == bytes, "the bytes of round {replay} are not as written");
    }
    gpu.synchronize(PATIENCE).unwrap();
    assert_eq!(rig.status(), None);
}
