//! Paths that are closed, drain, and are opened again: what recovery after a failure rests on.

use super::pair::{Driver, End, Message, NicPair, Third};
use crate::hw::{Lane, LocalSpan, Nic, NicDevice, NicEvent, RemoteSpan, Work, WorkError, WorkOp};

const BYTES: u32 = 65_536;
const BOTH: [End; 2] = [End::A, End::B];

fn message(imm: u32) -> Message {
    Message { offset: 0, bytes: BYTES, imm }
}

/// How each item ended, in the order in which it was told.
fn ended<P: NicPair>(d: &Driver<P>, end: End) -> Vec<(u64, Result<(), WorkError>)> {
    let ended = |e: &NicEvent| match e {
        NicEvent::Completed { cookie, result } => Some((*cookie, *result)),
        _ => None,
    };
    d.events(end).iter().filter_map(ended).collect()
}

fn arrived<P: NicPair>(d: &Driver<P>, end: End) -> Vec<u32> {
    let imm = |e: &NicEvent| match e {
        NicEvent::Arrived { imm, .. } => Some(*imm),
        _ => None,
    };
    d.events(end).iter().filter_map(imm).collect()
}

fn fence<P: NicPair>(d: &mut Driver<P>, end: End) {
    let path = d.pair.path(end);
    d.pair.nic(end).fence(path).expect("fence");
}

fn await_drained<P: NicPair>(d: &mut Driver<P>, end: End) {
    let path = d.pair.path(end);
    d.await_that("the path drains", |d| {
        d.poll();
        d.pair.nic(end).is_drained(path)
    });
}

fn close<P: NicPair>(d: &mut Driver<P>) {
    BOTH.into_iter().for_each(|end| fence(d, end));
    BOTH.into_iter().for_each(|end| await_drained(d, end));
}

fn reopen<P: NicPair>(d: &mut Driver<P>, order: [End; 2]) {
    for end in order {
        let path = d.pair.path(end);
        d.pair.nic(end).reopen(path).expect("reopen");
    }
}

/// Both ends can send to each other; what was told before is not asked about.
fn assert_carries<P: NicPair>(d: &mut Driver<P>) {
    for from in BOTH {
        let (to, imm) = (from.other(), 1000 + from as u32);
        let before = (ended(d, from).len(), arrived(d, to).len());
        d.post_all(from, &[d.write(from, Message { bytes: 64, ..message(imm) })]);
        d.await_that("a message passes", |d| {
            d.poll();
            ended(d, from).len() > before.0 && arrived(d, to).len() > before.1
        });
        assert_eq!(ended(d, from)[before.0..], [(imm.into(), Ok(()))]);
        assert_eq!(arrived(d, to)[before.1..], [imm], "nothing of before it was closed");
    }
}

/// Messages on the way from A, some of which have come.
fn send_some<P: NicPair>(d: &mut Driver<P>, count: u32) {
    let work: Vec<_> = (0..count).map(|imm| d.write(End::A, message(imm))).collect();
    d.post_all(End::A, &work);
    d.await_that("the first message passes", |d| {
        d.poll();
        !arrived(d, End::B).is_empty()
    });
}

/// An end that waits for traffic to end never opens a path on which there was none.
pub fn an_idle_path_drains<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    close(&mut d);
    assert_eq!((ended(&d, End::A), arrived(&d, End::B)), (vec![], vec![]));
    reopen(&mut d, BOTH);
    assert_carries(&mut d);
}

/// An item told twice frees a slot that is lent to another message; one never told is a hang. What is told to be done has come.
pub fn each_item_ends_once_before_its_path_has_drained<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    send_some(&mut d, 40);
    close(&mut d);
    let mut cookies: Vec<_> = ended(&d, End::A).iter().map(|(cookie, _)| *cookie).collect();
    cookies.sort_unstable();
    assert!(cookies.into_iter().eq(0..40), "{:?}", ended(&d, End::A));
    let come = arrived(&d, End::B);
    for (cookie, result) in ended(&d, End::A) {
        assert!(result.is_err() || come.contains(&(cookie as u32)), "{cookie} is done, and has not come");
    }
    assert_cut(&come);
}

/// The slot of a message that is sent again another way may be filled again: nothing late may fall into it.
pub fn nothing_lands_after_a_path_has_drained<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    d.fill(End::A, 0, BYTES as usize, 1);
    send_some(&mut d, 40);
    close(&mut d);
    let told = BOTH.map(|end| d.events(end).len());
    d.fill(End::B, 0, BYTES as usize, 9);
    d.settle();
    assert!(d.bytes(End::B, 0, BYTES as usize).iter().all(|&b| b == 9));
    assert_eq!(BOTH.map(|end| d.events(end).len()), told, "all was told before");
}

