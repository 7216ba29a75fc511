//! How the ranks of one server meet and hand each other descriptors (memory chunks, rings).
//!
//! Over a Unix socket in the abstract namespace, so that no file is left behind. Its name is a hash of the job's
//! secret, the job's name and the server's number; abstract names belong to a network namespace. Both sides check
//! that the other is the same user, and prove the secret. A star through local rank 0, which passes every packet on
//! the moment it comes, so that each rank sees for itself who is missing. A failure is told to all and stays.
//!
//! ```
//! use std::{os::fd::AsFd, thread, time::Duration};
//! use fuselink::comm::local::{LocalConfig, LocalGroup};
//! use fuselink::comm::secret::Secret;
//!
//! let config = |local_rank, secret| LocalConfig {
//!     server: 0, local_rank, local_size: 2, job: "doc".into(), secret, deadline: Duration::from_secs(10),
//! };
//! let (zero, one) = { let s = Secret::generate()?; (config(0, s.clone()), config(1, s)) };
//! let peer = thread::spawn(move || LocalGroup::connect(&one)?.allgather_fds(&[], b"none"));
//! let file = std::fs::File::open("/dev/null")?;
//! let all = LocalGroup::connect(&zero)?.allgather_fds(&[file.as_fd()], b"null")?;
//! assert_eq!((all[0].0.len(), &all[1].1[..]), (1, &b"none"[..]));
//! # assert_eq!(peer.join().unwrap()?[0].0.len(), 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod exchange;
mod meet;
mod packet;

use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub use super::handshake::Refusal;
pub use super::join::TurnedAway;
pub use packet::PacketError;

use super::secret::Secret;
use super::wake::within;
use exchange::{Exchange, Part, Peer};

/// Most descriptors that one rank may give to one call.
pub const MAX_FDS: usize = 1 << 16;
/// Most bytes that one rank may give to one call.
pub const MAX_BYTES: usize = 64 << 20;

/// How a rank meets the others of its server.
#[derive(Debug, Clone)]
pub struct LocalConfig {
    /// The server's number in the job.
    pub server: u32,
    /// This rank's place in the server; below `local_size`.
    pub local_rank: u32,
    /// Number of ranks in the server.
    pub local_size: u32,
    /// Tells groups apart that share a secret, on one host: the same text on every rank of the group.
    pub job: String,
    /// Proven by every pair that meets.
    pub secret: Secret,
    /// Longest that connecting, or one call, may take.
    pub deadline: Duration,
}

/// A local operation failed. Ranks are local ranks. Cheap to clone: a failure is told to every later call.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum LocalError {
    /// Rank and size do not fit each other.
    #[error(
        "local rank {local_rank} does not fit a server of {local_size} ranks; they count from 0 to size - 1"
    )]
    Place {
        /// The rank.
        local_rank: u32,
        /// Number of ranks.
        local_size: u32,
    },
    /// Local rank 0 could not open the meeting place.
    #[error(
        "cannot open the meeting place of server {server}: {source}; is a local rank 0 of this job running already?"
    )]
    Listen {
        /// The server.
        server: u32,
        /// The system's reason.
        source: Arc<io::Error>,
    },
    /// Local rank 0 could not be reached before the deadline.
    #[error(
        "no local rank 0 of this job on server {server} within {waited:?} ({source}); is it running, on this host and in this network namespace, and with the same FUSELINK_SECRET?"
    )]
    Connect {
        /// The server.
        server: u32,
        /// How long it was tried.
        waited: Duration,
        /// The last attempt's failure.
        source: Arc<io::Error>,
    },
    /// This process and local rank 0 do not belong together.
    #[error("refused by local rank 0 of server {server}: {refusal}")]
    Refused {
        /// The server.
        server: u32,
        /// Why.
        refusal: Refusal,
    },
    /// A process of this job came to local rank 0 with a wrong setting.
    #[error("refused {from} among the local ranks of server {server}: {refusal}")]
    RefusedPeer {
        /// The server.
        server: u32,
        /// Who came.
        from: String,
        /// Why.
        refusal: Refusal,
    },
    /// Ranks have not come before the deadline.
    #[error(
        "{call} on server {server}: local ranks {} have not come within {waited:?}{}",
        List(missing),
        Told(turned_away)
    )]
    Timeout {
        /// What this rank waited in.
        call: &'static str,
        /// The server.
        server: u32,
        /// Who has not come. Only rank 0, when nothing has: the others' packets pass through it.
        missing: Vec<u32>,
        /// The deadline of this rank, or of the one that told.
        waited: Duration,
        /// At local rank 0: who came and was turned away.
        turned_away: Vec<TurnedAway>,
    },
    /// A rank's connection has ended: it closed its group, or died.
    #[error("local rank {local_rank} has gone: its connection is closed")]
    Gone {
        /// Who.
        local_rank: u32,
    },
    /// Another rank failed and told why.
    #[error("local rank {local_rank} failed: {reason}")]
    Failed {
        /// Who.
        local_rank: u32,
        /// Why, in one line.
        reason: String,
    },
    /// More than a call carries.
    #[error("{fds} descriptors and {bytes} bytes are more than one call carries ({MAX_FDS} and {MAX_BYTES})")]
    TooMuch {
        /// How many descriptors.
        fds: usize,
        /// How many bytes.
        bytes: usize,
    },
    /// A rank sent what it must not.
    #[error("local rank {local_rank} broke the protocol: {source}")]
    Protocol {
        /// Who.
        local_rank: u32,
        /// What it sent.
        source: PacketError,
    },
    /// A system call failed.
    #[error("cannot {operation}: {source}")]
    Os {
        /// What was tried.
        operation: &'static str,
        /// The system's reason.
        source: Arc<io::Error>,
    },
}

