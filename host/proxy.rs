//! The proxy: the thread that carries the engine's decisions to NICs and kernels, and their events back. It has no
//! policy.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};

mod carry;
mod fixed;
mod local;
mod ports;
mod rounds;

pub use fixed::{ArmedSlot, FixedQueue};
pub use local::{LocalCell, LocalCells};
pub use ports::Port;
pub use rounds::{LotPtrs, ProxyParts, Rounds};

use crate::borrow::RingCounters;
use crate::channel::Channel;
use crate::doorbell::{BadDoorbell, Class, Doorbell};
use crate::engine::call::Call;
use crate::engine::{EngineError, Publish, Sent};
use crate::hw::{HwError, RemoteKey};
use crate::owner::PathCounters;
use crate::topo::{NicIdx, Rank};

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
    /// A kernel does what a fixed window does.
    #[error(
        "a kernel uses the stream to or from {peer}, which has a fixed window; a stream has one or the other"
    )]
    FixedStream {
        /// The stream's other end.
        peer: Rank,
    },
    /// The thread could not be started.
    #[error("cannot start the proxy thread: {0}")]
    Spawn(std::io::Error),
    /// The thread panicked.
    #[error("the proxy thread panicked; please report this")]
    Panicked,
}

enum Command {
    Open(Box<Call>),
    MoveLocal(Box<LocalCells>),
    LotLent { nic: NicIdx, class: Class, dev_ptr: u64, key: RemoteKey },
    RecallLot { nic: NicIdx, class: Class },
    FixSend { dst: Rank, slots: Arc<FixedQueue<ArmedSlot>> },
    FixRecv { src: Rank, arrivals: Arc<FixedQueue<Publish>> },
    Ring(Doorbell),
}

/// Sends commands to a proxy, and does not keep it: what is said to one that has ended is lost.
#[derive(Clone)]
pub struct ProxyBell {
    commands: mpsc::Sender<Command>,
    thread: Thread,
}

impl ProxyBell {
    /// What a kernel would ring: a slot of a [`FixedQueue`] is filled, or was read. Never waits.
    pub fn ring(&self, doorbell: Doorbell) {
        let _ = self.commands.send(Command::Ring(doorbell));
        self.thread.unpark();
    }
}

/// What the proxy and its owner share.
struct Shared {
    error: Mutex<Option<ProxyError>>,
    failed: AtomicBool,
    stop: AtomicBool,
    /// Nothing that is under way matters any more.
    abandoned: AtomicBool,
    sent: Mutex<Sent>,
    paths: Mutex<PathCounters>,
    rings: Mutex<RingCounters>,
    links_down: Mutex<Vec<NicIdx>>,
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
            paths: Mutex::default(),
            rings: Mutex::default(),
            links_down: Mutex::default(),
        });
        let (rank, state) = (parts.engine.config().rank, Arc::clone(&shared));
        let run = move || {
            let end = End { state, channel };
            if let Err(e) = run(Rounds::new(parts), &inbox, &end.state) {
                end.fail(e);
            }
        };
        let thread = std::thread::Builder::new().name(format!("proxy-{}", rank.0)).spawn(run);
        Ok(Self { commands, shared, thread: Some(thread.map_err(ProxyError::Spawn)?) })
    }

    /// Begins a call. Kernels may be launched at once: they wait for their first slots.
    pub fn open(&self, call: Call) {
        self.command(Command::Open(Box::new(call)));
    }

    /// Moves the cells of the call that is opened next, as soon as their peers have come to it: its kernel does not.
    pub fn move_local(&self, cells: LocalCells) {
        self.command(Command::MoveLocal(Box::new(cells)));
    }

    /// Memory for this rank's slots of a class beside a NIC is mapped at `dev_ptr` and registered; remote ranks write there by
    /// `key`. Calls that are opened after this use it.
    pub fn lot_lent(&self, nic: NicIdx, class: Class, dev_ptr: u64, key: RemoteKey) {
        self.command(Command::LotLent { nic, class, dev_ptr, key });
    }

    /// Its owner asks for it back; [`ProxyParts::on_lot_returned`] hears when nothing uses it any more.
    pub fn recall_lot(&self, nic: NicIdx, class: Class) {
        self.command(Command::RecallLot { nic, class });
    }

    /// From now on the slots for messages to a rank go to a thread of the user's, not to kernels; those too that were armed
    /// before, none of which a kernel has claimed.
    pub fn fix_send(&self, dst: Rank, slots: Arc<FixedQueue<ArmedSlot>>) {
        self.command(Command::FixSend { dst, slots });
    }

    /// The same for messages from a rank.
    pub fn fix_recv(&self, src: Rank, arrivals: Arc<FixedQueue<Publish>>) {
        self.command(Command::FixRecv { src, arrivals });
    }

    /// What rings in the place of kernels. `None` once the proxy has ended.
    pub fn bell(&self) -> Option<ProxyBell> {
        let thread = self.thread.as_ref()?.thread().clone();
        Some(ProxyBell { commands: self.commands.clone(), thread })
    }

    fn command(&self, command: Command) {
        // A proxy that has failed takes no commands; `take_error` tells why.
        let _ = self.commands.send(command);
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

    /// What has happened to the paths of the rank's NICs so far.
    pub fn path_counters(&self) -> PathCounters {
        *self.shared.paths.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What went through the rings between the server's processes so far, as this rank sees them.
    pub fn ring_counters(&self) -> RingCounters {
        *self.shared.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// NICs of this rank's whose link carries nothing.
    pub fn links_down(&self) -> Vec<NicIdx> {
        self.shared.links_down.lock().unwrap_or_else(PoisonError::into_inner).clone()
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

/// The thread.
fn run(mut rounds: Rounds, commands: &mpsc::Receiver<Command>, shared: &Shared) -> Result<(), ProxyError> {
    loop {
        let abandoned = shared.abandoned.load(Ordering::Acquire);
        if shared.stop.load(Ordering::Acquire) && (abandoned || rounds.may_leave()) {
            return Ok(());
        }
        for command in commands.try_iter() {
            match command {
                Command::Open(call) => rounds.open(call),
                Command::MoveLocal(cells) => rounds.move_local(*cells),
                Command::LotLent { nic, class, dev_ptr, key } => rounds.lot_lent(nic, class, dev_ptr, key),
                Command::RecallLot { nic, class } => rounds.recall_lot(nic, class),
                Command::FixSend { dst, slots } => rounds.fix_send(dst, slots),
                Command::FixRecv { src, arrivals } => rounds.fix_recv(src, arrivals),
                Command::Ring(doorbell) => rounds.ring(doorbell)?,
            }
        }
        if rounds.round()? {
            *shared.sent.lock().unwrap_or_else(PoisonError::into_inner) = rounds.engine().sent();
            *shared.paths.lock().unwrap_or_else(PoisonError::into_inner) = rounds.path_counters();
            *shared.rings.lock().unwrap_or_else(PoisonError::into_inner) = rounds.ring_counters();
            let mut links_down = shared.links_down.lock().unwrap_or_else(PoisonError::into_inner);
            links_down.clear();
            links_down.extend(rounds.links_down());
        }
        // No yielding first: on a host with fewer cores than ranks that only moves the wait to somebody else's turn.
        if let Some(rest) = rounds.rest() {
            std::thread::park_timeout(rest);
        }
    }
}
