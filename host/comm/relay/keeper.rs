//! The keeper of a rank's lots: a thread that lends, borrows and gives back, so that neither the proxy nor the user's thread
//! waits for memory to be made or mapped.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::RelayError;
use super::inbox::{Inbox, Outbox, Posted};
use super::lending::Lending;
use super::shared::Shared;
use super::words::{BadField, Letter, Word};
use crate::comm::device::Device;
use crate::comm::memory::Mapped;
use crate::comm::wake;
use crate::doorbell::Class;
use crate::engine::lots::is_permanent;
use crate::engine::relay::{Answer, Made, Recall, Refusal};
use crate::engine::slots::{Lot, SlotLayout};
use crate::hw::{Clock, HwError, RemoteKey};
use crate::proxy::Proxy;
use crate::topo::{Cluster, GpuIdx, NicIdx, Rank, ServerId};

/// Pause before a full inbox is tried again, in case nothing tells that it has room: descriptors in flight have a limit.
const CROWDED: Duration = Duration::from_millis(2);

/// Whoever uses the lots that a rank borrows.
pub trait LotUser: Send + Sync {
    /// It may be used from now on.
    fn lot_lent(&self, nic: NicIdx, class: Class, dev_ptr: u64, key: RemoteKey);
    /// It is asked back; [`Shared::returned`] is called when nothing uses it.
    fn recall_lot(&self, nic: NicIdx, class: Class);
}

impl LotUser for Proxy {
    fn lot_lent(&self, nic: NicIdx, class: Class, dev_ptr: u64, key: RemoteKey) {
        Proxy::lot_lent(self, nic, class, dev_ptr, key);
    }
    fn recall_lot(&self, nic: NicIdx, class: Class) {
        Proxy::recall_lot(self, nic, class);
    }
}

/// Where a keeper is.
#[derive(Clone)]
pub struct Place {
    pub cluster: Arc<Cluster>,
    pub server: ServerId,
    pub gpu: GpuIdx,
    pub slots: SlotLayout,
}

impl Place {
    pub fn rank_of(&self, gpu: GpuIdx) -> Rank {
        Rank(self.cluster.first_rank(self.server).0 + gpu.0)
    }

    fn owner_of(&self, nic: NicIdx) -> GpuIdx {
        self.cluster.server(self.server).nics[nic.idx()].relay_gpu
    }

    /// A letter from who it says, about a lot that there is and that sender and reader have to do with.
    fn check(&self, letter: &Letter) -> Result<(), BadField> {
        let server = self.cluster.server(self.server);
        let Letter { from, lot, word, .. } = letter;
        if from.0 >= server.gpus || *from == self.gpu {
            return Err(BadField("sender", from.0.into()));
        }
        if lot.nic.idx() >= server.nics.len() {
            return Err(BadField("NIC", lot.nic.0.into()));
        }
        let (owner, borrower) = match word {
            Word::Ask | Word::Returned => (self.gpu, *from),
            Word::Lent(_) | Word::Refused(_) | Word::Recall => (*from, self.gpu),
        };
        if self.owner_of(lot.nic) != owner {
            return Err(BadField("NIC", lot.nic.0.into()));
        }
        if lot.gpu != borrower {
            return Err(BadField("GPU", lot.gpu.0.into()));
        }
        if is_permanent(&self.cluster, self.server, *lot) || self.slots.lot_bytes(lot.class) == 0 {
            return Err(BadField("class", lot.class as u64));
        }
        match word {
            Word::Lent(key) if key.bytes < self.slots.lot_bytes(lot.class) => Err(BadField("key", key.bytes)),
            _ => Ok(()),
        }
    }
}

/// The way to another rank.
pub struct Peer {
    pub outbox: Outbox,
    queue: VecDeque<(Letter, Option<OwnedFd>)>,
    gone: bool,
}

impl Peer {
    pub fn new(outbox: Outbox) -> Self {
        Self { outbox, queue: VecDeque::new(), gone: false }
    }
}

