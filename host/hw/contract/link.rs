//! Links that go down and come back.

use super::pair::{Cable, Driver, End, Message};
use crate::hw::{LinkState, NicDevice, NicEvent};

const BYTES: u32 = 65_536;

fn message(imm: u32) -> Message {
    Message { offset: 0, bytes: BYTES, imm }
}

/// Cookies of the work that has failed at A.
fn failed<P: Cable>(d: &Driver<P>) -> Vec<u64> {
    let failed = |e: &NicEvent| match e {
        NicEvent::Completed { cookie, result: Err(_) } => Some(*cookie),
        _ => None,
    };
    d.events(End::A).iter().filter_map(failed).collect()
}

fn links<P: Cable>(d: &Driver<P>, end: End) -> Vec<LinkState> {
    let link = |e: &NicEvent| match e {
        NicEvent::Link(state) => Some(*state),
        _ => None,
    };
    d.events(end).iter().filter_map(link).collect()
}

fn arrivals<P: Cable>(d: &Driver<P>) -> usize {
    d.events(End::B).iter().filter(|e| matches!(e, NicEvent::Arrived { .. })).count()
}

/// Work posted before the owner has even noticed must not pass.
pub fn nothing_passes_a_link_that_is_down<P: Cable>(pair: &mut P) {
    pair.set_link(End::A, LinkState::Down);
    let mut d = Driver::new(pair);
    d.fill(End::A, 0, BYTES as usize, 1);
    d.post_all(End::A, &[d.write(End::A, message(1))]);
    d.poll_until(End::A, 2);
    d.settle();
    assert_eq!((failed(&d), arrivals(&d)), (vec![1], 0));
    assert_eq!(d.bytes(End::B, 0, 1), [0]);
    assert_eq!(d.pair.nic(End::A).counters(), Default::default());
}

/// Who waits for a completion must get one: each item once, as an error unless it arrived.
pub fn queued_work_completes_when_the_link_goes_down<P: Cable>(pair: &mut P) {
    let mut d = Driver::new(pair);
    let work: Vec<_> = (0..50).map(|i| d.write(End::A, message(i))).collect();
    let taken = d.post(End::A, &work).expect("work is good");
    d.pair.set_link(End::A, LinkState::Down);
    d.poll_until(End::A, taken + 1);
    d.settle();
    assert_eq!(d.events(End::A).len(), taken + 1, "one event each, and one of the link");
    assert!(!failed(&d).is_empty());
    assert!(arrivals(&d) >= taken - failed(&d).len());
}

/// A lost credit that nobody hears of is a hang.
pub fn inline_writes_complete_when_the_link_is_down<P: Cable>(pair: &mut P) {
    for end in [End::A, End::B] {
        pair.set_link(end, LinkState::Down);
        let mut d = Driver::new(pair);
        d.post_all(End::A, &[d.inline(0, &[1; 8], 7)]);
        d.settle();
        assert_eq!(failed(&d), [7], "{end:?} down");
        assert_eq!(d.bytes(End::B, 0, 8), [0; 8]);
        pair.set_link(end, LinkState::Up);
    }
}

/// The sender's own link says nothing of the peer's.
pub fn a_peer_whose_link_is_down_is_not_reached<P: Cable>(pair: &mut P) {
    pair.set_link(End::B, LinkState::Down);
    let mut d = Driver::new(pair);
    d.post_all(End::A, &[d.write(End::A, message(1))]);
    d.poll_until(End::A, 1);
    d.settle();
    assert_eq!((failed(&d), arrivals(&d)), (vec![1], 0));
    assert_eq!((links(&d, End::A), links(&d, End::B)), (vec![], vec![LinkState::Down]));
}

/// Routes are chosen by these events.
pub fn each_change_of_the_link_is_reported_once<P: Cable>(pair: &mut P) {
    let mut d = Driver::new(pair);
    let changes = [LinkState::Down, LinkState::Up, LinkState::Down];
    for state in changes {
        d.pair.set_link(End::A, state);
        d.settle();
    }
    assert_eq!((links(&d, End::A), links(&d, End::B)), (changes.to_vec(), vec![]));
}

/// A cable that is back is a NIC to use.
pub fn a_link_that_is_back_carries_again<P: Cable>(pair: &mut P) {
    let mut d = Driver::new(pair);
    for end in [End::A, End::B] {
        for state in [LinkState::Down, LinkState::Up] {
            d.pair.set_link(end, state);
            d.settle();
        }
    }
    let before = d.events(End::B).len();
    d.post_all(End::A, &[d.write(End::A, message(3))]);
    d.poll_until(End::B, before + 1);
    assert_eq!((failed(&d), arrivals(&d)), (vec![], 1));
}
