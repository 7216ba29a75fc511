//! The owner's side: a GPU's pool of relay memory, below its cap.

use std::collections::BTreeMap;

use crate::engine::slots::Lot;
use crate::hw::Nanos;

/// How long nothing is lent after memory was taken back or could not be had. It doubles each time, up to the longest; a
/// pool that was left alone for the longest begins anew.
const HOLD_BACK_NS: [Nanos; 2] = [20_000_000, 2_000_000_000];

/// Why a lot is not lent now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The pool would pass its cap.
    Cap = 0,
    /// Memory was taken back or could not be had a moment ago.
    HeldBack = 1,
    /// The GPU has none, or a NIC did not take it.
    Memory = 2,
}

impl Refusal {
    /// All of them, by number.
    pub const ALL: [Self; 3] = [Self::Cap, Self::HeldBack, Self::Memory];
}

/// What to do about an ask.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// Make the lot, then say [`Lender::on_made`] or [`Lender::on_failed`].
    Make,
    /// Tell the borrower no.
    Refuse(Refusal),
}

/// What to do with a lot that was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Made {
    /// Tell the borrower.
    Lend,
    /// It was taken back meanwhile: tell the borrower no, free it, then say [`Lender::on_freed`].
    Free(Refusal),
}

/// What has happened to a GPU's relay memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct RelayCounters {
    /// Lots that other ranks asked for.
    pub asked: u64,
    /// Lots that were lent.
    pub lent: u64,
    /// Refused, by [`Refusal`].
    pub refused: [u64; Refusal::ALL.len()],
    /// Lots whose return was asked for.
    pub recalled: u64,
    /// Lots that came back, asked for or not.
    pub returned: u64,
    /// Bytes of relay memory now, those that are there from the start among them.
    pub bytes: u64,
    /// The most that there were.
    pub most_bytes: u64,
}

impl RelayCounters {
    /// Of two GPUs together.
    pub fn plus(self, other: Self) -> Self {
        Self {
            asked: self.asked + other.asked,
            lent: self.lent + other.lent,
            refused: std::array::from_fn(|i| self.refused[i] + other.refused[i]),
            recalled: self.recalled + other.recalled,
            returned: self.returned + other.returned,
            bytes: self.bytes + other.bytes,
            most_bytes: self.most_bytes + other.most_bytes,
        }
    }

