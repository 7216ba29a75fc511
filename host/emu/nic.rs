//! An emulated NIC, driven by its owner. Work takes the time that the sending and the receiving NIC need for it; the
//! bytes are real.
//!
//! Each path (peer NIC) has a queue; the NIC serves the path whose head can start first, the least recently served of
//! equals, one message at a time. A path has at most `WINDOW` messages on the way, so that one slow receiver holds
//! up neither the sender's other paths nor more than its share of a receiver that many send to. The schedule is kept
//! in virtual time and caught up with at every poll, so that the host's scheduling does not cost the NIC its rate.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::gate;
use super::registrations::{self, EmuRegistrar, Place, Registrations};
use super::staging::DeviceCopies;
use super::wire::{self, ARRIVAL_WORDS, Wire};
use crate::hw::{
    HwError, INLINE_BYTES, LinkState, LocalKey, LocalSpan, Nanos, Nic, NicCounters, NicDevice, NicEvent,
    PathId, Registrable, Registrar, RemoteKey, RemoteSpan, Work, WorkError, WorkOp,
};
use crate::ring::{Consumer, Full, Producer};
use crate::topo::{GpuIdx, NicId, NicIdx};
use crate::words::WordSlice;

/// Messages of one path that may be on the way.
const WINDOW: usize = 2;
/// Work items that a path's send queue holds.
const QUEUE_DEPTH: usize = 256;
/// How far the virtual schedule may lag behind the clock and still catch up: the host's scheduling delays.
const CATCH_UP_NS: Nanos = 10_000_000;

struct RemoteMemory {
    fd: OwnedFd,
    bytes: u64,
}

struct Queued {
    work: Work,
    posted_at: Nanos,
}

struct Path {
    peer: NicId,
    arrivals: Producer<WordSlice, ARRIVAL_WORDS>,
    queue: VecDeque<Queued>,
    /// Writes done whose completions are not reported yet.
    uncompleted: usize,
    /// While it is closed: where the arrivals must have been read to, once that is known.
    closing: Option<Closing>,
    /// When the last `WINDOW` messages are delivered.
    on_the_way: VecDeque<Nanos>,
    last_served: u64,
}

/// A path that is being closed.
struct Closing {
    /// Arrivals that the wire had taken when nobody was inside the gate any more.
    arrivals_until: Option<u64>,
}

impl Path {
    /// When its head may start, as far as the path is concerned.
    fn eligible_at(&self) -> Option<Nanos> {
        let head = self.queue.front()?;
        let window_opens = if self.on_the_way.len() < WINDOW { 0 } else { self.on_the_way[0] };
        Some(head.posted_at.max(window_opens))
    }

    fn sent(&mut self, delivered_at: Nanos) {
        self.on_the_way.push_back(delivered_at);
        if self.on_the_way.len() > WINDOW {
            self.on_the_way.pop_front();
        }
    }
}

/// An emulated NIC in the process of its owner.
pub struct EmuNic {
    wire: Wire,
    id: NicId,
    idx: NicIdx,
    relay_gpu: GpuIdx,
    local: Registrations,
    /// Memory of peers that was written to.
    remote: HashMap<(NicId, u64), RemoteMemory>,
    paths: Vec<Path>,
    path_of: HashMap<NicId, PathId>,
    served: u64,
    /// When, which path, cookie.
    completions: BinaryHeap<Reverse<(Nanos, usize, u64)>>,
    failed: Vec<(u64, WorkError)>,
    /// A copy of such memory failed: the device is broken.
    broken: Option<HwError>,
    arrivals: Consumer<WordSlice, ARRIVAL_WORDS>,
    link: LinkState,
}

impl EmuNic {
    /// NIC `id` of the job, number `idx` of its server, beside `relay_gpu`.
    pub fn new(wire: Wire, id: NicId, idx: NicIdx, relay_gpu: GpuIdx) -> Self {
        Self::of(Place { wire, id, idx, relay_gpu, copies: None })
    }

    fn of(place: Place) -> Self {
        let Place { wire, id, idx, relay_gpu, .. } = place.clone();
        let arrivals = wire.arrivals_of(id);
        Self {
            wire,
            id,
            idx,
            relay_gpu,
            local: Registrations::new(place),
            remote: HashMap::new(),
            paths: Vec::new(),
            path_of: HashMap::new(),
            served: 0,
            completions: BinaryHeap::new(),
            failed: Vec::new(),
            broken: None,
            arrivals,
            link: LinkState::Up,
        }
    }

    /// The same, beside a GPU whose memory the host cannot map: it goes through `copies`.
    pub fn staged(
        wire: Wire,
        id: NicId,
        idx: NicIdx,
        relay_gpu: GpuIdx,
        copies: Arc<dyn DeviceCopies>,
    ) -> Self {
        Self::of(Place { wire, id, idx, relay_gpu, copies: Some(copies) })
    }

