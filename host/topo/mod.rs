//! Machines as facts: identifiers, servers, and which NIC is beside which GPU. Pure: readers take text.

#![forbid(unsafe_code)]

mod cluster;
mod describe;
mod error;
mod ids;

pub use cluster::{Cluster, NicSpec, Server};
pub use describe::{MAX_RANKS, PRESETS, check_count, check_nics, check_ranks, parse_rate};
pub use error::TopoError;
pub use ids::{GpuIdx, NicId, NicIdx, Rank, ServerId};
