//! All-to-all(v): counts are exchanged, every rank makes the same plan, kernels walk its table.

use std::sync::Arc;
use std::time::Duration;

use super::memory::{Image, Mapped, words_of};
use super::{Buffer, CommError, Communicator};
use crate::abi::{FL_CLASS_PLAN, FL_LOCAL_BY_HOST, FL_NO_NIC, FL_NO_TRANSFER, FlAllToAll, FlPeerFlags};
use crate::channel::DeviceLayout;
use crate::doorbell::Class;
use crate::engine::call::{Call, CallId, Direction, Incoming, Run, Turn};
use crate::hw::{Gpu, Kernel, Launch, Nanos};
use crate::plan::{self, Demand, Method, PlanTable, Schedule};
use crate::proxy::{LocalCell, LocalCells};
use crate::topo::{NicIdx, Rank, ServerId};

/// A planned all-to-all(v), ready to be run any number of times.
///
/// Cells are packed: in the send buffer by destination rank, in the receive buffer by source rank.
pub struct AllToAll {
    schedule: Schedule,
    table: PlanTable,
    send_at: Vec<u64>,
    recv_at: Vec<u64>,
    send_bytes: u64,
    recv_bytes: u64,
    /// Where this rank's cell starts in each local peer's receive buffer.
    peer_at: Vec<u64>,
    memory: Arc<Mapped>,
    layout: Layout,
    /// Copy engines move the cells that stay in the server.
    by_copy_engines: bool,
    /// What the plan is expected to take here.
    expected: Duration,
}

/// Where things lie in a plan's device memory.
#[derive(Clone, Copy)]
struct Layout {
    params: u64,
    table: u64,
    send_at: u64,
    recv_at: u64,
    peer_recv: u64,
    peer_at: u64,
}

/// How much longer a barrier waits than what runs before it.
const BARRIER_EXTRA: Duration = Duration::from_secs(5);
/// Messages of one cell that may be on the way out of order: sequence numbers travel as 12 bits, and this is well
/// below half of their range.
pub const MAX_CELL_MESSAGES: u64 = 1536;

/// When this rank's kernels of one run began and ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct RunTime {
    /// Launch, on the server's clock.
    pub begin_ns: Nanos,
    /// All kernels done.
    pub end_ns: Nanos,
}

/// Starts of packed cells, and their end.
fn packed(counts: impl Iterator<Item = u64>) -> (Vec<u64>, u64) {
    let mut end = 0;
    let starts = counts.map(|n| {
        let start = end;
        end += n;
        start
    });
    (starts.collect(), end)
}

impl AllToAll {
    /// The schedule that all ranks follow.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Where the cell for each rank starts in the send buffer.
    pub fn send_at(&self) -> &[u64] {
        &self.send_at
    }

    /// Where the cell from each rank starts in the receive buffer.
    pub fn recv_at(&self) -> &[u64] {
        &self.recv_at
    }

    /// Has copy engines move the cells that stay in the server, where the kernel's blocks are dear; the kernel still does the
    /// rest. Every rank of a server may decide for itself.
    pub fn move_local_by_copy_engines(&mut self) {
        self.by_copy_engines = true;
    }

    /// Bytes of the send buffer.
    pub fn send_bytes(&self) -> u64 {
        self.send_bytes
    }

    /// Bytes of the receive buffer.
    pub fn recv_bytes(&self) -> u64 {
        self.recv_bytes
    }
}

impl Communicator {
    /// Plans an all-to-all(v) in which this rank sends `send_counts[r]` bytes to rank `r`. Collective: the counts are
    /// exchanged, and the plans compared.
    ///
    /// # Errors
    /// [`CommError`]; after an error of a collective the communicator is dead.
    pub fn plan_all_to_all(&mut self, send_counts: &[u64], method: Method) -> Result<AllToAll, CommError> {
        let ranks = self.cluster.ranks();
        if send_counts.len() != ranks as usize {
            return Err(CommError::WrongCounts { found: send_counts.len(), ranks });
        }
        let row: Vec<u8> = send_counts.iter().flat_map(|n| n.to_le_bytes()).collect();
        let rows = self.bootstrap()?.allgather(&row)?;
        let mut cells = Vec::with_capacity(rows.len() * rows.len());
        for (r, row) in rows.iter().enumerate() {
            let (words, rest) = row.as_chunks::<8>();
            if words.len() != ranks as usize || !rest.is_empty() {
                return Err(CommError::BadAnswer { rank: Rank(r as u32) });
            }
            cells.extend(words.iter().map(|w| u64::from_le_bytes(*w)));
        }
        let demand = Demand::new(ranks, cells, 1)?;
        self.plan_demand(&demand, method)
    }

