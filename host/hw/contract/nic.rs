//! Work, completions and arrivals.

use std::os::fd::AsFd;

use super::pair::{Driver, End, Message, NicPair};
use crate::hw::{
    HwError, INLINE_BYTES, LocalKey, Nic, NicDevice, NicEvent, PathId, Registrable, Work, WorkError, WorkOp,
};

const BYTES: u32 = 4096;

fn message(i: u32) -> Message {
    Message { offset: u64::from(i % 64) * u64::from(BYTES), bytes: BYTES, imm: i }
}

fn completed(cookie: u64) -> NicEvent {
    NicEvent::Completed { cookie, result: Ok(()) }
}

fn arrived<P: NicPair>(d: &Driver<P>, from: End, m: Message) -> NicEvent {
    NicEvent::Arrived { from: d.pair.id(from), imm: m.imm, bytes: m.bytes }
}

#[track_caller]
fn assert_bad(result: Result<usize, HwError>) {
    assert!(matches!(result, Err(HwError::BadWork { .. })), "{result:?}");
}

/// Nothing was reported, carried or written.
#[track_caller]
fn assert_untouched<P: NicPair>(d: &mut Driver<P>) {
    d.settle();
    assert_eq!((d.events(End::A), d.events(End::B)), (&[][..], &[][..]));
    for end in [End::A, End::B] {
        assert_eq!(d.pair.nic(end).counters(), Default::default());
    }
    assert!(d.bytes(End::B, 0, BYTES as usize).iter().all(|&b| b == 0));
}

/// A reader that is told too early reads what was there before.
pub fn bytes_are_there_before_their_arrival<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    for i in 1..=100 {
        let m = message(0);
        d.fill(End::A, 0, BYTES as usize, i as u8);
        d.post_all(End::A, &[d.write(End::A, Message { imm: i, ..m })]);
        d.poll_until(End::B, i as usize);
        d.pair.nic(End::B).flush().expect("flush");
        assert_eq!(d.bytes(End::B, 0, BYTES as usize), vec![i as u8; BYTES as usize], "message {i}");
        d.poll_until(End::A, i as usize); // The source may be filled again only then.
    }
}

/// A sender that lends its slot too early sends what the next message wrote there.
pub fn bytes_are_there_before_the_completion<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    for i in 1..=100 {
        d.fill(End::A, 0, BYTES as usize, i as u8);
        d.post_all(End::A, &[d.write(End::A, Message { imm: i, ..message(0) })]);
        d.poll_until(End::A, i as usize);
        d.fill(End::A, 0, BYTES as usize, 0xff);
        d.poll_until(End::B, i as usize);
        assert_eq!(d.bytes(End::B, 0, BYTES as usize), vec![i as u8; BYTES as usize], "message {i}");
    }
    assert!((1..=100).map(completed).eq(d.events(End::A).iter().copied()));
}

/// The immediate says which slot; the length, how much of it. Empty messages are messages.
pub fn immediate_and_length_come_intact<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    let lengths = [0, 1, 15, 16, 4095, 4097, 1 << 20];
    let imms = [0, 1, 0x8000_0000, 0xffff_ffff, 0x1234_5678, 7, 8];
    let messages = lengths.into_iter().zip(imms).map(|(bytes, imm)| Message { offset: 0, bytes, imm });
    let messages: Vec<_> = messages.collect();
    for (n, &m) in messages.iter().enumerate() {
        d.post_all(End::A, &[d.write(End::A, m)]);
        d.poll_until(End::B, n + 1);
        assert_eq!(d.events(End::B)[n], arrived(&d, End::A, m));
    }
}

/// Sequence numbers, and a write followed by an empty one that announces it, count on it.
pub fn work_is_done_in_order_on_a_path<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    let messages: Vec<_> = (0..200).map(|i| Message { bytes: i * 7919 % BYTES, ..message(i) }).collect();
    let work: Vec<_> = messages.iter().map(|&m| d.write(End::A, m)).collect();
    d.post_all(End::A, &work);
    d.poll_until(End::B, messages.len());
    d.poll_until(End::A, messages.len());
    let arrivals: Vec<_> = messages.iter().map(|&m| arrived(&d, End::A, m)).collect();
    assert_eq!(d.events(End::B), arrivals);
    assert!((0..200).map(completed).eq(d.events(End::A).iter().copied()));
}

/// What does not fit is not taken, and what is taken comes: once.
pub fn a_full_queue_takes_a_prefix_and_loses_nothing<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    let work: Vec<_> = (0..20_000).map(|i| d.write(End::A, message(i))).collect();
    let taken = d.post(End::A, &work).expect("work is good");
    assert!(taken > 0 && taken < work.len(), "{taken} of {} taken without a poll", work.len());
    d.post_all(End::A, &work[taken..2000]);
    d.poll_until(End::B, 2000);
    d.poll_until(End::A, 2000);
    d.settle();
    let arrivals: Vec<_> = (0..2000).map(|i| arrived(&d, End::A, message(i))).collect();
    assert_eq!(d.events(End::B), arrivals);
    assert!((0..2000).map(completed).eq(d.events(End::A).iter().copied()));
}

