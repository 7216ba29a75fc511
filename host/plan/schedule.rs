//! A whole all-to-all: which bytes take which NICs in which transfer.

use super::list::{List, Shop};
use super::loose::loose_ns;
use super::openshop::MAX_SERVERS;
use super::orders::Orders;
use super::tile::{Cut, Focus, Tiler};
use super::{Bound, CostModel, Demand, Method, PlanError, ServerSums, direct, replay, spray};
use crate::abi::FL_NO_NIC;
use crate::topo::{Cluster, NicId, Rank, ServerId};

/// Bytes `[offset, offset + bytes)` of the cell from `src` to `dst`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Who has them.
    pub src: Rank,
    /// Who gets them.
    pub dst: Rank,
    /// First byte within the cell.
    pub offset: u64,
    /// How many, never 0.
    pub bytes: u64,
    /// The NIC they leave by; `None` = they stay in the server, or the engine chooses.
    pub egress: Option<NicId>,
    /// The NIC they enter by, likewise.
    pub ingress: Option<NicId>,
    /// Position of their transfer in the list; `None` = loose, or in the server.
    pub transfer: Option<u32>,
}

/// What all ranks do in one all-to-all.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Schedule {
    /// How it was made; never `Auto` or `Ordered`, but what those chose.
    pub method: Method,
    /// Who sends to whom, in list order.
    pub transfers: Vec<(ServerId, ServerId)>,
    /// Where stages begin in the list; empty for methods without stages. The transfers of a stage are a matching.
    pub stages: Vec<u32>,
    /// By source, destination and offset. They tile every cell of the demand.
    pub pieces: Vec<Piece>,
    /// What no schedule can beat.
    pub bound: Bound,
    /// What this one is expected to take on the NICs; [`replay`] prices scale-up as well.
    pub predicted_ns: u64,
    /// What each list that was compared is expected to take, by method, and loose traffic for `Auto`. Empty where there
    /// was nothing to compare.
    pub compared: Vec<(Method, u64)>,
    pub(super) hash: u64,
}

/// Makes a schedule. The same on every rank and machine.
///
/// # Errors
/// [`PlanError`] when the demand does not fit the cluster, or a server with traffic has no NIC that is up.
pub fn schedule(
    cluster: &Cluster,
    demand: &Demand,
    method: Method,
    model: &CostModel,
) -> Result<Schedule, PlanError> {
    if model.message_bytes == 0 {
        return Err(PlanError::ZeroMessage);
    }
    check_shape(cluster)?;
    let sums = ServerSums::of(cluster, demand)?;
    let bound = Bound::of_sums(cluster, &sums, model)?;
    let mut plan = Schedule {
        method,
        transfers: Vec::new(),
        stages: Vec::new(),
        pieces: Vec::new(),
        bound,
        predicted_ns: 0,
        compared: Vec::new(),
        hash: 0,
    };
    let mut pieces = Pieces::default();
    let mut list = List::default();
    match method {
        Method::Static => direct::by_direct_nic(cluster, demand, &mut pieces),
        Method::FuseLink => direct::by_engine(cluster, demand, &mut pieces),
        Method::Spray => spray::spray(cluster, demand, model.message_bytes, &mut pieces)?,
        _ => {
            let shop = Shop::of(cluster, &sums, model);
            let mut orders = Orders::default();
            let choice = orders.choose(method, &shop, bound.floor_ns, loose_ns(&sums, &bound, model));
            (plan.method, plan.predicted_ns, list) =
                (choice.method, choice.ns, std::mem::take(&mut orders.best));
            plan.compared = orders.tried.iter().map(|tried| (tried.method, tried.ns)).collect();
            let all = list.transfers.len();
            let cuts = cut_pairs(cluster, &shop, &mut list);
            if list.transfers.len() < all {
                plan.predicted_ns = list.cost_ns(&shop, &mut Vec::new());
            }
            pieces.tiles(cluster, demand, &cuts);
        }
    }
    plan.pieces = pieces.0;
    plan.pieces.sort_unstable_by_key(|p| (p.src, p.dst, p.offset));
    plan.transfers = list.transfers.iter().map(|t| (ServerId(t.src), ServerId(t.dst))).collect();
    plan.hash = hash(cluster, &sums, plan.method, &list);
    plan.stages = list.stages;
    if !plan.method.is_planned() {
        plan.predicted_ns = replay(cluster, &plan, model).cost_ns;
    }
    Ok(plan)
}

/// Refuses what the numbers of a plan cannot name.
pub(super) fn check_shape(cluster: &Cluster) -> Result<(), PlanError> {
    let most = |what, found: usize, limit: usize| match found > limit {
        true => Err(PlanError::TooMany { what, found, limit }),
        false => Ok(()),
    };
    most("servers", cluster.servers().len(), MAX_SERVERS)?;
    cluster.servers().iter().try_for_each(|server| {
        most("GPUs in a server", server.gpus as usize, u16::MAX.into())?;
        most("NICs in a server", server.nics.len(), FL_NO_NIC as usize)
    })
}

/// The cuts of every pair of servers, row-major. Transfers that would carry nothing leave the list.
pub(super) fn cut_pairs(cluster: &Cluster, shop: &Shop, list: &mut List) -> Vec<Vec<Cut>> {
    let n = shop.n;
    let mut cuts: Vec<Vec<Cut>> = vec![Vec::new(); n * n];
    for (at, t) in list.transfers.iter().enumerate() {
        let pair = &mut cuts[t.src as usize * n + t.dst as usize];
        let before = pair.last().map_or(0, |c: &Cut| c.upto);
        pair.push(Cut { transfer: Some(at as u32), upto: before + t.units });
    }
    drop_empty(cluster, n, &mut cuts, list);
    for (pair, cuts) in cuts.iter_mut().enumerate() {
        if cuts.is_empty() && shop.units[pair] > 0 {
            cuts.push(Cut { transfer: None, upto: shop.units[pair] });
        }
    }
    cuts
}

