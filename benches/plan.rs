//! Planning time against growth, next to a plain pass that reads the matrix once and writes the same table once.
//!
//! One JSON line per size and method, and one per drift from call to call for plans that start from the last one.
//! `cargo bench --bench plan`.

use std::hint::black_box;
use std::time::Instant;

use fuselink::plan::{CostModel, Demand, Method, PlanTable, Planner, Request};
use fuselink::topo::{Cluster, Rank, Server};

const GPUS: u32 = 8;
/// What a GPU sends in all.
const GPU_BYTES: f64 = 100e6;

fn main() {
    let machine = machine();
    // `cargo bench --bench plan -- 64 auto` measures that many GPUs, and that method, only.
    let only: Vec<u32> = std::env::args().filter_map(|a| a.parse().ok()).collect();
    let asked: Vec<Method> = std::env::args().filter_map(|a| a.parse().ok()).collect();
    let methods =
        if asked.is_empty() { vec![Method::Auto, Method::Ordered, Method::Birkhoff] } else { asked };
    for servers in [2, 4, 8, 16, 40, 128] {
        if !only.is_empty() && !only.contains(&(servers * GPUS)) {
            continue;
        }
        let cluster = Cluster::uniform(servers, Server::new(GPUS, &[400_000; 8], 450_000));
        let demand = zipf(servers * GPUS);
        for &method in &methods {
            measure(&cluster, &demand, method, &machine);
        }
        for &method in methods.iter().filter(|&&m| m != Method::Birkhoff) {
            for percent in [1, 3, 10] {
                measure_drift(&cluster, &demand, method, percent, &machine);
            }
        }
    }
}

fn measure(cluster: &Cluster, demand: &Demand, method: Method, machine: &str) {
    let model = CostModel::default();
    let request = Request { method, model, rank: Rank(0), message_bytes: model.message_bytes };
    let mut planner = Planner::new();
    let mut times = [Vec::new(), Vec::new()];
    let started = Instant::now();
    while times[0].len() < 7 || (times[0].len() < 20_001 && started.elapsed().as_secs_f64() < 3.0) {
        let before = Instant::now();
        let planned =
            planner.plan(cluster, black_box(demand), &request).expect("a demand that can be planned");
        let table = black_box(planned.table);
        times[0].push(before.elapsed());
        let before = Instant::now();
        black_box(plain_pass(demand, table));
        times[1].push(before.elapsed());
    }
    times.iter_mut().for_each(|t| t.sort_unstable());
    let us = |t: &[std::time::Duration], nth: usize| t[nth].as_nanos() as f64 / 1e3;
    let [plan, plain] = &times;
    let (min, p50, p99) = (us(plan, 0), us(plan, plan.len() / 2), us(plan, plan.len() * 99 / 100));
    let plain = us(plain, plain.len() / 2);
    let planned = planner.plan(cluster, demand, &request).expect("planned before");
    println!(
        "{{\"name\":\"plan\",\"method\":\"{method}\",\"chosen\":\"{}\",\"gpus\":{},\"servers\":{},\"min_us\":{min:.1},\"p50_us\":{p50:.1},\
         \"p99_us\":{p99:.1},\"plain_pass_us\":{plain:.1},\"over_plain\":{:.1},\"cost_over_floor\":{:.4},\
         \"machine\":\"{machine}\"}}",
        planned.method,
        demand.ranks(),
        cluster.server_count(),
        p50 / plain,
        planned.predicted_ns as f64 / planned.bound.floor_ns.max(1) as f64,
    );
}

