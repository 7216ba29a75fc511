//! One rank of a job whose ranks somebody else starts, on as many hosts as there are servers: torchrun, mpirun, srun, or a
//! script that sets FUSELINK_RANK, FUSELINK_SIZE, FUSELINK_ROOT and FUSELINK_SECRET.

use anyhow::{Context, anyhow};
use fuselink::comm::settings::Settings;
use fuselink::topo::{Cluster, Rank};

use crate::failure::Failure;
use crate::job::{self, Event, JobSpec, Report};
use crate::progress::Progress;

/// Joins the job and runs this rank. Rank 0 makes the job, and gets its report; the others get `None`.
pub fn run(
    cluster: &Cluster,
    make_spec: impl FnOnce() -> Result<JobSpec, Failure>,
    progress: &mut Progress,
) -> Result<Option<(JobSpec, Report)>, Failure> {
    let settings = Settings::from_env().map_err(Failure::input)?;
    if settings.size != cluster.ranks() {
        let (size, gpus) = (settings.size, cluster.ranks());
        return Err(Failure::Input(anyhow!(
            "--join: {size} ranks were started (torchrun, mpirun, srun or FUSELINK_SIZE), but the cluster has {gpus} GPUs; \
             start one rank per GPU, the ranks of a server on one host"
        )));
    }
    let config = settings.bootstrap().map_err(Failure::input)?;
    // Bad input is told before anybody is waited for.
    let own = if settings.rank == Rank(0) { Some(make_spec()?) } else { None };
    let text = own.as_ref().map(serde_json::to_vec).transpose().map_err(Failure::run)?.unwrap_or_default();
    let bootstrap = job::meet(&config, None).map_err(Failure::Run)?;
    let text = bootstrap.broadcast(&text).map_err(Failure::run)?;
    let spec: JobSpec =
        serde_json::from_slice(&text).context("rank 0's job is not readable").map_err(Failure::Run)?;
    let mut report = None;
    let tell = |event: Event| {
        progress.on_event(&event);
        if let Event::Report(r) = event {
            report = Some(*r);
        }
        Ok(())
    };
    let rank = settings.rank;
    let ran = job::run_rank(&spec, bootstrap, &config.secret, tell);
    ran.map_err(|e| Failure::Run(e.context(rank.to_string())))?;
    Ok(report.map(|r| (spec, r)))
}
