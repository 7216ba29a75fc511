//! Readers of demands: whatever the bytes, a demand that adds up or one line that says what is wrong.

#![no_main]

use fuselink::plan::{Demand, DemandError, ExpertLoads, MAX_TOTAL_BYTES, RouterTrace};
use fuselink::topo::Rank;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, u8, u8, u16, &str)| {
    let (kind, ranks, layer, token_bytes, text) = input;
    let (ranks, layer, token_bytes) = (u32::from(ranks % 9), layer % 4, u64::from(token_bytes));
    let read = match kind % 3 {
        0 => Demand::from_csv(text, "f", token_bytes),
        1 => {
            let layer = layer.into();
            Demand::from_expert_loads(
                text,
                "f",
                ExpertLoads { layer, token_bytes, ..Default::default() },
                ranks,
            )
        }
        _ => {
            let layer = (layer > 0).then_some(layer.into());
            Demand::from_router_trace(
                text,
                "f",
                RouterTrace { layer, token_bytes, ..Default::default() },
                ranks,
            )
        }
    };
    match read {
        Ok(demand) => is_sound(&demand),
        Err(error) => is_one_line(&error),
    }
});

fn is_sound(demand: &Demand) {
    let total = (0..demand.ranks()).flat_map(|r| demand.row(Rank(r))).map(|&c| u128::from(c)).sum::<u128>();
    assert_eq!(total, demand.total_bytes().into());
    assert!(demand.total_bytes() <= MAX_TOTAL_BYTES && demand.unit_bytes() > 0);
    assert_eq!(Demand::from_csv(&demand.to_csv(), "f", demand.unit_bytes()).as_ref(), Ok(demand));
}

fn is_one_line(error: &DemandError) {
    let text = error.to_string();
    assert_eq!(text.lines().count(), 1, "{text:?}");
    assert!(text.starts_with('f') && !text.contains('\u{1b}'), "{text:?}");
}
