//! Experiments in virtual time: their tables are checked in, so that a change of behaviour is a difference of numbers.
//! FUSELINK_BLESS=1 writes them anew.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use fuselink::sim::experiments::{self, NAMES, Rows};

fn sim(args: &[&str]) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_fuselink")).arg("sim").args(args).output().unwrap()
}

#[test]
fn tables_are_as_checked_in() {
    for name in NAMES {
        let out = sim(&[name]);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let path: PathBuf =
            [env!("CARGO_MANIFEST_DIR"), "tests/snapshots", &format!("sim-{name}.txt")].iter().collect();
        let found = String::from_utf8(out.stdout).unwrap();
        if std::env::var_os("FUSELINK_BLESS").is_some() {
            fs::write(&path, &found).unwrap();
        }
        let expected = fs::read_to_string(&path).unwrap();
        assert_eq!(found, expected, "{name} differs from {}", path.display());
    }
}

#[test]
fn one_gpu_uses_all_nics_and_never_more_than_there_is() {
    let Some(outcome) = experiments::run("p2p-nics").unwrap() else { panic!() };
    let Rows::P2pNics(rows) = outcome.rows else { panic!() };
    assert!(rows.iter().all(|r| r.gbyte_per_s <= r.ideal_gbyte_per_s * 1.0001), "{rows:?}");
    assert!(rows[0].gbyte_per_s > 0.98 * 50.0);
    assert!(rows[5..].iter().all(|r| r.gbyte_per_s >= 212.0), "the paper's figure from 6 NICs on: {rows:?}");
}

#[test]
fn names_are_checked() {
    let out = sim(&["warp"]);
    assert_eq!(out.status.code(), Some(2));
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert_eq!(stderr.lines().count(), 1);
    assert!(stderr.contains("p2p-nics"), "{stderr}");
}