/// Traffic of one direction must not be taken for the other's.
pub fn both_ends_send_at_once<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    let half = u64::from(BYTES) * 64;
    let at = |end: End, i| Message { offset: end as u64 * half + message(i).offset, ..message(i) };
    for end in [End::A, End::B] {
        d.fill(end, end as u64 * half, half as usize, 1 + end as u8);
        let work: Vec<_> = (0..64).map(|i| d.write(end, at(end, i))).collect();
        d.post_all(end, &work);
    }
    for end in [End::A, End::B] {
        d.poll_until(end, 128);
        assert_eq!(d.events(end).iter().filter(|e| matches!(e, NicEvent::Arrived { .. })).count(), 64);
        let from = end.other();
        assert_eq!(d.bytes(end, from as u64 * half, half as usize), vec![1 + from as u8; half as usize]);
    }
}

/// A path number comes from another process.
pub fn a_bad_path_is_refused<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    d.fill(End::A, 0, BYTES as usize, 1);
    for work in [d.write(End::A, message(0)), d.inline(0, &[1], 0)] {
        let bad = Work { path: PathId(u32::MAX), ..work };
        assert_bad(d.post(End::A, &[bad]));
    }
    assert_untouched(&mut d);
}

fn with_local(work: Work, key: LocalKey, offset: u64, bytes: u32) -> Work {
    let WorkOp::Write { mut local, remote, imm } = work.op else { panic!("not a write") };
    (local.key, local.offset, local.bytes) = (key, offset, bytes);
    Work { op: WorkOp::Write { local, remote, imm }, ..work }
}

/// So does a key.
pub fn a_bad_key_is_refused<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    d.fill(End::A, 0, BYTES as usize, 1);
    let bad = with_local(d.write(End::A, message(0)), LocalKey(u32::MAX), 0, BYTES);
    assert_bad(d.post(End::A, &[bad]));
    assert_untouched(&mut d);
}

/// The NIC would send memory that nobody gave it.
pub fn a_span_outside_of_its_memory_is_refused<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    d.fill(End::A, 0, BYTES as usize, 1);
    let (key, size) = (d.pair.key(End::A), d.pair.remote(End::A).bytes);
    for (offset, bytes) in [(size, 1), (size - 1, 2), (u64::MAX, 2), (size + 1, 0), (0, u32::MAX)] {
        let bad = with_local(d.write(End::A, message(0)), key, offset, bytes);
        assert_bad(d.post(End::A, &[bad]));
    }
    assert_untouched(&mut d);
}

/// The length comes from another process, and the buffer is short.
pub fn an_inline_write_that_is_too_long_is_refused<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    let mut bad = d.inline(0, &[1; INLINE_BYTES], 0);
    let WorkOp::Inline { len, .. } = &mut bad.op else { panic!("not inline") };
    *len += 1;
    assert_bad(d.post(End::A, &[bad]));
    assert_untouched(&mut d);
}

/// One process's nonsense does not undo what was taken before.
pub fn work_before_a_bad_item_is_done<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    let good = d.write(End::A, message(1));
    let bad = Work { path: PathId(u32::MAX), ..good };
    assert_bad(d.post(End::A, &[good, bad]));
    d.poll_until(End::B, 1);
    d.poll_until(End::A, 1);
    assert_eq!(d.events(End::B), [arrived(&d, End::A, message(1))]);
    assert_eq!(d.events(End::A), [completed(1)]);
}

#[track_caller]
fn assert_remote_access_fails<P: NicPair>(d: &mut Driver<P>, work: Work) {
    let before = d.events(End::A).len();
    d.post_all(End::A, &[work]);
    d.poll_until(End::A, before + 1);
    let refused = NicEvent::Completed { cookie: work.cookie, result: Err(WorkError::RemoteAccess) };
    assert_eq!(d.events(End::A)[before..], [refused]);
    d.settle();
    let nothing_came = d.events(End::B).iter().all(|e| matches!(e, NicEvent::Broken(_)));
    assert!(nothing_came, "{:?}", d.events(End::B));
    assert_eq!(d.pair.nic(End::B).counters().rx_bytes, 0);
}

fn with_remote(work: Work, rkey: u64, remote_addr: u64) -> Work {
    let mut work = work;
    let (WorkOp::Write { remote, .. } | WorkOp::Inline { remote, .. }) = &mut work.op;
    (remote.rkey, remote.remote_addr) = (rkey, remote_addr);
    work
}

