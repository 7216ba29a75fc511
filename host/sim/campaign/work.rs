//! What the ranks of a job do in one call: pieces drawn from a seed, and what each rank has to send and to expect.

use std::collections::BTreeMap;

use super::random::Random;
use crate::abi::FL_NO_TRANSFER;
use crate::doorbell::Class;
use crate::engine::call::{Call, CallId, Direction, Incoming, Run, Turn, messages};
use crate::hw::Nanos;
use crate::topo::{Cluster, NicIdx, Rank, ServerId};

/// Bytes of a slot.
pub(super) const MESSAGE_BYTES: u32 = 512;

/// Bytes from one rank to another that take one way.
#[derive(Clone, Copy, Debug)]
struct Piece {
    src: Rank,
    dst: Rank,
    bytes: u64,
    nics: Option<(NicIdx, NicIdx)>,
    transfer: Option<u32>,
}

/// A message to fill.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) dst: Rank,
    pub(super) seq: u64,
    pub(super) bytes: u32,
}

/// One rank's part in a call.
#[derive(Clone, Debug, Default)]
pub(super) struct RankWork {
    pub(super) call: u64,
    pub(super) class: Class,
    runs: Vec<Run>,
    /// By source: bytes of each message.
    incoming: BTreeMap<Rank, Vec<u32>>,
    pub(super) expected: u64,
}

impl RankWork {
    /// Every message to fill, by piece and number.
    pub(super) fn parts(&self) -> impl Iterator<Item = ((u32, u32), Part)> + '_ {
        self.runs.iter().flat_map(|run| {
            cut(run.bytes).enumerate().map(move |(n, bytes)| {
                let seq = u64::from(run.first_seq) + n as u64;
                ((run.piece, n as u32), Part { dst: run.dst, seq, bytes })
            })
        })
    }

    pub(super) fn bytes_of(&self, src: Rank, seq: u64) -> Option<u32> {
        self.incoming.get(&src)?.get(seq as usize).copied()
    }
}

fn cut(bytes: u64) -> impl Iterator<Item = u32> {
    let message = u64::from(MESSAGE_BYTES);
    (0..messages(bytes, MESSAGE_BYTES)).map(move |n| (bytes - n * message).min(message) as u32)
}

/// The bytes of a message.
pub(super) fn payload(call: u64, src: Rank, dst: Rank, seq: u64, bytes: u32) -> Vec<u8> {
    let seed = call << 48 ^ u64::from(src.0) << 40 ^ u64::from(dst.0) << 32 ^ seq;
    let mut random = Random::new(seed);
    let words = (0..bytes.div_ceil(8)).flat_map(|_| random.draw().to_le_bytes());
    words.take(bytes as usize).collect()
}

/// How a call's messages find their NICs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// The engine chooses.
    Chosen,
    /// Each piece has its NICs.
    Prescribed,
    /// Transfers in list order, over rails.
    Planned,
}

/// A call for every rank of a cluster.
pub(super) fn draw(
    cluster: &Cluster,
    id: u64,
    random: &mut Random,
    timeout_ns: Nanos,
) -> Vec<(Call, RankWork)> {
    let way = [Way::Chosen, Way::Prescribed, Way::Planned, Way::Planned][random.below(4) as usize];
    let pieces = match way {
        Way::Planned => planned(cluster, random),
        _ => unplanned(cluster, random, way),
    };
    let class = if way == Way::Planned { Class::Plan } else { Class::Put };
    (0..cluster.ranks()).map(|r| of_rank(cluster, CallId(id), class, &pieces, Rank(r), timeout_ns)).collect()
}

fn any_bytes(random: &mut Random) -> u64 {
    match random.below(4) {
        0 => random.between(1, 40),
        1 => random.between(1, u64::from(MESSAGE_BYTES) * 3),
        _ => random.between(1, u64::from(MESSAGE_BYTES) * 24),
    }
}

fn any_nic(cluster: &Cluster, server: ServerId, random: &mut Random) -> NicIdx {
    NicIdx(random.below(cluster.server(server).nics.len() as u64) as u32)
}

fn unplanned(cluster: &Cluster, random: &mut Random, way: Way) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (src, dst) in remote_pairs(cluster) {
        if random.one_in(3) {
            continue;
        }
        let [from, to] = [src, dst].map(|r| cluster.server_of(r));
        let nics =
            (way == Way::Prescribed).then(|| (any_nic(cluster, from, random), any_nic(cluster, to, random)));
        pieces.push(Piece { src, dst, bytes: any_bytes(random), nics, transfer: None });
    }
    pieces
}

