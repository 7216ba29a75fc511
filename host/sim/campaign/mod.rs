//! Fault campaigns: whole jobs in virtual time, with the proxies' own code, on NICs that fail in ways drawn from a seed. Each
//! run must move every byte once and unchanged, or end within its time with an error that says why; the same seed gives the
//! same run.

mod fault;
mod job;
mod kernel;
mod nic;
mod pools;
pub(super) mod random;
mod trace;
mod wire;
mod work;
mod wrap;

pub use fault::{Fault, FaultRates, Mutant, Mutation};
pub use kernel::Wrong;
pub use nic::SimNic;
pub use random::Random;
pub use trace::{Lines, Trace};
pub use wire::{SimWire, WireTimes};
pub use wrap::Wrap;

use std::fmt;

use job::{Job, JobConfig, RankState};

use crate::engine::LINE_SLOTS;
use crate::engine::slots::SlotConfig;
use crate::hw::{HwError, LinkState, Nanos};
use crate::topo::{Cluster, NicId, Rank, Server};

/// One run of a campaign.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RunOptions {
    /// Everything is drawn from it.
    pub seed: u64,
    /// Whether to write down what every NIC does.
    pub trace: bool,
    /// What to leave out; for tests of the campaign itself.
    pub mutation: Option<Mutation>,
}

/// Something that happens from outside.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Blow {
    /// A cable is pulled, or put back.
    Link(NicId, LinkState),
    /// A process dies.
    Kill(Rank),
    /// A NIC's rate is divided.
    Slow(NicId, u64),
    /// A rank takes back the relay memory that its GPU has lent.
    Recall(Rank),
}

impl fmt::Display for Blow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Link(nic, LinkState::Down) => write!(f, "{nic} down"),
            Self::Link(nic, LinkState::Up) => write!(f, "{nic} up"),
            Self::Kill(rank) => write!(f, "{rank} killed"),
            Self::Recall(rank) => write!(f, "{rank} takes its relay memory back"),
            Self::Slow(nic, by) => write!(f, "{nic} {by} times slower"),
        }
    }
}

/// What a run met, and how it ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Run {
    /// Its seed.
    pub seed: u64,
    /// The machine, in words.
    pub machine: String,
    /// What happened to it, and when.
    pub blows: Vec<(Nanos, Blow)>,
    /// How each NIC failed by itself.
    pub rates: FaultRates,
    /// Virtual time that it took.
    pub took_ns: Nanos,
    /// Messages that came.
    pub messages: u64,
    /// The end.
    pub verdict: Verdict,
    /// What the NICs did, if it was to be traced.
    pub lines: Vec<String>,
}

/// How a run ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Every byte came, once and unchanged.
    Whole,
    /// A process was killed, or cut off where it had relay memory, and the others ended with these errors, or were done.
    Named(Vec<String>),
    /// What must not be.
    Broken(String),
}

impl Run {
    /// Whether the run is as it must be.
    pub fn is_good(&self) -> bool {
        !matches!(self.verdict, Verdict::Broken(_))
    }
}

/// Longest without progress in a call, and longest run.
const CALL_TIMEOUT_NS: Nanos = 40_000_000;
const RUN_NS: Nanos = 2_000_000_000;
/// How long it may take until relay memory is back.
const TAKE_BACK_NS: Nanos = 40_000_000;

/// Does one run.
///
/// # Errors
/// [`HwError`] when there is no memory for it.
pub fn run(options: RunOptions) -> Result<Run, HwError> {
    let mut random = Random::new(options.seed);
    let cluster = any_cluster(&mut random);
    let lines = options.trace.then(Lines::default);
    let config = JobConfig {
        seed: random.draw(),
        slots: SlotConfig {
            slot_bytes: work::MESSAGE_BYTES,
            send_slots: 6,
            recv_slots: random.between(1, LINE_SLOTS as u64) as u32,
            put_bytes: 0,
        },
        times: any_times(&mut random),
        faults: any_rates(&mut random),
        mutation: options.mutation,
        lines: lines.clone(),
        cluster,
    };
    let blows = any_blows(&config.cluster, &mut random);
    let mut course =
        Course { job: Job::new(&config)?, blows: blows.clone(), random, messages: 0, lines: lines.clone() };
    let verdict = course.run();
    Ok(Run {
        seed: options.seed,
        machine: describe(&config),
        blows,
        rates: config.faults,
        took_ns: course.job.wire.now(),
        messages: course.messages,
        verdict,
        lines: lines.map(|l| l.take()).unwrap_or_default(),
    })
}

