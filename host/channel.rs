//! A rank's channel between kernels and proxy: the memory behind `FlChannel`, and the host's ends of its rings.

use std::sync::Arc;

use crate::abi::{FlArmedSlot, FlArrival, FlChannel, FlDoorbell, FlPeerFlags, FlRing, FlStatus, FlStream};
use crate::doorbell::{Class, Signal};
use crate::engine::Publish;
use crate::hw::MappedHost;
use crate::ring::{self, Consumer, RingLayout};
use crate::topo::{NicIdx, Rank};
use crate::words::{Ordering, WordSlice, Words, fence};

mod local;
mod status;
pub use local::LOCAL_DEPTH;
use local::LocalLayout;
pub use status::KernelStatus;

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
    /// For one-sided puts.
    pub streams: StreamConfig,
}

/// Sizes of what one-sided puts use; by default nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StreamConfig {
    /// Ranks of the job.
    pub ranks: u32,
    /// Arrivals per source, a power of two and at least the receive slots that one source may fill.
    pub arrival_depth: u32,
    /// Signals of this rank.
    pub signals: u32,
    /// The first rank of the server, and how many of it have streams among each other; 0: none.
    pub first_local_rank: u32,
    /// See `first_local_rank`.
    pub local_ranks: u32,
    /// This rank among them.
    pub local_rank: u32,
    /// Slots of a stream within the server, a power of two and at most [`LOCAL_DEPTH`].
    pub local_depth: u32,
    /// Bytes of such a slot, a multiple of 64.
    pub local_slot_bytes: u32,
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
    stream_arrivals: usize,
    completed: usize,
    signals: usize,
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
            stream_arrivals: take(ARRIVAL_WORDS * (c.streams.arrival_depth * c.streams.ranks) as usize),
            completed: take(c.streams.ranks as usize),
            signals: take(c.streams.signals as usize),
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
    taken: u64,
    seen: u64,
    channel: u64,
    local_ends: u64,
    local: u64,
    /// Bytes in all.
    pub bytes: u64,
}

impl DeviceLayout {
    /// The layout for a channel.
    pub fn new(c: &ChannelConfig) -> Self {
        let mut next = u64::from(c.local_ranks) * size_of::<FlPeerFlags>() as u64;
        let mut take = |bytes: u64| {
            let at = next.next_multiple_of(local::ALIGN);
            next = at + bytes;
            at
        };
        Self {
            prod_idx: take(64 * u64::from(c.doorbell_rings)),
            queue_next: take(8 * u64::from(c.queues)),
            arrival_next: take(8),
            taken: take(8 * u64::from(c.streams.ranks)),
            seen: take(8 * u64::from(c.streams.signals)),
            channel: take(size_of::<FlChannel>() as u64),
            local_ends: take(8 * u64::from(c.streams.local_ranks)),
            local: take(LocalLayout::new(&c.streams).bytes),
            bytes: take(0),
        }
    }

    /// Where local rank `i` finds its flags in a peer's device memory.
    pub fn flags_of(i: u32) -> u64 {
        u64::from(i) * size_of::<FlPeerFlags>() as u64
    }
}

/// What an `FlStream` says beside addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StreamLimits {
    /// Class of the messages.
    pub class: Class,
    /// Longest message.
    pub slot_bytes: u32,
    /// Longest wait of a kernel.
    pub timeout_ns: u64,
}

/// The channel's memory, and how kernels are told of it.
pub struct Channel {
    config: ChannelConfig,
    layout: HostLayout,
    words: WordSlice,
    mapped_dev_ptr: u64,
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

    /// Where kernels look for the memory of the server's ranks for streams among each other, and what is to be written there:
    /// the addresses of all of it, as this GPU sees them.
    pub fn local_ends(&self, peer_control_dev_ptrs: &[u64]) -> (u64, Vec<u64>) {
        let (streams, device) = (&self.config.streams, DeviceLayout::new(&self.config));
        let peers = peer_control_dev_ptrs.iter().take(streams.local_ranks as usize);
        let own = peer_control_dev_ptrs[streams.local_rank as usize];
        (own + device.local_ends, peers.map(|control| control + device.local).collect())
    }

