//! Emulated links take the time they say. NICs are driven in virtual time, so their figures are exact on any host; of
//! real time only lower bounds are asserted.

mod common;

use std::time::{Duration, Instant};

use common::emu::{Port, gpus_of, import};
use fuselink::emu::{ScaleupLinks, Wire, WireConfig};
use fuselink::hw::contract::rig::{Rig, RigConfig, Stream};
use fuselink::hw::{Gpu, Kernel, Lane, LocalSpan, Nanos, Nic, NicEvent, PathId, RemoteSpan, Work, WorkOp};
use fuselink::topo::{GpuIdx, NicId};

const PATIENCE: Duration = Duration::from_secs(20);
const MIB: u64 = 1 << 20;

/// Puts 1 MiB as one message into a slot of `rig`.
fn put_1_mib<G: Gpu>(gpu: &G, rig: &mut Rig<G>) {
    rig.arm(0, 0);
    rig.launch(Kernel::Put, 1, Stream { offset: 0, bytes: MIB, message_bytes: MIB }).unwrap();
    gpu.synchronize(PATIENCE).unwrap();
}

#[test]
fn a_copy_over_scaleup_takes_its_time() {
    let byte_per_s = 20_000_000;
    let gpus = gpus_of(2, byte_per_s);
    let slots = import(&gpus, MIB);
    let mut rig = Rig::with_slots(&gpus.gpu, RigConfig::default(), &slots);
    let begin = Instant::now();
    put_1_mib(&gpus.gpu, &mut rig);
    let least = Duration::from_nanos(MIB * 1_000_000_000 / byte_per_s);
    assert!(begin.elapsed() >= least, "{:?}, not {least:?}", begin.elapsed());
}

#[test]
fn a_copy_inside_a_gpu_takes_no_scaleup_time() {
    let gpus = gpus_of(2, MIB / 60); // A minute for the copy: a charge would show.
    let mut rig = Rig::new(&gpus.gpu, RigConfig::default());
    put_1_mib(&gpus.gpu, &mut rig);
}

#[test]
fn scaleup_ports_are_shared_by_all_who_cross_them() {
    let memory = fuselink::shm::SharedMemory::create("fuselink-test", ScaleupLinks::words(3)).unwrap();
    let links = ScaleupLinks::new(memory.words(), 1_000_000_000);
    let [a, b, c] = [0, 1, 2].map(GpuIdx);
    assert_eq!(links.reserve(a, b, 1000, 0), 1000);
    assert_eq!(links.reserve(a, c, 1000, 0), 2000, "the same way out");
    assert_eq!(links.reserve(c, b, 1000, 0), 2000, "the same way in");
    assert_eq!(links.reserve(b, a, 1000, 0), 1000, "the other direction is free");
}

const RATE: u64 = 100_000_000;
const MESSAGE: u32 = 16_384;
/// How far a NIC's schedule may lag behind the clock and still catch up (host/emu/nic.rs).
const CATCH_UP_NS: Nanos = 10_000_000;

/// Senders that never run dry, and one receiver, in virtual time.
struct Incast {
    senders: Vec<(Port, PathId)>,
    receiver: Port,
    received: Vec<u64>,
    events: Vec<NicEvent>,
}

impl Incast {
    fn new(rates: &[u64]) -> Self {
        let nic_byte_per_s = [&[RATE], rates].concat();
        let wire = Wire::create(WireConfig { nic_byte_per_s }).unwrap();
        let mut receiver = Port::new(&wire, NicId(0));
        let sender = |i| {
            let mut port = Port::new(&wire, NicId(i));
            let path = port.open_path(&receiver, NicId(0));
            (port, path)
        };
        let senders: Vec<_> = (1..=rates.len() as u32).map(sender).collect();
        for (i, (port, _)) in senders.iter().enumerate() {
            receiver.open_path(port, NicId(i as u32 + 1));
        }
        Self { received: vec![0; senders.len()], senders, receiver, events: Vec::new() }
    }

    /// Every NIC is driven once.
    fn step(&mut self, now: Nanos) {
        let key = self.receiver.remote;
        let remote = RemoteSpan { rkey: key.rkey, remote_addr: key.remote_addr };
        for (port, path) in &mut self.senders {
            let local = LocalSpan { key: port.key, offset: 0, bytes: MESSAGE };
            let op = WorkOp::Write { local, remote, imm: 0 };
            port.nic.post(&[Work { path: *path, lane: Lane::Put, op, cookie: 0 }; 300], now).unwrap();
            port.nic.poll(now, &mut self.events).unwrap();
        }
        self.events.clear();
        self.receiver.nic.poll(now, &mut self.events).unwrap();
        for event in self.events.drain(..) {
            let NicEvent::Arrived { from, bytes, .. } = event else { continue };
            self.received[from.idx() - 1] += u64::from(bytes);
        }
    }

    fn total(&self) -> u64 {
        self.received.iter().sum()
    }
}

fn bytes_in(ns: Nanos) -> u64 {
    (u128::from(RATE) * u128::from(ns) / 1_000_000_000) as u64
}

#[test]
fn a_nic_keeps_its_rate_and_never_passes_it() {
    let mut incast = Incast::new(&[RATE]);
    let (begin, step, steps) = (1, 200_000, 10_000);
    for i in 0..steps {
        let now = begin + i * step;
        incast.step(now);
        assert!(incast.total() <= bytes_in(now - begin) + u64::from(MESSAGE), "at {now}");
    }
    let most = bytes_in(steps * step);
    assert!(incast.total() >= most * 99 / 100, "{} of {most}", incast.total());
}

#[test]
fn a_host_that_stalls_does_not_make_a_nic_faster() {
    let mut incast = Incast::new(&[RATE]);
    let mut now = 1;
    for round in 0..400 {
        now += [200_000, 5_000_000, 30_000_000, 1_000_000][round % 4];
        incast.step(now);
        incast.step(now); // As often as it likes.
    }
    assert!(incast.total() <= bytes_in(now) + bytes_in(CATCH_UP_NS));
    let stalled = 100 * (30_000_000 - CATCH_UP_NS);
    assert!(incast.total() >= bytes_in(now - stalled) * 95 / 100, "short stalls are caught up with");
}

/// Runs until a sender has brought over 16 MiB; returns what each has, and when.
fn race(incast: &mut Incast) -> (Vec<u64>, Nanos) {
    for i in 1..100_000 {
        let now = i * 100_000;
        incast.step(now);
        if incast.received.iter().any(|&bytes| bytes >= 16 * MIB) {
            return (incast.received.clone(), now);
        }
    }
    panic!("nobody has finished: {:?}", incast.received);
}

#[test]
fn senders_share_a_receiver_fairly_and_its_rate_bounds_their_sum() {
    for senders in [2, 3, 7] {
        let (received, now) = race(&mut Incast::new(&vec![RATE; senders]));
        let total = received.iter().sum::<u64>();
        let share = total / senders as u64;
        for bytes in &received {
            assert!(bytes.abs_diff(share) <= share / 3, "{received:?}");
        }
        assert!(total <= bytes_in(now + CATCH_UP_NS), "{total} in {now} ns");
        assert!(total >= bytes_in(now) * 9 / 10, "the receiver was kept busy: {total} in {now} ns");
    }
}

#[test]
fn a_slow_sender_leaves_the_rest_to_the_other() {
    let (received, now) = race(&mut Incast::new(&[RATE, RATE / 10]));
    assert!(received[1].abs_diff(bytes_in(now) / 10) <= bytes_in(now) / 20, "{received:?}");
    assert!(received[0] >= bytes_in(now) * 8 / 10, "{received:?} in {now} ns");
}
