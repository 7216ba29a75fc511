//! What a GPU takes for the things that count, one JSON line each. On the stand-in the figures mean nothing.

use std::time::{Duration, Instant};

use fuselink::cuda::CudaGpu;
use fuselink::doorbell::Doorbell;
use fuselink::hw::contract::PATIENCE;
use fuselink::hw::contract::rig::{Rig, RigConfig, Stream};
use fuselink::hw::{Gpu, Kernel, Window};

use crate::on_gpu;

fn print(figure: serde_json::Value) {
    println!("{figure}");
}

fn micros(duration: Duration) -> f64 {
    duration.as_nanos() as f64 / 1e3
}

/// A stream of messages through armed slots, and how long the kernel took. All slots are armed again as they ring.
fn stream(gpu: &CudaGpu, config: RigConfig, blocks: u32, messages: u64, message_bytes: u64) -> Duration {
    let depth = u64::from(config.armed_depth);
    let mut rig = Rig::new(gpu, config);
    let mut armed = 0;
    while armed < messages.min(depth) {
        rig.arm(armed, armed % depth * message_bytes);
        armed += 1;
    }
    let begin = Instant::now();
    let whole = Stream { offset: 0, bytes: messages * message_bytes, message_bytes };
    rig.launch(Kernel::Put, blocks, whole).unwrap();
    let (mut rung, mut out_of_order) = (0, std::collections::BTreeSet::new());
    while rung < messages {
        let Doorbell::Send { idx, .. } = rig.await_doorbell() else { panic!("not a send") };
        out_of_order.insert(idx);
        // A place is armed again when every message before the one in it has rung.
        while out_of_order.remove(&rung) {
            rung += 1;
            if armed < messages {
                rig.arm(armed, armed % depth * message_bytes);
                armed += 1;
            }
        }
    }
    let took = begin.elapsed();
    gpu.synchronize(PATIENCE).unwrap();
    took
}

/// Best known: 1.973 us from one thread of an H200 (MSCCL++'s FIFO, which has no slots to wait for).
pub fn doorbell_cost() {
    let gpus = on_gpu::gpus();
    let messages = 20_000;
    let config = RigConfig { doorbell_capacity: 512, armed_depth: 512, ..RigConfig::default() };
    for blocks in [1, 4, 16] {
        let took = stream(&gpus.gpu, config, blocks, messages, 8);
        let each = micros(took) / messages as f64;
        print(
            serde_json::json!({"figure": "doorbell", "blocks": blocks, "triggers": messages, "us_per_trigger": each}),
        );
    }
}

/// A put's copy into mapped memory, against the driver's own copy of the same bytes.
pub fn put_bandwidth() {
    let gpus = on_gpu::gpus();
    let gpu = &gpus.gpu;
    let (messages, message_bytes) = (64, 1 << 20);
    let total = messages * message_bytes;
    let config =
        RigConfig { armed_depth: 64, data_bytes: total, doorbell_capacity: 64, ..RigConfig::default() };
    let copied = driver_copy(gpu, total);
    for blocks in [8, 32, 64] {
        let put = stream(gpu, config, blocks, messages, message_bytes);
        let rate = |took: Duration| total as f64 / took.as_nanos() as f64;
        print(serde_json::json!({
            "figure": "put", "blocks": blocks, "bytes": total, "message_bytes": message_bytes,
            "put_gbyte_per_s": rate(put), "memcpy_gbyte_per_s": rate(copied),
        }));
    }
}

/// Device to device, on a stream of its own; the better of two.
fn driver_copy(gpu: &CudaGpu, bytes: u64) -> Duration {
    let whole = |gpu: &CudaGpu| {
        let mut window = gpu.reserve_window(bytes).unwrap();
        window.map(0, &gpu.create_chunk(bytes).unwrap()).unwrap();
        window
    };
    let (from, to) = (whole(gpu), whole(gpu));
    let copy = || {
        let begin = Instant::now();
        gpu.copy(to.dev_ptr(), from.dev_ptr(), bytes).unwrap();
        begin.elapsed()
    };
    copy().min(copy())
}

/// A switch of the memory under an address: waiting for kernels, unmapping, mapping with access.
pub fn remap_time() {
    let gpus = on_gpu::gpus();
    let gpu = &gpus.gpu;
    let rounds = 20;
    for units in [1, 8, 32] {
        let bytes = units * gpu.granularity_bytes();
        let chunks = [gpu.create_chunk(bytes).unwrap(), gpu.create_chunk(bytes).unwrap()];
        let mut window = gpu.reserve_window(bytes).unwrap();
        window.map(0, &chunks[0]).unwrap();
        let mut times = [Duration::ZERO; 3];
        for round in 1..=rounds {
            let mut at = Instant::now();
            let mut lap = |time: &mut Duration| *time += std::mem::replace(&mut at, Instant::now()).elapsed();
            gpu.synchronize(PATIENCE).unwrap();
            lap(&mut times[0]);
            window.unmap(0).unwrap();
            lap(&mut times[1]);
            window.map(0, &chunks[round % 2]).unwrap();
            lap(&mut times[2]);
        }
        let [drain, unmap, map] = times.map(|t| micros(t) / rounds as f64);
        print(serde_json::json!({
            "figure": "remap", "bytes": bytes, "drain_us": drain, "unmap_us": unmap, "map_us": map,
        }));
    }
}
