//! What every transfer of a schedule puts on NICs and on scale-up links, from its pieces alone.

use super::cost::wire_ns;
use super::{CostModel, Piece, Schedule};
use crate::topo::{Cluster, NicId, Rank};

/// A transfer, or the loose pieces together, as time on links.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Step {
    /// Its busiest NIC.
    pub nic_ns: u64,
    /// The busiest of the NICs that have nothing to send before balance has brought it.
    pub waiting_nic_ns: u64,
    /// Balance: the busiest scale-up link of the sender.
    pub balance: Copies,
    /// Redistribution: the busiest scale-up link of the receiver.
    pub spread: Copies,
    /// The last message that balance brings, on its NIC.
    pub last_nic_ns: u64,
}

/// Copies over the scale-up links of one server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Copies {
    /// What the busiest link carries.
    pub ns: u64,
    /// One message.
    pub message_ns: u64,
}

/// A link as transfers load it. Scale-up links are named by their GPU's rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Link {
    Egress(NicId),
    /// An egress NIC and what is beside it, hence needs no balance.
    Beside(NicId),
    Ingress(NicId),
    BalanceFrom(Rank),
    BalanceTo(Rank),
    SpreadFrom(Rank),
    SpreadTo(Rank),
}

/// The steps of a schedule being collected.
pub(super) struct Steps<'a> {
    cluster: &'a Cluster,
    message_bytes: u64,
    steps: Vec<Step>,
    /// Bytes by step and link.
    loads: Vec<(u32, Link, u64)>,
}

impl<'a> Steps<'a> {
    /// A step for each transfer, in list order, and one more for loose pieces.
    pub fn of(cluster: &'a Cluster, schedule: &Schedule, model: &CostModel) -> Vec<Step> {
        let loose = schedule.transfers.len();
        let (message_bytes, steps) = (model.message_bytes, vec![Step::default(); loose + 1]);
        let mut collected = Self { cluster, message_bytes, steps, loads: Vec::new() };
        for piece in &schedule.pieces {
            collected.add(piece, loose as u32);
        }
        collected.finish()
    }

    fn add(&mut self, piece: &Piece, loose: u32) {
        let (Some(egress), Some(ingress)) = (piece.egress, piece.ingress) else { return };
        let at = piece.transfer.unwrap_or(loose);
        let (from, to) = (self.cluster.owner_of(egress), self.cluster.owner_of(ingress));
        let mut load = |link| self.loads.push((at, link, piece.bytes));
        load(Link::Egress(egress));
        load(Link::Ingress(ingress));
        let message = piece.bytes.min(self.message_bytes);
        let step = &mut self.steps[at as usize];
        if piece.src == from {
            load(Link::Beside(egress));
        } else {
            load(Link::BalanceFrom(piece.src));
            load(Link::BalanceTo(from));
            step.balance.message_ns = step.balance.message_ns.max(scaleup_ns(self.cluster, from, message));
            let nic_ns = wire_ns(message, self.cluster.nic(egress).mbit_per_s);
            step.last_nic_ns = step.last_nic_ns.max(nic_ns);
        }
        if piece.dst != to {
            load(Link::SpreadFrom(to));
            load(Link::SpreadTo(piece.dst));
            step.spread.message_ns = step.spread.message_ns.max(scaleup_ns(self.cluster, to, message));
        }
    }

    fn finish(mut self) -> Vec<Step> {
        self.loads.sort_unstable_by_key(|load| (load.0, load.1));
        let loads = std::mem::take(&mut self.loads);
        for of_step in loads.chunk_by(|a, b| a.0 == b.0) {
            let beside = |nic| of_step.binary_search_by_key(&Link::Beside(nic), |load| load.1).is_ok();
            for of_link in of_step.chunk_by(|a, b| a.1 == b.1) {
                let (at, link, _) = of_link[0];
                let bytes = of_link.iter().map(|load| load.2).sum();
                let step = &mut self.steps[at as usize];
                match link {
                    Link::Beside(_) => {}
                    Link::Egress(nic) | Link::Ingress(nic) => {
                        let ns = wire_ns(bytes, self.cluster.nic(nic).mbit_per_s);
                        step.nic_ns = step.nic_ns.max(ns);
                        if matches!(link, Link::Egress(_)) && !beside(nic) {
                            step.waiting_nic_ns = step.waiting_nic_ns.max(ns);
                        }
                    }
                    Link::BalanceFrom(gpu) | Link::BalanceTo(gpu) => {
                        step.balance.ns = step.balance.ns.max(scaleup_ns(self.cluster, gpu, bytes));
                    }
                    Link::SpreadFrom(gpu) | Link::SpreadTo(gpu) => {
                        step.spread.ns = step.spread.ns.max(scaleup_ns(self.cluster, gpu, bytes));
                    }
                }
            }
        }
        self.steps
    }
}

/// Time on a GPU's scale-up link.
pub(super) fn scaleup_ns(cluster: &Cluster, gpu: Rank, bytes: u64) -> u64 {
    let server = cluster.server(cluster.server_of(gpu));
    wire_ns(bytes, server.scaleup_mbyte_per_s.saturating_mul(8))
}