impl LocalError {
    fn os(operation: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Os { operation, source: Arc::new(source) }
    }
}

struct List<'a>(&'a [u32]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<_> = self.0.iter().map(u32::to_string).collect();
        f.write_str(&all.join(", "))
    }
}

struct Told<'a>(&'a [TurnedAway]);

impl fmt::Display for Told<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, t) in self.0.iter().enumerate() {
            write!(f, "{}{t}", if i == 0 { "; turned away " } else { ", " })?;
        }
        Ok(())
    }
}

/// What one rank gave to a call: descriptors and bytes.
pub type Given = (Vec<OwnedFd>, Vec<u8>);

/// A rank's place among the ranks of its server. Dropping it closes its connections.
#[derive(Debug)]
pub struct LocalGroup {
    server: u32,
    local_rank: u32,
    local_size: u32,
    deadline: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    peers: Vec<Peer>,
    /// Number of the next call.
    seq: u64,
    failure: Option<LocalError>,
}

impl LocalGroup {
    /// Meets the other ranks of the server; returns once all are there.
    ///
    /// # Errors
    /// [`LocalError::Place`], [`Listen`](LocalError::Listen), [`Connect`](LocalError::Connect) (also when the secrets
    /// differ: then so do the meeting places), [`Refused`](LocalError::Refused),
    /// [`RefusedPeer`](LocalError::RefusedPeer), [`Timeout`](LocalError::Timeout) with the ranks that have not come.
    pub fn connect(config: &LocalConfig) -> Result<Self, LocalError> {
        let &LocalConfig { server, local_rank, local_size, deadline, .. } = config;
        if local_rank >= local_size {
            return Err(LocalError::Place { local_rank, local_size });
        }
        let peers = if local_size == 1 { Vec::new() } else { meet::meet(config, &meet::name(config))? };
        let state = Mutex::new(State { peers, seq: 0, failure: None });
        Ok(Self { server, local_rank, local_size, deadline, state })
    }

    /// This rank's place in the server.
    pub fn local_rank(&self) -> u32 {
        self.local_rank
    }

    /// Number of ranks in the server.
    pub fn local_size(&self) -> u32 {
        self.local_size
    }

    /// Everybody's descriptors and bytes, by local rank, in the order given. All returned descriptors are new, this
    /// rank's own too, and close on exec. While a call runs, a process holds all descriptors of all ranks: the
    /// limit on open files (RLIMIT_NOFILE) must allow for it.
    ///
    /// # Errors
    /// [`LocalError::TooMuch`] before anything is sent; then, for this and all later calls,
    /// [`Timeout`](LocalError::Timeout) with the ranks that have not come, [`Gone`](LocalError::Gone),
    /// [`Failed`](LocalError::Failed), [`Protocol`](LocalError::Protocol), [`Os`](LocalError::Os).
    pub fn allgather_fds(&self, fds: &[BorrowedFd<'_>], bytes: &[u8]) -> Result<Vec<Given>, LocalError> {
        if fds.len() > MAX_FDS || bytes.len() > MAX_BYTES {
            return Err(LocalError::TooMuch { fds: fds.len(), bytes: bytes.len() });
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let seq = state.seq;
        state.seq += 1;
        let result = self.exchange(&mut state.peers, seq, fds, bytes);
        if let Err(failure) = &result {
            meet::tell(&mut state.peers, self.local_rank, failure);
            state.failure = Some(failure.clone());
        }
        result
    }

    fn exchange(
        &self,
        peers: &mut [Peer],
        seq: u64,
        fds: &[BorrowedFd<'_>],
        bytes: &[u8],
    ) -> Result<Vec<Given>, LocalError> {
        let own = Part::own(fds, bytes).map_err(LocalError::os("duplicate a descriptor"))?;
        let mut exchange = Exchange::new(peers, self.local_rank, self.local_size, seq, own);
        let until = within(self.deadline);
        if !exchange.run(until)? {
            return Err(LocalError::Timeout {
                call: "passing descriptors",
                server: self.server,
                missing: exchange.missing(),
                waited: self.deadline,
                turned_away: Vec::new(),
            });
        }
        exchange.finish().map_err(LocalError::os("duplicate a descriptor"))
    }
}

#[cfg(test)]
mod tests;
