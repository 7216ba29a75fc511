//! Relay memory from the user's side: what calls borrow, and how it is taken back for others' use.

use std::time::Duration;

use super::device::Device;
use super::{CommError, Communicator, Reclaimed};
use crate::engine::call::Call;
use crate::engine::lots;
use crate::engine::relay::RelayCounters;
use crate::engine::slots::CHUNK_BYTES;
use crate::hw::HwError;

/// Longest that a call waits for the answers of those whom it asks for relay memory. They answer at once, but for kernels
/// that must end first; what comes later serves the next call.
const ASK_WITHIN: Duration = Duration::from_millis(50);
/// Longest that an allocation waits for relay memory to come back; shorter where the time-out is.
const RECLAIM_WITHIN: Duration = Duration::from_secs(2);

impl Communicator {
    /// Takes back the relay memory that this rank has lent to others of its server, and waits `within` for it. Calls that
    /// run keep what they need until they are over; for a while none is lent again. Not collective.
    pub fn reclaim_relay(&self, within: Duration) -> Reclaimed {
        self.relay.reclaim(u64::MAX, within)
    }

    /// What has happened to the relay memory of this rank's GPU so far.
    pub fn relay_counters(&self) -> RelayCounters {
        self.relay.counters()
    }

    /// Makes memory for the user; where the GPU has none left, relay memory makes room.
    pub(super) fn with_room<T>(
        &self,
        bytes: u64,
        make: impl Fn(&Device) -> Result<T, HwError>,
    ) -> Result<T, HwError> {
        match make(self.machine.gpu()) {
            Err(e) if e.is_out_of_memory() => {
                let bytes = bytes.max(1).saturating_add(CHUNK_BYTES - 1) / CHUNK_BYTES * CHUNK_BYTES;
                self.relay.reclaim(bytes, RECLAIM_WITHIN.min(self.timeout / 4));
                make(self.machine.gpu())
            }
            other => other,
        }
    }

    /// Asks for the relay memory that a call would like.
    pub(super) fn borrow_for(&mut self, call: &Call) -> Result<(), CommError> {
        let wanted = lots::wanted(call, &self.cluster, self.rank);
        self.relay.borrow(&wanted, call.id, ASK_WITHIN);
        match self.relay.take_error() {
            None => Ok(()),
            Some(e) => Err(self.fail(e.into())),
        }
    }
}
