//! A NIC over verbs, in the process of its owner.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ibverbs_sys as ffi;
use ibverbs_sys::ibv_wc_status as status;

use super::advice::{Operation, advise};
use super::control::Control;
use super::device;
use super::handshake::{Phase, Reaction};
use super::ledger::Ended;
use super::loopback::Loopback;
use super::memory::{DeviceMemory, Memory, Via};
use super::path::{Arrival, Gear, MAX_PATHS, Path, RequestId};
use super::port::{News, Port};
use super::raw::{Completions, Domain, SharedReceives};
use super::settings::VerbsSettings;
use super::wire::{Address, Hello};
use crate::hw::{
    HwError, INLINE_BYTES, LinkState, LocalKey, Nanos, Nic, NicCounters, NicDevice, NicEvent, PathId,
    Registrable, RemoteKey, Work, WorkError, WorkOp,
};
use crate::topo::{GpuIdx, NicId, NicIdx};

/// Events of the device are asked for this often: it costs a system call.
const NEWS_EVERY_NS: Nanos = 1_000_000;
/// Completions taken at a time.
const BATCH: usize = 32;

/// What a NIC has carried, for whoever does not hold it.
#[derive(Default, Debug)]
pub struct VerbsTraffic {
    tx_bytes: AtomicU64,
    rx_bytes: AtomicU64,
}

impl VerbsTraffic {
    /// The totals. Relaxed: they are read after the traffic has been waited for.
    pub fn counters(&self) -> NicCounters {
        let of = |total: &AtomicU64| total.load(Ordering::Relaxed);
        NicCounters { tx_bytes: of(&self.tx_bytes), rx_bytes: of(&self.rx_bytes) }
    }
}

/// What a NIC is made for.
#[derive(Clone, Debug)]
pub struct VerbsNicConfig {
    /// Its number in the job.
    pub id: NicId,
    /// Its number in its server.
    pub idx: NicIdx,
    /// The GPU beside it.
    pub relay_gpu: GpuIdx,
    /// How it is used.
    pub settings: VerbsSettings,
    /// Whether [`Nic::flush`] reads through the NIC: needed where payload lands in a GPU's memory, not in the host's.
    pub flush_by_read: bool,
}

/// Where a path is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PathState {
    /// Nobody has used it yet; it costs nothing.
    Idle,
    /// The ends are getting to know each other.
    Opening,
    /// Bytes go.
    Open,
    /// Taken down; what was under way is still being reported.
    Draining,
    /// Taken down, and nothing of it can come any more. It may be opened again.
    Drained,
}

/// A NIC over verbs.
pub struct VerbsNic {
    config: VerbsNicConfig,
    address: Address,
    // Paths before what they are made from, memory before its domain.
    paths: Vec<Path>,
    control: Control,
    loopback: Option<Loopback>,
    memories: Vec<Memory>,
    gear: Gear,
    path_of: HashMap<NicId, usize>,
    /// Path and queue pair behind a number.
    behind: HashMap<u32, (usize, usize)>,
    /// Paths that wait for something other than completions.
    unsettled: Vec<usize>,
    staged: Vec<usize>,
    failed: Vec<(u64, WorkError)>,
    ended: Vec<Ended>,
    /// Receives used up and not yet replaced.
    used_receives: usize,
    asked_at: Option<Nanos>,
    /// Of the last poll or post.
    now: Nanos,
    /// Paths that the device closed by itself, although no work failed.
    broken: Vec<usize>,
    traffic: Arc<VerbsTraffic>,
}

