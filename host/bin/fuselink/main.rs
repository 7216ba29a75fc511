//! The command line.

mod alltoallv;
mod chart;
mod cluster_args;
mod demand_args;
mod environment;
mod failure;
mod faults;
mod input;
mod job;
mod join;
mod launch;
mod memory;
mod output;
mod p2p;
mod plan;
mod progress;
mod run_args;
mod run_report;
mod sim;
mod svg;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};

use failure::Failure;

/// Sends over every NIC of a server, and schedules all-to-alls.
#[derive(Parser)]
#[command(name = "fuselink", version, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Plan an all-to-all and say what it will take.
    Plan(plan::PlanArgs),
    /// Move an all-to-all with several methods, check every byte, and compare
    Alltoallv(alltoallv::AllToAllvArgs),
    /// Measure one pair of GPUs against the number of NICs
    P2p(p2p::P2pArgs),
    /// Run a named experiment in virtual time
    Sim(sim::SimArgs),
    /// One rank of a run; started by the other commands
    #[command(hide = true)]
    Rank,
}

fn main() -> ExitCode {
    let result = match Cli::try_parse() {
        Ok(cli) => match cli.command {
            Command::Plan(args) => plan::run(&args),
            Command::Alltoallv(args) => alltoallv::run(&args),
            Command::P2p(args) => p2p::run(&args),
            Command::Sim(args) => sim::run(&args),
            Command::Rank => launch::rank(),
        },
        Err(e) if matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            output::print(e.to_string().as_bytes())
        }
        Err(e) => Err(Failure::arguments(&e)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("fuselink: {failure}");
            ExitCode::from(failure.code())
        }
    }
}
