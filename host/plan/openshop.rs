//! Open-shop list scheduling: whenever a server is free to send and another to receive, the pair whose lines have the
//! most work left goes next.
//!
//! Servers are machines that work in pairs, and no order of such jobs is known to be best in general; but lines with
//! much left must not wait, and the others have slack. One pass is far from the floor only when a line has few jobs;
//! there, passes with slightly different weights find better ones (GRASP, Feo and Resende 1995). Ties and weights come
//! from fixed seeds: every rank takes the same decisions.

use super::bits::Bits;
use super::list::{List, Shop};
use super::orders::Order;
use super::random::SplitMix;

/// Weight of a line without noise. With noise it is up to a third more.
const WEIGHT: u64 = 96;
const NOISE: u64 = 32;

/// No work: never ends.
const NEVER: u64 = u64::MAX;
/// Bits of an end that name the sender. Lines have 40 bits of work and no list takes twice the longest, so ends fit.
const SENDER_BITS: u32 = 15;
/// The most servers that can be planned for.
pub(super) const MAX_SERVERS: usize = 1 << SENDER_BITS;

#[derive(Default)]
pub(super) struct OpenShop {
    /// Receivers that each sender has yet to serve, and senders that each receiver has yet to hear.
    to_serve: Bits,
    to_hear: Bits,
    free_senders: Bits,
    free_receivers: Bits,
    /// Weighted work left of each sender and each receiver.
    out_left: Vec<u64>,
    in_left: Vec<u64>,
    out_weight: Vec<u64>,
    in_weight: Vec<u64>,
    /// When each sender's present job ends (above [`SENDER_BITS`]; never, without one) with the sender, and who
    /// receives it.
    end: Vec<u64>,
    receiver: Vec<u32>,
    /// Senders by work, for the start.
    first: Vec<u32>,
    now: u64,
}

impl Order for OpenShop {
    fn order(&mut self, shop: &Shop, attempt: u32, list: &mut List) {
        self.reset(shop, attempt);
        for i in 0..self.first.len() {
            self.send_next(shop, self.first[i] as usize, list);
        }
        while let Some((src, dst)) = self.advance() {
            self.pair_up(shop, src, dst, list);
        }
    }

    fn planning_ns(&self, n: u64) -> u64 {
        // n * n jobs, each found among the few servers that are free, and the end of each among all.
        56 * n * n + n * n * n / 2
    }
}

impl OpenShop {
    fn reset(&mut self, shop: &Shop, attempt: u32) {
        let n = shop.n;
        let mut random = SplitMix(attempt.into());
        let mut weigh = |lines: &[u64], weights: &mut Vec<u64>, left: &mut Vec<u64>| {
            weights.clear();
            left.clear();
            for &work in lines {
                let weight = WEIGHT + if attempt == 0 { 0 } else { random.below(NOISE) };
                weights.push(weight);
                left.push(work * weight);
            }
        };
        weigh(&shop.out_work, &mut self.out_weight, &mut self.out_left);
        weigh(&shop.in_work, &mut self.in_weight, &mut self.in_left);
        self.to_serve.copy_from(&shop.to_serve);
        self.to_hear.copy_from(&shop.to_hear);
        self.free_senders.reset(1, n);
        self.free_receivers.reset(1, n);
        (0..n).for_each(|s| self.free_senders.set(0, s));
        (0..n).for_each(|t| self.free_receivers.set(0, t));
        self.end.clear();
        self.end.resize(n, NEVER);
        self.receiver.clear();
        self.receiver.resize(n, 0);
        self.first.clear();
        self.first.extend(0..n as u32);
        self.first.sort_unstable_by_key(|&s| (std::cmp::Reverse(self.out_left[s as usize]), s));
        self.now = 0;
    }

    /// Moves on to the end of the next job and frees its servers. `None` when none is under way.
    #[inline]
    fn advance(&mut self) -> Option<(usize, usize)> {
        let next = least(&self.end);
        if next == NEVER {
            return None;
        }
        self.now = next >> SENDER_BITS;
        let src = (next & ((1 << SENDER_BITS) - 1)) as usize;
        let dst = self.receiver[src] as usize;
        self.end[src] = NEVER;
        self.free_senders.set(0, src);
        self.free_receivers.set(0, dst);
        Some((src, dst))
    }

