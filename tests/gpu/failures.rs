//! Machines that cannot do it: one clear error each.

use fuselink::cuda::{CudaGpu, CudaGpuConfig};
use fuselink::hw::{Chunk, Gpu};
use fuselink::topo::GpuIdx;

use crate::common::kernels;
use crate::standin;

/// Opens GPU 0, and a chunk that GPU 1 exports, and loads a kernel; prints the first error.
#[test]
#[ignore = "run by the tests below, on the stand-in"]
fn attempt() {
    let ordinal = std::env::var("FL_ORDINAL").map_or(0, |n| n.parse().unwrap());
    let attempt = || {
        let gpu = CudaGpu::new(CudaGpuConfig { idx: GpuIdx(0), ordinal })?;
        let peer = CudaGpu::new(CudaGpuConfig { idx: GpuIdx(1), ordinal: 1 })?;
        let chunk = peer.create_chunk(1)?;
        gpu.import_chunk(chunk.export()?, peer.idx(), chunk.bytes())?;
        let image = kernels::replay().image.expect("an image");
        // SAFETY: it is not launched.
        unsafe { gpu.add_kernels(image, &["test_replay_put"]) }
    };
    match attempt() {
        Ok(()) => println!("no error"),
        Err(e) => println!("error: {e}"),
    }
}

#[track_caller]
fn error_with(variables: &[(&str, &str)]) -> String {
    let mut command = standin::command(&["failures::attempt"]);
    let output = standin::output(command.envs(variables.iter().copied()));
    let said = standin::said(&output);
    assert!(output.status.success(), "{said}");
    let error = said.lines().find_map(|l| l.split_once("error: "));
    error.unwrap_or_else(|| panic!("no error:\n{said}")).1.to_owned()
}

#[track_caller]
fn assert_says(variables: &[(&str, &str)], words: &[&str]) {
    let error = error_with(variables);
    assert!(words.iter().all(|w| error.contains(w)), "{error}");
}

#[test]
fn no_driver() {
    let nowhere = tempfile::tempdir().unwrap();
    std::fs::write(nowhere.path().join("libcuda.so.1"), "").unwrap();
    let nowhere = nowhere.path().to_str().unwrap();
    assert_says(
        &[("LD_LIBRARY_PATH", nowhere)],
        &["libcuda.so.1", "install the NVIDIA driver", "FUSELINK_GPU=emu"],
    );
}

#[test]
fn no_gpu() {
    assert_says(&[("FL_STANDIN_GPUS", "0")], &["no CUDA device 0 (0 are visible)", "nvidia-smi"]);
}

#[test]
fn no_such_gpu() {
    assert_says(&[("FL_ORDINAL", "7")], &["no CUDA device 7 (2 are visible)", "CUDA_VISIBLE_DEVICES"]);
}

#[test]
fn a_driver_that_is_too_old() {
    assert_says(&[("FL_STANDIN_DRIVER", "12030")], &["CUDA 12.3", "update the NVIDIA driver"]);
}

#[test]
fn a_gpu_without_virtual_memory_management() {
    assert_says(&[("FL_STANDIN_LACKS", "102")], &["device 0 has no virtual memory management"]);
}

#[test]
fn a_gpu_whose_memory_cannot_be_shared() {
    assert_says(
        &[("FL_STANDIN_LACKS", "103")],
        &["device 0 has no memory that can be handed to other processes"],
    );
}

#[test]
fn no_peer_access() {
    assert_says(
        &[("FL_STANDIN_PEERS", "0")],
        &["GPU 0 cannot reach the memory of CUDA device 1", "peer access"],
    );
}

#[test]
fn a_kernel_with_other_parameters() {
    assert_says(
        &[("FL_STANDIN_PARAMETERS", "2")],
        &["cannot be given the kernel test_replay_put", "its one parameter must be a pointer"],
    );
}

#[test]
fn a_kernel_for_smaller_blocks() {
    assert_says(
        &[("FL_STANDIN_BLOCK_THREADS", "256")],
        &["the kernel test_replay_put", "at most 256 threads, and 512 are launched"],
    );
}
