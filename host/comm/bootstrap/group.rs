//! What a rank knows of its group: who has come, the collectives under way, the failure if there is one. No sockets.
//!
//! Rank 0 passes every contribution on the moment it comes, so that every rank sees for itself who is missing.
//! A rank can be at most one collective ahead of another, since none ends without everybody's part: anything
//! further ahead breaks the protocol, which bounds what a hostile peer can make us hold.

use std::collections::{BTreeMap, VecDeque};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::error::{BootstrapError, Waiting};
use super::wire::{Bytes, Call, Frame, MAX_CONTRIBUTION_BYTES, Message, WireError, one_line};
use crate::comm::wake::{Wake, left, within};
use crate::topo::Rank;

/// Told of the failure once.
pub(super) type Callback = Box<dyn FnOnce(&BootstrapError) + Send>;

/// Longest that an abort waits for its words to leave.
const ABORT_FLUSH: Duration = Duration::from_secs(1);

/// What the caller's threads and the I/O thread share.
pub(super) struct Group {
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) deadline: Duration,
    /// Wakes the I/O thread: something is in an outbox, or the group is closing.
    pub(super) wake: Wake,
    state: Mutex<State>,
    changed: Condvar,
    /// Held through a collective: one at a time.
    turn: Mutex<()>,
    failed: Arc<AtomicBool>,
}

/// The part behind the lock.
pub(super) struct State {
    rank: u32,
    present: Vec<bool>,
    /// Who has said goodbye.
    pub(super) left: Vec<bool>,
    /// The next collective of each rank.
    next: Vec<u64>,
    calls: BTreeMap<u64, Gather>,
    failure: Option<BootstrapError>,
    callbacks: Vec<Callback>,
    /// Frames for each rank that there is a connection to.
    pub(super) outbox: Vec<Option<VecDeque<Frame>>>,
    /// Frames that are not fully with the system yet.
    pub(super) unsent: usize,
    /// Other ranks than 0: how many of our parts the system has taken.
    pub(super) parts_sent: u64,
    /// Connections that the I/O thread is to take over.
    pub(super) joined: Vec<(u32, TcpStream)>,
    /// Set by a close: when it gives up.
    pub(super) closing: Option<Instant>,
}

/// One collective under way.
struct Gather {
    parts: Vec<Option<(Call, Bytes)>>,
    missing: usize,
}

/// How a collective stands.
enum Progress {
    Done(Vec<Bytes>),
    Waiting(Vec<Rank>),
    Failed(BootstrapError),
}

