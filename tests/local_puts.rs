//! Streams within a server (kernels/local.cuh, built as C++): kernels of two GPUs with no host between them, in each scope, with
//! blocks in any order, and of a GPU to itself.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::emu::{gpus_of, gpus_with_links};
use fuselink::abi::{FlChannel, FlStream};
use fuselink::channel::{
    Channel, ChannelConfig, DeviceLayout, KernelStatus, LOCAL_DEPTH, StreamConfig, StreamLimits,
};
use fuselink::doorbell::{Class, Signal, SignalOp};
use fuselink::emu::gpu::Block;
use fuselink::emu::memory::EmuWindow;
use fuselink::emu::{BlockOrder, EmuGpu, EmuKernel};
use fuselink::hw::contract::Gpus;
use fuselink::hw::{Chunk, Gpu, HwError, Kernel, Launch, Window};

unsafe extern "C" {
    fn test_put(block: *const Block, params_dev_ptr: u64);
    fn test_produce(block: *const Block, params_dev_ptr: u64);
    fn test_take(block: *const Block, params_dev_ptr: u64);
    fn test_read(block: *const Block, params_dev_ptr: u64);
    fn test_backwards(block: *const Block, params_dev_ptr: u64);
    fn test_wait(block: *const Block, params_dev_ptr: u64);
    fn test_misuse(block: *const Block, params_dev_ptr: u64);
}

const PATIENCE: Duration = Duration::from_secs(30);
const SLOT: u32 = 512;
const SIGNALS: u32 = 4;
/// Of the job; the two GPUs are ranks 4 and 5.
const RANKS: u32 = 8;
const FIRST: u32 = 4;
const DEPTH: u64 = LOCAL_DEPTH as u64;
const DATA_BYTES: u64 = 1 << 20;

/// Mirrors `PutTest` of tests/kernels/puts.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct PutTest {
    stream: FlStream,
    data_ptr: u64,
    bytes: u64,
    items: u64,
    peer: u32,
    scope: u32,
    next: u64,
    done: u64,
}

#[derive(Clone, Copy)]
enum Test {
    Put,
    Produce,
    Take,
    Read,
    Backwards,
    Wait,
    Misuse,
}

impl Test {
    fn kernel(self) -> (&'static str, EmuKernel) {
        match self {
            Self::Put => ("test_put", test_put),
            Self::Produce => ("test_produce", test_produce),
            Self::Take => ("test_take", test_take),
            Self::Read => ("test_read", test_read),
            Self::Backwards => ("test_backwards", test_backwards),
            Self::Wait => ("test_wait", test_wait),
            Self::Misuse => ("test_misuse", test_misuse),
        }
    }
}

/// A kernel to run: `items` of `bytes`, to or from a rank.
#[derive(Clone, Copy)]
struct Run {
    test: Test,
    blocks: u32,
    items: u64,
    bytes: u64,
    peer: u32,
    scope: u32,
}

impl Run {
    fn new(test: Test, peer: u32, items: u64, bytes: u64) -> Self {
        Self { test, blocks: 1, items, bytes, peer, scope: 2 }
    }
}

/// A rank: its GPU with a channel that no proxy serves.
struct End<'a> {
    gpu: &'a EmuGpu,
    channel: Channel,
    channel_dev_ptr: u64,
    timeout: Duration,
    data: EmuWindow,
    params: EmuWindow,
    launches: u64,
    _control: Vec<EmuWindow>,
}

fn window(gpu: &EmuGpu, chunk: &Arc<<EmuGpu as Gpu>::Chunk>) -> EmuWindow {
    let mut window = gpu.reserve_window(chunk.bytes()).unwrap();
    window.map(0, chunk).unwrap();
    window
}

