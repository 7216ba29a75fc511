//! Runs of the program with ranks as processes: what it prints, and how it ends when somebody ends it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

const DEADLINE: Duration = Duration::from_secs(60);

fn fuselink(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fuselink"));
    command.args(args).stdin(Stdio::null());
    command
}

fn run(args: &[&str]) -> Output {
    fuselink(args).output().unwrap()
}

fn demand(dir: &TempDir, rows: &[&[u64]]) -> PathBuf {
    let path = dir.path().join("demand.csv");
    let line = |row: &&[u64]| row.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
    fs::write(&path, rows.iter().map(line).collect::<Vec<_>>().join("\n")).unwrap();
    path
}

fn until<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = check() {
            return found;
        }
        assert!(begin.elapsed() < DEADLINE, "waited too long for {what}");
        std::thread::yield_now();
    }
}

/// Processes of ranks whose launcher is `parent`, by rank.
fn ranks_of(parent: u32) -> BTreeMap<u32, u32> {
    let mut ranks = BTreeMap::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        let Ok(status) = fs::read_to_string(entry.path().join("status")) else { continue };
        let field = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)).map(str::trim);
        if field("PPid:") != Some(&parent.to_string()) || field("State:").is_some_and(|s| s.starts_with('Z'))
        {
            continue;
        }
        let environ = fs::read(entry.path().join("environ")).unwrap_or_default();
        let rank = environ.split(|&b| b == 0).find_map(|v| v.strip_prefix(b"FUSELINK_RANK="));
        if let Some(rank) = rank.and_then(|r| std::str::from_utf8(r).ok()?.parse().ok()) {
            ranks.insert(rank, pid);
        }
    }
    ranks
}

/// A run that would take minutes, stopped once all of its ranks exchange bytes.
struct Long {
    child: Child,
    ranks: BTreeMap<u32, u32>,
}

impl Long {
    fn start(extra: &[&str]) -> Self {
        Self::start_on(2, "static", extra)
    }

    fn start_on(gpus: usize, method: &str, extra: &[&str]) -> Self {
        let count = gpus.to_string();
        let args = ["alltoallv", "--servers", "2", "--gpus", &count, "--scale", "200000", "--method", method];
        let mut command = fuselink(&args);
        command.args(extra).env("FUSELINK_TIMEOUT_MS", "5000").stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        let ranks = until("all ranks to run kernels", || {
            let ranks = ranks_of(child.id());
            (ranks.len() == 2 * gpus && ranks.values().all(|&pid| is_exchanging(pid))).then_some(ranks)
        });
        Self { child, ranks }
    }

    fn signal(&self, pid: u32, signal: Signal) {
        kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
    }

    /// Waits for the end; then no rank may be left.
    fn end(mut self) -> (ExitStatus, String) {
        let status = until("the launcher to end", || self.child.try_wait().unwrap());
        let mut stderr = String::new();
        std::io::Read::read_to_string(&mut self.child.stderr.take().unwrap(), &mut stderr).unwrap();
        until("all ranks to be gone", || self.ranks.values().all(|&pid| is_gone(pid)).then_some(()));
        (status, stderr)
    }
}

fn is_gone(pid: u32) -> bool {
    match fs::read_to_string(format!("/proc/{pid}/status")) {
        Err(_) => true,
        Ok(status) => status.lines().any(|l| l.starts_with("State:") && l.contains('Z')),
    }
}

/// Whether a rank has mapped the memory that it needs before its first exchange: its own and its peer's buffers.
fn is_exchanging(pid: u32) -> bool {
    maps(pid).values().filter(|name| name.contains("fuselink-gpu")).count() >= 8
}

/// Shared memory that a process has mapped: inode -> name.
fn maps(pid: u32) -> BTreeMap<u64, String> {
    let text = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let entry = |line: &str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let name = fields.get(5).filter(|n| n.starts_with("/memfd:") || n.starts_with("/dev/shm"))?;
        Some((fields[4].parse().ok()?, (*name).to_owned()))
    };
    text.lines().filter_map(entry).collect()
}

