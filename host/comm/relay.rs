//! Relay memory as one rank holds it: the lots that it uses, beside any NIC of its server, and those on its own GPU. Those
//! that are there from the start are in [`RelayMemory`]; others come and go through the [`RelayKeeper`].

mod gate;
mod inbox;
mod keeper;
mod lending;
mod shared;
#[cfg(test)]
mod tests;
mod words;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::memory::MappedParts;
use crate::doorbell::Class;
use crate::engine::call::CallId;
use crate::engine::relay::{Lender, RelayCounters};
use crate::engine::slots::Lot;
use crate::hw::{Clock, HwError};
use crate::proxy::LotPtrs;
use crate::topo::{GpuIdx, NicIdx, Rank};

pub(super) use inbox::{Inbox, Outbox, pair};
pub(super) use keeper::{KeeperParts, Place};
pub(super) use lending::{Lending, OwnedNicLots};

use keeper::{Holdings, Keeper};
use shared::Shared;
use words::{Letter, Word};

/// Relay memory can be lent and taken back no more.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RelayError {
    /// A rank of this server sent something that is no word about relay memory.
    #[error(
        "a rank of this server sent a word about relay memory with a bad {field}: {value}; run one version on all ranks"
    )]
    BadLetter {
        /// Which field.
        field: &'static str,
        /// What it said.
        value: u64,
    },
    /// A rank said what it must not.
    #[error(
        "{rank} sent a word about relay memory with a bad {field}: {value}; run one version on all ranks"
    )]
    BadWord {
        /// Who.
        rank: Rank,
        /// Which field.
        field: &'static str,
        /// What it said.
        value: u64,
    },
    /// A NIC does not let go of memory.
    #[error("relay memory cannot be taken back: {0}")]
    Hw(#[from] HwError),
    /// A system call failed.
    #[error("cannot {operation}: {source}")]
    Os {
        /// What was tried.
        operation: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// The thread panicked.
    #[error("the thread that keeps relay memory panicked; please report this")]
    Panicked,
}

/// What [`Communicator::reclaim_relay`](super::Communicator::reclaim_relay) got.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Reclaimed {
    /// Bytes that are free now and were relay memory before.
    pub bytes: u64,
    /// What did not come in time. It comes when its calls are over.
    pub still_lent: Vec<StillLent>,
}

/// Relay memory that a rank was asked to give back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StillLent {
    /// Who uses it.
    pub rank: Rank,
    /// Beside which NIC of the server.
    pub nic: NicIdx,
    /// For messages of which class.
    pub class: Class,
}

/// Lots by NIC, GPU and class.
#[derive(Default)]
pub(super) struct RelayMemory {
    /// Those that this rank uses, and those on its GPU that others use: a NIC registers what its owner has mapped.
    lots: BTreeMap<Lot, MappedParts>,
}

impl RelayMemory {
    pub fn add(&mut self, lot: Lot, memory: MappedParts) {
        self.lots.insert(lot, memory);
    }

    pub fn lot(&self, lot: Lot) -> Option<&MappedParts> {
        self.lots.get(&lot)
    }

    /// Where a GPU's lots of one NIC lie; 0: not there.
    pub fn dev_ptrs(&self, nic: NicIdx, gpu: GpuIdx) -> LotPtrs {
        Class::ALL.map(|class| self.lot(Lot { nic, gpu, class }).map_or(0, MappedParts::dev_ptr))
    }
}

/// The books of a rank's lots, before and while there is somebody who keeps them.
#[derive(Clone)]
pub(super) struct RelayBooks(Arc<Shared>);

impl RelayBooks {
    pub fn new(lender: Lender) -> Result<Self, RelayError> {
        let shared = Shared::new(lender);
        let shared = shared.map_err(|source| RelayError::Os { operation: "make an event", source })?;
        Ok(Self(Arc::new(shared)))
    }

    /// What the proxy calls when nothing uses a lot any more.
    pub fn on_returned(&self) -> Box<dyn FnMut(NicIdx, Class) + Send> {
        let shared = Arc::clone(&self.0);
        Box::new(move |nic, class| shared.returned(nic, class))
    }
}

