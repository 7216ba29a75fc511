//! How fast an emulated cluster may run on this host.

use std::time::{Duration, Instant};

/// What a byte on the wire costs the host, in plain copies of a byte, so that it is about half busy. Most of it is not
/// copying but waking threads: found by running all-to-alls of 16 ranks on two cores at several scales.
const COPIES_PER_BYTE: f64 = 90.0;

/// Bytes per second that one core of this host copies: the best of a few short samples, since others may be at work.
pub fn copy_byte_per_s() -> f64 {
    const BLOCK: usize = 8 << 20;
    let src = vec![1u8; BLOCK];
    let mut dst = vec![0u8; BLOCK];
    dst.copy_from_slice(&src);
    let mut best = 0.0f64;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(60) {
        let sample = Instant::now();
        dst.copy_from_slice(std::hint::black_box(&src));
        std::hint::black_box(&mut dst);
        best = best.max(BLOCK as f64 / sample.elapsed().as_secs_f64());
    }
    best
}

/// A NIC faster than this is paced by how fast the host's threads answer each other, and not by its rate.
const NIC_BYTE_PER_S: f64 = 100e6;

/// The scale (modelled rate / emulated rate) at which this host can carry NICs of these modelled rates in bytes per
/// second, each direction counted once. Rounded up to 1, 2 or 5 times a power of ten; at least 1.
pub fn choose_scale(modelled_nic_byte_per_s: &[f64], cores: f64, core_byte_per_s: f64) -> u64 {
    let carried = cores * core_byte_per_s / COPIES_PER_BYTE;
    let fastest = modelled_nic_byte_per_s.iter().copied().fold(0.0, f64::max);
    let all: f64 = modelled_nic_byte_per_s.iter().sum();
    round_up_125((all / carried).max(fastest / NIC_BYTE_PER_S))
}

fn round_up_125(x: f64) -> u64 {
    let mut power = 1u64;
    loop {
        for step in [1, 2, 5] {
            if (power * step) as f64 >= x {
                return power * step;
            }
        }
        power = power.saturating_mul(10);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_round() {
        assert_eq!(round_up_125(0.2), 1);
        assert_eq!(round_up_125(1.5), 2);
        assert_eq!(round_up_125(501.0), 1000);
        // 16 NICs of 50 GB/s on two cores that copy 24 GB/s each.
        assert_eq!(choose_scale(&[50e9; 16], 2.0, 24e9), 2000);
        assert_eq!(choose_scale(&[50e9; 2], 64.0, 24e9), 500, "a large host does not outrun its own threads");
        assert_eq!(choose_scale(&[], 2.0, 24e9), 1);
    }
}
