//! Where slots lie in the relay memory beside a NIC. Both ends compute it, so a slot travels as a number.
//!
//! Relay memory of NIC `k`: for every local rank, class and send slot, then for every local rank, class, remote rank
//! and receive slot. Nothing is shared between ranks or classes, so none can starve another.

use crate::abi::{FL_CREDIT_RING, FL_IMM_GPU_BITS, FL_IMM_SLOT_BITS};
use crate::doorbell::Class;
use crate::topo::{Cluster, GpuIdx, Rank, ServerId};

/// Sizes that all ranks agree on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotConfig {
    /// Bytes of a slot, hence the longest message. A multiple of 64.
    pub slot_bytes: u32,
    /// Send slots per local rank, class and NIC.
    pub send_slots: u32,
    /// Receive slots per local rank, class, NIC and remote rank: the credits that may stand.
    pub recv_slots: u32,
}

impl SlotConfig {
    /// The most slots, and then the largest, that fit a cap on the relay memory of a GPU on every server.
    ///
    /// # Errors
    /// [`SlotError`]: also when not even one small slot for every peer fits.
    pub fn fit(cluster: &Cluster, slot_bytes: u32, relay_bytes: u64) -> Result<Self, SlotError> {
        let sizes = std::iter::successors(Some(slot_bytes.next_multiple_of(64)), |b| Some(b / 2));
        for slot_bytes in sizes.take_while(|&b| b >= MIN_SLOT_BYTES) {
            for slots in (1..=MAX_SLOTS).rev() {
                let config = Self { slot_bytes, send_slots: 2 * slots, recv_slots: slots };
                if config.fits(cluster, relay_bytes)? {
                    return Ok(config);
                }
            }
        }
        Err(SlotError::NoRelayMemory { relay_bytes, ranks: cluster.ranks() })
    }

    fn fits(self, cluster: &Cluster, relay_bytes: u64) -> Result<bool, SlotError> {
        for server in 0..cluster.server_count() {
            let layout = match SlotLayout::new(cluster, ServerId(server), self) {
                Err(SlotError::TooManySlots { .. }) if self.recv_slots > 1 => return Ok(false),
                other => other?,
            };
            let nics = &cluster.server(ServerId(server)).nics;
            let most = nics.iter().map(|n| nics.iter().filter(|m| m.relay_gpu == n.relay_gpu).count()).max();
            if layout.relay_bytes() * most.unwrap_or(0) as u64 > relay_bytes {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Smaller slots cost more than they carry.
const MIN_SLOT_BYTES: u32 = 4096;
/// Slots that keep a NIC busy while the word of a used one travels.
const MAX_SLOTS: u32 = 4;
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

const CLASSES: u64 = Class::ALL.len() as u64;

/// The layout of the relay memory beside each NIC of one server.
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

    /// Bytes of relay memory per NIC.
    pub fn relay_bytes(&self) -> u64 {
        (self.send_slots_in_all() + self.recv_slots_in_all()) * u64::from(self.config.slot_bytes)
    }

    fn send_slots_in_all(&self) -> u64 {
        u64::from(self.gpus) * CLASSES * u64::from(self.config.send_slots)
    }

    fn recv_slots_in_all(&self) -> u64 {
        u64::from(self.gpus) * CLASSES * u64::from(self.slots_per_class())
    }

    /// Receive slots per local rank, class and NIC.
    pub fn slots_per_class(&self) -> u32 {
        self.senders * self.config.recv_slots
    }

    /// Where a send slot of a local rank starts.
    pub fn send_offset(&self, gpu: GpuIdx, class: Class, slot: u32) -> u64 {
        let n =
            (u64::from(gpu.0) * CLASSES + class as u64) * u64::from(self.config.send_slots) + u64::from(slot);
        n * u64::from(self.config.slot_bytes)
    }

    /// Whether `bytes` from `offset` are within one send slot of a local rank: what a borrower may have sent.
    pub fn is_send_span(&self, gpu: GpuIdx, offset: u64, bytes: u32) -> bool {
        let slot_bytes = u64::from(self.config.slot_bytes);
        let first = self.send_offset(gpu, Class::Plan, 0);
        let end = first + CLASSES * u64::from(self.config.send_slots) * slot_bytes;
        let within_slot = offset % slot_bytes + u64::from(bytes) <= slot_bytes;
        offset >= first && offset < end && within_slot
    }

    /// Where a receive slot of a local rank starts.
    pub fn recv_offset(&self, gpu: GpuIdx, class: Class, slot: u32) -> u64 {
        let n =
            (u64::from(gpu.0) * CLASSES + class as u64) * u64::from(self.slots_per_class()) + u64::from(slot);
        (self.send_slots_in_all() + n) * u64::from(self.config.slot_bytes)
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

    fn layout(server: u32) -> SlotLayout {
        let cluster = Cluster::new(vec![
            Server::new(2, &[1; 2], 1),
            Server::new(3, &[1], 1),
            Server::new(2, &[1; 2], 1),
        ]);
        let config = SlotConfig { slot_bytes: 4096, send_slots: 3, recv_slots: 2 };
        SlotLayout::new(&cluster, ServerId(server), config).unwrap()
    }

    #[test]
    fn slots_tile_the_relay_memory() {
        let l = layout(1);
        let mut offsets = Vec::new();
        for gpu in (0..3).map(GpuIdx) {
            for class in Class::ALL {
                offsets.extend((0..3).map(|s| l.send_offset(gpu, class, s)));
                offsets.extend((0..l.slots_per_class()).map(|s| l.recv_offset(gpu, class, s)));
            }
        }
        offsets.sort();
        assert!(offsets.iter().enumerate().all(|(i, &o)| o == i as u64 * 4096));
        assert_eq!(offsets.len() as u64 * 4096, l.relay_bytes());
    }

    #[test]
    fn slots_name_their_sender() {
        let l = layout(1);
        for sender in [0, 1, 5, 6].map(Rank) {
            let first = l.first_slot_of(sender);
            assert!((first..first + 2).all(|s| l.sender_of(s) == sender));
        }
    }

    #[test]
    fn a_borrower_cannot_send_what_is_not_its_own() {
        let l = layout(0);
        let own = l.send_offset(GpuIdx(1), Class::Put, 2);
        assert!(l.is_send_span(GpuIdx(1), own, 4096));
        assert!(!l.is_send_span(GpuIdx(0), own, 1));
        assert!(!l.is_send_span(GpuIdx(1), own + 1, 4096));
        assert!(!l.is_send_span(GpuIdx(1), l.recv_offset(GpuIdx(1), Class::Plan, 0), 1));
    }
}