fn any_cluster(random: &mut Random) -> Cluster {
    let servers = random.between(2, 3);
    let server = |random: &mut Random| {
        let nics = random.between(1, 4);
        let rates: Vec<u64> = (0..nics).map(|_| 8_000 * random.between(1, 4)).collect();
        Server::new(random.between(1, 3) as u32, &rates, 1_000)
    };
    if random.one_in(3) {
        Cluster::new((0..servers).map(|_| server(random)).collect())
    } else {
        Cluster::uniform(servers as u32, server(random))
    }
}

/// Most ways are short; on some wires messages are long on their way, so that they land after their sender gave them up.
fn any_times(random: &mut Random) -> WireTimes {
    let longest = [20_000, 200_000, 800_000][random.below(3) as usize];
    WireTimes { way_ns: (1_000, longest), ..WireTimes::default() }
}

fn any_rates(random: &mut Random) -> FaultRates {
    let mut rate = |n: u64| if random.one_in(2) { n } else { 0 };
    FaultRates {
        lost_completion: rate(40),
        most_lost: 2,
        late_completion: rate(20),
        late_arrival: rate(20),
        no_memory: rate(4),
        late_ns: (10_000, 400_000),
    }
}

/// Links that go down, most of them for a while; relay memory that is taken back; seldom a process that dies.
fn any_blows(cluster: &Cluster, random: &mut Random) -> Vec<(Nanos, Blow)> {
    let mut blows = Vec::new();
    for _ in 0..random.below(4) {
        let nic = NicId(random.below(cluster.nics().into()) as u32);
        let down_at = random.between(0, 1_500_000);
        blows.push((down_at, Blow::Link(nic, LinkState::Down)));
        let stays = random.one_in(4) && others_stay_up(cluster, nic, &blows);
        if !stays {
            let up_at = down_at + random.between(1_000, 3_000_000);
            blows.push((up_at, Blow::Link(nic, LinkState::Up)));
        }
    }
    if random.one_in(4) {
        let nic = NicId(random.below(cluster.nics().into()) as u32);
        blows.push((random.between(0, 1_000_000), Blow::Slow(nic, random.between(2, 20))));
    }
    for _ in 0..random.below(4) {
        let rank = Rank(random.below(cluster.ranks().into()) as u32);
        blows.push((random.between(0, 2_000_000), Blow::Recall(rank)));
    }
    if random.one_in(8) {
        let rank = Rank(random.below(cluster.ranks().into()) as u32);
        blows.push((random.between(0, 2_000_000), Blow::Kill(rank)));
    }
    blows.sort_by_key(|&(at, _)| at);
    blows
}

/// Whether a server keeps a NIC that nothing happens to when this one never comes back.
fn others_stay_up(cluster: &Cluster, nic: NicId, blows: &[(Nanos, Blow)]) -> bool {
    let server = cluster.server_of_nic(nic);
    let touched = |n: NicId| blows.iter().any(|(_, b)| matches!(b, Blow::Link(m, _) if *m == n));
    let mut nics = (0..cluster.nics()).map(NicId).filter(|&n| cluster.server_of_nic(n) == server);
    nics.any(|n| n != nic && !touched(n))
}

fn describe(config: &JobConfig) -> String {
    let servers = config.cluster.servers().iter().map(|s| format!("{}x{}", s.gpus, s.nics.len()));
    let servers: Vec<_> = servers.collect();
    format!("servers (GPUs x NICs) {}; {} credits per line", servers.join(", "), config.slots.recv_slots)
}

/// A run as it goes.
struct Course {
    job: Job,
    blows: Vec<(Nanos, Blow)>,
    random: Random,
    messages: u64,
    lines: Option<Lines>,
}

impl Course {
    fn run(&mut self) -> Verdict {
        for call in 1..=self.random.between(1, 4) {
            if let Err(verdict) = self.call(call) {
                return verdict;
            }
        }
        self.take_all_back()
    }

