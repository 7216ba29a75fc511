//! `fuselink p2p`: bandwidth between two GPUs of two servers against the number of NICs (FuseLink, OSDI'25: one GPU
//! sends through every NIC of its server, up to its direct NIC and what its scale-up link carries to the others).

use std::fmt::Write;

use anyhow::anyhow;
use clap::Args;
use fuselink::comm::machine::emulated_nic_byte_per_s;
use fuselink::comm::{GpuKind, NicBackend};
use fuselink::emu::host::LIMITED_ABOVE;
use fuselink::plan::Demand;
use fuselink::topo::{Cluster, GpuIdx, Rank, Server, ServerId};
use serde_json::json;

use crate::cluster_args::ClusterArgs;
use crate::environment;
use crate::failure::Failure;
use crate::job::RunMethod;
use crate::output;
use crate::progress::Progress;
use crate::run_args::{self, RunArgs};

/// Measures bandwidth between two GPUs of two servers against the number of NICs that are up.
#[derive(Args, Debug)]
pub struct P2pArgs {
    /// NICs per server that are up: a number, or a range such as 1..8 [default: 1..all]
    #[arg(long, value_name = "N|1..N")]
    nics: Option<String>,
    /// GPUs per server [default: 8]
    #[arg(long, value_name = "G", allow_negative_numbers = true)]
    gpus: Option<u64>,
    /// Gbit/s of a NIC, or a list, one per NIC of a server [default: 400]
    #[arg(long, value_name = "X[,..]", allow_hyphen_values = true)]
    nic_gbit: Option<String>,
    /// GB/s over scale-up (NVLink), per GPU and direction [default: 200]
    #[arg(long, value_name = "B", allow_hyphen_values = true)]
    scaleup_gbyte: Option<String>,
    /// A TOML file that names every server, or a kind of server [default: fuselink-testbed]
    #[arg(long, value_name = "FILE|PRESET")]
    cluster: Option<String>,
    #[command(flatten)]
    run: RunArgs,
    /// Timed iterations of each row, after one to warm up
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 3)]
    iters: u32,
}

/// One number of NICs.
struct Row {
    nics: u32,
    byte_per_s: f64,
    ideal_byte_per_s: f64,
    host_busy: Option<f64>,
}

/// How long a row's transfer takes at its ideal rate.
const ROW_SECONDS: f64 = 0.5;

/// Runs the command.
pub fn run(args: &P2pArgs) -> Result<(), Failure> {
    if args.run.join {
        return Err(Failure::Input(anyhow!(
            "--join: p2p starts its ranks itself; use alltoallv with a --demand"
        )));
    }
    let nic = args.run.nic()?;
    let cluster = args.whole_cluster()?;
    let most = cluster.servers().iter().map(|s| s.nics.len() as u32).min().unwrap_or(0);
    let counts = counts(args.nics.as_deref(), most)?;
    if args.iters == 0 {
        return Err(Failure::Input(anyhow!("--iters must be at least 1")));
    }
    let scale = args.run.scale(&cluster)?;
    let mut progress = Progress::new(args.run.json);
    let mut rows = Vec::new();
    for nics in counts {
        let row = args.measure(&cluster, nics, scale, &mut progress);
        if row.is_err() {
            progress.finish();
        }
        rows.push(row?);
    }
    progress.finish();
    let text = match args.run.json {
        true => as_json(&rows, scale, environment::settings().map_err(Failure::input)?.gpu, nic),
        false => as_text(&rows, scale),
    };
    output::print(text.as_bytes())
}

/// `3` or `1..8`.
fn counts(text: Option<&str>, most: u32) -> Result<Vec<u32>, Failure> {
    let Some(text) = text else { return Ok((1..=most).collect()) };
    let refuse = || {
        Failure::Input(anyhow!("--nics {text}: give a number or a range such as 1..{most}, from 1 to {most}"))
    };
    let number = |t: &str| t.trim().parse::<u32>().ok().filter(|n| (1..=most).contains(n)).ok_or_else(refuse);
    match text.split_once("..") {
        None => Ok(vec![number(text)?]),
        Some((low, high)) => {
            let (low, high) = (number(low)?, number(high.trim_start_matches('='))?);
            if low > high { Err(refuse()) } else { Ok((low..=high).collect()) }
        }
    }
}

impl P2pArgs {
    /// All NICs of it up.
    fn whole_cluster(&self) -> Result<Cluster, Failure> {
        let preset_kind = self.cluster.is_none();
        let args = ClusterArgs {
            servers: None,
            gpus: self.gpus,
            nics: None,
            nic_gbit: self.nic_gbit.clone(),
            scaleup_gbyte: self.scaleup_gbyte.clone(),
            cluster: self.cluster.clone(),
        };
        let cluster = args.cluster("fuselink-testbed")?;
        if cluster.server_count() < 2 {
            let whose = if preset_kind { "the preset" } else { "--cluster" };
            return Err(Failure::Input(anyhow!("{whose} has one server; p2p needs two")));
        }
        Ok(cluster)
    }

