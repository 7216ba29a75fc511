//! The machine under a communicator: this file and `device.rs` alone know which.

use std::num::NonZeroU16;
use std::os::fd::OwnedFd;
use std::sync::Arc;
#[cfg(feature = "verbs")]
use std::{collections::HashMap, sync::Mutex, sync::PoisonError};

use super::CommError;
use super::device::{Device, GpuKind};
use crate::emu::{BlockOrder, EmuGpu, EmuGpuConfig, EmuNic, MonotonicClock, ScaleupLinks, Wire, WireConfig};
use crate::engine::path::PathTiming;
use crate::hw::{Clock, HwError, LinkState, NicCounters, NicDevice};
use crate::shm::SharedMemory;
use crate::topo::{Cluster, GpuIdx, NicId, Rank};
use crate::verbs::VerbsSettings;
#[cfg(feature = "verbs")]
use crate::verbs::{VerbsNic, VerbsNicConfig, VerbsTraffic};

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
    /// Memory of a GPU, in bytes; `None`: as much as the host gives.
    pub memory_bytes: Option<u64>,
}

impl EmuOptions {
    /// At a scale, with grids of two blocks.
    pub fn at_scale(scale: u64) -> Self {
        Self { scale, resident_blocks: 2, blocks: 2, block_order: BlockOrder::Ascending, memory_bytes: None }
    }
}

/// Which NICs carry the messages between servers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NicBackend {
    /// Emulated ones: all servers are on this host.
    #[default]
    Emu,
    /// RDMA devices, by verbs. Needs the feature `verbs`.
    Verbs,
}

/// The same, with what it takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Nics {
    /// Emulated NICs.
    #[default]
    Emulated,
    /// RDMA devices.
    Verbs(VerbsSettings),
}

impl Nics {
    /// What all ranks must have been started with alike.
    pub(super) fn terms(&self) -> String {
        match self {
            Self::Emulated => "emu".into(),
            Self::Verbs(s) => {
                format!("verbs, {} queue pairs, adaptive routing {}", s.queue_pairs, s.adaptive_routing)
            }
        }
    }

    /// Times for closing and opening paths.
    pub(super) fn path_timing(&self) -> PathTiming {
        match self {
            Self::Emulated => EMULATED_PATHS,
            Self::Verbs(_) => PathTiming::default(),
        }
    }
}

/// An emulated device completes or fails its work within the time that the work takes, and drains at once.
const EMULATED_PATHS: PathTiming = PathTiming {
    completion_ns: 30_000_000_000,
    drain_ns: 2_000_000_000,
    repeat_ns: 4_000_000,
    hold_down_ns: 20_000_000,
};

/// What a rank's configuration says of its GPU.
#[derive(Clone, Copy)]
pub struct Hardware {
    /// Which kind.
    pub gpu: GpuKind,
    /// Blocks of the library's grids.
    pub blocks: Option<NonZeroU16>,
    /// How it is emulated.
    pub emulation: EmuOptions,
}

/// One rank's machine.
pub struct Machine {
    gpu: Arc<Device>,
    network: Network,
    options: EmuOptions,
    blocks: u32,
}

/// What NICs are opened from.
enum Network {
    Emulated(Wire),
    #[cfg(feature = "verbs")]
    Verbs {
        settings: VerbsSettings,
        /// Of the NICs that were opened here.
        traffic: Mutex<HashMap<NicId, Arc<VerbsTraffic>>>,
    },
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
    nics: Nics,
    /// Rank 0 keeps the wire until all have opened it.
    wire: Option<Wire>,
}

impl MachineRoot {
    /// Rank 0 makes the wire of emulated NICs.
    ///
    /// # Errors
    /// [`CommError::Hw`].
    pub fn new(cluster: &Cluster, rank: Rank, options: EmuOptions, nics: &Nics) -> Result<Self, CommError> {
        let makes = rank.0 == 0 && *nics == Nics::Emulated;
        let wire = if makes { Some(Wire::create(wire_config(cluster, options.scale))?) } else { None };
        Ok(Self { nics: nics.clone(), wire })
    }

    /// What rank 0 tells the others; nothing on other ranks, and nothing where there is no wire.
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
        hardware: Hardware,
        address: &[u8],
        server_memory: OwnedFd,
    ) -> Result<Machine, CommError> {
        let options = hardware.emulation;
        let network = match (self.nics, self.wire) {
            (Nics::Emulated, Some(wire)) => Network::Emulated(wire),
            (Nics::Emulated, None) => Network::Emulated(open_wire(cluster, options, address)?),
            (Nics::Verbs(settings), _) => verbs_network(settings)?,
        };
        let gpu = match hardware.gpu {
            GpuKind::Emu => emulated_gpu(cluster, rank, options, server_memory)?,
            GpuKind::Cuda { ordinal } => cuda_gpu(cluster.gpu_of(rank), ordinal)?,
        };
        let blocks = match hardware.blocks {
            Some(blocks) => blocks.get().into(),
            None => gpu.suitable_blocks(options.blocks)?,
        };
        Ok(Machine { gpu: Arc::new(gpu), network, options, blocks })
    }
}

