//! From pieces to what one rank does.

use super::cells::Cells;
use super::schedule::Hash;
use super::table::{PlanTable, plan_lane, put_lane};
use super::tile::{Hop, TilePiece};
use super::{Demand, Piece, PlanError, Schedule};
use crate::abi::{
    FL_CLASS_PLAN, FL_CLASS_PUT, FL_NO_NIC, FL_NO_TRANSFER, FL_PLAN_MAGIC, FL_PLAN_VERSION, FlPlanHeader,
    FlPlanLane, FlPlanLocal, FlPlanRecv, FlPlanSend, FlPlanTurn,
};
use crate::topo::{Cluster, GpuIdx, Rank, ServerId};

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
        let planned = schedule.method.is_planned();
        let target = Target::new(cluster, rank, planned, message_bytes)?;
        let mut builder = Builder::default();
        builder.begin(cluster);
        for piece in &schedule.pieces {
            if let Some((piece, servers)) = locate(cluster, piece) {
                builder.add(cluster, &target, servers, &piece)?;
            }
        }
        let mut table = Self::default();
        builder.finish(cluster, &target, demand, schedule.hash, &mut table)?;
        Ok(table)
    }
}

/// A piece with its places; `None` when it stays in its server.
fn locate(cluster: &Cluster, piece: &Piece) -> Option<(TilePiece, (ServerId, ServerId))> {
    let servers = (cluster.server_of(piece.src), cluster.server_of(piece.dst));
    if servers.0 == servers.1 {
        return None;
    }
    let hop = piece.egress.zip(piece.ingress).map(|(egress, ingress)| Hop {
        egress: cluster.nic_idx(egress),
        ingress: cluster.nic_idx(ingress),
        from: cluster.nic(egress).relay_gpu,
        to: cluster.nic(ingress).relay_gpu,
    });
    let (src_gpu, dst_gpu) = (cluster.gpu_of(piece.src), cluster.gpu_of(piece.dst));
    let (src, dst, offset, bytes, transfer) =
        (piece.src, piece.dst, piece.offset, piece.bytes, piece.transfer);
    Some((TilePiece { src, dst, src_gpu, dst_gpu, offset, bytes, hop, transfer }, servers))
}

/// Whose table is made, and in what messages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub rank: Rank,
    pub gpu: GpuIdx,
    pub home: ServerId,
    /// Whether messages take turns by a list.
    pub planned: bool,
    pub message_bytes: u64,
}

impl Target {
    pub fn new(cluster: &Cluster, rank: Rank, planned: bool, message_bytes: u64) -> Result<Self, PlanError> {
        if rank.0 >= cluster.ranks() {
            return Err(PlanError::NoRank { rank, ranks: cluster.ranks() });
        }
        if message_bytes == 0 {
            return Err(PlanError::ZeroMessage);
        }
        Ok(Self { rank, gpu: cluster.gpu_of(rank), home: cluster.server_of(rank), planned, message_bytes })
    }

    #[inline]
    fn messages(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.message_bytes)
    }

    fn too_many(&self, src: Rank, dst: Rank) -> PlanError {
        PlanError::TooManyMessages { src, dst, message_bytes: self.message_bytes }
    }
}

/// Where a send belongs, from the top bit down: lane (16), transfer (32), turn (16), destination (32), sequence (32).
type Place = u128;
const TRANSFER_SHIFT: u32 = 80;
const LANE_SHIFT: u32 = 112;

/// What one transfer moves over one of the rank's own NICs, as far as it is known.
#[derive(Clone, Copy, Debug)]
struct TurnSum {
    nic: u16,
    direction: u16,
    transfer: u32,
    peer_server: u32,
    messages: u64,
    bytes: u64,
}

impl TurnSum {
    fn key(&self) -> (u16, u16, u32, u32) {
        (self.nic, self.direction, self.transfer, self.peer_server)
    }
}

