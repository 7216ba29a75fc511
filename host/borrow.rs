//! A NIC that another process owns: work goes to the owner through a ring in the server's segment, completions and
//! arrivals come back through another. The same trait as the device's.

use crate::hw::{
    HwError, INLINE_BYTES, LinkState, LocalKey, LocalSpan, Nanos, Nic, NicEvent, PathId, PathNews,
    RemoteSpan, Work, WorkError, WorkOp,
};
use crate::ring::{Consumer, Full, Producer, WORD_MAX};
use crate::segment::{EVENT_WORDS, SegmentLayout, WORK_WORDS};
use crate::topo::{GpuIdx, NicId, NicIdx};
use crate::words::WordSlice;

const WORK_WRITE: u64 = 1;
const WORK_INLINE: u64 = 2;

/// Work as words of 63 bits. The local key is not sent: a borrower's slots lie in the relay memory of that NIC.
fn encode_work(work: &Work) -> [u64; WORK_WORDS] {
    let path = work.path.0.into();
    match work.op {
        WorkOp::Write { local, remote, imm } => {
            let bytes = local.bytes.into();
            [WORK_WRITE, path, local.offset, bytes, imm.into(), remote.remote_addr, remote.rkey, work.cookie]
        }
        WorkOp::Inline { remote, data, len } => {
            let halves: [u64; 2] =
                std::array::from_fn(|i| u64::from_ne_bytes(std::array::from_fn(|b| data[8 * i + b])));
            let tops = halves[0] >> 63 | halves[1] >> 63 << 1;
            let low = halves.map(|h| h & WORD_MAX);
            [
                WORK_INLINE | u64::from(len) << 8,
                path,
                low[0],
                low[1],
                tops,
                remote.remote_addr,
                remote.rkey,
                work.cookie,
            ]
        }
    }
}

/// Every field is hostile; what they may name is checked by the owner. `None`: not work at all.
fn decode_work(words: [u64; WORK_WORDS]) -> Option<Work> {
    let [kind, path, a, b, c, remote_addr, rkey, cookie] = words;
    let remote = RemoteSpan { rkey, remote_addr };
    let op = match kind & 0xff {
        WORK_WRITE => {
            let local = LocalSpan { key: LocalKey(0), offset: a, bytes: u32::try_from(b).ok()? };
            WorkOp::Write { local, remote, imm: u32::try_from(c).ok()? }
        }
        WORK_INLINE => {
            let len = u8::try_from(kind >> 8).ok().filter(|&l| usize::from(l) <= INLINE_BYTES)?;
            let mut data = [0; INLINE_BYTES];
            data[..8].copy_from_slice(&(a | (c & 1) << 63).to_ne_bytes());
            data[8..].copy_from_slice(&(b | (c >> 1 & 1) << 63).to_ne_bytes());
            WorkOp::Inline { remote, data, len }
        }
        _ => return None,
    };
    Some(Work { path: PathId(u32::try_from(path).ok()?), op, cookie })
}

const ERRORS: [WorkError; 6] = [
    WorkError::RemoteAccess,
    WorkError::LinkDown,
    WorkError::RetryExceeded,
    WorkError::Flushed,
    WorkError::Refused,
    WorkError::Quarantined,
];
const EVENT_COMPLETED: u64 = 1;
const EVENT_ARRIVED: u64 = 2;
const EVENT_LINK: u64 = 3;
const EVENT_PATH: u64 = 4;
const EVENT_BROKEN: u64 = 5;

/// What is new, and its two arguments.
fn encode_news(news: PathNews) -> [u64; 2] {
    match news {
        PathNews::Down => [1, 0],
        PathNews::Fenced { fence, all_closed } => [2, u64::from(fence) << 1 | u64::from(all_closed)],
        PathNews::PeerFenced { fence } => [3, fence.into()],
        PathNews::Up { fence } => [4, fence.into()],
    }
}

