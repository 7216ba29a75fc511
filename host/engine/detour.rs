//! The sender's way round failed paths: settling doubts, sending again, and choosing NICs when the prescribed ones do not
//! work.

use super::recovery::{Doubt, Moving};
use super::route::NicState;
use super::sender::{Message, Sender, instead_of, line_slot, transfer_order};
use super::{Answer, Arm, EngineConfig, EngineError, Lent, Move, NicView, WaitsFor};
use crate::doorbell::Class;
use crate::hw::WorkError;
use crate::topo::{NicId, NicIdx, Rank, ServerId};

use super::call::{Call, Run};

/// A message that failed this often will not get through.
const MAX_ATTEMPTS: u32 = 8;
/// New messages keep this near to unsettled ones: sequence numbers travel as 12 bits.
const MAX_AHEAD: u64 = 1536;

impl Sender {
    /// Whether every message of a call may go as it is prescribed; where the engine chooses, all paths must be open.
    pub(super) fn is_settled(&self, config: &EngineConfig, call: &Call) -> bool {
        self.paths.is_untroubled() || call.sends.iter().all(|run| self.may_go(config, call.class, run))
    }

    fn may_go(&self, config: &EngineConfig, class: Class, run: &Run) -> bool {
        let nics = config.cluster.server(config.cluster.server_of(run.dst)).nics.len() as u32;
        let open = |egress: NicIdx, ingress: NicIdx| {
            let answered = self.credits[self.credit_at(class, run.dst, ingress)].answer.fence;
            self.paths.is_usable(egress, peer_of(config, run.dst, ingress), answered)
        };
        let egress_nics = || all_or(run.egress, config.nics() as u32);
        egress_nics().all(|egress| all_or(run.ingress, nics).all(|ingress| open(egress, ingress)))
    }

    /// A post did not complete.
    pub(super) fn failed(
        &mut self,
        config: &EngineConfig,
        mut message: Message,
        source: WorkError,
    ) -> Result<(), EngineError> {
        message.attempts += 1;
        if message.attempts > MAX_ATTEMPTS {
            let (nic, dst, dst_nic) = (message.egress, message.dst, message.ingress);
            return Err(EngineError::WriteFailed { nic, dst, dst_nic, seq: message.seq, source });
        }
        message.slot_is_sound &= source != WorkError::Quarantined;
        if source.is_in_doubt() {
            self.recovery.doubts.push(Doubt { message, fence: None });
        } else {
            self.not_come(config, message);
        }
        Ok(())
    }

    /// Its credit was not used, so it may be used again.
    fn not_come(&mut self, config: &EngineConfig, message: Message) {
        let line_slot = line_slot(config, &message.lent);
        let at = self.credit_at(message.class, message.dst, message.ingress);
        if self.credits[at].put(message.lent, line_slot) {
            self.tell_returned(message.class, message.dst, message.ingress);
        }
        self.recovery.again.push(Message { come: None, ..message });
    }

    /// Both ends of a path are closed; all completions on it have been told.
    pub(super) fn on_peer_fenced(&mut self, config: &EngineConfig, egress: NicIdx, peer: NicId, fence: u32) {
        for doubt in self.recovery.doubts.iter_mut().filter(|d| d.fence.is_none()) {
            let m = &doubt.message;
            if m.egress == egress && peer_of(config, m.dst, m.ingress) == peer {
                doubt.fence = Some(fence);
            }
        }
        self.settle(config);
    }

