//! The kernels of docs/tutorial/fused.cu over real proxies: two servers of two GPUs, of which ranks 0 and 1 send, 2 and 3 take.

use fuselink::abi::FlStream;
use fuselink::comm::{Buffer, CommConfig, CommError, Communicator, UserLaunch};
use fuselink::hw::Gpu;
use fuselink::topo::{Cluster, Server};

use super::kernels::{self, Params};
use super::{config, run_ranks};

pub const TILE: u32 = 32;
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

impl Params for GemmPut {}
impl Params for RowSums {}
impl Params for DispatchTokens {}
impl Params for TakeAny {}

/// The emulated cluster.
pub fn put_config() -> CommConfig {
    let cluster = Cluster::uniform(2, Server::new(2, &[400_000; 2], 450_000));
    CommConfig { put_bytes: TILE_MESSAGE_BYTES, ..config(&cluster, 1000, 8192) }
}

pub fn buffer(comm: &Communicator, bytes: &[u8]) -> Result<Buffer, CommError> {
    let buffer = comm.alloc(bytes.len() as u64)?;
    comm.gpu().write(buffer.dev_ptr(), bytes)?;
    Ok(buffer)
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

pub fn ranks(ranks: &[u32]) -> Vec<u8> {
    ranks.iter().flat_map(|r| r.to_ne_bytes()).collect()
}

pub fn read_floats(comm: &Communicator, buffer: &Buffer, count: usize) -> Vec<f32> {
    let mut bytes = vec![0; 4 * count];
    comm.gpu().read(buffer.dev_ptr(), &mut bytes).unwrap();
    bytes.chunks(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect()
}

/// Launches between two barriers: while kernels wait for the host, nobody maps or unmaps memory of their GPU.
pub fn run(comm: &mut Communicator, launch: UserLaunch<'_>) -> Result<(), CommError> {
    comm.barrier()?;
    comm.launch(launch)?;
    comm.synchronize()?;
    comm.barrier()
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
    kernels::add(comm, kernels::fused());
    let buffers = [&a, &b, &owners];
    let launch =
        UserLaunch { name: "tutorial_gemm_put", blocks: 3, params: params.bytes(), buffers: &buffers };
    run(comm, launch)
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
    kernels::add(comm, kernels::fused());
    let buffers = [&sources, &row_sums, &spare];
    let launch =
        UserLaunch { name: "tutorial_row_sums", blocks: 2, params: params.bytes(), buffers: &buffers };
    run(comm, launch)?;
    Ok(read_floats(comm, &row_sums, 2 * ROWS as usize))
}

/// A product, read where it arrives.
pub fn product(config: &CommConfig) {
    let sums = run_ranks(config, |mut comm| -> Result<Vec<f32>, CommError> {
        let sums = if comm.rank().0 < 2 {
            send_product(&mut comm)?;
            Vec::new()
        } else {
            take_row_sums(&mut comm)?
        };
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
    kernels::add(comm, kernels::fused());
    let buffers = [&tokens, &expert_of];
    let launch =
        UserLaunch { name: "tutorial_dispatch", blocks: 2, params: params.bytes(), buffers: &buffers };
    run(comm, launch)
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
    kernels::add(comm, kernels::take_any());
    let buffers = [&data, &taken];
    let launch = UserLaunch { name: "test_take_any", blocks: 1, params: params.bytes(), buffers: &buffers };
    run(comm, launch)?;
    let mut bytes = vec![0; all as usize];
    comm.gpu().read(data.dev_ptr(), &mut bytes)?;
    let of = |source: u64, count: u64| {
        let first = source * u64::from(TOKENS) * TOKEN_BYTES;
        let part = &bytes[first as usize..(first + count * TOKEN_BYTES) as usize];
        part.chunks(TOKEN_BYTES as usize).map(<[u8]>::to_vec).collect()
    };
    Ok(vec![of(0, due(0)), of(1, due(1))])
}

/// Tokens, each sent to its expert.
pub fn tokens(config: &CommConfig) {
    let taken = run_ranks(config, |mut comm| -> Result<_, CommError> {
        let taken = if comm.rank().0 < 2 {
            dispatch(&mut comm)?;
            Vec::new()
        } else {
            take_tokens(&mut comm)?
        };
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
