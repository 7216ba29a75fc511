//! `fuselink alltoallv`: the main job. Moves a demand with each method, checks every byte, and compares.

use anyhow::anyhow;
use clap::Args;
use fuselink::plan::{Bound, CostModel};

use crate::cluster_args::ClusterArgs;
use crate::demand_args::DemandArgs;
use crate::failure::Failure;
use crate::job::RunMethod;
use crate::progress::Progress;
use crate::run_args::{self, RunArgs};
use crate::run_report;

/// Moves an all-to-all on an emulated cluster with several methods, checks every byte, and compares.
#[derive(Args, Debug)]
pub struct AllToAllvArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    demand: DemandArgs,
    #[command(flatten)]
    run: RunArgs,
    /// Methods to compare: static, spray, fuselink, fast, or any method of `fuselink plan`
    #[arg(long, value_name = "M[,..]", value_delimiter = ',', default_value = "static,spray,fuselink,fast")]
    method: Vec<String>,
    /// Timed iterations of each method, after one to warm up
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 5)]
    iters: u32,
    /// What the planner reckons for the start of a transfer
    #[arg(long, value_name = "US", allow_negative_numbers = true, default_value_t = 20)]
    start_us: u64,
}

/// Runs the command.
pub fn run(args: &AllToAllvArgs) -> Result<(), Failure> {
    let cluster = args.cluster.cluster("hgx-h200")?;
    let demand = args.demand.demand(&cluster)?;
    let methods = methods(&args.method)?;
    if args.iters == 0 {
        return Err(Failure::Input(anyhow!("--iters must be at least 1")));
    }
    let scale = args.run.scale(&cluster)?;
    let mut spec = args.run.spec(cluster, &demand, methods, scale)?;
    spec.iterations = args.iters;
    spec.seed = args.demand.seed();
    spec.start_ns = args.start_us.saturating_mul(1000);
    let model = CostModel { start_ns: spec.start_ns, ..CostModel::default() };
    let bound = Bound::of(&spec.cluster, &demand, &model).map_err(Failure::input)?;
    let mut progress = Progress::new(args.run.json);
    let report = args.run.run(&spec, &mut progress);
    progress.finish();
    let report = report?;
    run_report::print(&spec, &demand, &bound, &report, args.run.json)?;
    run_args::check_bytes(&report)
}

fn methods(names: &[String]) -> Result<Vec<RunMethod>, Failure> {
    let methods: Vec<RunMethod> = names.iter().map(|n| RunMethod { name: n.trim().to_owned() }).collect();
    for method in &methods {
        method.plan().map_err(|e| Failure::Input(anyhow!("--method: {e}; fast stands for auto")))?;
    }
    Ok(methods)
}
