//! Engines that put to each other, in an order drawn from a seed.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use proptest::prelude::*;

use super::AHEAD;
use crate::doorbell::{Class, Doorbell, Signal, SignalOp};
use crate::engine::call::CallId;
use crate::engine::lots::LotsAtStart;
use crate::engine::route::{Policy, RouteLimits};
use crate::engine::slots::{SlotConfig, SlotLayout};
use crate::engine::*;
use crate::topo::Server;

const PUT_BYTES: u32 = 64;
const CONFIG: SlotConfig = SlotConfig { slot_bytes: 100, send_slots: 3, recv_slots: 3, put_bytes: PUT_BYTES };
const DEPTH: u32 = 4;

enum Due {
    Post(Rank, Post),
    Arrive(Rank, Post),
    Complete(Rank, Post),
    /// The oldest control word of a rank.
    Credit(Rank),
    Drain(Rank, Publish),
}

/// What a kernel has put or may put: by source and destination.
#[derive(Default)]
struct Stream {
    armed: Vec<Arm>,
    /// Payload and signal of each message that was sent.
    sent: HashMap<u64, (u32, Option<Signal>)>,
    handed_on: u64,
    completed: u64,
    flushed: u64,
}

struct World {
    cluster: Arc<Cluster>,
    engines: Vec<Engine>,
    streams: HashMap<(Rank, Rank), Stream>,
    due: Vec<Due>,
    /// By rank: control words keep their order.
    controls: Vec<VecDeque<CreditWrite>>,
    /// By receiver, sender, class and NIC: credits read so far.
    read: HashMap<(Rank, Rank, Class, NicIdx), u64>,
    /// By NIC and server of the peer's: fences so far.
    fences: HashMap<(NicId, ServerId), u32>,
    closed: HashSet<(NicId, NicId)>,
    random: u64,
}

impl World {
    fn new(cluster: Cluster, seed: u64) -> Self {
        let cluster = Arc::new(cluster);
        let engine = |rank| {
            let slots = SlotLayout::new(&cluster, cluster.server_of(rank), CONFIG).unwrap();
            Engine::new(EngineConfig {
                rank,
                cluster: Arc::clone(&cluster),
                slots,
                work_queues: 2,
                armed_depth: DEPTH,
                limits: RouteLimits { direct_bytes: 200, borrow_bytes: 400, policy: Policy::WHOLE },
                lookahead_bytes: 0,
                direct_nic: cluster.direct_nic(rank),
                lots: LotsAtStart::All,
                call: CallId(0),
            })
        };
        let mut engines: Vec<_> = (0..cluster.ranks()).map(|r| engine(Rank(r))).collect();
        // No call is open, so NICs rest.
        let idle = NicLoad { state: NicState::Idle, borrowed_bytes: 0 };
        for engine in &mut engines {
            for nic in (0..engine.config().nics() as u32).map(NicIdx) {
                engine.update_nic(nic, NicView { egress: idle, ingress: idle, ..NicView::default() });
            }
        }
        let controls = vec![VecDeque::new(); engines.len()];
        let (streams, due) = (HashMap::new(), Vec::new());
        let (read, fences, closed) = (HashMap::new(), HashMap::new(), HashSet::new());
        Self { engines, cluster, streams, due, controls, read, fences, closed, random: seed | 1 }
    }

