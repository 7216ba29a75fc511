//! The ring under a model checker: every interleaving, and every value that a weak memory order allows a load to see.
//!
//!     RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --lib ring::model
//!
//! Payload is a cell that the checker tracks, so that a missing fence is a reported race, not a lucky read.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::{Consumer, Producer, RingLayout};
use crate::words::{AtomicU64, heap_words};

mod kernel;
mod lines;

type Memory = std::sync::Arc<[AtomicU64]>;
/// Two words: enough to tear.
type Sending = Producer<Memory, 2>;
type Receiving = Consumer<Memory, 2>;

/// What messages carry outside of the ring, by message.
#[derive(Clone)]
struct Payload(Arc<Vec<UnsafeCell<u64>>>);

impl Payload {
    fn new(messages: u64) -> Self {
        Self(Arc::new((0..messages).map(|_| UnsafeCell::new(0)).collect()))
    }

    fn write(&self, message: u64) {
        // SAFETY: the checker fails the model if this races with a read.
        self.0[message as usize].with_mut(|p| unsafe { *p = message + 1 });
    }

    fn assert_written(&self, message: u64) {
        // SAFETY: the checker fails the model if this races with a write.
        assert_eq!(self.0[message as usize].with(|p| unsafe { *p }), message + 1);
    }
}

fn ring(capacity: u64) -> (Sending, Receiving) {
    let memory = heap_words(RingLayout::words(2, capacity));
    let layout = RingLayout::at(0, capacity);
    (Producer::new(memory.clone(), layout), Consumer::new(memory, layout))
}

fn push(ring: &Sending, payload: &Payload, message: u64) {
    payload.write(message);
    while ring.push(&[message, message]).is_err() {
        thread::yield_now();
    }
}

fn pop(ring: &mut Receiving, payload: &Payload) -> u64 {
    loop {
        if let Some([message, copy]) = ring.pop() {
            assert_eq!(message, copy, "torn");
            payload.assert_written(message);
            return message;
        }
        ring.publish();
        thread::yield_now();
    }
}

/// All interleavings with at most three preemptions: more has been seen to find nothing and takes hours.
fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// `producers` threads push messages of their own into a ring; all come, once, in each producer's order.
fn all_come_once(producers: u64, each: u64, capacity: u64) {
    all_come_once_from(0, producers, each, capacity);
}

/// The same in a ring through which `begun` entries have gone.
fn all_come_once_from(begun: u64, producers: u64, each: u64, capacity: u64) {
    check(move || {
        let (sending, mut receiving) = ring(capacity);
        for _ in 0..begun {
            sending.push(&[0, 0]).unwrap();
            receiving.pop().unwrap();
        }
        receiving.publish();
        let payload = Payload::new(producers * each);
        let threads: Vec<_> = (0..producers)
            .map(|p| {
                let (sending, payload) = (sending.clone(), payload.clone());
                thread::spawn(move || (p * each..(p + 1) * each).for_each(|m| push(&sending, &payload, m)))
            })
            .collect();
        let mut next: Vec<_> = (0..producers).map(|p| p * each).collect();
        for _ in 0..producers * each {
            let message = pop(&mut receiving, &payload);
            let expected = &mut next[(message / each) as usize];
            assert_eq!(message, *expected);
            *expected += 1;
        }
        assert_eq!(receiving.pop(), None);
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
}

#[test]
fn payload_is_there_with_the_entry() {
    all_come_once(1, 2, 4);
}

#[test]
fn the_lap_boundary_is_crossed() {
    all_come_once(1, 4, 2);
    all_come_once(1, 3, 1);
}

/// An owner looks at what it will post before it takes any of it from the ring.
#[test]
fn looking_ahead_sees_payload_and_keeps_places() {
    for begun in 0..2 {
        check(move || {
            let (sending, mut receiving) = ring(2);
            for _ in 0..begun {
                sending.push(&[9, 9]).unwrap();
                receiving.pop().unwrap();
            }
            receiving.publish();
            let payload = Payload::new(3);
            let writing = payload.clone();
            let thread = thread::spawn(move || (0..3).for_each(|m| push(&sending, &writing, m)));
            let mut taken = 0;
            while taken < 3 {
                let ahead: Vec<_> = (0..2).map_while(|ahead| receiving.peek_ahead(ahead)).collect();
                for (message, entry) in (taken..).zip(&ahead) {
                    assert_eq!(entry, &[message, message]);
                    payload.assert_written(message);
                }
                ahead.iter().for_each(|_| receiving.advance());
                receiving.publish();
                taken += ahead.len() as u64;
                thread::yield_now();
            }
            thread.join().unwrap();
        });
    }
}

#[test]
fn two_producers_share() {
    all_come_once(2, 1, 4);
}

#[test]
fn two_producers_cross_the_lap_boundary() {
    all_come_once_from(1, 2, 1, 2); // One takes the last place of the lap, the other the first of the next.
    all_come_once_from(3, 2, 1, 2);
}

/// Who has claimed a place again knows that whatever the consumer did before it gave the place back is done.
#[test]
fn a_place_is_free_only_after_it_was_read() {
    check(|| {
        let (sending, mut receiving) = ring(2);
        let payload = Payload::new(3);
        let reuse = payload.clone();
        let thread = thread::spawn(move || {
            (0..3).for_each(|m| push(&sending, &reuse, m));
            reuse.write(0);
        });
        for message in 0..3 {
            while receiving.peek().is_none() {
                thread::yield_now();
            }
            if message == 0 {
                payload.assert_written(message);
            }
            receiving.advance();
            receiving.publish();
        }
        thread.join().unwrap();
    });
}

/// Entries that nobody has read are never written over, whoever asks.
#[test]
fn a_full_ring_refuses() {
    check(|| {
        let (sending, mut receiving) = ring(2);
        let pushed: Vec<_> = (0..2)
            .map(|p| {
                let sending = sending.clone();
                thread::spawn(move || (0..2).filter(|i| sending.push(&[p, *i]).is_ok()).count())
            })
            .collect();
        let pushed: usize = pushed.into_iter().map(|t| t.join().unwrap()).sum();
        assert_eq!(pushed, 2, "nobody reads, and there are two places");
        assert!(!sending.has_room());
        assert!(receiving.pop().is_some() && receiving.pop().is_some() && receiving.pop().is_none());
    });
}
