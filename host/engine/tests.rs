//! Engines against each other, without threads, memory or time: every event that is due may come next, in an order drawn
//! from a seed. What must hold in any order is checked as it goes.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use proptest::prelude::*;

use super::call::{Call, CallId, Direction, Incoming, Run, Turn, messages};
use super::route::{NicState, Policy, RouteLimits};
use super::slots::{SlotConfig, SlotLayout};
use super::*;
use crate::topo::Server;

mod lots;

const MESSAGE: u32 = 100;
const CONFIG: SlotConfig = SlotConfig { slot_bytes: MESSAGE, send_slots: 3, recv_slots: 2, put_bytes: 0 };

/// What is under way, by the rank that has to do something next.
#[derive(Clone, Debug)]
enum Due {
    Fill(Rank, Arm),
    Send(Rank, Post),
    Complete(Rank, u64),
    Arrive { src: Rank, post: Post },
    Drain(Rank, Publish),
    Credit(Rank, CreditWrite),
}

impl Due {
    /// Words from one rank to another come in their order, as they go by one path.
    fn goes_before(&self, other: &Self) -> bool {
        let pair = |due: &Self| match due {
            Self::Credit(from, word) => Some((*from, word.to())),
            _ => None,
        };
        pair(self).is_some() && pair(self) == pair(other)
    }
}

struct World {
    cluster: Arc<Cluster>,
    engines: Vec<Engine>,
    due: Vec<Due>,
    random: u64,
    /// Filled send slots, by rank, NIC and slot; and lent receive slots that hold a message.
    sending: HashSet<(Rank, NicIdx, Class, u32)>,
    received: HashMap<(Rank, Rank, u64), u32>,
    occupied: HashSet<(Rank, NicIdx, Class, u32)>,
    /// Planned messages on the way through a NIC: transfer -> how many.
    on_nic: HashMap<(ServerId, NicIdx, Direction), HashMap<u32, u32>>,
    transfer_of: HashMap<(Rank, u32), u32>,
    /// Lots that are there; `None`: all are, for ever.
    memory: Option<HashSet<(Rank, NicIdx, Class)>>,
    /// Whether transfers may not overlap at all.
    strict: bool,
    now: Nanos,
}

fn engine_config(cluster: &Arc<Cluster>, rank: Rank, lookahead_bytes: u64) -> EngineConfig {
    let slots = SlotLayout::new(cluster, cluster.server_of(rank), CONFIG).unwrap();
    EngineConfig {
        rank,
        cluster: Arc::clone(cluster),
        slots,
        work_queues: 2,
        armed_depth: 4,
        limits: RouteLimits { direct_bytes: 200, borrow_bytes: 400, policy: Policy::WHOLE },
        lookahead_bytes,
        direct_nic: cluster.direct_nic(rank),
        lots: LotsAtStart::All,
        call: CallId(0),
    }
}

fn engine(cluster: &Arc<Cluster>, rank: Rank, lookahead_bytes: u64) -> Engine {
    Engine::new(engine_config(cluster, rank, lookahead_bytes))
}

impl World {
    fn new(cluster: Cluster, seed: u64) -> Self {
        Self::with_lookahead(cluster, seed, 0)
    }

    fn with_lookahead(cluster: Cluster, seed: u64, lookahead_bytes: u64) -> Self {
        let cluster = Arc::new(cluster);
        let engines = (0..cluster.ranks()).map(|r| engine(&cluster, Rank(r), lookahead_bytes)).collect();
        let (due, now) = (Vec::new(), 0);
        Self {
            cluster,
            engines,
            due,
            random: seed | 1,
            sending: HashSet::new(),
            received: HashMap::new(),
            occupied: HashSet::new(),
            on_nic: HashMap::new(),
            transfer_of: HashMap::new(),
            memory: None,
            strict: lookahead_bytes == 0,
            now,
        }
    }

