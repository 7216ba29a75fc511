//! A NIC that another process owns: work goes to the owner through rings in the server's segment, completions and arrivals
//! come back through others. The same trait as the device's.
//!
//! Each lane of work has a ring of its own, and so has each class of events: what finds one full leaves the others alone.
//! *News* (of links and paths) is ordered with the events of every class: completions told before a path is fenced must be heard
//! before. So the owner puts it into all rings, and the borrower takes it when it has come to it in all of them.

mod encoding;

use std::fmt;

pub use encoding::Handover;
use encoding::{decode_event, decode_work, encode_event, encode_work};

use crate::doorbell::Class;
use crate::hw::{HwError, Lane, Nanos, Nic, NicEvent, Work};
use crate::ring::{Consumer, Full, Producer};
use crate::segment::{EVENT_WORDS, SegmentLayout, WORK_WORDS};
use crate::topo::{GpuIdx, NicIdx};
use crate::words::WordSlice;

/// How many rings carry events.
const EVENT_RINGS: usize = Class::ALL.len();

/// What went through rings, and what had to wait for room.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct LaneCount {
    /// Items that went on.
    pub passed: u64,
    /// Times that the next one had to wait.
    pub waited: u64,
}

impl LaneCount {
    /// Of two rings together.
    pub fn plus(self, other: Self) -> Self {
        Self { passed: self.passed + other.passed, waited: self.waited + other.waited }
    }

    pub(crate) fn count(&mut self, passed: usize, waited: bool) {
        self.passed += passed as u64;
        self.waited += u64::from(waited);
    }
}

/// By lane.
pub type LaneCounts = [LaneCount; Lane::COUNT];

/// What went through the rings between the processes of a server, as one of them sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct RingCounters {
    /// Work that it handed to owners; it waited where a ring was full.
    pub handed_over: LaneCounts,
    /// Work of borrowers that it posted; it waited where the device had no room, or enough bytes of its lane.
    pub served: LaneCounts,
    /// Events that it handed to borrowers, by the lane of their class; they waited where a ring was full.
    pub told: LaneCounts,
}

impl RingCounters {
    /// Of two NICs together.
    pub fn plus(self, other: Self) -> Self {
        let sum = |a: LaneCounts, b: LaneCounts| std::array::from_fn(|lane| a[lane].plus(b[lane]));
        Self {
            handed_over: sum(self.handed_over, other.handed_over),
            served: sum(self.served, other.served),
            told: sum(self.told, other.told),
        }
    }
}

impl fmt::Display for RingCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, counts) in
            [("handed over", self.handed_over), ("served", self.served), ("told", self.told)]
        {
            write!(f, "{what}")?;
            for (lane, LaneCount { passed, waited }) in Lane::ALL.iter().zip(counts) {
                write!(f, " {lane:?} {passed} (waited {waited})")?;
            }
            f.write_str("; ")?;
        }
        Ok(())
    }
}

/// Whether an event is ordered with those of all classes.
fn is_news(event: &NicEvent) -> bool {
    !matches!(event, NicEvent::Completed { .. } | NicEvent::Arrived { .. })
}

/// The borrower's end: a [`Nic`] whose path numbers are the peers' NIC numbers.
pub struct BorrowedNic {
    idx: NicIdx,
    work: [Producer<WordSlice, WORK_WORDS>; Lane::COUNT],
    events: [Consumer<WordSlice, EVENT_WORDS>; EVENT_RINGS],
    heard: u64,
    counts: LaneCounts,
}

impl BorrowedNic {
    /// NIC `idx`, borrowed by `borrower`, in the server's segment.
    pub fn new(segment: &WordSlice, layout: SegmentLayout, borrower: GpuIdx, idx: NicIdx) -> Self {
        let work = |lane| Producer::new(segment.clone(), layout.work_ring(borrower, idx, lane));
        let events = |ring| Consumer::new(segment.clone(), ring);
        Self {
            idx,
            work: Lane::ALL.map(work),
            events: layout.event_rings(borrower, idx).map(events),
            heard: 0,
            counts: LaneCounts::default(),
        }
    }