    /// What has happened since; bytes as they are now.
    pub fn since(self, before: Self) -> Self {
        Self {
            asked: self.asked - before.asked,
            lent: self.lent - before.lent,
            refused: std::array::from_fn(|i| self.refused[i] - before.refused[i]),
            recalled: self.recalled - before.recalled,
            returned: self.returned - before.returned,
            ..self
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Making { recalled: bool },
    Lent,
    Recalled,
    Freeing,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    state: State,
    ask: u32,
    bytes: u64,
}

/// A GPU's pool.
#[derive(Debug)]
pub struct Lender {
    cap_bytes: u64,
    /// Lots that are not free.
    lots: BTreeMap<Lot, Entry>,
    held_back_until: Nanos,
    hold_back_ns: Nanos,
    counters: RelayCounters,
}

impl Lender {
    /// A pool of at most `cap_bytes`, of which `permanent_bytes` are never taken back.
    pub fn new(cap_bytes: u64, permanent_bytes: u64) -> Self {
        let counters =
            RelayCounters { bytes: permanent_bytes, most_bytes: permanent_bytes, ..Default::default() };
        Self { cap_bytes, lots: BTreeMap::new(), held_back_until: 0, hold_back_ns: 0, counters }
    }

    /// A rank asks for a lot of so much physical memory. `None`: it has that lot, or is about to get it, and must not ask.
    pub fn on_ask(&mut self, lot: Lot, ask: u32, bytes: u64, now: Nanos) -> Option<Answer> {
        let entry = self.lots.get(&lot).map(|entry| entry.state);
        if entry.is_some_and(|state| state != State::Freeing) {
            return None;
        }
        self.counters.asked += 1;
        let refusal = if now < self.held_back_until || entry.is_some() {
            Some(Refusal::HeldBack)
        } else if self.counters.bytes.saturating_add(bytes) > self.cap_bytes {
            Some(Refusal::Cap)
        } else {
            None
        };
        if let Some(refusal) = refusal {
            return Some(self.refuse(refusal));
        }
        self.lots.insert(lot, Entry { state: State::Making { recalled: false }, ask, bytes });
        self.counters.bytes += bytes;
        self.counters.most_bytes = self.counters.most_bytes.max(self.counters.bytes);
        Some(Answer::Make)
    }

    fn refuse(&mut self, refusal: Refusal) -> Answer {
        self.counters.refused[refusal as usize] += 1;
        Answer::Refuse(refusal)
    }

    /// A lot is there, and a NIC can reach it.
    pub fn on_made(&mut self, lot: Lot) -> Made {
        let Some(entry) = self.lots.get_mut(&lot) else { return Made::Free(Refusal::HeldBack) };
        if entry.state != (State::Making { recalled: false }) {
            entry.state = State::Freeing;
            self.refuse(Refusal::HeldBack);
            return Made::Free(Refusal::HeldBack);
        }
        entry.state = State::Lent;
        self.counters.lent += 1;
        Made::Lend
    }

    /// A lot could not be made: the borrower is to be told [`Refusal::Memory`], and [`on_freed`](Self::on_freed) follows
    /// when what there was of it is gone.
    pub fn on_failed(&mut self, lot: Lot, now: Nanos) {
        if let Some(entry) = self.lots.get_mut(&lot) {
            entry.state = State::Freeing;
            self.refuse(Refusal::Memory);
            self.hold_back(now);
        }
    }

    /// Takes back lots of at least so many bytes, those that were recalled before among them, or all that there are; for a
    /// while none is lent. Returns whom to tell: lots, and the numbers of their asks.
    pub fn recall(&mut self, bytes: u64, now: Nanos) -> Vec<(Lot, u32)> {
        self.hold_back(now);
        let mut coming_bytes = self.coming_bytes();
        let mut tell = Vec::new();
        for (&lot, entry) in &mut self.lots {
            if coming_bytes >= bytes {
                break;
            }
            match entry.state {
                State::Lent => {
                    entry.state = State::Recalled;
                    tell.push((lot, entry.ask));
                }
                State::Making { recalled: false } => entry.state = State::Making { recalled: true },
                _ => continue,
            }
            coming_bytes += entry.bytes;
        }
        self.counters.recalled += tell.len() as u64;
        tell
    }

    /// The borrower is done with a lot, asked or not: free it, then say [`on_freed`](Self::on_freed). False: it has no such
    /// lot, and must not say so.
    pub fn on_returned(&mut self, lot: Lot, ask: u32) -> bool {
        let Some(entry) = self.lots.get_mut(&lot).filter(|e| e.ask == ask) else { return false };
        if !matches!(entry.state, State::Lent | State::Recalled) {
            return false;
        }
        entry.state = State::Freeing;
        self.counters.returned += 1;
        true
    }

    /// A lot's memory is gone.
    pub fn on_freed(&mut self, lot: Lot) {
        if self.lots.get(&lot).is_some_and(|e| e.state == State::Freeing)
            && let Some(entry) = self.lots.remove(&lot)
        {
            self.counters.bytes -= entry.bytes;
        }
    }

    /// Bytes that were taken back and are not there yet.
    pub fn coming_bytes(&self) -> u64 {
        let coming = |e: &&Entry| !matches!(e.state, State::Lent | State::Making { recalled: false });
        self.lots.values().filter(coming).map(|e| e.bytes).sum()
    }

    /// Lots that were taken back and that their borrowers still have.
    pub fn still_lent(&self) -> impl Iterator<Item = Lot> + '_ {
        self.lots.iter().filter(|(_, e)| e.state == State::Recalled).map(|(&lot, _)| lot)
    }

    /// What has happened so far.
    pub fn counters(&self) -> RelayCounters {
        self.counters
    }

    fn hold_back(&mut self, now: Nanos) {
        let [shortest, longest] = HOLD_BACK_NS;
        let forgotten = now > self.held_back_until.saturating_add(longest);
        let doubled = if forgotten { shortest } else { 2 * self.hold_back_ns };
        self.hold_back_ns = doubled.clamp(shortest, longest);
        self.held_back_until = now.saturating_add(self.hold_back_ns);
    }
}
