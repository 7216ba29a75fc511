//! `ablation`: what each part of the choice of NICs is worth (FuseLink, OSDI'25, its ablation). Every row is the engine,
//! with parts of its rule switched off ([`Policy`]).

use serde::Serialize;

use super::long_flow::{Long, PERIOD_NS, watch};
use super::report::{Chart, Outcome, Series, Table, values};
use super::{Options, TESTBED, assumptions, testbed, world_config};
use crate::engine::route::Policy;
use crate::sim::world::SimError;

/// One set of parts.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Row {
    /// The part that this row adds to the one before.
    adds: &'static str,
    /// What the long flow got.
    gbyte_per_s: f64,
    /// What the paper reports.
    paper_gbyte_per_s: f64,
    /// The direct NIC and scale-up.
    ideal_gbyte_per_s: f64,
    /// 99th percentile of the flows of GPU 1, whose NIC is the first to be borrowed, over alone.
    victim_ratio: f64,
}

/// Flows of GPU 1 per row, and their size: a sixth of the time its NIC is its own.
const FLOWS: usize = 25;
const VICTIM_BYTES: u64 = 8 << 20;

const PARTS: [(&str, Policy, f64); 5] = [
    ("static", Policy::STATIC, 49.27),
    ("+ relay", Policy::RELAY, 78.39),
    ("+ no interruption", Policy::YIELDING, 76.37),
    ("+ contention control", Policy::BOUNDED, 178.59),
    ("+ load-aware scheduling", Policy::WHOLE, 212.35),
];

pub(super) fn run(_: &Options) -> Result<Outcome, SimError> {
    let alone = watch(Long::Absent, VICTIM_BYTES, FLOWS)?.victim_p99_us;
    let mut rows = Vec::new();
    for (adds, policy, paper_gbyte_per_s) in PARTS {
        let seen = watch(Long::Chooses(policy), VICTIM_BYTES, FLOWS)?;
        rows.push(Row {
            adds,
            gbyte_per_s: seen.long_gbyte_per_s,
            paper_gbyte_per_s,
            ideal_gbyte_per_s: 250.0,
            victim_ratio: seen.victim_p99_us / alone,
        });
    }
    let mut assumed = assumptions(TESTBED, &world_config(testbed(8)));
    assumed.extend([
        format!(
            "GPU 0 sends without end to GPU 0 of the other server; GPU 1 sends {} MiB to GPU 1 every {} us, by its own NICs only",
            VICTIM_BYTES >> 20,
            PERIOD_NS / 1000
        ),
        "relay: the direct NIC while it is idle, else the first other one that is up; what is full is waited for".into(),
        "no interruption: only NICs that their owners leave idle".into(),
        "contention control: bounded bytes per borrowed NIC, then the next one; a quarter of the blocks is left to direct messages".into(),
        "load-aware: the least borrowed NIC, and the same rail at both ends".into(),
    ]);
    Ok(Outcome {
        experiment: "ablation",
        assumptions: assumed,
        paper: vec!["49.27, 78.39, 76.37, 178.59, 212.35 GB/s; its other traffic is not described".into()],
        tables: vec![table(&rows)],
        chart: chart(&rows),
        rows: values(&rows),
    })
}

fn table(rows: &[Row]) -> Table {
    Table::of(
        "",
        rows,
        &[
            ("policy", "", |r| r.adds.into()),
            ("here", "(GB/s)", |r| format!("{:.2}", r.gbyte_per_s)),
            ("paper", "(GB/s)", |r| format!("{:.2}", r.paper_gbyte_per_s)),
            ("ideal", "(GB/s)", |r| format!("{:.2}", r.ideal_gbyte_per_s)),
            ("victim P99", "over alone", |r| format!("{:.3}", r.victim_ratio)),
        ],
    )
}

fn chart(rows: &[Row]) -> Chart {
    let bars = |name, y: fn(&Row) -> f64| Series::bars(name, rows.iter().map(|r| (r.adds.into(), y(r))));
    Chart {
        title: "What each part of the rule is worth".into(),
        x: "parts in force",
        y: "GB/s",
        series: vec![bars("here", |r| r.gbyte_per_s), bars("paper", |r| r.paper_gbyte_per_s)],
        log_x: false,
    }
}
