//! Starts the ranks of a run, as processes or as threads, and sees to it that they all end.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use fuselink::comm::bootstrap::BootstrapConfig;
use fuselink::comm::secret::Secret;
use fuselink::comm::settings::Settings;
use fuselink::topo::Rank;
use rustix::io::FdFlags;
use rustix::process::Signal;

use crate::failure::Failure;
use crate::job::{self, Event, JobSpec, Report};

/// Where rank 0's process finds the socket that the launcher has bound for it.
const LISTENER_ENV: &str = "FUSELINK_ROOT_FD";
/// Tells a rank whose child it is.
const LAUNCHER_ENV: &str = "FUSELINK_LAUNCHER_PID";
/// How long the other ranks may take to notice that one has failed, on top of the job's own time-out.
const GRACE: Duration = Duration::from_secs(8);
const TICK: Duration = Duration::from_millis(20);

/// Signals that end a run.
pub struct Interrupt(Arc<AtomicUsize>);

impl Interrupt {
    /// Catches Ctrl-C and SIGTERM from now on.
    pub fn catch() -> Result<Self> {
        let seen = Arc::new(AtomicUsize::new(0));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register_usize(signal, Arc::clone(&seen), signal as usize)?;
        }
        Ok(Self(seen))
    }

    fn signal(&self) -> Option<usize> {
        Some(self.0.load(Ordering::Acquire)).filter(|&s| s != 0)
    }
}

/// Runs a job in processes of this program; `progress` hears of every event.
pub fn processes(spec: &JobSpec, mut progress: impl FnMut(&Event)) -> Result<Report, Failure> {
    let interrupt = Interrupt::catch().map_err(Failure::Run)?;
    let mut ranks = Ranks::start(spec).map_err(Failure::Run)?;
    let mut report = None;
    loop {
        while let Some(event) = ranks.next_event() {
            progress(&event);
            if let Event::Report(r) = event {
                report = Some(*r);
            }
        }
        if let Some(signal) = interrupt.signal() {
            ranks.end();
            return Err(Failure::Interrupted(signal as u8));
        }
        match ranks.state().map_err(Failure::Run)? {
            State::Running => {}
            State::Done => break,
            State::Failed => return Err(Failure::Run(ranks.explain(Duration::from_millis(spec.timeout_ms)))),
        }
    }
    for event in ranks.last_events() {
        if let Event::Report(r) = event {
            report = Some(*r);
        }
    }
    report.ok_or_else(|| Failure::Run(anyhow!("the ranks ended without a report")))
}

enum State {
    Running,
    Done,
    Failed,
}

struct RankProcess {
    child: Child,
    status: Option<ExitStatus>,
    /// Its last word on standard error.
    words: Option<JoinHandle<String>>,
}

struct Ranks {
    ranks: Vec<RankProcess>,
    events: Receiver<Event>,
}

