//! `fast-sweep`: all-to-alls of growing clusters and skews against the bound (FAST, NSDI'26, its simulations).

use serde::Serialize;

use super::methods::{Way, bound_ns, measure};
use super::report::{Chart, Outcome, Series, Table, or_dash, values};
use super::{MESSAGE_BYTES, Options, assumptions, world_config};
use crate::plan::{CostModel, Demand, replay};
use crate::sim::draw::{Draw, zipf};
use crate::sim::world::SimError;
use crate::topo::{Cluster, Server};

/// One demand, one way.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Row {
    /// GPUs.
    gpus: u32,
    /// `random`, or the exponent of the Zipf law.
    workload: String,
    /// The way.
    method: &'static str,
    /// `engine` in virtual time, or the plan's `replay`.
    by: &'static str,
    /// How long it takes.
    ms: f64,
    /// With the planner's time before it.
    with_planning_ms: f64,
    /// What no way can beat.
    bound_ms: f64,
    /// Over the bound.
    bound_ratio: f64,
}

/// What a pair of GPUs exchanges.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Workload {
    /// Uniform between 0 and twice the mean.
    Random,
    /// By a Zipf law over 1024 places, drawn for each pair.
    Zipf(f64),
}

const GPU_BYTES: f64 = 100e6;
const PLACES: usize = 1024;
/// Up to this many GPUs the engine moves every message.
const ENGINE_GPUS: u32 = 64;
const SKEWS: [f64; 4] = [0.1, 0.4, 0.8, 0.99];
const SIZES: [u32; 4] = [64, 96, 160, 320];
const WAYS: [Way; 5] = [Way::STATIC, Way::Rails, Way::FUSELINK, Way::SPREADOUT, Way::FAST];
/// Planning takes this and that much per pair of GPUs: fitted to `cargo bench --bench plan` (docs/planning.md).
const PLANNING_NS: f64 = 1_500.0;
const PLANNING_NS_PER_PAIR: f64 = 2.75;
const MACHINE: &str = "servers of 8 GPUs, 400 Gbit/s NICs, 450 GB/s of scale-up per GPU and direction";

impl Workload {
    fn name(self) -> String {
        match self {
            Self::Random => "random".into(),
            Self::Zipf(s) => format!("zipf {s}"),
        }
    }

    fn demand(self, gpus: u32, seed: u64) -> Result<Demand, SimError> {
        let mut draw = Draw::new(seed);
        let law = match self {
            Self::Random => Vec::new(),
            Self::Zipf(s) => zipf(PLACES, s),
        };
        let mut weight = |n: u32| match (n / gpus == n % gpus, self) {
            (true, _) => 0.0,
            (_, Self::Random) => draw.unit(),
            (_, Self::Zipf(_)) => law[(draw.unit() * PLACES as f64) as usize],
        };
        let weights: Vec<f64> = (0..gpus * gpus).map(&mut weight).collect();
        let scale = GPU_BYTES * f64::from(gpus) / weights.iter().sum::<f64>();
        Ok(Demand::new(gpus, weights.iter().map(|w| (w * scale) as u64).collect(), 1)?)
    }
}

pub(super) fn run(options: &Options) -> Result<Outcome, SimError> {
    let mut rows = Vec::new();
    for workload in [Workload::Random].into_iter().chain(SKEWS.map(Workload::Zipf)) {
        rows.extend(measure_all(32, workload, options.seed)?);
    }
    for gpus in SIZES {
        for workload in [Workload::Random, Workload::Zipf(0.8)] {
            rows.extend(measure_all(gpus, workload, options.seed)?);
        }
    }
    let mut assumed = assumptions(MACHINE, &world_config(cluster(16)));
    assumed.extend([
        format!("{:.0} MB per GPU; what a pair exchanges is uniform (random), or drawn from {PLACES} places of a Zipf law, seed {}", GPU_BYTES / 1e6, options.seed),
        format!("up to {ENGINE_GPUS} GPUs the engine moves every message in virtual time; beyond, the plan's replay: 20 us per transfer, loose traffic slower by 1/32 per server that sends into one NIC (twice at most)"),
        "static: direct NICs only; rails: forwarding by the destination's rail (after PXN), in no order; spreadout: balanced, in that order; fast: the planner's choice".into(),
        format!("planning time: {:.1} us and {PLANNING_NS_PER_PAIR} ns per pair of GPUs, for fast and spreadout", PLANNING_NS / 1e3),
    ]);
    Ok(Outcome {
        experiment: "fast-sweep",
        assumptions: assumed,
        paper: vec![
            "H200 4x8: 1.01-1.1x of NCCL on random, 1.2-1.3x on Zipf 0.8; MI300X 4x8: 2.5-2.8x of SpreadOut on Zipf 0.8".into(),
            "planning: 25 us at 32 GPUs, 221 us at 64, 805 us at 96, 77 ms at 320".into(),
        ],
        tables: vec![table("", &rows)],
        chart: chart(&rows),
        rows: values(&rows),
    })
}

