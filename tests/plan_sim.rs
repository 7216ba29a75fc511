//! What plans promise to take, against the engines that carry them out in virtual time (docs/planning.md says where the
//! two differ).

use fuselink::abi::{FL_CLASS_PLAN, FL_NO_NIC, FL_NO_TRANSFER};
use fuselink::doorbell::Class;
use fuselink::engine::call::{Call, CallId, Direction, Incoming, Run, Turn};
use fuselink::engine::route::RouteLimits;
use fuselink::engine::slots::SlotConfig;
use fuselink::plan::{self, CostModel, Demand, Method, PlanTable};
use fuselink::sim::world::{Delays, World, WorldConfig};
use fuselink::topo::{Cluster, NicIdx, Rank, Server, ServerId};

const MESSAGE_BYTES: u32 = 512 << 10;

fn nic(number: u16) -> Option<NicIdx> {
    (u32::from(number) != FL_NO_NIC).then_some(NicIdx(number.into()))
}

fn transfer(number: u32) -> Option<u32> {
    (number != FL_NO_TRANSFER).then_some(number)
}

/// What the engine has to do for a table.
fn call(table: &PlanTable) -> Call {
    assert_eq!(table.header().msg_class, FL_CLASS_PLAN);
    let run = |(piece, s): (usize, fuselink::abi::FlPlanSend)| Run {
        piece: piece as u32,
        dst: Rank(s.dst),
        first_seq: s.first_seq,
        bytes: s.bytes,
        egress: nic(s.egress),
        ingress: nic(s.ingress),
        transfer: transfer(s.transfer),
        queue: None,
    };
    let incoming = |r: fuselink::abi::FlPlanRecv| Incoming {
        src: Rank(r.src),
        bytes: r.bytes,
        ingress: nic(r.ingress),
        transfer: transfer(r.transfer),
    };
    let turn = |t: fuselink::abi::FlPlanTurn| Turn {
        nic: NicIdx(t.nic.into()),
        direction: if t.direction == 0 { Direction::Egress } else { Direction::Ingress },
        transfer: t.transfer,
        peer: ServerId(t.peer_server),
        bytes: t.bytes,
    };
    Call {
        id: CallId(0),
        class: Class::Plan,
        message_bytes: MESSAGE_BYTES,
        timeout_ns: u64::MAX / 2,
        sends: table.sends().enumerate().map(run).collect(),
        incoming: table.recvs().map(incoming).collect(),
        turns: table.turns().map(turn).collect(),
    }
}

fn config(cluster: &Cluster, lookahead_bytes: u64) -> WorldConfig {
    let message = u64::from(MESSAGE_BYTES);
    WorldConfig {
        cluster: cluster.clone(),
        slots: SlotConfig { slot_bytes: MESSAGE_BYTES, send_slots: 16, recv_slots: 8 },
        limits: RouteLimits { direct_bytes: 3 * message, borrow_bytes: 8 * message },
        idle_after_ns: 40_000,
        blocks: 8,
        armed_depth: 4,
        lookahead_bytes,
        delays: Delays::default(),
    }
}

/// Predicted and simulated time.
fn compare(cluster: &Cluster, demand: &Demand, method: Method, start_ns: u64, lookahead_bytes: u64) -> (u64, u64) {
    let model = CostModel { start_ns, message_bytes: MESSAGE_BYTES.into(), ..CostModel::default() };
    let schedule = plan::schedule(cluster, demand, method, &model).unwrap();
    let mut world = World::new(config(cluster, lookahead_bytes)).unwrap();
    for rank in (0..cluster.ranks()).map(Rank) {
        let table = PlanTable::compile(cluster, demand, &schedule, rank, MESSAGE_BYTES.into()).unwrap();
        world.open(rank, call(&table)).unwrap();
    }
    world.run_until_done().unwrap();
    let replay = plan::replay(cluster, &schedule, &model);
    println!(
        "{method:<10} chosen {:<10} transfers {:>3} cost {} predicted {} simulated {} ratio {:.4} {:?}",
        schedule.method.to_string(), schedule.transfers.len(), replay.cost_ns, replay.pipeline.done_ns, world.now(),
        world.now() as f64 / replay.pipeline.done_ns as f64, replay.pipeline,
    );
    (replay.pipeline.done_ns, world.now())
}

#[derive(Clone, Copy, Debug)]
enum Kind { Uniform, Random, Zipf, Hot }

/// Cells between servers only: what stays in a server never reaches an engine.
fn demand(cluster: &Cluster, kind: Kind, mean: u64) -> Demand {
    let mut state = 7u64;
    let mut draw = || { state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407); state >> 40 };
    let ranks = cluster.ranks();
    let cells = (0..ranks * ranks).map(|i| {
        let (src, dst) = (Rank(i / ranks), Rank(i % ranks));
        let drawn = draw();
        if cluster.server_of(src) == cluster.server_of(dst) { return 0; }
        match kind {
            Kind::Uniform => mean,
            Kind::Random => 2 * mean * drawn >> 24,
            Kind::Zipf => (mean as f64 * 4.0 / f64::powf(1.0 + (drawn % 64) as f64, 0.8)) as u64,
            Kind::Hot => if dst.0 == ranks - 1 { 4 * mean } else { mean / 2 },
        }
    });
    Demand::new(ranks, cells.collect(), 1).unwrap()
}

#[test]
fn explore() {
    let message = u64::from(MESSAGE_BYTES);
    let clusters = [
        ("4x4", Cluster::uniform(4, Server::new(4, &[400_000; 4], 450_000))),
        ("4x4 200GB/s", Cluster::uniform(4, Server::new(4, &[400_000; 4], 200_000))),
        ("4x4x2", Cluster::uniform(4, Server::new(4, &[400_000; 2], 450_000))),
        ("slow", Cluster::new((0..4).map(|s| Server::new(4, &[if s == 1 { 200_000 } else { 400_000 }; 4], 450_000)).collect())),
    ];
    for (name, cluster) in &clusters {
        for kind in [Kind::Uniform, Kind::Random, Kind::Zipf, Kind::Hot] {
            for (start, look) in [(0, 2 * message), (0, 4 * message), (20_000, 0)] {
                println!("-- {name} {kind:?} start {start} look {look}");
                for method in [Method::Ordered, Method::SpreadOut, Method::Birkhoff, Method::Loose] {
                    let demand = demand(cluster, kind, 2_000_000);
                    compare(cluster, &demand, method, start, look);
                }
            }
        }
    }
}
