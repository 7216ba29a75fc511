//! A rank's channel between kernels and proxy: the memory behind `FlChannel`, and the host's ends of its rings.

use std::sync::Arc;

use crate::abi::{
    FL_STATUS_ABORTED, FL_STATUS_BAD_ARRIVAL, FL_STATUS_BAD_MESSAGE, FL_STATUS_NO_ARMED_SLOT,
    FL_STATUS_NO_ARRIVAL, FL_STATUS_OK, FL_STATUS_PEER_SILENT, FL_STATUS_RING_FULL, FlArmedSlot, FlArrival,
    FlChannel, FlDoorbell, FlPeerFlags, FlRing, FlStatus,
};
use crate::engine::Publish;
use crate::hw::MappedHost;
use crate::ring::{self, Consumer, RingLayout};
use crate::words::{Ordering, WordSlice, Words, fence};

const LINE: usize = 8;
const DOORBELL_WORDS: usize = size_of::<FlDoorbell>() / 8;
const ARMED_WORDS: usize = size_of::<FlArmedSlot>() / 8;
const ARRIVAL_WORDS: usize = size_of::<FlArrival>() / 8;
const STATUS_WORDS: usize = size_of::<FlStatus>() / 8;
const RING_WORDS: usize = size_of::<FlRing>() / 8;

/// Sizes of a channel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChannelConfig {
    /// This rank.
    pub rank: u32,
    /// Ranks of its server.
    pub local_ranks: u32,
    /// Doorbell rings; blocks are dealt to them.
    pub doorbell_rings: u32,
    /// Descriptors per ring, a power of two.
    pub doorbell_capacity: u64,
    /// Queues of armed slots, in all.
    pub queues: u32,
    /// Those of them for kernels that walk a plan: the first ones.
    pub work_queues: u32,
    /// Armed slots per queue, a power of two.
    pub armed_depth: u32,
    /// Arrivals, a power of two and at least the receive slots of this rank.
    pub arrival_capacity: u32,
}

/// Where the parts lie in host-mapped memory, in words.
#[derive(Clone, Copy, Debug)]
struct HostLayout {
    abort: usize,
    status: usize,
    peer_flags: usize,
    rings: usize,
    cons_idx: usize,
    doorbells: usize,
    armed: usize,
    arrivals: usize,
    words: usize,
}

impl HostLayout {
    fn new(c: &ChannelConfig) -> Self {
        let mut next = 0;
        let mut take = |words: usize| {
            let at = next;
            next = (at + words).next_multiple_of(LINE);
            at
        };
        Self {
            abort: take(1),
            status: take(STATUS_WORDS),
            peer_flags: take(c.local_ranks as usize),
            rings: take(RING_WORDS * c.doorbell_rings as usize),
            cons_idx: take(LINE * c.doorbell_rings as usize),
            doorbells: take(DOORBELL_WORDS * c.doorbell_capacity as usize * c.doorbell_rings as usize),
            armed: take(ARMED_WORDS * c.armed_depth as usize * c.queues as usize),
            arrivals: take(ARRIVAL_WORDS * c.arrival_capacity as usize),
            words: take(0),
        }
    }
}

/// Where the parts lie in device memory, in bytes. The peers' flags come first: peers compute their address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceLayout {
    prod_idx: u64,
    queue_next: u64,
    arrival_next: u64,
    channel: u64,
    /// Bytes in all.
    pub bytes: u64,
}

impl DeviceLayout {
    /// The layout for a channel.
    pub fn new(c: &ChannelConfig) -> Self {
        let mut next = u64::from(c.local_ranks) * size_of::<FlPeerFlags>() as u64;
        let mut take = |bytes: u64| {
            let at = next.next_multiple_of(64);
            next = at + bytes;
            at
        };
        Self {
            prod_idx: take(64 * u64::from(c.doorbell_rings)),
            queue_next: take(8 * u64::from(c.queues)),
            arrival_next: take(8),
            channel: take(size_of::<FlChannel>() as u64),
            bytes: take(0),
        }
    }

    /// Where local rank `i` finds its flags in a peer's device memory.
    pub fn flags_of(i: u32) -> u64 {
        u64::from(i) * size_of::<FlPeerFlags>() as u64
    }
}

