//! `fuselink plan` from outside: its JSON, and one clear line with exit code 2 for every kind of bad input.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn plan(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fuselink")).arg("plan").args(arguments).output().unwrap()
}

/// A file in a directory of its own; both go when it is dropped.
struct Scratch(tempfile::TempDir);

impl Scratch {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.display().to_string()
    }
}

fn refused(arguments: &[&str], message: &str) {
    let out = plan(arguments);
    let text = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(2), "{arguments:?}: {text}");
    assert_eq!(text.lines().count(), 1, "{arguments:?}: {text}");
    assert!(text.contains(message), "{arguments:?}: {text}");
    assert!(out.stdout.is_empty());
}

#[test]
fn bad_matrices_are_refused() {
    let dir = Scratch::new();
    let refused_csv = |bytes: &[u8], message: &str| {
        let file = dir.file("d.csv", bytes);
        refused(&["--servers", "2", "--gpus", "1", "--demand", &file], message);
    };
    refused_csv(b"1,2\n3\n", "d.csv:2: 1 numbers in this row, but there are 2 rows");
    refused_csv(b"1,2,3\n4,5,6\n7,8,9\n", "3 rows, but 2 servers have 2 GPUs in all");
    refused_csv(b"1,two\n3,4\n", "d.csv:1: \"two\" (column 2) is not a whole number");
    refused_csv(b"1,2\n-3,4\n", "d.csv:2: -3 (column 1) is negative");
    refused_csv(b"1,2\n3,9223372036854775808\n", "d.csv:2: 9223372036854775808 (column 2) is above 2^63");
    refused_csv(b"1,9223372036854775807\n3,0\n", "d.csv: the cells add up to more than 2^63");
    let file = dir.file("d.csv", b"0,9000000000000000000\n0,0\n");
    refused(
        &["--servers", "2", "--gpus", "1", "--demand", &file, "--method", "spray"],
        "a plan of that many pieces",
    );
    refused_csv(b"", "d.csv: no numbers in it");
    refused_csv(b"1,2\n\xff\xfe,3\n", "d.csv:2: not UTF-8");
    refused_csv(b"1,\x1b[2J\n3,4\n", "is not a whole number");
    refused(&["--demand", &dir.0.path().join("none.csv").display().to_string()], "none.csv: No such file");
    refused(&["--demand", &dir.0.path().display().to_string()], "Is a directory");
}

#[test]
fn bad_expert_loads_are_refused() {
    let dir = Scratch::new();
    let good = r#"{"logical_count": [[1.0, 2.0, 3.0, 4.0]]}"#;
    let loads = |text: &str, more: &[&str], message: &str| {
        let file = dir.file("loads.json", text);
        refused(&[&["--servers", "2", "--gpus", "1", "--expert-loads", &file], more].concat(), message);
    };
    loads(&good[..30], &["--layer", "0"], "loads.json:1: EOF while parsing");
    loads("", &["--layer", "0"], "loads.json:1: EOF while parsing");
    loads(good, &["--layer", "1"], "loads.json: no layer 1: the file has layers 0 to 0");
    loads(good, &["--layer", "0", "--servers", "3"], "cannot be used multiple times");
    loads(good, &["--layer", "0", "--token-bytes", "9223372036854775807"], "add up to more than 2^63");
    loads(good, &[], "--layer");
    let file = dir.file("loads.json", good);
    refused(
        &["--servers", "3", "--gpus", "1", "--expert-loads", &file, "--layer", "0"],
        "4 experts do not divide",
    );
    let trace = dir.file("t.jsonl", "{\"step\":0}");
    refused(&["--router-trace", &trace], "t.jsonl:1: missing field");
}

#[test]
fn bad_clusters_and_flags_are_refused() {
    refused(&["--servers", "0", "--gpus", "8"], "--servers: the number must be from 1");
    refused(&["--servers", "2", "--gpus", "0"], "--gpus: the number must be from 1");
    refused(&["--servers", "4000000", "--gpus", "4000000"], "must be from 1 to 16384");
    refused(&["--start-us", "-1"], "--start-us");
    refused(&["--start-us", "soon"], "at most 3 decimals");
    refused(&["--servers", "-1"], "--servers");
    refused(&["--nics", "0"], "--nics");
    refused(&["--nic-gbit", "fast"], "--nic-gbit: \"fast\" is no rate");
    refused(&["--nic-gbit", "-400"], "--nic-gbit");
    refused(&["--nic-gbit", "1,2,3"], "3 values for 16 NICs");
    refused(&["--nic-gbit", "0"], "all of its 8 NICs are down");
    refused(&["--scaleup-gbyte", "0"], "--scaleup-gbyte must be above 0");
    refused(&["--method", "fastest"], "unknown method \"fastest\"");
    refused(&["--speed", "3"], "unexpected argument '--speed'");
    refused(&["--unit", "0"], "--unit must be at least 1");
    refused(
        &["--cluster", "nowhere.toml"],
        "nowhere.toml: No such file or directory, and no preset of that name",
    );
    refused(&["--cluster", "p4d", "--gpus", "4"], "it says how many");
    let dir = Scratch::new();
    let file = dir.file("c.toml", "[[server]]\ngpus = 2\nspeed = 1\n");
    refused(&["--cluster", &file], "c.toml:3: unknown field `speed`");
    refused(&["--cluster", &file, "--servers", "2"], "--servers cannot be used with --cluster");
}

