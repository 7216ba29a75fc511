//! Random clusters and demands, and what tables must do together.

use std::collections::BTreeMap;

use fuselink::abi::FL_CLASS_PLAN;
use fuselink::plan::{self, CostModel, Demand, Method, PlanTable};
use fuselink::topo::{Cluster, GpuIdx, NicSpec, Rank, Server};
use proptest::prelude::*;

pub const MESSAGE_BYTES: u64 = 1000;

/// 300 in every run; `PROPTEST_CASES` asks for more.
pub fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(300)
}

pub fn methods() -> impl Iterator<Item = Method> {
    Method::ALL.iter().copied()
}

/// Servers of different size, NICs anywhere, of any rate, some down, never all.
pub fn server() -> impl Strategy<Value = Server> {
    (1..5u32).prop_flat_map(|gpus| {
        let nic = (prop_oneof![1 => Just(0u64), 3 => Just(400_000u64), 1 => 1..400_000u64], 0..gpus);
        let nics = prop::collection::vec(nic, 0..5);
        (Just(gpus), 0..gpus, nics).prop_map(|(gpus, up, nics)| {
            let spec = |(mbit_per_s, gpu)| NicSpec { mbit_per_s, relay_gpu: GpuIdx(gpu) };
            let nics = std::iter::once((200_000, up)).chain(nics).map(spec).collect();
            Server { gpus, nics, scaleup_mbyte_per_s: if gpus % 2 == 0 { 450_000 } else { 20_000 } }
        })
    })
}

fn cell() -> impl Strategy<Value = u64> {
    prop_oneof![3 => Just(0u64), 3 => 1..50u64, 3 => 1..100_000u64]
}

pub fn case() -> impl Strategy<Value = (Cluster, Demand)> {
    (prop::collection::vec(server(), 1..6), prop_oneof![Just(1u64), 1..20u64, 1..5000u64]).prop_flat_map(
        |(servers, unit)| {
            let cluster = Cluster::new(servers);
            let ranks = cluster.ranks();
            prop::collection::vec(cell(), (ranks * ranks) as usize)
                .prop_map(move |cells| (cluster.clone(), Demand::new(ranks, cells, unit).unwrap()))
        },
    )
}

pub fn model() -> CostModel {
    CostModel { message_bytes: MESSAGE_BYTES, ..CostModel::default() }
}

/// Sequence, offset and size of each message of a piece.
fn messages(first_seq: u32, offset: u64, bytes: u64) -> impl Iterator<Item = (u32, u64, u64)> {
    let cut = move |i: u64| {
        let at = i * MESSAGE_BYTES;
        (first_seq + i as u32, offset + at, MESSAGE_BYTES.min(bytes - at))
    };
    (0..bytes.div_ceil(MESSAGE_BYTES)).map(cut)
}

/// All tables together replay to exactly the demand, both ends of every message agree, and turns count what is sent.
pub fn check_carried(cluster: &Cluster, demand: &Demand, tables: &[PlanTable]) {
    let ranks = demand.ranks();
    let mut sent = BTreeMap::new();
    let mut received = BTreeMap::new();
    let mut bytes = vec![0u64; (ranks * ranks) as usize];
    let mut by_nic: BTreeMap<(u32, u16, u16, u32), (u64, u64)> = BTreeMap::new();
    for (rank, table) in (0..ranks).zip(tables) {
        assert_eq!(PlanTable::parse(table.as_bytes()).as_ref(), Ok(table));
        assert_eq!(table.header().plan_hash, tables[0].header().plan_hash);
        let home = cluster.server_of(Rank(rank)).0;
        for lane in table.lanes() {
            let mut before = 0;
            for s in table.sends().skip(lane.first_send as usize).take(lane.sends as usize) {
                let to = cluster.server_of(Rank(s.dst)).0;
                if table.header().msg_class == FL_CLASS_PLAN {
                    assert_eq!(lane.lane, u32::from(s.egress));
                    assert!(s.transfer >= before, "list order within a lane");
                    before = s.transfer;
                    for (server, direction, nic) in [(home, 0, s.egress), (to, 1, s.ingress)] {
                        let sum = by_nic.entry((server, nic, direction, s.transfer)).or_default();
                        *sum = (sum.0 + s.bytes.div_ceil(MESSAGE_BYTES), sum.1 + s.bytes);
                    }
                } else {
                    assert_eq!(lane.lane, plan::put_lane(cluster, Rank(rank), Rank(s.dst)));
                }
                for (seq, offset, bytes) in messages(s.first_seq, s.offset, s.bytes) {
                    let message = (offset, bytes, s.transfer, s.egress, s.ingress);
                    assert!(sent.insert((rank, s.dst, seq), message).is_none());
                }
                bytes[(rank * ranks + s.dst) as usize] += s.bytes;
            }
        }
        for src in 0..ranks {
            for r in
                table.recvs().skip(table.recvs_from(Rank(src)).start).take(table.recvs_from(Rank(src)).len())
            {
                assert_eq!(r.src, src);
                for (seq, offset, bytes) in messages(r.first_seq, r.offset, r.bytes) {
                    let message = (offset, bytes, r.transfer, r.egress, r.ingress);
                    assert!(received.insert((src, rank, seq), message).is_none());
                }
            }
        }
        table.locals().for_each(|l| bytes[(rank * ranks + l.dst) as usize] += l.bytes);
    }
    assert_eq!(sent, received);
    for (i, &b) in bytes.iter().enumerate() {
        assert_eq!(b, demand.cell(Rank(i as u32 / ranks), Rank(i as u32 % ranks)));
    }
    let mut turns: BTreeMap<(u32, u16, u16, u32), (u64, u64)> = BTreeMap::new();
    for (rank, table) in (0..ranks).zip(tables) {
        for turn in table.turns() {
            let server = cluster.server_of(Rank(rank));
            assert_eq!(
                cluster.server(server).nics[usize::from(turn.nic)].relay_gpu,
                cluster.gpu_of(Rank(rank))
            );
            let sum = turns.entry((server.0, turn.nic, turn.direction, turn.transfer)).or_default();
            *sum = (sum.0 + u64::from(turn.messages), sum.1 + turn.bytes);
        }
    }
    assert_eq!(turns, by_nic);
}