    /// Plans the all-to-all(v) of a whole matrix that every rank has. Collective: the plans are compared.
    ///
    /// # Errors
    /// As [`plan_all_to_all`](Self::plan_all_to_all).
    pub fn plan_demand(&mut self, demand: &Demand, method: Method) -> Result<AllToAll, CommError> {
        let schedule = plan::schedule(&self.cluster, demand, method, &self.model)?;
        self.check_spread(demand, &schedule)?;
        let message_bytes = self.message_bytes.into();
        let table = PlanTable::compile(&self.cluster, demand, &schedule, self.rank, message_bytes)?;
        let hashes = self.bootstrap()?.allgather(&table.header().plan_hash.to_le_bytes())?;
        if let Some(r) = hashes.iter().position(|h| *h != hashes[0]) {
            return Err(CommError::PlanDiffers { rank: Rank(r as u32) });
        }
        self.place(demand, schedule, table)
    }

    /// Pieces of one cell that take different NICs run apart by up to the cell's length.
    fn check_spread(&self, demand: &Demand, schedule: &Schedule) -> Result<(), CommError> {
        let message_bytes = u64::from(self.message_bytes);
        let long = |p: &&plan::Piece| {
            let cell = demand.cell(p.src, p.dst);
            p.egress.is_some() && p.bytes < cell && cell.div_ceil(message_bytes) > MAX_CELL_MESSAGES
        };
        match schedule.pieces.iter().find(long) {
            None => Ok(()),
            Some(&plan::Piece { src, dst, .. }) => {
                let (bytes, most) = (demand.cell(src, dst), MAX_CELL_MESSAGES * message_bytes);
                Err(CommError::CellTooLong { src, dst, bytes, most })
            }
        }
    }

    /// Puts a plan into device memory.
    fn place(&self, demand: &Demand, schedule: Schedule, table: PlanTable) -> Result<AllToAll, CommError> {
        let ranks = || (0..self.cluster.ranks()).map(Rank);
        let (send_at, send_bytes) = packed(ranks().map(|r| demand.cell(self.rank, r)));
        let (recv_at, recv_bytes) = packed(ranks().map(|r| demand.cell(r, self.rank)));
        let before = |peer: Rank| (0..self.rank.0).map(|r| demand.cell(Rank(r), peer)).sum();
        let peer_at: Vec<u64> = self.cluster.ranks_of(self.server).map(before).collect();
        let mut image = Image::default();
        let layout = Layout {
            params: image.zeroes(size_of::<FlAllToAll>()),
            table: image.raw(table.as_bytes()),
            send_at: image.words(send_at.iter().copied()),
            recv_at: image.words(recv_at.iter().copied()),
            peer_recv: image.zeroes(8 * peer_at.len()),
            peer_at: image.words(peer_at.iter().copied()),
        };
        let gpu = self.machine.gpu();
        let memory = Arc::new(Mapped::create(gpu, image.as_bytes().len() as u64)?);
        gpu.write(memory.dev_ptr(), image.as_bytes())?;
        let modelled_ns = schedule.predicted_ns.max(schedule.bound.lower_ns);
        let expected = Duration::from_nanos(modelled_ns.saturating_mul(self.machine.scale()));
        Ok(AllToAll {
            schedule,
            table,
            send_at,
            recv_at,
            send_bytes,
            recv_bytes,
            peer_at,
            memory,
            layout,
            by_copy_engines: false,
            expected,
        })
    }

    /// Runs a planned all-to-all(v): from `send` to `recv`, both made by [`alloc`](Self::alloc). Collective. Returns
    /// when this rank has everything.
    ///
    /// # Errors
    /// [`CommError`]; after an error of a collective the communicator is dead.
    pub fn all_to_all(
        &mut self,
        plan: &AllToAll,
        send: &Buffer,
        recv: &Buffer,
    ) -> Result<RunTime, CommError> {
        for (which, has, needs) in
            [("send", send.bytes(), plan.send_bytes), ("receive", recv.bytes(), plan.recv_bytes)]
        {
            if has < needs {
                return Err(self.fail(CommError::BufferTooSmall { which, has, needs }));
            }
        }
        if send.dev_ptr() == recv.dev_ptr() {
            return Err(self.fail(CommError::SameBuffer));
        }
        let id = self.next_call()?;
        let patience = self.patience(plan);
        self.write_params(plan, send, recv, id, patience)?;
        let call = call_of(&plan.table, id, nanos(patience));
        let begin_ns = self.clock.now();
        if plan.by_copy_engines {
            self.proxy.move_local(self.local_cells(plan, send, recv, id));
        }
        self.proxy.open(call);
        let params_dev_ptr = plan.memory.dev_ptr() + plan.layout.params;
        let launch = Launch { kernel: Kernel::AllToAll, blocks: self.machine.blocks(), params_dev_ptr };
        self.in_use = send.maps().chain(recv.maps()).chain([Arc::clone(&plan.memory)]).collect();
        self.machine.gpu().launch(launch)?;
        self.finish()?;
        Ok(RunTime { begin_ns, end_ns: self.clock.now() })
    }

