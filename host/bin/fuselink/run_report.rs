//! What a run prints: a table for people, or one JSON object.

use std::fmt::Write;

use fuselink::comm::machine::emulated_nic_byte_per_s;
use fuselink::comm::{NicBackend, Refusal, RelayCounters};
use fuselink::emu::host::{LIMITED_ABOVE, SHORTEST_MS};
use fuselink::plan::{Bound, Demand};
use fuselink::topo::NicId;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::job::{JobSpec, MethodReport, Report};
use crate::output;

/// Prints it.
pub fn print(
    spec: &JobSpec,
    demand: &Demand,
    bound: &Bound,
    report: &Report,
    json: bool,
) -> Result<(), Failure> {
    let view = View::new(spec, demand, bound, report);
    let text = if json { format!("{}\n", view.json()) } else { view.text() };
    output::print(text.as_bytes())
}

/// A report with what it is measured against.
struct View<'a> {
    spec: &'a JobSpec,
    report: &'a Report,
    bytes_total: u64,
    /// By NIC of the job, emulated.
    nic_byte_per_s: Vec<u64>,
    bound_ms: f64,
}

/// A method's figures.
struct Figures<'a> {
    method: &'a MethodReport,
    min_ms: f64,
    median_ms: f64,
    max_ms: f64,
    bound_ratio: Option<f64>,
    algbw_gbyte_per_s: f64,
    tx_busy: Vec<f64>,
    rx_busy: Vec<f64>,
}

impl<'a> View<'a> {
    fn new(spec: &'a JobSpec, demand: &Demand, bound: &Bound, report: &'a Report) -> Self {
        let rate = |n| emulated_nic_byte_per_s(spec.cluster.nic(NicId(n)).mbit_per_s, spec.scale);
        Self {
            spec,
            report,
            bytes_total: demand.total_bytes(),
            nic_byte_per_s: (0..spec.cluster.nics()).map(rate).collect(),
            bound_ms: bound.lower_us() * spec.scale as f64 / 1000.0,
        }
    }

    fn host_limited(&self) -> bool {
        self.is_short() || self.busiest() > LIMITED_ABOVE
    }

    fn has_real_nics(&self) -> bool {
        self.spec.nic == NicBackend::Verbs
    }

    fn is_short(&self) -> bool {
        self.bound_ms > 0.0 && self.bound_ms < SHORTEST_MS
    }

    fn busiest(&self) -> f64 {
        self.report.methods.iter().filter_map(|m| m.host_busy).fold(0.0, f64::max)
    }