/// What waits until no kernel runs.
enum Pending {
    Make { lot: Lot, ask: u32 },
    Map { lot: Lot, ask: u32, key: RemoteKey, fd: Option<OwnedFd> },
    Unmap { nic: NicIdx, class: Class },
    Free { lot: Lot, memory: Option<Mapped> },
}

/// What a keeper works with.
pub struct Keeper {
    pub place: Place,
    pub gpu: Arc<Device>,
    pub clock: Box<dyn Clock>,
    pub user: Arc<dyn LotUser>,
    pub inbox: Inbox,
    /// By local rank; this one's own is not used.
    pub peers: Vec<Peer>,
    pub holdings: Holdings,
    pending: VecDeque<Pending>,
}

/// The memory, which outlives the thread: the proxy may still use it.
pub struct Holdings {
    pub lending: Lending,
    pub borrowed: BTreeMap<(NicIdx, Class), Mapped>,
}

/// What a keeper is made of.
pub struct KeeperParts {
    pub place: Place,
    pub gpu: Arc<Device>,
    pub clock: Box<dyn Clock>,
    pub user: Arc<dyn LotUser>,
    pub inbox: Inbox,
    pub outboxes: Vec<Outbox>,
    pub lending: Lending,
}

fn os(operation: &'static str) -> impl FnOnce(io::Error) -> RelayError {
    move |source| RelayError::Os { operation, source }
}

impl Keeper {
    pub fn new(parts: KeeperParts) -> Self {
        let KeeperParts { place, gpu, clock, user, inbox, outboxes, lending } = parts;
        Self {
            place,
            gpu,
            clock,
            user,
            inbox,
            peers: outboxes.into_iter().map(Peer::new).collect(),
            holdings: Holdings { lending, borrowed: BTreeMap::new() },
            pending: VecDeque::new(),
        }
    }

    /// The thread: until it is told to stop.
    pub fn run(&mut self, shared: &Shared) -> Result<(), RelayError> {
        while !shared.stopped() {
            shared.wake.clear();
            self.round(shared)?;
            shared.tell();
            self.wait(shared)?;
        }
        Ok(())
    }

    /// Does all that can be done now.
    pub fn round(&mut self, shared: &Shared) -> Result<(), RelayError> {
        self.take_own(shared);
        while let Some(got) = self.inbox.take().map_err(os("hear of relay memory"))? {
            let (letter, fd) =
                got.map_err(|BadField(field, value)| RelayError::BadLetter { field, value })?;
            self.hear(shared, letter, fd)?;
        }
        self.post_all(shared)?;
        if !self.pending.is_empty() {
            let mut result = Ok(());
            shared.gate.while_quiet(|| result = self.do_pending(shared));
            result?;
            self.post_all(shared)?;
        }
        Ok(())
    }

    fn wait(&self, shared: &Shared) -> Result<(), RelayError> {
        let full: Vec<_> = self.peers.iter().filter(|p| !p.queue.is_empty()).collect();
        let mut fds =
            vec![PollFd::new(&self.inbox, PollFlags::IN), PollFd::new(&*shared.wake, PollFlags::IN)];
        fds.extend(full.iter().map(|p| PollFd::new(&p.outbox, PollFlags::OUT)));
        let until = (!full.is_empty()).then(|| Instant::now() + CROWDED);
        wake::wait(&mut fds, until).map_err(os("wait for words about relay memory")).map(drop)
    }

    /// What the user's thread and the proxy have left.
    fn take_own(&mut self, shared: &Shared) {
        let mut books = shared.books();
        let letters = std::mem::take(&mut books.letters);
        let returned = std::mem::take(&mut books.returned);
        drop(books);
        for letter in letters {
            let to =
                if letter.word == Word::Ask { self.place.owner_of(letter.lot.nic) } else { letter.lot.gpu };
            self.peers[to.idx()].queue.push_back((letter, None));
        }
        self.pending.extend(returned.into_iter().map(|(nic, class)| Pending::Unmap { nic, class }));
    }

