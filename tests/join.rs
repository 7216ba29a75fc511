//! Ranks that somebody else starts: each is told its place by the environment and joins.

use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};

const ARGS: [&str; 12] = [
    "alltoallv",
    "--join",
    "--gpus",
    "1",
    "--tokens",
    "8",
    "--token-bytes",
    "512",
    "--iters",
    "1",
    "--method",
    "static,fast",
];

/// A port that is free now.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn start(args: &[&str], vars: &[(&str, String)]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fuselink"));
    command.args(args).env_clear().envs(vars.iter().map(|(name, value)| (name, value)));
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Starts two ranks, each with the variables that `vars` gives it, and waits for both.
fn run(extra: &[&str], vars: impl Fn(u32) -> Vec<(&'static str, String)>) -> [Output; 2] {
    let args: Vec<&str> = ARGS.iter().chain(extra).copied().collect();
    let ranks = [0, 1].map(|rank| start(&args, &vars(rank)));
    ranks.map(|rank| rank.wait_with_output().unwrap())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[track_caller]
fn assert_ran(ranks: &[Output; 2]) {
    for (r, rank) in ranks.iter().enumerate() {
        assert!(rank.status.success(), "rank {r}: {}", text(&rank.stderr));
    }
    assert_eq!(text(&ranks[1].stdout), "", "rank 0 alone prints");
}

#[test]
fn ranks_join_by_our_own_variables() {
    let root = format!("127.0.0.1:{}", free_port());
    let ranks = run(&["--json"], |rank| {
        vec![
            ("FUSELINK_RANK", rank.to_string()),
            ("FUSELINK_SIZE", "2".into()),
            ("FUSELINK_ROOT", root.clone()),
            ("FUSELINK_SECRET", "s".into()),
        ]
    });
    assert_ran(&ranks);
    let report: serde_json::Value = serde_json::from_slice(&ranks[0].stdout).unwrap();
    assert_eq!(report["format"], "fuselink-run-1");
    assert_eq!(report["backend"], serde_json::json!({"gpu": "emu", "nic": "emu"}));
    for result in report["results"].as_array().unwrap() {
        assert_eq!(result["verified_bytes"], report["bytes_total"]);
        assert_eq!(result["mismatched_bytes"], 0);
        assert!(result["ms"]["median"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn ranks_join_under_torchrun() {
    let port = free_port().to_string();
    let ranks = run(&[], |rank| {
        vec![
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", "2".into()),
            ("MASTER_ADDR", "127.0.0.1".into()),
            ("MASTER_PORT", port.clone()),
            ("FUSELINK_SECRET", "s".into()),
        ]
    });
    assert_ran(&ranks);
    assert!(text(&ranks[0].stdout).contains("every byte arrived as sent"), "{}", text(&ranks[0].stdout));
}

#[track_caller]
fn refused(args: &[&str], vars: &[(&str, &str)], says: &str) {
    let vars: Vec<_> = vars.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    let output = start(args, &vars).wait_with_output().unwrap();
    let words = text(&output.stderr);
    assert_eq!((output.status.code(), words.lines().count()), (Some(2), 1), "{words}");
    assert!(words.contains(says), "{words}");
    assert_eq!(text(&output.stdout), "");
}

#[test]
fn a_job_of_another_size_is_refused_before_anybody_is_waited_for() {
    let three = [
        ("FUSELINK_RANK", "0"),
        ("FUSELINK_SIZE", "3"),
        ("FUSELINK_ROOT", "127.0.0.1:1"),
        ("FUSELINK_SECRET", "s"),
    ];
    refused(&ARGS, &three, "3 ranks were started");
    refused(&ARGS, &[], "1 ranks were started");
}

#[test]
fn what_is_missing_is_named() {
    let place = [("FUSELINK_RANK", "0"), ("FUSELINK_SIZE", "2")];
    refused(&ARGS, &place, "FUSELINK_ROOT");
    refused(&ARGS, &[&place[..], &[("FUSELINK_ROOT", "127.0.0.1:1")]].concat(), "FUSELINK_SECRET");
    refused(&["p2p", "--join"], &[], "--join");
}

#[cfg(not(feature = "verbs"))]
#[test]
fn nics_that_this_build_lacks_are_refused_with_the_feature_that_brings_them() {
    refused(&["alltoallv", "--nic", "verbs"], &[], "--features verbs");
    refused(&["alltoallv"], &[("FUSELINK_NIC", "verbs")], "--features verbs");
    refused(&["alltoallv"], &[("FUSELINK_NIC", "carrier-pigeon")], "emu or verbs");
}
