//! The kernels of docs/tutorial/fused.cu, on emulated clusters over real proxies.

mod common;

use common::{config, run_ranks};
use fuselink::abi::FlStream;
use fuselink::comm::{Buffer, CommConfig, CommError, Communicator, UserLaunch};
use fuselink::emu::gpu::Block;
use fuselink::hw::Gpu;
use fuselink::topo::{Cluster, Server};

unsafe extern "C" {
    fn tutorial_gemm_put(block: *const Block, params_dev_ptr: u64);
    fn tutorial_row_sums(block: *const Block, params_dev_ptr: u64);
    fn tutorial_dispatch(block: *const Block, params_dev_ptr: u64);
    fn tutorial_bulk_put(block: *const Block, params_dev_ptr: u64);
    fn tutorial_bulk_sums(block: *const Block, params_dev_ptr: u64);
    fn test_take_any(block: *const Block, params_dev_ptr: u64);
}

const TILE: u32 = 32;
const TILE_MESSAGE_BYTES: u32 = 64 + 4 * TILE * TILE;

/// Mirrors `GemmPut` of docs/tutorial/fused.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct GemmPut {
    stream: FlStream,
    a_ptr: u64,
    b_ptr: u64,
    rows: u32,
    inner: u32,
    columns: u32,
    owners: u32,
    owners_ptr: u64,
}

/// Mirrors `RowSums`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RowSums {
    stream: FlStream,
    sources_ptr: u64,
    sources: u32,
    tiles: u32,
    row_sums_ptr: u64,
    rows: u32,
    reserved: u32,
}

/// Mirrors `DispatchTokens`.
#[repr(C)]
#[derive(Clone, Copy)]
struct DispatchTokens {
    stream: FlStream,
    tokens_ptr: u64,
    token_bytes: u64,
    expert_of_ptr: u64,
    tokens: u32,
    reserved: u32,
}

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

/// Mirrors `TakeAny` of tests/kernels/take_any.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct TakeAny {
    stream: FlStream,
    data_ptr: u64,
    half: u64,
    taken_ptr: u64,
    bytes: u64,
    items: u64,
    signal: u32,
    reserved: u32,
}

/// Parameter structs: words and pairs of 32-bit fields, no padding.
trait Params: Copy {
    fn bytes(&self) -> &[u8] {
        // SAFETY: every byte of the structs above belongs to a field.
        unsafe { std::slice::from_raw_parts((&raw const *self).cast(), size_of::<Self>()) }
    }
}
impl Params for GemmPut {}
impl Params for RowSums {}
impl Params for DispatchTokens {}
impl Params for BulkPut {}
impl Params for BulkSums {}
impl Params for TakeAny {}

/// Two servers of two GPUs: ranks 0 and 1 send, 2 and 3 take.
fn put_config() -> CommConfig {
    let cluster = Cluster::uniform(2, Server::new(2, &[400_000; 2], 450_000));
    CommConfig { put_bytes: TILE_MESSAGE_BYTES, ..config(&cluster, 1000, 8192) }
}

