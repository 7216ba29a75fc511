//! Signals on their way: what a message does to a signal of its receiver, written by RDMA ahead of the message and on the
//! same path into the segment of the receiver's server (`FlSignalEntry` in `kernels/abi.h`).
//!
//! An entry names its message, so it is absolute: a message that is sent again writes the same again, and an entry of
//! another message is none.

use crate::doorbell::{Signal, SignalOp};
use crate::hw::{INLINE_BYTES, RemoteKey, RemoteSpan, WorkOp};
use crate::segment::{SIGNAL_ENTRY_WORDS, SegmentLayout};
use crate::topo::{Cluster, GpuIdx, Rank};
use crate::words::{Ordering, WordSlice, Words};

const OP_SHIFT: u32 = 15;
const SEQ_SHIFT: u32 = 16;
/// Sequences are told apart modulo this; an entry is as old as its ring is long.
const SEQ_MASK: u64 = (1 << 47) - 1;

fn encode(seq: u64, signal: Signal) -> [u64; SIGNAL_ENTRY_WORDS] {
    let op = u64::from(signal.op == SignalOp::Set);
    [(seq & SEQ_MASK) << SEQ_SHIFT | op << OP_SHIFT | u64::from(signal.number + 1), signal.value]
}

/// `None`: the entry is not of message `seq`.
fn decode(seq: u64, [what, value]: [u64; SIGNAL_ENTRY_WORDS]) -> Option<Signal> {
    let number = (what & ((1 << OP_SHIFT) - 1)).checked_sub(1)? as u32;
    let op = if what >> OP_SHIFT & 1 == 1 { SignalOp::Set } else { SignalOp::Add };
    ((what >> SEQ_SHIFT) & SEQ_MASK == seq & SEQ_MASK).then_some(Signal { number, op, value })
}

/// The RDMA write that tells `to` what message `seq` from `from` does to a signal; `segment`: the key of its server's
/// segment at the NIC by which the message comes in.
pub fn write_op(
    cluster: &Cluster,
    from: Rank,
    to: Rank,
    seq: u64,
    signal: Signal,
    segment: RemoteKey,
) -> WorkOp {
    let layout = SegmentLayout::new(cluster, cluster.server_of(to));
    let at = layout.signal_entry(cluster.gpu_of(to), from, seq);
    let mut data = [0; INLINE_BYTES];
    for (bytes, word) in data.chunks_exact_mut(8).zip(encode(seq, signal)) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    let remote = RemoteSpan { rkey: segment.rkey, remote_addr: segment.remote_addr + 8 * at as u64 };
    WorkOp::Inline { remote, data, len: INLINE_BYTES as u8 }
}

/// The signals that are on their way to one rank.
pub struct SignalInbox {
    words: WordSlice,
    layout: SegmentLayout,
    gpu: GpuIdx,
}

impl SignalInbox {
    /// Those to `rank`, in its server's segment.
    pub fn new(words: WordSlice, cluster: &Cluster, rank: Rank) -> Self {
        let layout = SegmentLayout::new(cluster, cluster.server_of(rank));
        Self { words, layout, gpu: cluster.gpu_of(rank) }
    }

    /// What message `seq` of `src`, which has come, does to a signal.
    pub fn of(&self, src: Rank, seq: u64) -> Option<Signal> {
        let at = self.layout.signal_entry(self.gpu, src, seq);
        // Relaxed: the entry was written before the message, whose arrival this thread has acquired.
        decode(seq, [0, 1].map(|i| self.words.word(at + i).load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::FL_MAX_SIGNALS;
    use crate::shm::SharedMemory;
    use crate::topo::{Server, ServerId};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn entries_are_of_their_message_alone(seq in 0..1u64 << 47, other in 0..1u64 << 47, number in 0..FL_MAX_SIGNALS, set in any::<bool>(), value in 0..1u64 << 63) {
            let op = if set { SignalOp::Set } else { SignalOp::Add };
            let signal = Signal { number, op, value };
            prop_assert_eq!(decode(seq, encode(seq, signal)), Some(signal));
            prop_assert_eq!(decode(other, encode(seq, signal)).is_some(), other == seq);
            prop_assert_eq!(decode(seq, [0, 0]), None);
        }
    }

    /// Does what a NIC does with an inline write.
    fn deliver(words: &WordSlice, op: WorkOp) {
        let WorkOp::Inline { remote, data, len: 16 } = op else { panic!("{op:?}") };
        for (i, bytes) in data.chunks(8).enumerate() {
            let word = u64::from_ne_bytes(bytes.try_into().unwrap());
            words.word((remote.remote_addr / 8) as usize + i).store(word, Ordering::Relaxed);
        }
    }

    #[test]
    fn signals_of_a_whole_ring_are_told_apart() {
        let cluster = Cluster::uniform(2, Server::new(2, &[1; 2], 1));
        let layout = SegmentLayout::new(&cluster, ServerId(0));
        let memory = SharedMemory::create("fuselink-signal-test", layout.words()).unwrap();
        let inbox = SignalInbox::new(memory.words(), &cluster, Rank(1));
        let key = RemoteKey { remote_addr: 0, rkey: 0, bytes: 0 };
        let signal = |src: u32, seq: u64| Signal { number: src, op: SignalOp::Add, value: seq };
        for lap in 0..3 {
            for (src, seq) in (2..4).flat_map(|src| (0..16).map(move |i| (src, 16 * lap + i))) {
                if seq % 3 > 0 {
                    let op = write_op(&cluster, Rank(src), Rank(1), seq, signal(src, seq), key);
                    deliver(&memory.words(), op);
                    deliver(&memory.words(), op);
                }
            }
            for (src, seq) in (2..4).flat_map(|src| (0..16).map(move |i| (src, 16 * lap + i))) {
                let due = (seq % 3 > 0).then(|| signal(src, seq));
                assert_eq!(inbox.of(Rank(src), seq), due);
                assert_eq!(SignalInbox::new(memory.words(), &cluster, Rank(0)).of(Rank(src), seq), None);
            }
        }
    }
}
