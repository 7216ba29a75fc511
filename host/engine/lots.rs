//! Relay memory that comes and goes: lots that this rank may use from the start, lots lent to it later, and how it gives one
//! back.
//!
//! A lot that is asked back is given up in two phases. First nothing new uses it: no message is armed in its send slots, no
//! credit is granted for its receive slots, and senders are asked to return the credits that they hold and have not spent
//! ([`CreditWrite::Recall`]; they answer with [`Returned`]). What is on its way arrives as always. When every
//! slot at both ends is free the lot is *returned*, and whoever owns the memory may unmap it. Lots of the plan class are given up
//! when the call is over: a plan has promised its bytes to their NICs.
//!
//! A call needs no lot that is not permanent, unless both NICs of those fail in it. Messages leave by other NICs, and a receiver grants credits on other NICs in
//! the place of one that it has no memory beside, as when that one cannot be reached.

use super::call::Call;
use super::receiver::Receiver;
use super::sender::{self, Sender};
use super::slots::Lot;
use super::{CreditWrite, Engine, EngineConfig, Returned, stream};
use crate::doorbell::Class;
use crate::hw::RemoteKey;
use crate::topo::{Cluster, GpuIdx, NicIdx, Rank, Server, ServerId};

/// Which lots a rank has from the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LotsAtStart {
    /// All: nothing is lent or taken back.
    #[default]
    All,
    /// Those that are never taken back; others are lent when a call wants them.
    Permanent,
}

/// Whether a lot is there from the start and never taken back: beside the NIC that is its rank's own or direct one, beside one
/// more in case that one fails, and where users' kernels put, since they may run at any time.
pub fn is_permanent(cluster: &Cluster, server: ServerId, lot: Lot) -> bool {
    let spec = cluster.server(server);
    let beside = spec.nics[lot.nic.idx()].relay_gpu == lot.gpu;
    let direct = spec.direct_nic(lot.gpu);
    beside
        || direct == Some(lot.nic)
        || spare(spec, direct) == Some(lot.nic)
        || lot.class == Class::LowLatency
}

/// The next NIC that is up behind a rank's direct one.
fn spare(spec: &Server, direct: Option<NicIdx>) -> Option<NicIdx> {
    let (nics, direct) = (spec.nics.len(), direct?.idx());
    let others = (1..nics).map(|n| (direct + n) % nics);
    others.filter(|&k| spec.nics[k].mbit_per_s > 0).map(|k| NicIdx(k as u32)).next()
}

/// A rank's lots: by class, then by NIC.
pub(super) fn all(nics: usize) -> impl Iterator<Item = (Class, NicIdx)> {
    Class::ALL.into_iter().flat_map(move |class| (0..nics as u32).map(move |k| (class, NicIdx(k))))
}

/// What becomes of a lot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    Absent,
    Lent,
    /// Asked back, and in use by a plan.
    Due,
    /// Asked back: nothing new uses it.
    Recalled,
}

pub(super) fn at_start(config: &EngineConfig) -> Vec<Phase> {
    let phase = |there| if there { Phase::Lent } else { Phase::Absent };
    all(config.nics()).map(|(class, nic)| phase(config.starts_with(class, nic))).collect()
}

impl EngineConfig {
    pub(super) fn starts_with(&self, class: Class, nic: NicIdx) -> bool {
        let lot = Lot { nic, gpu: self.cluster.gpu_of(self.rank), class };
        self.lots == LotsAtStart::All || is_permanent(&self.cluster, self.server(), lot)
    }
}

/// Lots that a call would like to have besides those that are permanent.
pub fn wanted(call: &Call, cluster: &Cluster, rank: Rank) -> Vec<(NicIdx, Class)> {
    let server = cluster.server_of(rank);
    let nics = &cluster.server(server).nics;
    let mut prescribed: Vec<Option<NicIdx>> = call.sends.iter().map(|run| run.egress).collect();
    prescribed.extend(call.incoming.iter().map(|piece| piece.ingress));
    let any = prescribed.contains(&None);
    let gpu: GpuIdx = cluster.gpu_of(rank);
    let is_wanted = |&nic: &NicIdx| {
        let lot = Lot { nic, gpu, class: call.class };
        let up = nics[nic.idx()].mbit_per_s > 0;
        up && (any || prescribed.contains(&Some(nic))) && !is_permanent(cluster, server, lot)
    };
    (0..nics.len() as u32).map(NicIdx).filter(is_wanted).map(|nic| (nic, call.class)).collect()
}