/// A wrong credit must not overwrite what lies behind the memory.
pub fn a_remote_address_out_of_range_completes_with_an_error<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    let key = d.pair.remote(End::B);
    d.fill(End::A, 0, BYTES as usize, 1);
    let past = key.remote_addr + key.bytes - 1;
    let bad = with_remote(d.write(End::A, message(0)), key.rkey, past);
    assert_remote_access_fails(&mut d, bad);
    assert_eq!(d.bytes(End::B, key.bytes - 1, 1), [0]);
}

/// Nor may a wrong key reach anything.
pub fn an_unknown_remote_key_completes_with_an_error<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    let key = d.pair.remote(End::B);
    let bad = with_remote(d.write(End::A, message(0)), key.rkey ^ 0x7fff_0000, key.remote_addr);
    assert_remote_access_fails(&mut d, bad);
}

/// A NIC reaches the memory of the GPU that shares its switch; any other would cross the server at a fraction of the
/// rate.
pub fn memory_that_is_not_beside_the_nic_is_refused<P: NicPair>(pair: &mut P) {
    let (fd, gpu, bytes) = pair.elsewhere(End::A);
    let beside = pair.nic(End::A).relay_gpu();
    let result = pair.nic(End::A).register(&Registrable::Device { fd: fd.as_fd(), gpu, dev_ptr: 0, bytes });
    let refused =
        matches!(result, Err(HwError::NotBeside { gpu: g, beside: b, .. }) if (g, b) == (gpu, beside));
    assert!(refused, "{result:?}");
}

/// Ranks that disagree on who is who must not talk to each other.
pub fn a_path_to_an_endpoint_of_another_nic_is_refused<P: NicPair>(pair: &mut P) {
    let (own, peer) = (pair.nic(End::A).endpoint(), pair.id(End::B));
    for endpoint in [&own[..], &[]] {
        let result = pair.nic(End::A).open_path(peer, endpoint);
        assert!(matches!(result, Err(HwError::OpenPath { .. })), "{result:?}");
    }
}

/// Signals travel as inline writes ahead of their message: who is told of the message must find them.
pub fn an_inline_write_is_there_before_the_write_after_it<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    let (count, at) = (40, |n: u32| (1 << 20) + 64 * u64::from(n));
    let (mut posted, mut seen) = (0, 0);
    while seen < count as usize {
        if posted < count {
            let words = [posted as u8 + 1; INLINE_BYTES];
            d.post_all(End::A, &[d.inline(at(posted), &words, 0), d.write(End::A, message(posted))]);
            posted += 1;
        } else {
            d.poll_until(End::B, seen + 1);
        }
        while let Some(&event) = d.events(End::B).get(seen) {
            let NicEvent::Arrived { imm, .. } = event else { panic!("{event:?}") };
            let n = seen as u32;
            assert_eq!(imm, message(n).imm, "one path keeps its order");
            assert_eq!(d.bytes(End::B, at(n), INLINE_BYTES), [n as u8 + 1; INLINE_BYTES], "message {n}");
            seen += 1;
        }
    }
}

/// Credits: each word is there or not, with nothing said to the receiver and nothing counted.
pub fn inline_writes_land_whole_and_unannounced<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    let words: Vec<u8> = (1..=INLINE_BYTES as u8).collect();
    d.post_all(End::A, &[d.inline(64, &words, 1), d.inline(128, &words[..8], 2)]);
    let last = |d: &mut Driver<P>| d.bytes(End::B, 64, 72)[64..] == words[..8];
    for _ in 0..10_000 {
        if last(&mut d) {
            break;
        }
        d.poll();
    }
    let mut expected = vec![0; 96];
    expected[..16].copy_from_slice(&words);
    expected[64..72].copy_from_slice(&words[..8]);
    assert_eq!(d.bytes(End::B, 64, 96), expected);
    d.settle();
    assert_eq!(
        (d.events(End::A), d.events(End::B)),
        (&[][..], &[][..]),
        "inline writes report failures only"
    );
    assert_eq!(d.pair.nic(End::A).counters(), Default::default());
}

/// The report rests on them.
pub fn counters_count_payload_in_both_directions<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    let work = [d.write(End::A, message(0)), d.inline(0, &[1; 8], 9), d.write(End::A, message(1))];
    d.post_all(End::A, &work);
    let back = Message { offset: 0, bytes: 100, imm: 5 };
    d.post_all(End::B, &[d.write(End::B, back)]);
    d.poll_until(End::A, 3);
    d.poll_until(End::B, 3);
    let [a, b] = [End::A, End::B].map(|end| d.pair.nic(end).counters());
    assert_eq!((a.tx_bytes, a.rx_bytes), (2 * u64::from(BYTES), 100));
    assert_eq!((b.tx_bytes, b.rx_bytes), (100, 2 * u64::from(BYTES)));
}
