//! One-sided puts (kernels/device.cuh, built as C++) against a host that is driven by hand, in each scope and with blocks in
//! any order.

mod common;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use common::emu::{gpus_of, gpus_with_links};
use fuselink::abi::FlStream;
use fuselink::channel::KernelStatus;
use fuselink::doorbell::{Class, Doorbell, Signal};
use fuselink::emu::gpu::Block;
use fuselink::emu::{BlockOrder, EmuGpu, EmuKernel};
use fuselink::engine::Publish;
use fuselink::hw::contract::rig::{KERNEL_PATIENCE, PUT_QUEUE, Rig, RigConfig};
use fuselink::hw::{Chunk, Gpu, HwError, Kernel, Launch};
use fuselink::topo::{NicIdx, Rank};

unsafe extern "C" {
    fn test_put(block: *const Block, params_dev_ptr: u64);
    fn test_produce(block: *const Block, params_dev_ptr: u64);
    fn test_take(block: *const Block, params_dev_ptr: u64);
    fn test_wait(block: *const Block, params_dev_ptr: u64);
    fn test_read(block: *const Block, params_dev_ptr: u64);
    fn test_misuse(block: *const Block, params_dev_ptr: u64);
    fn test_wait_value(block: *const Block, params_dev_ptr: u64);
}

const PATIENCE: Duration = Duration::from_secs(30);
const SLOT: u32 = 512;
const SLOTS: u64 = 8;
const NIC: NicIdx = NicIdx(3);

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
    Wait,
    Misuse,
    WaitValue,
}

impl Test {
    fn kernel(self) -> (&'static str, EmuKernel) {
        match self {
            Self::Put => ("test_put", test_put),
            Self::Produce => ("test_produce", test_produce),
            Self::Take => ("test_take", test_take),
            Self::Read => ("test_read", test_read),
            Self::Wait => ("test_wait", test_wait),
            Self::Misuse => ("test_misuse", test_misuse),
            Self::WaitValue => ("test_wait_value", test_wait_value),
        }
    }
}

/// One end: a GPU with its hand-driven host, and the doorbells it has heard.
struct End<'a> {
    gpu: &'a EmuGpu,
    rig: Rig<'a, EmuGpu>,
    timeout: Duration,
}

impl<'a> End<'a> {
    fn new(gpu: &'a EmuGpu, config: RigConfig) -> Self {
        Self { gpu, rig: Rig::new(gpu, config), timeout: KERNEL_PATIENCE }
    }

    /// An end whose slots lie on another GPU.
    fn with_slots_of(gpu: &'a EmuGpu, other: &EmuGpu, config: RigConfig) -> Self {
        let theirs = other.create_chunk(config.data_bytes).unwrap();
        let slots = gpu.import_chunk(theirs.export().unwrap(), other.idx(), theirs.bytes()).unwrap();
        Self { gpu, rig: Rig::with_slots(gpu, config, &slots), timeout: KERNEL_PATIENCE }
    }

    fn launch(&mut self, test: Test, blocks: u32, (items, bytes): (u64, u64), scope: u32) -> u64 {
        self.launch_at(test, blocks, (items, bytes), scope, 0)
    }

    fn launch_at(
        &mut self,
        test: Test,
        blocks: u32,
        (items, bytes): (u64, u64),
        scope: u32,
        peer: u32,
    ) -> u64 {
        let stream = self.rig.stream(SLOT, self.timeout);
        let data_ptr = self.rig.data_dev_ptr();
        let params = PutTest { stream, data_ptr, bytes, items, peer, scope, next: 0, done: 0 };
        // SAFETY: no padding (words, and pairs of 32-bit fields).
        let params: [u8; size_of::<PutTest>()] = unsafe { std::mem::transmute(params) };
        let (name, entry) = test.kernel();
        // SAFETY: the kernels of tests/kernels/puts.cu take a PutTest.
        unsafe { self.gpu.add_kernel(name, entry) };
        let params_bytes = size_of::<PutTest>() as u64;
        self.rig.launch_with(Kernel::Custom { name, params_bytes }, blocks, &params).unwrap()
    }

