//! Work that a device holds, by cookie.

use crate::doorbell::Class;
use crate::hw::Nanos;
use crate::topo::NicId;

/// Work that is with the device.
pub(super) struct InFlight {
    /// Place in `borrowers`; `None`: the owner's own.
    pub(super) borrower: Option<usize>,
    pub(super) cookie: u64,
    pub(super) peer: NicId,
    pub(super) bytes: u64,
    pub(super) class: Class,
    pub(super) posted_at: Nanos,
}

/// Work with the device, by cookie. A cookie names a place and how often it was taken: what a device reports after it was
/// given up names nothing.
#[derive(Default)]
pub(super) struct Posted {
    places: Vec<(u32, Option<InFlight>)>,
    free: Vec<usize>,
}

impl Posted {
    pub(super) fn insert(&mut self, item: InFlight) -> u64 {
        let at = self.free.pop().unwrap_or_else(|| {
            self.places.push((0, None));
            self.places.len() - 1
        });
        let (taken, place) = &mut self.places[at];
        *taken = taken.wrapping_add(1) & 0xf_ffff;
        *place = Some(item);
        u64::from(*taken) << 32 | at as u64
    }

    pub(super) fn remove(&mut self, cookie: u64) -> Option<InFlight> {
        let at = cookie as u32 as usize;
        let (taken, place) = self.places.get_mut(at)?;
        if u64::from(*taken) != cookie >> 32 {
            return None;
        }
        let item = place.take()?;
        self.free.push(at);
        Some(item)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &InFlight)> {
        let cookie = |at: usize, taken: u32| u64::from(taken) << 32 | at as u64;
        self.places
            .iter()
            .enumerate()
            .filter_map(move |(at, (taken, item))| Some((cookie(at, *taken), item.as_ref()?)))
    }
}
