//! Methods that put transfers in order, and the choice between them.

use super::Method;
use super::birkhoff::Birkhoff;
use super::list::{List, Shop};
use super::openshop::OpenShop;
use super::rounds::Rounds;
use super::spreadout::SpreadOut;

/// A way to order the transfers of a shop.
pub(super) trait Order {
    /// Appends transfers that carry every unit of every pair. The list comes empty. Methods with choices to make take
    /// others in each attempt; attempt 0 is the plain one.
    fn order(&mut self, shop: &Shop, attempt: u32, list: &mut List);

    /// What one attempt takes for `n` servers: a fixed formula, so that all ranks agree.
    fn planning_ns(&self, n: u64) -> u64;
}

/// A method and what its list will take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Choice {
    pub method: Method,
    pub ns: u64,
}

/// All ordering methods with their workspaces.
#[derive(Default)]
pub(super) struct Orders {
    /// The list of the last choice.
    pub best: List,
    trial: List,
    free: Vec<(u64, u64)>,
    spreadout: SpreadOut,
    birkhoff: Birkhoff,
    openshop: OpenShop,
    rounds: Rounds,
}

/// What attempts may take together: for `auto`, and for methods that are asked for quality.
const AUTO_NS_PER_JOB: u64 = 120;
const ORDERED_NS_PER_JOB: u64 = 1200;

impl Orders {
    /// Leaves the list of a method in `best`; of `Auto` and `Ordered`, the best by predicted cost.
    ///
    /// No order beats `floor_ns`; balanced traffic in no order takes `loose_ns`.
    pub fn choose(&mut self, method: Method, shop: &Shop, floor_ns: u64, loose_ns: u64) -> Choice {
        self.best.clear();
        let loose = Choice { method: Method::Loose, ns: loose_ns };
        if method == Method::Loose || (method == Method::Auto && loose_ns <= floor_ns) || shop.most_peers == 0
        {
            return Choice { ns: if shop.most_peers == 0 { 0 } else { loose_ns }, ..loose };
        }
        let mut search = Search { orders: self, shop, floor_ns, best: Choice { method, ns: u64::MAX } };
        match method {
            Method::Auto => search.all(AUTO_NS_PER_JOB),
            Method::Ordered => search.all(ORDERED_NS_PER_JOB),
            Method::OpenShop | Method::Rounds => {
                search.attempt(method, 0);
                search.refine(method, ORDERED_NS_PER_JOB);
            }
            _ => search.attempt(method, 0),
        }
        let best = search.best;
        if method == Method::Auto && loose_ns <= best.ns {
            self.best.clear();
            return loose;
        }
        best
    }

    fn order(&mut self, method: Method) -> &mut dyn Order {
        match method {
            Method::Birkhoff => &mut self.birkhoff,
            Method::OpenShop => &mut self.openshop,
            Method::Rounds => &mut self.rounds,
            _ => &mut self.spreadout,
        }
    }
}

struct Search<'a> {
    orders: &'a mut Orders,
    shop: &'a Shop,
    floor_ns: u64,
    best: Choice,
}

impl Search<'_> {
    /// Tries the methods from the quickest on, and goes on with the most promising.
    fn all(&mut self, ns_per_job: u64) {
        for method in [Method::SpreadOut, Method::Rounds, Method::OpenShop] {
            if !self.is_good() {
                self.attempt(method, 0);
            }
        }
        if self.birkhoff_may_win() {
            self.attempt(Method::Birkhoff, 0);
        }
        if matches!(self.best.method, Method::Rounds | Method::OpenShop) {
            self.refine(self.best.method, ns_per_job);
        }
    }

    /// More attempts with one method, as many as its planning time allows.
    fn refine(&mut self, method: Method, ns_per_job: u64) {
        let n = self.shop.n as u64;
        let attempts = n * n * ns_per_job / self.orders.order(method).planning_ns(n).max(1);
        for attempt in 1..attempts.min(1000) as u32 {
            if self.is_good() {
                return;
            }
            self.attempt(method, attempt);
        }
    }

    /// A five-hundredth above the floor is as good as it needs to be.
    fn is_good(&self) -> bool {
        self.best.ns <= self.floor_ns.saturating_add(self.floor_ns / 512)
    }

    /// Its stages are as long as the bound, but each costs a start: about one per pair of servers.
    fn birkhoff_may_win(&self) -> bool {
        let stages = self.shop.n as u64 * self.shop.most_peers as u64 / 2;
        let extra = self.shop.start_ns.saturating_mul(stages);
        !self.is_good() && self.best.ns > self.floor_ns.saturating_add(extra)
    }

    fn attempt(&mut self, method: Method, attempt: u32) {
        let mut list = std::mem::take(&mut self.orders.trial);
        list.clear();
        self.orders.order(method).order(self.shop, attempt, &mut list);
        let ns = list.cost_ns(self.shop, &mut self.orders.free);
        if ns < self.best.ns || self.orders.best.transfers.is_empty() {
            self.best = Choice { method, ns };
            std::mem::swap(&mut self.orders.best, &mut list);
        }
        self.orders.trial = list;
    }
}
