//! Planning time against growth, next to a plain pass that reads the matrix once and writes the same table once; plans
//! from the last one on; and what plans take against what no plan can beat. JSON lines.
//!
//! `cargo bench --bench plan` does it all. `cargo bench --bench plan -- speed 64 auto` only times that method at that many
//! GPUs; the other parts are `drift`, `quality`, `exact` and `clusters`.

mod demands;
#[path = "../machine/mod.rs"]
mod machine;
mod quality;
mod speed;

use fuselink::plan::Method;
use fuselink::topo::{Cluster, Server};

/// GPUs of a server.
const GPUS: u32 = 8;
/// A part of this bench.
type Part = fn(&Asked);

const PARTS: [(&str, Part); 5] = [
    ("speed", speed::speed),
    ("drift", speed::drift),
    ("quality", quality::quality),
    ("exact", quality::exact),
    ("clusters", quality::clusters),
];

/// What the command line asks for.
pub struct Asked {
    gpus: Vec<u32>,
    methods: Vec<Method>,
    machine: String,
}

impl Asked {
    /// The sizes, in servers, that were asked for of those there are.
    fn servers<const N: usize>(&self, all: [u32; N]) -> impl Iterator<Item = u32> {
        all.into_iter().filter(|servers| self.gpus.is_empty() || self.gpus.contains(&(servers * GPUS)))
    }

    fn methods(&self, usual: &[Method]) -> Vec<Method> {
        if self.methods.is_empty() { usual.to_vec() } else { self.methods.clone() }
    }
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let asked = Asked {
        gpus: words.iter().filter_map(|w| w.parse().ok()).collect(),
        methods: words.iter().filter_map(|w| w.parse().ok()).collect(),
        machine: machine::name(),
    };
    let named = |part: &str| words.iter().any(|w| w == part);
    let all = !PARTS.iter().any(|(name, _)| named(name));
    PARTS.iter().filter(|(name, _)| all || named(name)).for_each(|(_, run)| run(&asked));
}

/// Servers of 8 GPUs and 8 NICs of 400 Gbit/s.
fn usual(servers: u32) -> Cluster {
    Cluster::uniform(servers, Server::new(GPUS, &[400_000; 8], 450_000))
}
