//! The memory that a server's ranks share: load table, credit lines, rings between borrowers and NIC owners. Its layout
//! follows from the cluster alone, so that a remote rank can compute where a credit goes.

use crate::abi::{FlCreditLine, FlSignalEntry};
use crate::doorbell::Class;
use crate::engine::LINE_SLOTS;
use crate::hw::Lane;
use crate::load::LoadTable;
use crate::ring::RingLayout;
use crate::topo::{Cluster, GpuIdx, NicId, NicIdx, Rank, ServerId};

/// Words of an item of work handed to an owner.
pub const WORK_WORDS: usize = 8;
/// Words of an event handed back.
pub const EVENT_WORDS: usize = 4;
/// Work that a borrower may have waiting at a NIC, by lane. In `Plan` and `Put` it is less than the ring holds, since each
/// message waits in a send slot, of which a rank has a few per NIC. Control words and puts go to many ranks: those that
/// find the ring full stay with the borrower, in order.
const WORK_CAPACITY: [u64; Lane::COUNT] = [256, 256, 64, 64];
/// Events about one class that may wait for a borrower: completions of its work, arrivals in its slots, and news. What finds
/// the ring full stays with the owner, in order; slots bound it.
const EVENT_CAPACITY: u64 = 512;
/// How many classes there are.
const CLASSES: usize = Class::ALL.len();
const CREDIT_LINE_WORDS: usize = size_of::<FlCreditLine>() / 8;
/// Words of a signal on its way.
pub const SIGNAL_ENTRY_WORDS: usize = size_of::<FlSignalEntry>() / 8;

/// Each class has ring space of its own.
impl From<Class> for Lane {
    fn from(class: Class) -> Self {
        match class {
            Class::Plan => Self::Plan,
            Class::Put => Self::Put,
            Class::LowLatency => Self::LowLatency,
        }
    }
}

/// The layout of one server's segment, in words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentLayout {
    gpus: usize,
    nics: usize,
    ranks: usize,
    /// NICs of the job.
    job_nics: usize,
    /// The most NICs of any server: the width of a credit row.
    max_nics: usize,
}

impl SegmentLayout {
    /// The layout for a server.
    pub fn new(cluster: &Cluster, server: ServerId) -> Self {
        Self {
            gpus: cluster.server(server).gpus as usize,
            nics: cluster.server(server).nics.len(),
            ranks: cluster.ranks() as usize,
            job_nics: cluster.nics() as usize,
            max_nics: cluster.servers().iter().map(|s| s.nics.len()).max().unwrap_or(0),
        }
    }

    /// Where the load table is: first word, words.
    pub fn load_table(&self) -> (usize, usize) {
        (0, LoadTable::words(self.gpus as u32, self.nics))
    }

    fn credits_at(&self) -> usize {
        // RDMA writes whole lines here; the load table before it must not share one.
        self.load_table().1.next_multiple_of(CREDIT_LINE_WORDS)
    }

    /// Credit lines of one sender.
    pub fn credit_lines(&self) -> usize {
        CLASSES * self.ranks * self.max_nics
    }

    /// Number of a sender's credit line for a receiver's NIC.
    pub fn credit_line(&self, class: Class, receiver: Rank, nic: NicIdx) -> usize {
        (class as usize * self.ranks + receiver.idx()) * self.max_nics + nic.idx()
    }

    /// Class, receiver and NIC of a line number.
    pub fn credit_line_of(&self, line: usize) -> (Class, Rank, NicIdx) {
        let (row, nic) = (line / self.max_nics, line % self.max_nics);
        (Class::ALL[row / self.ranks], Rank((row % self.ranks) as u32), NicIdx(nic as u32))
    }

    /// First word of a sender's credit line.
    pub fn credit_at(&self, sender: GpuIdx, line: usize) -> usize {
        self.credits_at() + (sender.idx() * self.credit_lines() + line) * CREDIT_LINE_WORDS
    }

    /// First of the words in which the owners of other servers' NICs tell of their paths to a NIC of this server.
    pub fn path_words_at(&self, nic: NicIdx) -> usize {
        let credits_end = self.credit_at(GpuIdx(self.gpus as u32), 0);
        credits_end + nic.idx() * self.job_nics
    }

    /// The word in which the owner of `peer`, a NIC of another server, tells of its path to a NIC of this one.
    pub fn path_word(&self, nic: NicIdx, peer: NicId) -> usize {
        self.path_words_at(nic) + peer.idx()
    }

    fn returns_at(&self) -> usize {
        self.path_words_at(NicIdx(self.nics as u32))
    }

    /// The word in which a sender says which credits of a receiver of this server come back unused.
    pub fn return_at(&self, receiver: GpuIdx, class: Class, sender: Rank, nic: NicIdx) -> usize {
        let row = (receiver.idx() * Class::ALL.len() + class as usize) * self.ranks + sender.idx();
        self.returns_at() + row * self.nics + nic.idx()
    }

