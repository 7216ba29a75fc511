//! Where the planner reads cells from: a whole matrix, or the part of it that one server knows.

use super::{Demand, DemandError, MAX_TOTAL_BYTES, ServerSums};
use crate::topo::{Cluster, Rank, ServerId};

/// Rows of cells.
pub(super) trait Cells {
    /// Bytes that are never split.
    fn unit_bytes(&self) -> u64;

    /// Bytes from a rank to each rank of a server.
    fn cells(&self, cluster: &Cluster, src: Rank, dst: ServerId) -> &[u64];
}

impl Cells for Demand {
    fn unit_bytes(&self) -> u64 {
        Demand::unit_bytes(self)
    }

    #[inline]
    fn cells(&self, cluster: &Cluster, src: Rank, dst: ServerId) -> &[u64] {
        let first = cluster.first_rank(dst).idx();
        &self.row(src)[first..first + cluster.server(dst).gpus as usize]
    }
}

/// What one server needs to know of a demand: what its ranks send, what they receive, and the sums of everything.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LocalDemand {
    server: ServerId,
    ranks: u32,
    local_ranks: u32,
    first_rank: u32,
    sums: ServerSums,
    rows: Vec<u64>,
    columns: Vec<u64>,
}

impl LocalDemand {
    /// A server's part. `rows`: what its ranks send, one row per local rank, one cell per rank. `columns`: what they
    /// receive, one row per rank, one cell per local rank.
    ///
    /// # Errors
    /// [`DemandError`] when the parts have other shapes, contradict the sums, or the total passes 2^63 - 1.
    pub fn new(
        cluster: &Cluster,
        server: ServerId,
        sums: ServerSums,
        rows: Vec<u64>,
        columns: Vec<u64>,
    ) -> Result<Self, DemandError> {
        let (ranks, local_ranks) = (cluster.ranks(), cluster.server(server).gpus);
        let place = || format!("{server}'s part of the demand");
        let shape = ranks as usize * local_ranks as usize;
        let servers = cluster.servers().len();
        if rows.len() != shape || columns.len() != shape || !sums.is_of(servers) {
            return Err(DemandError::Shape { place: place(), ranks, cells: rows.len().max(columns.len()) });
        }
        let total = |cells: &[u64]| cells.iter().map(|&c| u128::from(c)).sum::<u128>();
        if !sums.fits() || total(&rows).max(total(&columns)) > MAX_TOTAL_BYTES.into() {
            return Err(DemandError::TotalTooLarge { place: place() });
        }
        let first_rank = cluster.first_rank(server).0;
        let part = Self { server, ranks, local_ranks, first_rank, sums, rows, columns };
        match (0..servers as u32).map(ServerId).find(|&peer| !part.agrees(cluster, peer)) {
            Some(peer) => Err(DemandError::SumsDiffer { place: place(), server, peer }),
            None => Ok(part),
        }
    }

    /// The part of a server, cut out of a whole matrix.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn cut(cluster: &Cluster, server: ServerId, demand: &Demand) -> Result<Self, DemandError> {
        let sums = ServerSums::of(cluster, demand).map_err(|_| DemandError::Shape {
            place: "the demand".into(),
            ranks: cluster.ranks(),
            cells: demand.ranks() as usize * demand.ranks() as usize,
        })?;
        let rows = cluster.ranks_of(server).flat_map(|src| demand.row(src).iter().copied()).collect();
        let all = (0..cluster.ranks()).map(Rank);
        let columns = all.flat_map(|src| demand.cells(cluster, src, server).iter().copied()).collect();
        Self::new(cluster, server, sums, rows, columns)
    }

    /// The server it is for.
    pub fn server(&self) -> ServerId {
        self.server
    }

    /// Number of ranks of the job.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// The sums of the whole demand.
    pub fn sums(&self) -> &ServerSums {
        &self.sums
    }

    fn agrees(&self, cluster: &Cluster, peer: ServerId) -> bool {
        if peer == self.server {
            return cluster.ranks_of(peer).all(|src| {
                let columns =
                    &self.columns[src.idx() * self.local_ranks as usize..][..self.local_ranks as usize];
                self.cells(cluster, src, peer) == columns
            });
        }
        [(self.server, peer), (peer, self.server)].into_iter().all(|(src, dst)| {
            let cells = || cluster.ranks_of(src).flat_map(|rank| self.cells(cluster, rank, dst));
            let units = cells().map(|c| c.div_ceil(self.sums.unit_bytes)).sum::<u64>();
            self.sums.pair(src, dst) == (cells().sum::<u64>(), units)
        })
    }
}

impl Cells for LocalDemand {
    fn unit_bytes(&self) -> u64 {
        self.sums.unit_bytes
    }

    /// Known only for cells from this server or to it.
    fn cells(&self, cluster: &Cluster, src: Rank, dst: ServerId) -> &[u64] {
        match src.0.checked_sub(self.first_rank).filter(|&row| row < self.local_ranks) {
            Some(row) => {
                let first = row as usize * self.ranks as usize + cluster.first_rank(dst).idx();
                &self.rows[first..first + cluster.server(dst).gpus as usize]
            }
            None => &self.columns[src.idx() * self.local_ranks as usize..][..self.local_ranks as usize],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topo::Server;

    fn cluster() -> Cluster {
        Cluster::new(vec![Server::new(2, &[1], 1), Server::new(1, &[1], 1)])
    }

    fn demand() -> Demand {
        Demand::new(3, vec![1, 2, 3, 4, 5, 6, 7, 8, 9], 2).expect("a square")
    }

    #[test]
    fn sums_of_rows_add_up_to_sums_of_the_whole() {
        let (cluster, demand) = (cluster(), demand());
        let mut sums = ServerSums::zero(&cluster, 2);
        for rank in [2, 0, 1].map(Rank) {
            let mut row = ServerSums::zero(&cluster, 2);
            row.add_row(&cluster, rank, demand.row(rank)).expect("a row of that length");
            sums.merge(&row).expect("the same cluster");
        }
        assert_eq!(Ok(&sums), ServerSums::of(&cluster, &demand).as_ref());
        assert_eq!(sums.pair(ServerId(0), ServerId(1)), (9, 2 + 3));
        assert!(sums.add_row(&cluster, Rank(3), &[0; 3]).is_err());
        assert!(sums.merge(&ServerSums::zero(&cluster, 1)).is_err());
    }

    #[test]
    fn parts_that_contradict_the_sums_are_refused() {
        let (cluster, demand) = (cluster(), demand());
        let whole = LocalDemand::cut(&cluster, ServerId(0), &demand).expect("a part");
        assert_eq!(whole.cells(&cluster, Rank(2), ServerId(0)), &[7, 8]);
        assert_eq!(whole.cells(&cluster, Rank(1), ServerId(1)), &[6]);
        for (rows, columns) in [(1, 0), (0, 1)] {
            let mut part = whole.clone();
            (part.rows[2], part.columns[4]) = (part.rows[2] + rows, part.columns[4] + columns);
            let again = LocalDemand::new(&cluster, ServerId(0), part.sums, part.rows, part.columns);
            assert!(matches!(again, Err(DemandError::SumsDiffer { peer: ServerId(1), .. })));
        }
    }
}