fn cluster(gpus: u32) -> Cluster {
    Cluster::uniform(gpus / 8, Server::new(8, &[400_000; 8], 450_000))
}

/// What can be measured: without an engine nobody chooses for `fuselink`.
fn ways(gpus: u32) -> impl Iterator<Item = Way> {
    WAYS.into_iter().filter(move |&way| gpus <= ENGINE_GPUS || way != Way::FUSELINK)
}

fn planning_ms(way: Way, gpus: u32) -> f64 {
    match way {
        Way::FAST | Way::SPREADOUT => (PLANNING_NS + PLANNING_NS_PER_PAIR * f64::from(gpus * gpus)) / 1e6,
        _ => 0.0,
    }
}

fn measure_all(gpus: u32, workload: Workload, seed: u64) -> Result<Vec<Row>, SimError> {
    let cluster = cluster(gpus);
    let demand = workload.demand(gpus, seed)?;
    let bound_ms = bound_ns(&cluster, &demand)? as f64 / 1e6;
    let one = |way: Way| {
        let schedule = way.schedule(&cluster, &demand)?;
        let by_engine = gpus <= ENGINE_GPUS;
        let ns = match by_engine {
            true => measure(&cluster, &demand, &schedule)?,
            false => {
                let model = CostModel { message_bytes: MESSAGE_BYTES.into(), ..CostModel::default() };
                replay(&cluster, &schedule, &model).cost_ns
            }
        };
        let ms = ns as f64 / 1e6;
        Ok(Row {
            gpus,
            workload: workload.name(),
            method: way.name(),
            by: if by_engine { "engine" } else { "replay" },
            ms,
            with_planning_ms: ms + planning_ms(way, gpus),
            bound_ms,
            bound_ratio: ms / bound_ms,
        })
    };
    ways(gpus).map(one).collect()
}

/// A line per demand, a column per way.
fn table(title: &str, rows: &[Row]) -> Table {
    let mut head = vec![["GPUs", ""], ["workload", ""], ["by", ""], ["bound", "(ms)"]];
    head.extend(WAYS.map(|way| [way.name(), "/ bound"]));
    head.extend([["fast + plan", "/ bound"], ["gain", "over static"]]);
    let line = |group: &[Row]| {
        let first = &group[0];
        let of = |way: Way| group.iter().find(|r| r.method == way.name());
        let mut cells = vec![
            first.gpus.to_string(),
            first.workload.clone(),
            first.by.into(),
            format!("{:.3}", first.bound_ms),
        ];
        cells.extend(WAYS.map(|way| or_dash(of(way).map(|r| r.bound_ratio), 3)));
        let fast = of(Way::FAST);
        cells.push(or_dash(fast.map(|r| r.with_planning_ms / r.bound_ms), 3));
        cells.push(or_dash(of(Way::STATIC).zip(fast).map(|(s, f)| s.ms / f.with_planning_ms), 2));
        cells
    };
    let same = |a: &Row, b: &Row| (a.gpus, &a.workload) == (b.gpus, &b.workload);
    Table { title: title.into(), head, rows: rows.chunk_by(same).map(line).collect() }
}

fn chart(rows: &[Row]) -> Chart {
    let line = |way: Way| {
        let own = rows.iter().filter(move |r| r.method == way.name() && r.workload == "zipf 0.8");
        Series::line(way.name(), own.map(|r| (f64::from(r.gpus), r.with_planning_ms / r.bound_ms)))
    };
    Chart {
        title: "All-to-all, Zipf 0.8, 100 MB per GPU, with planning".into(),
        x: "GPUs",
        y: "time over the bound",
        series: WAYS.map(line).into(),
        log_x: true,
    }
}