fn decode_news(kind: u64, argument: u64) -> Option<PathNews> {
    let fence = |n: u64| u32::try_from(n).ok();
    Some(match kind {
        1 => PathNews::Down,
        2 => PathNews::Fenced { fence: fence(argument >> 1)?, all_closed: argument & 1 == 1 },
        3 => PathNews::PeerFenced { fence: fence(argument)? },
        4 => PathNews::Up { fence: fence(argument)? },
        _ => return None,
    })
}

fn encode_event(event: &NicEvent) -> [u64; EVENT_WORDS] {
    match *event {
        NicEvent::Completed { cookie, result: Ok(()) } => [EVENT_COMPLETED, cookie, 0, 0],
        NicEvent::Completed { cookie, result: Err(e) } => {
            let code = ERRORS.iter().position(|&known| known == e).unwrap_or(ERRORS.len() - 1);
            [EVENT_COMPLETED, cookie, code as u64 + 1, 0]
        }
        NicEvent::Arrived { from, imm, bytes } => [EVENT_ARRIVED, from.0.into(), imm.into(), bytes.into()],
        NicEvent::Link(state) => [EVENT_LINK, (state == LinkState::Up).into(), 0, 0],
        NicEvent::Broken(path) => [EVENT_BROKEN, path.0.into(), 0, 0],
        NicEvent::Path { peer, news } => {
            let [kind, argument] = encode_news(news);
            [EVENT_PATH, peer.0.into(), kind, argument]
        }
    }
}

fn decode_event(words: [u64; EVENT_WORDS]) -> Option<NicEvent> {
    let [kind, a, b, c] = words;
    match kind {
        EVENT_COMPLETED => {
            let result = match b.checked_sub(1) {
                None => Ok(()),
                Some(code) => Err(*ERRORS.get(usize::try_from(code).ok()?)?),
            };
            Some(NicEvent::Completed { cookie: a, result })
        }
        EVENT_ARRIVED => Some(NicEvent::Arrived {
            from: NicId(u32::try_from(a).ok()?),
            imm: u32::try_from(b).ok()?,
            bytes: u32::try_from(c).ok()?,
        }),
        EVENT_LINK => Some(NicEvent::Link(if a == 0 { LinkState::Down } else { LinkState::Up })),
        EVENT_BROKEN => Some(NicEvent::Broken(PathId(u32::try_from(a).ok()?))),
        EVENT_PATH => Some(NicEvent::Path { peer: NicId(u32::try_from(a).ok()?), news: decode_news(b, c)? }),
        _ => None,
    }
}

/// The borrower's end: a [`Nic`] whose path numbers are the peers' NIC numbers.
pub struct BorrowedNic {
    idx: NicIdx,
    work: Producer<WordSlice, WORK_WORDS>,
    events: Consumer<WordSlice, EVENT_WORDS>,
}

impl BorrowedNic {
    /// NIC `idx`, borrowed by `borrower`, in the server's segment.
    pub fn new(segment: &WordSlice, layout: SegmentLayout, borrower: GpuIdx, idx: NicIdx) -> Self {
        Self {
            idx,
            work: Producer::new(segment.clone(), layout.work_ring(borrower, idx)),
            events: Consumer::new(segment.clone(), layout.event_ring(borrower, idx)),
        }
    }
}

impl Nic for BorrowedNic {
    fn idx(&self) -> NicIdx {
        self.idx
    }

    fn post(&mut self, work: &[Work], _now: Nanos) -> Result<usize, HwError> {
        let taken = work.iter().take_while(|w| self.work.push(&encode_work(w)).is_ok());
        Ok(taken.count())
    }

    fn poll(&mut self, _now: Nanos, events: &mut Vec<NicEvent>) -> Result<(), HwError> {
        while let Some(words) = self.events.pop() {
            events.push(decode_event(words).ok_or(HwError::BadWork {
                nic: self.idx,
                field: "event",
                value: words[0],
            })?);
        }
        self.events.publish();
        Ok(())
    }

    fn flush(&mut self) -> Result<(), HwError> {
        Ok(()) // The owner flushes before it passes an arrival on.
    }
}

