//! The shared load table: what every rank of a server says of its traffic, so that each can tell idle NICs from busy
//! ones without asking anybody.
//!
//! One single-writer line per process and NIC. Readers sum over processes and derive the state; a process whose
//! heartbeat stops simply stops counting. Nothing waits for anything.

use crate::engine::call::CallId;
use crate::engine::route::NicState;
use crate::engine::{NicLoad, NicView, ServerView, TurnView};
use crate::hw::Nanos;
use crate::topo::{GpuIdx, NicIdx};
use crate::words::{Ordering, WordSlice, Words};

/// Layout version, in the first word of the table.
pub const VERSION: u64 = 2;
const LINE: usize = 8;
/// Header: version, processes, NICs.
const HEADER: usize = LINE;
/// Of a process: heartbeat, call, last call done, last call with detours.
const HEARTBEAT_AT: usize = 0;
const CALL_AT: usize = 1;
const DONE_AT: usize = 2;
const DETOURS_AT: usize = 3;
/// Of a process and NIC, by direction: bytes, last activity, turn; then the lease, and whether the link is down.
const BYTES_AT: usize = 0;
const LAST_AT: usize = 2;
const TURN_AT: usize = 4;
const LEASE_AT: usize = 6;
const LINK_DOWN_AT: usize = 7;

/// A process that has been silent for this long does not count any more.
const DEAD_AFTER_NS: Nanos = 2_000_000_000;

/// One process's traffic at one NIC, as it publishes it. Index 0 is egress, 1 ingress.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LoadLine {
    /// Bytes queued or on the way.
    pub bytes: [u64; 2],
    /// When bytes last moved.
    pub last_ns: [Nanos; 2],
    /// Through which transfer the server may go; only the owner's counts.
    pub turns: [TurnView; 2],
    /// Until when a plan has leased the NIC; only the owner's counts.
    pub lease_until_ns: Nanos,
    /// Whether the link carries nothing; only the owner's counts.
    pub link_down: bool,
}

/// Where a process is, as it publishes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Beat {
    /// The call it is in.
    pub call: CallId,
    /// The last call that it is done with: nothing of it is due, in doubt or on the way.
    pub done: CallId,
    /// The last call in which it sent round failed paths.
    pub detours: CallId,
}

/// What the table is made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadConfig {
    /// The process that owns each NIC.
    pub owners: Vec<GpuIdx>,
    /// The processes whose direct NIC it is; their traffic, like the owner's, is not borrowed.
    pub users: Vec<Vec<GpuIdx>>,
    /// Whether each NIC is up.
    pub up: Vec<bool>,
    /// Processes.
    pub processes: u32,
    /// A NIC is idle only when its owner's bytes have not moved for this long.
    pub idle_after_ns: Nanos,
}

/// A process's handle on the table.
pub struct LoadTable {
    words: WordSlice,
    config: LoadConfig,
    own: GpuIdx,
}

/// The table is another's than this library's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "load table of version {version} for {processes} processes and {nics} NICs; ranks of one job must run one version"
)]
pub struct BadTable {
    /// Its version.
    pub version: u64,
    /// Its processes.
    pub processes: u64,
    /// Its NICs.
    pub nics: u64,
}

impl LoadTable {
    /// Words that a table takes.
    pub fn words(processes: u32, nics: usize) -> usize {
        HEADER + processes as usize * (1 + nics) * LINE
    }

    /// Writes the header; done once, by the process that creates the memory.
    pub fn init(words: &WordSlice, processes: u32, nics: usize) {
        for (i, value) in [VERSION, processes.into(), nics as u64].into_iter().enumerate() {
            words.word(i).store(value, Ordering::Release);
        }
    }

    /// The table in shared words, for process `own`.
    ///
    /// # Errors
    /// [`BadTable`].
    pub fn open(words: WordSlice, config: LoadConfig, own: GpuIdx) -> Result<Self, BadTable> {
        let [version, processes, nics] = [0, 1, 2].map(|i| words.word(i).load(Ordering::Acquire));
        if (version, processes, nics) != (VERSION, config.processes.into(), config.owners.len() as u64) {
            return Err(BadTable { version, processes, nics });
        }
        Ok(Self { words, config, own })
    }

    fn process_at(&self, process: GpuIdx) -> usize {
        HEADER + process.idx() * (1 + self.config.owners.len()) * LINE
    }

    fn line_at(&self, process: GpuIdx, nic: NicIdx) -> usize {
        self.process_at(process) + (1 + nic.idx()) * LINE
    }

    /// Says that this process lives, and where it is.
    pub fn beat(&self, now: Nanos, beat: Beat) {
        let at = self.process_at(self.own);
        // Relaxed: absolute, and each read for itself.
        self.words.word(at + DONE_AT).store(beat.done.0, Ordering::Relaxed);
        self.words.word(at + DETOURS_AT).store(beat.detours.0, Ordering::Relaxed);
        // Release, paired with `uses`: who sees the call sees what was published of it before.
        self.words.word(at + CALL_AT).store(beat.call.0, Ordering::Release);
        self.words.word(at + HEARTBEAT_AT).store(now, Ordering::Relaxed);
    }

