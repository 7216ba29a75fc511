//! What fixed windows wait for: each time for the communicator's time-out at most, and not once the job has failed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::place::Place;
use super::{CLASS, FixedError};
use crate::comm::{CommError, Communicator};
use crate::engine::slots::Lot;
use crate::hw::{Gpu, HwError};
use crate::proxy::FixedQueue;
use crate::topo::{NicIdx, Rank};

/// How often a waiting thread looks for failures.
const WATCH_EVERY: Duration = Duration::from_millis(20);

impl Communicator {
    /// Waits until nothing that this communicator has launched is queued or running; returns how long that took.
    pub(super) fn quiesce(&mut self) -> Result<Duration, CommError> {
        self.bootstrap()?;
        let begin = Instant::now();
        loop {
            match self.machine.gpu().synchronize(WATCH_EVERY.min(self.timeout)) {
                Ok(()) => {
                    let waited = begin.elapsed();
                    return self.finish().map(|()| waited);
                }
                Err(HwError::KernelTimeout { .. }) => self.check_alive()?,
                Err(e) => return Err(self.fail(e.into())),
            }
            if begin.elapsed() >= self.timeout {
                return Err(FixedError::KernelsRun { waited: self.timeout }.into());
            }
        }
    }

    /// The next of a queue; `None` when there was none in time.
    pub(super) fn take_next<T>(&mut self, queue: &FixedQueue<T>) -> Result<Option<T>, CommError> {
        let mut next = None;
        self.watch(|within| {
            next = queue.take(within);
            next.is_some()
        })?;
        Ok(next)
    }

    /// Waits for something of which the proxy tells.
    pub(super) fn wait_for<T>(
        &mut self,
        queue: &FixedQueue<T>,
        done: impl Fn() -> bool,
    ) -> Result<(), CommError> {
        self.watch(|within| {
            queue.wait_unless(within, &done);
            done()
        })
    }

    /// Calls `step`, which waits so long at most, until it is done or time is up.
    fn watch(&mut self, mut step: impl FnMut(Duration) -> bool) -> Result<(), CommError> {
        self.bootstrap()?;
        let until = Instant::now() + self.timeout;
        while !step(WATCH_EVERY.min(self.timeout)) {
            self.check_alive()?;
            if Instant::now() >= until {
                return Ok(());
            }
        }
        Ok(())
    }

    fn check_alive(&mut self) -> Result<(), CommError> {
        if self.has_failed() { self.finish() } else { Ok(()) }
    }

    /// Whether kernels have used a stream; `counter_dev_ptr`: where they count. No kernel runs.
    pub(super) fn check_unclaimed(&self, peer: Rank, counter_dev_ptr: u64) -> Result<(), CommError> {
        let mut claimed = [0; 8];
        self.machine.gpu().read(counter_dev_ptr, &mut claimed)?;
        match u64::from_ne_bytes(claimed) {
            0 => Ok(()),
            messages => Err(FixedError::KernelsUse { peer, messages }.into()),
        }
    }

    /// Places a window on the slot that starts at an offset of this rank's lot beside a NIC.
    pub(super) fn show(&mut self, place: &mut Place, nic: NicIdx, offset: u64) -> Result<(), CommError> {
        let lot = Lot { nic, gpu: self.cluster.gpu_of(self.rank), class: CLASS };
        let (part, _) = self.slots.part_of(CLASS, offset);
        let drained = self.quiesce()?;
        let memory = self.memory.relay.lot(lot).and_then(|lot| lot.chunks.get(part as usize));
        let chunk = Arc::clone(memory.ok_or(CommError::BadAnswer { rank: self.rank })?);
        Ok(place.show(nic, &chunk, drained)?)
    }
}
