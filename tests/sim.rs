//! Experiments in virtual time: their tables are checked in, so that a change of behaviour is a difference of numbers.
//! FUSELINK_BLESS=1 writes them anew.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use fuselink::sim::experiments::{self, Options};
use serde_json::Value;

fn sim(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fuselink")).arg("sim").args(args).output().unwrap()
}

fn stdout(out: Output) -> String {
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// Compares an experiment's table with the one that is checked in, and returns its rows.
fn checked(name: &str) -> Vec<Value> {
    let path: PathBuf =
        [env!("CARGO_MANIFEST_DIR"), "tests/snapshots", &format!("sim-{name}.txt")].iter().collect();
    let options = Options { seed: 1, loads: None };
    let outcome = experiments::find(name).unwrap().run(&options).unwrap();
    let found = outcome.to_text();
    if std::env::var_os("FUSELINK_BLESS").is_some() {
        fs::write(&path, &found).unwrap();
    }
    let expected = fs::read_to_string(&path).unwrap();
    assert_eq!(found, expected, "{name} differs from {}", path.display());
    outcome.rows
}

fn rows(name: &str) -> Vec<Value> {
    rows_of(&[name, "--json"])
}

fn rows_of(args: &[&str]) -> Vec<Value> {
    let object: Value = serde_json::from_str(&stdout(sim(args))).unwrap();
    assert_eq!(object["format"], "fuselink-sim-1");
    assert_eq!(object["experiment"], args[0]);
    object["rows"].as_array().unwrap().clone()
}

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row}"))
}

fn find<'a>(rows: &'a [Value], key: &str, value: &str) -> &'a Value {
    rows.iter().find(|r| r[key] == value).unwrap_or_else(|| panic!("{key} = {value}"))
}

#[test]
fn p2p_nics_reaches_what_the_links_carry() {
    let rows = checked("p2p-nics");
    assert_eq!(rows.len(), 8);
    for r in &rows {
        let part = number(r, "gbyte_per_s") / number(r, "ideal_gbyte_per_s");
        assert!((0.98..=1.0001).contains(&part), "{r}");
    }
    assert!(rows[5..].iter().all(|r| number(r, "gbyte_per_s") >= 212.0), "the paper's figure from 6 NICs on");
}

#[test]
fn fairness_bounds_what_an_owner_waits() {
    let rows = checked("fairness");
    let flows: Vec<_> = rows.iter().filter(|r| r["method"] == "fuselink").collect();
    assert_eq!(flows.len(), 3);
    for r in flows {
        let (with, alone) = (number(r, "victim_p99_us"), number(r, "alone_p99_us"));
        assert!(with - alone <= number(r, "bound_us"), "{r}");
    }
    let long = rows.iter().rfind(|r| r["method"] == "fuselink").unwrap();
    assert!(number(long, "victim_p99_us") <= 1.05 * number(long, "alone_p99_us"), "{long}");
    let sprayed = rows.iter().rfind(|r| r["method"] == "spray").unwrap();
    assert!(number(sprayed, "victim_p99_us") > 1.5 * number(sprayed, "alone_p99_us"), "{sprayed}");
}

#[test]
fn each_way_to_a_relay_is_as_slow_as_its_narrowest_link() {
    let rows = checked("relay-methods");
    let near = |at: usize, key| number(&rows[at], key);
    assert!(near(0, "far_gbyte_per_s") > 49.0, "stores over scale-up do not know sockets");
    assert!(near(0, "all_gbyte_per_s") > 240.0);
    assert!(near(1, "all_gbyte_per_s") < 160.0, "the host launches one copy at a time");
    assert!(rows[2..].iter().all(|r| number(r, "far_gbyte_per_s") <= 12.0));
}

#[test]
fn each_part_of_the_rule_is_worth_something() {
    let rows = checked("ablation");
    let rate = |name| number(find(&rows, "adds", name), "gbyte_per_s");
    let victim = |name| number(find(&rows, "adds", name), "victim_ratio");
    assert!(rate("+ relay") > rate("static"));
    assert!(victim("+ relay") > 1.5 * victim("+ no interruption"));
    assert!(rate("+ contention control") > 2.0 * rate("+ no interruption"));
    assert!(rate("+ load-aware scheduling") > rate("+ contention control"));
}

#[test]
fn a_switch_by_table_always_pays_and_a_remap_for_much() {
    let rows = checked("remap");
    assert!(rows.iter().all(|r| number(r, "table_us") < number(r, "stay_us")));
    let gain = |r: &Value| number(r, "stay_us") - number(r, "remap_193_us");
    assert!(gain(&rows[0]) < 0.0 && gain(rows.last().unwrap()) > 0.0);
}

