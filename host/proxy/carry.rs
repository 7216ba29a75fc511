//! What the engine has decided, carried to NICs, copy engines and kernels.

use super::ProxyError;
use super::ports::Port;
use super::rounds::Rounds;
use crate::credit;
use crate::doorbell::{Class, Doorbell, Signal};
use crate::engine::slots::Lot;
use crate::engine::{Control, EngineError, Post};
use crate::hw::{Lane, LocalKey, LocalSpan, PathId, RemoteSpan, Work, WorkOp};
use crate::segment::SegmentLayout;
use crate::signals;
use crate::topo::{NicId, NicIdx};

fn control(peer: NicId, op: WorkOp) -> Work {
    Work { path: PathId(peer.0), lane: Lane::Control, op, cookie: 0 }
}

impl Rounds {
    /// What the engine has decided.
    pub(super) fn carry_out(&mut self) -> Result<bool, ProxyError> {
        let mut any = false;
        let mut told = false;
        any |= self.move_slots()?;
        any |= self.move_cells()?;
        while let Some(arm) = self.p.engine.poll_arm() {
            if self.fixed.armed(self.p.engine.config(), &arm) {
                any = true;
                continue;
            }
            let slot_dev_ptr = self.send_slot_dev_ptr(arm.nic, arm.class, arm.slot);
            let message = u64::from(arm.piece) << 32 | u64::from(arm.part);
            self.p.channel.arm(arm.queue, arm.idx, slot_dev_ptr, message);
            told = true;
        }
        while let Some(post) = self.p.engine.poll_post() {
            let signal = post.signal.map(|signal| self.signal_of(&post, signal));
            let work = self.work_of(&post)?;
            signal.into_iter().chain([work]).for_each(|work| self.backlog[post.nic.idx()].push(work));
        }
        while let Some(control) = self.p.engine.poll_credit() {
            self.queue_control(&control);
        }
        self.queue_path_words();
        any |= self.post_backlog()?;
        any |= self.serve_borrowers()?;
        while let Some(arrival) = self.p.engine.poll_publish() {
            let slot_dev_ptr = self.recv_slot_dev_ptr(arrival.nic, arrival.class, arrival.slot);
            self.p.channel.publish(&arrival, slot_dev_ptr);
            told = true;
        }
        told |= self.hand_on_puts()?;
        if told {
            (self.p.tell_kernels)();
        }
        Ok(any || told)
    }

    fn work_of(&self, post: &Post) -> Result<Work, EngineError> {
        let config = self.p.engine.config();
        let cluster = &config.cluster;
        let offset = config.slots.send_offset(post.class, post.slot);
        let local = LocalSpan { key: LocalKey(0), offset, bytes: post.bytes };
        let server = cluster.server_of(post.dst);
        let peer = cluster.nic_id(server, post.dst_nic);
        let lot = Lot { nic: post.dst_nic, gpu: cluster.gpu_of(post.dst), class: post.class };
        let lent_since = self.p.inbox.memory(post.class, post.dst, post.dst_nic);
        let slots = &self.p.slots[server.idx()];
        let (part, into) = slots.part_of(post.class, slots.recv_offset(post.class, post.dst_slot));
        let key = lent_since.unwrap_or(self.p.lot_keys[peer.idx()][slots.part_number(lot, part)]);
        if key.bytes == 0 {
            return Err(EngineError::NoMemory { from: post.dst, nic: post.dst_nic, slot: post.dst_slot });
        }
        let remote = RemoteSpan { rkey: key.rkey, remote_addr: key.remote_addr + into };
        let op = WorkOp::Write { local, remote, imm: post.imm };
        Ok(Work { path: PathId(peer.0), lane: post.class.into(), op, cookie: post.cookie })
    }

    /// Goes ahead of its message, on its path and in its lane: a resent message brings its signal again.
    fn signal_of(&self, post: &Post, signal: Signal) -> Work {
        let config = self.p.engine.config();
        let peer = config.cluster.nic_id(config.cluster.server_of(post.dst), post.dst_nic);
        let key = self.p.segment_keys[peer.idx()];
        let op = signals::write_op(&config.cluster, config.rank, post.dst, post.seq, signal, key);
        Work { path: PathId(peer.0), lane: post.class.into(), op, cookie: 0 }
    }

