//! Methods that put transfers in order, and the choice between them.

use super::Method;
use super::birkhoff::Birkhoff;
use super::bits::Bits;
use super::list::{List, Shop};
use super::loose::Loose;
use super::openshop::OpenShop;
use super::repair::{Past, repair};
use super::rounds::Rounds;
use super::spreadout::SpreadOut;

/// A way to order the transfers of a shop.
pub(super) trait Order {
    /// Appends transfers; units of pairs that none carries are loose. The list comes empty. Methods with choices to make
    /// take others in each attempt; attempt 0 is the plain one.
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

impl Choice {
    /// Loose traffic instead, where `auto` expects it to take no longer.
    fn or_loose(self, asked: Method, loose_ns: u64, orders: &mut Orders) -> Self {
        if asked == Method::Auto {
            orders.note(Choice { method: Method::Loose, ns: loose_ns });
        }
        if asked != Method::Auto || loose_ns > self.ns {
            return self;
        }
        orders.past = None;
        orders.best.clear();
        Self { method: Method::Loose, ns: loose_ns }
    }
}

/// Loose traffic, where there is nothing to order or no order can be better.
fn goes_loose(method: Method, shop: &Shop, floor_ns: u64, loose_ns: u64) -> bool {
    shop.most_peers == 0 || method == Method::Loose || (method == Method::Auto && loose_ns <= floor_ns)
}

/// All ordering methods with their workspaces.
#[derive(Default)]
pub(super) struct Orders {
    /// The list of the last choice.
    pub best: List,
    /// How that list came about, if it is one.
    past: Option<Past>,
    /// What each method that was tried in the last choice would take at best.
    pub tried: Vec<Choice>,
    trial: List,
    missing: Bits,
    free: Vec<(u64, u64)>,
    loose: Loose,
    spreadout: SpreadOut,
    birkhoff: Birkhoff,
    openshop: OpenShop,
    rounds: Rounds,
}

/// What attempts may take together: for `auto`, and for methods that are asked for quality.
const AUTO_NS_PER_JOB: u64 = 30;
const ORDERED_NS_PER_JOB: u64 = 1000;

impl Orders {
    /// Forgets the last list.
    pub fn clear(&mut self) {
        self.best.clear();
        self.tried.clear();
        self.past = None;
    }

    /// Leaves the list of a method in `best`; of `Auto` and `Ordered`, the best by predicted cost.
    ///
    /// No order beats `floor_ns`; balanced traffic in no order takes `loose_ns`.
    pub fn choose(&mut self, method: Method, shop: &Shop, floor_ns: u64, loose_ns: u64) -> Choice {
        let floor_ns = floor_ns.max(shop.least_ns);
        self.clear();
        if goes_loose(method, shop, floor_ns, loose_ns) {
            return self.loose(shop, loose_ns);
        }
        let first = Choice { method, ns: u64::MAX };
        self.search(method, shop, floor_ns, first).or_loose(method, loose_ns, self)
    }

    /// The same, from the list of the last choice on: it is kept where it is about as good for this shop as it was for
    /// its own, and else competes with fresh ones. Follows from that list and the arguments.
    pub fn choose_again(&mut self, method: Method, shop: &Shop, floor_ns: u64, loose_ns: u64) -> Choice {
        let Some(past) = self.past.filter(|past| past.serves(method, shop)) else {
            return self.choose(method, shop, floor_ns, loose_ns);
        };
        let floor_ns = floor_ns.max(shop.least_ns);
        if goes_loose(method, shop, floor_ns, loose_ns) {
            return self.loose(shop, loose_ns);
        }
        self.tried.clear();
        self.trial.clear();
        repair(&self.best, shop, &mut self.missing, &mut self.trial);
        std::mem::swap(&mut self.best, &mut self.trial);
        let repaired = Choice { method: past.method, ns: self.best.cost_ns(shop, &mut self.free) };
        let best = match past.excuses(repaired.ns, floor_ns) {
            true => repaired,
            false => self.search(method, shop, floor_ns, repaired),
        };
        best.or_loose(method, loose_ns, self)
    }

    fn loose(&mut self, shop: &Shop, ns: u64) -> Choice {
        self.clear();
        self.loose.order(shop, 0, &mut self.best);
        Choice { method: Method::Loose, ns }
    }

    /// Looks for a better list than the one in `best`, which may be empty.
    fn search(&mut self, method: Method, shop: &Shop, floor_ns: u64, best: Choice) -> Choice {
        let mut search = Search { orders: self, shop, floor_ns, best };
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
        let Choice { method: made_by, ns } = search.best;
        self.past = Some(Past { asked: method, method: made_by, servers: shop.n, ns, floor_ns });
        Choice { method: made_by, ns }
    }

    fn note(&mut self, tried: Choice) {
        match self.tried.iter_mut().find(|known| known.method == tried.method) {
            Some(known) => known.ns = known.ns.min(tried.ns),
            None => self.tried.push(tried),
        }
    }

    fn order(&mut self, method: Method) -> &mut dyn Order {
        match method {
            Method::Loose => &mut self.loose,
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
        let dearest = arms.iter().map(|arm| self.orders.order(arm.method).planning_ns(n)).max().unwrap_or(0);
        let mut spent_ns = 0;
        while !self.is_good() && spent_ns < budget_ns {
            // Where time is for a few attempts only, the first ones have to tell.
            let explore = spent_ns + dearest <= budget_ns / 4;
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
        self.orders.note(Choice { method, ns });
        if ns < self.best.ns || self.orders.best.transfers.is_empty() {
            self.best = Choice { method, ns };
            std::mem::swap(&mut self.orders.best, &mut list);
        }
        self.orders.trial = list;
        ns
    }
}
