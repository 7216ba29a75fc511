//! The 32 bits that come with a message: class, destination GPU, slot, sequence (layout in `kernels/abi.h`).

use crate::abi::{FL_IMM_GPU_BITS, FL_IMM_SEQ_BITS, FL_IMM_SLOT_BITS};
use crate::doorbell::Class;
use crate::topo::GpuIdx;

/// An immediate, decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Immediate {
    /// Class of the message.
    pub class: Class,
    /// Its destination in the server.
    pub gpu: GpuIdx,
    /// The slot it was written to.
    pub slot: u32,
    /// The low bits of its sequence number.
    pub seq_low: u32,
}

fn field(imm: u32, shift: u32, bits: u32) -> u32 {
    imm >> shift & ((1 << bits) - 1)
}

impl Immediate {
    /// For message `seq` to `slot` of a GPU.
    pub fn new(class: Class, gpu: GpuIdx, slot: u32, seq: u64) -> Self {
        Self { class, gpu, slot, seq_low: field(seq as u32, 0, FL_IMM_SEQ_BITS) }
    }

    /// As the NIC carries it.
    pub fn encode(self) -> u32 {
        let gpu_shift = FL_IMM_SLOT_BITS + FL_IMM_SEQ_BITS;
        (self.class as u32) << (gpu_shift + FL_IMM_GPU_BITS)
            | self.gpu.0 << gpu_shift
            | self.slot << FL_IMM_SEQ_BITS
            | self.seq_low
    }

    /// Decodes; `None` for a class that does not exist.
    pub fn decode(imm: u32) -> Option<Self> {
        let gpu_shift = FL_IMM_SLOT_BITS + FL_IMM_SEQ_BITS;
        Some(Self {
            class: Class::from_number(u64::from(imm >> (gpu_shift + FL_IMM_GPU_BITS)))?,
            gpu: GpuIdx(field(imm, gpu_shift, FL_IMM_GPU_BITS)),
            slot: field(imm, FL_IMM_SEQ_BITS, FL_IMM_SLOT_BITS),
            seq_low: field(imm, 0, FL_IMM_SEQ_BITS),
        })
    }
}

/// The sequence number nearest to `near` whose low bits are `seq_low`.
///
/// Right while no message is more than half the range of the low bits away from `near`: credits bound that.
pub fn extend_seq(seq_low: u32, near: u64) -> u64 {
    let range = 1u64 << FL_IMM_SEQ_BITS;
    let base = near & !(range - 1) | u64::from(seq_low);
    let half = range / 2;
    if base + half < near {
        base + range
    } else if base > near + half && base >= range {
        base - range
    } else {
        base
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn encodes_and_decodes(class in 0u64..3, gpu in 0u32..64, slot in 0u32..4096, seq in any::<u32>()) {
            let class = Class::from_number(class).unwrap();
            let imm = Immediate::new(class, GpuIdx(gpu), slot, seq.into());
            prop_assert_eq!(Immediate::decode(imm.encode()), Some(imm));
        }

        #[test]
        fn sequence_survives_its_cut(near in 0u64..1 << 40, ahead in -2000i64..2000) {
            let seq = near.saturating_add_signed(ahead);
            prop_assert_eq!(extend_seq((seq & 0xfff) as u32, near), seq);
        }
    }
}
