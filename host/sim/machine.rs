//! The machine under a world: its links in order, and what engines and load tables are told of it.

use std::sync::Arc;

use super::fluid::LinkId;
use super::relay::{PCIE_BYTE_PER_NS, SOCKETS_BYTE_PER_NS};
use super::world::WorldConfig;
use crate::engine::EngineConfig;
use crate::engine::call::CallId;
use crate::engine::lots::LotsAtStart;
use crate::engine::slots::SlotLayout;
use crate::hw::HwError;
use crate::load::LoadTable;
use crate::shm::SharedMemory;
use crate::topo::{Cluster, NicId, Rank, ServerId};

/// Links in order: scale-up out and in, and memory, per rank; then NICs out and in; then what only relays through the
/// host use: launches, PCIe out and in, per rank; both ways between the sockets, per server.
pub(super) fn rates(cluster: &Cluster) -> Vec<f64> {
    let mut rates = Vec::new();
    for rank in (0..cluster.ranks()).map(Rank) {
        let scaleup = cluster.server(cluster.server_of(rank)).scaleup_mbyte_per_s as f64 / 1e3;
        rates.extend([scaleup, scaleup, MEMORY_BYTE_PER_NS]);
    }
    for nic in (0..cluster.nics()).map(NicId) {
        let rate = cluster.nic(nic).mbit_per_s as f64 / 8e3;
        rates.extend([rate, rate]);
    }
    let host = |_| [LAUNCHES_BYTE_PER_NS, PCIE_BYTE_PER_NS, PCIE_BYTE_PER_NS];
    rates.extend((0..cluster.ranks()).flat_map(host));
    rates.extend((0..cluster.server_count()).flat_map(|_| [SOCKETS_BYTE_PER_NS; 2]));
    rates
}

/// The host's time for launches, as bytes.
const LAUNCHES_BYTE_PER_NS: f64 = 1.0;

/// What a relay through the host uses of a rank.
pub(super) struct RelayLinks {
    pub launches: LinkId,
    /// Out of the GPU, and into it.
    pub pcie: [LinkId; 2],
}

fn first_host_link(cluster: &Cluster) -> usize {
    3 * cluster.ranks() as usize + 2 * cluster.nics() as usize
}

pub(super) fn relay_links(cluster: &Cluster, rank: Rank) -> RelayLinks {
    let at = first_host_link(cluster) + 3 * rank.idx();
    RelayLinks { launches: LinkId(at), pcie: [LinkId(at + 1), LinkId(at + 2)] }
}

/// Between the sockets of a server, towards the second one or towards the first.
pub(super) fn sockets_link(cluster: &Cluster, server: ServerId, to_second: bool) -> LinkId {
    LinkId(
        first_host_link(cluster) + 3 * cluster.ranks() as usize + 2 * server.idx() + usize::from(to_second),
    )
}

/// Copies inside a GPU: half of an H200's memory bandwidth, since each byte is read and written.
const MEMORY_BYTE_PER_NS: f64 = 2_400.0;

pub(super) fn scaleup_links(rank: Rank) -> [LinkId; 2] {
    [LinkId(3 * rank.idx()), LinkId(3 * rank.idx() + 1)]
}

pub(super) fn memory_link(rank: Rank) -> LinkId {
    LinkId(3 * rank.idx() + 2)
}

pub(super) fn nic_link(cluster: &Cluster, nic: NicId, into: bool) -> LinkId {
    LinkId(3 * cluster.ranks() as usize + 2 * nic.idx() + usize::from(into))
}

pub(super) fn load_memory(cluster: &Cluster, server: ServerId) -> Result<Arc<SharedMemory>, HwError> {
    let spec = cluster.server(server);
    let memory = SharedMemory::create("fuselink-sim", LoadTable::words(spec.gpus, spec.nics.len()))?;
    LoadTable::init(&memory.words(), spec.gpus, spec.nics.len());
    Ok(memory)
}

pub(super) fn engine_config(
    config: &WorldConfig,
    cluster: &Arc<Cluster>,
    rank: Rank,
    slots: SlotLayout,
) -> EngineConfig {
    EngineConfig {
        rank,
        cluster: Arc::clone(cluster),
        slots,
        work_queues: config.blocks,
        armed_depth: config.armed_depth,
        limits: config.limits,
        lookahead_bytes: config.lookahead_bytes,
        direct_nic: cluster.direct_nic(rank),
        lots: LotsAtStart::All,
        call: CallId(0),
    }
}
