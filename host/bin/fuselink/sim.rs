//! `fuselink sim`: named experiments in virtual time.

use std::fmt::Write;
use std::path::PathBuf;

use anyhow::anyhow;
use clap::Args;
use fuselink::sim::experiments::{self, LoadsFile, Options};

use crate::failure::Failure;
use crate::faults::{self, Campaign};
use crate::input::read_text;
use crate::{chart, output};

/// Runs a named experiment in virtual time: the real engine on modelled links. Without a name: which there are.
#[derive(Args, Debug)]
#[command(after_help = known())]
pub struct SimArgs {
    /// The experiment
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// Seed of what is drawn; without chance it changes nothing
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print one JSON object (fuselink-sim-1) instead of the table
    #[arg(long)]
    json: bool,
    /// Draw a chart
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Measured expert loads for moe: {"logical_count": [layers][experts]} [default: made up from the seed]
    #[arg(long, value_name = "FILE.json", requires = "layer")]
    expert_loads: Option<PathBuf>,
    /// Layer of the expert loads
    #[arg(long, value_name = "L", requires = "expert_loads")]
    layer: Option<usize>,
    /// For faults: how many runs, each with the next seed [default: 200]
    #[arg(long, value_name = "N")]
    runs: Option<u64>,
    /// For faults: print what every NIC does
    #[arg(long)]
    trace: bool,
}

/// The one that is no experiment with a table of its own, but a campaign.
const FAULTS: &str = "faults";
const DEFAULT_RUNS: u64 = 200;

/// The experiments, a line each.
fn known() -> String {
    let mut out = String::from("Experiments:\n");
    for e in experiments::ALL {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "  {:<14} {}", e.name, e.about);
    }
    let _ = writeln!(out, "  {FAULTS:<14} whole jobs on NICs that fail: no byte lost, doubled or changed");
    out
}

/// Runs the command.
pub fn run(args: &SimArgs) -> Result<(), Failure> {
    let Some(name) = &args.name else { return output::print(known().as_bytes()) };
    if name == FAULTS {
        return faults::run(&campaign(args)?);
    }
    if args.runs.is_some() || args.trace {
        return Err(Failure::Input(anyhow!("--runs and --trace are for faults, not for {name}")));
    }
    let Some(experiment) = experiments::find(name) else {
        let names: Vec<_> = experiments::ALL.iter().map(|e| e.name).chain([FAULTS]).collect();
        let names = names.join(", ");
        return Err(Failure::Input(anyhow!("there is no experiment {name:?}; known: {names}")));
    };
    if args.expert_loads.is_some() && !experiment.takes_loads {
        return Err(Failure::Input(anyhow!("{name} takes no --expert-loads")));
    }
    let options = Options { seed: args.seed, loads: loads(args)? };
    let outcome = experiment.run(&options).map_err(|e| match e {
        fuselink::sim::world::SimError::Demand(e) => Failure::input(e),
        e => Failure::run(e),
    })?;
    if let Some(path) = &args.svg {
        output::write_file(path, &chart::draw(&outcome.chart))?;
    }
    let text = if args.json { outcome.to_json() } else { outcome.to_text() };
    output::print(text.as_bytes())
}

fn campaign(args: &SimArgs) -> Result<Campaign, Failure> {
    if args.svg.is_some() || args.expert_loads.is_some() {
        return Err(Failure::Input(anyhow!("faults takes no --svg and no --expert-loads")));
    }
    let runs = args.runs.unwrap_or(DEFAULT_RUNS);
    if runs == 0 {
        return Err(Failure::Input(anyhow!("--runs must be at least 1")));
    }
    Ok(Campaign { seed: args.seed, runs, trace: args.trace, json: args.json })
}

fn loads(args: &SimArgs) -> Result<Option<LoadsFile>, Failure> {
    let (Some(path), Some(layer)) = (&args.expert_loads, args.layer) else { return Ok(None) };
    Ok(Some(LoadsFile { text: read_text(path)?, place: path.display().to_string(), layer }))
}