    fn figures(&self) -> Vec<Figures<'a>> {
        self.report.methods.iter().map(|m| self.figures_of(m)).collect()
    }

    fn figures_of(&self, method: &'a MethodReport) -> Figures<'a> {
        let mut ms: Vec<f64> = method.ns.iter().map(|&ns| ns as f64 / 1e6).collect();
        ms.sort_by(f64::total_cmp);
        let median_ms = (ms[(ms.len() - 1) / 2] + ms[ms.len() / 2]) / 2.0;
        let seconds = median_ms / 1e3;
        // Counters are those of the last iteration, and so is the time they are set against.
        let last = method.ns.last().map_or(0.0, |&ns| ns as f64 / 1e9);
        let busy = |bytes: u64, rate: u64| {
            if rate == 0 || last == 0.0 { 0.0 } else { bytes as f64 / rate as f64 / last }
        };
        let nics = method.nics.iter().zip(&self.nic_byte_per_s);
        let ranks = f64::from(self.spec.cluster.ranks());
        Figures {
            method,
            min_ms: ms[0],
            median_ms,
            max_ms: ms[ms.len() - 1],
            bound_ratio: (self.bound_ms > 0.0).then(|| median_ms / self.bound_ms),
            algbw_gbyte_per_s: self.bytes_total as f64 / ranks / seconds / 1e9,
            tx_busy: nics.clone().map(|(c, &rate)| busy(c.tx_bytes, rate)).collect(),
            rx_busy: nics.map(|(c, &rate)| busy(c.rx_bytes, rate)).collect(),
        }
    }

    fn json(&self) -> Value {
        let servers = self.spec.cluster.servers();
        let first = servers.first();
        let uniform =
            servers.windows(2).all(|w| (w[0].gpus, w[0].nics.len()) == (w[1].gpus, w[1].nics.len()));
        let mut object = json!({
            "format": "fuselink-run-1",
            "backend": {"gpu": self.spec.gpu.name(), "nic": self.spec.nic},
            "servers": servers.len(),
            "gpus_per_server": first.map(|s| s.gpus),
            "nics_per_server": first.map(|s| s.nics.len()),
            "scale": self.spec.scale,
            "nic_gbyte_per_s": self.nic_byte_per_s.iter().map(|&r| r as f64 / 1e9).collect::<Vec<_>>(),
            "bytes_total": self.bytes_total,
            "bound_ms": self.bound_ms,
            "host_limited": self.host_limited(),
            "results": self.figures().iter().map(Figures::json).collect::<Vec<_>>(),
        });
        if !uniform {
            if let Some(object) = object.as_object_mut() {
                object.retain(|key, _| key != "gpus_per_server" && key != "nics_per_server");
            }
            object["server_gpus"] = servers.iter().map(|s| s.gpus).collect();
            object["server_nics"] = servers.iter().map(|s| s.nics.len()).collect();
        }
        object
    }

    fn text(&self) -> String {
        let mut out = String::new();
        self.write_head(&mut out);
        let figures = self.figures();
        self.write_table(&mut out, &figures);
        for f in figures.iter().filter(|f| f.method.name != f.method.planned) {
            let _ = writeln!(out, "# {} was planned as {}.", f.method.name, f.method.planned);
        }
        self.write_relay(&mut out);
        out.push('\n');
        out.push_str(&self.sentence(&figures));
        out.push('\n');
        out
    }

    fn write_head(&self, out: &mut String) {
        let c = &self.spec.cluster;
        let (servers, ranks, nics) = (c.server_count(), c.ranks(), c.nics());
        let rates: Vec<u64> = self.nic_byte_per_s.iter().copied().filter(|&r| r > 0).collect();
        let (low, high) = (rates.iter().min().unwrap_or(&0), rates.iter().max().unwrap_or(&0));
        let span =
            |f: fn(u64) -> String| if low == high { f(*low) } else { format!("{} to {}", f(*low), f(*high)) };
        let modelled = |r: u64| format!("{}", r as f64 * self.spec.scale as f64 / 1e9);
        let of_modelled =
            if low == high { modelled(*low) } else { format!("{} to {}", modelled(*low), modelled(*high)) };
        // Infallible: writing to a string.
        let _ = writeln!(
            out,
            "# fuselink alltoallv on {}: {}, {}, {} ({} up)",
            if self.has_real_nics() { "emulated GPUs and NICs over verbs" } else { "an emulated cluster" },
            count(servers, "server"),
            count(ranks, "GPU"),
            count(nics, "NIC"),
            rates.len()
        );
        let described = span(|r| format!("{:.1}", r as f64 / 1e6));
        let _ = if self.has_real_nics() {
            writeln!(
                out,
                "# Real bytes between {ranks} ranks. GPUs are host memory; NICs are RDMA devices, described as {described} MB/s."
            )
        } else {
            writeln!(
                out,
                "# Emulated: real bytes between {ranks} ranks, paced. NICs at {described} MB/s stand for {of_modelled} GB/s (scale {}).",
                self.spec.scale
            )
        };
        let _ = writeln!(
            out,
            "# Demand {:.1} MB, of which the busiest server's NICs need {:.1} ms (the bound; {:.1} us as modelled).",
            self.bytes_total as f64 / 1e6,
            self.bound_ms,
            self.bound_ms * 1e3 / self.spec.scale as f64
        );
        let _ = writeln!(
            out,
            "# {} iterations after a warm-up; times are medians, algbw is per GPU.\n",
            self.spec.iterations
        );
    }

    fn write_table(&self, out: &mut String, figures: &[Figures<'_>]) {
        let _ = writeln!(
            out,
            "{:<10} {:>9} {:>8} {:>9} {:>9}   {:<13} {:<13} {:>9} {:>10} {:>6}",
            "method",
            "time",
            "/ bound",
            "algbw",
            "modelled",
            "NICs out",
            "NICs in",
            "relayed",
            "verified",
            "wrong"
        );
        let _ = writeln!(
            out,
            "{:<10} {:>9} {:>8} {:>9} {:>9}   {:<13} {:<13} {:>9} {:>10} {:>6}",
            "", "(ms)", "", "(MB/s)", "(GB/s)", "(min avg max)", "(min avg max)", "(MB)", "(MB)", "(B)"
        );
        for f in figures {
            let _ = writeln!(
                out,
                "{:<10} {:>9.1} {:>8} {:>9.1} {:>9.1}   {:<13} {:<13} {:>9.1} {:>10.1} {:>6}",
                f.method.name,
                f.median_ms,
                f.bound_ratio.map_or("-".into(), ratio),
                f.algbw_gbyte_per_s * 1e3,
                f.algbw_gbyte_per_s * self.spec.scale as f64,
                percent(&f.tx_busy),
                percent(&f.rx_busy),
                f.method.relayed_bytes as f64 / 1e6,
                f.method.verified_bytes as f64 / 1e6,
                f.method.mismatched_bytes
            );
        }
    }

    /// A line where relay memory was short.
    fn write_relay(&self, out: &mut String) {
        let relay = self.report.methods.iter().fold(RelayCounters::default(), |sum, m| sum.plus(m.relay));
        let refused: u64 = relay.refused.iter().sum();
        if refused + relay.recalled > 0 {
            let _ = writeln!(
                out,
                "# Relay memory: {} asked for, {} refused, {} taken back; what has none takes direct NICs (FUSELINK_RELAY_BYTES).",
                count(relay.asked, "lot"),
                refused,
                relay.recalled
            );
        }
    }

    /// One sentence that says what was seen.
    fn sentence(&self, figures: &[Figures<'_>]) -> String {
        let wrong: u64 = figures.iter().map(|f| f.method.mismatched_bytes).sum();
        if wrong > 0 {
            return format!("{wrong} bytes arrived wrong: the figures above mean nothing.");
        }
        let mut text = self.comparison(figures);
        if self.busiest() > LIMITED_ABOVE {
            let _ = write!(
                text,
                " The host was the bottleneck ({:.0} % busy): times are too long; use a --scale above {}.",
                self.busiest() * 100.0,
                self.spec.scale
            );
        } else if self.is_short() {
            let _ = write!(
                text,
                " The run is so short that the host's own delays rule its times; use a larger demand, or a --scale above {}.",
                self.spec.scale
            );
        }
        text
    }

    fn comparison(&self, figures: &[Figures<'_>]) -> String {
        let by_time = |a: &&Figures<'_>, b: &&Figures<'_>| a.median_ms.total_cmp(&b.median_ms);
        let (Some(best), Some(worst)) = (figures.iter().min_by(by_time), figures.iter().max_by(by_time))
        else {
            return "Nothing was run.".into();
        };
        let Some(ratio) = best.bound_ratio else {
            return "Nothing had to leave a server; every byte arrived as sent.".into();
        };
        if figures.len() == 1 {
            return format!(
                "{} took {ratio:.2} times the bound; every byte arrived as sent.",
                best.method.name
            );
        }
        format!(
            "{} was the fastest at {ratio:.2} times the bound, {:.2} times faster than {} ({:.2}); every byte arrived as sent.",
            best.method.name,
            worst.median_ms / best.median_ms,
            worst.method.name,
            worst.bound_ratio.unwrap_or(0.0)
        )
    }
}

impl Figures<'_> {
    fn json(&self) -> Value {
        let m = self.method;
        json!({
            "method": m.name,
            "planned_as": m.planned,
            "iterations": m.ns.len(),
            "ms": {"min": self.min_ms, "median": self.median_ms, "max": self.max_ms},
            "bound_ratio": self.bound_ratio,
            "algbw_gbyte_per_s": self.algbw_gbyte_per_s,
            "nic_tx_bytes": m.nics.iter().map(|c| c.tx_bytes).collect::<Vec<_>>(),
            "nic_rx_bytes": m.nics.iter().map(|c| c.rx_bytes).collect::<Vec<_>>(),
            "nic_busy_fraction": {"tx": self.tx_busy, "rx": self.rx_busy},
            "relayed_bytes": m.relayed_bytes,
            "verified_bytes": m.verified_bytes,
            "mismatched_bytes": m.mismatched_bytes,
            "host_busy_fraction": m.host_busy,
            "relay": relay_json(&m.relay),
        })
    }
}

fn relay_json(relay: &RelayCounters) -> Value {
    let refused = |why: Refusal| relay.refused[why as usize];
    json!({
        "asked": relay.asked,
        "lent": relay.lent,
        "refused": {
            "cap": refused(Refusal::Cap),
            "held_back": refused(Refusal::HeldBack),
            "memory": refused(Refusal::Memory),
        },
        "recalled": relay.recalled,
        "returned": relay.returned,
        "bytes": relay.bytes,
        "most_bytes": relay.most_bytes,
    })
}

/// As many digits as a person reads.
fn ratio(r: f64) -> String {
    if r < 100.0 { format!("{r:.3}") } else { format!("{r:.0}") }
}

fn count(n: impl Into<u64>, what: &str) -> String {
    let n = n.into();
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// Least, mean and most of some fractions.
fn percent(fractions: &[f64]) -> String {
    let (min, max) = fractions.iter().fold((f64::INFINITY, 0.0f64), |(a, b), &x| (a.min(x), b.max(x)));
    let mean = fractions.iter().sum::<f64>() / fractions.len().max(1) as f64;
    let part = |x: f64| format!("{:.0}", x * 100.0);
    if fractions.is_empty() {
        "-".into()
    } else {
        format!("{:>3} {:>3} {:>3} %", part(min), part(mean), part(max))
    }
}