    fn draw(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % below as u64) as usize
    }

    /// What the load table would say: turns of the owner; NICs of others idle unless their user has bytes there.
    fn tell_views(&mut self) {
        for server in (0..self.cluster.server_count()).map(ServerId) {
            for nic in (0..self.cluster.server(server).nics.len() as u32).map(NicIdx) {
                let owner = self.cluster.owner_of(self.cluster.nic_id(server, nic));
                let [egress_turn, ingress_turn] = self.engines[owner.idx()].turns(nic);
                let users =
                    || self.cluster.ranks_of(server).filter(|&r| self.cluster.direct_nic(r) == Some(nic));
                let state = |busy: bool| if busy { NicState::Busy } else { NicState::Idle };
                let egress = state(users().any(|r| self.engines[r.idx()].egress_bytes(nic) > 0));
                let ingress = state(users().any(|r| self.engines[r.idx()].ingress_bytes(nic) > 0));
                let load = |state| NicLoad { state, borrowed_bytes: 0 };
                let view =
                    NicView { egress: load(egress), ingress: load(ingress), egress_turn, ingress_turn };
                for rank in self.cluster.ranks_of(server) {
                    self.engines[rank.idx()].update_nic(nic, view);
                }
            }
            self.tell_server(server);
        }
    }

    /// What the load table would say of a server's processes.
    fn tell_server(&mut self, server: ServerId) {
        let ranks = || self.cluster.ranks_of(server);
        for rank in ranks() {
            let call = self.engines[rank.idx()].config().call;
            let others = || ranks().map(|r| &self.engines[r.idx()]);
            let detours = others().any(|e| e.config().call == call && e.detours());
            let done = |e: &Engine| e.config().call > call || e.config().call == call && e.is_quiet();
            let view = ServerView { all_done: others().all(done), detours };
            self.engines[rank.idx()].update_server(view);
        }
    }

    fn assert_there(&self, rank: Rank, nic: NicIdx, class: Class) {
        let there = self.memory.as_ref().is_none_or(|m| m.contains(&(rank, nic, class)));
        assert!(there, "{rank} uses memory of {class:?} beside {nic} that is not there");
    }

    fn poll(&mut self) {
        self.tell_views();
        for r in 0..self.engines.len() {
            let rank = Rank(r as u32);
            let engine = &mut self.engines[r];
            while let Some(arm) = engine.poll_arm() {
                assert!(arm.slot < CONFIG.send_slots);
                self.due.push(Due::Fill(rank, arm));
            }
            while let Some(post) = engine.poll_post() {
                self.due.push(Due::Send(rank, post));
            }
            while let Some(control) = engine.poll_credit() {
                self.due.push(Due::Credit(rank, control.write));
            }
            while let Some(arrival) = engine.poll_publish() {
                let seen = self.received.entry((arrival.src, rank, arrival.seq)).or_default();
                assert_eq!(*seen, 0, "message {} of {} to {rank} came twice", arrival.seq, arrival.src);
                *seen = arrival.bytes;
                self.due.push(Due::Drain(rank, arrival));
            }
        }
    }

    /// Does one thing that is due; false when nothing is.
    fn step(&mut self) -> bool {
        self.now += 1;
        self.poll();
        if self.due.is_empty() {
            return false;
        }
        let at = self.draw(self.due.len());
        let at = self.due.iter().position(|d| d.goes_before(&self.due[at])).unwrap_or(at);
        let due = self.due.remove(at);
        self.carry_out(due);
        true
    }

    fn carry_out(&mut self, due: Due) {
        let now = self.now;
        match due {
            Due::Fill(rank, arm) => {
                let slot = (rank, arm.nic, arm.class, arm.slot);
                self.assert_there(rank, arm.nic, arm.class);
                assert!(self.sending.insert(slot), "{rank} armed a send slot that is in use");
                let Arm { class, queue, idx, bytes, .. } = arm;
                let doorbell = Doorbell::Send { class, queue, idx, bytes: bytes.into(), signal: None };
                self.engines[rank.idx()].on_doorbell(doorbell, now).unwrap();
                if let Some(&transfer) =
                    self.transfer_of.get(&(rank, arm.piece)).filter(|_| class == Class::Plan)
                {
                    self.enter_nic(self.cluster.server_of(rank), arm.nic, Direction::Egress, transfer);
                }
            }
            Due::Send(src, post) => {
                self.assert_there(src, post.nic, post.class);
                self.due.push(Due::Complete(src, post.cookie));
                self.due.push(Due::Arrive { src, post });
                self.sending.remove(&(src, post.nic, post.class, post.slot));
                self.moved(src, post.nic, Direction::Egress, &post, self.cluster.server_of(post.dst));
            }
            Due::Complete(rank, cookie) => {
                self.engines[rank.idx()].on_completed(cookie, Ok(()), now).unwrap()
            }
            Due::Arrive { src, post } => {
                let slot = (post.dst, post.dst_nic, post.class, post.dst_slot);
                self.assert_there(post.dst, post.dst_nic, post.class);
                assert!(self.occupied.insert(slot), "{src} wrote into a slot that is in use");
                self.moved(post.dst, post.dst_nic, Direction::Ingress, &post, self.cluster.server_of(src));
                self.engines[post.dst.idx()].on_arrival(post.dst_nic, post.imm, post.bytes, now).unwrap();
            }
            Due::Drain(rank, p) => {
                self.assert_there(rank, p.nic, p.class);
                self.occupied.remove(&(rank, p.nic, p.class, p.slot));
                let doorbell = Doorbell::Drained { class: p.class, nic: p.nic, slot: p.slot };
                self.engines[rank.idx()].on_doorbell(doorbell, now).unwrap();
            }
            Due::Credit(from, word) => self.engines[word.to().idx()].on_word(from, word, now).unwrap(),
        }
    }

    /// With no look-ahead, a NIC never has messages of two transfers between arming and moving.
    fn enter_nic(&mut self, server: ServerId, nic: NicIdx, direction: Direction, transfer: u32) {
        let on_nic = self.on_nic.entry((server, nic, direction)).or_default();
        *on_nic.entry(transfer).or_default() += 1;
        let present: Vec<_> = on_nic.iter().filter(|(_, n)| **n > 0).map(|(t, _)| *t).collect();
        assert!(!self.strict || present == [transfer], "transfers {present:?} overlap on {nic} of {server}");
    }

    fn moved(&mut self, rank: Rank, nic: NicIdx, direction: Direction, post: &Post, peer: ServerId) {
        if post.class != Class::Plan {
            return;
        }
        let server = self.cluster.server_of(rank);
        let owner = self.cluster.owner_of(self.cluster.nic_id(server, nic));
        self.engines[owner.idx()].on_nic_moved(nic, direction, peer, post.bytes.into());
        if let Some(on_nic) = self.on_nic.get_mut(&(server, nic, direction)) {
            on_nic.values_mut().filter(|n| **n > 0).for_each(|n| *n -= 1);
        }
    }

    fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            if !self.step() {
                return;
            }
        }
        panic!("still busy after {steps} steps");
    }
}

