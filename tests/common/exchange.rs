//! Everybody sends messages to all ranks, itself among them, by puts, and checks each byte of what came: tests/kernels/exchange.cu.

use fuselink::abi::FlStream;
use fuselink::comm::{Buffer, CommConfig, CommError, Communicator, UserLaunch};
use fuselink::hw::Gpu;
use fuselink::payload::Pattern;
use fuselink::topo::{Cluster, Rank};

use super::kernels::{self, Params};
use super::{config, run_ranks};

pub const PUT_BYTES: u32 = 1024;

/// Mirrors `Exchange` of tests/kernels/exchange.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct ExchangeParams {
    stream: FlStream,
    send_ptr: u64,
    recv_ptr: u64,
    sent_ptr: u64,
    taken_ptr: u64,
    bytes: u64,
    messages: u64,
}
impl Params for ExchangeParams {}

pub fn put_config(cluster: &Cluster) -> CommConfig {
    CommConfig { put_bytes: PUT_BYTES, ..config(cluster, 1000, 8192) }
}

fn all(comm: &Communicator) -> impl Iterator<Item = Rank> + use<> {
    (0..comm.cluster().ranks()).map(Rank)
}

/// One exchange of a rank's. All are made before any runs, and go after all have run: while kernels wait for the host, none of
/// their GPU's memory is mapped or unmapped.
pub struct Exchange {
    send: Buffer,
    recv: Buffer,
    counters: Buffer,
    messages: u64,
    iteration: u64,
}

impl Exchange {
    /// Collective over the server.
    pub fn new(comm: &Communicator, messages: u64, iteration: u64) -> Result<Self, CommError> {
        let ranks = u64::from(comm.cluster().ranks());
        let cell = messages * u64::from(PUT_BYTES);
        let (send, recv) = (comm.alloc(ranks * cell)?, comm.alloc(ranks * cell)?);
        let counters = comm.alloc(16 * ranks)?;
        for dst in all(comm) {
            let mut data = vec![0; cell as usize];
            Pattern::new(1, iteration, comm.rank(), dst).fill(0, &mut data);
            comm.gpu().write(send.dev_ptr() + u64::from(dst.0) * cell, &data)?;
        }
        kernels::add(comm, kernels::exchange());
        Ok(Self { send, recv, counters, messages, iteration })
    }

    fn params(&self, comm: &Communicator) -> Result<ExchangeParams, CommError> {
        Ok(ExchangeParams {
            stream: comm.stream()?,
            send_ptr: self.send.dev_ptr(),
            recv_ptr: self.recv.dev_ptr(),
            sent_ptr: self.counters.dev_ptr(),
            taken_ptr: self.counters.dev_ptr() + 8 * u64::from(comm.cluster().ranks()),
            bytes: PUT_BYTES.into(),
            messages: self.messages,
        })
    }

    /// Queues its kernel, for so many messages to each rank.
    pub fn launch(&self, comm: &mut Communicator, messages: u64) -> Result<(), CommError> {
        let params = ExchangeParams { messages, ..self.params(comm)? };
        let buffers = [&self.send, &self.recv, &self.counters];
        let params = params.bytes();
        comm.launch(UserLaunch { name: "test_exchange", blocks: 1, params, buffers: &buffers })
    }

    /// Waits for it; wrong bytes in what came.
    pub fn finish(&self, comm: &mut Communicator) -> Result<u64, CommError> {
        comm.synchronize()?;
        self.mismatches(comm)
    }

    /// Runs it; wrong bytes in what came.
    pub fn run(&self, comm: &mut Communicator) -> Result<u64, CommError> {
        self.launch(comm, self.messages)?;
        self.finish(comm)
    }

    fn mismatches(&self, comm: &Communicator) -> Result<u64, CommError> {
        let bytes = u64::from(PUT_BYTES);
        let cell = self.messages * bytes;
        let mut wrong = 0;
        for src in all(comm) {
            let mut data = vec![0; cell as usize];
            comm.gpu().read(self.recv.dev_ptr() + u64::from(src.0) * cell, &mut data)?;
            for i in 0..self.messages {
                let (at, length) = (i * bytes, bytes - i % bytes);
                let message = &data[at as usize..(at + length) as usize];
                wrong += Pattern::new(1, self.iteration, src, comm.rank()).mismatches(at, message);
            }
        }
        Ok(wrong)
    }
}

/// An exchange of everybody's.
pub fn exchange(comm: &mut Communicator, messages: u64, iteration: u64) -> Result<u64, CommError> {
    let exchange = Exchange::new(comm, messages, iteration)?;
    comm.barrier()?;
    let wrong = exchange.run(comm)?;
    comm.barrier()?;
    Ok(wrong)
}

/// Several, over the laps of all rings.
pub fn run_exchange(config: &CommConfig, messages: u64) {
    let wrong = run_ranks(config, |mut comm| -> Result<u64, CommError> {
        (0..3).try_fold(0, |wrong, iteration| Ok(wrong + exchange(&mut comm, messages, iteration)?))
    });
    for (rank, wrong) in wrong.into_iter().enumerate() {
        assert_eq!(wrong.unwrap_or_else(|e| panic!("rank {rank}: {e}")), 0, "rank {rank}");
    }
}
