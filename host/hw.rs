//! What the library needs of a machine: GPU memory, kernels, NICs and a clock, as traits.
//!
//! Implemented by `emu` (real bytes, real time, no hardware), and meant for CUDA, verbs and virtual time alike.
//! The rules that every implementation must keep are executable: [`contract`] holds them as functions that the tests
//! of each implementation call.
//!
//! - A [`Chunk`] is physical memory on one GPU; it is registered with NICs and handed to other processes, and never
//!   moves. A [`Window`] is addresses that kernels see; chunks are mapped into it and out of it, and it is never
//!   registered.
//! - A [`Nic`] is where work is posted: the device itself ([`NicDevice`], in its owner) or a ring to the process
//!   that owns it. Posting never blocks and never drops: what does not fit now is simply not taken.

pub mod contract;
mod error;
mod work;

pub use error::HwError;
pub use work::{INLINE_BYTES, Lane, LocalSpan, RemoteSpan, Work, WorkError, WorkOp};

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::abi::{FlAllToAll, FlPut};
use crate::topo::{GpuIdx, NicId, NicIdx};

/// Nanoseconds on a [`Clock`]. Comparable between the processes of one server.
pub type Nanos = u64;

/// A source of time. The engine never asks one; whoever drives it does.
pub trait Clock: Send + Sync {
    /// Nanoseconds since some fixed moment, the same for every process of the server.
    fn now(&self) -> Nanos;
}

/// Physical memory on one GPU. Freed when the last holder in any process lets go.
pub trait Chunk: Send + Sync {
    /// The GPU it lies on.
    fn gpu(&self) -> GpuIdx;
    /// Its size, a multiple of the GPU's granularity.
    fn bytes(&self) -> u64;
    /// A descriptor with which another process of the server can import it.
    ///
    /// # Errors
    /// [`HwError::Export`].
    fn export(&self) -> Result<OwnedFd, HwError>;
    /// A descriptor with which a NIC can register it: a dma-buf, or what the emulated NIC takes for one.
    ///
    /// # Errors
    /// [`HwError::Export`].
    fn export_for_nic(&self) -> Result<OwnedFd, HwError> {
        self.export()
    }
}

/// Reserved addresses of one GPU. Parts of it are mapped to chunks on any GPU of the server.
///
/// Unmapping needs a *quiet* window: no kernel that touches the part is queued or running. The caller guarantees it.
pub trait Window: Send {
    /// The chunks that fit.
    type Chunk: Chunk;
    /// The first address, as kernels see it. Never changes.
    fn dev_ptr(&self) -> u64;
    /// Number of addresses.
    fn bytes(&self) -> u64;
    /// Maps a whole chunk at `offset`, with access for this GPU.
    ///
    /// # Errors
    /// [`HwError::WindowRule`] when it does not fit, is not aligned to the granularity or overlaps a mapped part.
    fn map(&mut self, offset: u64, chunk: &Arc<Self::Chunk>) -> Result<(), HwError>;
    /// Unmaps the whole chunk that was mapped at `offset`.
    ///
    /// # Errors
    /// [`HwError::WindowRule`] when no chunk starts there.
    fn unmap(&mut self, offset: u64) -> Result<(), HwError>;
    /// Puts another chunk of the same size in the place of the one at `offset`; the address stays.
    ///
    /// # Errors
    /// As `unmap` and `map`; the old mapping stays when the new chunk does not fit.
    fn remap(&mut self, offset: u64, chunk: &Arc<Self::Chunk>) -> Result<(), HwError>;
}

/// Host memory that kernels see. Rings live in it.
pub trait MappedHost: Send + Sync {
    /// The host's view. Page aligned, zeroed at creation.
    fn host_ptr(&self) -> *mut u8;
    /// The kernels' view.
    fn mapped_dev_ptr(&self) -> u64;
    /// Its size.
    fn bytes(&self) -> usize;
}

