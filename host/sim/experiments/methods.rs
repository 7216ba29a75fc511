//! All-to-alls through the engine: a demand, a method, and how long it takes.

use super::{MESSAGE_BYTES, world_config};
use crate::collective::call_of;
use crate::engine::call::CallId;
use crate::hw::Nanos;
use crate::plan::{self, CostModel, Demand, Method, Piece, PlanTable, Schedule};
use crate::sim::world::{SimError, World};
use crate::topo::{Cluster, Rank};

/// A way to carry out an all-to-all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// A method of the planner.
    Planned(Method),
    /// Rail forwarding, after NCCL's PXN: over scale-up to the GPU whose rail the destination is on, then by that
    /// rail.
    Rails,
}

impl Way {
    pub const STATIC: Self = Self::Planned(Method::Static);
    pub const SPRAY: Self = Self::Planned(Method::Spray);
    pub const FUSELINK: Self = Self::Planned(Method::FuseLink);
    pub const FAST: Self = Self::Planned(Method::Auto);
    pub const SPREADOUT: Self = Self::Planned(Method::SpreadOut);

    pub fn name(self) -> &'static str {
        match self {
            Self::FAST => "fast",
            Self::Rails => "rails",
            Self::Planned(method) => method.name(),
        }
    }

    pub fn schedule(self, cluster: &Cluster, demand: &Demand) -> Result<Schedule, SimError> {
        let model = CostModel { message_bytes: MESSAGE_BYTES.into(), ..CostModel::default() };
        match self {
            Self::Planned(method) => Ok(plan::schedule(cluster, demand, method, &model)?),
            Self::Rails => {
                let mut schedule = plan::schedule(cluster, demand, Method::Static, &model)?;
                schedule.pieces.iter_mut().for_each(|p| keep_rail(cluster, p));
                Ok(schedule)
            }
        }
    }
}

/// Bytes leave by the NIC of the index by which they come in, where it is there and up.
fn keep_rail(cluster: &Cluster, piece: &mut Piece) {
    let Some(ingress) = piece.ingress else { return };
    let (rail, server) = (cluster.nic_idx(ingress), cluster.server_of(piece.src));
    if cluster.server(server).nics.get(rail.idx()).is_some_and(|n| n.mbit_per_s > 0) {
        piece.egress = Some(cluster.nic_id(server, rail));
    }
}

/// How long an all-to-all takes in virtual time, from a start that all share until the last byte is drained.
pub(super) fn measure(cluster: &Cluster, demand: &Demand, schedule: &Schedule) -> Result<Nanos, SimError> {
    let mut world = World::new(world_config(cluster.clone()))?;
    for rank in (0..cluster.ranks()).map(Rank) {
        let table = PlanTable::compile(cluster, demand, schedule, rank, MESSAGE_BYTES.into())?;
        world.open(rank, call_of(&table, CallId(0), Nanos::MAX))?;
    }
    world.run_until_done()?;
    Ok(world.take_done().iter().map(|d| d.1).max().unwrap_or(0))
}

/// What no way can beat, in nanoseconds.
pub(super) fn bound_ns(cluster: &Cluster, demand: &Demand) -> Result<Nanos, SimError> {
    Ok(plan::Bound::of(cluster, demand, &CostModel::default())?.lower_ns)
}

/// The same bytes the other way round.
pub(super) fn transposed(demand: &Demand) -> Result<Demand, SimError> {
    let n = demand.ranks();
    let cells = (0..n).flat_map(|src| (0..n).map(move |dst| demand.cell(Rank(dst), Rank(src)))).collect();
    Ok(Demand::new(n, cells, demand.unit_bytes())?)
}