/// Collects the pieces that concern one rank. The pieces of one cell must come in order of offset, those of one source
/// server together and servers in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Builder {
    parts: Parts,
    sends: Vec<(Place, FlPlanSend)>,
    turns: Vec<TurnSum>,
    /// Parts of pieces with their places among others, while they are dealt out in turns.
    fragments: Vec<(u64, u32, FlPlanSend)>,
    /// Messages of each cell so far, by the rank at the other end.
    sent: Vec<u64>,
    received: Vec<u64>,
    /// The first of `parts.recvs` that are not yet in order, and the server they come from.
    unsorted: usize,
    source: Option<ServerId>,
}

impl Builder {
    pub fn begin(&mut self, cluster: &Cluster) {
        let ranks = cluster.ranks() as usize;
        for counts in [&mut self.sent, &mut self.received] {
            counts.clear();
            counts.resize(ranks, 0);
        }
        let p = &mut self.parts;
        p.lanes.clear();
        p.sends.clear();
        p.recv_index.clear();
        p.recvs.clear();
        p.locals.clear();
        p.turns.clear();
        self.sends.clear();
        self.turns.clear();
        (self.unsorted, self.source) = (0, None);
    }

    /// Takes a piece between two servers, if it concerns the rank.
    #[inline]
    pub fn add(
        &mut self,
        cluster: &Cluster,
        target: &Target,
        servers: (ServerId, ServerId),
        piece: &TilePiece,
    ) -> Result<(), PlanError> {
        if piece.src == target.rank {
            self.send(cluster, target, servers, piece)?;
        }
        if piece.dst == target.rank {
            self.receive(target, servers.0, piece)?;
        }
        if let Some(hop) = piece.hop.filter(|_| target.planned) {
            if servers.0 == target.home && hop.from == target.gpu {
                self.turn(target, hop.egress.0, 0, servers.1, piece);
            }
            if servers.1 == target.home && hop.to == target.gpu {
                self.turn(target, hop.ingress.0, 1, servers.0, piece);
            }
        }
        Ok(())
    }

    fn send(
        &mut self,
        cluster: &Cluster,
        target: &Target,
        servers: (ServerId, ServerId),
        piece: &TilePiece,
    ) -> Result<(), PlanError> {
        let first_seq = number(&mut self.sent[piece.dst.idx()], target, piece)?;
        let (egress, ingress) = nic_fields(piece.hop);
        let send = FlPlanSend {
            offset: piece.offset,
            bytes: piece.bytes,
            dst: piece.dst.0,
            first_seq,
            transfer: piece.transfer.unwrap_or(FL_NO_TRANSFER),
            egress,
            ingress,
        };
        self.sends.push((place(cluster, target, servers, piece, first_seq), send));
        Ok(())
    }

    fn receive(&mut self, target: &Target, source: ServerId, piece: &TilePiece) -> Result<(), PlanError> {
        if self.source != Some(source) {
            self.sort_receives();
            self.source = Some(source);
        }
        let first_seq = number(&mut self.received[piece.src.idx()], target, piece)?;
        let (egress, ingress) = nic_fields(piece.hop);
        self.parts.recvs.push(FlPlanRecv {
            offset: piece.offset,
            bytes: piece.bytes,
            src: piece.src.0,
            first_seq,
            transfer: piece.transfer.unwrap_or(FL_NO_TRANSFER),
            egress,
            ingress,
        });
        Ok(())
    }

    fn sort_receives(&mut self) {
        self.parts.recvs[self.unsorted..].sort_unstable_by_key(|r| (r.src, r.first_seq));
        self.unsorted = self.parts.recvs.len();
    }

    fn turn(&mut self, target: &Target, nic: u32, direction: u16, peer: ServerId, piece: &TilePiece) {
        // Pieces of one turn come close together; what is missed here is merged at the end.
        const NEAR: usize = 8;
        let transfer = piece.transfer.unwrap_or(FL_NO_TRANSFER);
        let (messages, bytes) = (target.messages(piece.bytes), piece.bytes);
        let turn = TurnSum { nic: nic as u16, direction, transfer, peer_server: peer.0, messages, bytes };
        match self.turns.iter_mut().rev().take(NEAR).find(|t| t.key() == turn.key()) {
            Some(known) => (known.messages, known.bytes) = (known.messages + messages, known.bytes + bytes),
            None => self.turns.push(turn),
        }
    }

