//! `spray`: every cell is cut into runs of about one message, and the runs cycle over all NICs of both servers.

use super::schedule::Pieces;
use super::{Demand, Piece, PlanError};
use crate::topo::{Cluster, NicId, ServerId};

/// The most runs that are planned: a piece each, some gigabytes in all.
const MAX_RUNS: u64 = 1 << 26;

/// Runs go to the NIC that has had the fewest bytes: a cycle, also across cells that end in a shorter run.
pub(super) fn spray(
    cluster: &Cluster,
    demand: &Demand,
    message_bytes: u64,
    pieces: &mut Pieces,
) -> Result<(), PlanError> {
    let unit = demand.unit_bytes();
    let run = (message_bytes / unit).max(1).saturating_mul(unit);
    // Cells add up to less than 2^63, and every run but a cell's last is of full length.
    let runs = demand.total_bytes() / run + u64::from(demand.ranks()) * u64::from(demand.ranks());
    if runs > MAX_RUNS.max(2 * u64::from(demand.ranks()) * u64::from(demand.ranks())) {
        let (found, limit) = (runs as usize, MAX_RUNS as usize);
        return Err(PlanError::TooMany { what: "runs of one message to spray", found, limit });
    }
    let mut egress = Wheels::new(cluster);
    let mut ingress = Wheels::new(cluster);
    pieces.cells(cluster, demand, |src, dst, cell, out| {
        let (from, to) = (cluster.server_of(src), cluster.server_of(dst));
        let mut offset = 0;
        while offset < cell {
            let bytes = run.min(cell - offset);
            let (egress, ingress) = (egress.next(from, bytes), ingress.next(to, bytes));
            out.push(Piece { src, dst, offset, bytes, egress, ingress, transfer: None });
            offset += bytes;
        }
    });
    Ok(())
}

/// Bytes given to each NIC that is up, by server.
struct Wheels(Vec<Vec<(NicId, u64)>>);

impl Wheels {
    fn new(cluster: &Cluster) -> Self {
        let wheel = |s: u32| {
            let nics = cluster.server(ServerId(s)).nics.iter().zip(cluster.first_nic(ServerId(s)).0..);
            nics.filter(|(nic, _)| nic.mbit_per_s > 0).map(|(_, id)| (NicId(id), 0)).collect()
        };
        Self((0..cluster.server_count()).map(wheel).collect())
    }

    fn next(&mut self, server: ServerId, bytes: u64) -> Option<NicId> {
        let (nic, given) = self.0[server.idx()].iter_mut().min_by_key(|(nic, given)| (*given, *nic))?;
        *given += bytes;
        Some(*nic)
    }
}