fn config(local_rank: u32) -> ChannelConfig {
    ChannelConfig {
        rank: FIRST + local_rank,
        local_ranks: 2,
        doorbell_rings: 1,
        doorbell_capacity: 4,
        queues: 2 + RANKS,
        work_queues: 2,
        armed_depth: 4,
        arrival_capacity: 4,
        streams: StreamConfig {
            ranks: RANKS,
            arrival_depth: 4,
            signals: SIGNALS,
            first_local_rank: FIRST,
            local_ranks: 2,
            local_rank,
            local_depth: LOCAL_DEPTH,
            local_slot_bytes: SLOT,
        },
    }
}

/// Both ranks of a server.
fn server(gpus: &Gpus<EmuGpu>) -> [End<'_>; 2] {
    let both = [&gpus.gpu, &gpus.peer];
    let bytes = DeviceLayout::new(&config(0)).bytes;
    let chunks = both.map(|gpu| gpu.create_chunk(bytes).unwrap());
    [0, 1].map(|own| {
        let gpu = both[own];
        let control: Vec<_> = (0..2)
            .map(|i| {
                let fd = chunks[i].export().unwrap();
                window(gpu, &gpu.import_chunk(fd, both[i].idx(), chunks[i].bytes()).unwrap())
            })
            .collect();
        let config = config(own as u32);
        let memory = gpu.map_host(Channel::host_bytes(&config)).unwrap();
        let channel = Channel::new(config, Arc::new(memory));
        let controls: Vec<_> = control.iter().map(Window::dev_ptr).collect();
        let (channel_dev_ptr, description) = channel.describe(controls[own], &controls, own as u32);
        // SAFETY: no padding: 32-bit fields and words.
        let description: [u8; size_of::<FlChannel>()] = unsafe { std::mem::transmute(description) };
        gpu.write(channel_dev_ptr, &description).unwrap();
        let (at, ends) = channel.local_ends(&controls);
        gpu.write(at, &ends.into_iter().flat_map(u64::to_ne_bytes).collect::<Vec<_>>()).unwrap();
        let data = window(gpu, &gpu.create_chunk(DATA_BYTES).unwrap());
        let params = window(gpu, &gpu.create_chunk(DATA_BYTES).unwrap());
        let timeout = PATIENCE;
        End { gpu, channel, channel_dev_ptr, timeout, data, params, launches: 0, _control: control }
    })
}

impl End<'_> {
    fn launch(&mut self, run: Run) -> u64 {
        let Run { test, blocks, items, bytes, peer, scope } = run;
        let limits = StreamLimits {
            class: Class::LowLatency,
            slot_bytes: SLOT,
            timeout_ns: self.timeout.as_nanos() as u64,
        };
        let stream = self.channel.stream(self.channel_dev_ptr, limits);
        let data_ptr = self.data.dev_ptr();
        let params = PutTest { stream, data_ptr, bytes, items, peer, scope, next: 0, done: 0 };
        // SAFETY: no padding (words, and pairs of 32-bit fields).
        let params: [u8; size_of::<PutTest>()] = unsafe { std::mem::transmute(params) };
        let params_dev_ptr = self.params.dev_ptr() + 1024 * self.launches;
        self.launches += 1;
        self.gpu.write(params_dev_ptr, &params).unwrap();
        let (name, entry) = test.kernel();
        // SAFETY: the kernels of tests/kernels/puts.cu take a PutTest.
        unsafe { self.gpu.add_kernel(name, entry) };
        let kernel = Kernel::Custom { name, params_bytes: size_of::<PutTest>() as u64 };
        self.gpu.launch(Launch { kernel, blocks, params_dev_ptr }).unwrap();
        params_dev_ptr
    }

    fn word(&self, dev_ptr: u64) -> u64 {
        let mut word = [0; 8];
        self.gpu.read(dev_ptr, &mut word).unwrap();
        u64::from_ne_bytes(word)
    }

    fn done(&self, params_dev_ptr: u64) -> u64 {
        self.word(params_dev_ptr + std::mem::offset_of!(PutTest, done) as u64)
    }

    /// Messages ever claimed for a rank.
    fn claimed(&self, dst: u32) -> u64 {
        let mut channel = [0; size_of::<FlChannel>()];
        self.gpu.read(self.channel_dev_ptr, &mut channel).unwrap();
        // SAFETY: what `server` wrote there; every bit pattern is an FlChannel.
        let channel: FlChannel = unsafe { std::mem::transmute(channel) };
        self.word(channel.queue_next_ptr + 8 * u64::from(channel.work_queues + dst))
    }

    fn is_running(&self) -> bool {
        matches!(self.gpu.synchronize(Duration::ZERO), Err(HwError::KernelTimeout { .. }))
    }

    fn finish(&self) {
        if let Err(e) = self.gpu.synchronize(PATIENCE) {
            panic!("{e}; the kernel says {:?}", self.channel.status());
        }
    }

    /// What `test_wait` finds: waits until signal 0 has grown by `more`, then reads signal 1.
    fn wait_for(&mut self, more: u64) -> u64 {
        self.launch(Run::new(Test::Wait, 0, more, 0));
        self.finish();
        assert_eq!(self.channel.status(), None);
        self.word(self.data.dev_ptr())
    }

    fn fill(&self, bytes: u64) -> Vec<u8> {
        let data: Vec<u8> = (0..bytes).map(|i| (i * 131 + i / 251) as u8).collect();
        self.gpu.write(self.data.dev_ptr(), &data).unwrap();
        data
    }

    fn data(&self, bytes: u64) -> Vec<u8> {
        let mut data = vec![0; bytes as usize];
        self.gpu.read(self.data.dev_ptr(), &mut data).unwrap();
        data
    }
}