impl Engine {
    fn lot_at(&self, class: Class, nic: NicIdx) -> usize {
        class as usize * self.views.len() + nic.idx()
    }

    /// Memory for this rank's slots of a class beside a NIC is mapped and registered; remote ranks write there by `key`.
    pub fn on_lot_lent(&mut self, nic: NicIdx, class: Class, key: RemoteKey) {
        let at = self.lot_at(class, nic);
        if self.lots[at] == Phase::Absent {
            self.lots[at] = Phase::Lent;
            self.sender.on_lot_lent(&self.config, class, nic);
            self.receiver.on_lot_lent(&self.config, class, nic, key);
        }
    }

    /// The owner of a lot asks for it back. [`Engine::poll_returned_lot`] tells when nothing uses it any more.
    pub fn recall_lot(&mut self, nic: NicIdx, class: Class) {
        let at = self.lot_at(class, nic);
        let lot = Lot { nic, gpu: self.config.cluster.gpu_of(self.config.rank), class };
        if self.lots[at] == Phase::Lent && !is_permanent(&self.config.cluster, self.config.server(), lot) {
            self.lots[at] = Phase::Due;
            if class != Class::Plan || !self.is_busy() {
                self.give_up(class, nic);
            }
        }
    }

    /// Phase one.
    fn give_up(&mut self, class: Class, nic: NicIdx) {
        let at = self.lot_at(class, nic);
        self.lots[at] = Phase::Recalled;
        self.sender.give_up_lot(class, nic);
        self.receiver.give_up_lot(&self.config, class, nic);
        if class == self.class && self.is_busy() {
            self.set_detours(true);
        }
    }

    /// Plans are over: what is due is given up.
    pub(super) fn give_up_due_lots(&mut self) {
        for (class, nic) in all(self.views.len()) {
            if self.lots[self.lot_at(class, nic)] == Phase::Due && !self.is_busy() {
                self.give_up(class, nic);
            }
        }
    }

    /// A lot that was asked back and that nothing uses any more, at either end.
    pub fn poll_returned_lot(&mut self) -> Option<(NicIdx, Class)> {
        if !self.lots.iter().any(|p| matches!(p, Phase::Due | Phase::Recalled)) {
            return None;
        }
        self.give_up_due_lots();
        let free = |&(class, nic): &(Class, NicIdx)| {
            self.lots[self.lot_at(class, nic)] == Phase::Recalled
                && self.sender.lot_is_free(&self.config, class, nic)
                && self.receiver.lot_is_free(&self.config, class, nic)
        };
        let (class, nic) = all(self.views.len()).find(free)?;
        let at = self.lot_at(class, nic);
        self.lots[at] = Phase::Absent;
        Some((nic, class))
    }

    /// Lines of lots that are asked back on which senders may still hold credits: where to look for what they return.
    pub fn recalled_lines(&self) -> impl Iterator<Item = (Class, Rank, NicIdx)> + '_ {
        self.receiver.recalled_lines()
    }

    /// A sender returns credits unused.
    pub fn on_returned(&mut self, class: Class, from: Rank, nic: NicIdx, returned: Returned) {
        self.receiver.on_returned(&self.config, class, from, nic, returned);
    }

    /// A receiver asks for credits back.
    pub fn on_recall(&mut self, class: Class, from: Rank, ingress: NicIdx, before: u64) {
        self.sender.on_recall(&self.config, class, from, ingress, before);
    }

    pub(super) fn describe_lots(&self) -> String {
        let recalled = all(self.views.len()).filter(|&(class, nic)| {
            matches!(self.lots[self.lot_at(class, nic)], Phase::Due | Phase::Recalled)
        });
        let recalled: Vec<_> = recalled.map(|(class, nic)| format!("{class:?} beside {nic}")).collect();
        if recalled.is_empty() {
            String::new()
        } else {
            format!("; relay memory asked back: {}", recalled.join(", "))
        }
    }
}

impl Sender {
    fn on_lot_lent(&mut self, config: &EngineConfig, class: Class, nic: NicIdx) {
        let at = self.slot_at(class, nic);
        self.free_slots[at] = sender::send_slots(config, class);
        self.parked[at] = None;
    }

