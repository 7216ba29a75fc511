//! The kernels of docs/tutorial/bulk.cu over real proxies: rank 0 sends tiles to the rank beside it and to those of the other
//! server, by the bulk copy engine's calls at both ends.

use fuselink::abi::FlStream;
use fuselink::comm::{CommConfig, CommError, Communicator, UserLaunch};

use super::fused::{TILE, buffer, ranks, read_floats, run};
use super::kernels::{self, Params};
use super::run_ranks;

/// Mirrors `BulkPut` of docs/tutorial/bulk.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct BulkPut {
    stream: FlStream,
    owner_of_ptr: u64,
    tiles: u32,
    first: u32,
}

/// Mirrors `BulkSums`.
#[repr(C)]
#[derive(Clone, Copy)]
struct BulkSums {
    stream: FlStream,
    sums_ptr: u64,
    source: u32,
    tiles: u32,
}

impl Params for BulkPut {}
impl Params for BulkSums {}

const TILES: u32 = 20;
const FIRST: u32 = 7;

fn owner_of(tile: u32) -> u32 {
    [1, 2, 3][tile as usize % 3]
}

/// What the values of a tile add up to.
fn sum(tile: u32) -> f32 {
    let values = TILE * TILE;
    (values * (FIRST + tile) + (0..values).map(|i| i % 7).sum::<u32>()) as f32
}

fn put(comm: &mut Communicator) -> Result<(), CommError> {
    let owners = buffer(comm, &ranks(&(0..TILES).map(owner_of).collect::<Vec<_>>()))?;
    let params =
        BulkPut { stream: comm.stream()?, owner_of_ptr: owners.dev_ptr(), tiles: TILES, first: FIRST };
    kernels::add(comm, kernels::bulk());
    let buffers = [&owners];
    let launch =
        UserLaunch { name: "tutorial_bulk_put", blocks: 2, params: params.bytes(), buffers: &buffers };
    run(comm, launch)
}

fn sums(comm: &mut Communicator) -> Result<Vec<f32>, CommError> {
    let sums = comm.alloc(4 * u64::from(TILES))?;
    let tiles = (0..TILES).filter(|&t| owner_of(t) == comm.rank().0).count() as u32;
    let params = BulkSums { stream: comm.stream()?, sums_ptr: sums.dev_ptr(), source: 0, tiles };
    kernels::add(comm, kernels::bulk());
    let buffers = [&sums];
    let launch =
        UserLaunch { name: "tutorial_bulk_sums", blocks: 2, params: params.bytes(), buffers: &buffers };
    run(comm, launch)?;
    Ok(read_floats(comm, &sums, TILES as usize))
}

/// Tiles, each added up by its owner.
pub fn tiles(config: &CommConfig) {
    let found = run_ranks(config, |mut comm| -> Result<Vec<f32>, CommError> {
        if comm.rank().0 == 0 { put(&mut comm).map(|()| Vec::new()) } else { sums(&mut comm) }
    });
    for (rank, found) in found.into_iter().enumerate().skip(1) {
        let due = (0..TILES).map(|t| if owner_of(t) == rank as u32 { sum(t) } else { 0.0 });
        assert_eq!(found.unwrap(), due.collect::<Vec<_>>(), "rank {rank}");
    }
}