    /// When all is quiet, what is taken back comes back: from whoever could be reached, whatever has happened before.
    fn take_all_back(&mut self) -> Verdict {
        (0..self.job.cluster.ranks()).map(Rank).for_each(|rank| self.job.recall(rank));
        let until = self.job.wire.now() + TAKE_BACK_NS;
        while !self.job.pools.still_lent().is_empty() && self.job.wire.now() < until {
            self.strike(self.job.wire.now());
            let worked = self.job.step();
            self.job.advance(worked, until);
        }
        if let Some(trespass) = self.job.wire.trespass() {
            return Verdict::Broken(trespass);
        }
        let left = self.job.pools.still_lent();
        if left.is_empty() || !self.job.all_reach_all() {
            return Verdict::Whole;
        }
        self.describe();
        Verdict::Broken(format!("relay memory was asked back and is not given back: {left:?}"))
    }

    /// One call, opened by the ranks at different times.
    fn call(&mut self, id: u64) -> Result<(), Verdict> {
        let cluster = (*self.job.cluster).clone();
        let calls = work::draw(&cluster, id, &mut self.random, CALL_TIMEOUT_NS);
        self.messages += calls.iter().map(|(_, w)| w.expected).sum::<u64>();
        let now = self.job.wire.now();
        let mut to_open: Vec<_> = (0..cluster.ranks()).map(Rank).zip(calls).collect();
        self.random.shuffle(&mut to_open);
        let mut to_open: Vec<_> =
            to_open.into_iter().map(|o| (now + self.random.between(0, 60_000), o)).collect();
        loop {
            let now = self.job.wire.now();
            to_open.retain_mut(|(at, (rank, (call, work)))| {
                if *at <= now && self.job.is_ready(*rank, call, *at) {
                    self.job.open(*rank, call.clone(), work.clone());
                    return false;
                }
                true
            });
            self.strike(now);
            let worked = self.job.step();
            let at_most = self.blows.first().map_or(Nanos::MAX, |&(at, _)| at);
            let opens = to_open.iter().map(|&(at, _)| if at > now { at } else { at + pools::PATIENCE_NS });
            let at_most = opens.min().unwrap_or(Nanos::MAX).min(at_most);
            if let Some(end) = self.judge(to_open.is_empty()) {
                return end;
            }
            self.job.advance(worked, at_most);
        }
    }

    fn strike(&mut self, now: Nanos) {
        while let Some(&(_, blow)) = self.blows.first().filter(|&&(at, _)| at <= now) {
            self.blows.remove(0);
            if let Some(lines) = &self.lines {
                lines.push(format!("{now:>10} {blow}"));
            }
            match blow {
                Blow::Link(nic, link) => self.job.wire.set_link(nic, link),
                Blow::Slow(nic, by) => self.job.wire.slow_down(nic, by),
                Blow::Kill(rank) => self.job.kill(rank),
                Blow::Recall(rank) => self.job.recall(rank),
            }
        }
    }

    /// Whether the call is over: well, with errors that are explained, or badly.
    fn judge(&self, all_open: bool) -> Option<Result<(), Verdict>> {
        if let Some(trespass) = self.job.wire.trespass() {
            return Some(Err(Verdict::Broken(trespass)));
        }
        let mut errors = Vec::new();
        let mut killed = false;
        let mut waiting = !all_open;
        for (r, world) in self.job.ranks.iter().enumerate() {
            let rank = Rank(r as u32);
            match &world.state {
                RankState::Wrong(wrong) => {
                    return Some(Err(Verdict::Broken(format!("{rank}: {wrong}"))));
                }
                RankState::Failed(e) => errors.push(format!("{rank}: {e}")),
                RankState::Dead => killed = true,
                RankState::Alive => waiting |= !self.job.is_done(rank) || !self.job.is_quiet(rank),
            }
        }
        if !waiting && !killed && errors.is_empty() {
            return Some(Ok(()));
        }
        let explained = killed || !self.job.cut_off().is_empty();
        if !waiting || !explained && !errors.is_empty() {
            self.describe();
            let verdict = if explained { Verdict::Named(errors) } else { Verdict::Broken(errors.join("; ")) };
            return Some(Err(verdict));
        }
        let late = self.job.wire.now() > RUN_NS;
        late.then(|| {
            self.describe();
            Err(Verdict::Broken("it hangs: somebody waits without a deadline".into()))
        })
    }

    /// Where every rank is, for the trace.
    fn describe(&self) {
        let Some(lines) = &self.lines else { return };
        for (r, world) in self.job.ranks.iter().enumerate() {
            lines.push(format!("{} {:?}: {}", Rank(r as u32), world.state, world.describe()));
        }
    }
}
