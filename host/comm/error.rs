//! What can go wrong for a user of communicators.

use std::time::Duration;

use super::bootstrap::BootstrapError;
use super::local::LocalError;
use super::relay::RelayError;
use super::settings::SettingsError;
use crate::channel::KernelStatus;
use crate::engine::slots::SlotError;
use crate::hw::HwError;
use crate::load::BadTable;
use crate::plan::{DemandError, PlanError};
use crate::proxy::ProxyError;
use crate::topo::Rank;

/// A communicator could not be made, or a collective failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// The communicator has no memory for one-sided puts.
    #[error("this communicator was made without one-sided puts; set CommConfig::put_bytes on every rank")]
    NoPuts,
    /// The environment is wrong.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// Ranks did not meet, or one died.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// The ranks of this server did not meet, or one died.
    #[error(transparent)]
    Local(#[from] LocalError),
    /// A device failed.
    #[error(transparent)]
    Hw(#[from] HwError),
    /// The cluster needs more slots than there can be.
    #[error(transparent)]
    Slots(#[from] SlotError),
    /// The load table is another's.
    #[error(transparent)]
    LoadTable(#[from] BadTable),
    /// Counts cannot be used.
    #[error(transparent)]
    Demand(#[from] DemandError),
    /// No plan can be made.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The proxy failed.
    #[error(transparent)]
    Proxy(#[from] ProxyError),
    /// Relay memory can be lent and taken back no more.
    #[error(transparent)]
    Relay(#[from] RelayError),
    /// Another rank of the server could not make its part of an allocation.
    #[error("{rank} has no memory for its buffer; its own error says why")]
    NoBuffer {
        /// Who.
        rank: Rank,
    },
    /// A kernel gave up.
    #[error(transparent)]
    Kernel(#[from] KernelStatus),
    /// This build lacks a backend.
    #[error("this program was built without {what}; build it with --features {feature}")]
    NotBuilt {
        /// What is asked for.
        what: &'static str,
        /// What brings it.
        feature: &'static str,
    },
    /// The ranks were not started alike.
    #[error(
        "{rank} was started with another {what} than rank 0; start all ranks with the same configuration"
    )]
    Differs {
        /// Who differs.
        rank: Rank,
        /// In what.
        what: &'static str,
    },
    /// The communicator has another size than the cluster.
    #[error("the job has {ranks} ranks, but the cluster has {gpus} GPUs; start one rank per GPU")]
    WrongSize {
        /// Ranks of the job.
        ranks: u32,
        /// GPUs of the cluster.
        gpus: u32,
    },
    /// Another rank answered with something that this version does not understand.
    #[error("{rank} answered with something that is not of this version; run one version on all ranks")]
    BadAnswer {
        /// Who.
        rank: Rank,
    },
    /// Ranks made different plans of one demand.
    #[error("{rank} made another plan than rank 0 of the same demand; run one version on all ranks")]
    PlanDiffers {
        /// Who.
        rank: Rank,
    },
    /// A buffer is too small for a collective.
    #[error("the {which} buffer holds {has} bytes, the collective needs {needs}")]
    BufferTooSmall {
        /// Send or receive.
        which: &'static str,
        /// Its size.
        has: u64,
        /// The need.
        needs: u64,
    },
    /// A collective cannot read what it writes.
    #[error("the send and the receive buffer are the same")]
    SameBuffer,
    /// A cell is longer than its messages can be numbered.
    #[error(
        "{src} has {bytes} bytes for {dst}; spread over several NICs at most {most} can be told apart: use larger slots (FUSELINK_SLOT_BYTES)"
    )]
    CellTooLong {
        /// Source.
        src: Rank,
        /// Destination.
        dst: Rank,
        /// The cell.
        bytes: u64,
        /// The most at this size of slots.
        most: u64,
    },
    /// A row of counts has the wrong length.
    #[error("{found} counts were given for {ranks} ranks")]
    WrongCounts {
        /// Given.
        found: usize,
        /// Needed.
        ranks: u32,
    },
    /// The kernel neither finished nor gave up.
    #[error("the kernels did not end within {waited:?} after they were told to stop")]
    KernelsStuck {
        /// How long was waited.
        waited: Duration,
    },
    /// An earlier failure ended this communicator.
    #[error("an earlier failure ended this communicator; make a new one")]
    Dead,
}
