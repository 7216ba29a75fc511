//! Rounds of nearly equal jobs: for servers that all have about as much to say to each other.
//!
//! List scheduling does badly there: its last jobs find no free partner. So the pairs are dealt to as many rounds as
//! the busiest server has peers, in each of which a server sends at most once and receives at most once (an edge
//! colouring, which König 1916 shows to exist). Long jobs are dealt first, hence together: partners end at about the
//! same time, and as there is no barrier between rounds, the busiest line hardly ever waits.

use super::bits::Bits;
use super::list::{List, Shop, WORK_BITS};
use super::orders::Order;
use super::random::SplitMix;

const NONE: u32 = u32::MAX;
/// Jobs count as up to a 20th longer, in attempts after the first.
const WEIGHT: u64 = 1 << 10;
const NOISE: u64 = WEIGHT / 20;

#[derive(Default)]
pub(super) struct Rounds {
    rounds: usize,
    /// Rounds in which each sender, or receiver, has nothing yet.
    idle_senders: Bits,
    idle_receivers: Bits,
    /// Whom each sender serves, and each receiver hears, by round.
    serves: Vec<u32>,
    hears: Vec<u32>,
    /// Jobs: noisy length, then pair in as many bits as it needs.
    jobs: Vec<u64>,
    /// Rounds: longest job and number.
    longest: Vec<(u64, u32)>,
}

impl Order for Rounds {
    fn order(&mut self, shop: &Shop, attempt: u32, list: &mut List) {
        self.reset(shop, attempt);
        let pair_mask = (1 << pair_bits(shop.n)) - 1;
        for i in (0..self.jobs.len()).rev() {
            let pair = (self.jobs[i] & pair_mask) as usize;
            self.deal(pair / shop.n, pair % shop.n);
        }
        self.list(shop, list);
    }

    fn planning_ns(&self, n: u64) -> u64 {
        // n * n jobs to sort and deal.
        30 * n * n
    }
}

/// Bits that number the pairs of `n` servers.
fn pair_bits(n: usize) -> u32 {
    usize::BITS - (n * n).leading_zeros()
}

impl Rounds {
    fn reset(&mut self, shop: &Shop, attempt: u32) {
        let n = shop.n;
        let mut random = SplitMix(attempt.into());
        self.jobs.clear();
        let pair_bits = pair_bits(n);
        // Lengths have 40 bits and weights 11; what does not fit beside the pair is too fine to matter.
        let cut = (pair_bits + WORK_BITS + 11).saturating_sub(u64::BITS);
        for (pair, &ns) in shop.job_ns.iter().enumerate().filter(|(_, ns)| **ns > 0) {
            let weight = WEIGHT + if attempt == 0 { 0 } else { random.below(NOISE) };
            self.jobs.push(((ns * weight) >> cut) << pair_bits | pair as u64);
        }
        self.jobs.sort_unstable();
        self.rounds = shop.most_peers;
        let fill = |bits: &mut Bits| {
            bits.reset(n, self.rounds);
            (0..n).for_each(|row| (0..self.rounds).for_each(|round| bits.set(row, round)));
        };
        fill(&mut self.idle_senders);
        fill(&mut self.idle_receivers);
        for table in [&mut self.serves, &mut self.hears] {
            table.clear();
            table.resize(n * self.rounds, NONE);
        }
    }

    /// Gives a job the first round in which both its servers are idle. Where there is none, jobs change places along
    /// the path that alternates between a round of either.
    fn deal(&mut self, src: usize, dst: usize) {
        if let Some(round) = self.idle_senders.first_common(src, &self.idle_receivers, dst) {
            return self.put(src, dst, round);
        }
        let (Some(a), Some(b)) = (self.idle_senders.first(src), self.idle_receivers.first(dst)) else {
            debug_assert!(false, "a server has no more jobs than there are rounds");
            return;
        };
        self.swap_path(dst, a, b);
        self.put(src, dst, a);
    }

