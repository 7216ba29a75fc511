//! Builds kernels/*.cu: as C++ for the emulated GPU, always, and the same way the kernels of tests and of the tutorial,
//! which use the device header as a user's do; by nvcc for real GPUs when the feature `cuda` is on, as images that the
//! library loads and as objects that C++ programs link.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

const KERNELS: [&str; 3] = ["kernels/all_to_all.cu", "kernels/put.cu", "kernels/launch.cu"];
/// Those that hold `__global__` functions.
const IMAGES: [&str; 2] = ["all_to_all", "put"];
/// Machine code for the GPUs that the library is meant for, and PTX from which the driver makes it for later ones.
const TARGETS: [&str; 3] = [
    "arch=compute_80,code=sm_80",
    "arch=compute_90,code=sm_90",
    "arch=compute_100,code=[sm_100,compute_100]",
];
const USER_KERNELS: [&str; 2] = ["tests/kernels", "docs/tutorial"];

fn main() -> Result<()> {
    for folder in ["kernels"].iter().chain(&USER_KERNELS) {
        println!("cargo::rerun-if-changed={folder}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").context("cargo sets OUT_DIR")?);
    let include = device_headers(&out)?;
    build_emulated_kernels().and_then(|()| build_user_kernels(&out, &include)).context(
        "cannot build the kernels for the emulated GPU; install a C++17 compiler (Debian: apt-get install g++) or name one in CXX",
    )?;
    if env::var_os("CARGO_FEATURE_CUDA").is_some() {
        build_driver_table()
            .context("cannot build host/cuda/libcuda.c; the feature `cuda` needs a C compiler")?;
        build_gpu_kernels(&out, &include)
            .context("cannot build the kernels for real GPUs (feature `cuda`)")?;
    }
    Ok(())
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

/// The driver's calls, found when the program starts.
fn build_driver_table() -> Result<()> {
    println!("cargo::rerun-if-changed=host/cuda/libcuda.c");
    cc::Build::new()
        .file("host/cuda/libcuda.c")
        .warnings_into_errors(true)
        .try_compile("fuselink_libcuda")?;
    println!("cargo::rustc-link-lib=dl");
    Ok(())
}

/// The library's kernels as images and as objects; those of tests and tutorial as images, each named for its source.
fn build_gpu_kernels(out: &Path, include: &Path) -> Result<()> {
    let nvcc = Nvcc::find(include)?;
    println!("cargo::rustc-env=FUSELINK_NVCC_MAJOR={}", nvcc.major_version()?);
    for image in IMAGES {
        nvcc.fatbin(Path::new(&format!("kernels/{image}.cu")), out)?;
    }
    let user_images = out.join("user");
    fs::create_dir_all(&user_images)?;
    for folder in USER_KERNELS {
        files(folder, &["cu"])?.iter().try_for_each(|source| nvcc.fatbin(source, &user_images))?;
    }
    let mut library: Vec<&OsStr> = vec!["-lib".as_ref(), "-rdc=true".as_ref(), "-Xcompiler=-fPIC".as_ref()];
    library.extend(KERNELS.iter().map(OsStr::new));
    nvcc.run(&library, &out.join("libfuselink_device.a"))
}

struct Nvcc {
    path: PathBuf,
    include: PathBuf,
}

impl Nvcc {
    /// From CUDA_HOME or CUDA_PATH (a toolkit, or the root of NVIDIA's wheels), PATH, or where installers put it.
    fn find(include: &Path) -> Result<Self> {
        let named = ["CUDA_HOME", "CUDA_PATH"];
        named.iter().for_each(|name| println!("cargo::rerun-if-env-changed={name}"));
        let roots = named.iter().filter_map(env::var_os).map(|root| Path::new(&root).join("bin"));
        let path = env::var_os("PATH").unwrap_or_default();
        let dirs = roots.chain(env::split_paths(&path)).chain([PathBuf::from("/usr/local/cuda/bin")]);
        let found = dirs.map(|dir| dir.join("nvcc")).find(|nvcc| nvcc.is_file());
        let path = found.context("there is no nvcc in CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda; install CUDA 12.8 or newer and set CUDA_PATH, or see docs/cuda.md for NVIDIA's Python wheels")?;
        Ok(Self { path, include: include.to_owned() })
    }

    fn major_version(&self) -> Result<u32> {
        let output = Command::new(&self.path).arg("--version").output().context("nvcc does not run")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let release = text.split("release ").nth(1).and_then(|rest| rest.split('.').next());
        release.and_then(|major| major.parse().ok()).with_context(|| format!("nvcc --version says {text:?}"))
    }

    fn fatbin(&self, source: &Path, folder: &Path) -> Result<()> {
        let name = source.file_stem().context("a kernel's source has a name")?;
        self.run(&["-fatbin".as_ref(), source.as_os_str()], &folder.join(name).with_extension("fatbin"))
    }

    fn run(&self, arguments: &[&OsStr], output: &Path) -> Result<()> {
        let mut command = Command::new(&self.path);
        command.args(["-std=c++17", "-O3", "-Werror", "all-warnings", "-I", "kernels", "--threads", "0"]);
        command.arg("-I").arg(&self.include);
        command.args(TARGETS.iter().flat_map(|target| ["-gencode", target]));
        let done = command.args(arguments).arg("-o").arg(output).output().context("nvcc does not run")?;
        if !done.status.success() {
            bail!("{command:?} failed:\n{}", String::from_utf8_lossy(&done.stderr));
        }
        ensure!(output.is_file(), "{command:?} left no {}", output.display());
        Ok(())
    }
}
