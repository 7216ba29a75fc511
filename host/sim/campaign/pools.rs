//! Relay memory that is lent, refused and taken back in virtual time: the pools of all ranks, with the words between the ranks
//! of a server under way. Memory that was taken back is out of bounds for everybody (`wire.rs`).

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use super::fault::FaultRates;
use super::kernel::relay_dev_ptr;
use super::random::Random;
use super::wire::SimWire;
use crate::doorbell::Class;
use crate::engine::call::Call;
use crate::engine::lots::{self, is_permanent};
use crate::engine::relay::{Answer, Borrowings, Lender, Made, Recall};
use crate::engine::slots::{Lot, SlotLayout};
use crate::hw::{LocalKey, Nanos, RemoteKey};
use crate::owner::LotKeys;
use crate::proxy::{LotPtrs, Rounds};
use crate::topo::{Cluster, GpuIdx, NicId, NicIdx, Rank};

/// How long a word takes to another process of the server, and what is done about it there.
const WORD_NS: (Nanos, Nanos) = (1_000, 30_000);
/// How long a call waits for the lots that it wants.
pub(super) const PATIENCE_NS: Nanos = 40_000;
/// Pools hold lending back for milliseconds; calls are shorter here.
const HASTE: u64 = 100;

#[derive(Clone, Copy, Debug)]
enum Word {
    Ask,
    Lent(RemoteKey),
    Refused,
    Recall,
    Returned,
}

#[derive(Clone, Copy, Debug)]
struct Mail {
    from: Rank,
    to: Rank,
    lot: Lot,
    ask: u32,
    word: Word,
}

/// Lots that proxies have handed back.
type Returned = Arc<Mutex<Vec<(NicIdx, Class)>>>;

/// The pools of a job.
pub(super) struct Pools {
    cluster: Arc<Cluster>,
    layouts: Vec<SlotLayout>,
    wire: SimWire,
    random: Random,
    no_memory: u64,
    /// A mutation: memory is given back at once.
    hasty: bool,
    lenders: Vec<Lender>,
    borrowings: Vec<Borrowings>,
    /// By NIC of the job.
    keys: Vec<LotKeys>,
    /// Where lots lie beside their NIC.
    places: HashMap<(NicId, Lot), u64>,
    returned: Vec<Returned>,
    /// By the time it comes, then in order.
    mail: BTreeMap<(Nanos, u64), Mail>,
    sent: u64,
    last_due: HashMap<(Rank, Rank), Nanos>,
}

impl Pools {
    /// Pools in which the permanent lots are there, with caps of any size above them.
    pub(super) fn new(
        cluster: &Arc<Cluster>,
        layouts: &[SlotLayout],
        wire: &SimWire,
        rates: FaultRates,
        mut random: Random,
    ) -> Self {
        let mut pools = Self {
            cluster: Arc::clone(cluster),
            layouts: layouts.to_vec(),
            wire: wire.clone(),
            no_memory: rates.no_memory,
            hasty: false,
            lenders: Vec::new(),
            borrowings: (0..cluster.ranks()).map(|_| Borrowings::default()).collect(),
            keys: (0..cluster.nics())
                .map(|n| LotKeys::new(layout_beside(layouts, cluster, NicId(n))))
                .collect(),
            places: HashMap::new(),
            returned: (0..cluster.ranks()).map(|_| Returned::default()).collect(),
            mail: BTreeMap::new(),
            sent: 0,
            last_due: HashMap::new(),
            random: Random::new(random.draw()),
        };
        let (mut permanent, mut all) = (vec![0; pools.returned.len()], vec![0; pools.returned.len()]);
        for nic in (0..cluster.nics()).map(NicId) {
            let owner = cluster.owner_of(nic).idx();
            for lot in pools.lots_of(nic) {
                all[owner] += pools.bytes(nic, lot);
                if is_permanent(cluster, cluster.server_of_nic(nic), lot) {
                    permanent[owner] += pools.bytes(nic, lot);
                    pools.make(nic, lot);
                }
            }
        }
        let caps = permanent.iter().zip(&all).map(|(&least, &most)| random.between(least, most + most / 2));
        pools.lenders = caps.zip(&permanent).map(|(cap, &least)| Lender::new(cap, least)).collect();
        pools
    }

