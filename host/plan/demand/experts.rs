//! Demands from measured expert loads of a mixture-of-experts model.

use super::Demand;
use crate::plan::DemandError;
use crate::topo::Rank;

/// Which layer of the measured loads to take, and what each rank sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpertLoads {
    /// Layer of the file, from 0.
    pub layer: usize,
    /// Tokens per source rank.
    pub tokens: u64,
    /// Copies sent of each token.
    pub top_k: u64,
    /// Size of one copy.
    pub token_bytes: u64,
}

impl Default for ExpertLoads {
    fn default() -> Self {
        Self { layer: 0, tokens: 512, top_k: 8, token_bytes: 7168 }
    }
}

#[derive(serde::Deserialize)]
struct File {
    logical_count: Vec<Vec<serde_json::Number>>,
}

impl Demand {
    /// Reads `{"logical_count": [layers][experts]}` (tokens seen by each expert). Experts stand in equal contiguous
    /// blocks on the ranks; every rank sends its token copies in proportion to the ranks' loads, none to itself.
    /// The unit is the token.
    ///
    /// # Errors
    /// [`DemandError`] when the text is not that, lacks the layer, or its experts do not divide over the ranks.
    pub fn from_expert_loads(
        json: &str,
        place: &str,
        loads: ExpertLoads,
        ranks: u32,
    ) -> Result<Self, DemandError> {
        let file: File = serde_json::from_str(json).map_err(|e| json_error(place, &e, 0))?;
        let layers = file.logical_count.len();
        let counts = file.logical_count.get(loads.layer).ok_or_else(|| DemandError::NoLayer {
            place: place.into(),
            layer: loads.layer,
            layers,
        })?;
        let counts = counts
            .iter()
            .enumerate()
            .map(|(expert, n)| whole(n).ok_or_else(|| bad_load(place, loads.layer, expert, n)))
            .collect::<Result<Vec<u64>, _>>()?;
        Self::from_counts(&counts, place, loads, ranks)
    }

    /// The demand of experts that have seen `counts` tokens each.
    pub(super) fn from_counts(
        counts: &[u64],
        place: &str,
        loads: ExpertLoads,
        ranks: u32,
    ) -> Result<Self, DemandError> {
        if ranks == 0 || counts.is_empty() || !counts.len().is_multiple_of(ranks as usize) {
            let experts = counts.len();
            return Err(DemandError::ExpertsDoNotDivide { place: place.into(), experts, ranks });
        }
        let too_large = || DemandError::TotalTooLarge { place: place.into() };
        let per_rank = counts.len() / ranks as usize;
        let load: Vec<u128> =
            counts.chunks(per_rank).map(|c| c.iter().map(|&n| u128::from(n)).sum()).collect();
        let copies = loads.tokens.checked_mul(loads.top_k).ok_or_else(too_large)?;
        if load.iter().all(|&l| l == 0) {
            return Err(DemandError::NoLoad { place: place.into(), layer: loads.layer });
        }
        let row = apportion(copies, &load)
            .into_iter()
            .map(|n| n.checked_mul(loads.token_bytes).ok_or_else(too_large))
            .collect::<Result<Vec<u64>, _>>()?;
        let cells = (0..ranks).flat_map(|src| {
            row.iter().enumerate().map(move |(dst, &bytes)| if Rank(src).idx() == dst { 0 } else { bytes })
        });
        Self::build(place, ranks, cells.collect(), loads.token_bytes)
    }
}

/// Splits `copies` in proportion to `load` by largest remainder; ties go to the lower rank.
fn apportion(copies: u64, load: &[u128]) -> Vec<u64> {
    let total: u128 = load.iter().sum();
    // Loads are sums of u64 over few experts: shifting both down keeps proportions when the product would not fit.
    let shift = (u128::BITS - total.leading_zeros()).saturating_sub(64);
    let scaled: Vec<u128> = load.iter().map(|l| l >> shift).collect();
    let total: u128 = scaled.iter().sum::<u128>().max(1);
    let product = |l: u128| u128::from(copies) * l;
    let mut share: Vec<u64> = scaled.iter().map(|&l| (product(l) / total) as u64).collect();
    let mut by_rest: Vec<usize> = (0..load.len()).collect();
    by_rest.sort_by_key(|&r| (std::cmp::Reverse(product(scaled[r]) % total), r));
    let left = copies - share.iter().sum::<u64>();
    by_rest.iter().take(left as usize).for_each(|&r| share[r] += 1);
    share
}

/// Whole numbers, also when they are written as floats (`2670507.0`), as measured files do.
fn whole(n: &serde_json::Number) -> Option<u64> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let float = || n.as_f64().filter(|f| f.fract() == 0.0 && (0.0..=EXACT).contains(f)).map(|f| f as u64);
    n.as_u64().or_else(float)
}

fn bad_load(place: &str, layer: usize, expert: usize, n: &serde_json::Number) -> DemandError {
    DemandError::BadLoad { place: place.into(), layer, expert, value: super::shorten(&n.to_string()) }
}

/// The parser's complaint, without its own "at line ..". `before` lines precede the text that was parsed.
pub(super) fn json_error(place: &str, e: &serde_json::Error, before: usize) -> DemandError {
    let text = e.to_string();
    let reason = text.rsplit_once(" at line ").map_or(text.as_str(), |(reason, _)| reason).to_owned();
    DemandError::Json { place: place.into(), line: before + e.line().max(1), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOADS: &str = r#"{"logical_count": [[0.0, 0.0, 0, 0], [3.0, 1, 2, 4.0], [1.5, 0, 0, 0]]}"#;

    fn read(layer: usize, ranks: u32) -> Result<Demand, DemandError> {
        let loads = ExpertLoads { layer, tokens: 3, top_k: 1, token_bytes: 10 };
        Demand::from_expert_loads(LOADS, "l.json", loads, ranks)
    }

    #[test]
    fn shares_are_by_largest_remainder_with_nothing_to_oneself() {
        let d = read(1, 2).unwrap();
        // Loads 4 and 6 of 10 share 3 copies: 1.2 and 1.8.
        assert_eq!((d.row(Rank(0)), d.row(Rank(1))), (&[0, 20][..], &[10, 0][..]));
        assert_eq!(d.unit_bytes(), 10);
    }

    #[test]
    fn each_mistake_is_named() {
        for (result, message) in [
            (read(0, 2), "l.json: layer 0 has no load"),
            (read(7, 2), "l.json: no layer 7: the file has layers 0 to 2"),
            (read(1, 3), "l.json: 4 experts do not divide over 3 ranks"),
            (read(2, 2), "l.json: layer 2, expert 0: 1.5 is not a whole number"),
        ] {
            let found = result.unwrap_err().to_string();
            assert!(found.starts_with(message), "{found}");
        }
        let cut = &LOADS[..40];
        let err =
            Demand::from_expert_loads(cut, "l.json", ExpertLoads::default(), 2).unwrap_err().to_string();
        assert!(err.starts_with("l.json:1: EOF while parsing"), "{err}");
    }
}