impl Ranks {
    fn start(spec: &JobSpec) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("cannot listen on the loopback address")?;
        let root = listener.local_addr()?;
        let secret = Secret::generate()?;
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let (tell, events) = mpsc::channel();
        let mut all = Self { ranks: Vec::new(), events };
        for rank in 0..spec.cluster.ranks() {
            let mut command = Command::new(&program);
            command.arg("rank").stderr(Stdio::piped());
            command
                .env("FUSELINK_RANK", rank.to_string())
                .env("FUSELINK_SIZE", spec.cluster.ranks().to_string());
            command.env("FUSELINK_ROOT", root.to_string()).env("FUSELINK_SECRET", secret.expose());
            // Many processes take their time to start.
            let timeout_ms = spec.timeout_ms.saturating_add(100 * u64::from(spec.cluster.ranks()));
            command.env("FUSELINK_TIMEOUT_MS", timeout_ms.to_string());
            command.env(LAUNCHER_ENV, std::process::id().to_string());
            let first = rank == 0;
            command.stdin(if first { Stdio::piped() } else { Stdio::null() });
            command.stdout(if first { Stdio::piped() } else { Stdio::null() });
            if first {
                rustix::io::fcntl_setfd(&listener, FdFlags::empty())?;
                command.env(LISTENER_ENV, listener.as_fd().as_raw_fd().to_string());
            }
            let child = command.spawn().with_context(|| format!("cannot start rank {rank}"))?;
            all.ranks.push(RankProcess { child, status: None, words: None });
            if first {
                rustix::io::fcntl_setfd(&listener, FdFlags::CLOEXEC)?;
                all.serve_first(spec, tell.clone())?;
            }
            all.listen_to_last();
        }
        Ok(all)
    }

    /// Gives rank 0 the job and reads its events.
    fn serve_first(&mut self, spec: &JobSpec, tell: mpsc::Sender<Event>) -> Result<()> {
        let Some(RankProcess { child, .. }) = self.ranks.last_mut() else { return Ok(()) };
        if let Some(mut stdin) = child.stdin.take() {
            let spec = serde_json::to_vec(spec)?;
            // On a thread: rank 0 reads it once all ranks are there, and they have yet to be started.
            std::thread::spawn(move || {
                // A rank that has died already is explained by its exit status.
                let _ = stdin.write_all(&spec);
            });
        }
        if let Some(stdout) = child.stdout.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if let Ok(event) = serde_json::from_str(&line)
                        && tell.send(event).is_err()
                    {
                        break;
                    }
                }
            });
        }
        Ok(())
    }

    fn listen_to_last(&mut self) {
        let Some(rank) = self.ranks.last_mut() else { return };
        rank.words = rank.child.stderr.take().map(|mut stderr| {
            std::thread::spawn(move || {
                let mut text = String::new();
                // What was read before an error still counts.
                let _ = stderr.read_to_string(&mut text);
                text.lines().last().unwrap_or_default().trim_start_matches("fuselink: ").to_owned()
            })
        });
    }

    fn next_event(&self) -> Option<Event> {
        match self.events.recv_timeout(TICK) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                std::thread::sleep(TICK);
                None
            }
        }
    }

    /// What is left to be told once all ranks have ended: up to the end of rank 0's output.
    fn last_events(&self) -> impl Iterator<Item = Event> + '_ {
        std::iter::from_fn(|| self.events.recv_timeout(GRACE).ok())
    }

    fn reap(&mut self) -> Result<()> {
        for rank in self.ranks.iter_mut().filter(|r| r.status.is_none()) {
            rank.status = rank.child.try_wait()?;
        }
        Ok(())
    }

    fn state(&mut self) -> Result<State> {
        self.reap()?;
        let mut statuses = self.ranks.iter().map(|r| r.status);
        Ok(if statuses.clone().any(|s| s.is_some_and(|s| !s.success())) {
            State::Failed
        } else if statuses.all(|s| s.is_some()) {
            State::Done
        } else {
            State::Running
        })
    }

    /// One rank has failed: waits until the others have noticed, ends those that have not, and says what happened.
    fn explain(&mut self, timeout: Duration) -> anyhow::Error {
        let deadline = Instant::now() + timeout + GRACE;
        while self.ranks.iter().any(|r| r.status.is_none()) && Instant::now() < deadline {
            std::thread::sleep(TICK);
            if self.reap().is_err() {
                break;
            }
        }
        let stuck: Vec<usize> = (0..self.ranks.len()).filter(|&r| self.ranks[r].status.is_none()).collect();
        self.end();
        let words: Vec<String> = self.ranks.iter_mut().map(last_words).collect();
        let signal = |r: &RankProcess| r.status.and_then(|s| s.signal());
        let killed = self.ranks.iter().enumerate().find(|(i, r)| signal(r).is_some() && !stuck.contains(i));
        let suffix = match stuck.first() {
            None => String::new(),
            Some(r) => format!("; rank {r} did not stop in time and was killed"),
        };
        if let Some((r, rank)) = killed {
            let signal = signal(rank).unwrap_or(0);
            return anyhow!(
                "rank {r} was killed by signal {signal}; all other ranks have been stopped{suffix}"
            );
        }
        // The rank that saw the cause says it; the others say that they were told.
        let cause = words.iter().enumerate().filter(|(_, w)| !w.is_empty());
        let (rank, words) = cause.min_by_key(|(_, w)| is_hearsay(w)).unwrap_or((0, &words[0]));
        anyhow!("rank {rank}: {words}{suffix}")
    }

    /// Ends every process.
    fn end(&mut self) {
        for rank in self.ranks.iter_mut().filter(|r| r.status.is_none()) {
            // It may have ended by itself meanwhile.
            let _ = rank.child.kill();
            rank.status = rank.child.wait().ok();
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.end();
    }
}

