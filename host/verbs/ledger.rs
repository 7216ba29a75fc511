//! Work on one queue pair, of which only some is signalled: a completion of an item is one of all items before it. So
//! a batch of messages costs one completion, and control words none at all as long as they succeed.
//!
//! It rests on what the specification promises of a reliable connection: work ends in order, and work that fails is reported
//! whether or not it was to be signalled. After the first failure everything behind it fails.

use std::collections::VecDeque;

use crate::hw::WorkError;

/// An item of work, as far as its end is concerned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    /// A message: its end is told.
    Message {
        /// From the work.
        cookie: u64,
        /// Payload.
        bytes: u32,
    },
    /// The payload of the message behind it: fails with its own reason, ends with it.
    Payload,
    /// A control word: told only when it fails.
    Control {
        /// From the work.
        cookie: u64,
    },
    /// Tells that everything before it has ended.
    Marker,
}

/// The end of an item that must be told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ended {
    /// From the work.
    pub cookie: u64,
    /// Payload; 0 for control words.
    pub bytes: u32,
    /// How it ended.
    pub result: Result<(), WorkError>,
}

/// The items of one queue pair that have not ended.
#[derive(Debug)]
pub struct Ledger {
    entries: VecDeque<Entry>,
    /// Number of the first entry.
    first: u32,
    depth: usize,
    since_signal: usize,
    /// Why the payload of the next message failed.
    payload_error: Option<WorkError>,
}

/// Places kept free: a marker must find room when the queue is full.
const RESERVED: usize = 1;

impl Ledger {
    /// For a send queue that holds `depth` items.
    pub fn new(depth: usize) -> Self {
        Self { entries: VecDeque::new(), first: 0, depth, since_signal: 0, payload_error: None }
    }

    /// Whether `items` more find room.
    pub fn has_room(&self, items: usize) -> bool {
        self.entries.len() + items + RESERVED <= self.depth
    }

    /// Whether nothing is under way.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adds an item and returns its number.
    pub fn push(&mut self, entry: Entry) -> u32 {
        self.entries.push_back(entry);
        self.since_signal += 1;
        self.first.wrapping_add(self.entries.len() as u32 - 1)
    }

    /// Whether the item pushed last must be signalled: the last message of a batch, and one in a while, so that places
    /// come free before the queue is full.
    pub fn must_signal(&mut self, ends_batch: bool) -> bool {
        let last = self.entries.back();
        let told = ends_batch && matches!(last, Some(Entry::Message { .. }));
        let signal = told || matches!(last, Some(Entry::Marker)) || self.since_signal * 4 >= self.depth;
        if signal {
            self.since_signal = 0;
        }
        signal
    }

    /// Item `number` has ended, and with it all before it. Appends what must be told. A number that is not under way is
    /// none of this ledger's.
    pub fn on_completion(
        &mut self,
        number: u32,
        result: Result<(), WorkError>,
        ended: &mut Vec<Ended>,
    ) -> bool {
        let behind = number.wrapping_sub(self.first) as usize;
        if behind >= self.entries.len() {
            return false;
        }
        for i in 0..=behind {
            let Some(entry) = self.entries.pop_front() else { break };
            let result = if i == behind { result } else { Ok(()) };
            self.end(entry, result, ended);
        }
        self.first = number.wrapping_add(1);
        true
    }

    fn end(&mut self, entry: Entry, result: Result<(), WorkError>, ended: &mut Vec<Ended>) {
        match entry {
            Entry::Payload => self.payload_error = self.payload_error.or(result.err()),
            Entry::Message { cookie, bytes } => {
                let result = self.payload_error.take().map_or(result, Err);
                ended.push(Ended { cookie, bytes, result });
            }
            Entry::Control { cookie } if result.is_err() => ended.push(Ended { cookie, bytes: 0, result }),
            Entry::Control { .. } | Entry::Marker => {}
        }
    }

    /// The last `items` were refused by the device: they have failed. Those before are under way.
    pub fn take_back(&mut self, items: usize, error: WorkError, ended: &mut Vec<Ended>) {
        let refused = self.entries.split_off(self.entries.len().saturating_sub(items));
        refused.into_iter().for_each(|entry| self.end(entry, Err(error), ended));
    }

