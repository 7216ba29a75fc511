//! Who may use whom (docs/design.md), read from the sources.

use std::fmt;
use std::path::{Path, PathBuf};

/// A layer: itself, and the layers that it may use.
type Rule = (&'static str, &'static [&'static str]);

const RULES: &[Rule] = &[
    // Facts, layouts and words of memory.
    ("abi", &[]),
    ("words", &[]),
    ("topo", &[]),
    ("ring", &["abi", "words"]),
    ("doorbell", &["abi", "topo"]),
    ("payload", &["topo"]),
    // What a machine must do. The traits name parameter structs, for their sizes.
    ("hw", &["abi", "topo"]),
    // Its rules run the library's kernels, over the channel that they are made for.
    ("hw::contract", &["hw", "abi", "topo", "channel", "doorbell"]),
    // Decisions: pure.
    ("plan", &["abi", "topo"]),
    ("engine", &["abi", "doorbell", "hw", "topo"]),
    // The load table holds what the engine asks of it, in the engine's words (its states and views).
    ("load", &["engine", "hw", "topo", "words"]),
    // Where plans and engines meet.
    ("collective", &["abi", "doorbell", "engine", "hw", "plan", "topo"]),
    // Memory that processes share, and rings in it.
    ("shm", &["hw", "words"]),
    ("segment", &["abi", "doorbell", "engine", "hw", "load", "ring", "topo"]),
    ("signals", &["doorbell", "hw", "segment", "topo", "words"]),
    ("channel", &["abi", "doorbell", "engine", "hw", "ring", "topo", "words"]),
    ("credit", &["abi", "doorbell", "engine", "hw", "ring", "segment", "topo", "words"]),
    ("borrow", &["doorbell", "hw", "ring", "segment", "topo", "words"]),
    // Other servers' owners write their words about paths into the segment.
    // Its tests run over real rings in a segment.
    ("owner", &["borrow", "doorbell", "engine", "hw", "segment", "shm", "topo", "words"]),
    // Machines: none knows another, or who drives it.
    ("space", &["hw", "topo"]),
    ("emu", &["hw", "ring", "shm", "space", "topo", "words"]),
    // Experiments drive engines as the proxy does, with the same load tables in the same kind of memory; fault campaigns
    // drive the proxies themselves.
    (
        "sim",
        &[
            "abi",
            "borrow",
            "channel",
            "collective",
            "credit",
            "doorbell",
            "engine",
            "hw",
            "load",
            "owner",
            "plan",
            "proxy",
            "segment",
            "shm",
            "signals",
            "topo",
            "words",
        ],
    ),
    ("cuda", &["abi", "hw", "space", "topo", "words"]),
    ("verbs", &["hw", "topo", "words"]),
    // The thread that joins them, and the objects that users hold.
    (
        "proxy",
        &[
            "abi", "borrow", "channel", "credit", "doorbell", "engine", "hw", "load", "owner", "plan",
            "segment", "signals", "topo", "words",
        ],
    ),
    (
        "comm",
        &[
            "abi",
            "borrow",
            "channel",
            "collective",
            "credit",
            "cuda",
            "doorbell",
            "emu",
            "engine",
            "hw",
            "load",
            "owner",
            "plan",
            "proxy",
            "segment",
            "shm",
            "signals",
            "topo",
            "verbs",
            "words",
        ],
    ),
    ("error", &["comm", "hw", "plan", "topo"]),
    // The command line asks emu how fast this host can be one, and whether it was.
    ("bin", &["comm", "emu", "error", "hw", "payload", "plan", "sim", "topo"]),
];

/// No threads, no clock, no I/O, no unsafe.
const PURE: &[&str] = &["topo", "plan", "engine"];
const IMPURE: &[&str] = &[
    "unsafe",
    "thread",
    "Instant",
    "SystemTime",
    "fs",
    "net",
    "process",
    "env",
    "println",
    "eprintln",
    "rustix",
    "memmap2",
];

const DIALECT_FILES: &[&str] = &["order.cuh", "simt.h", "launch.cu"];
const ORDER_FILE: &str = "order.cuh";

/// A rule broken, and where.
struct Break {
    file: String,
    line: usize,
    why: String,
}

impl fmt::Display for Break {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.why)
    }
}