    /// A sender and a receiver are free: the more urgent one chooses first.
    fn pair_up(&mut self, shop: &Shop, src: usize, dst: usize, list: &mut List) {
        let to = self.best_receiver(shop, src);
        let from = self.best_sender(shop, dst);
        match (to, from) {
            (Some((to_key, to)), Some((from_key, from))) => {
                if to_key >= from_key {
                    self.start(shop, src, to, list);
                    self.receive_next(shop, dst, list);
                } else {
                    self.start(shop, from, dst, list);
                    self.send_next(shop, src, list);
                }
            }
            (Some((_, to)), None) => self.start(shop, src, to, list),
            (None, Some((_, from))) => self.start(shop, from, dst, list),
            (None, None) => {}
        }
    }

    fn send_next(&mut self, shop: &Shop, src: usize, list: &mut List) {
        if self.free_senders.has(0, src)
            && let Some((_, dst)) = self.best_receiver(shop, src)
        {
            self.start(shop, src, dst, list);
        }
    }

    fn receive_next(&mut self, shop: &Shop, dst: usize, list: &mut List) {
        if self.free_receivers.has(0, dst)
            && let Some((_, src)) = self.best_sender(shop, dst)
        {
            self.start(shop, src, dst, list);
        }
    }

    /// The free receiver that `src` has to serve with the most urgent pair. Long jobs first: they fit nowhere later.
    fn best_receiver(&self, shop: &Shop, src: usize) -> Option<(u64, usize)> {
        let mut best = None;
        self.to_serve.for_each_common(src, &self.free_receivers, |dst| {
            let key = self.in_left[dst] + shop.job_ns[src * shop.n + dst] * WEIGHT;
            if best.is_none_or(|(most, _)| key > most) {
                best = Some((key, dst));
            }
        });
        best.map(|(key, dst)| (key + self.out_left[src], dst))
    }

    fn best_sender(&self, shop: &Shop, dst: usize) -> Option<(u64, usize)> {
        let mut best = None;
        self.to_hear.for_each_common(dst, &self.free_senders, |src| {
            let key = self.out_left[src] + shop.job_ns[src * shop.n + dst] * WEIGHT;
            if best.is_none_or(|(most, _)| key > most) {
                best = Some((key, src));
            }
        });
        best.map(|(key, src)| (key + self.in_left[dst], src))
    }

    fn start(&mut self, shop: &Shop, src: usize, dst: usize, list: &mut List) {
        let pair = src * shop.n + dst;
        let ns = shop.job_ns[pair];
        self.end[src] = (self.now + ns) << SENDER_BITS | src as u64;
        self.receiver[src] = dst as u32;
        self.out_left[src] -= ns * self.out_weight[src];
        self.in_left[dst] -= ns * self.in_weight[dst];
        self.to_serve.unset(src, dst);
        self.to_hear.unset(dst, src);
        self.free_senders.unset(0, src);
        self.free_receivers.unset(0, dst);
        list.push(src, dst, shop.units[pair]);
    }
}

/// The least of all, in four strands that the processor can follow at once.
#[inline]
fn least(values: &[u64]) -> u64 {
    let mut strands = [NEVER; 4];
    let mut chunks = values.chunks_exact(4);
    for chunk in &mut chunks {
        strands.iter_mut().zip(chunk).for_each(|(least, value)| *least = (*least).min(*value));
    }
    chunks.remainder().iter().chain(&strands).copied().min().unwrap_or(NEVER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_is_carried_once_by_any_attempt() {
        let mut random = SplitMix(9);
        for n in 1..14 {
            let units: Vec<u64> = (0..n * n).map(|_| random.below(3) * random.below(1000)).collect();
            let shop = Shop::with_units(n, &units);
            let mut order = OpenShop::default();
            for attempt in 0..4 {
                let (mut list, mut again) = (List::default(), List::default());
                order.order(&shop, attempt, &mut list);
                OpenShop::default().order(&shop, attempt, &mut again);
                assert!(list.carries_all_of(&shop));
                assert_eq!(list, again, "the same on every rank");
            }
        }
    }

    /// A server that all others send to sets the pace, and it never waits.
    #[test]
    fn the_busiest_line_never_waits() {
        let mut units = vec![10; 49];
        (0..7).for_each(|s| (units[s * 7 + 3], units[s * 8]) = (900, 0));
        let shop = Shop::with_units(7, &units);
        let mut list = List::default();
        OpenShop::default().order(&shop, 0, &mut list);
        assert_eq!(list.cost_ns(&shop, &mut Vec::new()), shop.in_work[3]);
    }

    #[test]
    fn the_least_of_any_number_is_found() {
        for n in 0..12u64 {
            let values: Vec<u64> = (0..n).map(|i| (i * 5 + 3) % 11).collect();
            assert_eq!(least(&values), values.iter().copied().min().unwrap_or(NEVER));
        }
    }
}