    /// A mutation for tests of the tests: memory is given back while it may be in use.
    pub(super) fn make_hasty(&mut self) {
        self.hasty = true;
    }

    fn lots_of(&self, nic: NicId) -> Vec<Lot> {
        let (idx, gpus) = (self.cluster.nic_idx(nic), gpus_beside(&self.cluster, nic));
        let of = |gpu| Class::ALL.into_iter().map(move |class| Lot { nic: idx, gpu, class });
        (0..gpus).map(GpuIdx).flat_map(of).filter(|lot| self.bytes(nic, *lot) > 0).collect()
    }

    fn bytes(&self, nic: NicId, lot: Lot) -> u64 {
        self.layout(nic).lot_bytes(lot.class)
    }

    fn layout(&self, nic: NicId) -> SlotLayout {
        layout_beside(&self.layouts, &self.cluster, nic)
    }

    /// Memory for a lot, registered: a simulated NIC takes the place for its key.
    fn make(&mut self, nic: NicId, lot: Lot) {
        let place = self.wire.add_memory(nic, self.bytes(nic, lot));
        self.places.insert((nic, lot), place);
        for (part, at) in self.parts(nic, lot) {
            self.keys[nic.idx()].set(lot, part, Some(LocalKey((place + at) as u32)));
        }
    }

    /// The parts of a lot, and where they begin in it.
    fn parts(&self, nic: NicId, lot: Lot) -> impl Iterator<Item = (u32, u64)> + use<> {
        let (layout, class) = (self.layout(nic), lot.class);
        (0..layout.parts(class)).map(move |part| (part, u64::from(part) * layout.part_bytes(class)))
    }

    fn free(&mut self, nic: NicId, lot: Lot) {
        for (part, _) in self.parts(nic, lot) {
            self.keys[nic.idx()].set(lot, part, None);
        }
        if let Some(place) = self.places.remove(&(nic, lot)) {
            self.wire.take_memory(nic, place, self.bytes(nic, lot));
        }
    }

    /// What the owner of a NIC registers there.
    pub(super) fn keys(&self, nic: NicId) -> LotKeys {
        self.keys[nic.idx()].clone()
    }

    /// Keys of the lots that are there, by number.
    pub(super) fn remote_keys(&self, nic: NicId) -> Vec<RemoteKey> {
        let layout = self.layout(nic);
        let mut keys = vec![super::job::key(0); layout.part_count()];
        for lot in self.lots_of(nic) {
            let whole = self.remote_key(nic, lot);
            for (part, at) in self.parts(nic, lot) {
                let (remote_addr, bytes) = (whole.remote_addr + at, layout.part_bytes(lot.class));
                keys[layout.part_number(lot, part)] = RemoteKey { remote_addr, bytes, ..whole };
            }
        }
        keys
    }

    fn remote_key(&self, nic: NicId, lot: Lot) -> RemoteKey {
        let of = |&remote_addr| RemoteKey {
            remote_addr,
            rkey: SimWire::relay_key(nic),
            bytes: self.bytes(nic, lot),
        };
        self.places.get(&(nic, lot)).map_or(super::job::key(0), of)
    }

    /// Where a rank's lots of a NIC lie.
    pub(super) fn dev_ptrs(&self, rank: Rank, nic: NicId) -> LotPtrs {
        let (idx, gpu) = (self.cluster.nic_idx(nic), self.cluster.gpu_of(rank));
        Class::ALL.map(|class| {
            let place = self.places.get(&(nic, Lot { nic: idx, gpu, class }));
            place.map_or(0, |&place| relay_dev_ptr(nic, place))
        })
    }

