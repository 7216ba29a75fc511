//! The control plane: how the ranks of a job find each other over TCP, exchange small data, and learn of each
//! other's end.
//!
//! A star: rank 0 listens on the root address, the others connect, and both sides prove the job secret. From then
//! on one thread per rank moves frames. Rank 0 passes on contributions, goodbyes, aborts and deaths the moment they
//! come, so that every rank knows for itself who is missing, and every failure reaches everybody:
//!
//! - a connection that ends without a goodbye is a death; everybody's pending and later calls fail with
//!   [`BootstrapError::PeerDied`];
//! - [`Bootstrap::abort`], a call past its deadline, and mismatched calls fail everybody with
//!   [`BootstrapError::Aborted`] (the rank that saw it: with the reason itself);
//! - the first failure counts and stays.
//!
//! Ranks may be processes or threads. A job of one rank opens no socket. End with a barrier before closing: rank 0
//! is the hub, and once it has said goodbye nothing passes between the others.
//!
//! ```
//! use std::{net::TcpListener, thread, time::Duration};
//! use fuselink::comm::bootstrap::{Bootstrap, BootstrapConfig};
//! use fuselink::comm::secret::Secret;
//! use fuselink::topo::Rank;
//!
//! let listener = TcpListener::bind("127.0.0.1:0")?;
//! let config = BootstrapConfig {
//!     rank: Rank(0),
//!     size: 2,
//!     root: listener.local_addr()?,
//!     secret: Secret::generate()?,
//!     deadline: Duration::from_secs(10),
//! };
//! let other = BootstrapConfig { rank: Rank(1), ..config.clone() };
//! let peer = thread::spawn(move || Bootstrap::connect(&other)?.allgather(b"from 1"));
//! let root = Bootstrap::listen(&config, listener)?;
//! assert_eq!(root.allgather(b"from 0")?, [b"from 0", b"from 1"]);
//! # peer.join().unwrap()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod group;
mod link;
mod tcp;
mod wire;

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

pub use super::handshake::{PROTOCOL_VERSION, Refusal};
pub use super::join::TurnedAway;
pub use error::{BootstrapError, Waiting};
pub use wire::{Call, MAX_CONTRIBUTION_BYTES, MAX_REASON_BYTES, WireError};

use super::handshake::Terms;
use super::join::{Host, JoinError, admit_all};
use super::secret::Secret;
use super::wake::{Wake, within};
use crate::topo::Rank;
use group::Group;
use tcp::TcpPipe;

/// Longest that a close waits for its goodbyes to be answered.
const CLOSE_FLUSH: Duration = Duration::from_secs(2);

/// How a rank meets the others.
#[derive(Debug, Clone)]
pub struct BootstrapConfig {
    /// This rank; below `size`.
    pub rank: Rank,
    /// Number of ranks.
    pub size: u32,
    /// Where rank 0 listens. Not used by a job of one rank.
    pub root: SocketAddr,
    /// Proven by every pair that meets.
    pub secret: Secret,
    /// Longest that connecting, or one collective, may take.
    pub deadline: Duration,
}

/// A rank's place in its job.
///
/// Calls may come from several threads; collectives then run one after the other, and their order must be the same
/// on every rank. Dropping it says goodbye, as [`close`](Self::close) does.
pub struct Bootstrap {
    group: Arc<Group>,
    io: Option<JoinHandle<()>>,
    /// Where this process is reached by the others.
    ip: Option<IpAddr>,
}

impl Bootstrap {
    /// Meets the other ranks; returns once all are there. Rank 0 binds the root address.
    ///
    /// # Errors
    /// [`BootstrapError::Place`], [`Listen`](BootstrapError::Listen), [`Connect`](BootstrapError::Connect),
    /// [`Refused`](BootstrapError::Refused), at rank 0 [`RefusedPeer`](BootstrapError::RefusedPeer),
    /// [`Timeout`](BootstrapError::Timeout) with the ranks that have not come, and whatever ends a job.
    pub fn connect(config: &BootstrapConfig) -> Result<Self, BootstrapError> {
        let until = within(config.deadline);
        let mut bootstrap = Self::new(config)?;
        if config.size == 1 {
            return Ok(bootstrap);
        }
        if config.rank.0 == 0 {
            let failed = |source| BootstrapError::Listen { root: config.root, source: Arc::new(source) };
            let listener = TcpListener::bind(config.root).map_err(failed)?;
            bootstrap.ip = Some(config.root.ip());
            bootstrap.admit(config, listener, until)?;
        } else {
            let stream = tcp::reach(config, &terms(config), until)?;
            link::prepare(&stream, config.deadline).map_err(BootstrapError::os("set up a connection"))?;
            bootstrap.ip = stream.local_addr().ok().map(|a| a.ip());
            bootstrap.group.join(0, stream);
            bootstrap.group.wait_present(until)?;
        }
        Ok(bootstrap)
    }

