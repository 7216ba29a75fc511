//! Shared memory as atomic 64-bit words. Every word that another process, a kernel or a NIC writes is reached through
//! here, so that no reference to plain memory ever aliases it.

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU64, Ordering, fence};

use std::sync::Arc;

/// A run of words that others write too.
pub trait Words: Send + Sync {
    /// One word.
    ///
    /// # Panics
    /// When `idx` is outside: an index is always computed from a layout, never taken from shared memory unchecked.
    fn word(&self, idx: usize) -> &AtomicU64;
    /// How many there are.
    fn word_count(&self) -> usize;
}

/// Words on this process's heap, for rings between threads and for tests.
impl Words for Arc<[AtomicU64]> {
    #[inline]
    fn word(&self, idx: usize) -> &AtomicU64 {
        &self[idx]
    }
    fn word_count(&self) -> usize {
        self.len()
    }
}

/// `count` words of zero on the heap.
pub fn heap_words(count: usize) -> Arc<[AtomicU64]> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

/// Part of a mapping, kept alive by it.
#[cfg(not(loom))]
#[derive(Clone)]
pub struct WordSlice {
    first: *const AtomicU64,
    count: usize,
    _keep: Arc<dyn Send + Sync>,
}

// SAFETY: the words are atomics, and `_keep` (itself Send + Sync) keeps their memory mapped.
#[cfg(not(loom))]
unsafe impl Send for WordSlice {}
// SAFETY: as above.
#[cfg(not(loom))]
unsafe impl Sync for WordSlice {}

#[cfg(not(loom))]
impl WordSlice {
    /// # Safety
    /// `first` is 8-byte aligned and `count` words from it stay mapped readable and writable while `keep` lives; no
    /// Rust reference to them exists other than through atomics.
    pub unsafe fn new(first: *const u8, count: usize, keep: Arc<dyn Send + Sync>) -> Self {
        Self { first: first.cast(), count, _keep: keep }
    }

    /// Words `[first, first + count)` of this slice.
    ///
    /// # Panics
    /// When they are not inside.
    pub fn part(&self, first: usize, count: usize) -> Self {
        assert!(first.checked_add(count).is_some_and(|end| end <= self.count), "part outside of the slice");
        // SAFETY: first <= self.count, checked above, so the address is inside the same mapping.
        let first = unsafe { self.first.add(first) };
        Self { first, count, _keep: Arc::clone(&self._keep) }
    }

    /// All of them: for loops that would check each index.
    #[inline]
    pub fn all(&self) -> &[AtomicU64] {
        // SAFETY: `count` words are mapped and aligned while `self` lives (contract of `new`), shared only as atomics.
        unsafe { std::slice::from_raw_parts(self.first, self.count) }
    }

    /// Address of the first word in this process.
    pub fn host_ptr(&self) -> *mut u8 {
        self.first.cast_mut().cast()
    }
}

#[cfg(not(loom))]
impl Words for WordSlice {
    #[inline]
    fn word(&self, idx: usize) -> &AtomicU64 {
        assert!(idx < self.count, "word {idx} of {}", self.count);
        // SAFETY: inside the slice (checked), mapped and aligned (contract of `new`), shared only as atomics.
        unsafe { &*self.first.add(idx) }
    }
    fn word_count(&self) -> usize {
        self.count
    }
}
