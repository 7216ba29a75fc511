//! Machines as facts: identifiers, servers, and which NIC is beside which GPU. Pure: readers take text.

mod cluster;
mod ids;

pub use cluster::{Cluster, NicSpec, Server};
pub use ids::{GpuIdx, NicId, NicIdx, Rank, ServerId};