/// Nor does that wait for the sender, which may not have noticed anything.
pub fn nothing_lands_at_an_end_that_closed_alone<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    d.fill(End::A, 0, BYTES as usize, 1);
    send_some(&mut d, 1);
    fence(&mut d, End::B);
    await_drained(&mut d, End::B);
    d.fill(End::B, 0, BYTES as usize, 9);
    d.post_all(End::A, &[d.write(End::A, message(7))]);
    d.await_that("the sender hears of it", |d| {
        d.poll();
        ended(d, End::A).len() == 2
    });
    d.settle();
    assert!(matches!(ended(&d, End::A)[..], [(0, Ok(())), (7, Err(_))]), "{:?}", d.events(End::A));
    assert_eq!(arrived(&d, End::B), [0]);
    assert!(d.bytes(End::B, 0, BYTES as usize).iter().all(|&b| b == 9));
}

/// Whoever posts on a closed path must hear of it, and nothing of it may reach the peer.
pub fn work_on_a_closed_path_fails_and_does_nothing<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    d.fill(End::A, 0, BYTES as usize, 1);
    close(&mut d);
    let work = [d.write(End::A, message(7)), d.inline(0, &[1; 8], 8)];
    d.post_all(End::A, &work);
    d.await_that("both fail", |d| {
        d.poll();
        ended(d, End::A).len() == 2
    });
    d.settle();
    let mut failed = ended(&d, End::A);
    failed.sort_by_key(|(cookie, _)| *cookie);
    assert!(matches!(failed[..], [(7, Err(_)), (8, Err(_))]), "{failed:?}");
    assert!(arrived(&d, End::B).is_empty());
    assert!(d.bytes(End::B, 0, BYTES as usize).iter().all(|&b| b == 0));
}

/// What came of messages that were numbered in their order: some may be missing in between, since a path may be several
/// connections, each of which was cut somewhere.
fn assert_cut(come: &[u32]) {
    assert!(come.is_sorted_by(|a, b| a < b), "in order, each once: {come:?}");
}

/// Either end notices trouble first, and may be done before the other has even begun.
pub fn ends_close_and_open_in_any_order<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    for (first, order) in
        [(End::A, BOTH), (End::B, BOTH), (End::A, [End::B, End::A]), (End::B, [End::B, End::A])]
    {
        let begun = (ended(&d, End::A).len(), arrived(&d, End::B).len());
        let work: Vec<_> = (0..10).map(|imm| d.write(End::A, message(imm))).collect();
        d.post_all(End::A, &work);
        for end in [first, first.other()] {
            fence(&mut d, end);
            await_drained(&mut d, end);
        }
        assert_eq!(ended(&d, End::A).len() - begun.0, 10, "{first:?} first");
        let come = &arrived(&d, End::B)[begun.1..];
        assert_cut(come);
        reopen(&mut d, order);
        assert_carries(&mut d);
    }
}

/// A path that fails again must not live on what it was.
pub fn a_path_closes_again_and_again<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    for _ in 0..4 {
        close(&mut d);
        reopen(&mut d, BOTH);
        assert_carries(&mut d);
    }
}

/// One peer's trouble is no other's.
pub fn other_paths_go_on<P: Third>(pair: &mut P) {
    let mut d = Driver::new(pair);
    let (path, key) = (d.pair.path_to_third(), d.pair.third_remote());
    let work = |imm: u32| {
        let local = LocalSpan { key: d.pair.key(End::A), offset: 0, bytes: BYTES };
        let remote = RemoteSpan { rkey: key.rkey, remote_addr: key.remote_addr };
        Work { path, lane: Lane::Put, op: WorkOp::Write { local, remote, imm }, cookie: imm.into() }
    };
    let to_third: Vec<_> = (100..120).map(work).collect();
    let to_b: Vec<_> = (0..20).map(|imm| d.write(End::A, message(imm))).collect();
    let mixed: Vec<_> = to_third.into_iter().zip(to_b).flat_map(<[Work; 2]>::from).collect();
    d.post_all(End::A, &mixed);
    close(&mut d);
    let mut events = Vec::new();
    d.await_that("all come to the third", |d| {
        d.poll();
        let now = d.pair.now();
        d.pair.third().poll(now, &mut events).expect("poll");
        events.len() == 20 && ended(d, End::A).len() == 40
    });
    let others = ended(&d, End::A).into_iter().filter(|(cookie, _)| *cookie >= 100);
    assert!(others.eq((100..120).map(|cookie| (cookie, Ok(())))));
    let from = d.pair.id(End::A);
    let arrivals = (100..120).map(|imm| NicEvent::Arrived { from, imm, bytes: BYTES });
    assert!(arrivals.eq(events.iter().copied()), "{events:?}");
}