    /// A receiver said what has come.
    pub(super) fn on_answer(
        &mut self,
        config: &EngineConfig,
        class: Class,
        from: Rank,
        ingress: NicIdx,
        answer: Answer,
    ) {
        let at = self.credit_at(class, from, ingress);
        let credits = &mut self.credits[at];
        let held = credits.held();
        if !credits.learn(answer) {
            return;
        }
        let mut called_in = credits.held() < held;
        // Whose credit was called in is settled now: when the slot is lent again, the answer will be another.
        let doubted = self.recovery.doubts.iter_mut().map(|d| &mut d.message);
        for m in doubted.chain(self.on_the_way.iter_mut()) {
            let void = m.lent.position < answer.called_in_before;
            if void && (m.class, m.dst, m.ingress) == (class, from, ingress) {
                m.come = credits.has_come(m, line_slot(config, &m.lent), Some(0));
                called_in = true;
            }
        }
        // What was not sent yet has not come, and must not: its slot is another message's by then.
        let armed = self.queues.iter_mut().flat_map(|queue| &mut queue.armed);
        for m in armed.chain(self.recovery.moving.iter_mut().map(|moving| &mut moving.message)) {
            let void = m.lent.position < answer.called_in_before;
            if void && (m.class, m.dst, m.ingress) == (class, from, ingress) {
                (m.come, called_in) = (Some(false), true);
            }
        }
        self.alike[config.cluster.server_of(from).idx()] |= called_in;
        self.settle(config);
    }

    /// Receivers may have come to the call, and found NICs that they cannot use, before this rank.
    pub(super) fn look_for_stand_ins(&mut self, config: &EngineConfig) {
        for server in (0..config.cluster.server_count()).map(ServerId) {
            let nics = (0..config.cluster.server(server).nics.len() as u32).map(NicIdx);
            let mut lines = nics.flat_map(|nic| config.cluster.ranks_of(server).map(move |dst| (dst, nic)));
            let stands_in =
                |(dst, nic)| self.credits[self.credit_at(Class::Plan, dst, nic)].stand_for_others();
            self.alike[server.idx()] = lines.any(stands_in);
        }
    }

    /// Takes a credit of a line for a message. While paths fail, and the receiver's server does not count planned bytes by NIC,
    /// any will do: all send slots may hold messages that go again, and all credits be for others, which have no slot to be
    /// sent from. In the end each has had one.
    pub(super) fn spend(
        &mut self,
        config: &EngineConfig,
        (class, dst, ingress): (Class, Rank, NicIdx),
        (transfer, instead_of): (Option<u32>, Option<NicIdx>),
    ) -> Lent {
        let at = self.credit_at(class, dst, ingress);
        let lent = if self.may_swap(config, class, dst) {
            self.credits[at].take_any(transfer, instead_of)
        } else {
            self.credits[at].take(transfer, instead_of)
        };
        lent.unwrap_or_default()
    }

    fn may_swap(&self, config: &EngineConfig, class: Class, dst: Rank) -> bool {
        class == Class::Plan && self.detours && self.alike[config.cluster.server_of(dst).idx()]
    }

    /// Settles every doubt that can be.
    pub(super) fn settle(&mut self, config: &EngineConfig) {
        let mut i = 0;
        while i < self.recovery.doubts.len() {
            let Doubt { message: m, fence } = self.recovery.doubts[i];
            let credits = &self.credits[self.credit_at(m.class, m.dst, m.ingress)];
            match credits.has_come(&m, line_slot(config, &m.lent), fence) {
                None => i += 1,
                Some(come) => {
                    self.recovery.doubts.swap_remove(i);
                    if come { self.done(&m) } else { self.not_come(config, m) }
                }
            }
        }
    }

    /// Finds ways for messages that go again: posts those that can leave from where they lie, returns the next that must
    /// be copied first.
    pub(super) fn poll_move(&mut self, config: &EngineConfig, views: &[NicView]) -> Option<Move> {
        let mut i = 0;
        while i < self.recovery.again.len() {
            let m = self.recovery.again[i];
            let way = self.way_again(config, views, &m);
            let Some((egress, ingress)) = way.filter(|&(_, nic)| self.may_spend(config, &m, nic)) else {
                i += 1;
                continue;
            };
            self.recovery.again.remove(i);
            let serves = instead_of(m.class, Some(prescribed(&m)), ingress);
            let lent = self.spend(config, (m.class, m.dst, ingress), (m.lent.transfer, serves));
            let message = Message { ingress, lent, ..m };
            if egress == m.egress {
                self.post(config, message);
            } else if let Some(moved) = self.begin_move(message, egress) {
                return Some(moved);
            }
        }
        None
    }

