//! Work and events as words of a ring. Either side takes the other's words for hostile.

use crate::hw::{
    INLINE_BYTES, Lane, LinkState, LocalKey, LocalSpan, NicEvent, PathId, PathNews, RemoteSpan, Work,
    WorkError, WorkOp,
};
use crate::ring::WORD_MAX;
use crate::segment::{EVENT_WORDS, WORK_WORDS};
use crate::topo::NicId;

const WORK_WRITE: u64 = 1;
const WORK_INLINE: u64 = 2;
const LEN_SHIFT: u32 = 8;

/// Bits of how much news a borrower has heard.
const HEARD_BITS: u32 = 47;
const HEARD_SHIFT: u32 = 16;
const _: () = assert!(HEARD_SHIFT + HEARD_BITS == 63);

/// Work that a borrower hands over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Handover {
    /// What is to be done.
    pub work: Work,
    /// How much news the borrower had heard when it handed it over: of a path that was closed and opened since, it thinks
    /// as of another one.
    pub heard: u64,
}

/// Work as words of 63 bits. The local key is not sent: a borrower's slots lie in the relay memory of that NIC. Nor is the
/// lane: each has a ring of its own.
pub(super) fn encode_work(&Handover { work, heard }: &Handover) -> [u64; WORK_WORDS] {
    let (path, heard) = (work.path.0.into(), heard << HEARD_SHIFT);
    match work.op {
        WorkOp::Write { local, remote, imm } => {
            let (kind, bytes) = (WORK_WRITE | heard, local.bytes.into());
            [kind, path, local.offset, bytes, imm.into(), remote.remote_addr, remote.rkey, work.cookie]
        }
        WorkOp::Inline { remote, data, len } => {
            let halves: [u64; 2] =
                std::array::from_fn(|i| u64::from_ne_bytes(std::array::from_fn(|b| data[8 * i + b])));
            let tops = halves[0] >> 63 | halves[1] >> 63 << 1;
            let low = halves.map(|h| h & WORD_MAX);
            [
                WORK_INLINE | u64::from(len) << LEN_SHIFT | heard,
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
pub(super) fn decode_work(lane: Lane, words: [u64; WORK_WORDS]) -> Option<Handover> {
    let [kind, path, a, b, c, remote_addr, rkey, cookie] = words;
    let remote = RemoteSpan { rkey, remote_addr };
    let op = match kind & 0xff {
        WORK_WRITE => {
            let local = LocalSpan { key: LocalKey(0), offset: a, bytes: u32::try_from(b).ok()? };
            WorkOp::Write { local, remote, imm: u32::try_from(c).ok()? }
        }
        WORK_INLINE => {
            let len = Some((kind >> LEN_SHIFT) as u8).filter(|&l| usize::from(l) <= INLINE_BYTES)?;
            let mut data = [0; INLINE_BYTES];
            data[..8].copy_from_slice(&(a | (c & 1) << 63).to_ne_bytes());
            data[8..].copy_from_slice(&(b | (c >> 1 & 1) << 63).to_ne_bytes());
            WorkOp::Inline { remote, data, len }
        }
        _ => return None,
    };
    let work = Work { path: PathId(u32::try_from(path).ok()?), lane, op, cookie };
    Some(Handover { work, heard: kind >> HEARD_SHIFT })
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

pub(super) fn encode_event(event: &NicEvent) -> [u64; EVENT_WORDS] {
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

pub(super) fn decode_event(words: [u64; EVENT_WORDS]) -> Option<NicEvent> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_work() -> impl Strategy<Value = Handover> {
        let word = 0u64..=WORD_MAX;
        (
            any::<bool>(),
            any::<u32>(),
            0..1u64 << HEARD_BITS,
            word.clone(),
            any::<u32>(),
            any::<[u8; 16]>(),
            0u8..=16,
            word.clone(),
            word,
        )
            .prop_map(|(write, n, heard, offset, bytes, data, len, remote_addr, cookie)| {
                let remote = RemoteSpan { rkey: offset, remote_addr };
                let local = LocalSpan { key: LocalKey(0), offset, bytes };
                let op = if write {
                    WorkOp::Write { local, remote, imm: n ^ 0xffff }
                } else {
                    WorkOp::Inline { remote, data, len }
                };
                let lane = if write { Lane::Put } else { Lane::LowLatency };
                Handover { work: Work { path: PathId(n), lane, op, cookie }, heard }
            })
    }

    proptest! {
        #[test]
        fn work_survives_the_ring(work in any_work()) {
            let words = encode_work(&work);
            prop_assert!(words.iter().all(|&w| w <= WORD_MAX));
            prop_assert_eq!(decode_work(work.work.lane, words), Some(work));
        }

        #[test]
        fn any_words_are_work_or_refused(words in any::<[u64; WORK_WORDS]>(), event in any::<[u64; EVENT_WORDS]>()) {
            let _ = decode_work(Lane::Plan, words);
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