    fn done(&self, params_dev_ptr: u64) -> u64 {
        let (mut word, at) = ([0; 8], std::mem::offset_of!(PutTest, done) as u64);
        self.gpu.read(params_dev_ptr + at, &mut word).unwrap();
        u64::from_ne_bytes(word)
    }

    fn finish(&self) {
        if let Err(e) = self.gpu.synchronize(PATIENCE) {
            panic!("{e}; the kernel says {:?}", self.rig.status());
        }
    }

    fn fill(&self, bytes: u64) -> Vec<u8> {
        let data: Vec<u8> = (0..bytes).map(|i| (i * 131 + i / 251) as u8).collect();
        self.gpu.write(self.rig.data_dev_ptr(), &data).unwrap();
        data
    }

    fn data(&self, bytes: u64) -> Vec<u8> {
        let mut data = vec![0; bytes as usize];
        self.gpu.read(self.rig.data_dev_ptr(), &mut data).unwrap();
        data
    }
}

/// The host between two ends: arms slots, carries what rings, shows it in order, applies signals, gives slots back.
#[derive(Default)]
struct Host {
    armed: u64,
    /// Rung and not carried yet: messages behind them wait.
    rung: BTreeMap<u64, (u64, Option<Signal>)>,
    carried: u64,
    messages: u64,
    free: Vec<u32>,
    signals: Vec<Signal>,
}

impl Host {
    fn new() -> Self {
        Self { free: (0..SLOTS as u32).collect(), ..Self::default() }
    }

    fn hear_sender(&mut self, from: &mut End) {
        while self.armed < self.carried + SLOTS {
            from.rig.arm(self.armed, self.armed % SLOTS * u64::from(SLOT));
            self.armed += 1;
        }
        for ring in 0..from.rig.proxy.doorbells.len() {
            while let Some(doorbell) = from.rig.hear(ring) {
                let Doorbell::Send { class: Class::Put, queue: PUT_QUEUE, idx, bytes, signal } = doorbell
                else {
                    panic!("{doorbell:?}")
                };
                assert!(idx >= self.carried && idx < self.armed, "message {idx} was not armed");
                assert!(self.rung.insert(idx, (bytes, signal)).is_none(), "message {idx} rang twice");
            }
            from.rig.proxy.doorbells[ring].publish();
        }
    }

    /// Carries the next message if it has rung and there is a place for it.
    fn carry(&mut self, from: &mut End, to: &mut End) -> bool {
        let Some(&(bytes, signal)) = self.rung.get(&self.carried) else { return false };
        if bytes > 0 {
            let Some(slot) = self.free.pop() else { return false };
            let mut payload = vec![0; bytes as usize];
            from.gpu
                .read(from.rig.slots_dev_ptr() + self.carried % SLOTS * u64::from(SLOT), &mut payload)
                .unwrap();
            let slot_dev_ptr = to.rig.slots_dev_ptr() + u64::from(slot) * u64::from(SLOT);
            to.gpu.write(slot_dev_ptr, &payload).unwrap();
            let (class, src, seq, bytes) = (Class::Put, Rank(0), self.messages, bytes as u32);
            let arrival = Publish { class, src, seq, bytes, nic: NIC, slot };
            to.rig.proxy.publish_in_order(&arrival, slot_dev_ptr);
            self.messages += 1;
        }
        if let Some(signal) = signal {
            to.rig.proxy.signal(signal).unwrap();
            self.signals.push(signal);
        }
        self.rung.remove(&self.carried);
        self.carried += 1;
        from.rig.proxy.complete(Rank(0), self.carried);
        true
    }

    fn hear_receiver(&mut self, to: &mut End) {
        for ring in 0..to.rig.proxy.doorbells.len() {
            while let Some(doorbell) = to.rig.hear(ring) {
                let Doorbell::Drained { class: Class::Put, nic: NIC, slot } = doorbell else {
                    panic!("{doorbell:?}")
                };
                assert!(!self.free.contains(&slot), "slot {slot} came back twice");
                self.free.push(slot);
            }
            to.rig.proxy.doorbells[ring].publish();
        }
    }

