//! How a NIC's paths are opened, kept open and drained.

use std::io;

use super::VerbsNic;
use crate::hw::{Nanos, NicEvent, Work, WorkError};
use crate::verbs::advice::{Operation, advise};
use crate::verbs::handshake::{Phase, Reaction};
use crate::verbs::wire::Hello;

impl VerbsNic {
    /// Keeps an item until the path is open, and opens it.
    pub(super) fn queue(&mut self, idx: usize, work: &Work, now: Nanos) -> bool {
        let depth = usize::from(self.config.settings.send_depth);
        if self.paths[idx].waiting.len() >= depth {
            return false;
        }
        if self.paths[idx].waiting.is_empty() {
            self.paths[idx].handshake.restart_clock(now);
        }
        self.paths[idx].waiting.push_back(*work);
        self.unsettle(idx);
        if self.paths[idx].handshake.phase() == Phase::Idle {
            self.offer(idx, now);
        }
        true
    }

    pub(super) fn make(&mut self, idx: usize) -> io::Result<()> {
        if !self.paths[idx].numbers().is_empty() {
            return Ok(());
        }
        let settings = &self.config.settings;
        let pairs = self.behind.len() + settings.lanes() + 1;
        let grown = self.gear.sends.grow(pairs * usize::from(settings.send_depth));
        grown.map_err(|e| advise(Operation::CreateQueue, e))?;
        let psn = getrandom::u32().map_err(io::Error::other)?;
        self.paths[idx].make(&self.gear, psn)?;
        for (lane, number) in self.paths[idx].numbers().into_iter().enumerate() {
            self.behind.insert(number, (idx, lane));
        }
        Ok(())
    }

    pub(super) fn forget_queue_pairs(&mut self, numbers: &[u32]) {
        self.behind.retain(|number, _| !numbers.contains(number));
    }

    pub(super) fn offer(&mut self, idx: usize, now: Nanos) {
        self.paths[idx].handshake.offer(now);
        if let Err(e) = self.make(idx) {
            self.paths[idx].trouble = Some(e.to_string());
            return;
        }
        self.say(idx, now);
    }

    pub(super) fn say(&mut self, idx: usize, now: Nanos) {
        let path = &mut self.paths[idx];
        path.handshake.said(now);
        let hello = path.hello(&self.gear);
        let local = self.gear.port.local(self.config.settings.control_class());
        if let Err(e) = self.control.say(&local, &path.peer, &hello) {
            path.trouble = Some(e.to_string());
        }
    }

    pub(super) fn on_hello(&mut self, hello: &Hello, now: Nanos) {
        let meant = hello.to == self.config.id && hello.token == self.address.token;
        let Some(&idx) = self.path_of.get(&hello.from).filter(|_| meant) else { return };
        if self.paths[idx].peer_moved(hello.place) {
            self.control.forget_ways();
        }
        let heard = self.paths[idx].heard(hello);
        match self.paths[idx].handshake.on_hello(heard) {
            Reaction::Ignore => {}
            Reaction::Answer => self.say(idx, now),
            Reaction::Offer => self.offer(idx, now),
            Reaction::Connect => self.connect(idx, hello, now),
            Reaction::Go => {
                if hello.asks {
                    self.say(idx, now);
                }
                self.send_waiting(idx);
            }
            Reaction::Fence => {
                self.close_broken(idx);
                self.paths[idx].follow(hello.generation);
            }
        }
    }

    pub(super) fn connect(&mut self, idx: usize, hello: &Hello, now: Nanos) {
        let heard = self.paths[idx].heard(hello);
        let connected = self.make(idx).and_then(|()| {
            let numbers = self.paths[idx].numbers();
            let connected = self.paths[idx].connect(&self.gear, hello);
            if connected.is_err() {
                self.forget_queue_pairs(&numbers);
            }
            connected
        });
        match connected {
            Ok(()) => {
                let agreed = self.paths[idx].handshake.connected(heard, now);
                self.paths[idx].trouble = None;
                self.say(idx, now);
                if agreed {
                    self.send_waiting(idx);
                }
            }
            Err(e) => self.paths[idx].trouble = Some(e.to_string()),
        }
    }

    /// Sees to the paths that wait for time or for a peer.
    pub(super) fn settle(&mut self, now: Nanos, events: &mut Vec<NicEvent>) {
        for idx in std::mem::take(&mut self.unsettled) {
            if !self.settle_one(idx, now, events) {
                self.unsettle(idx);
            }
        }
    }

    pub(super) fn settle_one(&mut self, idx: usize, now: Nanos, events: &mut Vec<NicEvent>) -> bool {
        match self.paths[idx].handshake.phase() {
            Phase::Fenced => self.drain(idx, now, events),
            Phase::Agreed => {
                self.send_waiting(idx);
                self.paths[idx].waiting.is_empty()
            }
            Phase::Idle | Phase::Offering | Phase::Connected => self.press(idx, now),
        }
    }

    pub(super) fn drain(&mut self, idx: usize, now: Nanos, events: &mut Vec<NicEvent>) -> bool {
        let (numbers, mut arrivals) = (self.paths[idx].numbers(), Vec::new());
        let drained = self.paths[idx].drain(now, &mut self.ended, &mut arrivals);
        arrivals.into_iter().for_each(|a| self.tell_arrival(idx, a, events));
        if drained {
            self.forget_queue_pairs(&numbers);
        }
        drained
    }

    /// Says hello again, or gives up. True when nothing waits.
    pub(super) fn press(&mut self, idx: usize, now: Nanos) -> bool {
        if self.paths[idx].waiting.is_empty() {
            return true;
        }
        let patience_ns = self.config.settings.open_timeout.as_nanos() as Nanos;
        if self.paths[idx].handshake.phase() == Phase::Idle {
            self.offer(idx, now);
        } else if self.paths[idx].handshake.is_overdue(now, patience_ns) {
            self.give_up(idx, now);
            return true;
        } else if self.paths[idx].handshake.is_due(now) {
            match self.make(idx) {
                Ok(()) => self.say(idx, now),
                Err(e) => self.paths[idx].trouble = Some(e.to_string()),
            }
        }
        false
    }

    pub(super) fn give_up(&mut self, idx: usize, now: Nanos) {
        let path = &mut self.paths[idx];
        let trouble = path.trouble.take().unwrap_or("no answer".into());
        eprintln!(
            "fuselink: {} cannot open a path to {} at {} within {:?}: {trouble}",
            self.config.id, path.peer.nic, path.peer.place.gid, self.config.settings.open_timeout
        );
        path.handshake.restart_clock(now);
        self.fail_waiting(idx, WorkError::RetryExceeded);
    }
}