#[test]
fn a_run_verifies_every_byte_and_reports() {
    let dir = TempDir::new().unwrap();
    let path =
        demand(&dir, &[&[5, 70_000, 200_000, 1], &[0, 0, 0, 150_000], &[9, 9, 9, 9], &[100_000, 0, 0, 7]]);
    let args = ["alltoallv", "--servers", "2", "--gpus", "2", "--iters", "2", "--json", "--demand"];
    let out = run(&[&args[..], &[path.to_str().unwrap()]].concat());
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let json: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(json["format"], "fuselink-run-1");
    assert_eq!(json["backend"], serde_json::json!({"gpu": "emu", "nic": "emu"}));
    let total = 5 + 70_000 + 200_000 + 1 + 150_000 + 36 + 100_000 + 7;
    assert_eq!(json["bytes_total"], total);
    let results = json["results"].as_array().unwrap();
    let names: Vec<_> = results.iter().map(|r| r["method"].as_str().unwrap()).collect();
    assert_eq!(names, ["static", "spray", "fuselink", "fast"]);
    for result in results {
        assert_eq!(result["mismatched_bytes"], 0);
        assert_eq!(result["verified_bytes"], 2 * total);
        let sum =
            |key: &str| result[key].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum::<u64>();
        let crosses = 200_000 + 1 + 150_000 + 9 + 9 + 100_000;
        assert_eq!((sum("nic_tx_bytes"), sum("nic_rx_bytes")), (crosses, crosses));
    }
    assert_eq!(results[0]["nic_tx_bytes"], serde_json::json!([200_001, 150_000, 18, 100_000]));
    assert_eq!(results[0]["nic_rx_bytes"], serde_json::json!([100_009, 9, 200_000, 150_001]));
}

#[test]
fn a_person_gets_a_table_and_a_sentence() {
    let out = run(&[
        "alltoallv",
        "--servers",
        "2",
        "--gpus",
        "1",
        "--tokens",
        "16",
        "--iters",
        "1",
        "--ranks",
        "thread",
    ]);
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(text.starts_with("# fuselink alltoallv on an emulated cluster: 2 servers"), "{text}");
    for method in ["static", "spray", "fuselink", "fast"] {
        assert!(text.lines().any(|l| l.starts_with(method)), "{text}");
    }
    assert!(text.contains("every byte arrived as sent"), "{text}");
}

#[test]
fn nothing_to_send_has_no_ratio() {
    let dir = TempDir::new().unwrap();
    let path = demand(&dir, &[&[0, 0], &[0, 0]]);
    let args = ["alltoallv", "--servers", "2", "--gpus", "1", "--iters", "1", "--json", "--demand"];
    let out = run(&[&args[..], &[path.to_str().unwrap()]].concat());
    let json: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(json["bound_ms"], 0.0);
    assert!(json["results"].as_array().unwrap().iter().all(|r| r["bound_ratio"].is_null()));
}

#[test]
fn ranks_of_different_servers_share_nothing_but_the_wire() {
    let mut run = Long::start(&[]);
    let maps: BTreeMap<u32, BTreeMap<u64, String>> =
        run.ranks.iter().map(|(&r, &pid)| (r, maps(pid))).collect();
    for (a, b) in [(0, 2), (0, 3), (1, 2), (1, 3)] {
        let inodes = |r: u32| maps[&r].keys().copied().collect::<BTreeSet<_>>();
        let shared: BTreeSet<&str> =
            inodes(a).intersection(&inodes(b)).map(|i| maps[&a][i].as_str()).collect();
        assert_eq!(shared, BTreeSet::from(["/memfd:fuselink-wire"]), "ranks {a} and {b}");
    }
    let local = |r: u32| maps[&r].values().filter(|n| n.contains("fuselink-segment")).count();
    assert!((0..4).all(|r| local(r) > 0), "the check looks at the right names: {maps:?}");
    run.child.kill().unwrap();
    run.end();
}

