//! What a NIC reports: its device's news, completions, arrivals.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ibverbs_sys as ffi;
use ibverbs_sys::ibv_wc_status as status;

use super::VerbsNic;
use crate::hw::{HwError, LinkState, Nanos, NicEvent, WorkError};
use crate::verbs::ledger::Ended;
use crate::verbs::path::{Arrival, RequestId};
use crate::verbs::port::News;

/// Events of the device are asked for this often: it costs a system call.
const NEWS_EVERY_NS: Nanos = 1_000_000;
/// Completions taken at a time.
pub(super) const BATCH: usize = 32;

impl VerbsNic {
    pub(super) fn poll_news(&mut self, now: Nanos, events: &mut Vec<NicEvent>) -> Result<(), HwError> {
        if self.asked_at.is_some_and(|at| now.saturating_sub(at) < NEWS_EVERY_NS) {
            return Ok(());
        }
        self.asked_at = Some(now);
        let News { link, moved, last_receives, failed, fatal } = self.gear.port.news();
        if fatal {
            let source = io::Error::other("the device reports a fatal error; see the kernel's log");
            return Err(HwError::Os { operation: "go on with an RDMA device", source });
        }
        if moved {
            self.address.place = self.gear.port.place();
            self.control.forget_ways();
            self.loopback = None;
        }
        for idx in last_receives.iter().filter_map(|n| self.behind.get(n)).map(|b| b.0).collect::<Vec<_>>() {
            self.paths[idx].on_last_receive();
        }
        for idx in failed.iter().filter_map(|n| self.behind.get(n)).map(|b| b.0).collect::<Vec<_>>() {
            self.close_broken(idx);
        }
        if let Some(link) = link {
            events.push(NicEvent::Link(link));
        }
        if link == Some(LinkState::Down) {
            self.on_link_down();
        }
        Ok(())
    }

    /// What is under way would be tried again and again; its fate is decided now. Paths with nothing under way live on.
    pub(super) fn on_link_down(&mut self) {
        for idx in 0..self.paths.len() {
            if self.paths[idx].is_busy() {
                self.close(idx);
            }
            self.fail_waiting(idx, WorkError::LinkDown);
        }
    }

    pub(super) fn poll_hellos(&mut self, now: Nanos) -> Result<(), HwError> {
        let os = |source| HwError::Os { operation: "receive datagrams", source };
        for hello in self.control.hear().map_err(os)? {
            self.on_hello(&hello, now);
        }
        Ok(())
    }

    pub(super) fn poll_sends(&mut self) -> Result<(), HwError> {
        let os = |source| HwError::Os { operation: "poll completions", source };
        let mut completions = [ffi::ibv_wc::default(); BATCH];
        let queue = Arc::clone(&self.gear.sends);
        loop {
            let found = queue.poll(&mut completions).map_err(os)?;
            for wc in found {
                let id = RequestId::decode(wc.wr_id());
                let result = wc.error().map_or(Ok(()), |(status, _)| Err(self.why(status)));
                if let Some(path) = self.paths.get_mut(id.path) {
                    path.on_completion(id, result, &mut self.ended);
                    if result.is_err() {
                        self.close(id.path);
                    }
                }
            }
            if found.len() < BATCH {
                return Ok(());
            }
        }
    }

    pub(super) fn why(&self, status: status::Type) -> WorkError {
        match status {
            status::IBV_WC_REM_ACCESS_ERR | status::IBV_WC_REM_INV_REQ_ERR | status::IBV_WC_REM_OP_ERR => {
                WorkError::RemoteAccess
            }
            _ if !self.is_up() => WorkError::LinkDown,
            status::IBV_WC_RETRY_EXC_ERR
            | status::IBV_WC_RNR_RETRY_EXC_ERR
            | status::IBV_WC_RESP_TIMEOUT_ERR => WorkError::RetryExceeded,
            _ => WorkError::Flushed,
        }
    }

    pub(super) fn poll_receives(&mut self, events: &mut Vec<NicEvent>) -> Result<(), HwError> {
        let os = |source| HwError::Os { operation: "poll arrivals", source };
        let mut completions = [ffi::ibv_wc::default(); BATCH];
        let queue = Arc::clone(&self.gear.receives);
        loop {
            let found = queue.poll(&mut completions).map_err(os)?;
            self.used_receives += found.len();
            for wc in found {
                let (Some(imm), Some(&(idx, lane))) = (wc.imm_data(), self.behind.get(&wc.qp_num)) else {
                    continue;
                };
                self.paths[idx].on_arrival(lane, u32::from_be(imm), wc.len() as u32);
                while let Some(arrival) = self.paths[idx].next_arrival() {
                    self.tell_arrival(idx, arrival, events);
                }
            }
            // Often enough that senders never see an empty queue, and not for each.
            if self.used_receives >= usize::from(self.config.settings.recv_depth).min(4 * BATCH) / 4 {
                self.gear.shared.post(self.used_receives).map_err(os)?;
                self.used_receives = 0;
            }
            if found.len() < BATCH {
                return Ok(());
            }
        }
    }

    pub(super) fn tell_arrival(
        &self,
        idx: usize,
        Arrival { imm, bytes }: Arrival,
        events: &mut Vec<NicEvent>,
    ) {
        // Relaxed: a total.
        self.traffic.rx_bytes.fetch_add(bytes.into(), Ordering::Relaxed);
        events.push(NicEvent::Arrived { from: self.paths[idx].peer.nic, imm, bytes });
    }

    pub(super) fn tell_ended(&mut self, events: &mut Vec<NicEvent>) {
        for Ended { cookie, bytes, result } in self.ended.drain(..) {
            if result.is_ok() {
                // Relaxed: a total.
                self.traffic.tx_bytes.fetch_add(bytes.into(), Ordering::Relaxed);
            }
            events.push(NicEvent::Completed { cookie, result });
        }
    }
}
