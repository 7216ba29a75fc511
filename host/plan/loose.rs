//! Balanced over NICs and rails, in no order: no transfers, so that nothing waits for a turn. Best where little is to be
//! sent. Servers that send into one NIC at a time slow each other down.

use super::list::{List, Shop};
use super::orders::Order;
use super::{Bound, CostModel, ServerSums};

#[derive(Default)]
pub(super) struct Loose;

impl Order for Loose {
    /// No transfers: every unit is loose.
    fn order(&mut self, _shop: &Shop, _attempt: u32, _list: &mut List) {}

    fn planning_ns(&self, _servers: u64) -> u64 {
        0
    }
}

/// What it takes: the bound, made worse by the servers that send into one at the same time.
pub(super) fn loose_ns(sums: &ServerSums, bound: &Bound, model: &CostModel) -> u64 {
    let senders = (0..sums.n).map(|t| sums.received_by(t).1).max().unwrap_or(0);
    model.loose_ns(bound.lower_ns, senders)
}
