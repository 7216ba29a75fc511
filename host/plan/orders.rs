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
const AUTO_NS_PER_JOB: u64 = 64;
const ORDERED_NS_PER_JOB: u64 = 800;

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
                let arm = search.arm(method);
                search.refine(&mut [arm], ORDERED_NS_PER_JOB);
            }
            _ => {
                search.attempt(method, 0);
            }
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

/// A method that can be tried more than once.
#[derive(Clone, Copy)]
struct Arm {
    method: Method,
    attempts: u32,
    best_ns: u64,
}

impl Search<'_> {
    /// Tries the methods from the quickest on, and goes on with the most promising.
    fn all(&mut self, ns_per_job: u64) {
        self.attempt(Method::SpreadOut, 0);
        let mut arms = [Method::Rounds, Method::OpenShop].map(|method| self.arm(method));
        if self.birkhoff_may_win() {
            self.attempt(Method::Birkhoff, 0);
        }
        self.refine(&mut arms, ns_per_job);
    }

    /// The first attempt of a method.
    fn arm(&mut self, method: Method) -> Arm {
        let best_ns = if self.is_good() { u64::MAX } else { self.attempt(method, 0) };
        Arm { method, attempts: 1, best_ns }
    }

    /// More attempts, as many as planning time allows: first with all arms, then with the best.
    fn refine(&mut self, arms: &mut [Arm], ns_per_job: u64) {
        let n = self.shop.n as u64;
        let budget_ns = n * n * ns_per_job;
        let mut spent_ns = 0;
        while !self.is_good() && spent_ns < budget_ns {
            let explore = spent_ns < budget_ns / 4;
            let key = |arm: &&mut Arm| if explore { u64::from(arm.attempts) } else { arm.best_ns };
            let Some(arm) = arms.iter_mut().min_by_key(key) else { return };
            arm.best_ns = arm.best_ns.min(self.attempt(arm.method, arm.attempts));
            arm.attempts += 1;
            spent_ns += self.orders.order(arm.method).planning_ns(n);
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

    /// Returns what the attempt's list takes.
    fn attempt(&mut self, method: Method, attempt: u32) -> u64 {
        let mut list = std::mem::take(&mut self.orders.trial);
        list.clear();
        self.orders.order(method).order(self.shop, attempt, &mut list);
        let ns = list.cost_ns(self.shop, &mut self.orders.free);
        if ns < self.best.ns || self.orders.best.transfers.is_empty() {
            self.best = Choice { method, ns };
            std::mem::swap(&mut self.orders.best, &mut list);
        }
        self.orders.trial = list;
        ns
    }
}
