//! Whether the host could carry an emulated run: emulated times mean something only while its cores have time to spare.

use std::fs;

/// Processor time of the whole machine, in clock ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CpuTime {
    busy: u64,
    idle: u64,
}

/// A run that keeps the machine busier than this was limited by it and not by the pace of its links.
pub const LIMITED_ABOVE: f64 = 0.92;

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

    /// Part of the machine that was busy between two readings; `None` when no tick passed.
    pub fn busy_since(self, before: Self) -> Option<f64> {
        let (busy, idle) = (self.busy.saturating_sub(before.busy), self.idle.saturating_sub(before.idle));
        (busy + idle > 0).then(|| busy as f64 / (busy + idle) as f64)
    }
}

/// Bytes of memory that a run may still take; `None` where it cannot be read.
pub fn available_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_was_busy() {
        let before = CpuTime::parse("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2 3\n").unwrap();
        let after = CpuTime::parse("cpu  150 0 75 825 50 0 0 0 9 9\n").unwrap();
        assert_eq!(after.busy_since(before), Some(0.75));
        assert_eq!(before.busy_since(before), None);
        assert_eq!(CpuTime::parse("intr 5"), None);
    }
}