    /// Shows kernels what came by puts, and what of theirs has come.
    fn hand_on_puts(&mut self) -> Result<bool, ProxyError> {
        let mut any = false;
        while let Some((dst, messages)) = self.p.engine.poll_flushed() {
            self.p.channel.complete(dst, messages);
            self.fixed.flushed(dst);
            any = true;
        }
        while let Some(arrival) = self.p.engine.poll_stream_arrival() {
            let signal = self.p.signals.of(arrival.src, arrival.seq);
            let (class, nic, slot) = (arrival.class, arrival.nic, arrival.slot);
            if arrival.bytes == 0 {
                self.p.engine.on_doorbell(Doorbell::Drained { class, nic, slot }, self.now())?;
            } else if !self.fixed.arrived(&arrival) {
                let slot_dev_ptr = self.recv_slot_dev_ptr(nic, class, slot);
                self.p.channel.publish_in_order(&arrival, slot_dev_ptr);
            }
            if let Some(signal) = signal {
                let (src, number) = (arrival.src, signal.number);
                self.p.channel.signal(signal).ok_or(EngineError::BadSignal { src, number })?;
            }
            any = true;
        }
        Ok(any)
    }

    /// Messages whose way has failed are copied to where another begins.
    fn move_slots(&mut self) -> Result<bool, ProxyError> {
        let mut any = false;
        while let Some(m) = self.p.engine.poll_move() {
            let [to, from] = [m.to, m.from].map(|(nic, slot)| self.send_slot_dev_ptr(nic, m.class, slot));
            self.moving.push((m.ticket, self.p.mover.start(to, from, m.bytes.into())?));
            any = true;
        }
        let mut i = 0;
        while i < self.moving.len() {
            let (ticket, copy) = self.moving[i];
            if self.p.mover.is_done(copy)? {
                self.moving.swap_remove(i);
                self.p.engine.on_moved(ticket);
                any = true;
            } else {
                i += 1;
            }
        }
        Ok(any)
    }

    fn send_slot_dev_ptr(&self, nic: NicIdx, class: Class, slot: u32) -> u64 {
        self.p.lot_dev_ptrs[nic.idx()][class as usize] + self.p.engine.config().slots.send_offset(class, slot)
    }

    fn recv_slot_dev_ptr(&self, nic: NicIdx, class: Class, slot: u32) -> u64 {
        self.p.lot_dev_ptrs[nic.idx()][class as usize] + self.p.engine.config().slots.recv_offset(class, slot)
    }

    fn queue_control(&mut self, &Control { via, peer, write }: &Control) {
        let config = self.p.engine.config();
        let key = self.p.segment_keys[peer.idx()];
        for op in credit::write_ops(&config.cluster, config.rank, write, key) {
            self.backlog[via.idx()].push(control(peer, op));
        }
    }

    /// What this rank's NICs tell the other ends of their paths: by the herald, and over an open path if there is one.
    fn queue_path_words(&mut self) {
        for k in 0..self.p.ports.len() {
            let Port::Owned(nic) = &mut self.p.ports[k] else { continue };
            let cluster = &self.p.engine.config().cluster;
            let server = cluster.server_of(self.p.engine.config().rank);
            let own = cluster.nic_id(server, NicIdx(k as u32));
            for (peer, word) in nic.take_words() {
                self.p.herald.tell(own, peer, word.encode());
                let there = cluster.server_of_nic(peer);
                let Some((via, entry)) = self.p.engine.path_to(there) else { continue };
                let at = SegmentLayout::new(cluster, there).path_word(cluster.nic_idx(peer), own);
                let op = credit::write_word(self.p.segment_keys[entry.idx()], at, word.encode());
                self.backlog[via.idx()].push(control(entry, op));
            }
        }
    }
}
