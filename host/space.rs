//! Which addresses of a GPU are mapped: the bookkeeping of windows, and the rules that every implementation of them
//! keeps before it asks its system or driver.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

use crate::hw::HwError;
use crate::topo::GpuIdx;

/// Which addresses of a process are whose memory.
#[derive(Debug, Default)]
pub struct AddressMap {
    ranges: RwLock<BTreeMap<u64, Range>>,
}

#[derive(Clone, Copy, Debug)]
struct Range {
    end: u64,
    /// `None`: host memory that kernels see.
    gpu: Option<GpuIdx>,
}

impl AddressMap {
    /// `bytes` from `start` are memory of a GPU, or host memory that kernels see.
    pub fn insert(&self, start: u64, bytes: u64, gpu: Option<GpuIdx>) {
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        ranges.insert(start, Range { end: start + bytes, gpu });
    }

    /// What starts there is not mapped any more.
    pub fn remove(&self, start: u64) {
        self.ranges.write().unwrap_or_else(PoisonError::into_inner).remove(&start);
    }

    /// Whose memory `bytes` from `dev_ptr` are; the outer `None` when they are not (all) mapped.
    ///
    /// Bytes may run over several mappings of the same GPU.
    pub fn owner(&self, dev_ptr: u64, bytes: u64) -> Option<Option<GpuIdx>> {
        let ranges = self.ranges.read().unwrap_or_else(PoisonError::into_inner);
        let end = dev_ptr.checked_add(bytes)?;
        let (_, first) = ranges.range(..=dev_ptr).next_back()?;
        let mut covered = first.end;
        while covered < end && covered > dev_ptr {
            let next = ranges.get(&covered).filter(|r| r.gpu == first.gpu)?;
            covered = next.end;
        }
        (covered >= end && first.end > dev_ptr).then_some(first.gpu)
    }
}

/// The parts of one window that are mapped, each with what keeps it so.
pub struct Parts<T> {
    bytes: u64,
    granularity_bytes: u64,
    mapped: BTreeMap<u64, (u64, T)>,
}

fn rule(operation: &'static str, offset: u64, bytes: u64, rule: &'static str) -> HwError {
    HwError::WindowRule { operation, offset, end: offset.saturating_add(bytes), rule }
}

impl<T> Parts<T> {
    /// A window of `bytes` addresses with nothing in it.
    pub fn new(bytes: u64, granularity_bytes: u64) -> Self {
        Self { bytes, granularity_bytes, mapped: BTreeMap::new() }
    }

    /// Number of addresses.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether `bytes` can be mapped at `offset`.
    ///
    /// # Errors
    /// [`HwError::WindowRule`] when they do not fit, are not aligned to the granularity or overlap a mapped part.
    pub fn check_free(&self, offset: u64, bytes: u64) -> Result<(), HwError> {
        let refuse = |why| Err(rule("map", offset, bytes, why));
        if !offset.is_multiple_of(self.granularity_bytes) {
            return refuse("the offset must be a multiple of the granularity");
        }
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return refuse("it is outside of the window");
        }
        let before = self.mapped.range(..offset + bytes).next_back();
        if before.is_some_and(|(at, (bytes, _))| at + bytes > offset) {
            return refuse("a part of it is mapped; unmap that first");
        }
        Ok(())
    }

    /// The size of what can be unmapped at `offset`.
    ///
    /// # Errors
    /// [`HwError::WindowRule`] when nothing starts there.
    pub fn check_unmap(&self, offset: u64) -> Result<u64, HwError> {
        let why = "no chunk is mapped from there; a mapping goes as a whole";
        self.mapped.get(&offset).map(|(bytes, _)| *bytes).ok_or(rule("unmap", offset, 0, why))
    }

    /// Whether a chunk of `bytes` can take the place of what is mapped at `offset`.
    ///
    /// # Errors
    /// [`HwError::WindowRule`].
    pub fn check_remap(&self, offset: u64, bytes: u64) -> Result<(), HwError> {
        match self.mapped.get(&offset) {
            None => Err(rule("remap", offset, bytes, "no chunk is mapped from there")),
            Some((old, _)) if *old != bytes => {
                Err(rule("remap", offset, bytes, "the new chunk has another size"))
            }
            Some(_) => Ok(()),
        }
    }

    /// Notes a mapping that was checked and made; returns what was in its place.
    pub fn insert(&mut self, offset: u64, bytes: u64, part: T) -> Option<T> {
        self.mapped.insert(offset, (bytes, part)).map(|(_, old)| old)
    }

    /// Forgets the mapping at `offset` and returns what kept it.
    pub fn remove(&mut self, offset: u64) -> Option<T> {
        self.mapped.remove(&offset).map(|(_, part)| part)
    }

    /// Where parts start.
    pub fn offsets(&self) -> impl Iterator<Item = u64> + '_ {
        self.mapped.keys().copied()
    }
}