    /// Work handed over, and the times that a ring was full.
    pub fn counts(&self) -> LaneCounts {
        self.counts
    }

    fn hand_over(&mut self, work: &Work) -> Result<(), Full> {
        let words = encode_work(&Handover { work: *work, heard: self.heard });
        let result = self.work[work.lane as usize].push(&words);
        self.counts[work.lane as usize].count(usize::from(result.is_ok()), result.is_err());
        result
    }

    fn head(&self, ring: usize) -> Result<Option<NicEvent>, HwError> {
        let Some(words) = self.events[ring].peek() else { return Ok(None) };
        decode_event(words).map(Some).ok_or(HwError::BadWork {
            nic: self.idx,
            field: "event",
            value: words[0],
        })
    }

    /// Takes the events of each class up to the next news; returns whether there was any.
    fn take_events(&mut self, events: &mut Vec<NicEvent>) -> Result<bool, HwError> {
        let before = events.len();
        for ring in 0..EVENT_RINGS {
            while let Some(event) = self.head(ring)?.filter(|e| !is_news(e)) {
                events.push(event);
                self.events[ring].advance();
            }
        }
        Ok(events.len() > before)
    }

    /// News that all rings have come to.
    fn take_news(&mut self, events: &mut Vec<NicEvent>) -> Result<bool, HwError> {
        let mut heads = [None; EVENT_RINGS];
        for (ring, head) in heads.iter_mut().enumerate() {
            *head = self.head(ring)?.filter(is_news);
        }
        let [Some(news), rest @ ..] = heads else { return Ok(false) };
        if rest.contains(&None) {
            return Ok(false);
        }
        if rest.iter().any(|&head| head != Some(news)) {
            return Err(HwError::BadWork { nic: self.idx, field: "news", value: self.heard });
        }
        self.events.iter_mut().for_each(Consumer::advance);
        self.heard += 1;
        events.push(news);
        Ok(true)
    }
}

impl Nic for BorrowedNic {
    fn idx(&self) -> NicIdx {
        self.idx
    }

    fn post(&mut self, work: &[Work], _now: Nanos) -> Result<usize, HwError> {
        Ok(work.iter().take_while(|item| self.hand_over(item).is_ok()).count())
    }

    fn poll(&mut self, _now: Nanos, events: &mut Vec<NicEvent>) -> Result<(), HwError> {
        while self.take_events(events)? | self.take_news(events)? {}
        self.events.iter_mut().for_each(Consumer::publish);
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
    work: [Consumer<WordSlice, WORK_WORDS>; Lane::COUNT],
    events: [Producer<WordSlice, EVENT_WORDS>; EVENT_RINGS],
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
        let work = |lane| Consumer::new(segment.clone(), layout.work_ring(borrower, idx, lane));
        let events = |ring| Producer::new(segment.clone(), ring);
        Self {
            gpu: borrower,
            work: Lane::ALL.map(work),
            events: layout.event_rings(borrower, idx).map(events),
        }
    }

    /// The item of a lane `ahead` places behind the next one; all are left in the ring until [`take`](Self::take).
    ///
    /// # Errors
    /// [`BadHandover`].
    pub fn peek(&mut self, lane: Lane, ahead: u64) -> Result<Option<Handover>, BadHandover> {
        let ring = &mut self.work[lane as usize];
        let Some(words) = ring.peek_ahead(ahead) else {
            ring.publish();
            return Ok(None);
        };
        decode_work(lane, words).map(Some).ok_or(BadHandover { gpu: self.gpu, words })
    }

    /// Whether nothing is left in any lane.
    pub fn is_empty(&self) -> bool {
        self.work.iter().all(|ring| ring.peek().is_none())
    }

    /// Goes past the next item of a lane.
    pub fn take(&mut self, lane: Lane) {
        self.work[lane as usize].advance();
    }

    /// Hands an event back, in the ring of a class.
    ///
    /// # Errors
    /// [`Full`]: keep it and try again.
    pub fn give(&self, class: Class, event: &NicEvent) -> Result<(), Full> {
        self.events[class as usize].push(&encode_event(event))
    }
}
