//! Checked-in bindings are what bindgen makes of their headers: host/abi.rs of kernels/abi.h, host/cuda/sys.rs of CUDA's
//! cuda.h.
//!
//!     cargo test --features abi-drift --test abi_drift -- --ignored
//!
//! With FUSELINK_REGENERATE=1 in the environment they are written anew.

use std::path::PathBuf;
use std::process::Command;

/// A binding: where it comes from and where it is.
struct Binding {
    header: String,
    output: &'static str,
    builder: bindgen::Builder,
}

fn path(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(file)
}

fn abi() -> Binding {
    let builder = bindgen::Builder::default()
        .prepend_enum_name(false)
        .derive_default(true)
        .derive_partialeq(true)
        .use_core()
        .allowlist_type("Fl.*")
        .allowlist_var("FL_.*")
        .raw_line(
            "//! Layouts shared with kernels: bindgen output of `kernels/abi.h`. Do not edit; see CONTRIBUTING.md.
#![allow(missing_docs, non_camel_case_types, clippy::all)]
",
        );
    let header = path("kernels/abi.h").to_string_lossy().into_owned();
    Binding { header, output: "host/abi.rs", builder }
}

/// The driver calls that the CUDA backend makes itself.
const DRIVER_CALLS: &[&str] = &[
    "cuCtx(PushCurrent_v2|PopCurrent_v2|GetCurrent|GetDevice)",
    "cuDevice(CanAccessPeer|GetAttribute)",
    "cuDriverGetVersion",
    "cuFunc(Load|GetAttribute|GetParamInfo)",
    "cuGetError(Name|String)",
    "cuInit",
    "cuLaunchKernel",
    "cuMem(AddressFree|AddressReserve|Create|Release|Map|Unmap|SetAccess)",
    "cuMem(ExportTo|ImportFrom)ShareableHandle",
    "cuMemGet(AllocationGranularity|AllocationPropertiesFromHandle|HandleForAddressRange)",
    "cuMemHost(Register|Unregister|GetDevicePointer)(_v2)?",
    "cuMemcpy(HtoD|DtoH|DtoD)Async_v2",
    "cuMemsetD8Async",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuPointerGetAttribute",
    "cuStream(Create|IsCapturing|Query|Destroy_v2)",
    "cuThreadExchangeStreamCaptureMode",
];

fn driver() -> Binding {
    let mut builder = bindgen::Builder::default()
        .prepend_enum_name(false)
        .layout_tests(false)
        .generate_comments(false)
        .derive_default(true)
        .use_core()
        .allowlist_var("CU_MEMHOSTREGISTER_.*")
        .allowlist_type("CUstream_flags")
        .raw_line(
            "//! Driver calls that the CUDA backend makes itself: bindgen output of CUDA's `cuda.h`. Do not edit; see CONTRIBUTING.md.
#![allow(missing_docs, non_camel_case_types, non_snake_case, non_upper_case_globals, clippy::all, clippy::undocumented_unsafe_blocks)]
",
        );
    for calls in DRIVER_CALLS {
        builder = builder.allowlist_function(calls);
    }
    let cuda = std::env::var("CUDA_PATH").expect("CUDA_PATH names a CUDA toolkit: it holds include/cuda.h");
    Binding { header: format!("{cuda}/include/cuda.h"), output: "host/cuda/sys.rs", builder }
}

/// What is left when formatters have nothing more to say. The first line names bindgen's version.
fn tokens(source: &str) -> String {
    let body = source.split_once('\n').map_or(source, |(_, body)| body);
    let dense: String = body.chars().filter(|c| !c.is_whitespace()).collect();
    [",}", ",)", ",]"].iter().fold(dense, |text, comma| text.replace(comma, &comma[1..]))
}

fn write(output: &str, source: &str) {
    std::fs::write(path(output), source).unwrap();
    let formatted = Command::new("rustfmt").args(["--edition", "2024"]).arg(path(output)).status();
    assert!(formatted.is_ok_and(|s| s.success()), "{output} is written, but rustfmt failed on it");
}

fn check(binding: Binding) {
    let Binding { header, output, builder } = binding;
    let generated =
        builder.header(&header).generate().unwrap_or_else(|e| panic!("{header}: {e}")).to_string();
    if std::env::var_os("FUSELINK_REGENERATE").is_some_and(|v| v == "1") {
        write(output, &generated);
    }
    let checked_in = std::fs::read_to_string(path(output)).unwrap();
    let (expected, found) = (tokens(&generated), tokens(&checked_in));
    let at = expected.bytes().zip(found.bytes()).take_while(|(a, b)| a == b).count();
    let from = at.saturating_sub(60);
    let excerpt = |text: &str| text.chars().skip(from).take(160).collect::<String>();
    assert!(
        expected == found,
        "{output} is not what {header} says; run this test again with FUSELINK_REGENERATE=1\n  generated: {}\n checked in: {}",
        excerpt(&expected),
        excerpt(&found)
    );
}

#[test]
#[ignore = "needs libclang"]
fn abi_rs_is_generated_from_abi_h() {
    check(abi());
}

#[test]
#[ignore = "needs libclang and the headers of CUDA 13.0"]
fn driver_calls_are_generated_from_cuda_h() {
    check(driver());
}
