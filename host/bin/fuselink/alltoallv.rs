//! `fuselink alltoallv`: the main job. Moves a demand with each method, checks every byte, and compares.

use anyhow::anyhow;
use clap::Args;
use fuselink::plan::{Bound, CostModel, Demand};
use fuselink::topo::Cluster;

use crate::cluster_args::ClusterArgs;
use crate::demand_args::DemandArgs;
use crate::failure::Failure;
use crate::job::{JobSpec, Report, RunMethod};
use crate::join;
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
    // Joined ranks share one terminal.
    let mut progress = Progress::new(args.run.json || args.run.join);
    let ran = args.run_on(cluster, &mut progress);
    progress.finish();
    let Some((spec, report)) = ran? else { return Ok(()) };
    let demand =
        Demand::new(spec.cluster.ranks(), spec.cells.clone(), spec.unit_bytes).map_err(Failure::input)?;
    let model = CostModel { start_ns: spec.start_ns, ..CostModel::default() };
    let bound = Bound::of(&spec.cluster, &demand, &model).map_err(Failure::input)?;
    run_report::print(&spec, &demand, &bound, &report, args.run.json)?;
    run_args::check_bytes(&report)
}

impl AllToAllvArgs {
    /// `None` for a rank that has nothing to print.
    fn run_on(
        &self,
        cluster: Cluster,
        progress: &mut Progress,
    ) -> Result<Option<(JobSpec, Report)>, Failure> {
        if self.run.join {
            return join::run(&cluster, || self.spec(cluster.clone()), progress);
        }
        let spec = self.spec(cluster)?;
        let report = self.run.run(&spec, progress)?;
        Ok(Some((spec, report)))
    }

    fn spec(&self, cluster: Cluster) -> Result<JobSpec, Failure> {
        let demand = self.demand.demand(&cluster)?;
        let methods = methods(&self.method)?;
        if self.iters == 0 {
            return Err(Failure::Input(anyhow!("--iters must be at least 1")));
        }
        let scale = self.run.scale(&cluster)?;
        let mut spec = self.run.spec(cluster, &demand, methods, scale)?;
        spec.iterations = self.iters;
        spec.seed = self.demand.seed();
        spec.start_ns = self.start_us.saturating_mul(1000);
        let model = CostModel { start_ns: spec.start_ns, ..CostModel::default() };
        Bound::of(&spec.cluster, &demand, &model).map_err(Failure::input)?;
        run_args::check_memory(&spec)?;
        Ok(spec)
    }
}

fn methods(names: &[String]) -> Result<Vec<RunMethod>, Failure> {
    let methods: Vec<RunMethod> = names.iter().map(|n| RunMethod { name: n.trim().to_owned() }).collect();
    for method in &methods {
        method.plan().map_err(|e| Failure::Input(anyhow!("--method: {e}; fast stands for auto")))?;
    }
    Ok(methods)
}
