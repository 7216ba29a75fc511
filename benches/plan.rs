//! Planning time against growth, next to a plain pass that reads the matrix once and writes the same table once.
//!
//! One JSON line per size and method. `cargo bench --bench plan`.

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
