//! The shared load table: what every rank of a server says of its traffic, so that each can tell idle NICs from busy
//! ones without asking anybody.
//!
//! One single-writer part per process: a line of its own, a row with its bytes at every NIC, a line per NIC for the
//! rest. Readers sum over processes and derive the state; a process whose heartbeat stops simply stops counting. Nothing
//! waits for anything. Bytes of eight NICs share a cache line, since every message asks for all of them.

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
/// Of a process: heartbeat, call, last call done, last call with detours, end of its scale-up collective.
const HEARTBEAT_AT: usize = 0;
const CALL_AT: usize = 1;
const DONE_AT: usize = 2;
const DETOURS_AT: usize = 3;
const SCALEUP_AT: usize = 4;
/// Of a process and NIC, by direction: last activity, turn; then the lease, and whether the link is down.
const LAST_AT: usize = 0;
const TURN_AT: usize = 2;
const LEASE_AT: usize = 4;
const LINK_DOWN_AT: usize = 5;

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
    /// `[process][nic]`: all ones where its bytes are borrowed, 0 where the NIC is its direct one.
    borrows: Vec<u64>,
    /// From one process's words to the next one's.
    stride: usize,
}

/// What the processes say of themselves, a bit each.
#[derive(Clone, Copy, Default)]
struct Processes {
    /// They still beat.
    live: u64,
    /// They have not come to the reader's call.
    behind: u64,
    /// They run a collective on scale-up.
    scaleup: u64,
}