/// The layer of a file under host/.
fn layer_of(file: &str) -> &str {
    let module = file.trim_end_matches(".rs");
    match module.split_once('/') {
        _ if module.starts_with("hw/contract") => "hw::contract",
        Some((top, _)) => top,
        None => module,
    }
}

/// The lines of a source without its tests, comments and strings, from 1.
fn code(source: &str) -> Vec<(usize, String)> {
    let lines: Vec<_> = source.lines().collect();
    let is_tests = |i: usize| {
        lines[i].starts_with("#[cfg(")
            && lines[i].contains("test")
            && lines.get(i + 1).is_some_and(|l| l.ends_with('{'))
    };
    let end = (0..lines.len()).find(|&i| is_tests(i)).unwrap_or(lines.len());
    lines[..end].iter().enumerate().map(|(i, line)| (i + 1, without_comment_and_strings(line))).collect()
}

fn without_comment_and_strings(line: &str) -> String {
    let before = line.split("//").next().unwrap_or("");
    before.split('"').step_by(2).collect::<Vec<_>>().join("\"\"")
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Whether a word stands in a line by itself.
fn has_word(line: &str, word: &str) -> bool {
    line.split(|c| !is_word(c)).any(|w| w == word)
}

/// What follows each `root::` of a line, `root` being a word of its own: paths, those in braces one by one.
fn paths_from<'a>(line: &'a str, root: &str) -> Vec<&'a str> {
    let start = format!("{root}::");
    let mut paths = Vec::new();
    for (at, _) in line.match_indices(&start) {
        let joined = line[..at].chars().next_back().is_some_and(|c| is_word(c) || c == '$' || c == ':');
        let rest = &line[at + start.len()..];
        match rest.strip_prefix('{') {
            _ if joined => {}
            Some(group) => paths.extend(group.split([',', '}']).map(str::trim).filter(|p| !p.is_empty())),
            None => paths.push(rest),
        }
    }
    paths
}

fn layer_of_path(path: &str) -> &str {
    if path.starts_with("hw::contract") {
        return "hw::contract";
    }
    path.split(|c| !is_word(c)).next().unwrap_or("")
}

/// Breaks of the rules in one file, `file` being its path under host/.
fn check_host(file: &str, source: &str) -> Vec<Break> {
    let (layer, root) = match file.strip_prefix("bin/") {
        Some(_) => ("bin", "fuselink"),
        None => (layer_of(file), "crate"),
    };
    let broken = |line, why| Break { file: format!("host/{file}"), line, why };
    let Some((_, allowed)) = RULES.iter().find(|(name, _)| *name == layer) else {
        return vec![broken(1, format!("`{layer}` has no rule; add it to tests/layers.rs"))];
    };
    let mut breaks = Vec::new();
    for (n, line) in code(source) {
        for used in paths_from(&line, root).into_iter().map(layer_of_path) {
            let known = RULES.iter().any(|(name, _)| *name == used);
            if known && used != layer && !allowed.contains(&used) {
                breaks.push(broken(n, format!("`{layer}` must not use `{used}`")));
            }
        }
        let top = !file.trim_end_matches("/mod.rs").contains('/');
        if layer != "bin" && (line.contains("super::super::super::") || top && has_word(&line, "super")) {
            breaks.push(broken(n, "`super` leaves the layer; write `crate::`".into()));
        }
        if PURE.contains(&layer) {
            let impure = IMPURE.iter().filter(|word| has_word(&line, word));
            breaks
                .extend(impure.map(|word| broken(n, format!("`{layer}` is pure and must not use `{word}`"))));
        }
    }
    breaks
}