    /// What a proxy does with a lot that nothing uses any more.
    pub(super) fn returner(&self, rank: Rank) -> Box<dyn FnMut(NicIdx, Class) + Send> {
        let returned = Arc::clone(&self.returned[rank.idx()]);
        Box::new(move |nic, class| {
            returned.lock().unwrap_or_else(PoisonError::into_inner).push((nic, class));
        })
    }

    /// A rank is about to open a call: it asks for the lots that it would like.
    pub(super) fn want(&mut self, rank: Rank, call: &Call, now: Nanos) {
        let wanted = lots::wanted(call, &self.cluster, rank);
        for ((nic, class), ask) in self.borrowings[rank.idx()].want(&wanted, call.id) {
            let lot = Lot { nic, gpu: self.cluster.gpu_of(rank), class };
            self.send(rank, self.owner(rank, nic), (lot, ask), Word::Ask, now);
        }
    }

    /// Whether all of them were answered.
    pub(super) fn is_settled(&self, rank: Rank, call: &Call) -> bool {
        self.borrowings[rank.idx()].is_settled(&lots::wanted(call, &self.cluster, rank))
    }

    /// An owner takes back all that it has lent.
    pub(super) fn recall(&mut self, owner: Rank, now: Nanos) {
        for (lot, ask) in self.lenders[owner.idx()].recall(u64::MAX, HASTE * now) {
            let borrower = Rank(self.cluster.first_rank(self.cluster.server_of(owner)).0 + lot.gpu.0);
            self.send(owner, borrower, (lot, ask), Word::Recall, now);
        }
    }

    /// Whether a rank has memory for a class beside a NIC of its server.
    pub(super) fn has_lot(&self, rank: Rank, nic: NicIdx, class: Class) -> bool {
        let lot = Lot { nic, gpu: self.cluster.gpu_of(rank), class };
        self.places.contains_key(&(self.nic_id(rank, nic), lot))
    }

    /// Lots that are recalled and have not come back.
    pub(super) fn still_lent(&self) -> Vec<Lot> {
        self.lenders.iter().flat_map(Lender::still_lent).collect()
    }

    /// When the next word comes.
    pub(super) fn next_due(&self) -> Option<Nanos> {
        self.mail.keys().next().map(|&(at, _)| at)
    }

    fn owner(&self, rank: Rank, nic: NicIdx) -> Rank {
        self.cluster.owner_of(self.nic_id(rank, nic))
    }

    fn nic_id(&self, rank: Rank, nic: NicIdx) -> NicId {
        self.cluster.nic_id(self.cluster.server_of(rank), nic)
    }

    fn send(&mut self, from: Rank, to: Rank, (lot, ask): (Lot, u32), word: Word, now: Nanos) {
        let last = self.last_due.entry((from, to)).or_default();
        *last = (now + self.random.between(WORD_NS.0, WORD_NS.1)).max(*last + 1);
        self.sent += 1;
        self.mail.insert((*last, self.sent), Mail { from, to, lot, ask, word });
    }

