//! The order of kernels and host under the thread sanitizer: the C++ build of the device header, as threads, with payload in
//! plain memory. And the check of the check: without any one of the header's fences it must report a race.
//!
//!     cargo test --test tsan -- --ignored

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

const FENCE: &str = "fl_fence_sys();";
/// Puts by the host, and within a server.
const PROGRAMS: [&str; 2] = ["puts", "local"];
/// Files with fences of the protocol, how many each has, and the program that needs them all.
const FENCES: [(&str, usize, &str); 4] = [
    ("doorbell.cuh", 1, "puts"),
    ("relay.cuh", 2, "puts"),
    ("device.cuh", 3, "puts"),
    ("local.cuh", 4, "local"),
];
/// The exit status that the sanitizer is told to use.
const RACE: i32 = 66;

fn root(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(file)
}

/// A folder from which `<fuselink/device.cuh>` is included, each header changed by `change`.
fn headers(change: impl Fn(&str, String) -> String) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("fuselink")).unwrap();
    for entry in fs::read_dir(root("kernels")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let text = change(name, fs::read_to_string(&path).unwrap());
        fs::write(folder.path().join("fuselink").join(name), text).unwrap();
    }
    folder
}

fn compile(folder: &TempDir, name: &str) -> PathBuf {
    let (program, source) = (folder.path().join(name), root("tests/tsan").join(format!("{name}.cpp")));
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "g++".into());
    let output = Command::new(compiler)
        .args(["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", "-I"])
        .args([folder.path(), &source, Path::new("-o"), &program])
        .output()
        .expect("a C++ compiler with the thread sanitizer (Debian: apt-get install g++)");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

fn run(program: &Path, threads: u32, depth: u32) -> Output {
    let options = format!("halt_on_error=1:exitcode={RACE}");
    let arguments = [threads.to_string(), depth.to_string()];
    Command::new(program).args(arguments).env("TSAN_OPTIONS", options).output().unwrap()
}

#[test]
#[ignore = "needs a C++ compiler with the thread sanitizer"]
fn the_protocol_has_no_race() {
    let folder = headers(|_, text| text);
    for program in PROGRAMS.map(|name| compile(&folder, name)) {
        for (threads, depth) in [(1, 1), (1, 4), (2, 1), (2, 4), (3, 2), (3, 16)] {
            let output = run(&program, threads, depth);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
    }
}

/// `text` without its `n`-th fence.
fn without_fence(text: &str, n: usize) -> String {
    let (at, _) = text.match_indices(FENCE).nth(n).unwrap();
    format!("{}{}", &text[..at], &text[at + FENCE.len()..])
}

#[test]
#[ignore = "needs a C++ compiler with the thread sanitizer"]
fn without_any_one_fence_a_race_is_reported() {
    for (file, fences, program) in FENCES {
        let text = fs::read_to_string(root("kernels").join(file)).unwrap();
        assert_eq!(text.matches(FENCE).count(), fences, "{file} has other fences than this test knows");
        for n in 0..fences {
            let folder = headers(|name, text| if name == file { without_fence(&text, n) } else { text });
            let program = compile(&folder, program);
            // One thread and one slot: each message follows from the one before, with no other fence to help out.
            let output = run(&program, 1, 1);
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(RACE), "{file} without its fence {n}: {said}");
            assert!(said.contains("data race"), "{file} without its fence {n}: {said}");
        }
    }
}
