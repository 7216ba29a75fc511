//! A GPU with a hand-driven proxy: whoever holds the rig arms slots, hears doorbells and shows arrivals, so that kernels
//! run against exactly what a test wants them to see.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::PATIENCE;
use crate::abi::{FL_CLASS_PUT, FlChannel, FlPut, FlStream};
use crate::channel::{
    Channel, ChannelConfig, DeviceLayout, KernelStatus, ProxyEnd, StreamConfig, StreamLimits,
};
use crate::doorbell::{Class, Doorbell};
use crate::hw::{Chunk, Gpu, HwError, Kernel, Launch, Window};

/// The queue that a rig's streams use, as if there were others.
pub const PUT_QUEUE: u32 = 2;
/// Launches whose parameters fit.
const PLACES: u64 = 64;
/// Longest parameters of a kernel that is launched on a rig.
const PLACE_BYTES: u64 = 256;
/// Ranks that a rig's streams know; rank 0 is the rig's peer.
pub const RANKS: u32 = 2;
/// Signals of a rig.
pub const SIGNALS: u32 = 8;
/// How long a kernel of a rig waits before it gives up.
pub const KERNEL_PATIENCE: Duration = Duration::from_secs(30);

/// Sizes of a rig.
#[derive(Clone, Copy, Debug)]
pub struct RigConfig {
    /// Doorbell rings.
    pub doorbell_rings: u32,
    /// Descriptors per ring, a power of two.
    pub doorbell_capacity: u64,
    /// Armed slots, a power of two.
    pub armed_depth: u32,
    /// Arrivals, a power of two.
    pub arrival_capacity: u32,
    /// Bytes of device memory for payload.
    pub data_bytes: u64,
}

impl Default for RigConfig {
    fn default() -> Self {
        Self {
            doorbell_rings: 1,
            doorbell_capacity: 16,
            armed_depth: 8,
            arrival_capacity: 8,
            data_bytes: 1 << 20,
        }
    }
}

/// Bytes for `fl_put` or `fl_take`.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    /// Where it starts in the rig's data.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
    /// Of a message.
    pub message_bytes: u64,
}

/// Device memory mapped as a whole.
struct Mapped<G: Gpu> {
    window: G::Window,
}

impl<G: Gpu> Mapped<G> {
    fn of(gpu: &G, chunk: &Arc<G::Chunk>) -> Self {
        let mut window = gpu.reserve_window(chunk.bytes()).expect("addresses");
        window.map(0, chunk).expect("map");
        Self { window }
    }
}

/// The GPU, its channel and its data.
pub struct Rig<'a, G: Gpu> {
    gpu: &'a G,
    channel: Channel,
    /// The proxy's ends of the rings.
    pub proxy: ProxyEnd,
    channel_dev_ptr: u64,
    params_dev_ptr: u64,
    launches: u64,
    data: Mapped<G>,
    slots: Mapped<G>,
    _control: Mapped<G>,
}

impl<'a, G: Gpu> Rig<'a, G> {
    /// A rig whose slots lie on the GPU itself.
    pub fn new(gpu: &'a G, config: RigConfig) -> Self {
        let slots = gpu.create_chunk(config.data_bytes).expect("memory");
        Self::with_slots(gpu, config, &slots)
    }

    /// A rig whose slots lie in a chunk that may be another GPU's.
    pub fn with_slots(gpu: &'a G, config: RigConfig, slots: &Arc<G::Chunk>) -> Self {
        let sizes = ChannelConfig {
            rank: 0,
            local_ranks: 1,
            doorbell_rings: config.doorbell_rings,
            doorbell_capacity: config.doorbell_capacity,
            queues: PUT_QUEUE + RANKS,
            work_queues: PUT_QUEUE,
            armed_depth: config.armed_depth,
            arrival_capacity: config.arrival_capacity,
            streams: StreamConfig {
                ranks: RANKS,
                arrival_depth: config.arrival_capacity,
                signals: SIGNALS,
                ..StreamConfig::default()
            },
        };
        let memory = gpu.map_host(Channel::host_bytes(&sizes)).expect("host memory");
        let channel = Channel::new(sizes, Arc::new(memory));
        let params_at = DeviceLayout::new(&sizes).bytes;
        let bytes = params_at + PLACES * PLACE_BYTES;
        let control = Mapped::of(gpu, &gpu.create_chunk(bytes).expect("memory"));
        let control_dev_ptr = control.window.dev_ptr();
        let (channel_dev_ptr, description) = channel.describe(control_dev_ptr, &[control_dev_ptr], 0);
        gpu.write(channel_dev_ptr, &channel_bytes(description)).expect("write");
        Self {
            proxy: channel.proxy_end(),
            channel,
            channel_dev_ptr,
            params_dev_ptr: control_dev_ptr + params_at,
            launches: 0,
            data: Mapped::of(gpu, &gpu.create_chunk(config.data_bytes).expect("memory")),
            slots: Mapped::of(gpu, slots),
            _control: control,
            gpu,
        }
    }

