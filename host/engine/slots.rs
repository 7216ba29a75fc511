//! Slots in the relay memory beside a NIC: how many, how large, and where. Both ends compute it, so a slot travels as a number.
//!
//! Relay memory is lent in *lots*: the slots of one local rank and class beside one NIC, first those to send from, then for
//! every remote rank those to receive in. Nothing is shared between ranks or classes, so none can starve another. Slots of
//! the low-latency class have a size of their own.
//!
//! A lot is one chunk, or, where slots of the low-latency class are whole chunks, one chunk per slot: only then can a slot be
//! shown at an address that stays (`comm/fixed.rs`). These are the *parts* of a lot, each registered by itself.

use super::lots::{LotsAtStart, is_permanent};
use super::stream;
use crate::abi::{FL_CREDIT_RING, FL_IMM_GPU_BITS, FL_IMM_SLOT_BITS};
use crate::doorbell::Class;
use crate::topo::{Cluster, GpuIdx, NicIdx, Rank, ServerId};

/// Sizes that all ranks agree on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotConfig {
    /// Bytes of a slot, hence the longest message. A multiple of 64.
    pub slot_bytes: u32,
    /// Send slots per local rank, class and NIC.
    pub send_slots: u32,
    /// Receive slots per local rank, class, NIC and remote rank: the credits that may stand.
    pub recv_slots: u32,
    /// Bytes of a slot of the low-latency class: the longest message of a one-sided put. A multiple of 64; 0: there are no
    /// such slots.
    pub put_bytes: u32,
}

impl SlotConfig {
    /// As many slots as help, whatever relay memory they take.
    pub fn most(slot_bytes: u32, put_bytes: u32) -> Self {
        Self { slot_bytes, send_slots: 2 * MAX_SLOTS, recv_slots: MAX_SLOTS, put_bytes }
    }

    /// The most slots, and then the largest, that fit a cap on the relay memory of a GPU on every server, with slots of
    /// `put_bytes` for one-sided puts. Room is kept for all lots; where not even the smallest slots fit for all, for those
    /// that are permanent, and others are lent as far as the cap allows.
    ///
    /// # Errors
    /// [`SlotError`]: also when not even one small slot for every peer fits beside the direct NICs.
    pub fn fit(
        cluster: &Cluster,
        slot_bytes: u32,
        put_bytes: u32,
        relay_bytes: u64,
    ) -> Result<Self, SlotError> {
        let put_bytes = put_bytes.next_multiple_of(64);
        let largest = slot_bytes.next_multiple_of(64);
        let all_of = |lots| [(lots, WELL_SIZED_BYTES, ENOUGH_SLOTS), (lots, MIN_SLOT_BYTES, 1)];
        for (lots, least_bytes, least_slots) in
            [LotsAtStart::All, LotsAtStart::Permanent].into_iter().flat_map(all_of)
        {
            let sizes = std::iter::successors(Some(largest), |b| Some(b / 2));
            for slot_bytes in sizes.take_while(|&b| b >= least_bytes) {
                for slots in (least_slots..=MAX_SLOTS).rev() {
                    let config = Self { slot_bytes, send_slots: 2 * slots, recv_slots: slots, put_bytes };
                    if config.fits(cluster, relay_bytes, lots)? {
                        return Ok(config);
                    }
                }
            }
        }
        Err(SlotError::NoRelayMemory { relay_bytes, ranks: cluster.ranks() })
    }

    /// Bytes of a slot of a class.
    pub fn bytes_of(&self, class: Class) -> u32 {
        if class == Class::LowLatency { self.put_bytes } else { self.slot_bytes }
    }

