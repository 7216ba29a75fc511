//! An address, and the chunk that it shows.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::comm::device::{Device, DeviceChunk, DeviceWindow};
use crate::hw::{Gpu, HwError, Window};
use crate::topo::NicIdx;

/// Longest that dropping a window waits for kernels that might touch it.
const DROP_WITHIN: Duration = Duration::from_secs(5);

/// How often a fixed window was placed, and what that has cost.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FixedCounters {
    /// Messages that it was placed for.
    pub placed: u64,
    /// Those for which it was mapped anew, the first among them; else it showed their chunk already.
    pub remapped: u64,
    /// Those of these for which it went to memory beside another NIC.
    pub switched: u64,
    /// Waiting for kernels, in all.
    pub drain: Duration,
    /// Unmapping.
    pub unmap: Duration,
    /// Mapping and giving access.
    pub map: Duration,
}

struct Shown {
    nic: NicIdx,
    chunk: Arc<DeviceChunk>,
}

/// A window of one chunk at a time.
pub(super) struct Place {
    gpu: Arc<Device>,
    /// There until it is dropped.
    window: Option<DeviceWindow>,
    dev_ptr: u64,
    bytes: u64,
    shown: Option<Shown>,
    counters: FixedCounters,
}

impl Place {
    pub fn new(gpu: Arc<Device>, bytes: u64) -> Result<Self, HwError> {
        let window = gpu.reserve_window(bytes)?;
        let dev_ptr = window.dev_ptr();
        Ok(Self {
            gpu,
            window: Some(window),
            dev_ptr,
            bytes,
            shown: None,
            counters: FixedCounters::default(),
        })
    }

    pub fn dev_ptr(&self) -> u64 {
        self.dev_ptr
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether all kernels of the GPU have ended, which is waited for.
    pub fn is_quiet(&self) -> bool {
        self.gpu.synchronize(DROP_WITHIN).is_ok()
    }

    pub fn counters(&self) -> FixedCounters {
        self.counters
    }

    /// Shows a chunk beside a NIC, for which kernels were waited so long. They must not touch the window. Where that fails it
    /// shows what it did before.
    pub fn show(&mut self, nic: NicIdx, chunk: &Arc<DeviceChunk>, drained: Duration) -> Result<(), HwError> {
        self.counters.drain += drained;
        let shown = self.shown.as_ref();
        if !shown.is_some_and(|shown| Arc::ptr_eq(&shown.chunk, chunk)) {
            let switched = shown.is_some_and(|shown| shown.nic != nic);
            self.remap(Shown { nic, chunk: Arc::clone(chunk) })?;
            self.counters.remapped += 1;
            self.counters.switched += u64::from(switched);
        }
        self.counters.placed += 1;
        Ok(())
    }

    /// In two steps, as [`Window::remap`] does in one, so that each can be timed.
    fn remap(&mut self, to: Shown) -> Result<(), HwError> {
        let Some(window) = &mut self.window else { return Ok(()) };
        let begin = Instant::now();
        if self.shown.is_some() {
            window.unmap(0)?;
        }
        let unmapped = Instant::now();
        let mapped = window.map(0, &to.chunk);
        self.counters.unmap += unmapped - begin;
        self.counters.map += unmapped.elapsed();
        match mapped {
            Ok(()) => self.shown = Some(to),
            // Should the old chunk not come back either, the window shows nothing, and the first error says why.
            Err(_) => self.shown = self.shown.take().filter(|old| window.map(0, &old.chunk).is_ok()),
        }
        mapped
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let window = self.window.take();
        if !self.is_quiet() {
            eprintln!("fuselink: kernels still run; a fixed window stays mapped for them");
            std::mem::forget(window);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emu::{EmuGpu, EmuGpuConfig, ScaleupLinks};
    use crate::shm::SharedMemory;
    use crate::topo::GpuIdx;

    fn gpu() -> Arc<Device> {
        let memory = SharedMemory::create("fuselink-test", ScaleupLinks::words(1)).unwrap();
        let links = ScaleupLinks::new(memory.words(), 1 << 40);
        let config = EmuGpuConfig { idx: GpuIdx(0), resident_blocks: 1, links, memory_bytes: None };
        Arc::new(Device::Emu(EmuGpu::new(config).unwrap()))
    }

    fn first_byte(place: &Place) -> u8 {
        let mut byte = [0];
        place.gpu.read(place.dev_ptr(), &mut byte).unwrap();
        byte[0]
    }

    #[test]
    fn a_chunk_that_does_not_fit_leaves_the_old_one_in_its_place() {
        let gpu = gpu();
        let granule = gpu.granularity_bytes();
        let mut place = Place::new(Arc::clone(&gpu), granule).unwrap();
        let [old, other] = [0, 1].map(|_| gpu.create_chunk(granule).unwrap());
        place.show(NicIdx(0), &old, Duration::ZERO).unwrap();
        gpu.write(place.dev_ptr(), &[7]).unwrap();
        let too_large = gpu.create_chunk(2 * granule).unwrap();
        let error = place.show(NicIdx(1), &too_large, Duration::ZERO).unwrap_err();
        assert!(matches!(error, HwError::WindowRule { .. }), "{error}");
        assert_eq!(first_byte(&place), 7);
        let counted =
            |place: &Place| (place.counters.placed, place.counters.remapped, place.counters.switched);
        assert_eq!(counted(&place), (1, 1, 0));
        // The window is as good as before.
        place.show(NicIdx(0), &old, Duration::ZERO).unwrap();
        assert_eq!(counted(&place), (2, 1, 0));
        place.show(NicIdx(1), &other, Duration::ZERO).unwrap();
        assert_eq!((first_byte(&place), counted(&place)), (0, (3, 2, 1)));
        place.show(NicIdx(1), &old, Duration::ZERO).unwrap();
        assert_eq!((first_byte(&place), counted(&place)), (7, (4, 3, 1)));
    }
}
