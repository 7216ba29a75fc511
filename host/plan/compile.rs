//! From a schedule to what one rank does.

use std::collections::BTreeMap;

use super::schedule::Hash;
use super::table::{PlanTable, plan_lane, put_lane};
use super::{Demand, Piece, PlanError, Schedule};
use crate::abi::{
    FL_CLASS_PLAN, FL_CLASS_PUT, FL_NO_NIC, FL_NO_TRANSFER, FL_PLAN_MAGIC, FL_PLAN_VERSION, FlPlanHeader,
    FlPlanLane, FlPlanLocal, FlPlanRecv, FlPlanSend, FlPlanTurn,
};
use crate::topo::{Cluster, NicId, Rank};

/// The parts of a table, before they are laid out.
#[derive(Clone, Debug, Default)]
pub(super) struct Parts {
    pub header: FlPlanHeader,
    pub lanes: Vec<FlPlanLane>,
    pub sends: Vec<FlPlanSend>,
    pub recv_index: Vec<u32>,
    pub recvs: Vec<FlPlanRecv>,
    pub locals: Vec<FlPlanLocal>,
    pub turns: Vec<FlPlanTurn>,
}

impl PlanTable {
    /// What `rank` does in a schedule, in messages of `message_bytes`.
    ///
    /// # Errors
    /// [`PlanError`] when the demand is of another size, the rank does not exist, or messages cannot be counted.
    pub fn compile(
        cluster: &Cluster,
        demand: &Demand,
        schedule: &Schedule,
        rank: Rank,
        message_bytes: u64,
    ) -> Result<Self, PlanError> {
        if demand.ranks() != cluster.ranks() {
            let (demand_ranks, cluster_ranks) = (demand.ranks(), cluster.ranks());
            return Err(PlanError::WrongSize { demand_ranks, cluster_ranks });
        }
        if rank.0 >= cluster.ranks() {
            return Err(PlanError::NoRank { rank, ranks: cluster.ranks() });
        }
        if message_bytes == 0 {
            return Err(PlanError::ZeroMessage);
        }
        let compiler = Compiler { cluster, schedule, rank, message_bytes };
        Ok(Self::from_parts(&compiler.parts(demand)?))
    }
}

struct Compiler<'a> {
    cluster: &'a Cluster,
    schedule: &'a Schedule,
    rank: Rank,
    message_bytes: u64,
}