/// A kernel: one of the library's, or a user's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kernel {
    /// `kernels/all_to_all.cu`; takes an `FlAllToAll`.
    AllToAll,
    /// `kernels/put.cu`, the sending half; takes an `FlPut`.
    Put,
    /// `kernels/put.cu`, the receiving half; takes an `FlPut`.
    Take,
    /// A user's kernel, by the name under which this GPU was given it: `FL_KERNEL(name, Params)` in its source.
    Custom {
        /// The name.
        name: &'static str,
        /// Size of its parameters.
        params_bytes: u64,
    },
}

impl Kernel {
    /// The name in the kernel sources.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllToAll => "fl_all_to_all",
            Self::Put => "fl_put",
            Self::Take => "fl_take",
            Self::Custom { name, .. } => name,
        }
    }

    /// Size of its parameters.
    pub fn params_bytes(self) -> u64 {
        let bytes = match self {
            Self::AllToAll => size_of::<FlAllToAll>(),
            Self::Put | Self::Take => size_of::<FlPut>(),
            Self::Custom { params_bytes, .. } => return params_bytes,
        };
        bytes as u64
    }
}

/// One launch. Blocks of a grid may run in any order and need not all be resident.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// What to run.
    pub kernel: Kernel,
    /// How many blocks.
    pub blocks: u32,
    /// Its parameters, in device memory.
    pub params_dev_ptr: u64,
}

/// Called after words that kernels poll have changed.
pub type Teller = Box<dyn Fn() + Send + Sync>;

/// Copies device memory from the host's side, while kernels run: a message whose NIC has failed goes to another one's
/// memory this way. Nothing here waits for kernels.
pub trait Mover: Send {
    /// Begins to copy; both ranges are mapped into the GPU's addresses, and nobody else writes to either until it is done.
    ///
    /// # Errors
    /// [`HwError::NotMapped`], [`HwError::Os`].
    fn start(&mut self, dst_dev_ptr: u64, src_dev_ptr: u64, bytes: u64) -> Result<u64, HwError>;
    /// Whether the copy of that number is done, and visible to NICs. Asked until it is, and not after.
    ///
    /// # Errors
    /// [`HwError::Os`].
    fn is_done(&mut self, copy: u64) -> Result<bool, HwError>;
}

/// One GPU, as its own process sees it.
pub trait Gpu: Send + Sync + 'static {
    /// Its memory.
    type Chunk: Chunk + 'static;
    /// Its addresses.
    type Window: Window<Chunk = Self::Chunk> + 'static;
    /// Host memory that its kernels see.
    type Mapped: MappedHost + 'static;

    /// Its place in the server.
    fn idx(&self) -> GpuIdx;
    /// Chunk sizes, and offsets of mappings, are multiples of this.
    fn granularity_bytes(&self) -> u64;
    /// Physical memory on this GPU, zeroed; `bytes` is rounded up to the granularity.
    ///
    /// # Errors
    /// [`HwError::CreateChunk`].
    fn create_chunk(&self, bytes: u64) -> Result<Arc<Self::Chunk>, HwError>;
    /// A chunk that the process of `owner` exported.
    ///
    /// # Errors
    /// [`HwError::ImportChunk`], also when the descriptor holds fewer bytes than promised.
    fn import_chunk(&self, fd: OwnedFd, owner: GpuIdx, bytes: u64) -> Result<Arc<Self::Chunk>, HwError>;
    /// Addresses without memory.
    ///
    /// # Errors
    /// [`HwError::Reserve`].
    fn reserve_window(&self, bytes: u64) -> Result<Self::Window, HwError>;
    /// Host memory for rings and flags.
    ///
    /// # Errors
    /// [`HwError::Os`].
    fn map_host(&self, bytes: usize) -> Result<Self::Mapped, HwError>;
    /// Writes device memory from the host. Not ordered with kernels that run.
    ///
    /// # Errors
    /// [`HwError::NotMapped`].
    fn write(&self, dev_ptr: u64, bytes: &[u8]) -> Result<(), HwError>;
    /// Reads device memory from the host. Not ordered with kernels that run.
    ///
    /// # Errors
    /// [`HwError::NotMapped`].
    fn read(&self, dev_ptr: u64, bytes: &mut [u8]) -> Result<(), HwError>;
    /// What to call after words that kernels poll have changed. A GPU polls by itself, so there it does nothing; an
    /// emulated one lets its blocks sleep until they are told.
    fn teller(&self) -> Teller;
    /// A copier for the proxy's thread.
    fn mover(&self) -> Box<dyn Mover>;
    /// Queues a kernel behind those launched before.
    ///
    /// # Errors
    /// [`HwError::Launch`].
    fn launch(&self, launch: Launch) -> Result<(), HwError>;
    /// Waits until everything launched has finished.
    ///
    /// # Errors
    /// [`HwError::KernelTimeout`] after `timeout`.
    fn synchronize(&self, timeout: Duration) -> Result<(), HwError>;
}

