//! Plans that start from the last one: as complete as fresh ones, about as good, and the same on every rank.

mod common;

use common::plans::{MESSAGE_BYTES, case, cases, check_carried, model};
use fuselink::plan::{Demand, LocalDemand, Method, PlanTable, Planner, Request};
use fuselink::topo::{Cluster, Rank, Server};
use proptest::prelude::*;

const METHODS: [Method; 6] =
    [Method::Auto, Method::Ordered, Method::OpenShop, Method::Rounds, Method::SpreadOut, Method::Birkhoff];

fn request(method: Method, rank: Rank) -> Request {
    Request { method, model: model(), rank, message_bytes: MESSAGE_BYTES }
}

/// Every cell by so many thousandths; a few go, and a few come.
fn drift(demand: &Demand, thousandths: &[u64], step: usize) -> Demand {
    let ranks = demand.ranks();
    let cells = (0..ranks).flat_map(|src| demand.row(Rank(src)).iter().copied());
    let cells = cells.enumerate().map(|(at, cell)| {
        let factor = thousandths[(at * 7 + step * 13) % thousandths.len()];
        match factor % 50 {
            0 => 0,
            1 => cell + 5000,
            _ => (u128::from(cell) * u128::from(factor) / 1000) as u64,
        }
    });
    Demand::new(ranks, cells.collect(), demand.unit_bytes()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases() / 3 + 1, ..ProptestConfig::default() })]

    #[test]
    fn drifting_demands_are_carried_at_no_great_loss(
        (cluster, first) in case(),
        thousandths in prop::collection::vec(900..1100u64, 97),
    ) {
        let ranks = || (0..cluster.ranks()).map(Rank);
        for method in METHODS {
            let mut planners: Vec<Planner> = ranks().map(|_| Planner::new()).collect();
            let mut local = Planner::new();
            let mut demand = first.clone();
            for step in 0..4 {
                let part = LocalDemand::cut(&cluster, cluster.server_of(Rank(0)), &demand).unwrap();
                let fresh = Planner::new().plan(&cluster, &demand, &request(method, Rank(0))).unwrap().predicted_ns;
                let again = |(rank, planner): (Rank, &mut Planner)| {
                    let planned = planner.replan(&cluster, &demand, &request(method, rank)).unwrap();
                    assert!(planned.predicted_ns <= fresh + fresh / 16 + 1, "{method}: {} over {fresh}", planned.predicted_ns);
                    planned.table.clone()
                };
                let tables: Vec<PlanTable> = ranks().zip(&mut planners).map(again).collect();
                check_carried(&cluster, &demand, &tables);
                let planned = local.replan_local(&cluster, &part, &request(method, Rank(0))).unwrap();
                prop_assert_eq!(planned.table, &tables[0]);
                demand = drift(&demand, &thousandths, step);
            }
        }
    }

    /// Without a last list for the same request, a plan is a fresh one.
    #[test]
    fn what_cannot_be_reused_is_planned_afresh((cluster, demand) in case(), (other, before) in case()) {
        for method in METHODS {
            let fresh = |method| {
                let mut planner = Planner::new();
                planner.plan(&cluster, &demand, &request(method, Rank(0))).unwrap().table.clone()
            };
            let mut planner = Planner::new();
            if other.server_count() != cluster.server_count() {
                planner.plan(&other, &before, &request(method, Rank(0))).unwrap();
                let again = planner.replan(&cluster, &demand, &request(method, Rank(0))).unwrap();
                prop_assert_eq!(again.table, &fresh(method));
            }
            let asked = if method == Method::Auto { Method::Ordered } else { Method::Auto };
            planner.plan(&cluster, &demand, &request(method, Rank(0))).unwrap();
            let again = planner.replan(&cluster, &demand, &request(asked, Rank(0))).unwrap();
            prop_assert_eq!(again.table, &fresh(asked));
            planner.plan(&cluster, &demand, &request(Method::Static, Rank(0))).unwrap();
            let again = planner.replan(&cluster, &demand, &request(method, Rank(0))).unwrap();
            prop_assert_eq!(again.table, &fresh(method));
        }
    }
}

/// The point of it: the order stays, although a fresh plan would have another.
#[test]
fn a_list_that_is_still_good_stays() {
    let cluster = Cluster::uniform(8, Server::new(1, &[400_000], 450_000));
    let cells =
        |seed: u64| (0..64).map(move |i| if i % 9 == 0 { 0 } else { 9_000_000 + (i * seed) % 97 * 1000 });
    let (first, second) = (cells(31).collect(), cells(57).collect());
    let [first, second] = [first, second].map(|cells| Demand::new(8, cells, 1).unwrap());
    let asked = request(Method::Ordered, Rank(0));
    let peers = |table: &PlanTable| table.sends().map(|s| (s.transfer, s.dst)).collect::<Vec<_>>();
    let mut planner = Planner::new();
    let before = peers(planner.plan(&cluster, &first, &asked).unwrap().table);
    assert_eq!(before, peers(planner.replan(&cluster, &second, &asked).unwrap().table));
}
