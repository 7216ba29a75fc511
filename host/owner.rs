//! A NIC in the process that owns it: the owner's own work first, then what borrowers hand over, within a bound; then
//! completions and arrivals go back to whom they belong.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::borrow::{BadHandover, BorrowerPort};
use crate::doorbell::Class;
use crate::engine::call::Direction;
use crate::engine::immediate::Immediate;
use crate::engine::slots::SlotLayout;
use crate::hw::{HwError, LocalKey, Nanos, Nic, NicDevice, NicEvent, PathId, Work, WorkOp};
use crate::topo::{Cluster, GpuIdx, NicId, NicIdx, ServerId};

/// Completions of control words come only when they fail; they all carry this.
pub const CONTROL_COOKIE: u64 = (1 << 62) - 1;

/// What a NIC's owner needs to know.
pub struct OwnedNicConfig {
    /// The job.
    pub cluster: Arc<Cluster>,
    /// This server.
    pub server: ServerId,
    /// This process's GPU.
    pub owner: GpuIdx,
    /// Slots beside the NIC.
    pub slots: SlotLayout,
    /// The relay memory, as registered with the device.
    pub relay: LocalKey,
    /// Path to each NIC of the job, where one is open.
    pub paths: Vec<Option<PathId>>,
    /// Bytes of borrowers, outside of plans, that may be with the device: the longest that the owner waits for them.
    pub borrow_bytes: u64,
}

/// Work that is with the device.
struct InFlight {
    /// Place in `borrowers`; `None`: the owner's own.
    borrower: Option<usize>,
    cookie: u64,
    peer: ServerId,
    bytes: u64,
    class: Option<Class>,
}

struct Borrower {
    port: BorrowerPort,
    /// Events that found its ring full.
    kept: VecDeque<NicEvent>,
}

/// Payload of a plan moved through the NIC, for the turns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moved {
    /// Which way.
    pub direction: Direction,
    /// The other server.
    pub peer: ServerId,
    /// Payload.
    pub bytes: u64,
}

/// The NIC, its device and its borrowers.
pub struct OwnedNic {
    device: Box<dyn NicDevice>,
    config: OwnedNicConfig,
    borrowers: Vec<Borrower>,
    in_flight: Vec<Option<InFlight>>,
    free: Vec<usize>,
    borrowed_bytes: u64,
    moved: Vec<Moved>,
    events: Vec<NicEvent>,
}

impl OwnedNic {
    /// A NIC with its borrowers' rings.
    pub fn new(device: Box<dyn NicDevice>, config: OwnedNicConfig, ports: Vec<BorrowerPort>) -> Self {
        let borrowers = ports.into_iter().map(|port| Borrower { port, kept: VecDeque::new() }).collect();
        Self {
            device,
            config,
            borrowers,
            in_flight: Vec::new(),
            free: Vec::new(),
            borrowed_bytes: 0,
            moved: Vec::new(),
            events: Vec::new(),
        }
    }

