//! What a job runs on: servers, their GPUs and NICs, and which GPU is beside which NIC.

use super::{GpuIdx, NicId, NicIdx, Rank, ServerId};

/// A NIC: its rate and the GPU whose memory it reaches without crossing another GPU's link.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct NicSpec {
    /// Line rate per direction; 0 = the NIC is down.
    pub mbit_per_s: u64,
    /// The GPU beside it, whose rank owns it.
    pub relay_gpu: GpuIdx,
}

/// One server.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct Server {
    /// GPUs, one rank each.
    pub gpus: u32,
    /// NICs in the order of their index.
    pub nics: Vec<NicSpec>,
    /// Scale-up (NVLink) rate of one GPU per direction.
    pub scaleup_mbyte_per_s: u64,
}

impl Server {
    /// A server whose NICs are dealt out evenly over its GPUs.
    ///
    /// With fewer NICs than GPUs, NIC `k` of `K` is beside GPU `k * G / K`; with more, neighbours share a GPU.
    pub fn new(gpus: u32, nic_mbit_per_s: &[u64], scaleup_mbyte_per_s: u64) -> Self {
        let nics = nic_mbit_per_s.len() as u64;
        let beside = |k: usize| GpuIdx((k as u64 * u64::from(gpus) / nics) as u32);
        let nics = nic_mbit_per_s
            .iter()
            .enumerate()
            .map(|(k, &mbit_per_s)| NicSpec { mbit_per_s, relay_gpu: beside(k) })
            .collect();
        Self { gpus, nics, scaleup_mbyte_per_s }
    }

    /// The NIC that carries a GPU's traffic when nobody chooses: the nearest that is up, its own first.
    ///
    /// A GPU without a NIC of its own uses the one dealt to its neighbours (GPU `g` of `G`: NIC `g * K / G`).
    /// `None` when every NIC is down.
    pub fn direct_nic(&self, gpu: GpuIdx) -> Option<NicIdx> {
        let home = self.home_nic(gpu)?;
        let up = |k: &u32| self.nics[*k as usize].mbit_per_s > 0;
        (0..self.nics.len() as u32).filter(up).min_by_key(|k| (k.abs_diff(home.0), *k)).map(NicIdx)
    }

    /// The NIC dealt to a GPU, up or down. `None` when the server has no NIC.
    pub fn home_nic(&self, gpu: GpuIdx) -> Option<NicIdx> {
        let own = self.nics.iter().position(|n| n.relay_gpu == gpu);
        let dealt = || {
            let k = u64::from(gpu.0) * self.nics.len() as u64 / u64::from(self.gpus);
            (!self.nics.is_empty()).then_some(k as usize)
        };
        own.or_else(dealt).map(|k| NicIdx(k as u32))
    }

    /// Sum of the NIC rates per direction.
    pub fn mbit_per_s(&self) -> u64 {
        self.nics.iter().map(|n| n.mbit_per_s).sum()
    }
}

/// The servers of a job, with the numbering of ranks and NICs that follows from them.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(from = "Vec<Server>", into = "Vec<Server>")]
pub struct Cluster {
    servers: Vec<Server>,
    first_rank: Vec<u32>,
    first_nic: Vec<u32>,
    places: Vec<Place>,
}

/// Where a rank is, by table: engines ask several times per message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Place {
    server: ServerId,
    gpu: GpuIdx,
    direct_nic: Option<NicIdx>,
}

fn places(servers: &[Server]) -> Vec<Place> {
    let of = |(s, server): (usize, &Server)| {
        let place = |gpu| Place { server: ServerId(s as u32), gpu, direct_nic: server.direct_nic(gpu) };
        (0..server.gpus).map(GpuIdx).map(place).collect::<Vec<_>>()
    };
    servers.iter().enumerate().flat_map(of).collect()
}

impl Cluster {
    /// Numbers ranks and NICs server by server.
    pub fn new(servers: Vec<Server>) -> Self {
        let prefix = |count: fn(&Server) -> u32| {
            let mut at = vec![0; servers.len() + 1];
            for (s, server) in servers.iter().enumerate() {
                at[s + 1] = at[s] + count(server);
            }
            at
        };
        let first_rank = prefix(|s| s.gpus);
        let first_nic = prefix(|s| s.nics.len() as u32);
        Self { places: places(&servers), servers, first_rank, first_nic }
    }

    /// `count` servers of one kind.
    pub fn uniform(count: u32, server: Server) -> Self {
        Self::new(vec![server; count as usize])
    }

    /// The servers in order.
    pub fn servers(&self) -> &[Server] {
        &self.servers
    }

    /// One server.
    pub fn server(&self, server: ServerId) -> &Server {
        &self.servers[server.idx()]
    }

    /// Number of servers.
    pub fn server_count(&self) -> u32 {
        self.servers.len() as u32
    }

