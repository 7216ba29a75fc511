//! What plans promise to take, against a walk of all ranks' tables: NIC by NIC, in list order, one transfer at a time.

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::plans::{MESSAGE_BYTES, case, cases, model};
use fuselink::abi::FL_NO_TRANSFER;
use fuselink::plan::{self, CostModel, Demand, Method, PlanTable, Schedule};
use fuselink::topo::{Cluster, NicId, NicIdx, Rank, Server};
use proptest::prelude::*;

/// One direction of one NIC: the NIC, and whether it receives.
type Port = (NicId, bool);

/// What the tables say: each port's turns (transfer and bytes) in the order of its table, and who sends to whom in them.
#[derive(Default)]
struct Walk {
    turns: BTreeMap<Port, Vec<(u32, u64)>>,
    flows: BTreeMap<u32, BTreeSet<(NicId, NicId)>>,
}

impl Walk {
    fn of(cluster: &Cluster, demand: &Demand, schedule: &Schedule) -> Self {
        let mut walk = Self::default();
        for rank in (0..demand.ranks()).map(Rank) {
            let table = PlanTable::compile(cluster, demand, schedule, rank, MESSAGE_BYTES).unwrap();
            let home = cluster.server_of(rank);
            for turn in table.turns() {
                let port = (cluster.nic_id(home, NicIdx(turn.nic.into())), turn.direction == 1);
                walk.turns.entry(port).or_default().push((turn.transfer, turn.bytes));
            }
            for send in table.sends() {
                let egress = cluster.nic_id(home, NicIdx(send.egress.into()));
                let to = cluster.server_of(Rank(send.dst));
                let ingress = cluster.nic_id(to, NicIdx(send.ingress.into()));
                walk.flows.entry(send.transfer).or_default().insert((egress, ingress));
            }
        }
        walk
    }

    /// When all is done if a transfer starts on a NIC, and on those it exchanges with, as soon as these are free. `whole`
    /// = a transfer waits for all NICs of both servers, as the cost model has it.
    fn run(&self, cluster: &Cluster, model: &CostModel, whole: bool) -> u64 {
        let mut heads: BTreeMap<Port, usize> = self.turns.keys().map(|&port| (port, 0)).collect();
        let mut free: BTreeMap<Port, u64> = BTreeMap::new();
        let mut end = 0;
        loop {
            let turn =
                |heads: &BTreeMap<Port, usize>, port: &Port| self.turns[port].get(heads[port]).copied();
            let due = heads.keys().filter_map(|port| Some((turn(&heads, port)?.0, *port)));
            // The first in list order can always go: nothing before it is left.
            let Some((transfer, first)) = due.filter(|d| d.0 != FL_NO_TRANSFER).min() else { return end };
            let group = self.group(transfer, first, whole);
            let at = |port: &Port| if whole { server_port(cluster, *port) } else { *port };
            let start = group.iter().map(|p| free.get(&at(p)).copied().unwrap_or(0)).max().unwrap();
            let mut busiest = 0;
            for port in &group {
                let (at_head, bytes) = turn(&heads, port).expect("both ends have the transfer");
                assert_eq!(at_head, transfer, "{port:?} has something before it");
                *heads.get_mut(port).unwrap() += 1;
                busiest = busiest.max(wire_ns(bytes, cluster.nic(port.0).mbit_per_s));
            }
            let done = start + model.start_ns + busiest;
            free.extend(group.iter().map(|port| (at(port), done)));
            end = end.max(done);
        }
    }

    /// The ports that a transfer ties to `first`: all of its own, or those that exchange bytes.
    fn group(&self, transfer: u32, first: Port, whole: bool) -> BTreeSet<Port> {
        let flows = self.flows[&transfer].iter().map(|&(out, into)| [(out, false), (into, true)]);
        let flows: Vec<[Port; 2]> = flows.collect();
        let mut group = BTreeSet::from([first]);
        loop {
            let before = group.len();
            let joined = |flow: &&[Port; 2]| whole || flow.iter().any(|port| group.contains(port));
            let more: Vec<Port> = flows.iter().filter(joined).flatten().copied().collect();
            group.extend(more);
            if group.len() == before {
                return group;
            }
        }
    }

