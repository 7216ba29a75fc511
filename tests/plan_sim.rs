//! What plans promise to take, against the engines that carry them out in virtual time (docs/planning.md says where the
//! two differ).

use fuselink::abi::{FL_CLASS_PLAN, FL_NO_NIC, FL_NO_TRANSFER};
use fuselink::doorbell::Class;
use fuselink::engine::call::{Call, CallId, Direction, Incoming, Run, Turn};
use fuselink::engine::route::{Policy, RouteLimits};
use fuselink::engine::slots::SlotConfig;
use fuselink::plan::{self, CostModel, Demand, Method, PlanTable, Schedule};
use fuselink::sim::relay::Relay;
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

/// What the engines wait for between two transfers, in [`Delays::default`]: the last arrival, a credit, an armed slot, a
/// message copied to its NIC, the doorbell. The cost model's start cost means this.
fn loop_ns(cluster: &Cluster) -> u64 {
    let d = Delays::default();
    let copy_ns = u64::from(MESSAGE_BYTES) * 1000 / cluster.server(ServerId(0)).scaleup_mbyte_per_s;
    d.arrival_ns + d.credit_ns + d.arm_ns + d.doorbell_ns + copy_ns
}

fn config(cluster: &Cluster, lookahead_bytes: u64) -> WorldConfig {
    let message = u64::from(MESSAGE_BYTES);
    WorldConfig {
        cluster: cluster.clone(),
        slots: SlotConfig::most(MESSAGE_BYTES, 0),
        limits: RouteLimits { direct_bytes: 3 * message, borrow_bytes: 8 * message, policy: Policy::WHOLE },
        idle_after_ns: 40_000,
        blocks: 8,
        armed_depth: 4,
        lookahead_bytes,
        delays: Delays::default(),
        relay: Relay::Stores,
    }
}

/// A plan, once as the cost model sees it and once as the engines carry it out.
struct Case<'a> {
    cluster: &'a Cluster,
    demand: &'a Demand,
    method: Method,
    /// Of one order, whatever the start cost that predictions are made for.
    schedule: Schedule,
}

impl<'a> Case<'a> {
    fn new(cluster: &'a Cluster, demand: &'a Demand, method: Method) -> Self {
        let schedule = plan::schedule(cluster, demand, method, &model(loop_ns(cluster))).unwrap();
        Self { cluster, demand, method, schedule }
    }

    fn predicted_ns(&self, start_ns: u64) -> u64 {
        // A start cost is counted per transfer; loose traffic starts once.
        let start_once = if self.method == Method::Loose { start_ns } else { 0 };
        start_once + plan::replay(self.cluster, &self.schedule, &model(start_ns)).pipeline.done_ns
    }

    fn simulated_ns(&self, lookahead_bytes: u64) -> u64 {
        let mut world = World::new(config(self.cluster, lookahead_bytes)).unwrap();
        for rank in (0..self.cluster.ranks()).map(Rank) {
            let message_bytes = MESSAGE_BYTES.into();
            let table = PlanTable::compile(self.cluster, self.demand, &self.schedule, rank, message_bytes);
            world.open(rank, call(&table.unwrap())).unwrap();
        }
        world.run_until_done().unwrap();
        world.now()
    }
}

/// Links are shared fairly in virtual time: many senders into one NIC cost nothing there.
fn model(start_ns: u64) -> CostModel {
    CostModel { start_ns, message_bytes: MESSAGE_BYTES.into(), fan_in_divisor: u64::MAX }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Uniform,
    Random,
    Zipf,
    Hot,
}

const KINDS: [Kind; 4] = [Kind::Uniform, Kind::Random, Kind::Zipf, Kind::Hot];
const METHODS: [Method; 6] =
    [Method::Ordered, Method::SpreadOut, Method::OpenShop, Method::Rounds, Method::Birkhoff, Method::Loose];

