//! Rank 0's door: takes connections until every rank has come.
//!
//! Each handshake runs in a thread of its own, so that a connection that says nothing, or garbage, delays nobody.
//! Only a process that has proven the secret can end the meeting (by a wrong size, or a rank that has come
//! already): all else is turned away, remembered, and told if somebody is missing in the end.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::handshake::{Applicant, HandshakeError, Pipe, Refusal, Terms, answer, examine};
use super::wake::{Wake, wait};

/// Longest that one handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Connections that may be in their handshake at one time; others wait in the socket's queue.
const MAX_HANDSHAKES: usize = 256;
/// Refusals that are remembered.
const MAX_REFUSED: usize = 8;

/// Where connections arrive.
pub(crate) trait Door {
    /// One connection.
    type Pipe: Pipe + Send + 'static;
    /// The descriptor that is readable when somebody knocks.
    fn as_fd(&self) -> BorrowedFd<'_>;
    /// Takes one connection, with a name for it; `None` when nobody knocks. Never blocks.
    fn accept(&self) -> io::Result<Option<(Self::Pipe, String)>>;
}

/// Somebody who came and was turned away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TurnedAway {
    /// Where it came from.
    pub from: String,
    /// Why.
    pub reason: String,
}

impl fmt::Display for TurnedAway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.from, self.reason)
    }
}

/// The meeting did not come about.
#[derive(Debug)]
pub(crate) enum JoinError<E> {
    /// The time is up.
    Missing { turned_away: Vec<TurnedAway> },
    /// A process of this job is set up wrongly.
    Refused { from: String, refusal: Refusal },
    /// The system failed.
    Os { operation: &'static str, source: io::Error },
    /// The caller stopped it.
    Stopped(E),
}

/// The meeting as its host sees it.
pub(crate) trait Host {
    /// One connection.
    type Pipe;
    /// Why a meeting is stopped.
    type Stop;
    /// Takes a rank in.
    fn welcome(&mut self, rank: u32, pipe: Self::Pipe) -> Result<(), Self::Stop>;
    /// Asked after every wake-up.
    fn check(&mut self) -> Result<(), Self::Stop>;
}

type Outcome<P> = (P, String, Result<Applicant, HandshakeError>);

struct Joiner<'a, D: Door> {
    terms: &'a Terms,
    until: Instant,
    wake: &'a Arc<Wake>,
    came: Vec<bool>,
    turned_away: Vec<TurnedAway>,
    in_handshake: usize,
    tell: Sender<Outcome<D::Pipe>>,
    outcomes: Receiver<Outcome<D::Pipe>>,
}

/// Lets ranks in until all have come. `wake` interrupts the wait.
pub(crate) fn admit_all<D: Door, H: Host<Pipe = D::Pipe>>(
    door: &D,
    terms: &Terms,
    until: Instant,
    wake: &Arc<Wake>,
    host: &mut H,
) -> Result<(), JoinError<H::Stop>> {
    let mut came = vec![false; terms.size as usize];
    came[terms.rank as usize] = true;
    let (tell, outcomes) = channel();
    let turned_away = Vec::new();
    let mut joiner = Joiner::<D> { terms, until, wake, came, turned_away, in_handshake: 0, tell, outcomes };
    while joiner.came.contains(&false) {
        joiner.step(door, host)?;
    }
    Ok(())
}

impl<D: Door> Joiner<'_, D> {
    fn step<H: Host<Pipe = D::Pipe>>(&mut self, door: &D, host: &mut H) -> Result<(), JoinError<H::Stop>> {
        let room = self.in_handshake < MAX_HANDSHAKES;
        let knock = if room { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = [
            PollFd::from_borrowed_fd(AsFd::as_fd(&**self.wake), PollFlags::IN),
            PollFd::from_borrowed_fd(door.as_fd(), knock),
        ];
        let os = |operation| move |source| JoinError::Os { operation, source };
        if !wait(&mut fds, Some(self.until)).map_err(os("wait for connections"))? {
            return Err(JoinError::Missing { turned_away: std::mem::take(&mut self.turned_away) });
        }
        self.wake.clear();
        host.check().map_err(JoinError::Stopped)?;
        while let Ok(outcome) = self.outcomes.try_recv() {
            self.in_handshake -= 1;
            self.decide(outcome, host)?;
        }
        if room && let Some((pipe, from)) = door.accept().map_err(os("accept a connection"))? {
            self.begin(pipe, from);
        }
        Ok(())
    }

    /// Starts a handshake.
    fn begin(&mut self, mut pipe: D::Pipe, from: String) {
        let (terms, wake, tell) = (self.terms.clone(), self.wake.clone(), self.tell.clone());
        let until = self.until.min(Instant::now() + HANDSHAKE);
        let name = from.clone();
        let run = move || {
            let outcome = examine(&mut pipe, &terms, until);
            // A meeting that is over needs no outcome.
            let _ = tell.send((pipe, from, outcome));
            wake.set();
        };
        match thread::Builder::new().name("fl-handshake".into()).stack_size(128 << 10).spawn(run) {
            Ok(_) => self.in_handshake += 1,
            Err(e) => self.turn_away(name, format!("no thread for its handshake: {e}")),
        }
    }

    /// Lets a peer in or turns it away.
    fn decide<H: Host<Pipe = D::Pipe>>(
        &mut self,
        (mut pipe, from, outcome): Outcome<D::Pipe>,
        host: &mut H,
    ) -> Result<(), JoinError<H::Stop>> {
        let applicant = match outcome {
            Ok(applicant) => applicant,
            Err(HandshakeError::Refused(refusal @ Refusal::Size { .. })) => {
                return Err(JoinError::Refused { from, refusal });
            }
            Err(e) => {
                self.turn_away(from, e.to_string());
                return Ok(());
            }
        };
        let rank = applicant.rank;
        let refusal = self.came[rank as usize].then_some(Refusal::DuplicateRank { rank });
        let told = answer(&mut pipe, self.terms, &applicant, refusal.as_ref(), self.until);
        match (refusal, told) {
            (Some(refusal), _) => Err(JoinError::Refused { from, refusal }),
            (None, Err(e)) => {
                self.turn_away(from, e.to_string());
                Ok(())
            }
            (None, Ok(())) => {
                self.came[rank as usize] = true;
                host.welcome(rank, pipe).map_err(JoinError::Stopped)
            }
        }
    }

    fn turn_away(&mut self, from: String, reason: String) {
        if self.turned_away.len() < MAX_REFUSED {
            self.turned_away.push(TurnedAway { from, reason });
        }
    }
}
