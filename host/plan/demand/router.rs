//! Demands from router traces: JSON lines with the experts that each token of a rank was sent to.

use super::Demand;
use super::experts::json_error;
use crate::plan::DemandError;

/// Which records of a trace to take, and how its experts lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RouterTrace {
    /// Step; `None` = that of the first record that fits.
    pub step: Option<u64>,
    /// Layer; `None` = that of the first record that fits.
    pub layer: Option<u64>,
    /// Experts of the model; `None` = the highest seen, rounded up to a multiple of the ranks.
    pub experts: Option<u64>,
    /// Size of one copy of a token.
    pub token_bytes: u64,
}

impl Default for RouterTrace {
    fn default() -> Self {
        Self { step: None, layer: None, experts: None, token_bytes: 7168 }
    }
}

#[derive(serde::Deserialize)]
struct Record {
    step: u64,
    layer: u64,
    rank: u64,
    top_indices: Vec<Vec<Choice>>,
}

/// An expert, or none: -1 where a token was dropped.
#[derive(Clone, Copy, serde::Deserialize)]
#[serde(try_from = "i64")]
struct Choice(Option<u64>);

impl TryFrom<i64> for Choice {
    type Error = String;

    fn try_from(index: i64) -> Result<Self, String> {
        match index {
            -1 => Ok(Self(None)),
            _ => u64::try_from(index)
                .map(|expert| Self(Some(expert)))
                .map_err(|_| format!("expert {index}; experts are numbered from 0, and -1 is none")),
        }
    }
}

impl Record {
    fn experts(&self) -> impl Iterator<Item = u64> + '_ {
        self.top_indices.iter().flatten().filter_map(|choice| choice.0)
    }
}

impl Demand {
    /// Reads lines of `{"step", "layer", "rank", "top_indices": [tokens][top_k]}`. Experts stand in equal contiguous
    /// blocks on the ranks; every entry of `top_indices` is one copy of a token, -1 none; copies to oneself are not sent.
    /// Several records of one rank (micro-batches) add up. The unit is the token.
    ///
    /// # Errors
    /// [`DemandError`], with the line, for records that are not that, ranks or experts that do not exist, and when
    /// no record is of the step and layer.
    pub fn from_router_trace(
        jsonl: &str,
        place: &str,
        trace: RouterTrace,
        ranks: u32,
    ) -> Result<Self, DemandError> {
        let zero = |what| DemandError::Zero { place: place.into(), what };
        if ranks == 0 {
            return Err(zero("the number of ranks"));
        }
        let records = chosen(jsonl, place, trace)?;
        let seen = records.iter().flat_map(|(_, record)| record.experts()).max();
        let experts = match trace.experts {
            Some(n) if n == 0 || n % u64::from(ranks) != 0 => {
                return Err(DemandError::ExpertsDoNotDivide {
                    place: place.into(),
                    experts: n as usize,
                    ranks,
                });
            }
            Some(n) => n,
            None => seen
                .map_or(1, |m| m.saturating_add(1))
                .div_ceil(u64::from(ranks))
                .saturating_mul(ranks.into()),
        };
        let per_rank = experts / u64::from(ranks);
        let mut cells = vec![0u64; ranks as usize * ranks as usize];
        for (line, record) in &records {
            let (place, line) = (|| place.to_owned(), *line);
            if record.rank >= u64::from(ranks) {
                return Err(DemandError::NoRank { place: place(), line, rank: record.rank, ranks });
            }
            for expert in record.experts() {
                if expert >= experts {
                    return Err(DemandError::NoExpert { place: place(), line, expert, experts });
                }
                let dst = expert / per_rank;
                if dst != record.rank {
                    let cell = &mut cells[(record.rank * u64::from(ranks) + dst) as usize];
                    *cell = cell.saturating_add(trace.token_bytes);
                }
            }
        }
        Self::build(place, ranks, cells, trace.token_bytes)
    }
}

/// The records of one step and layer, with their lines.
fn chosen(jsonl: &str, place: &str, trace: RouterTrace) -> Result<Vec<(usize, Record)>, DemandError> {
    let (mut step, mut layer) = (trace.step, trace.layer);
    let mut records = Vec::new();
    for (index, line) in jsonl.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let record: Record = serde_json::from_str(line).map_err(|e| json_error(place, &e, index))?;
        if step.is_none_or(|s| s == record.step) && layer.is_none_or(|l| l == record.layer) {
            (step, layer) = (Some(record.step), Some(record.layer));
            records.push((index + 1, record));
        }
    }
    if records.is_empty() {
        let word = |n: Option<u64>| n.map_or("any".to_owned(), |n| n.to_string());
        return Err(DemandError::NoRecord { place: place.into(), step: word(step), layer: word(layer) });
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topo::Rank;

    const TRACE: &str = r#"{"step": 3, "layer": 1, "rank": 0, "top_indices": [[0, 2], [3, 1]]}

{"step": 3, "layer": 1, "rank": 1, "top_indices": [[0, 1]]}
{"step": 3, "layer": 2, "rank": 1, "top_indices": [[9, 9]]}
{"step": 3, "layer": 1, "rank": 1, "top_indices": [[0, 3]]}
"#;

    fn read(trace: RouterTrace) -> Result<Demand, DemandError> {
        Demand::from_router_trace(TRACE, "t.jsonl", trace, 2)
    }

    #[test]
    fn copies_are_counted_and_micro_batches_add_up() {
        let d = read(RouterTrace { token_bytes: 10, ..Default::default() }).unwrap();
        assert_eq!((d.row(Rank(0)), d.row(Rank(1))), (&[0, 20][..], &[30, 0][..]));
        let other = read(RouterTrace { layer: Some(2), ..Default::default() }).unwrap();
        assert_eq!(other.total_bytes(), 0);
    }

    #[test]
    fn dropped_tokens_are_not_sent() {
        let text = r#"{"step": 0, "layer": 0, "rank": 0, "top_indices": [[1, -1], [-1, -1]]}"#;
        let read = |text: &str| Demand::from_router_trace(text, "t.jsonl", RouterTrace::default(), 2);
        assert_eq!(read(text).unwrap().row(Rank(0)), &[0, 7168]);
        let err = read(&text.replace("[1,", "[-2,")).unwrap_err().to_string();
        assert!(err.starts_with("t.jsonl:1: expert -2; experts are numbered from 0"), "{err}");
    }

    #[test]
    fn each_mistake_is_named() {
        let base = RouterTrace::default();
        for (result, message) in [
            (read(RouterTrace { step: Some(4), ..base }), "t.jsonl: no record of step 4 and layer any"),
            (read(RouterTrace { experts: Some(3), ..base }), "t.jsonl: 3 experts do not divide over 2 ranks"),
            (read(RouterTrace { experts: Some(2), ..base }), "t.jsonl:1: expert 2, but there are 2 experts"),
            (
                Demand::from_router_trace(TRACE, "t.jsonl", base, 1),
                "t.jsonl:3: rank 1, but the cluster has 1 ranks",
            ),
            (Demand::from_router_trace("{}", "t.jsonl", base, 1), "t.jsonl:1: missing field `step`"),
        ] {
            let found = result.unwrap_err().to_string();
            assert!(found.starts_with(message), "{found}");
        }
    }
}