    /// What moved since the last call.
    pub fn take_moved(&mut self) -> impl Iterator<Item = Moved> + '_ {
        self.moved.drain(..)
    }

    /// Whether nothing is with the device, and no borrower has handed over or is owed anything.
    pub fn is_quiet(&mut self) -> bool {
        let quiet = |b: &mut Borrower| b.kept.is_empty() && matches!(b.port.peek(), Ok(None));
        self.in_flight.iter().all(Option::is_none) && self.borrowers.iter_mut().all(quiet)
    }

    /// The device, for its counters.
    pub fn device(&self) -> &dyn NicDevice {
        &*self.device
    }

    fn bad(&self, field: &'static str, value: u64) -> HwError {
        HwError::BadWork { nic: self.device.idx(), field, value }
    }

    /// Checks an item from anybody and makes it the device's.
    fn translate(&mut self, work: &Work, borrower: Option<usize>) -> Result<Work, HwError> {
        let peer = NicId(work.path.0);
        let path = self.config.paths.get(peer.idx()).copied().flatten();
        let path = path.ok_or(self.bad("path", peer.0.into()))?;
        let WorkOp::Write { mut local, remote, imm } = work.op else {
            return Ok(Work {
                path,
                cookie: CONTROL_COOKIE - 1 - borrower.map_or(0, |b| b as u64 + 1),
                ..*work
            });
        };
        let gpu = borrower.map_or(self.config.owner, |b| self.borrowers[b].port.gpu);
        if !self.config.slots.is_send_span(gpu, local.offset, local.bytes) {
            return Err(self.bad("send slot", local.offset));
        }
        local.key = self.config.relay;
        let item = InFlight {
            borrower,
            cookie: work.cookie,
            peer: self.config.cluster.server_of_nic(peer),
            bytes: local.bytes.into(),
            class: Immediate::decode(imm).map(|i| i.class),
        };
        let cookie = self.free.pop().unwrap_or_else(|| {
            self.in_flight.push(None);
            self.in_flight.len() - 1
        });
        self.in_flight[cookie] = Some(item);
        Ok(Work { path, op: WorkOp::Write { local, remote, imm }, cookie: cookie as u64 })
    }

    /// Undoes `translate` for an item that the device had no room for.
    fn put_back(&mut self, work: &Work) {
        if let WorkOp::Write { .. } = work.op {
            self.in_flight[work.cookie as usize] = None;
            self.free.push(work.cookie as usize);
        }
    }

    fn post_one(&mut self, work: &Work, borrower: Option<usize>, now: Nanos) -> Result<bool, HwError> {
        let translated = self.translate(work, borrower)?;
        let taken = self.device.post(&[translated], now)? == 1;
        if !taken {
            self.put_back(&translated);
        }
        Ok(taken)
    }

    /// Takes work from borrowers, one item of each in turn, while it is within the bound. True if any was taken.
    ///
    /// # Errors
    /// [`HwError::BadWork`] for what no borrower of this library writes.
    pub fn serve_borrowers(&mut self, now: Nanos) -> Result<bool, HwError> {
        let mut any = false;
        let mut more = true;
        while more {
            more = false;
            for b in 0..self.borrowers.len() {
                more |= self.serve_one(b, now)?;
            }
            any |= more;
        }
        Ok(any)
    }

    fn serve_one(&mut self, b: usize, now: Nanos) -> Result<bool, HwError> {
        let peeked = self.borrowers[b].port.peek();
        let work = match peeked {
            Ok(Some(work)) => work,
            Ok(None) => return Ok(false),
            Err(BadHandover { words, .. }) => return Err(self.bad("borrowed work", words[0])),
        };
        let bounded = bounded_bytes(&work);
        if bounded > 0 && self.borrowed_bytes > 0 && self.borrowed_bytes + bounded > self.config.borrow_bytes
        {
            return Ok(false);
        }
        if !self.post_one(&work, Some(b), now)? {
            return Ok(false);
        }
        self.borrowed_bytes += bounded;
        self.borrowers[b].port.take();
        Ok(true)
    }

    fn completed(&mut self, cookie: u64, event: NicEvent, own: &mut Vec<NicEvent>) -> Result<(), HwError> {
        let NicEvent::Completed { result, .. } = event else { return Ok(()) };
        if cookie >= CONTROL_COOKIE - 1 - self.borrowers.len() as u64 {
            let source = CONTROL_COOKIE - 1 - cookie;
            let event = NicEvent::Completed { cookie: CONTROL_COOKIE, result };
            self.give(source.checked_sub(1).map(|b| b as usize), event, own);
            return Ok(());
        }
        let item = self.in_flight.get_mut(cookie as usize).and_then(Option::take);
        let item = item.ok_or(self.bad("completion", cookie))?;
        self.free.push(cookie as usize);
        match item.class {
            Some(Class::Plan) => {
                let direction = Direction::Egress;
                self.moved.push(Moved { direction, peer: item.peer, bytes: item.bytes });
            }
            _ if item.borrower.is_some() => self.borrowed_bytes -= item.bytes,
            _ => {}
        }
        self.give(item.borrower, NicEvent::Completed { cookie: item.cookie, result }, own);
        Ok(())
    }

    fn arrived(&mut self, event: NicEvent, own: &mut Vec<NicEvent>) -> Result<(), HwError> {
        let NicEvent::Arrived { from, imm, bytes } = event else { return Ok(()) };
        let decoded = Immediate::decode(imm).ok_or(self.bad("immediate", imm.into()))?;
        if decoded.class == Class::Plan {
            let peer = self.config.cluster.server_of_nic(from);
            self.moved.push(Moved { direction: Direction::Ingress, peer, bytes: bytes.into() });
        }
        if decoded.gpu == self.config.owner {
            own.push(event);
            return Ok(());
        }
        let to = self.borrowers.iter().position(|b| b.port.gpu == decoded.gpu);
        let to = to.ok_or(self.bad("destination GPU", decoded.gpu.0.into()))?;
        self.give(Some(to), event, own);
        Ok(())
    }

    /// Hands an event to a borrower, behind those kept for it, or to the owner.
    fn give(&mut self, to: Option<usize>, event: NicEvent, own: &mut Vec<NicEvent>) {
        let Some(b) = to else { return own.push(event) };
        let borrower = &mut self.borrowers[b];
        if !borrower.kept.is_empty() || borrower.port.give(&event).is_err() {
            borrower.kept.push_back(event);
        }
    }

    fn give_kept(&mut self) {
        for borrower in &mut self.borrowers {
            while let Some(event) = borrower.kept.front() {
                if borrower.port.give(event).is_err() {
                    break;
                }
                borrower.kept.pop_front();
            }
        }
    }
}

/// Bytes that count against the bound: a plan has leased its NICs, and control words are small.
fn bounded_bytes(work: &Work) -> u64 {
    match work.op {
        WorkOp::Write { local, imm, .. } => match Immediate::decode(imm) {
            Some(Immediate { class: Class::Plan, .. }) => 0,
            _ => local.bytes.into(),
        },
        WorkOp::Inline { .. } => 0,
    }
}

/// The owner's own use of it; path numbers are the peers' NIC numbers, as on a borrowed NIC.
impl Nic for OwnedNic {
    fn idx(&self) -> NicIdx {
        self.device.idx()
    }

    fn post(&mut self, work: &[Work], now: Nanos) -> Result<usize, HwError> {
        for (taken, item) in work.iter().enumerate() {
            if !self.post_one(item, None, now)? {
                return Ok(taken);
            }
        }
        Ok(work.len())
    }

    fn poll(&mut self, now: Nanos, own: &mut Vec<NicEvent>) -> Result<(), HwError> {
        self.give_kept();
        let mut events = std::mem::take(&mut self.events);
        self.device.poll(now, &mut events)?;
        if events.iter().any(|e| matches!(e, NicEvent::Arrived { .. })) {
            self.device.flush()?; // Once per batch, before anybody is told.
        }
        for event in events.drain(..) {
            match event {
                NicEvent::Completed { cookie, .. } => self.completed(cookie, event, own)?,
                NicEvent::Arrived { .. } => self.arrived(event, own)?,
                NicEvent::Link(_) => {
                    own.push(event);
                    (0..self.borrowers.len()).for_each(|b| self.give(Some(b), event, own));
                }
            }
        }
        self.events = events;
        Ok(())
    }

    fn flush(&mut self) -> Result<(), HwError> {
        self.device.flush()
    }
}
