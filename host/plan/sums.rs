//! A demand seen from above: what each server sends to each other server.

use super::{Demand, PlanError};
use crate::topo::{Cluster, ServerId};

/// Server-to-server sums. The diagonal (scale-up traffic) is 0: it uses no NIC.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Sums {
    /// Number of servers.
    pub n: usize,
    /// Bytes, row-major.
    pub bytes: Vec<u64>,
    /// Units, row-major: what is dealt out. The last unit of a cell may be short.
    pub units: Vec<u64>,
    /// Changes when any cell changes.
    pub digest: u64,
}

impl Sums {
    pub fn of(cluster: &Cluster, demand: &Demand) -> Result<Self, PlanError> {
        let mut sums = Self::default();
        sums.read(cluster, demand)?;
        Ok(sums)
    }

    /// Reads the whole matrix once.
    pub fn read(&mut self, cluster: &Cluster, demand: &Demand) -> Result<(), PlanError> {
        if demand.ranks() != cluster.ranks() {
            let (demand_ranks, cluster_ranks) = (demand.ranks(), cluster.ranks());
            return Err(PlanError::WrongSize { demand_ranks, cluster_ranks });
        }
        let n = cluster.servers().len();
        self.n = n;
        self.digest = 0;
        self.bytes.clear();
        self.bytes.resize(n * n, 0);
        self.units.clear();
        self.units.resize(n * n, 0);
        let unit = demand.unit_bytes();
        for s in 0..n {
            for src in cluster.ranks_of(ServerId(s as u32)) {
                let mut weight = row_weight(src.0);
                let mut row = demand.row(src);
                for (t, server) in cluster.servers().iter().enumerate() {
                    let (cells, rest) = row.split_at(server.gpus as usize);
                    row = rest;
                    let (bytes, digest) = sum_cells(cells, &mut weight);
                    self.digest = self.digest.wrapping_add(digest);
                    if s != t {
                        self.bytes[s * n + t] += bytes;
                        self.units[s * n + t] +=
                            if unit == 1 { bytes } else { cells.iter().map(|c| c.div_ceil(unit)).sum() };
                    }
                }
            }
        }
        Ok(())
    }

    /// Bytes and peers of a server's sends.
    pub fn sent_by(&self, s: usize) -> (u64, u64) {
        total(self.bytes[s * self.n..(s + 1) * self.n].iter())
    }

    /// Bytes and peers of a server's receives.
    pub fn received_by(&self, t: usize) -> (u64, u64) {
        total(self.bytes.iter().skip(t).step_by(self.n.max(1)))
    }
}

fn total<'a>(line: impl Iterator<Item = &'a u64>) -> (u64, u64) {
    line.fold((0, 0), |(sum, peers), &bytes| (sum + bytes, peers + u64::from(bytes > 0)))
}

/// Weights that differ per cell make the digest depend on where each byte count stands (multilinear hashing).
fn row_weight(src: u32) -> u64 {
    (u64::from(src) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

fn sum_cells(cells: &[u64], weight: &mut u64) -> (u64, u64) {
    cells.iter().fold((0, 0), |(sum, digest), &c| {
        *weight = weight.wrapping_add(0xd1b5_4a32_d192_ed02);
        (sum + c, u64::wrapping_add(digest, c.wrapping_mul(*weight)))
    })
}