impl VerbsNic {
    /// Opens the device that the settings name for NIC `config.idx`.
    ///
    /// # Errors
    /// [`HwError::Os`], with what to do about it.
    pub fn open(config: VerbsNicConfig) -> Result<Self, HwError> {
        let (info, context) = device::open(&config.settings, config.idx)?;
        let what = |source: io::Error| HwError::Os {
            operation: "set up an RDMA device",
            source: io::Error::new(source.kind(), format!("{} ({}): {source}", info.name, config.idx)),
        };
        let context = Arc::new(context);
        let port = Port::open(&context, &config.settings).map_err(what)?;
        let queue = |e| what(advise(Operation::CreateQueue, e));
        let domain = Arc::new(Domain::new(&context).map_err(queue)?);
        let receives = usize::from(config.settings.recv_depth);
        let shared = SharedReceives::new(&domain, receives as u32).map_err(queue)?;
        shared.post(receives).map_err(queue)?;
        let random = |e: getrandom::Error| what(io::Error::other(e));
        let token = getrandom::u64().map_err(random)?;
        // The uppermost bit of a key would mean another.
        let qkey = getrandom::u32().map_err(random)? >> 1;
        let control = Control::new(&domain, config.settings.port, qkey).map_err(what)?;
        let address =
            Address { nic: config.id, queue_pair: control.number(), qkey, place: port.place(), token };
        let gear = Gear {
            id: config.id,
            sends: Arc::new(
                Completions::new(&context, usize::from(config.settings.send_depth)).map_err(queue)?,
            ),
            receives: Arc::new(Completions::new(&context, receives + BATCH).map_err(queue)?),
            shared: Arc::new(shared),
            domain,
            port,
        };
        Ok(Self {
            config,
            address,
            paths: Vec::new(),
            control,
            loopback: None,
            memories: Vec::new(),
            gear,
            path_of: HashMap::new(),
            behind: HashMap::new(),
            unsettled: Vec::new(),
            staged: Vec::new(),
            failed: Vec::new(),
            ended: Vec::new(),
            used_receives: 0,
            asked_at: None,
            now: 0,
            broken: Vec::new(),
            traffic: Arc::default(),
        })
    }

    /// The NIC's totals, for whoever does not hold it.
    pub fn traffic(&self) -> Arc<VerbsTraffic> {
        Arc::clone(&self.traffic)
    }

    /// How many registrations went by dma-buf, and how many by address.
    pub fn registrations(&self) -> (usize, usize) {
        let by_dma_buf = self.memories.iter().filter(|m| m.via == Via::DmaBuf).count();
        (by_dma_buf, self.memories.len() - by_dma_buf)
    }

    /// Where a path is; `None` when there is no such path.
    pub fn path_state(&self, path: PathId) -> Option<PathState> {
        let path = self.paths.get(path.0 as usize)?;
        Some(match path.handshake.phase() {
            Phase::Idle => PathState::Idle,
            Phase::Offering | Phase::Connected => PathState::Opening,
            Phase::Agreed => PathState::Open,
            Phase::Fenced if path.numbers().is_empty() => PathState::Drained,
            Phase::Fenced => PathState::Draining,
        })
    }

    /// The generation of a path: it grows each time the path is opened again.
    pub fn path_generation(&self, path: PathId) -> Option<u32> {
        self.paths.get(path.0 as usize).map(|p| p.handshake.generation())
    }

    fn bad(&self, field: &'static str, value: u64) -> HwError {
        HwError::BadWork { nic: self.config.idx, field, value }
    }

    fn is_up(&self) -> bool {
        self.gear.port.is_up()
    }

    /// Takes a path down, unless it is.
    fn close(&mut self, idx: usize) {
        if self.paths[idx].handshake.phase() == Phase::Fenced {
            return;
        }
        let numbers = self.paths[idx].numbers();
        if !self.paths[idx].fence(self.now, &mut self.ended) {
            self.forget_queue_pairs(&numbers);
        }
        self.unsettle(idx);
        self.fail_waiting(idx, WorkError::Flushed);
    }

    /// The same, for a reason that no completion tells.
    fn close_broken(&mut self, idx: usize) {
        if self.paths[idx].handshake.phase() != Phase::Fenced {
            self.broken.push(idx);
        }
        self.close(idx);
    }