    fn put(&mut self, src: usize, dst: usize, round: usize) {
        self.serves[src * self.rounds + round] = dst as u32;
        self.hears[dst * self.rounds + round] = src as u32;
        self.idle_senders.unset(src, round);
        self.idle_receivers.unset(dst, round);
    }

    /// Makes `dst`, which is idle in round `b`, idle in `a`: its job there moves to `b`, the job that is in the way to
    /// `a`, and so on. A sender is only ever reached by its job in `a`, so one that is idle in `a` is never touched.
    fn swap_path(&mut self, dst: usize, a: usize, b: usize) {
        let mut dst = dst;
        let mut src = std::mem::replace(&mut self.hears[dst * self.rounds + a], NONE) as usize;
        self.idle_receivers.set(dst, a);
        loop {
            self.hears[dst * self.rounds + b] = src as u32;
            self.idle_receivers.unset(dst, b);
            let in_the_way = std::mem::replace(&mut self.serves[src * self.rounds + b], dst as u32);
            self.serves[src * self.rounds + a] = in_the_way;
            if in_the_way == NONE {
                self.idle_senders.set(src, a);
                self.idle_senders.unset(src, b);
                return;
            }
            dst = in_the_way as usize;
            let next = std::mem::replace(&mut self.hears[dst * self.rounds + a], src as u32);
            self.idle_receivers.unset(dst, a);
            if next == NONE {
                self.hears[dst * self.rounds + b] = NONE;
                self.idle_receivers.set(dst, b);
                return;
            }
            src = next as usize;
        }
    }

    /// Rounds by their longest job.
    fn list(&mut self, shop: &Shop, list: &mut List) {
        self.longest.clear();
        self.longest.extend((0..self.rounds as u32).map(|round| (0, round)));
        for (i, &dst) in self.serves.iter().enumerate().filter(|(_, dst)| **dst != NONE) {
            let ns = shop.job_ns[i / self.rounds * shop.n + dst as usize];
            let longest = &mut self.longest[i % self.rounds].0;
            *longest = ns.max(*longest);
        }
        self.longest.sort_unstable_by_key(|&(ns, round)| (std::cmp::Reverse(ns), round));
        for &(_, round) in &self.longest {
            for src in 0..shop.n {
                let dst = self.serves[src * self.rounds + round as usize];
                if dst != NONE {
                    list.push(src, dst as usize, shop.units[src * shop.n + dst as usize]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sparse and dense, equal and unequal: every job once, every server once in a round, no round too many.
    #[test]
    fn every_round_is_a_matching() {
        let mut random = SplitMix(5);
        for n in 1..14 {
            for density in 1..4 {
                let units: Vec<u64> =
                    (0..n * n).map(|_| random.below(4) / density * random.below(1000)).collect();
                let shop = Shop::with_units(n, &units);
                let mut rounds = Rounds::default();
                for attempt in 0..3 {
                    let mut list = List::default();
                    rounds.order(&shop, attempt, &mut list);
                    assert!(list.carries_all_of(&shop));
                    for round in
                        rounds.serves.chunks(rounds.rounds.max(1)).next().map_or(0..0, |r| 0..r.len())
                    {
                        let mut hears: Vec<u32> = (0..n)
                            .map(|s| rounds.serves[s * rounds.rounds + round])
                            .filter(|&t| t != NONE)
                            .collect();
                        let before = hears.len();
                        hears.sort_unstable();
                        hears.dedup();
                        assert_eq!(hears.len(), before);
                    }
                }
                assert_eq!(rounds.rounds, shop.most_peers);
            }
        }
    }

    #[test]
    fn equal_jobs_reach_the_floor() {
        let units: Vec<u64> = (0..36).map(|p| if p / 6 == p % 6 { 0 } else { 1000 }).collect();
        let shop = Shop::with_units(6, &units);
        let mut list = List::default();
        Rounds::default().order(&shop, 0, &mut list);
        assert_eq!(list.cost_ns(&shop, &mut Vec::new()), 5 * shop.job_ns[1]);
    }
}
