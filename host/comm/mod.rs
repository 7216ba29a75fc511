//! What users hold, and how ranks find each other.

pub mod bootstrap;
mod handshake;
mod herald;
mod join;
pub mod local;
pub mod secret;
pub mod settings;
mod wake;

mod all_to_all;
mod communicator;
pub mod device;
mod error;
mod fixed;
pub mod machine;
mod memory;
mod puts;
mod reclaim;
mod relay;
mod send_from;
mod setup;

pub use crate::engine::relay::{Refusal, RelayCounters};
pub use all_to_all::{AllToAll, MAX_CELL_MESSAGES, RunTime};
pub use communicator::{Buffer, CommConfig, Communicator};
pub use device::{GpuKind, UserKernel, UserKernels};
pub use error::CommError;
pub use fixed::{FixedCounters, FixedError, FixedRecv, FixedSend};
pub use machine::{Cables, EmuOptions, NicBackend, Nics};
pub use puts::{PreparedLaunch, UserLaunch};
pub use relay::{Reclaimed, RelayError, StillLent};
pub use send_from::SendFrom;
pub use setup::check_slots;
