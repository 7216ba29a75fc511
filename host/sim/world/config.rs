//! What a world is made of, and what can go wrong in it.

use crate::engine::EngineError;
use crate::engine::route::RouteLimits;
use crate::engine::slots::SlotConfig;
use crate::hw::{HwError, Nanos};
use crate::sim::relay::Relay;
use crate::topo::{Cluster, Rank};

/// Fixed delays, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Delays {
    /// From a kernel's doorbell to the work at the NIC: the ring over PCIe, the proxy's round, the post.
    pub doorbell_ns: Nanos,
    /// From the last byte at the receiving NIC to the arrival that a kernel sees: completion, flush, publication.
    pub arrival_ns: Nanos,
    /// From the last byte to the completion at the sender.
    pub completion_ns: Nanos,
    /// From a grant to the credit that a sender sees.
    pub credit_ns: Nanos,
    /// From arming to the kernel that begins to fill the slot.
    pub arm_ns: Nanos,
    /// A proxy with work looks at the load table this often when nothing else wakes it.
    pub look_ns: Nanos,
}

impl Default for Delays {
    /// Of the order that the FuseLink paper reports for its steps (post and pull 0.8 to 1.4 us each).
    fn default() -> Self {
        Self {
            doorbell_ns: 2_000,
            arrival_ns: 3_000,
            completion_ns: 2_000,
            credit_ns: 3_000,
            arm_ns: 1_000,
            look_ns: 2_000,
        }
    }
}

/// What a world is made of.
#[derive(Clone, Debug)]
pub struct WorldConfig {
    /// The servers.
    pub cluster: Cluster,
    /// Slots.
    pub slots: SlotConfig,
    /// Bounds of the choice of NICs.
    pub limits: RouteLimits,
    /// An owner's traffic must have rested this long before its NIC counts as idle.
    pub idle_after_ns: Nanos,
    /// Blocks per GPU that send, and as many that drain.
    pub blocks: u32,
    /// Slots armed ahead per block.
    pub armed_depth: u32,
    /// A transfer's successor is let in when this much is left.
    pub lookahead_bytes: u64,
    /// Delays.
    pub delays: Delays,
    /// How payload comes beside the NIC of another GPU.
    pub relay: Relay,
}

/// The run went wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// An engine refused an event.
    #[error("{rank} at {at_ns} ns: {source}")]
    Engine {
        /// Whose.
        rank: Rank,
        /// When.
        at_ns: Nanos,
        /// Why.
        source: EngineError,
    },
    /// Nothing is due, and a call is not done.
    #[error("nothing is due at {at_ns} ns, but {rank} is not done")]
    Stuck {
        /// Who waits.
        rank: Rank,
        /// When.
        at_ns: Nanos,
    },
    /// The load table's memory could not be had.
    #[error(transparent)]
    Hw(#[from] HwError),
    /// The cluster needs more slots than there can be.
    #[error(transparent)]
    Slots(#[from] crate::engine::slots::SlotError),
    /// The load table could not be opened.
    #[error(transparent)]
    Table(#[from] crate::load::BadTable),
    /// An experiment's demand could not be made.
    #[error(transparent)]
    Demand(#[from] crate::plan::DemandError),
    /// An experiment's demand could not be planned.
    #[error(transparent)]
    Plan(#[from] crate::plan::PlanError),
}
