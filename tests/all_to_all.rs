//! The collective on emulated clusters: every method, every shape, every byte, and each method's signature in the NICs'
//! counters, in both directions.

mod common;

use common::{Outcome, config, run, run_ranks};
use fuselink::hw::NicCounters;
use fuselink::plan::{Demand, Method};
use fuselink::topo::{Cluster, NicId, Rank, Server};

const METHODS: [Method; 7] = [
    Method::Static,
    Method::Spray,
    Method::FuseLink,
    Method::Loose,
    Method::SpreadOut,
    Method::Birkhoff,
    Method::OpenShop,
];
/// Slots of this size: small, so that small demands are many messages.
const SLOT: u32 = 8192;
const GBIT_400: u64 = 400_000;

fn servers(count: u32, gpus: u32, nics: usize) -> Cluster {
    Cluster::uniform(count, Server::new(gpus, &vec![GBIT_400; nics], 450_000))
}

/// Bytes below `below` for every cell, the diagonal too, by a simple generator.
fn random(ranks: u32, below: u64, mut seed: u64) -> Demand {
    let mut cell = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    Demand::new(ranks, (0..ranks * ranks).map(|_| cell()).collect(), 1).unwrap()
}

fn only(ranks: u32, cells: &[(u32, u32, u64)]) -> Demand {
    let mut all = vec![0; (ranks * ranks) as usize];
    for &(src, dst, bytes) in cells {
        all[(src * ranks + dst) as usize] = bytes;
    }
    Demand::new(ranks, all, 1).unwrap()
}

fn run_all(cluster: &Cluster, demand: &Demand, scale: u64) {
    let config = config(cluster, scale, SLOT);
    for method in METHODS {
        let out = run(&config, demand, method).unwrap_or_else(|e| panic!("{method}: {e}"));
        assert_eq!(out.mismatches, 0, "{method}");
        let (tx, rx) = totals(&out.nics);
        let crosses = crossing(cluster, demand);
        assert_eq!((tx, rx), (crosses, crosses), "{method}: payload is counted once in each direction");
    }
}

fn totals(nics: &[NicCounters]) -> (u64, u64) {
    (nics.iter().map(|c| c.tx_bytes).sum(), nics.iter().map(|c| c.rx_bytes).sum())
}

fn pairs(cluster: &Cluster) -> impl Iterator<Item = (Rank, Rank)> + '_ {
    let ranks = || (0..cluster.ranks()).map(Rank);
    let all = ranks().flat_map(move |s| ranks().map(move |d| (s, d)));
    all.filter(|&(s, d)| cluster.server_of(s) != cluster.server_of(d))
}

fn crossing(cluster: &Cluster, demand: &Demand) -> u64 {
    pairs(cluster).map(|(s, d)| demand.cell(s, d)).sum()
}

#[test]
fn two_servers() {
    run_all(&servers(2, 4, 4), &random(8, 60_000, 1), 1000);
}

#[test]
fn four_servers_of_two() {
    run_all(&servers(4, 2, 2), &random(8, 60_000, 2), 1000);
}

#[test]
fn fewer_nics_than_gpus() {
    run_all(&servers(2, 4, 2), &random(8, 40_000, 3), 1000);
}

#[test]
fn more_nics_than_gpus() {
    run_all(&servers(2, 2, 4), &random(4, 100_000, 4), 1000);
}

#[test]
fn servers_of_different_size_rates_and_a_nic_down() {
    let cluster = Cluster::new(vec![
        Server::new(3, &[GBIT_400, 0, 200_000], 450_000),
        Server::new(2, &[100_000, GBIT_400], 450_000),
        Server::new(1, &[GBIT_400; 2], 450_000),
    ]);
    run_all(&cluster, &random(6, 60_000, 5), 1000);
}

#[test]
fn one_server_sends_nothing_over_nics() {
    run_all(&servers(1, 4, 4), &random(4, 200_000, 6), 1000);
}

#[test]
fn a_single_rank_keeps_its_own_bytes() {
    run_all(&servers(1, 1, 1), &only(1, &[(0, 0, 100_001)]), 1000);
}

#[test]
fn nothing_to_send() {
    run_all(&servers(2, 2, 2), &only(4, &[]), 1000);
}

#[test]
fn one_pair_and_one_byte() {
    run_all(&servers(2, 2, 2), &only(4, &[(0, 3, 300_001)]), 1000);
    run_all(&servers(2, 2, 2), &only(4, &[(1, 2, 1)]), 1000);
}

