//! What the simulated NICs of a job share: memory, links, and messages on the way, in virtual time.
//!
//! Harder than any real fabric, within the rules of reliable connections: messages take random times, so that paths
//! overtake each other; a payload is seen in memory only when its NIC flushes, or much later than its arrival is told; what a
//! sender has given up may still land, until the *receiver* closes the path.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::random::Random;
use crate::hw::{LinkState, Nanos, WorkError};
use crate::topo::NicId;
use crate::words::{Ordering, WordSlice, Words};

/// Longest and shortest times, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct WireTimes {
    /// A message's way through the fabric.
    pub way_ns: (Nanos, Nanos),
    /// From landing to the sender's completion.
    pub ack_ns: (Nanos, Nanos),
    /// From a loss to the sender's failed completion: its retries.
    pub retry_ns: (Nanos, Nanos),
    /// From a payload's arrival to when it would be seen without a flush.
    pub unseen_ns: (Nanos, Nanos),
}

impl Default for WireTimes {
    fn default() -> Self {
        Self {
            way_ns: (1_000, 20_000),
            ack_ns: (500, 5_000),
            retry_ns: (50_000, 300_000),
            unseen_ns: (5_000, 100_000),
        }
    }
}

/// What a message carries.
#[derive(Clone, Debug)]
pub(super) enum Cargo {
    /// Bytes for relay memory, and the immediate.
    Payload { bytes: Vec<u8>, imm: u32 },
    /// A word for a segment.
    Word(u64),
}

/// A message between two NICs.
#[derive(Clone, Debug)]
pub(super) struct Flight {
    pub(super) from: NicId,
    pub(super) to: NicId,
    pub(super) cookie: u64,
    pub(super) rkey: u64,
    pub(super) addr: u64,
    pub(super) cargo: Cargo,
    generation: u32,
    /// Whether its sender still waits for it.
    awaited: bool,
}

/// One direction of a path.
#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    /// The receiver takes nothing.
    shut: bool,
    /// A loss: nothing behind it gets through.
    broken: bool,
    generation: u32,
    last_due: Nanos,
}

/// An arrival, landed and to be polled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Landed {
    pub(super) from: NicId,
    pub(super) imm: u32,
    pub(super) bytes: u32,
}

/// A completion for a sender.
#[derive(Clone, Copy, Debug)]
pub(super) struct Done {
    pub(super) to: NicId,
    pub(super) cookie: u64,
    pub(super) result: Result<(), WorkError>,
}

struct NicSide {
    link: LinkState,
    dead: bool,
    byte_per_us: u64,
    tx_free_at: Nanos,
    relay: Vec<u8>,
    /// Parts of it that were taken back: whoever reads or writes there uses memory that is not his any more.
    taken: Vec<std::ops::Range<usize>>,
    /// Payload that has landed and that nobody can see yet: when it is seen, where, what.
    unseen: Vec<(Nanos, usize, Vec<u8>)>,
    landed: VecDeque<Landed>,
    done: BTreeMap<(Nanos, u64), Done>,
}

pub(super) struct State {
    now: Nanos,
    random: Random,
    times: WireTimes,
    nics: Vec<NicSide>,
    lanes: Vec<Lane>,
    /// By key.
    segments: Vec<WordSlice>,
    /// Words of segments in which paths are told of, per segment.
    path_words: Vec<std::ops::Range<usize>>,
    flights: BTreeMap<u64, Flight>,
    due: BinaryHeap<Reverse<(Nanos, u64)>>,
    next: u64,
    /// What was done that must not be.
    trespass: Option<String>,
    /// A mutation: fences are told as never counted.
    forget_fences: bool,
}

/// Keys of relay memories; below are those of segments.
const RELAY_KEYS: u64 = 1 << 32;

/// A handle on the wire.
#[derive(Clone)]
pub struct SimWire(Arc<Mutex<State>>);

