//! What can go wrong in the bootstrap.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::wire::{Call, WireError};
use crate::comm::handshake::Refusal;
use crate::comm::join::TurnedAway;
use crate::topo::Rank;

/// A bootstrap operation failed. Cheap to clone: a failure is told to every pending and later call.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum BootstrapError {
    /// Rank and size do not fit each other.
    #[error("{rank} does not fit a job of {size} ranks; ranks count from 0 to size - 1")]
    Place {
        /// The rank.
        rank: Rank,
        /// Number of ranks.
        size: u32,
    },
    /// [`Bootstrap::listen`](super::Bootstrap::listen) was called by another rank than 0.
    #[error("only rank 0 listens, this is {rank}")]
    NotRoot {
        /// Who called.
        rank: Rank,
    },
    /// Rank 0 could not take the root address.
    #[error(
        "cannot listen on {root}: {source}; choose an address of this host and a free port (FUSELINK_ROOT)"
    )]
    Listen {
        /// The root address.
        root: SocketAddr,
        /// The system's reason.
        source: Arc<io::Error>,
    },
    /// Rank 0 could not be reached before the deadline.
    #[error(
        "cannot reach rank 0 at {root} within {waited:?} ({source}); is rank 0 running, and is FUSELINK_ROOT its address?"
    )]
    Connect {
        /// The root address.
        root: SocketAddr,
        /// How long it was tried.
        waited: Duration,
        /// The last attempt's failure.
        source: Arc<io::Error>,
    },
    /// This process and rank 0 do not belong together.
    #[error("refused at {root}: {refusal}")]
    Refused {
        /// The root address.
        root: SocketAddr,
        /// Why.
        refusal: Refusal,
    },
    /// A process of this job came to rank 0 with a wrong setting.
    #[error("refused a connection from {from}: {refusal}")]
    RefusedPeer {
        /// Where it came from.
        from: String,
        /// Why.
        refusal: Refusal,
    },
    /// Ranks have not come to a call before its deadline.
    #[error("{call}: {} not come within {waited:?}{}", Have(missing), Told(turned_away))]
    Timeout {
        /// What this rank waited in.
        call: Waiting,
        /// Who has not come. Rank 0 passes everything on, so that when it hangs, all others are missing.
        missing: Vec<Rank>,
        /// The deadline.
        waited: Duration,
        /// At rank 0: who came and was turned away.
        turned_away: Vec<TurnedAway>,
    },
    /// A rank's process ended, or its host can no longer be reached.
    #[error("{rank} died: its connection closed without a goodbye")]
    PeerDied {
        /// Who.
        rank: Rank,
    },
    /// A rank closed its bootstrap before it took part in a call that others are in.
    #[error("{call}: {rank} has already closed its bootstrap")]
    PeerLeft {
        /// Who.
        rank: Rank,
        /// The call it misses.
        call: Waiting,
    },
    /// A rank gave up and told all others.
    #[error("{rank} aborted the job: {reason}")]
    Aborted {
        /// Who.
        rank: Rank,
        /// Why, in one line.
        reason: String,
    },
    /// Ranks are in different calls.
    #[error(
        "collective {seq} is {ours} here and {theirs} at {rank}; every rank must make the same calls in the same order"
    )]
    Mismatch {
        /// The call's number, from 0.
        seq: u64,
        /// Another rank.
        rank: Rank,
        /// The call here.
        ours: Call,
        /// The call there.
        theirs: Call,
    },
    /// A rank sent what it must not.
    #[error("{rank} broke the bootstrap protocol: {source}")]
    Protocol {
        /// Who.
        rank: Rank,
        /// What it sent.
        source: WireError,
    },
    /// A contribution exceeds the cap.
    #[error("a contribution of {bytes} bytes exceeds the cap of {cap}; send it in parts")]
    TooLong {
        /// Its size.
        bytes: u64,
        /// The largest that goes.
        cap: u64,
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

impl BootstrapError {
    pub(super) fn os(operation: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Os { operation, source: Arc::new(source) }
    }
}

/// What a rank was waiting in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waiting {
    /// For all ranks to come.
    Connect,
    /// In a collective.
    Collective {
        /// Which kind.
        call: Call,
        /// Its number, from 0.
        seq: u64,
    },
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect => f.write_str("connecting the job"),
            Self::Collective { call, seq } => write!(f, "collective {seq} ({call})"),
        }
    }
}

/// "ranks 1, 2 have"; long lists are cut.
struct Have<'a>(&'a [Rank]);

impl fmt::Display for Have<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 16;
        let shown: Vec<_> = self.0.iter().take(SHOWN).map(|r| r.0.to_string()).collect();
        let more = self.0.len() - shown.len();
        let (noun, verb) = if self.0.len() == 1 { ("rank", "has") } else { ("ranks", "have") };
        write!(f, "{noun} {}", shown.join(", "))?;
        if more > 0 {
            write!(f, " and {more} more")?;
        }
        write!(f, " {verb}")
    }
}

/// "; turned away ..." or nothing.
struct Told<'a>(&'a [TurnedAway]);

impl fmt::Display for Told<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, t) in self.0.iter().enumerate() {
            write!(f, "{}{t}", if i == 0 { "; turned away " } else { ", " })?;
        }
        Ok(())
    }
}