#[test]
fn lengths_around_a_slot() {
    let slot = u64::from(SLOT);
    let cells =
        [(0, 2, slot - 1), (0, 3, slot), (1, 2, slot + 1), (1, 3, 3 * slot), (2, 0, 1), (3, 3, slot + 1)];
    run_all(&servers(2, 2, 2), &only(4, &cells), 1000);
}

/// No barrier in between: ranks are in different calls at once, and owners of NICs with nothing of their own to do are
/// ahead of those who still need them.
#[test]
fn calls_follow_each_other_without_a_barrier() {
    let cluster = servers(3, 2, 2);
    let demand = only(6, &[(1, 3, 400_000), (1, 5, 200_000), (3, 5, 300_000), (5, 1, 500_000), (4, 2, 1)]);
    for method in [Method::Birkhoff, Method::Loose, Method::OpenShop, Method::FuseLink, Method::Static] {
        let wrong = common::run_ranks(&config(&cluster, 2000, SLOT), |mut comm| {
            let plan = comm.plan_demand(&demand, method).unwrap();
            let (send, recv) =
                (comm.alloc(plan.send_bytes()).unwrap(), comm.alloc(plan.recv_bytes()).unwrap());
            common::prepare(&comm, &plan, &demand, &send, &recv, 0);
            comm.barrier().unwrap();
            for _ in 0..4 {
                comm.all_to_all(&plan, &send, &recv).unwrap_or_else(|e| panic!("{method}: {e}"));
            }
            let wrong = common::mismatches(&comm, &plan, &demand, &recv, 0);
            comm.barrier().unwrap();
            wrong
        });
        assert_eq!(wrong, [0; 6], "{method}");
    }
}

#[test]
fn a_rank_that_is_done_and_gone_has_sent_everything() {
    let cluster = servers(2, 2, 2);
    let demand = only(4, &[(1, 3, 1_000_000), (0, 2, 1)]);
    let wrong = common::run_ranks(&config(&cluster, 2000, SLOT), |mut comm| {
        let plan = comm.plan_demand(&demand, Method::Static).unwrap();
        let (send, recv) = (comm.alloc(plan.send_bytes()).unwrap(), comm.alloc(plan.recv_bytes()).unwrap());
        common::prepare(&comm, &plan, &demand, &send, &recv, 0);
        comm.barrier().unwrap();
        comm.all_to_all(&plan, &send, &recv).unwrap();
        if comm.rank() == Rank(1) {
            return 0; // Its communicator goes while its messages are on the way.
        }
        common::mismatches(&comm, &plan, &demand, &recv, 0)
    });
    assert_eq!(wrong, [0; 4]);
}

#[test]
fn a_cell_too_long_to_be_numbered_is_refused() {
    let cluster = servers(2, 2, 2);
    let demand = only(4, &[(0, 2, 1537 * u64::from(SLOT))]);
    let Err(error) = run(&config(&cluster, 1000, SLOT), &demand, Method::Spray).map(drop) else { panic!() };
    assert!(error.to_string().contains("FUSELINK_SLOT_BYTES"), "{error}");
}

/// What a prescription of NICs per cell comes to.
fn by_nic(
    cluster: &Cluster,
    demand: &Demand,
    nics: impl Fn(Rank, Rank) -> (NicId, NicId),
) -> Vec<NicCounters> {
    let mut counters = vec![NicCounters::default(); cluster.nics() as usize];
    for (src, dst) in pairs(cluster) {
        let (egress, ingress) = nics(src, dst);
        counters[egress.idx()].tx_bytes += demand.cell(src, dst);
        counters[ingress.idx()].rx_bytes += demand.cell(src, dst);
    }
    counters
}

fn direct(cluster: &Cluster, rank: Rank) -> NicId {
    cluster.nic_id(cluster.server_of(rank), cluster.direct_nic(rank).unwrap())
}

#[test]
fn static_uses_only_direct_nics() {
    let (cluster, demand) = (servers(2, 3, 3), random(6, 90_000, 7));
    let out = run(&config(&cluster, 1000, SLOT), &demand, Method::Static).unwrap();
    assert_eq!(out.nics, by_nic(&cluster, &demand, |s, d| (direct(&cluster, s), direct(&cluster, d))));
}