impl Drop for End<'_> {
    /// Kernels that still run would touch memory that is about to go.
    fn drop(&mut self) {
        self.channel.abort();
        let _ = self.gpu.synchronize(PATIENCE);
    }
}

/// Every item is there whole, once.
fn assert_same_items(sent: &[u8], received: &[u8], bytes: u64) {
    let mut left: Vec<&[u8]> = received.chunks(bytes as usize).collect();
    for item in sent.chunks(bytes as usize) {
        let at = left.iter().position(|r| *r == item).expect("an item that came whole");
        left.swap_remove(at);
    }
}

/// Items and signals by themselves, over many laps of all rings; blocks fill their slots in any order.
#[test]
fn what_is_put_is_taken_with_its_signals() {
    let orders = [BlockOrder::Ascending, BlockOrder::Descending, BlockOrder::Random { seed: 7 }];
    for (scope, order) in orders.into_iter().enumerate() {
        for (resident, blocks) in [(1, 1), (1, 3), (3, 3)] {
            let gpus = gpus_of(resident, 1 << 40);
            gpus.gpu.set_block_order(order);
            gpus.peer.set_block_order(order);
            let [mut from, mut to] = server(&gpus);
            let (items, bytes) = (60, 500);
            let sent = from.fill(items * bytes);
            let run = |test, peer| Run { blocks, scope: scope as u32, ..Run::new(test, peer, items, bytes) };
            let put = from.launch(run(Test::Put, FIRST + 1));
            let take = to.launch(run(Test::Take, FIRST));
            from.finish();
            to.finish();
            assert_eq!((from.channel.status(), to.channel.status()), (None, None));
            assert_eq!((from.done(put), to.done(take)), (u64::from(blocks), items));
            // A place for each sequence: signals by themselves have one, too, which stays empty.
            let received = to.data(2 * items * bytes);
            let places = received.chunks(bytes as usize);
            let taken: Vec<u8> = places.filter(|p| p.iter().any(|&b| b != 0)).flatten().copied().collect();
            assert_eq!(taken.len(), sent.len());
            assert_same_items(&sent, &taken, bytes);
            let last = to.wait_for(items);
            assert!((1..=items).contains(&last) && (blocks > 1 || last == items), "{last}");
        }
    }
}

