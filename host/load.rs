//! The shared load table: what every rank of a server says of its traffic, so that each can tell idle NICs from busy
//! ones without asking anybody.
//!
//! Every line has one writer. A process has a line of its own, and a row with the bytes that it has borrowed at every
//! NIC; a NIC has a line that its owner writes. Readers sum over processes and derive the state; a process that stops
//! beating simply stops counting. Nothing waits for anything.
//!
//! What many read often is worked out once by who writes it: until when a process keeps its direct NIC busy is a time,
//! whatever made it so; bytes at the direct NIC are nobody's loan, so rows hold loans only; and both directions of a
//! row's word can be summed as one number. A reader of eight NICs and processes so touches 24 cache lines, of which
//! little more than the rows of borrowers changes while puts move, and remembers nothing from one time to the next.

use crate::engine::call::CallId;
use crate::engine::route::NicState;
use crate::engine::{NicLoad, NicView, ServerView, TurnView};
use crate::hw::Nanos;
use crate::topo::{GpuIdx, NicIdx, Server};
use crate::words::{AtomicU64, Ordering, WordSlice, Words};

/// Layout version, in the first word of the table.
pub const VERSION: u64 = 3;
/// What a line of the cache holds.
const LINE: usize = 8;
type Line = [AtomicU64; LINE];
/// Lines that are fetched together: a process's own and the first of its row.
const PAIR: usize = 2;
/// Lines before the first process's: version, processes, NICs.
const HEADER: usize = PAIR;
/// Of a process: its call, the last one done, the last one with detours.
const CALL_AT: usize = 0;
const DONE_AT: usize = 1;
const DETOURS_AT: usize = 2;
/// Of a process: until when it counts as alive, runs a collective on scale-up, leases the NICs that it owns, and, by
/// direction, uses its direct NIC itself.
const ALIVE_AT: usize = 3;
const SCALEUP_AT: usize = 4;
const LEASE_AT: usize = 5;
const BUSY_AT: usize = 6;
/// Of a NIC: by direction, its turn; then whether the link is down.
const TURN_AT: usize = 0;
const LINK_DOWN_AT: usize = 2;

/// A process that has been silent for this long does not count any more.
const DEAD_AFTER_NS: Nanos = 2_000_000_000;
/// It may count for this much longer: its beats within that time leave its line alone. A power of two.
const BEAT_GRAIN_NS: Nanos = 1 << 26;

/// One process's traffic at one NIC, as it publishes it. Index 0 is egress, 1 ingress.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LoadLine {
    /// Bytes queued or on the way.
    pub bytes: [u64; 2],
    /// When bytes last moved.
    pub last_ns: [Nanos; 2],
    /// Through which transfer the server may go; only the owner's counts.
    pub turns: [TurnView; 2],
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
    /// Until when a plan has leased the NICs that it owns.
    pub lease_until_ns: Nanos,
}

/// What the table is made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadConfig {
    /// The process that owns each NIC.
    pub owners: Vec<GpuIdx>,
    /// The direct NIC of each process: there its traffic is not borrowed.
    pub direct: Vec<Option<NicIdx>>,
    /// Whether each NIC is up.
    pub up: Vec<bool>,
    /// A NIC is idle only when no bytes of those whose direct NIC it is have moved for this long.
    pub idle_after_ns: Nanos,
}

impl LoadConfig {
    /// For the processes of a server, one per GPU.
    pub fn of(server: &Server, idle_after_ns: Nanos) -> Self {
        Self {
            owners: server.nics.iter().map(|n| n.relay_gpu).collect(),
            direct: (0..server.gpus).map(|g| server.direct_nic(GpuIdx(g))).collect(),
            up: server.nics.iter().map(|n| n.mbit_per_s > 0).collect(),
            idle_after_ns,
        }
    }

    fn processes(&self) -> usize {
        self.direct.len()
    }
}

/// A process's handle on the table.
pub struct LoadTable {
    words: WordSlice,
    config: LoadConfig,
    own: GpuIdx,
    nics: Vec<NicRoles>,
    /// Lines from one process to the next.
    stride: usize,
}

/// Who counts at a NIC: sets of processes, a bit each.
#[derive(Clone, Copy, Debug)]
struct NicRoles {
    /// Its owner; nobody when the NIC is not up.
    owner: u64,
    /// Those whose direct NIC it is.
    users: u64,
}