/// The thread that keeps a rank's lots.
pub(super) struct RelayKeeper {
    shared: Arc<Shared>,
    place: Place,
    clock: Box<dyn Clock>,
    thread: Option<JoinHandle<Holdings>>,
    /// Once the thread has ended. Dropped after the proxy and the GPU's kernels.
    holdings: Option<Holdings>,
}

impl RelayKeeper {
    pub fn start(books: RelayBooks, parts: KeeperParts, clock: Box<dyn Clock>) -> Result<Self, RelayError> {
        let (shared, place) = (books.0, parts.place.clone());
        let (state, rank) = (Arc::clone(&shared), place.rank_of(place.gpu));
        let run = move || {
            let end = End(state);
            let mut keeper = Keeper::new(parts);
            if let Err(e) = keeper.run(&end.0) {
                end.0.fail(e);
            }
            keeper.holdings
        };
        let thread = std::thread::Builder::new().name(format!("relay-{}", rank.0)).spawn(run);
        let thread = thread.map_err(|source| RelayError::Os { operation: "start a thread", source })?;
        Ok(Self { shared, place, clock, thread: Some(thread), holdings: None })
    }

    /// Before a launch: nothing is mapped or unmapped until [`kernels_ended`](Self::kernels_ended).
    pub fn kernels_start(&self) {
        self.shared.gate.enter();
    }

    /// All kernels have ended.
    pub fn kernels_ended(&self) {
        self.shared.gate.leave();
    }

    /// Asks for lots that a call would like and waits for the answers, so long at most. What is refused or late is done
    /// without.
    pub fn borrow(&self, wanted: &[(NicIdx, Class)], call: CallId, within: Duration) {
        if wanted.is_empty() {
            return;
        }
        let gpu = self.place.gpu;
        let mut books = self.shared.books();
        let asks = books.borrowings.want(wanted, call);
        let asks = asks.into_iter().map(|((nic, class), ask)| {
            let lot = Lot { nic, gpu, class };
            Letter { from: gpu, lot, ask, word: Word::Ask }
        });
        books.letters.extend(asks);
        drop(books);
        self.shared.wake.set();
        self.shared.wait_until(Instant::now() + within, |books| books.borrowings.is_settled(wanted));
    }

    /// Takes back lots of at least so many bytes, and waits for them so long at most.
    pub fn reclaim(&self, bytes: u64, within: Duration) -> Reclaimed {
        let from = self.place.gpu;
        let mut books = self.shared.books();
        let before = books.lender.counters().bytes;
        let recalled = books.lender.recall(bytes, self.clock.now());
        let letters = recalled.into_iter().map(|(lot, ask)| Letter { from, lot, ask, word: Word::Recall });
        books.letters.extend(letters);
        drop(books);
        self.shared.wake.set();
        self.shared.wait_until(Instant::now() + within, |books| books.lender.coming_bytes() == 0);
        let books = self.shared.books();
        let still_lent =
            |lot: Lot| StillLent { rank: self.place.rank_of(lot.gpu), nic: lot.nic, class: lot.class };
        Reclaimed {
            bytes: before.saturating_sub(books.lender.counters().bytes),
            still_lent: books.lender.still_lent().map(still_lent).collect(),
        }
    }

    pub fn counters(&self) -> RelayCounters {
        self.shared.books().lender.counters()
    }

    pub fn has_failed(&self) -> bool {
        self.shared.has_failed()
    }

    pub fn take_error(&self) -> Option<RelayError> {
        self.shared.books().error.take()
    }

    /// Ends the thread. The memory stays until this is dropped.
    pub fn stop(&mut self) {
        self.shared.stop();
        if let Some(thread) = self.thread.take() {
            match thread.join() {
                Ok(holdings) => self.holdings = Some(holdings),
                Err(_) => eprintln!("fuselink: {}", RelayError::Panicked),
            }
        }
    }

    /// After [`stop`](Self::stop): keeps what is mapped for the rest of the process, for kernels that do not end.
    pub fn leave_memory(&mut self) {
        std::mem::forget(self.holdings.take());
    }
}

impl Drop for RelayKeeper {
    fn drop(&mut self) {
        self.stop();
    }
}

/// However the thread ends, nobody waits for it in vain.
struct End(Arc<Shared>);

impl Drop for End {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(RelayError::Panicked);
        }
        self.0.gate.give_up();
    }
}
