//! Exact Birkhoff decomposition (FAST, NSDI'26): matchings of servers whose lengths add up to the busiest server's
//! work, found by repairing the matching before.
//!
//! The matrix is padded with idle work until all of its lines are equal; then every server is matched in every stage
//! until all work is done, so the stages are exactly as long as the busiest line. A stage ends when one of its pairs
//! is used up; only the servers of such pairs are matched anew, by shortest augmenting paths over bitmask rows.

use super::cost::mul_div;
use super::list::{List, Shop};
use super::orders::Order;

#[derive(Default)]
pub(super) struct Birkhoff {
    n: usize,
    /// Work of each pair: all, what is left, and what is left with idling; in units, or in time when servers differ in
    /// rate.
    total: Vec<u64>,
    real: Vec<u64>,
    padded: Vec<u64>,
    /// What is left of every line.
    left: u64,
    /// Units of a pair that are done.
    done: Vec<u64>,
    /// Idling still to be placed, by sender and by receiver.
    out_idle: Vec<u64>,
    in_idle: Vec<u64>,
    matching: Matching,
}

impl Order for Birkhoff {
    fn order(&mut self, shop: &Shop, _attempt: u32, list: &mut List) {
        self.n = shop.n;
        work(shop, &mut self.total);
        self.real.clone_from(&self.total);
        self.pad();
        self.done.clear();
        self.done.resize(self.n * self.n, 0);
        self.matching.reset(self.n);
        for src in 0..self.n {
            for dst in (0..self.n).filter(|dst| self.padded[src * self.n + dst] > 0) {
                self.matching.allow(src, dst);
            }
        }
        while self.left > 0 {
            (0..self.n).for_each(|src| self.matching.augment(src));
            self.stage(shop, list);
        }
    }

    fn planning_ns(&self, n: u64) -> u64 {
        // About n * n stages of n pairs, a matching repaired in each.
        20 * n * n * n
    }
}

impl Birkhoff {
    /// Adds idle work until every line is as long as the longest.
    fn pad(&mut self) {
        let n = self.n;
        let (out, into) = (&mut self.out_idle, &mut self.in_idle);
        out.clear();
        out.extend((0..n).map(|s| self.real[s * n..(s + 1) * n].iter().sum::<u64>()));
        into.clear();
        into.extend((0..n).map(|t| self.real.iter().skip(t).step_by(n).sum::<u64>()));
        let longest = out.iter().chain(&*into).copied().max().unwrap_or(0);
        out.iter_mut().chain(&mut *into).for_each(|line| *line = longest - *line);
        self.left = longest;
        self.padded.clone_from(&self.real);
        let (mut s, mut t) = (0, 0);
        while s < n && t < n {
            let idle = out[s].min(into[t]);
            self.padded[s * n + t] += idle;
            (out[s], into[t]) = (out[s] - idle, into[t] - idle);
            if out[s] == 0 {
                s += 1;
            } else {
                t += 1;
            }
        }
    }

    /// Runs the present matching until its first pair is used up.
    fn stage(&mut self, shop: &Shop, list: &mut List) {
        let n = self.n;
        let pair = |src: usize, dst: u32| src * n + dst as usize;
        let matched = || self.matching.of_row.iter().enumerate();
        let length = matched().map(|(src, &dst)| self.padded[pair(src, dst)]).min().unwrap_or(self.left);
        self.left -= length;
        let first = list.transfers.len() as u32;
        for src in 0..n {
            let dst = self.matching.of_row[src];
            let p = pair(src, dst);
            let work = length.min(self.real[p]);
            self.real[p] -= work;
            self.padded[p] -= length;
            if self.padded[p] == 0 {
                self.matching.forbid(src, dst as usize);
            }
            // Cumulative rounding: the last part of a pair always ends at its last unit.
            let upto =
                if work == 0 { self.done[p] } else { units_done(shop.units[p], self.total[p], self.real[p]) };
            if upto > self.done[p] {
                list.push(src, dst as usize, upto - self.done[p]);
                self.done[p] = upto;
            }
        }
        if list.transfers.len() as u32 > first {
            list.stages.push(first);
        }
    }
}

fn units_done(units: u64, total: u64, left: u64) -> u64 {
    if units == total { total - left } else { mul_div(units, total - left, total) }
}

/// Work per pair: units when all servers are equally fast, else time in ticks as fine as 62 bits allow.
fn work(shop: &Shop, out: &mut Vec<u64>) {
    if shop.is_even() {
        return out.clone_from(&shop.units);
    }
    let exact = |p: usize, scale: u128| -> u128 {
        let rate = u128::from(shop.mbit_per_s(p / shop.n, p % shop.n));
        if shop.units[p] == 0 { 0 } else { (u128::from(shop.units[p]) * scale).div_ceil(rate.max(1)) }
    };
    let pairs = shop.n * shop.n;
    // Units fit 63 bits and a scale of 2^40 leaves room for the sum; the shift brings the largest sum to 62 bits.
    let sum: u128 = (0..pairs).map(|p| exact(p, 1 << 40)).sum();
    let shift = (u128::BITS - sum.leading_zeros()).saturating_sub(62);
    out.clear();
    out.extend((0..pairs).map(|p| exact(p, 1 << 40).div_ceil(1 << shift) as u64));
}

