//! Waiting for descriptors with a deadline, and waking who waits.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// A descriptor that is readable from [`Wake::set`] to [`Wake::clear`].
#[derive(Debug)]
pub(crate) struct Wake(OwnedFd);

impl Wake {
    /// Not set.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Wakes whoever polls it. A full counter is set already, so that an error changes nothing.
    pub(crate) fn set(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Takes all wake-ups back.
    pub(crate) fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits until a descriptor has an event or the time has come; `None` waits without end. `false`: the time has come.
pub(crate) fn wait(fds: &mut [PollFd<'_>], until: Option<Instant>) -> io::Result<bool> {
    loop {
        // Rounded up, or the last millisecond would be spent in a loop.
        let left = until.map(|u| left(u) + Duration::from_nanos(1));
        let timeout = left.and_then(|l| Timespec::try_from(l).ok());
        match poll(fds, timeout.as_ref()) {
            Ok(0) if until.is_some_and(|u| Instant::now() >= u) => return Ok(false),
            Ok(0) => {}
            Ok(_) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Waits for one descriptor.
pub(crate) fn wait_for(fd: BorrowedFd<'_>, flags: PollFlags, until: Instant) -> io::Result<()> {
    let mut fds = [PollFd::from_borrowed_fd(fd, flags)];
    if wait(&mut fds, Some(until))? { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
}

/// The moment that is `deadline` from now. A year stands for anything longer, which a clock might not hold.
pub(crate) fn within(deadline: Duration) -> Instant {
    Instant::now() + deadline.min(Duration::from_secs(365 * 86_400))
}

/// Time left; zero when the time has come.
pub(crate) fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}
