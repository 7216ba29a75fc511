//! A skewed mixture-of-experts demand without a file: what the command line moves when nobody names one.

use super::{Demand, ExpertLoads};
use crate::plan::DemandError;
use crate::plan::random::SplitMix;

/// The shape of a made-up layer: about the size and skew of a measured DeepSeek-V3 layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SyntheticMoe {
    /// Same seed, same demand, on every machine.
    pub seed: u64,
    /// Tokens per source rank.
    pub tokens: u64,
    /// Copies sent of each token.
    pub top_k: u64,
    /// Size of one copy.
    pub token_bytes: u64,
}

impl Default for SyntheticMoe {
    fn default() -> Self {
        Self { seed: 1, tokens: 512, top_k: 8, token_bytes: 7168 }
    }
}

/// Experts of the made-up layer; more when there are more ranks.
const EXPERTS: u32 = 256;

impl Demand {
    /// A layer whose experts' loads fall off as 1 / position, the first half as much again, with the busiest experts on
    /// different ranks.
    ///
    /// # Errors
    /// [`DemandError`] for 0 ranks and totals past 2^63.
    pub fn synthetic_moe(ranks: u32, moe: SyntheticMoe) -> Result<Self, DemandError> {
        let place = "the made-up demand";
        if ranks == 0 {
            return Err(DemandError::Empty { place: place.into() });
        }
        let per_rank = EXPERTS.div_ceil(ranks);
        let mut counts = vec![0u64; per_rank as usize * ranks as usize];
        let mut random = SplitMix(moe.seed);
        let mut deal: Vec<u32> = (0..ranks).collect();
        for round in 0..per_rank {
            random.shuffle(&mut deal);
            for (nth, rank) in deal.iter().enumerate() {
                let position = u64::from(round) * u64::from(ranks) + nth as u64 + 1;
                let load = (1 << 32) / position;
                counts[(rank * per_rank + round) as usize] = if position == 1 { load * 3 / 2 } else { load };
            }
        }
        let loads =
            ExpertLoads { layer: 0, tokens: moe.tokens, top_k: moe.top_k, token_bytes: moe.token_bytes };
        Self::from_counts(&counts, place, loads, ranks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topo::Rank;

    #[test]
    fn the_default_is_a_measured_layer_in_size_and_skew() {
        let d = Demand::synthetic_moe(16, SyntheticMoe::default()).unwrap();
        assert_eq!(d, Demand::synthetic_moe(16, SyntheticMoe::default()).unwrap());
        assert!((400_000_000..480_000_000).contains(&d.total_bytes()), "{}", d.total_bytes());
        let sum = |src: std::ops::Range<u32>, dst: std::ops::Range<u32>| -> u64 {
            src.flat_map(|s| dst.clone().map(move |t| (s, t))).map(|(s, t)| d.cell(Rank(s), Rank(t))).sum()
        };
        let bound = sum(0..8, 8..16).max(sum(8..16, 0..8)) / 8;
        let into = |t: u32| if t < 8 { sum(8..16, t..t + 1) } else { sum(0..8, t..t + 1) };
        let statics = (0..16).map(into).max().unwrap();
        assert!((25..=35).contains(&(statics * 10 / bound)), "static needs {statics}, the bound is {bound}");
    }

    #[test]
    fn any_number_of_ranks_has_a_demand() {
        for ranks in [1, 2, 3, 7, 48, 300] {
            assert_eq!(Demand::synthetic_moe(ranks, SyntheticMoe::default()).unwrap().ranks(), ranks);
        }
    }
}
