//! What the keeper of lots, the proxy and the user's thread share: the books, and how they wake each other.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::RelayError;
use super::gate::KernelGate;
use super::words::Letter;
use crate::comm::wake::{Wake, left};
use crate::doorbell::Class;
use crate::engine::relay::{Borrowings, Lender};
use crate::topo::NicIdx;

/// A rank's lots, at both ends.
pub struct Books {
    pub lender: Lender,
    pub borrowings: Borrowings,
    /// Letters of the user's thread.
    pub letters: VecDeque<Letter>,
    /// Lots that the engine has let go of.
    pub returned: Vec<(NicIdx, Class)>,
    pub error: Option<RelayError>,
}

pub struct Shared {
    books: Mutex<Books>,
    changed: Condvar,
    pub wake: Arc<Wake>,
    pub gate: KernelGate,
    failed: AtomicBool,
    stop: AtomicBool,
}

impl Shared {
    pub fn new(lender: Lender) -> io::Result<Self> {
        let wake = Arc::new(Wake::new()?);
        let books = Books {
            lender,
            borrowings: Borrowings::default(),
            letters: VecDeque::new(),
            returned: Vec::new(),
            error: None,
        };
        Ok(Self {
            books: Mutex::new(books),
            changed: Condvar::new(),
            gate: KernelGate::new(Arc::clone(&wake)),
            wake,
            failed: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        })
    }

    pub fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the user's thread to look again.
    pub fn tell(&self) {
        self.changed.notify_all();
    }

    /// The engine has let go of a lot. For the proxy's thread.
    pub fn returned(&self, nic: NicIdx, class: Class) {
        self.books().returned.push((nic, class));
        self.wake.set();
    }

    /// Waits until the books say so, or the time has come, or the keeper has ended. Whether they say so.
    pub fn wait_until(&self, until: Instant, mut done: impl FnMut(&mut Books) -> bool) -> bool {
        let mut books = self.books();
        loop {
            if done(&mut books) {
                return true;
            }
            let left = left(until);
            if left.is_zero() || self.has_failed() {
                return false;
            }
            books = self.changed.wait_timeout(books, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether the keeper has ended with an error.
    pub fn has_failed(&self) -> bool {
        // Acquire: pairs with `fail`; the error itself comes under the lock.
        self.failed.load(Ordering::Acquire)
    }

    pub fn fail(&self, error: RelayError) {
        self.books().error.get_or_insert(error);
        self.failed.store(true, Ordering::Release);
        self.gate.give_up();
        self.tell();
    }

    pub fn stop(&self) {
        // Release: pairs with `stopped`; nothing is published but the word.
        self.stop.store(true, Ordering::Release);
        self.wake.set();
    }

    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}