    fn begin_move(&mut self, m: Message, egress: NicIdx) -> Option<Move> {
        let at = self.slot_at(m.class, egress);
        let send_slot = self.free_slots[at].pop()?;
        let bytes = u64::from(m.bytes);
        self.own_bytes[m.egress.idx()] -= bytes;
        self.own_bytes[egress.idx()] += bytes;
        let (from, to) = ((m.egress, m.send_slot), (egress, send_slot));
        let message = Message { egress, send_slot, slot_is_sound: true, ..m };
        let ticket = self.recovery.moving.insert(Moving { message, from, from_is_sound: m.slot_is_sound });
        Some(Move { ticket, class: m.class, from, to, bytes: m.bytes })
    }

    /// The bytes of a move lie in their new slot.
    pub(super) fn on_moved(&mut self, config: &EngineConfig, ticket: u64) {
        if let Some(Moving { message, from, from_is_sound }) = self.recovery.moving.remove(ticket) {
            self.free_slot(message.class, from, from_is_sound);
            self.post(config, message);
        }
    }

    /// A pair of NICs for a message that goes again: from where it lies if that works.
    fn way_again(&self, config: &EngineConfig, views: &[NicView], m: &Message) -> Option<(NicIdx, NicIdx)> {
        let preferred = prescribed(m);
        let here = self.detour_ingress(config, m.class, m.dst, m.lent.transfer, m.egress, preferred);
        if let Some(ingress) = here.filter(|_| m.slot_is_sound) {
            return Some((m.egress, ingress));
        }
        self.egress_nics(config, m.class, views, None).find_map(|egress| {
            let ingress = self.detour_ingress(config, m.class, m.dst, m.lent.transfer, egress, preferred)?;
            Some((egress, ingress))
        })
    }

