//! All-to-all and puts of several ranks on one GPU, over emulated NICs. Ranks are threads: their kernels run side by side.

use std::num::NonZeroU16;

use fuselink::comm::{CommConfig, GpuKind};
use fuselink::plan::{Demand, Method};
use fuselink::topo::{Cluster, Server};

use crate::common;
use crate::on_gpu;

const SLOT: u32 = 16_384;

/// All ranks on the first GPU.
pub fn on_cuda(config: CommConfig) -> CommConfig {
    CommConfig { gpu: GpuKind::Cuda { ordinal: Some(0) }, ..config }
}

fn config(cluster: &Cluster) -> CommConfig {
    on_cuda(common::config(cluster, 1000, SLOT))
}

/// Every pair, the diagonal too, some of them empty, with remainders.
fn demand(ranks: u32) -> Demand {
    let cells = (0..ranks * ranks).map(|i| u64::from(i * 7919 % 5) * 23_457).collect();
    Demand::new(ranks, cells, 1).unwrap()
}

fn run(cluster: &Cluster, method: Method) {
    run_with(&config(cluster), method);
}

fn run_with(config: &CommConfig, method: Method) {
    let _turn = on_gpu::turn();
    let cluster = &config.cluster;
    let demand = demand(cluster.ranks());
    let out = common::run(config, &demand, method).unwrap_or_else(|e| panic!("{method}: {e}"));
    assert_eq!(out.mismatches, 0, "{method}");
    let sent: u64 = out.nics.iter().map(|n| n.tx_bytes).sum();
    let received: u64 = out.nics.iter().map(|n| n.rx_bytes).sum();
    assert_eq!(sent, received, "{method}");
    assert!(cluster.server_count() == 1 || sent > 0, "{method}: nothing went over NICs");
}

fn servers(count: u32, gpus: u32) -> Cluster {
    Cluster::uniform(count, Server::new(gpus, &vec![400_000; gpus as usize], 450_000))
}

pub fn all_to_all_by_a_plan() {
    run(&servers(2, 2), Method::Birkhoff);
}

pub fn all_to_all_by_idle_nics() {
    run(&servers(2, 2), Method::FuseLink);
}

pub fn all_to_all_over_relays() {
    run(&servers(2, 2), Method::Spray);
}

pub fn all_to_all_inside_a_server() {
    run(&servers(1, 3), Method::Static);
}

/// One block makes progress, and so do some of more than there is room for.
pub fn all_to_all_by_any_number_of_blocks() {
    for blocks in [1, 7, 300] {
        let config = CommConfig { blocks: NonZeroU16::new(blocks), ..config(&servers(2, 2)) };
        run_with(&config, Method::Birkhoff);
    }
}
