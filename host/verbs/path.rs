//! One path: the queue pairs to a peer's NIC, what is under way on them, and what has come.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use ibverbs_sys as ffi;

use super::handshake::{Handshake, Heard, Phase};
use super::lanes::{Dealer, InTurn};
use super::ledger::{Ended, Entry, Ledger};
use super::memory::{HostMemory, Registered};
use super::port::Port;
use super::post::{Batch, Bytes, Request};
use super::queue_pair::{Failed, Prepared, Ready, Remote};
use super::raw::{Completions, Domain, QueuePairParts, SharedReceives};
use super::wire::{Address, Hello, LengthRing, MAX_QUEUE_PAIRS, Place};
use crate::hw::{INLINE_BYTES, Nanos, RemoteSpan, Work, WorkError, WorkOp};
use crate::topo::NicId;

/// How long a queue pair that was taken down may still report receives, where the device does not say when it is done.
const DRAIN_NS: Nanos = 50_000_000;
/// A device that has not flushed its work by then never will.
const ABANDON_NS: Nanos = 2_000_000_000;
/// The queue pair for control words.
const CONTROL: usize = 0;

/// What the paths of a NIC have in common.
pub(super) struct Gear {
    pub id: NicId,
    pub domain: Arc<Domain>,
    pub sends: Arc<Completions>,
    pub receives: Arc<Completions>,
    pub shared: Arc<SharedReceives>,
    pub port: Port,
}

impl Gear {
    fn queue_pairs(&self) -> usize {
        self.port.settings().lanes() + 1
    }

    fn traffic_class(&self, lane: usize) -> u8 {
        let settings = self.port.settings();
        if lane == CONTROL { settings.control_class() } else { settings.traffic_class }
    }

    fn make(&self) -> io::Result<Prepared> {
        let parts = QueuePairParts {
            domain: Arc::clone(&self.domain),
            sends: Arc::clone(&self.sends),
            receives: Arc::clone(&self.receives),
            shared: Some(Arc::clone(&self.shared)),
            kind: ffi::ibv_qp_type::IBV_QPT_RC,
            send_depth: self.port.settings().send_depth.into(),
            recv_depth: 0,
            inline_bytes: INLINE_BYTES as u32,
        };
        Prepared::new(parts, self.port.settings().port)
    }

    /// Words per lane in which a peer tells lengths: all that can have arrived unseen, and all that can be under way.
    fn length_words(&self) -> usize {
        let settings = self.port.settings();
        (usize::from(settings.recv_depth) + usize::from(settings.send_depth)).next_power_of_two()
    }
}

enum QueuePairs {
    None,
    Prepared(Vec<Prepared>),
    Ready(Vec<Ready>),
    Failed(Vec<Failed>),
}

/// A message that has come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    pub imm: u32,
    pub bytes: u32,
}

/// Names a request: path, generation, queue pair, number.
#[derive(Clone, Copy)]
pub(super) struct RequestId {
    pub path: usize,
    pub generation: u8,
    pub lane: usize,
    pub number: u32,
}

impl RequestId {
    fn encode(self) -> u64 {
        (self.path as u64) << 48
            | u64::from(self.generation) << 40
            | (self.lane as u64) << 32
            | u64::from(self.number)
    }

    pub fn decode(id: u64) -> Self {
        Self {
            path: (id >> 48) as usize,
            generation: (id >> 40) as u8,
            lane: usize::from((id >> 32) as u8),
            number: id as u32,
        }
    }
}

/// Most paths of a NIC, as request ids have room.
pub(super) const MAX_PATHS: usize = 1 << 16;

/// One path.
pub(super) struct Path {
    idx: usize,
    pub peer: Address,
    pub handshake: Handshake,
    queue_pairs: QueuePairs,
    ledgers: Vec<Ledger>,
    batches: Vec<Batch>,
    dealer: Dealer,
    done: InTurn<Ended>,
    arrived: InTurn<Arrival>,
    /// Work that waits for the peer to agree.
    pub waiting: VecDeque<Work>,
    psn: u32,
    connected_to: u32,
    lengths: Option<HostMemory>,
    peer_lengths: LengthRing,
    /// Messages by lane.
    sent: Vec<u64>,
    received: Vec<u64>,
    fenced_at: Nanos,
    last_receives: usize,
    follow: Option<u32>,
    /// Why it is not open, for whoever asks.
    pub trouble: Option<String>,
}

