//! `moe`: dispatch and combine of a mixture-of-experts layer, one after the other.

use serde::Serialize;

use super::methods::{Way, bound_ns, measure, transposed};
use super::report::{Chart, Outcome, Series, Table, values};
use super::{Options, assumptions, world_config};
use crate::plan::{Demand, ExpertLoads, SyntheticMoe};
use crate::sim::world::SimError;
use crate::topo::{Cluster, Server};

/// One way.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Row {
    /// The way.
    method: &'static str,
    /// Tokens to the experts.
    dispatch_ms: f64,
    /// And back.
    combine_ms: f64,
    /// Both.
    iteration_ms: f64,
    /// What no way can beat, both.
    bound_ms: f64,
    /// Over the bound.
    bound_ratio: f64,
    /// How many times as quick as static.
    gain: f64,
}

const SERVERS: u32 = 4;
const TOKENS: u64 = 4096;
const TOP_K: u64 = 8;
const TOKEN_BYTES: u64 = 7168;
const MACHINE: &str = "four servers: 8 GPUs, 400 Gbit/s NICs, 450 GB/s of scale-up per GPU and direction";

pub(super) fn run(options: &Options) -> Result<Outcome, SimError> {
    let cluster = Cluster::uniform(SERVERS, Server::new(8, &[400_000; 8], 450_000));
    let (dispatch, loads) = demand(options, cluster.ranks())?;
    let combine = transposed(&dispatch)?;
    let bound_ms = (bound_ns(&cluster, &dispatch)? + bound_ns(&cluster, &combine)?) as f64 / 1e6;
    let mut rows: Vec<Row> = Vec::new();
    for way in [Way::STATIC, Way::SPRAY, Way::FUSELINK, Way::FAST] {
        let ms = |demand: &Demand| {
            let schedule = way.schedule(&cluster, demand)?;
            Ok::<_, SimError>(measure(&cluster, demand, &schedule)? as f64 / 1e6)
        };
        let (dispatch_ms, combine_ms) = (ms(&dispatch)?, ms(&combine)?);
        let iteration_ms = dispatch_ms + combine_ms;
        rows.push(Row {
            method: way.name(),
            dispatch_ms,
            combine_ms,
            iteration_ms,
            bound_ms,
            bound_ratio: iteration_ms / bound_ms,
            gain: rows.first().map_or(1.0, |r| r.iteration_ms / iteration_ms),
        });
    }
    let mut assumed = assumptions(MACHINE, &world_config(cluster));
    assumed.extend([
        loads,
        format!("each GPU sends {TOKENS} tokens of {TOKEN_BYTES} bytes to {TOP_K} experts each; combine is the same bytes back, and begins when dispatch has ended everywhere"),
        "what stays in a server is not simulated; experts' own time is not counted".into(),
    ]);
    Ok(Outcome {
        experiment: "moe",
        assumptions: assumed,
        paper: vec![
            "FuseLink: Mixtral 8x22B, TP4 EP8, 1.3x static, with computation".into(),
            "FAST: Megatron MoE 1.18-4.48x of RCCL or NCCL, with computation".into(),
        ],
        tables: vec![table(&rows)],
        chart: chart(&rows),
        rows: values(&rows),
    })
}

fn demand(options: &Options, ranks: u32) -> Result<(Demand, String), SimError> {
    match &options.loads {
        Some(file) => {
            let loads =
                ExpertLoads { layer: file.layer, tokens: TOKENS, top_k: TOP_K, token_bytes: TOKEN_BYTES };
            let demand = Demand::from_expert_loads(&file.text, &file.place, loads, ranks)?;
            Ok((demand, format!("expert loads of layer {} of {}", file.layer, file.place)))
        }
        None => {
            let moe =
                SyntheticMoe { seed: options.seed, tokens: TOKENS, top_k: TOP_K, token_bytes: TOKEN_BYTES };
            let words = format!(
                "made-up expert loads, seed {}: 256 experts, load 1 / place, the first half as much again; dealt to ranks so that the busiest are apart",
                options.seed
            );
            Ok((Demand::synthetic_moe(ranks, moe)?, words))
        }
    }
}

fn table(rows: &[Row]) -> Table {
    Table::of(
        "",
        rows,
        &[
            ("method", "", |r| r.method.into()),
            ("dispatch", "(ms)", |r| format!("{:.3}", r.dispatch_ms)),
            ("combine", "(ms)", |r| format!("{:.3}", r.combine_ms)),
            ("iteration", "(ms)", |r| format!("{:.3}", r.iteration_ms)),
            ("ideal", "(ms)", |r| format!("{:.3}", r.bound_ms)),
            ("of ideal", "", |r| format!("{:.3}", r.bound_ratio)),
            ("gain", "over static", |r| format!("{:.2}", r.gain)),
        ],
    )
}

fn chart(rows: &[Row]) -> Chart {
    let bars = |name, y: fn(&Row) -> f64| Series::bars(name, rows.iter().map(|r| (r.method.into(), y(r))));
    Chart {
        title: "A mixture-of-experts layer".into(),
        x: "method",
        y: "ms",
        series: vec![
            bars("dispatch", |r| r.dispatch_ms),
            bars("combine", |r| r.combine_ms),
            bars("bound, both", |r| r.bound_ms),
        ],
        log_x: false,
    }
}