    /// Where the payload starts.
    pub fn data_dev_ptr(&self) -> u64 {
        self.data.window.dev_ptr()
    }

    /// Where the slots start.
    pub fn slots_dev_ptr(&self) -> u64 {
        self.slots.window.dev_ptr()
    }

    /// Launches a stream kernel and returns where its parameters are. At most 64 launches in a rig's life.
    ///
    /// # Errors
    /// As [`Gpu::launch`].
    pub fn launch(&mut self, kernel: Kernel, blocks: u32, stream: Stream) -> Result<u64, HwError> {
        let put = FlPut {
            channel_ptr: self.channel_dev_ptr,
            data_ptr: self.data_dev_ptr() + stream.offset,
            bytes: stream.bytes,
            message_bytes: stream.message_bytes,
            peer: 0,
            msg_class: FL_CLASS_PUT,
            timeout_ns: KERNEL_PATIENCE.as_nanos() as u64,
            next: 0,
            moved: 0,
        };
        self.launch_with(kernel, blocks, &put_bytes(put))
    }

    /// Launches any kernel and returns where its parameters are.
    ///
    /// # Errors
    /// As [`Gpu::launch`].
    pub fn launch_with(&mut self, kernel: Kernel, blocks: u32, params: &[u8]) -> Result<u64, HwError> {
        assert!(self.launches < PLACES, "a rig has room for {PLACES} launches");
        assert!(params.len() as u64 <= PLACE_BYTES, "parameters of {} bytes", params.len());
        let params_dev_ptr = self.params_dev_ptr + self.launches * PLACE_BYTES;
        self.launches += 1;
        self.gpu.write(params_dev_ptr, params)?;
        self.gpu.launch(Launch { kernel, blocks, params_dev_ptr })?;
        Ok(params_dev_ptr)
    }

    /// What a kernel is given for one-sided puts.
    pub fn stream(&self, slot_bytes: u32, timeout: Duration) -> FlStream {
        let timeout_ns = timeout.as_nanos() as u64;
        self.channel.stream(self.channel_dev_ptr, StreamLimits { class: Class::Put, slot_bytes, timeout_ns })
    }

    /// Shows the kernel the slot at `offset` for message `idx` of the queue.
    pub fn arm(&self, idx: u64, offset: u64) {
        self.proxy.arm(PUT_QUEUE, idx, self.slots_dev_ptr() + offset, idx);
    }

    /// The next doorbell of a ring, if it is there. The ring's place is free for kernels only after
    /// [`publish`](crate::ring::Consumer::publish).
    pub fn hear(&mut self, ring: usize) -> Option<Doorbell> {
        self.proxy.doorbells[ring].pop().map(|words| Doorbell::decode(words).expect("a doorbell"))
    }

    /// Waits for the next doorbell of ring 0 and frees its place.
    pub fn await_doorbell(&mut self) -> Doorbell {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(doorbell) = self.hear(0) {
                self.proxy.doorbells[0].publish();
                return doorbell;
            }
            assert!(Instant::now() < deadline, "no doorbell; the kernel says {:?}", self.status());
            std::thread::yield_now();
        }
    }

    /// Why a kernel gave up, if one did.
    pub fn status(&self) -> Option<KernelStatus> {
        self.channel.status()
    }

    /// Tells the kernels to stop.
    pub fn abort(&self) {
        self.channel.abort();
    }
}

impl<G: Gpu> Drop for Rig<'_, G> {
    /// Kernels that still run would touch memory that is about to go.
    fn drop(&mut self) {
        self.channel.abort();
        if let Err(e) = self.gpu.synchronize(PATIENCE) {
            eprintln!("fuselink: a rig's kernels did not stop: {e}");
        }
    }
}

fn put_bytes(put: FlPut) -> [u8; size_of::<FlPut>()] {
    // SAFETY: same size, and FlPut has no padding (the offsets asserted in abi.rs leave none).
    unsafe { std::mem::transmute(put) }
}

fn channel_bytes(channel: FlChannel) -> [u8; size_of::<FlChannel>()] {
    // SAFETY: same size, and FlChannel has no padding (the offsets asserted in abi.rs leave none).
    unsafe { std::mem::transmute(channel) }
}