/// Carries the words of NIC owners about paths beside the NICs themselves: when all paths between two servers are closed
/// nothing else can. Words may be lost, doubled or late; they are told until they are answered.
pub trait Herald: Send {
    /// Sends a word about the path from `from`, a NIC of this process, to the owner of `to`. Never blocks.
    fn tell(&mut self, from: NicId, to: NicId, word: u64);
    /// The next word that has come: from which NIC, to which of this process's, what.
    fn hear(&mut self) -> Option<(NicId, NicId, u64)>;
}

/// Memory that is offered to a NIC. It must live as long as the NIC, or until it is taken back ([`Registrar::deregister`]).
#[derive(Debug)]
pub enum Registrable<'a> {
    /// A chunk of a GPU: dma-buf descriptor, or its like.
    Device {
        /// What [`Chunk::export_for_nic`] gave.
        fd: BorrowedFd<'a>,
        /// Where it lies.
        gpu: GpuIdx,
        /// Its address in this process, for NICs that cannot register the descriptor; 0 when it is not mapped.
        dev_ptr: u64,
        /// Its size.
        bytes: u64,
    },
    /// Host memory: its address, and its descriptor where it has one (the emulated wire needs it).
    Host {
        /// The start.
        host_ptr: *mut u8,
        /// Its size.
        bytes: u64,
        /// The shared-memory descriptor behind it.
        fd: BorrowedFd<'a>,
    },
}

/// What a peer needs to write to registered memory; travels in the bootstrap.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct RemoteKey {
    /// Address of the first byte in the NIC's address space.
    pub remote_addr: u64,
    /// The key.
    pub rkey: u64,
    /// Its size.
    pub bytes: u64,
}

/// Registered memory of this process, by NIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct LocalKey(pub u32);

/// A connection between two NICs: a queue pair or a set of them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct PathId(pub u32);

/// Whether a NIC's link is up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub enum LinkState {
    /// Traffic flows.
    Up,
    /// Nothing flows; posted work completes with an error.
    Down,
}

/// What a NIC's owner tells its server's ranks of a path to a peer's NIC (`engine/path.rs` has the protocol).
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub enum PathNews {
    /// It is being closed: new work is refused.
    Down,
    /// Nothing more can land here over it, and all that has landed was told before.
    Fenced {
        /// Number of this fence, counted per NIC and peer server.
        fence: u32,
        /// Whether no path from that server to this NIC is open any more.
        all_closed: bool,
    },
    /// Nothing more can land at the peer over it; all completions of posted work were told before.
    PeerFenced {
        /// The peer's number of it: its ranks' answers count from that fence on.
        fence: u32,
    },
    /// It may be used again by who has heard its receiver's answer to the peer's `fence`.
    Up {
        /// The peer's latest fence.
        fence: u32,
    },
}

/// What a NIC reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub enum NicEvent {
    /// Posted work is done; its local memory may be used again.
    Completed {
        /// From the work.
        cookie: u64,
        /// Whether the bytes are in the peer's memory.
        result: Result<(), WorkError>,
    },
    /// A write with an immediate has come in. Before a reader elsewhere is told, [`Nic::flush`] must have returned.
    Arrived {
        /// The peer's NIC.
        from: NicId,
        /// Its immediate.
        imm: u32,
        /// Payload bytes.
        bytes: u32,
    },
    /// The link changed.
    Link(LinkState),
    /// The device can no longer use a path, although no work on it has failed.
    Broken(PathId),
    /// The owner's news of the path to a peer's NIC. Devices do not tell it.
    Path {
        /// The peer's NIC.
        peer: NicId,
        /// What is new.
        news: PathNews,
    },
}

