//! Which NICs a message takes when nothing prescribes them: FuseLink's rule (OSDI'25, §4; see docs/design.md).
//!
//! Direct if it is idle; else an idle NIC of another GPU, within the bound on what may be borrowed; else direct.
//! The owner of a NIC always wins: its own traffic makes the NIC busy for everybody else.
//!
//! Both ends follow it, and the two choices of a message hang together: what leaves by a borrowed NIC comes in by the
//! NIC of the same index (its rail) where that may be used. Else two messages that leave by different NICs would
//! often come in by one, and the other would idle.

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
    /// Which parts of the rule are in force.
    pub policy: Policy,
}

/// The parts of the rule. All are in force but in experiments that ask what each is worth (FuseLink, OSDI'25, fig. on
/// ablation).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Policy {
    /// Other NICs than the direct one may be used.
    pub relays: bool,
    /// Only while their owners leave them idle.
    pub yields: bool,
    /// Borrowers stay within [`RouteLimits::borrow_bytes`], and relayed messages leave kernels free for direct ones.
    pub bounded: bool,
    /// The least loaded one is taken, and rails are kept; else the first.
    pub by_load: bool,
}

impl Policy {
    /// Nothing but the direct NIC.
    pub const STATIC: Self = Self { relays: false, yields: false, bounded: false, by_load: false };
    /// Others too, whatever their owners do.
    pub const RELAY: Self = Self { relays: true, ..Self::STATIC };
    /// Only idle ones.
    pub const YIELDING: Self = Self { yields: true, ..Self::RELAY };
    /// Only so much at a time.
    pub const BOUNDED: Self = Self { bounded: true, ..Self::YIELDING };
    /// The whole rule.
    pub const WHOLE: Self = Self { by_load: true, ..Self::BOUNDED };
}

impl Default for Policy {
    fn default() -> Self {
        Self::WHOLE
    }
}

/// What is asked for one end of a message.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// The rank's own NIC.
    pub direct: NicIdx,
    /// The NIC at the other end, if it is known. That of the same index here is taken before others that may be used,
    /// where the message is relayed there even before a direct one that is idle.
    pub rail: Option<Rail>,
    /// Payload.
    pub bytes: u64,
    /// Bounds.
    pub limits: RouteLimits,
}

/// The NIC at the other end of a message.
#[derive(Clone, Copy, Debug)]
pub struct Rail {
    /// Its index.
    pub nic: NicIdx,
    /// It is not the direct one there.
    pub relayed: bool,
}

/// Chooses among the NICs of one server. `None`: later.
pub fn choose(ask: Ask, candidates: impl Iterator<Item = Candidate>) -> Option<NicIdx> {
    let policy = ask.limits.policy;
    let rail = ask.rail.filter(|_| policy.by_load && policy.relays);
    let (mut idle, mut on_rail, mut full_rail, mut direct) = (None, None, None, None);
    let mut best: Option<(u64, Candidate)> = None;
    for c in candidates.filter(|c| c.state != NicState::Down) {
        let is_direct = c.nic == ask.direct;
        let usable = is_direct || may_borrow(ask, &c);
        if rail.is_some_and(|r| r.nic == c.nic) {
            if usable && c.available {
                on_rail = Some(c.nic);
            } else if is_direct || c.state == NicState::Idle {
                full_rail = Some(c.borrowed_bytes);
            }
        }
        // Without a bound nobody looks whether a NIC has room: one waits for it.
        if !c.available && (policy.bounded || is_direct) {
            continue;
        }
        if is_direct {
            direct = Some(c);
            if c.own_bytes.saturating_add(ask.bytes) <= ask.limits.direct_bytes {
                idle = Some(c.nic);
            }
        } else if usable {
            let load = if policy.by_load { c.borrowed_bytes } else { c.nic.0.into() };
            if best.is_none_or(|(least, b)| (load, c.nic) < (least, b.nic)) {
                best = Some((load, c));
            }
        }
    }
    let relayed = rail.is_some_and(|r| r.relayed);
    let first = if relayed { on_rail.or(idle) } else { idle.or(on_rail) };
    // Hysteresis: a rail that is only full is left for a NIC with at most half as much on the way; else all rails would
    // get mixed up as soon as all are full.
    let is_better = |bytes: u64| full_rail.is_none_or(|full| bytes.saturating_mul(2) <= full);
    match (first, best) {
        (Some(nic), _) => Some(nic),
        (None, Some((_, c))) => (c.available && is_better(c.borrowed_bytes)).then_some(c.nic),
        // Messages that the source's own NIC sends need the direct NIC more than relayed ones do.
        (None, None) => {
            direct.filter(|c| full_rail.is_none() || !relayed && is_better(c.own_bytes)).map(|c| c.nic)
        }
    }
}