    /// As [`connect`](Self::connect) for rank 0, on a socket that is bound already (so that a launcher can let the
    /// system choose the port).
    ///
    /// # Errors
    /// As [`connect`](Self::connect); [`BootstrapError::NotRoot`] on another rank.
    pub fn listen(config: &BootstrapConfig, listener: TcpListener) -> Result<Self, BootstrapError> {
        let until = within(config.deadline);
        if config.rank.0 != 0 {
            return Err(BootstrapError::NotRoot { rank: config.rank });
        }
        let mut bootstrap = Self::new(config)?;
        bootstrap.ip = listener.local_addr().ok().map(|a| a.ip());
        bootstrap.admit(config, listener, until)?;
        Ok(bootstrap)
    }

    fn new(config: &BootstrapConfig) -> Result<Self, BootstrapError> {
        let &BootstrapConfig { rank, size, .. } = config;
        if rank.0 >= size {
            return Err(BootstrapError::Place { rank, size });
        }
        let group = Arc::new(Group::new(rank.0, size, config.deadline)?);
        let io = if size == 1 { None } else { Some(start(group.clone())?) };
        Ok(Self { group, io, ip: None })
    }

    /// Rank 0: lets everybody in.
    fn admit(
        &self,
        config: &BootstrapConfig,
        listener: TcpListener,
        until: Instant,
    ) -> Result<(), BootstrapError> {
        tcp::widen(&listener).map_err(BootstrapError::os("prepare the listening socket"))?;
        let wake = Arc::new(Wake::new().map_err(BootstrapError::os("make an event descriptor"))?);
        let on_failure = wake.clone();
        self.group.on_failure(Box::new(move |_| on_failure.set()));
        let mut host = Root { group: &self.group, deadline: config.deadline };
        let failure = match admit_all(&listener, &terms(config), until, &wake, &mut host) {
            Ok(()) => return Ok(()),
            Err(JoinError::Stopped(failure)) => failure,
            Err(JoinError::Refused { from, refusal }) => BootstrapError::RefusedPeer { from, refusal },
            Err(JoinError::Os { operation, source }) => BootstrapError::os(operation)(source),
            Err(JoinError::Missing { turned_away }) => BootstrapError::Timeout {
                call: Waiting::Connect,
                missing: self.group.absent(),
                waited: config.deadline,
                turned_away,
            },
        };
        Err(self.group.give_up(failure))
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        Rank(self.group.rank)
    }

    /// The address by which the other ranks reach this process's host, where one is known.
    pub fn local_ip(&self) -> Option<IpAddr> {
        self.ip.filter(|ip| !ip.is_unspecified())
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.group.size
    }

