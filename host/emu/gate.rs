//! The gate of one direction between two NICs: what makes a closed path closed on the emulated wire. The receiver shuts it;
//! a sender goes through it for each write, so that a shut gate with nobody inside lets nothing land any more.

use crate::words::{AtomicU64, Ordering, fence};

const SHUT: u64 = 1;
const INSIDE: u64 = 2;

/// The gate is shut: the receiver has closed the path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Shut;

/// Runs `write` inside of the gate.
pub(super) fn pass<T>(gate: &AtomicU64, write: impl FnOnce() -> T) -> Result<T, Shut> {
    // Acquire: pairs with the release in `open`. The receiver's part of `shut` is in the same word, so one of the two
    // sees the other.
    if gate.fetch_or(INSIDE, Ordering::AcqRel) & SHUT != 0 {
        gate.fetch_and(!INSIDE, Ordering::AcqRel);
        return Err(Shut);
    }
    // Pairs with the fence in `registrations.rs: Registrations::remove`: either it sees somebody inside, or `write` sees that
    // the memory is gone.
    fence(Ordering::SeqCst);
    let result = write();
    // Release: pairs with `is_empty`: who sees nobody inside sees what was written.
    gate.fetch_and(!INSIDE, Ordering::AcqRel);
    Ok(result)
}

/// Shuts the gate for senders that come after.
pub(super) fn shut(gate: &AtomicU64) {
    gate.fetch_or(SHUT, Ordering::AcqRel);
}

/// Whether nobody is inside.
pub(super) fn is_empty(gate: &AtomicU64) -> bool {
    gate.load(Ordering::Acquire) & INSIDE == 0
}

/// Lets senders in again. Whoever died inside is not waited for any more.
pub(super) fn open(gate: &AtomicU64) {
    gate.store(0, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shut_gate_lets_nothing_through() {
        let gate = AtomicU64::new(0);
        assert_eq!(pass(&gate, || 7), Ok(7));
        shut(&gate);
        assert_eq!(pass(&gate, || unreachable!()), Err::<(), _>(Shut));
        assert!(is_empty(&gate));
        open(&gate);
        assert_eq!(pass(&gate, || is_empty(&gate)), Ok(false));
    }
}