impl SimWire {
    /// A wire for NICs of these rates (bytes per microsecond), without relay memory yet.
    pub fn new(seed: u64, times: WireTimes, nics: &[u64]) -> Self {
        let side = |&byte_per_us: &u64| NicSide {
            link: LinkState::Up,
            dead: false,
            byte_per_us,
            tx_free_at: 0,
            relay: Vec::new(),
            taken: Vec::new(),
            unseen: Vec::new(),
            landed: VecDeque::new(),
            done: BTreeMap::new(),
        };
        Self(Arc::new(Mutex::new(State {
            now: 0,
            random: Random::new(seed),
            times,
            lanes: vec![Lane::default(); nics.len() * nics.len()],
            nics: nics.iter().map(side).collect(),
            segments: Vec::new(),
            path_words: Vec::new(),
            flights: BTreeMap::new(),
            due: BinaryHeap::new(),
            next: 0,
            trespass: None,
            forget_fences: false,
        })))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Key of a NIC's relay memory.
    pub fn relay_key(nic: NicId) -> u64 {
        RELAY_KEYS + u64::from(nic.0)
    }

    /// Relay memory beside a NIC; returns where it lies.
    pub fn add_memory(&self, nic: NicId, bytes: u64) -> u64 {
        let side = &mut self.lock().nics[nic.idx()];
        let place = side.relay.len();
        side.relay.resize(place + bytes as usize, 0);
        place as u64
    }

    /// Takes it back: from now on nobody may touch it.
    pub fn take_memory(&self, nic: NicId, place: u64, bytes: u64) {
        self.lock().nics[nic.idx()].taken.push(place as usize..(place + bytes) as usize);
    }

    /// Who touched memory that was taken back, if anybody did.
    pub fn trespass(&self) -> Option<String> {
        self.lock().trespass.clone()
    }

    /// Makes a server's segment reachable; returns its key. `path_words`: where owners tell of paths.
    pub fn add_segment(&self, words: WordSlice, path_words: std::ops::Range<usize>) -> u64 {
        let mut state = self.lock();
        state.segments.push(words);
        state.path_words.push(path_words);
        state.segments.len() as u64 - 1
    }

    /// Virtual time.
    pub fn now(&self) -> Nanos {
        self.lock().now
    }

    /// When something on the wire is due next.
    pub fn next_due(&self) -> Option<Nanos> {
        let state = self.lock();
        let flight = state.due.peek().map(|Reverse((at, _))| *at);
        let done = state.nics.iter().filter_map(|n| n.done.keys().next().map(|&(at, _)| at)).min();
        flight.into_iter().chain(done).min()
    }

    /// Goes on to `now`: messages land.
    pub fn advance(&self, now: Nanos) {
        let mut state = self.lock();
        while let Some(&Reverse((at, id))) = state.due.peek().filter(|Reverse((at, _))| *at <= now) {
            state.due.pop();
            state.now = state.now.max(at);
            if let Some(flight) = state.flights.remove(&id) {
                state.land(flight);
            }
        }
        state.now = now;
        let seen = |side: &mut NicSide| {
            let (ready, rest): (Vec<_>, Vec<_>) = side.unseen.drain(..).partition(|&(at, ..)| at <= now);
            side.unseen = rest;
            ready.into_iter().for_each(|(_, offset, bytes)| side.see(offset, &bytes));
        };
        state.nics.iter_mut().filter(|side| !side.unseen.is_empty()).for_each(seen);
    }

    /// Pulls a cable, or puts it back.
    pub fn set_link(&self, nic: NicId, link: LinkState) {
        self.lock().nics[nic.idx()].link = link;
    }

    /// A NIC's process is gone: nothing is taken in, nothing is answered.
    pub fn kill(&self, nic: NicId) {
        self.lock().nics[nic.idx()].dead = true;
    }

    /// Divides a NIC's rate.
    pub fn slow_down(&self, nic: NicId, by: u64) {
        let side = &mut self.lock().nics[nic.idx()];
        side.byte_per_us = (side.byte_per_us / by).max(1);
    }

    /// A mutation for tests of the tests: words about paths say fence 0, so that any answer is believed.
    pub fn forget_fences(&self) {
        self.lock().forget_fences = true;
    }

    /// Reads relay memory as a kernel does.
    pub fn read(&self, nic: NicId, offset: u64, bytes: usize) -> Vec<u8> {
        let mut state = self.lock();
        state.enter(nic, offset, bytes, "a kernel reads");
        state.nics[nic.idx()].relay[offset as usize..][..bytes].to_vec()
    }

    /// Writes relay memory as a kernel does.
    pub fn write(&self, nic: NicId, offset: u64, bytes: &[u8]) {
        let mut state = self.lock();
        state.enter(nic, offset, bytes.len(), "a kernel writes");
        state.nics[nic.idx()].see(offset as usize, bytes);
    }
}

impl NicSide {
    fn see(&mut self, offset: usize, bytes: &[u8]) {
        self.relay[offset..][..bytes.len()].copy_from_slice(bytes);
    }
}

impl State {
    pub(super) fn lane_is_broken(&self, from: NicId, to: NicId) -> bool {
        self.lanes[from.idx() * self.nics.len() + to.idx()].broken
    }