    fn bad(&self, field: &'static str, value: u64) -> HwError {
        HwError::BadWork { nic: self.idx, field, value }
    }

    fn check(&self, work: &Work) -> Result<(), HwError> {
        if work.path.0 as usize >= self.paths.len() {
            return Err(self.bad("path", work.path.0.into()));
        }
        match work.op {
            WorkOp::Write { local, .. } => {
                let memory = self.local.local(local.key).ok_or(self.bad("local key", local.key.0.into()))?;
                let end = local.offset.checked_add(local.bytes.into());
                end.filter(|&end| end <= memory.map.len() as u64)
                    .map(drop)
                    .ok_or(self.bad("local offset", local.offset))
            }
            WorkOp::Inline { len, .. } if usize::from(len) > INLINE_BYTES => {
                Err(self.bad("inline length", len.into()))
            }
            WorkOp::Inline { .. } => Ok(()),
        }
    }

    /// Writes to the peer's registered memory. Inside the gate.
    fn write_remote(&mut self, peer: NicId, to: RemoteSpan, bytes: &[u8]) -> Result<(), WorkError> {
        let address = registrations::find(&self.wire, peer, to.rkey).ok_or(WorkError::RemoteAccess)?;
        if !self.remote.contains_key(&(peer, to.rkey)) {
            self.open_remote(peer, to.rkey, address)?;
        }
        let memory = self.remote.get(&(peer, to.rkey)).ok_or(WorkError::RemoteAccess)?;
        let end = to.remote_addr.checked_add(bytes.len() as u64).ok_or(WorkError::RemoteAccess)?;
        if end > memory.bytes {
            return Err(WorkError::RemoteAccess);
        }
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::pwrite(&memory.fd, &bytes[done..], to.remote_addr + done as u64) {
                Ok(n) if n > 0 => done += n,
                Err(rustix::io::Errno::INTR) => {}
                _ => return Err(WorkError::RemoteAccess),
            }
        }
        Ok(())
    }

    /// Opens a peer's memory, and lets go of what the peer has taken back since.
    fn open_remote(&mut self, peer: NicId, rkey: u64, address: u64) -> Result<(), WorkError> {
        let wire = &self.wire;
        self.remote.retain(|&(nic, rkey), _| nic != peer || registrations::find(wire, nic, rkey).is_some());
        let fd = wire::open_remote_fd(address).map_err(|_| wire::why_unreachable(address))?;
        let bytes = rustix::fs::fstat(&fd).map_err(|_| WorkError::RetryExceeded)?.st_size as u64;
        self.remote.insert((peer, rkey), RemoteMemory { fd, bytes });
        Ok(())
    }

    fn write_span(&mut self, peer: NicId, local: LocalSpan, to: RemoteSpan) -> Result<(), WorkError> {
        let Some(memory) = self.local.local(local.key) else { return Err(WorkError::Flushed) };
        // SAFETY: `check` put the span inside the mapping; whoever posted it leaves the slot alone until its completion,
        // as with any NIC, and a stage is this NIC's own.
        let bytes = unsafe { memory.span(local.offset, local.bytes as usize) };
        let fetched = memory.behind.as_ref().map_or(Ok(()), |b| b.fetch(local.offset, bytes));
        match fetched {
            Ok(()) => self.write_remote(peer, to, bytes),
            Err(e) => {
                self.broken = Some(e);
                Err(WorkError::Flushed)
            }
        }
    }

    /// Brings what has arrived on a stage to the GPU behind it.
    fn deliver(&self, place: u64, offset: u64, bytes: u32) -> Result<(), HwError> {
        let Some(memory) = self.local.at_place(place) else { return Ok(()) };
        let Some(behind) = &memory.behind else { return Ok(()) };
        if offset.checked_add(bytes.into()).is_none_or(|end| end > memory.map.len() as u64) {
            return Err(self.bad("arrival", offset));
        }
        // SAFETY: inside (checked), and the sender has written it before it told of it.
        behind.deliver(offset, unsafe { memory.span(offset, bytes as usize) })
    }

    /// Control words go ahead of bulk data, as a fabric's priority class does, and take their time from both NICs.
    fn send_inline(
        &mut self,
        path: PathId,
        to: RemoteSpan,
        data: &[u8],
        now: Nanos,
    ) -> Result<(), WorkError> {
        let peer = self.paths[path.0 as usize].peer;
        if self.wire.link(self.id) == LinkState::Down {
            return Err(WorkError::LinkDown);
        }
        if self.paths[path.0 as usize].closing.is_some() {
            return Err(WorkError::Flushed);
        }
        if self.wire.link(peer) == LinkState::Down {
            return Err(WorkError::RetryExceeded);
        }
        let wire = self.wire.clone();
        gate::pass(wire.gate(self.id, peer), || self.write_remote(peer, to, data))
            .map_err(|gate::Shut| WorkError::RetryExceeded)??;
        self.wire.reserve_tx(self.id, now, data.len() as u64);
        self.wire.reserve_rx(peer, now, data.len() as u64);
        Ok(())
    }

    /// The path whose head starts first, and when; not later than `now`.
    fn next_path(&self, now: Nanos) -> Option<(usize, Nanos)> {
        let free_at = self.wire.tx_free_at(self.id).max(now.saturating_sub(CATCH_UP_NS));
        let start = |p: &Path| p.eligible_at().map(|at| at.max(free_at));
        let candidates =
            self.paths.iter().enumerate().filter_map(|(i, p)| Some((start(p)?, p.last_served, i)));
        candidates.min().filter(|&(at, ..)| at <= now).map(|(at, _, i)| (i, at))
    }

    /// Sends everything whose time has come.
    fn progress(&mut self, now: Nanos) {
        if self.wire.link(self.id) == LinkState::Down {
            return; // The next poll fails what is queued.
        }
        while let Some((i, start)) = self.next_path(now) {
            let Some(Queued { work, .. }) = self.paths[i].queue.front() else { return };
            let work = *work;
            if self.serve(i, work, start) == Err(Full) {
                return; // The receiver is not ready: the message stays at the head and is tried again.
            }
            self.served += 1;
            self.paths[i].last_served = self.served;
            self.paths[i].queue.pop_front();
        }
    }

    fn serve(&mut self, i: usize, work: Work, start: Nanos) -> Result<(), Full> {
        let WorkOp::Write { local, remote, imm } = work.op else { return Ok(()) };
        let peer = self.paths[i].peer;
        if !self.paths[i].arrivals.has_room() {
            return Err(Full);
        }
        if self.wire.link(peer) == LinkState::Down {
            self.failed.push((work.cookie, WorkError::RetryExceeded));
            return Ok(());
        }
        let wire = self.wire.clone();
        let carried = gate::pass(wire.gate(self.id, peer), || self.carry(i, local, remote, imm, start));
        match carried.unwrap_or(Ok(Err(WorkError::RetryExceeded)))? {
            Ok(delivered_at) => {
                self.wire.count(self.id, peer, local.bytes.into());
                self.paths[i].sent(delivered_at);
                self.paths[i].uncompleted += 1;
                self.completions.push(Reverse((delivered_at, i, work.cookie)));
            }
            Err(e) => self.failed.push((work.cookie, e)),
        }
        Ok(())
    }

    /// Writes the bytes and tells the peer; returns when both are due.
    fn carry(
        &mut self,
        i: usize,
        local: LocalSpan,
        remote: RemoteSpan,
        imm: u32,
        start: Nanos,
    ) -> Result<Result<Nanos, WorkError>, Full> {
        let (peer, bytes) = (self.paths[i].peer, u64::from(local.bytes));
        if let Err(e) = self.write_span(peer, local, remote) {
            return Ok(Err(e));
        }
        let sent_at = self.wire.reserve_tx(self.id, start, bytes);
        let delivered_at = self.wire.reserve_rx(peer, start, bytes).max(sent_at);
        let from = u64::from(self.id.0) | (remote.rkey & 0xffff_ffff) << 32;
        let arrival = [delivered_at, u64::from(imm) | (bytes & 0x7fff_ffff) << 32, from, remote.remote_addr];
        self.paths[i].arrivals.push(&arrival)?;
        Ok(Ok(delivered_at))
    }

    fn poll_link(&mut self, events: &mut Vec<NicEvent>) {
        let link = self.wire.link(self.id);
        if link != self.link {
            self.link = link;
            events.push(NicEvent::Link(link));
        }
        if link == LinkState::Down {
            let queued = self.paths.iter_mut().flat_map(|p| p.queue.drain(..));
            self.failed.extend(queued.map(|q| (q.work.cookie, WorkError::LinkDown)));
        }
    }
}