/// A piece between two ranks with its route, all by local numbers.
#[derive(Clone, Copy, Debug)]
struct Piece {
    src: Rank,
    dst: Rank,
    bytes: u64,
    nics: Option<(NicIdx, NicIdx)>,
    transfer: Option<u32>,
}

/// The calls of all ranks for some pieces, at most one per cell.
fn calls(cluster: &Cluster, id: u64, class: Class, pieces: &[Piece]) -> Vec<Call> {
    let call = |rank: Rank| {
        let sends = pieces.iter().enumerate().filter(|(_, p)| p.src == rank).map(|(i, p)| Run {
            piece: i as u32,
            dst: p.dst,
            first_seq: 0,
            bytes: p.bytes,
            egress: p.nics.map(|n| n.0),
            ingress: p.nics.map(|n| n.1),
            transfer: p.transfer,
            queue: None,
        });
        let incoming = pieces.iter().filter(|p| p.dst == rank).map(|p| Incoming {
            src: p.src,
            bytes: p.bytes,
            ingress: p.nics.map(|n| n.1),
            transfer: p.transfer,
        });
        Call {
            id: CallId(id),
            class,
            message_bytes: MESSAGE,
            timeout_ns: 1_000_000,
            sends: sends.collect(),
            incoming: incoming.collect(),
            turns: if class == Class::Plan { turns(cluster, rank, pieces) } else { Vec::new() },
        }
    };
    (0..cluster.ranks()).map(|r| call(Rank(r))).collect()
}

