//! Paths between NICs, as the owner of one end keeps them: up, being closed, closed, coming up again.
//!
//! A path is a pair of NICs of two servers, and carries both ways. Trouble at either end (a completion that failed or never
//! came, a link that went down) closes it at *both*, so that no write of the present *generation* can land any more:
//!
//! ```text
//!            trouble, or the peer is not up             the device has drained
//!   Up(g) ------------------------------> Draining(g) -------------------------> Fenced(g)
//!     ^                                                                             | the peer is fenced too
//!     |  the peer is ready, or up in g                       links up, hold-down    v
//!     +-------------------------------- Ready(g - 1) <-------------------------- Closed(g)
//! ```
//!
//! Each end tells the other its phase in one absolute word; a word only ever grows, so that one written twice, or late,
//! changes nothing. Words of older generations are not heard. While an end waits, it tells its word again.
//!
//! Every closing of a path gets a number, counted per NIC and server: the *fence*. A receiver's answer (which messages have
//! come) names the last fence that it has heard of, and a sender believes it only for fences up to that one.

use std::collections::VecDeque;

use crate::hw::{LinkState, Nanos, PathNews};
use crate::topo::{NicId, ServerId};

/// Times of the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathTiming {
    /// Work that a device has not completed for this long is trouble.
    pub completion_ns: Nanos,
    /// A device that has not drained for this long will not: what it may still write to is not used again.
    pub drain_ns: Nanos,
    /// A word is told again this often while its end waits.
    pub repeat_ns: Nanos,
    /// A path stays closed at least this long, twice as long after each closing, up to 64 times.
    pub hold_down_ns: Nanos,
}

impl Default for PathTiming {
    /// For hardware: RC retries take up to seconds before a completion fails.
    fn default() -> Self {
        Self {
            completion_ns: 10_000_000_000,
            drain_ns: 2_000_000_000,
            repeat_ns: 5_000_000,
            hold_down_ns: 50_000_000,
        }
    }
}

/// What an end of a path tells the other. Grows in this order, within a generation and from one to the next.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Phase {
    /// Traffic flows.
    Up = 0,
    /// Closing: the peer should, too.
    Closing = 1,
    /// Nothing of this generation can land here any more.
    Fenced = 2,
    /// Ready to receive in the next generation.
    Ready = 3,
}

/// One end's word to the other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct PathWord {
    /// Generation of the path.
    pub generation: u32,
    /// How far it is.
    pub phase: Phase,
    /// The teller's number of the fence, once fenced.
    pub fence: u32,
}

const FENCE_BITS: u32 = 31;
const PHASE_BITS: u32 = 2;
/// Generations that fit the word.
const MAX_GENERATION: u32 = (1 << (63 - FENCE_BITS - PHASE_BITS)) - 1;

impl PathWord {
    /// As it is written; 63 bits.
    pub fn encode(self) -> u64 {
        let generation = u64::from(self.generation.min(MAX_GENERATION));
        (generation << PHASE_BITS | self.phase as u64) << FENCE_BITS | u64::from(self.fence)
    }

    /// From any word: every bit pattern is some word.
    pub fn decode(word: u64) -> Self {
        let phase = match word >> FENCE_BITS & 3 {
            0 => Phase::Up,
            1 => Phase::Closing,
            2 => Phase::Fenced,
            _ => Phase::Ready,
        };
        let generation = (word >> (FENCE_BITS + PHASE_BITS)) as u32 & MAX_GENERATION;
        Self { generation, phase, fence: (word & ((1 << FENCE_BITS) - 1)) as u32 }
    }
}

/// What the keeper wants done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PathStep {
    /// Have the device close its end: nothing more may leave or land.
    Fence(NicId),
    /// Have the device open its end again.
    Reopen(NicId),
    /// Give up what the device still holds of this path: its work counts as failed, its memory is not used again.
    Quarantine(NicId),
    /// Write a word to the owner of the other end.
    Tell(NicId, PathWord),
    /// Tell all ranks of the server.
    News(NicId, PathNews),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Up,
    Draining,
    Fenced,
    Closed,
    Ready,
}

