//! The borrower's side: the lots that a rank has beside NICs that others own.

use std::collections::BTreeMap;

use crate::doorbell::Class;
use crate::engine::call::CallId;
use crate::topo::NicIdx;

/// Calls that pass before a lot is asked for again that was refused: one, then twice as many each time, up to these.
const LONGEST_BACK_OFF: u64 = 64;

/// A lot of this rank's.
type Place = (NicIdx, Class);

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum State {
    #[default]
    Absent,
    Asked,
    /// Lent, and not mapped yet.
    Offered,
    Lent,
    Recalled,
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    state: State,
    /// Number of the last ask.
    ask: u32,
    /// Calls to pass after the next refusal; 0: there was none lately.
    back_off: u64,
    /// The first call that may ask again.
    ask_from: u64,
}

/// What to do about a recall.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recall {
    /// Begin to give the lot back, and say [`Borrowings::on_returned`] when nothing uses or maps it.
    Begin,
    /// It was not mapped yet, and need not be: tell its owner that it is returned.
    NotUsed,
    /// It is not here any more, and the owner will hear so, or has.
    NotHere,
}

/// What a rank has borrowed.
#[derive(Debug, Default)]
pub struct Borrowings {
    lots: BTreeMap<Place, Entry>,
    call: u64,
}

impl Borrowings {
    /// A call would like these lots. Returns those to ask for, with the numbers of the asks.
    pub fn want(&mut self, wanted: &[Place], call: CallId) -> Vec<(Place, u32)> {
        self.call = call.0;
        let mut asks = Vec::new();
        for &place in wanted {
            let entry = self.lots.entry(place).or_default();
            if entry.state == State::Absent && self.call >= entry.ask_from {
                entry.state = State::Asked;
                entry.ask = entry.ask.wrapping_add(1);
                asks.push((place, entry.ask));
            }
        }
        asks
    }

    /// Whether none of these lots is waited for.
    pub fn is_settled(&self, wanted: &[Place]) -> bool {
        !wanted.iter().any(|place| matches!(self.state(place), State::Asked | State::Offered))
    }

    /// Whether a lot is there and may be used.
    pub fn is_lent(&self, place: Place) -> bool {
        self.state(&place) == State::Lent
    }

    fn state(&self, place: &Place) -> State {
        self.lots.get(place).map(|entry| entry.state).unwrap_or_default()
    }

    fn entry(&mut self, place: Place, ask: u32, state: State) -> Option<&mut Entry> {
        self.lots.get_mut(&place).filter(|e| e.ask == ask && e.state == state)
    }

    /// The owner lends a lot. True: map it when that is possible, if it is still [offered](Self::is_offered) then, and say
    /// [`on_mapped`](Self::on_mapped) or [`on_unusable`](Self::on_unusable). False: nobody has asked; it goes back.
    pub fn on_lent(&mut self, place: Place, ask: u32) -> bool {
        let Some(entry) = self.entry(place, ask, State::Asked) else { return false };
        entry.state = State::Offered;
        true
    }

    /// Whether a lot is lent and not mapped yet.
    pub fn is_offered(&mut self, place: Place, ask: u32) -> bool {
        self.entry(place, ask, State::Offered).is_some()
    }

    /// A lot is mapped and comes into use.
    pub fn on_mapped(&mut self, place: Place, ask: u32) {
        if let Some(entry) = self.entry(place, ask, State::Offered) {
            (entry.state, entry.back_off) = (State::Lent, 0);
        }
    }

    /// A lot was lent and cannot be mapped here: tell its owner that it is returned.
    pub fn on_unusable(&mut self, place: Place, ask: u32) {
        self.give_up(place, ask, State::Offered);
    }

    /// The owner does not lend a lot now. False: it was not asked.
    pub fn on_refused(&mut self, place: Place, ask: u32) -> bool {
        self.give_up(place, ask, State::Asked)
    }

    fn give_up(&mut self, place: Place, ask: u32, state: State) -> bool {
        let call = self.call;
        let Some(entry) = self.entry(place, ask, state) else { return false };
        entry.state = State::Absent;
        entry.back_off = (2 * entry.back_off).clamp(1, LONGEST_BACK_OFF);
        entry.ask_from = call + entry.back_off;
        true
    }

    /// The owner wants a lot back.
    pub fn on_recall(&mut self, place: Place, ask: u32) -> Recall {
        if self.give_up(place, ask, State::Offered) {
            return Recall::NotUsed;
        }
        match self.entry(place, ask, State::Lent) {
            Some(entry) => {
                entry.state = State::Recalled;
                Recall::Begin
            }
            None => Recall::NotHere,
        }
    }

    /// A lot that was recalled is neither used nor mapped any more. Returns the number to tell its owner.
    pub fn on_returned(&mut self, place: Place) -> Option<u32> {
        let entry = self.lots.get_mut(&place).filter(|e| e.state == State::Recalled)?;
        entry.state = State::Absent;
        Some(entry.ask)
    }

    /// An owner has gone: what it was asked for does not come.
    pub fn on_gone(&mut self, nic: NicIdx) {
        let asked = self.lots.iter_mut().filter(|((n, _), e)| *n == nic && e.state == State::Asked);
        for (_, entry) in asked {
            (entry.state, entry.ask_from) = (State::Absent, u64::MAX);
        }
    }
}
