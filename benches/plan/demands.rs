//! Demands by kind and seed: the same everywhere, since the generator is this file's own.

use fuselink::plan::Demand;
use fuselink::topo::{Cluster, Rank};

/// How bytes are spread over pairs of ranks. The diagonal is 0.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Kind {
    /// Every pair the same.
    Uniform,
    /// Every pair the same but for up to 4 kB.
    Tail,
    /// Every pair anything up to twice the mean.
    Random,
    /// Every pair by rank-frequency over 1024 places, with this exponent.
    Zipf(f64),
    /// This part of everything goes to the last rank.
    Hot(f64),
    /// Pairs of servers by rank-frequency with this exponent, and ranks within by up to half.
    Server(f64),
    /// A pair is there with this probability.
    Sparse(f64),
    /// From the first rank to the last.
    One,
}

impl Kind {
    /// Those that planners are judged by, with what `ordered` may take over the floor on average (64 GPUs, 320).
    pub const JUDGED: [(Self, [f64; 2]); 6] = [
        (Self::Zipf(0.8), [1.02, 1.03]),
        (Self::Random, [1.02, 1.03]),
        (Self::Tail, [1.02, 1.03]),
        (Self::Server(1.2), [1.005, 1.005]),
        (Self::Hot(0.3), [1.005, 1.005]),
        (Self::Uniform, [1.005, 1.005]),
    ];

    /// All.
    pub const ALL: [Self; 8] = [
        Self::Uniform,
        Self::Tail,
        Self::Random,
        Self::Zipf(0.8),
        Self::Hot(0.3),
        Self::Server(1.2),
        Self::Sparse(0.2),
        Self::One,
    ];

    /// Its name in figures.
    pub fn name(self) -> String {
        match self {
            Self::Uniform => "uniform".into(),
            Self::Tail => "tail".into(),
            Self::Random => "random".into(),
            Self::Zipf(f) => format!("zipf:{f}"),
            Self::Hot(f) => format!("hot:{f}"),
            Self::Server(f) => format!("server:{f}"),
            Self::Sparse(f) => format!("sparse:{f}"),
            Self::One => "one".into(),
        }
    }

    /// A demand in which a GPU sends so many bytes on average.
    pub fn demand(self, cluster: &Cluster, gpu_bytes: f64, seed: u64) -> Demand {
        let ranks = cluster.ranks();
        let mut random = Random(seed);
        let servers = self.servers(cluster.servers().len(), &mut random);
        let home = |rank| cluster.server_of(Rank(rank)).idx() as u32;
        let pairs = (0..ranks).flat_map(|src| (0..ranks).map(move |dst| (src, dst)));
        let weights: Vec<f64> = pairs
            .map(|(src, dst)| match self {
                _ if src == dst => 0.0,
                Self::Uniform | Self::Tail => 1.0,
                Self::Random => random.real(),
                Self::Zipf(f) => (1.0 + random.below(1024) as f64).powf(-f),
                Self::Hot(f) if dst == ranks - 1 => f * f64::from(ranks),
                Self::Hot(f) => 1.0 - f,
                Self::Server(_) => {
                    servers[(home(src) * cluster.server_count() + home(dst)) as usize] * (0.5 + random.real())
                }
                Self::Sparse(p) => {
                    let there = random.real() < p;
                    random.real() * f64::from(u8::from(there))
                }
                Self::One => f64::from(u8::from((src, dst) == (0, ranks - 1))),
            })
            .collect();
        let sum: f64 = weights.iter().sum();
        let scale = gpu_bytes * f64::from(ranks) / if sum > 0.0 { sum } else { 1.0 };
        let remainder = |weight: f64, random: &mut Random| match self {
            Self::Tail if weight > 0.0 => random.below(4096),
            _ => 0,
        };
        let cells = weights.iter().map(|&w| (w * scale) as u64 + remainder(w, &mut random)).collect();
        Demand::new(ranks, cells, 1).expect("a square of cells that add up to less than 2^63")
    }

    /// Weights of pairs of servers: places in a random order.
    fn servers(self, n: usize, random: &mut Random) -> Vec<f64> {
        let Self::Server(f) = self else { return Vec::new() };
        let mut places: Vec<usize> = (0..n * n).collect();
        for last in (1..places.len()).rev() {
            places.swap(last, random.below(last as u64 + 1) as usize);
        }
        places.into_iter().map(|place| (1.0 + place as f64).powf(-f)).collect()
    }
}

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to 1.
    pub fn real(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Less than `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }
}
