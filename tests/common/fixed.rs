//! Kernels that know one address, whichever NIC carries their messages: tests/kernels/fixed.cu over fixed windows.

use std::sync::{Barrier, Mutex};
use std::time::Duration;

use fuselink::comm::{
    Buffer, CommConfig, CommError, Communicator, FixedCounters, PreparedLaunch, UserLaunch,
};
use fuselink::doorbell::{Signal, SignalOp};
use fuselink::hw::{Gpu, LinkState};
use fuselink::topo::{Cluster, NicId, Rank, Server};

use super::kernels::{self, Params};
use super::{config, run_ranks};

pub const PUT_BYTES: u32 = 2 << 20;
pub const STATE_BYTES: u64 = 24;
pub const DATA_BYTES: u64 = 32 << 20;
pub const LEAVE_WITHIN: Duration = Duration::from_secs(60);

/// Mirrors `Fixed` of tests/kernels/fixed.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Fixed {
    data_ptr: u64,
    words: u64,
    state_ptr: u64,
    seed: u64,
}
impl Params for Fixed {}

pub fn cluster() -> Cluster {
    Cluster::uniform(2, Server::new(2, &[400_000; 2], 450_000))
}

pub fn fixed_config(put_bytes: u32) -> CommConfig {
    CommConfig { put_bytes, ..config(&cluster(), 200, 1 << 20) }
}

/// What a rank's kernels work on beside fixed windows.
pub struct Memory {
    pub write: Buffer,
    pub read: Buffer,
    pub data: Buffer,
}

/// Ranks 0 and 2 do something with each other; the others lend them their NICs.
pub fn run_pair<T: Send>(
    config: &CommConfig,
    work: impl Fn(&mut Communicator, Rank, &Memory) -> Result<T, CommError> + Sync,
) -> [T; 2] {
    let results = run_ranks(config, |mut comm| -> Result<Option<T>, CommError> {
        kernels::add(&comm, kernels::fixed());
        kernels::add(&comm, kernels::puts());
        let [write, read, data] = [STATE_BYTES, STATE_BYTES, DATA_BYTES].map(|bytes| comm.alloc(bytes));
        let memory = Memory { write: write?, read: read?, data: data? };
        let done = match comm.rank() {
            Rank(0) => Some(work(&mut comm, Rank(2), &memory)?),
            Rank(2) => Some(work(&mut comm, Rank(0), &memory)?),
            _ => None,
        };
        comm.bootstrap()?.barrier_within(LEAVE_WITHIN)?;
        Ok(done)
    });
    let done: Vec<T> = results.into_iter().filter_map(|result| result.unwrap()).collect();
    done.try_into().ok().expect("two ranks")
}

pub fn seed(src: Rank) -> u64 {
    1000 * (u64::from(src.0) + 1)
}

/// Bytes of message `n`.
pub fn length(n: u64) -> u64 {
    u64::from(PUT_BYTES) - 8 * n
}

/// A launch that stays the same, as a captured graph's does: what differs by message is in `state`.
pub struct Captured<'a> {
    launch: PreparedLaunch,
    state: &'a Buffer,
}

impl<'a> Captured<'a> {
    pub fn new(
        comm: &Communicator,
        name: &'static str,
        data_ptr: u64,
        src: Rank,
        state: &'a Buffer,
    ) -> Result<Self, CommError> {
        let params = Fixed { data_ptr, words: length(0) / 8, state_ptr: state.dev_ptr(), seed: seed(src) };
        let launch =
            comm.prepare(UserLaunch { name, blocks: 1, params: params.bytes(), buffers: &[state] })?;
        Ok(Self { launch, state })
    }

    pub fn launch(&self, comm: &mut Communicator) -> Result<(), CommError> {
        comm.launch_prepared(&self.launch)
    }

    pub fn word(&self, comm: &Communicator, n: u64) -> u64 {
        let mut word = [0; 8];
        comm.gpu().read(self.state.dev_ptr() + 8 * n, &mut word).unwrap();
        u64::from_ne_bytes(word)
    }

    /// Ends a kernel that holds.
    pub fn let_go(&self, comm: &Communicator) {
        comm.gpu().write(self.state.dev_ptr() + 16, &1u64.to_ne_bytes()).unwrap();
    }
}

pub fn add_one() -> Option<Signal> {
    Some(Signal { number: 3, op: SignalOp::Add, value: 1 })
}

/// Both ranks send through one address and receive at one address, by launches that never change, while a cable is pulled and
/// put back: every word of every message is there, and the windows were on memory beside several NICs.
pub fn one_address_at_both_ends(config: &CommConfig) {
    const MESSAGES: u64 = 24;
    let victim = NicId(0);
    // Where the ranks share a GPU and a process, the driver is one, too: nothing is mapped while a kernel of the other's runs.
    let (turn, both) = (Mutex::new(()), Barrier::new(2));
    let outcomes = run_pair(config, |comm, peer, memory| {
        let (mut tx, mut rx) = (comm.fixed_send(peer)?, comm.fixed_recv(peer)?);
        let addresses = (tx.dev_ptr(), rx.dev_ptr());
        let write = Captured::new(comm, "test_fixed_write", tx.dev_ptr(), comm.rank(), &memory.write)?;
        let read = Captured::new(comm, "test_fixed_read", rx.dev_ptr(), peer, &memory.read)?;
        let cables = comm.cables().expect("emulated NICs have cables");
        for n in 0..MESSAGES {
            if comm.rank() == Rank(0) && n % 8 == 4 {
                let state = if n % 16 == 4 { LinkState::Down } else { LinkState::Up };
                cables.set(victim, state);
            }
            both.wait();
            {
                let _turn = turn.lock().unwrap();
                tx.place(comm)?;
                write.launch(comm)?;
                tx.send(comm, length(n), add_one())?;
            }
            // What the other waits for in its turn has been sent.
            both.wait();
            let _turn = turn.lock().unwrap();
            assert_eq!(rx.accept(comm)?, length(n));
            read.launch(comm)?;
            rx.release(comm)?;
        }
        tx.flush(comm)?;
        both.wait();
        assert_eq!((tx.dev_ptr(), rx.dev_ptr()), addresses);
        assert_eq!((write.word(comm, 0), read.word(comm, 0)), (MESSAGES, MESSAGES));
        let own = comm.cluster().server_of(comm.rank());
        let nics = (0..2).map(|k| cables.counters(NicId(2 * own.0 + k)).tx_bytes);
        Ok((read.word(comm, 1), [tx.counters(), rx.counters()], nics.collect::<Vec<_>>()))
    });
    for (rank, (wrong, counters, _)) in outcomes.iter().enumerate() {
        assert_eq!(*wrong, 0, "wrong words at end {rank}");
        for FixedCounters { placed, remapped, .. } in *counters {
            assert!(placed == MESSAGES && remapped > 1 && remapped <= placed, "{counters:?}");
        }
    }
    let (_, [tx, rx], nics) = &outcomes[0];
    assert!(tx.switched > 0 && rx.switched > 0, "{tx:?} {rx:?}");
    assert!(nics.iter().all(|&tx_bytes| tx_bytes > u64::from(PUT_BYTES)), "{nics:?}");
}
