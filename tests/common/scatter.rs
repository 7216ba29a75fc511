//! Seeded many-to-many puts by several blocks, to ranks of the own server, of others and to oneself, over real proxies: every
//! word of every message, every message once, every signal exact. tests/kernels/scatter.cu.

use fuselink::abi::FlStream;
use fuselink::comm::{Buffer, CommConfig, CommError, Communicator, UserLaunch};
use fuselink::hw::Gpu;
use fuselink::topo::Cluster;

use super::fused;
use super::kernels::{self, Params};
use super::{config, run_ranks};

const PUT_BYTES: u32 = 1024;
const SIGNALS: usize = 4;
const ITEMS: u64 = 150;

/// Mirrors `Scatter` of tests/kernels/scatter.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Scatter {
    stream: FlStream,
    items_ptr: u64,
    items: u64,
    due: u64,
    signals_due: [u64; SIGNALS],
    sums_ptr: u64,
    next: u64,
    sent: u64,
    taken: u64,
    wrong: u64,
}
impl Params for Scatter {}

pub fn put_config(cluster: &Cluster) -> CommConfig {
    CommConfig { put_bytes: PUT_BYTES, ..config(cluster, 1000, 8192) }
}

/// Destination and bytes of an item.
type Item = (u32, u32);

fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 16
}

/// What a rank sends in one launch: a tenth of it signals alone, half of the rest to one favourite.
fn items_of(seed: u64, launch: u64, rank: u32, ranks: u32) -> Vec<Item> {
    let mut state = seed << 40 | launch << 20 | u64::from(rank);
    let favourite = random(&mut state) as u32 % ranks;
    let mut item = || {
        let dst =
            if random(&mut state).is_multiple_of(2) { favourite } else { random(&mut state) as u32 % ranks };
        let words = if random(&mut state).is_multiple_of(10) {
            0
        } else {
            1 + random(&mut state) as u32 % (PUT_BYTES / 8)
        };
        (dst, 8 * words)
    };
    (0..ITEMS).map(|_| item()).collect()
}

fn buffer(comm: &Communicator, words: &[u64]) -> Result<Buffer, CommError> {
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
    fused::buffer(comm, &bytes)
}

/// What must have come here in the end: messages, the sum of item numbers by source, and what signals grow by.
fn due(seed: u64, launch: u64, own: u32, ranks: u32) -> (u64, Vec<u64>, [u64; SIGNALS]) {
    let (mut messages, mut sums, mut signals) = (0, vec![0; ranks as usize], [0; SIGNALS]);
    for src in 0..ranks {
        for (i, (dst, bytes)) in items_of(seed, launch, src, ranks).into_iter().enumerate() {
            if dst == own {
                let number = 1 + i as u64;
                signals[i % SIGNALS] += number;
                messages += u64::from(bytes > 0);
                sums[src as usize] += if bytes > 0 { number } else { 0 };
            }
        }
    }
    (messages, sums, signals)
}

/// One launch; how many sums are not as due. The kernel itself gives up over wrong words and signals.
fn scatter(
    comm: &mut Communicator,
    seed: u64,
    launch: u64,
    signals_due: &mut [u64; SIGNALS],
) -> Result<u64, CommError> {
    let (own, ranks) = (comm.rank().0, comm.cluster().ranks());
    let items = items_of(seed, launch, own, ranks);
    let words: Vec<_> = items.iter().map(|&(dst, bytes)| u64::from(dst) << 32 | u64::from(bytes)).collect();
    let (due, sums, more) = due(seed, launch, own, ranks);
    signals_due.iter_mut().zip(more).for_each(|(signal, more)| *signal += more);
    let list = buffer(comm, &words)?;
    let found = buffer(comm, &vec![0; ranks as usize])?;
    let params = Scatter {
        stream: comm.stream()?,
        items_ptr: list.dev_ptr(),
        items: ITEMS,
        due,
        signals_due: *signals_due,
        sums_ptr: found.dev_ptr(),
        next: 0,
        sent: 0,
        taken: 0,
        wrong: 0,
    };
    kernels::add(comm, kernels::scatter());
    let buffers = [&list, &found];
    let launch = UserLaunch { name: "test_scatter", blocks: 3, params: params.bytes(), buffers: &buffers };
    fused::run(comm, launch)?;
    let mut bytes = vec![0; 8 * ranks as usize];
    comm.gpu().read(found.dev_ptr(), &mut bytes)?;
    let found = bytes.chunks(8).map(|b| u64::from_ne_bytes(b.try_into().unwrap()));
    Ok(found.zip(sums).filter(|(found, due)| found != due).count() as u64)
}

/// Several launches, over the laps of all rings.
pub fn run(config: &CommConfig, seed: u64) {
    let wrong = run_ranks(config, |mut comm| -> Result<u64, CommError> {
        let mut signals = [0; SIGNALS];
        (0..3).try_fold(0, |wrong, launch| Ok(wrong + scatter(&mut comm, seed, launch, &mut signals)?))
    });
    for (rank, wrong) in wrong.into_iter().enumerate() {
        assert_eq!(
            wrong.unwrap_or_else(|e| panic!("seed {seed}, rank {rank}: {e}")),
            0,
            "seed {seed}, rank {rank}"
        );
    }
}
