//! Methods that put transfers in order, and the choice between them.

use super::Method;
use super::birkhoff::Birkhoff;
use super::list::{List, Shop};
use super::spreadout::SpreadOut;

/// A way to order the transfers of a shop.
pub(super) trait Order {
    /// Appends transfers that carry every unit of every pair. The list comes empty.
    fn order(&mut self, shop: &Shop, list: &mut List);

    /// What planning takes for `n` servers: a fixed formula, so that all ranks agree; it enters the choice.
    fn planning_ns(&self, n: u64) -> u64;
}

/// A method, its list and what that will take.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    pub method: Method,
    pub list: List,
    pub ns: u64,
}

/// The ordering behind a method; `None` for methods without a list.
fn ordering(method: Method) -> Option<Box<dyn Order>> {
    match method {
        Method::SpreadOut => Some(Box::new(SpreadOut)),
        Method::Birkhoff => Some(Box::new(Birkhoff::default())),
        _ => None,
    }
}

/// The list of a method; of `Auto` and `Ordered`, the best by predicted cost. `loose_ns` is what no order would take.
pub(super) fn choose(method: Method, shop: &Shop, loose_ns: u64) -> Choice {
    let loose = || Choice { method: Method::Loose, list: List::default(), ns: loose_ns };
    let candidates: &[Method] = match method {
        Method::Loose => return loose(),
        Method::Auto | Method::Ordered => &[Method::SpreadOut, Method::Birkhoff],
        ref one => std::slice::from_ref(one),
    };
    let mut best = (method == Method::Auto).then(|| (loose_ns, loose()));
    let mut free = Vec::new();
    for &candidate in candidates {
        let Some(mut ordering) = ordering(candidate) else { continue };
        let mut list = List::default();
        ordering.order(shop, &mut list);
        let ns = list.cost_ns(shop, &mut free);
        let with_planning = ns.saturating_add(ordering.planning_ns(shop.n as u64));
        if best.as_ref().is_none_or(|(least, _)| with_planning < *least) {
            best = Some((with_planning, Choice { method: candidate, list, ns }));
        }
    }
    best.map_or_else(loose, |(_, choice)| choice)
}
