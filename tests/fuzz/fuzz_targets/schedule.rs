//! Any small cluster, any demand, any costs: an error, or a plan that carries every byte, by every way to make it.

#![no_main]

use arbitrary::{Arbitrary, Result, Unstructured};
use fuselink::plan::{self, CostModel, Demand, Method, PlanError, PlanTable, Planner, Request};
use fuselink::topo::{Cluster, GpuIdx, NicSpec, Rank, Server};
use libfuzzer_sys::fuzz_target;

#[derive(Debug)]
struct Case {
    cluster: Cluster,
    demands: [Demand; 2],
    method: Method,
    model: CostModel,
}

impl Arbitrary<'_> for Case {
    fn arbitrary(u: &mut Unstructured<'_>) -> Result<Self> {
        let servers = (0..u.int_in_range(1..=6)?).map(|_| server(u)).collect::<Result<Vec<_>>>()?;
        let cluster = Cluster::new(servers);
        let unit = u.arbitrary::<u64>()?.max(1) >> u.int_in_range(0..=63)?;
        let demands = [demand(u, cluster.ranks(), unit)?, demand(u, cluster.ranks(), unit)?];
        let method = *u.choose(Method::ALL)?;
        let model = CostModel {
            start_ns: u.arbitrary::<u64>()? >> u.int_in_range(0..=63)?,
            message_bytes: 1 << u.int_in_range(32..=62)?,
            fan_in_divisor: u.arbitrary()?,
        };
        Ok(Self { cluster, demands, method, model })
    }
}

fn server(u: &mut Unstructured<'_>) -> Result<Server> {
    let gpus = u.int_in_range(1..=4)?;
    let nics = (0..u.int_in_range(0..=5)?).map(|_| {
        let mbit_per_s = *u.choose(&[0, 1, 200_000, 400_000, 400_001, 1_000_000_000])?;
        Ok(NicSpec { mbit_per_s, relay_gpu: GpuIdx(u.int_in_range(0..=gpus - 1)?) })
    });
    let nics = nics.collect::<Result<_>>()?;
    Ok(Server { gpus, nics, scaleup_mbyte_per_s: *u.choose(&[1, 20_000, 450_000])? })
}

/// Cells of all sizes, no more in all than a demand may hold.
fn demand(u: &mut Unstructured<'_>, ranks: u32, unit: u64) -> Result<Demand> {
    let mut left = plan::MAX_TOTAL_BYTES;
    let cells = (0..ranks * ranks).map(|_| {
        let cell = match u.int_in_range(0..=3)? {
            0 => 0,
            1 => u.int_in_range(0..=64)?,
            _ => u.arbitrary::<u64>()? >> u.int_in_range(1..=63)?,
        };
        let cell = cell.min(left);
        left -= cell;
        Ok(cell)
    });
    Ok(Demand::new(ranks, cells.collect::<Result<_>>()?, unit.max(1)).expect("a small square"))
}

fuzz_target!(|case: Case| {
    let Case { cluster, demands, method, model } = &case;
    let mut planner = Planner::new();
    let request =
        Request { method: *method, model: *model, rank: Rank(0), message_bytes: model.message_bytes };
    for demand in demands {
        // As many pieces as messages: right, and slow.
        if *method == Method::Spray && demand.total_bytes() / model.message_bytes > 1 << 12 {
            continue;
        }
        let schedule = match plan::schedule(cluster, demand, *method, model) {
            Ok(schedule) => schedule,
            Err(error) => {
                assert!(matches!(error, PlanError::NoNic { .. }) || !method.is_planned(), "{error}");
                continue;
            }
        };
        let pieces: u128 = schedule.pieces.iter().map(|p| u128::from(p.bytes)).sum();
        assert_eq!(pieces, demand.total_bytes().into());
        let replay = plan::replay(cluster, &schedule, model);
        assert!(replay.cost_ns >= schedule.bound.lower_ns.saturating_sub(1) || !method.is_planned());
        let table = PlanTable::compile(cluster, demand, &schedule, Rank(0), model.message_bytes);
        let table = table.expect("messages that can be counted");
        assert_eq!(PlanTable::parse(table.as_bytes()).as_ref(), Ok(&table));
        let fresh = Planner::new().plan(cluster, demand, &request).map(|p| p.predicted_ns);
        assert_eq!(fresh, Ok(schedule.predicted_ns));
        let again = planner.replan(cluster, demand, &request).expect("what can be planned");
        assert_eq!(PlanTable::parse(again.table.as_bytes()).as_ref(), Ok(again.table));
        assert!(again.predicted_ns <= schedule.predicted_ns.saturating_add(schedule.predicted_ns / 16));
    }
});
