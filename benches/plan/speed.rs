//! Planning time: of fresh plans, next to a plain pass; and from the last plan on.

use std::hint::black_box;
use std::time::{Duration, Instant};

use fuselink::plan::{CostModel, Demand, Method, PlanTable, Planner, Request};
use fuselink::topo::{Cluster, Rank};

use super::demands::{Kind, Random};
use super::{Asked, usual};

/// What a GPU sends in all.
const GPU_BYTES: f64 = 100e6;
/// Plans of one matrix are timed for so long, and at least so often.
const LONG: Duration = Duration::from_millis(400);
const OFTEN: usize = 51;

fn request(method: Method) -> Request {
    let model = CostModel::default();
    Request { method, model, rank: Rank(0), message_bytes: model.message_bytes }
}

/// Times in microseconds, in order.
#[derive(Default)]
struct Times(Vec<f64>);

impl Times {
    fn push(&mut self, began: Instant) {
        self.0.push(began.elapsed().as_nanos() as f64 / 1e3);
    }

    fn at(&mut self, percent: usize) -> f64 {
        self.0.sort_unstable_by(f64::total_cmp);
        self.0[(self.0.len() * percent / 100).min(self.0.len() - 1)]
    }
}

/// One line per size and method: several matrices, each planned again and again as if it were new.
pub fn speed(asked: &Asked) {
    for servers in asked.servers([2, 4, 8, 16, 40, 128]) {
        let cluster = usual(servers);
        let seeds = if servers < 16 { 10 } else { 3 };
        let demands: Vec<Demand> =
            (1..=seeds).map(|seed| Kind::Zipf(0.8).demand(&cluster, GPU_BYTES, seed)).collect();
        let mut auto_us = None;
        for method in asked.methods(&[Method::Auto, Method::Ordered, Method::Birkhoff]) {
            let us = plan_all(&cluster, &demands, method, auto_us, &asked.machine);
            if method == Method::Auto {
                auto_us = Some(us);
            }
        }
    }
}

/// Prints a line; returns the median of the matrices' medians.
fn plan_all(
    cluster: &Cluster,
    demands: &[Demand],
    method: Method,
    auto_us: Option<f64>,
    machine: &str,
) -> f64 {
    let (mut medians, mut all, mut plain) = (Times::default(), Times::default(), Times::default());
    let (mut over_floor, mut chosen) = (0.0, Vec::new());
    let mut planner = Planner::new();
    for demand in demands {
        let mut times = Times::default();
        let began = Instant::now();
        let mut written = Vec::new();
        while times.0.len() < OFTEN || began.elapsed() < LONG {
            let before = Instant::now();
            let planned = planner.plan(cluster, black_box(demand), &request(method)).expect("can be planned");
            let table = black_box(planned.table);
            times.push(before);
            let before = Instant::now();
            black_box(plain_pass(demand, table, &mut written));
            plain.push(before);
        }
        let planned = planner.plan(cluster, demand, &request(method)).expect("planned before");
        over_floor += planned.predicted_ns as f64 / planned.bound.floor_ns.max(1) as f64;
        if !chosen.contains(&planned.method.name()) {
            chosen.push(planned.method.name());
        }
        medians.0.push(times.at(50));
        all.0.append(&mut times.0);
    }
    let (p50, plain_us) = (medians.at(50), plain.at(50));
    println!(
        "{{\"name\":\"plan\",\"method\":\"{method}\",\"chosen\":\"{}\",\"gpus\":{},\"servers\":{},\"matrices\":{},\"min_us\":{:.1},\
         \"p50_us\":{p50:.1},\"worst_p50_us\":{:.1},\"p99_us\":{:.1},\"plain_pass_us\":{plain_us:.1},\"over_plain\":{:.1},\
         \"over_auto\":{},\"cost_over_floor\":{:.4},\"machine\":\"{machine}\"}}",
        chosen.join("+"),
        cluster.ranks(),
        cluster.server_count(),
        demands.len(),
        all.at(0),
        medians.at(100),
        all.at(99),
        p50 / plain_us,
        auto_us.map_or("null".into(), |auto_us| format!("{:.2}", p50 / auto_us)),
        over_floor / demands.len() as f64,
    );
    p50
}

