//! Which bytes of a tile take which pair of NICs (FAST, step 1, for any number of NICs and any rates).

use super::rails::Route;

/// A run of units of one cell on one route.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Segment {
    pub units: u64,
    pub src: u16,
    pub dst: u16,
    /// Position of the route among the tile's.
    pub route: u32,
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
}

impl Balance<'_> {
    /// The routes must carry exactly as many units as the cells hold.
    pub fn run(mut self) {
        self.prepare();
        self.keep_direct();
        self.move_direct();
        self.keep_rest();
        self.move_rest();
        debug_assert!(self.cells.iter().all(|&c| c == 0));
    }

    fn prepare(&mut self) {
        let s = &mut *self.scratch;
        s.room.clear();
        s.room.extend(self.routes.iter().map(|r| r.units));
        s.spare.clear();
        s.spare.resize(self.shape.0, 0);
        self.routes.iter().for_each(|r| s.spare[r.hop.from.idx()] += r.units);
        s.surplus.clear();
        for (row, own) in self.cells.chunks(self.shape.1).zip(&mut s.spare) {
            let has: u64 = row.iter().sum();
            s.surplus.push(has.saturating_sub(*own));
            *own = own.saturating_sub(has);
        }
        s.open.clear();
        let open = |r: &Route| s.spare[r.hop.from.idx()] > 0;
        s.open.extend(self.routes.iter().zip(0..).filter(|(r, _)| open(r)).map(|(_, at)| at));
    }

    #[inline]
    fn take(&mut self, src: usize, dst: usize, route: usize, at_most: u64) -> u64 {
        let cell = &mut self.cells[src * self.shape.1 + dst];
        let room = &mut self.scratch.room[route];
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
    fn move_direct(&mut self) {
        for src in 0..self.shape.0 {
            let mut surplus = self.scratch.surplus[src];
            if surplus == 0 {
                continue;
            }
            for nth in wrapping(src, self.scratch.open.len()) {
                let r = self.scratch.open[nth] as usize;
                let (from, to) = (self.routes[r].hop.from.idx(), self.routes[r].hop.to.idx());
                let moved = self.take(src, to, r, surplus.min(self.scratch.spare[from]));
                surplus -= moved;
                self.scratch.spare[from] -= moved;
            }
            self.scratch.surplus[src] = surplus;
        }
    }

    /// What each GPU's own NICs still have room for, without what it owes to others.
    fn keep_rest(&mut self) {
        for r in 0..self.routes.len() {
            let src = self.routes[r].hop.from.idx();
            self.fill(src, r, u64::MAX);
        }
    }

    /// The rest of the surplus, wherever there is room.
    fn move_rest(&mut self) {
        for src in 0..self.shape.0 {
            let mut surplus = self.scratch.surplus[src];
            for nth in wrapping(src, self.scratch.open.len()) {
                if surplus == 0 {
                    break;
                }
                surplus -= self.fill(src, self.scratch.open[nth] as usize, surplus);
            }
        }
    }

    /// Gives a route what a GPU has left, beginning with another destination on each route.
    #[inline]
    fn fill(&mut self, src: usize, route: usize, at_most: u64) -> u64 {
        let dsts = self.shape.1;
        let row = &mut self.cells[src * dsts..(src + 1) * dsts];
        let first = self.routes[route].hop.to.idx() + 1;
        let first = if first < dsts { first } else { 0 };
        let fill = self.scratch.room[route].min(at_most);
        if fill == 0 {
            return 0;
        }
        let mut left = fill;
        let (before, after) = row.split_at_mut(first);
        for (at, part) in [(first, after), (0, before)] {
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
        self.scratch.room[route] -= fill - left;
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
        Balance { cells: &mut cells, shape, routes: &found, scratch: &mut scratch, out: &mut out }.run();
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