    /// Orders what was collected and writes the table. `hash` is that of the schedule.
    pub fn finish(
        &mut self,
        cluster: &Cluster,
        target: &Target,
        demand: &impl Cells,
        hash: u64,
        table: &mut PlanTable,
    ) -> Result<(), PlanError> {
        let cells = demand.cells(cluster, target.rank, target.home);
        for (dst, &bytes) in cluster.ranks_of(target.home).zip(cells).filter(|(_, bytes)| **bytes > 0) {
            self.parts.locals.push(FlPlanLocal { bytes, dst: dst.0, reserved: 0 });
        }
        self.order_sends(cluster, target)?;
        self.sort_receives();
        self.index_receives(cluster.ranks());
        self.merge_turns(target)?;
        self.parts.header = self.header(cluster, target, hash);
        table.write(&self.parts);
        Ok(())
    }

    fn order_sends(&mut self, cluster: &Cluster, target: &Target) -> Result<(), PlanError> {
        self.sends.sort_unstable_by_key(|s| s.0);
        // Without turns, a lane is all that goes to one peer.
        let lane_shift = if target.planned { LANE_SHIFT } else { TRANSFER_SHIFT };
        for lane in self.sends.chunk_by(|a, b| a.0 >> lane_shift == b.0 >> lane_shift) {
            let first = lane[0].1;
            let first_send = self.parts.sends.len() as u32;
            let messages: u64 = lane.iter().map(|(_, s)| target.messages(s.bytes)).sum();
            for transfer in lane.chunk_by(|a, b| a.0 >> TRANSFER_SHIFT == b.0 >> TRANSFER_SHIFT) {
                let pieces = transfer.iter().map(|(_, send)| *send);
                match target.planned && converges(cluster, Rank(transfer[0].1.dst)) {
                    true => interleave(target, pieces, &mut self.fragments, &mut self.parts.sends),
                    false => self.parts.sends.extend(pieces),
                }
            }
            self.parts.lanes.push(FlPlanLane {
                lane: match target.planned {
                    true => plan_lane(crate::topo::NicIdx(first.egress.into())),
                    false => put_lane(cluster, target.rank, Rank(first.dst)),
                },
                first_send,
                sends: self.parts.sends.len() as u32 - first_send,
                messages: u32::try_from(messages)
                    .map_err(|_| target.too_many(target.rank, Rank(first.dst)))?,
            });
        }
        Ok(())
    }

    fn index_receives(&mut self, ranks: u32) {
        for (at, recv) in self.parts.recvs.iter().enumerate() {
            let sources = recv.src as usize + 1;
            if self.parts.recv_index.len() < sources {
                self.parts.recv_index.resize(sources, at as u32);
            }
        }
        self.parts.recv_index.resize(ranks as usize + 1, self.parts.recvs.len() as u32);
    }

    fn merge_turns(&mut self, target: &Target) -> Result<(), PlanError> {
        self.turns.sort_unstable_by_key(TurnSum::key);
        for group in self.turns.chunk_by(|a, b| a.key() == b.key()) {
            let TurnSum { nic, direction, transfer, peer_server, .. } = group[0];
            let messages: u64 = group.iter().map(|t| t.messages).sum();
            let messages = u32::try_from(messages).map_err(|_| target.too_many(target.rank, target.rank))?;
            let bytes = group.iter().map(|t| t.bytes).sum();
            self.parts.turns.push(FlPlanTurn { transfer, peer_server, nic, direction, messages, bytes });
        }
        Ok(())
    }

    fn header(&self, cluster: &Cluster, target: &Target, hash: u64) -> FlPlanHeader {
        let mut plan_hash = Hash(hash);
        plan_hash.add(target.message_bytes);
        FlPlanHeader {
            magic: FL_PLAN_MAGIC,
            version: FL_PLAN_VERSION,
            rank: target.rank.0,
            ranks: cluster.ranks(),
            first_local_rank: cluster.first_rank(target.home).0,
            local_ranks: cluster.server(target.home).gpus,
            msg_class: if target.planned { FL_CLASS_PLAN } else { FL_CLASS_PUT },
            message_bytes: target.message_bytes,
            send_messages: self.sent.iter().sum(),
            recv_messages: self.received.iter().sum(),
            plan_hash: plan_hash.0,
            ..FlPlanHeader::default()
        }
    }
}

