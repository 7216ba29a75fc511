//! A scene of two experiments: a flow without end from GPU 0, and the short flows of GPU 1, whose NIC it may borrow.

use super::{MESSAGE_BYTES, by, one_way, percentile, testbed, world_config};
use crate::engine::call::Run;
use crate::engine::route::Policy;
use crate::hw::Nanos;
use crate::sim::world::{SimError, World};
use crate::topo::{NicId, Rank};

/// How the long flow chooses NICs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Long {
    /// By a rule.
    Chooses(Policy),
    /// Its own NIC.
    Static,
    /// All pairs of NICs in turn.
    Sprays,
    /// There is none.
    Absent,
}

/// What came out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    /// The victim's 99th percentile.
    pub victim_p99_us: f64,
    /// What the long flow got meanwhile.
    pub long_gbyte_per_s: f64,
}

/// The victim sends a flow this often, or when the one before is done.
pub(super) const PERIOD_NS: Nanos = 1_000_000;
/// The long flow never ends.
const LONG_BYTES: u64 = 1 << 40;
const LONG: (Rank, Rank) = (Rank(0), Rank(8));
const VICTIM: (Rank, Rank) = (Rank(1), Rank(9));

impl Long {
    fn runs(self, free: Run) -> Vec<Run> {
        match self {
            Self::Absent => Vec::new(),
            Self::Chooses(_) => vec![free],
            Self::Static => vec![by(free, 0, 0)],
            // Equal parts on all pairs of NICs; the sender takes the one with most left, hence each in turn.
            Self::Sprays => {
                let part = free.bytes / 64 / u64::from(MESSAGE_BYTES) * u64::from(MESSAGE_BYTES);
                let first_seq = |n: u32| n * (part / u64::from(MESSAGE_BYTES)) as u32;
                (0..64)
                    .map(|n| Run { bytes: part, first_seq: first_seq(n), ..by(free, n % 8, n / 8) })
                    .collect()
            }
        }
    }
}

/// Lets `flows` flows of the victim pass.
pub(super) fn watch(long: Long, victim_bytes: u64, flows: usize) -> Result<Seen, SimError> {
    let mut config = world_config(testbed(8));
    if let Long::Chooses(policy) = long {
        config.limits.policy = policy;
    }
    let mut world = World::new(config)?;
    for rank in (0..world.cluster().ranks()).map(Rank) {
        world.open(rank, one_way(LONG, LONG_BYTES, rank, MESSAGE_BYTES, |r| long.runs(r)))?;
    }
    let mut times = Vec::new();
    for flow in 1..=flows as u64 {
        times.push(victim_flow(&mut world, flow * PERIOD_NS, victim_bytes)?);
    }
    let sent: u64 = (0..8).map(|n| world.nic_tx_bytes(NicId(n))).sum();
    let long = sent.saturating_sub(victim_bytes * flows as u64);
    Ok(Seen {
        victim_p99_us: percentile(&mut times, 99) as f64 / 1e3,
        long_gbyte_per_s: long as f64 / world.now() as f64,
    })
}

fn victim_flow(world: &mut World, at: Nanos, bytes: u64) -> Result<Nanos, SimError> {
    world.wake_at(at);
    while world.now() < at {
        world.step()?;
    }
    for rank in [VICTIM.0, VICTIM.1] {
        world.open(rank, one_way(VICTIM, bytes, rank, MESSAGE_BYTES, |r| vec![by(r, 1, 1)]))?;
    }
    loop {
        if let Some(&(_, took)) = world.take_done().iter().find(|d| d.0 == VICTIM.1) {
            return Ok(took);
        }
        world.step()?;
    }
}