/// Demands that drift: every pair of servers by up to `percent` from call to call. Each is planned from the last list
/// on, and afresh.
fn measure_drift(cluster: &Cluster, demand: &Demand, method: Method, percent: u64, machine: &str) {
    let model = CostModel::default();
    let request = Request { method, model, rank: Rank(0), message_bytes: model.message_bytes };
    let (mut warm, mut fresh) = (Planner::new(), Planner::new());
    let (mut times, mut over_floor) = ([Vec::new(), Vec::new()], [0.0, 0.0]);
    let mut worse = 0;
    let mut demand = demand.clone();
    warm.plan(cluster, &demand, &request).expect("a demand that can be planned");
    let started = Instant::now();
    let mut steps = 0u64;
    while steps < 8 || (steps < 200 && started.elapsed().as_secs_f64() < 2.0) {
        demand = drifted(cluster, &demand, percent, steps);
        steps += 1;
        let mut costs = [0, 0];
        // Whoever goes first finds the demand out of cache: they take turns.
        let first = steps.is_multiple_of(2);
        for again in [first, !first] {
            let before = Instant::now();
            let planned = match again {
                true => warm.replan(cluster, black_box(&demand), &request),
                false => fresh.plan(cluster, black_box(&demand), &request),
            }
            .expect("a demand that can be planned");
            times[usize::from(!again)].push(before.elapsed());
            let cost = planned.predicted_ns as f64 / planned.bound.floor_ns.max(1) as f64;
            costs[usize::from(!again)] = planned.predicted_ns;
            over_floor[usize::from(!again)] += cost;
        }
        worse += u64::from(costs[0] > costs[1]);
    }
    times.iter_mut().for_each(|t| t.sort_unstable());
    let us = |t: &[std::time::Duration], part: usize| t[t.len() * part / 100].as_nanos() as f64 / 1e3;
    let [again, anew] = &times;
    println!(
        "{{\"name\":\"replan\",\"method\":\"{method}\",\"gpus\":{},\"servers\":{},\"drift_percent\":{percent},\"p50_us\":{:.1},\
         \"p99_us\":{:.1},\"fresh_p50_us\":{:.1},\"over_fresh\":{:.2},\"cost_over_floor\":{:.4},\"fresh_cost_over_floor\":{:.4},\
         \"worse\":{:.2},\"machine\":\"{machine}\"}}",
        demand.ranks(),
        cluster.server_count(),
        us(again, 50),
        us(again, 99),
        us(anew, 50),
        us(again, 50) / us(anew, 50),
        over_floor[0] / steps as f64,
        over_floor[1] / steps as f64,
        worse as f64 / steps as f64,
    );
}

/// The demand with every pair of servers up to `percent` larger or smaller.
fn drifted(cluster: &Cluster, demand: &Demand, percent: u64, step: u64) -> Demand {
    let n = cluster.servers().len();
    let mut state = step;
    let mut draw = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        1.0 + (((state >> 40) as f64 / (1u64 << 23) as f64) - 1.0) * percent as f64 / 100.0
    };
    let factors: Vec<f64> = (0..n * n).map(|_| draw()).collect();
    let ranks = || (0..demand.ranks()).map(Rank);
    let home = |rank| cluster.server_of(rank).idx();
    let cell = |src, dst| (demand.cell(src, dst) as f64 * factors[home(src) * n + home(dst)]) as u64;
    let cells = ranks().flat_map(|src| ranks().map(move |dst| (src, dst))).map(|(src, dst)| cell(src, dst));
    Demand::new(demand.ranks(), cells.collect(), demand.unit_bytes()).expect("a square of small cells")
}

/// Reads every cell and writes every byte of the table: what no planner can leave out.
fn plain_pass(demand: &Demand, table: &PlanTable) -> (u64, Vec<u8>) {
    let sum = (0..demand.ranks()).map(|src| demand.row(Rank(src)).iter().sum::<u64>()).sum();
    (sum, table.as_bytes().to_vec())
}

/// Bytes of every pair by a Zipf law of exponent 0.8 over 1024 places, drawn from a fixed seed.
fn zipf(ranks: u32) -> Demand {
    let mut state = 1u64;
    let mut draw = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        1.0 / f64::powf(1.0 + (state >> 54) as f64, 0.8)
    };
    let weights: Vec<f64> =
        (0..ranks * ranks).map(|i| if i / ranks == i % ranks { 0.0 } else { draw() }).collect();
    let scale = GPU_BYTES * f64::from(ranks) / weights.iter().sum::<f64>();
    Demand::new(ranks, weights.iter().map(|w| (w * scale) as u64).collect(), 1)
        .expect("a square of small cells")
}

fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|l| l.strip_prefix("model name")).unwrap_or(": unknown");
    name.trim_start_matches([' ', '\t', ':']).replace('"', "'")
}
