//! What it costs to switch to memory beside another NIC: by table (the next message is armed with another address), and
//! by remap on the emulated GPU, split into drain, unmap and map. One JSON line. `cargo bench --bench switch`.
//!
//! The emulated GPU's remap is two mmap calls of this host: it shows the split, not a GPU's figures (FuseLink, OSDI'25:
//! 95 to 193 us).

mod machine;

use std::hint::black_box;
use std::time::{Duration, Instant};

use fuselink::emu::{EmuGpu, EmuGpuConfig, ScaleupLinks};
use fuselink::hw::contract::rig::{PUT_QUEUE, Rig, RigConfig, Stream};
use fuselink::hw::{Gpu, Kernel, Window};
use fuselink::shm::SharedMemory;
use fuselink::topo::GpuIdx;

/// FuseLink's chunk.
const MESSAGE: u64 = 512 << 10;
/// A rig has parameters for 64 launches.
const REMAPS: u64 = 63;
const BATCH: u64 = 1000;
const SAMPLES: usize = 1001;
const PATIENCE: Duration = Duration::from_secs(20);

fn gpus() -> [EmuGpu; 2] {
    let memory = SharedMemory::create("fuselink-bench", ScaleupLinks::words(2)).expect("memory");
    [0, 1].map(|idx| {
        let links = ScaleupLinks::new(memory.words(), 1 << 40);
        EmuGpu::new(EmuGpuConfig { idx: GpuIdx(idx), resident_blocks: 1, links, memory_bytes: None })
            .expect("an emulated GPU")
    })
}

fn ns(begin: Instant) -> f64 {
    begin.elapsed().as_nanos() as f64
}

/// Median and 99th percentile.
fn summary(mut ns: Vec<f64>) -> [f64; 2] {
    ns.sort_by(f64::total_cmp);
    [ns[ns.len() / 2], ns[ns.len() * 99 / 100]]
}

/// Arming slots beside two NICs in turn.
fn by_table(gpu: &EmuGpu) -> [f64; 2] {
    let rig = Rig::new(gpu, RigConfig::default());
    let slots = [rig.slots_dev_ptr(), rig.slots_dev_ptr() + MESSAGE];
    let sample = |n| {
        let begin = Instant::now();
        for i in 0..BATCH {
            let idx = n as u64 * BATCH + i;
            rig.proxy.arm(PUT_QUEUE, black_box(idx), black_box(slots[(idx % 2) as usize]), idx);
        }
        ns(begin) / BATCH as f64
    };
    summary((0..SAMPLES).map(sample).collect())
}

/// Medians of drain (one message under way), unmap and map of one granule.
fn by_remap([gpu, peer]: &[EmuGpu; 2]) -> [[f64; 2]; 3] {
    let mut rig = Rig::new(gpu, RigConfig::default());
    let granule = gpu.granularity_bytes();
    let chunks = [gpu, peer].map(|g| g.create_chunk(granule).expect("memory"));
    let mut window = gpu.reserve_window(granule).expect("addresses");
    window.map(0, &chunks[0]).expect("map");
    let mut parts = [const { Vec::new() }; 3];
    for n in 0..REMAPS {
        let stream = Stream { offset: 0, bytes: MESSAGE, message_bytes: MESSAGE };
        rig.launch(Kernel::Put, 1, stream).expect("launch");
        rig.proxy.arm(PUT_QUEUE, n, window.dev_ptr(), 0);
        let begin = Instant::now();
        gpu.synchronize(PATIENCE).expect("the message is stored");
        parts[0].push(ns(begin));
        let begin = Instant::now();
        window.unmap(0).expect("unmap");
        parts[1].push(ns(begin));
        let begin = Instant::now();
        window.map(0, &chunks[(n + 1) as usize % 2]).expect("map");
        parts[2].push(ns(begin));
        rig.await_doorbell();
    }
    parts.map(summary)
}

fn main() {
    let gpus = gpus();
    let table = by_table(&gpus[0]);
    let [drain, unmap, map] = by_remap(&gpus);
    println!(
        "{{\"name\":\"switch\",\"table_p50_ns\":{:.1},\"table_p99_ns\":{:.1},\"remap_bytes\":{},\
         \"drain_message_bytes\":{MESSAGE},\"drain_p50_ns\":{:.0},\"unmap_p50_ns\":{:.0},\"map_p50_ns\":{:.0},\
         \"drain_p99_ns\":{:.0},\"unmap_p99_ns\":{:.0},\"map_p99_ns\":{:.0},\"machine\":\"{}\"}}",
        table[0],
        table[1],
        gpus[0].granularity_bytes(),
        drain[0],
        unmap[0],
        map[0],
        drain[1],
        unmap[1],
        map[1],
        machine::name()
    );
}
