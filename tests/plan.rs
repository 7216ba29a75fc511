//! Properties of schedules and plan tables over random clusters and demands.

mod common;

use std::collections::BTreeMap;

use common::plans::{MESSAGE_BYTES, case, cases, check_carried, methods, model};
use fuselink::abi::{FL_NO_NIC, FL_NO_TRANSFER};
use fuselink::plan::{
    self, Bound, CostModel, Demand, LocalDemand, Method, PlanTable, Planner, Request, Schedule,
};
use fuselink::topo::{Cluster, Rank, Server, ServerId};
use proptest::prelude::*;

/// Pieces tile every cell, split no unit, use NICs that are up, of the right servers, in transfers of those servers.
fn check_pieces(cluster: &Cluster, demand: &Demand, schedule: &Schedule) {
    let mut at: BTreeMap<(u32, u32), u64> = BTreeMap::new();
    for p in &schedule.pieces {
        assert!(p.bytes > 0);
        let end = at.entry((p.src.0, p.dst.0)).or_default();
        assert_eq!(*end, p.offset, "gap or overlap in {} to {}", p.src, p.dst);
        *end += p.bytes;
        assert_eq!(p.offset % demand.unit_bytes(), 0);
        let (from, to) = (cluster.server_of(p.src), cluster.server_of(p.dst));
        if from == to {
            assert_eq!((p.egress, p.ingress, p.transfer), (None, None, None));
        } else if schedule.method != Method::FuseLink {
            for (nic, server) in [(p.egress, from), (p.ingress, to)] {
                let nic = nic.unwrap();
                assert_eq!(cluster.server_of_nic(nic), server);
                assert!(cluster.nic(nic).mbit_per_s > 0);
            }
        }
        if let Some(t) = p.transfer {
            assert_eq!(schedule.transfers[t as usize], (from, to));
        }
    }
    for (src, dst) in (0..demand.ranks()).flat_map(|s| (0..demand.ranks()).map(move |d| (s, d))) {
        let planned = at.get(&(src, dst)).copied().unwrap_or(0);
        assert_eq!(planned, demand.cell(Rank(src), Rank(dst)));
    }
}

/// By replay, no server sends to two at a time, or receives from two; no transfer is empty.
fn check_one_at_a_time(cluster: &Cluster, schedule: &Schedule) {
    let replayed = plan::replay(cluster, schedule, &model());
    let mut sends: BTreeMap<ServerId, u64> = BTreeMap::new();
    let mut receives: BTreeMap<ServerId, u64> = BTreeMap::new();
    for (&(src, dst), span) in schedule.transfers.iter().zip(&replayed.spans) {
        assert!(span.start_ns >= sends.insert(src, span.end_ns).unwrap_or(0));
        assert!(span.start_ns >= receives.insert(dst, span.end_ns).unwrap_or(0));
        assert!(span.end_ns > span.start_ns + model().start_ns, "an empty transfer");
    }
    assert!(replayed.cost_ns >= schedule.bound.lower_ns.saturating_sub(1));
    check_pipeline(&replayed);
}

/// Scale-up only ever adds, nothing ends before the busiest link, and every nanosecond has its reason.
fn check_pipeline(replayed: &plan::Replay) {
    let added = replayed.pipeline;
    assert!(added.done_ns >= replayed.cost_ns.max(replayed.scaleup_ns));
    assert_eq!(added.done_ns, replayed.cost_ns + added.balance_ns + added.spread_ns + added.own_ns);
}

fn check_stages(schedule: &Schedule) {
    let ends = schedule.stages.iter().copied().skip(1).chain([schedule.transfers.len() as u32]);
    for (first, end) in schedule.stages.iter().copied().zip(ends) {
        let stage = &schedule.transfers[first as usize..end as usize];
        assert!(!stage.is_empty());
        for pick in [|t: &(ServerId, ServerId)| t.0, |t: &(ServerId, ServerId)| t.1] {
            let mut servers: Vec<_> = stage.iter().map(pick).collect();
            servers.sort_unstable();
            servers.dedup();
            assert_eq!(servers.len(), stage.len(), "a server twice in a stage");
        }
    }
}

