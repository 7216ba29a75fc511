//! Credit lines: a receiver's word to a sender, written by RDMA into the segment of the sender's server
//! (`FlCreditLine` in `kernels/abi.h`).

mod returns;

pub use returns::ReturnInbox;

use crate::abi::{FL_CREDIT_RING, FlCreditLine};
use crate::doorbell::Class;
use crate::engine::call::CallId;
use crate::engine::route::NicState;
use crate::engine::{Answer, CreditWrite, LINE_SLOTS, Lent};
use crate::hw::{INLINE_BYTES, RemoteKey, RemoteSpan, WorkOp};
use crate::ring::{WORD_MAX, lap, with_lap};
use crate::segment::SegmentLayout;
use crate::topo::{Cluster, GpuIdx, NicIdx, Rank};
use crate::words::{Ordering, WordSlice, Words, fence};

/// Words of a credit line, counted from its first.
const STATE_AT: usize = 0;
const CALLED_IN_AT: usize = 1;
const ANSWER_AT: usize = 2;
const RECALLED_AT: usize = 3;
/// Address, key, bytes.
const MEMORY_AT: usize = 4;
const ARRIVED_AT: usize = 7;
const RING_AT: usize = 8;
const _: () = assert!(std::mem::offset_of!(FlCreditLine, called_in) == 8 * CALLED_IN_AT);
const _: () = assert!(std::mem::offset_of!(FlCreditLine, answer) == 8 * ANSWER_AT);
const _: () = assert!(std::mem::offset_of!(FlCreditLine, recalled) == 8 * RECALLED_AT);
const _: () = assert!(std::mem::offset_of!(FlCreditLine, memory_addr) == 8 * MEMORY_AT);
const _: () = assert!(std::mem::offset_of!(FlCreditLine, memory_rkey) == 8 * (MEMORY_AT + 1));
const _: () = assert!(std::mem::offset_of!(FlCreditLine, memory_bytes) == 8 * (MEMORY_AT + 2));
const _: () = assert!(std::mem::offset_of!(FlCreditLine, arrived) == 8 * ARRIVED_AT);
const _: () = assert!(std::mem::offset_of!(FlCreditLine, ring) == 8 * RING_AT);

fn ring_word(position: u64) -> usize {
    RING_AT + (position % u64::from(FL_CREDIT_RING)) as usize
}

/// The RDMA writes, in order, that carry a control word from `from` to its sender, whose segment is registered under
/// `segment`.
pub fn write_ops(
    cluster: &Cluster,
    from: Rank,
    write: CreditWrite,
    segment: RemoteKey,
) -> impl Iterator<Item = WorkOp> {
    let layout = SegmentLayout::new(cluster, cluster.server_of(write.to()));
    let line = |to, class, nic| layout.credit_at(cluster.gpu_of(to), layout.credit_line(class, from, nic));
    let one = |at, word| [Some((at, word)), None, None];
    let (first, words) = match write {
        CreditWrite::Slot { to, class, nic, lent } => {
            let word = with_lap(encode_lent(lent), lent.position, FL_CREDIT_RING.into());
            (line(to, class, nic), one(ring_word(lent.position), word))
        }
        // Who sees what is void sees what had come by then, and who sees the fence sees both.
        CreditWrite::Answer { to, class, nic, answer } => {
            let called_in = (CALLED_IN_AT, answer.called_in_before);
            let arrived = (ARRIVED_AT, u64::from_le_bytes(answer.arrived));
            (line(to, class, nic), [arrived, called_in, (ANSWER_AT, answer.fence.into())].map(Some))
        }
        CreditWrite::Memory { to, class, nic, key } => {
            let words = [key.remote_addr, key.rkey, key.bytes];
            (line(to, class, nic), std::array::from_fn(|i| Some((MEMORY_AT + i, words[i]))))
        }
        CreditWrite::Recall { to, class, nic, before } => (line(to, class, nic), one(RECALLED_AT, before)),
        CreditWrite::Returned { to, class, nic, returned } => {
            let at = layout.return_at(cluster.gpu_of(to), class, from, nic);
            (at, one(0, returns::encode(returned)))
        }
        CreditWrite::State { to, nic, call, state } => {
            (line(to, Class::Put, nic), one(STATE_AT, encode_state(call, state)))
        }
    };
    words.into_iter().flatten().map(move |(at, word)| write_word(segment, first + at, word))
}

/// The RDMA write of one word of a segment.
pub fn write_word(segment: RemoteKey, at: usize, word: u64) -> WorkOp {
    let mut data = [0; INLINE_BYTES];
    data[..8].copy_from_slice(&word.to_ne_bytes());
    let remote = RemoteSpan { rkey: segment.rkey, remote_addr: segment.remote_addr + 8 * at as u64 };
    WorkOp::Inline { remote, data, len: 8 }
}