impl Processes {
    fn has(set: u64, process: GpuIdx) -> bool {
        set >> process.0 & 1 != 0
    }
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
        HEADER + processes as usize * process_words(nics)
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
        let is_user = |p, k: usize| config.users[k].contains(&GpuIdx(p));
        let all = (0..config.processes).flat_map(|p| (0..config.owners.len()).map(move |k| (p, k)));
        let borrows = all.map(|(p, k)| if is_user(p, k) { 0 } else { u64::MAX }).collect();
        let stride = process_words(config.owners.len());
        Ok(Self { words, config, own, borrows, stride })
    }

    fn nics(&self) -> usize {
        self.config.owners.len()
    }

    fn process_at(&self, process: GpuIdx) -> usize {
        HEADER + process.idx() * self.stride
    }

    fn bytes_at(&self, process: GpuIdx, nic: NicIdx) -> usize {
        self.process_at(process) + LINE + nic.idx()
    }

    fn line_at(&self, process: GpuIdx, nic: NicIdx) -> usize {
        self.process_at(process) + LINE + self.nics().next_multiple_of(LINE) + nic.idx() * LINE
    }

    /// Says that this process lives, and where it is.
    pub fn beat(&self, now: Nanos, beat: Beat) {
        let at = self.process_at(self.own);
        // Relaxed: absolute, and each read for itself.
        self.words.word(at + DONE_AT).store(beat.done.0, Ordering::Relaxed);
        self.words.word(at + DETOURS_AT).store(beat.detours.0, Ordering::Relaxed);
        // Release, paired with `processes`: who sees the call sees what was published of it before.
        self.words.word(at + CALL_AT).store(beat.call.0, Ordering::Release);
        self.words.word(at + HEARTBEAT_AT).store(now, Ordering::Relaxed);
    }

    /// Until `until` this process runs a collective on its scale-up links: others leave its NICs alone, since relayed
    /// payload would cross the same links. A time in the past ends it. Its own use of them goes on.
    pub fn mark_scaleup_busy(&self, until: Nanos) {
        // Relaxed: absolute and complete by itself.
        self.words.word(self.process_at(self.own) + SCALEUP_AT).store(until, Ordering::Relaxed);
    }

    /// The call that a process of the server is in. What it owns of the call, its receive buffer for one, is there.
    pub fn call_of(&self, process: GpuIdx) -> CallId {
        // Acquire: pairs with the release in `beat`.
        CallId(self.words.word(self.process_at(process) + CALL_AT).load(Ordering::Acquire))
    }

    /// Publishes this process's traffic at a NIC. Relaxed: each word is absolute and complete by itself.
    pub fn publish(&self, nic: NicIdx, line: &LoadLine) {
        let at = self.line_at(self.own, nic);
        let store = |at: usize, value| self.words.word(at).store(value, Ordering::Relaxed);
        store(self.bytes_at(self.own, nic), encode_bytes(line.bytes));
        for d in 0..2 {
            store(at + LAST_AT + d, line.last_ns[d]);
            store(at + TURN_AT + d, encode_turn(line.turns[d]));
        }
        store(at + LEASE_AT, line.lease_until_ns);
        store(at + LINK_DOWN_AT, line.link_down.into());
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

    fn processes(&self, call: CallId, now: Nanos) -> Processes {
        let mut all = Processes::default();
        for p in (0..self.config.processes.min(u64::BITS)).map(GpuIdx) {
            let at = self.process_at(p);
            let lives = self.lives(p, now);
            // Acquire, paired with `beat`.
            let behind = self.words.word(at + CALL_AT).load(Ordering::Acquire) < call.0;
            let scaleup = self.load(at + SCALEUP_AT) > now;
            all.live |= u64::from(lives) << p.0;
            all.behind |= u64::from(behind) << p.0;
            all.scaleup |= u64::from(scaleup) << p.0;
        }
        all
    }

    /// How a NIC fares, as seen by a rank that is in `call`.
    pub fn view(&self, nic: NicIdx, call: CallId, now: Nanos) -> NicView {
        let processes = self.processes(call, now);
        let mut borrowed = [0; 2];
        for p in (0..self.config.processes).map(GpuIdx).filter(|&p| Processes::has(processes.live, p)) {
            let word = self.load(self.bytes_at(p, nic)) & self.borrows[p.idx() * self.nics() + nic.idx()];
            add_bytes(&mut borrowed, word);
        }
        self.view_of(nic, borrowed, processes, now)
    }

    /// How the first NICs of the server fare, as [`view`](Self::view) tells it of each: one pass over what the
    /// processes say.
    pub fn views(&self, call: CallId, now: Nanos, views: &mut [NicView]) {
        let nics = views.len().min(self.nics());
        let processes = self.processes(call, now);
        for chunk in (0..nics).step_by(LINE) {
            let mut borrowed = [[0; 2]; LINE];
            let count = (nics - chunk).min(LINE);
            for p in (0..self.config.processes).map(GpuIdx).filter(|&p| Processes::has(processes.live, p)) {
                let at = self.bytes_at(p, NicIdx(chunk as u32));
                let borrows = &self.borrows[p.idx() * self.nics() + chunk..][..count];
                for (k, (sums, borrows)) in borrowed.iter_mut().zip(borrows).enumerate() {
                    add_bytes(sums, self.load(at + k) & borrows);
                }
            }
            for (k, view) in views[chunk..chunk + count].iter_mut().enumerate() {
                *view = self.view_of(NicIdx((chunk + k) as u32), borrowed[k], processes, now);
            }
        }
    }

    fn view_of(&self, nic: NicIdx, borrowed: [u64; 2], processes: Processes, now: Nanos) -> NicView {
        let line = self.line_at(self.config.owners[nic.idx()], nic);
        let turn = |d: usize| decode_turn(self.load(line + TURN_AT + d));
        let states = self.states(nic, line, processes, now);
        let [egress, ingress] = [0, 1].map(|d| NicLoad { state: states[d], borrowed_bytes: borrowed[d] });
        NicView { egress, ingress, egress_turn: turn(0), ingress_turn: turn(1) }
    }

    fn states(&self, nic: NicIdx, owner_line: usize, processes: Processes, now: Nanos) -> [NicState; 2] {
        let owner = self.config.owners[nic.idx()];
        if !self.config.up[nic.idx()] || !Processes::has(processes.live, owner) {
            return [NicState::Down; 2]; // Without an owner nobody drives it.
        }
        if self.load(owner_line + LINK_DOWN_AT) != 0 {
            return [NicState::Down; 2];
        }
        if self.load(owner_line + LEASE_AT) > now {
            return [NicState::Leased; 2];
        }
        if Processes::has(processes.scaleup, owner) {
            return [NicState::Busy; 2];
        }
        let mut states = [NicState::Idle; 2];
        for &user in self.config.users[nic.idx()].iter().filter(|&&u| Processes::has(processes.live, u)) {
            let (line, bytes) = (self.line_at(user, nic), decode_bytes(self.load(self.bytes_at(user, nic))));
            // Who has not come to this call yet has not said what it will send in it.
            let behind = Processes::has(processes.behind, user);
            for d in 0..2 {
                let recent = now.saturating_sub(self.load(line + LAST_AT + d)) < self.config.idle_after_ns;
                if behind || bytes[d] > 0 || recent {
                    states[d] = NicState::Busy;
                }
            }
        }
        states
    }
}

