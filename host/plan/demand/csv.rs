//! Demands as CSV: one row per source rank, one column per destination rank, bytes; '#' starts a comment.

use super::{Demand, shorten};
use crate::plan::DemandError;

impl Demand {
    /// Reads a matrix of byte counts. `place` names the text in messages.
    ///
    /// # Errors
    /// [`DemandError`], with the line, for anything but a square of whole numbers below 2^63.
    pub fn from_csv(text: &str, place: &str, unit_bytes: u64) -> Result<Self, DemandError> {
        let mut cells = Vec::new();
        let mut rows = Vec::new();
        for (index, line) in text.trim_start_matches('\u{feff}').lines().enumerate() {
            let numbers = line.split('#').next().unwrap_or("").trim();
            if !numbers.is_empty() {
                let before = cells.len();
                read_row(numbers, place, index + 1, &mut cells)?;
                rows.push((index + 1, cells.len() - before));
            }
        }
        if let Some(&(line, found)) = rows.iter().find(|(_, found)| *found != rows.len()) {
            return Err(DemandError::NotSquare { place: place.into(), line, found, rows: rows.len() });
        }
        Self::build(place, rows.len() as u32, cells, unit_bytes)
    }
}

fn read_row(numbers: &str, place: &str, line: usize, cells: &mut Vec<u64>) -> Result<(), DemandError> {
    for (index, field) in numbers.split(',').enumerate() {
        let (place, column, text) = (|| place.to_owned(), index + 1, || shorten(field.trim()));
        let digits = field.trim();
        let magnitude = digits.strip_prefix(['-', '+']).unwrap_or(digits);
        if magnitude.is_empty() || !magnitude.bytes().all(|b| b.is_ascii_digit()) {
            return Err(DemandError::NotANumber { place: place(), line, column, text: text() });
        }
        if digits.starts_with('-') && magnitude.bytes().any(|b| b != b'0') {
            return Err(DemandError::Negative { place: place(), line, column, text: text() });
        }
        match magnitude.parse::<i64>() {
            Ok(bytes) => cells.push(bytes as u64),
            Err(_) => return Err(DemandError::TooLarge { place: place(), line, column, text: text() }),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topo::Rank;

    fn read(text: &str) -> Result<Demand, DemandError> {
        Demand::from_csv(text, "d.csv", 1)
    }

    #[test]
    fn comments_blank_lines_and_spaces_are_skipped() {
        let d = read("# kind\r\n\r\n 1 , 2 # row 0\n3,9223372036854775801\n").unwrap();
        assert_eq!((d.ranks(), d.cell(Rank(0), Rank(1)), d.total_bytes()), (2, 2, i64::MAX as u64));
        assert_eq!(read(&d.to_csv()).unwrap(), d);
    }

    #[test]
    fn each_mistake_is_named_with_its_line() {
        for (text, message) in [
            ("", "d.csv: no numbers in it"),
            ("# only\n", "d.csv: no numbers in it"),
            ("1,2\n3\n", "d.csv:2: 1 numbers in this row, but there are 2 rows"),
            ("1,2\n", "d.csv:1: 2 numbers in this row, but there are 1 rows"),
            ("1,2\n3,x\n", "d.csv:2: \"x\" (column 2) is not a whole number"),
            ("1,2\n3,\n", "d.csv:2: \"\" (column 2) is not a whole number"),
            ("1.5", "d.csv:1: \"1.5\" (column 1) is not"),
            ("-4", "d.csv:1: -4 (column 1) is negative"),
            ("9223372036854775808", "d.csv:1: 9223372036854775808 (column 1) is above"),
            (
                "99999999999999999999999999999999999",
                "d.csv:1: 999999999999999999999999... (column 1) is above",
            ),
            ("9223372036854775807,1\n0,0", "d.csv: the cells add up"),
        ] {
            let message_found = read(text).unwrap_err().to_string();
            assert!(message_found.starts_with(message), "{message_found}");
            assert!(!message_found.contains('\n'));
        }
    }
}
