//! `fuselink alltoallv`: the main job. Moves a demand with each method, checks every byte, and compares.

use anyhow::anyhow;
use clap::{Args, ValueEnum};
use fuselink::comm::machine::emulated_nic_byte_per_s;
use fuselink::comm::settings::Settings;
use fuselink::emu::{calibrate, host};
use fuselink::plan::{Bound, CostModel, Demand};
use fuselink::topo::{Cluster, NicId};

use crate::cluster_args::ClusterArgs;
use crate::demand_args::DemandArgs;
use crate::failure::Failure;
use crate::job::{JobSpec, Report, RunMethod};
use crate::progress::Progress;
use crate::{launch, run_report};

/// Moves an all-to-all on an emulated cluster with several methods, checks every byte, and compares.
#[derive(Args, Debug)]
pub struct AllToAllvArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    demand: DemandArgs,
    /// Methods to compare: static, spray, fuselink, fast, or any method of `fuselink plan`
    #[arg(long, value_name = "M[,..]", value_delimiter = ',', default_value = "static,spray,fuselink,fast")]
    method: Vec<String>,
    /// Timed iterations of each method, after one to warm up
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 5)]
    iters: u32,
    /// What a rank is
    #[arg(long, value_enum, default_value_t = RankKind::Process)]
    ranks: RankKind,
    /// Modelled rate over emulated rate [default: what this host carries]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    scale: Option<u64>,
    /// What the planner reckons for the start of a transfer
    #[arg(long, value_name = "US", allow_negative_numbers = true, default_value_t = 20)]
    start_us: u64,
    /// Print one JSON object (fuselink-run-1) instead of the table
    #[arg(long)]
    json: bool,
}

/// How ranks are started.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum RankKind {
    /// A process each, as on a cluster
    Process,
    /// Threads of one process
    Thread,
}

/// Longest message of an emulated run: small enough that NICs are shared finely at emulated rates.
const SLOT_BYTES: u32 = 64 << 10;

/// Runs the command.
pub fn run(args: &AllToAllvArgs) -> Result<(), Failure> {
    let cluster = args.cluster.cluster("hgx-h200")?;
    let demand = args.demand.demand(&cluster)?;
    let methods = methods(&args.method)?;
    if args.iters == 0 {
        return Err(Failure::Input(anyhow!("--iters must be at least 1")));
    }
    if args.scale == Some(0) {
        return Err(Failure::Input(anyhow!("--scale must be at least 1")));
    }
    let settings = Settings::from_env().map_err(Failure::input)?;
    let spec = JobSpec {
        scale: args.scale.unwrap_or_else(|| scale_for(&cluster)),
        cells: cells(&demand),
        unit_bytes: demand.unit_bytes(),
        methods,
        iterations: args.iters,
        seed: args.demand.seed(),
        start_ns: args.start_us.saturating_mul(1000),
        slot_bytes: SLOT_BYTES,
        relay_bytes: settings.relay_bytes,
        timeout_ms: settings.timeout.as_millis() as u64,
        cluster,
    };
    let model = CostModel { start_ns: spec.start_ns, ..CostModel::default() };
    let bound = Bound::of(&spec.cluster, &demand, &model).map_err(Failure::input)?;
    check_memory(&spec, &demand)?;
    let mut progress = Progress::new(args.json);
    let report = match args.ranks {
        RankKind::Process => launch::processes(&spec, |event| progress.on_event(event)),
        RankKind::Thread => launch::threads(&spec, |event| progress.on_event(event)),
    };
    progress.finish();
    let report = report?;
    run_report::print(&spec, &demand, &bound, &report, args.json)?;
    check_bytes(&report)
}

fn methods(names: &[String]) -> Result<Vec<RunMethod>, Failure> {
    let methods: Vec<RunMethod> = names.iter().map(|n| RunMethod { name: n.trim().to_owned() }).collect();
    for method in &methods {
        method.plan().map_err(|e| Failure::Input(anyhow!("--method: {e}; fast stands for auto")))?;
    }
    Ok(methods)
}

fn cells(demand: &Demand) -> Vec<u64> {
    (0..demand.ranks()).flat_map(|r| demand.row(fuselink::topo::Rank(r)).to_vec()).collect()
}

fn scale_for(cluster: &Cluster) -> u64 {
    let modelled: u64 =
        (0..cluster.nics()).map(|n| emulated_nic_byte_per_s(cluster.nic(NicId(n)).mbit_per_s, 1)).sum();
    let cores = std::thread::available_parallelism().map_or(1.0, |n| n.get() as f64);
    calibrate::choose_scale(modelled as f64, cores, calibrate::copy_byte_per_s())
}

/// A run that would not fit into memory is refused before anything starts.
fn check_memory(spec: &JobSpec, demand: &Demand) -> Result<(), Failure> {
    let ranks = u64::from(spec.cluster.ranks());
    // Send and receive buffers, relay memory, and what a process takes by itself.
    let needs = demand
        .total_bytes()
        .saturating_mul(2)
        .saturating_add(ranks * ((8 << 20) + spec.relay_bytes.min(64 << 20)));
    match host::available_bytes() {
        Some(has) if needs > has => Err(Failure::Input(anyhow!(
            "the run needs about {} MB of memory, {} MB are free; use a smaller demand or fewer ranks",
            needs >> 20,
            has >> 20
        ))),
        _ => Ok(()),
    }
}

fn check_bytes(report: &Report) -> Result<(), Failure> {
    match report.methods.iter().find(|m| m.mismatched_bytes > 0) {
        None => Ok(()),
        Some(m) => Err(Failure::Run(anyhow!("{}: {} bytes arrived wrong", m.name, m.mismatched_bytes))),
    }
}
