//! What the commands that move bytes have in common: how ranks are started, and how fast the emulation runs.

use anyhow::anyhow;
use clap::{Args, ValueEnum};
use fuselink::comm::machine::{check_built, check_gpu_built, emulated_nic_byte_per_s};
use fuselink::comm::{MAX_CELL_MESSAGES, NicBackend, check_slots};
use fuselink::emu::calibrate;
use fuselink::plan::Demand;
use fuselink::topo::{Cluster, NicId, Rank};

use crate::environment;
use crate::failure::Failure;
use crate::job::{JobSpec, Report, RunMethod};
use crate::launch;
use crate::memory;
use crate::progress::Progress;

/// The flags of an emulated run.
#[derive(Args, Debug)]
#[command(next_help_heading = "Emulation")]
pub struct RunArgs {
    /// What a rank is
    #[arg(long, value_enum, default_value_t = RankKind::Process)]
    ranks: RankKind,
    /// Be one rank of a job that torchrun, mpirun, srun or a script has started on all hosts; rank 0 prints
    #[arg(long, conflicts_with = "ranks")]
    pub join: bool,
    /// What carries messages between servers [default: $FUSELINK_NIC, else emu]
    #[arg(long, value_enum)]
    nic: Option<NicKind>,
    /// Modelled rate over emulated rate [default: what this host carries; 1 with --nic verbs]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    scale: Option<u64>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub json: bool,
}

/// How ranks are started.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum RankKind {
    /// A process each, as on a cluster
    Process,
    /// Threads of one process
    Thread,
}

/// What NICs are.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum NicKind {
    /// Emulated: all servers are on this host
    Emu,
    /// RDMA devices (needs a build with --features verbs)
    Verbs,
}

/// Longest message of an emulated run: small enough that NICs are shared finely at emulated rates.
const SLOT_BYTES: u32 = 64 << 10;

/// Larger where a cell would otherwise be more messages than can be told apart.
fn slot_bytes(longest_cell: u64) -> u32 {
    let needed = longest_cell.div_ceil(MAX_CELL_MESSAGES).min(MAX_SLOT_BYTES.into()) as u32;
    needed.next_power_of_two().max(SLOT_BYTES)
}

/// What needs more than this does not fit into memory anyway.
const MAX_SLOT_BYTES: u32 = 1 << 30;

/// Beyond it a run takes hours, and NICs move less than a message a second.
const MAX_SCALE: u64 = 1_000_000;

impl RunArgs {
    /// What carries messages between servers, if this build has it.
    pub fn nic(&self) -> Result<NicBackend, Failure> {
        let backend = match self.nic {
            Some(NicKind::Emu) => NicBackend::Emu,
            Some(NicKind::Verbs) => NicBackend::Verbs,
            None => environment::settings().map_err(Failure::input)?.nic,
        };
        check_built(backend).map_err(Failure::input)?;
        Ok(backend)
    }

    /// The scale asked for, or what this host carries when all NICs of a cluster are at work.
    pub fn scale(&self, cluster: &Cluster) -> Result<u64, Failure> {
        match self.scale {
            Some(scale) if (1..=MAX_SCALE).contains(&scale) => Ok(scale),
            Some(scale) => Err(Failure::Input(anyhow!("--scale {scale} must be from 1 to {MAX_SCALE}"))),
            // Nothing slows an RDMA device down.
            None if self.nic()? == NicBackend::Verbs => Ok(1),
            None => {
                let rates = (0..cluster.nics()).map(|n| cluster.nic(NicId(n)).mbit_per_s);
                let modelled: Vec<f64> = rates.map(|r| emulated_nic_byte_per_s(r, 1) as f64).collect();
                let cores = std::thread::available_parallelism().map_or(1.0, |n| n.get() as f64);
                Ok(calibrate::choose_scale(&modelled, cores, calibrate::copy_byte_per_s()))
            }
        }
    }

    /// A job on a cluster.
    pub fn spec(
        &self,
        cluster: Cluster,
        demand: &Demand,
        methods: Vec<RunMethod>,
        scale: u64,
    ) -> Result<JobSpec, Failure> {
        let settings = environment::settings().map_err(Failure::input)?;
        check_gpu_built(settings.gpu).map_err(Failure::input)?;
        let longest = (0..demand.ranks()).flat_map(|r| demand.row(Rank(r))).copied().max().unwrap_or(0);
        let slot_bytes = slot_bytes(longest);
        check_slots(&cluster, slot_bytes, settings.relay_bytes).map_err(Failure::input)?;
        Ok(JobSpec {
            cells: (0..demand.ranks()).flat_map(|r| demand.row(Rank(r)).to_vec()).collect(),
            unit_bytes: demand.unit_bytes(),
            methods,
            iterations: 1,
            seed: 1,
            start_ns: 0,
            scale,
            slot_bytes,
            relay_bytes: settings.relay_bytes,
            gpu: settings.gpu,
            blocks: settings.blocks,
            timeout_ms: settings.timeout.as_millis() as u64,
            nic: self.nic()?,
            joined: self.join,
            cluster,
        })
    }

    /// Runs it in ranks of its own, unless it does not fit into memory. Wrong bytes are a failure only after the report.
    pub fn run(&self, spec: &JobSpec, progress: &mut Progress) -> Result<Report, Failure> {
        check_memory(spec)?;
        match self.ranks {
            RankKind::Process => launch::processes(spec, |event| progress.on_event(event)),
            RankKind::Thread => launch::threads(spec, |event| progress.on_event(event)),
        }
    }
}

/// Whether what this host holds of a job fits into its memory: all of it, or one server's part.
pub fn check_memory(spec: &JobSpec) -> Result<(), Failure> {
    let servers = if spec.joined { u64::from(spec.cluster.server_count()) } else { 1 };
    let ranks = u64::from(spec.cluster.ranks()).div_ceil(servers);
    let total = spec.cells.iter().fold(0u64, |sum, &cell| sum.saturating_add(cell));
    // Send and receive buffers, relay memory, and what a process takes by itself.
    let rank_bytes = (8 << 20) + spec.relay_bytes.min(64 << 20);
    memory::check_fits("the run", (total / servers).saturating_mul(2).saturating_add(ranks * rank_bytes))
}

/// A run whose bytes are not as sent has failed.
pub fn check_bytes(report: &Report) -> Result<(), Failure> {
    match report.methods.iter().find(|m| m.mismatched_bytes > 0) {
        None => Ok(()),
        Some(m) => Err(Failure::Run(anyhow!("{}: {} bytes arrived wrong", m.name, m.mismatched_bytes))),
    }
}
