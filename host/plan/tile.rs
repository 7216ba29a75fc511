//! From the units of one pair of servers to pieces: balance, routes, and cuts between transfers.

use super::balance::{Balance, Scratch, Segment};
use super::cost::mul_div;
use super::rails::{Route, Shares, routes};
use super::{Demand, Piece};
use crate::topo::{Cluster, GpuIdx, ServerId};

/// Where a transfer ends in the units of its pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cut {
    /// Position in the list; `None` = loose.
    pub transfer: Option<u32>,
    /// Units of the pair that this and all cuts before carry.
    pub upto: u64,
}

/// Workspace for one tile after the other.
#[derive(Clone, Debug, Default)]
pub(super) struct Tiler {
    shares: Shares,
    routes: Vec<Route>,
    cells: Vec<u64>,
    balance: Scratch,
    segments: Vec<Segment>,
    /// Per route: units placed so far by the GPU beside its NIC, and by others behind those.
    own_at: Vec<u64>,
    others_at: Vec<u64>,
    /// Per cell: units placed so far.
    placed: Vec<u64>,
}

impl Tiler {
    /// Hands out the pieces of one pair of servers, each cell's in order of offset.
    pub fn pieces(
        &mut self,
        cluster: &Cluster,
        demand: &Demand,
        pair: (ServerId, ServerId),
        cuts: &[Cut],
        mut emit: impl FnMut(Piece),
    ) {
        self.balance(cluster, demand, pair);
        self.queue_on_routes();
        let unit = demand.unit_bytes();
        let dsts = cluster.server(pair.1).gpus as usize;
        for i in 0..self.segments.len() {
            let segment = self.segments[i];
            let route = self.routes[segment.route as usize];
            let (src, dst) =
                (cluster.rank_of(pair.0, GpuIdx(segment.src)), cluster.rank_of(pair.1, GpuIdx(segment.dst)));
            let cell = demand.cell(src, dst);
            let placed = &mut self.placed[segment.src as usize * dsts + segment.dst as usize];
            let at = match route.from.0 == segment.src {
                true => &mut self.own_at[segment.route as usize],
                false => &mut self.others_at[segment.route as usize],
            };
            for_each_cut(cuts, route.units, *at, segment.units, |transfer, units| {
                let offset = *placed * unit;
                *placed += units;
                emit(Piece {
                    src,
                    dst,
                    offset,
                    bytes: placed.saturating_mul(unit).min(cell) - offset,
                    egress: Some(cluster.nic_id(pair.0, route.egress)),
                    ingress: Some(cluster.nic_id(pair.1, route.ingress)),
                    transfer,
                });
            });
            *at += segment.units;
        }
    }

    fn balance(&mut self, cluster: &Cluster, demand: &Demand, pair: (ServerId, ServerId)) {
        let (src, dst) = (cluster.server(pair.0), cluster.server(pair.1));
        let columns = cluster.first_rank(pair.1).idx()..;
        let columns = &columns.start..&(columns.start + dst.gpus as usize);
        let unit = demand.unit_bytes();
        self.cells.clear();
        for rank in cluster.ranks_of(pair.0) {
            let cells = &demand.row(rank)[*columns.start..*columns.end];
            self.cells.extend(cells.iter().map(|&c| if unit == 1 { c } else { c.div_ceil(unit) }));
        }
        self.placed.clear();
        self.placed.resize(self.cells.len(), 0);
        routes(src, dst, self.cells.iter().sum(), &mut self.shares, &mut self.routes);
        self.segments.clear();
        Balance {
            cells: &mut self.cells,
            shape: (src.gpus as usize, dst.gpus as usize),
            routes: &self.routes,
            scratch: &mut self.balance,
            out: &mut self.segments,
        }
        .run();
    }

    /// On every route, bytes that need not move come first, so that balance is not exposed.
    fn queue_on_routes(&mut self) {
        self.own_at.clear();
        self.own_at.resize(self.routes.len(), 0);
        self.others_at.clear();
        self.others_at.resize(self.routes.len(), 0);
        for segment in &self.segments {
            let route = segment.route as usize;
            if self.routes[route].from.0 == segment.src {
                self.others_at[route] += segment.units;
            }
        }
    }

    /// Marks the cuts of a pair that would carry nothing, because rounding leaves them no unit on any route.
    pub fn empty_cuts(
        &mut self,
        cluster: &Cluster,
        pair: (ServerId, ServerId),
        cuts: &[Cut],
        empty: &mut Vec<bool>,
    ) {
        let total = cuts.last().map_or(0, |c| c.upto);
        routes(cluster.server(pair.0), cluster.server(pair.1), total, &mut self.shares, &mut self.routes);
        empty.clear();
        let mut before = 0;
        for cut in cuts {
            let moves = |r: &Route| mul_div(r.units, before, total) < mul_div(r.units, cut.upto, total);
            let carries = self.routes.iter().any(moves);
            empty.push(!carries);
            before = cut.upto;
        }
    }
}

/// Cuts the units `[at, at + units)` of a route where its transfers end. Every route keeps pace with the whole pair.
fn for_each_cut(cuts: &[Cut], route: u64, at: u64, units: u64, mut emit: impl FnMut(Option<u32>, u64)) {
    let total = cuts.last().map_or(0, |c| c.upto);
    let ends = |c: &Cut| if c.upto == total { route } else { mul_div(route, c.upto, total) };
    let first = if cuts.len() == 1 { 0 } else { cuts.partition_point(|c| ends(c) <= at) };
    let mut from = at;
    for cut in &cuts[first..] {
        if from == at + units {
            break;
        }
        let to = ends(cut).min(at + units);
        if to > from {
            emit(cut.transfer, to - from);
            from = to;
        }
    }
}
