//! Kernels of users: how they are handed in, and what they do.

use fuselink::comm::{CommConfig, CommError, GpuKind, UserKernel, UserKernels};
use fuselink::hw::contract::rig::{Rig, RigConfig, Stream};
use fuselink::hw::{Gpu, HwError, Kernel};
use fuselink::topo::{Cluster, Server};

use crate::collective::on_cuda;
use crate::common::exchange::{put_config, run_exchange};
use crate::common::{bulk, config, fixed, fused, kernels, run_ranks, scatter};
use crate::on_gpu;

pub fn puts_between_servers() {
    let _turn = on_gpu::turn();
    run_exchange(&on_cuda(put_config(&Cluster::uniform(2, Server::new(2, &[400_000; 2], 450_000)))), 60);
}

pub fn puts_over_one_nic() {
    let _turn = on_gpu::turn();
    run_exchange(&on_cuda(put_config(&Cluster::uniform(2, Server::new(2, &[400_000], 450_000)))), 25);
}

/// Two ranks of a server on GPUs of their own, where there are two.
fn on_two(config: CommConfig) -> CommConfig {
    let ordinal = (on_gpu::count() < 2).then_some(0);
    CommConfig { gpu: GpuKind::Cuda { ordinal }, ..config }
}

/// Nothing but scale-up, and to oneself.
pub fn puts_within_a_server() {
    let _turn = on_gpu::turn();
    run_exchange(&on_two(put_config(&Cluster::uniform(1, Server::new(2, &[400_000; 2], 450_000)))), 60);
    run_exchange(&on_cuda(put_config(&Cluster::uniform(1, Server::new(3, &[400_000; 2], 450_000)))), 60);
    run_exchange(&on_cuda(put_config(&Cluster::uniform(1, Server::new(1, &[400_000], 450_000)))), 60);
}

/// By several blocks, which write and read in place.
pub fn puts_of_anybody_to_anybody() {
    let _turn = on_gpu::turn();
    let clusters = [(2, 2), (1, 4)]
        .map(|(servers, gpus)| Cluster::uniform(servers, Server::new(gpus, &[400_000; 2], 450_000)));
    clusters.iter().for_each(|cluster| scatter::run(&on_cuda(scatter::put_config(cluster)), 1));
}

/// Fixed windows: remapped for each message, between launches of prepared kernels.
pub fn one_address_while_nics_change() {
    let _turn = on_gpu::turn();
    fixed::one_address_at_both_ends(&on_cuda(fixed::fixed_config(fixed::PUT_BYTES)));
}

pub fn a_product_is_read_where_it_arrives() {
    let _turn = on_gpu::turn();
    fused::product(&on_cuda(fused::put_config()));
}

pub fn every_token_reaches_its_expert() {
    let _turn = on_gpu::turn();
    fused::tokens(&on_cuda(fused::put_config()));
}

pub fn tiles_go_by_bulk_copies() {
    let _turn = on_gpu::turn();
    bulk::tiles(&on_cuda(fused::put_config()));
}

/// Hands in kernels in a job of one rank.
fn add(names: &[&'static str], image: Option<&[u8]>) -> Result<(), String> {
    let kernels: Vec<_> = names.iter().map(|&name| UserKernel { name, emulated: None }).collect();
    let alone = Cluster::uniform(1, Server::new(1, &[400_000], 450_000));
    let results = run_ranks(&on_cuda(config(&alone, 1000, 8192)), |comm| {
        // SAFETY: none of them is launched.
        unsafe { comm.add_kernels(UserKernels { kernels: &kernels, image }) }
            .map_err(|e: CommError| e.to_string())
    });
    results.into_iter().next().unwrap()
}

#[track_caller]
fn assert_says(result: Result<(), String>, words: &[&str]) {
    let error = result.unwrap_err();
    assert!(words.iter().all(|w| error.contains(w)) && !error.contains('\n'), "{error}");
}

/// One error each, which names the kernel or what is wrong with the image.
pub fn what_cannot_be_loaded_is_named() {
    let _turn = on_gpu::turn();
    let image = kernels::replay().image.unwrap();
    assert_eq!(add(&["test_replay_put"], Some(image)), Ok(()));
    assert_says(
        add(&["test_replay_put", "replay"], Some(image)),
        &["the kernel replay", "none of that name"],
    );
    assert_says(add(&["test_replay_put"], None), &["the image is missing"]);
    assert_says(add(&["test_replay_put"], Some(b"#!/bin/sh")), &["is no fatbin, cubin or PTX"]);
    assert_says(add(&["test_replay_put"], Some(&image[..image.len() / 2])), &["a fatbin of", "are there"]);
}

/// Loading would wait for a kernel that waits for the host.
pub fn nothing_is_loaded_beside_a_kernel() {
    let gpus = on_gpu::gpus();
    let mut rig = Rig::new(&gpus.gpu, RigConfig::default());
    rig.launch(Kernel::Put, 1, Stream { offset: 0, bytes: 64, message_bytes: 64 }).unwrap();
    let image = kernels::replay().image.unwrap();
    // SAFETY: it is not launched.
    let result = unsafe { gpus.gpu.add_kernels(image, &["test_replay_put"]) };
    assert!(matches!(result, Err(HwError::KernelsRun { .. })), "{result:?}");
    rig.abort();
    gpus.gpu.synchronize(fuselink::hw::contract::PATIENCE).unwrap();
    // SAFETY: as above.
    unsafe { gpus.gpu.add_kernels(image, &["test_replay_put"]) }.unwrap();
}