fn turns(cluster: &Cluster, rank: Rank, pieces: &[Piece]) -> Vec<Turn> {
    let mut turns: Vec<Turn> = Vec::new();
    for p in pieces {
        let Some((egress, ingress)) = p.nics else { continue };
        // As the planner has it: what is loose comes last.
        let transfer = p.transfer.unwrap_or(u32::MAX);
        let (from, to) = (cluster.server_of(p.src), cluster.server_of(p.dst));
        for (nic, direction, here, peer) in
            [(egress, Direction::Egress, from, to), (ingress, Direction::Ingress, to, from)]
        {
            if cluster.owner_of(cluster.nic_id(here, nic)) != rank {
                continue;
            }
            let key = (nic, direction, transfer, peer);
            let known = turns.iter_mut().find(|t| (t.nic, t.direction, t.transfer, t.peer) == key);
            match known {
                Some(turn) => turn.bytes += p.bytes,
                None => turns.push(Turn { nic, direction, transfer, peer, bytes: p.bytes }),
            }
        }
    }
    turns.sort_by_key(|t| t.transfer);
    turns
}

fn cluster(kind: u8) -> Cluster {
    match kind % 3 {
        0 => Cluster::uniform(2, Server::new(2, &[1; 2], 1)),
        1 => Cluster::uniform(3, Server::new(2, &[1; 1], 1)),
        _ => Cluster::new(vec![
            Server::new(2, &[1; 3], 1),
            Server::new(1, &[1; 2], 1),
            Server::new(3, &[1; 2], 1),
        ]),
    }
}

/// Every remote cell at random; planned pieces by transfer `src server * servers + dst server`, any NICs.
fn any_pieces(cluster: &Cluster, seed: u64, planned: bool, free: bool) -> Vec<Piece> {
    let mut random = seed | 1;
    let mut draw = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    let ranks = || (0..cluster.ranks()).map(Rank);
    let mut pieces = Vec::new();
    for (src, dst) in ranks().flat_map(|s| ranks().map(move |d| (s, d))) {
        let (from, to) = (cluster.server_of(src), cluster.server_of(dst));
        if from == to || draw(4) == 0 {
            continue;
        }
        let mut nic = |server: ServerId| NicIdx(draw(cluster.server(server).nics.len() as u64) as u32);
        let nics = (!free).then(|| (nic(from), nic(to)));
        // Every pair of servers has its turn several times, as exact Birkhoff repeats them.
        let round = draw(3) as u32;
        let transfer = planned.then(|| (round * 10 + to.0 + cluster.server_count() - from.0) * 100 + from.0);
        pieces.push(Piece { src, dst, bytes: 1 + draw(1500), nics, transfer });
    }
    pieces
}

