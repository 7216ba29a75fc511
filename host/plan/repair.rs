//! From the list of one demand to a list of the next: what a training step routes is much like what the step before did.

use super::Method;
use super::bits::Bits;
use super::list::{List, Shop};

/// How good a list was when it was made, and by what request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Past {
    pub asked: Method,
    /// Which method made it.
    pub method: Method,
    pub servers: usize,
    pub ns: u64,
    pub floor_ns: u64,
}

impl Past {
    /// Whether its list can be one of a shop for the same request. Exact Birkhoff loses its point when pairs change;
    /// SpreadOut costs nothing to make.
    pub fn serves(&self, asked: Method, shop: &Shop) -> bool {
        let repairable = matches!(self.method, Method::OpenShop | Method::Rounds | Method::SpreadOut);
        repairable && asked != Method::SpreadOut && self.asked == asked && self.servers == shop.n
    }

    /// Whether a list as close to the floor as `ns` may be kept without a look for better ones: at most a 128th further
    /// from it than a fresh list was, and a 16th at most, so that drift cannot add up.
    pub fn excuses(&self, ns: u64, floor_ns: u64) -> bool {
        let wide = |a: u64, b: u64| u128::from(a) * u128::from(b);
        let fresh = wide(self.ns, floor_ns);
        let as_close = wide(ns, self.floor_ns) <= fresh.saturating_add(fresh / 128);
        as_close && ns <= floor_ns.saturating_add(floor_ns / 16)
    }
}

/// Appends the transfers of `old` with the units of the new demand, then pairs that had nothing to do before.
pub(super) fn repair(old: &List, shop: &Shop, missing: &mut Bits, list: &mut List) {
    missing.copy_from(&shop.to_serve);
    for t in &old.transfers {
        let (src, dst) = (t.src as usize, t.dst as usize);
        if missing.has(src, dst) {
            missing.unset(src, dst);
            list.push(src, dst, shop.units[src * shop.n + dst]);
        }
    }
    for src in 0..shop.n {
        while let Some(dst) = missing.first(src) {
            missing.unset(src, dst);
            list.push(src, dst, shop.units[src * shop.n + dst]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::random::SplitMix;

    /// Pairs that come, go and change: every unit is carried, in the old order.
    #[test]
    fn a_repaired_list_carries_the_new_demand() {
        let mut random = SplitMix(3);
        for n in 1..12 {
            let mut draw = || (0..n * n).map(|_| random.below(2) * random.below(1000)).collect::<Vec<u64>>();
            let (before, after) = (Shop::with_units(n, &draw()), Shop::with_units(n, &draw()));
            let (mut old, mut list) = (List::default(), List::default());
            repair(&old, &before, &mut Bits::default(), &mut list);
            std::mem::swap(&mut old, &mut list);
            list.clear();
            repair(&old, &after, &mut Bits::default(), &mut list);
            assert!(list.carries_all_of(&after));
            let kept = |list: &List, other: &Shop| -> Vec<(u32, u32)> {
                let both =
                    |t: &&super::super::list::Transfer| other.units[t.src as usize * n + t.dst as usize] > 0;
                list.transfers.iter().filter(both).map(|t| (t.src, t.dst)).collect()
            };
            assert_eq!(kept(&old, &after), kept(&list, &before));
        }
    }

    #[test]
    fn drift_is_excused_up_to_a_limit() {
        let (asked, method) = (Method::Auto, Method::OpenShop);
        let past = Past { asked, method, servers: 2, ns: 12_800, floor_ns: 12_800 };
        assert!(past.excuses(1290, 1280) && !past.excuses(1291, 1280));
        let far = Past { ns: 25_600, ..past };
        assert!(far.excuses(1360, 1280) && !far.excuses(1361, 1280));
        assert!(past.excuses(u64::MAX, u64::MAX));
        let endless = Past { ns: u64::MAX, ..past };
        assert!(endless.excuses(u64::MAX, u64::MAX), "found by fuzzing: the product is near 2^128");
    }
}
