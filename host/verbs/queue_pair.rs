//! A reliable connection's queue pair. Its states are types, so that only what a state allows can be asked of it:
//! [`Prepared`] -> [`Ready`] -> [`Failed`]. A failed one is not brought back: it is destroyed once it is drained, and a new one,
//! with a number of its own, takes its place, so that no late packet of the old connection can land on the new.

use std::io;

use ibverbs_sys as ffi;
use ibverbs_sys::ibv_qp_attr_mask as mask;
use ibverbs_sys::ibv_qp_state as state;

use super::advice::{Operation, advise};
use super::raw::{QueuePairParts, RawQueuePair};
use super::settings::VerbsSettings;
use super::wire::Place;

/// Where this end of a connection is, and how it sends.
#[derive(Clone, Copy)]
pub(super) struct Local<'a> {
    pub settings: &'a VerbsSettings,
    pub gid_index: u8,
    pub ethernet: bool,
    /// Code of the longest packet that the port carries.
    pub mtu: u32,
    pub traffic_class: u8,
}

/// The peer's end.
#[derive(Clone, Copy)]
pub(super) struct Remote {
    pub place: Place,
    pub queue_pair: u32,
    pub psn: u32,
}

/// The way to a place.
pub(super) fn address(local: &Local<'_>, place: &Place) -> ffi::ibv_ah_attr {
    let mut attr = ffi::ibv_ah_attr {
        dlid: place.lid,
        sl: local.settings.service_level,
        port_num: local.settings.port,
        ..Default::default()
    };
    if local.ethernet {
        attr.is_global = 1;
        attr.grh.dgid.raw = place.gid.0;
        attr.grh.sgid_index = local.gid_index;
        attr.grh.hop_limit = 64;
        attr.grh.traffic_class = local.traffic_class;
    }
    attr
}

/// A queue pair that has a number, and takes no work yet.
pub(super) struct Prepared(RawQueuePair);

/// A queue pair that is connected.
pub(super) struct Ready(RawQueuePair);

/// A queue pair whose work is being flushed.
pub(super) struct Failed(RawQueuePair);

fn wrong(e: io::Error) -> io::Error {
    advise(Operation::ConnectQueuePair, e)
}

impl Prepared {
    /// A new queue pair on a port.
    pub fn new(parts: QueuePairParts, port: u8) -> io::Result<Self> {
        let mut raw = RawQueuePair::new(parts).map_err(|e| advise(Operation::CreateQueue, e))?;
        let access =
            ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ;
        let mut attr = ffi::ibv_qp_attr {
            qp_state: state::IBV_QPS_INIT,
            pkey_index: 0,
            port_num: port,
            qp_access_flags: access.0,
            ..Default::default()
        };
        let fields =
            mask::IBV_QP_STATE | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS;
        raw.modify(&mut attr, fields).map_err(wrong)?;
        Ok(Self(raw))
    }

    pub fn number(&self) -> u32 {
        self.0.number()
    }

    /// Connects it; `psn` is the first packet number that it sends.
    pub fn connect(mut self, local: &Local<'_>, remote: &Remote, psn: u32) -> io::Result<Ready> {
        let settings = local.settings;
        let peer_mtu = if remote.place.mtu == 0 { local.mtu } else { remote.place.mtu.into() };
        let mut attr = ffi::ibv_qp_attr {
            qp_state: state::IBV_QPS_RTR,
            path_mtu: settings.mtu_code(local.mtu.min(peer_mtu)),
            dest_qp_num: remote.queue_pair,
            rq_psn: remote.psn & PSN_BITS,
            max_dest_rd_atomic: 1,
            min_rnr_timer: settings.rnr_timer,
            ah_attr: address(local, &remote.place),
            ..Default::default()
        };
        let fields = mask::IBV_QP_STATE
            | mask::IBV_QP_AV
            | mask::IBV_QP_PATH_MTU
            | mask::IBV_QP_DEST_QPN
            | mask::IBV_QP_RQ_PSN
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | mask::IBV_QP_MIN_RNR_TIMER;
        self.0.modify(&mut attr, fields).map_err(wrong)?;
        let mut attr = ffi::ibv_qp_attr {
            qp_state: state::IBV_QPS_RTS,
            timeout: settings.timeout,
            retry_cnt: settings.retry_count,
            rnr_retry: settings.rnr_retry,
            sq_psn: psn & PSN_BITS,
            max_rd_atomic: 1,
            ..Default::default()
        };
        let fields = mask::IBV_QP_STATE
            | mask::IBV_QP_TIMEOUT
            | mask::IBV_QP_RETRY_CNT
            | mask::IBV_QP_RNR_RETRY
            | mask::IBV_QP_SQ_PSN
            | mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.0.modify(&mut attr, fields).map_err(wrong)?;
        Ok(Ready(self.0))
    }
}

/// Packet numbers have 24 bits.
const PSN_BITS: u32 = 0xff_ffff;

impl Ready {
    pub fn number(&self) -> u32 {
        self.0.number()
    }

    pub fn raw(&mut self) -> &mut RawQueuePair {
        &mut self.0
    }

    /// Takes it down: everything under way is flushed, nothing more is taken in.
    pub fn fail(mut self) -> Failed {
        let mut attr = ffi::ibv_qp_attr { qp_state: state::IBV_QPS_ERR, ..Default::default() };
        if let Err(e) = self.0.modify(&mut attr, mask::IBV_QP_STATE) {
            eprintln!("fuselink: cannot take queue pair {} down: {e}", self.number());
        }
        Failed(self.0)
    }
}

impl Failed {
    pub fn number(&self) -> u32 {
        self.0.number()
    }

    /// For the marker behind what is flushed.
    pub fn raw(&mut self) -> &mut RawQueuePair {
        &mut self.0
    }
}
