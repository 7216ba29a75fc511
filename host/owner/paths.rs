//! What an owner does for the paths of its NIC: hears the other ends, closes and opens, gives up.

use super::OwnedNic;
use super::posted::InFlight;
use crate::engine::path::{PathStep, PathWord};
use crate::hw::{HwError, Nanos, NicEvent, PathId, PathNews, WorkError};
use crate::topo::NicId;
use crate::words::{Ordering, Words};

/// What has happened to a NIC's paths.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct PathCounters {
    /// Paths closed.
    pub closed: u64,
    /// Paths opened again.
    pub opened: u64,
    /// Paths whose device did not drain.
    pub quarantined: u64,
    /// Work that was not done or not known to be done.
    pub failed_work: u64,
    /// Arrivals and completions of paths that had been given up.
    pub late: u64,
}

impl PathCounters {
    /// Of two NICs together.
    pub fn plus(self, other: Self) -> Self {
        Self {
            closed: self.closed + other.closed,
            opened: self.opened + other.opened,
            quarantined: self.quarantined + other.quarantined,
            failed_work: self.failed_work + other.failed_work,
            late: self.late + other.late,
        }
    }
}

impl OwnedNic {
    /// Hears the other ends, looks for work that never completes, and does what the keeper wants.
    pub(super) fn keep_paths(&mut self, now: Nanos) -> Result<(), HwError> {
        self.take_steps()?;
        if self.keeper.all_up() && now.saturating_sub(self.looked_at) < self.config.timing.repeat_ns / 4 {
            return Ok(());
        }
        self.looked_at = now;
        self.hear(now);
        self.look_for_overdue_work(now);
        self.take_steps()?; // Paths that close now are fenced before they may be found drained.
        self.look_for_drained_paths(now);
        self.keeper.handle_timeout(now);
        self.take_steps()
    }

    /// A word of another owner that came beside the NICs.
    pub fn on_word(&mut self, peer: NicId, word: u64, now: Nanos) {
        self.keeper.on_word(peer, PathWord::decode(word), now);
    }

    fn hear(&mut self, now: Nanos) {
        for n in 0..self.config.paths.len() {
            // Relaxed: a word says all by itself.
            let word = self.config.path_words.word(n).load(Ordering::Relaxed);
            if word != 0 {
                self.keeper.on_word(NicId(n as u32), PathWord::decode(word), now);
            }
        }
    }

    pub(super) fn broken(&mut self, path: PathId, now: Nanos) {
        if let Some(n) = self.config.paths.iter().position(|&p| p == Some(path)) {
            self.keeper.on_trouble(NicId(n as u32), now);
        }
    }

    fn look_for_overdue_work(&mut self, now: Nanos) {
        let limit = self.config.timing.completion_ns;
        let overdue = |i: &InFlight| now.saturating_sub(i.posted_at) > limit;
        let peers: Vec<_> = self.posted.iter().filter(|(_, i)| overdue(i)).map(|(_, i)| i.peer).collect();
        peers.into_iter().for_each(|peer| self.keeper.on_trouble(peer, now));
    }

    fn look_for_drained_paths(&mut self, now: Nanos) {
        let draining: Vec<_> = self.keeper.draining().collect();
        for peer in draining {
            let Some(path) = self.config.paths[peer.idx()] else { continue };
            let held = self.posted.iter().any(|(_, i)| i.peer == peer);
            if !held && self.device.is_drained(path) {
                self.keeper.on_drained(peer, now);
            }
        }
    }

    fn take_steps(&mut self) -> Result<(), HwError> {
        while let Some(step) = self.keeper.poll() {
            match step {
                PathStep::Fence(peer) => {
                    self.counters.closed += 1;
                    if let Some(path) = self.config.paths[peer.idx()] {
                        self.device.fence(path)?;
                    }
                }
                PathStep::Reopen(peer) => {
                    if let Some(path) = self.config.paths[peer.idx()] {
                        self.device.reopen(path)?;
                    }
                }
                PathStep::Quarantine(peer) => self.quarantine(peer),
                PathStep::Tell(peer, word) => self.words.push((peer, word)),
                PathStep::News(peer, news) => {
                    self.tell_all(NicEvent::Path { peer, news });
                    if matches!(news, PathNews::Up { .. }) {
                        self.counters.opened += 1;
                        self.borrowers.path_is_up(peer);
                    }
                }
            }
        }
        Ok(())
    }

    /// The device does not answer: its work has failed as far as anybody can tell.
    fn quarantine(&mut self, peer: NicId) {
        self.counters.quarantined += 1;
        let held: Vec<_> =
            self.posted.iter().filter(|(_, i)| i.peer == peer).map(|(cookie, _)| cookie).collect();
        for item in held.into_iter().filter_map(|cookie| self.posted.remove(cookie)).collect::<Vec<_>>() {
            self.counters.failed_work += 1;
            self.finish(item, Err(WorkError::Quarantined));
        }
    }
}
