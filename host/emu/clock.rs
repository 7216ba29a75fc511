//! The clock that all processes of a host share.

use std::num::NonZeroU64;
use std::time::Duration;

use rustix::thread::ClockId;

use crate::hw::{Clock, Nanos};

/// `CLOCK_MONOTONIC`.
#[derive(Clone, Copy, Debug, Default)]
pub struct MonotonicClock;

impl Clock for MonotonicClock {
    fn now(&self) -> Nanos {
        let t = rustix::time::clock_gettime(ClockId::Monotonic);
        t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
    }
}

/// Short sleeps of this thread end within microseconds instead of the default 50.
pub fn sharpen_sleep() {
    // Best effort: without it sleeps are longer, and nothing else changes.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1_000));
}

/// Sleeps until `until`, if that is ahead.
pub fn sleep_until(until: Nanos) {
    let now = MonotonicClock.now();
    if until > now {
        std::thread::sleep(Duration::from_nanos(until - now));
    }
}