impl Path {
    pub fn new(idx: usize, peer: Address, gear: &Gear) -> Self {
        let (lanes, depth) = (gear.port.settings().lanes(), usize::from(gear.port.settings().send_depth));
        Self {
            idx,
            peer,
            handshake: Handshake::default(),
            queue_pairs: QueuePairs::None,
            ledgers: (0..=lanes).map(|_| Ledger::new(depth)).collect(),
            batches: (0..=lanes).map(|_| Batch::default()).collect(),
            dealer: Dealer::new(lanes),
            done: InTurn::new(lanes),
            arrived: InTurn::new(lanes),
            waiting: VecDeque::new(),
            psn: 0,
            connected_to: 0,
            lengths: None,
            peer_lengths: LengthRing::default(),
            sent: vec![0; lanes],
            received: vec![0; lanes],
            fenced_at: 0,
            last_receives: 0,
            follow: None,
            trouble: None,
        }
    }

    fn generation(&self) -> u8 {
        self.handshake.generation() as u8
    }

    /// The numbers of its queue pairs.
    pub fn numbers(&self) -> Vec<u32> {
        match &self.queue_pairs {
            QueuePairs::None => Vec::new(),
            QueuePairs::Prepared(all) => all.iter().map(Prepared::number).collect(),
            QueuePairs::Ready(all) => all.iter().map(Ready::number).collect(),
            QueuePairs::Failed(all) => all.iter().map(Failed::number).collect(),
        }
    }

    /// Makes its queue pairs, unless there are any.
    pub fn make(&mut self, gear: &Gear, psn: u32) -> io::Result<()> {
        if !matches!(self.queue_pairs, QueuePairs::None) {
            return Ok(());
        }
        if gear.port.settings().adaptive_routing && self.lengths.is_none() {
            let words = gear.length_words() * gear.port.settings().lanes();
            self.lengths = Some(HostMemory::new(&gear.domain, words)?);
        }
        let made = (0..gear.queue_pairs()).map(|_| gear.make()).collect::<io::Result<_>>()?;
        self.queue_pairs = QueuePairs::Prepared(made);
        self.psn = psn;
        Ok(())
    }

    /// What this end has to say.
    pub fn hello(&self, gear: &Gear) -> Hello {
        let mut queue_pairs = [0; MAX_QUEUE_PAIRS];
        queue_pairs.iter_mut().zip(self.numbers()).for_each(|(place, number)| *place = number);
        let ring = |m: &HostMemory| LengthRing {
            remote_addr: m.memory().start(),
            rkey: m.memory().rkey(),
            words: m.words().len() as u32,
        };
        Hello {
            from: gear.id,
            to: self.peer.nic,
            token: self.peer.token,
            generation: self.handshake.generation(),
            connected_to: self.connected_to,
            psn: self.psn,
            asks: self.handshake.asks(),
            place: gear.port.place(),
            lengths: self.lengths.as_ref().map(ring).unwrap_or_default(),
            queue_pairs,
        }
    }

    /// What of a hello decides.
    pub fn heard(&self, hello: &Hello) -> Heard {
        let own = self.numbers().first().copied();
        Heard {
            generation: hello.generation,
            knows_us: own == Some(hello.connected_to) && hello.generation == self.handshake.generation(),
            asks: hello.asks,
        }
    }

    /// Connects its queue pairs to the peer's.
    pub fn connect(&mut self, gear: &Gear, hello: &Hello) -> io::Result<()> {
        let theirs = hello.queue_pairs.iter().take_while(|&&q| q != 0).count();
        let adaptive = hello.lengths.words > 0;
        if theirs != gear.queue_pairs() || adaptive != gear.port.settings().adaptive_routing {
            return Err(io::Error::other(
                "the peer was started with other FUSELINK_VERBS_QPS or FUSELINK_VERBS_ADAPTIVE_ROUTING",
            ));
        }
        let QueuePairs::Prepared(prepared) = std::mem::replace(&mut self.queue_pairs, QueuePairs::None)
        else {
            return Err(io::Error::other("there are no queue pairs to connect"));
        };
        let mut ready = Vec::new();
        for (lane, (own, &number)) in prepared.into_iter().zip(&hello.queue_pairs).enumerate() {
            let remote = Remote { place: hello.place, queue_pair: number, psn: hello.psn };
            ready.push(own.connect(&gear.port.local(gear.traffic_class(lane)), &remote, self.psn)?);
        }
        self.queue_pairs = QueuePairs::Ready(ready);
        self.connected_to = hello.queue_pairs[0];
        self.peer_lengths = hello.lengths;
        Ok(())
    }

