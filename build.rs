//! Builds kernels/*.cu as C++ for the emulated GPU.

use anyhow::{Context, Result};

const KERNELS: [&str; 3] = ["kernels/all_to_all.cu", "kernels/put.cu", "kernels/launch.cu"];

fn main() -> Result<()> {
    println!("cargo::rerun-if-changed=kernels");
    build_emulated_kernels().context(
        "cannot build the kernels for the emulated GPU; install a C++17 compiler (Debian: apt-get install g++) or name one in CXX",
    )
}

/// The sources are CUDA's dialect only where simt.h and order.cuh say so; for a C++ compiler they are C++.
fn build_emulated_kernels() -> Result<()> {
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").include("kernels").flag("-xc++").opt_level(3);
    build.flag("-Wno-unused-function").warnings_into_errors(true).files(KERNELS);
    build.try_compile("fuselink_kernels")?;
    Ok(())
}