    /// Entries in which one source has signals on their way to one rank: as many as it can have messages on the way
    /// and not handed on, since each of those has a receive slot.
    fn signal_entries(&self) -> usize {
        (LINE_SLOTS * self.nics).next_power_of_two()
    }

    fn signals_at(&self) -> usize {
        self.return_at(GpuIdx(self.gpus as u32), Class::ALL[0], Rank(0), NicIdx(0))
            .next_multiple_of(CREDIT_LINE_WORDS)
    }

    /// First word of the entry for message `seq` of a source to a rank of this server.
    pub fn signal_entry(&self, dst: GpuIdx, src: Rank, seq: u64) -> usize {
        let entries = self.signal_entries();
        let ring = dst.idx() * self.ranks + src.idx();
        self.signals_at() + (ring * entries + (seq % entries as u64) as usize) * SIGNAL_ENTRY_WORDS
    }

    fn rings_at(&self) -> usize {
        // RDMA writes end here; rings are this server's own.
        self.signal_entry(GpuIdx(self.gpus as u32), Rank(0), 0).next_multiple_of(CREDIT_LINE_WORDS)
    }

    fn work_words() -> usize {
        WORK_CAPACITY.iter().map(|&capacity| RingLayout::words(WORK_WORDS, capacity)).sum()
    }

    fn pair_words() -> usize {
        Self::work_words() + CLASSES * RingLayout::words(EVENT_WORDS, EVENT_CAPACITY)
    }

    fn pair_at(&self, borrower: GpuIdx, nic: NicIdx) -> usize {
        self.rings_at() + (borrower.idx() * self.nics + nic.idx()) * Self::pair_words()
    }

    /// The ring in which a borrower hands an owner work of one lane for a NIC.
    pub fn work_ring(&self, borrower: GpuIdx, nic: NicIdx, lane: Lane) -> RingLayout {
        let before = &WORK_CAPACITY[..lane as usize];
        let before: usize = before.iter().map(|&capacity| RingLayout::words(WORK_WORDS, capacity)).sum();
        RingLayout::at(self.pair_at(borrower, nic) + before, WORK_CAPACITY[lane as usize])
    }

    /// The rings in which the owner hands events back, by class.
    pub fn event_rings(&self, borrower: GpuIdx, nic: NicIdx) -> [RingLayout; CLASSES] {
        let first = self.pair_at(borrower, nic) + Self::work_words();
        let each = RingLayout::words(EVENT_WORDS, EVENT_CAPACITY);
        std::array::from_fn(|i| RingLayout::at(first + i * each, EVENT_CAPACITY))
    }

    /// Words in all.
    pub fn words(&self) -> usize {
        self.rings_at() + self.gpus * self.nics * Self::pair_words()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topo::Server;

    #[test]
    fn parts_do_not_overlap() {
        let cluster = Cluster::new(vec![Server::new(3, &[1; 2], 1), Server::new(2, &[1; 4], 1)]);
        let l = SegmentLayout::new(&cluster, ServerId(0));
        let line = l.credit_line(Class::LowLatency, Rank(4), NicIdx(3));
        assert_eq!(line + 1, l.credit_lines());
        assert_eq!(l.credit_line_of(line), (Class::LowLatency, Rank(4), NicIdx(3)));
        assert!(l.load_table().1 <= l.credit_at(GpuIdx(0), 0));
        assert_eq!(l.credit_at(GpuIdx(2), line) + CREDIT_LINE_WORDS, l.path_word(NicIdx(0), NicId(0)));
        assert!(l.path_word(NicIdx(1), NicId(5)) < l.return_at(GpuIdx(0), Class::Plan, Rank(0), NicIdx(0)));
        let last = l.return_at(GpuIdx(2), Class::LowLatency, Rank(4), NicIdx(1));
        assert!(last < l.signal_entry(GpuIdx(0), Rank(0), 0));
        let entries = (0..16).map(|seq| l.signal_entry(GpuIdx(2), Rank(4), seq));
        assert!(entries.max() < Some(l.work_ring(GpuIdx(0), NicIdx(0), Lane::Control).prod_idx_at - 1));
    }

    #[test]
    fn rings_follow_one_another() {
        let cluster = Cluster::uniform(2, Server::new(3, &[1; 2], 1));
        let l = SegmentLayout::new(&cluster, ServerId(0));
        let mut at = l.rings_at();
        let pairs = (0..3).flat_map(|gpu| (0..2).map(move |nic| (GpuIdx(gpu), NicIdx(nic))));
        for (gpu, nic) in pairs {
            let work = Lane::ALL.map(|lane| (WORK_WORDS, l.work_ring(gpu, nic, lane)));
            let events = l.event_rings(gpu, nic).map(|ring| (EVENT_WORDS, ring));
            for (words, ring) in work.into_iter().chain(events) {
                assert_eq!(ring, RingLayout::at(at, ring.capacity));
                at += RingLayout::words(words, ring.capacity);
            }
        }
        assert_eq!(at, l.words());
    }
}
