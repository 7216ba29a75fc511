//! What a schedule costs, from its pieces and list alone.

use super::cost::wire_ns;
use super::pipeline::{Pipeline, Run};
use super::steps::{Step, Steps, scaleup_ns};
use super::{CostModel, Schedule};
use crate::topo::{Cluster, Rank, ServerId};

/// When a transfer runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Span {
    /// Both sides are free.
    pub start_ns: u64,
    /// Its busiest NIC is done.
    pub end_ns: u64,
}

/// A schedule carried out on paper.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Replay {
    /// When the NICs are done, if they never wait for scale-up.
    pub cost_ns: u64,
    /// When each transfer runs, in list order, likewise.
    pub spans: Vec<Span>,
    /// When everything is done, and what scale-up adds.
    pub pipeline: Pipeline,
    /// How much of the cost is loose traffic, which follows the list.
    pub loose_ns: u64,
    /// Bytes sent by each NIC of the job. Pieces whose NIC the engine chooses are not counted.
    pub nic_tx_bytes: Vec<u64>,
    /// Bytes received by each NIC, likewise.
    pub nic_rx_bytes: Vec<u64>,
    /// Bytes that cross scale-up on their way to a NIC or from one, per rank: sent, then received.
    pub scaleup_bytes: Vec<(u64, u64)>,
    /// What the busiest GPU's scale-up link needs for these and for what stays in its server, in all.
    pub scaleup_ns: u64,
}

impl Replay {
    /// The most that one GPU sends or receives over scale-up for the NICs' sake.
    pub fn scaleup_max_bytes(&self) -> u64 {
        self.scaleup_bytes.iter().map(|&(out, into)| out.max(into)).max().unwrap_or(0)
    }
}

/// Carries out a schedule: a transfer takes its start cost and its busiest NIC's bytes over that NIC's rate; loose
/// pieces follow, slower where several servers send into one NIC. Scale-up runs beside the NICs ([`Pipeline`]).
///
/// Traffic whose NICs the engine chooses is spread over those of each server.
pub fn replay(cluster: &Cluster, schedule: &Schedule, model: &CostModel) -> Replay {
    let nics = cluster.nics() as usize;
    let servers = cluster.servers().len();
    let mut out = Replay {
        nic_tx_bytes: vec![0; nics],
        nic_rx_bytes: vec![0; nics],
        scaleup_bytes: vec![(0, 0); cluster.ranks() as usize],
        ..Replay::default()
    };
    let mut senders: Vec<(u32, u32)> = Vec::new();
    let mut engine_bytes = vec![(0u64, 0u64); servers];
    let mut local = vec![(0u64, 0u64); cluster.ranks() as usize];
    for piece in &schedule.pieces {
        let (from, to) = (cluster.server_of(piece.src), cluster.server_of(piece.dst));
        if from == to {
            if piece.src != piece.dst {
                local[piece.src.idx()].0 += piece.bytes;
                local[piece.dst.idx()].1 += piece.bytes;
            }
            continue;
        }
        let (Some(egress), Some(ingress)) = (piece.egress, piece.ingress) else {
            engine_bytes[from.idx()].0 += piece.bytes;
            engine_bytes[to.idx()].1 += piece.bytes;
            continue;
        };
        if piece.transfer.is_none() {
            senders.push((ingress.0, from.0));
        }
        out.nic_tx_bytes[egress.idx()] += piece.bytes;
        out.nic_rx_bytes[ingress.idx()] += piece.bytes;
        let (relay_out, relay_in) = (cluster.owner_of(egress), cluster.owner_of(ingress));
        for (a, b) in [(piece.src, relay_out), (relay_in, piece.dst)] {
            if a != b {
                out.scaleup_bytes[a.idx()].0 += piece.bytes;
                out.scaleup_bytes[b.idx()].1 += piece.bytes;
            }
        }
    }
    let steps = Steps::of(cluster, schedule, model);
    out.run(schedule, &steps, model, servers);
    let loose = steps[schedule.transfers.len()];
    out.loose_ns = model.loose_ns(loose.nic_ns, fan_in(senders));
    for (s, &(sent, received)) in engine_bytes.iter().enumerate() {
        let rate = cluster.server(ServerId(s as u32)).mbit_per_s();
        out.loose_ns = out.loose_ns.max(wire_ns(sent.max(received), rate));
    }
    out.cost_ns = out.cost_ns.saturating_add(out.loose_ns);
    let links = (0..).map(Rank).zip(out.scaleup_bytes.iter().zip(&local));
    let link_ns = links.map(|(rank, (relayed, local))| {
        let busier = (relayed.0.saturating_add(local.0)).max(relayed.1.saturating_add(local.1));
        scaleup_ns(cluster, rank, busier)
    });
    out.scaleup_ns = link_ns.max().unwrap_or(0);
    out.pipeline = out.pipeline(schedule, &steps, model, servers);
    out
}

/// The most servers that send into one NIC.
fn fan_in(mut senders: Vec<(u32, u32)>) -> u64 {
    senders.sort_unstable();
    senders.dedup();
    senders.chunk_by(|a, b| a.0 == b.0).map(|c| c.len() as u64).max().unwrap_or(0)
}

impl Replay {
    fn run(&mut self, schedule: &Schedule, steps: &[Step], model: &CostModel, servers: usize) {
        let (mut out_free, mut in_free) = (vec![0u64; servers], vec![0u64; servers]);
        for (&(src, dst), step) in schedule.transfers.iter().zip(steps) {
            let start_ns = out_free[src.idx()].max(in_free[dst.idx()]);
            let end_ns = start_ns.saturating_add(model.start_ns).saturating_add(step.nic_ns);
            (out_free[src.idx()], in_free[dst.idx()]) = (end_ns, end_ns);
            self.spans.push(Span { start_ns, end_ns });
            self.cost_ns = self.cost_ns.max(end_ns);
        }
    }

    fn pipeline(&self, schedule: &Schedule, steps: &[Step], model: &CostModel, servers: usize) -> Pipeline {
        let mut run = Run::new(servers, model);
        for (&pair, step) in schedule.transfers.iter().zip(steps) {
            run.transfer(pair, step);
        }
        run.loose(self.loose_ns, &steps[schedule.transfers.len()]);
        run.finish(self.cost_ns, self.scaleup_ns)
    }
}