    fn fits(self, cluster: &Cluster, relay_bytes: u64, lots: LotsAtStart) -> Result<bool, SlotError> {
        for server in 0..cluster.server_count() {
            let layout = match SlotLayout::new(cluster, ServerId(server), self) {
                Err(SlotError::TooManySlots { .. }) if self.recv_slots > 1 => return Ok(false),
                other => other?,
            };
            let gpus = (0..cluster.server(ServerId(server)).gpus).map(GpuIdx);
            let most = gpus.map(|gpu| layout.gpu_bytes(cluster, ServerId(server), gpu, lots)).max();
            if most.unwrap_or(0) > relay_bytes {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// GPUs give physical memory in multiples of this. One that gives more at a time passes the cap by less than a chunk per lot.
pub const CHUNK_BYTES: u64 = 2 << 20;
/// Smaller slots cost more than they carry.
const MIN_SLOT_BYTES: u32 = 4096;
/// Slots that keep a NIC busy while one is filled, sent, drained and granted again. Where one GPU uses so many NICs that
/// scale-up is as busy as they are, that takes 70 us: 7 messages of 512 KiB at 400 Gbit/s (`sim p2p-nics`).
const MAX_SLOTS: u32 = 8;
/// Smaller slots rather than fewer, down to this size: a NIC idles while its few slots are on their way.
const ENOUGH_SLOTS: u32 = 4;
const WELL_SIZED_BYTES: u32 = 64 << 10;
const _: () = assert!(
    2 * super::LINE_SLOTS <= FL_CREDIT_RING as usize,
    "a credit must not overwrite one that is not read yet"
);
const _: () = assert!(MAX_SLOTS as usize <= super::LINE_SLOTS, "an answer must have room for each slot");

/// The cluster or the configuration asks for more than an immediate can name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SlotError {
    /// Too many remote ranks times receive slots.
    #[error(
        "{senders} remote ranks with {recv_slots} receive slots each do not fit the {max} that a message can name"
    )]
    TooManySlots {
        /// Ranks outside of the server.
        senders: u32,
        /// Slots for each.
        recv_slots: u32,
        /// The most.
        max: u32,
    },
    /// The cap is too low.
    #[error(
        "{relay_bytes} bytes of relay memory per GPU are too few for the peers among {ranks} ranks; raise FUSELINK_RELAY_BYTES"
    )]
    NoRelayMemory {
        /// The cap.
        relay_bytes: u64,
        /// Ranks of the job.
        ranks: u32,
    },
    /// Too many GPUs in a server.
    #[error("{gpus} GPUs in one server do not fit the {max} that a message can name")]
    TooManyGpus {
        /// GPUs.
        gpus: u32,
        /// The most.
        max: u32,
    },
}

/// What is lent and taken back at once: the slots of one local rank and class beside one NIC of its server.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Lot {
    /// The NIC.
    pub nic: NicIdx,
    /// The GPU of the rank that uses it.
    pub gpu: GpuIdx,
    /// The class.
    pub class: Class,
}

/// The slots of one server's lots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotLayout {
    config: SlotConfig,
    gpus: u32,
    first_rank: u32,
    senders: u32,
}

impl SlotLayout {
    /// The layout for a server.
    ///
    /// # Errors
    /// [`SlotError`].
    pub fn new(cluster: &Cluster, server: ServerId, config: SlotConfig) -> Result<Self, SlotError> {
        let gpus = cluster.server(server).gpus;
        let senders = cluster.ranks() - gpus;
        let max = 1 << FL_IMM_SLOT_BITS;
        if u64::from(senders) * u64::from(config.recv_slots) > max {
            let max = max as u32;
            return Err(SlotError::TooManySlots { senders, recv_slots: config.recv_slots, max });
        }
        if gpus > 1 << FL_IMM_GPU_BITS {
            return Err(SlotError::TooManyGpus { gpus, max: 1 << FL_IMM_GPU_BITS });
        }
        Ok(Self { config, gpus, first_rank: cluster.first_rank(server).0, senders })
    }

    /// The sizes it was made with.
    pub fn config(&self) -> SlotConfig {
        self.config
    }

    /// Relay memory of a GPU, all lots beside its NICs or those that are permanent.
    pub fn gpu_bytes(&self, cluster: &Cluster, server: ServerId, gpu: GpuIdx, lots: LotsAtStart) -> u64 {
        let nics = cluster.server(server).nics.iter().zip((0..).map(NicIdx));
        let owned = nics.filter(|(spec, _)| spec.relay_gpu == gpu).map(|(_, nic)| nic);
        let counts = |lot: &Lot| lots == LotsAtStart::All || is_permanent(cluster, server, *lot);
        owned.flat_map(|nic| self.lots(nic)).filter(counts).map(|lot| self.chunk_bytes(lot.class)).sum()
    }