fn drop_empty(cluster: &Cluster, n: usize, cuts: &mut [Vec<Cut>], list: &mut List) {
    let (mut tiler, mut empty) = (Tiler::default(), Vec::new());
    let mut dropped = vec![false; list.transfers.len()];
    for (pair, cuts) in cuts.iter_mut().enumerate().filter(|(_, cuts)| cuts.len() > 1) {
        let servers = (ServerId((pair / n) as u32), ServerId((pair % n) as u32));
        tiler.empty_cuts(cluster, servers, cuts, &mut empty);
        let mut verdicts = empty.iter();
        cuts.retain(|c| {
            let drop = *verdicts.next().unwrap_or(&false);
            c.transfer.iter().for_each(|&t| dropped[t as usize] = drop);
            !drop
        });
    }
    if !dropped.contains(&true) {
        return;
    }
    // New positions: how many transfers stay before each.
    let mut kept = 0;
    let mut position = Vec::with_capacity(dropped.len() + 1);
    for &drop in &dropped {
        position.push(kept);
        kept += u32::from(!drop);
    }
    position.push(kept);
    for cuts in cuts.iter_mut() {
        let mut before = 0;
        for cut in cuts.iter_mut() {
            if let Some(t) = &mut cut.transfer {
                list.transfers[*t as usize].units = cut.upto - before;
                *t = position[*t as usize];
            }
            before = cut.upto;
        }
    }
    let mut verdicts = dropped.iter();
    list.transfers.retain(|_| !*verdicts.next().unwrap_or(&false));
    list.stages.iter_mut().for_each(|first| *first = position[*first as usize]);
    list.stages.dedup();
    list.stages.retain(|&first| first < kept);
}

/// Pieces as they are made, in any order.
#[derive(Default)]
pub(super) struct Pieces(Vec<Piece>);

impl Pieces {
    /// Cells within servers become pieces without NICs; all others that hold bytes go to `cut`.
    pub fn cells(
        &mut self,
        cluster: &Cluster,
        demand: &Demand,
        mut cut: impl FnMut(Rank, Rank, u64, &mut Vec<Piece>),
    ) {
        self.locals(cluster, demand);
        for src in (0..cluster.ranks()).map(Rank) {
            let home = cluster.server_of(src);
            for (dst, &bytes) in demand.row(src).iter().enumerate().filter(|(_, bytes)| **bytes > 0) {
                let dst = Rank(dst as u32);
                if cluster.server_of(dst) != home {
                    cut(src, dst, bytes, &mut self.0);
                }
            }
        }
    }

    fn locals(&mut self, cluster: &Cluster, demand: &Demand) {
        for src in (0..cluster.ranks()).map(Rank) {
            for dst in cluster.ranks_of(cluster.server_of(src)) {
                let bytes = demand.cell(src, dst);
                if bytes > 0 {
                    let (egress, ingress, transfer) = (None, None, None);
                    self.0.push(Piece { src, dst, offset: 0, bytes, egress, ingress, transfer });
                }
            }
        }
    }

    fn tiles(&mut self, cluster: &Cluster, demand: &Demand, cuts: &[Vec<Cut>]) {
        self.locals(cluster, demand);
        let n = cluster.servers().len();
        let mut tiler = Tiler::default();
        for (pair, cuts) in cuts.iter().enumerate().filter(|(_, cuts)| !cuts.is_empty()) {
            let servers = (ServerId((pair / n) as u32), ServerId((pair % n) as u32));
            tiler.pieces(cluster, demand, servers, cuts, Focus::All, |p| {
                let egress = p.hop.map(|hop| cluster.nic_id(servers.0, hop.egress));
                let ingress = p.hop.map(|hop| cluster.nic_id(servers.1, hop.ingress));
                let (src, dst, offset, bytes, transfer) = (p.src, p.dst, p.offset, p.bytes, p.transfer);
                self.0.push(Piece { src, dst, offset, bytes, egress, ingress, transfer });
            });
        }
    }
}

/// A schedule follows from these alone, so ranks that agree on them agree on it.
pub(super) fn hash(cluster: &Cluster, sums: &ServerSums, method: Method, list: &List) -> u64 {
    let mut hash = Hash(0x6675_7365_6c69_6e6b);
    for server in cluster.servers() {
        hash.add(u64::from(server.gpus) << 32 | server.nics.len() as u64);
        server.nics.iter().for_each(|n| hash.add(n.mbit_per_s << 20 ^ u64::from(n.relay_gpu.0)));
    }
    method.name().bytes().for_each(|b| hash.add(b.into()));
    hash.add(sums.unit_bytes);
    hash.add(sums.digest);
    for t in &list.transfers {
        hash.add(u64::from(t.src) << 32 | u64::from(t.dst));
        hash.add(t.units);
    }
    hash.0
}

/// Multiply and fold; stable across machines and versions of Rust.
pub(super) struct Hash(pub u64);

impl Hash {
    pub fn add(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word ^ 0x2d35_8dcc_aa6c_78a5) * 0x8bb8_4b93_962e_acc9;
        self.0 = product as u64 ^ (product >> 64) as u64 ^ self.0.rotate_left(23);
    }
}
