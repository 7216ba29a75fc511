//! NICs over verbs keep the rules of `hw`, between two machines: this process drives the NIC of one, and asks a peer (the
//! test `other_machine`, on the other machine) to drive the NIC there. `tests/vm/run` starts both.
#![cfg(feature = "verbs")]

mod common;

use std::time::{Duration, Instant};

use common::verbs::{Pair, Settings};
use fuselink::hw::contract::{Cable, End, NicPair};
use fuselink::hw::{
    Lane, LinkState, LocalSpan, Nic, NicDevice, NicEvent, RemoteSpan, Work, WorkError, WorkOp,
};
use fuselink::verbs::PathState;

mod nic {
    fuselink::contract!(nic, super::Pair::new(super::Settings::plain()), [#[ignore = "needs two machines; see tests/vm/run"]]);
}

/// Messages in turn over three queue pairs, each a write and a write with its length.
mod nic_adaptive {
    fuselink::contract!(nic, super::Pair::new(super::Settings::adaptive()), [#[ignore = "needs two machines; see tests/vm/run"]]);
}

mod registrar {
    // A device may give a key again, in its time.
    fuselink::contract!(@each registrar, super::Pair::new(super::Settings::plain()), [#[ignore = "needs two machines; see tests/vm/run"]],
        memory_registered_by_another_thread_carries
        a_key_that_was_taken_back_is_refused
        a_write_to_memory_that_was_taken_back_fails
        a_key_is_taken_back_once
    );
}

mod link {
    fuselink::contract!(link, super::Pair::new(super::Settings::plain()).patient(), [#[ignore = "needs two machines; see tests/vm/run"]]);
}

mod fence {
    fuselink::contract!(fence, super::Pair::new(super::Settings::plain()), [#[ignore = "needs two machines; see tests/vm/run"]]);
}

mod fence_adaptive {
    fuselink::contract!(fence, super::Pair::new(super::Settings::adaptive()), [#[ignore = "needs two machines; see tests/vm/run"]]);
}

/// The other machine's part.
#[test]
#[ignore = "serves the other tests; see tests/vm/run"]
fn other_machine() {
    common::verbs::serve();
}

fn write(pair: &Pair, imm: u32, bytes: u32) -> Work {
    let key = pair.remote(End::B);
    let local = LocalSpan { key: pair.key(End::A), offset: 0, bytes };
    let remote = RemoteSpan { rkey: key.rkey, remote_addr: key.remote_addr };
    Work {
        path: pair.path(End::A),
        lane: Lane::Put,
        op: WorkOp::Write { local, remote, imm },
        cookie: imm.into(),
    }
}

/// Polls both ends until `done` says so; what they told.
fn poll_until(
    pair: &mut Pair,
    mut done: impl FnMut(&mut Pair, &[Vec<NicEvent>; 2]) -> bool,
) -> [Vec<NicEvent>; 2] {
    let mut events = [Vec::new(), Vec::new()];
    let deadline = Instant::now() + Duration::from_secs(20);
    while !done(pair, &events) {
        assert!(Instant::now() < deadline, "still waiting; told were {events:?}");
        for end in [End::A, End::B] {
            let now = pair.now();
            pair.nic(end).poll(now, &mut events[end as usize]).unwrap();
        }
    }
    events
}

/// Posts messages of `bytes` at A, their immediates given.
fn post(pair: &mut Pair, imms: impl IntoIterator<Item = u32>, bytes: u32) {
    let work: Vec<_> = imms.into_iter().map(|imm| write(pair, imm, bytes)).collect();
    let now = pair.now();
    assert_eq!(pair.nic(End::A).post(&work, now).unwrap(), work.len());
}

fn arrived(events: &[NicEvent]) -> Vec<u32> {
    let imm = |e: &NicEvent| match e {
        NicEvent::Arrived { imm, .. } => Some(*imm),
        _ => None,
    };
    events.iter().filter_map(imm).collect()
}

fn state(pair: &Pair) -> PathState {
    pair.here().path_state(pair.path(End::A)).unwrap()
}

/// A cluster has more pairs of NICs than it uses.
#[test]
#[ignore = "needs two machines; see tests/vm/run"]
fn a_path_costs_nothing_before_its_first_message() {
    let mut pair = Pair::new(Settings::plain());
    assert_eq!(state(&pair), PathState::Idle);
    post(&mut pair, [1], 64);
    assert_eq!(state(&pair), PathState::Opening);
    poll_until(&mut pair, |_, events| arrived(&events[1]) == [1]);
    assert_eq!(state(&pair), PathState::Open);
}

/// Closes both ends and waits until both have drained; what they told meanwhile.
fn fence(pair: &mut Pair) -> [Vec<NicEvent>; 2] {
    for end in [End::A, End::B] {
        let path = pair.path(end);
        pair.nic(end).fence(path).unwrap();
    }
    poll_until(pair, |pair, _| {
        [End::A, End::B].into_iter().all(|end| {
            let path = pair.path(end);
            pair.nic(end).is_drained(path)
        })
    })
}

fn reopen(pair: &mut Pair) {
    for end in [End::A, End::B] {
        let path = pair.path(end);
        pair.nic(end).reopen(path).unwrap();
    }
}

fn ended(events: &[NicEvent]) -> usize {
    events.iter().filter(|e| matches!(e, NicEvent::Completed { .. })).count()
}

/// Nothing of the old generation may come after both ends have drained, and the next one works.
#[test]
#[ignore = "needs two machines; see tests/vm/run"]
fn a_path_that_was_closed_opens_again_under_the_next_generation() {
    let mut pair = Pair::new(Settings::plain());
    let path = pair.path(End::A);
    for generation in 2..5 {
        post(&mut pair, 0..40, 65_536);
        let before = poll_until(&mut pair, |_, events| !arrived(&events[1]).is_empty());
        let events = fence(&mut pair);
        assert_eq!(ended(&before[0]) + ended(&events[0]), 40, "each item is told once");
        post(&mut pair, [99], 64);
        let events = poll_until(&mut pair, |_, events| !events[0].is_empty());
        assert_eq!(events[0], [NicEvent::Completed { cookie: 99, result: Err(WorkError::Flushed) }]);
        reopen(&mut pair);
        post(&mut pair, [1000], 64);
        let events =
            poll_until(&mut pair, |_, events| !arrived(&events[1]).is_empty() && ended(&events[0]) == 1);
        assert_eq!(arrived(&events[1]), [1000], "nothing of the old generation");
        assert_eq!(pair.here().path_generation(path), Some(generation));
    }
}

/// A cable that is pulled while bytes move: every item is told once, and the path comes back.
#[test]
#[ignore = "needs two machines; see tests/vm/run"]
fn a_path_comes_back_after_its_link() {
    let mut pair = Pair::new(Settings::plain());
    post(&mut pair, 0..40, 65_536);
    let first = poll_until(&mut pair, |_, events| !arrived(&events[1]).is_empty());
    let begin = Instant::now();
    pair.set_link(End::A, LinkState::Down);
    let is_down = |events: &[NicEvent]| events.contains(&NicEvent::Link(LinkState::Down));
    let told = ended(&first[0]);
    poll_until(&mut pair, |_, events| is_down(&events[0]) && told + ended(&events[0]) == 40);
    println!("from the link's end to the end of all 40 items: {:?}", begin.elapsed());
    fence(&mut pair);
    pair.set_link(End::A, LinkState::Up);
    poll_until(&mut pair, |_, events| events[0].contains(&NicEvent::Link(LinkState::Up)));
    reopen(&mut pair);
    post(&mut pair, [1000], 64);
    poll_until(&mut pair, |_, events| arrived(&events[1]) == [1000]);
}

/// The first word of a path went into a link that was down: what carries such words must live on.
#[test]
#[ignore = "needs two machines; see tests/vm/run"]
fn a_path_opens_after_its_first_word_met_a_dead_link() {
    let mut pair = Pair::new(Settings::plain());
    pair.set_link(End::A, LinkState::Down);
    post(&mut pair, [1], 64); // Nobody has noticed yet that the link is down.
    let is_down = |events: &[NicEvent]| events.contains(&NicEvent::Link(LinkState::Down));
    poll_until(&mut pair, |_, events| is_down(&events[0]) && ended(&events[0]) == 1);
    pair.set_link(End::A, LinkState::Up);
    poll_until(&mut pair, |_, events| events[0].contains(&NicEvent::Link(LinkState::Up)));
    post(&mut pair, [2], 64);
    poll_until(&mut pair, |_, events| arrived(&events[1]) == [2]);
}

/// The peer's link is down while ours is up: retries run out.
#[test]
#[ignore = "needs two machines; see tests/vm/run"]
fn an_open_path_to_a_peer_that_is_gone_fails() {
    let mut pair = Pair::new(Settings::plain());
    post(&mut pair, [1], 64);
    poll_until(&mut pair, |_, events| arrived(&events[1]) == [1] && events[0].len() == 1);
    pair.set_link(End::B, LinkState::Down);
    post(&mut pair, [2], 64);
    let events = poll_until(&mut pair, |_, events| !events[0].is_empty());
    pair.set_link(End::B, LinkState::Up);
    let failed = NicEvent::Completed { cookie: 2, result: Err(WorkError::RetryExceeded) };
    assert_eq!(events[0], [failed]);
}

/// Soft-RoCE registers no dma-buf; memory is registered by its address instead, as with nvidia-peermem.
#[test]
#[ignore = "needs two machines; see tests/vm/run"]
fn memory_whose_dma_buf_is_refused_is_registered_by_address() {
    let pair = Pair::new(Settings::plain());
    let (by_dma_buf, by_address) = pair.here().registrations();
    println!("registered by dma-buf: {by_dma_buf}, by address: {by_address}");
    assert_eq!(by_dma_buf + by_address, 1);
    assert_eq!(by_address, 1, "this device registers dma-bufs; the fallback was not tried");
}