    fn unsettle(&mut self, idx: usize) {
        if !self.unsettled.contains(&idx) {
            self.unsettled.push(idx);
        }
    }

    fn check(&self, work: &Work) -> Result<(), HwError> {
        if work.path.0 as usize >= self.paths.len() {
            return Err(self.bad("path", work.path.0.into()));
        }
        let (WorkOp::Write { remote, .. } | WorkOp::Inline { remote, .. }) = work.op;
        if remote.rkey > u32::MAX.into() {
            return Err(self.bad("remote key", remote.rkey));
        }
        match work.op {
            WorkOp::Write { local, .. } => {
                let memory = self.memories.get(local.key.0 as usize);
                let memory = memory.ok_or(self.bad("local key", local.key.0.into()))?;
                let within = memory.address(local.offset, local.bytes);
                within.map(drop).ok_or(self.bad("local offset", local.offset))
            }
            WorkOp::Inline { len, .. } if usize::from(len) > INLINE_BYTES => {
                Err(self.bad("inline length", len.into()))
            }
            WorkOp::Inline { .. } => Ok(()),
        }
    }

    /// Takes an item, if there is room.
    fn take(&mut self, work: &Work, now: Nanos) -> Result<bool, HwError> {
        self.check(work)?;
        let idx = work.path.0 as usize;
        if !self.is_up() {
            self.failed.push((work.cookie, WorkError::LinkDown));
            return Ok(true);
        }
        match self.paths[idx].handshake.phase() {
            Phase::Fenced => self.failed.push((work.cookie, WorkError::Flushed)),
            Phase::Agreed if self.paths[idx].waiting.is_empty() => return Ok(self.stage(idx, work)),
            _ => return Ok(self.queue(idx, work, now)),
        }
        Ok(true)
    }

    fn stage(&mut self, idx: usize, work: &Work) -> bool {
        let path = &mut self.paths[idx];
        if !path.has_room(&work.op) {
            return false;
        }
        let memory = match work.op {
            WorkOp::Write { local, .. } => self.memories.get(local.key.0 as usize),
            WorkOp::Inline { .. } => None,
        };
        path.stage(work, memory);
        if !self.staged.contains(&idx) {
            self.staged.push(idx);
        }
        true
    }

    /// Keeps an item until the path is open, and opens it.
    fn queue(&mut self, idx: usize, work: &Work, now: Nanos) -> bool {
        let depth = usize::from(self.config.settings.send_depth);
        if self.paths[idx].waiting.len() >= depth {
            return false;
        }
        if self.paths[idx].waiting.is_empty() {
            self.paths[idx].handshake.restart_clock(now);
        }
        self.paths[idx].waiting.push_back(*work);
        self.unsettle(idx);
        if self.paths[idx].handshake.phase() == Phase::Idle {
            self.offer(idx, now);
        }
        true
    }

    fn make(&mut self, idx: usize) -> io::Result<()> {
        if !self.paths[idx].numbers().is_empty() {
            return Ok(());
        }
        let settings = &self.config.settings;
        let pairs = self.behind.len() + settings.lanes() + 1;
        let grown = self.gear.sends.grow(pairs * usize::from(settings.send_depth));
        grown.map_err(|e| advise(Operation::CreateQueue, e))?;
        let psn = getrandom::u32().map_err(io::Error::other)?;
        self.paths[idx].make(&self.gear, psn)?;
        for (lane, number) in self.paths[idx].numbers().into_iter().enumerate() {
            self.behind.insert(number, (idx, lane));
        }
        Ok(())
    }

    fn forget_queue_pairs(&mut self, numbers: &[u32]) {
        self.behind.retain(|number, _| !numbers.contains(number));
    }

    fn offer(&mut self, idx: usize, now: Nanos) {
        self.paths[idx].handshake.offer(now);
        if let Err(e) = self.make(idx) {
            self.paths[idx].trouble = Some(e.to_string());
            return;
        }
        self.say(idx, now);
    }

