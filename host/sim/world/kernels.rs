//! Kernels: blocks that fill slots, each those of its own queues in their order, and as many that drain, whichever comes.

use std::collections::VecDeque;

use super::{Moving, SimError, World};
use crate::doorbell::Doorbell;
use crate::engine::{Arm, Publish};
use crate::sim::relay::SlotCopy;
use crate::topo::Rank;

/// A GPU's blocks.
pub(super) struct Blocks {
    filling: Vec<bool>,
    fill: Vec<VecDeque<Arm>>,
    drain: VecDeque<Publish>,
    draining: u32,
}

impl Blocks {
    pub(super) fn new(blocks: u32) -> Self {
        let n = blocks as usize;
        Self { filling: vec![false; n], fill: vec![VecDeque::new(); n], drain: VecDeque::new(), draining: 0 }
    }

    fn of(&self, queue: u32) -> usize {
        queue as usize % self.fill.len()
    }
}

impl World {
    /// A block sees the slot that was armed.
    pub(super) fn armed(&mut self, rank: Rank, arm: Arm) {
        let block = self.blocks[rank.idx()].of(arm.queue);
        self.blocks[rank.idx()].fill[block].push_back(arm);
        self.fill_next(rank, block);
    }

    /// Blocks may see a message.
    pub(super) fn published(&mut self, rank: Rank, arrival: Publish) {
        self.blocks[rank.idx()].drain.push_back(arrival);
        self.drain_next(rank);
    }

    pub(super) fn filled(&mut self, rank: Rank, arm: Arm) -> Result<(), SimError> {
        let Arm { class, queue, idx, bytes, .. } = arm;
        let block = self.blocks[rank.idx()].of(queue);
        self.blocks[rank.idx()].filling[block] = false;
        let doorbell = Doorbell::Send { class, queue, idx, bytes: bytes.into(), signal: None };
        self.engine(rank, |e, now| e.on_doorbell(doorbell, now))?;
        self.fill_next(rank, block);
        Ok(())
    }

    pub(super) fn drained(&mut self, rank: Rank, p: Publish) -> Result<(), SimError> {
        self.blocks[rank.idx()].draining -= 1;
        let doorbell = Doorbell::Drained { class: p.class, nic: p.nic, slot: p.slot };
        self.engine(rank, |e, now| e.on_doorbell(doorbell, now))?;
        self.count_drained(rank);
        self.drain_next(rank);
        Ok(())
    }

    fn fill_next(&mut self, rank: Rank, block: usize) {
        let blocks = &mut self.blocks[rank.idx()];
        if blocks.filling[block] {
            return;
        }
        let Some(arm) = blocks.fill[block].pop_front() else { return };
        blocks.filling[block] = true;
        self.copy(Moving::Filling(rank, arm, 0));
    }

    fn drain_next(&mut self, rank: Rank) {
        let blocks = &mut self.blocks[rank.idx()];
        if blocks.draining >= self.config.blocks {
            return;
        }
        let Some(arrival) = blocks.drain.pop_front() else { return };
        blocks.draining += 1;
        self.copy(Moving::Draining(rank, arrival, 0));
    }

    /// Begins a stage of a copy; `false`: there is none any more.
    pub(super) fn copy(&mut self, moving: Moving) -> bool {
        let (rank, nic, bytes, fills, nth) = match moving {
            Moving::Filling(rank, arm, nth) => (rank, arm.nic, arm.bytes, true, nth),
            Moving::Draining(rank, arrival, nth) => (rank, arrival.nic, arrival.bytes, false, nth),
            Moving::Sending(..) => return false,
        };
        let (server, gpu) = (self.cluster.server_of(rank), self.cluster.gpu_of(rank));
        let copy = SlotCopy { server, gpu, nic, fills, bytes: bytes.into() };
        let Some(stage) = self.config.relay.stage(&self.cluster, copy, nth) else { return false };
        let flow = self.fluid.start(stage.links(), stage.bytes, self.now);
        self.moving.insert(flow, moving);
        true
    }
}
