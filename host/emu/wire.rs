//! The emulated wire: the one thing that NICs of different servers share. It holds each NIC's pace in both directions,
//! its counters, its link, and the ring through which arrivals are told.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};

use super::pacer;
use crate::hw::{HwError, LinkState, Nanos, NicCounters, WorkError};
use crate::ring::{Consumer, Producer, RingLayout};
use crate::shm::SharedMemory;
use crate::topo::NicId;
use crate::words::{AtomicU64, Ordering, WordSlice, Words};

/// Words of an arrival: when it is due, immediate | bytes << 32 (31 bits), from | the place of the registration << 32, where
/// in it.
pub(super) const ARRIVAL_WORDS: usize = 4;
/// Arrivals that a NIC can hold before senders must wait: the depth of its receive queue.
const ARRIVAL_CAPACITY: u64 = 4096;
const LINE: usize = 8;
const TX_FREE_AT: usize = 0;
const RX_FREE_AT: usize = LINE;
const TX_BYTES_AT: usize = 2 * LINE;
const RX_BYTES_AT: usize = 2 * LINE + 1;
const LINK_DOWN_AT: usize = 2 * LINE + 2;
const RING_AT: usize = 3 * LINE;

/// What all processes must agree on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WireConfig {
    /// Emulated rate per direction of each NIC of the job; 0 = down.
    pub nic_byte_per_s: Vec<u64>,
}

/// A process's view of the wire.
#[derive(Clone)]
pub struct Wire {
    memory: Arc<SharedMemory>,
    words: WordSlice,
    config: Arc<WireConfig>,
}

fn words_per_nic() -> usize {
    RING_AT + RingLayout::words(ARRIVAL_WORDS, ARRIVAL_CAPACITY)
}

/// NICs, then the gate of each pair, sender by sender, then the registrations of each NIC.
fn words(nics: usize) -> usize {
    nics * words_per_nic() + nics * nics + nics * REGISTRATIONS * REGISTRATION_WORDS
}

/// Registrations that a NIC can have at a time.
pub(super) const REGISTRATIONS: usize = 4096;
/// Words of one: its generation, odd while it is there; the [address](fd_address) of its memory.
const REGISTRATION_WORDS: usize = 2;

impl Wire {
    /// A new wire.
    ///
    /// # Errors
    /// [`HwError::Os`].
    pub fn create(config: WireConfig) -> Result<Self, HwError> {
        let memory = SharedMemory::create("fuselink-wire", words(config.nic_byte_per_s.len()))?;
        Ok(Self { words: memory.words(), memory, config: Arc::new(config) })
    }

    /// The wire behind another process's [`address`](Self::address).
    ///
    /// # Errors
    /// [`HwError::Os`] when that process is gone or not visible from here.
    pub fn open(address: u64, config: WireConfig) -> Result<Self, HwError> {
        let fd = open_remote_fd(address)
            .map_err(|e| HwError::Os { operation: "open the emulated wire, which reaches this host only (between hosts use NICs over verbs)", source: e.into() })?;
        let memory = SharedMemory::open(fd, words(config.nic_byte_per_s.len()))?;
        Ok(Self { words: memory.words(), memory, config: Arc::new(config) })
    }

    /// Where other processes of this host find the wire.
    pub fn address(&self) -> u64 {
        fd_address(self.memory.as_fd())
    }

    fn word(&self, nic: NicId, at: usize) -> &AtomicU64 {
        self.words.word(nic.idx() * words_per_nic() + at)
    }

    /// The gate of what one NIC sends to another.
    pub(super) fn gate(&self, from: NicId, to: NicId) -> &AtomicU64 {
        let nics = self.config.nic_byte_per_s.len();
        self.words.word(nics * words_per_nic() + from.idx() * nics + to.idx())
    }

    /// A registration of a NIC's: generation, and address.
    pub(super) fn registration(&self, nic: NicId, place: usize) -> [&AtomicU64; REGISTRATION_WORDS] {
        let nics = self.config.nic_byte_per_s.len();
        let table = nics * words_per_nic() + nics * nics;
        let at = table + (nic.idx() * REGISTRATIONS + place) * REGISTRATION_WORDS;
        [self.words.word(at), self.words.word(at + 1)]
    }