/// Slots of the receiver's are written where they lie, and read there.
#[test]
fn nothing_is_copied_in_place() {
    let (gpus, links) = gpus_with_links(2, 1 << 40);
    let [mut from, mut to] = server(&gpus);
    let (items, bytes) = (100, 200);
    from.launch(Run { blocks: 2, ..Run::new(Test::Produce, FIRST + 1, items, bytes) });
    to.launch(Run { blocks: 2, ..Run::new(Test::Read, FIRST, items, bytes) });
    from.finish();
    to.finish();
    assert_eq!(to.word(to.data.dev_ptr()), items * (items + 1) / 2);
    // The stores cross scale-up once; the loads are the receiver's own memory's.
    assert_eq!([&gpus.gpu, &gpus.peer].map(|g| links.sent_bytes(g.idx())), [items * bytes, 0]);
}

/// One GPU, one resident block: sent, waited for and taken in launches of its own, over many laps.
#[test]
fn a_rank_puts_to_itself() {
    let (gpus, links) = gpus_with_links(1, 1 << 40);
    let [mut end, _other] = server(&gpus);
    let items = DEPTH - 1;
    for round in 0..6 {
        end.launch(Run::new(Test::Backwards, FIRST, items, u64::MAX));
        assert_eq!(end.wait_for(items), items, "round {round}");
        end.gpu.write(end.data.dev_ptr(), &[0; 8]).unwrap();
        end.launch(Run::new(Test::Read, FIRST, items, 8));
        end.finish();
        assert_eq!(end.channel.status(), None, "round {round}");
        let first = round * (items + 1) + 1;
        assert_eq!(end.word(end.data.dev_ptr()), (first..first + items).sum::<u64>());
    }
    assert_eq!(links.sent_bytes(gpus.gpu.idx()), 0);
}

/// A receiver that takes nothing holds the sender; when it takes, the sender goes on where it stopped.
#[test]
fn a_full_stream_waits_and_goes_on() {
    let gpus = gpus_of(2, 1 << 40);
    let [mut from, mut to] = server(&gpus);
    let (items, bytes) = (3 * DEPTH, 496);
    from.launch(Run { blocks: 2, ..Run::new(Test::Produce, FIRST + 1, items, bytes) });
    let by = Instant::now() + PATIENCE;
    while from.claimed(FIRST + 1) < DEPTH {
        assert!(Instant::now() < by && from.is_running(), "{:?}", from.channel.status());
        std::thread::yield_now();
    }
    // It waits; whatever it may do wrong, it does now.
    assert!(from.gpu.synchronize(Duration::from_millis(50)).is_err());
    assert_eq!((from.claimed(FIRST + 1), from.channel.status()), (DEPTH, None));
    to.launch(Run::new(Test::Read, FIRST, items, bytes));
    from.finish();
    to.finish();
    assert_eq!((from.channel.status(), to.channel.status()), (None, None));
    assert_eq!(to.word(to.data.dev_ptr()), items * (items + 1) / 2);
}

/// Slots that are filled from the last to the first are shown from the first to the last, with their signals: a set that was sent
/// before others still comes after them.
#[test]
fn messages_keep_the_order_of_their_slots() {
    let gpus = gpus_of(1, 1 << 40);
    let [mut from, mut to] = server(&gpus);
    for round in 1..5 {
        let items = DEPTH - 2;
        let all = from.launch(Run::new(Test::Backwards, FIRST + 1, items, u64::MAX));
        from.finish();
        assert_eq!((from.channel.status(), from.done(all)), (None, 1), "flushed");
        assert_eq!(to.wait_for(items), items);
        to.gpu.write(to.data.dev_ptr(), &[0; 8]).unwrap();
        to.launch(Run::new(Test::Read, FIRST, items, 8));
        to.finish();
        assert_eq!(to.channel.status(), None);
        // Numbers of the stream's messages: each round has one more, the set by itself.
        let first = (round - 1) * (items + 1) + 1;
        assert_eq!(to.word(to.data.dev_ptr()), (first..first + items).sum::<u64>());
    }
}