/// Transfers between servers in an order of chance, each over all rails; some pieces loose.
fn planned(cluster: &Cluster, random: &mut Random) -> Vec<Piece> {
    let servers = cluster.server_count();
    let pairs = (0..servers).flat_map(|a| (0..servers).map(move |b| (ServerId(a), ServerId(b))));
    let mut list: Vec<_> = pairs.filter(|(a, b)| a != b).collect();
    random.shuffle(&mut list);
    let mut pieces = Vec::new();
    for (t, &(from, to)) in list.iter().enumerate() {
        for src in cluster.ranks_of(from) {
            for dst in cluster.ranks_of(to) {
                for _ in 0..random.below(3) {
                    let nics = Some((any_nic(cluster, from, random), any_nic(cluster, to, random)));
                    let transfer = (!random.one_in(6)).then_some(t as u32);
                    pieces.push(Piece { src, dst, bytes: any_bytes(random), nics, transfer });
                }
            }
        }
    }
    pieces
}

fn remote_pairs(cluster: &Cluster) -> impl Iterator<Item = (Rank, Rank)> + '_ {
    let ranks = cluster.ranks();
    let pairs = (0..ranks).flat_map(move |a| (0..ranks).map(move |b| (Rank(a), Rank(b))));
    pairs.filter(|&(a, b)| cluster.server_of(a) != cluster.server_of(b))
}

fn of_rank(
    cluster: &Cluster,
    id: CallId,
    class: Class,
    pieces: &[Piece],
    rank: Rank,
    timeout_ns: Nanos,
) -> (Call, RankWork) {
    let mut work = RankWork { call: id.0, class, ..RankWork::default() };
    let mut sent: BTreeMap<Rank, u32> = BTreeMap::new();
    let mut incoming = Vec::new();
    for piece in pieces {
        let (egress, ingress) = (piece.nics.map(|n| n.0), piece.nics.map(|n| n.1));
        if piece.src == rank {
            let first_seq = sent.entry(piece.dst).or_default();
            work.runs.push(Run {
                piece: work.runs.len() as u32,
                dst: piece.dst,
                first_seq: *first_seq,
                bytes: piece.bytes,
                egress,
                ingress,
                transfer: piece.transfer,
                queue: None,
            });
            *first_seq += messages(piece.bytes, MESSAGE_BYTES) as u32;
        }
        if piece.dst == rank {
            work.incoming.entry(piece.src).or_default().extend(cut(piece.bytes));
            incoming.push(Incoming { src: piece.src, bytes: piece.bytes, ingress, transfer: piece.transfer });
        }
    }
    work.expected = work.incoming.values().map(|m| m.len() as u64).sum();
    let turns = if class == Class::Plan { turns_of(cluster, pieces, rank) } else { Vec::new() };
    let sends = work.runs.clone();
    (Call { id, class, message_bytes: MESSAGE_BYTES, timeout_ns, sends, incoming, turns }, work)
}

/// What each transfer moves over the NICs that a rank owns; loose pieces need no turn, but are counted last.
fn turns_of(cluster: &Cluster, pieces: &[Piece], rank: Rank) -> Vec<Turn> {
    let server = cluster.server_of(rank);
    let owned = |nic: NicIdx| cluster.owner_of(cluster.nic_id(server, nic)) == rank;
    let mut turns: BTreeMap<(u32, NicIdx, u8, ServerId), Turn> = BTreeMap::new();
    for piece in pieces {
        let Some((egress, ingress)) = piece.nics else { continue };
        let transfer = piece.transfer.unwrap_or(FL_NO_TRANSFER);
        let [from, to] = [piece.src, piece.dst].map(|r| cluster.server_of(r));
        let ends = [(from, egress, Direction::Egress, to), (to, ingress, Direction::Ingress, from)];
        for (at, nic, direction, peer) in ends {
            if at == server && owned(nic) {
                let fresh = Turn { nic, direction, transfer, peer, bytes: 0 };
                turns.entry((transfer, nic, direction as u8, peer)).or_insert(fresh).bytes += piece.bytes;
            }
        }
    }
    turns.into_values().collect()
}