    fn measure(
        &self,
        cluster: &Cluster,
        nics: u32,
        scale: u64,
        progress: &mut Progress,
    ) -> Result<Row, Failure> {
        let cluster = with_nics(cluster, nics);
        let ideal_byte_per_s = ideal_byte_per_s(&cluster, scale);
        let bytes = (ideal_byte_per_s * ROW_SECONDS) as u64;
        let ranks = cluster.ranks() as usize;
        let mut cells = vec![0; ranks * ranks];
        cells[cluster.first_rank(ServerId(1)).idx()] = bytes;
        let demand = Demand::new(cluster.ranks(), cells, 1).map_err(Failure::input)?;
        let method = RunMethod { name: "fuselink".into() };
        let mut spec = self.run.spec(cluster, &demand, vec![method], scale)?;
        spec.iterations = self.iters;
        let report = self.run.run(&spec, progress)?;
        run_args::check_bytes(&report)?;
        let Some(method) = report.methods.first() else {
            return Err(Failure::Run(anyhow!("the ranks reported nothing")));
        };
        let mut ns = method.ns.clone();
        ns.sort_unstable();
        let seconds = ns[ns.len() / 2] as f64 / 1e9;
        Ok(Row { nics, byte_per_s: bytes as f64 / seconds, ideal_byte_per_s, host_busy: method.host_busy })
    }
}

/// The two servers with all but the first `nics` NICs down.
fn with_nics(cluster: &Cluster, nics: u32) -> Cluster {
    let limit = |server: &Server| {
        let mut server = server.clone();
        server.nics.iter_mut().skip(nics as usize).for_each(|n| n.mbit_per_s = 0);
        server
    };
    Cluster::new(cluster.servers().iter().take(2).map(limit).collect())
}

/// What the slower side can do at best: all NICs that are up, or the direct NIC and the scale-up link to the others.
fn ideal_byte_per_s(cluster: &Cluster, scale: u64) -> f64 {
    let side = |server: ServerId| {
        let spec = cluster.server(server);
        let rate = |mbit_per_s: u64| emulated_nic_byte_per_s(mbit_per_s, scale) as f64;
        let all: f64 = spec.nics.iter().map(|n| rate(n.mbit_per_s)).sum();
        let beside =
            spec.nics.iter().filter(|n| n.relay_gpu == GpuIdx(0)).map(|n| rate(n.mbit_per_s)).sum::<f64>();
        debug_assert_eq!(cluster.gpu_of(Rank(0)), GpuIdx(0));
        all.min(beside + spec.scaleup_mbyte_per_s as f64 * 1e6 / scale as f64)
    };
    side(ServerId(0)).min(side(ServerId(1)))
}

fn ratio_to_one(rows: &[Row], row: &Row) -> Option<f64> {
    rows.iter().find(|r| r.nics == 1).map(|one| row.byte_per_s / one.byte_per_s)
}

fn host_limited(rows: &[Row]) -> bool {
    rows.iter().filter_map(|r| r.host_busy).any(|busy| busy > LIMITED_ABOVE)
}

fn as_json(rows: &[Row], scale: u64, gpu: GpuKind, nic: NicBackend) -> String {
    let row = |r: &Row| {
        json!({
            "nics": r.nics,
            "gbyte_per_s": r.byte_per_s / 1e9,
            "ideal_gbyte_per_s": r.ideal_byte_per_s / 1e9,
            "ratio_to_one": ratio_to_one(rows, r),
        })
    };
    let object = json!({
        "format": "fuselink-p2p-1",
        "backend": {"gpu": gpu.name(), "nic": nic},
        "scale": scale,
        "host_limited": host_limited(rows),
        "rows": rows.iter().map(row).collect::<Vec<_>>(),
    });
    format!("{object}\n")
}

fn as_text(rows: &[Row], scale: u64) -> String {
    let mut out = String::new();
    // Infallible: writing to a string.
    let _ = writeln!(
        out,
        "# fuselink p2p on an emulated cluster: one GPU to one GPU of another server, method fuselink."
    );
    let _ = writeln!(
        out,
        "# Emulated rates at scale {scale}; modelled = emulated x scale. Medians after a warm-up.\n"
    );
    let _ = writeln!(
        out,
        "{:>5} {:>12} {:>12} {:>10} {:>9} {:>8}",
        "NICs", "emulated", "modelled", "ideal", "of ideal", "of one"
    );
    let _ = writeln!(out, "{:>5} {:>12} {:>12} {:>10}", "", "(MB/s)", "(GB/s)", "(GB/s)");
    for r in rows {
        let modelled = |byte_per_s: f64| byte_per_s * scale as f64 / 1e9;
        let _ = writeln!(
            out,
            "{:>5} {:>12.1} {:>12.1} {:>10.1} {:>9.3} {:>8}",
            r.nics,
            r.byte_per_s / 1e6,
            modelled(r.byte_per_s),
            modelled(r.ideal_byte_per_s),
            r.byte_per_s / r.ideal_byte_per_s,
            ratio_to_one(rows, r).map_or("-".into(), |x| format!("{x:.2}"))
        );
    }
    if let Some(best) = rows.iter().max_by(|a, b| a.byte_per_s.total_cmp(&b.byte_per_s)) {
        let part = best.byte_per_s / best.ideal_byte_per_s * 100.0;
        let _ = writeln!(
            out,
            "\nWith {} NICs one GPU sends at {part:.0} % of what they and its links allow.",
            best.nics
        );
    }
    if host_limited(rows) {
        let _ = writeln!(out, "The host was the bottleneck: rates are too low; use a --scale above {scale}.");
    }
    out
}
