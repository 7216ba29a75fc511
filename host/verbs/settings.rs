//! What can be set about NICs over verbs. The environment variables are read in one place, `comm::settings`.

use std::time::Duration;

/// How NICs are used. The same on all ranks, but for the devices, which are a server's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsSettings {
    /// The RDMA devices of this server, by NIC number: names (`mlx5_0`) or PCI bus ids (`0000:1a:00.0`). Empty: all that
    /// there are, by PCI bus id, then by name. `FUSELINK_VERBS_DEVICES`, separated by commas.
    pub devices: Vec<String>,
    /// Port of each device, from 1. `FUSELINK_VERBS_PORT`. Default 1.
    pub port: u8,
    /// Entry of the GID table. `FUSELINK_VERBS_GID_INDEX`. Default: chosen, RoCE v2 with an IPv4 address before others.
    pub gid_index: Option<u8>,
    /// Traffic class of messages on RoCE: the DSCP in the upper six bits; the fabric's lossless class.
    /// `FUSELINK_VERBS_TRAFFIC_CLASS`. Default 0.
    pub traffic_class: u8,
    /// Traffic class of control words (credits). `FUSELINK_VERBS_CONTROL_TRAFFIC_CLASS`. Default: that of messages.
    pub control_traffic_class: Option<u8>,
    /// InfiniBand service level, 0 to 15; on RoCE the priority of the VLAN tag. `FUSELINK_VERBS_SERVICE_LEVEL`. Default 0.
    pub service_level: u8,
    /// Largest packet: 256, 512, 1024, 2048 or 4096 bytes; what the ports of both ends carry bounds it.
    /// `FUSELINK_VERBS_MTU`. Default 4096.
    pub mtu_bytes: u16,
    /// A packet is sent again when 4.096 us x 2^n have passed without an answer; 1 to 31. `FUSELINK_VERBS_TIMEOUT`.
    /// Default 14 (67 ms).
    pub timeout: u8,
    /// How often it is sent again before the path has failed; 0 to 7. `FUSELINK_VERBS_RETRY_COUNT`. Default 7.
    pub retry_count: u8,
    /// How often a message is offered again to a peer whose receive queue was empty; 7 = for ever.
    /// `FUSELINK_VERBS_RNR_RETRY`. Default 7: the queue is refilled at every poll, and deadlines bound the wait.
    pub rnr_retry: u8,
    /// How long such a peer asks to wait, as the InfiniBand specification encodes it (table 45), 0 to 31.
    /// `FUSELINK_VERBS_RNR_TIMER`. Default 12 (0.64 ms).
    pub rnr_timer: u8,
    /// Queue pairs of a path: one for control words, the others for messages in turn. More spread a path over more ways
    /// through the fabric. 2 to 8. `FUSELINK_VERBS_QPS`. Default 2.
    pub queue_pairs: u8,
    /// Work that a queue pair holds, 16 to 32768. `FUSELINK_VERBS_SEND_DEPTH`. Default 256.
    pub send_depth: u16,
    /// Arrivals that a NIC's shared receive queue holds, 16 to 32768. `FUSELINK_VERBS_RECV_DEPTH`. Default 4096.
    pub recv_depth: u16,
    /// The fabric may deliver packets of one message in any order: each message is a write, followed by a write with the
    /// immediate that carries its length alone. `FUSELINK_VERBS_ADAPTIVE_ROUTING`, 0 or 1. Default 0.
    pub adaptive_routing: bool,
    /// Try to register GPU memory by its dma-buf before by its address (nvidia-peermem).
    /// `FUSELINK_VERBS_DMA_BUF`, 0 or 1. Default 1.
    pub dma_buf: bool,
    /// How long a peer's NIC may take to answer when a path is opened, in milliseconds. `FUSELINK_VERBS_OPEN_MS`.
    /// Default 5000.
    pub open_timeout: Duration,
}

impl Default for VerbsSettings {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            port: 1,
            gid_index: None,
            traffic_class: 0,
            control_traffic_class: None,
            service_level: 0,
            mtu_bytes: 4096,
            timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
            rnr_timer: 12,
            queue_pairs: 2,
            send_depth: 256,
            recv_depth: 4096,
            adaptive_routing: false,
            dma_buf: true,
            open_timeout: Duration::from_millis(5000),
        }
    }
}

/// The lengths of packets that there are, with their code in the InfiniBand specification.
pub const MTUS: [(u16, u32); 5] = [(256, 1), (512, 2), (1024, 3), (2048, 4), (4096, 5)];

impl VerbsSettings {
    /// The traffic class of control words.
    pub fn control_class(&self) -> u8 {
        self.control_traffic_class.unwrap_or(self.traffic_class)
    }

    /// Queue pairs of a path that carry messages.
    pub fn lanes(&self) -> usize {
        usize::from(self.queue_pairs.max(2)) - 1
    }

    /// The specification's code of [`mtu_bytes`](Self::mtu_bytes), at most `port`, the code of the port.
    pub fn mtu_code(&self, port: u32) -> u32 {
        let wanted =
            MTUS.iter().rev().find(|(bytes, _)| *bytes <= self.mtu_bytes).map_or(1, |(_, code)| *code);
        wanted.min(port.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_no_longer_than_the_port_carries() {
        let of = |mtu_bytes, port| VerbsSettings { mtu_bytes, ..Default::default() }.mtu_code(port);
        assert_eq!([of(4096, 5), of(4096, 3), of(1024, 5), of(256, 5), of(4096, 0)], [5, 3, 3, 1, 1]);
    }

    #[test]
    fn control_words_have_a_queue_pair_of_their_own() {
        let lanes = |queue_pairs| VerbsSettings { queue_pairs, ..Default::default() }.lanes();
        assert_eq!([lanes(2), lanes(3), lanes(8)], [1, 2, 7]);
        let settings = VerbsSettings { traffic_class: 106, ..Default::default() };
        assert_eq!(settings.control_class(), 106);
        assert_eq!(VerbsSettings { control_traffic_class: Some(8), ..settings }.control_class(), 8);
    }
}
