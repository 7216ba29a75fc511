//! Whether the host could carry an emulated run: emulated times mean something only while its cores have time to spare.

use std::fs;

/// Processor time of the whole machine, in clock ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CpuTime {
    busy: u64,
    idle: u64,
}

/// A run that keeps the machine busier than this was limited by it and not by the pace of its links.
pub const LIMITED_ABOVE: f64 = 0.92;
/// Runs whose bound is shorter than this are ruled by how fast the host's threads answer each other.
pub const SHORTEST_MS: f64 = 10.0;

impl CpuTime {
    /// Reads `/proc/stat`; `None` where it cannot be read.
    pub fn now() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// The line of all processors: user, nice, system, idle, iowait, irq, softirq, steal. Stolen time is not ours.
    fn parse(text: &str) -> Option<Self> {
        let mut fields = text.lines().next()?.split_ascii_whitespace();
        if fields.next()? != "cpu" {
            return None;
        }
        let ticks: Vec<u64> = fields.map_while(|f| f.parse().ok()).collect();
        let idle = ticks.get(3)? + ticks.get(4).unwrap_or(&0);
        Some(Self { busy: ticks.iter().take(8).sum::<u64>() - idle, idle })
    }

    /// What passed since an earlier reading.
    pub fn since(self, before: Self) -> Self {
        Self { busy: self.busy.saturating_sub(before.busy), idle: self.idle.saturating_sub(before.idle) }
    }

    /// Both together.
    pub fn plus(self, other: Self) -> Self {
        Self { busy: self.busy + other.busy, idle: self.idle + other.idle }
    }

    /// The part that was busy; `None` when too few ticks passed to tell.
    pub fn busy_fraction(self) -> Option<f64> {
        let ticks = self.busy + self.idle;
        (ticks >= FEWEST_TICKS).then(|| self.busy as f64 / ticks as f64)
    }
}

/// Fewer ticks than this say nothing: a tick is 10 ms of one core.
const FEWEST_TICKS: u64 = 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_was_busy() {
        let before = CpuTime::parse("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2 3\n").unwrap();
        let after = CpuTime::parse("cpu  150 0 75 825 50 0 0 0 9 9\n").unwrap();
        assert_eq!(after.since(before).busy_fraction(), Some(0.75));
        assert_eq!(before.since(before).busy_fraction(), None);
        assert_eq!(after.since(before).plus(after.since(before)), CpuTime { busy: 150, idle: 50 });
        assert_eq!(CpuTime::parse("intr 5"), None);
    }
}