/// A message that is claimed and not sent holds back those behind it, and their signals; a flush says so.
#[test]
fn a_missing_message_holds_back_those_behind_it() {
    let gpus = gpus_of(1, 1 << 40);
    let [mut from, mut to] = server(&gpus);
    (from.timeout, to.timeout) = (Duration::from_millis(50), Duration::from_millis(50));
    from.launch(Run::new(Test::Backwards, FIRST + 1, 6, 2));
    from.finish();
    assert_eq!(from.channel.status(), Some(KernelStatus::NotFlushed { dst: 5, messages: 7 }));
    assert_eq!(to.wait_for(2), 0, "the set comes behind the missing one");
    to.launch(Run::new(Test::Read, FIRST, 3, 8));
    to.finish();
    assert_eq!(to.channel.status(), Some(KernelStatus::NoMessage { src: 4, seq: 2 }));
}

/// Ranks of other servers, by the host, and ranks of the own one change one signal.
#[test]
fn signals_of_both_sides_add_up() {
    let gpus = gpus_of(1, 1 << 40);
    let [mut from, mut to] = server(&gpus);
    let host = to.channel.proxy_end();
    let add = |value| Signal { number: 0, op: SignalOp::Add, value };
    for round in 1..4 {
        host.signal(add(5)).unwrap();
        from.launch(Run::new(Test::Put, FIRST + 1, 2, 8));
        from.finish();
        to.launch(Run::new(Test::Wait, 0, 8, 0));
        assert!(to.gpu.synchronize(Duration::from_millis(5)).is_err(), "waits for the eighth");
        host.signal(add(1)).unwrap();
        to.finish();
        assert_eq!(to.word(to.data.dev_ptr()), 2, "round {round}: what the second item set");
        to.launch(Run::new(Test::Read, FIRST, 2, 8));
        to.finish();
    }
    assert_eq!(to.channel.status(), None);
}

#[test]
fn waits_give_up_and_say_what_for() {
    let cases = [
        (Test::Put, DEPTH + 1, KernelStatus::NoSlot { dst: 5, idx: DEPTH }),
        (Test::Take, 1, KernelStatus::NoMessage { src: 5, seq: 0 }),
        (Test::Wait, 1, KernelStatus::NoSignal { number: 0, value: 1 }),
    ];
    for (test, items, status) in cases {
        let gpus = gpus_of(1, 1 << 40);
        let [mut end, _other] = server(&gpus);
        end.timeout = Duration::from_millis(20);
        let params = end.launch(Run::new(test, FIRST + 1, items, 8));
        end.finish();
        assert_eq!(end.channel.status(), Some(status));
        assert_eq!(end.done(params), 0);
    }
}

/// The host's word ends a wait at once.
#[test]
fn a_wait_that_is_told_to_stop_does() {
    for test in [Test::Put, Test::Take, Test::Wait] {
        let gpus = gpus_of(1, 1 << 40);
        let [mut end, _other] = server(&gpus);
        end.launch(Run::new(test, FIRST + 1, DEPTH + 1, 8));
        assert!(end.gpu.synchronize(Duration::from_millis(5)).is_err(), "waits");
        end.channel.abort();
        end.finish();
        assert_eq!(end.channel.status(), Some(KernelStatus::Aborted));
    }
}

#[test]
fn misuse_is_refused() {
    // Too long; a slot that was sent before; a signal that is not there.
    let cases = [(5, 5, 8), (6, u64::from(SIGNALS), 0)];
    for (what, which, bytes) in cases {
        let gpus = gpus_of(1, 1 << 40);
        let [mut end, _other] = server(&gpus);
        let params = end.launch(Run::new(Test::Misuse, FIRST + 1, what, 0));
        end.finish();
        assert_eq!(end.channel.status(), Some(KernelStatus::BadPut { which, bytes }), "{what}");
        assert_eq!(end.done(params), 0);
    }
}
