//! Credit lines: a receiver's word to a sender, written by RDMA into the segment of the sender's server
//! (`FlCreditLine` in `kernels/abi.h`).

use crate::abi::FL_CREDIT_RING;
use crate::doorbell::Class;
use crate::engine::call::CallId;
use crate::engine::route::NicState;
use crate::engine::{CreditWrite, Lent};
use crate::hw::{INLINE_BYTES, RemoteKey, RemoteSpan, WorkOp};
use crate::ring::{WORD_MAX, lap, with_lap};
use crate::segment::SegmentLayout;
use crate::topo::{Cluster, GpuIdx, NicIdx, Rank};
use crate::words::{Ordering, WordSlice, Words, fence};

/// The RDMA write that carries a credit from `from` to its sender, whose segment is registered under `segment`.
pub fn write_op(cluster: &Cluster, from: Rank, write: CreditWrite, segment: RemoteKey) -> WorkOp {
    let (to, class, nic, position, word) = match write {
        CreditWrite::Slot { to, class, nic, position, slot, transfer } => {
            let word = encode_lent(Lent { slot, transfer });
            (to, class, nic, Some(position), with_lap(word, position, FL_CREDIT_RING.into()))
        }
        CreditWrite::State { to, nic, call, state } => (to, Class::Put, nic, None, encode_state(call, state)),
    };
    let layout = SegmentLayout::new(cluster, cluster.server_of(to));
    let line = layout.credit_at(cluster.gpu_of(to), layout.credit_line(class, from, nic));
    let remote_addr = segment.remote_addr + 8 * (line + SegmentLayout::credit_word(position)) as u64;
    let mut data = [0; INLINE_BYTES];
    data[..8].copy_from_slice(&word.to_ne_bytes());
    WorkOp::Inline { remote: RemoteSpan { rkey: segment.rkey, remote_addr }, data, len: 8 }
}

/// The transfer takes 31 bits, shifted by one so that 0 names none.
fn encode_lent(lent: Lent) -> u64 {
    u64::from(lent.transfer.map_or(0, |t| t + 1)) << 32 | u64::from(lent.slot)
}

fn decode_lent(word: u64) -> Lent {
    Lent { slot: word as u32, transfer: ((word & WORD_MAX) >> 32).checked_sub(1).map(|t| t as u32) }
}

/// Call and state in one absolute word; zero, as memory starts, says nothing.
fn encode_state(call: CallId, state: NicState) -> u64 {
    call.0 << 8 | (state as u64 + 1)
}

fn decode_state(word: u64) -> Option<(CallId, NicState)> {
    let state = (word & 0xff).checked_sub(1)?;
    Some((CallId(word >> 8), NicState::from_number(state)))
}

/// News on a credit line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CreditEvent {
    /// A slot was granted.
    Slot {
        /// Class.
        class: Class,
        /// The receiver.
        from: Rank,
        /// Its NIC.
        nic: NicIdx,
        /// Its slot.
        lent: Lent,
    },
    /// A NIC's state, for a call.
    State {
        /// The receiver.
        from: Rank,
        /// Its NIC.
        nic: NicIdx,
        /// The call.
        call: CallId,
        /// How it fares.
        state: NicState,
    },
}

/// A sender's credit lines, polled.
pub struct CreditInbox {
    words: WordSlice,
    layout: SegmentLayout,
    sender: GpuIdx,
    lines: Vec<InboxLine>,
}

struct InboxLine {
    first_word: usize,
    class: Class,
    from: Rank,
    nic: NicIdx,
    next: u64,
    state: u64,
}

impl CreditInbox {
    /// The lines of a sender for all receivers of other servers.
    pub fn new(words: WordSlice, cluster: &Cluster, sender: Rank) -> Self {
        let server = cluster.server_of(sender);
        let layout = SegmentLayout::new(cluster, server);
        let gpu = cluster.gpu_of(sender);
        let mut inbox = Self { words, layout, sender: gpu, lines: Vec::new() };
        for line in 0..layout.credit_lines() {
            let (class, from, nic) = layout.credit_line_of(line);
            let other = cluster.server_of(from);
            if other != server && nic.idx() < cluster.server(other).nics.len() {
                let first_word = inbox.layout.credit_at(inbox.sender, line);
                inbox.lines.push(InboxLine { first_word, class, from, nic, next: 0, state: 0 });
            }
        }
        inbox
    }

