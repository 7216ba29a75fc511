//! SpreadOut: in round k every server sends to the k-th after it.

use super::list::{List, Shop};
use super::orders::Order;

#[derive(Default)]
pub(super) struct SpreadOut;

impl Order for SpreadOut {
    fn order(&mut self, shop: &Shop, _attempt: u32, list: &mut List) {
        let n = shop.n;
        for round in 1..n {
            for src in 0..n {
                let dst = (src + round) % n;
                let units = shop.units[src * n + dst];
                if units > 0 {
                    list.push(src, dst, units);
                }
            }
        }
    }

    fn planning_ns(&self, n: u64) -> u64 {
        4 * n * n
    }
}
