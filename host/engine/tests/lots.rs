//! Relay memory that is lent and asked back at any moment: nothing uses what is not there, no call needs what it does not get,
//! and what is asked back comes back.

use super::*;
use crate::engine::lots::{self, is_permanent};
use crate::engine::slots::Lot;
use crate::hw::RemoteKey;

const KEY: RemoteKey = RemoteKey { remote_addr: 0, rkey: 1, bytes: 1 };

fn world(cluster: Cluster, seed: u64) -> World {
    let mut world = World::new(cluster, seed);
    let config =
        |r| EngineConfig { lots: LotsAtStart::Permanent, ..engine_config(&world.cluster, Rank(r), 0) };
    world.engines = (0..world.cluster.ranks()).map(|r| Engine::new(config(r))).collect();
    world.memory = Some(all_lots(&world.cluster).filter(|&at| permanent(&world.cluster, at)).collect());
    world
}

/// With more NICs beside each server than a rank has permanent lots at.
fn wide_cluster(kind: u8) -> Cluster {
    match kind % 3 {
        0 => Cluster::uniform(2, Server::new(2, &[1; 4], 1)),
        1 => Cluster::uniform(3, Server::new(3, &[1; 3], 1)),
        _ => Cluster::new(vec![
            Server::new(2, &[1; 4], 1),
            Server::new(1, &[1; 5], 1),
            Server::new(4, &[1; 4], 1),
        ]),
    }
}

fn all_lots(cluster: &Cluster) -> impl Iterator<Item = (Rank, NicIdx, Class)> + '_ {
    let nics = |rank| cluster.server(cluster.server_of(rank)).nics.len();
    let of = move |rank| lots::all(nics(rank)).map(move |(class, nic)| (rank, nic, class));
    (0..cluster.ranks()).map(Rank).flat_map(of)
}

fn permanent(cluster: &Cluster, (rank, nic, class): (Rank, NicIdx, Class)) -> bool {
    is_permanent(cluster, cluster.server_of(rank), Lot { nic, gpu: cluster.gpu_of(rank), class })
}

impl World {
    /// Lends a lot that is not there, or asks back one that is.
    fn change_a_lot(&mut self) {
        let lots: Vec<_> = all_lots(&self.cluster).filter(|&at| !permanent(&self.cluster, at)).collect();
        if lots.is_empty() {
            return;
        }
        let (rank, nic, class) = lots[self.draw(lots.len())];
        let engine = &mut self.engines[rank.idx()];
        if self.memory.as_mut().unwrap().insert((rank, nic, class)) {
            engine.on_lot_lent(nic, class, KEY);
        } else {
            engine.recall_lot(nic, class);
        }
    }

    fn take_lots_back(&mut self) {
        for r in 0..self.engines.len() {
            while let Some((nic, class)) = self.engines[r].poll_returned_lot() {
                let lot = (Rank(r as u32), nic, class);
                assert!(self.memory.as_mut().unwrap().remove(&lot), "{lot:?} came back twice");
                assert!(!self.occupied.iter().any(|o| (o.0, o.1, o.2) == lot), "a message lies in {lot:?}");
                assert!(
                    !self.sending.iter().any(|s| (s.0, s.1, s.2) == lot),
                    "a message leaves from {lot:?}"
                );
            }
        }
    }

    /// Like [`run`](World::run), with lots that come and go.
    fn run_with_lots(&mut self, steps: usize, one_in: usize) {
        for _ in 0..steps {
            self.take_lots_back();
            if self.draw(one_in) == 0 {
                self.change_a_lot();
            }
            if !self.step() {
                return;
            }
        }
        let states: Vec<_> = self.engines.iter().map(Engine::describe).collect();
        panic!("still busy after {steps} steps: {states:#?}");
    }
}