/// Opens the calls of all ranks and runs until nothing is due; everything must have come exactly once.
fn exchange(world: &mut World, id: u64, class: Class, pieces: &[Piece]) {
    world.received.clear();
    world.transfer_of =
        pieces.iter().enumerate().filter_map(|(i, p)| Some(((p.src, i as u32), p.transfer?))).collect();
    let mut order: Vec<Call> = calls(&world.cluster, id, class, pieces);
    let mut ranks: Vec<usize> = (0..order.len()).collect();
    // Ranks come to a call one by one, while others are at work in it already.
    while !ranks.is_empty() {
        let at = world.draw(ranks.len());
        let rank = ranks.swap_remove(at);
        let call = std::mem::replace(&mut order[rank], calls(&world.cluster, id, class, &[])[rank].clone());
        world.engines[rank].open(&call, world.now).unwrap();
        for _ in 0..world.draw(20) {
            world.step();
        }
    }
    world.run(200_000);
    for p in pieces {
        let count = messages(p.bytes, MESSAGE);
        for seq in 0..count {
            let bytes = (p.bytes - seq * u64::from(MESSAGE)).min(MESSAGE.into()) as u32;
            assert_eq!(world.received.get(&(p.src, p.dst, seq)), Some(&bytes), "{p:?}, message {seq}");
        }
    }
    let expected: u64 = pieces.iter().map(|p| messages(p.bytes, MESSAGE)).sum();
    assert_eq!(world.received.len() as u64, expected);
    assert!(world.engines.iter().all(|e| !e.is_busy() && e.is_quiet()));
    assert!(world.engines.iter().all(Engine::turns_finished), "bytes that no turn has counted");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn nothing_is_lost_or_doubled_in_any_order(seed in any::<u64>(), kind in any::<u8>(), free in any::<bool>()) {
        let mut world = World::new(cluster(kind), seed);
        for id in 1..4 {
            let pieces = any_pieces(&world.cluster, seed ^ id, false, free);
            exchange(&mut world, id, Class::Put, &pieces);
        }
    }

    #[test]
    fn plans_keep_their_order_on_every_nic(seed in any::<u64>(), kind in any::<u8>()) {
        let mut world = World::new(cluster(kind), seed);
        for id in 1..4 {
            let pieces = any_pieces(&world.cluster, seed ^ id, true, false);
            exchange(&mut world, id, Class::Plan, &pieces);
        }
    }

    #[test]
    fn plans_with_a_look_ahead_never_stall(seed in any::<u64>(), kind in any::<u8>(), ahead in 1u64..1000) {
        let mut world = World::with_lookahead(cluster(kind), seed, ahead);
        for id in 1..6 {
            let pieces = any_pieces(&world.cluster, seed ^ id, true, false);
            exchange(&mut world, id, Class::Plan, &pieces);
        }
    }

    #[test]
    fn loose_plans_are_counted_by_owners_who_come_late(seed in any::<u64>(), kind in any::<u8>()) {
        let mut world = World::with_lookahead(cluster(kind), seed, 100);
        for id in 1..5 {
            let pieces = any_pieces(&world.cluster, seed ^ id, id % 2 == 0, false);
            exchange(&mut world, id, Class::Plan, &pieces);
        }
    }

    #[test]
    fn classes_take_turns_without_disturbing_each_other(seed in any::<u64>(), kind in any::<u8>()) {
        let mut world = World::new(cluster(kind), seed);
        for id in 1..5 {
            let class = if id % 2 == 0 { Class::Plan } else { Class::Put };
            let pieces = any_pieces(&world.cluster, seed ^ id, class == Class::Plan, false);
            exchange(&mut world, id, class, &pieces);
        }
    }

    #[test]
    fn hostile_events_are_errors_and_never_panics(
        queue in any::<u32>(), idx in any::<u64>(), bytes in any::<u64>(), nic in any::<u32>(), slot in any::<u32>(),
        imm in any::<u32>(), len in any::<u32>(),
    ) {
        let cluster = Arc::new(cluster(0));
        let mut e = engine(&cluster, Rank(0), 0);
        let send = Doorbell::Send { class: Class::Put, queue, idx, bytes, signal: None };
        prop_assert!(e.on_doorbell(send, 0).is_err());
        let drained = Doorbell::Drained { class: Class::Plan, nic: NicIdx(nic), slot };
        prop_assert!(e.on_doorbell(drained, 0).is_err());
        prop_assert!(e.on_completed(idx, Ok(()), 0).is_err());
        prop_assert!(e.on_arrival(NicIdx(nic), imm | 1 << 31, len, 0).is_err());
        let _ = e.on_arrival(NicIdx(0), imm, len, 0);
    }
}

/// One rank to one rank of a 2 x 2 cluster whose other ranks are silent.
fn one_way(bytes: u64) -> (World, Vec<Piece>) {
    let world = World::new(cluster(0), 7);
    let piece = Piece { src: Rank(0), dst: Rank(2), bytes, nics: None, transfer: None };
    (world, vec![piece])
}

fn open_all(world: &mut World, id: u64, pieces: &[Piece]) {
    world.received.clear();
    for (engine, call) in world.engines.iter_mut().zip(calls(&world.cluster, id, Class::Put, pieces)) {
        engine.open(&call, 0).unwrap();
    }
}

#[test]
fn a_stall_names_what_it_waits_for() {
    let (mut world, pieces) = one_way(1000);
    open_all(&mut world, 1, &pieces);
    let engine = &mut world.engines[0];
    assert_eq!(engine.handle_timeout(999_999), Ok(()));
    let Err(EngineError::Stalled { waits_for, .. }) = engine.handle_timeout(1_000_000) else { panic!() };
    assert_eq!(waits_for, WaitsFor::Credit { dst: Rank(2), egress: NicIdx(0), ingress: None });
    let Err(error) = world.engines[2].handle_timeout(1_000_000) else { panic!() };
    let text = "no progress for 1 ms: waited for messages from rank 0 (0 of 10 have come, 4 slots out)";
    assert_eq!(error.to_string(), text);
    assert_eq!(world.engines[1].handle_timeout(u64::MAX), Ok(()), "who waits for nothing does not stall");
}

#[test]
fn a_call_cannot_open_over_an_unfinished_one() {
    let (mut world, pieces) = one_way(1000);
    open_all(&mut world, 1, &pieces);
    let call = &calls(&world.cluster, 2, Class::Put, &pieces)[0];
    assert_eq!(world.engines[0].open(call, 0), Err(EngineError::CallOpen { call: CallId(2) }));
}

