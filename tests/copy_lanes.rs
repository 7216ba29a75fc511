//! kernels/copy.cuh: the lanes of a scope copy any bytes from any address to any address, and touch nothing else.

mod common;

use common::emu::gpus;
use fuselink::hw::{Chunk, Gpu, Window};

unsafe extern "C" {
    fn test_copy_lanes(dst: u64, src: u64, bytes: u64, lane: u32, lanes: u32);
}

const MARGIN: usize = 32;
const UNTOUCHED: u8 = 0xee;

/// What `lanes` lanes, in some order, make of a copy of `bytes` from `src_at` to `dst_at` bytes past a 16-byte boundary.
fn copied(dst_at: usize, src_at: usize, bytes: usize, lanes: u32) -> (Vec<u8>, Vec<u8>) {
    let source: Vec<u8> = (0..bytes).map(|i| (i * 37 + i / 256 + 1) as u8).collect();
    let align = |buffer: &mut Vec<u8>, at: usize| {
        let to = buffer.as_ptr().align_offset(16) + at;
        if to < 16 { to + 16 } else { to }
    };
    let mut from = vec![0; bytes + 3 * MARGIN];
    let mut to = vec![UNTOUCHED; bytes + 3 * MARGIN];
    let (src, dst) = (align(&mut from, src_at), align(&mut to, dst_at));
    from[src..src + bytes].copy_from_slice(&source);
    let (src_ptr, dst_ptr) = (from[src..].as_ptr() as u64, to[dst..].as_mut_ptr() as u64);
    for lane in (0..lanes).rev() {
        // SAFETY: both ranges lie in the vectors, and apart.
        unsafe { test_copy_lanes(dst_ptr, src_ptr, bytes as u64, lane, lanes) };
    }
    let mut expected = vec![UNTOUCHED; to.len()];
    expected[dst..dst + bytes].copy_from_slice(&source);
    (to, expected)
}

#[test]
fn every_alignment_and_length() {
    let lengths = (0..70).chain([127, 128, 1000, 4096 + 13]);
    for bytes in lengths {
        for at in 0..256 {
            for lanes in [1, 3, 32] {
                let (dst_at, src_at) = (at / 16, at % 16);
                let (found, expected) = copied(dst_at, src_at, bytes, lanes);
                assert_eq!(found, expected, "{bytes} bytes from {src_at} to {dst_at} by {lanes} lanes");
            }
        }
    }
}

/// Source bytes at both ends of mapped memory, with nothing around it: a load that reaches over an end stops the process.
#[test]
fn nothing_outside_of_the_source_is_read() {
    let gpu = gpus().gpu;
    let chunk = gpu.create_chunk(1).unwrap();
    let mut window = gpu.reserve_window(3 * chunk.bytes()).unwrap();
    window.map(chunk.bytes(), &chunk).unwrap();
    let first = window.dev_ptr() + chunk.bytes();
    let end = first + chunk.bytes();
    let mut to = [0u8; 128];
    let dst = to.as_mut_ptr() as u64;
    for bytes in 1..64 {
        for src in [first, end - bytes] {
            for (shift, lanes) in (0..16).flat_map(|shift| [(shift, 1), (shift, 32)]) {
                for lane in 0..lanes {
                    // SAFETY: the source is mapped, and the destination is inside of the array.
                    unsafe { test_copy_lanes(dst + shift, src, bytes, lane, lanes) };
                }
            }
        }
    }
}