fn exchange_with_lots(world: &mut World, id: u64, class: Class, pieces: &[Piece], one_in: usize) {
    world.received.clear();
    world.transfer_of = HashMap::new();
    let calls = calls(&world.cluster, id, class, pieces);
    let mut ranks: Vec<usize> = (0..calls.len()).collect();
    while !ranks.is_empty() {
        let at = world.draw(ranks.len());
        let rank = ranks.swap_remove(at);
        // As the proxy has it: the server's others may still need this rank's NICs.
        for _ in 0..1000 {
            if world.engines[rank].turns_finished() {
                break;
            }
            world.step();
        }
        world.engines[rank].open(&calls[rank], world.now).unwrap();
        let steps = world.draw(20);
        for _ in 0..steps {
            world.take_lots_back();
            world.change_a_lot();
            world.step();
        }
    }
    world.run_with_lots(100_000, one_in);
    let expected: u64 = pieces.iter().map(|p| messages(p.bytes, MESSAGE)).sum();
    let states: Vec<_> = world.engines.iter().map(Engine::describe).collect();
    assert_eq!(world.received.len() as u64, expected, "{states:#?}");
    assert!(world.engines.iter().all(|e| !e.is_busy() && e.is_quiet()), "{states:#?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn calls_end_whatever_is_lent_and_asked_back(
        seed in any::<u64>(),
        kind in any::<u8>(),
        style in 0u8..4,
        one_in in 3usize..200,
    ) {
        let mut world = world(wide_cluster(kind), seed);
        for id in 1..5 {
            let (class, planned, free) = [
                (Class::Put, false, true),
                (Class::Put, false, false),
                (Class::Plan, true, false),
                (if id % 2 == 0 { Class::Put } else { Class::Plan }, id % 2 == 1, false),
            ][usize::from(style)];
            let pieces = any_pieces(&world.cluster, seed ^ id, planned, free);
            exchange_with_lots(&mut world, id, class, &pieces, one_in);
        }
        all_comes_back(&mut world);
    }
}

/// Between calls, everything that is lent comes back when it is asked for, and can be lent again.
fn all_comes_back(world: &mut World) {
    for (rank, nic, class) in all_lots(&world.cluster.clone()) {
        world.engines[rank.idx()].recall_lot(nic, class);
    }
    world.run_with_lots(10_000, usize::MAX);
    world.take_lots_back();
    let left = world.memory.as_ref().unwrap();
    assert!(left.iter().all(|&at| permanent(&world.cluster, at)), "not given back: {left:?}");
}

#[test]
fn a_call_wants_the_lots_that_it_prescribes() {
    let cluster = Cluster::uniform(2, Server::new(4, &[1; 4], 1));
    let wanted = |nics| {
        let piece = Piece { src: Rank(0), dst: Rank(4), bytes: 100, nics, transfer: None };
        let calls = calls(&cluster, 1, Class::Put, &[piece]);
        [0, 4].map(|r| lots::wanted(&calls[r], &cluster, Rank(r as u32)))
    };
    let lots = |nics: &[u32]| nics.iter().map(|&k| (NicIdx(k), Class::Put)).collect::<Vec<_>>();
    assert_eq!(wanted(Some((NicIdx(0), NicIdx(1)))), [lots(&[]), lots(&[])], "the direct NIC and the spare");
    assert_eq!(wanted(Some((NicIdx(0), NicIdx(2)))), [lots(&[]), lots(&[2])]);
    assert_eq!(wanted(None), [lots(&[2, 3]), lots(&[2, 3])], "any may be taken");
}

/// Where slots lie is told again with every credit that is: also while these are asked back.
#[test]
fn credits_that_are_told_again_come_with_their_memory() {
    let cluster = Arc::new(Cluster::uniform(2, Server::new(2, &[1; 4], 1)));
    let config = EngineConfig { lots: LotsAtStart::Permanent, ..engine_config(&cluster, Rank(0), 0) };
    let (mut engine, nic, class) = (Engine::new(config), NicIdx(2), Class::Put);
    let told = |engine: &mut Engine| {
        let words = std::iter::from_fn(|| engine.poll_credit()).map(|control| control.write);
        let of_the_line = |word: &CreditWrite| match *word {
            CreditWrite::Memory { to, class: c, nic: k, .. }
            | CreditWrite::Slot { to, class: c, nic: k, .. } => (to, c, k) == (Rank(2), class, nic),
            _ => false,
        };
        words.filter(of_the_line).collect::<Vec<_>>()
    };
    assert_eq!(told(&mut engine), [], "nothing is there yet");
    engine.on_lot_lent(nic, class, KEY);
    let first = told(&mut engine);
    assert!(matches!(
        first[..],
        [CreditWrite::Memory { key: KEY, .. }, CreditWrite::Slot { .. }, CreditWrite::Slot { .. }]
    ));
    engine.recall_lot(nic, class);
    assert_eq!(told(&mut engine), [], "no new credits");
    engine.on_path(NicIdx(0), NicId(4), PathNews::Down, 0);
    engine.on_path(NicIdx(0), NicId(4), PathNews::PeerFenced { fence: 1 }, 0);
    assert_eq!(told(&mut engine), first);
}
