//! What plans take, by replay of their pieces, against what no plan can beat.

use fuselink::plan::{self, CostModel, Demand, Method};
use fuselink::topo::{Cluster, Server, ServerId};

use super::demands::Kind;
use super::{Asked, GPUS, usual};

const MB: f64 = 1e6;

/// Ratios of one kind of demand.
#[derive(Default)]
struct Ratios(Vec<f64>);

impl Ratios {
    fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.0.len() as f64
    }

    fn worst(&self) -> f64 {
        self.0.iter().copied().fold(0.0, f64::max)
    }
}

/// Replayed time over `least_ns`.
fn ratio(cluster: &Cluster, demand: &Demand, method: Method, model: &CostModel, least_ns: f64) -> f64 {
    let schedule = plan::schedule(cluster, demand, method, model).expect("a demand that can be planned");
    let cost_ns = plan::replay(cluster, &schedule, model).cost_ns as f64;
    if least_ns > 0.0 { cost_ns / least_ns } else { 1.0 }
}

fn bound(cluster: &Cluster, demand: &Demand, model: &CostModel) -> plan::Bound {
    plan::Bound::of(cluster, demand, model).expect("a demand of the cluster")
}

/// `ordered` over the floor, 20 us per transfer.
pub fn quality(asked: &Asked) {
    let model = CostModel::default();
    for servers in asked.servers([8, 40]) {
        let cluster = usual(servers);
        let seeds = if servers == 8 { 10 } else { 3 };
        for gpu_bytes in [100.0 * MB, 1000.0 * MB] {
            for (kind, limits) in Kind::JUDGED {
                let mut ratios = Ratios::default();
                for seed in 1..=seeds {
                    let demand = kind.demand(&cluster, gpu_bytes, seed);
                    let floor_ns = bound(&cluster, &demand, &model).floor_ns as f64;
                    ratios.0.push(ratio(&cluster, &demand, Method::Ordered, &model, floor_ns));
                }
                println!(
                    "{{\"name\":\"ordered_over_floor\",\"gpus\":{},\"gpu_mb\":{},\"kind\":\"{}\",\"matrices\":{seeds},\"start_us\":20,\
                     \"mean\":{:.4},\"worst\":{:.4},\"mean_limit\":{},\"worst_limit\":1.05}}",
                    servers * GPUS,
                    gpu_bytes / MB,
                    kind.name(),
                    ratios.mean(),
                    ratios.worst(),
                    limits[usize::from(servers != 8)],
                );
            }
        }
    }
}

/// Exact Birkhoff over the bound, starts for free; 1 GB per GPU, for every transfer is rounded up to a nanosecond.
pub fn exact(asked: &Asked) {
    let model = CostModel { start_ns: 0, ..CostModel::default() };
    for servers in asked.servers([8, 40]) {
        let cluster = usual(servers);
        for kind in Kind::ALL {
            let mut ratios = Ratios::default();
            for seed in 1..=3 {
                let demand = kind.demand(&cluster, 1000.0 * MB, seed);
                let lower_ns = bound(&cluster, &demand, &model).lower_us() * 1e3;
                ratios.0.push(ratio(&cluster, &demand, Method::Birkhoff, &model, lower_ns));
            }
            println!(
                "{{\"name\":\"birkhoff_over_bound\",\"gpus\":{},\"kind\":\"{}\",\"matrices\":3,\"start_us\":0,\"mean\":{:.6},\
                 \"worst\":{:.6}}}",
                servers * GPUS,
                kind.name(),
                ratios.mean(),
                ratios.worst(),
            );
        }
    }
}

/// `ordered` over the bound where NICs are not 8 of 400 Gbit/s for 8 GPUs, starts for free; and over the pair bound,
/// which no list beats (docs/planning.md).
pub fn clusters(asked: &Asked) {
    let model = CostModel { start_ns: 0, ..CostModel::default() };
    for servers in asked.servers([8]) {
        for (name, cluster) in others(servers) {
            for kind in Kind::ALL {
                let (mut over_bound, mut over_pairs) = (Ratios::default(), Ratios::default());
                for seed in 1..=3 {
                    let demand = kind.demand(&cluster, 100.0 * MB, seed);
                    let lower_ns = bound(&cluster, &demand, &model).lower_us() * 1e3;
                    let pair_ns = pair_bound_ns(&cluster, &demand);
                    let over = ratio(&cluster, &demand, Method::Ordered, &model, lower_ns);
                    over_bound.0.push(over);
                    over_pairs.0.push(if pair_ns > 0.0 { over * lower_ns / pair_ns } else { 1.0 });
                }
                println!(
                    "{{\"name\":\"ordered_over_bound\",\"gpus\":{},\"cluster\":\"{name}\",\"kind\":\"{}\",\"matrices\":3,\
                     \"start_us\":0,\"mean\":{:.4},\"worst\":{:.4},\"worst_limit\":1.05,\"worst_over_pair_bound\":{:.4}}}",
                    servers * GPUS,
                    kind.name(),
                    over_bound.mean(),
                    over_bound.worst(),
                    over_pairs.worst(),
                );
            }
        }
    }
}

fn others(servers: u32) -> [(&'static str, Cluster); 4] {
    let nics = |rates: &[u64]| Server::new(GPUS, rates, 450_000);
    let one_differs = |rates: &[u64]| {
        let usual = std::iter::repeat_n(nics(&[400_000; 8]), servers as usize - 1);
        // Not the one that is hot: it would be the busiest by far.
        Cluster::new([nics(rates)].into_iter().chain(usual).collect())
    };
    let half = [400_000, 0, 400_000, 0, 400_000, 0, 400_000, 0];
    [
        ("half of one server's NICs down", one_differs(&half)),
        ("one server at 200 Gbit/s", one_differs(&[200_000; 8])),
        ("4 NICs", Cluster::uniform(servers, nics(&[400_000; 4]))),
        ("16 NICs", Cluster::uniform(servers, nics(&[400_000; 16]))),
    ]
}

/// The busiest server's transfers, each at the rate of the slower side.
fn pair_bound_ns(cluster: &Cluster, demand: &Demand) -> f64 {
    let n = cluster.servers().len();
    let mut lines = vec![[0.0; 2]; n];
    for (src, dst) in (0..n).flat_map(|src| (0..n).map(move |dst| (src, dst))).filter(|(s, d)| s != d) {
        let ranks = |server: usize| cluster.ranks_of(ServerId(server as u32));
        let bytes: u64 = ranks(src).flat_map(|a| ranks(dst).map(move |b| demand.cell(a, b))).sum();
        let mbit_per_s = |server: usize| cluster.server(ServerId(server as u32)).mbit_per_s();
        let ns = bytes as f64 * 8e3 / mbit_per_s(src).min(mbit_per_s(dst)) as f64;
        lines[src][0] += ns;
        lines[dst][1] += ns;
    }
    lines.into_iter().flatten().fold(0.0, f64::max)
}
