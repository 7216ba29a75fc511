//! The ordered list of transfers, its cost, and the problem it solves: an open shop of servers.

use super::cost::wire_ns;
use super::sums::Sums;
use super::{CostModel, PlanError};
use crate::topo::Cluster;

/// Servers that each send to one and receive from one at a time, and what they have to do.
#[derive(Clone, Debug, Default)]
pub(super) struct Shop {
    /// Number of servers.
    pub n: usize,
    /// Units from server to server, row-major; the diagonal is 0.
    pub units: Vec<u64>,
    /// Time of each pair in one transfer, without the start cost.
    pub ns: Vec<u64>,
    /// Fixed cost of one transfer.
    pub start_ns: u64,
    /// How each server takes units in or gives them out.
    ports: Vec<Port>,
    unit_bytes: u64,
}

/// The NICs of a server as one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Port {
    mbit_per_s: u64,
    /// NICs that are up, when all of those have one rate; else 1, and rounding to whole units is left out.
    lanes: u64,
}

impl Shop {
    pub fn of(cluster: &Cluster, sums: &Sums, unit_bytes: u64, model: &CostModel) -> Result<Self, PlanError> {
        let ports = cluster.servers().iter().map(|server| {
            let up = || server.nics.iter().map(|n| n.mbit_per_s).filter(|&r| r > 0);
            let even = up().all(|r| Some(r) == up().next());
            Port { mbit_per_s: server.mbit_per_s(), lanes: if even { up().count().max(1) as u64 } else { 1 } }
        });
        let mut shop = Self {
            n: sums.n,
            units: sums.units.clone(),
            ns: Vec::new(),
            start_ns: model.start_ns,
            ports: ports.collect(),
            unit_bytes,
        };
        let pairs = (0..sums.n * sums.n).map(|p| shop.transfer_ns(p / sums.n, p % sums.n, shop.units[p]));
        shop.ns = pairs.collect();
        Ok(shop)
    }

    /// Time for part of a pair on the busier of the two servers, without the start cost.
    pub fn transfer_ns(&self, src: usize, dst: usize, units: u64) -> u64 {
        let port_ns = |p: Port| {
            let busiest = units.div_ceil(p.lanes).saturating_mul(p.lanes);
            wire_ns(busiest.saturating_mul(self.unit_bytes), p.mbit_per_s)
        };
        let (a, b) = (self.ports[src], self.ports[dst]);
        if a == b { port_ns(a) } else { port_ns(a).max(port_ns(b)) }
    }

    /// Whether all servers move units equally fast, so that units measure time.
    pub fn is_even(&self) -> bool {
        self.ports.windows(2).all(|w| w[0].mbit_per_s == w[1].mbit_per_s)
    }

    /// Rate at which a pair moves: that of the slower server.
    pub fn mbit_per_s(&self, src: usize, dst: usize) -> u64 {
        self.ports[src].mbit_per_s.min(self.ports[dst].mbit_per_s)
    }
}

/// A transfer: some units of a pair of servers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Transfer {
    pub src: u32,
    pub dst: u32,
    pub units: u64,
}

/// Transfers in order. `stages` holds where each stage begins, for methods that have stages.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct List {
    pub transfers: Vec<Transfer>,
    pub stages: Vec<u32>,
}

impl List {
    pub fn push(&mut self, src: usize, dst: usize, units: u64) {
        self.transfers.push(Transfer { src: src as u32, dst: dst as u32, units });
    }

    /// When the last transfer ends.
    pub fn cost_ns(&self, shop: &Shop, free: &mut Vec<(u64, u64)>) -> u64 {
        free.clear();
        free.resize(shop.n, (0, 0));
        let mut end = 0;
        for t in &self.transfers {
            let (src, dst) = (t.src as usize, t.dst as usize);
            let pair = src * shop.n + dst;
            let ns =
                if t.units == shop.units[pair] { shop.ns[pair] } else { shop.transfer_ns(src, dst, t.units) };
            let done = free[src].0.max(free[dst].1).saturating_add(shop.start_ns).saturating_add(ns);
            (free[src].0, free[dst].1) = (done, done);
            end = end.max(done);
        }
        end
    }
}