    fn ring(&self, nic: NicId) -> (WordSlice, RingLayout) {
        let part = self.words.part(nic.idx() * words_per_nic() + RING_AT, words_per_nic() - RING_AT);
        (part, RingLayout::at(0, ARRIVAL_CAPACITY))
    }

    /// Number of NICs.
    pub fn nics(&self) -> u32 {
        self.config.nic_byte_per_s.len() as u32
    }

    /// A NIC's rate per direction.
    pub fn byte_per_s(&self, nic: NicId) -> u64 {
        self.config.nic_byte_per_s[nic.idx()]
    }

    pub(super) fn arrivals_to(&self, nic: NicId) -> Producer<WordSlice, ARRIVAL_WORDS> {
        let (memory, layout) = self.ring(nic);
        Producer::new(memory, layout)
    }

    pub(super) fn arrivals_of(&self, nic: NicId) -> Consumer<WordSlice, ARRIVAL_WORDS> {
        let (memory, layout) = self.ring(nic);
        Consumer::new(memory, layout)
    }

    /// When the NIC can send its next byte.
    pub(super) fn tx_free_at(&self, nic: NicId) -> Nanos {
        self.word(nic, TX_FREE_AT).load(Ordering::Relaxed)
    }

    /// Takes the time of `bytes` on the sending NIC, from `from`; returns when the last byte has left.
    pub(super) fn reserve_tx(&self, nic: NicId, from: Nanos, bytes: u64) -> Nanos {
        let duration = pacer::duration_ns(bytes, self.byte_per_s(nic));
        pacer::reserve(self.word(nic, TX_FREE_AT), from, duration)
    }

    /// The same on the receiving NIC.
    pub(super) fn reserve_rx(&self, nic: NicId, from: Nanos, bytes: u64) -> Nanos {
        let duration = pacer::duration_ns(bytes, self.byte_per_s(nic));
        pacer::reserve(self.word(nic, RX_FREE_AT), from, duration)
    }

    pub(super) fn count(&self, from: NicId, to: NicId, bytes: u64) {
        // Relaxed: totals, read after the traffic has been waited for.
        self.word(from, TX_BYTES_AT).fetch_add(bytes, Ordering::Relaxed);
        self.word(to, RX_BYTES_AT).fetch_add(bytes, Ordering::Relaxed);
    }

    /// Payload bytes that a NIC has carried.
    pub fn counters(&self, nic: NicId) -> NicCounters {
        NicCounters {
            tx_bytes: self.word(nic, TX_BYTES_AT).load(Ordering::Relaxed),
            rx_bytes: self.word(nic, RX_BYTES_AT).load(Ordering::Relaxed),
        }
    }

    /// Whether a NIC's link is up.
    pub fn link(&self, nic: NicId) -> LinkState {
        let down = self.word(nic, LINK_DOWN_AT).load(Ordering::Relaxed) != 0 || self.byte_per_s(nic) == 0;
        if down { LinkState::Down } else { LinkState::Up }
    }

    /// Pulls the cable, or puts it back.
    pub fn set_link(&self, nic: NicId, state: LinkState) {
        self.word(nic, LINK_DOWN_AT).store((state == LinkState::Down).into(), Ordering::Relaxed);
    }
}

/// A descriptor's address on this host: process and number.
pub(super) fn fd_address(fd: BorrowedFd<'_>) -> u64 {
    u64::from(std::process::id()) << 32 | fd.as_raw_fd() as u64
}

/// Opens the shared memory behind an address: the wire reaching into a peer's registered memory.
pub(super) fn open_remote_fd(address: u64) -> rustix::io::Result<OwnedFd> {
    let path = format!("/proc/{}/fd/{}", address >> 32, address & 0xffff_ffff);
    let link = rustix::fs::readlink(&path, Vec::new())?;
    if !link.as_bytes().starts_with(b"/memfd:fuselink") {
        return Err(rustix::io::Errno::ACCESS);
    }
    rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

/// Why the memory behind an address could not be opened: its process is gone, or has no such memory.
pub(super) fn why_unreachable(address: u64) -> WorkError {
    match rustix::fs::stat(format!("/proc/{}", address >> 32)) {
        Ok(_) => WorkError::RemoteAccess,
        Err(_) => WorkError::RetryExceeded,
    }
}