    /// The cells that stay in the server, as the proxy moves them. Those of 0 bytes count: each peer waits for a flag.
    fn local_cells(&self, plan: &AllToAll, send: &Buffer, recv: &Buffer, id: CallId) -> LocalCells {
        let own = self.cluster.gpu_of(self.rank);
        let flag = DeviceLayout::flags_of(own.0) + std::mem::offset_of!(FlPeerFlags, done) as u64;
        let bytes_to = |dst: Rank| plan.table.locals().filter(|l| l.dst == dst.0).map(|l| l.bytes).sum();
        let peers = self.cluster.ranks_of(self.server).zip(recv.peer_dev_ptrs()).zip(&plan.peer_at);
        let mut cells: Vec<_> = peers
            .zip(&self.memory.control)
            .map(|(((peer, peer_recv), peer_at), control)| LocalCell {
                peer: self.cluster.gpu_of(peer),
                src_dev_ptr: send.dev_ptr() + plan.send_at[peer.idx()],
                dst_dev_ptr: peer_recv + peer_at,
                bytes: bytes_to(peer),
                flag_dev_ptr: control.dev_ptr() + flag,
            })
            .collect();
        // From this rank on, itself last.
        let after_own = (own.idx() + 1) % cells.len();
        cells.rotate_left(after_own);
        let call_word = plan.layout.params + std::mem::offset_of!(FlAllToAll, call) as u64;
        let (chunk_bytes, call_word_dev_ptr) = (self.message_bytes.into(), plan.memory.dev_ptr() + call_word);
        LocalCells { call: id, cells, chunk_bytes, call_word_dev_ptr }
    }

    /// Several times what is expected, so that only a job that hangs is told that it does.
    fn patience(&self, plan: &AllToAll) -> Duration {
        self.timeout + plan.expected * 4
    }

    /// Waits for all ranks, which may be as far apart as a run of this plan takes.
    ///
    /// # Errors
    /// [`CommError::Bootstrap`].
    pub fn barrier_around(&self, plan: &AllToAll) -> Result<(), CommError> {
        // The rank that waits for something says so first: it knows what for.
        Ok(self.bootstrap()?.barrier_within(self.patience(plan) + BARRIER_EXTRA)?)
    }

    fn write_params(
        &self,
        plan: &AllToAll,
        send: &Buffer,
        recv: &Buffer,
        id: CallId,
        patience: Duration,
    ) -> Result<(), CommError> {
        let (base, l) = (plan.memory.dev_ptr(), plan.layout);
        let gpu = self.machine.gpu();
        let peers: Vec<u8> = recv.peer_dev_ptrs().flat_map(u64::to_ne_bytes).collect();
        gpu.write(base + l.peer_recv, &peers)?;
        let params = FlAllToAll {
            channel_ptr: self.channel_dev_ptr,
            table_ptr: base + l.table,
            send_ptr: send.dev_ptr(),
            recv_ptr: recv.dev_ptr(),
            send_at_ptr: base + l.send_at,
            recv_at_ptr: base + l.recv_at,
            peer_recv_ptr: base + l.peer_recv,
            peer_at_ptr: base + l.peer_at,
            call: id.0,
            options: if plan.by_copy_engines { FL_LOCAL_BY_HOST.into() } else { 0 },
            // The proxy gives up first: it knows what is missing.
            timeout_ns: nanos(patience + Duration::from_secs(2)),
            sent: 0,
            drained: 0,
            local_next: 0,
            local_done: 0,
        };
        let words: [u64; 15] = words_of(params);
        gpu.write(base + l.params, &words.map(u64::to_ne_bytes).concat())?;
        debug_assert_eq!(plan.peer_at.len(), recv.peer_dev_ptrs().count());
        Ok(())
    }
}

fn nanos(duration: Duration) -> Nanos {
    Nanos::try_from(duration.as_nanos()).unwrap_or(Nanos::MAX)
}

fn nic(number: u16) -> Option<NicIdx> {
    (u32::from(number) != FL_NO_NIC).then_some(NicIdx(number.into()))
}

fn transfer(number: u32) -> Option<u32> {
    (number != FL_NO_TRANSFER).then_some(number)
}

/// What the engine has to do for a table.
fn call_of(table: &PlanTable, id: CallId, timeout_ns: Nanos) -> Call {
    let header = table.header();
    let sends = table.sends().enumerate().map(|(i, s)| Run {
        piece: i as u32,
        dst: Rank(s.dst),
        first_seq: s.first_seq,
        bytes: s.bytes,
        egress: nic(s.egress),
        ingress: nic(s.ingress),
        transfer: transfer(s.transfer),
        queue: None,
    });
    let incoming = table.recvs().map(|r| Incoming {
        src: Rank(r.src),
        bytes: r.bytes,
        ingress: nic(r.ingress),
        transfer: transfer(r.transfer),
    });
    let turns = table.turns().map(|t| Turn {
        nic: NicIdx(t.nic.into()),
        direction: if t.direction == 0 { Direction::Egress } else { Direction::Ingress },
        transfer: t.transfer,
        peer: ServerId(t.peer_server),
        bytes: t.bytes,
    });
    Call {
        id,
        class: if header.msg_class == FL_CLASS_PLAN { Class::Plan } else { Class::Put },
        message_bytes: header.message_bytes as u32,
        timeout_ns,
        sends: sends.collect(),
        incoming: incoming.collect(),
        turns: turns.collect(),
    }
}
