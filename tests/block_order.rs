//! The all-to-all kernel with few resident blocks, which run in any order: it is one ordinary grid, so nothing says that all
//! of its blocks run at once, or which run first.

mod common;

use std::time::Duration;

use common::{config, mismatches, prepare, run, run_ranks};
use fuselink::comm::{CommError, EmuOptions};
use fuselink::emu::BlockOrder;
use fuselink::plan::{Demand, Method};
use fuselink::topo::{Cluster, Server};

const SLOT: u32 = 8192;

/// Two servers of two; cells of some messages each, inside of the servers too.
fn all_to_all(resident_blocks: u32, blocks: u32, block_order: BlockOrder) {
    let cluster = Cluster::uniform(2, Server::new(2, &[400_000; 2], 450_000));
    let cells = (0..16).map(|i| 30_000 + 7_001 * (i % 5)).collect();
    let demand = Demand::new(4, cells, 1).unwrap();
    let mut config = config(&cluster, 1000, SLOT);
    config.emulation = EmuOptions { resident_blocks, blocks, block_order, ..EmuOptions::at_scale(1000) };
    // A grid that cannot finish should say so soon.
    config.timeout = Duration::from_secs(10);
    for method in [Method::Static, Method::FuseLink, Method::SpreadOut] {
        let out = run(&config, &demand, method).unwrap_or_else(|e| panic!("{method}: {e}"));
        assert_eq!(out.mismatches, 0, "{method}");
    }
}

/// Copy engines instead of blocks for what stays in the server, on some ranks or on all.
#[test]
fn cells_that_stay_in_the_server_by_copy_engines() {
    let cluster = Cluster::new(vec![
        Server::new(3, &[400_000; 3], 450_000),
        Server::new(1, &[400_000], 450_000),
        Server::new(2, &[400_000; 2], 450_000),
    ]);
    // Long, empty and short cells.
    let cells = (0..36).map(|i| [70_000, 0, 1, 20_011][i % 4]).collect();
    let demand = Demand::new(6, cells, 1).unwrap();
    for by_copy_engines in [0b111111, 0b010101, 0b000100] {
        let wrong = run_ranks(&config(&cluster, 1000, SLOT), |mut comm| -> Result<u64, CommError> {
            let mut plan = comm.plan_demand(&demand, Method::Static)?;
            if by_copy_engines >> comm.rank().0 & 1 == 1 {
                plan.move_local_by_copy_engines();
            }
            let (send, recv) = (comm.alloc(plan.send_bytes())?, comm.alloc(plan.recv_bytes())?);
            let mut wrong = 0;
            for iteration in 0..3 {
                prepare(&comm, &plan, &demand, &send, &recv, iteration);
                comm.barrier()?;
                comm.all_to_all(&plan, &send, &recv)?;
                wrong += mismatches(&comm, &plan, &demand, &recv, iteration);
                comm.barrier()?;
            }
            Ok(wrong)
        });
        for wrong in wrong {
            assert_eq!(wrong.unwrap(), 0, "{by_copy_engines:b}");
        }
    }
}

#[test]
fn one_block_does_everything() {
    all_to_all(1, 1, BlockOrder::Ascending);
}

/// The others run only when the first has ended: it must do all of the work, whichever it is.
#[test]
fn one_block_at_a_time_from_the_first() {
    all_to_all(1, 4, BlockOrder::Ascending);
}

#[test]
fn one_block_at_a_time_from_the_last() {
    all_to_all(1, 4, BlockOrder::Descending);
}

#[test]
fn few_of_many_blocks_in_any_order() {
    for seed in 0..4 {
        all_to_all(2, 7, BlockOrder::Random { seed });
    }
}
