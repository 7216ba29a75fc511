//! Named experiments. Each says what it assumes and returns rows; docs/experiments.md has their story.

pub mod fairness;
pub mod p2p_nics;

use serde::Serialize;

use super::world::{Delays, SimError, WorldConfig};
use crate::engine::route::RouteLimits;
use crate::engine::slots::SlotConfig;
use crate::topo::{Cluster, Server};

/// FuseLink's chunk.
pub const MESSAGE_BYTES: u32 = 512 << 10;

/// What an experiment found.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Outcome {
    /// Its name.
    pub experiment: &'static str,
    /// What was taken for granted.
    pub assumptions: Vec<String>,
    /// Its rows.
    pub rows: Rows,
}

/// Rows of one kind.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[serde(untagged)]
pub enum Rows {
    /// Bandwidth against the number of NICs.
    P2pNics(Vec<p2p_nics::Row>),
    /// A victim's short flows beside a long one.
    Fairness(Vec<fairness::Row>),
}

/// The experiments by name.
pub const NAMES: &[&str] = &["p2p-nics", "fairness"];

/// Runs an experiment; `None` when there is none of that name.
///
/// # Errors
/// [`SimError`].
pub fn run(name: &str) -> Result<Option<Outcome>, SimError> {
    Ok(match name {
        "p2p-nics" => Some(p2p_nics::run()?),
        "fairness" => Some(fairness::run()?),
        _ => None,
    })
}

/// Two servers as FuseLink's testbed: 8 GPUs, 8 NICs of 400 Gbit/s of which `nics` are up, 200 GB/s of scale-up.
fn testbed(nics: u32) -> Cluster {
    let rates: Vec<u64> = (0..8).map(|k| if k < nics { 400_000 } else { 0 }).collect();
    Cluster::uniform(2, Server::new(8, &rates, 200_000))
}

fn world_config(cluster: Cluster) -> WorldConfig {
    let message = u64::from(MESSAGE_BYTES);
    WorldConfig {
        cluster,
        slots: SlotConfig { slot_bytes: MESSAGE_BYTES, send_slots: 16, recv_slots: 8, put_bytes: 0 },
        limits: RouteLimits { direct_bytes: 3 * message, borrow_bytes: 8 * message },
        idle_after_ns: 40_000,
        blocks: 8,
        armed_depth: 4,
        lookahead_bytes: 2 * message,
        delays: Delays::default(),
    }
}

/// What every experiment here assumes, in words.
fn common_assumptions(config: &WorldConfig) -> Vec<String> {
    let d = config.delays;
    vec![
        "two servers of FuseLink's testbed: 8 GPUs, 400 Gbit/s NICs, 200 GB/s of scale-up per GPU and direction".into(),
        format!("messages of {} KiB; 16 send slots per NIC, 8 credits per NIC and peer", MESSAGE_BYTES >> 10),
        "links shared max-min fairly; each pair of NICs has 2 messages under way at most".into(),
        format!(
            "fixed delays: arm {} us, doorbell {} us, completion {} us, arrival {} us, credit {} us",
            d.arm_ns / 1000,
            d.doorbell_ns / 1000,
            d.completion_ns / 1000,
            d.arrival_ns / 1000,
            d.credit_ns / 1000
        ),
        format!(
            "borrowers have at most {} KiB on the way through a NIC; it is idle {} us after its owner's last byte",
            config.limits.borrow_bytes >> 10,
            config.idle_after_ns / 1000
        ),
    ]
}