impl Nic for EmuNic {
    fn idx(&self) -> NicIdx {
        self.idx
    }

    fn post(&mut self, work: &[Work], now: Nanos) -> Result<usize, HwError> {
        for (taken, item) in work.iter().enumerate() {
            self.check(item)?;
            match item.op {
                WorkOp::Inline { remote, data, len } => {
                    if let Err(e) = self.send_inline(item.path, remote, &data[..len.into()], now) {
                        self.failed.push((item.cookie, e));
                    }
                }
                WorkOp::Write { .. } => {
                    let path = &mut self.paths[item.path.0 as usize];
                    if path.closing.is_some() {
                        self.failed.push((item.cookie, WorkError::Flushed));
                    } else if path.queue.len() >= QUEUE_DEPTH {
                        return Ok(taken);
                    } else {
                        path.queue.push_back(Queued { work: *item, posted_at: now });
                    }
                }
            }
        }
        self.progress(now);
        Ok(work.len())
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<NicEvent>) -> Result<(), HwError> {
        self.poll_link(events);
        self.progress(now);
        events
            .extend(self.failed.drain(..).map(|(cookie, e)| NicEvent::Completed { cookie, result: Err(e) }));
        while let Some(Reverse((_, path, cookie))) =
            self.completions.peek().copied().filter(|Reverse((at, ..))| *at <= now)
        {
            self.completions.pop();
            self.paths[path].uncompleted -= 1;
            events.push(NicEvent::Completed { cookie, result: Ok(()) });
        }
        if let Some(e) = self.broken.take() {
            return Err(e);
        }
        while let Some([due, imm_bytes, from, offset]) = self.arrivals.peek() {
            if due > now {
                break;
            }
            self.arrivals.advance();
            let (imm, bytes) = (imm_bytes as u32, (imm_bytes >> 32) as u32);
            self.deliver(from >> 32, offset, bytes)?;
            events.push(NicEvent::Arrived { from: NicId(from as u32), imm, bytes });
        }
        self.arrivals.publish();
        Ok(())
    }