    /// Time of the busiest NIC in loose traffic, with what every server after the first that sends into it costs.
    fn loose_ns(&self, cluster: &Cluster, model: &CostModel) -> u64 {
        let mut senders: BTreeMap<NicId, BTreeSet<u32>> = BTreeMap::new();
        for (out, into) in self.flows.get(&FL_NO_TRANSFER).into_iter().flatten() {
            senders.entry(*into).or_default().insert(cluster.server_of_nic(*out).0);
        }
        let most = senders.values().map(|s| s.len() as u64).max().unwrap_or(1);
        let loose = |turns: &[(u32, u64)]| -> u64 {
            turns.iter().filter(|t| t.0 == FL_NO_TRANSFER).map(|t| t.1).sum()
        };
        let busiest = self.turns.iter().map(|(port, t)| wire_ns(loose(t), cluster.nic(port.0).mbit_per_s));
        let ns = busiest.max().unwrap_or(0);
        ns + (ns / model.fan_in_divisor * (most - 1)).min(ns)
    }
}

/// All NICs of a server as one.
fn server_port(cluster: &Cluster, (nic, receives): Port) -> Port {
    (cluster.first_nic(cluster.server_of_nic(nic)), receives)
}

fn wire_ns(bytes: u64, mbit_per_s: u64) -> u64 {
    (u128::from(bytes) * 8000).div_ceil(mbit_per_s.into()) as u64
}

/// What whole units make of shares: up to two per NIC and transfer, on the slowest NIC there is; and what the last units
/// of cells lack, which are planned as whole ones.
fn rounding_ns(cluster: &Cluster, demand: &Demand, transfers: usize) -> u64 {
    let rates = (0..cluster.nics()).map(|n| cluster.nic(NicId(n)).mbit_per_s).filter(|&rate| rate > 0);
    let (unit, slowest) = (demand.unit_bytes(), rates.min().unwrap_or(1));
    let cells = (0..demand.ranks()).flat_map(|src| demand.row(Rank(src)));
    let lacking = cells.map(|cell| cell.next_multiple_of(unit) - cell).sum();
    (wire_ns(2 * unit, slowest) + 1) * (transfers as u64 + 1) + wire_ns(lacking, slowest)
}

const ORDERED: [Method; 5] =
    [Method::Ordered, Method::SpreadOut, Method::Birkhoff, Method::OpenShop, Method::Rounds];

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    /// Any cluster: the model's walk takes what was predicted, up to whole units; NICs that run apart take no longer.
    #[test]
    fn tables_take_what_was_predicted((cluster, demand) in case()) {
        let model = model();
        for method in ORDERED {
            let schedule = plan::schedule(&cluster, &demand, method, &model).unwrap();
            let walk = Walk::of(&cluster, &demand, &schedule);
            let (servers_ns, nics_ns) = (walk.run(&cluster, &model, true), walk.run(&cluster, &model, false));
            let off = rounding_ns(&cluster, &demand, schedule.transfers.len());
            prop_assert!(servers_ns.abs_diff(schedule.predicted_ns) <= off, "{} {} {}", method, servers_ns, schedule.predicted_ns);
            prop_assert_eq!(servers_ns, plan::replay(&cluster, &schedule, &model).cost_ns);
            prop_assert!(nics_ns <= servers_ns);
            prop_assert!(nics_ns + off >= schedule.bound.lower_ns);
        }
        let loose = plan::schedule(&cluster, &demand, Method::Loose, &model).unwrap();
        let walked_ns = Walk::of(&cluster, &demand, &loose).loose_ns(&cluster, &model);
        let off = 2 * rounding_ns(&cluster, &demand, (cluster.server_count() * cluster.server_count()) as usize);
        prop_assert!(walked_ns.abs_diff(loose.predicted_ns) <= off, "{} {}", walked_ns, loose.predicted_ns);
    }

    /// Servers of one kind, where every NIC of a transfer is equally busy: to the nanosecond per transfer, in both walks.
    #[test]
    fn rails_of_one_kind_take_what_was_predicted(
        servers in 2..9u32,
        cells in prop::collection::vec(prop_oneof![1 => Just(0u64), 3 => 0..100_000_000u64], 16 * 16),
    ) {
        let cluster = Cluster::uniform(servers, Server::new(2, &[400_000; 2], 450_000));
        let ranks = cluster.ranks() as usize;
        let demand = Demand::new(ranks as u32, cells[..ranks * ranks].to_vec(), 1).unwrap();
        for method in ORDERED {
            let schedule = plan::schedule(&cluster, &demand, method, &model()).unwrap();
            let walk = Walk::of(&cluster, &demand, &schedule);
            for whole in [true, false] {
                let ns = walk.run(&cluster, &model(), whole);
                let off = 2 * schedule.transfers.len() as u64;
                prop_assert!(ns.abs_diff(schedule.predicted_ns) <= off, "{} {} {}", method, ns, schedule.predicted_ns);
            }
        }
    }
}
