//! The layouts of kernels/abi.h as the kernels' compiler sees them, and as Rust does.

use std::mem::offset_of;

use fuselink::abi::*;

unsafe extern "C" {
    static fl_abi_layout: u64;
    static fl_abi_layout_len: u64;
}

/// Name, size and offset of the last field.
macro_rules! layouts {
    ($($name:ident.$last:ident),+ $(,)?) => {
        [$((stringify!($name), [size_of::<$name>() as u64, offset_of!($name, $last) as u64])),+]
    };
}

/// In the order of `fl_abi_layout` in kernels/launch.cu.
const LAYOUTS: [(&str, [u64; 2]); 21] = layouts![
    FlDoorbell.word,
    FlRing.capacity,
    FlArmedSlot.message,
    FlArrival.slot,
    FlLocalArrival.bytes,
    FlLocalSend.value,
    FlLocalEnd.reserved,
    FlCreditLine.ring,
    FlSignalEntry.value,
    FlPlanHeader.table_bytes,
    FlPlanLane.messages,
    FlPlanSend.ingress,
    FlPlanRecv.ingress,
    FlPlanLocal.reserved,
    FlPlanTurn.bytes,
    FlChannel.status_ptr,
    FlPeerFlags.done,
    FlStatus.detail,
    FlAllToAll.local_done,
    FlStream.local_depth,
    FlPut.moved,
];

/// What the C++ compiler says.
fn compiled() -> Vec<u64> {
    // SAFETY: a constant of kernels/launch.cu.
    let len = unsafe { fl_abi_layout_len } as usize;
    // SAFETY: launch.cu defines that many words from there, constant for the life of the program.
    unsafe { std::slice::from_raw_parts(&raw const fl_abi_layout, len) }.to_vec()
}

#[test]
fn sizes_and_last_offsets_agree() {
    let compiled = compiled();
    assert_eq!(compiled.len(), 2 * LAYOUTS.len(), "kernels/launch.cu lists other structs than this test");
    for ((name, layout), pair) in LAYOUTS.iter().zip(compiled.chunks(2)) {
        assert_eq!(pair, layout, "{name}: size, offset of its last field");
    }
}

/// The compiler and bindgen between them check every field; this checks that no struct is left out here.
#[test]
fn every_struct_is_compared() {
    let source = include_str!("../host/abi.rs");
    let structs: Vec<_> = source
        .lines()
        .filter_map(|line| line.strip_prefix("pub struct ")?.split([' ', '{']).next())
        .collect();
    assert_eq!(structs, LAYOUTS.map(|(name, _)| name));
}