fn buffer(comm: &Communicator, bytes: &[u8]) -> Result<Buffer, CommError> {
    let buffer = comm.alloc(bytes.len() as u64)?;
    comm.gpu().write(buffer.dev_ptr(), bytes)?;
    Ok(buffer)
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

fn ranks(ranks: &[u32]) -> Vec<u8> {
    ranks.iter().flat_map(|r| r.to_ne_bytes()).collect()
}

fn read_floats(comm: &Communicator, buffer: &Buffer, count: usize) -> Vec<f32> {
    let mut bytes = vec![0; 4 * count];
    comm.gpu().read(buffer.dev_ptr(), &mut bytes).unwrap();
    bytes.chunks(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect()
}

const ROWS: u32 = 4 * TILE;
const INNER: u32 = 20;
const COLUMNS: u32 = 3 * TILE;

/// Small whole numbers, so that sums of products are exact in any order.
fn a_of(rank: u32) -> Vec<f32> {
    (0..ROWS * INNER).map(|i| ((i * 7 + rank * 3) % 11) as f32).collect()
}

fn b() -> Vec<f32> {
    (0..INNER * COLUMNS).map(|i| (i * 5 % 13) as f32).collect()
}

fn row_sum(a: &[f32], row: u32) -> f32 {
    let b = b();
    let products = |k: u32| (0..COLUMNS).map(move |c| (k, c));
    (0..INNER)
        .flat_map(products)
        .map(|(k, c)| a[(row * INNER + k) as usize] * b[(k * COLUMNS + c) as usize])
        .sum()
}

fn send_product(comm: &mut Communicator) -> Result<(), CommError> {
    let a = buffer(comm, &floats(&a_of(comm.rank().0)))?;
    let b = buffer(comm, &floats(&b()))?;
    let owners = buffer(comm, &ranks(&[2, 3]))?;
    let params = GemmPut {
        stream: comm.stream()?,
        a_ptr: a.dev_ptr(),
        b_ptr: b.dev_ptr(),
        rows: ROWS,
        inner: INNER,
        columns: COLUMNS,
        owners: 2,
        owners_ptr: owners.dev_ptr(),
    };
    // SAFETY: docs/tutorial/fused.cu defines it for a GemmPut.
    unsafe { comm.add_kernel("tutorial_gemm_put", tutorial_gemm_put) };
    let buffers = [&a, &b, &owners];
    comm.launch(UserLaunch {
        name: "tutorial_gemm_put",
        blocks: 3,
        params: params.bytes(),
        buffers: &buffers,
    })?;
    comm.synchronize()
}

/// Rows of this rank's half of C, by source.
fn take_row_sums(comm: &mut Communicator) -> Result<Vec<f32>, CommError> {
    let sources = buffer(comm, &ranks(&[0, 1]))?;
    let row_sums = comm.alloc(2 * 4 * u64::from(ROWS))?;
    // The two collective allocations of the senders' that this rank does not need.
    let spare = comm.alloc(1)?;
    let params = RowSums {
        stream: comm.stream()?,
        sources_ptr: sources.dev_ptr(),
        sources: 2,
        tiles: ROWS / 2 / TILE * (COLUMNS / TILE),
        row_sums_ptr: row_sums.dev_ptr(),
        rows: ROWS,
        reserved: 0,
    };
    // SAFETY: docs/tutorial/fused.cu defines it for a RowSums.
    unsafe { comm.add_kernel("tutorial_row_sums", tutorial_row_sums) };
    let buffers = [&sources, &row_sums, &spare];
    comm.launch(UserLaunch {
        name: "tutorial_row_sums",
        blocks: 2,
        params: params.bytes(),
        buffers: &buffers,
    })?;
    comm.synchronize()?;
    Ok(read_floats(comm, &row_sums, 2 * ROWS as usize))
}

#[test]
fn a_product_is_read_where_it_arrives() {
    let sums = run_ranks(&put_config(), |mut comm| -> Result<Vec<f32>, CommError> {
        let sums = if comm.rank().0 < 2 {
            send_product(&mut comm)?;
            Vec::new()
        } else {
            take_row_sums(&mut comm)?
        };
        comm.barrier()?;
        Ok(sums)
    });
    for (rank, sums) in sums.into_iter().enumerate().skip(2) {
        let sums = sums.unwrap();
        let half = (rank as u32 - 2) * ROWS / 2;
        for source in 0..2 {
            let a = a_of(source);
            for row in 0..ROWS {
                let owned = row >= half && row < half + ROWS / 2;
                let expected = if owned { row_sum(&a, row) } else { 0.0 };
                let found = sums[(source * ROWS + row) as usize];
                assert_eq!(found, expected, "rank {rank}, source {source}, row {row}");
            }
        }
    }
}

const TOKENS: u32 = 300;
const TOKEN_BYTES: u64 = 200;

/// Token `t` of a rank: its rank and number, over and over.
fn token(rank: u32, t: u32) -> Vec<u8> {
    (0..TOKEN_BYTES).map(|i| (u64::from(rank) * 89 + u64::from(t) * 31 + i * 7) as u8).collect()
}

fn expert_of(rank: u32, t: u32) -> u32 {
    2 + (t * t + rank) % 3 % 2
}

fn dispatch(comm: &mut Communicator) -> Result<(), CommError> {
    let own = comm.rank().0;
    let tokens = buffer(comm, &(0..TOKENS).flat_map(|t| token(own, t)).collect::<Vec<_>>())?;
    let expert_of = buffer(comm, &ranks(&(0..TOKENS).map(|t| expert_of(own, t)).collect::<Vec<_>>()))?;
    let params = DispatchTokens {
        stream: comm.stream()?,
        tokens_ptr: tokens.dev_ptr(),
        token_bytes: TOKEN_BYTES,
        expert_of_ptr: expert_of.dev_ptr(),
        tokens: TOKENS,
        reserved: 0,
    };
    // SAFETY: docs/tutorial/fused.cu defines it for a DispatchTokens.
    unsafe { comm.add_kernel("tutorial_dispatch", tutorial_dispatch) };
    let buffers = [&tokens, &expert_of];
    comm.launch(UserLaunch {
        name: "tutorial_dispatch",
        blocks: 2,
        params: params.bytes(),
        buffers: &buffers,
    })?;
    comm.synchronize()
}

/// What this rank's experts got, by source.
fn take_tokens(comm: &mut Communicator) -> Result<Vec<Vec<Vec<u8>>>, CommError> {
    let own = comm.rank();
    let all = u64::from(2 * TOKENS) * TOKEN_BYTES;
    let (data, taken) = (comm.alloc(all)?, comm.alloc(16)?);
    let due = |source| (0..TOKENS).filter(|&t| expert_of(source, t) == own.0).count() as u64;
    let params = TakeAny {
        stream: comm.stream()?,
        data_ptr: data.dev_ptr(),
        half: all / 2,
        taken_ptr: taken.dev_ptr(),
        bytes: TOKEN_BYTES,
        items: due(0) + due(1),
        signal: 1,
        reserved: 0,
    };
    // SAFETY: tests/kernels/take_any.cu defines it for a TakeAny.
    unsafe { comm.add_kernel("test_take_any", test_take_any) };
    let buffers = [&data, &taken];
    comm.launch(UserLaunch { name: "test_take_any", blocks: 1, params: params.bytes(), buffers: &buffers })?;
    comm.synchronize()?;
    let mut bytes = vec![0; all as usize];
    comm.gpu().read(data.dev_ptr(), &mut bytes)?;
    let of = |source: u64, count: u64| {
        let first = source * u64::from(TOKENS) * TOKEN_BYTES;
        let part = &bytes[first as usize..(first + count * TOKEN_BYTES) as usize];
        part.chunks(TOKEN_BYTES as usize).map(<[u8]>::to_vec).collect()
    };
    Ok(vec![of(0, due(0)), of(1, due(1))])
}

#[test]
fn every_token_reaches_its_expert() {
    let taken = run_ranks(&put_config(), |mut comm| -> Result<_, CommError> {
        let taken = if comm.rank().0 < 2 {
            dispatch(&mut comm)?;
            Vec::new()
        } else {
            take_tokens(&mut comm)?
        };
        comm.barrier()?;
        Ok(taken)
    });
    for (rank, taken) in taken.into_iter().enumerate().skip(2) {
        for (source, mut found) in taken.unwrap().into_iter().enumerate() {
            let source = source as u32;
            let own = |&t: &u32| expert_of(source, t) == rank as u32;
            let mut expected: Vec<_> = (0..TOKENS).filter(own).map(|t| token(source, t)).collect();
            // Warps send in any order.
            found.sort();
            expected.sort();
            assert_eq!(found, expected, "rank {rank}, source {source}");
        }
    }
}

const TILES: u32 = 20;

fn bulk_owner_of(tile: u32) -> u32 {
    [1, 2, 3][tile as usize % 3]
}

/// Rank 0 sends tiles, by the bulk copy engine's calls, to the rank beside it and to those of the other server.
fn bulk_put(comm: &mut Communicator, first: u32) -> Result<(), CommError> {
    let owners = buffer(comm, &ranks(&(0..TILES).map(bulk_owner_of).collect::<Vec<_>>()))?;
    let params = BulkPut { stream: comm.stream()?, owner_of_ptr: owners.dev_ptr(), tiles: TILES, first };
    // SAFETY: docs/tutorial/bulk.cu defines it for a BulkPut.
    unsafe { comm.add_kernel("tutorial_bulk_put", tutorial_bulk_put) };
    let buffers = [&owners];
    comm.launch(UserLaunch {
        name: "tutorial_bulk_put",
        blocks: 2,
        params: params.bytes(),
        buffers: &buffers,
    })?;
    comm.synchronize()
}

fn bulk_sums(comm: &mut Communicator) -> Result<Vec<f32>, CommError> {
    let sums = comm.alloc(4 * u64::from(TILES))?;
    let tiles = (0..TILES).filter(|&t| bulk_owner_of(t) == comm.rank().0).count() as u32;
    let params = BulkSums { stream: comm.stream()?, sums_ptr: sums.dev_ptr(), source: 0, tiles };
    // SAFETY: docs/tutorial/bulk.cu defines it for a BulkSums.
    unsafe { comm.add_kernel("tutorial_bulk_sums", tutorial_bulk_sums) };
    let buffers = [&sums];
    comm.launch(UserLaunch {
        name: "tutorial_bulk_sums",
        blocks: 2,
        params: params.bytes(),
        buffers: &buffers,
    })?;
    comm.synchronize()?;
    Ok(read_floats(comm, &sums, TILES as usize))
}

#[test]
fn tiles_go_by_bulk_copies() {
    let first = 7;
    let sums = run_ranks(&put_config(), |mut comm| -> Result<Vec<f32>, CommError> {
        let sums = if comm.rank().0 == 0 {
            bulk_put(&mut comm, first)?;
            Vec::new()
        } else {
            bulk_sums(&mut comm)?
        };
        comm.barrier()?;
        Ok(sums)
    });
    for (rank, sums) in sums.into_iter().enumerate().skip(1) {
        let values = TILE * TILE;
        let sum = |tile: u32| (values * (first + tile) + (0..values).map(|i| i % 7).sum::<u32>()) as f32;
        let due = (0..TILES).map(|t| if bulk_owner_of(t) == rank as u32 { sum(t) } else { 0.0 });
        assert_eq!(sums.unwrap(), due.collect::<Vec<_>>(), "rank {rank}");
    }
}