    /// Publishes this process's traffic at a NIC. Relaxed: each word is absolute and complete by itself.
    pub fn publish(&self, nic: NicIdx, line: &LoadLine) {
        let at = self.line_at(self.own, nic);
        let store = |offset: usize, value| self.words.word(at + offset).store(value, Ordering::Relaxed);
        for d in 0..2 {
            store(BYTES_AT + d, line.bytes[d]);
            store(LAST_AT + d, line.last_ns[d]);
            store(TURN_AT + d, encode_turn(line.turns[d]));
        }
        store(LEASE_AT, line.lease_until_ns);
        store(LINK_DOWN_AT, line.link_down.into());
    }

    /// Where the server's processes are, with regard to a call.
    pub fn server_view(&self, call: CallId, now: Nanos) -> ServerView {
        let mut view = ServerView { all_done: true, detours: false };
        for p in (0..self.config.processes).map(GpuIdx) {
            let at = self.process_at(p);
            view.all_done &= self.load(at + DONE_AT) >= call.0 || !self.lives(p, now);
            view.detours |= call.0 > 0 && self.load(at + DETOURS_AT) >= call.0;
        }
        view
    }

    fn load(&self, at: usize) -> u64 {
        self.words.word(at).load(Ordering::Relaxed)
    }

    fn lives(&self, process: GpuIdx, now: Nanos) -> bool {
        now.saturating_sub(self.load(self.process_at(process) + HEARTBEAT_AT)) < DEAD_AFTER_NS
    }

    /// How a NIC fares, as seen by a rank that is in `call`.
    pub fn view(&self, nic: NicIdx, call: CallId, now: Nanos) -> NicView {
        let owner = self.config.owners[nic.idx()];
        let line = self.line_at(owner, nic);
        let turn = |d: usize| decode_turn(self.load(line + TURN_AT + d));
        let borrowed = self.borrowed_bytes(nic, now);
        let states = self.states(nic, owner, call, now);
        let [egress, ingress] = [0, 1].map(|d| NicLoad { state: states[d], borrowed_bytes: borrowed[d] });
        NicView { egress, ingress, egress_turn: turn(0), ingress_turn: turn(1) }
    }

    fn states(&self, nic: NicIdx, owner: GpuIdx, call: CallId, now: Nanos) -> [NicState; 2] {
        if !self.config.up[nic.idx()] {
            return [NicState::Down; 2];
        }
        if !self.lives(owner, now) {
            return [NicState::Down; 2]; // Nobody drives it.
        }
        if self.load(self.line_at(owner, nic) + LINK_DOWN_AT) != 0 {
            return [NicState::Down; 2];
        }
        if self.load(self.line_at(owner, nic) + LEASE_AT) > now {
            return [NicState::Leased; 2];
        }
        let users = &self.config.users[nic.idx()];
        [0, 1].map(|d| {
            let busy = users.iter().any(|&user| self.uses(user, nic, d, call, now));
            if busy { NicState::Busy } else { NicState::Idle }
        })
    }

    /// Whether a process has, or may have, traffic of its own at its direct NIC.
    fn uses(&self, user: GpuIdx, nic: NicIdx, direction: usize, call: CallId, now: Nanos) -> bool {
        let line = self.line_at(user, nic);
        // Who has not come to this call yet has not said what it will send in it.
        let behind = self.words.word(self.process_at(user) + CALL_AT).load(Ordering::Acquire) < call.0;
        let pending = self.load(line + BYTES_AT + direction) > 0;
        let recent = now.saturating_sub(self.load(line + LAST_AT + direction)) < self.config.idle_after_ns;
        self.lives(user, now) && (behind || pending || recent)
    }

    /// Both directions in one pass: a process's line is one cache line.
    fn borrowed_bytes(&self, nic: NicIdx, now: Nanos) -> [u64; 2] {
        let users = &self.config.users[nic.idx()];
        let mut sums = [0; 2];
        for p in (0..self.config.processes).map(GpuIdx).filter(|p| !users.contains(p)) {
            let line = self.line_at(p, nic);
            let bytes = [0, 1].map(|d| self.load(line + BYTES_AT + d));
            if bytes != [0; 2] && self.lives(p, now) {
                sums = [0, 1].map(|d| u64::saturating_add(sums[d], bytes[d]));
            }
        }
        sums
    }
}

/// Call in the high half; transfers allowed in the low half, shifted by one so that 0 allows none.
fn encode_turn(turn: TurnView) -> u64 {
    turn.call.0 << 32 | u64::from(turn.through.saturating_add(1))
}

