//! GPU memory: chunks, windows, and what the host may touch.

use std::sync::Arc;

use super::Gpus;
use crate::hw::{Chunk, Gpu, HwError, MappedHost, Window};

/// A chunk of `units` times the granularity, filled with one byte.
fn filled<G: Gpu>(gpu: &G, units: u64, value: u8) -> Arc<G::Chunk> {
    let chunk = gpu.create_chunk(units * gpu.granularity_bytes()).expect("memory");
    let mut window = gpu.reserve_window(chunk.bytes()).expect("addresses");
    window.map(0, &chunk).expect("map");
    gpu.write(window.dev_ptr(), &vec![value; chunk.bytes() as usize]).expect("write");
    chunk
}

/// A window of `units` times the granularity.
fn window<G: Gpu>(gpu: &G, units: u64) -> G::Window {
    gpu.reserve_window(units * gpu.granularity_bytes()).expect("addresses")
}

fn byte<G: Gpu>(gpu: &G, dev_ptr: u64) -> u8 {
    let mut out = [0];
    gpu.read(dev_ptr, &mut out).expect("read");
    out[0]
}

/// First and last byte of the `units` granules at `offset` of a window.
fn ends<G: Gpu>(gpu: &G, window: &G::Window, offset: u64, units: u64) -> [u8; 2] {
    let first = window.dev_ptr() + offset;
    [byte(gpu, first), byte(gpu, first + units * gpu.granularity_bytes() - 1)]
}

#[track_caller]
fn assert_refused(result: Result<(), HwError>) {
    assert!(matches!(result, Err(HwError::WindowRule { .. })), "{result:?}");
}

#[track_caller]
fn assert_unmapped<G: Gpu>(gpu: &G, dev_ptr: u64, bytes: usize) {
    let read = gpu.read(dev_ptr, &mut vec![0; bytes]);
    assert!(matches!(read, Err(HwError::NotMapped { .. })), "read: {read:?}");
    let write = gpu.write(dev_ptr, &vec![0; bytes]);
    assert!(matches!(write, Err(HwError::NotMapped { .. })), "write: {write:?}");
}

/// Bytes of another job must not show, and rings start from zero.
pub fn fresh_memory_is_zero<G: Gpu>(gpus: &mut Gpus<G>) {
    let gpu = &gpus.gpu;
    drop(filled(gpu, 1, 0xff));
    let chunk = gpu.create_chunk(gpu.granularity_bytes()).expect("memory");
    let mut w = window(gpu, 1);
    w.map(0, &chunk).expect("map");
    let mut bytes = vec![1; chunk.bytes() as usize];
    gpu.read(w.dev_ptr(), &mut bytes).expect("read");
    assert!(bytes.iter().all(|&b| b == 0));
}

/// Callers ask for bytes; devices deal in granules.
pub fn sizes_are_rounded_up_to_the_granularity<G: Gpu>(gpus: &mut Gpus<G>) {
    let gpu = &gpus.gpu;
    let granularity = gpu.granularity_bytes();
    assert!(granularity.is_power_of_two());
    for (asked, got) in [(1, granularity), (granularity, granularity), (granularity + 1, 2 * granularity)] {
        let chunk = gpu.create_chunk(asked).expect("memory");
        assert_eq!((chunk.bytes(), chunk.gpu()), (got, gpu.idx()));
        let w = gpu.reserve_window(asked).expect("addresses");
        assert!(w.bytes() >= got && w.dev_ptr().is_multiple_of(4096));
    }
}

/// Hardware maps granules only.
pub fn an_unaligned_mapping_is_refused<G: Gpu>(gpus: &mut Gpus<G>) {
    let (gpu, chunk) = (&gpus.gpu, filled(&gpus.gpu, 1, 1));
    let mut w = window(gpu, 4);
    assert_refused(w.map(1, &chunk));
    assert_refused(w.map(gpu.granularity_bytes() / 2, &chunk));
}

/// A mapping past the end would take addresses of others.
pub fn a_mapping_outside_of_the_window_is_refused<G: Gpu>(gpus: &mut Gpus<G>) {
    let (gpu, chunk) = (&gpus.gpu, filled(&gpus.gpu, 2, 1));
    let granularity = gpu.granularity_bytes();
    let mut w = window(gpu, 2);
    let last_granule = u64::MAX - granularity + 1;
    for offset in [w.bytes() - granularity, w.bytes(), last_granule] {
        assert_refused(w.map(offset, &chunk));
    }
    w.map(0, &chunk).expect("the whole window");
}

