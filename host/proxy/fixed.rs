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
            // A slot that is none is the engine's to refuse.
            Doorbell::Drained { class: Class::LowLatency, slot, .. }
                if slot < config.slots.slots_per_class() =>
            {
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
    use crate::engine::call::CallId;
    use crate::engine::lots::LotsAtStart;
    use crate::engine::route::{Policy, RouteLimits};
    use crate::engine::slots::{SlotConfig, SlotLayout};
    use crate::topo::{Cluster, Server, ServerId};
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

    fn config() -> EngineConfig {
        let cluster = Arc::new(Cluster::uniform(2, Server::new(2, &[1; 2], 1)));
        let sizes = SlotConfig { slot_bytes: 4096, send_slots: 2, recv_slots: 1, put_bytes: 4096 };
        EngineConfig {
            rank: Rank(0),
            slots: SlotLayout::new(&cluster, ServerId(0), sizes).unwrap(),
            cluster,
            work_queues: 3,
            armed_depth: 4,
            limits: RouteLimits { direct_bytes: 1, borrow_bytes: 1, policy: Policy::WHOLE },
            lookahead_bytes: 1,
            direct_nic: Some(NicIdx(0)),
            lots: LotsAtStart::All,
            call: CallId(0),
        }
    }

    /// What kernels ring for a fixed stream is known by its queue or its slot, and nothing else is taken for it.
    #[test]
    fn kernels_that_ring_for_a_fixed_stream_are_found() {
        let config = config();
        let mut fixed = FixedStreams::default();
        fixed.fix_send(Rank(2), Arc::default());
        fixed.fix_recv(Rank(3), Arc::default());
        let (low, put, nic) = (Class::LowLatency, Class::Put, NicIdx(0));
        let send = |class, queue| Doorbell::Send { class, queue, idx: 0, bytes: 8, signal: None };
        let drained = |class, src| Doorbell::Drained { class, nic, slot: config.slots.first_slot_of(src) };
        let found = |doorbell: Doorbell| fixed.trespass(&config, &doorbell);
        assert_eq!(found(send(low, config.put_queue(Rank(2)))), Some(Rank(2)));
        assert_eq!(found(drained(low, Rank(3))), Some(Rank(3)));
        assert_eq!(found(send(low, config.put_queue(Rank(3)))), None);
        assert_eq!(found(drained(low, Rank(2))), None);
        assert_eq!([put, low].map(|class| found(send(class, 2))), [None, None]);
        assert_eq!(found(send(put, config.put_queue(Rank(2)))), None);
        assert_eq!(found(drained(put, Rank(3))), None);
        let far = u32::MAX;
        assert_eq!(
            [send(low, far), Doorbell::Drained { class: low, nic, slot: far }].map(found),
            [None, None]
        );
    }
}