    /// The lots beside a NIC.
    pub fn lots(&self, nic: NicIdx) -> impl Iterator<Item = Lot> + use<> {
        let there = Class::ALL.map(|class| self.lot_bytes(class) > 0);
        let of = move |gpu| Class::ALL.into_iter().map(move |class| Lot { nic, gpu, class });
        (0..self.gpus).map(GpuIdx).flat_map(of).filter(move |lot| there[lot.class as usize])
    }

    /// Chunks that a lot consists of.
    pub fn parts(&self, class: Class) -> u32 {
        if self.has_chunk_per_slot(class) { self.send_slots(class) + self.slots_per_class() } else { 1 }
    }

    /// Bytes of each.
    pub fn part_bytes(&self, class: Class) -> u64 {
        self.lot_bytes(class) / u64::from(self.parts(class))
    }

    /// In which part of a lot a byte lies, and where in it.
    pub fn part_of(&self, class: Class, offset: u64) -> (u32, u64) {
        let bytes = self.part_bytes(class).max(1);
        ((offset / bytes) as u32, offset % bytes)
    }

    /// Whether each slot of a class is a chunk of its own.
    pub fn has_chunk_per_slot(&self, class: Class) -> bool {
        let put_bytes = u64::from(self.config.put_bytes);
        class == Class::LowLatency && put_bytes > 0 && put_bytes.is_multiple_of(CHUNK_BYTES)
    }

    /// Parts of all lots beside a NIC.
    pub fn part_count(&self) -> usize {
        self.gpus as usize * self.parts_per_gpu()
    }

    /// The number of a part among those beside its NIC.
    pub fn part_number(&self, lot: Lot, part: u32) -> usize {
        let before = Class::ALL.into_iter().take(lot.class as usize);
        let first: usize = before.map(|class| self.parts(class) as usize).sum();
        lot.gpu.idx() * self.parts_per_gpu() + first + part as usize
    }

    fn parts_per_gpu(&self) -> usize {
        Class::ALL.into_iter().map(|class| self.parts(class) as usize).sum()
    }

    /// Physical memory of a lot.
    pub fn chunk_bytes(&self, class: Class) -> u64 {
        self.lot_bytes(class).next_multiple_of(CHUNK_BYTES)
    }

    /// Bytes of a lot; 0: the class has no slots.
    pub fn lot_bytes(&self, class: Class) -> u64 {
        let slots = u64::from(self.send_slots(class)) + u64::from(self.slots_per_class());
        slots * u64::from(self.config.bytes_of(class))
    }

    /// Send slots per local rank and NIC. Puts need them for every destination: a slot that is armed for one is of no use
    /// to another. And one for messages that go again.
    pub fn send_slots(&self, class: Class) -> u32 {
        match class {
            Class::LowLatency if self.config.put_bytes == 0 => 0,
            Class::LowLatency => stream::AHEAD * self.senders + 1,
            _ => self.config.send_slots,
        }
    }

    /// Receive slots per local rank, class and NIC.
    pub fn slots_per_class(&self) -> u32 {
        self.senders * self.config.recv_slots
    }

    /// Where a send slot starts in its lot.
    pub fn send_offset(&self, class: Class, slot: u32) -> u64 {
        u64::from(slot) * u64::from(self.config.bytes_of(class))
    }

    /// Whether `bytes` from `offset` are within one send slot of a lot: what may be sent from it.
    pub fn is_send_span(&self, class: Class, offset: u64, bytes: u32) -> bool {
        let slot_bytes = u64::from(self.config.bytes_of(class));
        let end = self.send_offset(class, self.send_slots(class));
        offset < end && offset % slot_bytes + u64::from(bytes) <= slot_bytes
    }

    /// Where a receive slot starts in its lot.
    pub fn recv_offset(&self, class: Class, slot: u32) -> u64 {
        self.send_offset(class, self.send_slots(class))
            + u64::from(slot) * u64::from(self.config.bytes_of(class))
    }

    /// The first receive slot that is lent to a remote rank.
    pub fn first_slot_of(&self, sender: Rank) -> u32 {
        let n = if sender.0 < self.first_rank { sender.0 } else { sender.0 - self.gpus };
        n * self.config.recv_slots
    }

