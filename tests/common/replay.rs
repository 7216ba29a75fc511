//! A launch that is repeated with the same parameters, nothing written between: rank 0 puts, rank 1 takes, and
//! every message of every round is checked. How it is repeated is the caller's: launched again, or replayed as a graph.

use std::collections::BTreeSet;

use fuselink::abi::FlStream;
use fuselink::comm::{Buffer, CommConfig, CommError, Communicator, PreparedLaunch, UserLaunch};
use fuselink::hw::Gpu;
use fuselink::topo::{Cluster, Rank, Server};

use super::kernels::{self, Params};
use super::{config, run_ranks};

const WORDS: u64 = 40;
const BYTES: u64 = 8 * WORDS;
/// More than there are slots, and all rounds together more than any ring holds.
const MESSAGES: u64 = 23;
pub const ROUNDS: u64 = 40;
/// Blocks that put.
const BLOCKS: u32 = 3;

/// Mirrors `Replay` of tests/kernels/replay.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct ReplayParams {
    stream: FlStream,
    data_ptr: u64,
    bytes: u64,
    messages: u64,
    round: u64,
    ended: u64,
    peer: u32,
    reserved: u32,
}
impl Params for ReplayParams {}

/// Two ranks, on one server or on two.
pub fn replay_config(servers: u32) -> CommConfig {
    let cluster = Cluster::uniform(servers, Server::new(2 / servers, &[400_000], 450_000));
    CommConfig { put_bytes: BYTES as u32, ..config(&cluster, 1000, 8192) }
}

/// Word `w` of message `i` of a round: messages of odd number are copied from memory, the others made by the kernel.
fn word(round: u64, i: u64, w: u64) -> u64 {
    match w {
        0 => round,
        1 => i,
        _ if i.is_multiple_of(2) => round << 32 | i << 16 | w,
        _ => !w,
    }
}

/// What a rank launches, and its data: the message to send, or room for those of all rounds.
fn prepare(comm: &Communicator) -> Result<(PreparedLaunch, Buffer), CommError> {
    kernels::add(comm, kernels::replay());
    let puts = comm.rank() == Rank(0);
    let data = comm.alloc(if puts { BYTES } else { ROUNDS * MESSAGES * BYTES })?;
    if puts {
        let message: Vec<u8> = (0..WORDS).flat_map(|w| word(0, 1, w).to_ne_bytes()).collect();
        comm.gpu().write(data.dev_ptr(), &message)?;
    }
    let params = ReplayParams {
        stream: comm.stream()?,
        data_ptr: data.dev_ptr(),
        bytes: BYTES,
        messages: MESSAGES,
        round: 0,
        ended: 0,
        peer: 1 - comm.rank().0,
        reserved: 0,
    };
    let (name, blocks) = if puts { ("test_replay_put", BLOCKS) } else { ("test_replay_take", 1) };
    let launch = UserLaunch { name, blocks, params: params.bytes(), buffers: &[&data] };
    Ok((comm.prepare(launch)?, data))
}

/// Each message of each round came once, whole, and no round's before the last one's of the round before.
fn check(comm: &Communicator, data: &Buffer) -> Result<(), CommError> {
    let mut bytes = vec![0; (ROUNDS * MESSAGES * BYTES) as usize];
    comm.gpu().read(data.dev_ptr(), &mut bytes)?;
    for (round, taken) in bytes.chunks((MESSAGES * BYTES) as usize).enumerate() {
        let mut left: BTreeSet<u64> = (0..MESSAGES).collect();
        for message in taken.chunks(BYTES as usize) {
            let words: Vec<u64> =
                message.chunks(8).map(|w| u64::from_ne_bytes(w.try_into().unwrap())).collect();
            let i = words[1];
            assert!(left.remove(&i), "message {i} of round {round} came twice, or never was");
            let expected: Vec<u64> = (0..WORDS).map(|w| word(round as u64, i, w)).collect();
            assert_eq!(words, expected, "message {i} of round {round}");
        }
    }
    Ok(())
}

/// Runs all rounds; `repeat` launches what was prepared, again and again, on each rank.
pub fn run(
    config: &CommConfig,
    repeat: impl Fn(&mut Communicator, &PreparedLaunch) -> Result<(), CommError> + Sync,
) {
    let results = run_ranks(config, |mut comm| -> Result<(), CommError> {
        let (launch, data) = prepare(&comm)?;
        comm.barrier()?;
        repeat(&mut comm, &launch)?;
        comm.synchronize()?;
        comm.barrier()?;
        if comm.rank() == Rank(1) { check(&comm, &data) } else { Ok(()) }
    });
    for (rank, result) in results.into_iter().enumerate() {
        result.unwrap_or_else(|e| panic!("rank {rank}: {e}"));
    }
}