    fn tell(&mut self, lot: Lot, ask: u32, word: Word, fd: Option<OwnedFd>) {
        let to = match word {
            Word::Ask | Word::Returned => self.place.owner_of(lot.nic),
            Word::Lent(_) | Word::Refused(_) | Word::Recall => lot.gpu,
        };
        let letter = Letter { from: self.place.gpu, lot, ask, word };
        self.peers[to.idx()].queue.push_back((letter, fd));
    }

    fn hear(&mut self, shared: &Shared, letter: Letter, fd: Option<OwnedFd>) -> Result<(), RelayError> {
        let rank = self.place.rank_of(letter.from);
        let bad = |BadField(field, value)| RelayError::BadWord { rank, field, value };
        self.place.check(&letter).map_err(bad)?;
        let Letter { lot, ask, word, .. } = letter;
        let place = (lot.nic, lot.class);
        match word {
            Word::Ask => self.asked(shared, lot, ask).map_err(bad),
            Word::Returned => self.returned(shared, lot, ask, rank),
            Word::Lent(key) => {
                if shared.books().borrowings.on_lent(place, ask) {
                    self.pending.push_back(Pending::Map { lot, ask, key, fd });
                } else {
                    self.tell(lot, ask, Word::Returned, None);
                }
                Ok(())
            }
            Word::Refused(_) => {
                shared.books().borrowings.on_refused(place, ask);
                Ok(())
            }
            Word::Recall => {
                let recall = shared.books().borrowings.on_recall(place, ask);
                match recall {
                    Recall::Begin => self.user.recall_lot(lot.nic, lot.class),
                    Recall::NotUsed => self.tell(lot, ask, Word::Returned, None),
                    Recall::NotHere => {}
                }
                Ok(())
            }
        }
    }

    fn asked(&mut self, shared: &Shared, lot: Lot, ask: u32) -> Result<(), BadField> {
        let (now, bytes) = (self.clock.now(), self.place.slots.chunk_bytes(lot.class));
        let answer = shared.books().lender.on_ask(lot, ask, bytes, now);
        match answer.ok_or(BadField("ask", ask.into()))? {
            Answer::Make => self.pending.push_back(Pending::Make { lot, ask }),
            Answer::Refuse(refusal) => self.tell(lot, ask, Word::Refused(refusal), None),
        }
        Ok(())
    }

    /// A lot is back: the NIC must not reach it any more, then it goes.
    fn returned(&mut self, shared: &Shared, lot: Lot, ask: u32, rank: Rank) -> Result<(), RelayError> {
        if !shared.books().lender.on_returned(lot, ask) {
            return Err(RelayError::BadWord { rank, field: "return", value: ask.into() });
        }
        let memory = self.holdings.lending.take_back(lot)?;
        self.pending.push_back(Pending::Free { lot, memory });
        Ok(())
    }

    /// No kernel runs.
    fn do_pending(&mut self, shared: &Shared) -> Result<(), RelayError> {
        while let Some(pending) = self.pending.pop_front() {
            match pending {
                Pending::Make { lot, ask } => self.make(shared, lot, ask)?,
                Pending::Map { lot, ask, key, fd } => self.map(shared, lot, ask, (key, fd)),
                Pending::Unmap { nic, class } => self.unmap(shared, nic, class),
                Pending::Free { lot, memory } => {
                    drop(memory);
                    shared.books().lender.on_freed(lot);
                }
            }
        }
        Ok(())
    }