/// The channel's memory, and how kernels are told of it.
pub struct Channel {
    config: ChannelConfig,
    layout: HostLayout,
    words: WordSlice,
    mapped_dev_ptr: u64,
}

/// A kernel gave up; what it said.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelStatus {
    /// The host told it to.
    #[error("the kernel was told to stop")]
    Aborted,
    /// No slot was armed in time.
    #[error("the kernel waited too long for a send slot: {sent} of {expected} messages were sent")]
    NoArmedSlot {
        /// Messages sent.
        sent: u64,
        /// Messages to send.
        expected: u64,
    },
    /// Not all messages came in time.
    #[error("the kernel waited too long for messages: {drained} of {expected} came")]
    NoArrival {
        /// Messages drained.
        drained: u64,
        /// Messages due.
        expected: u64,
    },
    /// The host did not empty a doorbell ring.
    #[error("doorbell ring {ring} stayed full at descriptor {idx}")]
    RingFull {
        /// The ring.
        ring: u64,
        /// The descriptor.
        idx: u64,
    },
    /// A local peer was not ready, or did not finish.
    #[error("local rank {local_rank} did not take part in call {call} in time")]
    PeerSilent {
        /// Which one.
        local_rank: u64,
        /// The call.
        call: u64,
    },
    /// A message that is not in the plan.
    #[error("message {seq} of rank {src} is not in the plan, or has another size")]
    BadArrival {
        /// Source.
        src: u64,
        /// Sequence in the call.
        seq: u64,
    },
    /// An armed slot names a message that is not in the plan.
    #[error("queue {queue} asked for message {message:#x}, which is not in the plan")]
    BadMessage {
        /// The queue.
        queue: u64,
        /// Piece and part.
        message: u64,
    },
    /// A code that this library does not know.
    #[error("the kernel stopped with unknown status {code}")]
    Unknown {
        /// The code.
        code: u64,
    },
}

impl KernelStatus {
    /// Whether it only says that something did not come.
    pub fn is_timeout(self) -> bool {
        matches!(
            self,
            Self::NoArmedSlot { .. }
                | Self::NoArrival { .. }
                | Self::RingFull { .. }
                | Self::PeerSilent { .. }
        )
    }
}

impl Channel {
    /// Words of host-mapped memory that a channel takes.
    pub fn host_bytes(config: &ChannelConfig) -> usize {
        HostLayout::new(config).words * 8
    }