    /// NICs with a free send slot by which a message may leave, the preferred first.
    pub(super) fn egress_nics<'a>(
        &'a self,
        config: &EngineConfig,
        class: Class,
        views: &'a [NicView],
        prescribed: Option<NicIdx>,
    ) -> impl Iterator<Item = NicIdx> + 'a {
        let (direct, limits) = (config.direct_nic, config.limits);
        let message_bytes = u64::from(self.message_bytes);
        let may_lend = move |k: usize, nic: NicIdx| {
            let load = views[k].egress;
            let lent = load.state == NicState::Idle
                && load.borrowed_bytes.saturating_add(message_bytes) <= limits.borrow_bytes;
            // A plan has leased its NICs for all of its messages.
            class == Class::Plan || Some(nic) == direct || Some(nic) == prescribed || lent
        };
        let usable = move |&nic: &NicIdx| {
            let k = nic.idx();
            let free = !self.free_slots[self.slot_at(class, nic)].is_empty();
            free && views[k].egress.state != NicState::Down && may_lend(k, nic)
        };
        let first = prescribed.or(direct);
        let others = (0..views.len() as u32).map(NicIdx).filter(move |&nic| Some(nic) != first);
        first.into_iter().chain(others).filter(usable)
    }

    /// An ingress NIC of `dst` with a credit that can be reached from `egress`: the preferred one (where the class counts
    /// by NIC: the prescribed one), else that with most credits.
    pub(super) fn detour_ingress(
        &self,
        config: &EngineConfig,
        class: Class,
        dst: Rank,
        transfer: Option<u32>,
        egress: NicIdx,
        preferred: NicIdx,
    ) -> Option<NicIdx> {
        let usable = |&nic: &NicIdx| {
            let credits = &self.credits[self.credit_at(class, dst, nic)];
            let answered = credits.answer.fence;
            let serves = credits.serves(transfer, instead_of(class, Some(preferred), nic));
            (serves || credits.held() > 0 && self.may_swap(config, class, dst))
                && self.paths.is_usable(egress, peer_of(config, dst, nic), answered)
        };
        let nics = config.cluster.server(config.cluster.server_of(dst)).nics.len() as u32;
        let held = |nic: &NicIdx| self.credits[self.credit_at(class, dst, *nic)].held();
        let others = || (0..nics).map(NicIdx).filter(usable).max_by_key(held);
        Some(preferred).filter(usable).or_else(others)
    }

    /// Arms the next message while paths fail: what is prescribed is only preferred.
    pub(super) fn poll_detour(
        &mut self,
        config: &EngineConfig,
        class: Class,
        views: &[NicView],
    ) -> Option<Arm> {
        for _ in 0..self.groups.len() {
            let group = self.next_group;
            self.next_group = if self.is_prescribed(group) { group + 1 } else { 0 };
            for at in 0..self.groups[group].len() {
                let piece = &self.groups[group][at];
                let run = piece.run;
                if !self.is_near(class, &run, piece.next_part) {
                    continue;
                }
                let own = run.egress.or(config.direct_nic).unwrap_or_default();
                let Some(queue) = self.queue_for(config, &run, own) else { continue };
                if let Some((egress, ingress)) = self.detour(config, class, views, &run) {
                    return Some(self.arm(config, class, (group, at), queue, egress, ingress));
                }
            }
        }
        None
    }

    fn detour(
        &self,
        config: &EngineConfig,
        class: Class,
        views: &[NicView],
        run: &Run,
    ) -> Option<(NicIdx, NicIdx)> {
        let preferred = run.ingress.or(config.cluster.direct_nic(run.dst))?;
        self.egress_nics(config, class, views, run.egress).find_map(|egress| {
            let ingress = self.detour_ingress(config, class, run.dst, run.transfer, egress, preferred)?;
            Some((egress, ingress))
        })
    }

    /// Whether a message's sequence is near enough to those of unsettled ones to be told from theirs.
    fn is_near(&self, class: Class, run: &Run, part: u64) -> bool {
        let seq = self.seq_of(class, run, part);
        let same = |m: &&Message| m.dst == run.dst && m.class == class;
        self.recovery.unsettled().filter(same).all(|m| seq.abs_diff(m.seq) <= MAX_AHEAD)
    }

    /// What recovering waits for.
    pub(super) fn recovery_waits_for(&self) -> Option<WaitsFor> {
        let doubt = self.recovery.doubts.first().map(|d| match d.fence {
            None => {
                let (egress, dst, dst_nic) = (d.message.egress, d.message.dst, d.message.ingress);
                WaitsFor::Fence { egress, dst, dst_nic }
            }
            Some(fence) => WaitsFor::Answer { dst: d.message.dst, dst_nic: d.message.ingress, fence },
        });
        let again = self.recovery.again.iter().min_by_key(|m| transfer_order(m.lent.transfer));
        doubt.or(again.map(|m| WaitsFor::Detour { dst: m.dst, seq: m.seq, lies_at: m.egress }))
    }
}

/// The NIC by which a message was to come in.
fn prescribed(m: &Message) -> NicIdx {
    m.lent.instead_of.unwrap_or(m.ingress)
}

/// The one that is prescribed, or all of a server.
fn all_or(prescribed: Option<NicIdx>, nics: u32) -> impl Iterator<Item = NicIdx> {
    let all = 0..if prescribed.is_some() { 0 } else { nics };
    prescribed.into_iter().chain(all.map(NicIdx))
}

/// The number in the job of a destination's NIC.
pub(super) fn peer_of(config: &EngineConfig, dst: Rank, ingress: NicIdx) -> NicId {
    config.cluster.nic_id(config.cluster.server_of(dst), ingress)
}