#[test]
fn a_write_that_fails_for_ever_names_the_way() {
    let (mut world, pieces) = one_way(50);
    open_all(&mut world, 1, &pieces);
    let post = loop {
        if let Some(at) = world.due.iter().position(|d| matches!(d, Due::Send(..))) {
            let Due::Send(_, post) = world.due.swap_remove(at) else { unreachable!() };
            break post;
        }
        assert!(world.step());
    };
    let engine = &mut world.engines[0];
    let mut cookie = post.cookie;
    let error = loop {
        if let Err(e) = engine.on_completed(cookie, Err(WorkError::Refused), 1) {
            break e;
        }
        assert_eq!(engine.poll_move(), None, "it can leave from where it lies");
        cookie = engine.poll_post().expect("it goes again").cookie;
    };
    assert_eq!(
        error.to_string(),
        "NIC 0 could not write message 0 to rank 2 (its NIC 0): the path is closed"
    );
}

#[test]
fn borrowed_nics_are_used_only_while_their_owners_rest() {
    let (mut world, mut pieces) = one_way(5000);
    exchange(&mut world, 1, Class::Put, &pieces);
    assert!(world.engines[0].sent().relayed_bytes > 0, "idle NICs were there to be used");
    let before = world.engines[0].sent();
    // The others' owners are at it all the time: nothing may be relayed, whatever the order.
    let busy = Piece {
        src: Rank(1),
        dst: Rank(3),
        bytes: 50_000,
        nics: Some((NicIdx(1), NicIdx(1))),
        transfer: None,
    };
    pieces.push(busy);
    open_all(&mut world, 2, &pieces);
    while world.engines[0].is_busy() || world.engines[2].is_busy() {
        assert!(world.step());
        if !world.engines[1].is_busy() || !world.engines[3].is_busy() {
            break;
        }
    }
    assert_eq!(world.engines[0].sent().relayed_bytes, before.relayed_bytes);
}

/// A kernel fills a slot whose credit was called in while it did: the message must not go into a slot that is another's by now.
#[test]
fn a_message_whose_credit_was_called_in_before_it_was_sent_takes_another() {
    let cluster = cluster(0);
    let nics = Some((NicIdx(0), NicIdx(0)));
    let piece = Piece { src: Rank(0), dst: Rank(2), bytes: 100, nics, transfer: Some(1) };
    let mut world = World::new(cluster, 7);
    let engine = &mut world.engines[0];
    engine.open(&calls(&world.cluster, 1, Class::Plan, &[piece])[0], 0).unwrap();
    let egress_turn = TurnView { call: CallId(1), through: 1 };
    engine.update_nic(NicIdx(0), NicView { egress_turn, ..NicView::default() });
    let lent =
        |position| Lent { position, slot: 0, epoch: 1 + position as u8, transfer: Some(1), instead_of: None };
    engine.on_credit(Class::Plan, Rank(2), NicIdx(0), lent(0), 0).unwrap();
    let arm = engine.poll_arm().expect("it has a credit and its turn");
    engine.on_path(NicIdx(0), NicId(2), PathNews::Down, 0);
    engine.on_path(NicIdx(0), NicId(2), PathNews::PeerFenced { fence: 1 }, 0);
    let answer = Answer { fence: 1, called_in_before: 1, ..Answer::default() };
    engine.on_answer(Class::Plan, Rank(2), NicIdx(0), answer, 0);
    engine.on_path(NicIdx(0), NicId(2), PathNews::Up { fence: 1 }, 0);
    let Arm { class, queue, idx, bytes, .. } = arm;
    engine.on_doorbell(Doorbell::Send { class, queue, idx, bytes: bytes.into(), signal: None }, 0).unwrap();
    assert_eq!((engine.poll_move(), engine.poll_post()), (None, None), "its credit is void");
    engine.on_credit(Class::Plan, Rank(2), NicIdx(0), lent(1), 0).unwrap();
    assert_eq!(engine.poll_move(), None, "it leaves from where it lies");
    assert_eq!(engine.poll_post().map(|post| (post.dst_slot, post.slot)), Some((0, arm.slot)));
    assert!(!engine.is_quiet(), "it is on its way");
}