    fn draw(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % below as u64) as usize
    }

    fn poll(&mut self) {
        for r in 0..self.engines.len() {
            let (rank, engine) = (Rank(r as u32), &mut self.engines[r]);
            while let Some(arm) = engine.poll_arm() {
                assert_eq!((arm.class, arm.bytes), (Class::LowLatency, PUT_BYTES));
                let dst = Rank(arm.queue - 2);
                let stream = self.streams.entry((rank, dst)).or_default();
                stream.armed.push(arm);
                assert!(stream.armed.len() <= DEPTH as usize);
            }
            while let Some(moved) = engine.poll_move() {
                engine.on_moved(moved.ticket);
            }
            self.due.extend(std::iter::from_fn(|| engine.poll_post()).map(|post| Due::Post(rank, post)));
            while let Some(control) = engine.poll_credit() {
                self.controls[r].push_back(control.write);
                self.due.push(Due::Credit(rank));
            }
            while let Some((dst, messages)) = engine.poll_flushed() {
                let stream = self.streams.get_mut(&(rank, dst)).unwrap();
                assert!(messages > stream.flushed, "told only when it grows");
                assert!(messages <= stream.completed, "no more than have completed");
                stream.flushed = messages;
            }
            while let Some(arrival) = engine.poll_stream_arrival() {
                let stream = self.streams.get_mut(&(arrival.src, rank)).unwrap();
                assert_eq!(arrival.seq, stream.handed_on, "in order");
                assert_eq!(arrival.bytes, stream.sent[&arrival.seq].0);
                stream.handed_on += 1;
                self.due.push(Due::Drain(rank, arrival));
            }
            assert_eq!(engine.poll_publish(), None, "no call is open");
        }
    }

    /// A kernel of `src` fills any of the slots armed for `dst`, if there is one.
    fn put(&mut self, src: Rank, dst: Rank) -> bool {
        self.poll();
        let armed = self.streams.get(&(src, dst)).map_or(0, |s| s.armed.len());
        if armed == 0 {
            return false;
        }
        let at = self.draw(armed);
        let bytes = self.draw(PUT_BYTES as usize + 1) as u32;
        let signal = (self.draw(2) == 1).then_some(Signal { number: 3, op: SignalOp::Add, value: 9 });
        let stream = self.streams.get_mut(&(src, dst)).unwrap();
        let arm = stream.armed.swap_remove(at);
        assert!(stream.sent.insert(arm.idx, (bytes, signal)).is_none());
        let (class, queue, idx) = (Class::LowLatency, arm.queue, arm.idx);
        let doorbell = Doorbell::Send { class, queue, idx, bytes: bytes.into(), signal };
        self.engines[src.idx()].on_doorbell(doorbell, 0).unwrap();
        true
    }

    /// Does one thing that is due; false when nothing is.
    fn step(&mut self) -> bool {
        self.poll();
        if self.due.is_empty() {
            return false;
        }
        let at = self.draw(self.due.len());
        match self.due.swap_remove(at) {
            Due::Post(src, post) if self.closed.contains(&self.path(src, &post)) => {
                self.complete(src, &post, Err(WorkError::Refused));
            }
            Due::Post(src, post) => {
                let sent = self.streams[&(src, post.dst)].sent[&post.seq];
                assert_eq!((post.bytes, post.signal), sent);
                self.due.push(Due::Arrive(src, post));
            }
            Due::Arrive(src, post) => {
                self.arrive(src, &post);
                self.due.push(Due::Complete(src, post));
            }
            Due::Complete(src, post) => self.complete(src, &post, Ok(())),
            Due::Drain(rank, Publish { class, nic, slot, .. }) => {
                self.engines[rank.idx()].on_doorbell(Doorbell::Drained { class, nic, slot }, 0).unwrap();
            }
            Due::Credit(from) => {
                // Words that were taken before their time leave nothing here.
                if let Some(write) = self.controls[from.idx()].pop_front() {
                    self.control(from, write);
                }
            }
        }
        true
    }

    fn path(&self, src: Rank, post: &Post) -> (NicId, NicId) {
        let id = |rank: Rank, nic| self.cluster.nic_id(self.cluster.server_of(rank), nic);
        (id(src, post.nic), id(post.dst, post.dst_nic))
    }

    fn arrive(&mut self, src: Rank, post: &Post) {
        let engine = &mut self.engines[post.dst.idx()];
        engine.on_arrival(post.dst_nic, post.imm, post.bytes, 0).unwrap();
        self.streams.get_mut(&(src, post.dst)).unwrap().completed += 1;
    }

    fn complete(&mut self, src: Rank, post: &Post, result: Result<(), WorkError>) {
        self.engines[src.idx()].on_completed(post.cookie, result, 0).unwrap();
    }

    /// Credits of a line are read in the order of their positions; one that is told again is no news (`credit.rs`).
    fn control(&mut self, from: Rank, write: CreditWrite) {
        let to = &mut self.engines[write.to().idx()];
        match write {
            CreditWrite::Slot { class, nic, lent, .. } => {
                let next = self.read.entry((from, write.to(), class, nic)).or_default();
                assert!(lent.position <= *next, "a word was skipped");
                if lent.position == *next {
                    *next += 1;
                    to.on_credit(class, from, nic, lent, 0).unwrap();
                }
            }
            CreditWrite::State { .. } => panic!("no call is open"),
            word => to.on_word(from, word, 0).unwrap(),
        }
    }

    /// Tells all ranks of a NIC's server.
    fn tell(&mut self, nic: NicId, peer: NicId, news: PathNews) {
        for rank in self.cluster.ranks_of(self.cluster.server_of_nic(nic)) {
            self.engines[rank.idx()].on_path(self.cluster.nic_idx(nic), peer, news, 0);
        }
    }

    /// A path fails and is closed at both ends: of what was on it, some came and some did not, and nobody was told.
    fn fail(&mut self, (a, b): (NicId, NicId)) {
        self.poll();
        // What was said before is read: words on a way that closes are told again (`control.rs`), which is not the point.
        for r in 0..self.engines.len() {
            while let Some(write) = self.controls[r].pop_front() {
                self.control(Rank(r as u32), write);
            }
        }
        self.tell(a, b, PathNews::Down);
        self.tell(b, a, PathNews::Down);
        self.closed.extend([(a, b), (b, a)]);
        let doubted = |due: &Due, path: &dyn Fn(Rank, &Post) -> (NicId, NicId)| match due {
            Due::Arrive(src, post) | Due::Complete(src, post) => [(a, b), (b, a)].contains(&path(*src, post)),
            _ => false,
        };
        let (on_it, others): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.due).into_iter().partition(|due| doubted(due, &|s, p| self.path(s, p)));
        self.due = others;
        for due in on_it {
            match due {
                Due::Arrive(src, post) => {
                    if self.draw(2) == 0 {
                        self.arrive(src, &post);
                    }
                    self.complete(src, &post, Err(WorkError::Flushed));
                }
                Due::Complete(src, post) => self.complete(src, &post, Err(WorkError::RetryExceeded)),
                _ => unreachable!("partitioned"),
            }
        }
        for (nic, peer) in [(a, b), (b, a)] {
            let server = self.cluster.server_of_nic(peer);
            let counter = self.fences.entry((nic, server)).or_default();
            *counter += 1;
            let fence = *counter;
            let of_server = |n: &NicId| self.cluster.server_of_nic(*n) == server;
            let all_closed = (0..self.cluster.nics())
                .map(NicId)
                .filter(of_server)
                .all(|n| self.closed.contains(&(n, nic)));
            self.tell(nic, peer, PathNews::Fenced { fence, all_closed });
            self.tell(peer, nic, PathNews::PeerFenced { fence });
        }
    }

    fn reopen(&mut self, (a, b): (NicId, NicId)) {
        for (nic, peer) in [(a, b), (b, a)] {
            self.closed.remove(&(nic, peer));
            let fence = self.fences[&(peer, self.cluster.server_of_nic(nic))];
            self.tell(nic, peer, PathNews::Up { fence });
        }
    }

    fn pairs(&self) -> Vec<(Rank, Rank)> {
        let ranks = || (0..self.cluster.ranks()).map(Rank);
        let all = ranks().flat_map(|s| ranks().map(move |d| (s, d)));
        all.filter(|&(s, d)| self.cluster.server_of(s) != self.cluster.server_of(d)).collect()
    }

    fn settle(&mut self) {
        while self.step() {}
    }
}