const FREE: u32 = u32::MAX;

/// A bipartite matching of senders (rows) and receivers (columns).
#[derive(Default)]
struct Matching {
    words: usize,
    allowed: Vec<u64>,
    of_row: Vec<u32>,
    of_column: Vec<u32>,
    /// Scratch of the search: columns not yet seen, the row each was reached from, rows to visit.
    unseen: Vec<u64>,
    from_row: Vec<u32>,
    queue: Vec<u32>,
}

impl Matching {
    /// `n` rows and columns, no pair allowed.
    fn reset(&mut self, n: usize) {
        self.words = n.div_ceil(64);
        let fill = |v: &mut Vec<u64>, len: usize| {
            v.clear();
            v.resize(len, 0);
        };
        fill(&mut self.allowed, n * self.words);
        fill(&mut self.unseen, self.words);
        for servers in [&mut self.of_row, &mut self.of_column, &mut self.from_row] {
            servers.clear();
            servers.resize(n, FREE);
        }
    }

    fn allow(&mut self, row: usize, column: usize) {
        self.allowed[row * self.words + column / 64] |= 1 << (column % 64);
    }

    /// Removes a pair that is matched.
    fn forbid(&mut self, row: usize, column: usize) {
        self.allowed[row * self.words + column / 64] &= !(1 << (column % 64));
        self.of_row[row] = FREE;
        self.of_column[column] = FREE;
    }

    /// Matches a row, rematching others on a shortest path where needed. Equal lines guarantee a path (Hall).
    fn augment(&mut self, row: usize) {
        if self.of_row[row] != FREE {
            return;
        }
        self.unseen.fill(u64::MAX);
        self.queue.clear();
        self.queue.push(row as u32);
        let mut next = 0;
        while let Some(&row) = self.queue.get(next) {
            next += 1;
            if let Some(free) = self.visit(row as usize) {
                return self.flip(free);
            }
        }
        debug_assert!(false, "a padded matrix always has a perfect matching");
    }

    /// Reaches the unseen columns of a row; a free one ends the search.
    fn visit(&mut self, row: usize) -> Option<usize> {
        for word in 0..self.words {
            let mut fresh = self.allowed[row * self.words + word] & self.unseen[word];
            self.unseen[word] &= !fresh;
            while fresh != 0 {
                let column = word * 64 + fresh.trailing_zeros() as usize;
                fresh &= fresh - 1;
                self.from_row[column] = row as u32;
                match self.of_column[column] {
                    FREE => return Some(column),
                    owner => self.queue.push(owner),
                }
            }
        }
        None
    }

    fn flip(&mut self, mut column: usize) {
        loop {
            let row = self.from_row[column];
            let before = std::mem::replace(&mut self.of_row[row as usize], column as u32);
            self.of_column[column] = row;
            if before == FREE {
                return;
            }
            column = before as usize;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_as_long_as_the_busiest_line() {
        let units = [0, 5, 1, 9, 3, 0, 0, 2, 8, 1, 0, 1, 0, 0, 7, 0];
        let shop = Shop::with_units(4, &units);
        let mut list = List::default();
        Birkhoff::default().order(&shop, 0, &mut list);
        assert!(list.carries_all_of(&shop));
        assert_eq!(list.cost_ns(&shop, &mut Vec::new()), 15);
    }

    #[test]
    fn nothing_and_one_pair() {
        for (n, units) in [(1, vec![0]), (3, vec![0; 9]), (2, vec![0, 4, 0, 0])] {
            let shop = Shop::with_units(n, &units);
            let mut list = List::default();
            Birkhoff::default().order(&shop, 0, &mut list);
            assert!(list.carries_all_of(&shop));
            assert_eq!(list.transfers.len(), units.iter().filter(|&&u| u > 0).count());
        }
    }

    /// A server at half rate is busy twice as long with the same bytes.
    #[test]
    fn slow_servers_set_the_pace_by_time() {
        use crate::plan::{CostModel, Demand, ServerSums};
        use crate::topo::{Cluster, Server};
        let server = |rate| Server::new(1, &[rate], 1);
        let cluster = Cluster::new(vec![server(8000), server(8000), server(4000)]);
        let demand = Demand::new(3, vec![0, 30, 10, 30, 0, 10, 10, 10, 0], 1).unwrap();
        let sums = ServerSums::of(&cluster, &demand).unwrap();
        let shop = Shop::of(&cluster, &sums, &CostModel { start_ns: 0, ..CostModel::default() });
        let mut list = List::default();
        Birkhoff::default().order(&shop, 0, &mut list);
        assert!(list.carries_all_of(&shop));
        assert!(list.cost_ns(&shop, &mut Vec::new()) <= 30 + 20 + 2);
    }
}
