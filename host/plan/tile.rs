//! From the units of one pair of servers to pieces: balance, routes, and cuts between transfers.

pub(super) use super::balance::Focus;
use super::balance::{Balance, Scratch, Segment};
use super::cells::Cells;
use super::cost::mul_div;
use super::rails::{Route, Shares, routes};
use crate::topo::{Cluster, GpuIdx, NicIdx, Rank, ServerId};

/// Where a transfer ends in the units of its pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cut {
    /// Position in the list; `None` = loose.
    pub transfer: Option<u32>,
    /// Units of the pair that this and all cuts before carry.
    pub upto: u64,
}

/// A piece, with where its ends are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TilePiece {
    pub src: Rank,
    pub dst: Rank,
    pub src_gpu: GpuIdx,
    pub dst_gpu: GpuIdx,
    pub offset: u64,
    pub bytes: u64,
    /// The pair of NICs and the GPUs beside them; `None` = the engine chooses.
    pub hop: Option<Hop>,
    pub transfer: Option<u32>,
}

/// The pair of NICs that a piece takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Hop {
    pub egress: NicIdx,
    pub ingress: NicIdx,
    /// The GPU beside the egress NIC.
    pub from: GpuIdx,
    /// The GPU beside the ingress NIC.
    pub to: GpuIdx,
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
    ///
    /// A focus may leave out pieces that it does not need; of cells that it needs for their NICs only, offsets do not
    /// count.
    pub fn pieces(
        &mut self,
        cluster: &Cluster,
        demand: &impl Cells,
        pair: (ServerId, ServerId),
        cuts: &[Cut],
        focus: Focus,
        mut emit: impl FnMut(&TilePiece),
    ) {
        let whole = cuts.len() == 1;
        let unit = demand.unit_bytes();
        // Short units are found by offset, and cuts by what went before, so nothing can be left out there.
        self.balance(cluster, demand, pair, if whole && unit == 1 { focus } else { Focus::All });
        if !whole {
            self.queue_on_routes();
        }
        let (first_src, first_dst) = (cluster.first_rank(pair.0).0, cluster.first_rank(pair.1).0);
        let dsts = cluster.server(pair.1).gpus as usize;
        for segment in &self.segments {
            let route = &self.routes[segment.route as usize];
            let (src_gpu, dst_gpu) = (u32::from(segment.src), u32::from(segment.dst));
            let (src, dst) = (Rank(first_src + src_gpu), Rank(first_dst + dst_gpu));
            let cell = segment.src as usize * dsts + segment.dst as usize;
            let placed = &mut self.placed[cell];
            let mut put = |transfer, units| {
                let offset = *placed * unit;
                *placed += units;
                // The last unit of a cell may be short; only then is the size of the cell looked up.
                let end = match unit {
                    1 => *placed,
                    _ => placed
                        .saturating_mul(unit)
                        .min(demand.cells(cluster, src, pair.1)[segment.dst as usize]),
                };
                emit(&TilePiece {
                    src,
                    dst,
                    src_gpu: GpuIdx(src_gpu),
                    dst_gpu: GpuIdx(dst_gpu),
                    offset,
                    bytes: end - offset,
                    hop: Some(route.hop),
                    transfer,
                });
            };
            if whole {
                put(cuts[0].transfer, segment.units);
                continue;
            }
            let at = match route.hop.from.0 == src_gpu {
                true => &mut self.own_at[segment.route as usize],
                false => &mut self.others_at[segment.route as usize],
            };
            for_each_cut(cuts, route.units, *at, segment.units, put);
            *at += segment.units;
        }
    }

    fn balance(&mut self, cluster: &Cluster, demand: &impl Cells, pair: (ServerId, ServerId), focus: Focus) {
        let (src, dst) = (cluster.server(pair.0), cluster.server(pair.1));
        let unit = demand.unit_bytes();
        self.cells.clear();
        for rank in cluster.ranks_of(pair.0) {
            let cells = demand.cells(cluster, rank, pair.1);
            match unit {
                1 => self.cells.extend_from_slice(cells),
                _ => self.cells.extend(cells.iter().map(|c| c.div_ceil(unit))),
            }
        }
        self.placed.clear();
        self.placed.resize(self.cells.len(), 0);
        routes(src, dst, self.cells.iter().sum(), &mut self.shares, &mut self.routes);
        self.segments.clear();
        Balance {
            cells: &mut self.cells,
            shape: (src.gpus as usize, dst.gpus as usize),
            routes: &self.routes,
            focus,
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
            if self.routes[route].hop.from.0 == u32::from(segment.src) {
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