    /// The device will report no more: everything that is under way has failed.
    pub fn abandon(&mut self, error: WorkError, ended: &mut Vec<Ended>) {
        while let Some(entry) = self.entries.pop_front() {
            self.first = self.first.wrapping_add(1);
            self.end(entry, Err(error), ended);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message(cookie: u64) -> Entry {
        Entry::Message { cookie, bytes: 8 }
    }

    fn push(ledger: &mut Ledger, entry: Entry) {
        ledger.push(entry);
    }

    fn told(ended: &[Ended]) -> Vec<(u64, Result<(), WorkError>)> {
        ended.iter().map(|e| (e.cookie, e.result)).collect()
    }

    #[test]
    fn one_completion_ends_a_batch() {
        let (mut ledger, mut ended) = (Ledger::new(16), Vec::new());
        let numbers: Vec<u32> = (0..3).map(|c| ledger.push(message(c))).collect();
        assert!(ledger.must_signal(true));
        assert!(ledger.on_completion(numbers[2], Ok(()), &mut ended));
        assert_eq!(told(&ended), [(0, Ok(())), (1, Ok(())), (2, Ok(()))]);
        assert!(ledger.is_empty() && !ledger.on_completion(numbers[2], Ok(()), &mut ended));
    }

    #[test]
    fn what_came_before_a_failure_succeeded() {
        let (mut ledger, mut ended) = (Ledger::new(16), Vec::new());
        (0..3).for_each(|c| push(&mut ledger, message(c)));
        ledger.on_completion(1, Err(WorkError::RemoteAccess), &mut ended);
        ledger.on_completion(2, Err(WorkError::Flushed), &mut ended);
        let failed = [(0, Ok(())), (1, Err(WorkError::RemoteAccess)), (2, Err(WorkError::Flushed))];
        assert_eq!(told(&ended), failed);
    }

    #[test]
    fn control_words_are_told_only_when_they_fail() {
        let (mut ledger, mut ended) = (Ledger::new(16), Vec::new());
        (0..4).for_each(|cookie| push(&mut ledger, Entry::Control { cookie }));
        ledger.on_completion(1, Ok(()), &mut ended);
        assert!(ended.is_empty());
        ledger.on_completion(2, Err(WorkError::RetryExceeded), &mut ended);
        ledger.abandon(WorkError::Flushed, &mut ended);
        assert_eq!(told(&ended), [(2, Err(WorkError::RetryExceeded)), (3, Err(WorkError::Flushed))]);
    }

    #[test]
    fn a_message_fails_with_the_reason_of_its_payload() {
        let (mut ledger, mut ended) = (Ledger::new(16), Vec::new());
        for cookie in [1, 2] {
            ledger.push(Entry::Payload);
            ledger.push(message(cookie));
        }
        for (number, error) in
            [(0, WorkError::RemoteAccess), (1, WorkError::Flushed), (3, WorkError::Flushed)]
        {
            ledger.on_completion(number, Err(error), &mut ended);
        }
        assert_eq!(told(&ended), [(1, Err(WorkError::RemoteAccess)), (2, Err(WorkError::Flushed))]);
    }

    #[test]
    fn what_the_device_refused_has_failed_and_the_rest_goes_on() {
        let (mut ledger, mut ended) = (Ledger::new(16), Vec::new());
        (0..4).for_each(|c| push(&mut ledger, message(c)));
        ledger.take_back(2, WorkError::Flushed, &mut ended);
        let marker = ledger.push(Entry::Marker);
        ledger.on_completion(marker, Err(WorkError::Flushed), &mut ended);
        let [refused, fine] = [Err(WorkError::Flushed), Ok(())];
        assert_eq!(told(&ended), [(2, refused), (3, refused), (0, fine), (1, fine)]);
    }

    #[test]
    fn a_marker_finds_room_in_a_full_queue() {
        let mut ledger = Ledger::new(4);
        while ledger.has_room(1) {
            ledger.push(Entry::Control { cookie: 0 });
        }
        assert_eq!(ledger.entries.len(), 3);
        ledger.push(Entry::Marker);
        assert!(ledger.must_signal(true));
    }

    proptest! {
        /// A device that completes signalled items alone never leaves the queue full, and every message is told once.
        #[test]
        fn places_come_free(depth in 8usize..64, batches in prop::collection::vec((1usize..6, any::<bool>()), 1..100)) {
            let (mut ledger, mut ended) = (Ledger::new(depth), Vec::new());
            ledger.first = u32::MAX - 20;
            let (mut posted, mut signalled) = (0u64, VecDeque::new());
            for (items, control) in batches {
                for i in 0..items {
                    while !ledger.has_room(1) {
                        let number = signalled.pop_front();
                        prop_assert!(number.is_some(), "full, and nothing will be reported");
                        ledger.on_completion(number.unwrap(), Ok(()), &mut ended);
                    }
                    let entry = if control { Entry::Control { cookie: 0 } } else { message(posted) };
                    posted += u64::from(!control);
                    let number = ledger.push(entry);
                    if ledger.must_signal(i + 1 == items) {
                        signalled.push_back(number);
                    }
                }
            }
            for number in signalled {
                ledger.on_completion(number, Ok(()), &mut ended);
            }
            prop_assert!(ended.iter().map(|e| e.cookie).eq(0..posted));
        }
    }
}