impl State {
    fn new(rank: u32, size: u32) -> Self {
        let ranks = size as usize;
        let mut present = vec![false; ranks];
        present[rank as usize] = true;
        Self {
            rank,
            present,
            left: vec![false; ranks],
            next: vec![0; ranks],
            calls: BTreeMap::new(),
            failure: None,
            callbacks: Vec::new(),
            outbox: (0..ranks).map(|_| None).collect(),
            unsent: 0,
            parts_sent: 0,
            joined: Vec::new(),
            closing: None,
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Queues a frame for one rank, if there is a connection to it.
    pub(super) fn tell(&mut self, rank: u32, message: &Message) {
        if let Some(queue) = &mut self.outbox[rank as usize] {
            queue.push_back(message.into());
            self.unsent += 1;
        }
    }

    /// Queues a frame for every connected rank but one.
    pub(super) fn tell_all(&mut self, message: &Message, except: u32) {
        let frame = Frame::from(message);
        for (_, queue) in self.outbox.iter_mut().enumerate().filter(|(r, _)| *r != except as usize) {
            if let Some(queue) = queue {
                queue.push_back(frame.clone());
                self.unsent += 1;
            }
        }
    }

    fn missing(came: &[bool]) -> Vec<Rank> {
        (0u32..).zip(came).filter(|(_, came)| !**came).map(|(r, _)| Rank(r)).collect()
    }

    /// A message from the rank at the other end of a connection. The error, if any, is the group's failure.
    pub(super) fn handle(&mut self, from: u32, message: Message) -> Result<(), BootstrapError> {
        let broken = |source| BootstrapError::Protocol { rank: Rank(from), source };
        let (Message::Present { rank }
        | Message::Contribution { rank, .. }
        | Message::Died { rank }
        | Message::Left { rank }
        | Message::Abort { rank, .. }) = message;
        // Rank 0 speaks for anybody but us; others for themselves.
        if rank == self.rank || (from != 0 && rank != from) {
            return Err(broken(WireError::Rank { rank }));
        }
        match message {
            Message::Contribution { call, seq, bytes, .. } => {
                let message = Message::Contribution { rank, call, seq, bytes: bytes.clone() };
                self.contribute(rank, call, seq, bytes).map_err(broken)?;
                self.pass_on(&message, from);
            }
            Message::Left { .. } => {
                self.left[rank as usize] = true;
                self.pass_on(&message, from);
            }
            Message::Abort { reason, .. } => {
                return Err(BootstrapError::Aborted { rank: Rank(rank), reason });
            }
            Message::Present { .. } if from == 0 => self.present[rank as usize] = true,
            Message::Died { .. } if from == 0 => return Err(BootstrapError::PeerDied { rank: Rank(rank) }),
            Message::Present { .. } | Message::Died { .. } => return Err(broken(WireError::Unexpected)),
        }
        Ok(())
    }

    fn pass_on(&mut self, message: &Message, from: u32) {
        if self.rank == 0 {
            self.tell_all(message, from);
        }
    }

    /// Stores a rank's part.
    fn contribute(&mut self, rank: u32, call: Call, seq: u64, bytes: Bytes) -> Result<(), WireError> {
        let expected = self.next[rank as usize];
        let ours = self.next[self.rank as usize];
        if seq != expected || (rank != self.rank && seq > ours) {
            return Err(WireError::Sequence { seq, expected });
        }
        self.next[rank as usize] = seq + 1;
        let ranks = self.present.len();
        let empty = || Gather { parts: (0..ranks).map(|_| None).collect(), missing: ranks };
        let gather = self.calls.entry(seq).or_insert_with(empty);
        gather.parts[rank as usize] = Some((call, bytes));
        gather.missing -= 1;
        Ok(())
    }

    /// How our collective stands. A complete one counts even in a group that has failed since.
    fn progress(&mut self, call: Call, seq: u64) -> Progress {
        let Some(gather) = self.calls.get(&seq) else { return Progress::Waiting(Vec::new()) };
        let other = (0u32..)
            .zip(&gather.parts)
            .find_map(|(r, p)| p.as_ref().map(|p| (r, p.0)).filter(|p| p.1 != call));
        if let Some((rank, theirs)) = other {
            return Progress::Failed(BootstrapError::Mismatch { seq, rank: Rank(rank), ours: call, theirs });
        }
        // Our own part must be with the system, so that others get it even if this process ends now.
        let sent = self.rank == 0 || self.parts_sent > seq;
        if gather.missing == 0 && sent {
            let parts = self.calls.remove(&seq).map(|g| g.parts).unwrap_or_default();
            return Progress::Done(parts.into_iter().flatten().map(|(_, bytes)| bytes).collect());
        }
        if let Some(failure) = &self.failure {
            return Progress::Failed(failure.clone());
        }
        let came: Vec<_> = gather.parts.iter().map(Option::is_some).collect();
        let mut missing = Self::missing(&came);
        if missing.is_empty() {
            // It does not take our part.
            missing.push(Rank(0));
        }
        let gone = |rank: &&Rank| self.left[rank.idx()];
        // Whatever is still missing comes through rank 0.
        let root = [Rank(0)];
        match missing.iter().chain(&root).find(gone) {
            Some(&rank) => {
                Progress::Failed(BootstrapError::PeerLeft { rank, call: Waiting::Collective { call, seq } })
            }
            None => Progress::Waiting(missing),
        }
    }

    /// Queues what others must hear of a failure; they have not heard of it from elsewhere.
    fn announce(&mut self, failure: &BootstrapError) {
        let me = self.rank;
        let (message, origin) = match failure {
            BootstrapError::PeerDied { rank } => (Message::Died { rank: rank.0 }, rank.0),
            BootstrapError::Aborted { rank, reason } => {
                (Message::Abort { rank: rank.0, reason: reason.clone() }, rank.0)
            }
            other => (Message::Abort { rank: me, reason: other.to_string() }, me),
        };
        if me == 0 || origin == me {
            self.tell_all(&message, origin);
        }
    }
}

impl Group {
    pub(super) fn new(rank: u32, size: u32, deadline: Duration) -> Result<Self, BootstrapError> {
        Ok(Self {
            rank,
            size,
            deadline,
            wake: Wake::new().map_err(BootstrapError::os("make an event descriptor"))?,
            state: Mutex::new(State::new(rank, size)),
            changed: Condvar::new(),
            turn: Mutex::new(()),
            failed: Arc::new(AtomicBool::new(false)),
        })
    }

    /// The state. A thread that panicked under the lock left no step half done that matters to others.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells waiters that the state has changed.
    pub(super) fn notify(&self) {
        self.changed.notify_all();
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, until: Instant) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, left(until)).unwrap_or_else(PoisonError::into_inner).0
    }