impl Compiler<'_> {
    fn parts(&self, demand: &Demand) -> Result<Parts, PlanError> {
        let mut parts = Parts { locals: self.locals(demand), ..Parts::default() };
        self.sends(&mut parts)?;
        self.recvs(&mut parts)?;
        if self.schedule.method.is_planned() {
            self.turns(&mut parts)?;
        }
        parts.header = self.header(&parts);
        Ok(parts)
    }

    fn messages(&self, piece: &Piece) -> u64 {
        piece.bytes.div_ceil(self.message_bytes)
    }

    fn crosses(&self, piece: &Piece) -> bool {
        self.cluster.server_of(piece.src) != self.cluster.server_of(piece.dst)
    }

    fn nic_field(&self, nic: Option<NicId>) -> u16 {
        nic.map_or(FL_NO_NIC as u16, |nic| self.cluster.nic_idx(nic).0 as u16)
    }

    fn locals(&self, demand: &Demand) -> Vec<FlPlanLocal> {
        let home = self.cluster.server_of(self.rank);
        let cells = self.cluster.ranks_of(home).map(|dst| (dst, demand.cell(self.rank, dst)));
        cells.filter(|c| c.1 > 0).map(|(dst, bytes)| FlPlanLocal { bytes, dst: dst.0, reserved: 0 }).collect()
    }

    fn sends(&self, parts: &mut Parts) -> Result<(), PlanError> {
        let pieces = &self.schedule.pieces;
        let own =
            pieces.partition_point(|p| p.src < self.rank)..pieces.partition_point(|p| p.src <= self.rank);
        let mut numbers = Numbers::default();
        // (lane, place in the lane's order), then the entry.
        let mut keyed: Vec<((u32, u32, u32, u64), FlPlanSend)> = Vec::new();
        for piece in pieces[own].iter().filter(|p| self.crosses(p)) {
            let first_seq = numbers.take(piece, self.messages(piece), self.message_bytes)?;
            let send = FlPlanSend {
                offset: piece.offset,
                bytes: piece.bytes,
                dst: piece.dst.0,
                first_seq,
                transfer: piece.transfer.unwrap_or(FL_NO_TRANSFER),
                egress: self.nic_field(piece.egress),
                ingress: self.nic_field(piece.ingress),
            };
            keyed.push((self.place(piece), send));
        }
        keyed.sort_unstable_by_key(|k| k.0);
        for lane in keyed.chunk_by(|a, b| a.0.0 == b.0.0) {
            let first_send = parts.sends.len() as u32;
            let messages: u64 = lane.iter().map(|(_, s)| s.bytes.div_ceil(self.message_bytes)).sum();
            parts.sends.extend(lane.iter().map(|&(_, send)| send));
            parts.lanes.push(FlPlanLane {
                lane: self.lane_of(lane[0].0.0),
                first_send,
                sends: lane.len() as u32,
                messages: self.count(messages, Rank(lane[0].1.dst))?,
            });
        }
        Ok(())
    }

    /// Lane, transfer, rotated destination, offset: what sorts the sends of a rank.
    ///
    /// In a transfer every lane begins with the destination beside its ingress NIC, and each borrower one further, so
    /// that redistribution does not converge on one GPU. Lanes to single peers begin after the own rank.
    fn place(&self, piece: &Piece) -> (u32, u32, u32, u64) {
        let (from, to) = (self.cluster.server_of(piece.src), self.cluster.server_of(piece.dst));
        match (self.schedule.method.is_planned(), piece.egress, piece.ingress) {
            (true, Some(egress), Some(ingress)) => {
                let gpus = self.cluster.server(to).gpus;
                let beside = self.cluster.nic(ingress).relay_gpu.0;
                let owner = self.cluster.nic(egress).relay_gpu.0;
                let borrowed =
                    (self.cluster.gpu_of(piece.src).0 + self.cluster.server(from).gpus - owner) % gpus;
                let turn = (self.cluster.gpu_of(piece.dst).0 + 2 * gpus - beside - borrowed) % gpus;
                let transfer = piece.transfer.unwrap_or(FL_NO_TRANSFER);
                (self.cluster.nic_idx(egress).0, transfer, turn, piece.offset)
            }
            _ => {
                let ranks = self.cluster.ranks();
                ((piece.dst.0 + ranks - self.rank.0) % ranks, 0, 0, piece.offset)
            }
        }
    }

    /// The lane behind the first part of [`Self::place`].
    fn lane_of(&self, place: u32) -> u32 {
        match self.schedule.method.is_planned() {
            true => plan_lane(crate::topo::NicIdx(place)),
            false => put_lane(self.cluster, self.rank, Rank((self.rank.0 + place) % self.cluster.ranks())),
        }
    }

    fn recvs(&self, parts: &mut Parts) -> Result<(), PlanError> {
        let ranks = self.cluster.ranks() as usize;
        parts.recv_index = Vec::with_capacity(ranks + 1);
        let mut numbers = Numbers::default();
        for piece in self.schedule.pieces.iter().filter(|p| p.dst == self.rank && self.crosses(p)) {
            parts.recv_index.resize(piece.src.idx() + 1, parts.recvs.len() as u32);
            let first_seq = numbers.take(piece, self.messages(piece), self.message_bytes)?;
            parts.recvs.push(FlPlanRecv {
                offset: piece.offset,
                bytes: piece.bytes,
                src: piece.src.0,
                first_seq,
                transfer: piece.transfer.unwrap_or(FL_NO_TRANSFER),
                egress: self.nic_field(piece.egress),
                ingress: self.nic_field(piece.ingress),
            });
        }
        parts.recv_index.resize(ranks + 1, parts.recvs.len() as u32);
        Ok(())
    }

    /// What every transfer moves over the NICs that the rank owns. Loose traffic comes last, by peer.
    fn turns(&self, parts: &mut Parts) -> Result<(), PlanError> {
        let mut sums: BTreeMap<(u16, u16, u32, u32), (u64, u64, Rank)> = BTreeMap::new();
        for piece in &self.schedule.pieces {
            let ends = [(piece.egress, piece.dst, 0), (piece.ingress, piece.src, 1)];
            for (nic, peer, direction) in ends {
                let Some(nic) = nic.filter(|&nic| self.cluster.owner_of(nic) == self.rank) else { continue };
                let transfer = piece.transfer.unwrap_or(FL_NO_TRANSFER);
                let key = (self.nic_field(Some(nic)), direction, transfer, self.cluster.server_of(peer).0);
                let sum = sums.entry(key).or_insert((0, 0, peer));
                (sum.0, sum.1) = (sum.0 + self.messages(piece), sum.1 + piece.bytes);
            }
        }
        for ((nic, direction, transfer, peer_server), (messages, bytes, peer)) in sums {
            let messages = self.count(messages, peer)?;
            parts.turns.push(FlPlanTurn { transfer, peer_server, nic, direction, messages, bytes });
        }
        Ok(())
    }

    fn count(&self, messages: u64, peer: Rank) -> Result<u32, PlanError> {
        u32::try_from(messages).map_err(|_| PlanError::TooManyMessages {
            src: self.rank,
            dst: peer,
            message_bytes: self.message_bytes,
        })
    }

    fn header(&self, parts: &Parts) -> FlPlanHeader {
        let home = self.cluster.server_of(self.rank);
        let class = if self.schedule.method.is_planned() { FL_CLASS_PLAN } else { FL_CLASS_PUT };
        let messages = |bytes: u64| bytes.div_ceil(self.message_bytes);
        let mut hash = Hash(self.schedule.hash);
        hash.add(self.message_bytes);
        FlPlanHeader {
            magic: FL_PLAN_MAGIC,
            version: FL_PLAN_VERSION,
            rank: self.rank.0,
            ranks: self.cluster.ranks(),
            first_local_rank: self.cluster.first_rank(home).0,
            local_ranks: self.cluster.server(home).gpus,
            msg_class: class,
            message_bytes: self.message_bytes,
            send_messages: parts.sends.iter().map(|s| messages(s.bytes)).sum(),
            recv_messages: parts.recvs.iter().map(|r| messages(r.bytes)).sum(),
            plan_hash: hash.0,
            ..FlPlanHeader::default()
        }
    }
}

/// Sequence numbers of one cell after the other, whose pieces come in order of offset.
#[derive(Default)]
struct Numbers {
    cell: Option<(Rank, Rank)>,
    next: u64,
}

impl Numbers {
    fn take(&mut self, piece: &Piece, messages: u64, message_bytes: u64) -> Result<u32, PlanError> {
        if self.cell != Some((piece.src, piece.dst)) {
            (self.cell, self.next) = (Some((piece.src, piece.dst)), 0);
        }
        let first = self.next;
        self.next += messages;
        match (u32::try_from(first), u32::try_from(self.next)) {
            (Ok(first), Ok(_)) => Ok(first),
            _ => Err(PlanError::TooManyMessages { src: piece.src, dst: piece.dst, message_bytes }),
        }
    }
}
