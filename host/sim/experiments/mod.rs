//! Named experiments. Each says what it assumes and returns rows; docs/experiments.md has their story.

mod ablation;
mod dlrm;
mod fairness;
mod fast_sweep;
mod long_flow;
mod methods;
mod moe;
mod p2p_nics;
mod relay_methods;
mod remap;
pub mod report;
mod serving;

use super::world::{Delays, SimError, WorldConfig};
use crate::doorbell::Class;
use crate::engine::call::{Call, CallId, Incoming, Run};
use crate::engine::route::{Policy, RouteLimits};
use crate::engine::slots::SlotConfig;
use crate::hw::Nanos;
use crate::sim::relay::Relay;
use crate::topo::{Cluster, NicIdx, Rank, Server};
use report::Outcome;

/// FuseLink's chunk.
pub const MESSAGE_BYTES: u32 = 512 << 10;

/// What an experiment may be told.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Same seed, same result. Experiments without chance ignore it.
    pub seed: u64,
    /// Measured expert loads, for those that can use them.
    pub loads: Option<LoadsFile>,
}

/// Measured expert loads, as `plan` reads them.
#[derive(Clone, Debug)]
pub struct LoadsFile {
    /// What the file says.
    pub text: String,
    /// Its name, for errors.
    pub place: String,
    /// Which layer of it.
    pub layer: usize,
}

/// A named experiment.
pub struct Experiment {
    /// Its name.
    pub name: &'static str,
    /// What it shows, in a line.
    pub about: &'static str,
    /// Whether it can use [`Options::loads`].
    pub takes_loads: bool,
    run: fn(&Options) -> Result<Outcome, SimError>,
}

impl Experiment {
    /// Runs it.
    ///
    /// # Errors
    /// [`SimError`].
    pub fn run(&self, options: &Options) -> Result<Outcome, SimError> {
        (self.run)(options)
    }
}

const fn experiment(
    name: &'static str,
    about: &'static str,
    run: fn(&Options) -> Result<Outcome, SimError>,
) -> Experiment {
    Experiment { name, about, takes_loads: false, run }
}

/// All experiments.
pub const ALL: &[Experiment] = &[
    experiment("p2p-nics", "bandwidth of one pair of GPUs against the number of NICs", p2p_nics::run),
    experiment("relay-methods", "three ways to reach the NIC of another GPU", relay_methods::run),
    experiment("ablation", "what each part of the choice of NICs is worth", ablation::run),
    experiment("fairness", "what a long flow does to the short flows of a NIC's owner", fairness::run),
    experiment("remap", "switching to another NIC by table and by remap, and where each pays", remap::run),
    experiment("serving", "KV caches from prefill to decode: time to first token", serving::run),
    Experiment {
        takes_loads: true,
        ..experiment("moe", "dispatch and combine of a mixture-of-experts layer", moe::run)
    },
    experiment("dlrm", "embedding fetches of a recommendation model", dlrm::run),
    experiment("fast-sweep", "all-to-alls of 32 to 320 GPUs against the bound", fast_sweep::run),
];

/// The experiment of that name.
pub fn find(name: &str) -> Option<&'static Experiment> {
    ALL.iter().find(|e| e.name == name)
}

/// Two servers as FuseLink's testbed: 8 GPUs, 8 NICs of 400 Gbit/s of which `nics` are up, 200 GB/s of scale-up.
fn testbed(nics: u32) -> Cluster {
    let rates: Vec<u64> = (0..8).map(|k| if k < nics { 400_000 } else { 0 }).collect();
    Cluster::uniform(2, Server::new(8, &rates, 200_000))
}

fn world_config(cluster: Cluster) -> WorldConfig {
    world_with(cluster, MESSAGE_BYTES)
}

fn world_with(cluster: Cluster, message_bytes: u32) -> WorldConfig {
    let message = u64::from(message_bytes);
    WorldConfig {
        cluster,
        slots: SlotConfig::most(message_bytes, 0),
        limits: RouteLimits {
            direct_bytes: 3 * message,
            borrow_bytes: 8 * message,
            policy: Policy::default(),
        },
        idle_after_ns: 40_000,
        blocks: 8,
        armed_depth: 4,
        lookahead_bytes: 3 * message,
        delays: Delays::default(),
        relay: Relay::Stores,
    }
}

/// A call in which `src` sends `bytes` to `dst`, NICs free to choose unless `run` says more; `side` is who opens it.
fn one_way(
    (src, dst): (Rank, Rank),
    bytes: u64,
    side: Rank,
    message_bytes: u32,
    run: impl Fn(Run) -> Vec<Run>,
) -> Call {
    let free =
        Run { piece: 0, dst, first_seq: 0, bytes, egress: None, ingress: None, transfer: None, queue: None };
    let runs = run(free);
    let incoming = runs.iter().map(|r| Incoming { src, bytes: r.bytes, ingress: r.ingress, transfer: None });
    Call {
        id: CallId(0),
        class: Class::Put,
        message_bytes,
        timeout_ns: Nanos::MAX,
        incoming: if side == dst { incoming.collect() } else { Vec::new() },
        sends: if side == src { runs } else { Vec::new() },
        turns: Vec::new(),
    }
}

/// The same run by these NICs.
fn by(run: Run, egress: u32, ingress: u32) -> Run {
    Run { egress: Some(NicIdx(egress)), ingress: Some(NicIdx(ingress)), ..run }
}

/// The 99th percentile, or another.
fn percentile(times: &mut [Nanos], percent: usize) -> Nanos {
    times.sort_unstable();
    let nth = (times.len() * percent).div_ceil(100);
    times.get(nth.saturating_sub(1)).copied().unwrap_or(0)
}

/// FuseLink's testbed in words.
const TESTBED: &str =
    "two servers of FuseLink's testbed: 8 GPUs, 400 Gbit/s NICs, 200 GB/s of scale-up per GPU and direction";

/// What every experiment here assumes of a machine, in words.
fn assumptions(machine: &str, config: &WorldConfig) -> Vec<String> {
    let d = config.delays;
    let kib = |bytes: u64| bytes >> 10;
    vec![
        machine.into(),
        format!(
            "messages of {} KiB; {} send slots per NIC, {} credits per NIC and peer",
            config.slots.slot_bytes >> 10,
            config.slots.send_slots,
            config.slots.recv_slots
        ),
        "links shared max-min fairly; each pair of NICs has 2 messages under way at most".into(),
        format!(
            "fixed delays: arm {} us, doorbell {} us, completion {} us, arrival {} us, credit {} us; a look at the load table every {} us",
            d.arm_ns / 1000,
            d.doorbell_ns / 1000,
            d.completion_ns / 1000,
            d.arrival_ns / 1000,
            d.credit_ns / 1000,
            d.look_ns / 1000
        ),
        format!(
            "borrowers have at most {} KiB on the way through a NIC; it is idle {} us after its owner's last byte",
            kib(config.limits.borrow_bytes),
            config.idle_after_ns / 1000
        ),
    ]
}
