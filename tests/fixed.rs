//! Fixed windows on emulated clusters: kernels that know one address, whichever NIC carries their messages.

mod common;

use std::time::Duration;

use common::{config, run_ranks};
use fuselink::abi::FlStream;
use fuselink::comm::{
    Buffer, CommConfig, CommError, Communicator, FixedCounters, FixedError, PreparedLaunch, UserKernel,
    UserKernels, UserLaunch,
};
use fuselink::doorbell::{Signal, SignalOp};
use fuselink::emu::EmuKernel;
use fuselink::emu::gpu::Block;
use fuselink::hw::{Gpu, LinkState};
use fuselink::topo::{Cluster, NicId, Rank, Server};

unsafe extern "C" {
    fn test_fixed_write(block: *const Block, params_dev_ptr: u64);
    fn test_fixed_read(block: *const Block, params_dev_ptr: u64);
    fn test_fixed_hold(block: *const Block, params_dev_ptr: u64);
    fn test_put(block: *const Block, params_dev_ptr: u64);
    fn test_take(block: *const Block, params_dev_ptr: u64);
    fn test_wait(block: *const Block, params_dev_ptr: u64);
}

const PUT_BYTES: u32 = 2 << 20;
const STATE_BYTES: u64 = 24;
const DATA_BYTES: u64 = 32 << 20;
const LEAVE_WITHIN: Duration = Duration::from_secs(60);

/// Mirrors `Fixed` of tests/kernels/fixed.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Fixed {
    data_ptr: u64,
    words: u64,
    state_ptr: u64,
    seed: u64,
}

/// Mirrors `PutTest` of tests/kernels/puts.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct PutTest {
    stream: FlStream,
    data_ptr: u64,
    bytes: u64,
    items: u64,
    peer: u32,
    scope: u32,
    next: u64,
    done: u64,
}

const KERNELS: [(&str, EmuKernel); 6] = [
    ("test_fixed_write", test_fixed_write),
    ("test_fixed_read", test_fixed_read),
    ("test_fixed_hold", test_fixed_hold),
    ("test_put", test_put),
    ("test_take", test_take),
    ("test_wait", test_wait),
];

fn cluster() -> Cluster {
    Cluster::uniform(2, Server::new(2, &[400_000; 2], 450_000))
}

fn fixed_config(put_bytes: u32) -> CommConfig {
    CommConfig { put_bytes, ..config(&cluster(), 200, 1 << 20) }
}

/// What a rank's kernels work on beside fixed windows.
struct Memory {
    write: Buffer,
    read: Buffer,
    data: Buffer,
}