    /// Number of ranks (GPUs) in all.
    pub fn ranks(&self) -> u32 {
        self.first_rank[self.servers.len()]
    }

    /// Number of NICs in all.
    pub fn nics(&self) -> u32 {
        self.first_nic[self.servers.len()]
    }

    /// The lowest rank of a server.
    pub fn first_rank(&self, server: ServerId) -> Rank {
        Rank(self.first_rank[server.idx()])
    }

    /// The lowest NIC number of a server.
    pub fn first_nic(&self, server: ServerId) -> NicId {
        NicId(self.first_nic[server.idx()])
    }

    /// The ranks of a server.
    pub fn ranks_of(&self, server: ServerId) -> impl Iterator<Item = Rank> + use<> {
        (self.first_rank[server.idx()]..self.first_rank[server.idx() + 1]).map(Rank)
    }

    /// The server a rank runs on.
    pub fn server_of(&self, rank: Rank) -> ServerId {
        self.places[rank.idx()].server
    }

    /// The server a NIC is in.
    pub fn server_of_nic(&self, nic: NicId) -> ServerId {
        ServerId((self.first_nic.partition_point(|&first| first <= nic.0) - 1) as u32)
    }

    /// A rank's GPU within its server.
    pub fn gpu_of(&self, rank: Rank) -> GpuIdx {
        self.places[rank.idx()].gpu
    }

    /// The rank of a server's GPU.
    pub fn rank_of(&self, server: ServerId, gpu: GpuIdx) -> Rank {
        Rank(self.first_rank[server.idx()] + gpu.0)
    }

    /// The job-wide number of a server's NIC.
    pub fn nic_id(&self, server: ServerId, nic: NicIdx) -> NicId {
        NicId(self.first_nic[server.idx()] + nic.0)
    }

    /// A NIC's place within its server.
    pub fn nic_idx(&self, nic: NicId) -> NicIdx {
        NicIdx(nic.0 - self.first_nic(self.server_of_nic(nic)).0)
    }

    /// A NIC's rate and neighbour.
    pub fn nic(&self, nic: NicId) -> NicSpec {
        let server = self.server_of_nic(nic);
        self.server(server).nics[self.nic_idx(nic).idx()]
    }

    /// The rank whose GPU is beside a NIC: the one process that drives it.
    pub fn owner_of(&self, nic: NicId) -> Rank {
        self.rank_of(self.server_of_nic(nic), self.nic(nic).relay_gpu)
    }

    /// The NIC that carries a rank's traffic when nobody chooses; `None` when all of its server's are down.
    pub fn direct_nic(&self, rank: Rank) -> Option<NicIdx> {
        self.places[rank.idx()].direct_nic
    }
}

impl From<Vec<Server>> for Cluster {
    fn from(servers: Vec<Server>) -> Self {
        Self::new(servers)
    }
}

impl From<Cluster> for Vec<Server> {
    fn from(cluster: Cluster) -> Self {
        cluster.servers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_follow_servers_of_different_size() {
        let c = Cluster::new(vec![Server::new(2, &[400, 400], 1), Server::new(4, &[100], 1)]);
        assert_eq!((c.ranks(), c.nics()), (6, 3));
        assert_eq!(c.server_of(Rank(1)), ServerId(0));
        assert_eq!(c.server_of(Rank(2)), ServerId(1));
        assert_eq!(c.gpu_of(Rank(5)), GpuIdx(3));
        assert_eq!(c.owner_of(NicId(2)), Rank(2));
        assert_eq!(c.nic_idx(NicId(2)), NicIdx(0));
    }

    #[test]
    fn nics_are_dealt_out_evenly() {
        let few = Server::new(8, &[1; 4], 1);
        assert_eq!(few.nics.iter().map(|n| n.relay_gpu.0).collect::<Vec<_>>(), [0, 2, 4, 6]);
        assert_eq!(
            (0..8).map(|g| few.direct_nic(GpuIdx(g)).unwrap().0).collect::<Vec<_>>(),
            [0, 0, 1, 1, 2, 2, 3, 3]
        );
        let many = Server::new(2, &[1; 4], 1);
        assert_eq!(many.nics.iter().map(|n| n.relay_gpu.0).collect::<Vec<_>>(), [0, 0, 1, 1]);
        assert_eq!(many.direct_nic(GpuIdx(1)), Some(NicIdx(2)));
    }

    #[test]
    fn a_down_nic_is_nobodys_direct_nic() {
        let s = Server::new(4, &[1, 0, 1, 1], 1);
        assert_eq!(s.home_nic(GpuIdx(1)), Some(NicIdx(1)));
        assert_eq!(s.direct_nic(GpuIdx(1)), Some(NicIdx(0)));
        assert_eq!(Server::new(2, &[0, 0], 1).direct_nic(GpuIdx(0)), None);
    }
}
