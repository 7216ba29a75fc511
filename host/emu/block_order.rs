//! Blocks of a grid in any order, for kernels that must be right with any.

/// In which order an emulated GPU takes the blocks of a grid. A kernel must be right with any.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub enum BlockOrder {
    /// From 0 on.
    #[default]
    Ascending,
    /// From the last one on.
    Descending,
    /// Shuffled, another way for each launch.
    Random {
        /// Same seed, same orders.
        seed: u64,
    },
}

impl BlockOrder {
    /// The `n`-th block to run, of `count`, in the `launch`-th launch: a bijection for each launch.
    pub(super) fn block(self, n: u32, count: u32, launch: u64) -> u32 {
        match self {
            Self::Ascending => n,
            Self::Descending => count - 1 - n,
            Self::Random { seed } => {
                // n -> factor * n + first, modulo count: a bijection, since the factor shares no divisor with count.
                let random = (seed ^ launch).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
                let (first, count) = (random >> 40, u64::from(count));
                let mut factor = 1 + random % count;
                while gcd(factor, count) != 1 {
                    factor += 1;
                }
                ((factor * u64::from(n) + first) % count) as u32
            }
        }
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_order_runs_every_block_once(seed in any::<u64>(), count in 1u32..40, launch in 0u64..10) {
            for order in [BlockOrder::Ascending, BlockOrder::Descending, BlockOrder::Random { seed }] {
                let mut blocks: Vec<_> = (0..count).map(|n| order.block(n, count, launch)).collect();
                blocks.sort();
                prop_assert_eq!(blocks, (0..count).collect::<Vec<_>>());
            }
        }
    }
}