/// Where work is posted: a device, or a ring to the process that owns it.
pub trait Nic: Send {
    /// Which NIC of the server it is.
    fn idx(&self) -> NicIdx;
    /// Takes as many items from the front as there is room for and returns how many. The rest is to be posted later.
    ///
    /// # Errors
    /// [`HwError::BadWork`] for an item that could never be posted; nothing before it is undone.
    fn post(&mut self, work: &[Work], now: Nanos) -> Result<usize, HwError>;
    /// Appends what has happened since the last call. Never blocks.
    ///
    /// # Errors
    /// [`HwError::Os`] when the device itself is gone.
    fn poll(&mut self, now: Nanos, events: &mut Vec<NicEvent>) -> Result<(), HwError>;
    /// Makes every payload whose arrival was polled visible to all readers of the memory it lies in.
    ///
    /// # Errors
    /// [`HwError::Os`] when the device itself is gone.
    fn flush(&mut self) -> Result<(), HwError>;
}

/// A NIC in the process that owns it.
pub trait NicDevice: Nic {
    /// The GPU beside it.
    fn relay_gpu(&self) -> GpuIdx;
    /// Makes memory readable and writable for the NIC.
    ///
    /// # Errors
    /// [`HwError::NotBeside`] for another GPU's memory, [`HwError::Register`] when the system refuses.
    fn register(&mut self, memory: &Registrable<'_>) -> Result<(LocalKey, RemoteKey), HwError>;
    /// What registers memory with this NIC from another thread, while this one drives it.
    fn registrar(&self) -> Box<dyn Registrar>;
    /// What a peer needs to open a path to this NIC.
    fn endpoint(&self) -> Vec<u8>;
    /// Opens the path to a peer's NIC, whose `endpoint` came through the bootstrap.
    ///
    /// # Errors
    /// [`HwError::OpenPath`].
    fn open_path(&mut self, peer: NicId, endpoint: &[u8]) -> Result<PathId, HwError>;
    /// Begins to close this end of a path, in both directions: what is posted completes, with an error where it may not
    /// have reached the peer, and soon nothing can land over it. Never blocks.
    ///
    /// # Errors
    /// [`HwError::Os`] when the device itself is gone.
    fn fence(&mut self, path: PathId) -> Result<(), HwError>;
    /// Whether a path that is being closed has drained: [`Nic::poll`] has reported every completion and every arrival, and
    /// nothing that the peer has sent over it can land any more.
    fn is_drained(&mut self, path: PathId) -> bool;
    /// Opens this end of a drained path again. What the peer sends from now on is received.
    ///
    /// # Errors
    /// [`HwError::OpenPath`].
    fn reopen(&mut self, path: PathId) -> Result<(), HwError>;
    /// Payload bytes sent and received so far.
    fn counters(&self) -> NicCounters;
}

/// Makes memory known to a NIC, and unknown again, beside the thread that drives it: neither waits for that thread. It works
/// on after the NIC has gone.
pub trait Registrar: Send {
    /// As [`NicDevice::register`].
    ///
    /// # Errors
    /// As there.
    fn register(&mut self, memory: &Registrable<'_>) -> Result<(LocalKey, RemoteKey), HwError>;
    /// The NIC reaches the memory no more once this returns: a peer's write to it fails with [`WorkError::RemoteAccess`], and
    /// a post that names the key is refused. The caller sees to it that nothing posted still does. Keys are not used again.
    ///
    /// # Errors
    /// [`HwError::Deregister`]: there is no such key.
    fn deregister(&mut self, key: LocalKey) -> Result<(), HwError>;
}

/// What a NIC has carried. Payload only: control words are not counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct NicCounters {
    /// Payload bytes sent.
    pub tx_bytes: u64,
    /// Payload bytes received.
    pub rx_bytes: u64,
}