fn last_words(rank: &mut RankProcess) -> String {
    rank.words.take().and_then(|w| w.join().ok()).unwrap_or_default()
}

fn is_hearsay(words: &str) -> bool {
    words.contains("aborted the job") || words.contains("died")
}

/// The hidden subcommand: one rank, started by `processes`.
pub fn rank() -> Result<(), Failure> {
    die_with_parent().map_err(Failure::Run)?;
    run_this_rank().map_err(Failure::Run)
}

/// A launcher that is killed must not leave ranks behind.
fn die_with_parent() -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have died before the line above; then this process has another parent by now.
    let launcher: Option<i32> = std::env::var(LAUNCHER_ENV).ok().and_then(|pid| pid.parse().ok());
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    if launcher.is_some() && launcher != parent { bail!("the launcher is gone") } else { Ok(()) }
}

fn run_this_rank() -> Result<()> {
    let settings = Settings::from_env()?;
    let config = settings.bootstrap()?;
    let listener = std::env::var(LISTENER_ENV).ok().map(|fd| take_listener(&fd)).transpose()?;
    let bootstrap = job::meet(&config, listener)?;
    let own = if config.rank == Rank(0) {
        let mut text = Vec::new();
        std::io::stdin().read_to_end(&mut text).context("cannot read the job")?;
        text
    } else {
        Vec::new()
    };
    let spec: JobSpec =
        serde_json::from_slice(&bootstrap.broadcast(&own)?).context("the job is not readable")?;
    let mut stdout = std::io::stdout();
    job::run_rank(&spec, bootstrap, &config.secret, |event| {
        let mut line = serde_json::to_vec(&event)?;
        line.push(b'\n');
        stdout.write_all(&line)?;
        Ok(stdout.flush()?)
    })
}

fn take_listener(fd: &str) -> Result<TcpListener> {
    let fd = fd.parse().with_context(|| format!("{LISTENER_ENV} is not a descriptor"))?;
    // SAFETY: the launcher passed this descriptor to this process alone, and nothing else here knows its number.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC).context("the launcher's socket is not there")?;
    Ok(TcpListener::from(fd))
}

/// Runs a job in threads of this process.
pub fn threads(spec: &JobSpec, mut progress: impl FnMut(&Event)) -> Result<Report, Failure> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(Failure::run)?;
    let root = listener.local_addr().map_err(Failure::run)?;
    let secret = Secret::generate().map_err(Failure::run)?;
    let (tell, events) = mpsc::channel();
    let mut listener = Some(listener);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..spec.cluster.ranks())
            .map(|r| {
                let (tell, listener, secret) = (tell.clone(), listener.take(), &secret);
                scope.spawn(move || run_thread(spec, Rank(r), root, listener, secret, &tell))
            })
            .collect();
        drop(tell);
        let mut report = None;
        for event in events {
            progress(&event);
            if let Event::Report(r) = event {
                report = Some(*r);
            }
        }
        let mut errors = Vec::new();
        for (r, rank) in ranks.into_iter().enumerate() {
            match rank.join() {
                Ok(Ok(())) => {}
                Ok(Err(e)) => errors.push(anyhow!("rank {r}: {e:#}")),
                Err(_) => errors.push(anyhow!("rank {r} panicked")),
            }
        }
        if let Some(cause) = errors.into_iter().min_by_key(|e| is_hearsay(&e.to_string())) {
            return Err(Failure::Run(cause));
        }
        report.ok_or_else(|| Failure::Run(anyhow!("the ranks ended without a report")))
    })
}

fn run_thread(
    spec: &JobSpec,
    rank: Rank,
    root: SocketAddr,
    listener: Option<TcpListener>,
    secret: &Secret,
    tell: &mpsc::Sender<Event>,
) -> Result<()> {
    let deadline = Duration::from_millis(spec.timeout_ms);
    let config = BootstrapConfig { rank, size: spec.cluster.ranks(), root, secret: secret.clone(), deadline };
    let bootstrap = job::meet(&config, listener)?;
    job::run_rank(spec, bootstrap, secret, |event| Ok(tell.send(event)?))
}
