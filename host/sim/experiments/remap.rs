//! `remap`: what a switch to another NIC costs by table and by remap, and from how many bytes on each pays (FuseLink,
//! OSDI'25, reports 95 to 193 us per remap).

use serde::Serialize;

use super::report::{Chart, Outcome, Series, Table, values};
use super::{MESSAGE_BYTES, Options, TESTBED, assumptions, by, one_way, testbed, world_config};
use crate::hw::Nanos;
use crate::sim::world::{SimError, World};
use crate::topo::Rank;

/// Bytes that are sent after a switch, or without one.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Row {
    /// How many.
    bytes: u64,
    /// By the direct NIC, which another rank uses as well.
    stay_us: f64,
    /// By an idle NIC after a switch by table.
    table_us: f64,
    /// By an idle NIC after a remap at each end, at the paper's least.
    remap_95_us: f64,
    /// At the paper's most.
    remap_193_us: f64,
    /// Bytes over the rate of a whole NIC.
    ideal_us: f64,
}

const REMAPS_NS: [Nanos; 2] = [95_000, 193_000];
const SIZES_KIB: [u64; 8] = [512, 1024, 2048, 4096, 6144, 8192, 12288, 16384];
/// The flow that shares the direct NIC never ends.
const OTHER_BYTES: u64 = 1 << 40;
/// The other flow has settled by then.
const BEGIN_NS: Nanos = 500_000;

pub(super) fn run(_: &Options) -> Result<Outcome, SimError> {
    let mut rows = Vec::new();
    for bytes in SIZES_KIB.map(|kib| kib << 10) {
        let us = |nic, after_ns| Ok::<_, SimError>(measure(bytes, nic, after_ns)? as f64 / 1e3);
        rows.push(Row {
            bytes,
            stay_us: us(0, 0)?,
            table_us: us(1, 0)?,
            remap_95_us: us(1, REMAPS_NS[0])?,
            remap_193_us: us(1, REMAPS_NS[1])?,
            ideal_us: bytes as f64 / 50.0 / 1e3,
        });
    }
    let mut assumed = assumptions(TESTBED, &world_config(testbed(8)));
    assumed.extend([
        "GPU 0 sends to GPU 0 of the other server; GPU 1 sends without end by NIC 0, both ends, so that half of it is left".into(),
        "by table: the next message takes another address (a store; `cargo bench --bench choose` has its cost)".into(),
        "by remap: the window must be quiet, so nothing is sent while both ends remap, 95 or 193 us".into(),
        "NIC 1 is idle".into(),
    ]);
    Ok(Outcome {
        experiment: "remap",
        assumptions: assumed,
        paper: vec!["a remap takes 95 to 193 us; it pays from about 5 to 10 MB on one NIC".into()],
        tables: vec![table(&rows), break_even(&rows)],
        chart: chart(&rows),
        rows: values(&rows),
    })
}

/// How long `bytes` take by one NIC from the moment of the decision, when sending begins `after_ns` later.
fn measure(bytes: u64, nic: u32, after_ns: Nanos) -> Result<Nanos, SimError> {
    let mut world = World::new(world_config(testbed(8)))?;
    let (other_src, other_dst) = (Rank(1), Rank(9));
    for rank in (0..world.cluster().ranks()).map(Rank).filter(|r| ![0, 8].contains(&r.0)) {
        let call = one_way((other_src, other_dst), OTHER_BYTES, rank, MESSAGE_BYTES, |r| vec![by(r, 0, 0)]);
        world.open(rank, call)?;
    }
    let begin = BEGIN_NS + after_ns;
    world.wake_at(begin);
    while world.now() < begin {
        world.step()?;
    }
    let (src, dst) = (Rank(0), Rank(8));
    for rank in [src, dst] {
        world.open(rank, one_way((src, dst), bytes, rank, MESSAGE_BYTES, |r| vec![by(r, nic, nic)]))?;
    }
    loop {
        if world.take_done().iter().any(|d| d.0 == dst) {
            return Ok(world.now() - BEGIN_NS);
        }
        world.step()?;
    }
}

fn table(rows: &[Row]) -> Table {
    Table::of(
        "",
        rows,
        &[
            ("bytes", "(KiB)", |r| (r.bytes >> 10).to_string()),
            ("stay", "(us)", |r| format!("{:.1}", r.stay_us)),
            ("table", "(us)", |r| format!("{:.1}", r.table_us)),
            ("remap 95 us", "(us)", |r| format!("{:.1}", r.remap_95_us)),
            ("remap 193 us", "(us)", |r| format!("{:.1}", r.remap_193_us)),
            ("ideal", "(us)", |r| format!("{:.1}", r.ideal_us)),
            ("best", "", |r| {
                let ways = [(r.stay_us, "stay"), (r.table_us, "table")];
                let best = ways.iter().min_by(|a, b| a.0.total_cmp(&b.0));
                best.map_or(String::new(), |b| b.1.into())
            }),
        ],
    )
}

/// What a way takes.
type Time = fn(&Row) -> f64;

/// From how many bytes on a way is quicker than staying: between the sizes measured, in a straight line.
fn pays_from(rows: &[Row], us: Time) -> Option<f64> {
    let gain = |r: &Row| r.stay_us - us(r);
    let first = rows.first().filter(|r| gain(r) >= 0.0).map(|r| r.bytes as f64);
    let crossing = rows.windows(2).find(|w| gain(&w[0]) < 0.0 && gain(&w[1]) >= 0.0);
    first.or_else(|| {
        crossing.map(|w| {
            let part = -gain(&w[0]) / (gain(&w[1]) - gain(&w[0]));
            w[0].bytes as f64 + part * (w[1].bytes - w[0].bytes) as f64
        })
    })
}

fn break_even(rows: &[Row]) -> Table {
    let ways: [(&str, Time, &str); 3] = [
        ("table", |r| r.table_us, "-"),
        ("remap 95 us", |r| r.remap_95_us, "about 5"),
        ("remap 193 us", |r| r.remap_193_us, "about 10"),
    ];
    let from = |us| pays_from(rows, us).map_or("never".into(), |b| format!("{:.1}", b / 1e6));
    Table {
        title: "\nPays from".into(),
        head: vec![["switch", ""], ["here", "(MB)"], ["paper", "(MB)"]],
        rows: ways.iter().map(|&(name, us, paper)| vec![name.into(), from(us), paper.into()]).collect(),
    }
}

fn chart(rows: &[Row]) -> Chart {
    let line =
        |name, y: fn(&Row) -> f64| Series::line(name, rows.iter().map(|r| (r.bytes as f64 / 1e6, y(r))));
    Chart {
        title: "Staying on a shared NIC, or switching to an idle one".into(),
        x: "MB to send",
        y: "us",
        series: vec![
            line("stay", |r| r.stay_us),
            line("table", |r| r.table_us),
            line("remap 95 us", |r| r.remap_95_us),
            line("remap 193 us", |r| r.remap_193_us),
        ],
        log_x: false,
    }
}