    /// Until both kernels have ended.
    fn run(&mut self, from: &mut End, to: &mut End) {
        let deadline = Instant::now() + PATIENCE;
        let running =
            |e: &End| matches!(e.gpu.synchronize(Duration::ZERO), Err(HwError::KernelTimeout { .. }));
        while running(from) || running(to) {
            self.hear_sender(from);
            while self.carry(from, to) {}
            self.hear_receiver(to);
            let said = (from.rig.status(), to.rig.status());
            assert!(Instant::now() < deadline, "{} carried, the kernels say {said:?}", self.carried);
            std::thread::yield_now();
        }
        self.hear_receiver(to);
    }
}

const ORDERS: [BlockOrder; 3] =
    [BlockOrder::Ascending, BlockOrder::Descending, BlockOrder::Random { seed: 7 }];

fn config(doorbell_rings: u32, doorbell_capacity: u64) -> RigConfig {
    RigConfig { doorbell_rings, doorbell_capacity, data_bytes: 1 << 20, ..RigConfig::default() }
}

/// Items of every length, empty ones and ones of several slots among them; every byte, every signal, once.
#[test]
fn what_is_put_is_taken_with_its_signals() {
    for (n, order) in ORDERS.into_iter().enumerate() {
        for (resident, blocks) in [(1, 1), (1, 3), (3, 3)] {
            let gpus = gpus_of(resident, 1 << 40);
            gpus.gpu.set_block_order(order);
            gpus.peer.set_block_order(order);
            let (mut from, mut to) = (End::new(&gpus.gpu, config(2, 4)), End::new(&gpus.peer, config(1, 2)));
            let mut host = Host::new();
            let (items, bytes) = (40, 500);
            let sent = from.fill(items * bytes);
            let put = from.launch(Test::Put, blocks, (items, bytes), n as u32);
            let take = to.launch(Test::Take, blocks, (items, bytes), n as u32);
            host.run(&mut from, &mut to);
            assert_eq!((from.rig.status(), to.rig.status()), (None, None));
            assert_eq!(to.done(take), items);
            assert_eq!(from.done(put), u64::from(blocks), "each block flushed");
            // Blocks put items in any order; messages keep it. Signal 1 tells in which.
            let order: Vec<_> = host.signals.iter().filter(|s| s.number == 1).map(|s| s.value - 1).collect();
            assert_eq!(order.len() as u64, items);
            let mut seen = order.clone();
            seen.sort();
            assert_eq!(seen, (0..items).collect::<Vec<_>>());
            let received = to.data(items * bytes);
            let mut left: Vec<&[u8]> = received.chunks(bytes as usize).collect();
            for item in sent.chunks(bytes as usize) {
                let at = left.iter().position(|r| *r == item).expect("an item that came whole");
                left.swap_remove(at);
            }
            assert_eq!(host.free.len() as u64, SLOTS, "all slots came back");
        }
    }
}

/// A put longer than a slot is several messages, and its signal comes with the last.
#[test]
fn a_long_put_is_cut_and_signals_once() {
    let gpus = gpus_of(1, 1 << 40);
    let (mut from, mut to) = (End::new(&gpus.gpu, config(1, 4)), End::new(&gpus.peer, config(1, 4)));
    let bytes = 5 * u64::from(SLOT) + 7;
    let sent = from.fill(bytes);
    from.launch(Test::Put, 1, (1, bytes), 2);
    to.launch(Test::Take, 1, (6, SLOT.into()), 2);
    let mut host = Host::new();
    host.run(&mut from, &mut to);
    assert_eq!((from.rig.status(), to.rig.status()), (None, None));
    assert_eq!(to.data(bytes), sent);
    assert_eq!(host.signals.len(), 2, "one of the put, one by itself");
    assert_eq!((host.messages, host.carried), (6, 7));
}