    /// Everybody's bytes, in rank order. Lengths may differ; each at most [`MAX_CONTRIBUTION_BYTES`].
    ///
    /// When it returns on another rank than 0, the system has this rank's part: the others get it even if this
    /// process ends now.
    ///
    /// # Errors
    /// [`BootstrapError::TooLong`] before anything is sent; [`Timeout`](BootstrapError::Timeout) with the ranks that
    /// have not come; [`PeerDied`](BootstrapError::PeerDied), [`PeerLeft`](BootstrapError::PeerLeft),
    /// [`Aborted`](BootstrapError::Aborted), [`Mismatch`](BootstrapError::Mismatch),
    /// [`Protocol`](BootstrapError::Protocol).
    pub fn allgather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let parts = self.group.gather(Call::Allgather, bytes, self.group.deadline)?;
        Ok(parts.into_iter().map(Arc::unwrap_or_clone).collect())
    }

    /// Returns once every rank has called it.
    ///
    /// # Errors
    /// As [`allgather`](Self::allgather).
    pub fn barrier(&self) -> Result<(), BootstrapError> {
        self.barrier_within(self.group.deadline)
    }

    /// A barrier to which some ranks may come later than the job's deadline, after long work of different length.
    ///
    /// # Errors
    /// As [`allgather`](Self::allgather).
    pub fn barrier_within(&self, deadline: Duration) -> Result<(), BootstrapError> {
        self.group.gather(Call::Barrier, &[], deadline).map(drop)
    }

    /// Rank 0's bytes, on every rank; what others pass is not looked at. Also a barrier.
    ///
    /// # Errors
    /// As [`allgather`](Self::allgather).
    pub fn broadcast(&self, bytes: &[u8]) -> Result<Vec<u8>, BootstrapError> {
        let bytes = if self.group.rank == 0 { bytes } else { &[] };
        let mut parts = self.group.gather(Call::Broadcast, bytes, self.group.deadline)?;
        Ok(Arc::unwrap_or_clone(parts.swap_remove(0)))
    }

    /// Ends the job for everybody: all pending and later calls of all ranks fail with
    /// [`BootstrapError::Aborted`]. `reason` becomes one line of at most [`MAX_REASON_BYTES`]. Returns when the
    /// word is on its way, within a second. A job that has failed already keeps its first failure.
    pub fn abort(&self, reason: &str) {
        self.group.give_up(self.group.aborted(reason));
    }

    /// The job's failure, if there is one.
    pub fn failure(&self) -> Option<BootstrapError> {
        self.group.failure()
    }

    /// True from the moment the job has failed: one load, for a loop that must not wait. Load with `Acquire` or ask
    /// [`failure`](Self::failure) for the reason.
    pub fn failure_flag(&self) -> Arc<AtomicBool> {
        self.group.failed_flag()
    }

    /// Calls back once, when the job fails; at once if it has failed already. Runs on the thread that moves
    /// messages: it must be short and must not make collective calls.
    pub fn on_failure(&self, callback: impl FnOnce(&BootstrapError) + Send + 'static) {
        self.group.on_failure(Box::new(callback));
    }

    /// Says goodbye, so that the end of this rank is not taken for its death.
    ///
    /// # Errors
    /// The job's failure, if it had failed.
    pub fn close(mut self) -> Result<(), BootstrapError> {
        self.leave();
        self.failure().map_or(Ok(()), Err)
    }

    fn leave(&mut self) {
        let Some(io) = self.io.take() else { return };
        let until = Instant::now() + CLOSE_FLUSH.min(self.group.deadline);
        self.group.lock().closing = Some(until);
        self.group.wake.set();
        // A callback may own the last handle; its thread cannot wait for itself.
        if io.thread().id() != thread::current().id() && io.join().is_err() {
            eprintln!("fuselink: the bootstrap thread of rank {} panicked", self.group.rank);
        }
    }
}

impl Drop for Bootstrap {
    fn drop(&mut self) {
        self.leave();
    }
}

impl std::fmt::Debug for Bootstrap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bootstrap").field("rank", &self.group.rank).field("size", &self.group.size).finish()
    }
}

fn start(group: Arc<Group>) -> Result<JoinHandle<()>, BootstrapError> {
    let run = move || link::run(&group);
    thread::Builder::new()
        .name("fl-bootstrap".into())
        .spawn(run)
        .map_err(BootstrapError::os("start a thread"))
}

fn terms(config: &BootstrapConfig) -> Terms {
    let secret = config.secret.clone();
    Terms { realm: b"bootstrap".to_vec(), secret, rank: config.rank.0, size: config.size }
}

/// Rank 0 as the host of the meeting.
struct Root<'a> {
    group: &'a Group,
    deadline: Duration,
}

impl Host for Root<'_> {
    type Pipe = TcpPipe;
    type Stop = BootstrapError;

    fn welcome(&mut self, rank: u32, pipe: TcpPipe) -> Result<(), BootstrapError> {
        let stream: TcpStream = pipe.0;
        link::prepare(&stream, self.deadline).map_err(BootstrapError::os("set up a connection"))?;
        self.group.join(rank, stream);
        Ok(())
    }

    fn check(&mut self) -> Result<(), BootstrapError> {
        self.group.failure().map_or(Ok(()), Err)
    }
}