#[derive(Clone, Debug)]
struct Path {
    peer: NicId,
    server: ServerId,
    state: State,
    generation: u32,
    fence: u32,
    /// The newest word of the other end.
    heard: PathWord,
    since: Nanos,
    told_at: Nanos,
    /// How often its word will be told again although it is up: the other end may have missed it.
    repeats: u32,
    closings: u32,
}

impl Path {
    fn word(&self) -> PathWord {
        let phase = match self.state {
            State::Up => Phase::Up,
            State::Draining => Phase::Closing,
            State::Fenced | State::Closed => Phase::Fenced,
            State::Ready => Phase::Ready,
        };
        PathWord { generation: self.generation, phase, fence: self.fence }
    }

    /// What the other end says of this generation; `None`: nothing yet.
    fn heard_now(&self) -> Option<PathWord> {
        (self.heard.generation == self.generation).then_some(self.heard)
    }
}

/// The paths of one NIC.
#[derive(Debug)]
pub struct PathKeeper {
    paths: Vec<Path>,
    /// Fences by server.
    fences: Vec<u32>,
    link: LinkState,
    timing: PathTiming,
    steps: VecDeque<PathStep>,
    /// Paths that are not up.
    closed: usize,
    /// Whether some path has something to repeat, or waits.
    waits: bool,
}

/// An end that is up needs no answer, so it tells so a few times and lets it be.
const REPEATS: u32 = 64;

impl PathKeeper {
    /// Paths to these NICs, all up.
    pub fn new(peers: impl IntoIterator<Item = (NicId, ServerId)>, servers: u32, timing: PathTiming) -> Self {
        let up = PathWord { generation: 0, phase: Phase::Up, fence: 0 };
        let path = |(peer, server)| Path {
            peer,
            server,
            state: State::Up,
            generation: 0,
            fence: 0,
            heard: up,
            since: 0,
            told_at: 0,
            repeats: 0,
            closings: 0,
        };
        Self {
            paths: peers.into_iter().map(path).collect(),
            fences: vec![0; servers as usize],
            link: LinkState::Up,
            timing,
            steps: VecDeque::new(),
            closed: 0,
            waits: false,
        }
    }

    fn at(&self, peer: NicId) -> Option<usize> {
        self.paths.binary_search_by_key(&peer, |p| p.peer).ok()
    }

    /// Whether work may be posted on the path.
    pub fn is_up(&self, peer: NicId) -> bool {
        self.at(peer).is_some_and(|at| self.paths[at].state == State::Up)
    }

    /// Whether what arrives over the path counts: not what a device that did not answer delivers late.
    pub fn may_arrive(&self, peer: NicId) -> bool {
        let counts = |p: &Path| matches!(p.state, State::Up | State::Draining | State::Ready);
        self.at(peer).is_some_and(|at| counts(&self.paths[at]))
    }

    /// Whether every path is up.
    pub fn all_up(&self) -> bool {
        self.closed == 0
    }

    /// Whether the link carries.
    pub fn link(&self) -> LinkState {
        self.link
    }

    /// Times it works with.
    pub fn timing(&self) -> PathTiming {
        self.timing
    }