/// Words of one process.
fn process_words(nics: usize) -> usize {
    LINE + nics.next_multiple_of(LINE) + nics * LINE
}

/// Bytes are told in units of this, rounded up, so that both directions fit one word.
const UNIT_BYTES: u64 = 64;

/// Egress in the low half, ingress in the high half. More than 256 GiB count as 256 GiB.
fn encode_bytes(bytes: [u64; 2]) -> u64 {
    let [egress, ingress] = bytes.map(|b| b.div_ceil(UNIT_BYTES).min(u32::MAX.into()));
    ingress << 32 | egress
}

fn decode_bytes(word: u64) -> [u64; 2] {
    [word & u64::from(u32::MAX), word >> 32].map(|units| units * UNIT_BYTES)
}

/// Halves of 32 bits times 64 over the processes of a server stay far below 64 bits.
fn add_bytes(sums: &mut [u64; 2], word: u64) {
    let bytes = decode_bytes(word);
    sums[0] += bytes[0];
    sums[1] += bytes[1];
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
    use proptest::prelude::*;

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
    fn a_scale_up_collective_keeps_borrowers_off_and_ends() {
        let [owner, other, borrower] = tables();
        for table in [&owner, &other] {
            table.beat(1000, in_call(1));
        }
        owner.mark_scaleup_busy(2000);
        let state = |nic, now| borrower.view(NicIdx(nic), CallId(1), now).egress.state;
        assert_eq!([state(0, 1999), state(1, 1999)], [NicState::Busy, NicState::Idle]);
        assert_eq!(state(0, 2000), NicState::Idle);
    }

    proptest! {
        /// All at once or one by one: the same view.
        #[test]
        fn all_views_are_the_single_ones(
            lines in proptest::collection::vec((any::<[u16; 2]>(), 0u64..300, 0u64..400), 6),
            calls in any::<[bool; 3]>(),
            now in 200u64..400,
        ) {
            let tables = tables();
            for (p, table) in tables.iter().enumerate() {
                table.beat(100, in_call(calls[p].into()));
                for nic in 0..2 {
                    let (bytes, last, lease_until_ns) = lines[p * 2 + nic];
                    let bytes = bytes.map(u64::from);
                    let line = LoadLine { bytes, last_ns: [last, 0], lease_until_ns, ..LoadLine::default() };
                    table.publish(NicIdx(nic as u32), &line);
                }
            }
            let mut views = [NicView::default(); 2];
            tables[2].views(CallId(1), now, &mut views);
            for (nic, view) in views.into_iter().enumerate() {
                prop_assert_eq!(view, tables[2].view(NicIdx(nic as u32), CallId(1), now));
            }
        }
    }

    #[test]
    fn bytes_round_up_and_saturate() {
        for (bytes, told) in [(0, 0), (1, 64), (64, 64), (65, 128), (u64::MAX, (1 << 38) - 64)] {
            assert_eq!(decode_bytes(encode_bytes([bytes, 0])), [told, 0]);
            assert_eq!(decode_bytes(encode_bytes([0, bytes])), [0, told]);
        }
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