    fn lane(&mut self, from: NicId, to: NicId) -> &mut Lane {
        let at = from.idx() * self.nics.len() + to.idx();
        &mut self.lanes[at]
    }

    pub(super) fn link(&self, nic: NicId) -> LinkState {
        self.nics[nic.idx()].link
    }

    /// Whether a place may be used.
    fn enter(&mut self, nic: NicId, offset: u64, bytes: usize, who: &str) {
        let (from, to) = (offset as usize, offset as usize + bytes);
        let taken = |range: &std::ops::Range<usize>| from < range.end && range.start < to;
        if self.nics[nic.idx()].taken.iter().any(taken) && self.trespass.is_none() {
            self.trespass =
                Some(format!("{who} memory beside {nic} that was taken back, at {} ns", self.now));
        }
    }

    pub(super) fn read_relay(&mut self, nic: NicId, offset: u64, bytes: u32) -> Vec<u8> {
        self.enter(nic, offset, bytes as usize, "the NIC reads");
        self.nics[nic.idx()].relay[offset as usize..][..bytes as usize].to_vec()
    }

    fn pick(&mut self, (from, to): (Nanos, Nanos)) -> Nanos {
        self.random.between(from, to)
    }

    /// Sends a message; it lands, or is lost, in its time. Messages of one path stay in order.
    pub(super) fn send(
        &mut self,
        from: NicId,
        to: NicId,
        cookie: u64,
        (rkey, addr): (u64, u64),
        cargo: Cargo,
    ) {
        let bytes = match &cargo {
            Cargo::Payload { bytes, .. } => bytes.len() as u64,
            Cargo::Word(_) => 0,
        };
        let way = self.pick(self.times.way_ns);
        let side = &mut self.nics[from.idx()];
        let begin = side.tx_free_at.max(self.now);
        side.tx_free_at = begin + 1000 * bytes / side.byte_per_us;
        let sent_at = side.tx_free_at;
        let lane = self.lane(from, to);
        lane.last_due = (sent_at + way).max(lane.last_due + 1);
        let (due, generation) = (lane.last_due, lane.generation);
        let id = self.next;
        self.next += 1;
        self.flights.insert(id, Flight { from, to, cookie, rkey, addr, cargo, generation, awaited: true });
        self.due.push(Reverse((due, id)));
    }

    fn land(&mut self, flight: Flight) {
        let Flight { from, to, .. } = flight;
        let lane = *self.lane(from, to);
        let links_up = self.link(from) == LinkState::Up && self.link(to) == LinkState::Up;
        if lane.shut
            || lane.broken
            || lane.generation != flight.generation
            || !links_up
            || self.nics[to.idx()].dead
        {
            self.lane(from, to).broken |= lane.generation == flight.generation;
            let after = if lane.broken { (0, 1000) } else { self.times.retry_ns };
            let error = if lane.broken { WorkError::Flushed } else { WorkError::RetryExceeded };
            return self.report(&flight, after, Err(error));
        }
        match &flight.cargo {
            Cargo::Word(word) => self.write_word(flight.rkey, flight.addr, *word),
            Cargo::Payload { bytes, imm } => {
                self.enter(to, flight.addr, bytes.len(), "a message lands in");
                let landed = Landed { from, imm: *imm, bytes: bytes.len() as u32 };
                let seen_at = self.now + self.random.between(self.times.unseen_ns.0, self.times.unseen_ns.1);
                let side = &mut self.nics[to.idx()];
                side.unseen.push((seen_at, flight.addr as usize, bytes.clone()));
                side.landed.push_back(landed);
            }
        }
        self.report(&flight, self.times.ack_ns, Ok(()));
    }

