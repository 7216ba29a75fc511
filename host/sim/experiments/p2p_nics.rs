//! `p2p-nics`: bandwidth of one pair of GPUs against the number of NICs (FuseLink, OSDI'25, section 5.2).

use serde::Serialize;

use super::{MESSAGE_BYTES, Outcome, Rows, common_assumptions, testbed, world_config};
use crate::doorbell::Class;
use crate::engine::call::{Call, CallId, Incoming, Run};
use crate::hw::Nanos;
use crate::sim::world::{SimError, World};
use crate::topo::Rank;

/// One number of NICs.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Row {
    /// NICs per server that are up.
    pub nics: u32,
    /// What the pair reached.
    pub gbyte_per_s: f64,
    /// The least of the NICs' sum and the direct NIC with scale-up.
    pub ideal_gbyte_per_s: f64,
    /// Over one NIC.
    pub ratio_to_one: f64,
    /// What the paper reports, where it does.
    pub paper_gbyte_per_s: Option<f64>,
}

/// Bytes of a transfer: long enough that its beginning and end do not count.
const BYTES: u64 = 4 << 30;

/// A call in which `src` sends `bytes` to `dst`, NICs free to choose; `side` is who opens it.
pub(super) fn one_way(src: Rank, dst: Rank, bytes: u64, side: Rank, run: impl Fn(Run) -> Vec<Run>) -> Call {
    let free =
        Run { piece: 0, dst, first_seq: 0, bytes, egress: None, ingress: None, transfer: None, queue: None };
    let runs = run(free);
    let incoming = runs.iter().map(|r| Incoming { src, bytes: r.bytes, ingress: r.ingress, transfer: None });
    Call {
        id: CallId(0),
        class: Class::Put,
        message_bytes: MESSAGE_BYTES,
        timeout_ns: Nanos::MAX,
        incoming: if side == dst { incoming.collect() } else { Vec::new() },
        sends: if side == src { runs } else { Vec::new() },
        turns: Vec::new(),
    }
}

/// Runs it.
///
/// # Errors
/// [`SimError`].
pub fn run() -> Result<Outcome, SimError> {
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
    let mut assumptions = common_assumptions(&world_config(testbed(8)));
    assumptions.push(format!("one transfer of {} MiB, nothing else running", BYTES >> 20));
    Ok(Outcome { experiment: "p2p-nics", assumptions, rows: Rows::P2pNics(rows) })
}

fn measure(nics: u32) -> Result<f64, SimError> {
    let mut world = World::new(world_config(testbed(nics)))?;
    let (src, dst) = (Rank(0), Rank(8));
    for rank in (0..world.cluster().ranks()).map(Rank) {
        world.open(rank, one_way(src, dst, BYTES, rank, |r| vec![r]))?;
    }
    world.run_until_done()?;
    let took = world.take_done().iter().map(|d| d.1).max().unwrap_or(1);
    Ok(BYTES as f64 / took as f64)
}
