//! The borrowers of a NIC: their rings, what could not be handed back to them yet, and how much of theirs the device holds.

use std::collections::VecDeque;

use crate::borrow::{BadHandover, BorrowerPort, Handover, LaneCounts, RingCounters};
use crate::doorbell::Class;
use crate::hw::{Lane, NicEvent};
use crate::topo::{GpuIdx, NicId};

struct Borrower {
    port: BorrowerPort,
    /// By class: events that found its ring full.
    kept: [VecDeque<NicEvent>; Class::ALL.len()],
}

pub(super) struct Borrowers {
    all: Vec<Borrower>,
    /// By lane: whose turn it is.
    turns: [usize; Lane::COUNT],
    /// By lane: bytes with the device.
    held_bytes: [u64; Lane::COUNT],
    /// By lane: the most of them.
    bounds: [u64; Lane::COUNT],
    /// News told so far.
    news: u64,
    /// By NIC of the job: how much news had been told when the path to it was opened last.
    up_since: Vec<u64>,
    served: LaneCounts,
    told: LaneCounts,
}

/// Puts may hold the device this much less than calls.
const PUT_SHARE: u64 = 4;

/// A plan has leased its NICs, and control words are small.
fn bounds(borrow_bytes: u64) -> [u64; Lane::COUNT] {
    Lane::ALL.map(|lane| match lane {
        Lane::Control | Lane::Plan => u64::MAX,
        Lane::LowLatency => borrow_bytes / PUT_SHARE,
        Lane::Put => borrow_bytes,
    })
}

impl Borrowers {
    pub(super) fn new(ports: Vec<BorrowerPort>, borrow_bytes: u64, peers: usize) -> Self {
        let all = ports.into_iter().map(|port| Borrower { port, kept: Default::default() }).collect();
        Self {
            all,
            turns: [0; Lane::COUNT],
            held_bytes: [0; Lane::COUNT],
            bounds: bounds(borrow_bytes),
            news: 0,
            up_since: vec![0; peers],
            served: LaneCounts::default(),
            told: LaneCounts::default(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn gpu(&self, b: usize) -> GpuIdx {
        self.all[b].port.gpu
    }

    pub(super) fn of_gpu(&self, gpu: GpuIdx) -> Option<usize> {
        self.all.iter().position(|b| b.port.gpu == gpu)
    }

    pub(super) fn counters(&self) -> RingCounters {
        RingCounters { served: self.served, told: self.told, ..RingCounters::default() }
    }

    pub(super) fn are_quiet(&self) -> bool {
        self.all.iter().all(|b| b.kept.iter().all(VecDeque::is_empty) && b.port.is_empty())
    }

    // Work.

    pub(super) fn turn(&self, lane: Lane) -> usize {
        self.turns[lane as usize]
    }

    pub(super) fn set_turn(&mut self, lane: Lane, b: usize) {
        self.turns[lane as usize] = b;
    }

    pub(super) fn peek(&mut self, b: usize, lane: Lane, ahead: u64) -> Result<Option<Handover>, BadHandover> {
        self.all[b].port.peek(lane, ahead)
    }

    /// Goes past the next item of a lane.
    pub(super) fn take(&mut self, b: usize, lane: Lane) {
        self.all[b].port.take(lane);
        self.served[lane as usize].count(1, false);
    }

    pub(super) fn has_to_wait(&mut self, lane: Lane) {
        self.served[lane as usize].count(0, true);
    }

    /// Whether the device may be given that much more; a single message always goes, however long.
    pub(super) fn has_share(&self, lane: Lane, bytes: u64) -> bool {
        let held = self.held_bytes[lane as usize];
        held == 0 || held.saturating_add(bytes) <= self.bounds[lane as usize]
    }

    pub(super) fn hold(&mut self, lane: Lane, bytes: u64) {
        self.held_bytes[lane as usize] += bytes;
    }

    pub(super) fn release(&mut self, lane: Lane, bytes: u64) {
        self.held_bytes[lane as usize] -= bytes;
    }

    /// The latest news is that a path is open.
    pub(super) fn path_is_up(&mut self, peer: NicId) {
        self.up_since[peer.idx()] = self.news;
    }

    /// Whether a borrower that had heard that much news meant the path as it is open now.
    pub(super) fn knows_path(&self, peer: NicId, heard: u64) -> bool {
        self.up_since.get(peer.idx()).is_some_and(|&since| heard >= since)
    }

    // Events.

    /// Hands an event to a borrower, behind those of its class that are kept for it.
    pub(super) fn give(&mut self, b: usize, class: Class, event: NicEvent) {
        let Borrower { port, kept } = &mut self.all[b];
        let kept = &mut kept[class as usize];
        let goes = kept.is_empty() && port.give(class, &event).is_ok();
        if !goes {
            kept.push_back(event);
        }
        self.told[Lane::from(class) as usize].count(usize::from(goes), !goes);
    }

    /// Tells every borrower in the order of every class.
    pub(super) fn tell_all(&mut self, news: NicEvent) {
        self.news += 1;
        for b in 0..self.all.len() {
            Class::ALL.iter().for_each(|&class| self.give(b, class, news));
        }
    }

    pub(super) fn give_kept(&mut self) {
        for Borrower { port, kept } in &mut self.all {
            for (class, kept) in Class::ALL.into_iter().zip(kept) {
                while kept.front().is_some_and(|event| port.give(class, event).is_ok()) {
                    kept.pop_front();
                    self.told[Lane::from(class) as usize].count(1, false);
                }
            }
        }
    }
}
