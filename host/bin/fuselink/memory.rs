//! Whether what is asked fits the machine, before anything starts.

use anyhow::anyhow;

use crate::failure::Failure;

/// Refuses what needs more memory than is free. Where the system does not say what is free, everything passes.
pub fn check_fits(what: &str, bytes: u64) -> Result<(), Failure> {
    match available_bytes() {
        Some(free) if bytes > free => {
            let gib = |bytes: u64| bytes as f64 / f64::from(1u32 << 30);
            Err(Failure::Input(anyhow!(
                "{what} needs {:.1} GiB of memory, {:.1} are free",
                gib(bytes),
                gib(free)
            )))
        }
        _ => Ok(()),
    }
}

fn available_bytes() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