    fn flush(&mut self) -> Result<(), HwError> {
        // The peer wrote before it pushed the arrival that we acquired: on coherent memory nothing is left to flush.
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        Ok(())
    }
}

impl NicDevice for EmuNic {
    fn relay_gpu(&self) -> GpuIdx {
        self.relay_gpu
    }

    fn register(&mut self, memory: &Registrable<'_>) -> Result<(LocalKey, RemoteKey), HwError> {
        self.local.add(memory)
    }

    fn registrar(&self) -> Box<dyn Registrar> {
        Box::new(EmuRegistrar(self.local.clone()))
    }

    fn endpoint(&self) -> Vec<u8> {
        self.id.0.to_le_bytes().to_vec()
    }

    fn open_path(&mut self, peer: NicId, endpoint: &[u8]) -> Result<PathId, HwError> {
        let refuse = |reason: String| HwError::OpenPath { nic: self.idx, peer, reason };
        if endpoint != peer.0.to_le_bytes() || peer.0 >= self.wire.nics() {
            return Err(refuse(format!("its endpoint names another NIC ({endpoint:?})")));
        }
        if let Some(&path) = self.path_of.get(&peer) {
            return Ok(path);
        }
        let path = PathId(self.paths.len() as u32);
        let arrivals = self.wire.arrivals_to(peer);
        self.paths.push(Path {
            peer,
            arrivals,
            queue: VecDeque::new(),
            uncompleted: 0,
            closing: None,
            on_the_way: VecDeque::new(),
            last_served: 0,
        });
        self.path_of.insert(peer, path);
        Ok(path)
    }

    fn fence(&mut self, path: PathId) -> Result<(), HwError> {
        let bad = self.bad("path", path.0.into());
        let path = self.paths.get_mut(path.0 as usize).ok_or(bad)?;
        let flushed = path.queue.drain(..).map(|q| (q.work.cookie, WorkError::Flushed));
        self.failed.extend(flushed);
        path.closing.get_or_insert(Closing { arrivals_until: None });
        gate::shut(self.wire.gate(path.peer, self.id));
        Ok(())
    }

    fn is_drained(&mut self, path: PathId) -> bool {
        let Some(path) = self.paths.get_mut(path.0 as usize) else { return true };
        let (peer, uncompleted) = (path.peer, path.uncompleted);
        let Some(closing) = &mut path.closing else { return false };
        if closing.arrivals_until.is_none() && gate::is_empty(self.wire.gate(peer, self.id)) {
            closing.arrivals_until = Some(self.arrivals.claimed());
        }
        let arrived = closing.arrivals_until.is_some_and(|until| self.arrivals.read() >= until);
        arrived && uncompleted == 0 && self.failed.is_empty()
    }

    fn reopen(&mut self, path: PathId) -> Result<(), HwError> {
        let bad = self.bad("path", path.0.into());
        let path = self.paths.get_mut(path.0 as usize).ok_or(bad)?;
        path.closing = None;
        path.on_the_way.clear();
        gate::open(self.wire.gate(path.peer, self.id));
        Ok(())
    }

    fn counters(&self) -> NicCounters {
        self.wire.counters(self.id)
    }
}
