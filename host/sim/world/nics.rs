//! NICs: each path sends its messages in order, at most [`WINDOW`] at a time, so that paths share the NIC.

use std::collections::VecDeque;

use super::{Event, Moving, SimError, World};
use crate::doorbell::Class;
use crate::engine::Post;
use crate::engine::call::Direction;
use crate::sim::machine::nic_link;
use crate::topo::{NicId, Rank, ServerId};

/// Messages of one path that are on the way at once.
pub const WINDOW: usize = 2;

/// What waits for a pair of NICs.
#[derive(Default)]
pub(super) struct Path {
    queue: VecDeque<(Rank, Post)>,
    on_the_way: usize,
}

impl World {
    /// The pair of NICs that a message takes.
    fn way(&self, rank: Rank, post: &Post) -> (NicId, NicId) {
        let from = self.cluster.nic_id(self.cluster.server_of(rank), post.nic);
        (from, self.cluster.nic_id(self.cluster.server_of(post.dst), post.dst_nic))
    }

    pub(super) fn enqueue(&mut self, rank: Rank, post: Post) {
        let way = self.way(rank, &post);
        self.paths.entry(way).or_default().queue.push_back((rank, post));
        self.send_next(way);
    }

    fn send_next(&mut self, way: (NicId, NicId)) {
        let Some(path) = self.paths.get_mut(&way) else { return };
        while path.on_the_way < WINDOW {
            let Some((rank, post)) = path.queue.pop_front() else { return };
            path.on_the_way += 1;
            let mut links = vec![nic_link(&self.cluster, way.0, false), nic_link(&self.cluster, way.1, true)];
            links.extend(self.config.relay.nic_crosses(&self.cluster, rank, post.nic, false));
            links.extend(self.config.relay.nic_crosses(&self.cluster, post.dst, post.dst_nic, true));
            let flow = self.fluid.start(&links, post.bytes.into(), self.now);
            self.moving.insert(flow, Moving::Sending(rank, post));
        }
    }

    pub(super) fn sent(&mut self, rank: Rank, post: Post) {
        let way = self.way(rank, &post);
        if let Some(path) = self.paths.get_mut(&way) {
            path.on_the_way -= 1;
        }
        self.nic_tx_bytes[way.0.idx()] += u64::from(post.bytes);
        let peer = self.cluster.server_of(post.dst);
        self.tell_turn(way.0, Direction::Egress, &post, peer);
        self.schedule(self.config.delays.completion_ns, Event::Completed(rank, post.nic, post.cookie));
        self.schedule(self.config.delays.arrival_ns, Event::Arrived(post.dst, post, rank));
        self.send_next(way);
    }

    pub(super) fn arrived(&mut self, rank: Rank, post: Post, src: Rank) -> Result<(), SimError> {
        let nic = self.cluster.nic_id(self.cluster.server_of(rank), post.dst_nic);
        self.tell_turn(nic, Direction::Ingress, &post, self.cluster.server_of(src));
        self.lines[rank.idx()][post.dst_nic.idx()].last_ns[1] = self.now;
        self.engine(rank, |e, now| e.on_arrival(post.dst_nic, post.imm, post.bytes, now))
    }

    fn tell_turn(&mut self, nic: NicId, direction: Direction, post: &Post, peer: ServerId) {
        if post.class == Class::Plan {
            let owner = self.cluster.owner_of(nic);
            let idx = self.cluster.nic_idx(nic);
            // Others wait for what it says of its NIC, even when it has nothing to do itself.
            self.touched[owner.idx()] = true;
            self.engines[owner.idx()].on_nic_moved(idx, direction, peer, post.bytes.into());
        }
    }
}
