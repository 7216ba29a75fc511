//! The kernels' own rings (kernels/doorbell.cuh, relay.cuh, built as C++) against the host's.

mod common;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use common::emu::{gpus, gpus_of};
use fuselink::channel::KernelStatus;
use fuselink::doorbell::{Class, Doorbell};
use fuselink::emu::EmuGpu;
use fuselink::engine::Publish;
use fuselink::hw::contract::rig::{PUT_QUEUE, Rig, RigConfig, Stream};
use fuselink::hw::{Gpu, Kernel};
use fuselink::payload::Pattern;
use fuselink::topo::{NicIdx, Rank};

const PATIENCE: Duration = Duration::from_secs(30);
const MESSAGE: u64 = 256;

type Emulated<'a> = Rig<'a, EmuGpu>;

fn pattern() -> Pattern {
    Pattern::new(1, 1, Rank(0), Rank(1))
}

fn stream(bytes: u64) -> Stream {
    Stream { offset: 0, bytes, message_bytes: MESSAGE }
}

fn fill(gpu: &EmuGpu, rig: &Emulated, bytes: u64) {
    let mut data = vec![0; bytes as usize];
    pattern().fill(0, &mut data);
    gpu.write(rig.data_dev_ptr(), &data).unwrap();
}

fn assert_filled(gpu: &EmuGpu, dev_ptr: u64, offset: u64, bytes: u64) {
    let mut data = vec![0; bytes as usize];
    gpu.read(dev_ptr, &mut data).unwrap();
    assert_eq!(pattern().mismatches(offset, &data), 0, "bytes from {offset}");
}

/// Goes on until `step` has nothing left to do.
fn drive(what: &str, mut step: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while step() {
        assert!(Instant::now() < deadline, "{what} takes too long");
        std::thread::yield_now();
    }
}

/// Which messages of a queue have rung.
struct Heard {
    rang: Vec<bool>,
    left: u64,
}

impl Heard {
    fn new(messages: u64) -> Self {
        Self { rang: vec![false; messages as usize], left: messages }
    }

    fn take(&mut self, doorbell: Doorbell) -> u64 {
        let Doorbell::Send { class: Class::Put, queue: PUT_QUEUE, idx, bytes: MESSAGE, signal: None } =
            doorbell
        else {
            panic!("{doorbell:?}")
        };
        assert!(!std::mem::replace(&mut self.rang[idx as usize], true), "message {idx} rang twice");
        self.left -= 1;
        idx
    }
}

/// Blocks on several threads, rings far smaller than the stream: every message rings once, with its bytes in the slot.
#[test]
fn many_blocks_ring_and_nothing_is_lost_or_doubled() {
    let gpus = gpus_of(4, 1 << 40);
    for (doorbell_rings, doorbell_capacity, armed_depth) in [(1, 4, 16), (2, 8, 8), (4, 1, 2)] {
        let config = RigConfig { doorbell_rings, doorbell_capacity, armed_depth, ..RigConfig::default() };
        let (messages, depth) = (2000, u64::from(armed_depth));
        let mut rig = Rig::new(&gpus.gpu, config);
        fill(&gpus.gpu, &rig, messages * MESSAGE);
        rig.launch(Kernel::Put, 4, stream(messages * MESSAGE)).unwrap();
        let (mut heard, mut armed, mut oldest) = (Heard::new(messages), 0, 0);
        drive("hearing the doorbells", || {
            // A slot is armed again only when the message in it has been read.
            while oldest < messages && heard.rang[oldest as usize] {
                oldest += 1;
            }
            while armed < messages && armed < oldest + depth {
                rig.arm(armed, armed % depth * MESSAGE);
                armed += 1;
            }
            for ring in 0..doorbell_rings as usize {
                while let Some(doorbell) = rig.hear(ring) {
                    let idx = heard.take(doorbell);
                    let slot = rig.slots_dev_ptr() + idx % depth * MESSAGE;
                    assert_filled(&gpus.gpu, slot, idx * MESSAGE, MESSAGE);
                }
                rig.proxy.doorbells[ring].publish();
            }
            heard.left > 0
        });
        gpus.gpu.synchronize(PATIENCE).unwrap();
        assert!((0..doorbell_rings as usize).all(|ring| rig.hear(ring).is_none()));
        assert_eq!(rig.status(), None);
    }
}

/// A host that does not listen stops the kernel at a full ring, and the kernel goes on when it listens again.
#[test]
fn a_ring_that_nobody_reads_holds_the_kernel_up() {
    let gpus = gpus();
    let (capacity, messages, blocks) = (4, 64, 2);
    let config = RigConfig { doorbell_capacity: capacity, armed_depth: 64, ..RigConfig::default() };
    let mut rig = Rig::new(&gpus.gpu, config);
    (0..messages).for_each(|idx| rig.arm(idx, idx * MESSAGE));
    let params = rig.launch(Kernel::Put, blocks, stream(messages * MESSAGE)).unwrap();
    let next = || {
        let (mut word, at) = ([0; 8], std::mem::offset_of!(fuselink::abi::FlPut, next));
        gpus.gpu.read(params + at as u64, &mut word).unwrap();
        u64::from_ne_bytes(word)
    };
    // The ring is full, and each block stands before it with one message more.
    let stuck = capacity + u64::from(blocks);
    drive("filling the ring", || next() < stuck);
    let still_full = gpus.gpu.synchronize(Duration::from_millis(20));
    assert!(still_full.is_err());
    assert_eq!(next(), stuck);
    let mut heard = Heard::new(messages);
    drive("emptying the ring", || {
        while let Some(doorbell) = rig.hear(0) {
            heard.take(doorbell);
        }
        rig.proxy.doorbells[0].publish();
        heard.left > 0
    });
    gpus.gpu.synchronize(PATIENCE).unwrap();
}