fn open_wire(cluster: &Cluster, options: EmuOptions, address: &[u8]) -> Result<Wire, CommError> {
    let address = address.try_into().map(u64::from_le_bytes);
    let address = address.map_err(|_| CommError::BadAnswer { rank: Rank(0) })?;
    Ok(Wire::open(address, wire_config(cluster, options.scale))?)
}

#[cfg(feature = "verbs")]
fn verbs_network(settings: VerbsSettings) -> Result<Network, CommError> {
    Ok(Network::Verbs { settings, traffic: Mutex::default() })
}

#[cfg(not(feature = "verbs"))]
fn verbs_network(_settings: VerbsSettings) -> Result<Network, CommError> {
    Err(CommError::NotBuilt { what: "NICs over verbs", feature: "verbs" })
}

/// Whether this build has GPUs of a kind.
///
/// # Errors
/// [`CommError::NotBuilt`].
pub fn check_gpu_built(gpu: GpuKind) -> Result<(), CommError> {
    match gpu {
        GpuKind::Cuda { .. } if !cfg!(feature = "cuda") => {
            Err(CommError::NotBuilt { what: "CUDA GPUs", feature: "cuda" })
        }
        _ => Ok(()),
    }
}

/// Whether this build has a backend for NICs.
///
/// # Errors
/// [`CommError::NotBuilt`].
pub fn check_built(nics: NicBackend) -> Result<(), CommError> {
    match nics {
        NicBackend::Emu => Ok(()),
        NicBackend::Verbs => verbs_network(VerbsSettings::default()).map(drop),
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
    let EmuOptions { resident_blocks, memory_bytes, .. } = options;
    let gpu = EmuGpu::new(EmuGpuConfig { idx, resident_blocks, links, memory_bytes })?;
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

    /// The same, for another thread.
    pub fn shared_gpu(&self) -> Arc<Device> {
        Arc::clone(&self.gpu)
    }

    /// Blocks of the library's grids.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// A NIC that the rank owns.
    ///
    /// # Errors
    /// [`HwError::Os`].
    pub fn open_nic(&self, cluster: &Cluster, nic: NicId) -> Result<Box<dyn NicDevice>, HwError> {
        let (idx, relay_gpu) = (cluster.nic_idx(nic), cluster.nic(nic).relay_gpu);
        match &self.network {
            Network::Emulated(wire) => Ok(match *self.gpu {
                Device::Emu(_) => Box::new(EmuNic::new(wire.clone(), nic, idx, relay_gpu)),
                // The host cannot map a real GPU's memory.
                #[cfg(feature = "cuda")]
                Device::Cuda(_) => {
                    let gpu = Arc::<Device>::clone(&self.gpu);
                    Box::new(EmuNic::staged(wire.clone(), nic, idx, relay_gpu, gpu))
                }
            }),
            #[cfg(feature = "verbs")]
            Network::Verbs { settings, traffic } => {
                // An emulated GPU's memory is the host's: completions order it. A real one's needs a read behind them.
                let (settings, flush_by_read) = (settings.clone(), !matches!(*self.gpu, Device::Emu(_)));
                let config = VerbsNicConfig { id: nic, idx, relay_gpu, settings, flush_by_read };
                let device = VerbsNic::open(config)?;
                traffic.lock().unwrap_or_else(PoisonError::into_inner).insert(nic, device.traffic());
                Ok(Box::new(device))
            }
        }
    }

    /// What a NIC has carried so far; of NICs over verbs only the rank that owns one knows.
    pub fn counters(&self, nic: NicId) -> NicCounters {
        match &self.network {
            Network::Emulated(wire) => wire.counters(nic),
            #[cfg(feature = "verbs")]
            Network::Verbs { traffic, .. } => {
                let traffic = traffic.lock().unwrap_or_else(PoisonError::into_inner);
                traffic.get(&nic).map(|t| t.counters()).unwrap_or_default()
            }
        }
    }

    /// The cables of emulated NICs; `None` where NICs are real.
    pub fn cables(&self) -> Option<Cables> {
        match &self.network {
            Network::Emulated(wire) => Some(Cables(wire.clone())),
            #[cfg(feature = "verbs")]
            Network::Verbs { .. } => None,
        }
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