    fn give_up_lot(&mut self, class: Class, nic: NicIdx) {
        let at = self.slot_at(class, nic);
        self.parked[at] = Some(std::mem::take(&mut self.free_slots[at]).len() as u32);
    }

    fn lot_is_free(&self, config: &EngineConfig, class: Class, nic: NicIdx) -> bool {
        self.parked[self.slot_at(class, nic)] == Some(config.slots.send_slots(class))
    }

    /// Whether this rank has its slots beside every NIC that is prescribed for a call.
    pub(super) fn has_lots_for(&self, config: &EngineConfig, call: &Call) -> bool {
        let has = |nic: NicIdx| self.parked[self.slot_at(call.class, nic)].is_none();
        call.sends.iter().all(|run| run.egress.is_none_or(|nic| !config.is_up(nic) || has(nic)))
    }

    fn on_recall(&mut self, config: &EngineConfig, class: Class, from: Rank, ingress: NicIdx, before: u64) {
        let at = self.credit_at(class, from, ingress);
        if self.credits[at].recall(before, |lent| sender::line_slot(config, lent)) {
            self.tell_returned(class, from, ingress);
        }
    }

    pub(super) fn tell_returned(&mut self, class: Class, to: Rank, nic: NicIdx) {
        let returned = self.credits[self.credit_at(class, to, nic)].returned;
        self.words.push_back(CreditWrite::Returned { to, class, nic, returned });
    }

    /// Tells the receivers of a server once more what came back: words may have been lost.
    pub(super) fn tell_again(&mut self, config: &EngineConfig, server: ServerId) {
        let nics = config.cluster.server(server).nics.len();
        for to in config.cluster.ranks_of(server) {
            for (class, nic) in all(nics) {
                if self.credits[self.credit_at(class, to, nic)].returned.slots != 0 {
                    self.tell_returned(class, to, nic);
                }
            }
        }
    }
}

impl Receiver {
    fn on_lot_lent(&mut self, config: &EngineConfig, class: Class, nic: NicIdx, key: RemoteKey) {
        let at = self.lot_at(class, nic);
        self.has_lot[at] = true;
        for sender in self.remote_ranks(config) {
            let at = self.line_at(class, sender, nic);
            self.lines[at].to_tell = Some(key);
            self.lines[at].memory = Some(key);
            if stream::credits_stand(config, class) && config.is_up(nic) {
                self.grant_all(config, at);
            }
        }
    }

    fn give_up_lot(&mut self, config: &EngineConfig, class: Class, nic: NicIdx) {
        let at = self.lot_at(class, nic);
        self.has_lot[at] = false;
        for to in self.remote_ranks(config) {
            let at = self.line_at(class, to, nic);
            let line = &mut self.lines[at];
            if !line.out.is_empty() {
                line.recalled_before = line.granted;
                self.recalled.push(at);
                self.credits.push_back(CreditWrite::Recall { to, class, nic, before: line.granted });
            }
        }
        // Senders of this call hear that the NIC is not for them.
        self.told[nic.idx()] = None;
    }

    fn recalled_lines(&self) -> impl Iterator<Item = (Class, Rank, NicIdx)> + '_ {
        self.recalled.iter().map(|&at| self.line_of(at))
    }

    fn on_returned(
        &mut self,
        config: &EngineConfig,
        class: Class,
        from: Rank,
        nic: NicIdx,
        returned: Returned,
    ) {
        let at = self.line_at(class, from, nic);
        let line = &mut self.lines[at];
        if returned.before == line.recalled_before {
            let recv_slots = config.slots.config().recv_slots;
            let is_back = |slot: u32| returned.slots >> (slot % recv_slots) & 1 == 1;
            let back = line.out.extract_if(.., |lent| lent.position < returned.before && is_back(lent.slot));
            let back: Vec<u32> = back.map(|lent| lent.slot).collect();
            for slot in back {
                self.free(config, class, nic, slot);
            }
        }
        if self.lines[at].out.iter().all(|lent| lent.position >= self.lines[at].recalled_before) {
            self.recalled.retain(|&recalled| recalled != at);
        }
    }

    fn lot_is_free(&self, config: &EngineConfig, class: Class, nic: NicIdx) -> bool {
        let slots = config.slots.config().recv_slots as usize;
        let mut lines = self.remote_ranks(config).map(|sender| &self.lines[self.line_at(class, sender, nic)]);
        lines.all(|line| line.free.len() == slots)
    }
}
