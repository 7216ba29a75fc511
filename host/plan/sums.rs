//! A demand seen from above: what each server sends to each other server.

use super::random::SplitMix;
use super::{Demand, MAX_TOTAL_BYTES, PlanError};
use crate::topo::{Cluster, Rank, ServerId};

/// Server-to-server sums. The diagonal (scale-up traffic) is 0: it uses no NIC.
///
/// Sums of parts add up: each server can sum its own rows, exchange n numbers, and [`merge`](Self::merge) those of the
/// others.
#[derive(Clone, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct ServerSums {
    /// Number of servers.
    pub(super) n: usize,
    pub(super) unit_bytes: u64,
    /// Bytes, row-major.
    pub(super) bytes: Vec<u64>,
    /// Units, row-major: what is dealt out. The last unit of a cell may be short.
    pub(super) units: Vec<u64>,
    /// Changes when any cell changes.
    pub(super) digest: u64,
    /// Keys of columns in the digest.
    #[serde(skip)]
    columns: Columns,
}

/// Random keys, one per destination. A digest is a sum of hashes of cells by column, weighted by row, so that digests of
/// parts add up, and tokens that trade places do not go unseen.
#[derive(Clone, Debug, Default)]
struct Columns(Vec<u64>);

impl PartialEq for Columns {
    /// All the same: they follow from the number of ranks.
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Columns {}

impl Columns {
    fn at_least(&mut self, ranks: usize) -> &[u64] {
        let mut random = SplitMix(self.0.len() as u64);
        while self.0.len() < ranks {
            random.0 = self.0.len() as u64;
            self.0.push(random.next() | 1);
        }
        &self.0
    }
}

impl ServerSums {
    /// The sums of a whole matrix.
    ///
    /// # Errors
    /// [`PlanError::WrongSize`].
    pub fn of(cluster: &Cluster, demand: &Demand) -> Result<Self, PlanError> {
        let mut sums = Self::default();
        sums.read(cluster, demand)?;
        Ok(sums)
    }

    /// Sums of nothing, to be added to.
    pub fn zero(cluster: &Cluster, unit_bytes: u64) -> Self {
        let mut sums = Self::default();
        sums.reset(cluster, unit_bytes);
        sums
    }

    fn reset(&mut self, cluster: &Cluster, unit_bytes: u64) {
        let n = cluster.servers().len();
        (self.n, self.unit_bytes, self.digest) = (n, unit_bytes.max(1), 0);
        for sums in [&mut self.bytes, &mut self.units] {
            sums.clear();
            sums.resize(n * n, 0);
        }
    }

    /// Reads the whole matrix once.
    pub(super) fn read(&mut self, cluster: &Cluster, demand: &Demand) -> Result<(), PlanError> {
        if demand.ranks() != cluster.ranks() {
            let (demand_ranks, cluster_ranks) = (demand.ranks(), cluster.ranks());
            return Err(PlanError::WrongSize { demand_ranks, cluster_ranks });
        }
        self.reset(cluster, demand.unit_bytes());
        for s in 0..self.n {
            for src in cluster.ranks_of(ServerId(s as u32)) {
                self.add_to(cluster, s, src, demand.row(src));
            }
        }
        Ok(())
    }

    /// Adds what one rank sends, by destination.
    ///
    /// # Errors
    /// [`PlanError::NoRank`], and [`PlanError::WrongSize`] for a row that does not have one cell per rank.
    pub fn add_row(&mut self, cluster: &Cluster, src: Rank, row: &[u64]) -> Result<(), PlanError> {
        let cluster_ranks = cluster.ranks();
        if src.0 >= cluster_ranks {
            return Err(PlanError::NoRank { rank: src, ranks: cluster_ranks });
        }
        if row.len() != cluster_ranks as usize || self.n != cluster.servers().len() {
            return Err(PlanError::WrongSize { demand_ranks: row.len() as u32, cluster_ranks });
        }
        self.add_to(cluster, cluster.server_of(src).idx(), src, row);
        Ok(())
    }

