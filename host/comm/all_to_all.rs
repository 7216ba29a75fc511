//! All-to-all(v): counts are exchanged, every rank makes the same plan, kernels walk its table.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::memory::{Image, Mapped, words_of};
use super::{Buffer, CommError, Communicator, SendFrom};
use crate::abi::{FL_LOCAL_BY_HOST, FlAllToAll, FlPeerFlags, FlPlanSend};
use crate::channel::DeviceLayout;
use crate::collective::{call_of, nic};
use crate::engine::call::CallId;
use crate::hw::{Gpu, Kernel, Launch, Nanos};
use crate::plan::{Demand, Method, PlanTable, Request};
use crate::proxy::{LocalCell, LocalCells};
use crate::topo::{Cluster, Rank};

/// A planned all-to-all(v), ready to be run any number of times.
///
/// Cells are packed: in the send buffer by destination rank, in the receive buffer by source rank.
pub struct AllToAll {
    method: Method,
    predicted: Duration,
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
    /// What the plan is expected to take here, scale-up included.
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

/// From so many ranks on, it pays to plan from the last list on (docs/planning.md).
const REPLAN_RANKS: u32 = 128;
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

/// What ranks tell each other of their plans.
struct Verdict {
    /// The same on all ranks, or their plans differ.
    plan_hash: u64,
    /// Whose cell is too long to be spread.
    too_long: Option<Rank>,
}

impl Verdict {
    const NONE: u32 = u32::MAX;

    fn to_bytes(&self) -> [u8; 12] {
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&self.plan_hash.to_le_bytes());
        bytes[8..].copy_from_slice(&self.too_long.map_or(Self::NONE, |dst| dst.0).to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (plan_hash, too_long) = bytes.split_first_chunk::<8>()?;
        let dst = u32::from_le_bytes(too_long.try_into().ok()?);
        let too_long = (dst != Self::NONE).then_some(Rank(dst));
        Some(Self { plan_hash: u64::from_le_bytes(*plan_hash), too_long })
    }
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
    /// How it was planned; never `Auto` or `Ordered`, but what those chose.
    pub fn method(&self) -> Method {
        self.method
    }

    /// What it is expected to take on the NICs of the machine described.
    pub fn predicted(&self) -> Duration {
        self.predicted
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
        let message_bytes = self.message_bytes.into();
        let request = Request { method, model: self.model, rank: self.rank, message_bytes };
        let cluster = self.working_cluster()?;
        // Every rank has come through the same calls with the same demands, so all go on from the same list; and the
        // hashes would show if one did not.
        let planned = match cluster.ranks() >= REPLAN_RANKS && *cluster == *self.cluster {
            true => self.planner.replan(&cluster, demand, &request)?,
            false => self.planner.plan(&cluster, demand, &request)?,
        };
        let (method, table) = (planned.method, planned.table.clone());
        let predicted = Duration::from_nanos(planned.predicted_ns.max(planned.bound.lower_ns));
        self.compare_plans(demand, &table)?;
        self.place(demand, method, table, predicted)
    }

    /// The cluster as it is now: NICs whose link is down, as their owners say, are down for the plan. Collective.
    fn working_cluster(&self) -> Result<Arc<Cluster>, CommError> {
        let own: Vec<u8> = self.proxy.links_down().iter().flat_map(|nic| nic.0.to_le_bytes()).collect();
        let answers = self.bootstrap()?.allgather(&own)?;
        if answers.iter().all(Vec::is_empty) {
            return Ok(Arc::clone(&self.cluster));
        }
        let mut servers = self.cluster.servers().to_vec();
        for (rank, answer) in (0..).map(Rank).zip(&answers) {
            let server = self.cluster.server_of(rank);
            let (nics, rest) = answer.as_chunks::<4>();
            for nic in nics {
                let place = servers[server.idx()].nics.get_mut(u32::from_le_bytes(*nic) as usize);
                place.ok_or(CommError::BadAnswer { rank })?.mbit_per_s = 0;
            }
            if !rest.is_empty() {
                return Err(CommError::BadAnswer { rank });
            }
        }
        Ok(Arc::new(Cluster::new(servers)))
    }

    /// Fails on all ranks where the plan does on one. Collective.
    fn compare_plans(&self, demand: &Demand, table: &PlanTable) -> Result<(), CommError> {
        let too_long = self.cell_too_long(demand, table);
        let own = Verdict { plan_hash: table.header().plan_hash, too_long };
        let answers = self.bootstrap()?.allgather(&own.to_bytes())?;
        let mut first_hash = None;
        for (rank, answer) in (0..).map(Rank).zip(&answers) {
            let verdict = Verdict::from_bytes(answer).ok_or(CommError::BadAnswer { rank })?;
            if verdict.plan_hash != *first_hash.get_or_insert(verdict.plan_hash) {
                return Err(CommError::PlanDiffers { rank });
            }
            if let Some(dst) = verdict.too_long.filter(|&dst| dst.0 < demand.ranks()) {
                let most = MAX_CELL_MESSAGES * u64::from(self.message_bytes);
                let bytes = demand.cell(rank, dst);
                return Err(CommError::CellTooLong { src: rank, dst, bytes, most });
            }
        }
        Ok(())
    }

