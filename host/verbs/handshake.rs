//! How the two ends of a path come to know each other's queue pairs. Pure: hellos and time come in, decisions go out.
//!
//! Both ends do the same. An end that wants the path, or hears of a peer that does, makes queue pairs and says
//! *hello* with their numbers. An end that hears a hello connects its own to them and says whose it is connected to. It may
//! send once the peer has said that it is connected. Hellos are datagrams: they may get lost or come twice, so whoever
//! waits says hello again, and asks; an end that is not asked does not answer.
//!
//! A path that failed is made anew under the next *generation*: the peer of an end that has gone on to it takes its own
//! queue pairs down, so that nothing of the generation before can still land, before it answers.

use crate::hw::Nanos;

/// How often an end that waits says hello.
pub const HELLO_EVERY_NS: Nanos = 20_000_000;

/// Where an end is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Nobody has wanted the path.
    Idle,
    /// There are queue pairs; the peer's are not known.
    Offering,
    /// They are connected to the peer's; whether it is to ours is not known.
    Connected,
    /// Both are; bytes may go.
    Agreed,
    /// Taken down; nothing goes until it is opened again.
    Fenced,
}

/// What the path has to do after a hello.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reaction {
    /// Nothing.
    Ignore,
    /// Connect the queue pairs (made first in phase `Idle`) to the peer's, call [`Handshake::connected`], and answer.
    Connect,
    /// Say hello: the peer lacks something.
    Answer,
    /// Make queue pairs, call [`Handshake::offer`] and say hello: the peer does not know of the present generation.
    Offer,
    /// Both ends are connected: send what waits, and say hello if the peer asked.
    Go,
    /// The peer has gone on to another generation: take the path down here too, then call [`Handshake::follow`].
    Fence,
}

/// One end's view of the agreement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Handshake {
    phase: Phase,
    generation: u32,
    said_at: Option<Nanos>,
    since: Nanos,
}

/// The parts of a hello that decide.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Heard {
    /// Of the path.
    pub generation: u32,
    /// The peer says that it is connected to our queue pairs.
    pub knows_us: bool,
    /// The peer does not know yet whether we are connected to its own.
    pub asks: bool,
}

impl Default for Handshake {
    fn default() -> Self {
        Self { phase: Phase::Idle, generation: 1, said_at: None, since: 0 }
    }
}

impl Handshake {
    /// Whether a hello of this end wants an answer.
    pub fn asks(&self) -> bool {
        self.phase != Phase::Agreed
    }

    /// Where this end is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Of the path; from 1.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Queue pairs have been made because this end wants the path.
    pub fn offer(&mut self, now: Nanos) {
        if self.phase == Phase::Idle {
            (self.phase, self.since, self.said_at) = (Phase::Offering, now, None);
        }
    }

    /// A hello came.
    pub fn on_hello(&mut self, heard: Heard) -> Reaction {
        if heard.generation < self.generation {
            return match self.phase {
                Phase::Fenced => Reaction::Ignore,
                Phase::Idle => Reaction::Offer,
                _ => Reaction::Answer,
            };
        }
        if heard.generation > self.generation {
            return match self.phase {
                Phase::Idle | Phase::Offering => {
                    self.generation = heard.generation;
                    Reaction::Connect
                }
                Phase::Connected | Phase::Agreed | Phase::Fenced => Reaction::Fence,
            };
        }
        match (self.phase, heard.knows_us) {
            (Phase::Idle | Phase::Offering, _) => Reaction::Connect,
            (Phase::Connected, true) => {
                self.phase = Phase::Agreed;
                Reaction::Go
            }
            (Phase::Connected | Phase::Agreed, false) => Reaction::Answer,
            (Phase::Agreed, true) if heard.asks => Reaction::Answer,
            (Phase::Agreed, true) | (Phase::Fenced, _) => Reaction::Ignore,
        }
    }

    /// The queue pairs are connected to the peer's. True if the peer is known to be connected to ours.
    pub fn connected(&mut self, heard: Heard, now: Nanos) -> bool {
        if self.phase == Phase::Idle {
            self.since = now;
        }
        self.phase = if heard.knows_us { Phase::Agreed } else { Phase::Connected };
        heard.knows_us
    }

    /// Whether it is time to say hello again, for an end with something to send; others only answer.
    pub fn is_due(&self, now: Nanos) -> bool {
        let waits = matches!(self.phase, Phase::Offering | Phase::Connected);
        waits && self.said_at.is_none_or(|at| now.saturating_sub(at) >= HELLO_EVERY_NS)
    }

    /// It was said.
    pub fn said(&mut self, now: Nanos) {
        self.said_at = Some(now);
    }

    /// Whether the peer has not agreed for `patience_ns`.
    pub fn is_overdue(&self, now: Nanos, patience_ns: Nanos) -> bool {
        let waits = matches!(self.phase, Phase::Offering | Phase::Connected);
        waits && now.saturating_sub(self.since) > patience_ns
    }

    /// What waited has been given up; whoever comes next gets the whole time again.
    pub fn restart_clock(&mut self, now: Nanos) {
        self.since = now;
    }

    /// The path has been taken down.
    pub fn fence(&mut self) {
        self.phase = Phase::Fenced;
    }

    /// Nothing of the old generation is under way here any more: the next one begins. The queue pairs are gone.
    pub fn reopen(&mut self) {
        if self.phase == Phase::Fenced {
            *self = Self { generation: self.generation + 1, ..Self::default() };
        }
    }