    /// What a kernel is given for one-sided puts of messages of at most `slot_bytes`.
    pub fn stream(&self, channel_dev_ptr: u64, limits: StreamLimits) -> FlStream {
        let (c, l, device) = (&self.config.streams, &self.layout, DeviceLayout::new(&self.config));
        let control_dev_ptr = channel_dev_ptr - device.channel;
        let local = LocalLayout::new(c);
        FlStream {
            channel_ptr: channel_dev_ptr,
            slot_bytes: limits.slot_bytes.into(),
            timeout_ns: limits.timeout_ns,
            msg_class: limits.class as u32,
            ranks: c.ranks,
            arrival_depth: c.arrival_depth,
            signals: c.signals,
            arrivals_ptr: self.dev_ptr(l.stream_arrivals),
            taken_ptr: control_dev_ptr + device.taken,
            completed_ptr: self.dev_ptr(l.completed),
            signals_ptr: self.dev_ptr(l.signals),
            seen_ptr: control_dev_ptr + device.seen,
            local_ends_ptr: control_dev_ptr + device.local_ends,
            local_signals_offset: local.signals,
            local_slots_offset: local.slots,
            first_local_rank: c.first_local_rank,
            local_ranks: c.local_ranks,
            local_rank: c.local_rank,
            local_depth: c.local_depth,
        }
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
            stream_arrivals: vec![0; c.streams.ranks as usize],
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

    /// Signals of this rank.
    pub fn signals(&self) -> u32 {
        self.config.streams.signals
    }

    /// The queue of slots for puts to a rank.
    pub fn put_queue(&self, dst: Rank) -> u32 {
        self.config.work_queues + dst.0
    }

    /// Below which number all messages to a rank are in its memory.
    pub fn completed(&self, dst: Rank) -> u64 {
        // Acquire: pairs with `ProxyEnd::complete`.
        self.words.word(self.layout.completed + dst.idx()).load(Ordering::Acquire)
    }

    /// Where kernels count the slots that they claimed of a queue, and the messages that they took of a source, given the
    /// channel's own place.
    pub fn claims_dev_ptrs(&self, channel_dev_ptr: u64, dst: Rank) -> [u64; 2] {
        let device = DeviceLayout::new(&self.config);
        let control_dev_ptr = channel_dev_ptr - device.channel;
        let queue = u64::from(self.put_queue(dst));
        [device.queue_next + 8 * queue, device.taken + 8 * u64::from(dst.0)].map(|at| control_dev_ptr + at)
    }

    /// Why a kernel gave up, if one did.
    pub fn status(&self) -> Option<KernelStatus> {
        let [code, a, b] = [0, 1, 2].map(|i| self.words.word(self.layout.status + i).load(Ordering::Acquire));
        KernelStatus::decode(code, a, b)
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
    /// Messages ever shown, by source.
    stream_arrivals: Vec<u64>,
}

impl ProxyEnd {
    /// Shows a kernel the slot at place `idx` of a queue, for a message as `FlArmedSlot` words it. Its place is free:
    /// at most `armed_depth` are armed.
    pub fn arm(&self, queue: u32, idx: u64, slot_dev_ptr: u64, message: u64) {
        let depth = u64::from(self.config.armed_depth);
        let at = self.layout.armed + queue as usize * ARMED_WORDS * depth as usize;
        ring::write_entry(&self.words, at, idx, depth, &[slot_dev_ptr, message]);
    }

    /// Shows kernels a message of a call. Its place is free: the ring holds as many as there are receive slots.
    pub fn publish(&mut self, arrival: &Publish, slot_dev_ptr: u64) {
        let capacity = u64::from(self.config.arrival_capacity);
        let entry = arrival_entry(arrival, slot_dev_ptr);
        ring::write_entry(&self.words, self.layout.arrivals, self.arrivals, capacity, &entry);
        self.arrivals += 1;
    }

    /// Shows kernels the next message of a stream. Its place is free: a source's ring holds as many as there are receive
    /// slots for it.
    pub fn publish_in_order(&mut self, arrival: &Publish, slot_dev_ptr: u64) {
        let depth = u64::from(self.config.streams.arrival_depth);
        let at = self.layout.stream_arrivals + arrival.src.idx() * ARRIVAL_WORDS * depth as usize;
        let next = &mut self.stream_arrivals[arrival.src.idx()];
        ring::write_entry(&self.words, at, *next, depth, &arrival_entry(arrival, slot_dev_ptr));
        *next += 1;
    }

    /// Messages of a stream that kernels were shown, while none has been given back: nothing of them is overwritten.
    pub fn shown(&self, src: Rank) -> impl Iterator<Item = Publish> + '_ {
        let depth = self.config.streams.arrival_depth as usize;
        let first = self.layout.stream_arrivals + src.idx() * ARRIVAL_WORDS * depth;
        (0..self.stream_arrivals[src.idx()] as usize).map(move |n| {
            // Relaxed: this thread has written them.
            let word = |i| self.words.word(first + n * ARRIVAL_WORDS + i).load(Ordering::Relaxed);
            read_arrival([0, 1, 2, 3].map(word))
        })
    }

    /// Tells kernels that all messages of a stream below `messages` are in the memory of `dst`.
    pub fn complete(&self, dst: Rank, messages: u64) {
        // Release: pairs with fl_fence_sys in fl_flush. What it orders is the completed read of the slots.
        self.words.word(self.layout.completed + dst.idx()).store(messages, Ordering::Release);
    }

    /// Changes a signal, after everything that was published before. `None`: there is no such signal.
    pub fn signal(&self, signal: Signal) -> Option<u64> {
        if signal.number >= self.config.streams.signals {
            return None;
        }
        let word = self.words.word(self.layout.signals + signal.number as usize);
        // Relaxed: nobody but this thread writes it.
        let value = signal.apply(word.load(Ordering::Relaxed));
        // Arrivals that a kernel may look for once it has seen the signal. Pairs with fl_fence_sys in fl_poll and fl_wait.
        fence(Ordering::Release);
        word.store(value, Ordering::Relaxed);
        Some(value)
    }
}

/// The words of an arrival.
fn arrival_entry(arrival: &Publish, slot_dev_ptr: u64) -> [u64; ARRIVAL_WORDS] {
    let src_bytes = u64::from(arrival.src.0) << 32 | u64::from(arrival.bytes);
    let slot = (arrival.class as u64) << 60 | u64::from(arrival.nic.0) << 32 | u64::from(arrival.slot);
    [slot_dev_ptr, arrival.seq, src_bytes, slot]
}

/// What such an entry of class `low latency` says, its lap bits aside.
fn read_arrival([_, seq, src_bytes, slot]: [u64; ARRIVAL_WORDS]) -> Publish {
    let without_lap = u64::MAX >> 1;
    let src_bytes = src_bytes & without_lap;
    Publish {
        class: Class::LowLatency,
        src: Rank((src_bytes >> 32) as u32),
        seq: seq & without_lap,
        bytes: src_bytes as u32,
        nic: NicIdx((slot >> 32) as u32 & 0xfff_ffff),
        slot: slot as u32,
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