    /// Pieces of one cell that take different ways run apart by up to the cell's length. A cell of this rank's for
    /// which that is too far.
    fn cell_too_long(&self, demand: &Demand, table: &PlanTable) -> Option<Rank> {
        let row = demand.row(self.rank);
        let is_long = |dst: u32| row[dst as usize].div_ceil(self.message_bytes.into()) > MAX_CELL_MESSAGES;
        let way = |s: &FlPlanSend| (s.egress, s.ingress, s.transfer);
        let mut ways: BTreeMap<u32, (u16, u16, u32)> = BTreeMap::new();
        let prescribed = table.sends().filter(|s| nic(s.egress).is_some() && is_long(s.dst));
        for send in prescribed {
            let first = *ways.entry(send.dst).or_insert(way(&send));
            if first != way(&send) {
                return Some(Rank(send.dst));
            }
        }
        None
    }

    /// Puts a plan into device memory.
    fn place(
        &self,
        demand: &Demand,
        method: Method,
        table: PlanTable,
        predicted: Duration,
    ) -> Result<AllToAll, CommError> {
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
        let bytes = image.as_bytes().len() as u64;
        let memory = Arc::new(self.with_room(bytes, |gpu| Mapped::create(gpu, bytes))?);
        gpu.write(memory.dev_ptr(), image.as_bytes())?;
        // Every byte of this rank's may have to cross its scale-up link.
        let scaleup_mbyte_per_s = self.cluster.server(self.server).scaleup_mbyte_per_s.max(1);
        let scaleup_us = send_bytes.max(recv_bytes).div_ceil(scaleup_mbyte_per_s);
        let modelled = predicted.saturating_add(Duration::from_micros(scaleup_us));
        let scale = u32::try_from(self.machine.scale()).unwrap_or(u32::MAX);
        Ok(AllToAll {
            method,
            predicted,
            table,
            send_at,
            recv_at,
            send_bytes,
            recv_bytes,
            peer_at,
            memory,
            layout,
            by_copy_engines: false,
            expected: modelled.saturating_mul(scale),
        })
    }

    /// Runs a planned all-to-all(v): from `send` (a [`Buffer`], or other memory of this GPU: see [`SendFrom`]) to `recv`,
    /// made by [`alloc`](Self::alloc). Collective. Returns when this rank has everything.
    ///
    /// # Errors
    /// [`CommError`]; after an error of a collective the communicator is dead.
    pub fn all_to_all<'a>(
        &mut self,
        plan: &AllToAll,
        send: impl Into<SendFrom<'a>>,
        recv: &Buffer,
    ) -> Result<RunTime, CommError> {
        let send = send.into();
        let checked = self.check_not_capturing("run an all-to-all");
        if let Err(e) = checked.and_then(|()| send.check(self.machine.gpu())) {
            return Err(self.fail(e.into()));
        }
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
        self.write_params(plan, send.dev_ptr(), recv, id, patience)?;
        let call = call_of(&plan.table, id, nanos(patience));
        self.borrow_for(&call)?;
        self.relay.kernels_start();
        let begin_ns = self.clock.now();
        if plan.by_copy_engines {
            self.proxy.move_local(self.local_cells(plan, send.dev_ptr(), recv, id));
        }
        self.proxy.open(call);
        let params_dev_ptr = plan.memory.dev_ptr() + plan.layout.params;
        let launch = Launch { kernel: Kernel::AllToAll, blocks: self.machine.blocks(), params_dev_ptr };
        self.in_use = send.maps().into_iter().chain(recv.maps()).chain([Arc::clone(&plan.memory)]).collect();
        self.machine.gpu().launch(launch)?;
        self.finish()?;
        Ok(RunTime { begin_ns, end_ns: self.clock.now() })
    }

    /// The cells that stay in the server, as the proxy moves them. Those of 0 bytes count: each peer waits for a flag.
    fn local_cells(&self, plan: &AllToAll, send_dev_ptr: u64, recv: &Buffer, id: CallId) -> LocalCells {
        let own = self.cluster.gpu_of(self.rank);
        let flag = DeviceLayout::flags_of(own.0) + std::mem::offset_of!(FlPeerFlags, done) as u64;
        let bytes_to = |dst: Rank| plan.table.locals().filter(|l| l.dst == dst.0).map(|l| l.bytes).sum();
        let peers = self.cluster.ranks_of(self.server).zip(recv.peer_dev_ptrs()).zip(&plan.peer_at);
        let mut cells: Vec<_> = peers
            .zip(&self.memory.control)
            .map(|(((peer, peer_recv), peer_at), control)| LocalCell {
                peer: self.cluster.gpu_of(peer),
                src_dev_ptr: send_dev_ptr + plan.send_at[peer.idx()],
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
        self.timeout.saturating_add(plan.expected.saturating_mul(4))
    }

    /// Waits for all ranks, which may be as far apart as a run of this plan takes.
    ///
    /// # Errors
    /// [`CommError::Bootstrap`].
    pub fn barrier_around(&self, plan: &AllToAll) -> Result<(), CommError> {
        // The rank that waits for something says so first: it knows what for.
        Ok(self.bootstrap()?.barrier_within(self.patience(plan).saturating_add(BARRIER_EXTRA))?)
    }

    fn write_params(
        &self,
        plan: &AllToAll,
        send_dev_ptr: u64,
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
            send_ptr: send_dev_ptr,
            recv_ptr: recv.dev_ptr(),
            send_at_ptr: base + l.send_at,
            recv_at_ptr: base + l.recv_at,
            peer_recv_ptr: base + l.peer_recv,
            peer_at_ptr: base + l.peer_at,
            call: id.0,
            options: if plan.by_copy_engines { FL_LOCAL_BY_HOST.into() } else { 0 },
            // The proxy gives up first: it knows what is missing.
            timeout_ns: nanos(patience.saturating_add(Duration::from_secs(2))),
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