/// The owner's end of one borrower's rings.
pub struct BorrowerPort {
    /// The borrower.
    pub gpu: GpuIdx,
    work: Consumer<WordSlice, WORK_WORDS>,
    events: Producer<WordSlice, EVENT_WORDS>,
}

/// A borrower wrote something that is not work.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{gpu} handed over something that is not work ({words:x?})")]
pub struct BadHandover {
    /// The borrower.
    pub gpu: GpuIdx,
    /// Its words.
    pub words: [u64; WORK_WORDS],
}

impl BorrowerPort {
    /// The rings of `borrower` for NIC `idx`.
    pub fn new(segment: &WordSlice, layout: SegmentLayout, borrower: GpuIdx, idx: NicIdx) -> Self {
        Self {
            gpu: borrower,
            work: Consumer::new(segment.clone(), layout.work_ring(borrower, idx)),
            events: Producer::new(segment.clone(), layout.event_ring(borrower, idx)),
        }
    }

    /// The next item of work, left in the ring until [`take`](Self::take).
    ///
    /// # Errors
    /// [`BadHandover`].
    pub fn peek(&mut self) -> Result<Option<Work>, BadHandover> {
        let Some(words) = self.work.peek() else {
            self.work.publish();
            return Ok(None);
        };
        decode_work(words).map(Some).ok_or(BadHandover { gpu: self.gpu, words })
    }

    /// Goes past the item that `peek` returned.
    pub fn take(&mut self) {
        self.work.advance();
    }

    /// Hands an event back.
    ///
    /// # Errors
    /// [`Full`]: keep it and try again.
    pub fn give(&self, event: &NicEvent) -> Result<(), Full> {
        self.events.push(&encode_event(event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_work() -> impl Strategy<Value = Work> {
        let word = 0u64..=WORD_MAX;
        (
            any::<bool>(),
            any::<u32>(),
            word.clone(),
            any::<u32>(),
            any::<[u8; 16]>(),
            0u8..=16,
            word.clone(),
            word,
        )
            .prop_map(|(write, n, offset, bytes, data, len, remote_addr, cookie)| {
                let remote = RemoteSpan { rkey: offset, remote_addr };
                let local = LocalSpan { key: LocalKey(0), offset, bytes };
                let op = if write {
                    WorkOp::Write { local, remote, imm: n ^ 0xffff }
                } else {
                    WorkOp::Inline { remote, data, len }
                };
                Work { path: PathId(n), op, cookie }
            })
    }

    proptest! {
        #[test]
        fn work_survives_the_ring(work in any_work()) {
            let words = encode_work(&work);
            prop_assert!(words.iter().all(|&w| w <= WORD_MAX));
            prop_assert_eq!(decode_work(words), Some(work));
        }

        #[test]
        fn any_words_are_work_or_refused(words in any::<[u64; WORK_WORDS]>(), event in any::<[u64; EVENT_WORDS]>()) {
            let _ = decode_work(words);
            let _ = decode_event(event);
        }
    }

    #[test]
    fn events_survive_the_ring() {
        let completed = |result| NicEvent::Completed { cookie: WORD_MAX, result };
        let mut events = vec![
            completed(Ok(())),
            NicEvent::Arrived { from: NicId(9), imm: u32::MAX, bytes: u32::MAX },
            NicEvent::Link(LinkState::Up),
            NicEvent::Link(LinkState::Down),
            NicEvent::Broken(PathId(7)),
        ];
        let news = [
            PathNews::Down,
            PathNews::Fenced { fence: (1 << 31) - 1, all_closed: true },
            PathNews::Fenced { fence: 1, all_closed: false },
            PathNews::PeerFenced { fence: 9 },
            PathNews::Up { fence: 0 },
        ];
        events.extend(news.map(|news| NicEvent::Path { peer: NicId(3), news }));
        events.extend(ERRORS.map(|e| completed(Err(e))));
        for event in events {
            assert_eq!(decode_event(encode_event(&event)), Some(event));
        }
    }
}
