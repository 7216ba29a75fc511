//! The machine under a communicator: this file and `device.rs` alone know which.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::CommError;
use super::device::{Device, GpuKind};
use crate::emu::{BlockOrder, EmuGpu, EmuGpuConfig, EmuNic, MonotonicClock, ScaleupLinks, Wire, WireConfig};
use crate::hw::{Clock, HwError, LinkState, NicCounters, NicDevice};
use crate::shm::SharedMemory;
use crate::topo::{Cluster, GpuIdx, NicId, Rank};

/// How an emulated cluster is built; the same on every rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct EmuOptions {
    /// Modelled rate over emulated rate, of NICs and scale-up links.
    pub scale: u64,
    /// Blocks that an emulated GPU runs at once.
    pub resident_blocks: u32,
    /// Blocks of a grid; more than can be resident run one after the other.
    pub blocks: u32,
    /// In which order they run.
    pub block_order: BlockOrder,
}

impl EmuOptions {
    /// At a scale, with grids of two blocks.
    pub fn at_scale(scale: u64) -> Self {
        Self { scale, resident_blocks: 2, blocks: 2, block_order: BlockOrder::Ascending }
    }
}

/// One rank's machine.
pub struct Machine {
    gpu: Arc<Device>,
    wire: Wire,
    options: EmuOptions,
}

/// Bytes per second of a modelled NIC at a scale; 0 = down.
pub fn emulated_nic_byte_per_s(mbit_per_s: u64, scale: u64) -> u64 {
    let rate = mbit_per_s.saturating_mul(125_000) / scale.max(1);
    if mbit_per_s == 0 { 0 } else { rate.max(1) }
}

fn wire_config(cluster: &Cluster, scale: u64) -> WireConfig {
    let rate = |n| emulated_nic_byte_per_s(cluster.nic(NicId(n)).mbit_per_s, scale);
    WireConfig { nic_byte_per_s: (0..cluster.nics()).map(rate).collect() }
}

/// What one process makes for its whole server, or job, before machines can be built.
pub struct MachineRoot {
    /// Rank 0 keeps the wire until all have opened it.
    wire: Option<Wire>,
}

impl MachineRoot {
    /// Rank 0 makes the wire.
    ///
    /// # Errors
    /// [`CommError::Hw`].
    pub fn new(cluster: &Cluster, rank: Rank, options: EmuOptions) -> Result<Self, CommError> {
        let wire = if rank.0 == 0 { Some(Wire::create(wire_config(cluster, options.scale))?) } else { None };
        Ok(Self { wire })
    }

    /// What rank 0 tells the others; nothing on other ranks.
    pub fn address(&self) -> Vec<u8> {
        self.wire.as_ref().map(|w| w.address().to_le_bytes().to_vec()).unwrap_or_default()
    }

    /// Memory that the lowest rank of a server makes for all of it, as descriptors.
    ///
    /// # Errors
    /// [`CommError::Hw`].
    pub fn server_memory(gpus: u32) -> Result<Arc<SharedMemory>, CommError> {
        Ok(SharedMemory::create("fuselink-scaleup", ScaleupLinks::words(gpus))?)
    }

    /// Builds a rank's machine from what rank 0 and the server's lowest rank made.
    ///
    /// # Errors
    /// [`CommError::Hw`].
    pub fn build(
        self,
        cluster: &Cluster,
        rank: Rank,
        hardware: (GpuKind, EmuOptions),
        address: &[u8],
        server_memory: OwnedFd,
    ) -> Result<Machine, CommError> {
        let (kind, options) = hardware;
        let address =
            address.try_into().map(u64::from_le_bytes).map_err(|_| CommError::BadAnswer { rank: Rank(0) })?;
        let wire = match self.wire {
            Some(wire) => wire,
            None => Wire::open(address, wire_config(cluster, options.scale))?,
        };
        let gpu = match kind {
            GpuKind::Emu => emulated_gpu(cluster, rank, options, server_memory)?,
            GpuKind::Cuda { ordinal } => cuda_gpu(cluster.gpu_of(rank), ordinal)?,
        };
        Ok(Machine { gpu: Arc::new(gpu), wire, options })
    }
}

fn emulated_gpu(
    cluster: &Cluster,
    rank: Rank,
    options: EmuOptions,
    server_memory: OwnedFd,
) -> Result<Device, HwError> {
    let server = cluster.server(cluster.server_of(rank));
    let links = SharedMemory::open(server_memory, ScaleupLinks::words(server.gpus))?;
    let byte_per_s = (server.scaleup_mbyte_per_s * 1_000_000 / options.scale).max(1);
    let links = ScaleupLinks::new(links.words(), byte_per_s);
    let idx = cluster.gpu_of(rank);
    let gpu = EmuGpu::new(EmuGpuConfig { idx, resident_blocks: options.resident_blocks, links })?;
    gpu.set_block_order(options.block_order);
    Ok(Device::Emu(gpu))
}

#[cfg(feature = "cuda")]
fn cuda_gpu(idx: GpuIdx, ordinal: Option<u32>) -> Result<Device, HwError> {
    let ordinal = ordinal.unwrap_or(idx.0);
    crate::cuda::CudaGpu::new(crate::cuda::CudaGpuConfig { idx, ordinal }).map(Device::Cuda)
}

#[cfg(not(feature = "cuda"))]
fn cuda_gpu(_idx: GpuIdx, _ordinal: Option<u32>) -> Result<Device, HwError> {
    Err(HwError::NotBuilt { backend: "CUDA GPUs", feature: "cuda" })
}

/// The cables of all emulated NICs of a job, to be pulled and put back while it runs.
#[derive(Clone)]
pub struct Cables(Wire);

impl Cables {
    /// Pulls a NIC's cable, or puts it back.
    pub fn set(&self, nic: NicId, link: LinkState) {
        self.0.set_link(nic, link);
    }

    /// What a NIC has carried so far.
    pub fn counters(&self, nic: NicId) -> NicCounters {
        self.0.counters(nic)
    }
}

impl Machine {
    /// The rank's GPU.
    pub fn gpu(&self) -> &Device {
        &self.gpu
    }

    /// Blocks of the library's grids.
    pub fn blocks(&self) -> u32 {
        self.options.blocks
    }

    /// A NIC that the rank owns.
    pub fn open_nic(&self, cluster: &Cluster, nic: NicId) -> Box<dyn NicDevice> {
        let (idx, relay_gpu) = (cluster.nic_idx(nic), cluster.nic(nic).relay_gpu);
        let wire = self.wire.clone();
        match *self.gpu {
            Device::Emu(_) => Box::new(EmuNic::new(wire, nic, idx, relay_gpu)),
            // The host cannot map a real GPU's memory.
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => {
                Box::new(EmuNic::staged(wire, nic, idx, relay_gpu, Arc::<Device>::clone(&self.gpu)))
            }
        }
    }

    /// What a NIC has carried so far.
    pub fn counters(&self, nic: NicId) -> NicCounters {
        self.wire.counters(nic)
    }

    /// The cables of emulated NICs; `None` where NICs are real.
    pub fn cables(&self) -> Option<Cables> {
        Some(Cables(self.wire.clone()))
    }

    /// The server's clock.
    pub fn clock(&self) -> Box<dyn Clock> {
        Box::new(MonotonicClock)
    }

    /// How much slower this machine is than the one it stands for.
    pub fn scale(&self) -> u64 {
        self.options.scale
    }
}