    fn say(&mut self, idx: usize, now: Nanos) {
        let path = &mut self.paths[idx];
        path.handshake.said(now);
        let hello = path.hello(&self.gear);
        let local = self.gear.port.local(self.config.settings.control_class());
        if let Err(e) = self.control.say(&local, &path.peer, &hello) {
            path.trouble = Some(e.to_string());
        }
    }

    fn on_hello(&mut self, hello: &Hello, now: Nanos) {
        let meant = hello.to == self.config.id && hello.token == self.address.token;
        let Some(&idx) = self.path_of.get(&hello.from).filter(|_| meant) else { return };
        if self.paths[idx].peer_moved(hello.place) {
            self.control.forget_ways();
        }
        let heard = self.paths[idx].heard(hello);
        match self.paths[idx].handshake.on_hello(heard) {
            Reaction::Ignore => {}
            Reaction::Answer => self.say(idx, now),
            Reaction::Offer => self.offer(idx, now),
            Reaction::Connect => self.connect(idx, hello, now),
            Reaction::Go => {
                if hello.asks {
                    self.say(idx, now);
                }
                self.send_waiting(idx);
            }
            Reaction::Fence => {
                self.close_broken(idx);
                self.paths[idx].follow(hello.generation);
            }
        }
    }

    fn connect(&mut self, idx: usize, hello: &Hello, now: Nanos) {
        let heard = self.paths[idx].heard(hello);
        let connected = self.make(idx).and_then(|()| {
            let numbers = self.paths[idx].numbers();
            let connected = self.paths[idx].connect(&self.gear, hello);
            if connected.is_err() {
                self.forget_queue_pairs(&numbers);
            }
            connected
        });
        match connected {
            Ok(()) => {
                let agreed = self.paths[idx].handshake.connected(heard, now);
                self.paths[idx].trouble = None;
                self.say(idx, now);
                if agreed {
                    self.send_waiting(idx);
                }
            }
            Err(e) => self.paths[idx].trouble = Some(e.to_string()),
        }
    }

    /// The path is open: what waited goes, as far as there is room; the rest at the next poll.
    fn send_waiting(&mut self, idx: usize) {
        while let Some(work) = self.paths[idx].waiting.front().copied() {
            if !self.stage(idx, &work) {
                break;
            }
            self.paths[idx].waiting.pop_front();
        }
    }

    fn fail_waiting(&mut self, idx: usize, error: WorkError) {
        let waiting = self.paths[idx].waiting.drain(..);
        self.failed.extend(waiting.map(|w| (w.cookie, error)));
    }

    /// Rings the doorbells of what was staged.
    fn ring(&mut self) {
        for idx in std::mem::take(&mut self.staged) {
            if let Err(e) = self.paths[idx].ring(&mut self.ended) {
                self.paths[idx].trouble = Some(e.to_string());
                self.close(idx);
            }
        }
    }

    fn poll_news(&mut self, now: Nanos, events: &mut Vec<NicEvent>) -> Result<(), HwError> {
        if self.asked_at.is_some_and(|at| now.saturating_sub(at) < NEWS_EVERY_NS) {
            return Ok(());
        }
        self.asked_at = Some(now);
        let News { link, moved, last_receives, failed, fatal } = self.gear.port.news();
        if fatal {
            let source = io::Error::other("the device reports a fatal error; see the kernel's log");
            return Err(HwError::Os { operation: "go on with an RDMA device", source });
        }
        if moved {
            self.address.place = self.gear.port.place();
            self.control.forget_ways();
            self.loopback = None;
        }
        for idx in last_receives.iter().filter_map(|n| self.behind.get(n)).map(|b| b.0).collect::<Vec<_>>() {
            self.paths[idx].on_last_receive();
        }
        for idx in failed.iter().filter_map(|n| self.behind.get(n)).map(|b| b.0).collect::<Vec<_>>() {
            self.close_broken(idx);
        }
        if let Some(link) = link {
            events.push(NicEvent::Link(link));
        }
        if link == Some(LinkState::Down) {
            self.on_link_down();
        }
        Ok(())
    }

