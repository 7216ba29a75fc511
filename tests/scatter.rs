//! Many-to-many puts on emulated clusters, where blocks run in any order.

mod common;

use common::scatter;
use fuselink::emu::BlockOrder;
use fuselink::topo::{Cluster, Server};

const GBIT_400: u64 = 400_000;

fn run(cluster: &Cluster, seed: u64, resident_blocks: u32) {
    let mut config = scatter::put_config(cluster);
    config.emulation.resident_blocks = resident_blocks;
    config.emulation.block_order = BlockOrder::Random { seed };
    scatter::run(&config, seed);
}

#[test]
fn anybody_to_anybody() {
    let cluster = Cluster::uniform(2, Server::new(2, &[GBIT_400; 2], 450_000));
    (0..4).for_each(|seed| run(&cluster, seed, 1 + seed as u32 % 3));
}

#[test]
fn within_one_server() {
    let cluster = Cluster::uniform(1, Server::new(4, &[GBIT_400; 2], 450_000));
    (10..14).for_each(|seed| run(&cluster, seed, 1 + seed as u32 % 3));
}

#[test]
fn servers_of_different_size() {
    let cluster =
        Cluster::new(vec![Server::new(3, &[GBIT_400; 2], 450_000), Server::new(1, &[GBIT_400], 450_000)]);
    (20..22).for_each(|seed| run(&cluster, seed, 2));
}