    fn make(&mut self, shared: &Shared, lot: Lot, ask: u32) -> Result<(), RelayError> {
        let bytes = self.place.slots.chunk_bytes(lot.class);
        let refusal = match self.holdings.lending.make(&self.gpu, lot, bytes) {
            Ok(offer) => {
                let made = shared.books().lender.on_made(lot);
                match made {
                    Made::Lend => {
                        self.tell(lot, ask, Word::Lent(offer.key), Some(offer.fd));
                        return Ok(());
                    }
                    Made::Free(refusal) => refusal,
                }
            }
            Err(_) => {
                // The borrower goes on without; the counters say so.
                shared.books().lender.on_failed(lot, self.clock.now());
                Refusal::Memory
            }
        };
        drop(self.holdings.lending.take_back(lot)?);
        shared.books().lender.on_freed(lot);
        self.tell(lot, ask, Word::Refused(refusal), None);
        Ok(())
    }

    fn map(&mut self, shared: &Shared, lot: Lot, ask: u32, (key, fd): (RemoteKey, Option<OwnedFd>)) {
        let place = (lot.nic, lot.class);
        if !shared.books().borrowings.is_offered(place, ask) {
            return; // Recalled meanwhile.
        }
        match self.import(lot, fd) {
            Ok(memory) => {
                let dev_ptr = memory.dev_ptr();
                self.holdings.borrowed.insert(place, memory);
                shared.books().borrowings.on_mapped(place, ask);
                self.user.lot_lent(lot.nic, lot.class, dev_ptr, key);
            }
            Err(_) => {
                shared.books().borrowings.on_unusable(place, ask);
                self.tell(lot, ask, Word::Returned, None);
            }
        }
    }

    fn import(&self, lot: Lot, fd: Option<OwnedFd>) -> Result<Mapped, HwError> {
        let (owner, bytes) = (self.place.owner_of(lot.nic), self.place.slots.lot_bytes(lot.class));
        let lost = || HwError::ImportChunk {
            gpu: owner,
            bytes,
            source: io::Error::other(
                "its descriptor did not come; raise the limit on open files (ulimit -n)",
            ),
        };
        Mapped::import(&self.gpu, fd.ok_or_else(lost)?, owner, bytes)
    }

    fn unmap(&mut self, shared: &Shared, nic: NicIdx, class: Class) {
        drop(self.holdings.borrowed.remove(&(nic, class)));
        let ask = shared.books().borrowings.on_returned((nic, class));
        if let Some(ask) = ask {
            self.tell(Lot { nic, gpu: self.place.gpu, class }, ask, Word::Returned, None);
        }
    }

    fn post_all(&mut self, shared: &Shared) -> Result<(), RelayError> {
        for n in 0..self.peers.len() {
            self.post(shared, GpuIdx(n as u32))?;
        }
        Ok(())
    }

    fn post(&mut self, shared: &Shared, to: GpuIdx) -> Result<(), RelayError> {
        while let Some((letter, fd)) = self.peers[to.idx()].queue.front() {
            let peer = &self.peers[to.idx()];
            let fd = fd.as_ref().map(AsFd::as_fd);
            let posted = if peer.gone { Ok(Posted::Gone) } else { peer.outbox.post(letter, fd) };
            match posted.map_err(os("tell of relay memory"))? {
                Posted::Later => return Ok(()),
                Posted::Sent => drop(self.peers[to.idx()].queue.pop_front()),
                Posted::Gone => self.gone(shared, to)?,
            }
        }
        Ok(())
    }

    /// A rank has left. What it was lent stays as it is: who left may still be written to. What never reached it comes back.
    fn gone(&mut self, shared: &Shared, to: GpuIdx) -> Result<(), RelayError> {
        self.peers[to.idx()].gone = true;
        for (letter, _) in std::mem::take(&mut self.peers[to.idx()].queue) {
            match letter.word {
                Word::Lent(_) => {
                    self.returned(shared, letter.lot, letter.ask, self.place.rank_of(to))?;
                }
                Word::Ask => shared.books().borrowings.on_gone(letter.lot.nic),
                Word::Refused(_) | Word::Recall | Word::Returned => {}
            }
        }
        Ok(())
    }
}
