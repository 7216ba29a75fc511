//! `fairness`: what a long flow that looks for NICs does to the short flows of a NIC's owner (FuseLink, OSDI'25,
//! section 5.3).

use serde::Serialize;

use super::long_flow::{Long, PERIOD_NS, watch};
use super::report::{Chart, Outcome, Series, Table, values};
use super::{Options, TESTBED, assumptions, testbed, world_config};
use crate::engine::route::Policy;
use crate::sim::world::SimError;

/// One way of the long flow, one size of the victim's flows.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Row {
    /// How the long flow chooses NICs.
    method: &'static str,
    /// Size of a victim's flow.
    victim_bytes: u64,
    /// 99th percentile of its time.
    victim_p99_us: f64,
    /// The same without the long flow.
    alone_p99_us: f64,
    /// The most that borrowers may delay a flow: their bound over the NIC's rate.
    bound_us: f64,
    /// What the long flow got meanwhile.
    long_gbyte_per_s: f64,
}

/// Flows of the victim per row.
const FLOWS: usize = 25;
/// A NIC of the testbed.
const NIC_BYTE_PER_NS: f64 = 50.0;

pub(super) fn run(_: &Options) -> Result<Outcome, SimError> {
    let config = world_config(testbed(8));
    let bound = config.limits.borrow_bytes;
    let mut rows = Vec::new();
    for victim_bytes in [bound / 2, 4 * bound, 20 * bound] {
        let alone_p99_us = watch(Long::Absent, victim_bytes, FLOWS)?.victim_p99_us;
        let ways =
            [("static", Long::Static), ("spray", Long::Sprays), ("fuselink", Long::Chooses(Policy::WHOLE))];
        for (method, long) in ways {
            let seen = watch(long, victim_bytes, FLOWS)?;
            rows.push(Row {
                method,
                victim_bytes,
                victim_p99_us: seen.victim_p99_us,
                alone_p99_us,
                bound_us: bound as f64 / NIC_BYTE_PER_NS / 1e3,
                long_gbyte_per_s: seen.long_gbyte_per_s,
            });
        }
    }
    let mut assumed = assumptions(TESTBED, &config);
    assumed.push(format!(
        "GPU 0 sends without end to GPU 0 of the other server; GPU 1 sends {FLOWS} flows, one every {} us, to GPU 1, by its own NICs only",
        PERIOD_NS / 1000
    ));
    assumed.push(
        "ideal: the victim as if alone (ratio 1), the long flow at 250 GB/s less what the victim takes"
            .into(),
    );
    Ok(Outcome {
        experiment: "fairness",
        assumptions: assumed,
        paper: vec![
            "a long flow that sprays over a victim's NIC slows the victim's short flows; FuseLink does not (a figure without numbers)".into(),
        ],
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
            ("long flow", "", |r| r.method.into()),
            ("victim flow", "(KiB)", |r| (r.victim_bytes >> 10).to_string()),
            ("victim P99", "(us)", |r| format!("{:.1}", r.victim_p99_us)),
            ("alone P99", "(us)", |r| format!("{:.1}", r.alone_p99_us)),
            ("ratio", "", |r| format!("{:.3}", r.victim_p99_us / r.alone_p99_us)),
            ("added", "(us)", |r| format!("{:.1}", r.victim_p99_us - r.alone_p99_us)),
            ("bound / rate", "(us)", |r| format!("{:.1}", r.bound_us)),
            ("long flow", "(GB/s)", |r| format!("{:.1}", r.long_gbyte_per_s)),
        ],
    )
}

fn chart(rows: &[Row]) -> Chart {
    let bars = |method: &'static str| {
        let own = rows.iter().filter(move |r| r.method == method);
        let name = |r: &Row| format!("{} KiB", r.victim_bytes >> 10);
        Series::bars(method, own.map(|r| (name(r), r.victim_p99_us / r.alone_p99_us)))
    };
    Chart {
        title: "A victim's flows beside a long flow".into(),
        x: "size of the victim's flow",
        y: "P99 over alone",
        series: ["static", "spray", "fuselink"].map(bars).into(),
        log_x: false,
    }
}
