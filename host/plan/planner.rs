//! Planning for one rank, again and again, in memory that is kept: only the own server's tiles are dealt out.

use super::cells::Cells;
use super::compile::{Builder, Target};
use super::list::Shop;
use super::loose::loose_ns;
use super::orders::{Choice, Orders};
use super::schedule::{check_shape, cut_pairs, hash};
use super::tile::{Cut, Focus, Tiler};
use super::{Bound, CostModel, Demand, LocalDemand, Method, PlanError, PlanTable, ServerSums, schedule};
use crate::topo::{Cluster, Rank, ServerId};

/// What to plan for one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// How.
    pub method: Method,
    /// Constants of the cost model, the same on every rank.
    pub model: CostModel,
    /// Whose table.
    pub rank: Rank,
    /// Payload of a message, the same on every rank.
    pub message_bytes: u64,
}

/// A plan for one rank.
#[derive(Clone, Copy, Debug)]
pub struct Planned<'a> {
    /// What the rank does.
    pub table: &'a PlanTable,
    /// How the plan was made; never `Auto` or `Ordered`, but what those chose.
    pub method: Method,
    /// Transfers in the list.
    pub transfers: usize,
    /// What no schedule can beat.
    pub bound: Bound,
    /// What this one is expected to take.
    pub predicted_ns: u64,
}

/// Afresh, or from the last list on.
type Choose = fn(&mut Orders, Method, &Shop, u64, u64) -> Choice;

/// Makes the tables of [`schedule`] for one rank at a time, without the pieces of other servers. A planner that is kept
/// allocates nothing once it has seen a demand of the size (exact Birkhoff and the methods without a list excepted).
#[derive(Default)]
pub struct Planner {
    sums: ServerSums,
    shop: Shop,
    orders: Orders,
    tiler: Tiler,
    builder: Builder,
    /// Position in the list of each transfer from the own server and to it, by peer.
    sends: Vec<Cut>,
    receives: Vec<Cut>,
    table: PlanTable,
}