/// A kernel keeps what it was told while the host was away: doorbells of several launches come in order.
#[test]
fn launches_share_a_ring_in_order() {
    let gpus = gpus();
    let mut rig = Rig::new(&gpus.gpu, RigConfig { doorbell_capacity: 64, ..RigConfig::default() });
    for launch in 0..3 {
        (0..3).for_each(|i| rig.arm(3 * launch + i, i * MESSAGE));
        rig.launch(Kernel::Put, 1, stream(3 * MESSAGE)).unwrap();
        gpus.gpu.synchronize(PATIENCE).unwrap();
    }
    let rang: Vec<_> = std::iter::from_fn(|| rig.hear(0)).collect();
    let expected =
        |idx| Doorbell::Send { class: Class::Put, queue: PUT_QUEUE, idx, bytes: MESSAGE, signal: None };
    assert_eq!(rang, (0..9).map(expected).collect::<Vec<_>>());
}

fn arrival(seq: u64, slot: u32, bytes: u64) -> Publish {
    Publish { class: Class::Put, src: Rank(0), seq, bytes: bytes as u32, nic: NicIdx(3), slot }
}

/// Carries what a sending rig rings to a receiving one, the newest first: a network that reorders.
struct Carrier {
    waiting: Vec<u64>,
    free: VecDeque<u32>,
    drained: u64,
}

impl Carrier {
    fn bytes_of(total: u64, idx: u64) -> u64 {
        (total - idx * MESSAGE).min(MESSAGE)
    }

    fn carry(&mut self, from: (&EmuGpu, &Emulated), to: (&EmuGpu, &mut Emulated), total: u64) {
        while !self.waiting.is_empty() && !self.free.is_empty() {
            let (Some(idx), Some(slot)) = (self.waiting.pop(), self.free.pop_front()) else { return };
            let mut bytes = vec![0; Self::bytes_of(total, idx) as usize];
            from.0.read(from.1.slots_dev_ptr() + idx % 8 * MESSAGE, &mut bytes).unwrap();
            let slot_dev_ptr = to.1.slots_dev_ptr() + u64::from(slot) * MESSAGE;
            to.0.write(slot_dev_ptr, &bytes).unwrap();
            to.1.proxy.publish(&arrival(idx, slot, bytes.len() as u64), slot_dev_ptr);
        }
    }

    fn take_back(&mut self, rig: &mut Emulated) {
        while let Some(doorbell) = rig.hear(0) {
            let Doorbell::Drained { class: Class::Put, nic: NicIdx(3), slot } = doorbell else {
                panic!("{doorbell:?}")
            };
            assert!(!self.free.contains(&slot), "slot {slot} came back twice");
            self.free.push_back(slot);
            self.drained += 1;
        }
        rig.proxy.doorbells[0].publish();
    }
}

/// fl_put on one GPU, fl_take on another, and between them a host that carries slots in disorder.
#[test]
fn what_is_put_is_taken() {
    let gpus = gpus();
    let (sender, receiver) = (&gpus.gpu, &gpus.peer);
    let (messages, total) = (500, 499 * MESSAGE + 7);
    let mut put = Rig::new(sender, RigConfig::default());
    let mut take = Rig::new(receiver, RigConfig::default());
    fill(sender, &put, total);
    put.launch(Kernel::Put, 3, stream(total)).unwrap();
    take.launch(Kernel::Take, 3, stream(total)).unwrap();
    let mut carrier = Carrier { waiting: Vec::new(), free: (0..8).collect(), drained: 0 };
    let (mut rung, mut armed) = (0, 0);
    drive("the stream", || {
        // Eight at a time: all slots of a batch have been carried before they are armed again.
        if rung == armed && carrier.waiting.is_empty() && armed < messages {
            let batch = armed..(armed + 8).min(messages);
            armed = batch.end;
            batch.for_each(|idx| put.arm(idx, idx % 8 * MESSAGE));
        }
        while let Some(Doorbell::Send { idx, bytes, .. }) = put.hear(0) {
            assert_eq!(bytes, Carrier::bytes_of(total, idx));
            carrier.waiting.push(idx);
            rung += 1;
        }
        put.proxy.doorbells[0].publish();
        carrier.carry((sender, &put), (receiver, &mut take), total);
        carrier.take_back(&mut take);
        carrier.drained < messages
    });
    sender.synchronize(PATIENCE).unwrap();
    receiver.synchronize(PATIENCE).unwrap();
    assert_eq!((put.status(), take.status()), (None, None));
    assert_filled(receiver, take.data_dev_ptr(), 0, total);
}

/// A sender that makes up messages must not write outside of the buffer.
#[test]
fn a_message_that_is_not_in_the_stream_stops_the_kernel() {
    let gpus = gpus();
    for (seq, bytes) in [(2, MESSAGE), (0, MESSAGE - 1), (1, MESSAGE), (1 << 40, 8)] {
        let mut take = Rig::new(&gpus.gpu, RigConfig::default());
        take.launch(Kernel::Take, 1, stream(MESSAGE + 8)).unwrap();
        let slot_dev_ptr = take.slots_dev_ptr();
        take.proxy.publish(&arrival(seq, 0, bytes), slot_dev_ptr);
        gpus.gpu.synchronize(PATIENCE).unwrap();
        assert_eq!(take.status(), Some(KernelStatus::BadArrival { src: 0, seq }));
    }
}
