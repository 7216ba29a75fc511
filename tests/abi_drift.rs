//! host/abi.rs is what bindgen makes of kernels/abi.h.
//!
//!     cargo test --features abi-drift --test abi_drift -- --ignored
//!
//! With FUSELINK_REGENERATE=1 in the environment it is written anew.

use std::path::PathBuf;
use std::process::Command;

const HEADER: &str = "kernels/abi.h";
const OUTPUT: &str = "host/abi.rs";
const PREFACE: &str =
    "//! Layouts shared with kernels: bindgen output of `kernels/abi.h`. Do not edit; see CONTRIBUTING.md.
#![allow(missing_docs, non_camel_case_types, clippy::all)]
";

fn path(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(file)
}

fn generate() -> String {
    bindgen::Builder::default()
        .header(path(HEADER).to_string_lossy())
        .prepend_enum_name(false)
        .derive_default(true)
        .derive_partialeq(true)
        .use_core()
        .allowlist_type("Fl.*")
        .allowlist_var("FL_.*")
        .raw_line(PREFACE)
        .generate()
        .unwrap_or_else(|e| panic!("{HEADER}: {e}"))
        .to_string()
}

/// What is left when formatters have nothing more to say. The first line names bindgen's version.
fn tokens(source: &str) -> String {
    let body = source.split_once('\n').map_or(source, |(_, body)| body);
    let dense: String = body.chars().filter(|c| !c.is_whitespace()).collect();
    [",}", ",)", ",]"].iter().fold(dense, |text, comma| text.replace(comma, &comma[1..]))
}

fn write(source: &str) {
    std::fs::write(path(OUTPUT), source).unwrap();
    let formatted = Command::new("rustfmt").args(["--edition", "2024"]).arg(path(OUTPUT)).status();
    assert!(formatted.is_ok_and(|s| s.success()), "{OUTPUT} is written, but rustfmt failed on it");
}

#[test]
#[ignore = "needs libclang"]
fn abi_rs_is_generated_from_abi_h() {
    let generated = generate();
    if std::env::var_os("FUSELINK_REGENERATE").is_some_and(|v| v == "1") {
        write(&generated);
    }
    let checked_in = std::fs::read_to_string(path(OUTPUT)).unwrap();
    let (expected, found) = (tokens(&generated), tokens(&checked_in));
    let at = expected.bytes().zip(found.bytes()).take_while(|(a, b)| a == b).count();
    let from = at.saturating_sub(60);
    let excerpt = |text: &str| text.chars().skip(from).take(160).collect::<String>();
    assert!(
        expected == found,
        "{OUTPUT} is not what {HEADER} says; run this test again with FUSELINK_REGENERATE=1\n  generated: {}\n checked in: {}",
        excerpt(&expected),
        excerpt(&found)
    );
}