impl Planner {
    /// A planner with no memory yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Plans a whole matrix.
    ///
    /// # Errors
    /// As [`schedule`] and [`PlanTable::compile`].
    pub fn plan(
        &mut self,
        cluster: &Cluster,
        demand: &Demand,
        request: &Request,
    ) -> Result<Planned<'_>, PlanError> {
        self.plan_matrix(cluster, demand, request, Orders::choose)
    }

    /// Plans a matrix that is much like the last one, from its list on: quicker than [`Planner::plan`] where that list
    /// is still about as good, and otherwise no worse. At most a 16th over what `plan` would have found.
    ///
    /// The result follows from the lists since the last `plan` and the demand. So all ranks must make the same calls
    /// with the same demands; a rank that did not shows by the hash in its table.
    ///
    /// # Errors
    /// As [`Planner::plan`].
    pub fn replan(
        &mut self,
        cluster: &Cluster,
        demand: &Demand,
        request: &Request,
    ) -> Result<Planned<'_>, PlanError> {
        self.plan_matrix(cluster, demand, request, Orders::choose_again)
    }

    /// Plans from what one server knows. The rank must be of that server.
    ///
    /// # Errors
    /// As [`schedule`] and [`PlanTable::compile`]; [`PlanError::NeedsWholeMatrix`] for methods without a list.
    pub fn plan_local(
        &mut self,
        cluster: &Cluster,
        demand: &LocalDemand,
        request: &Request,
    ) -> Result<Planned<'_>, PlanError> {
        self.plan_server(cluster, demand, request, Orders::choose)
    }

    /// [`Planner::replan`] from what one server knows.
    ///
    /// # Errors
    /// As [`Planner::plan_local`].
    pub fn replan_local(
        &mut self,
        cluster: &Cluster,
        demand: &LocalDemand,
        request: &Request,
    ) -> Result<Planned<'_>, PlanError> {
        self.plan_server(cluster, demand, request, Orders::choose_again)
    }

    fn plan_matrix(
        &mut self,
        cluster: &Cluster,
        demand: &Demand,
        request: &Request,
        choose: Choose,
    ) -> Result<Planned<'_>, PlanError> {
        if !request.method.is_planned() {
            return self.plan_whole(cluster, demand, request);
        }
        let mut sums = std::mem::take(&mut self.sums);
        let result = sums.read(cluster, demand);
        let result = result.and_then(|()| self.plan_part(cluster, &sums, demand, request, choose));
        self.sums = sums;
        let (method, bound, predicted_ns) = self.or_forget(result)?;
        Ok(self.planned(method, bound, predicted_ns))
    }

    fn plan_server(
        &mut self,
        cluster: &Cluster,
        demand: &LocalDemand,
        request: &Request,
        choose: Choose,
    ) -> Result<Planned<'_>, PlanError> {
        let (demand_ranks, cluster_ranks) = (demand.ranks(), cluster.ranks());
        if demand_ranks != cluster_ranks || !demand.sums().is_of(cluster.servers().len()) {
            return Err(PlanError::WrongSize { demand_ranks, cluster_ranks });
        }
        let of_server = cluster.ranks_of(demand.server()).any(|rank| rank == request.rank);
        if !request.method.is_planned() || !of_server {
            return Err(PlanError::NeedsWholeMatrix { method: request.method, rank: request.rank });
        }
        let result = self.plan_part(cluster, demand.sums(), demand, request, choose);
        let (method, bound, predicted_ns) = self.or_forget(result)?;
        Ok(self.planned(method, bound, predicted_ns))
    }

    /// A plan that failed half-way leaves no list to go on from.
    fn or_forget<T>(&mut self, result: Result<T, PlanError>) -> Result<T, PlanError> {
        if result.is_err() {
            self.orders.clear();
        }
        result
    }

    fn planned(&self, method: Method, bound: Bound, predicted_ns: u64) -> Planned<'_> {
        Planned {
            table: &self.table,
            method,
            transfers: self.orders.best.transfers.len(),
            bound,
            predicted_ns,
        }
    }

    fn plan_whole(
        &mut self,
        cluster: &Cluster,
        demand: &Demand,
        request: &Request,
    ) -> Result<Planned<'_>, PlanError> {
        let whole = schedule(cluster, demand, request.method, &request.model)?;
        self.table = PlanTable::compile(cluster, demand, &whole, request.rank, request.message_bytes)?;
        self.orders.clear();
        Ok(self.planned(whole.method, whole.bound, whole.predicted_ns))
    }

    fn plan_part(
        &mut self,
        cluster: &Cluster,
        sums: &ServerSums,
        demand: &impl Cells,
        request: &Request,
        choose: Choose,
    ) -> Result<(Method, Bound, u64), PlanError> {
        check_shape(cluster)?;
        let target = Target::new(cluster, request.rank, true, request.message_bytes)?;
        let model = &request.model;
        let bound = Bound::of_sums(cluster, sums, model)?;
        self.shop.reset(cluster, sums, model);
        let loose_ns = loose_ns(sums, &bound, model);
        let mut choice = choose(&mut self.orders, request.method, &self.shop, bound.floor_ns, loose_ns);
        self.builder.begin(cluster);
        if self.orders.best.transfers.len() <= self.shop.pairs() {
            self.own_tiles(cluster, demand, &target)?;
        } else {
            let all = self.orders.best.transfers.len();
            self.own_tiles_in_parts(cluster, demand, &target)?;
            if self.orders.best.transfers.len() < all {
                choice.ns = self.orders.best.cost_ns(&self.shop, &mut Vec::new());
            }
        }
        let hash = hash(cluster, sums, choice.method, &self.orders.best);
        self.builder.finish(cluster, &target, demand, hash, &mut self.table)?;
        Ok((choice.method, bound, choice.ns))
    }

    /// Deals out the own server's tiles, each in one transfer or loose.
    fn own_tiles(
        &mut self,
        cluster: &Cluster,
        demand: &impl Cells,
        target: &Target,
    ) -> Result<(), PlanError> {
        let (n, home) = (self.shop.n, target.home.idx());
        let units = &self.shop.units;
        let loose = |upto: u64| Cut { transfer: None, upto };
        self.sends.clear();
        self.sends.extend((0..n).map(|peer| loose(units[home * n + peer])));
        self.receives.clear();
        self.receives.extend((0..n).map(|peer| loose(units[peer * n + home])));
        for (at, t) in self.orders.best.transfers.iter().enumerate() {
            if t.src as usize == home {
                self.sends[t.dst as usize].transfer = Some(at as u32);
            } else if t.dst as usize == home {
                self.receives[t.src as usize].transfer = Some(at as u32);
            }
        }
        for peer in (0..n).filter(|&peer| peer != home) {
            let (to, from) = (self.sends[peer], self.receives[peer]);
            self.own_pair(cluster, demand, target, peer, (&[to], &[from]))?;
        }
        Ok(())
    }

    /// The same, with pairs that are split over several transfers.
    fn own_tiles_in_parts(
        &mut self,
        cluster: &Cluster,
        demand: &impl Cells,
        target: &Target,
    ) -> Result<(), PlanError> {
        let cuts = cut_pairs(cluster, &self.shop, &mut self.orders.best);
        let (n, home) = (self.shop.n, target.home.idx());
        for peer in (0..n).filter(|&peer| peer != home) {
            self.own_pair(cluster, demand, target, peer, (&cuts[home * n + peer], &cuts[peer * n + home]))?;
        }
        Ok(())
    }

    fn own_pair(
        &mut self,
        cluster: &Cluster,
        demand: &impl Cells,
        target: &Target,
        peer: usize,
        (to, from): (&[Cut], &[Cut]),
    ) -> Result<(), PlanError> {
        let peer = ServerId(peer as u32);
        let sends = ((target.home, peer), to, Focus::Sender(target.gpu));
        let receives = ((peer, target.home), from, Focus::Receiver(target.gpu));
        for (pair, cuts, focus) in [sends, receives] {
            if cuts.last().is_none_or(|c| c.upto == 0) {
                continue;
            }
            let (mut result, builder) = (Ok(()), &mut self.builder);
            self.tiler.pieces(cluster, demand, pair, cuts, focus, |piece| {
                if let Err(e) = builder.add(cluster, target, pair, piece) {
                    result = Err(e);
                }
            });
            result?;
        }
        Ok(())
    }
}
