//! `fairness`: what a long flow that looks for NICs does to the short flows of a NIC's owner (FuseLink, OSDI'25,
//! section 5.3).

use serde::Serialize;

use super::p2p_nics::one_way;
use super::{MESSAGE_BYTES, Outcome, Rows, common_assumptions, testbed, world_config};
use crate::engine::call::Run;
use crate::hw::Nanos;
use crate::sim::world::{SimError, World};
use crate::topo::{NicIdx, Rank};

/// One way of the long flow, one size of the victim's flows.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Row {
    /// How the long flow chooses NICs.
    pub method: &'static str,
    /// Size of a victim's flow.
    pub victim_bytes: u64,
    /// 99th percentile of its time.
    pub victim_p99_us: f64,
    /// The same without the long flow.
    pub alone_p99_us: f64,
    /// What the long flow got meanwhile.
    pub long_gbyte_per_s: f64,
}

/// The victim sends a flow this often, or when the one before is done.
const PERIOD_NS: Nanos = 1_000_000;
/// Flows of the victim per row.
const FLOWS: usize = 25;
/// The long flow never ends.
const LONG_BYTES: u64 = 1 << 40;
const LONG: (Rank, Rank) = (Rank(0), Rank(8));
const VICTIM: (Rank, Rank) = (Rank(1), Rank(9));

/// How the long flow chooses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Method {
    Static,
    Spray,
    FuseLink,
}

impl Method {
    fn name(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Spray => "spray",
            Self::FuseLink => "fuselink",
        }
    }

    fn runs(self, free: Run) -> Vec<Run> {
        let on =
            |egress, ingress| Run { egress: Some(NicIdx(egress)), ingress: Some(NicIdx(ingress)), ..free };
        match self {
            Self::FuseLink => vec![free],
            Self::Static => vec![on(0, 0)],
            // Equal parts on all pairs of NICs; the sender takes the one with most left, hence each in turn.
            Self::Spray => {
                let part = free.bytes / 64 / u64::from(MESSAGE_BYTES) * u64::from(MESSAGE_BYTES);
                let first_seq = |n: u32| n * (part / u64::from(MESSAGE_BYTES)) as u32;
                (0..64).map(|n| Run { bytes: part, first_seq: first_seq(n), ..on(n % 8, n / 8) }).collect()
            }
        }
    }
}

/// Runs it.
///
/// # Errors
/// [`SimError`].
pub fn run() -> Result<Outcome, SimError> {
    let config = world_config(testbed(8));
    let bound = config.limits.borrow_bytes;
    let mut rows = Vec::new();
    for victim_bytes in [bound / 2, 4 * bound, 20 * bound] {
        let (alone_p99_us, _) = measure(None, victim_bytes)?;
        for method in [Method::Static, Method::Spray, Method::FuseLink] {
            let (victim_p99_us, long_gbyte_per_s) = measure(Some(method), victim_bytes)?;
            rows.push(Row {
                method: method.name(),
                victim_bytes,
                victim_p99_us,
                alone_p99_us,
                long_gbyte_per_s,
            });
        }
    }
    let mut assumptions = common_assumptions(&config);
    assumptions.push(format!(
        "GPU 0 sends without end to GPU 0 of the other server; GPU 1 sends a flow every {} us to GPU 1, by its own NICs only",
        PERIOD_NS / 1000
    ));
    Ok(Outcome { experiment: "fairness", assumptions, rows: Rows::Fairness(rows) })
}

/// The victim's 99th percentile in microseconds, and the long flow's rate.
fn measure(method: Option<Method>, victim_bytes: u64) -> Result<(f64, f64), SimError> {
    let mut world = World::new(world_config(testbed(8)))?;
    let idle = |rank| one_way(LONG.0, LONG.1, 0, rank, |_| Vec::new());
    for rank in (0..world.cluster().ranks()).map(Rank) {
        let call = match method {
            Some(m) if rank == LONG.0 || rank == LONG.1 => {
                one_way(LONG.0, LONG.1, LONG_BYTES, rank, |r| m.runs(r))
            }
            _ => idle(rank),
        };
        world.open(rank, call)?;
    }
    let direct = |r: Run| vec![Run { egress: Some(NicIdx(1)), ingress: Some(NicIdx(1)), ..r }];
    let mut times = Vec::new();
    for flow in 1..=FLOWS as u64 {
        let at = flow * PERIOD_NS;
        world.wake_at(at);
        while world.now() < at {
            world.step()?;
        }
        for rank in [VICTIM.0, VICTIM.1] {
            world.open(rank, one_way(VICTIM.0, VICTIM.1, victim_bytes, rank, direct))?;
        }
        let took = loop {
            if let Some(&(_, took)) = world.take_done().iter().find(|d| d.0 == VICTIM.1) {
                break took;
            }
            world.step()?;
        };
        times.push(took);
    }
    times.sort_unstable();
    let p99_us = times[(times.len() * 99).div_ceil(100) - 1] as f64 / 1e3;
    let sent: u64 = (0..8).map(|n| world.nic_tx_bytes(crate::topo::NicId(n))).sum();
    let victim = victim_bytes * FLOWS as u64;
    Ok((p99_us, sent.saturating_sub(victim) as f64 / world.now() as f64))
}
