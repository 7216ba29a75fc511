//! A NIC over verbs, in the process of its owner.

mod opening;
mod polling;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use polling::BATCH;

use super::advice::{Operation, advise};
use super::control::Control;
use super::device;
use super::handshake::Phase;
use super::ledger::Ended;
use super::loopback::Loopback;
use super::memory::{Registered, Registrations};
use super::path::{Gear, MAX_PATHS, Path};
use super::port::Port;
use super::raw::{Completions, Domain, SharedReceives};
use super::settings::VerbsSettings;
use super::wire::Address;
use crate::hw::{
    HwError, INLINE_BYTES, LocalKey, Nanos, Nic, NicCounters, NicDevice, NicEvent, PathId, Registrable,
    Registrar, RemoteKey, Work, WorkError, WorkOp,
};
use crate::topo::{GpuIdx, NicId, NicIdx};

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
    registrations: Registrations,
    /// A copy of what is registered, for every message, and the count of changes that it is from.
    places: BTreeMap<u32, Registered>,
    places_of: u64,
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
        let (beside, dma_buf) = (config.relay_gpu, config.settings.dma_buf);
        let registrations = Registrations::new(&domain, config.idx, beside, dma_buf);
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
            registrations,
            places: BTreeMap::new(),
            places_of: 0,
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
        self.registrations.count()
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
                let memory = self.places.get(&local.key.0);
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
            WorkOp::Write { local, .. } => self.places.get(&local.key.0),
            WorkOp::Inline { .. } => None,
        };
        path.stage(work, memory);
        if !self.staged.contains(&idx) {
            self.staged.push(idx);
        }
        true
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

    fn flush_once(&mut self) -> io::Result<()> {
        self.registrations.refresh(&mut self.places_of, &mut self.places);
        // The first is there from the start, and stays.
        let Some((_, memory)) = self.places.first_key_value() else { return Ok(()) };
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
        self.registrations.refresh(&mut self.places_of, &mut self.places);
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
        self.registrations.register(memory)
    }

    fn registrar(&self) -> Box<dyn Registrar> {
        Box::new(self.registrations.clone())
    }

    fn endpoint(&self) -> Vec<u8> {
        self.address.encode()
    }

    fn open_path(&mut self, peer: NicId, endpoint: &[u8]) -> Result<PathId, HwError> {
        let refuse = |reason: String| HwError::OpenPath { nic: self.config.idx, peer, reason };
        let address =
            Address::decode(endpoint).ok_or(refuse("its endpoint is not one of this version".into()))?;
        if address.nic != peer {
            return Err(refuse(format!("its endpoint is that of {}", address.nic)));
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