/// Reads every cell and writes every byte of the table: what no planner can leave out.
fn plain_pass(demand: &Demand, table: &PlanTable, written: &mut Vec<u8>) -> u64 {
    let sum = (0..demand.ranks()).map(|src| demand.row(Rank(src)).iter().sum::<u64>()).sum();
    written.clear();
    written.extend_from_slice(table.as_bytes());
    black_box(written);
    sum
}

/// One line per size, method and drift.
pub fn drift(asked: &Asked) {
    for servers in asked.servers([2, 4, 8, 16, 40, 128]) {
        let cluster = usual(servers);
        let demand = Kind::Zipf(0.8).demand(&cluster, GPU_BYTES, 1);
        for method in asked.methods(&[Method::Auto, Method::Ordered]) {
            for percent in [1, 3, 10] {
                plan_drifting(&cluster, &demand, method, percent, &asked.machine);
            }
        }
    }
}

/// Demands that drift: every pair of servers by up to `percent` from call to call. Each is planned from the last list
/// on, and afresh.
fn plan_drifting(cluster: &Cluster, demand: &Demand, method: Method, percent: u64, machine: &str) {
    let (mut warm, mut fresh) = (Planner::new(), Planner::new());
    let (mut times, mut over_floor) = ([Times::default(), Times::default()], [0.0, 0.0]);
    let (mut worse, mut steps) = (0, 0u64);
    let mut demand = demand.clone();
    warm.plan(cluster, &demand, &request(method)).expect("can be planned");
    let began = Instant::now();
    while steps < 8 || (steps < 200 && began.elapsed().as_secs_f64() < 2.0) {
        demand = drifted(cluster, &demand, percent, steps);
        steps += 1;
        let mut costs = [0, 0];
        // Whoever goes first finds the demand out of cache: they take turns.
        let first = steps.is_multiple_of(2);
        for again in [first, !first] {
            let at = usize::from(!again);
            let before = Instant::now();
            let planned = match again {
                true => warm.replan(cluster, black_box(&demand), &request(method)),
                false => fresh.plan(cluster, black_box(&demand), &request(method)),
            }
            .expect("can be planned");
            times[at].push(before);
            costs[at] = planned.predicted_ns;
            over_floor[at] += planned.predicted_ns as f64 / planned.bound.floor_ns.max(1) as f64;
        }
        worse += u64::from(costs[0] > costs[1]);
    }
    let [again, anew] = &mut times;
    println!(
        "{{\"name\":\"replan\",\"method\":\"{method}\",\"gpus\":{},\"servers\":{},\"drift_percent\":{percent},\"p50_us\":{:.1},\
         \"p99_us\":{:.1},\"fresh_p50_us\":{:.1},\"over_fresh\":{:.2},\"cost_over_floor\":{:.4},\"fresh_cost_over_floor\":{:.4},\
         \"worse\":{:.2},\"machine\":\"{machine}\"}}",
        cluster.ranks(),
        cluster.server_count(),
        again.at(50),
        again.at(99),
        anew.at(50),
        again.at(50) / anew.at(50),
        over_floor[0] / steps as f64,
        over_floor[1] / steps as f64,
        worse as f64 / steps as f64,
    );
}

/// The demand with every pair of servers up to `percent` larger or smaller.
fn drifted(cluster: &Cluster, demand: &Demand, percent: u64, step: u64) -> Demand {
    let n = cluster.servers().len();
    let mut random = Random(step);
    let factors: Vec<f64> =
        (0..n * n).map(|_| 1.0 + (2.0 * random.real() - 1.0) * percent as f64 / 100.0).collect();
    let ranks = || (0..demand.ranks()).map(Rank);
    let home = |rank| cluster.server_of(rank).idx();
    let cell = |src, dst| (demand.cell(src, dst) as f64 * factors[home(src) * n + home(dst)]) as u64;
    let cells = ranks().flat_map(|src| ranks().map(move |dst| (src, dst))).map(|(src, dst)| cell(src, dst));
    Demand::new(demand.ranks(), cells.collect(), demand.unit_bytes()).expect("a square of small cells")
}