/// What the processes say of themselves: sets, a bit each.
#[derive(Clone, Copy, Default)]
struct Processes {
    /// They still beat.
    live: u64,
    /// They have not come to the reader's call.
    behind: u64,
    /// They run a collective on scale-up.
    scaleup: u64,
    /// A plan has leased their NICs.
    leased: u64,
    /// They use their direct NIC, by direction.
    busy: [u64; 2],
}

impl Processes {
    /// Those whose own traffic keeps their direct NIC from others: who has not come to the call has not said what it
    /// will send in it.
    fn using(&self, d: usize) -> u64 {
        self.live & (self.behind | self.busy[d])
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
        (HEADER + processes as usize * process_lines(nics) + nics) * LINE
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
    ///
    /// # Panics
    /// When there are fewer [`words`](Self::words) than the table takes.
    pub fn open(words: WordSlice, config: LoadConfig, own: GpuIdx) -> Result<Self, BadTable> {
        let [version, processes, nics] = [0, 1, 2].map(|i| words.word(i).load(Ordering::Acquire));
        let expected = (VERSION, config.processes() as u64, config.owners.len() as u64);
        if (version, processes, nics) != expected {
            return Err(BadTable { version, processes, nics });
        }
        assert!(words.word_count() >= Self::words(processes as u32, config.owners.len()), "a table in part");
        let nics: Vec<_> = (0..config.owners.len()).map(|k| roles(&config, k)).collect();
        Ok(Self { words, stride: process_lines(nics.len()), nics, config, own })
    }

    /// Lines of processes, and of NICs.
    fn lines(&self) -> (&[Line], &[Line]) {
        let (lines, _) = self.words.all().as_chunks();
        lines[HEADER..].split_at(self.config.processes() * self.stride)
    }

    fn line_of(&self, process: GpuIdx) -> &Line {
        &self.lines().0[process.idx() * self.stride]
    }

    /// Says that this process lives, and where it is.
    pub fn beat(&self, now: Nanos, beat: Beat) {
        let line = self.line_of(self.own);
        tell(&line[DONE_AT], beat.done.0);
        tell(&line[DETOURS_AT], beat.detours.0);
        tell(&line[LEASE_AT], beat.lease_until_ns);
        if line[CALL_AT].load(Ordering::Relaxed) != beat.call.0 {
            // Release, paired with `say`: who sees the call sees what was told before. Relaxed above: it is its own word.
            line[CALL_AT].store(beat.call.0, Ordering::Release);
        }
        tell(&line[ALIVE_AT], (now | (BEAT_GRAIN_NS - 1)).saturating_add(DEAD_AFTER_NS));
    }

    /// Until `until` this process runs a collective on its scale-up links: others leave its NICs alone, since relayed
    /// payload would cross the same links. A time in the past ends it. Its own use of them goes on.
    pub fn mark_scaleup_busy(&self, until: Nanos) {
        tell(&self.line_of(self.own)[SCALEUP_AT], until);
    }

    /// The call that a process of the server is in. What it owns of the call, its receive buffer for one, is there.
    pub fn call_of(&self, process: GpuIdx) -> CallId {
        // Acquire: pairs with the release in `beat`.
        CallId(self.line_of(process)[CALL_AT].load(Ordering::Acquire))
    }

    /// Publishes this process's traffic at a NIC.
    pub fn publish(&self, nic: NicIdx, line: &LoadLine) {
        let (processes, nics) = self.lines();
        let own = &processes[self.own.idx() * self.stride..][..self.stride];
        if self.config.direct[self.own.idx()] == Some(nic) {
            for d in 0..2 {
                tell(&own[0][BUSY_AT + d], self.busy_until(line, d));
            }
        } else {
            tell(&own[1 + nic.idx() / LINE][nic.idx() % LINE], encode_bytes(line.bytes));
        }
        if self.config.owners[nic.idx()] == self.own {
            publish_owned(&nics[nic.idx()], line);
        }
    }

    /// Hysteresis: activity keeps a NIC busy for a while.
    fn busy_until(&self, line: &LoadLine, d: usize) -> Nanos {
        match line.bytes[d] {
            0 => line.last_ns[d].saturating_add(self.config.idle_after_ns),
            _ => Nanos::MAX,
        }
    }

    /// Where the server's processes are, with regard to a call.
    pub fn server_view(&self, call: CallId, now: Nanos) -> ServerView {
        let mut view = ServerView { all_done: true, detours: false };
        for line in self.lines().0.iter().step_by(self.stride) {
            // Relaxed: each is absolute, and seen late it delays.
            let load = |at: usize| line[at].load(Ordering::Relaxed);
            view.all_done &= load(DONE_AT) >= call.0 || load(ALIVE_AT) <= now;
            view.detours |= call.0 > 0 && load(DETOURS_AT) >= call.0;
        }
        view
    }

    /// What all processes say, with regard to a call.
    fn say(&self, call: CallId, now: Nanos) -> Processes {
        let lines = self.lines().0;
        let mut all = Processes::default();
        // The last one first: the bits move up as others are added.
        for line in (0..self.config.processes().min(MAX_PROCESSES)).rev().map(|p| &lines[p * self.stride]) {
            // Acquire, paired with `beat`: what was published of the call is read after it.
            add(&mut all.behind, line[CALL_AT].load(Ordering::Acquire) < call.0);
            // Relaxed: each is absolute, and a wrong answer costs time, not bytes.
            let until = |at: usize| line[at].load(Ordering::Relaxed) > now;
            add(&mut all.live, until(ALIVE_AT));
            add(&mut all.scaleup, until(SCALEUP_AT));
            add(&mut all.leased, until(LEASE_AT));
            add(&mut all.busy[0], until(BUSY_AT));
            add(&mut all.busy[1], until(BUSY_AT + 1));
        }
        all
    }

    /// How the first NICs of the server fare, as seen by a rank that is in `call`.
    pub fn views(&self, call: CallId, now: Nanos, views: &mut [NicView]) {
        let processes = self.say(call, now);
        let (lines, nics) = (self.lines().1, views.len().min(self.nics.len()));
        for (part, views) in views[..nics].chunks_mut(LINE).enumerate() {
            let borrowed = self.borrowed(part, processes.live);
            for (k, view) in views.iter_mut().enumerate() {
                let nic = part * LINE + k;
                *view = view_of(self.nics[nic], &lines[nic], borrowed[k], &processes);
            }
        }
    }

    /// What those that live have borrowed of eight NICs. On its own, so that the sums stay in registers.
    #[inline(never)]
    fn borrowed(&self, part: usize, live: u64) -> [u64; LINE] {
        let lines = self.lines().0;
        let (mut sums, mut left) = ([0; LINE], live);
        while left != 0 {
            let row = &lines[left.trailing_zeros() as usize * self.stride + 1 + part];
            for (sum, word) in sums.iter_mut().zip(row) {
                // Relaxed, as in `say`. Wrapping: what does not come from `encode_bytes` is wrong anyway.
                *sum = u64::wrapping_add(*sum, word.load(Ordering::Relaxed));
            }
            left &= left - 1;
        }
        sums
    }
}

/// Writes one of its writer's words, unless it says so already: readers keep their copies of a line that is left alone.
fn tell(word: &AtomicU64, value: u64) {
    // Relaxed: its own word, absolute and complete by itself.
    if word.load(Ordering::Relaxed) != value {
        word.store(value, Ordering::Relaxed);
    }
}

/// Moves a set up by one process and adds the one that was not in it.
fn add(set: &mut u64, is_in: bool) {
    *set = *set << 1 | u64::from(is_in);
}

fn view_of(roles: NicRoles, line: &Line, borrowed: u64, processes: &Processes) -> NicView {
    let NicRoles { owner, users } = roles;
    // Relaxed: a turn is one word, seen late it delays; the link's state is absolute.
    let load = |at: usize| line[at].load(Ordering::Relaxed);
    // Without an owner nobody drives it.
    let down = owner & processes.live == 0 || load(LINK_DOWN_AT) != 0;
    let state = |d: usize| match () {
        () if down => NicState::Down,
        () if owner & processes.leased != 0 => NicState::Leased,
        () if owner & processes.scaleup | users & processes.using(d) != 0 => NicState::Busy,
        () => NicState::Idle,
    };
    let bytes = decode_bytes(borrowed);
    let [egress, ingress] = [0, 1].map(|d| NicLoad { state: state(d), borrowed_bytes: bytes[d] });
    let [egress_turn, ingress_turn] = [0, 1].map(|d| decode_turn(load(TURN_AT + d)));
    NicView { egress, ingress, egress_turn, ingress_turn }
}

fn publish_owned(words: &Line, line: &LoadLine) {
    for (d, &turn) in line.turns.iter().enumerate() {
        tell(&words[TURN_AT + d], encode_turn(turn));
    }
    tell(&words[LINK_DOWN_AT], line.link_down.into());
}

/// As many as a set has bits, and GPUs that an immediate can name: servers with more are refused (`engine/slots.rs`).
const MAX_PROCESSES: usize = u64::BITS as usize;

fn roles(config: &LoadConfig, nic: usize) -> NicRoles {
    let set = |p: usize| 1u64.checked_shl(p as u32).unwrap_or(0);
    let is_user = |&p: &usize| config.direct[p] == Some(NicIdx(nic as u32));
    NicRoles {
        owner: if config.up[nic] { set(config.owners[nic].idx()) } else { 0 },
        users: (0..config.processes()).filter(is_user).fold(0, |users, p| users | set(p)),
    }
}

/// Lines of one process.
fn process_lines(nics: usize) -> usize {
    (1 + nics.div_ceil(LINE)).next_multiple_of(PAIR)
}

/// Bytes are told in units of this, rounded up, so that both directions fit one word.
const UNIT_BYTES: u64 = 64;
/// More count as this many, 4 GiB: so a half holds the sum over all processes.
const MAX_UNITS: u64 = u32::MAX as u64 / MAX_PROCESSES as u64;

/// Egress in the low half, ingress in the high half.
fn encode_bytes(bytes: [u64; 2]) -> u64 {
    let [egress, ingress] = bytes.map(|b| b.div_ceil(UNIT_BYTES).min(MAX_UNITS));
    ingress << 32 | egress
}

fn decode_bytes(word: u64) -> [u64; 2] {
    [word & u64::from(u32::MAX), word >> 32].map(|units| units * UNIT_BYTES)
}

/// Call in the high half, the last transfer allowed in the low half. No call has number 0, so an empty word allows none.
fn encode_turn(turn: TurnView) -> u64 {
    turn.call.0 << 32 | u64::from(turn.through)
}

fn decode_turn(word: u64) -> TurnView {
    TurnView { call: CallId(word >> 32), through: word as u32 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::shm::SharedMemory;

    const IDLE_AFTER_NS: Nanos = 100;
    /// Who has been silent for this long does not count, whenever it beat within the grain.
    const LONG_AFTER_NS: Nanos = DEAD_AFTER_NS + BEAT_GRAIN_NS;

    fn config() -> LoadConfig {
        LoadConfig {
            owners: vec![GpuIdx(0), GpuIdx(1)],
            direct: vec![Some(NicIdx(0)), Some(NicIdx(1)), None],
            up: vec![true, true],
            idle_after_ns: IDLE_AFTER_NS,
        }
    }

    fn open(config: &LoadConfig) -> Vec<LoadTable> {
        let (processes, nics) = (config.processes() as u32, config.owners.len());
        let memory = SharedMemory::create("fuselink-load-test", LoadTable::words(processes, nics)).unwrap();
        LoadTable::init(&memory.words(), processes, nics);
        let table = |p| LoadTable::open(memory.words(), config.clone(), GpuIdx(p)).unwrap();
        (0..processes).map(table).collect()
    }

    fn tables() -> [LoadTable; 3] {
        open(&config()).try_into().ok().unwrap()
    }

    fn view(table: &LoadTable, nic: u32, call: u64, now: Nanos) -> NicView {
        let mut views = vec![NicView::default(); table.nics.len()];
        table.views(CallId(call), now, &mut views);
        views[nic as usize]
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
        let state = |now| view(&borrower, 0, 1, now).egress;
        assert_eq!(state(1000).state, NicState::Idle);
        borrower.publish(NicIdx(0), &busy(64, 1000));
        assert_eq!(state(1000), NicLoad { state: NicState::Idle, borrowed_bytes: 64 });
        owner.publish(NicIdx(0), &busy(1, 1000));
        assert_eq!(state(1000).state, NicState::Busy);
        owner.publish(NicIdx(0), &busy(0, 1000));
        assert_eq!(state(1099).state, NicState::Busy, "hysteresis");
        assert_eq!(state(1100).state, NicState::Idle);
        assert_eq!(view(&borrower, 0, 1, 1100).ingress.state, NicState::Idle);
    }

    #[test]
    fn an_owner_behind_or_silent_lends_nothing() {
        let [owner, _, borrower] = tables();
        owner.beat(1000, in_call(1));
        assert_eq!(view(&borrower, 0, 2, 1000).egress.state, NicState::Busy);
        assert_eq!(view(&borrower, 0, 1, 1000 + LONG_AFTER_NS).egress.state, NicState::Down);
    }

    #[test]
    fn a_lease_repels_and_ends() {
        let [owner, _, borrower] = tables();
        owner.beat(1000, Beat { lease_until_ns: 2000, ..in_call(1) });
        assert_eq!(view(&borrower, 0, 1, 1999).ingress.state, NicState::Leased);
        assert_eq!(view(&borrower, 0, 1, 2000).ingress.state, NicState::Idle);
    }

    #[test]
    fn a_dead_borrower_stops_counting() {
        let [owner, _, borrower] = tables();
        owner.beat(DEAD_AFTER_NS, in_call(1));
        borrower.beat(1, in_call(1));
        borrower.publish(NicIdx(0), &busy(64, 1));
        assert_eq!(view(&owner, 0, 1, DEAD_AFTER_NS).egress.borrowed_bytes, 64);
        assert_eq!(view(&owner, 0, 1, LONG_AFTER_NS).egress.borrowed_bytes, 0);
    }

    #[test]
    fn a_scale_up_collective_keeps_borrowers_off_and_ends() {
        let [owner, other, borrower] = tables();
        for table in [&owner, &other] {
            table.beat(1000, in_call(1));
        }
        owner.mark_scaleup_busy(2000);
        let state = |nic, now| view(&borrower, nic, 1, now).egress.state;
        assert_eq!([state(0, 1999), state(1, 1999)], [NicState::Busy, NicState::Idle]);
        assert_eq!(state(0, 2000), NicState::Idle);
    }

    /// What a process says.
    #[derive(Clone, Debug)]
    struct Said {
        beat: Beat,
        beat_at: Nanos,
        scaleup_until: Nanos,
        lines: Vec<LoadLine>,
    }

    const NOW: Nanos = 10 * DEAD_AFTER_NS + 500;
    const CALL: u64 = 2;

    fn any_line() -> impl Strategy<Value = LoadLine> {
        let bytes = prop_oneof![Just(0), 0u64..1 << 40];
        let last = NOW - 2 * IDLE_AFTER_NS..=NOW;
        let turn = (1u64..4, any::<u32>()).prop_map(|(c, through)| TurnView { call: CallId(c), through });
        ([bytes.clone(), bytes], [last.clone(), last], [turn.clone(), turn], proptest::bool::weighted(0.1))
            .prop_map(|(bytes, last_ns, turns, link_down)| LoadLine { bytes, last_ns, turns, link_down })
    }

    fn any_said(nics: usize) -> impl Strategy<Value = Said> {
        let beat_at = prop_oneof![5 => NOW - DEAD_AFTER_NS + 1..=NOW, 1 => 0..NOW - LONG_AFTER_NS];
        let until = || prop_oneof![3 => Just(0), 1 => NOW - 1..=NOW + 1];
        (1u64..4, beat_at, until(), until(), proptest::collection::vec(any_line(), nics)).prop_map(
            |(call, beat_at, scaleup_until, lease_until_ns, lines)| Said {
                beat: Beat { lease_until_ns, ..in_call(call) },
                beat_at,
                scaleup_until,
                lines,
            },
        )
    }

    /// Owners anywhere, each process with its own direct NIC or one that it shares, or none.
    fn any_server() -> impl Strategy<Value = (LoadConfig, Vec<Said>)> {
        (1usize..20, 1usize..12).prop_flat_map(|(nics, processes)| {
            let nic = proptest::option::weighted(0.9, 0..nics as u32);
            let direct = nic.prop_map(|nic| nic.map(NicIdx));
            let config = (
                proptest::collection::vec((0..processes as u32).prop_map(GpuIdx), nics),
                proptest::collection::vec(direct, processes),
                proptest::collection::vec(proptest::bool::weighted(0.9), nics),
            );
            let config = config.prop_map(|(owners, direct, up)| LoadConfig {
                owners,
                direct,
                up,
                idle_after_ns: IDLE_AFTER_NS,
            });
            (config, proptest::collection::vec(any_said(nics), processes))
        })
    }

    /// The rules, in words of docs/design.md, from what was said.
    fn expected(config: &LoadConfig, said: &[Said], nic: usize) -> NicView {
        let lives = |p: usize| NOW - said[p].beat_at < DEAD_AFTER_NS;
        let uses = |p: usize| config.direct[p] == Some(NicIdx(nic as u32));
        let owner = config.owners[nic].idx();
        let told = |bytes: u64| bytes.div_ceil(UNIT_BYTES).min(MAX_UNITS) * UNIT_BYTES;
        let load = |d: usize| {
            let active = |p: usize| {
                let line = &said[p].lines[nic];
                let recent = NOW - line.last_ns[d] < IDLE_AFTER_NS;
                said[p].beat.call < CallId(CALL) || line.bytes[d] > 0 || recent
            };
            let state = if !config.up[nic] || !lives(owner) || said[owner].lines[nic].link_down {
                NicState::Down
            } else if said[owner].beat.lease_until_ns > NOW {
                NicState::Leased
            } else if said[owner].scaleup_until > NOW
                || (0..said.len()).any(|p| uses(p) && lives(p) && active(p))
            {
                NicState::Busy
            } else {
                NicState::Idle
            };
            let borrowers = (0..said.len()).filter(|&p| lives(p) && !uses(p));
            let borrowed_bytes = borrowers.map(|p| told(said[p].lines[nic].bytes[d])).sum();
            NicLoad { state, borrowed_bytes }
        };
        let [egress_turn, ingress_turn] = said[owner].lines[nic].turns;
        NicView { egress: load(0), ingress: load(1), egress_turn, ingress_turn }
    }

    proptest! {
        /// Whatever the processes say, and however NICs are dealt to them: the views are the rules'.
        #[test]
        fn views_follow_the_rules((config, said) in any_server(), reader in any::<prop::sample::Index>()) {
            let tables = open(&config);
            for (table, said) in tables.iter().zip(&said) {
                table.mark_scaleup_busy(said.scaleup_until);
                for (k, line) in said.lines.iter().enumerate() {
                    table.publish(NicIdx(k as u32), line);
                }
                table.beat(said.beat_at, said.beat);
            }
            let mut views = vec![NicView::default(); config.owners.len()];
            reader.get(&tables).views(CallId(CALL), NOW, &mut views);
            for (nic, view) in views.into_iter().enumerate() {
                prop_assert_eq!(view, expected(&config, &said, nic), "NIC {}", nic);
            }
        }
    }

    #[test]
    fn bytes_round_up_and_saturate() {
        for (bytes, told) in [(0, 0), (1, 64), (64, 64), (65, 128), (u64::MAX, (1 << 32) - 64)] {
            assert_eq!(decode_bytes(encode_bytes([bytes, 0])), [told, 0]);
            assert_eq!(decode_bytes(encode_bytes([0, bytes])), [0, told]);
        }
    }

    #[test]
    fn sums_of_all_processes_stay_in_their_half() {
        let most = encode_bytes([u64::MAX, u64::MAX]);
        let sum = (0..MAX_PROCESSES).map(|_| most).sum();
        assert_eq!(decode_bytes(sum), [MAX_PROCESSES as u64 * ((1 << 32) - 64); 2]);
    }

    #[test]
    fn a_link_that_is_down_is_lent_to_nobody() {
        let [owner, other, borrower] = tables();
        owner.beat(1000, in_call(1));
        let down = LoadLine { link_down: true, ..LoadLine::default() };
        other.publish(NicIdx(0), &down);
        assert_eq!(view(&borrower, 0, 1, 1000).egress.state, NicState::Idle, "only its owner can tell");
        owner.publish(NicIdx(0), &down);
        assert_eq!(view(&borrower, 0, 1, 1000).egress.state, NicState::Down);
        assert_eq!(view(&owner, 0, 1, 1000).ingress.state, NicState::Down);
    }

    #[test]
    fn all_are_done_when_the_last_that_lives_is() {
        let [a, b, c] = tables();
        let done = |done| Beat { done: CallId(done), detours: CallId(done), ..in_call(2) };
        a.beat(DEAD_AFTER_NS, done(2));
        b.beat(DEAD_AFTER_NS, done(1));
        c.beat(1, done(0));
        assert_eq!(a.server_view(CallId(2), DEAD_AFTER_NS), ServerView { all_done: false, detours: true });
        b.beat(DEAD_AFTER_NS, done(2));
        assert!(!a.server_view(CallId(2), DEAD_AFTER_NS).all_done);
        assert!(a.server_view(CallId(2), LONG_AFTER_NS).all_done, "c is dead");
        assert!(!a.server_view(CallId(3), LONG_AFTER_NS).detours);
    }

    #[test]
    fn turns_survive_their_word() {
        for turn in [(0, 0), (1, 0), (7, 12), (9, u32::MAX)] {
            let turn = TurnView { call: CallId(turn.0), through: turn.1 };
            assert_eq!(decode_turn(encode_turn(turn)), turn);
        }
        assert!(!decode_turn(0).allows(CallId(1), Some(0)));
    }
}