/// A slot is written where it lies and sent; its bytes were never anywhere else.
#[test]
fn slots_are_filled_in_place() {
    for scope in 0..3 {
        let gpus = gpus_of(2, 1 << 40);
        let (mut from, mut to) = (End::new(&gpus.gpu, config(1, 8)), End::new(&gpus.peer, config(1, 8)));
        let (items, bytes) = (100, u64::from(SLOT));
        from.launch(Test::Produce, 2, (items, bytes), scope);
        to.launch(Test::Take, 2, (items, bytes), scope);
        Host::new().run(&mut from, &mut to);
        assert_eq!((from.rig.status(), to.rig.status()), (None, None));
        let words: Vec<u64> =
            to.data(items * bytes).chunks(8).map(|w| u64::from_ne_bytes(w.try_into().unwrap())).collect();
        assert!(words.iter().enumerate().all(|(i, &w)| w == i as u64 / (bytes / 8) + 1));
    }
}

/// Bytes that cross scale-up are charged once, whoever moves them: a copy, or a kernel that stores and loads in place.
#[test]
fn bytes_in_place_are_charged_as_copies_are() {
    let (items, bytes) = (30, 200);
    for (send, take) in [(Test::Put, Test::Take), (Test::Produce, Test::Read), (Test::Put, Test::Read)] {
        let (gpus, links) = gpus_with_links(2, 1 << 40);
        let mut from = End::with_slots_of(&gpus.gpu, &gpus.peer, config(1, 8));
        let mut to = End::with_slots_of(&gpus.peer, &gpus.gpu, config(1, 8));
        from.launch(send, 2, (items, bytes), 2);
        to.launch(take, 2, (items, bytes), 2);
        Host::new().run(&mut from, &mut to);
        assert_eq!((from.rig.status(), to.rig.status()), (None, None));
        // Out by the sender's port to its slots on the peer; and again to the receiver, whose slots are on the sender's GPU.
        assert_eq!(links.sent_bytes(gpus.gpu.idx()), 2 * items * bytes);
        assert_eq!(links.sent_bytes(gpus.peer.idx()), 0);
    }
}

/// In memory of its own GPU nothing is charged.
#[test]
fn slots_of_the_own_gpu_cost_no_scaleup() {
    let (gpus, links) = gpus_with_links(1, 1 << 40);
    let (mut from, mut to) = (End::new(&gpus.gpu, config(1, 8)), End::new(&gpus.peer, config(1, 8)));
    from.launch(Test::Produce, 1, (20, 200), 2);
    to.launch(Test::Read, 1, (20, 200), 2);
    Host::new().run(&mut from, &mut to);
    assert_eq!([&gpus.gpu, &gpus.peer].map(|gpu| links.sent_bytes(gpu.idx())), [0, 0]);
    // Message i is i + 1, over and over.
    assert_eq!(to.data(8), (20 * 21 / 2_u64).to_ne_bytes());
}

/// Launches with the same parameters, as a graph replays them: each waits for what came since the one before.
#[test]
fn a_replayed_wait_counts_on() {
    let gpus = gpus_of(1, 1 << 40);
    let mut end = End::new(&gpus.gpu, config(1, 4));
    let add = |value| Signal { number: 0, op: fuselink::doorbell::SignalOp::Add, value };
    let set = |value| Signal { number: 1, op: fuselink::doorbell::SignalOp::Set, value };
    let params_dev_ptr = end.launch(Test::Wait, 1, (3, 0), 2);
    for replay in 1..4u64 {
        assert!(end.gpu.synchronize(Duration::from_millis(5)).is_err(), "waits");
        end.rig.proxy.signal(set(10 * replay)).unwrap();
        end.rig.proxy.signal(add(3)).unwrap();
        end.finish();
        let last = end.data(8);
        assert_eq!(u64::from_ne_bytes(last.try_into().unwrap()), 10 * replay);
        let kernel = Kernel::Custom { name: "test_wait", params_bytes: size_of::<PutTest>() as u64 };
        end.gpu.launch(Launch { kernel, blocks: 1, params_dev_ptr }).unwrap();
    }
    end.rig.abort();
    end.finish();
}

