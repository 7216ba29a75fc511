//! `fuselink sim`: named experiments in virtual time.

use std::fmt::Write;

use anyhow::anyhow;
use clap::Args;
use fuselink::sim::experiments::{self, Outcome, Rows, fairness, p2p_nics};
use serde_json::json;

use crate::failure::Failure;
use crate::output;

/// Runs a named experiment in virtual time: the real engine on modelled links.
#[derive(Args, Debug)]
pub struct SimArgs {
    /// The experiment: p2p-nics, fairness
    #[arg(value_name = "NAME")]
    name: String,
    /// Print one JSON object (fuselink-sim-1) instead of the table
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &SimArgs) -> Result<(), Failure> {
    let outcome = experiments::run(&args.name).map_err(Failure::run)?;
    let Some(outcome) = outcome else {
        let known = experiments::NAMES.join(", ");
        return Err(Failure::Input(anyhow!("there is no experiment {:?}; known: {known}", args.name)));
    };
    let text = if args.json { as_json(&outcome) } else { as_text(&outcome) };
    output::print(text.as_bytes())
}

fn as_json(outcome: &Outcome) -> String {
    let object = json!({
        "format": "fuselink-sim-1",
        "experiment": outcome.experiment,
        "assumptions": outcome.assumptions,
        "rows": outcome.rows,
    });
    format!("{object}\n")
}

fn as_text(outcome: &Outcome) -> String {
    let mut out = format!(
        "# fuselink sim {}: the engine in virtual time, links modelled. Assumed:\n",
        outcome.experiment
    );
    for assumption in &outcome.assumptions {
        let _ = writeln!(out, "#   {assumption}");
    }
    out.push('\n');
    match &outcome.rows {
        Rows::P2pNics(rows) => write_p2p(&mut out, rows),
        Rows::Fairness(rows) => write_fairness(&mut out, rows),
    }
    out
}

// Writing to a string cannot fail.

fn write_p2p(out: &mut String, rows: &[p2p_nics::Row]) {
    let _ = writeln!(out, "{:>5} {:>10} {:>10} {:>10} {:>10}", "NICs", "here", "ideal", "paper", "of ideal");
    let _ = writeln!(out, "{:>5} {:>10} {:>10} {:>10}", "", "(GB/s)", "(GB/s)", "(GB/s)");
    for r in rows {
        let paper = r.paper_gbyte_per_s.map_or("-".into(), |p| format!("{p:.2}"));
        let part = r.gbyte_per_s / r.ideal_gbyte_per_s;
        let _ = writeln!(
            out,
            "{:>5} {:>10.2} {:>10.2} {paper:>10} {part:>10.3}",
            r.nics, r.gbyte_per_s, r.ideal_gbyte_per_s
        );
    }
}

fn write_fairness(out: &mut String, rows: &[fairness::Row]) {
    let _ = writeln!(
        out,
        "{:<10} {:>12} {:>12} {:>12} {:>8} {:>12}",
        "long flow", "victim flow", "victim P99", "alone P99", "ratio", "long flow"
    );
    let _ =
        writeln!(out, "{:<10} {:>12} {:>12} {:>12} {:>8} {:>12}", "", "(KiB)", "(us)", "(us)", "", "(GB/s)");
    for r in rows {
        let _ = writeln!(
            out,
            "{:<10} {:>12} {:>12.1} {:>12.1} {:>8.3} {:>12.1}",
            r.method,
            r.victim_bytes >> 10,
            r.victim_p99_us,
            r.alone_p99_us,
            r.victim_p99_us / r.alone_p99_us,
            r.long_gbyte_per_s
        );
    }
}
