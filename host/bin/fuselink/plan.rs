//! `fuselink plan`: what an all-to-all will take, and who does what.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use fuselink::plan::{self, CostModel, Demand, Method, Piece, Planner, Replay, Request, Schedule};
use fuselink::topo::{self, Cluster, NicId, Rank};
use serde::Serialize;

use crate::cluster_args::ClusterArgs;
use crate::demand_args::DemandArgs;
use crate::failure::Failure;
use crate::memory::check_fits;
use crate::{output, svg};

/// Flags of `plan`.
#[derive(Args, Debug)]
pub struct PlanArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    demand: DemandArgs,
    /// How: auto (or fast), ordered, loose, spreadout, birkhoff, openshop, rounds, static, spray, fuselink
    #[arg(long, value_name = "M", default_value = "auto", help_heading = "Plan")]
    method: Method,
    /// Fixed cost of one transfer, in microseconds
    #[arg(
        long = "start-us",
        value_name = "A",
        allow_negative_numbers = true,
        default_value = "20",
        value_parser = start_ns,
        help_heading = "Plan"
    )]
    start_ns: u64,
    /// Print the plan as JSON ("fuselink-plan-1")
    #[arg(long, help_heading = "Plan")]
    json: bool,
    /// Draw the schedule as a timeline into a file
    #[arg(long, value_name = "FILE", help_heading = "Plan")]
    svg: Option<PathBuf>,
}

/// Plannings whose median is reported.
const PLANNINGS: usize = 51;

/// Messages that a demand is cut into at most. Every piece may end with a short one.
const MAX_MESSAGES: u64 = 1 << 31;

/// Plans and prints.
pub fn run(args: &PlanArgs) -> Result<(), Failure> {
    let cluster = args.cluster.cluster("hgx-h200")?;
    let demand = args.demand.demand(&cluster)?;
    let model = CostModel { start_ns: args.start_ns, ..CostModel::default() };
    // Every cell becomes a piece or a few, and sorting them takes half as much again.
    let runs = match args.method {
        Method::Spray => demand.total_bytes() / model.message_bytes.max(demand.unit_bytes()),
        _ => 0,
    };
    let pieces = 2 * u64::from(cluster.ranks()) * u64::from(cluster.ranks()) + 2 * runs;
    check_fits("a plan of that many pieces", pieces.saturating_mul(size_of::<Piece>() as u64))?;
    let schedule = plan::schedule(&cluster, &demand, args.method, &model).map_err(Failure::input)?;
    let replay = plan::replay(&cluster, &schedule, &model);
    let report = Report {
        cluster: &cluster,
        demand: &demand,
        asked: args.method,
        model: &model,
        schedule: &schedule,
        replay: &replay,
        plan_us: time(&cluster, &demand, args.method, &model)?,
    };
    if let Some(path) = &args.svg {
        output::write_file(path, &svg::timeline(&cluster, &schedule, &replay))?;
    }
    if args.json {
        let mut text = serde_json::to_vec(&report.json()).map_err(Failure::run)?;
        text.push(b'\n');
        return output::print(&text);
    }
    output::print(report.summary().as_bytes())
}

/// Median time to plan the matrix as if it were new, down to the table of one rank.
fn time(cluster: &Cluster, demand: &Demand, method: Method, model: &CostModel) -> Result<f64, Failure> {
    let mut times_us = Vec::with_capacity(PLANNINGS);
    let mut planner = Planner::new();
    // Tables count messages in 32 bits: the largest demands go in larger ones.
    let message_bytes = model.message_bytes.max(demand.total_bytes().div_ceil(MAX_MESSAGES));
    let request = Request { method, model: *model, rank: Rank(0), message_bytes };
    for _ in 0..PLANNINGS {
        let before = Instant::now();
        let planned =
            planner.plan(cluster, std::hint::black_box(demand), &request).map_err(Failure::input)?;
        std::hint::black_box(planned.table);
        times_us.push(before.elapsed().as_nanos() as f64 / 1e3);
    }
    times_us.sort_by(f64::total_cmp);
    Ok(times_us[times_us.len() / 2])
}

struct Report<'a> {
    cluster: &'a Cluster,
    demand: &'a Demand,
    asked: Method,
    model: &'a CostModel,
    schedule: &'a Schedule,
    replay: &'a Replay,
    plan_us: f64,
}

/// Format "fuselink-plan-1".
#[derive(Serialize)]
struct Json {
    format: &'static str,
    servers: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpus_per_server: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nics_per_server: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    server_gpus: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    server_nics: Option<Vec<usize>>,
    nic_gbit_per_s: Vec<serde_json::Number>,
    relay_gpu: Vec<u32>,
    unit_bytes: u64,
    start_us: serde_json::Number,
    method: &'static str,
    lower_bound_us: f64,
    floor_us: f64,
    predicted_us: f64,
    plan_us: f64,
    transfers: Vec<[u32; 2]>,
    pieces: Vec<(u32, u32, u64, u64, i64, i64, i64)>,
}