/// Kernels would write to a chunk that the host thinks is elsewhere.
pub fn an_overlapping_mapping_is_refused<G: Gpu>(gpus: &mut Gpus<G>) {
    let (gpu, granularity) = (&gpus.gpu, gpus.gpu.granularity_bytes());
    let (two, three) = (filled(gpu, 2, 2), filled(gpu, 3, 3));
    let mut w = window(gpu, 8);
    w.map(2 * granularity, &two).expect("map");
    for offset in [0, 1, 2, 3] {
        assert_refused(w.map(offset * granularity, &three)); // From below, over it, and from above.
    }
    w.map(4 * granularity, &three).expect("right behind it");
    w.map(0, &two).expect("right before it");
    assert_eq!(ends(gpu, &w, 2 * granularity, 2), [2, 2]);
}

/// Devices unmap whole handles only.
pub fn a_mapping_goes_as_a_whole<G: Gpu>(gpus: &mut Gpus<G>) {
    let (gpu, granularity) = (&gpus.gpu, gpus.gpu.granularity_bytes());
    let chunk = filled(gpu, 2, 7);
    let mut w = window(gpu, 4);
    w.map(granularity, &chunk).expect("map");
    assert_refused(w.unmap(0));
    assert_refused(w.unmap(2 * granularity));
    assert_eq!(ends(gpu, &w, granularity, 2), [7, 7]);
    w.unmap(granularity).expect("unmap");
    assert_unmapped(gpu, w.dev_ptr() + granularity, 1);
    assert_refused(w.unmap(granularity));
}

/// A window is used again and again; its address never changes.
pub fn unmapped_addresses_can_be_mapped_again<G: Gpu>(gpus: &mut Gpus<G>) {
    let gpu = &gpus.gpu;
    let (a, b) = (filled(gpu, 1, 1), filled(gpu, 2, 2));
    let mut w = window(gpu, 2);
    let address = w.dev_ptr();
    w.map(0, &a).expect("map");
    w.unmap(0).expect("unmap");
    w.map(0, &b).expect("map again");
    assert_eq!((w.dev_ptr(), ends(gpu, &w, 0, 2)), (address, [2, 2]));
}

/// A NIC's registration and a kernel's window look at one memory.
pub fn one_chunk_in_two_windows_is_the_same_memory<G: Gpu>(gpus: &mut Gpus<G>) {
    let (gpu, chunk) = (&gpus.gpu, filled(&gpus.gpu, 1, 0));
    let (mut v, mut w) = (window(gpu, 1), window(gpu, 2));
    v.map(0, &chunk).expect("map");
    w.map(gpu.granularity_bytes(), &chunk).expect("map");
    gpu.write(v.dev_ptr() + 100, &[42]).expect("write");
    assert_eq!(byte(gpu, w.dev_ptr() + gpu.granularity_bytes() + 100), 42);
}

/// Kernels that hold the address must see the other NIC's memory after a switch, and the old bytes must survive it.
pub fn remap_keeps_the_address_and_swaps_the_bytes<G: Gpu>(gpus: &mut Gpus<G>) {
    let (gpu, granularity) = (&gpus.gpu, gpus.gpu.granularity_bytes());
    let chunks = [filled(gpu, 2, 1), filled(gpu, 2, 2)];
    let mut w = window(gpu, 3);
    let address = w.dev_ptr();
    w.map(granularity, &chunks[0]).expect("map");
    for turn in [1u8, 0, 1] {
        w.remap(granularity, &chunks[usize::from(turn)]).expect("remap");
        assert_eq!((w.dev_ptr(), ends(gpu, &w, granularity, 2)), (address, [turn + 1; 2]));
    }
}

/// A failed switch must leave the window as it was: kernels go on using it.
pub fn remap_to_another_size_is_refused_and_the_old_stays<G: Gpu>(gpus: &mut Gpus<G>) {
    let gpu = &gpus.gpu;
    let mut w = window(gpu, 4);
    w.map(0, &filled(gpu, 2, 2)).expect("map");
    for units in [1, 3] {
        assert_refused(w.remap(0, &filled(gpu, units, 9)));
        assert_eq!(ends(gpu, &w, 0, 2), [2, 2]);
    }
    assert_unmapped(gpu, w.dev_ptr() + 2 * gpu.granularity_bytes(), 1);
}