    /// A channel in fresh host-mapped memory.
    pub fn new<M: MappedHost + 'static>(config: ChannelConfig, memory: Arc<M>) -> Self {
        let layout = HostLayout::new(&config);
        assert!(layout.words * 8 <= memory.bytes(), "channel memory too small");
        let mapped_dev_ptr = memory.mapped_dev_ptr();
        let first = memory.host_ptr();
        // SAFETY: fresh page-aligned memory of that size, alive in `memory`, reached by both sides as words only.
        let words = unsafe { WordSlice::new(first, layout.words, memory) };
        Self { config, layout, words, mapped_dev_ptr }
    }

    fn dev_ptr(&self, word: usize) -> u64 {
        self.mapped_dev_ptr + 8 * word as u64
    }

    /// Fills the tables that kernels read, and returns the `FlChannel` to be written to device memory at
    /// `control_dev_ptr` + its place. `peer_control_dev_ptrs[i]`: local rank `i`'s device memory, as this GPU sees it.
    pub fn describe(
        &self,
        control_dev_ptr: u64,
        peer_control_dev_ptrs: &[u64],
        local_rank: u32,
    ) -> (u64, FlChannel) {
        let (c, l, device) = (&self.config, &self.layout, DeviceLayout::new(&self.config));
        for (i, peer) in peer_control_dev_ptrs.iter().enumerate() {
            self.words
                .word(l.peer_flags + i)
                .store(peer + DeviceLayout::flags_of(local_rank), Ordering::Relaxed);
        }
        for r in 0..c.doorbell_rings as usize {
            let ring = [
                self.dev_ptr(l.doorbells + r * DOORBELL_WORDS * c.doorbell_capacity as usize),
                control_dev_ptr + device.prod_idx + 64 * r as u64,
                self.dev_ptr(l.cons_idx + r * LINE),
                c.doorbell_capacity,
            ];
            for (i, value) in ring.into_iter().enumerate() {
                self.words.word(l.rings + r * RING_WORDS + i).store(value, Ordering::Relaxed);
            }
        }
        let channel = FlChannel {
            rank: c.rank,
            doorbell_rings: c.doorbell_rings,
            work_queues: c.work_queues,
            armed_depth: c.armed_depth,
            arrival_capacity: c.arrival_capacity,
            local_ranks: c.local_ranks,
            doorbell_rings_ptr: self.dev_ptr(l.rings),
            armed_ptr: self.dev_ptr(l.armed),
            queue_next_ptr: control_dev_ptr + device.queue_next,
            arrivals_ptr: self.dev_ptr(l.arrivals),
            arrival_next_ptr: control_dev_ptr + device.arrival_next,
            flags_ptr: control_dev_ptr,
            peer_flags_ptr: self.dev_ptr(l.peer_flags),
            abort_ptr: self.dev_ptr(l.abort),
            status_ptr: self.dev_ptr(l.status),
        };
        (control_dev_ptr + device.channel, channel)
    }

    /// The proxy's ends of the rings. Once.
    pub fn proxy_end(&self) -> ProxyEnd {
        let (c, l) = (&self.config, &self.layout);
        let doorbells = (0..c.doorbell_rings as usize).map(|r| {
            // Kernels keep their index in device memory; the host never reads it.
            let cons_idx_at = l.cons_idx + r * LINE;
            let entries_at = l.doorbells + r * DOORBELL_WORDS * c.doorbell_capacity as usize;
            let layout = RingLayout {
                prod_idx_at: cons_idx_at,
                cons_idx_at,
                entries_at,
                capacity: c.doorbell_capacity,
            };
            Consumer::new(self.words.clone(), layout)
        });
        ProxyEnd {
            doorbells: doorbells.collect(),
            words: self.words.clone(),
            layout: self.layout,
            config: self.config,
            arrivals: 0,
        }
    }

    /// The kernels' ends of the rings, for kernels that run on the host: models and tests. Once.
    pub fn kernel_end(&self) -> KernelEnd {
        let doorbells = vec![0; self.config.doorbell_rings as usize];
        KernelEnd {
            words: self.words.clone(),
            layout: self.layout,
            config: self.config,
            doorbells,
            arrivals: 0,
        }
    }

    /// Tells kernels to stop.
    pub fn abort(&self) {
        self.words.word(self.layout.abort).store(1, Ordering::Release);
    }

    /// Why a kernel gave up, if one did.
    pub fn status(&self) -> Option<KernelStatus> {
        let [code, a, b] = [0, 1, 2].map(|i| self.words.word(self.layout.status + i).load(Ordering::Acquire));
        Some(match code as u32 {
            FL_STATUS_OK => return None,
            FL_STATUS_ABORTED => KernelStatus::Aborted,
            FL_STATUS_NO_ARMED_SLOT => KernelStatus::NoArmedSlot { sent: a, expected: b },
            FL_STATUS_NO_ARRIVAL => KernelStatus::NoArrival { drained: a, expected: b },
            FL_STATUS_RING_FULL => KernelStatus::RingFull { ring: a, idx: b },
            FL_STATUS_PEER_SILENT => KernelStatus::PeerSilent { local_rank: a, call: b },
            FL_STATUS_BAD_ARRIVAL => KernelStatus::BadArrival { src: a, seq: b },
            FL_STATUS_BAD_MESSAGE => KernelStatus::BadMessage { queue: a, message: b },
            _ => KernelStatus::Unknown { code },
        })
    }
}

/// The proxy's ends of a channel's rings.
pub struct ProxyEnd {
    /// One consumer per doorbell ring.
    pub doorbells: Vec<Consumer<WordSlice, DOORBELL_WORDS>>,
    words: WordSlice,
    layout: HostLayout,
    config: ChannelConfig,
    arrivals: u64,
}

