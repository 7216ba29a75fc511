//! What a sender does about paths that fail: which may be used, which messages are in doubt, and which go again.
//!
//! A message whose completion failed may have come all the same. It stays in doubt until both ends have closed the path
//! (`path.rs`) and its receiver has answered which of its slots were filled by then; then it is either done or goes again,
//! from the slot where it lies or from another one beside a NIC that works.

use super::EngineConfig;
use super::sender::Message;
use crate::topo::{NicId, NicIdx};

/// A path from a NIC of this server, as this rank may use it.
#[derive(Clone, Copy, Debug)]
struct PathView {
    open: bool,
    /// The fence that a receiver must have answered to before this rank sends to it over the path.
    needs: u32,
}

/// All paths of this server's NICs.
#[derive(Debug)]
pub(super) struct Paths {
    /// `[egress][peer]`, peers numbered through the job.
    views: Vec<PathView>,
    job_nics: usize,
    /// Whether any path ever was closed: until then nothing needs to be looked up.
    seen_trouble: bool,
}

impl Paths {
    pub(super) fn new(config: &EngineConfig) -> Self {
        let job_nics = config.cluster.nics() as usize;
        let views = vec![PathView { open: true, needs: 0 }; config.nics() * job_nics];
        Self { views, job_nics, seen_trouble: false }
    }

    fn at(&self, egress: NicIdx, peer: NicId) -> usize {
        egress.idx() * self.job_nics + peer.idx()
    }

    /// True until the first trouble: everything may be used.
    pub(super) fn is_untroubled(&self) -> bool {
        !self.seen_trouble
    }

    pub(super) fn is_open(&self, egress: NicIdx, peer: NicId) -> bool {
        self.views[self.at(egress, peer)].open
    }

    /// Whether a sender whose receiver has answered up to fence `answered` may use the path.
    pub(super) fn is_usable(&self, egress: NicIdx, peer: NicId, answered: u32) -> bool {
        let view = self.views[self.at(egress, peer)];
        view.open && answered >= view.needs
    }

    pub(super) fn close(&mut self, egress: NicIdx, peer: NicId) {
        let at = self.at(egress, peer);
        self.views[at].open = false;
        self.seen_trouble = true;
    }

    pub(super) fn open(&mut self, egress: NicIdx, peer: NicId, fence: u32) {
        let at = self.at(egress, peer);
        let view = &mut self.views[at];
        *view = PathView { open: true, needs: view.needs.max(fence) };
    }
}

/// A message that may or may not have come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Doubt {
    pub(super) message: Message,
    /// The fence that closed its path at the receiver, once it is known.
    pub(super) fence: Option<u32>,
}

/// A message that goes again, on its way from one send slot to another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moving {
    /// As it will be sent.
    pub(super) message: Message,
    /// Where it lies.
    pub(super) from: (NicIdx, u32),
    /// Whether that place may be used again.
    pub(super) from_is_sound: bool,
}

/// Everything of a sender that waits for a fence, an answer or another way.
#[derive(Debug, Default)]
pub(super) struct Recovery {
    pub(super) doubts: Vec<Doubt>,
    /// Messages that have not come, first to go first.
    pub(super) again: Vec<Message>,
    pub(super) moving: Slab<Moving>,
}

impl Recovery {
    pub(super) fn is_empty(&self) -> bool {
        self.doubts.is_empty() && self.again.is_empty() && self.moving.is_empty()
    }

    /// Messages that are not settled, for one destination and class.
    pub(super) fn unsettled(&self) -> impl Iterator<Item = &Message> {
        let moving = self.moving.iter().map(|m| &m.message);
        self.doubts.iter().map(|d| &d.message).chain(&self.again).chain(moving)
    }
}

/// Items with numbers that stay while they are there.
#[derive(Debug)]
pub(super) struct Slab<T> {
    items: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { items: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    pub(super) fn insert(&mut self, item: T) -> u64 {
        let at = self.free.pop().unwrap_or_else(|| {
            self.items.push(None);
            self.items.len() - 1
        });
        self.items[at] = Some(item);
        at as u64
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<T> {
        let at = usize::try_from(number).ok()?;
        let item = self.items.get_mut(at)?.take()?;
        self.free.push(at);
        Some(item)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.items.iter().flatten()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.items.iter_mut().flatten()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.items.len() == self.free.len()
    }
}