#[test]
fn a_killed_rank_stops_all_others_and_is_named() {
    for victim in [2, 0] {
        let run = Long::start(&[]);
        run.signal(run.ranks[&victim], Signal::KILL);
        let (status, stderr) = run.end();
        assert_eq!(status.code(), Some(1));
        let line =
            format!("fuselink: rank {victim} was killed by signal 9; all other ranks have been stopped\n");
        assert_eq!(stderr, line);
    }
}

/// Chunks that a rank has mapped without any that is lent: control memory and buffers of four ranks, a plan, and of lots its
/// own, its spare ones, and those of whom it spares.
const MAPPED_WITHOUT_LENT: usize = 4 + 8 + 1 + 3 * 2;

#[test]
fn a_killed_lender_and_borrower_stops_all_others_and_is_named() {
    let run = Long::start_on(4, "spray", &[]);
    let mapped = |pid: u32| maps(pid).values().filter(|name| name.contains("fuselink-gpu")).count();
    let lent = |rank: u32| mapped(run.ranks[&rank]) > MAPPED_WITHOUT_LENT;
    let victim = until("relay memory to be lent", || (0..8).find(|&rank| lent(rank)));
    run.signal(run.ranks[&victim], Signal::KILL);
    let (status, stderr) = run.end();
    assert_eq!(status.code(), Some(1));
    let line = format!("fuselink: rank {victim} was killed by signal 9; all other ranks have been stopped\n");
    assert_eq!(stderr, line);
}

/// Its kernels are never idle: they copy inside the server, over links of hardly any rate.
#[test]
fn a_killed_rank_stops_a_peer_that_is_busy_copying() {
    let dir = TempDir::new().unwrap();
    let path = demand(&dir, &[&[0, 60_000_000], &[60_000_000, 0]]);
    let args =
        ["alltoallv", "--servers", "1", "--gpus", "2", "--scaleup-gbyte", "1", "--scale", "200", "--demand"];
    let mut command = fuselink(&[&args[..], &[path.to_str().unwrap()]].concat());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let ranks = until("both ranks to run kernels", || {
        let ranks = ranks_of(child.id());
        (ranks.len() == 2 && ranks.values().all(|&pid| maps(pid).len() >= 5)).then_some(ranks)
    });
    let run = Long { child, ranks };
    run.signal(run.ranks[&1], Signal::KILL);
    let (status, stderr) = run.end();
    assert_eq!(status.code(), Some(1));
    assert_eq!(stderr, "fuselink: rank 1 was killed by signal 9; all other ranks have been stopped\n");
}

#[test]
fn signals_end_every_process_and_leave_nothing() {
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        let run = Long::start(&[]);
        run.signal(run.child.id(), signal);
        let (status, stderr) = run.end();
        assert_eq!(status.code(), Some(code));
        assert_eq!(stderr, "fuselink: interrupted; all ranks have been stopped\n");
    }
    let left: Vec<_> =
        fs::read_dir("/dev/shm").into_iter().flatten().flatten().map(|e| e.file_name()).collect();
    assert!(!left.iter().any(|n| n.to_string_lossy().contains("fuselink")), "{left:?}");
}

#[test]
fn ranks_do_not_outlive_a_launcher_that_is_killed() {
    let mut run = Long::start(&[]);
    run.child.kill().unwrap();
    run.end();
}

