//! How payload comes beside the NIC of another GPU: the ways that FuseLink compares (OSDI'25, its D1 to D4).

use super::fluid::LinkId;
use super::machine;
use crate::hw::Nanos;
use crate::topo::{Cluster, GpuIdx, NicIdx, Rank, ServerId};

/// The way between a GPU and a slot beside another GPU's NIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Relay {
    /// D1: the kernel's own stores (and loads) cross scale-up, to mapped memory on the relay GPU.
    Stores,
    /// D2: the kernel stages in its own memory; the host launches a copy over scale-up and waits for it.
    Copy {
        /// What one copy costs the host, which does one at a time for a GPU.
        launch_ns: Nanos,
    },
    /// Through host memory, over the GPU's PCIe link.
    Host(HostSide),
}

/// In whose memory of a server with two CPU sockets payload waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostSide {
    /// D3: beside the GPU; the NIC reads and writes across the sockets where it is at the other one.
    Gpu,
    /// D4: beside the NIC; the GPU's copy crosses.
    Nic,
}

/// Of a GPU's PCIe link to host memory, per direction.
pub const PCIE_BYTE_PER_NS: f64 = 50.0;
/// Between the CPU sockets of a server, per direction: what FuseLink measured from memory across it.
pub const SOCKETS_BYTE_PER_NS: f64 = 12.0;

/// One stage of a copy: what it crosses, with how many bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stage {
    pub links: [LinkId; 2],
    pub link_count: usize,
    pub bytes: u64,
}

impl Stage {
    fn new(links: &[LinkId], bytes: u64) -> Self {
        let mut crossed = [links[0]; 2];
        crossed[..links.len()].copy_from_slice(links);
        Self { links: crossed, link_count: links.len(), bytes }
    }

    pub fn links(&self) -> &[LinkId] {
        &self.links[..self.link_count]
    }
}

/// A copy between a GPU and a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotCopy {
    pub server: ServerId,
    pub gpu: GpuIdx,
    pub nic: NicIdx,
    /// To the slot, or from it.
    pub fills: bool,
    pub bytes: u64,
}

/// GPUs and NICs of the lower half are at the first socket.
fn socket(cluster: &Cluster, server: ServerId, gpu: GpuIdx) -> bool {
    gpu.0 >= cluster.server(server).gpus.div_ceil(2)
}

impl Relay {
    /// The `nth` stage of a copy, if it has so many.
    pub(super) fn stage(self, cluster: &Cluster, copy: SlotCopy, nth: u32) -> Option<Stage> {
        let relay = cluster.server(copy.server).nics[copy.nic.idx()].relay_gpu;
        let rank = |gpu| cluster.rank_of(copy.server, gpu);
        let own_memory = Stage::new(&[machine::memory_link(rank(copy.gpu))], copy.bytes);
        let (from, to) = if copy.fills { (copy.gpu, relay) } else { (relay, copy.gpu) };
        let scaleup = || {
            let ([out, _], [_, into]) =
                (machine::scaleup_links(rank(from)), machine::scaleup_links(rank(to)));
            Stage::new(&[out, into], copy.bytes)
        };
        if relay == copy.gpu {
            return (nth == 0).then_some(own_memory);
        }
        let extra = machine::relay_links(cluster, rank(copy.gpu));
        match (self, nth) {
            (Self::Stores, 0) => Some(scaleup()),
            (Self::Copy { .. }, 0) if copy.fills => Some(own_memory),
            (Self::Copy { .. }, 2) if !copy.fills => Some(own_memory),
            // The host's time as bytes of a link that moves one per nanosecond.
            (Self::Copy { launch_ns }, n) if n == u32::from(copy.fills) => {
                Some(Stage::new(&[extra.launches], launch_ns))
            }
            (Self::Copy { .. }, n) if n == 1 + u32::from(copy.fills) => Some(scaleup()),
            (Self::Host(side), 0) => {
                let pcie = extra.pcie[usize::from(!copy.fills)];
                let far = socket(cluster, copy.server, copy.gpu) != socket(cluster, copy.server, relay);
                let crosses = side == HostSide::Nic && far;
                let sockets = machine::sockets_link(cluster, copy.server, socket(cluster, copy.server, to));
                Some(if crosses {
                    Stage::new(&[pcie, sockets], copy.bytes)
                } else {
                    Stage::new(&[pcie], copy.bytes)
                })
            }
            _ => None,
        }
    }

    /// The link between sockets that a NIC crosses when it reads or writes the payload of a rank.
    pub(super) fn nic_crosses(
        self,
        cluster: &Cluster,
        rank: Rank,
        nic: NicIdx,
        into: bool,
    ) -> Option<LinkId> {
        let (server, gpu) = (cluster.server_of(rank), cluster.gpu_of(rank));
        let relay = cluster.server(server).nics[nic.idx()].relay_gpu;
        let [at_gpu, at_nic] = [gpu, relay].map(|g| socket(cluster, server, g));
        let far = relay != gpu && at_gpu != at_nic;
        let to = if into { at_gpu } else { at_nic };
        (self == Self::Host(HostSide::Gpu) && far).then(|| machine::sockets_link(cluster, server, to))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topo::Server;

    fn stages(relay: Relay, nic: u32, fills: bool) -> Vec<(Vec<LinkId>, u64)> {
        let cluster = Cluster::uniform(2, Server::new(4, &[1; 4], 1));
        let copy = SlotCopy { server: ServerId(1), gpu: GpuIdx(0), nic: NicIdx(nic), fills, bytes: 7 };
        (0..).map_while(|n| relay.stage(&cluster, copy, n)).map(|s| (s.links().to_vec(), s.bytes)).collect()
    }

    #[test]
    fn the_direct_nic_needs_no_relay() {
        for relay in [Relay::Stores, Relay::Copy { launch_ns: 3 }, Relay::Host(HostSide::Gpu)] {
            assert_eq!(stages(relay, 0, true), [(vec![machine::memory_link(Rank(4))], 7)]);
        }
    }

    #[test]
    fn a_copy_is_staged_launched_and_crosses_scale_up_both_ways() {
        let relay = Relay::Copy { launch_ns: 3 };
        let (fill, drain) = (stages(relay, 1, true), stages(relay, 1, false));
        assert_eq!(fill.iter().map(|s| s.1).collect::<Vec<_>>(), [7, 3, 7]);
        assert_eq!(drain.iter().map(|s| s.1).collect::<Vec<_>>(), [3, 7, 7]);
        assert_eq!(fill[2].0.len(), 2);
    }

    #[test]
    fn only_the_far_socket_is_crossed() {
        let crossed = |side, nic| stages(Relay::Host(side), nic, true)[0].0.len();
        assert_eq!([1, 2].map(|nic| crossed(HostSide::Nic, nic)), [1, 2]);
        assert_eq!([1, 2].map(|nic| crossed(HostSide::Gpu, nic)), [1, 1]);
        let cluster = Cluster::uniform(2, Server::new(4, &[1; 4], 1));
        let far = |nic| Relay::Host(HostSide::Gpu).nic_crosses(&cluster, Rank(4), NicIdx(nic), false);
        assert!(far(1).is_none() && far(2).is_some());
    }
}
