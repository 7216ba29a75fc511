//! Builds kernels/*.cu as C++ for the emulated GPU, and the same way the kernels of tests and of the tutorial, which use
//! the device header as a user's do.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

const KERNELS: [&str; 3] = ["kernels/all_to_all.cu", "kernels/put.cu", "kernels/launch.cu"];
const USER_KERNELS: [&str; 2] = ["tests/kernels", "docs/tutorial"];

fn main() -> Result<()> {
    for folder in ["kernels"].iter().chain(&USER_KERNELS) {
        println!("cargo::rerun-if-changed={folder}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").context("cargo sets OUT_DIR")?);
    let include = device_headers(&out)?;
    build_emulated_kernels().and_then(|()| build_user_kernels(&out, &include)).context(
        "cannot build the kernels for the emulated GPU; install a C++17 compiler (Debian: apt-get install g++) or name one in CXX",
    )
}

/// Puts the headers where `#include <fuselink/device.cuh>` finds them, and tells the build scripts of packages that
/// depend on this one where that is (`DEP_FUSELINK_INCLUDE`).
fn device_headers(out: &Path) -> Result<PathBuf> {
    let include = out.join("include");
    let folder = include.join("fuselink");
    fs::create_dir_all(&folder)?;
    for header in files("kernels", &["cuh", "h"])? {
        fs::copy(&header, folder.join(header.file_name().context("a header has a name")?))?;
    }
    println!("cargo::metadata=include={}", include.display());
    Ok(include)
}

fn files(folder: &str, extensions: &[&str]) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {folder}"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| extensions.iter().any(|&known| e == known)) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// The sources are CUDA's dialect only where simt.h and order.cuh say so; for a C++ compiler they are C++.
fn cpp() -> cc::Build {
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").flag("-xc++").opt_level(3);
    build.flag("-Wno-unused-function").warnings_into_errors(true);
    build
}

fn build_emulated_kernels() -> Result<()> {
    cpp().include("kernels").files(KERNELS).try_compile("fuselink_kernels")?;
    Ok(())
}

/// An archive of its own, which only tests link.
fn build_user_kernels(out: &Path, include: &Path) -> Result<()> {
    let mut build = cpp();
    for folder in USER_KERNELS {
        build.files(files(folder, &["cu"])?);
    }
    build.include(include).cargo_metadata(false).try_compile("fuselink_user_kernels")?;
    println!("cargo::rustc-link-arg-tests={}", out.join("libfuselink_user_kernels.a").display());
    Ok(())
}
