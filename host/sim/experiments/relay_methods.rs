//! `relay-methods`: three ways to reach the NIC of another GPU (FuseLink, OSDI'25, section 3: its D1 to D4).

use serde::Serialize;

use super::report::{Chart, Outcome, Series, Table, or_dash, values};
use super::{MESSAGE_BYTES, Options, TESTBED, assumptions, by, one_way, testbed, world_config};
use crate::sim::relay::{HostSide, PCIE_BYTE_PER_NS, Relay, SOCKETS_BYTE_PER_NS};
use crate::sim::world::{SimError, World};
use crate::topo::Rank;

/// One way.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Row {
    /// The way.
    method: &'static str,
    /// By one NIC beside a GPU of the same socket, at both ends.
    near_gbyte_per_s: f64,
    /// By one NIC at the other socket, at both ends.
    far_gbyte_per_s: f64,
    /// By all NICs, the engine chooses.
    all_gbyte_per_s: f64,
    /// What one NIC could do.
    ideal_gbyte_per_s: f64,
    /// What the paper reports of one NIC.
    paper_gbyte_per_s: Option<f64>,
}

const BYTES: u64 = 1 << 30;
const LAUNCH_NS: u64 = 5_000;

const WAYS: [(&str, Relay, Option<f64>); 4] = [
    ("D1 stores over scale-up", Relay::Stores, Some(49.3)),
    ("D2 copy to the relay GPU", Relay::Copy { launch_ns: LAUNCH_NS }, None),
    ("D3 host memory, GPU's side", Relay::Host(HostSide::Gpu), Some(12.0)),
    ("D4 host memory, NIC's side", Relay::Host(HostSide::Nic), Some(12.0)),
];

pub(super) fn run(_: &Options) -> Result<Outcome, SimError> {
    let mut rows = Vec::new();
    for (method, relay, paper_gbyte_per_s) in WAYS {
        rows.push(Row {
            method,
            near_gbyte_per_s: measure(relay, Some(1))?,
            far_gbyte_per_s: measure(relay, Some(7))?,
            all_gbyte_per_s: measure(relay, None)?,
            ideal_gbyte_per_s: 50.0,
            paper_gbyte_per_s,
        });
    }
    let mut assumed = assumptions(TESTBED, &world_config(testbed(8)));
    assumed.extend([
        format!("one transfer of {} MiB from GPU 0, the same way at both ends", BYTES >> 20),
        "near: by NIC 1 alone; far: by NIC 7 alone, at the other CPU socket; all: the engine chooses among 8".into(),
        format!("D2: staged in the GPU's own memory, then a copy that the host launches and waits for: {} us, one at a time per GPU", LAUNCH_NS / 1000),
        format!("D3, D4: over the GPU's PCIe link, {PCIE_BYTE_PER_NS} GB/s per direction; GPUs and NICs 4 to 7 are at the second socket; {SOCKETS_BYTE_PER_NS} GB/s between the sockets per direction (the paper's figure)"),
        "host memory's own bandwidth is not modelled".into(),
    ]);
    Ok(Outcome {
        experiment: "relay-methods",
        assumptions: assumed,
        paper: vec!["direct NIC 49.3 GB/s, which D1 keeps; across the CPU socket link 12.0 GB/s; D2 to D4 are slower at the NIC".into()],
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
            ("way", "", |r| r.method.into()),
            ("near NIC", "(GB/s)", |r| format!("{:.2}", r.near_gbyte_per_s)),
            ("far NIC", "(GB/s)", |r| format!("{:.2}", r.far_gbyte_per_s)),
            ("paper", "(GB/s)", |r| or_dash(r.paper_gbyte_per_s, 1)),
            ("ideal", "(GB/s)", |r| format!("{:.1}", r.ideal_gbyte_per_s)),
            ("all NICs", "(GB/s)", |r| format!("{:.2}", r.all_gbyte_per_s)),
        ],
    )
}

fn chart(rows: &[Row]) -> Chart {
    let bars = |name, y: fn(&Row) -> f64| Series::bars(name, rows.iter().map(|r| (r.method.into(), y(r))));
    Chart {
        title: "Ways to the NIC of another GPU".into(),
        x: "way",
        y: "GB/s",
        series: vec![
            bars("near NIC", |r| r.near_gbyte_per_s),
            bars("far NIC", |r| r.far_gbyte_per_s),
            bars("all NICs", |r| r.all_gbyte_per_s),
        ],
        log_x: false,
    }
}

fn measure(relay: Relay, only: Option<u32>) -> Result<f64, SimError> {
    let mut config = world_config(testbed(8));
    config.relay = relay;
    let mut world = World::new(config)?;
    let (src, dst) = (Rank(0), Rank(8));
    for rank in (0..world.cluster().ranks()).map(Rank) {
        let runs = |r| vec![only.map_or(r, |nic| by(r, nic, nic))];
        world.open(rank, one_way((src, dst), BYTES, rank, MESSAGE_BYTES, runs))?;
    }
    world.run_until_done()?;
    let took = world.take_done().iter().map(|d| d.1).max().unwrap_or(1);
    Ok(BYTES as f64 / took as f64)
}