    /// Hands on what is due. `rounds` are the living ranks' proxies.
    pub(super) fn step(&mut self, now: Nanos, mut rounds: impl FnMut(Rank, &mut dyn FnMut(&mut Rounds))) {
        while let Some(mail) = self.mail.first_entry().filter(|e| e.key().0 <= now).map(|e| e.remove()) {
            match mail.word {
                Word::Ask => self.on_ask(mail, now),
                Word::Returned => self.on_returned(mail),
                Word::Lent(key) => self.on_lent(mail, key, now, &mut rounds),
                Word::Refused => {
                    self.borrowings[mail.to.idx()].on_refused((mail.lot.nic, mail.lot.class), mail.ask);
                }
                Word::Recall => {
                    let place = (mail.lot.nic, mail.lot.class);
                    // Memory is mapped when it is offered, so a recall never finds it between.
                    if self.borrowings[mail.to.idx()].on_recall(place, mail.ask) == Recall::Begin {
                        rounds(mail.to, &mut |r| r.recall_lot(place.0, place.1));
                        if self.hasty {
                            (self.returner(mail.to))(place.0, place.1);
                        }
                    }
                }
            }
        }
        for rank in (0..self.returned.len() as u32).map(Rank) {
            let returned = std::mem::take(
                &mut *self.returned[rank.idx()].lock().unwrap_or_else(PoisonError::into_inner),
            );
            for (nic, class) in returned {
                let Some(ask) = self.borrowings[rank.idx()].on_returned((nic, class)) else { continue };
                let lot = Lot { nic, gpu: self.cluster.gpu_of(rank), class };
                self.send(rank, self.owner(rank, nic), (lot, ask), Word::Returned, now);
            }
        }
    }

    fn on_ask(&mut self, mail: Mail, now: Nanos) {
        let Mail { from, to, lot, ask, .. } = mail;
        let nic = self.nic_id(to, lot.nic);
        let bytes = self.bytes(nic, lot);
        let word = match self.lenders[to.idx()].on_ask(lot, ask, bytes, HASTE * now) {
            None => return,
            Some(Answer::Refuse(_)) => Word::Refused,
            Some(Answer::Make) if self.no_memory > 0 && self.random.one_in(self.no_memory) => {
                self.lenders[to.idx()].on_failed(lot, HASTE * now);
                self.lenders[to.idx()].on_freed(lot);
                Word::Refused
            }
            Some(Answer::Make) => {
                self.make(nic, lot);
                self.made(to, nic, lot)
            }
        };
        self.send(to, from, (lot, ask), word, now);
    }

    fn made(&mut self, owner: Rank, nic: NicId, lot: Lot) -> Word {
        match self.lenders[owner.idx()].on_made(lot) {
            Made::Lend => Word::Lent(self.remote_key(nic, lot)),
            Made::Free(_) => {
                self.free(nic, lot);
                self.lenders[owner.idx()].on_freed(lot);
                Word::Refused
            }
        }
    }

    /// A rank that cannot map what it gets gives it back.
    fn on_lent(
        &mut self,
        mail: Mail,
        key: RemoteKey,
        now: Nanos,
        rounds: &mut impl FnMut(Rank, &mut dyn FnMut(&mut Rounds)),
    ) {
        let Mail { from, to, lot, ask, .. } = mail;
        let place = (lot.nic, lot.class);
        let nic = self.nic_id(to, lot.nic);
        let expected = self.borrowings[to.idx()].on_lent(place, ask);
        if self.no_memory > 0 && self.random.one_in(self.no_memory) {
            self.borrowings[to.idx()].on_unusable(place, ask);
            self.send(to, from, (lot, ask), Word::Returned, now);
        } else if expected {
            self.borrowings[to.idx()].on_mapped(place, ask);
            let dev_ptr = relay_dev_ptr(nic, key.remote_addr);
            rounds(to, &mut |r| r.lot_lent(lot.nic, lot.class, dev_ptr, key));
        }
    }

    fn on_returned(&mut self, mail: Mail) {
        let Mail { to, lot, ask, .. } = mail;
        if self.lenders[to.idx()].on_returned(lot, ask) {
            self.free(self.nic_id(to, lot.nic), lot);
            self.lenders[to.idx()].on_freed(lot);
        }
    }
}

fn layout_beside(layouts: &[SlotLayout], cluster: &Cluster, nic: NicId) -> SlotLayout {
    layouts[cluster.server_of_nic(nic).idx()]
}

fn gpus_beside(cluster: &Cluster, nic: NicId) -> u32 {
    cluster.server(cluster.server_of_nic(nic)).gpus
}