#[test]
fn serving_gains_at_the_papers_queueing_at_least_what_the_paper_did() {
    let rows = checked("serving");
    let (fixed, free) = (&rows[0], &rows[1]);
    assert_eq!((&fixed["method"], &free["method"]), (&"static".into(), &"fuselink".into()));
    assert_eq!(fixed["instances"], 8);
    let static_p50 = number(fixed, "ttft_p50_ms");
    assert!((600.0..770.0).contains(&static_p50), "the paper's queueing: 684.54 ms, here {static_p50}");
    assert!(static_p50 / number(free, "ttft_p50_ms") >= 2.2);
    for instances in [2, 4, 8] {
        assert_eq!(rows[..6].iter().filter(|r| r["instances"] == instances).count(), 2);
    }
}

#[test]
fn moe_is_no_quicker_than_its_bound_and_a_plan_is_near_it() {
    let rows = checked("moe");
    assert!(rows.iter().all(|r| number(r, "bound_ratio") >= 1.0));
    assert!(number(find(&rows, "method", "fast"), "bound_ratio") < 1.05);
    assert!(number(find(&rows, "method", "fuselink"), "gain") > 1.3);
}

#[test]
fn dlrm_gains_what_the_paper_did_at_least() {
    let rows = checked("dlrm");
    assert!(number(find(&rows, "method", "fuselink"), "gain") >= 1.2);
    assert!(rows.iter().all(|r| number(r, "fetch_ms") >= number(r, "bound_ms")));
}

#[test]
fn fast_stays_near_the_bound_whatever_the_skew() {
    let rows = checked("fast-sweep");
    assert!(rows.iter().all(|r| number(r, "bound_ratio") >= 1.0));
    let fast = rows.iter().filter(|r| r["method"] == "fast" && r["by"] == "engine");
    assert!(fast.clone().count() >= 7);
    assert!(fast.clone().all(|r| number(r, "bound_ratio") < 1.05));
}

#[test]
fn every_experiment_has_a_table_that_is_checked_in() {
    for e in experiments::ALL {
        let path = format!("{}/tests/snapshots/sim-{}.txt", env!("CARGO_MANIFEST_DIR"), e.name);
        assert!(fs::exists(&path).unwrap(), "{path}");
    }
}

#[test]
fn without_a_name_the_experiments_are_listed() {
    let listed = stdout(sim(&[]));
    let help = stdout(sim(&["--help"]));
    for e in experiments::ALL {
        assert!(listed.contains(e.name) && listed.contains(e.about), "{listed}");
        assert!(help.contains(e.name), "{help}");
    }
}

#[test]
fn the_command_prints_what_is_checked_in_and_draws_it() {
    let dir = tempfile::tempdir().unwrap();
    let svg = dir.path().join("chart.svg");
    for name in ["p2p-nics", "ablation"] {
        let found = stdout(sim(&[name, "--svg", svg.to_str().unwrap()]));
        let path = format!("{}/tests/snapshots/sim-{name}.txt", env!("CARGO_MANIFEST_DIR"));
        assert_eq!(found, fs::read_to_string(path).unwrap());
        let svg = fs::read_to_string(&svg).unwrap();
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && !svg.contains("NaN"), "{svg}");
    }
}

#[test]
fn a_seed_changes_what_is_drawn_and_nothing_else() {
    assert_eq!(rows("dlrm"), rows("dlrm"));
    let other: Value = serde_json::from_str(&stdout(sim(&["dlrm", "--json", "--seed", "7"]))).unwrap();
    assert_ne!(other["rows"], Value::Array(rows("dlrm")));
}

#[test]
fn moe_takes_measured_loads() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("loads.json");
    let counts: Vec<String> = (1..=64).map(|n| (6400 / n).to_string()).collect();
    fs::write(&file, format!("{{\"logical_count\": [[{}]]}}", counts.join(","))).unwrap();
    let path = file.to_str().unwrap();
    let text = stdout(sim(&["moe", "--expert-loads", path, "--layer", "0"]));
    assert!(text.contains("expert loads of layer 0"), "{text}");
    let refused = |args: &[&str], part: &str| {
        let out = sim(args);
        let stderr = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(2), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(stderr.contains(part), "{stderr}");
    };
    refused(&["moe", "--expert-loads", path, "--layer", "3"], "no layer 3");
    refused(&["p2p-nics", "--expert-loads", path, "--layer", "0"], "takes no --expert-loads");
    refused(&["moe", "--expert-loads", path], "--layer");
    refused(&["warp"], "p2p-nics");
}

#[test]
fn faults_are_told_apart_from_experiments() {
    let refused = |args: &[&str], what: &str| {
        let out = sim(args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains(what) && said.lines().count() == 1, "{args:?}: {said}");
    };
    refused(&["faults", "--runs", "0"], "at least 1");
    refused(&["faults", "--svg", "chart.svg"], "no --svg");
    refused(&["p2p-nics", "--runs", "5"], "for faults");
    refused(&["p2p-nics", "--trace"], "for faults");
    let rows = rows_of(&["faults", "--seed", "7", "--runs", "3", "--json"]);
    assert_eq!((&rows[0]["runs"], &rows[0]["broken"]), (&3.into(), &0.into()));
}