#[test]
fn spray_is_even_over_all_nics() {
    let (cluster, demand) = (servers(2, 4, 4), random(8, 120_000, 8));
    let out = run(&config(&cluster, 1000, SLOT), &demand, Method::Spray).unwrap();
    for nics in out.nics.chunks(4) {
        for count in [|c: &NicCounters| c.tx_bytes, |c: &NicCounters| c.rx_bytes] {
            let (low, high) = (nics.iter().map(count).min().unwrap(), nics.iter().map(count).max().unwrap());
            assert!(high - low <= 4 * u64::from(SLOT), "{nics:?}");
        }
    }
}

#[test]
fn fast_moves_exactly_the_pieces_of_its_plan() {
    for (cluster, seed) in [(servers(2, 4, 4), 9), (servers(3, 2, 2), 10), (servers(2, 4, 2), 11)] {
        let demand = random(cluster.ranks(), 80_000, seed);
        for method in [Method::Auto, Method::Ordered, Method::Birkhoff] {
            let Outcome { schedule, nics, mismatches, .. } =
                run(&config(&cluster, 1000, SLOT), &demand, method).unwrap();
            assert_eq!(mismatches, 0);
            let mut planned = vec![NicCounters::default(); nics.len()];
            for piece in &schedule.pieces {
                let (Some(egress), Some(ingress)) = (piece.egress, piece.ingress) else { continue };
                planned[egress.idx()].tx_bytes += piece.bytes;
                planned[ingress.idx()].rx_bytes += piece.bytes;
            }
            assert_eq!(nics, planned, "{method}");
        }
    }
}

/// Ranks 0 and 1 both send all the time that rank 0 does: rank 1 has fifteen times as much.
#[test]
fn fuselink_never_takes_a_busy_nic_of_another() {
    let cluster = servers(2, 2, 2);
    let demand = only(4, &[(0, 2, 200_000), (1, 3, 3_000_000)]);
    let out = run(&config(&cluster, 2000, SLOT), &demand, Method::FuseLink).unwrap();
    assert_eq!(out.mismatches, 0);
    assert_eq!(out.relayed_bytes[0], 0, "rank 0 took a NIC whose owner was busy");
    assert!(out.relayed_bytes[1] > 1_000_000, "rank 1 left NICs idle whose owner had finished");
    assert!(out.nics[0].tx_bytes > 200_000 && out.nics[1].tx_bytes < 3_000_000, "{:?}", out.nics);
}

#[test]
fn fuselink_spreads_one_flow_over_all_idle_nics() {
    let cluster = servers(2, 4, 4);
    let out = run(&config(&cluster, 2000, SLOT), &only(8, &[(1, 6, 2_000_000)]), Method::FuseLink).unwrap();
    assert_eq!(out.mismatches, 0);
    let (senders, receivers) = out.nics.split_at(4);
    // How much each carries depends on the host's timing; that each carries some does not.
    assert!(senders.iter().all(|c| c.tx_bytes > 0 && c.rx_bytes == 0), "{senders:?}");
    assert!(receivers.iter().all(|c| c.rx_bytes > 0 && c.tx_bytes == 0), "{receivers:?}");
}

#[test]
fn spray_relays_and_static_does_not() {
    let (cluster, demand) = (servers(2, 2, 2), random(4, 200_000, 12));
    let relayed = |method| {
        run(&config(&cluster, 1000, SLOT), &demand, method).unwrap().relayed_bytes.iter().sum::<u64>()
    };
    assert_eq!(relayed(Method::Static), 0);
    let crosses = crossing(&cluster, &demand);
    assert!(relayed(Method::Spray) > crosses / 2, "three of four ways lead through another GPU's memory");
}

/// Sequence numbers on the wire are short: a cell that is spread over NICs has a longest length. The rank that has a longer one
/// says so to all; whole on one NIC it may be as long as it likes, and planning goes on after the refusal.
#[test]
fn a_cell_too_long_to_spread_is_refused_on_all_ranks() {
    let cluster = servers(2, 2, 2);
    let demand = only(4, &[(1, 2, 1537 * u64::from(SLOT)), (0, 3, 10)]);
    let refused = run_ranks(&config(&cluster, 1000, SLOT), |mut comm| {
        let refusal = comm.plan_demand(&demand, Method::Ordered).err().map(|e| e.to_string());
        comm.plan_demand(&demand, Method::Static).unwrap();
        refusal.expect("spread over both NICs")
    });
    assert_eq!(refused.len(), 4);
    assert!(refused[0].contains("rank 1") && refused[0].contains("rank 2"), "{}", refused[0]);
    assert!(refused.iter().all(|text| text == &refused[0]), "{refused:?}");
}