#[test]
fn help_is_no_error() {
    let out = plan(&["--help"]);
    assert_eq!(out.status.code(), Some(0));
    assert!(String::from_utf8(out.stdout).unwrap().contains("--method"));
    let out = Command::new(env!("CARGO_BIN_EXE_fuselink")).output().unwrap();
    assert_eq!((out.status.code(), String::from_utf8(out.stderr).unwrap().lines().count()), (Some(2), 1));
}

/// More bytes than a float counts exactly: every one is planned.
#[test]
fn totals_past_2_to_the_53_are_exact() {
    let dir = Scratch::new();
    let cells = [[0, 9_007_199_254_740_993u64], [4_611_686_018_427_387_905, 0]];
    let text = cells.map(|row| row.map(|cell| cell.to_string()).join(",")).join("\n");
    let demand = dir.file("d.csv", text);
    for method in ["auto", "ordered", "birkhoff", "loose", "static", "fuselink"] {
        let out = plan(&[
            "--servers",
            "2",
            "--gpus",
            "1",
            "--nics",
            "3",
            "--demand",
            &demand,
            "--method",
            method,
            "--json",
        ]);
        assert!(out.status.success(), "{method}: {}", String::from_utf8_lossy(&out.stderr));
        let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        let bytes = |src: u64| -> u64 {
            let pieces = json["pieces"].as_array().unwrap().iter();
            pieces.filter(|p| p[0] == src).map(|p| p[3].as_u64().unwrap()).sum()
        };
        assert_eq!([bytes(0), bytes(1)], [cells[0][1], cells[1][0]], "{method}");
    }
}

#[test]
fn json_says_what_was_planned() {
    let dir = Scratch::new();
    let demand = dir.file("d.csv", "5,6\n7,8\n");
    let cluster =
        dir.file("c.toml", "[[server]]\ngpus = 1\nnic_gbit = 12.5\n[[server]]\ngpus = 1\nnics = 2\n");
    let out = plan(&["--cluster", &cluster, "--demand", &demand, "--method", "birkhoff", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(json["format"], "fuselink-plan-1");
    assert_eq!(json["server_nics"], serde_json::json!([1, 2]));
    assert_eq!(json["nic_gbit_per_s"], serde_json::json!([12.5, 400, 400]));
    assert_eq!(json["relay_gpu"], serde_json::json!([0, 1, 1]));
    assert_eq!(json["pieces"][0], serde_json::json!([0, 0, 0, 5, -1, -1, -1]));
    assert_eq!(json["pieces"].as_array().unwrap().len(), 6);
    assert!(json["plan_us"].as_f64().unwrap() > 0.0);
    assert!(json["predicted_us"].as_f64().unwrap() >= json["lower_bound_us"].as_f64().unwrap());
    let drawing = dir.0.path().join("plan.svg");
    let out = plan(&["--cluster", &cluster, "--demand", &demand, "--svg", &drawing.display().to_string()]);
    assert!(String::from_utf8(out.stdout).unwrap().contains("lower bound"));
    let svg = std::fs::read_to_string(&drawing).unwrap();
    assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"), "{svg}");
    for row in ["server 0 sends", "server 1 sends"] {
        assert!(svg.contains(row), "no row {row}");
    }
    let out = plan(&["--servers", "2", "--svg", "no/such/folder/plan.svg"]);
    assert_eq!((out.status.code(), out.stdout.is_empty()), (Some(1), true));
    assert!(String::from_utf8(out.stderr).unwrap().contains("cannot write no/such/folder/plan.svg"));
}

/// The independent checker that lives beside the repository, when it is there.
fn tool(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/tools").join(name);
    if !path.exists() {
        eprintln!("SKIPPED: no {}, so plans are not judged from outside here", path.display());
        return None;
    }
    Some(path)
}

#[test]
fn the_outside_checker_accepts_every_kind_of_demand() {
    let (Some(check), Some(make)) = (tool("check_plan.py"), tool("make_demand.py")) else { return };
    let dir = Scratch::new();
    let kinds = ["uniform", "random", "zipf:0.8", "hot:0.3", "server:1.2", "sparse:0.2", "one", "tail"];
    for (i, kind) in kinds.iter().enumerate() {
        let servers = (i % 8 + 1).to_string();
        let csv = Command::new("python3").arg(&make).args([*kind, &servers, "4"]).output().unwrap();
        assert!(csv.status.success());
        let demand = dir.file("d.csv", &csv.stdout);
        for (nics, method) in [("4", "birkhoff"), ("2", "ordered"), ("4", "auto")] {
            let cluster = ["--servers", &servers, "--gpus", "4", "--nics", nics];
            let out = plan(&[&cluster[..], &["--demand", &demand, "--method", method, "--json"]].concat());
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
            let json = dir.file("p.json", &out.stdout);
            let mut judge = Command::new("python3");
            judge.arg(&check).args([&demand, &json]).args(cluster);
            if method == "birkhoff" {
                judge.args(["--ordered", "--max-ratio", "1.0001"]);
            }
            let verdict = judge.output().unwrap();
            assert!(
                verdict.status.success(),
                "{kind} {method}: {}",
                String::from_utf8_lossy(&verdict.stdout)
            );
        }
    }
}