fn refused(args: &[&str], says: &str) {
    let out = run(args);
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(2), "{args:?}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
    assert!(stderr.contains(says), "{args:?}: {stderr}");
    assert!(out.stdout.is_empty());
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_build_without_cuda_says_so_before_anything_starts() {
    for ranks in ["process", "thread"] {
        let args = ["alltoallv", "--servers", "1", "--gpus", "2", "--iters", "1", "--ranks", ranks];
        let out = fuselink(&args).env("FUSELINK_GPU", "cuda").output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!((out.status.code(), stderr.lines().count()), (Some(2), 1), "{stderr}");
        assert!(stderr.contains("build it with --features cuda"), "{stderr}");
    }
}

#[test]
fn bad_input_is_one_line_and_exit_code_2() {
    let dir = TempDir::new().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let csv = |bytes: &[u8], says: &str| {
        let path = file("bad.csv", bytes);
        refused(&["alltoallv", "--servers", "2", "--gpus", "1", "--demand", &path], says);
    };
    csv(b"1,2\n3\n", "bad.csv:2");
    csv(b"1,2,3\n4,5,6\n7,8,9\n", "2 servers");
    csv(b"1,x\n3,4\n", "bad.csv:1");
    csv(b"1,-2\n3,4\n", "bad.csv:1");
    csv(b"1,9223372036854775809\n3,4\n", "bad.csv:1");
    csv(b"", "bad.csv");
    csv(b"1,\xff\n3,4\n", "UTF-8");
    csv(b"0,9000000000000000000\n9000000000000000000,0\n", "2^63");
    csv(b"0,4000000000000000000\n0,0\n", "memory");
    refused(&["alltoallv", "--demand", "/no/such/file.csv"], "/no/such/file.csv");
    let loads = |json: &str, layer: &str, says: &str| {
        let path = file("loads.json", json.as_bytes());
        refused(&["alltoallv", "--expert-loads", &path, "--layer", layer], says);
    };
    loads("{\"logical_count\": [[1,2", "0", "loads.json");
    loads("{\"logical_count\": [[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]]}", "1", "layer");
    loads("{\"logical_count\": [[1,2,3]]}", "0", "divide");
    refused(&["alltoallv", "--servers", "0"], "--servers");
    refused(&["alltoallv", "--frobnicate"], "--frobnicate");
    refused(&["alltoallv", "--method", "warp"], "warp");
    refused(&["alltoallv", "--iters", "0"], "--iters");
    refused(&["alltoallv", "--scale", "0"], "--scale");
    refused(&["alltoallv", "--iters", "-3"], "--iters");
    refused(&["alltoallv", "--nic-gbit", "0"], "NIC");
    let gone = Path::new("/no/such/cluster.toml").to_str().unwrap();
    refused(&["alltoallv", "--cluster", gone], gone);
}

#[test]
fn p2p_reports_a_row_per_number_of_nics() {
    let args = ["p2p", "--gpus", "2", "--nics", "1..2", "--iters", "1", "--ranks", "thread", "--json"];
    let out = run(&args);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let json: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(json["format"], "fuselink-p2p-1");
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.iter().map(|r| r["nics"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(rows[0]["ratio_to_one"], 1.0);
    for row in rows {
        let (rate, ideal) =
            (row["gbyte_per_s"].as_f64().unwrap(), row["ideal_gbyte_per_s"].as_f64().unwrap());
        assert!(rate > 0.0 && rate <= ideal * 1.05, "no NIC passes its rate: {row}");
    }
    refused(&["p2p", "--nics", "0"], "--nics");
    refused(&["p2p", "--nics", "9"], "--nics");
    refused(&["p2p", "--nics", "x..y"], "--nics");
}

#[test]
fn what_cannot_run_is_refused_before_anything_starts() {
    refused(&["alltoallv", "--gpus", "65"], "65 GPUs");
    refused(&["alltoallv", "--scale", "1000000000"], "--scale");
    refused(&["alltoallv", "--layer", "3"], "--layer");
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("cluster.toml");
    fs::write(&path, "[[server]]\ngpus = 1\nscaleup_gbyte = 0\n[[server]]\ngpus = 1\n").unwrap();
    refused(&["alltoallv", "--cluster", path.to_str().unwrap()], "scale-up");
    for setting in
        ["FUSELINK_BLOCKS", "FUSELINK_GPU", "FUSELINK_NIC", "FUSELINK_RELAY_BYTES", "FUSELINK_TIMEOUT_MS"]
    {
        let mut command = fuselink(&["alltoallv", "--servers", "2", "--gpus", "1"]);
        let out = command.env(setting, "0").output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{setting}: {said}");
        assert!(said.contains(setting) && !said.contains("rank 0"), "before any rank starts: {said}");
    }
    // What some other launcher says of ranks is not meant for this run's.
    let args =
        ["alltoallv", "--servers", "2", "--gpus", "1", "--tokens", "1", "--iters", "1", "--ranks", "thread"];
    assert!(fuselink(&args).env("RANK", "7").output().unwrap().status.success());
}
