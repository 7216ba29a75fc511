//! What has to go where: a matrix of byte counts between ranks.

mod csv;
mod experts;
mod router;
mod synthetic;

pub use experts::ExpertLoads;
pub use router::RouterTrace;
pub use synthetic::SyntheticMoe;

use super::DemandError;
use crate::topo::Rank;

/// The largest total: anything larger is refused at construction, so that sums need no checks later.
pub const MAX_TOTAL_BYTES: u64 = i64::MAX as u64;

/// How many bytes every rank sends to every rank, itself included, in units that are never split.
///
/// A cell that is not a multiple of the unit ends in one shorter unit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Demand {
    ranks: u32,
    unit_bytes: u64,
    cells: Vec<u64>,
    total_bytes: u64,
}

impl Demand {
    /// A demand from its cells in row-major order (a row per source).
    ///
    /// # Errors
    /// [`DemandError`] when the cells do not make a square of `ranks`, add up to more than [`MAX_TOTAL_BYTES`], or
    /// the unit is 0.
    pub fn new(ranks: u32, cells: Vec<u64>, unit_bytes: u64) -> Result<Self, DemandError> {
        Self::build("the demand", ranks, cells, unit_bytes)
    }

    fn build(place: &str, ranks: u32, cells: Vec<u64>, unit_bytes: u64) -> Result<Self, DemandError> {
        let place = || place.to_owned();
        if ranks == 0 {
            return Err(DemandError::Empty { place: place() });
        }
        if Some(cells.len()) != (ranks as usize).checked_mul(ranks as usize) {
            return Err(DemandError::Shape { place: place(), ranks, cells: cells.len() });
        }
        if unit_bytes == 0 {
            return Err(DemandError::ZeroUnit { place: place() });
        }
        let total =
            cells.iter().try_fold(0u64, |sum, &c| sum.checked_add(c).filter(|&s| s <= MAX_TOTAL_BYTES));
        let total_bytes = total.ok_or_else(|| DemandError::TotalTooLarge { place: place() })?;
        Ok(Self { ranks, unit_bytes, cells, total_bytes })
    }

    /// The same bytes in other units.
    ///
    /// # Errors
    /// [`DemandError::ZeroUnit`].
    pub fn with_unit(self, unit_bytes: u64) -> Result<Self, DemandError> {
        if unit_bytes == 0 {
            return Err(DemandError::ZeroUnit { place: "the demand".into() });
        }
        Ok(Self { unit_bytes, ..self })
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Bytes that must stay together, such as a token.
    pub fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// Bytes from one rank to another.
    pub fn cell(&self, src: Rank, dst: Rank) -> u64 {
        self.row(src)[dst.idx()]
    }

    /// What one rank sends, by destination.
    pub fn row(&self, src: Rank) -> &[u64] {
        &self.cells[src.idx() * self.ranks as usize..][..self.ranks as usize]
    }

    /// The whole matrix, the diagonal included.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// The matrix as CSV, as [`Demand::from_csv`] reads it.
    pub fn to_csv(&self) -> String {
        let row = |r: &[u64]| r.iter().map(u64::to_string).collect::<Vec<_>>().join(",") + "\n";
        self.cells.chunks(self.ranks as usize).map(row).collect()
    }
}

/// Text from outside, fit for one line of an error message.
fn shorten(text: &str) -> String {
    const CHARS: usize = 24;
    let mut short: String = text.chars().take(CHARS).collect();
    if text.chars().nth(CHARS).is_some() {
        short.push_str("...");
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_past_2_63_are_refused() {
        let half = 1u64 << 62;
        assert!(Demand::new(2, vec![half, half - 1, 0, 0], 1).is_ok());
        let err = Demand::new(2, vec![half, half, 0, 0], 1).unwrap_err();
        assert!(matches!(err, DemandError::TotalTooLarge { .. }));
        assert!(matches!(Demand::new(1, vec![u64::MAX], 1), Err(DemandError::TotalTooLarge { .. })));
    }

    #[test]
    fn shape_and_unit_are_checked() {
        assert!(matches!(Demand::new(2, vec![0; 3], 1), Err(DemandError::Shape { cells: 3, .. })));
        assert!(matches!(Demand::new(0, vec![], 1), Err(DemandError::Empty { .. })));
        assert!(matches!(Demand::new(1, vec![0], 0), Err(DemandError::ZeroUnit { .. })));
    }
}
