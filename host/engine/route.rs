//! Which NICs a message takes when nothing prescribes them: FuseLink's rule (OSDI'25, §4; see docs/design.md).
//!
//! Direct if it is idle; else an idle NIC of another GPU, within the bound on what may be borrowed; else direct.
//! The owner of a NIC always wins: its own traffic makes the NIC busy for everybody else.

use crate::topo::NicIdx;

/// How a NIC fares in one direction, as its server's ranks see it. Numbers as in `FlNicState`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum NicState {
    /// Nobody but borrowers uses it.
    Idle = 0,
    /// Its owner uses it, or may: unknown counts as busy.
    #[default]
    Busy = 1,
    /// A plan is about to use it.
    Leased = 2,
    /// Nothing flows.
    Down = 3,
}

impl NicState {
    /// From a number of a shared word; what is unknown counts as busy.
    pub fn from_number(n: u64) -> Self {
        match n {
            0 => Self::Idle,
            2 => Self::Leased,
            3 => Self::Down,
            _ => Self::Busy,
        }
    }
}

/// One candidate in one direction.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// The NIC.
    pub nic: NicIdx,
    /// Whether this rank can use it right now: a free slot, a standing credit.
    pub available: bool,
    /// Its state for others than its owner.
    pub state: NicState,
    /// This rank's own bytes on the way through it.
    pub own_bytes: u64,
    /// Bytes of all borrowers on the way through it.
    pub borrowed_bytes: u64,
}

/// Bounds of the rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RouteLimits {
    /// The direct NIC counts as idle while at most this much of the rank's own is on the way.
    pub direct_bytes: u64,
    /// Borrowers together may have at most this much on the way through a NIC.
    pub borrow_bytes: u64,
}

/// Chooses among the NICs of one server. `None`: later.
pub fn choose(
    direct: NicIdx,
    candidates: impl Iterator<Item = Candidate>,
    bytes: u64,
    limits: RouteLimits,
) -> Option<NicIdx> {
    let mut fallback = None;
    let mut best: Option<(u64, NicIdx)> = None;
    for c in candidates.filter(|c| c.available && c.state != NicState::Down) {
        if c.nic == direct {
            if c.own_bytes.saturating_add(bytes) <= limits.direct_bytes {
                return Some(direct);
            }
            fallback = Some(direct);
        } else if c.state == NicState::Idle && c.borrowed_bytes.saturating_add(bytes) <= limits.borrow_bytes {
            let load = (c.borrowed_bytes, c.nic);
            best = Some(best.map_or(load, |b| b.min(load)));
        }
    }
    best.map(|(_, nic)| nic).or(fallback)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: RouteLimits = RouteLimits { direct_bytes: 100, borrow_bytes: 200 };

    fn nic(n: u32, state: NicState, own_bytes: u64, borrowed_bytes: u64) -> Candidate {
        Candidate { nic: NicIdx(n), available: true, state, own_bytes, borrowed_bytes }
    }

    fn pick(candidates: &[Candidate]) -> Option<u32> {
        choose(NicIdx(0), candidates.iter().copied(), 50, LIMITS).map(|n| n.0)
    }

    #[test]
    fn direct_while_it_is_idle() {
        assert_eq!(pick(&[nic(0, NicState::Busy, 50, 0), nic(1, NicState::Idle, 0, 0)]), Some(0));
    }

    #[test]
    fn then_the_least_borrowed_idle_nic() {
        let others =
            [nic(0, NicState::Busy, 100, 0), nic(1, NicState::Idle, 0, 100), nic(2, NicState::Idle, 0, 50)];
        assert_eq!(pick(&others), Some(2));
    }

    #[test]
    fn never_a_busy_leased_or_down_nic_of_another() {
        for state in [NicState::Busy, NicState::Leased, NicState::Down] {
            assert_eq!(pick(&[nic(0, NicState::Busy, 100, 0), nic(1, state, 0, 0)]), Some(0));
        }
    }

    #[test]
    fn never_past_the_borrow_bound() {
        assert_eq!(pick(&[nic(0, NicState::Busy, 100, 0), nic(1, NicState::Idle, 0, 151)]), Some(0));
        assert_eq!(pick(&[nic(1, NicState::Idle, 0, 151)]), None);
    }

    #[test]
    fn a_direct_nic_that_is_down_is_not_used() {
        assert_eq!(pick(&[nic(0, NicState::Down, 0, 0), nic(1, NicState::Idle, 0, 0)]), Some(1));
    }
}