/// Whether a NIC of another GPU may take the message.
fn may_borrow(ask: Ask, c: &Candidate) -> bool {
    let RouteLimits { borrow_bytes, policy, .. } = ask.limits;
    let left_alone = c.state == NicState::Idle || !policy.yields;
    let within = c.borrowed_bytes.saturating_add(ask.bytes) <= borrow_bytes || !policy.bounded;
    policy.relays && left_alone && within
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: RouteLimits = RouteLimits { direct_bytes: 100, borrow_bytes: 200, policy: Policy::WHOLE };
    const ASK: Ask = Ask { direct: NicIdx(0), rail: None, bytes: 50, limits: LIMITS };

    fn nic(n: u32, state: NicState, own_bytes: u64, borrowed_bytes: u64) -> Candidate {
        Candidate { nic: NicIdx(n), available: true, state, own_bytes, borrowed_bytes }
    }

    fn pick(candidates: &[Candidate]) -> Option<u32> {
        choose(ASK, candidates.iter().copied()).map(|n| n.0)
    }

    fn pick_on_rail(rail: u32, relayed: bool, candidates: &[Candidate]) -> Option<u32> {
        let rail = Some(Rail { nic: NicIdx(rail), relayed });
        choose(Ask { rail, ..ASK }, candidates.iter().copied()).map(|n| n.0)
    }

    #[test]
    fn the_rail_before_others_that_may_be_used() {
        let nics =
            [nic(0, NicState::Busy, 0, 0), nic(1, NicState::Idle, 0, 0), nic(2, NicState::Idle, 0, 100)];
        assert_eq!(pick_on_rail(2, true, &nics), Some(2));
        assert_eq!(pick_on_rail(2, false, &nics), Some(0), "the direct NIC is idle");
        assert_eq!(pick_on_rail(0, true, &nics), Some(0));
        assert_eq!(pick_on_rail(7, true, &nics), Some(0), "no such NIC here");
        let busy =
            [nic(0, NicState::Busy, 100, 0), nic(1, NicState::Idle, 0, 0), nic(2, NicState::Busy, 0, 0)];
        assert_eq!(pick_on_rail(2, true, &busy), Some(1));
        assert_eq!(pick_on_rail(0, false, &busy), Some(0), "the rail is the direct NIC");
    }

    #[test]
    fn a_full_rail_is_left_only_for_a_nic_that_is_half_empty() {
        let full = Candidate { available: false, ..nic(2, NicState::Idle, 0, 150) };
        let direct = nic(0, NicState::Busy, 100, 100);
        assert_eq!(pick_on_rail(2, false, &[direct, nic(1, NicState::Idle, 0, 75), full]), Some(1));
        assert_eq!(pick_on_rail(2, false, &[direct, nic(1, NicState::Idle, 0, 76), full]), None);
        assert_eq!(pick_on_rail(2, false, &[direct, full]), None);
        let taken = Candidate { state: NicState::Busy, ..full };
        assert_eq!(pick_on_rail(2, false, &[direct, taken]), Some(0), "its owner may keep it for long");
    }

    #[test]
    fn each_part_of_the_rule_can_be_left_out() {
        let nics = [
            nic(0, NicState::Busy, 100, 0),
            nic(1, NicState::Busy, 0, 0),
            nic(2, NicState::Idle, 0, 200),
            nic(3, NicState::Idle, 0, 150),
            nic(4, NicState::Idle, 0, 0),
        ];
        let with = |policy| {
            choose(Ask { limits: RouteLimits { policy, ..LIMITS }, ..ASK }, nics.iter().copied()).map(|n| n.0)
        };
        assert_eq!(with(Policy::STATIC), Some(0));
        assert_eq!(with(Policy::RELAY), Some(1));
        assert_eq!(with(Policy::YIELDING), Some(2));
        assert_eq!(with(Policy::BOUNDED), Some(3));
        assert_eq!(with(Policy::WHOLE), Some(4));
    }

    fn any_nic() -> impl Strategy<Value = Candidate> {
        (any::<bool>(), 0u64..5, 0u64..300, 0u64..300).prop_map(
            |(available, state, own_bytes, borrowed_bytes)| Candidate {
                available,
                ..nic(0, NicState::from_number(state), own_bytes, borrowed_bytes)
            },
        )
    }

    proptest! {
        /// Whatever the NICs do: only idle ones are borrowed, within the bound; none that is down or has no room is
        /// used at all; and where the direct one can be used, there is always an answer.
        #[test]
        fn borrowing_is_bounded_and_leaves_owners_alone(
            mut nics in proptest::collection::vec(any_nic(), 1..9),
            direct in 0u32..9,
            rail in proptest::option::of((0u32..9, any::<bool>())),
            bytes in 1u64..120,
        ) {
            for (k, c) in nics.iter_mut().enumerate() {
                c.nic = NicIdx(k as u32);
            }
            let ask = Ask { direct: NicIdx(direct), rail: rail.map(|(n, relayed)| Rail { nic: NicIdx(n), relayed }), bytes, limits: LIMITS };
            let usable = |c: &&Candidate| c.available && c.state != NicState::Down;
            match choose(ask, nics.iter().copied()) {
                None => {
                    let rail_is_full = rail.is_some_and(|(n, _)| {
                        nics.get(n as usize).is_some_and(|c| !usable(&c) || c.borrowed_bytes + bytes > LIMITS.borrow_bytes)
                    });
                    prop_assert!(rail_is_full || nics.iter().filter(usable).all(|c| c.nic.0 != direct));
                }
                Some(nic) => {
                    let c = nics[nic.idx()];
                    prop_assert!(usable(&&c), "{c:?}");
                    if nic.0 != direct {
                        prop_assert_eq!(c.state, NicState::Idle);
                        prop_assert!(c.borrowed_bytes + bytes <= LIMITS.borrow_bytes);
                    }
                }
            }
        }
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