    /// As [`reopen`](Self::reopen), to the generation that the peer has gone on to.
    pub fn follow(&mut self, generation: u32) {
        if self.phase == Phase::Fenced && generation > self.generation {
            *self = Self { generation, ..Self::default() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// One end with its queue pairs reduced to a number.
    #[derive(Default)]
    struct End {
        handshake: Handshake,
        own: u32,
        /// The peer's queue pair that ours is connected to.
        theirs: u32,
        made: u32,
        wants: bool,
    }

    #[derive(Clone, Copy, Debug)]
    struct Said {
        generation: u32,
        own: u32,
        connected_to: u32,
        asks: bool,
    }

    impl End {
        fn say(&self) -> Said {
            Said {
                generation: self.handshake.generation(),
                own: self.own,
                connected_to: self.theirs,
                asks: self.handshake.asks(),
            }
        }

        fn make(&mut self) {
            if self.own == 0 {
                self.made += 1;
                self.own = self.made;
            }
        }

        fn fence(&mut self) {
            self.handshake.fence();
            (self.own, self.theirs) = (0, 0);
        }

        fn on_time(&mut self, now: Nanos) -> Option<Said> {
            if self.wants && self.handshake.phase() == Phase::Idle {
                self.make();
                self.handshake.offer(now);
            }
            let due = self.wants && self.handshake.is_due(now);
            due.then(|| {
                self.handshake.said(now);
                self.say()
            })
        }

        fn hear(&mut self, said: Said, now: Nanos) -> Option<Said> {
            let knows_us = self.own != 0 && said.connected_to == self.own;
            let heard = Heard { generation: said.generation, knows_us, asks: said.asks };
            match self.handshake.on_hello(heard) {
                Reaction::Ignore => None,
                Reaction::Go => said.asks.then(|| self.say()),
                Reaction::Answer => Some(self.say()),
                Reaction::Offer => {
                    self.make();
                    self.handshake.offer(now);
                    Some(self.say())
                }
                Reaction::Connect => {
                    self.make();
                    self.theirs = said.own;
                    self.handshake.connected(heard, now);
                    Some(self.say())
                }
                Reaction::Fence => {
                    self.fence();
                    self.handshake.follow(said.generation);
                    None
                }
            }
        }
    }

    proptest! {
        /// With datagrams lost and repeated at will, and ends that give up and begin anew, both agree in the end, on each
        /// other's present queue pairs.
        #[test]
        fn both_ends_agree(script in prop::collection::vec((0usize..2, 0u8..4), 0..60), both: bool) {
            let mut ends = [End { wants: true, ..Default::default() }, End { wants: both, ..Default::default() }];
            let mut on_the_way: [Vec<Said>; 2] = Default::default();
            let mut now = 1;
            for (e, action) in script {
                now += HELLO_EVERY_NS / 2;
                let said = match action {
                    0 => ends[e].on_time(now),
                    1 => { on_the_way[e].pop(); None } // Lost.
                    2 => { let said = on_the_way[e].first().copied(); said.and_then(|s| ends[e].hear(s, now)) } // Twice.
                    _ => {
                        if matches!(ends[e].handshake.phase(), Phase::Agreed | Phase::Connected) {
                            ends[e].fence();
                            ends[e].handshake.reopen();
                        }
                        None
                    }
                };
                on_the_way[1 - e].extend(said);
            }
            // An end that began anew says nothing by itself: the owners' words about the path take the other end down.
            for e in 0..2 {
                let other = ends[1 - e].handshake.generation();
                if ends[e].handshake.generation() < other {
                    ends[e].fence();
                    ends[e].handshake.follow(other);
                }
            }
            for _ in 0..40 {
                now += HELLO_EVERY_NS;
                for e in 0..2 {
                    let said = ends[e].on_time(now);
                    on_the_way[1 - e].extend(said);
                    for said in std::mem::take(&mut on_the_way[e]) {
                        let answer = ends[e].hear(said, now);
                        on_the_way[1 - e].extend(answer);
                    }
                }
            }
            let [a, b] = &ends;
            prop_assert_eq!((a.handshake.phase(), a.handshake.generation()), (Phase::Agreed, b.handshake.generation()));
            prop_assert_eq!((a.theirs, b.theirs), (b.own, a.own));
            prop_assert!(on_the_way.iter().all(Vec::is_empty), "nobody answers for ever");
        }
    }

    #[test]
    fn a_silent_peer_is_overdue_and_may_come_later() {
        let mut h = Handshake::default();
        h.offer(10);
        assert!(h.is_due(10) && !h.is_overdue(10 + 100, 100));
        h.said(10);
        assert!(!h.is_due(11) && h.is_due(10 + HELLO_EVERY_NS) && h.is_overdue(10 + 101, 100));
        h.restart_clock(200);
        assert!(!h.is_overdue(300, 100));
        let heard = Heard { generation: 1, knows_us: true, asks: true };
        assert_eq!(h.on_hello(heard), Reaction::Connect);
        assert!(h.connected(heard, 300) && h.phase() == Phase::Agreed);
    }

    #[test]
    fn a_fenced_path_is_not_talked_back_to_life() {
        let mut h = Handshake::default();
        h.offer(1);
        h.connected(Heard { generation: 1, knows_us: true, asks: true }, 2);
        h.fence();
        assert_eq!(h.on_hello(Heard { generation: 1, knows_us: false, asks: true }), Reaction::Ignore);
        assert_eq!(h.on_hello(Heard { generation: 2, knows_us: false, asks: true }), Reaction::Fence);
        h.follow(2);
        assert_eq!((h.phase(), h.generation()), (Phase::Idle, 2));
        h.reopen();
        assert_eq!(h.generation(), 2, "only what was fenced is opened again");
    }
}