    /// The closed path's device still has to drain.
    pub fn draining(&self) -> impl Iterator<Item = NicId> + '_ {
        self.paths.iter().filter(|p| p.state == State::Draining).map(|p| p.peer)
    }

    /// Something went wrong on a path.
    pub fn on_trouble(&mut self, peer: NicId, now: Nanos) {
        if let Some(at) = self.at(peer) {
            self.close(at, now);
        }
    }

    /// The NIC's own link changed.
    pub fn on_link(&mut self, link: LinkState, now: Nanos) {
        self.link = link;
        if link == LinkState::Down {
            (0..self.paths.len()).for_each(|at| self.close(at, now));
        }
    }

    /// The other end's word. It may be old, or told before.
    pub fn on_word(&mut self, peer: NicId, word: PathWord, now: Nanos) {
        let Some(at) = self.at(peer) else { return };
        let path = &mut self.paths[at];
        if word <= path.heard {
            return;
        }
        path.heard = word;
        self.react(at, now);
    }

    /// The device has drained: nothing of the path is left in it, and all that had landed was reported.
    pub fn on_drained(&mut self, peer: NicId, now: Nanos) {
        let Some(at) = self.at(peer).filter(|&at| self.paths[at].state == State::Draining) else { return };
        let server = self.paths[at].server;
        self.fences[server.idx()] += 1;
        let fence = self.fences[server.idx()];
        let path = &mut self.paths[at];
        (path.state, path.fence, path.since) = (State::Fenced, fence, now);
        let open =
            |p: &Path| p.server == server && matches!(p.state, State::Up | State::Draining | State::Ready);
        let all_closed = !self.paths.iter().any(open);
        self.steps.push_back(PathStep::News(peer, PathNews::Fenced { fence, all_closed }));
        self.tell(at, now);
        self.react(at, now);
    }

    fn close(&mut self, at: usize, now: Nanos) {
        let path = &mut self.paths[at];
        if !matches!(path.state, State::Up | State::Ready) {
            return;
        }
        if path.state == State::Up {
            self.closed += 1;
        } else {
            // It was open for receiving in the next generation already.
            path.generation += 1;
        }
        (path.state, path.since, path.repeats) = (State::Draining, now, 0);
        self.waits = true;
        let path = &mut self.paths[at];
        path.closings = path.closings.saturating_add(1);
        let peer = path.peer;
        self.steps.push_back(PathStep::Fence(peer));
        self.steps.push_back(PathStep::News(peer, PathNews::Down));
        self.tell(at, now);
    }

    fn tell(&mut self, at: usize, now: Nanos) {
        let path = &mut self.paths[at];
        path.told_at = now;
        self.steps.push_back(PathStep::Tell(path.peer, path.word()));
    }

    /// Goes on as far as the newest word allows.
    fn react(&mut self, at: usize, now: Nanos) {
        let path = &mut self.paths[at];
        let (peer, heard) = (path.peer, path.heard);
        match path.state {
            State::Up if heard.generation == path.generation && heard.phase > Phase::Up => {
                self.close(at, now)
            }
            State::Fenced => {
                // Who is in the next generation, and closes it already, was fenced in this one.
                let fenced = path.heard_now().is_some_and(|w| w.phase >= Phase::Fenced);
                if fenced || heard.generation > path.generation {
                    (path.state, path.since) = (State::Closed, now);
                    let news = PathNews::PeerFenced { fence: heard.fence };
                    self.steps.push_back(PathStep::News(peer, news));
                }
            }
            State::Ready => {
                let ready = path.heard_now().is_some_and(|w| w.phase == Phase::Ready);
                let ahead = heard.generation == path.generation + 1;
                if ready || ahead {
                    path.generation += 1;
                    (path.state, path.since, path.repeats) = (State::Up, now, REPEATS);
                    self.closed -= 1;
                    self.steps.push_back(PathStep::News(peer, PathNews::Up { fence: heard.fence }));
                    self.tell(at, now);
                    self.react(at, now); // The peer may have closed it again already.
                }
            }
            _ => {}
        }
    }

    fn hold_down(&self, path: &Path) -> Nanos {
        self.timing.hold_down_ns << path.closings.saturating_sub(1).min(6)
    }

    /// What is due by time alone.
    pub fn handle_timeout(&mut self, now: Nanos) {
        if !self.waits {
            return;
        }
        self.waits = false;
        for at in 0..self.paths.len() {
            self.waits |= self.paths[at].state != State::Up || self.paths[at].repeats > 0;
            self.path_timeout(at, now);
        }
    }

    fn path_timeout(&mut self, at: usize, now: Nanos) {
        let path = &self.paths[at];
        let (peer, waited) = (path.peer, now.saturating_sub(path.since));
        match path.state {
            State::Draining if waited > self.timing.drain_ns => {
                self.steps.push_back(PathStep::Quarantine(peer));
                self.on_drained(peer, now);
            }
            State::Closed if self.link == LinkState::Up && waited > self.hold_down(path) => {
                self.make_ready(at, now);
            }
            State::Up if path.repeats == 0 => {}
            _ if now.saturating_sub(path.told_at) > self.timing.repeat_ns => {
                let path = &mut self.paths[at];
                path.repeats = path.repeats.saturating_sub(1);
                self.tell(at, now);
            }
            _ => {}
        }
    }

    /// Whoever uses the path again must have heard of all fences so far: credits may have been called in since its own.
    fn make_ready(&mut self, at: usize, now: Nanos) {
        let path = &mut self.paths[at];
        (path.state, path.since) = (State::Ready, now);
        path.fence = self.fences[path.server.idx()];
        self.steps.push_back(PathStep::Reopen(path.peer));
        self.tell(at, now);
        self.react(at, now);
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<PathStep> {
        self.steps.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TIMING: PathTiming =
        PathTiming { completion_ns: 1000, drain_ns: 300, repeat_ns: 20, hold_down_ns: 50 };
    const NICS: [NicId; 2] = [NicId(0), NicId(1)];

    /// The two ends of one path, the words between them (absolute: the last one counts), and what each device holds.
    struct Pair {
        keepers: [PathKeeper; 2],
        words: [Option<PathWord>; 2],
        drains_at: [Option<Nanos>; 2],
        /// Whether the device takes in what the other sends.
        receives: [bool; 2],
        fenced: [u32; 2],
        peer_fenced: [u32; 2],
        up: [bool; 2],
        now: Nanos,
        random: u64,
    }

    impl Pair {
        fn new(seed: u64) -> Self {
            let keeper = |peer: usize| PathKeeper::new([(NICS[peer], ServerId(peer as u32))], 2, TIMING);
            Self {
                keepers: [keeper(1), keeper(0)],
                words: [None; 2],
                drains_at: [None; 2],
                receives: [true; 2],
                fenced: [0; 2],
                peer_fenced: [0; 2],
                up: [true; 2],
                now: 0,
                random: seed | 1,
            }
        }

        fn draw(&mut self, below: u64) -> u64 {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            self.random % below
        }

        /// Carries out what an end wants; words are lost at times while `lossy`.
        fn steps(&mut self, end: usize, lossy: bool) {
            while let Some(step) = self.keepers[end].poll() {
                match step {
                    PathStep::Fence(_) => {
                        self.receives[end] = false;
                        self.drains_at[end] = Some(self.now + self.draw(200));
                    }
                    PathStep::Reopen(_) => self.receives[end] = true,
                    PathStep::Quarantine(_) => {}
                    PathStep::Tell(_, word) => {
                        if !lossy || self.draw(3) > 0 {
                            self.words[1 - end] = Some(word);
                        }
                    }
                    PathStep::News(_, news) => self.news(end, news),
                }
            }
        }

        fn news(&mut self, end: usize, news: PathNews) {
            match news {
                PathNews::Down => self.up[end] = false,
                PathNews::Fenced { fence, all_closed } => {
                    assert!(fence > self.fenced[end], "fences are counted");
                    assert!(all_closed && !self.receives[end]);
                    self.fenced[end] = fence;
                }
                PathNews::PeerFenced { fence } => {
                    assert!(
                        !self.up[end] && fence <= self.fenced[1 - end],
                        "only what the other end has said"
                    );
                    // Equal where this end was left behind: the other had closed the next generation already.
                    assert!(fence >= self.peer_fenced[end], "fences only grow");
                    self.peer_fenced[end] = fence;
                }
                PathNews::Up { fence } => {
                    // The other end may have closed again already; then nothing that is sent lands.
                    let current = fence == self.fenced[1 - end];
                    assert!(current || !self.receives[1 - end], "no fence is skipped");
                    self.up[end] = true;
                }
            }
        }

        fn turn(&mut self, lossy: bool, blow: Option<(usize, u64)>) {
            self.now += 1 + self.draw(10);
            match blow {
                Some((end, 0)) => self.keepers[end].on_trouble(NICS[1 - end], self.now),
                Some((end, 1)) => self.keepers[end].on_link(LinkState::Down, self.now),
                Some((end, _)) => self.keepers[end].on_link(LinkState::Up, self.now),
                None => {}
            }
            for end in 0..2 {
                self.steps(end, lossy);
                if let Some(word) = self.words[end] {
                    self.keepers[end].on_word(NICS[1 - end], PathWord::decode(word.encode()), self.now);
                }
                self.steps(end, lossy);
                if self.drains_at[end].is_some_and(|at| at <= self.now) {
                    self.drains_at[end] = None;
                    self.keepers[end].on_drained(NICS[1 - end], self.now);
                }
                self.steps(end, lossy);
                self.keepers[end].handle_timeout(self.now);
                self.steps(end, lossy);
            }
        }
    }

    /// Blows (which end, what, how long until the next) to a pair whose words are lost at times; in the end both are up.
    fn close_and_open(seed: u64, blows: &[(usize, u64, u64)]) {
        let mut pair = Pair::new(seed);
        for &(end, what, turns) in blows {
            pair.turn(true, Some((end, what)));
            (0..turns).for_each(|_| pair.turn(true, None));
        }
        pair.turn(true, Some((0, 2)));
        pair.turn(true, Some((1, 2)));
        (0..4000).for_each(|_| pair.turn(true, None));
        (0..200).for_each(|_| pair.turn(false, None));
        assert_eq!(pair.up, [true; 2], "{:?}", pair.keepers);
        assert_eq!(pair.receives, [true; 2]);
        assert!(pair.keepers[0].is_up(NICS[1]) && pair.keepers[1].is_up(NICS[0]));
    }

    #[test]
    fn an_end_that_was_left_behind_hears_of_the_newest_fence() {
        close_and_open(17_761_211_393_832_925_406, &[(0, 0, 23), (0, 0, 24), (0, 0, 7), (0, 0, 0)]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn both_ends_close_and_open_whatever_is_lost(
            seed in any::<u64>(),
            blows in proptest::collection::vec((0usize..2, 0u64..3, 0u64..120), 0..12),
        ) {
            close_and_open(seed, &blows);
        }

        #[test]
        fn words_survive_and_keep_their_order(
            a in (0u32..1 << 20, 0usize..4, 0u32..1 << 31),
            b in (0u32..1 << 20, 0usize..4, 0u32..1 << 31),
        ) {
            let phases = [Phase::Up, Phase::Closing, Phase::Fenced, Phase::Ready];
            let word = |(generation, phase, fence): (u32, usize, u32)| PathWord { generation, phase: phases[phase], fence };
            let (a, b) = (word(a), word(b));
            prop_assert_eq!(PathWord::decode(a.encode()), a);
            prop_assert_eq!(a.cmp(&b), a.encode().cmp(&b.encode()));
        }
    }

    #[test]
    fn a_device_that_does_not_drain_is_given_up() {
        let mut keeper = PathKeeper::new([(NICS[1], ServerId(1))], 2, TIMING);
        keeper.on_trouble(NICS[1], 0);
        let mut steps = Vec::new();
        for now in (0..=TIMING.drain_ns + 20).step_by(20) {
            keeper.handle_timeout(now);
            steps.extend(std::iter::from_fn(|| keeper.poll()));
        }
        let quarantined = steps.iter().position(|s| *s == PathStep::Quarantine(NICS[1]));
        let fenced = steps.iter().position(|s| matches!(s, PathStep::News(_, PathNews::Fenced { .. })));
        assert!(quarantined.is_some_and(|q| fenced.is_some_and(|f| q < f)), "{steps:?}");
        assert!(!keeper.may_arrive(NICS[1]), "what comes late is not heard");
    }
}