/// Whether all NICs of a rank's server together bring more than scale-up can carry to one GPU, so that destinations had
/// better take turns in short runs.
fn converges(cluster: &Cluster, rank: Rank) -> bool {
    let server = cluster.server(cluster.server_of(rank));
    server.scaleup_mbyte_per_s.saturating_mul(8) < server.mbit_per_s()
}

/// Cuts pieces between messages and spreads the parts of each evenly over the transfer.
fn interleave(
    target: &Target,
    pieces: impl Iterator<Item = FlPlanSend>,
    fragments: &mut Vec<(u64, u32, FlPlanSend)>,
    out: &mut Vec<FlPlanSend>,
) {
    const PARTS: u64 = 8;
    fragments.clear();
    for (turn, piece) in pieces.enumerate() {
        let messages = target.messages(piece.bytes);
        let parts = messages.min(PARTS);
        for part in 0..parts {
            // Messages fit 32 bits, so none of these products overflows.
            let (from, to) = (messages * part / parts, messages * (part + 1) / parts);
            let at = from * target.message_bytes;
            let bytes = if to == messages { piece.bytes - at } else { (to - from) * target.message_bytes };
            let (offset, first_seq) = (piece.offset + at, piece.first_seq + from as u32);
            let place = ((2 * part + 1) << 32) / (2 * parts);
            fragments.push((place, turn as u32, FlPlanSend { offset, bytes, first_seq, ..piece }));
        }
    }
    fragments.sort_unstable_by_key(|f| (f.0, f.1));
    out.extend(fragments.iter().map(|f| f.2));
}

/// The first sequence number of a piece, after those of its cell before.
#[inline]
fn number(count: &mut u64, target: &Target, piece: &TilePiece) -> Result<u32, PlanError> {
    let first = *count;
    *count += target.messages(piece.bytes);
    if *count > u64::from(u32::MAX) {
        return Err(target.too_many(piece.src, piece.dst));
    }
    Ok(first as u32)
}

fn nic_fields(hop: Option<Hop>) -> (u16, u16) {
    hop.map_or((FL_NO_NIC as u16, FL_NO_NIC as u16), |hop| (hop.egress.0 as u16, hop.ingress.0 as u16))
}

/// In a transfer every lane begins with the destination beside its ingress NIC, and each borrower one further, so that
/// redistribution does not converge on one GPU. Lanes to single peers come in the order of ranks after the own.
#[inline]
fn place(
    cluster: &Cluster,
    target: &Target,
    servers: (ServerId, ServerId),
    piece: &TilePiece,
    first_seq: u32,
) -> Place {
    let message = u128::from(piece.dst.0) << 32 | u128::from(first_seq);
    let Some(hop) = piece.hop.filter(|_| target.planned) else {
        let (rank, dst) = (target.rank.0, piece.dst.0);
        let turn = if dst >= rank { dst - rank } else { dst + cluster.ranks() - rank };
        return u128::from(turn) << TRANSFER_SHIFT | message;
    };
    let (own, peers) = (cluster.server(servers.0).gpus, cluster.server(servers.1).gpus);
    let ahead = |of: u32, from: u32, all: u32| if of >= from { of - from } else { of + all - from };
    let borrowed = ahead(piece.src_gpu.0, hop.from.0, own);
    let borrowed = if borrowed < peers { borrowed } else { borrowed % peers };
    let turn = ahead(ahead(piece.dst_gpu.0, hop.to.0, peers), borrowed, peers);
    let transfer = piece.transfer.unwrap_or(FL_NO_TRANSFER);
    u128::from(hop.egress.0) << LANE_SHIFT
        | u128::from(transfer) << TRANSFER_SHIFT
        | u128::from(turn) << 64
        | message
}