    fn write_word(&mut self, rkey: u64, addr: u64, word: u64) {
        let at = (addr / 8) as usize;
        let segment = rkey as usize;
        let forget = self.forget_fences && self.path_words[segment].contains(&at);
        let word = if forget { word & !((1 << 31) - 1) } else { word };
        self.segments[segment].word(at).store(word, Ordering::Release);
    }

    /// Control words complete only when they fail.
    fn report(&mut self, flight: &Flight, after: (Nanos, Nanos), result: Result<(), WorkError>) {
        let silent = matches!(flight.cargo, Cargo::Word(_)) && result.is_ok();
        if !flight.awaited || silent || self.nics[flight.from.idx()].dead {
            return;
        }
        let at = self.now + self.pick(after);
        self.complete(flight.from, at, Done { to: flight.to, cookie: flight.cookie, result });
    }

    pub(super) fn complete(&mut self, nic: NicId, at: Nanos, done: Done) {
        let id = self.next;
        self.next += 1;
        self.nics[nic.idx()].done.insert((at, id), done);
    }

    pub(super) fn take_done(&mut self, nic: NicId) -> Vec<Done> {
        let now = self.now;
        let side = &mut self.nics[nic.idx()];
        if side.done.is_empty() {
            return Vec::new();
        }
        let rest = side.done.split_off(&(now + 1, 0));
        std::mem::replace(&mut side.done, rest).into_values().collect()
    }

    pub(super) fn take_landed(&mut self, nic: NicId) -> Vec<Landed> {
        self.nics[nic.idx()].landed.drain(..).collect()
    }

    pub(super) fn flush(&mut self, nic: NicId) {
        let side = &mut self.nics[nic.idx()];
        for (_, offset, bytes) in std::mem::take(&mut side.unseen) {
            side.see(offset, &bytes);
        }
    }

    /// The sender's side of closing: it waits for nothing any more. What is on the way may land all the same.
    pub(super) fn give_up(&mut self, from: NicId, to: NicId) {
        let now = self.now;
        let awaited = |f: &&mut Flight| f.from == from && f.to == to && f.awaited;
        let give_up = |f: &mut Flight| {
            f.awaited = false;
            f.cookie
        };
        let flushed: Vec<_> = self.flights.values_mut().filter(awaited).map(give_up).collect();
        for cookie in flushed {
            self.complete(from, now, Done { to, cookie, result: Err(WorkError::Flushed) });
        }
    }

    /// The receiver's side of closing: nothing lands any more.
    pub(super) fn shut(&mut self, from: NicId, to: NicId) {
        let lane = self.lane(from, to);
        lane.shut = true;
        lane.generation += 1;
    }

    /// Opens one end: what is sent from now on is taken in, and sent.
    pub(super) fn reopen(&mut self, here: NicId, there: NicId) {
        let inward = self.lane(there, here);
        inward.shut = false;
        inward.generation += 1;
        self.lane(here, there).broken = false;
    }

    /// Whether a NIC's work on a path is all completed, and everything that came over it was told.
    pub(super) fn is_drained(&self, here: NicId, there: NicId) -> bool {
        let flying = self.flights.values().any(|f| f.from == here && f.to == there && f.awaited);
        let side = &self.nics[here.idx()];
        let told = side.done.values().all(|d| d.to != there) && side.landed.iter().all(|l| l.from != there);
        told && !flying
    }

    pub(super) fn now(&self) -> Nanos {
        self.now
    }
}