/// Waits end with a reason that names what they waited for.
#[test]
fn waits_give_up_and_say_what_for() {
    let cases = [
        (Test::Put, KernelStatus::NoSlot { dst: 0, idx: 0 }),
        (Test::Take, KernelStatus::NoMessage { src: 0, seq: 0 }),
        (Test::WaitValue, KernelStatus::NoSignal { number: 0, value: 1 }),
    ];
    for (test, status) in cases {
        let gpus = gpus_of(1, 1 << 40);
        let mut end = End::new(&gpus.gpu, config(1, 4));
        end.timeout = Duration::from_millis(20);
        let params = end.launch(test, 1, (1, 8), 2);
        end.finish();
        assert_eq!(end.rig.status(), Some(status));
        assert_eq!(end.done(params), 0);
    }
}

/// A flush waits for completions, not for doorbells.
#[test]
fn a_flush_waits_until_all_is_there() {
    let gpus = gpus_of(1, 1 << 40);
    let mut end = End::new(&gpus.gpu, config(1, 8));
    end.timeout = Duration::from_millis(50);
    (0..4).for_each(|i| end.rig.arm(i, i * u64::from(SLOT)));
    end.rig.proxy.complete(Rank(0), 3);
    let params = end.launch(Test::Put, 1, (2, 8), 2);
    end.finish();
    assert_eq!(end.rig.status(), Some(KernelStatus::NotFlushed { dst: 0, messages: 4 }));
    assert_eq!(end.done(params), 0);
}

/// A kernel that gives up claims nothing: the next takes up where it stopped.
#[test]
fn who_gives_up_leaves_no_gap() {
    let gpus = gpus_of(1, 1 << 40);
    let mut end = End::new(&gpus.gpu, config(1, 8));
    end.rig.arm(0, 0);
    end.timeout = Duration::from_millis(20);
    end.launch(Test::Produce, 1, (2, 8), 2);
    end.finish();
    assert_eq!(end.rig.status(), Some(KernelStatus::NoSlot { dst: 0, idx: 1 }));
    end.timeout = KERNEL_PATIENCE;
    (1..3).for_each(|i| end.rig.arm(i, i * u64::from(SLOT)));
    end.launch(Test::Produce, 1, (2, 8), 2);
    end.finish();
    let rang: Vec<_> = std::iter::from_fn(|| end.rig.hear(0)).collect();
    let idx = |d: &Doorbell| if let Doorbell::Send { idx, .. } = d { *idx } else { panic!("{d:?}") };
    assert_eq!(rang.iter().map(idx).collect::<Vec<_>>(), [0, 1, 2]);
}

/// What names no rank or signal, or is longer than a slot, is refused and nothing rings.
#[test]
fn misuse_is_refused() {
    // What it does, with which rank or signal; the status names that, and the bytes.
    for (what, which, bytes) in [(0, 2, 0), (1, 8, 0), (2, 2, 0), (3, 0, u64::from(SLOT) + 1), (4, 9, 0)] {
        let gpus = gpus_of(1, 1 << 40);
        let mut end = End::new(&gpus.gpu, config(1, 4));
        end.rig.arm(0, 0);
        let params = end.launch_at(Test::Misuse, 1, (what, 0), 2, which);
        end.finish();
        assert_eq!(end.rig.status(), Some(KernelStatus::BadPut { which: which.into(), bytes }), "{what}");
        assert_eq!(end.done(params), 0, "{what}");
        assert_eq!(end.rig.hear(0), None, "{what}");
    }
}

/// A name that the GPU was not given is an error of the launch, not of the kernel.
#[test]
fn an_unknown_kernel_is_refused() {
    let gpus = gpus_of(1, 1 << 40);
    let mut rig = Rig::new(&gpus.gpu, RigConfig::default());
    let result = rig.launch_with(Kernel::Custom { name: "nobody", params_bytes: 8 }, 1, &[0; 8]);
    assert!(matches!(result, Err(HwError::Launch { kernel: "nobody", .. })), "{result:?}");
}