/// A planner makes the same tables for one rank, from the whole matrix and from what the rank's server knows.
fn check_planner(cluster: &Cluster, demand: &Demand, schedule: &Schedule, asked: Method) {
    let mut planner = Planner::new();
    for rank in (0..demand.ranks()).map(Rank) {
        let request = Request { method: asked, model: model(), rank, message_bytes: MESSAGE_BYTES };
        let table = PlanTable::compile(cluster, demand, schedule, rank, MESSAGE_BYTES).unwrap();
        let planned = planner.plan(cluster, demand, &request).unwrap();
        assert_eq!(planned.table, &table);
        assert_eq!((planned.method, planned.predicted_ns), (schedule.method, schedule.predicted_ns));
        if schedule.method.is_planned() {
            let local = LocalDemand::cut(cluster, cluster.server_of(rank), demand).unwrap();
            assert_eq!(planner.plan_local(cluster, &local, &request).unwrap().table, &table);
        }
    }
}

/// All tables together replay to exactly the demand, turns count what is sent, and peers are those of the list.
fn check_tables(cluster: &Cluster, demand: &Demand, schedule: &Schedule) {
    let compile = |r| PlanTable::compile(cluster, demand, schedule, Rank(r), MESSAGE_BYTES).unwrap();
    let tables: Vec<PlanTable> = (0..demand.ranks()).map(compile).collect();
    check_carried(cluster, demand, &tables);
    for turn in tables.iter().flat_map(PlanTable::turns).filter(|t| t.transfer != FL_NO_TRANSFER) {
        let (src, dst) = schedule.transfers[turn.transfer as usize];
        assert_eq!(turn.peer_server, if turn.direction == 0 { dst.0 } else { src.0 });
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    #[test]
    fn every_method_carries_exactly_the_demand((cluster, demand) in case()) {
        for method in methods() {
            let schedule = plan::schedule(&cluster, &demand, method, &model()).unwrap();
            check_pieces(&cluster, &demand, &schedule);
            check_one_at_a_time(&cluster, &schedule);
            check_stages(&schedule);
            check_tables(&cluster, &demand, &schedule);
            check_planner(&cluster, &demand, &schedule, method);
        }
    }

    #[test]
    fn exact_birkhoff_reaches_the_bound(
        servers in 1..9u32,
        nics in prop::sample::select(vec![1u32, 2, 4, 8]),
        cells in prop::collection::vec(prop_oneof![1 => Just(0u64), 3 => 0..100_000_000u64], 16 * 16),
    ) {
        let cluster = Cluster::uniform(servers, Server::new(2, &vec![400_000; nics as usize], 450_000));
        let ranks = cluster.ranks() as usize;
        let demand = Demand::new(ranks as u32, cells[..ranks * ranks].to_vec(), 1).unwrap();
        let free = CostModel { start_ns: 0, ..CostModel::default() };
        let schedule = plan::schedule(&cluster, &demand, Method::Birkhoff, &free).unwrap();
        let replayed = plan::replay(&cluster, &schedule, &free);
        // A nanosecond of rounding per stage, and a byte per NIC where a cut falls between bytes.
        prop_assert!(replayed.cost_ns <= schedule.bound.lower_ns + 3 * (servers * servers) as u64);
    }

    /// Sums near 2^63, rates from 1 Mbit/s to 1 Tbit/s, start costs without end: nothing overflows.
    #[test]
    fn extreme_numbers_are_planned(
        servers in prop::collection::vec((1..4u32, prop::sample::select(vec![1u64, 400_000, 1_000_000_000])), 1..7),
        shifts in prop::collection::vec(0..64u32, 18 * 18),
        unit in prop_oneof![Just(1u64), Just(7168), Just(u64::MAX), 1..u64::MAX],
        start_ns in prop_oneof![Just(0u64), Just(u64::MAX), any::<u64>()],
    ) {
        let server = |&(gpus, rate): &(u32, u64)| Server::new(gpus, &[rate, 400_000], 450_000);
        let cluster = Cluster::new(servers.iter().map(server).collect());
        let ranks = cluster.ranks() as usize;
        let mut left = i64::MAX as u64;
        let cells = shifts[..ranks * ranks].iter().map(|shift| {
            let cell = left >> shift;
            left -= cell;
            cell
        });
        let demand = Demand::new(ranks as u32, cells.collect(), unit).unwrap();
        let message_bytes = 1 << 40;
        let model = CostModel { start_ns, message_bytes, ..CostModel::default() };
        for method in methods().filter(|&m| m != Method::Spray) {
            let schedule = plan::schedule(&cluster, &demand, method, &model).unwrap();
            check_pieces(&cluster, &demand, &schedule);
            plan::replay(&cluster, &schedule, &model);
            let request = Request { method, model, rank: Rank(0), message_bytes };
            let mut planner = Planner::new();
            let planned = planner.plan(&cluster, &demand, &request).unwrap();
            prop_assert_eq!(&PlanTable::compile(&cluster, &demand, &schedule, Rank(0), message_bytes).unwrap(), planned.table);
        }
    }

    /// Every list carries every pair once, costs what it promises, and `ordered` is no worse than what it begins with.
    #[test]
    fn ordered_keeps_its_promises(
        servers in 2..12u32,
        cells in prop::collection::vec(prop_oneof![1 => Just(0u64), 1 => 1..1000u64, 2 => 0..200_000_000u64], 11 * 11),
    ) {
        let cluster = Cluster::uniform(servers, Server::new(1, &[400_000], 450_000));
        let ranks = cluster.ranks() as usize;
        let demand = Demand::new(ranks as u32, cells[..ranks * ranks].to_vec(), 1).unwrap();
        let plan = |method| plan::schedule(&cluster, &demand, method, &model()).unwrap();
        let ordered = plan(Method::Ordered);
        prop_assert!(ordered.predicted_ns <= plan(Method::SpreadOut).predicted_ns);
        for schedule in [&ordered, &plan(Method::OpenShop), &plan(Method::Rounds)] {
            let mut pairs = schedule.transfers.clone();
            pairs.sort_unstable();
            let before = pairs.len();
            pairs.dedup();
            prop_assert!(schedule.method == Method::Birkhoff || pairs.len() == before);
            prop_assert!(schedule.predicted_ns >= schedule.bound.floor_ns.saturating_sub(servers.into()));
        }
        let replayed = plan::replay(&cluster, &ordered, &model());
        prop_assert!(replayed.cost_ns.abs_diff(ordered.predicted_ns) <= u64::from(servers * servers));
    }

    #[test]
    fn mutated_tables_never_panic((cluster, demand) in case(), flips in prop::collection::vec((any::<u32>(), any::<u8>()), 1..6), cut in any::<u32>()) {
        let schedule = plan::schedule(&cluster, &demand, Method::SpreadOut, &model()).unwrap();
        let table = PlanTable::compile(&cluster, &demand, &schedule, Rank(0), MESSAGE_BYTES).unwrap();
        let mut bytes = table.as_bytes().to_vec();
        for (at, value) in flips {
            // Mostly the header, where a wrong word does the most harm.
            let at = if at % 2 == 0 { at as usize % 136 } else { at as usize % bytes.len() };
            bytes[at] = value;
        }
        if let Ok(parsed) = PlanTable::parse(&bytes) {
            parsed.sends().for_each(|s| assert!(s.dst < parsed.header().ranks));
            parsed.recvs().for_each(|r| assert!(r.src < parsed.header().ranks));
        }
        bytes.truncate(cut as usize % (bytes.len() + 1));
        let _ = PlanTable::parse(&bytes);
    }

    #[test]
    fn readers_never_panic(text in "[0-9,#\\n \\-x\"{}\\[\\]:a-z_]{0,80}") {
        let _ = Demand::from_csv(&text, "f", 1);
        let _ = Demand::from_expert_loads(&text, "f", Default::default(), 2);
        let _ = Demand::from_router_trace(&text, "f", Default::default(), 2);
    }
}

fn two_by_two() -> Cluster {
    Cluster::uniform(2, Server::new(2, &[400_000; 2], 450_000))
}

fn with_cells(cluster: &Cluster, cells: &[(u32, u32, u64)]) -> Demand {
    let ranks = cluster.ranks();
    let mut all = vec![0; (ranks * ranks) as usize];
    cells.iter().for_each(|&(s, d, bytes)| all[(s * ranks + d) as usize] = bytes);
    Demand::new(ranks, all, 1).unwrap()
}

#[test]
fn a_demand_of_nothing_is_a_plan_of_nothing() {
    let cluster = two_by_two();
    let demand = with_cells(&cluster, &[]);
    for method in methods() {
        let schedule = plan::schedule(&cluster, &demand, method, &model()).unwrap();
        assert!(schedule.pieces.is_empty() && schedule.transfers.is_empty());
        assert_eq!((schedule.bound, schedule.predicted_ns), (Bound::default(), 0));
        check_tables(&cluster, &demand, &schedule);
    }
}

#[test]
fn one_cell_uses_every_nic_of_both_servers() {
    let cluster = two_by_two();
    let demand = with_cells(&cluster, &[(0, 3, 1001)]);
    let schedule = plan::schedule(&cluster, &demand, Method::Birkhoff, &model()).unwrap();
    assert_eq!(schedule.pieces.iter().map(|p| p.bytes).collect::<Vec<_>>(), [501, 500]);
    let replayed = plan::replay(&cluster, &schedule, &model());
    assert_eq!(replayed.nic_tx_bytes, [500, 501, 0, 0]);
    assert_eq!(replayed.nic_rx_bytes, [0, 0, 500, 501]);
}

#[test]
fn diagonals_stay_home() {
    let cluster = two_by_two();
    let demand = with_cells(&cluster, &[(0, 0, 7), (3, 3, 9), (2, 3, 1)]);
    for method in methods() {
        let schedule = plan::schedule(&cluster, &demand, method, &model()).unwrap();
        assert_eq!(schedule.pieces.len(), 3);
        check_tables(&cluster, &demand, &schedule);
    }
}

#[test]
fn a_server_without_a_nic_that_is_up_is_an_error_only_when_it_has_traffic() {
    let server = |rate| Server::new(1, &[rate], 1);
    let cluster = Cluster::new(vec![server(1), server(0), server(1)]);
    let err =
        plan::schedule(&cluster, &with_cells(&cluster, &[(0, 1, 5)]), Method::Auto, &model()).unwrap_err();
    assert_eq!(err.to_string(), "server 1 has 5 bytes to send or receive, but all of its 1 NICs are down");
    let demand = with_cells(&cluster, &[(0, 2, 5), (1, 1, 8)]);
    for method in methods() {
        let schedule = plan::schedule(&cluster, &demand, method, &model()).unwrap();
        check_pieces(&cluster, &demand, &schedule);
        check_tables(&cluster, &demand, &schedule);
    }
}

#[test]
fn static_uses_direct_nics_and_spray_is_even() {
    let cluster = Cluster::uniform(2, Server::new(4, &[400_000; 4], 450_000));
    let demand = with_cells(&cluster, &[(0, 5, 64_000), (1, 5, 16_000), (6, 2, 8_000)]);
    let schedule = plan::schedule(&cluster, &demand, Method::Static, &model()).unwrap();
    let counters = plan::replay(&cluster, &schedule, &model());
    assert_eq!(counters.nic_tx_bytes, [64_000, 16_000, 0, 0, 0, 0, 8_000, 0]);
    assert_eq!(counters.nic_rx_bytes, [0, 0, 8_000, 0, 0, 80_000, 0, 0]);
    let schedule = plan::schedule(&cluster, &demand, Method::Spray, &model()).unwrap();
    let counters = plan::replay(&cluster, &schedule, &model());
    assert_eq!(counters.nic_tx_bytes, [[20_000; 4], [2_000; 4]].concat());
    assert_eq!(counters.nic_rx_bytes, [[2_000; 4], [20_000; 4]].concat());
}

/// Found by fuzzing: one cell of 619 PB was cut into runs until memory was full.
#[test]
fn a_demand_of_more_runs_than_memory_is_not_sprayed() {
    let cluster = two_by_two();
    let demand = with_cells(&cluster, &[(0, 2, 619_315_317_507_110_968)]);
    let err = plan::schedule(&cluster, &demand, Method::Spray, &CostModel::default()).unwrap_err();
    assert!(err.to_string().contains("runs of one message to spray"), "{err}");
}

/// Balanced traffic in no order wins where all-to-alls are small, an order where they are large (4 servers: about 64 MB
/// per GPU, as published).
#[test]
fn auto_goes_loose_when_little_is_to_be_sent() {
    let cluster = Cluster::uniform(4, Server::new(8, &[400_000; 8], 450_000));
    let uniform = |gpu_bytes: u64| {
        let cells = (0..32 * 32).map(|i| if i / 32 == i % 32 { 0 } else { gpu_bytes / 31 });
        let demand = Demand::new(32, cells.collect(), 1).unwrap();
        plan::schedule(&cluster, &demand, Method::Auto, &CostModel::default()).unwrap().method
    };
    assert_eq!(uniform(32_000_000), Method::Loose);
    assert_ne!(uniform(128_000_000), Method::Loose);
}

#[test]
fn hashes_differ_when_anything_does() {
    let cluster = two_by_two();
    let cells = [(0, 2, 10), (0, 3, 20), (1, 2, 30), (1, 3, 40)];
    let hash = |cells: &[(u32, u32, u64)], method, message_bytes| {
        let demand = with_cells(&cluster, cells);
        let schedule = plan::schedule(&cluster, &demand, method, &model()).unwrap();
        PlanTable::compile(&cluster, &demand, &schedule, Rank(3), message_bytes).unwrap().header().plan_hash
    };
    let base = hash(&cells, Method::SpreadOut, 1000);
    assert_eq!(base, hash(&cells, Method::SpreadOut, 1000));
    assert_ne!(base, hash(&cells, Method::Birkhoff, 1000));
    assert_ne!(base, hash(&cells, Method::SpreadOut, 1001));
    // Two units trade places, so that all sums of rows and columns stay the same.
    assert_ne!(base, hash(&[(0, 2, 11), (0, 3, 19), (1, 2, 29), (1, 3, 41)], Method::SpreadOut, 1000));
}

/// A rank's lanes begin with different destinations where scale-up is fast, and each lane alternates between them where
/// it is slow.
#[test]
fn redistribution_does_not_converge() {
    let plan = |scaleup| {
        let cluster = Cluster::uniform(2, Server::new(4, &[400_000; 4], scaleup));
        let cells: Vec<_> = (0..4).flat_map(|s| (4..8).map(move |d| (s, d, 40_000))).collect();
        let demand = with_cells(&cluster, &cells);
        let schedule = plan::schedule(&cluster, &demand, Method::SpreadOut, &model()).unwrap();
        let table = |r| PlanTable::compile(&cluster, &demand, &schedule, Rank(r), MESSAGE_BYTES).unwrap();
        (0..4).map(table).collect::<Vec<_>>()
    };
    let fast = plan(450_000);
    let mut firsts: Vec<u32> = fast.iter().map(|t| t.sends().next().unwrap().dst).collect();
    firsts.sort_unstable();
    assert_eq!(firsts, [4, 5, 6, 7]);
    for table in plan(20_000) {
        let dsts: Vec<u32> = table.sends().map(|s| s.dst).collect();
        assert!(dsts.len() > 4 && dsts.windows(2).all(|w| w[0] != w[1]), "{dsts:?}");
    }
}

#[test]
fn every_name_is_parsed_back() {
    for method in methods() {
        assert_eq!(method.to_string().parse(), Ok(method));
    }
    assert_eq!("fast".parse(), Ok(Method::Auto));
    let err = "fastest".parse::<Method>().unwrap_err().to_string();
    assert!(err.starts_with("unknown method \"fastest\"; methods are auto, ordered"), "{err}");
    assert_eq!(FL_NO_NIC, 0xffff);
}