    /// What is under way would be tried again and again; its fate is decided now. Paths with nothing under way live on.
    fn on_link_down(&mut self) {
        for idx in 0..self.paths.len() {
            if self.paths[idx].is_busy() {
                self.close(idx);
            }
            self.fail_waiting(idx, WorkError::LinkDown);
        }
    }

    fn poll_hellos(&mut self, now: Nanos) -> Result<(), HwError> {
        let os = |source| HwError::Os { operation: "receive datagrams", source };
        for hello in self.control.hear().map_err(os)? {
            self.on_hello(&hello, now);
        }
        Ok(())
    }

    fn poll_sends(&mut self) -> Result<(), HwError> {
        let os = |source| HwError::Os { operation: "poll completions", source };
        let mut completions = [ffi::ibv_wc::default(); BATCH];
        let queue = Arc::clone(&self.gear.sends);
        loop {
            let found = queue.poll(&mut completions).map_err(os)?;
            for wc in found {
                let id = RequestId::decode(wc.wr_id());
                let result = wc.error().map_or(Ok(()), |(status, _)| Err(self.why(status)));
                if let Some(path) = self.paths.get_mut(id.path) {
                    path.on_completion(id, result, &mut self.ended);
                    if result.is_err() {
                        self.close(id.path);
                    }
                }
            }
            if found.len() < BATCH {
                return Ok(());
            }
        }
    }

    fn why(&self, status: status::Type) -> WorkError {
        match status {
            status::IBV_WC_REM_ACCESS_ERR | status::IBV_WC_REM_INV_REQ_ERR | status::IBV_WC_REM_OP_ERR => {
                WorkError::RemoteAccess
            }
            _ if !self.is_up() => WorkError::LinkDown,
            status::IBV_WC_RETRY_EXC_ERR
            | status::IBV_WC_RNR_RETRY_EXC_ERR
            | status::IBV_WC_RESP_TIMEOUT_ERR => WorkError::RetryExceeded,
            _ => WorkError::Flushed,
        }
    }

    fn poll_receives(&mut self, events: &mut Vec<NicEvent>) -> Result<(), HwError> {
        let os = |source| HwError::Os { operation: "poll arrivals", source };
        let mut completions = [ffi::ibv_wc::default(); BATCH];
        let queue = Arc::clone(&self.gear.receives);
        loop {
            let found = queue.poll(&mut completions).map_err(os)?;
            self.used_receives += found.len();
            for wc in found {
                let (Some(imm), Some(&(idx, lane))) = (wc.imm_data(), self.behind.get(&wc.qp_num)) else {
                    continue;
                };
                self.paths[idx].on_arrival(lane, u32::from_be(imm), wc.len() as u32);
                while let Some(arrival) = self.paths[idx].next_arrival() {
                    self.tell_arrival(idx, arrival, events);
                }
            }
            // Often enough that senders never see an empty queue, and not for each.
            if self.used_receives >= usize::from(self.config.settings.recv_depth).min(4 * BATCH) / 4 {
                self.gear.shared.post(self.used_receives).map_err(os)?;
                self.used_receives = 0;
            }
            if found.len() < BATCH {
                return Ok(());
            }
        }
    }

    fn tell_arrival(&self, idx: usize, Arrival { imm, bytes }: Arrival, events: &mut Vec<NicEvent>) {
        // Relaxed: a total.
        self.traffic.rx_bytes.fetch_add(bytes.into(), Ordering::Relaxed);
        events.push(NicEvent::Arrived { from: self.paths[idx].peer.nic, imm, bytes });
    }

    fn tell_ended(&mut self, events: &mut Vec<NicEvent>) {
        for Ended { cookie, bytes, result } in self.ended.drain(..) {
            if result.is_ok() {
                // Relaxed: a total.
                self.traffic.tx_bytes.fetch_add(bytes.into(), Ordering::Relaxed);
            }
            events.push(NicEvent::Completed { cookie, result });
        }
    }