    /// Calls `news` for everything that has come since the last poll; returns whether anything has.
    pub fn poll(&mut self, mut news: impl FnMut(CreditEvent)) -> bool {
        let mut any = false;
        for line in &mut self.lines {
            let (class, from, nic) = (line.class, line.from, line.nic);
            while let Some(lent) = take_slot(&self.words, line) {
                news(CreditEvent::Slot { class, from, nic, lent });
                any = true;
            }
            let word = self.words.word(line.first_word).load(Ordering::Relaxed);
            if word != line.state {
                line.state = word;
                if let Some((call, state)) = decode_state(word) {
                    news(CreditEvent::State { from, nic, call, state });
                    any = true;
                }
            }
        }
        any
    }
}

fn take_slot(words: &WordSlice, line: &mut InboxLine) -> Option<Lent> {
    let capacity = u64::from(FL_CREDIT_RING);
    let at = line.first_word + SegmentLayout::credit_word(Some(line.next));
    let word = words.word(at).load(Ordering::Relaxed);
    if word >> 63 != lap(line.next, capacity) {
        return None;
    }
    // The receiver's reads of the slot came before its grant; our writes to it come after this.
    fence(Ordering::Acquire);
    line.next += 1;
    Some(decode_lent(word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::SharedMemory;
    use crate::topo::{Server, ServerId};

    /// Does what a NIC does with an inline write.
    fn deliver(words: &WordSlice, op: WorkOp) {
        let WorkOp::Inline { remote, data, len: 8 } = op else { panic!("{op:?}") };
        let word = u64::from_ne_bytes(data[..8].try_into().unwrap());
        words.word((remote.remote_addr / 8) as usize).store(word, Ordering::Release);
    }

    #[test]
    fn credits_come_once_and_in_order_over_many_laps() {
        let cluster = Cluster::uniform(2, Server::new(2, &[1; 2], 1));
        let layout = SegmentLayout::new(&cluster, ServerId(0));
        let memory = SharedMemory::create("fuselink-credit-test", layout.words()).unwrap();
        let mut inbox = CreditInbox::new(memory.words(), &cluster, Rank(1));
        let key = RemoteKey { remote_addr: 0, rkey: 0, bytes: layout.words() as u64 * 8 };
        for position in 0..50 {
            let slot = (position % 7) as u32;
            let transfer = (position % 2 == 1).then_some(position as u32);
            let write = CreditWrite::Slot {
                to: Rank(1),
                class: Class::Put,
                nic: NicIdx(1),
                position,
                slot,
                transfer,
            };
            let op = write_op(&cluster, Rank(3), write, key);
            deliver(&memory.words(), op);
            deliver(&memory.words(), op);
            let mut seen = Vec::new();
            inbox.poll(|e| seen.push(e));
            let lent = Lent { slot, transfer };
            let event = CreditEvent::Slot { class: Class::Put, from: Rank(3), nic: NicIdx(1), lent };
            assert_eq!(seen, [event], "position {position}");
        }
    }

    #[test]
    fn states_belong_to_a_call() {
        let cluster = Cluster::uniform(2, Server::new(1, &[1], 1));
        let layout = SegmentLayout::new(&cluster, ServerId(1));
        let memory = SharedMemory::create("fuselink-credit-test", layout.words()).unwrap();
        let mut inbox = CreditInbox::new(memory.words(), &cluster, Rank(1));
        assert!(!inbox.poll(|e| panic!("{e:?}")));
        let key = RemoteKey { remote_addr: 0, rkey: 0, bytes: 0 };
        let write =
            CreditWrite::State { to: Rank(1), nic: NicIdx(0), call: CallId(9), state: NicState::Idle };
        deliver(&memory.words(), write_op(&cluster, Rank(0), write, key));
        let mut seen = Vec::new();
        inbox.poll(|e| seen.push(e));
        let event =
            CreditEvent::State { from: Rank(0), nic: NicIdx(0), call: CallId(9), state: NicState::Idle };
        assert_eq!(seen, [event]);
    }
}