    /// The remote rank to which a receive slot is lent.
    pub fn sender_of(&self, slot: u32) -> Rank {
        let n = slot / self.config.recv_slots;
        Rank(if n < self.first_rank { n } else { n + self.gpus })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topo::Server;

    fn cluster() -> Cluster {
        Cluster::new(vec![Server::new(2, &[1; 2], 1), Server::new(3, &[1], 1), Server::new(2, &[1; 2], 1)])
    }

    fn layout(server: u32) -> SlotLayout {
        let config = SlotConfig { slot_bytes: 4096, send_slots: 3, recv_slots: 2, put_bytes: 256 };
        SlotLayout::new(&cluster(), ServerId(server), config).unwrap()
    }

    #[test]
    fn slots_tile_their_lot() {
        let l = layout(1);
        for class in Class::ALL {
            let bytes = u64::from(l.config.bytes_of(class));
            let sends = (0..l.send_slots(class)).map(|s| l.send_offset(class, s));
            let all: Vec<_> =
                sends.chain((0..l.slots_per_class()).map(|s| l.recv_offset(class, s))).collect();
            assert!(all.iter().enumerate().all(|(i, &offset)| offset == i as u64 * bytes));
            assert_eq!(all.len() as u64 * bytes, l.lot_bytes(class));
        }
    }

    #[test]
    fn slots_name_their_sender() {
        let l = layout(1);
        for sender in [0, 1, 5, 6].map(Rank) {
            let first = l.first_slot_of(sender);
            assert!((first..first + 2).all(|s| l.sender_of(s) == sender));
        }
    }

    /// Of whole chunks or not: parts tile their lot, have numbers of their own, and hold each slot whole.
    #[test]
    fn parts_tile_their_lot_and_slots_lie_within_them() {
        let whole = SlotConfig { put_bytes: 2 * CHUNK_BYTES as u32, ..layout(1).config };
        let whole = SlotLayout::new(&cluster(), ServerId(1), whole).unwrap();
        for (l, per_slot) in [(layout(1), false), (whole, true)] {
            let mut numbers = std::collections::BTreeSet::new();
            for lot in l.lots(NicIdx(0)) {
                let (class, parts) = (lot.class, l.parts(lot.class));
                assert_eq!(l.part_bytes(class) * u64::from(parts), l.lot_bytes(class));
                assert!((0..parts).all(|part| numbers.insert(l.part_number(lot, part))));
                let sends = (0..l.send_slots(class)).map(|s| l.send_offset(class, s));
                let offsets = sends.chain((0..l.slots_per_class()).map(|s| l.recv_offset(class, s)));
                for (n, offset) in (0..).zip(offsets) {
                    let (part, at) = l.part_of(class, offset);
                    assert!(at + u64::from(l.config.bytes_of(class)) <= l.part_bytes(class));
                    assert_eq!((part, at) == (n, 0), n == 0 || per_slot && class == Class::LowLatency);
                }
            }
            assert_eq!(numbers.len(), l.part_count());
            assert_eq!(numbers.last(), Some(&(l.part_count() - 1)));
        }
    }

    #[test]
    fn only_send_slots_can_be_sent_from() {
        let l = layout(0);
        let own = l.send_offset(Class::Put, 2);
        assert!(l.is_send_span(Class::Put, own, 4096));
        assert!(!l.is_send_span(Class::Put, own + 1, 4096));
        assert!(!l.is_send_span(Class::Put, l.recv_offset(Class::Put, 0), 1));
        assert!(!l.is_send_span(Class::LowLatency, u64::MAX, u32::MAX));
    }

    #[test]
    fn without_puts_their_class_takes_no_memory() {
        let cluster = Cluster::uniform(2, Server::new(1, &[1], 1));
        let config = SlotConfig { slot_bytes: 4096, send_slots: 3, recv_slots: 2, put_bytes: 0 };
        let l = SlotLayout::new(&cluster, ServerId(0), config).unwrap();
        assert_eq!(l.lot_bytes(Class::LowLatency), 0);
        assert!(!l.is_send_span(Class::LowLatency, 0, 0));
    }
}