    /// Whether an item finds room now.
    pub fn has_room(&self, op: &WorkOp) -> bool {
        match op {
            WorkOp::Inline { .. } => self.ledgers[CONTROL].has_room(1),
            WorkOp::Write { .. } => self.ledgers[1 + self.dealer.lane()].has_room(2),
        }
    }

    /// Adds an item to the batch; its bytes are in `memory`.
    pub fn stage(&mut self, work: &Work, memory: Option<&Registered>) {
        match work.op {
            WorkOp::Inline { remote, data, len } => {
                self.request(
                    CONTROL,
                    Entry::Control { cookie: work.cookie },
                    Bytes::Inline { data, len },
                    remote,
                    None,
                );
            }
            WorkOp::Write { local, remote, imm } => {
                let address = memory.and_then(|m| Some((m.address(local.offset, local.bytes)?, m.lkey())));
                let (address, lkey) = address.unwrap_or_default(); // Checked by whoever took the work.
                let bytes = Bytes::Registered { address, bytes: local.bytes, lkey };
                let message = Entry::Message { cookie: work.cookie, bytes: local.bytes };
                let lane = self.dealer.lane();
                if self.peer_lengths.words == 0 {
                    self.request(1 + lane, message, bytes, remote, Some(imm));
                } else {
                    self.request(1 + lane, Entry::Payload, bytes, remote, None);
                    let (length, place) = self.length_word(lane, local.bytes);
                    self.request(1 + lane, message, length, place, Some(imm));
                }
                self.sent[lane] += 1;
                self.dealer.dealt();
            }
        }
    }

    /// The word that tells the peer a message's length, and its place there.
    fn length_word(&self, lane: usize, bytes: u32) -> (Bytes, RemoteSpan) {
        let words = u64::from(self.peer_lengths.words) / self.sent.len() as u64;
        let at = lane as u64 * words + self.sent[lane] % words;
        let mut data = [0; INLINE_BYTES];
        data[..8].copy_from_slice(&u64::from(bytes).to_ne_bytes());
        let remote_addr = self.peer_lengths.remote_addr + 8 * at;
        (Bytes::Inline { data, len: 8 }, RemoteSpan { rkey: self.peer_lengths.rkey.into(), remote_addr })
    }

    fn request(&mut self, lane: usize, entry: Entry, bytes: Bytes, to: RemoteSpan, imm: Option<u32>) {
        let number = self.ledgers[lane].push(entry);
        let signalled = self.ledgers[lane].must_signal(false);
        let id = RequestId { path: self.idx, generation: self.generation(), lane, number }.encode();
        self.batches[lane].push(Request { id, bytes, to, imm, signalled });
    }

    /// Posts what was staged: one ring of the doorbell for each queue pair. What a queue pair does not take has failed.
    pub fn ring(&mut self, told: &mut Vec<Ended>) -> io::Result<()> {
        let QueuePairs::Ready(ready) = &mut self.queue_pairs else { return Ok(()) };
        let mut result = Ok(());
        let mut refused = Vec::new();
        for (lane, queue_pair) in ready.iter_mut().enumerate() {
            let (batch, ledger) = (&mut self.batches[lane], &mut self.ledgers[lane]);
            let Some(last) = batch.last_mut() else { continue };
            last.signalled = last.signalled || ledger.must_signal(true);
            if let Err((left, e)) = batch.ring(queue_pair.raw()) {
                let mut ended = Vec::new();
                ledger.take_back(left, WorkError::Flushed, &mut ended);
                refused.push((lane, ended));
                result = Err(e);
            }
        }
        for (lane, ended) in refused {
            self.tell(lane, ended, told);
        }
        result
    }

    /// A request has ended. Appends what must be told.
    pub fn on_completion(&mut self, id: RequestId, result: Result<(), WorkError>, told: &mut Vec<Ended>) {
        if id.generation != self.generation() {
            return;
        }
        let Some(ledger) = self.ledgers.get_mut(id.lane) else { return };
        let mut ended = Vec::new();
        ledger.on_completion(id.number, result, &mut ended);
        self.tell(id.lane, ended, told);
    }

    fn tell(&mut self, lane: usize, ended: Vec<Ended>, told: &mut Vec<Ended>) {
        if lane == CONTROL {
            told.extend(ended);
            return;
        }
        ended.into_iter().for_each(|e| self.done.put(lane - 1, e));
        while let Some(e) = self.done.take() {
            told.push(e);
        }
    }

    /// A message has come in by a lane.
    pub fn on_arrival(&mut self, lane: usize, imm: u32, bytes: u32) {
        let Some(lane) = lane.checked_sub(1) else { return };
        let bytes = self.arrived_bytes(lane).unwrap_or(bytes);
        self.received[lane] += 1;
        self.arrived.put(lane, Arrival { imm, bytes });
    }

