//! The proxy: the thread that carries the engine's decisions to NICs and kernels, and their events back. It has no
//! policy.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::borrow::BorrowedNic;
use crate::channel::{Channel, ProxyEnd};
use crate::credit::{self, CreditEvent, CreditInbox};
use crate::doorbell::{BadDoorbell, Class, Doorbell};
use crate::engine::call::Call;
use crate::engine::slots::SlotLayout;
use crate::engine::{CreditWrite, Engine, EngineError, Post, Sent};
use crate::hw::{
    Clock, HwError, LocalKey, LocalSpan, Nanos, Nic, NicEvent, PathId, RemoteKey, RemoteSpan, Teller, Work,
    WorkError, WorkOp,
};
use crate::load::{LoadLine, LoadTable};
use crate::owner::{CONTROL_COOKIE, OwnedNic};
use crate::topo::{NicId, NicIdx, Rank};

/// The proxy cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProxyError {
    /// The protocol broke, or time ran out.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A device failed.
    #[error(transparent)]
    Hw(#[from] HwError),
    /// A kernel wrote nonsense.
    #[error(transparent)]
    Doorbell(#[from] BadDoorbell),
    /// A credit did not reach a sender.
    #[error("{nic} could not write a credit: {source}")]
    CreditFailed {
        /// The NIC.
        nic: NicIdx,
        /// Why.
        source: WorkError,
    },
    /// The thread could not be started.
    #[error("cannot start the proxy thread: {0}")]
    Spawn(std::io::Error),
    /// The thread panicked.
    #[error("the proxy thread panicked; please report this")]
    Panicked,
}

/// A NIC of the server, as this rank reaches it.
pub enum Port {
    /// This rank owns it.
    Owned(Box<OwnedNic>),
    /// Another rank does.
    Borrowed(BorrowedNic),
    /// It is down.
    Down,
}

/// What one rank's proxy works with.
pub struct ProxyParts {
    /// The state machine.
    pub engine: Engine,
    /// Time.
    pub clock: Box<dyn Clock>,
    /// Rings to and from kernels.
    pub channel: ProxyEnd,
    /// Called when something was written there.
    pub tell_kernels: Teller,
    /// NICs of the server, by index.
    pub ports: Vec<Port>,
    /// Where each NIC's relay memory lies for this GPU.
    pub relay_dev_ptrs: Vec<u64>,
    /// Key of the relay memory beside each NIC of the job.
    pub relay_keys: Vec<RemoteKey>,
    /// Slots of each server's relay memory.
    pub slots: Vec<SlotLayout>,
    /// How credits reach each rank: the NIC by which its segment is written, and its key there.
    pub segments: Vec<Option<(NicId, RemoteKey)>>,
    /// Credits granted to this rank.
    pub inbox: CreditInbox,
    /// What the server's ranks say of their traffic.
    pub load: LoadTable,
    /// While a plan runs, its NICs are leased for this long at a time.
    pub lease_ns: Nanos,
    /// Longest sleep while there is work, and when there has been none for a while.
    pub sleep: [Duration; 2],
}

enum Command {
    Open(Box<Call>),
}

/// What the proxy and its owner share.
struct Shared {
    error: Mutex<Option<ProxyError>>,
    failed: AtomicBool,
    stop: AtomicBool,
    /// Nothing that is under way matters any more.
    abandoned: AtomicBool,
    sent: Mutex<Sent>,
}

/// A running proxy.
pub struct Proxy {
    commands: mpsc::Sender<Command>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Starts the thread. Kernels on `channel` are told to stop when it fails.
    ///
    /// # Errors
    /// [`ProxyError::Spawn`].
    pub fn start(parts: ProxyParts, channel: Arc<Channel>) -> Result<Self, ProxyError> {
        let (commands, inbox) = mpsc::channel();
        let shared = Arc::new(Shared {
            error: Mutex::new(None),
            failed: false.into(),
            stop: false.into(),
            abandoned: false.into(),
            sent: Mutex::default(),
        });
        let (rank, state) = (parts.engine.config().rank, Arc::clone(&shared));
        let run = move || {
            let end = End { state, channel };
            if let Err(e) = Loop::new(parts, inbox).run(&end.state) {
                end.fail(e);
            }
        };
        let thread = std::thread::Builder::new().name(format!("proxy-{}", rank.0)).spawn(run);
        Ok(Self { commands, shared, thread: Some(thread.map_err(ProxyError::Spawn)?) })
    }

    /// Begins a call. Kernels may be launched at once: they wait for their first slots.
    pub fn open(&self, call: Call) {
        // A proxy that has failed takes no commands; `take_error` tells why.
        let _ = self.commands.send(Command::Open(Box::new(call)));
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    /// Whether it has failed; cheap.
    pub fn has_failed(&self) -> bool {
        self.shared.failed.load(Ordering::Acquire)
    }

    /// What the rank has sent so far; up to date once its peers have received it.
    pub fn sent(&self) -> Sent {
        *self.shared.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The job has failed: when the proxy is dropped it need not finish what is under way.
    pub fn abandon(&self) {
        self.shared.abandoned.store(true, Ordering::Release);
    }

    /// Takes the error it failed with.
    pub fn take_error(&self) -> Option<ProxyError> {
        self.shared.error.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// However the thread ends, nobody waits for it in vain.
struct End {
    state: Arc<Shared>,
    channel: Arc<Channel>,
}

impl End {
    fn fail(&self, error: ProxyError) {
        *self.state.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        self.state.failed.store(true, Ordering::Release);
        self.channel.abort();
    }
}

impl Drop for End {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail(ProxyError::Panicked);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                eprintln!("fuselink: {}", ProxyError::Panicked);
            }
        }
    }
}

/// The loop's own state.
struct Loop {
    p: ProxyParts,
    commands: mpsc::Receiver<Command>,
    /// Work that a NIC had no room for.
    backlog: Vec<VecDeque<Work>>,
    events: Vec<NicEvent>,
    lines: Vec<LoadLine>,
    /// Calls whose turn has not come yet.
    to_open: VecDeque<Box<Call>>,
    class: Class,
    idle_rounds: u32,
    worked_at: Nanos,
}

/// Doorbells taken in one round, so that no ring keeps the others waiting.
const DOORBELL_BATCH: usize = 32;
/// After this long without work a proxy looks less often.
const QUIET_NS: Nanos = 20_000_000;
/// How long a proxy that is told to stop goes on for others.
const LEAVE_WITHIN_NS: Nanos = 5_000_000_000;
/// A heartbeat is due this often.
const BEAT_NS: Nanos = 50_000_000;

impl Loop {
    fn new(p: ProxyParts, commands: mpsc::Receiver<Command>) -> Self {
        let nics = p.ports.len();
        Self {
            p,
            commands,
            backlog: vec![VecDeque::new(); nics],
            events: Vec::new(),
            lines: vec![LoadLine::default(); nics],
            to_open: VecDeque::new(),
            class: Class::Put,
            idle_rounds: 0,
            worked_at: 0,
        }
    }

    fn run(&mut self, shared: &Shared) -> Result<(), ProxyError> {
        let mut beaten = 0;
        let mut leave_by = None;
        loop {
            let now = self.p.clock.now();
            let abandoned = shared.abandoned.load(Ordering::Acquire);
            if shared.stop.load(Ordering::Acquire) && (abandoned || self.may_leave(now, &mut leave_by)) {
                return Ok(());
            }
            let mut worked = self.take_commands(now)?;
            worked |= self.take_doorbells(now)?;
            worked |= self.poll_nics(now)?;
            worked |= self.poll_credits(now)?;
            self.update_views(now);
            worked |= self.carry_out()?;
            if worked || now - beaten > BEAT_NS {
                self.publish_load(now);
                *shared.sent.lock().unwrap_or_else(PoisonError::into_inner) = self.p.engine.sent();
                beaten = now;
            }
            self.p.engine.handle_timeout(now)?;
            self.rest(worked, now);
        }
    }

    /// A rank that is done still has others' work: its own sends must reach their peers, and NICs that it owns carry
    /// borrowers' bytes. Bounded, since a peer may be gone.
    fn may_leave(&mut self, now: Nanos, leave_by: &mut Option<Nanos>) -> bool {
        let quiet = |port: &mut Port| match port {
            Port::Owned(nic) => nic.is_quiet(),
            _ => true,
        };
        let backlog = self.backlog.iter().all(VecDeque::is_empty);
        let done = backlog
            && self.p.engine.is_quiet()
            && self.p.engine.turns_finished()
            && self.p.ports.iter_mut().all(quiet);
        done || now > *leave_by.get_or_insert(now + LEAVE_WITHIN_NS)
    }

    /// Sleeps when nothing happened. No yielding first: on a host with fewer cores than ranks that only moves the wait to
    /// somebody else's turn.
    fn rest(&mut self, worked: bool, now: Nanos) {
        if worked {
            (self.idle_rounds, self.worked_at) = (0, now);
            return;
        }
        self.idle_rounds = self.idle_rounds.saturating_add(1);
        let longest = self.p.sleep[usize::from(now - self.worked_at > QUIET_NS)];
        std::thread::park_timeout(if self.idle_rounds == 1 { longest / 2 } else { longest });
    }

    fn take_commands(&mut self, now: Nanos) -> Result<bool, ProxyError> {
        match self.commands.try_recv() {
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => {}
            Ok(Command::Open(call)) => self.to_open.push_back(call),
        }
        // The server's other ranks may still need this rank's NICs in the call before.
        if !self.p.engine.turns_finished() {
            return Ok(false);
        }
        match self.to_open.pop_front() {
            None => Ok(false),
            Some(call) => {
                // What the kernels of the call before rang must be heard before its queues are used again.
                while self.take_doorbells(now)? {}
                self.p.engine.open(&call, now)?;
                self.class = call.class;
                Ok(true)
            }
        }
    }

    fn take_doorbells(&mut self, now: Nanos) -> Result<bool, ProxyError> {
        let mut any = false;
        for ring in &mut self.p.channel.doorbells {
            for _ in 0..DOORBELL_BATCH {
                let Some(words) = ring.pop() else { break };
                self.p.engine.on_doorbell(Doorbell::decode(words)?, now)?;
                any = true;
            }
            ring.publish();
        }
        Ok(any)
    }

    fn poll_nics(&mut self, now: Nanos) -> Result<bool, ProxyError> {
        let mut any = false;
        for k in 0..self.p.ports.len() {
            let mut events = std::mem::take(&mut self.events);
            match &mut self.p.ports[k] {
                Port::Owned(nic) => {
                    nic.poll(now, &mut events)?;
                    for moved in nic.take_moved() {
                        let nic = NicIdx(k as u32);
                        self.p.engine.on_nic_moved(nic, moved.direction, moved.peer, moved.bytes);
                        any = true;
                    }
                }
                Port::Borrowed(nic) => nic.poll(now, &mut events)?,
                Port::Down => {}
            }
            any |= !events.is_empty();
            for event in events.drain(..) {
                self.on_event(NicIdx(k as u32), event, now)?;
            }
            self.events = events;
        }
        Ok(any)
    }

    fn on_event(&mut self, nic: NicIdx, event: NicEvent, now: Nanos) -> Result<(), ProxyError> {
        match event {
            NicEvent::Completed { cookie: CONTROL_COOKIE, result: Err(source) } => {
                return Err(ProxyError::CreditFailed { nic, source });
            }
            NicEvent::Completed { cookie, result } => {
                self.p.engine.on_completed(cookie, result, now)?;
                self.lines[nic.idx()].last_ns[0] = now;
            }
            NicEvent::Arrived { imm, bytes, .. } => {
                self.p.engine.on_arrival(nic, imm, bytes, now)?;
                self.lines[nic.idx()].last_ns[1] = now;
            }
            // Work that was on the way completes with an error of its own.
            NicEvent::Link(_) => {}
        }
        Ok(())
    }

    fn poll_credits(&mut self, now: Nanos) -> Result<bool, ProxyError> {
        let engine = &mut self.p.engine;
        let mut bad = None;
        let any = self.p.inbox.poll(|event| match event {
            CreditEvent::Slot { class, from, nic, lent } => {
                if let Err(e) = engine.on_credit(class, from, nic, lent, now) {
                    bad = Some(e);
                }
            }
            CreditEvent::State { from, nic, call, state } => engine.on_peer_nic_state(from, nic, call, state),
        });
        match bad {
            None => Ok(any),
            Some(e) => Err(e.into()),
        }
    }

    fn update_views(&mut self, now: Nanos) {
        let call = self.p.engine.config().call;
        self.p.load.views(call, now, self.p.engine.views_mut());
    }

    /// What the engine has decided.
    fn carry_out(&mut self) -> Result<bool, ProxyError> {
        let mut any = false;
        let mut told = false;
        while let Some(arm) = self.p.engine.poll_arm() {
            let config = self.p.engine.config();
            let gpu = config.cluster.gpu_of(config.rank);
            let offset = config.slots.send_offset(gpu, arm.class, arm.slot);
            let slot_dev_ptr = self.p.relay_dev_ptrs[arm.nic.idx()] + offset;
            let message = u64::from(arm.piece) << 32 | u64::from(arm.part);
            self.p.channel.arm(arm.queue, arm.idx, slot_dev_ptr, message);
            told = true;
        }
        while let Some(post) = self.p.engine.poll_post() {
            let work = self.work_of(&post);
            self.backlog[post.nic.idx()].push_back(work);
        }
        while let Some(write) = self.p.engine.poll_credit() {
            self.queue_credit(write);
        }
        any |= self.post_backlog()?;
        any |= self.serve_borrowers()?;
        while let Some(arrival) = self.p.engine.poll_publish() {
            let config = self.p.engine.config();
            let gpu = config.cluster.gpu_of(config.rank);
            let offset = config.slots.recv_offset(gpu, arrival.class, arrival.slot);
            self.p.channel.publish(&arrival, self.p.relay_dev_ptrs[arrival.nic.idx()] + offset);
            told = true;
        }
        if told {
            (self.p.tell_kernels)();
        }
        Ok(any || told)
    }

    fn work_of(&self, post: &Post) -> Work {
        let config = self.p.engine.config();
        let cluster = &config.cluster;
        let offset = config.slots.send_offset(cluster.gpu_of(config.rank), post.class, post.slot);
        let local = LocalSpan { key: LocalKey(0), offset, bytes: post.bytes };
        let server = cluster.server_of(post.dst);
        let peer = cluster.nic_id(server, post.dst_nic);
        let key = self.p.relay_keys[peer.idx()];
        let into =
            self.p.slots[server.idx()].recv_offset(cluster.gpu_of(post.dst), post.class, post.dst_slot);
        let remote = RemoteSpan { rkey: key.rkey, remote_addr: key.remote_addr + into };
        Work { path: PathId(peer.0), op: WorkOp::Write { local, remote, imm: post.imm }, cookie: post.cookie }
    }

    fn queue_credit(&mut self, write: CreditWrite) {
        let config = self.p.engine.config();
        let (CreditWrite::Slot { to, .. } | CreditWrite::State { to, .. }) = write;
        // Without a NIC on either side nothing can be sent to this rank, so no credit is missed.
        let (Some(via), Some((peer, key))) = (config.direct_nic, self.p.segments[Rank::idx(to)]) else {
            return;
        };
        let op = credit::write_op(&config.cluster, config.rank, write, key);
        self.backlog[via.idx()].push_back(Work { path: PathId(peer.0), op, cookie: CONTROL_COOKIE });
    }

    /// Work is posted at the time it is posted, not at that of the round's beginning: a device may reckon from it.
    fn post_backlog(&mut self) -> Result<bool, ProxyError> {
        let now = self.p.clock.now();
        let mut any = false;
        for (port, backlog) in self.p.ports.iter_mut().zip(&mut self.backlog) {
            if backlog.is_empty() {
                continue;
            }
            let work = backlog.make_contiguous();
            let taken = match port {
                Port::Owned(nic) => nic.post(work, now)?,
                Port::Borrowed(nic) => nic.post(work, now)?,
                Port::Down => 0,
            };
            backlog.drain(..taken);
            any |= taken > 0;
        }
        Ok(any)
    }

    /// After the owner's own work.
    fn serve_borrowers(&mut self) -> Result<bool, ProxyError> {
        let now = self.p.clock.now();
        let mut any = false;
        for port in &mut self.p.ports {
            if let Port::Owned(nic) = port {
                any |= nic.serve_borrowers(now)?;
            }
        }
        Ok(any)
    }

    fn publish_load(&mut self, now: Nanos) {
        let engine = &self.p.engine;
        let leased = self.class == Class::Plan && engine.is_busy();
        for (k, line) in self.lines.iter_mut().enumerate() {
            let nic = NicIdx(k as u32);
            line.bytes = [engine.egress_bytes(nic), engine.ingress_bytes(nic)];
            line.turns = engine.turns(nic);
            line.lease_until_ns = if leased { now + self.p.lease_ns } else { 0 };
            self.p.load.publish(nic, line);
        }
        self.p.load.beat(now, engine.config().call);
    }
}