/// Cells between servers, of 2 MB or so; what stays in a server never reaches an engine.
fn demand(cluster: &Cluster, kind: Kind) -> Demand {
    const MEAN: u64 = 2_000_000;
    let mut state = 7u64;
    let mut draw = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        state >> 40
    };
    let ranks = cluster.ranks();
    let cells = (0..ranks * ranks).map(|i| {
        let (src, dst, drawn) = (Rank(i / ranks), Rank(i % ranks), draw());
        if cluster.server_of(src) == cluster.server_of(dst) {
            return 0;
        }
        match kind {
            Kind::Uniform => MEAN,
            Kind::Random => (2 * MEAN * drawn) >> 24,
            Kind::Zipf => (4.0 * MEAN as f64 / f64::powf(1.0 + (drawn % 64) as f64, 0.8)) as u64,
            Kind::Hot if dst.0 == ranks - 1 => 4 * MEAN,
            Kind::Hot => MEAN / 2,
        }
    });
    Demand::new(ranks, cells.collect(), 1).unwrap()
}

/// Four servers of four GPUs, the second of which has NICs of these rates.
fn one_differs(mbit_per_s: [u64; 4]) -> Cluster {
    let usual = || Server::new(4, &[400_000; 4], 450_000);
    Cluster::new(vec![usual(), Server::new(4, &mbit_per_s, 450_000), usual(), usual()])
}

fn four(nics: usize, scaleup_mbyte_per_s: u64) -> Cluster {
    Cluster::uniform(4, Server::new(4, &vec![400_000; nics], scaleup_mbyte_per_s))
}

/// A 33rd and 15 us: messages are whole, NICs run apart, and kernels fill and drain a few at a time.
fn tolerance_ns(predicted_ns: u64) -> u64 {
    predicted_ns / 33 + 15_000
}

/// NICs as many as GPUs, fewer, more, slow or down in one server; scale-up of 450 and of 200 GB/s.
#[test]
fn engines_take_what_was_predicted() {
    let clusters = [
        four(4, 450_000),
        four(4, 200_000),
        four(2, 450_000),
        four(8, 450_000),
        one_differs([200_000; 4]),
        one_differs([400_000, 0, 400_000, 0]),
    ];
    for cluster in &clusters {
        let loop_ns = loop_ns(cluster);
        for kind in KINDS {
            let demand = demand(cluster, kind);
            for method in METHODS {
                let case = Case::new(cluster, &demand, method);
                let place = || format!("{kind:?} {method} on {:?}", cluster.server(ServerId(1)));
                // One transfer after the other: each costs one way round.
                let (predicted, simulated) = (case.predicted_ns(loop_ns), case.simulated_ns(0));
                let most = tolerance_ns(predicted);
                assert!(simulated.abs_diff(predicted) <= most, "{}: {simulated} for {predicted}", place());
                // The next is let in early: between no start cost at all and the full one.
                let simulated = case.simulated_ns(2 * u64::from(MESSAGE_BYTES));
                assert!(simulated >= case.predicted_ns(0), "{}: {simulated}", place());
                assert!(simulated <= predicted + most, "{}: {simulated} for {predicted}", place());
            }
        }
    }
}

/// Scale-up hardly faster than a NIC: balance and redistribution get into each other's way, which the model leaves out.
/// What it says is the least that is possible.
#[test]
fn slow_scale_up_takes_no_less_than_was_predicted() {
    let cluster = four(4, 60_000);
    for kind in KINDS {
        let demand = demand(&cluster, kind);
        for method in METHODS {
            let case = Case::new(&cluster, &demand, method);
            let (predicted, simulated) = (case.predicted_ns(0), case.simulated_ns(0));
            assert!(simulated >= predicted, "{kind:?} {method}: {simulated} for {predicted}");
            assert!(simulated <= 2 * predicted, "{kind:?} {method}: {simulated} for {predicted}");
        }
    }
}