/// Breaks of the rules in a file of kernels/.
fn check_kernel(file: &str, source: &str) -> Vec<Break> {
    let mut breaks = Vec::new();
    for (n, line) in source.lines().enumerate() {
        let line = line.split("/*").next().unwrap_or("").split("//").next().unwrap_or("");
        let mut broken =
            |why: &str| breaks.push(Break { file: format!("kernels/{file}"), line: n + 1, why: why.into() });
        if line.contains("__CUDACC__") && !DIALECT_FILES.contains(&file) {
            broken("only order.cuh, simt.h and launch.cu tell CUDA from C++");
        }
        if file != ORDER_FILE && (has_word(line, "asm") || line.contains("__atomic")) {
            broken("only order.cuh holds PTX and atomics");
        }
    }
    breaks
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// All files under a folder, with their paths in it.
fn files(folder: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else {
                let name = path.strip_prefix(folder).unwrap().to_string_lossy().into_owned();
                found.push((name, std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    found.sort();
    found
}

fn assert_kept(breaks: Vec<Break>) {
    let list: Vec<_> = breaks.iter().map(|b| format!("  {b}\n")).collect();
    assert!(list.is_empty(), "{} rules of docs/design.md are broken:\n{}", list.len(), list.concat());
}

#[test]
fn layers_use_only_what_they_may() {
    let files = files(&root().join("host"));
    assert!(files.len() > 50, "the sources are not where this test looks");
    let library = files.iter().filter(|(file, _)| file.ends_with(".rs") && file != "lib.rs");
    assert_kept(library.flat_map(|(file, source)| check_host(file, source)).collect());
}

#[test]
fn kernels_keep_dialect_and_order_in_their_place() {
    let files = files(&root().join("kernels"));
    assert!(files.iter().any(|(file, _)| file == ORDER_FILE));
    assert_kept(files.iter().flat_map(|(file, source)| check_kernel(file, source)).collect());
}

#[test]
fn pure_layers_forbid_unsafe_code() {
    for layer in PURE {
        let source = std::fs::read_to_string(root().join(format!("host/{layer}/mod.rs"))).unwrap();
        assert!(
            source.contains("\n#![forbid(unsafe_code)]\n"),
            "host/{layer}/mod.rs must forbid unsafe code"
        );
    }
}

/// The rule table itself: bottom layers use nothing above them, and machines do not know each other.
#[test]
fn rules_have_no_cycle() {
    let mut done: Vec<&str> = Vec::new();
    while done.len() < RULES.len() {
        let ready = |(name, uses): &&Rule| !done.contains(name) && uses.iter().all(|u| done.contains(u));
        let next: Vec<_> = RULES.iter().filter(ready).map(|(name, _)| *name).collect();
        assert!(
            !next.is_empty(),
            "these use each other: {:?}",
            RULES.iter().filter(|r| !done.contains(&r.0))
        );
        done.extend(next);
    }
}

fn lines_of(breaks: &[Break]) -> Vec<usize> {
    breaks.iter().map(|b| b.line).collect()
}

#[test]
fn made_up_violations_are_caught() {
    let caught = |file, source: &str| lines_of(&check_host(file, source));
    assert_eq!(caught("plan/x.rs", "use crate::topo::Rank;\nuse crate::emu::Wire;\n"), [2]);
    assert_eq!(caught("emu/nic.rs", "fn f() { crate::engine::g() }"), [1]);
    assert_eq!(caught("emu/nic.rs", "use crate::{hw, comm};"), [1]);
    assert_eq!(caught("engine/mod.rs", "let now = Instant::now();"), [1]);
    assert_eq!(caught("engine/x.rs", "use std::{fs, fmt};"), [1]);
    assert_eq!(caught("topo/x.rs", "unsafe { *p }"), [1]);
    assert_eq!(caught("ring.rs", "use super::hw::Nic;"), [1]);
    assert_eq!(caught("owner.rs", "use crate::hw::contract::rig::Rig;"), [1]);
    assert_eq!(caught("bin/fuselink/plan.rs", "use fuselink::engine::Engine;"), [1]);
    assert_eq!(caught("brand_new.rs", ""), [1]);
    let kernel = |file, source| lines_of(&check_kernel(file, source));
    assert_eq!(kernel("put.cu", "#ifdef __CUDACC__\nasm volatile(\"\");\n__atomic_load_n(p, 0);"), [1, 2, 3]);
    assert_eq!(kernel("simt.h", "#ifdef __CUDACC__"), []);
}

#[test]
fn what_is_allowed_is_not_reported() {
    let source = "#![forbid(unsafe_code)]\n//! Like crate::emu, but unsafe.\nuse crate::topo::Rank;\nlet s = \"crate::emu\";\n\
                  #[cfg(test)]\nmod tests {\n use crate::emu::Wire;\n}\n";
    assert_kept(check_host("plan/x.rs", source));
    assert_kept(check_kernel("put.cu", "/* no asm here */ int x;"));
}