    /// Under adaptive routing the peer has told the length in memory.
    fn arrived_bytes(&self, lane: usize) -> Option<u32> {
        let words = self.lengths.as_ref()?.words();
        let per_lane = words.len() / self.received.len();
        // Acquire: the device wrote the word before the completion that was read just now.
        fence(Ordering::Acquire);
        // Relaxed: see the fence.
        let word = words[lane * per_lane + self.received[lane] as usize % per_lane].load(Ordering::Relaxed);
        u32::try_from(word).ok()
    }

    /// The next message, in the order in which they were sent.
    pub fn next_arrival(&mut self) -> Option<Arrival> {
        self.arrived.take()
    }

    /// Whether anything is under way.
    pub fn is_busy(&self) -> bool {
        self.ledgers.iter().any(|l| !l.is_empty())
    }

    /// Takes the path down: what is under way is flushed, nothing more comes in. False if nothing was connected, so that
    /// nothing is left of it.
    pub fn fence(&mut self, now: Nanos, told: &mut Vec<Ended>) -> bool {
        // Work that was taken is posted even now, so that it fails as all other work does.
        let _ = self.ring(told);
        self.handshake.fence();
        let QueuePairs::Ready(ready) = std::mem::replace(&mut self.queue_pairs, QueuePairs::None) else {
            self.reset();
            return false;
        };
        let mut failed: Vec<Failed> = ready.into_iter().map(Ready::fail).collect();
        for (lane, queue_pair) in failed.iter_mut().enumerate() {
            let number = self.ledgers[lane].push(Entry::Marker);
            let id =
                RequestId { path: self.idx, generation: self.handshake.generation() as u8, lane, number };
            let bytes = Bytes::Registered { address: 0, bytes: 0, lkey: 0 };
            let to = RemoteSpan { rkey: 0, remote_addr: 0 };
            self.batches[lane].push(Request { id: id.encode(), bytes, to, imm: None, signalled: true });
            // Where even that is refused, the deadline of the drain ends the wait.
            let _ = self.batches[lane].ring(queue_pair.raw());
        }
        self.queue_pairs = QueuePairs::Failed(failed);
        (self.fenced_at, self.last_receives) = (now, 0);
        true
    }

    /// The device says that one of its queue pairs receives no more.
    pub fn on_last_receive(&mut self) {
        self.last_receives += 1;
    }

    /// The peer has gone on to another generation: this end does so when it is opened again.
    pub fn follow(&mut self, generation: u32) {
        self.follow = Some(generation);
    }

    /// After a fence: true once nothing of the old generation can come any more, neither completion nor arrival. Then the
    /// queue pairs are gone, and what has arrived is in `arrivals`.
    pub fn drain(&mut self, now: Nanos, told: &mut Vec<Ended>, arrivals: &mut Vec<Arrival>) -> bool {
        let QueuePairs::Failed(failed) = &self.queue_pairs else { return true };
        let queue_pairs = failed.len();
        let waited = now.saturating_sub(self.fenced_at);
        if waited > ABANDON_NS {
            for lane in 0..self.ledgers.len() {
                let mut ended = Vec::new();
                self.ledgers[lane].abandon(WorkError::Flushed, &mut ended);
                self.tell(lane, ended, told);
            }
        }
        let received = self.last_receives >= queue_pairs || waited > DRAIN_NS;
        if self.is_busy() || !received {
            return false;
        }
        arrivals.extend(self.arrived.drain());
        told.extend(self.done.drain());
        self.reset();
        true
    }

    fn reset(&mut self) {
        self.queue_pairs = QueuePairs::None;
        self.dealer = Dealer::new(self.sent.len());
        self.sent.fill(0);
        self.received.fill(0);
        self.connected_to = 0;
    }

    /// Goes on to the next generation, if the path was taken down and has drained.
    pub fn reopen(&mut self) -> bool {
        let drained = self.handshake.phase() == Phase::Fenced && matches!(self.queue_pairs, QueuePairs::None);
        if drained {
            match self.follow.take().filter(|&g| g > self.handshake.generation()) {
                Some(generation) => self.handshake.follow(generation),
                None => self.handshake.reopen(),
            }
        }
        drained
    }

    /// The peer is somewhere else now. True if it has moved.
    pub fn peer_moved(&mut self, place: Place) -> bool {
        let moved = self.peer.place != place;
        self.peer.place = place;
        moved
    }
}