    /// Sees to the paths that wait for time or for a peer.
    fn settle(&mut self, now: Nanos, events: &mut Vec<NicEvent>) {
        for idx in std::mem::take(&mut self.unsettled) {
            if !self.settle_one(idx, now, events) {
                self.unsettle(idx);
            }
        }
    }

    fn settle_one(&mut self, idx: usize, now: Nanos, events: &mut Vec<NicEvent>) -> bool {
        match self.paths[idx].handshake.phase() {
            Phase::Fenced => self.drain(idx, now, events),
            Phase::Agreed => {
                self.send_waiting(idx);
                self.paths[idx].waiting.is_empty()
            }
            Phase::Idle | Phase::Offering | Phase::Connected => self.press(idx, now),
        }
    }

    fn drain(&mut self, idx: usize, now: Nanos, events: &mut Vec<NicEvent>) -> bool {
        let (numbers, mut arrivals) = (self.paths[idx].numbers(), Vec::new());
        let drained = self.paths[idx].drain(now, &mut self.ended, &mut arrivals);
        arrivals.into_iter().for_each(|a| self.tell_arrival(idx, a, events));
        if drained {
            self.forget_queue_pairs(&numbers);
        }
        drained
    }

    /// Says hello again, or gives up. True when nothing waits.
    fn press(&mut self, idx: usize, now: Nanos) -> bool {
        if self.paths[idx].waiting.is_empty() {
            return true;
        }
        let patience_ns = self.config.settings.open_timeout.as_nanos() as Nanos;
        if self.paths[idx].handshake.phase() == Phase::Idle {
            self.offer(idx, now);
        } else if self.paths[idx].handshake.is_overdue(now, patience_ns) {
            self.give_up(idx, now);
            return true;
        } else if self.paths[idx].handshake.is_due(now) {
            match self.make(idx) {
                Ok(()) => self.say(idx, now),
                Err(e) => self.paths[idx].trouble = Some(e.to_string()),
            }
        }
        false
    }

    fn give_up(&mut self, idx: usize, now: Nanos) {
        let path = &mut self.paths[idx];
        let trouble = path.trouble.take().unwrap_or("no answer".into());
        eprintln!(
            "fuselink: NIC {} cannot open a path to NIC {} at {} within {:?}: {trouble}",
            self.config.id, path.peer.nic, path.peer.place.gid, self.config.settings.open_timeout
        );
        path.handshake.restart_clock(now);
        self.fail_waiting(idx, WorkError::RetryExceeded);
    }

    fn flush_once(&mut self) -> io::Result<()> {
        let Some(memory) = self.memories.first() else { return Ok(()) };
        if self.loopback.is_none() {
            let local = self.gear.port.local(self.config.settings.traffic_class);
            self.loopback = Some(Loopback::new(&self.gear.domain, &local, &self.gear.port.place())?);
        }
        match &mut self.loopback {
            Some(loopback) => loopback.flush(memory),
            None => Ok(()),
        }
    }
}

impl Nic for VerbsNic {
    fn idx(&self) -> NicIdx {
        self.config.idx
    }

    fn post(&mut self, work: &[Work], now: Nanos) -> Result<usize, HwError> {
        self.now = now;
        let mut result = Ok(work.len());
        for (taken, item) in work.iter().enumerate() {
            match self.take(item, now) {
                Ok(true) => {}
                Ok(false) => {
                    result = Ok(taken);
                    break;
                }
                Err(e) => {
                    result = Err(e);
                    break;
                }
            }
        }
        self.ring();
        result
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<NicEvent>) -> Result<(), HwError> {
        self.now = now;
        self.poll_news(now, events)?;
        self.poll_hellos(now)?;
        self.poll_sends()?;
        self.poll_receives(events)?;
        self.settle(now, events);
        self.ring();
        self.tell_ended(events);
        let failed = self.failed.drain(..);
        events.extend(failed.map(|(cookie, e)| NicEvent::Completed { cookie, result: Err(e) }));
        events.extend(self.broken.drain(..).map(|idx| NicEvent::Broken(PathId(idx as u32))));
        Ok(())
    }

