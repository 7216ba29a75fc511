//! Instructions, counted by valgrind where it is installed: unlike times they do not depend on what else the host does.

use std::process::Command;

/// What a run to be counted is called with.
const COUNT: &str = "--count";

/// Of this whole program called with these arguments; `None` without valgrind.
pub fn of(args: &[&str]) -> Option<u64> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(std::env::current_exe().ok()?)
        .args(args)
        .output()
        .ok()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let collected = said.lines().find_map(|line| line.split_once("Collected :"))?.1;
    collected.trim().parse().ok()
}

/// Of one round: the program does [`few and many`](rounds_asked) of them, and what is common falls away.
#[allow(dead_code)] // Each bench has its own way of counting.
pub fn per_round(few: u64, many: u64) -> Option<f64> {
    let counted = |rounds: u64| of(&[COUNT, &rounds.to_string()]);
    counted(many)?.checked_sub(counted(few)?).map(|more| more as f64 / (many - few) as f64)
}

/// The rounds that this run is to do and no more: it is being counted.
#[allow(dead_code)] // As above.
pub fn rounds_asked() -> Option<u64> {
    let args: Vec<String> = std::env::args().collect();
    let at = args.iter().position(|a| a == COUNT)?;
    args.get(at + 1)?.parse().ok()
}

/// A count for a JSON line.
pub fn json(count: Option<f64>) -> String {
    count.map_or("null".into(), |n| format!("{n:.1}"))
}