fn decode_turn(word: u64) -> TurnView {
    match word as u32 {
        0 => TurnView::default(),
        // `ALL_TRANSFERS` saturated, so that one less of it still allows every transfer that exists.
        n => TurnView { call: CallId(word >> 32), through: n - 1 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::SharedMemory;

    fn tables() -> [LoadTable; 3] {
        let memory = SharedMemory::create("fuselink-load-test", LoadTable::words(3, 2)).unwrap();
        LoadTable::init(&memory.words(), 3, 2);
        let config = LoadConfig {
            owners: vec![GpuIdx(0), GpuIdx(1)],
            users: vec![vec![GpuIdx(0)], vec![GpuIdx(1)]],
            up: vec![true, true],
            processes: 3,
            idle_after_ns: 100,
        };
        [0, 1, 2].map(|p| LoadTable::open(memory.words(), config.clone(), GpuIdx(p)).unwrap())
    }

    fn in_call(call: u64) -> Beat {
        Beat { call: CallId(call), ..Beat::default() }
    }

    fn busy(bytes: u64, last_ns: u64) -> LoadLine {
        LoadLine { bytes: [bytes, 0], last_ns: [last_ns, 0], ..LoadLine::default() }
    }

    #[test]
    fn owner_traffic_makes_busy_and_borrowers_do_not() {
        let [owner, _, borrower] = tables();
        owner.beat(1000, in_call(1));
        borrower.beat(1000, in_call(1));
        let state = |now| borrower.view(NicIdx(0), CallId(1), now).egress;
        assert_eq!(state(1000).state, NicState::Idle);
        borrower.publish(NicIdx(0), &busy(64, 1000));
        assert_eq!(state(1000), NicLoad { state: NicState::Idle, borrowed_bytes: 64 });
        owner.publish(NicIdx(0), &busy(1, 1000));
        assert_eq!(state(1000).state, NicState::Busy);
        owner.publish(NicIdx(0), &busy(0, 1000));
        assert_eq!(state(1099).state, NicState::Busy, "hysteresis");
        assert_eq!(state(1100).state, NicState::Idle);
        assert_eq!(borrower.view(NicIdx(0), CallId(1), 1100).ingress.state, NicState::Idle);
    }

    #[test]
    fn an_owner_behind_or_silent_lends_nothing() {
        let [owner, _, borrower] = tables();
        owner.beat(1000, in_call(1));
        assert_eq!(borrower.view(NicIdx(0), CallId(2), 1000).egress.state, NicState::Busy);
        assert_eq!(borrower.view(NicIdx(0), CallId(1), 1000 + DEAD_AFTER_NS).egress.state, NicState::Down);
    }

    #[test]
    fn a_lease_repels_and_ends() {
        let [owner, _, borrower] = tables();
        owner.beat(1000, in_call(1));
        owner.publish(NicIdx(0), &LoadLine { lease_until_ns: 2000, ..LoadLine::default() });
        assert_eq!(borrower.view(NicIdx(0), CallId(1), 1999).ingress.state, NicState::Leased);
        assert_eq!(borrower.view(NicIdx(0), CallId(1), 2000).ingress.state, NicState::Idle);
    }

    #[test]
    fn a_dead_borrower_stops_counting() {
        let [owner, _, borrower] = tables();
        owner.beat(DEAD_AFTER_NS, in_call(1));
        borrower.beat(1, in_call(1));
        borrower.publish(NicIdx(0), &busy(64, 1));
        assert_eq!(owner.view(NicIdx(0), CallId(1), DEAD_AFTER_NS).egress.borrowed_bytes, 64);
        assert_eq!(owner.view(NicIdx(0), CallId(1), DEAD_AFTER_NS + 1).egress.borrowed_bytes, 0);
    }

    #[test]
    fn a_link_that_is_down_is_lent_to_nobody() {
        let [owner, _, borrower] = tables();
        owner.beat(1000, in_call(1));
        owner.publish(NicIdx(0), &LoadLine { link_down: true, ..LoadLine::default() });
        assert_eq!(borrower.view(NicIdx(0), CallId(1), 1000).egress.state, NicState::Down);
        assert_eq!(owner.view(NicIdx(0), CallId(1), 1000).ingress.state, NicState::Down);
    }

    #[test]
    fn all_are_done_when_the_last_that_lives_is() {
        let [a, b, c] = tables();
        let done = |done| Beat { call: CallId(2), done: CallId(done), detours: CallId(done) };
        a.beat(DEAD_AFTER_NS, done(2));
        b.beat(DEAD_AFTER_NS, done(1));
        c.beat(1, done(0));
        assert_eq!(a.server_view(CallId(2), DEAD_AFTER_NS), ServerView { all_done: false, detours: true });
        b.beat(DEAD_AFTER_NS, done(2));
        assert!(!a.server_view(CallId(2), DEAD_AFTER_NS).all_done);
        assert!(a.server_view(CallId(2), DEAD_AFTER_NS + 1).all_done, "c is dead");
        assert!(!a.server_view(CallId(3), DEAD_AFTER_NS + 1).detours);
    }

    #[test]
    fn turns_survive_their_word() {
        for turn in [(1, 0), (7, 12), (9, u32::MAX - 1)] {
            let turn = TurnView { call: CallId(turn.0), through: turn.1 };
            assert_eq!(decode_turn(encode_turn(turn)), turn);
        }
        let all = TurnView { call: CallId(3), through: u32::MAX };
        assert!(decode_turn(encode_turn(all)).allows(CallId(3), Some(u32::MAX - 1)));
        assert!(!decode_turn(0).allows(CallId(1), Some(0)));
    }
}