impl ProxyEnd {
    /// Shows a kernel the slot at place `idx` of a queue, for a message as `FlArmedSlot` words it. Its place is free:
    /// at most `armed_depth` are armed.
    pub fn arm(&self, queue: u32, idx: u64, slot_dev_ptr: u64, message: u64) {
        let depth = u64::from(self.config.armed_depth);
        let at = self.layout.armed + queue as usize * ARMED_WORDS * depth as usize;
        ring::write_entry(&self.words, at, idx, depth, &[slot_dev_ptr, message]);
    }

    /// Shows kernels a message. Its place is free: the ring holds as many as there are receive slots.
    pub fn publish(&mut self, arrival: &Publish, slot_dev_ptr: u64) {
        let src_bytes = u64::from(arrival.src.0) << 32 | u64::from(arrival.bytes);
        let slot = (arrival.class as u64) << 60 | u64::from(arrival.nic.0) << 32 | u64::from(arrival.slot);
        let capacity = u64::from(self.config.arrival_capacity);
        let entry = [slot_dev_ptr, arrival.seq, src_bytes, slot];
        ring::write_entry(&self.words, self.layout.arrivals, self.arrivals, capacity, &entry);
        self.arrivals += 1;
    }
}

/// The kernels' ends of a channel's rings, as `kernels/relay.cuh` and `doorbell.cuh` use them.
pub struct KernelEnd {
    words: WordSlice,
    layout: HostLayout,
    config: ChannelConfig,
    /// Descriptors ever written, by ring.
    doorbells: Vec<u64>,
    arrivals: u64,
}

/// An arrival as a kernel sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelArrival {
    /// Where the message lies.
    pub dev_ptr: u64,
    /// Which message of its source, from the start of the call.
    pub seq: u64,
    /// Source.
    pub src: u32,
    /// Payload bytes.
    pub bytes: u32,
    /// What gives the slot back: class << 60 | NIC << 32 | slot.
    pub slot: u64,
}

impl KernelEnd {
    fn entry<const N: usize>(&self, entries_at: usize, idx: u64, capacity: u64) -> Option<[u64; N]> {
        let first = entries_at + N * (idx % capacity) as usize;
        // Relaxed: the fence below orders all of them before anything the caller reads.
        let entry: [u64; N] = std::array::from_fn(|i| self.words.word(first + i).load(Ordering::Relaxed));
        if entry.iter().any(|word| word >> 63 != ring::lap(idx, capacity)) {
            return None;
        }
        // Pairs with the release fence of `ring::write_entry`.
        fence(Ordering::Acquire);
        Some(entry.map(|word| word & ring::WORD_MAX))
    }

    /// Address and message of the slot at place `idx` of a queue, if it is armed. The place one lap before was.
    pub fn armed(&self, queue: u32, idx: u64) -> Option<[u64; 2]> {
        let depth = u64::from(self.config.armed_depth);
        let at = self.layout.armed + queue as usize * ARMED_WORDS * depth as usize;
        self.entry::<ARMED_WORDS>(at, idx, depth)
    }

    /// Takes the oldest arrival.
    pub fn take_arrival(&mut self) -> Option<KernelArrival> {
        let capacity = self.config.arrival_capacity.into();
        let entry = self.entry::<ARRIVAL_WORDS>(self.layout.arrivals, self.arrivals, capacity)?;
        self.arrivals += 1;
        let [dev_ptr, seq, src_bytes, slot] = entry;
        Some(KernelArrival { dev_ptr, seq, src: (src_bytes >> 32) as u32, bytes: src_bytes as u32, slot })
    }

    /// Rings a doorbell.
    ///
    /// # Errors
    /// [`ring::Full`]: try again.
    pub fn ring(&mut self, ring: u32, words: [u64; DOORBELL_WORDS]) -> Result<(), ring::Full> {
        let (r, capacity) = (ring as usize, self.config.doorbell_capacity);
        let idx = self.doorbells[r];
        // Acquire: pairs with the release in `Consumer::publish`.
        let read = self.words.word(self.layout.cons_idx + r * LINE).load(Ordering::Acquire);
        if idx - read >= capacity {
            return Err(ring::Full);
        }
        let entries_at = self.layout.doorbells + r * DOORBELL_WORDS * capacity as usize;
        ring::write_entry(&self.words, entries_at, idx, capacity, &words);
        self.doorbells[r] += 1;
        Ok(())
    }
}