    fn flush(&mut self) -> Result<(), HwError> {
        if !self.config.flush_by_read {
            // The device wrote before the completions that were read: on the host's coherent memory nothing is left to flush.
            std::sync::atomic::fence(Ordering::SeqCst);
            return Ok(());
        }
        if self.flush_once().is_ok() {
            return Ok(());
        }
        self.loopback = None; // Its queue pair has failed; a new one may not.
        self.flush_once().map_err(|source| HwError::Os { operation: "flush what a NIC has written", source })
    }
}

impl NicDevice for VerbsNic {
    fn relay_gpu(&self) -> GpuIdx {
        self.config.relay_gpu
    }

    fn register(&mut self, memory: &Registrable<'_>) -> Result<(LocalKey, RemoteKey), HwError> {
        let (nic, beside) = (self.config.idx, self.config.relay_gpu);
        let domain = &self.gear.domain;
        let (registered, bytes) = match *memory {
            Registrable::Device { gpu, .. } if gpu != beside => {
                return Err(HwError::NotBeside { nic, gpu, beside });
            }
            Registrable::Device { fd, dev_ptr, bytes, .. } => {
                let memory = DeviceMemory { fd, dev_ptr, bytes };
                (Memory::of_device(domain, memory, self.config.settings.dma_buf), bytes)
            }
            Registrable::Host { host_ptr, bytes, .. } => {
                (Memory::at_address(domain, host_ptr as u64, bytes), bytes)
            }
        };
        let memory = registered.map_err(|source| HwError::Register { nic, bytes, source })?;
        let (key, remote) = (LocalKey(self.memories.len() as u32), memory.remote_key());
        self.memories.push(memory);
        Ok((key, remote))
    }

    fn endpoint(&self) -> Vec<u8> {
        self.address.encode()
    }

    fn open_path(&mut self, peer: NicId, endpoint: &[u8]) -> Result<PathId, HwError> {
        let refuse = |reason: String| HwError::OpenPath { nic: self.config.idx, peer, reason };
        let address =
            Address::decode(endpoint).ok_or(refuse("its endpoint is not one of this version".into()))?;
        if address.nic != peer {
            return Err(refuse(format!("its endpoint is that of NIC {}", address.nic)));
        }
        if let Some(&idx) = self.path_of.get(&peer) {
            return Ok(PathId(idx as u32));
        }
        let idx = self.paths.len();
        if idx >= MAX_PATHS {
            return Err(refuse(format!("a NIC has at most {MAX_PATHS} paths")));
        }
        self.paths.push(Path::new(idx, address, &self.gear));
        self.path_of.insert(peer, idx);
        Ok(PathId(idx as u32))
    }

    fn fence(&mut self, path: PathId) -> Result<(), HwError> {
        if (path.0 as usize) < self.paths.len() {
            self.close(path.0 as usize);
        }
        Ok(())
    }

    fn is_drained(&mut self, path: PathId) -> bool {
        let drained = self.path_state(path).is_none_or(|state| state == PathState::Drained);
        drained && self.failed.is_empty() && self.ended.is_empty()
    }

    fn reopen(&mut self, path: PathId) -> Result<(), HwError> {
        let Some(known) = self.paths.get_mut(path.0 as usize) else {
            return Err(self.bad("path", path.0.into()));
        };
        if known.reopen() {
            return Ok(());
        }
        let reason = "it has not drained".into();
        Err(HwError::OpenPath { nic: self.config.idx, peer: known.peer.nic, reason })
    }

    fn counters(&self) -> NicCounters {
        self.traffic.counters()
    }
}