/// Ranks 0 and 2 do something with each other; the others lend them their NICs.
fn run_pair<T: Send>(
    config: &CommConfig,
    work: impl Fn(&mut Communicator, Rank, &Memory) -> Result<T, CommError> + Sync,
) -> [T; 2] {
    let results = run_ranks(config, |mut comm| -> Result<Option<T>, CommError> {
        let kernels = KERNELS.map(|(name, entry)| UserKernel { name, emulated: Some(entry) });
        // SAFETY: tests/kernels define them for the structs above.
        unsafe { comm.add_kernels(UserKernels { kernels: &kernels, image: None }) }?;
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

fn seed(src: Rank) -> u64 {
    1000 * (u64::from(src.0) + 1)
}

/// Bytes of message `n`.
fn length(n: u64) -> u64 {
    u64::from(PUT_BYTES) - 8 * n
}

/// A launch that stays the same, as a captured graph's does: what differs by message is in `state`.
struct Captured<'a> {
    launch: PreparedLaunch,
    state: &'a Buffer,
}

impl<'a> Captured<'a> {
    fn new(
        comm: &Communicator,
        name: &'static str,
        data_ptr: u64,
        src: Rank,
        state: &'a Buffer,
    ) -> Result<Self, CommError> {
        let params = Fixed { data_ptr, words: length(0) / 8, state_ptr: state.dev_ptr(), seed: seed(src) };
        // SAFETY: words only.
        let params = unsafe { std::mem::transmute::<Fixed, [u8; size_of::<Fixed>()]>(params) };
        let launch = comm.prepare(UserLaunch { name, blocks: 1, params: &params, buffers: &[state] })?;
        Ok(Self { launch, state })
    }

    fn launch(&self, comm: &mut Communicator) -> Result<(), CommError> {
        comm.launch_prepared(&self.launch)
    }

    fn word(&self, comm: &Communicator, n: u64) -> u64 {
        let mut word = [0; 8];
        comm.gpu().read(self.state.dev_ptr() + 8 * n, &mut word).unwrap();
        u64::from_ne_bytes(word)
    }

    /// Ends a kernel that holds.
    fn let_go(&self, comm: &Communicator) {
        comm.gpu().write(self.state.dev_ptr() + 16, &1u64.to_ne_bytes()).unwrap();
    }
}

fn launch_puts(
    comm: &mut Communicator,
    name: &'static str,
    peer: Rank,
    (items, bytes): (u64, u64),
    data: &Buffer,
) -> Result<(), CommError> {
    let (stream, data_ptr) = (comm.stream()?, data.dev_ptr());
    let params = PutTest { stream, data_ptr, bytes, items, peer: peer.0, scope: 2, next: 0, done: 0 };
    // SAFETY: no padding: words, and pairs of 32-bit fields.
    let params: [u8; size_of::<PutTest>()] = unsafe { std::mem::transmute(params) };
    comm.launch(UserLaunch { name, blocks: 1, params: &params, buffers: &[data] })
}

fn add_one() -> Option<Signal> {
    Some(Signal { number: 3, op: SignalOp::Add, value: 1 })
}

/// Both ranks send through one address and receive at one address, by launches that never change, while a cable is pulled and
/// put back: every word of every message is there, and the windows were on memory beside several NICs.
#[test]
fn one_address_at_both_ends_while_nics_change() {
    const MESSAGES: u64 = 24;
    let victim = NicId(0);
    let outcomes = run_pair(&fixed_config(PUT_BYTES), |comm, peer, memory| {
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
            tx.place(comm)?;
            write.launch(comm)?;
            tx.send(comm, length(n), add_one())?;
            assert_eq!(rx.accept(comm)?, length(n));
            read.launch(comm)?;
            rx.release(comm)?;
        }
        tx.flush(comm)?;
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

/// Either end may be kernels that use the table: they notice nothing.
#[test]
fn tables_and_fixed_windows_at_the_two_ends() {
    const MESSAGES: u64 = 9;
    let bytes = u64::from(PUT_BYTES) - 24;
    let item = |n: u64| (0..bytes).map(|i| (i * 131 + i / 251 + 7 * n) as u8).collect::<Vec<_>>();
    run_pair(&fixed_config(PUT_BYTES), |comm, peer, memory| {
        let at = |n| memory.data.dev_ptr() + n * bytes;
        if comm.rank() == Rank(0) {
            (0..MESSAGES).for_each(|n| comm.gpu().write(at(n), &item(n)).unwrap());
            launch_puts(comm, "test_put", peer, (MESSAGES, bytes), &memory.data)?;
            comm.synchronize()?;
            launch_puts(comm, "test_take", peer, (MESSAGES, bytes), &memory.data)?;
            comm.synchronize()?;
            for n in 0..MESSAGES {
                let mut came = vec![0; bytes as usize];
                comm.gpu().read(at(n), &mut came).unwrap();
                assert!(came == item(n + 100), "message {n} that was taken");
            }
        } else {
            // The first messages have been shown to kernels when the window is made.
            launch_puts(comm, "test_wait", peer, (2, 8), &memory.data)?;
            comm.synchronize()?;
            let mut rx = comm.fixed_recv(peer)?;
            for n in 0..MESSAGES {
                let mut came = vec![0; rx.accept(comm)? as usize];
                comm.gpu().read(rx.dev_ptr(), &mut came).unwrap();
                assert!(came == item(n), "message {n} that was accepted");
                rx.release(comm)?;
            }
            let mut tx = comm.fixed_send(peer)?;
            for n in 0..MESSAGES {
                tx.place(comm)?;
                comm.gpu().write(tx.dev_ptr(), &item(n + 100)).unwrap();
                tx.send(comm, bytes, None)?;
            }
            tx.flush(comm)?;
        }
        Ok(())
    });
}

fn refusal<T>(result: Result<T, CommError>) -> FixedError {
    match result {
        Err(CommError::Fixed(e)) => e,
        Err(e) => panic!("{e}"),
        Ok(_) => panic!("it was not refused"),
    }
}

/// Steps in the wrong order, and what no slot or signal can hold: the windows and the communicator live on.
#[test]
fn what_a_window_refuses_leaves_it_as_it_was() {
    run_pair(&fixed_config(PUT_BYTES), |comm, peer, _| {
        assert_eq!(
            refusal(comm.fixed_send(Rank(comm.rank().0 + 1))),
            FixedError::SameServer { peer: Rank(comm.rank().0 + 1) }
        );
        assert_eq!(refusal(comm.fixed_recv(Rank(99))), FixedError::SameServer { peer: Rank(99) });
        let (mut tx, mut rx) = (comm.fixed_send(peer)?, comm.fixed_recv(peer)?);
        assert_eq!(refusal(comm.fixed_send(peer)), FixedError::Open { peer });
        assert_eq!(refusal(comm.fixed_recv(peer)), FixedError::Open { peer });
        assert_eq!(refusal(tx.send(comm, 8, None)), FixedError::NotPlaced { dst: peer });
        assert_eq!(refusal(rx.release(comm)), FixedError::NotAccepted { src: peer });
        for n in 0..40u8 {
            tx.place(comm)?;
            tx.place(comm)?;
            comm.gpu().write(tx.dev_ptr(), &[n; 8]).unwrap();
            let most = tx.bytes();
            assert_eq!(refusal(tx.send(comm, most + 1, None)), FixedError::TooLong { bytes: most + 1, most });
            let signal = Signal { number: u32::MAX, op: SignalOp::Set, value: 1 };
            assert!(matches!(refusal(tx.send(comm, 8, Some(signal))), FixedError::NoSuchSignal { .. }));
            // A signal alone is no message to accept.
            tx.send(comm, 0, add_one())?;
            tx.place(comm)?;
            comm.gpu().write(tx.dev_ptr(), &[n; 8]).unwrap();
            tx.send(comm, 8, None)?;
            assert_eq!(refusal(tx.send(comm, 8, None)), FixedError::NotPlaced { dst: peer });
            assert_eq!(rx.accept(comm)?, 8);
            assert_eq!(refusal(rx.accept(comm)), FixedError::NotReleased { src: peer });
            let mut came = [0; 8];
            comm.gpu().read(rx.dev_ptr(), &mut came).unwrap();
            assert_eq!(came, [n; 8]);
            // Windows that are dropped in the midst leave the stream to the next, and no slot is lost with them: there are
            // fewer than this.
            if n % 2 == 0 {
                tx.place(comm)?;
                drop((tx, rx));
                (tx, rx) = (comm.fixed_send(peer)?, comm.fixed_recv(peer)?);
            } else {
                rx.release(comm)?;
            }
        }
        tx.flush(comm)
    });
}

/// A slot that shares its chunk with others cannot be mapped alone.
#[test]
fn slots_that_are_no_whole_chunks_are_refused_with_a_size_that_would_do() {
    for (put_bytes, better) in [(4096, "2097152"), (3 << 20, "4194304")] {
        let errors = run_pair(&fixed_config(put_bytes), |comm, peer, _| {
            assert_eq!(refusal(comm.fixed_recv(peer)), FixedError::PartialChunks { put_bytes });
            Ok(refusal(comm.fixed_send(peer)).to_string())
        });
        assert!(errors.iter().all(|e| e.contains(better)), "{errors:?}");
    }
}

/// A stream that kernels have used stays theirs, at the end that they used.
#[test]
fn a_stream_that_kernels_use_is_refused() {
    run_pair(&fixed_config(PUT_BYTES), |comm, peer, memory| {
        if comm.rank() == Rank(0) {
            launch_puts(comm, "test_put", peer, (2, 64), &memory.data)?;
            // Each item with a signal after it.
            assert_eq!(refusal(comm.fixed_send(peer)), FixedError::KernelsUse { peer, messages: 4 });
        } else {
            launch_puts(comm, "test_take", peer, (2, 64), &memory.data)?;
            assert_eq!(refusal(comm.fixed_recv(peer)), FixedError::KernelsUse { peer, messages: 2 });
            comm.fixed_send(peer)?;
        }
        Ok(())
    });
}

/// While a kernel runs nothing is mapped, sent or given back, and that ends with a reason. Then all goes on.
#[test]
fn a_kernel_that_does_not_end_leaves_the_mapping_alone() {
    let mut config = fixed_config(PUT_BYTES);
    config.timeout = Duration::from_secs(3);
    run_pair(&config, |comm, peer, memory| {
        let (mut tx, mut rx) = (comm.fixed_send(peer)?, comm.fixed_recv(peer)?);
        let hold = Captured::new(comm, "test_fixed_hold", tx.dev_ptr(), peer, &memory.write)?;
        let [mut before, mut after] = [[0; 8]; 2];
        tx.place(comm)?;
        comm.gpu().write(tx.dev_ptr(), &[1; 8]).unwrap();
        tx.send(comm, 8, None)?;
        assert_eq!(rx.accept(comm)?, 8);
        comm.gpu().read(rx.dev_ptr(), &mut before).unwrap();
        if comm.rank() == Rank(0) {
            let counters = (tx.counters(), rx.counters());
            hold.launch(comm)?;
            let waited = Duration::from_secs(3);
            assert_eq!(refusal(tx.place(comm)), FixedError::KernelsRun { waited });
            assert_eq!(refusal(rx.release(comm)), FixedError::KernelsRun { waited });
            assert_eq!((tx.counters(), rx.counters()), counters);
            comm.gpu().read(tx.dev_ptr(), &mut after).unwrap();
            assert_eq!(after, [1; 8], "the sending window still shows the message before");
            comm.gpu().read(rx.dev_ptr(), &mut after).unwrap();
            assert_eq!(after, before, "the receiving window still shows its message");
            hold.let_go(comm);
        }
        rx.release(comm)?;
        tx.place(comm)?;
        comm.gpu().write(tx.dev_ptr(), &[2; 8]).unwrap();
        tx.send(comm, 8, None)?;
        // The other rank may have waited for two time-outs of this one.
        let again = |result| matches!(refusal(result), FixedError::NoMessage { .. });
        let bytes = loop {
            match rx.accept(comm) {
                Ok(bytes) => break bytes,
                failed => assert!(again(failed)),
            }
        };
        assert_eq!(bytes, 8);
        rx.release(comm)?;
        tx.flush(comm)
    });
}
