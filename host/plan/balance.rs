//! Which bytes of a tile take which pair of NICs (FAST, step 1, for any number of NICs and any rates).

use super::rails::Route;
use crate::topo::GpuIdx;

/// A run of units of one cell on one route.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Segment {
    pub units: u64,
    pub src: u16,
    pub dst: u16,
    /// Position of the route among the tile's.
    pub route: u32,
}

/// Which segments of a tile are needed: those of a GPU's cells, and those on routes beside it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Focus {
    All,
    Sender(GpuIdx),
    Receiver(GpuIdx),
}

/// Fills every route exactly, moving the fewest units between the sender's GPUs.
///
/// A GPU keeps what its own NICs can carry; only its surplus moves. Within that, units that land on the GPU they are
/// meant for are preferred. The segments of one cell come out in order of offset.
pub(super) struct Balance<'a> {
    /// Units left of each cell, row-major: sender's GPUs x receiver's GPUs.
    pub cells: &'a mut [u64],
    /// GPUs of the sender and of the receiver.
    pub shape: (usize, usize),
    pub routes: &'a [Route],
    /// Other segments are not handed out.
    pub focus: Focus,
    pub scratch: &'a mut Scratch,
    pub out: &'a mut Vec<Segment>,
}

/// Reused between tiles.
#[derive(Clone, Debug, Default)]
pub(super) struct Scratch {
    /// Units left on each route.
    room: Vec<u64>,
    /// Per sending GPU: units that must move, and room that it leaves to others.
    surplus: Vec<u64>,
    spare: Vec<u64>,
    /// Routes of GPUs that leave room to others.
    open: Vec<u32>,
    /// Per route: whether the focus needs it.
    in_focus: Vec<bool>,
}

impl Balance<'_> {
    /// The routes must carry exactly as many units as the cells hold.
    pub fn run(self) {
        let Self { cells, shape: (_, columns), routes, focus, scratch, out } = self;
        scratch.prepare(cells, columns, routes);
        scratch.look_at(focus, routes);
        let Scratch { room, surplus, spare, open, in_focus } = scratch;
        let (gpu, sends) = match focus {
            Focus::All => (0, true),
            Focus::Sender(gpu) => (gpu.0 as u16, true),
            Focus::Receiver(gpu) => (gpu.0 as u16, false),
        };
        let mut deal =
            Deal { cells, columns, routes, room, out: Out { gpu, sends, in_focus, segments: out } };
        deal.keep_direct();
        deal.move_direct(surplus, spare, open);
        deal.keep_rest();
        deal.move_rest(surplus, open);
        debug_assert!(deal.cells.iter().all(|&c| c == 0));
    }
}

impl Scratch {
    /// Finds who has more than its own NICs carry, and which routes have room for it.
    fn prepare(&mut self, cells: &[u64], columns: usize, routes: &[Route]) {
        self.room.clear();
        self.room.extend(routes.iter().map(|r| r.units));
        self.spare.clear();
        self.spare.resize(cells.len() / columns.max(1), 0);
        routes.iter().for_each(|r| self.spare[r.hop.from.idx()] += r.units);
        self.surplus.clear();
        for (row, own) in cells.chunks_exact(columns).zip(&mut self.spare) {
            let has: u64 = row.iter().sum();
            self.surplus.push(has.saturating_sub(*own));
            *own = own.saturating_sub(has);
        }
        self.open.clear();
        for (route, at) in routes.iter().zip(0..) {
            if self.spare[route.hop.from.idx()] > 0 {
                self.open.push(at);
            }
        }
    }

    fn look_at(&mut self, focus: Focus, routes: &[Route]) {
        self.in_focus.clear();
        self.in_focus.extend(routes.iter().map(|route| match focus {
            Focus::All => true,
            Focus::Sender(gpu) => route.hop.from == gpu,
            Focus::Receiver(gpu) => route.hop.to == gpu,
        }));
    }
}

/// Segments that the focus needs.
struct Out<'a> {
    gpu: u16,
    sends: bool,
    in_focus: &'a [bool],
    segments: &'a mut Vec<Segment>,
}

impl Out<'_> {
    #[inline]
    fn push(&mut self, segment: Segment) {
        let own = if self.sends { segment.src } else { segment.dst };
        if (own == self.gpu) | self.in_focus[segment.route as usize] {
            self.segments.push(segment);
        }
    }
}

/// Units on their way from cells to routes.
struct Deal<'a> {
    cells: &'a mut [u64],
    columns: usize,
    routes: &'a [Route],
    room: &'a mut [u64],
    out: Out<'a>,
}