fn clusters() -> impl Strategy<Value = Cluster> {
    prop_oneof![
        Just(Cluster::uniform(2, Server::new(2, &[1; 2], 1))),
        Just(Cluster::uniform(3, Server::new(1, &[1; 2], 1))),
        Just(Cluster::new(vec![Server::new(3, &[1], 1), Server::new(2, &[1, 0, 1], 1)])),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever happens in which order: each message once, in its order, with its bytes and signal; flushes tell the truth,
    /// and in the end all of it.
    #[test]
    fn messages_come_once_and_in_order(cluster in clusters(), seed in any::<u64>()) {
        let mut world = World::new(cluster, seed);
        let pairs = world.pairs();
        for _ in 0..400 {
            let (src, dst) = pairs[world.draw(pairs.len())];
            if world.draw(2) == 0 {
                world.put(src, dst);
            } else {
                world.step();
            }
        }
        world.settle();
        for (pair, stream) in &world.streams {
            // A slot that is armed and not filled holds up those behind it; below it all must have come.
            let first_armed = stream.armed.iter().map(|arm| arm.idx).min();
            let due = first_armed.unwrap_or(stream.sent.len() as u64);
            prop_assert_eq!((stream.handed_on, stream.flushed), (due, due), "{:?}", pair);
        }
        prop_assert!(world.engines.iter().all(Engine::is_quiet), "armed slots that nobody fills do not count");
    }

    /// Paths fail and come back between two servers, one always being left: still each message once, in its order, with its
    /// signal, since what is resent brings it again and what has come is not resent.
    #[test]
    fn messages_come_once_over_paths_that_fail(seed in any::<u64>()) {
        let mut world = World::new(Cluster::uniform(2, Server::new(2, &[1; 2], 1)), seed);
        let pairs = world.pairs();
        let path = |n: usize| (NicId(n as u32 / 2), NicId(2 + n as u32 % 2));
        for _ in 0..600 {
            let (src, dst) = pairs[world.draw(pairs.len())];
            match world.draw(20) {
                0 => {
                    let path = path(world.draw(4));
                    if world.closed.contains(&path) {
                        world.reopen(path);
                    } else if world.closed.len() < 6 {
                        world.fail(path);
                    }
                }
                n if n < 10 => {
                    world.put(src, dst);
                }
                _ => {
                    world.step();
                }
            }
        }
        world.settle();
        for (pair, stream) in &world.streams {
            let first_armed = stream.armed.iter().map(|arm| arm.idx).min();
            let due = first_armed.unwrap_or(stream.sent.len() as u64);
            prop_assert_eq!((stream.handed_on, stream.flushed), (due, due), "{:?}", pair);
        }
    }

    /// Slots that are armed and never used keep no other destination from getting some.
    #[test]
    fn a_destination_that_is_not_put_to_starves_nobody(cluster in clusters(), seed in any::<u64>()) {
        let mut world = World::new(cluster, seed);
        world.settle();
        let pairs = world.pairs();
        for &(src, dst) in &pairs {
            let armed = world.streams[&(src, dst)].armed.len() as u64;
            // The last credit is kept.
            prop_assert!(armed >= AHEAD.min(CONFIG.recv_slots - 1).into(), "{src} to {dst}: {armed}");
        }
        // One pair alone goes on for ever.
        let (src, dst) = pairs[world.draw(pairs.len())];
        for _ in 0..50 {
            let filled = world.put(src, dst);
            world.settle();
            prop_assert!(filled);
        }
    }
}

#[test]
fn what_does_not_fit_a_slot_is_refused() {
    let mut world = World::new(Cluster::uniform(2, Server::new(1, &[1], 1)), 1);
    world.settle();
    let arm = world.streams[&(Rank(0), Rank(1))].armed[0];
    let mut send = |queue, idx, bytes| {
        let doorbell = Doorbell::Send { class: Class::LowLatency, queue, idx, bytes, signal: None };
        world.engines[0].on_doorbell(doorbell, 0).map_err(|e| e.to_string())
    };
    assert!(send(arm.queue, arm.idx, u64::from(PUT_BYTES) + 1).is_err());
    assert!(send(arm.queue, arm.idx + 100, 1).is_err());
    assert!(send(arm.queue + 100, arm.idx, 1).is_err());
    assert!(send(arm.queue, arm.idx, 0).is_ok());
    assert!(send(arm.queue, arm.idx, 0).is_err(), "once");
}