/// Slot in 12 bits, epoch in 8, the NIC that it stands for in 12 and the transfer in 31, both shifted by one so that 0
/// names none.
fn encode_lent(lent: Lent) -> u64 {
    let transfer = u64::from(lent.transfer.map_or(0, |t| t + 1));
    let instead_of = u64::from(lent.instead_of.map_or(0, |nic| nic.0 + 1) & 0xfff);
    transfer << 32 | instead_of << 20 | u64::from(lent.epoch) << 12 | u64::from(lent.slot & 0xfff)
}

fn decode_lent(word: u64, position: u64) -> Lent {
    let transfer = ((word & WORD_MAX) >> 32).checked_sub(1).map(|t| t as u32);
    let instead_of = (word as u32 >> 20).checked_sub(1).map(NicIdx);
    Lent { position, slot: word as u32 & 0xfff, epoch: (word >> 12) as u8, transfer, instead_of }
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
    /// A receiver's answer after a path was closed.
    Answer {
        /// Class.
        class: Class,
        /// The receiver.
        from: Rank,
        /// Its NIC.
        nic: NicIdx,
        /// The answer.
        answer: Answer,
    },
    /// Credits are asked back.
    Recall {
        /// Class.
        class: Class,
        /// The receiver.
        from: Rank,
        /// Its NIC.
        nic: NicIdx,
        /// Those before this position.
        before: u64,
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
    /// Position of the next credit.
    next: u64,
    /// By slot: the last epoch seen.
    epochs: [u8; LINE_SLOTS],
    state: u64,
    answer: u64,
    recalled: u64,
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
                let (next, epochs, state, answer, recalled) = (0, [0; LINE_SLOTS], 0, 0, 0);
                inbox.lines.push(InboxLine {
                    first_word,
                    class,
                    from,
                    nic,
                    next,
                    epochs,
                    state,
                    answer,
                    recalled,
                });
            }
        }
        inbox
    }

    /// Where a receiver's slots beside one of its NICs lie, if their memory was lent after the start. Asked by who holds a credit
    /// of theirs: the words came before it (its acquire is `take_slot`'s), and stay until it is spent or returned.
    pub fn memory(&self, class: Class, from: Rank, nic: NicIdx) -> Option<RemoteKey> {
        let first = self.layout.credit_at(self.sender, self.layout.credit_line(class, from, nic)) + MEMORY_AT;
        let word = |i| self.words.word(first + i).load(Ordering::Relaxed);
        let key = RemoteKey { remote_addr: word(0), rkey: word(1), bytes: word(2) };
        (key.bytes > 0).then_some(key)
    }

    /// Calls `news` for everything that has come since the last poll; returns whether anything has.
    pub fn poll(&mut self, mut news: impl FnMut(CreditEvent)) -> bool {
        let mut any = false;
        for line in &mut self.lines {
            any |= line.poll(&self.words, &mut news);
        }
        any
    }
}

impl InboxLine {
    /// An answer is told before the credits that were read before it: it came before them, and may void some.
    fn poll(&mut self, words: &WordSlice, news: &mut impl FnMut(CreditEvent)) -> bool {
        let (class, from, nic) = (self.class, self.from, self.nic);
        let mut slots: [Option<Lent>; LINE_SLOTS] = [None; LINE_SLOTS];
        for place in &mut slots {
            *place = self.take_slot(words);
            if place.is_none() {
                break;
            }
        }
        let answered = self.take_answer(words);
        if let Some(answer) = answered {
            news(CreditEvent::Answer { class, from, nic, answer });
        }
        for lent in slots.into_iter().flatten() {
            news(CreditEvent::Slot { class, from, nic, lent });
        }
        // Relaxed: a position says all by itself; a credit that is seen later is known by its own.
        let before = words.word(self.first_word + RECALLED_AT).load(Ordering::Relaxed);
        let recalled = std::mem::replace(&mut self.recalled, before) != before;
        if recalled {
            news(CreditEvent::Recall { class, from, nic, before });
        }
        let state = words.word(self.first_word + STATE_AT).load(Ordering::Relaxed);
        let changed = std::mem::replace(&mut self.state, state) != state;
        if let Some((call, state)) = decode_state(state).filter(|_| changed) {
            news(CreditEvent::State { from, nic, call, state });
        }
        answered.is_some() || slots[0].is_some() || recalled || changed
    }

