//! What a NIC was asked and what it told, as lines: for a run that went wrong.

use std::sync::{Arc, Mutex, PoisonError};

use super::wrap::Wrap;
use crate::hw::{HwError, Nanos, NicDevice, NicEvent, PathId, Work, WorkOp};
use crate::topo::NicId;

/// Lines in the order in which things happened, shared by all NICs of a job.
#[derive(Clone, Default)]
pub struct Lines(Arc<Mutex<Vec<String>>>);

impl Lines {
    /// Appends a line.
    pub fn push(&self, line: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }

    /// All lines.
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A NIC that writes down what happens to it.
pub struct Trace<N> {
    inner: N,
    id: NicId,
    lines: Option<Lines>,
    now: Nanos,
}

impl<N: NicDevice> Trace<N> {
    /// Wraps NIC `id`; without lines it only passes on.
    pub fn new(inner: N, id: NicId, lines: Option<Lines>) -> Self {
        Self { inner, id, lines, now: 0 }
    }

    fn note(&self, what: impl FnOnce() -> String) {
        if let Some(lines) = &self.lines {
            lines.push(format!("{:>10} {} {}", self.now, self.id, what()));
        }
    }
}

fn describe(work: &Work) -> String {
    let to = NicId(work.path.0);
    match work.op {
        WorkOp::Write { local, imm, .. } => {
            format!(
                "write {} bytes at {} to {to} (immediate {imm:#010x}, cookie {:#x})",
                local.bytes, local.offset, work.cookie
            )
        }
        WorkOp::Inline { remote, data, .. } => {
            let word = u64::from_ne_bytes(std::array::from_fn(|i| data[i]));
            format!("word {word:#x} to {to} at {}", remote.remote_addr)
        }
    }
}

impl<N: NicDevice> Wrap for Trace<N> {
    type Inner = N;

    fn inner(&self) -> &N {
        &self.inner
    }

    fn inner_mut(&mut self) -> &mut N {
        &mut self.inner
    }

    fn post(&mut self, work: &[Work], now: Nanos) -> Result<usize, HwError> {
        self.now = now;
        let taken = self.inner.post(work, now)?;
        work[..taken].iter().for_each(|w| self.note(|| describe(w)));
        Ok(taken)
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<NicEvent>) -> Result<(), HwError> {
        self.now = now;
        let before = events.len();
        self.inner.poll(now, events)?;
        events[before..].iter().for_each(|e| self.note(|| format!("{e:x?}")));
        Ok(())
    }

    fn fence(&mut self, path: PathId) -> Result<(), HwError> {
        self.note(|| format!("fence the path to {}", NicId(path.0)));
        self.inner.fence(path)
    }

    fn is_drained(&mut self, path: PathId) -> bool {
        let drained = self.inner.is_drained(path);
        if drained {
            self.note(|| format!("the path to {} has drained", NicId(path.0)));
        }
        drained
    }

    fn reopen(&mut self, path: PathId) -> Result<(), HwError> {
        self.note(|| format!("reopen the path to {}", NicId(path.0)));
        self.inner.reopen(path)
    }
}
