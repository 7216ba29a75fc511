//! What the rules of NICs are tried on: two NICs that reach each other, and how a rule drives them.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::PATIENCE;
use crate::hw::{
    Lane, LinkState, LocalKey, LocalSpan, Nanos, Nic, NicDevice, NicEvent, PathId, RemoteKey, RemoteSpan,
    Work, WorkOp,
};
use crate::topo::{GpuIdx, NicId};

/// One of the two NICs of a pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// Most rules send from here.
    A = 0,
    /// To there.
    B = 1,
}

/// Two NICs of two servers. Each has registered memory beside it, of the same size at both ends and at least 1 MiB, and
/// an open path to the other.
pub trait NicPair {
    /// The device under test.
    type Nic: NicDevice;
    /// The device of an end.
    fn nic(&mut self, end: End) -> &mut Self::Nic;
    /// The number of an end's NIC in the job.
    fn id(&self, end: End) -> NicId;
    /// The path from an end to the other.
    fn path(&self, end: End) -> PathId;
    /// An end's memory, for its own NIC.
    fn key(&self, end: End) -> LocalKey;
    /// An end's memory, for the other NIC.
    fn remote(&self, end: End) -> RemoteKey;
    /// Writes an end's memory from the host.
    fn write(&mut self, end: End, offset: u64, bytes: &[u8]);
    /// Reads an end's memory from the host.
    fn read(&mut self, end: End, offset: u64, bytes: &mut [u8]);
    /// Memory of a GPU that is not beside an end's NIC: descriptor, GPU, size.
    fn elsewhere(&mut self, end: End) -> (OwnedFd, GpuIdx, u64);
    /// Takes an end's memory from its NIC, by the registrar and in another thread.
    fn deregister(&mut self, end: End);
    /// Registers an end's memory again, likewise; `key` and `remote` are then the new ones.
    fn register_again(&mut self, end: End);
    /// The time; it goes on by itself.
    fn now(&mut self) -> Nanos;
    /// How long whatever is on the way may take to show, beside some hundred polls.
    fn settle_time(&self) -> Duration {
        Duration::ZERO
    }
}

/// A pair whose cables can be pulled.
pub trait Cable: NicPair {
    /// Pulls an end's cable, or puts it back.
    fn set_link(&mut self, end: End, state: LinkState);
}

/// A pair with a third NIC, of another server, to which end A has a path of its own.
pub trait Third: NicPair {
    /// The device.
    fn third(&mut self) -> &mut Self::Nic;
    /// The path from end A.
    fn path_to_third(&self) -> PathId;
    /// Its memory, for end A.
    fn third_remote(&self) -> RemoteKey;
}

/// A pair with what its ends have reported.
pub(super) struct Driver<'a, P> {
    pub pair: &'a mut P,
    events: [Vec<NicEvent>; 2],
}

/// What a rule sends from end A to end B: `bytes` bytes, from and to `offset`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Message {
    pub offset: u64,
    pub bytes: u32,
    pub imm: u32,
}

impl<'a, P: NicPair> Driver<'a, P> {
    pub fn new(pair: &'a mut P) -> Self {
        Self { pair, events: [Vec::new(), Vec::new()] }
    }

    /// The write of a message from `from` to the other end. Its immediate is also its cookie.
    pub fn write(&self, from: End, m: Message) -> Work {
        let key = self.pair.remote(from.other());
        let local = LocalSpan { key: self.pair.key(from), offset: m.offset, bytes: m.bytes };
        let remote = RemoteSpan { rkey: key.rkey, remote_addr: key.remote_addr + m.offset };
        let op = WorkOp::Write { local, remote, imm: m.imm };
        Work { path: self.pair.path(from), lane: Lane::Put, op, cookie: m.imm.into() }
    }

    /// An inline write from A to `offset` at B.
    pub fn inline(&self, offset: u64, bytes: &[u8], cookie: u64) -> Work {
        let key = self.pair.remote(End::B);
        let remote = RemoteSpan { rkey: key.rkey, remote_addr: key.remote_addr + offset };
        let mut data = [0; crate::hw::INLINE_BYTES];
        data[..bytes.len()].copy_from_slice(bytes);
        let op = WorkOp::Inline { remote, data, len: bytes.len() as u8 };
        Work { path: self.pair.path(End::A), lane: Lane::Control, op, cookie }
    }

    /// Posts at an end and returns how many were taken.
    pub fn post(&mut self, from: End, work: &[Work]) -> Result<usize, crate::hw::HwError> {
        let now = self.pair.now();
        self.pair.nic(from).post(work, now)
    }

    /// Posts items at an end, all of them, later where need be.
    pub fn post_all(&mut self, from: End, mut work: &[Work]) {
        let deadline = Instant::now() + PATIENCE;
        while !work.is_empty() {
            let taken = self.post(from, work).expect("work is good");
            work = &work[taken..];
            self.poll();
            assert!(Instant::now() < deadline, "{} items still find no room", work.len());
        }
    }

    pub fn poll_end(&mut self, end: End) {
        let now = self.pair.now();
        self.pair.nic(end).poll(now, &mut self.events[end as usize]).expect("poll");
    }

    pub fn poll(&mut self) {
        self.poll_end(End::A);
        self.poll_end(End::B);
    }

    pub fn events(&self, end: End) -> &[NicEvent] {
        &self.events[end as usize]
    }

    /// Polls both ends until `end` has reported `count` events.
    pub fn poll_until(&mut self, end: End, count: usize) {
        let deadline = Instant::now() + PATIENCE;
        while self.events(end).len() < count {
            assert!(Instant::now() < deadline, "{end:?} reported {:?}, not {count} events", self.events(end));
            self.poll();
            std::thread::yield_now();
        }
    }

    /// Waits until `is_so`, which polls.
    pub fn await_that(&mut self, what: &str, mut is_so: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_so(self) {
            assert!(Instant::now() < deadline, "still waiting until {what}; told were {:?}", self.events);
            std::thread::yield_now();
        }
    }

    /// Polls long enough for whatever is on the way to show.
    pub fn settle(&mut self) {
        let until = Instant::now() + self.pair.settle_time();
        (0..200).for_each(|_| self.poll());
        while Instant::now() < until {
            self.poll();
            std::thread::yield_now();
        }
    }

    pub fn fill(&mut self, end: End, offset: u64, bytes: usize, value: u8) {
        self.pair.write(end, offset, &vec![value; bytes]);
    }

    pub fn bytes(&mut self, end: End, offset: u64, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        self.pair.read(end, offset, &mut out);
        out
    }
}

impl End {
    /// The end across.
    pub fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}
