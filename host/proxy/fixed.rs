//! Streams whose messages a thread of the user's fills and reads through fixed windows (`comm/fixed.rs`). What kernels would
//! be told of them waits here for that thread; the engine knows no difference.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::doorbell::{Class, Doorbell};
use crate::engine::{Arm, EngineConfig, Publish};
use crate::topo::{NicIdx, Rank};

/// A slot that is armed for the next message of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArmedSlot {
    /// Its place in the stream's queue.
    pub idx: u64,
    /// The NIC beside which it lies.
    pub nic: NicIdx,
    /// The send slot.
    pub slot: u32,
}

/// Slots in the order of a stream, from the proxy to one thread of the user's. The proxy never waits here: the lock is held
/// for a few instructions, by either side.
pub struct FixedQueue<T> {
    slots: Mutex<VecDeque<T>>,
    changed: Condvar,
}

impl<T> Default for FixedQueue<T> {
    fn default() -> Self {
        Self { slots: Mutex::default(), changed: Condvar::new() }
    }
}

impl<T> FixedQueue<T> {
    fn lock(&self) -> MutexGuard<'_, VecDeque<T>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Behind all others.
    pub fn push(&self, slot: T) {
        self.lock().push_back(slot);
        self.changed.notify_all();
    }

    /// Back to where it was taken from.
    pub fn put_back(&self, slot: T) {
        self.lock().push_front(slot);
    }

    /// Something that the user's thread may wait for has changed.
    pub fn tell(&self) {
        let _slots = self.lock();
        self.changed.notify_all();
    }

    /// The next one, waited for so long at most.
    pub fn take(&self, within: Duration) -> Option<T> {
        let mut slots = self.lock();
        if slots.is_empty() {
            slots = self.changed.wait_timeout(slots, within).unwrap_or_else(PoisonError::into_inner).0;
        }
        slots.pop_front()
    }

    /// Waits until the proxy tells, so long at most; not at all when `done` says so.
    pub fn wait_unless(&self, within: Duration, done: impl FnOnce() -> bool) {
        let slots = self.lock();
        if !done() {
            drop(self.changed.wait_timeout(slots, within));
        }
    }
}

/// The proxy's ends, by rank.
#[derive(Default)]
pub(super) struct FixedStreams {
    sends: Vec<Option<Arc<FixedQueue<ArmedSlot>>>>,
    recvs: Vec<Option<Arc<FixedQueue<Publish>>>>,
}

impl FixedStreams {
    pub fn fix_send(&mut self, dst: Rank, slots: Arc<FixedQueue<ArmedSlot>>) {
        at(&mut self.sends, dst).replace(slots);
    }

    pub fn fix_recv(&mut self, src: Rank, arrivals: Arc<FixedQueue<Publish>>) {
        at(&mut self.recvs, src).replace(arrivals);
    }

    fn send(&self, dst: Rank) -> Option<&FixedQueue<ArmedSlot>> {
        self.sends.get(dst.idx())?.as_deref()
    }

    fn recv(&self, src: Rank) -> Option<&FixedQueue<Publish>> {
        self.recvs.get(src.idx())?.as_deref()
    }

    /// Takes a slot that is not for kernels.
    pub fn armed(&self, config: &EngineConfig, arm: &Arm) -> bool {
        let queue = stream_of(config, arm.class, arm.queue).and_then(|dst| self.send(dst));
        queue.map(|queue| queue.push(ArmedSlot { idx: arm.idx, nic: arm.nic, slot: arm.slot })).is_some()
    }

    /// Takes a message that is not for kernels.
    pub fn arrived(&self, arrival: &Publish) -> bool {
        self.recv(arrival.src).map(|queue| queue.push(*arrival)).is_some()
    }

    /// More of a stream's messages have come.
    pub fn flushed(&self, dst: Rank) {
        if let Some(queue) = self.send(dst) {
            queue.tell();
        }
    }

    /// The rank whose fixed stream a kernel's doorbell is about.
    pub fn trespass(&self, config: &EngineConfig, doorbell: &Doorbell) -> Option<Rank> {
        match *doorbell {
            Doorbell::Send { class, queue, .. } => {
                stream_of(config, class, queue).filter(|&dst| self.send(dst).is_some())
            }
            Doorbell::Drained { class: Class::LowLatency, slot, .. } => {
                let src = config.slots.sender_of(slot);
                self.recv(src).is_some().then_some(src)
            }
            Doorbell::Drained { .. } => None,
        }
    }
}

fn at<T>(ends: &mut Vec<Option<T>>, rank: Rank) -> &mut Option<T> {
    if ends.len() <= rank.idx() {
        ends.resize_with(rank.idx() + 1, || None);
    }
    &mut ends[rank.idx()]
}

fn stream_of(config: &EngineConfig, class: Class, queue: u32) -> Option<Rank> {
    let dst = queue.checked_sub(config.work_queues).map(Rank);
    dst.filter(|_| class == Class::LowLatency)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn slots_come_in_order_and_one_that_was_put_back_is_the_next() {
        let queue = FixedQueue::default();
        [1, 2, 3].into_iter().for_each(|slot| queue.push(slot));
        assert_eq!(queue.take(Duration::ZERO), Some(1));
        queue.put_back(1);
        assert_eq!([1, 2, 3].map(|_| queue.take(Duration::ZERO)), [Some(1), Some(2), Some(3)]);
        assert_eq!(queue.take(Duration::from_millis(1)), None);
    }

    #[test]
    fn whoever_waits_is_woken() {
        let queue = Arc::new(FixedQueue::<u32>::default());
        for wake in [|queue: &FixedQueue<u32>| queue.push(7), |queue: &FixedQueue<u32>| queue.tell()] {
            let (begin, other) = (Instant::now(), Arc::clone(&queue));
            let (waits, is_waiting) = std::sync::mpsc::channel();
            let waiter = std::thread::spawn(move || {
                // The lock is held from the look until the wait begins, so no wake-up is lost.
                other.wait_unless(SOON, || waits.send(()).is_err());
            });
            is_waiting.recv().unwrap();
            wake(&queue);
            waiter.join().unwrap();
            assert!(begin.elapsed() < SOON);
        }
    }
}
