//! The ordered list of transfers, its cost, and the problem it solves: an open shop of servers.

use super::bits::Bits;
use super::cost::wire_ns;
use super::{CostModel, ServerSums};
use crate::topo::{Cluster, Server};

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
    /// Time of each pair in one transfer, start cost included; 0 = nothing to do. Halved until sums fit 40 bits, so
    /// that methods can weigh them freely.
    pub job_ns: Vec<u64>,
    /// Sums of `job_ns` by sender and by receiver.
    pub out_work: Vec<u64>,
    pub in_work: Vec<u64>,
    /// Whom each sender has to serve, and whom each receiver has to hear.
    pub to_serve: Bits,
    pub to_hear: Bits,
    /// What no list beats: the most of any server in either direction, peers that are slower included. 0 = not known.
    pub least_ns: u64,
    /// The most peers of any server in either direction.
    pub most_peers: usize,
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

impl Port {
    fn of(server: &Server) -> Self {
        let mut up = server.nics.iter().map(|n| n.mbit_per_s).filter(|&r| r > 0);
        let first = up.next().unwrap_or(0);
        let (lanes, even) = up.fold((1, true), |(lanes, even), rate| (lanes + 1, even && rate == first));
        Self { mbit_per_s: server.mbit_per_s(), lanes: if even { lanes } else { 1 } }
    }
}

/// Bits that sums of [`Shop::job_ns`] may have.
pub(super) const WORK_BITS: u32 = 40;

impl Shop {
    pub fn of(cluster: &Cluster, sums: &ServerSums, model: &CostModel) -> Self {
        let mut shop = Self::default();
        shop.reset(cluster, sums, model);
        shop
    }

    /// Takes another problem into the same memory.
    pub fn reset(&mut self, cluster: &Cluster, sums: &ServerSums, model: &CostModel) {
        self.n = sums.n;
        self.start_ns = model.start_ns;
        self.unit_bytes = sums.unit_bytes;
        self.ports.clear();
        self.ports.extend(cluster.servers().iter().map(Port::of));
        self.units.clear();
        self.units.extend_from_slice(&sums.units);
        self.ns.clear();
        for src in 0..self.n {
            for dst in 0..self.n {
                let units = self.units[src * self.n + dst];
                self.ns.push(if units == 0 { 0 } else { self.transfer_ns(src, dst, units) });
            }
        }
        self.measure();
    }

    fn measure(&mut self) {
        let n = self.n;
        self.to_serve.reset(n, n);
        self.to_hear.reset(n, n);
        for lines in [&mut self.out_work, &mut self.in_work] {
            lines.clear();
            lines.resize(n, 0);
        }
        let longest = self.ns.iter().copied().max().unwrap_or(0).saturating_add(self.start_ns);
        let sum_bits = u64::BITS - longest.leading_zeros() + usize::BITS - n.leading_zeros();
        let shift = sum_bits.saturating_sub(WORK_BITS);
        self.job_ns.clear();
        for src in 0..n {
            for dst in 0..n {
                let pair = src * n + dst;
                let todo = self.units[pair] > 0;
                let ns = if todo { (self.ns[pair].saturating_add(self.start_ns) >> shift).max(1) } else { 0 };
                self.job_ns.push(ns);
                if todo {
                    self.out_work[src] += ns;
                    self.in_work[dst] += ns;
                    self.to_serve.set(src, dst);
                    self.to_hear.set(dst, src);
                }
            }
        }
        let longest_line = self.out_work.iter().chain(&self.in_work).copied().max().unwrap_or(0);
        self.least_ns = if shift == 0 { longest_line } else { 0 };
        let peers = |bits: &Bits| (0..n).map(|row| bits.count(row)).max().unwrap_or(0);
        self.most_peers = peers(&self.to_serve).max(peers(&self.to_hear));
    }

    /// Time for part of a pair on the busier of the two servers, without the start cost.
    #[inline]
    pub fn transfer_ns(&self, src: usize, dst: usize, units: u64) -> u64 {
        let port_ns = |p: Port| {
            let busiest = units.div_ceil(p.lanes).saturating_mul(p.lanes);
            wire_ns(busiest.saturating_mul(self.unit_bytes), p.mbit_per_s)
        };
        let (a, b) = (self.ports[src], self.ports[dst]);
        if a == b { port_ns(a) } else { port_ns(a).max(port_ns(b)) }
    }

    /// Pairs of servers with something to do.
    pub fn pairs(&self) -> usize {
        (0..self.n).map(|src| self.to_serve.count(src)).sum()
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
    pub fn clear(&mut self) {
        self.transfers.clear();
        self.stages.clear();
    }

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

#[cfg(test)]
impl Shop {
    /// Servers of one kind, a byte per unit and nanosecond, starts for free.
    pub fn with_units(n: usize, units: &[u64]) -> Self {
        let cluster = Cluster::uniform(n as u32, Server::new(1, &[8_000], 1));
        let mut cells = units.to_vec();
        (0..n).for_each(|s| cells[s * n + s] = 0);
        let demand = super::Demand::new(n as u32, cells, 1).expect("small cells");
        let sums = ServerSums::of(&cluster, &demand).expect("a rank per server");
        Self::of(&cluster, &sums, &CostModel { start_ns: 0, ..CostModel::default() })
    }
}

#[cfg(test)]
impl List {
    /// Whether every unit of every pair is in the list.
    pub fn carries_all_of(&self, shop: &Shop) -> bool {
        let mut left = shop.units.clone();
        let mut take = |t: &Transfer| {
            let pair = &mut left[t.src as usize * shop.n + t.dst as usize];
            let fits = t.units > 0 && t.units <= *pair;
            *pair = pair.saturating_sub(t.units);
            fits
        };
        self.transfers.iter().all(&mut take) && left.iter().all(|&units| units == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_starts_when_both_sides_are_free() {
        let shop = Shop::with_units(3, &[0, 5, 7, 0, 0, 2, 0, 0, 0]);
        let mut list = List::default();
        list.push(0, 1, 5);
        list.push(1, 2, 2);
        list.push(0, 2, 7);
        assert_eq!(list.cost_ns(&shop, &mut Vec::new()), 12);
        assert_eq!((shop.out_work[0], shop.in_work[2], shop.most_peers, shop.pairs()), (12, 9, 2, 3));
    }

    /// A fast server waits for slow peers: four units from each of two take it twice as long from the one at half rate.
    #[test]
    fn slow_peers_make_the_least_longer() {
        let server = |rate| Server::new(1, &[rate], 1);
        let cluster = Cluster::new(vec![server(8_000), server(8_000), server(4_000)]);
        let demand = super::super::Demand::new(3, vec![0, 0, 0, 4, 0, 0, 4, 0, 0], 1).expect("small cells");
        let sums = ServerSums::of(&cluster, &demand).expect("a rank per server");
        let shop = Shop::of(&cluster, &sums, &CostModel { start_ns: 10, ..CostModel::default() });
        assert_eq!(shop.least_ns, 4 + 8 + 2 * 10);
    }
}