/// Remap is a switch; what is not there cannot be switched.
pub fn remap_of_nothing_is_refused<G: Gpu>(gpus: &mut Gpus<G>) {
    let (gpu, granularity) = (&gpus.gpu, gpus.gpu.granularity_bytes());
    let chunk = filled(gpu, 2, 1);
    let mut w = window(gpu, 4);
    assert_refused(w.remap(0, &chunk));
    w.map(0, &chunk).expect("map");
    assert_refused(w.remap(granularity, &chunk));
}

/// A server's ranks hand chunks to each other as descriptors.
pub fn an_imported_chunk_is_the_same_memory<G: Gpu>(gpus: &mut Gpus<G>) {
    let (gpu, owner) = (&gpus.gpu, &gpus.peer);
    let theirs = filled(owner, 2, 5);
    let ours =
        gpu.import_chunk(theirs.export().expect("export"), owner.idx(), theirs.bytes()).expect("import");
    assert_eq!((ours.gpu(), ours.bytes()), (owner.idx(), theirs.bytes()));
    let (mut w, mut v) = (window(gpu, 2), window(owner, 2));
    w.map(0, &ours).expect("map");
    v.map(0, &theirs).expect("map");
    assert_eq!(ends(gpu, &w, 0, 2), [5, 5]);
    gpu.write(w.dev_ptr() + 3, &[6]).expect("write");
    assert_eq!(byte(owner, v.dev_ptr() + 3), 6);
}

/// A peer that promises more than it gives would make kernels fault.
pub fn an_import_of_too_few_bytes_is_refused<G: Gpu>(gpus: &mut Gpus<G>) {
    let (gpu, owner) = (&gpus.gpu, &gpus.peer);
    let theirs = filled(owner, 1, 5);
    let promised = theirs.bytes() + 1;
    let result = gpu.import_chunk(theirs.export().expect("export"), owner.idx(), promised);
    assert!(matches!(result.map(drop), Err(HwError::ImportChunk { .. })));
}

/// Dropping a handle must not pull memory from under a kernel.
pub fn memory_outlives_the_chunk_that_was_mapped<G: Gpu>(gpus: &mut Gpus<G>) {
    let gpu = &gpus.gpu;
    let mut w = window(gpu, 1);
    w.map(0, &filled(gpu, 1, 8)).expect("map");
    assert_eq!(ends(gpu, &w, 0, 1), [8, 8]);
}

/// The host's own mistakes come back as errors.
pub fn host_access_outside_of_mappings_is_refused<G: Gpu>(gpus: &mut Gpus<G>) {
    let (gpu, granularity) = (&gpus.gpu, gpus.gpu.granularity_bytes());
    let mut w = window(gpu, 3);
    w.map(granularity, &filled(gpu, 1, 1)).expect("map");
    let start = w.dev_ptr() + granularity;
    assert_unmapped(gpu, start - 1, 1);
    assert_unmapped(gpu, start - 1, 2);
    assert_unmapped(gpu, start + granularity - 1, 2);
    assert_unmapped(gpu, start + granularity, 1);
    assert_unmapped(gpu, 0, 1);
    assert_unmapped(gpu, u64::MAX, 2);
    drop(w);
    assert_unmapped(gpu, start, 1);
}

/// Relay memory of several chunks is one range to whoever copies.
pub fn host_access_runs_over_neighbouring_mappings<G: Gpu>(gpus: &mut Gpus<G>) {
    let (gpu, granularity) = (&gpus.gpu, gpus.gpu.granularity_bytes());
    let mut w = window(gpu, 2);
    w.map(0, &filled(gpu, 1, 1)).expect("map");
    w.map(granularity, &filled(gpu, 1, 2)).expect("map");
    let mut bytes = [0; 4];
    gpu.read(w.dev_ptr() + granularity - 2, &mut bytes).expect("read");
    assert_eq!(bytes, [1, 1, 2, 2]);
}

/// Rings live there; both sides must look at the same words.
pub fn mapped_host_memory_is_seen_by_the_gpu<G: Gpu>(gpus: &mut Gpus<G>) {
    let gpu = &gpus.gpu;
    let memory = gpu.map_host(5000).expect("host memory");
    assert!(memory.bytes() >= 5000 && memory.host_ptr().addr().is_multiple_of(4096));
    let mut bytes = vec![1; 5000];
    gpu.read(memory.mapped_dev_ptr(), &mut bytes).expect("read");
    assert!(bytes.iter().all(|&b| b == 0), "zeroed at creation");
    gpu.write(memory.mapped_dev_ptr() + 4999, &[7]).expect("write");
    // SAFETY: inside the memory (5000 bytes), which nobody else touches here.
    assert_eq!(unsafe { memory.host_ptr().add(4999).read() }, 7);
}