impl Report<'_> {
    fn json(&self) -> Json {
        let servers = self.cluster.servers();
        let gpus: Vec<u32> = servers.iter().map(|s| s.gpus).collect();
        let nics: Vec<usize> = servers.iter().map(|s| s.nics.len()).collect();
        let alike = gpus.windows(2).all(|w| w[0] == w[1]) && nics.windows(2).all(|w| w[0] == w[1]);
        let nic_ids = || (0..self.cluster.nics()).map(NicId);
        let field = |nic: Option<NicId>| nic.map_or(-1, |nic| i64::from(nic.0));
        Json {
            format: "fuselink-plan-1",
            servers: self.cluster.server_count(),
            gpus_per_server: alike.then(|| gpus[0]),
            nics_per_server: alike.then(|| nics[0]),
            server_gpus: (!alike).then_some(gpus),
            server_nics: (!alike).then_some(nics),
            nic_gbit_per_s: nic_ids().map(|nic| thousandths(self.cluster.nic(nic).mbit_per_s)).collect(),
            relay_gpu: nic_ids().map(|nic| self.cluster.owner_of(nic).0).collect(),
            unit_bytes: self.demand.unit_bytes(),
            start_us: thousandths(self.model.start_ns),
            method: self.schedule.method.name(),
            lower_bound_us: self.schedule.bound.lower_us(),
            floor_us: us(self.schedule.bound.floor_ns),
            predicted_us: us(self.replay.pipeline.done_ns),
            plan_us: self.plan_us,
            transfers: self.schedule.transfers.iter().map(|(s, t)| [s.0, t.0]).collect(),
            pieces: self
                .schedule
                .pieces
                .iter()
                .map(|p| {
                    let transfer = p.transfer.map_or(-1, i64::from);
                    (p.src.0, p.dst.0, p.offset, p.bytes, field(p.egress), field(p.ingress), transfer)
                })
                .collect(),
        }
    }

    fn summary(&self) -> String {
        let plan = self.schedule;
        let mut text = String::new();
        let mut line = |name: &str, value: String| {
            let _ = writeln!(text, "{name:<14}{value}");
        };
        line("cluster", describe(self.cluster));
        line(
            "demand",
            format!(
                "{} between {} ranks, in units of {}",
                size(self.demand.total_bytes()),
                self.demand.ranks(),
                size(self.demand.unit_bytes())
            ),
        );
        line("method", self.method());
        line(
            "lower bound",
            format!("{:.1} us (bytes of the busiest server over its NICs)", plan.bound.lower_us()),
        );
        line(
            "floor",
            format!("{:.1} us (with {} us per peer)", us(plan.bound.floor_ns), us(self.model.start_ns)),
        );
        line("predicted", format!("{:.1} us{}", us(self.replay.pipeline.done_ns), self.over_bound()));
        line("transfers", format!("{} in {} pieces", plan.transfers.len(), plan.pieces.len()));
        line(
            "scale-up",
            format!(
                "{} for NICs, {} at most into or out of one GPU; {:.1} us with what stays in servers",
                size(self.replay.scaleup_bytes.iter().map(|bytes| bytes.0).sum()),
                size(self.replay.scaleup_max_bytes()),
                us(self.replay.scaleup_ns)
            ),
        );
        line("pipeline", self.exposed());
        line("planning", format!("{:.1} us to the table of one rank", self.plan_us));
        text
    }

    /// What was chosen, and over what.
    fn method(&self) -> String {
        let plan = self.schedule;
        let name = plan.method.name();
        let why = match self.asked {
            Method::Auto => "the least predicted cost",
            Method::Ordered => "the least predicted cost without loose pieces",
            _ => return format!("{name} (asked for)"),
        };
        let mut others: Vec<_> = plan.compared.iter().filter(|(m, _)| *m != plan.method).collect();
        others.sort_by_key(|(_, ns)| *ns);
        let others: Vec<String> =
            others.iter().map(|(method, ns)| format!("{method} {:.1} us", us(*ns))).collect();
        match (others.is_empty(), plan.transfers.is_empty()) {
            (false, _) => format!("{name} ({why}; others: {})", others.join(", ")),
            (true, false) => format!("{name} ({why}: good enough at the first try)"),
            (true, true) => format!("{name} ({why}: no order can take less)"),
        }
    }

    /// What scale-up adds to the time of the NICs.
    fn exposed(&self) -> String {
        let added = self.replay.pipeline;
        format!(
            "NICs {:.1} us; balance adds {:.1} us, redistribution {:.1} us, what stays in servers {:.1} us",
            us(self.replay.cost_ns),
            us(added.balance_ns),
            us(added.spread_ns),
            us(added.own_ns)
        )
    }

    fn over_bound(&self) -> String {
        match self.schedule.bound.lower_us() {
            0.0 => String::new(),
            bound => format!(", {:.3} times the lower bound", us(self.replay.pipeline.done_ns) / bound),
        }
    }
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}

/// 400000 as 400, 12500 as 12.5.
fn thousandths(milli: u64) -> serde_json::Number {
    let float = serde_json::Number::from_f64(milli as f64 / 1e3);
    match milli % 1000 {
        0 => (milli / 1000).into(),
        _ => float.unwrap_or_else(|| 0.into()),
    }
}

/// Microseconds as text, in nanoseconds.
fn start_ns(text: &str) -> Result<u64, String> {
    topo::parse_rate(text, "", "").map_err(|_| "give 0 to 1000000 with at most 3 decimals".into())
}

fn describe(cluster: &Cluster) -> String {
    let servers = cluster.servers();
    let count = servers.len();
    match servers.iter().all(|s| s == &servers[0]) {
        true => {
            let s = &servers[0];
            let down = s.nics.iter().filter(|n| n.mbit_per_s == 0).count();
            let down = if down > 0 { format!(" ({down} down)") } else { String::new() };
            let rate = s.mbit_per_s() as f64 / 8e3;
            format!("{count} servers x {} GPUs x {} NICs{down}, {rate} GB/s per server", s.gpus, s.nics.len())
        }
        false => format!("{count} servers, {} GPUs, {} NICs", cluster.ranks(), cluster.nics()),
    }
}

/// Bytes for people.
fn size(bytes: u64) -> String {
    let units = [("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)];
    match units.iter().find(|(_, size)| bytes as f64 >= *size) {
        Some((name, size)) => format!("{:.2} {name}", bytes as f64 / size),
        None => format!("{bytes} B"),
    }
}
