//! The stand-in for the driver: building it, and running this program's tests on it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{OnceLock, mpsc};
use std::time::Duration;

/// Where the stand-in is; built once.
fn library_dir() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(build)
}

fn sources(folder: &str, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join(folder)).unwrap().map(|e| e.unwrap().path());
    let mut found: Vec<_> = entries.filter(|p| p.extension().is_some_and(|e| e == extension)).collect();
    found.sort();
    found
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn build() -> PathBuf {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("cuda_standin");
    std::fs::create_dir_all(&dir).unwrap();
    let cuda = ["CUDA_PATH", "CUDA_HOME"].into_iter().find_map(std::env::var_os);
    let cuda = cuda.map_or(PathBuf::from("/usr/local/cuda"), PathBuf::from);
    // Another name first: a test program that runs at the same time never finds half a library.
    let fresh = dir.join(format!("libcuda.{}", std::process::id()));
    let output = Command::new(std::env::var_os("CXX").unwrap_or("c++".into()))
        .args([
            "-std=c++17",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unused-function",
            "-fPIC",
            "-shared",
        ])
        .args(["-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic", "-xc++", "-I", "kernels", "-I"])
        .arg(cuda.join("include"))
        .arg(concat!("-I", env!("OUT_DIR"), "/include"))
        .args(sources("tests/cuda_standin", "cpp"))
        .args(["kernels", "tests/kernels", "docs/tutorial"].iter().flat_map(|folder| sources(folder, "cu")))
        .args(["-ldl", "-lpthread", "-o"])
        .arg(&fresh)
        .current_dir(root())
        .output()
        .expect("a C++ compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&fresh, dir.join("libcuda.so.1")).unwrap();
    dir
}

/// This program with its arguments as a test's, on the stand-in.
pub fn command(tests: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(tests).args(["--ignored", "--nocapture", "--test-threads=1"]);
    on_standin(&mut command);
    command
}

/// Has a program find the stand-in where it looks for the driver.
pub fn on_standin(command: &mut Command) {
    command.env("LD_LIBRARY_PATH", library_dir());
}

/// Longest that a child may take.
const DEADLINE: Duration = Duration::from_secs(120);

/// Runs a child, and kills one that does not end.
pub fn output(command: &mut Command) -> Output {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    let (tell, ended) = mpsc::channel();
    let waiter = std::thread::spawn(move || {
        let output = child.wait_with_output();
        let _ = tell.send(());
        output
    });
    if ended.recv_timeout(DEADLINE).is_err() {
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    }
    waiter.join().unwrap().unwrap()
}

pub fn said(output: &Output) -> String {
    [&output.stdout[..], &output.stderr[..]].map(String::from_utf8_lossy).concat()
}

/// How many tests a run says that it has passed.
fn passed(output: &str) -> usize {
    let line = output.lines().find(|l| l.starts_with("test result: ok. "));
    let count = line.and_then(|l| l.split_whitespace().nth(3));
    count.and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// The stand-in's complaints are errors even where the library only logs them, but for `expected` ones.
#[track_caller]
fn run_on_standin(filter: &str, at_least: usize, expected: &[&str]) {
    run_with(&[], filter, at_least, expected);
}

/// The same on another machine.
#[track_caller]
fn run_with(machine: &[(&str, &str)], filter: &str, at_least: usize, expected: &[&str]) {
    let output = output(command(&[filter]).envs(machine.iter().copied()));
    let said = said(&output);
    assert!(output.status.success(), "{said}");
    assert!(passed(&said) >= at_least, "{at_least} tests were expected to run:\n{said}");
    let is_complaint = |l: &&str| l.contains("libcuda stand-in:") || l.contains("fuselink: cannot");
    let complaint = said.lines().filter(is_complaint).find(|l| !expected.iter().any(|e| l.contains(e)));
    assert_eq!(complaint, None, "{said}");
}

#[test]
fn memory_rules_hold_on_the_standin() {
    // How large a handle is shows only when more than it has is mapped.
    run_on_standin("gpu::memory::", 17, &["map-whole"]);
}

#[test]
fn kernel_rules_hold_on_the_standin() {
    run_on_standin("gpu::kernels::", 7, &[]);
}

#[test]
fn the_host_works_beside_a_kernel_on_the_standin() {
    run_on_standin("gpu::beside::", 2, &[]);
}

#[test]
fn ranks_on_one_gpu_meet_on_the_standin() {
    run_on_standin("gpu::collective::", 5, &[]);
}

#[test]
fn kernels_of_users_run_on_the_standin() {
    run_on_standin("gpu::users::", 9, &[]);
}

#[test]
fn graphs_are_replayed_on_the_standin() {
    run_on_standin("gpu::graphs::", 3, &[]);
}

#[test]
fn grids_leave_room_on_the_standin() {
    run_on_standin("gpu::blocks::", 1, &[]);
}

/// The closed kernel modules have no dma-buf.
#[test]
fn ranks_meet_without_dma_buf() {
    run_with(&[("FL_STANDIN_LACKS", "124")], "gpu::collective::all_to_all_over_relays", 1, &[]);
}

/// One GPU is enough for the tests that need two places.
#[test]
fn memory_rules_hold_with_one_gpu() {
    run_with(&[("FL_STANDIN_GPUS", "1")], "gpu::memory::", 17, &["map-whole"]);
}

#[test]
fn figures_are_taken_on_the_standin() {
    run_on_standin("gpu::figures::", 3, &[]);
}

#[cfg(feature = "rustacuda")]
#[test]
fn buffers_of_rustacuda_are_taken_on_the_standin() {
    run_on_standin("gpu::other_crate::", 2, &[]);
}
