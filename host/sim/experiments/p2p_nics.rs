//! `p2p-nics`: bandwidth of one pair of GPUs against the number of NICs (FuseLink, OSDI'25, section 5.2).

use serde::Serialize;

use super::report::{Chart, Outcome, Series, Table, or_dash, values};
use super::{MESSAGE_BYTES, Options, TESTBED, assumptions, one_way, testbed, world_config};
use crate::sim::world::{SimError, World};
use crate::topo::Rank;

/// One number of NICs.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
struct Row {
    /// NICs per server that are up.
    nics: u32,
    /// What the pair reached.
    gbyte_per_s: f64,
    /// The least of the NICs' sum and the direct NIC with scale-up.
    ideal_gbyte_per_s: f64,
    /// Over one NIC.
    ratio_to_one: f64,
    /// What the paper reports, where it does.
    paper_gbyte_per_s: Option<f64>,
}

/// Bytes of a transfer: long enough that its beginning and end do not count.
const BYTES: u64 = 4 << 30;

pub(super) fn run(_: &Options) -> Result<Outcome, SimError> {
    let mut rows: Vec<Row> = Vec::new();
    for nics in 1..=8 {
        let gbyte_per_s = measure(nics)?;
        let one = rows.first().map_or(gbyte_per_s, |r| r.gbyte_per_s);
        rows.push(Row {
            nics,
            gbyte_per_s,
            ideal_gbyte_per_s: f64::from(nics * 50).min(250.0),
            ratio_to_one: gbyte_per_s / one,
            paper_gbyte_per_s: match nics {
                1 => Some(49.27),
                6.. => Some(212.35),
                _ => None,
            },
        });
    }
    let mut assumed = assumptions(TESTBED, &world_config(testbed(8)));
    assumed.push(format!("one transfer of {} MiB, nothing else running", BYTES >> 20));
    Ok(Outcome {
        experiment: "p2p-nics",
        assumptions: assumed,
        paper: vec!["49.27 GB/s with one NIC, 212.35 GB/s from six on".into()],
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
            ("NICs", "", |r| r.nics.to_string()),
            ("here", "(GB/s)", |r| format!("{:.2}", r.gbyte_per_s)),
            ("paper", "(GB/s)", |r| or_dash(r.paper_gbyte_per_s, 2)),
            ("ideal", "(GB/s)", |r| format!("{:.2}", r.ideal_gbyte_per_s)),
            ("of ideal", "", |r| format!("{:.3}", r.gbyte_per_s / r.ideal_gbyte_per_s)),
        ],
    )
}

fn chart(rows: &[Row]) -> Chart {
    let line = |name, y: fn(&Row) -> Option<f64>| {
        Series::line(name, rows.iter().filter_map(|r| Some((r.nics.into(), y(r)?))))
    };
    Chart {
        title: "One pair of GPUs against the number of NICs".into(),
        x: "NICs per server",
        y: "GB/s",
        series: vec![
            line("here", |r| Some(r.gbyte_per_s)),
            line("ideal", |r| Some(r.ideal_gbyte_per_s)),
            line("paper", |r| r.paper_gbyte_per_s),
        ],
        log_x: false,
    }
}

fn measure(nics: u32) -> Result<f64, SimError> {
    let mut world = World::new(world_config(testbed(nics)))?;
    let (src, dst) = (Rank(0), Rank(8));
    for rank in (0..world.cluster().ranks()).map(Rank) {
        world.open(rank, one_way((src, dst), BYTES, rank, MESSAGE_BYTES, |r| vec![r]))?;
    }
    world.run_until_done()?;
    let took = world.take_done().iter().map(|d| d.1).max().unwrap_or(1);
    Ok(BYTES as f64 / took as f64)
}