    fn add_to(&mut self, cluster: &Cluster, s: usize, src: Rank, row: &[u64]) {
        let unit = self.unit_bytes;
        let hash = hash_row(row, self.columns.at_least(row.len()));
        self.digest = self.digest.wrapping_add(hash.wrapping_mul(row_weight(src.0)));
        let mut row = row;
        let line = s * self.n..(s + 1) * self.n;
        let sums = self.bytes[line.clone()].iter_mut().zip(&mut self.units[line]);
        for (t, (server, (sum, units))) in cluster.servers().iter().zip(sums).enumerate() {
            let (cells, rest) = row.split_at(server.gpus as usize);
            row = rest;
            if s != t {
                let bytes = add_cells(cells);
                *sum = sum.wrapping_add(bytes);
                let more = if unit == 1 { bytes } else { cells.iter().map(|c| c.div_ceil(unit)).sum() };
                *units = units.wrapping_add(more);
            }
        }
    }

    /// Adds the sums of other rows.
    ///
    /// # Errors
    /// [`PlanError::WrongSize`] for sums of another cluster.
    pub fn merge(&mut self, other: &Self) -> Result<(), PlanError> {
        if self.unit_bytes != other.unit_bytes || !other.is_of(self.n) {
            return Err(PlanError::WrongSize { demand_ranks: other.n as u32, cluster_ranks: self.n as u32 });
        }
        let add = |a: &mut [u64], b: &[u64]| a.iter_mut().zip(b).for_each(|(a, b)| *a = a.wrapping_add(*b));
        add(&mut self.bytes, &other.bytes);
        add(&mut self.units, &other.units);
        self.digest = self.digest.wrapping_add(other.digest);
        Ok(())
    }

    /// Whether these are sums of so many servers; sums from outside may say anything.
    pub(super) fn is_of(&self, servers: usize) -> bool {
        let pairs = servers * servers;
        self.n == servers && self.bytes.len() == pairs && self.units.len() == pairs && self.unit_bytes > 0
    }

    /// Bytes and units from one server to another.
    pub(super) fn pair(&self, src: ServerId, dst: ServerId) -> (u64, u64) {
        let pair = src.idx() * self.n + dst.idx();
        (self.bytes[pair], self.units[pair])
    }

    /// Whether all servers together send no more than a demand may hold.
    pub(super) fn fits(&self) -> bool {
        let fits = |sums: &[u64]| sums.iter().map(|&b| u128::from(b)).sum::<u128>() <= MAX_TOTAL_BYTES.into();
        fits(&self.bytes) && fits(&self.units)
    }

    /// Bytes and peers of a server's sends.
    pub(super) fn sent_by(&self, s: usize) -> (u64, u64) {
        total(self.bytes[s * self.n..(s + 1) * self.n].iter())
    }

    /// Bytes and peers of a server's receives.
    pub(super) fn received_by(&self, t: usize) -> (u64, u64) {
        total(self.bytes.iter().skip(t).step_by(self.n.max(1)))
    }
}

/// The sum of some cells. Eight at a time: every cell of a demand passes here.
#[inline]
fn add_cells(cells: &[u64]) -> u64 {
    let (eights, rest) = cells.as_chunks::<8>();
    let eights = eights.iter().fold(0u64, |sum, c| {
        let pairs = [
            c[0].wrapping_add(c[4]),
            c[1].wrapping_add(c[5]),
            c[2].wrapping_add(c[6]),
            c[3].wrapping_add(c[7]),
        ];
        sum.wrapping_add(pairs.iter().fold(0, |sum, pair| sum.wrapping_add(*pair)))
    });
    rest.iter().fold(eights, |sum, cell| sum.wrapping_add(*cell))
}

fn hash_row(cells: &[u64], keys: &[u64]) -> u64 {
    cells.iter().zip(keys).fold(0u64, |sum, (cell, key)| sum.wrapping_add(hash_cell(*cell, *key)))
}

/// NH (Black et al., UMAC, 1999): two cells trade units unseen once in 2^32 times.
#[inline]
fn hash_cell(cell: u64, key: u64) -> u64 {
    let low = (cell as u32).wrapping_add(key as u32);
    let high = ((cell >> 32) as u32).wrapping_add((key >> 32) as u32);
    u64::from(low) * u64::from(high)
}

fn total<'a>(line: impl Iterator<Item = &'a u64>) -> (u64, u64) {
    line.fold((0, 0), |(sum, peers): (u64, u64), &bytes| {
        (sum.saturating_add(bytes), peers + u64::from(bytes > 0))
    })
}

fn row_weight(src: u32) -> u64 {
    SplitMix(u64::MAX - u64::from(src)).next() | 1
}