    pub(super) fn failed_flag(&self) -> Arc<AtomicBool> {
        self.failed.clone()
    }

    pub(super) fn failure(&self) -> Option<BootstrapError> {
        self.lock().failure.clone()
    }

    /// Registers a callback, or calls it now.
    pub(super) fn on_failure(&self, callback: Callback) {
        let mut state = self.lock();
        match state.failure.clone() {
            None => state.callbacks.push(callback),
            Some(failure) => {
                drop(state);
                callback(&failure);
            }
        }
    }

    /// Rank 0: a rank has proven itself. Other ranks: the connection to rank 0.
    pub(super) fn join(&self, peer: u32, stream: TcpStream) {
        let mut state = self.lock();
        state.outbox[peer as usize] = Some(VecDeque::new());
        state.joined.push((peer, stream));
        state.present[peer as usize] = true;
        if self.rank == 0 {
            for rank in (0..self.size).filter(|r| *r != peer) {
                if state.present[rank as usize] {
                    state.tell(peer, &Message::Present { rank });
                }
            }
            state.tell_all(&Message::Present { rank: peer }, peer);
        }
        drop(state);
        self.wake.set();
    }

    /// Waits until all ranks are present. Once they are, a failure is the next call's.
    pub(super) fn wait_present(&self, until: Instant) -> Result<(), BootstrapError> {
        let mut state = self.lock();
        loop {
            let missing = State::missing(&state.present);
            if missing.is_empty() {
                return Ok(());
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            if left(until).is_zero() {
                drop(state);
                return Err(self.give_up(self.timeout(Waiting::Connect, missing, self.deadline)));
            }
            state = self.wait(state, until);
        }
    }

    fn timeout(&self, call: Waiting, missing: Vec<Rank>, waited: Duration) -> BootstrapError {
        BootstrapError::Timeout { call, missing, waited, turned_away: Vec::new() }
    }

    /// Who is not here yet.
    pub(super) fn absent(&self) -> Vec<Rank> {
        State::missing(&self.lock().present)
    }

    /// One collective: everybody's bytes, in rank order.
    pub(super) fn gather(
        &self,
        call: Call,
        bytes: &[u8],
        deadline: Duration,
    ) -> Result<Vec<Bytes>, BootstrapError> {
        if bytes.len() as u64 > MAX_CONTRIBUTION_BYTES {
            return Err(BootstrapError::TooLong { bytes: bytes.len() as u64, cap: MAX_CONTRIBUTION_BYTES });
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let until = within(deadline);
        let seq = self.begin(call, bytes)?;
        let mut state = self.lock();
        loop {
            match state.progress(call, seq) {
                Progress::Done(parts) => return Ok(parts),
                Progress::Waiting(missing) if left(until).is_zero() => {
                    drop(state);
                    return Err(self.give_up(self.timeout(
                        Waiting::Collective { call, seq },
                        missing,
                        deadline,
                    )));
                }
                Progress::Waiting(_) => state = self.wait(state, until),
                Progress::Failed(e @ BootstrapError::Mismatch { .. }) => {
                    drop(state);
                    return Err(self.give_up(e));
                }
                Progress::Failed(e) => return Err(e),
            }
        }
    }

    /// Sends our part and returns the collective's number.
    fn begin(&self, call: Call, bytes: &[u8]) -> Result<u64, BootstrapError> {
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let rank = self.rank;
        let seq = state.next[rank as usize];
        let bytes = Bytes::new(bytes.to_vec());
        let broken = |source| BootstrapError::Protocol { rank: Rank(rank), source };
        state.contribute(rank, call, seq, bytes.clone()).map_err(broken)?;
        state.tell_all(&Message::Contribution { rank, call, seq, bytes }, rank);
        drop(state);
        self.wake.set();
        Ok(seq)
    }

    /// Fails the group from a caller's thread, and waits until the others have been written to. Returns the failure
    /// that counts: the first.
    pub(super) fn give_up(&self, failure: BootstrapError) -> BootstrapError {
        self.announce(&failure);
        self.wake.set();
        let until = Instant::now() + ABORT_FLUSH.min(self.deadline);
        let mut state = self.lock();
        while state.unsent > 0 && !left(until).is_zero() {
            state = self.wait(state, until);
        }
        drop(state);
        self.publish(failure)
    }

    /// The failure of an abort by this rank.
    pub(super) fn aborted(&self, reason: &str) -> BootstrapError {
        BootstrapError::Aborted { rank: Rank(self.rank), reason: one_line(reason) }
    }

    /// Queues what others must hear, unless a failure is known already.
    pub(super) fn announce(&self, failure: &BootstrapError) {
        let mut state = self.lock();
        if state.failure.is_none() {
            state.announce(failure);
        }
    }

    /// Makes a failure known in this process; the first one counts, and is returned.
    pub(super) fn publish(&self, failure: BootstrapError) -> BootstrapError {
        let mut state = self.lock();
        let callbacks = match &state.failure {
            Some(first) => return first.clone(),
            None => std::mem::take(&mut state.callbacks),
        };
        state.failure = Some(failure.clone());
        // Pairs with the load in whatever loop polls the flag; the failure itself is read under the lock.
        self.failed.store(true, Ordering::Release);
        drop(state);
        self.notify();
        for callback in callbacks {
            // A callback that panics has said so; the others are still called.
            let call = std::panic::AssertUnwindSafe(|| callback(&failure));
            let _ = std::panic::catch_unwind(call);
        }
        failure
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(rank: u32, seq: u64) -> Message {
        Message::Contribution { rank, call: Call::Allgather, seq, bytes: Bytes::default() }
    }

    #[track_caller]
    fn broken(result: Result<(), BootstrapError>, by: u32) -> WireError {
        match result {
            Err(BootstrapError::Protocol { rank: Rank(r), source }) if r == by => source,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn nobody_speaks_for_others_but_rank_0() {
        let mut root = State::new(0, 3);
        for message in [part(2, 0), part(0, 0), Message::Left { rank: 2 }, Message::Died { rank: 2 }] {
            let rank = if message == part(0, 0) { 0 } else { 2 };
            assert_eq!(broken(root.handle(1, message), 1), WireError::Rank { rank });
        }
        for message in [Message::Present { rank: 1 }, Message::Died { rank: 1 }] {
            assert_eq!(broken(root.handle(1, message), 1), WireError::Unexpected);
        }
        let mut other = State::new(1, 3);
        assert_eq!(broken(other.handle(0, part(1, 0)), 0), WireError::Rank { rank: 1 });
        other.handle(0, part(2, 0)).unwrap();
        assert!(matches!(
            other.handle(0, Message::Died { rank: 2 }),
            Err(BootstrapError::PeerDied { rank: Rank(2) })
        ));
    }

    #[test]
    fn a_rank_is_at_most_one_call_ahead_and_never_repeats() {
        let mut state = State::new(0, 2);
        state.handle(1, part(1, 0)).unwrap();
        for seq in [0, 1, 2, u64::MAX] {
            assert_eq!(broken(state.handle(1, part(1, seq)), 1), WireError::Sequence { seq, expected: 1 });
        }
        state.contribute(0, Call::Allgather, 0, Bytes::default()).unwrap();
        state.handle(1, part(1, 1)).unwrap();
        assert!(matches!(state.progress(Call::Allgather, 0), Progress::Done(parts) if parts.len() == 2));
    }

    #[test]
    fn the_first_failure_stays_and_every_callback_hears_it_once() {
        let group = Group::new(0, 1, Duration::from_secs(1)).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let callback = |name: &'static str| {
            let tell = tell.clone();
            Box::new(move |failure: &BootstrapError| tell.send((name, failure.to_string())).unwrap())
        };
        group.on_failure(Box::new(|_| panic!("a user's callback")));
        group.on_failure(callback("early"));
        let first = group.give_up(group.aborted("first")).to_string();
        assert_eq!(group.give_up(group.aborted("second")).to_string(), first);
        group.on_failure(callback("late"));
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [("early", first.clone()), ("late", first)]);
        assert!(group.failed_flag().load(Ordering::Acquire));
    }
}
