//! What an experiment found, for people and for programs: rows as JSON, tables of text, one chart.

use std::fmt::Write;

use serde::Serialize;
use serde_json::{Value, json};

/// What an experiment found.
#[derive(Clone, PartialEq, Debug)]
pub struct Outcome {
    /// Its name.
    pub experiment: &'static str,
    /// What was taken for granted.
    pub assumptions: Vec<String>,
    /// What the papers report of it.
    pub paper: Vec<String>,
    /// Its rows, an object each.
    pub rows: Vec<Value>,
    /// The same for people.
    pub tables: Vec<Table>,
    /// The same as a picture.
    pub chart: Chart,
}

impl Outcome {
    /// One object of format "fuselink-sim-1", on a line.
    pub fn to_json(&self) -> String {
        let object = json!({
            "format": "fuselink-sim-1",
            "experiment": self.experiment,
            "assumptions": self.assumptions,
            "paper": self.paper,
            "rows": self.rows,
        });
        format!("{object}\n")
    }

    /// What was assumed, what the papers report, and the tables.
    pub fn to_text(&self) -> String {
        let mut out = format!(
            "# fuselink sim {}: the engine in virtual time, links modelled. Assumed:\n",
            self.experiment
        );
        // Writing to a string cannot fail.
        for assumption in &self.assumptions {
            let _ = writeln!(out, "#   {assumption}");
        }
        for paper in &self.paper {
            let _ = writeln!(out, "# Paper: {paper}");
        }
        out.push('\n');
        self.tables.iter().for_each(|table| out += &table.to_text());
        out
    }
}

/// Rows as JSON objects.
pub(super) fn values<R: Serialize>(rows: &[R]) -> Vec<Value> {
    rows.iter().filter_map(|r| serde_json::to_value(r).ok()).collect()
}

/// A table of text.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Table {
    /// Said above it; may be empty.
    pub title: String,
    /// Name and unit of each column.
    pub head: Vec<[&'static str; 2]>,
    /// Cells, row by row.
    pub rows: Vec<Vec<String>>,
}

/// One column: its name, its unit, and the cell of a row.
pub(super) type Column<R> = (&'static str, &'static str, fn(&R) -> String);

impl Table {
    /// A table of rows.
    pub(super) fn of<'a, R: 'a>(
        title: &str,
        rows: impl IntoIterator<Item = &'a R>,
        columns: &[Column<R>],
    ) -> Self {
        let cells = |row: &R| columns.iter().map(|(.., cell)| cell(row)).collect();
        Self {
            title: title.into(),
            head: columns.iter().map(|&(name, unit, _)| [name, unit]).collect(),
            rows: rows.into_iter().map(cells).collect(),
        }
    }

    /// The table as text: names left, numbers right.
    pub fn to_text(&self) -> String {
        let width = |k: usize| {
            let cells = self.rows.iter().map(|r| r[k].len());
            cells.chain(self.head[k].map(str::len)).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.head.len()).map(width).collect();
        let mut out = String::new();
        if !self.title.is_empty() {
            out += &format!("{}\n", self.title);
        }
        for line in 0..2 {
            let words: Vec<String> = self.head.iter().map(|h| h[line].to_owned()).collect();
            out += &self.line(&widths, &words);
        }
        for row in &self.rows {
            out += &self.line(&widths, row);
        }
        out
    }

    fn line(&self, widths: &[usize], cells: &[String]) -> String {
        let cell = |(k, (w, text)): (usize, (&usize, &String))| match k == 0 {
            true => format!("{text:<w$}"),
            false => format!("  {text:>w$}"),
        };
        let line: String = widths.iter().zip(cells).enumerate().map(cell).collect();
        format!("{}\n", line.trim_end())
    }
}

/// A chart: lines over a numeric axis, or bars by name.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Chart {
    /// Above it.
    pub title: String,
    /// Under the horizontal axis.
    pub x: &'static str,
    /// Beside the vertical axis.
    pub y: &'static str,
    /// What is drawn.
    pub series: Vec<Series>,
    /// Horizontal places are powers, not steps.
    pub log_x: bool,
}

/// One line, or the bars of one colour.
#[derive(Clone, PartialEq, Debug)]
pub struct Series {
    /// In the legend.
    pub name: String,
    /// Where.
    pub points: Points,
}

/// The points of a series.
#[derive(Clone, PartialEq, Debug)]
pub enum Points {
    /// A line over numbers.
    Line(Vec<(f64, f64)>),
    /// Bars over names.
    Bars(Vec<(String, f64)>),
}

impl Series {
    pub(super) fn line(name: &str, points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        Self { name: name.into(), points: Points::Line(points.into_iter().collect()) }
    }

    pub(super) fn bars(name: &str, points: impl IntoIterator<Item = (String, f64)>) -> Self {
        Self { name: name.into(), points: Points::Bars(points.into_iter().collect()) }
    }
}

/// A number that a paper may not have.
pub(super) fn or_dash(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".into(), |v| format!("{v:.digits$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_left_and_numbers_right() {
        let rows = [("static", 1.0), ("fast", 10.25)];
        let columns: [Column<(&str, f64)>; 2] =
            [("method", "", |r| r.0.into()), ("time", "(us)", |r| format!("{:.1}", r.1))];
        let table = Table::of("t", &rows, &columns);
        assert_eq!(table.to_text(), "t\nmethod  time\n        (us)\nstatic   1.0\nfast    10.2\n");
    }
}