    fn take_answer(&mut self, words: &WordSlice) -> Option<Answer> {
        let word = words.word(self.first_word + ANSWER_AT).load(Ordering::Relaxed);
        if word == self.answer {
            return None;
        }
        // The other words were written before it, in this order from the last; they may belong to a newer fence already.
        fence(Ordering::Acquire);
        let called_in_before = words.word(self.first_word + CALLED_IN_AT).load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let arrived = words.word(self.first_word + ARRIVED_AT).load(Ordering::Relaxed).to_le_bytes();
        self.answer = word;
        // Credits that were void before they could be read may never have come.
        self.next = self.next.max(called_in_before);
        Some(Answer { fence: word as u32, arrived, called_in_before })
    }

    fn take_slot(&mut self, words: &WordSlice) -> Option<Lent> {
        let word = words.word(self.first_word + ring_word(self.next)).load(Ordering::Relaxed);
        if word >> 63 != lap(self.next, FL_CREDIT_RING.into()) {
            return None;
        }
        let lent = decode_lent(word, self.next);
        // The word of two laps before looks the same where the one between was lost; its epoch has been seen.
        let seen = &mut self.epochs[lent.slot as usize % LINE_SLOTS];
        if (lent.epoch.wrapping_sub(*seen) as i8) <= 0 {
            return None;
        }
        *seen = lent.epoch;
        // The receiver's reads of the slot came before its grant; our writes to it come after this.
        fence(Ordering::Acquire);
        self.next += 1;
        Some(lent)
    }
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

    fn deliver_all(words: &WordSlice, ops: impl Iterator<Item = WorkOp>) {
        ops.for_each(|op| deliver(words, op));
    }

    #[test]
    fn an_answer_voids_what_was_lost_and_a_word_of_old_laps_is_no_credit() {
        let cluster = Cluster::uniform(2, Server::new(1, &[1], 1));
        let layout = SegmentLayout::new(&cluster, ServerId(0));
        let memory = SharedMemory::create("fuselink-credit-test", layout.words()).unwrap();
        let mut inbox = CreditInbox::new(memory.words(), &cluster, Rank(0));
        let key = RemoteKey { remote_addr: 0, rkey: 0, bytes: 0 };
        let (to, class, nic) = (Rank(0), Class::Plan, NicIdx(0));
        let lent = |position| Lent {
            position,
            slot: position as u32 % 4,
            epoch: 1 + position as u8 / 4,
            transfer: None,
            instead_of: Some(NicIdx(7)),
        };
        let slot = |position| CreditWrite::Slot { to, class, nic, lent: lent(position) };
        let tell = |write| deliver_all(&memory.words(), write_ops(&cluster, Rank(1), write, key));
        let mut poll = || {
            let mut seen = Vec::new();
            inbox.poll(|e| seen.push(e));
            seen
        };
        let ring = u64::from(FL_CREDIT_RING);
        (0..ring).for_each(|position| {
            tell(slot(position));
            poll();
        });
        // A whole lap is lost, and void: the words of the lap before theirs are still there.
        let answer = Answer { fence: 3, arrived: [2, 2, 2, 2, 0, 0, 0, 15], called_in_before: 2 * ring };
        tell(CreditWrite::Answer { to, class, nic, answer });
        let from = Rank(1);
        assert_eq!(poll(), [CreditEvent::Answer { class, from, nic, answer }]);
        assert_eq!(poll(), []);
        tell(slot(2 * ring));
        assert_eq!(poll(), [CreditEvent::Slot { class, from, nic, lent: lent(2 * ring) }]);
    }

    #[test]
    fn credits_come_once_and_in_order_over_many_laps() {
        let cluster = Cluster::uniform(2, Server::new(2, &[1; 2], 1));
        let layout = SegmentLayout::new(&cluster, ServerId(0));
        let memory = SharedMemory::create("fuselink-credit-test", layout.words()).unwrap();
        let mut inbox = CreditInbox::new(memory.words(), &cluster, Rank(1));
        let key = RemoteKey { remote_addr: 0, rkey: 0, bytes: layout.words() as u64 * 8 };
        for position in 0..50 {
            let slot = (position % 4) as u32;
            let transfer = (position % 2 == 1).then_some(position as u32);
            let lent = Lent { position, slot, epoch: (position / 4 + 1) as u8, transfer, instead_of: None };
            let write = CreditWrite::Slot { to: Rank(1), class: Class::Put, nic: NicIdx(1), lent };
            deliver_all(&memory.words(), write_ops(&cluster, Rank(3), write, key));
            deliver_all(&memory.words(), write_ops(&cluster, Rank(3), write, key));
            let mut seen = Vec::new();
            inbox.poll(|e| seen.push(e));
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
        deliver_all(&memory.words(), write_ops(&cluster, Rank(0), write, key));
        let mut seen = Vec::new();
        inbox.poll(|e| seen.push(e));
        let event =
            CreditEvent::State { from: Rank(0), nic: NicIdx(0), call: CallId(9), state: NicState::Idle };
        assert_eq!(seen, [event]);
    }
}
