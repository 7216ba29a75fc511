//! Fixed windows on emulated clusters: kernels that know one address, whichever NIC carries their messages.

mod common;

use std::time::Duration;

use common::fixed::{Captured, PUT_BYTES, add_one, fixed_config, one_address_at_both_ends, run_pair};
use fuselink::abi::FlStream;
use fuselink::comm::{Buffer, CommError, Communicator, FixedError, UserLaunch};
use fuselink::doorbell::{Signal, SignalOp};
use fuselink::hw::Gpu;
use fuselink::topo::Rank;

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

#[test]
fn one_address_while_nics_change() {
    one_address_at_both_ends(&fixed_config(PUT_BYTES));
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
