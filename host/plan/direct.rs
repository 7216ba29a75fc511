//! The two methods that cut nothing: `static`, where each rank has its NIC, and `fuselink`, where the engine chooses.

use super::schedule::Pieces;
use super::{Demand, Piece};
use crate::topo::Cluster;

/// Every byte leaves by its source's direct NIC and enters by its destination's.
pub(super) fn by_direct_nic(cluster: &Cluster, demand: &Demand, pieces: &mut Pieces) {
    let nic = |rank| cluster.direct_nic(rank).map(|k| cluster.nic_id(cluster.server_of(rank), k));
    pieces.cells(cluster, demand, |src, dst, bytes, out| {
        let (egress, ingress) = (nic(src), nic(dst));
        out.push(Piece { src, dst, offset: 0, bytes, egress, ingress, transfer: None });
    });
}

/// No NIC is named.
pub(super) fn by_engine(cluster: &Cluster, demand: &Demand, pieces: &mut Pieces) {
    pieces.cells(cluster, demand, |src, dst, bytes, out| {
        out.push(Piece { src, dst, offset: 0, bytes, egress: None, ingress: None, transfer: None });
    });
}
