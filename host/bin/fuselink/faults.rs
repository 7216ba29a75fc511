//! `fuselink sim faults`: whole jobs in virtual time on NICs that fail.

use std::fmt::Write;

use anyhow::anyhow;
use fuselink::sim::campaign::{self, Run, RunOptions, Verdict};
use serde_json::json;

use crate::failure::Failure;
use crate::output;
use crate::progress::Progress;

/// What a campaign is asked to do.
pub struct Campaign {
    /// Seed of the first run; each has the next.
    pub seed: u64,
    /// How many.
    pub runs: u64,
    /// Whether to print what every NIC does.
    pub trace: bool,
    /// Whether to print JSON.
    pub json: bool,
}

#[derive(Default)]
struct Totals {
    whole: u64,
    named: u64,
    broken: u64,
    messages: u64,
    virtual_ns: u64,
}

impl Totals {
    fn count(&mut self, run: &Run) {
        match run.verdict {
            Verdict::Whole => self.whole += 1,
            Verdict::Named(_) => self.named += 1,
            Verdict::Broken(_) => self.broken += 1,
        }
        self.messages += run.messages;
        self.virtual_ns += run.took_ns;
    }
}

const ASSUMPTIONS: [&str; 5] = [
    "the proxies' own code, one thread, virtual time; everything is drawn from the seed",
    "links go down and come back, completions are lost or late, arrivals are late, NICs are slow, processes die",
    "relay memory is lent as calls want it, refused, not to be had, and taken back at any moment; whoever touches it then is found",
    "messages land after their sender gave them up, until the receiver closes the path; payload is seen after its arrival is told",
    "a run is good when every byte came once and unchanged, or when a process died, or was cut off where it had memory, and the others ended with an error in time",
];

/// Runs a campaign; fails with the first seed that shows something wrong.
pub fn run(campaign: &Campaign) -> Result<(), Failure> {
    let mut totals = Totals::default();
    let progress = Progress::new(campaign.json || campaign.trace);
    for n in 0..campaign.runs {
        let seed = campaign.seed.wrapping_add(n);
        progress.step("faults", n, campaign.runs);
        let options = RunOptions { seed, trace: campaign.trace, mutation: None };
        let run = campaign::run(options).map_err(Failure::run)?;
        totals.count(&run);
        if campaign.trace {
            output::print(describe(&run).as_bytes())?;
        }
        if let Verdict::Broken(what) = &run.verdict {
            progress.finish();
            return Err(Failure::run(anyhow!(
                "seed {seed}: {what}; repeat with: fuselink sim faults --seed {seed} --runs 1 --trace"
            )));
        }
    }
    progress.finish();
    let text = if campaign.json { to_json(campaign, &totals) } else { to_text(campaign, &totals) };
    output::print(text.as_bytes())
}

fn describe(run: &Run) -> String {
    let mut out = format!("seed {}: {}\n", run.seed, run.machine);
    for (at, blow) in &run.blows {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "  at {at} ns: {blow}");
    }
    let _ = writeln!(out, "  by themselves: {:?}", run.rates);
    for line in &run.lines {
        let _ = writeln!(out, "{line}");
    }
    let _ = writeln!(out, "  {:?} after {} ns, {} messages", run.verdict, run.took_ns, run.messages);
    out
}

fn to_text(campaign: &Campaign, totals: &Totals) -> String {
    let mut out = String::new();
    for line in ASSUMPTIONS {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "# {line}");
    }
    let _ = writeln!(
        out,
        "{:>8} {:>10} {:>14} {:>10} {:>10} {:>14}",
        "runs", "all came", "named errors", "broken", "messages", "virtual ms"
    );
    let _ = writeln!(
        out,
        "{:>8} {:>10} {:>14} {:>10} {:>10} {:>14.1}",
        campaign.runs,
        totals.whole,
        totals.named,
        totals.broken,
        totals.messages,
        totals.virtual_ns as f64 / 1e6
    );
    out
}

fn to_json(campaign: &Campaign, totals: &Totals) -> String {
    let row = json!({
        "seed": campaign.seed,
        "runs": campaign.runs,
        "whole": totals.whole,
        "named_errors": totals.named,
        "broken": totals.broken,
        "messages": totals.messages,
        "virtual_ms": totals.virtual_ns as f64 / 1e6,
    });
    let object = json!({
        "format": "fuselink-sim-1",
        "experiment": "faults",
        "assumptions": ASSUMPTIONS,
        "rows": [row],
    });
    format!("{object}\n")
}