impl Deal<'_> {
    #[inline]
    fn take(&mut self, src: usize, dst: usize, route: usize, at_most: u64) -> u64 {
        let cell = &mut self.cells[src * self.columns + dst];
        let room = &mut self.room[route];
        let units = (*cell).min(*room).min(at_most);
        if units > 0 {
            *cell -= units;
            *room -= units;
            self.out.push(Segment { units, src: src as u16, dst: dst as u16, route: route as u32 });
        }
        units
    }

    /// Bytes that touch scale-up on neither side.
    fn keep_direct(&mut self) {
        for (r, route) in self.routes.iter().enumerate() {
            self.take(route.hop.from.idx(), route.hop.to.idx(), r, u64::MAX);
        }
    }

    /// Surplus that lands where it is meant to go.
    fn move_direct(&mut self, surplus: &mut [u64], spare: &mut [u64], open: &[u32]) {
        for (src, surplus) in surplus.iter_mut().enumerate().filter(|(_, surplus)| **surplus > 0) {
            for nth in wrapping(src, open.len()) {
                let r = open[nth] as usize;
                let hop = &self.routes[r].hop;
                let spare = &mut spare[hop.from.idx()];
                let moved = self.take(src, hop.to.idx(), r, (*surplus).min(*spare));
                *surplus -= moved;
                *spare -= moved;
            }
        }
    }

    /// What each GPU's own NICs still have room for, without what it owes to others.
    fn keep_rest(&mut self) {
        for r in 0..self.routes.len() {
            self.fill(self.routes[r].hop.from.idx(), r, u64::MAX);
        }
    }

    /// The rest of the surplus, wherever there is room; every GPU begins with another destination and another route.
    fn move_rest(&mut self, surplus: &[u64], open: &[u32]) {
        for (src, &surplus) in surplus.iter().enumerate().filter(|(_, surplus)| **surplus > 0) {
            let mut left = surplus;
            let mut routes = wrapping(src, open.len()).map(|nth| open[nth] as usize);
            let mut route = routes.next();
            for dst in wrapping(src + 1, self.columns) {
                while let Some(r) = route.filter(|_| left > 0 && self.cells[src * self.columns + dst] > 0) {
                    left -= self.take(src, dst, r, left);
                    if self.room[r] == 0 {
                        route = routes.next();
                    }
                }
                if left == 0 {
                    break;
                }
            }
        }
    }

    /// Gives a route what a GPU has left, beginning with another destination on each route.
    #[inline]
    fn fill(&mut self, src: usize, route: usize, at_most: u64) -> u64 {
        let fill = self.room[route].min(at_most);
        if fill == 0 {
            return 0;
        }
        let mut left = fill;
        let row = &mut self.cells[src * self.columns..(src + 1) * self.columns];
        let first = self.routes[route].hop.to.idx() + 1;
        let (before, after) = row.split_at_mut(if first < self.columns { first } else { 0 });
        for (at, part) in [(before.len(), after), (0, before)] {
            for (dst, cell) in part.iter_mut().enumerate() {
                if left == 0 {
                    break;
                }
                let units = (*cell).min(left);
                if units > 0 {
                    *cell -= units;
                    left -= units;
                    let (src, dst) = (src as u16, (at + dst) as u16);
                    self.out.push(Segment { units, src, dst, route: route as u32 });
                }
            }
        }
        self.room[route] -= fill - left;
        fill - left
    }
}

/// All of `0..n`, from `first` on (which may lie past the end).
#[inline]
fn wrapping(first: usize, n: usize) -> impl Iterator<Item = usize> {
    let first = if first < n { first } else { first % n.max(1) };
    (0..n).map(move |nth| if nth + first < n { nth + first } else { nth + first - n })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::rails::{Shares, routes};
    use crate::topo::Server;

    fn balance(src: &Server, dst: &Server, cells: &[u64]) -> (Vec<Route>, Vec<Segment>) {
        let mut found = Vec::new();
        routes(src, dst, cells.iter().sum(), &mut Shares::default(), &mut found);
        let mut out = Vec::new();
        let shape = (src.gpus as usize, dst.gpus as usize);
        let (mut cells, mut scratch) = (cells.to_vec(), Scratch::default());
        Balance {
            cells: &mut cells,
            shape,
            routes: &found,
            focus: Focus::All,
            scratch: &mut scratch,
            out: &mut out,
        }
        .run();
        assert!(cells.iter().all(|&c| c == 0));
        for (r, route) in found.iter().enumerate() {
            let on: u64 = out.iter().filter(|s| s.route as usize == r).map(|s| s.units).sum();
            assert_eq!(on, route.units);
        }
        (found, out)
    }

    fn moved(routes: &[Route], segments: &[Segment]) -> u64 {
        segments
            .iter()
            .filter(|s| routes[s.route as usize].hop.from.0 != u32::from(s.src))
            .map(|s| s.units)
            .sum()
    }

    #[test]
    fn a_balanced_tile_moves_nothing() {
        let s = Server::new(2, &[1, 1], 1);
        let (r, out) = balance(&s, &s, &[3, 1, 2, 2]);
        assert_eq!(moved(&r, &out), 0);
        assert_eq!(out.len(), 4);
    }

    #[test]
    fn only_the_surplus_moves_and_what_lands_right_goes_first() {
        let s = Server::new(2, &[1, 1], 1);
        // GPU 0 has 8 of 10 units; 3 must move, and the 3 for GPU 1 land there by rail 1.
        let (r, out) = balance(&s, &s, &[5, 3, 2, 0]);
        assert_eq!(moved(&r, &out), 3);
        assert!(out.contains(&Segment { units: 3, src: 0, dst: 1, route: 1 }));
    }

    #[test]
    fn one_cell_uses_every_nic() {
        let s = Server::new(4, &[1; 4], 1);
        let mut cells = [0; 16];
        cells[6] = 9;
        let (r, out) = balance(&s, &s, &cells);
        assert_eq!((r.len(), out.len(), moved(&r, &out)), (4, 4, 7));
    }

    #[test]
    fn gpus_without_a_nic_move_all() {
        let (few, many) = (Server::new(4, &[1; 2], 1), Server::new(2, &[1; 4], 1));
        let (r, out) = balance(&few, &many, &[1, 1, 1, 1, 1, 1, 1, 1]);
        assert_eq!(moved(&r, &out), 4);
    }
}
