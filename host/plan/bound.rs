//! What no schedule can beat.

use super::cost::wire_ns;
use super::{CostModel, Demand, PlanError, ServerSums};
use crate::topo::{Cluster, ServerId};

/// The least time any schedule can take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Bound {
    /// Over servers and directions, the most of: bytes over the sum of the rates of NICs that are up.
    pub lower_ns: u64,
    /// The same with the start cost of one transfer added per peer.
    pub floor_ns: u64,
    /// Bytes of the busiest server and direction.
    pub busiest_bytes: u64,
    /// Sum of its NIC rates.
    pub busiest_mbit_per_s: u64,
}

impl Bound {
    /// The bound of a demand.
    ///
    /// # Errors
    /// [`PlanError::WrongSize`], and [`PlanError::NoNic`] for a server with traffic whose NICs are all down.
    pub fn of(cluster: &Cluster, demand: &Demand, model: &CostModel) -> Result<Self, PlanError> {
        Self::of_sums(cluster, &ServerSums::of(cluster, demand)?, model)
    }

    pub(super) fn of_sums(
        cluster: &Cluster,
        sums: &ServerSums,
        model: &CostModel,
    ) -> Result<Self, PlanError> {
        let mut bound = Self::default();
        for (s, server) in cluster.servers().iter().enumerate() {
            let (out, into) = (sums.sent_by(s), sums.received_by(s));
            let rate = server.mbit_per_s();
            let bytes = out.0.max(into.0);
            if bytes > 0 && rate == 0 {
                let server_id = ServerId(s as u32);
                return Err(PlanError::NoNic { server: server_id, nics: server.nics.len(), bytes });
            }
            for (bytes, peers) in [out, into] {
                let ns = wire_ns(bytes, rate);
                if ns > bound.lower_ns {
                    (bound.lower_ns, bound.busiest_bytes, bound.busiest_mbit_per_s) = (ns, bytes, rate);
                }
                bound.floor_ns = bound.floor_ns.max(ns.saturating_add(model.start_ns.saturating_mul(peers)));
            }
        }
        Ok(bound)
    }

    /// The lower bound in microseconds, unrounded. For people and files: no decision rests on it.
    pub fn lower_us(&self) -> f64 {
        if self.busiest_bytes == 0 {
            return 0.0;
        }
        self.busiest_bytes as f64 * 8.0 / self.busiest_mbit_per_s as f64
    }
}
