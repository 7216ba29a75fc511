//! `dlrm`: embedding fetches of a recommendation model, tables spread over the workers (FuseLink, OSDI'25, its DLRM).

use serde::Serialize;

use super::methods::{Way, bound_ns, measure};
use super::report::{Chart, Outcome, Series, Table, values};
use super::{Options, assumptions, world_config};
use crate::plan::Demand;
use crate::sim::draw::{Draw, zipf};
use crate::sim::world::SimError;
use crate::topo::{Cluster, Server};

/// One way.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Row {
    /// The way.
    method: &'static str,
    /// The fetches of one batch.
    fetch_ms: f64,
    /// What no way can beat.
    bound_ms: f64,
    /// Computation and fetches.
    iteration_ms: f64,
    /// How many times as quick as static: fetches alone.
    fetch_gain: f64,
    /// With computation.
    gain: f64,
}

const SERVERS: u32 = 4;
const BATCH: u64 = 1024;
const TABLES: usize = 128;
const VECTOR_BYTES: u64 = 128 * 4;
/// The most vectors that one sample takes of a table, before pooling, and how that falls off from table to table.
const MOST_LOOKUPS: f64 = 80.0;
const LOOKUPS_ZIPF: f64 = 0.5;
/// The hot NIC is busy for this part of a static iteration: the middle of what the paper saw, 59 to 82 %.
const STATIC_BUSY: f64 = 0.7;
const MACHINE: &str =
    "four servers: 8 GPUs, 400 Gbit/s NICs, 200 GB/s of scale-up per GPU and direction; 32 workers";

pub(super) fn run(options: &Options) -> Result<Outcome, SimError> {
    let cluster = Cluster::uniform(SERVERS, Server::new(8, &[400_000; 8], 200_000));
    let demand = demand(options.seed, cluster.ranks())?;
    let bound_ms = bound_ns(&cluster, &demand)? as f64 / 1e6;
    let mut rows: Vec<Row> = Vec::new();
    let mut compute_ms = 0.0;
    for way in [Way::STATIC, Way::SPRAY, Way::FUSELINK, Way::FAST] {
        let schedule = way.schedule(&cluster, &demand)?;
        let fetch_ms = measure(&cluster, &demand, &schedule)? as f64 / 1e6;
        if rows.is_empty() {
            compute_ms = fetch_ms * (1.0 / STATIC_BUSY - 1.0);
        }
        let iteration_ms = fetch_ms + compute_ms;
        rows.push(Row {
            method: way.name(),
            fetch_ms,
            bound_ms,
            iteration_ms,
            fetch_gain: rows.first().map_or(1.0, |r| r.fetch_ms / fetch_ms),
            gain: rows.first().map_or(1.0, |r| r.iteration_ms / iteration_ms),
        });
    }
    let mut assumed = assumptions(MACHINE, &world_config(cluster));
    assumed.extend([
        format!("{TABLES} tables of {VECTOR_BYTES}-byte vectors, 4 to a worker, dealt by seed {}; a batch of {BATCH} samples in all, as many to each worker", options.seed),
        format!("a sample takes {MOST_LOOKUPS} / place^{LOOKUPS_ZIPF} vectors of a table, unpooled, the same from every worker"),
        format!("computation: {compute_ms:.2} ms, so that static's busiest NIC is busy {:.0} % of an iteration (the paper: 59 to 82 %); it does not overlap the fetches", STATIC_BUSY * 100.0),
        "what stays in a server is not simulated".into(),
    ]);
    Ok(Outcome {
        experiment: "dlrm",
        assumptions: assumed,
        paper: vec!["32 workers, batch 1024: up to 1.2x static".into()],
        tables: vec![table(&rows)],
        chart: chart(&rows),
        rows: values(&rows),
    })
}

/// What each worker sends to each other one: vectors of its tables.
fn demand(seed: u64, ranks: u32) -> Result<Demand, SimError> {
    let mut draw = Draw::new(seed);
    let mut left: Vec<f64> = zipf(TABLES, LOOKUPS_ZIPF).iter().map(|w| w * MOST_LOOKUPS).collect();
    let mut owned = vec![0u64; ranks as usize];
    for nth in 0..TABLES {
        let at = draw.weighted(&vec![1.0; left.len()]);
        owned[nth % ranks as usize] += left.swap_remove(at).ceil() as u64;
    }
    let cells = (0..ranks).flat_map(|src| {
        let bytes = owned[src as usize] * BATCH * VECTOR_BYTES / u64::from(ranks);
        (0..ranks).map(move |dst| if src == dst { 0 } else { bytes / VECTOR_BYTES * VECTOR_BYTES })
    });
    Ok(Demand::new(ranks, cells.collect(), VECTOR_BYTES)?)
}

fn table(rows: &[Row]) -> Table {
    Table::of(
        "",
        rows,
        &[
            ("method", "", |r| r.method.into()),
            ("fetches", "(ms)", |r| format!("{:.3}", r.fetch_ms)),
            ("ideal", "(ms)", |r| format!("{:.3}", r.bound_ms)),
            ("gain", "over static", |r| format!("{:.2}", r.fetch_gain)),
            ("iteration", "(ms)", |r| format!("{:.3}", r.iteration_ms)),
            ("gain", "over static", |r| format!("{:.2}", r.gain)),
            ("paper", "up to", |r| if r.method == "fuselink" { "1.2".into() } else { "-".into() }),
        ],
    )
}

fn chart(rows: &[Row]) -> Chart {
    let bars = |name, y: fn(&Row) -> f64| Series::bars(name, rows.iter().map(|r| (r.method.into(), y(r))));
    Chart {
        title: "Embedding fetches of 32 workers".into(),
        x: "method",
        y: "ms",
        series: vec![
            bars("fetches", |r| r.fetch_ms),
            bars("bound", |r| r.bound_ms),
            bars("iteration", |r| r.iteration_ms),
        ],
        log_x: false,
    }
}
