//! The memory that a server's ranks share: load table, credit lines, rings between borrowers and NIC owners. Its layout
//! follows from the cluster alone, so that a remote rank can compute where a credit goes.

use crate::abi::{FlCreditLine, FlSignalEntry};
use crate::doorbell::Class;
use crate::engine::LINE_SLOTS;
use crate::load::LoadTable;
use crate::ring::RingLayout;
use crate::topo::{Cluster, GpuIdx, NicId, NicIdx, Rank, ServerId};

/// Words of an item of work handed to an owner.
pub const WORK_WORDS: usize = 8;
/// Words of an event handed back.
pub const EVENT_WORDS: usize = 4;
/// Items of work that a borrower may have waiting at a NIC: more than it has slots there.
const WORK_CAPACITY: u64 = 256;
/// Events that may wait for a borrower.
const EVENT_CAPACITY: u64 = 1024;
const CREDIT_LINE_WORDS: usize = size_of::<FlCreditLine>() / 8;
/// Words of a signal on its way.
pub const SIGNAL_ENTRY_WORDS: usize = size_of::<FlSignalEntry>() / 8;

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
        Class::ALL.len() * self.ranks * self.max_nics
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

    fn pair_words() -> usize {
        RingLayout::words(WORK_WORDS, WORK_CAPACITY) + RingLayout::words(EVENT_WORDS, EVENT_CAPACITY)
    }

    /// The ring in which a borrower hands work for a NIC to its owner.
    pub fn work_ring(&self, borrower: GpuIdx, nic: NicIdx) -> RingLayout {
        let pair = borrower.idx() * self.nics + nic.idx();
        RingLayout::at(self.rings_at() + pair * Self::pair_words(), WORK_CAPACITY)
    }

    /// The ring in which the owner hands events back.
    pub fn event_ring(&self, borrower: GpuIdx, nic: NicIdx) -> RingLayout {
        let work = self.work_ring(borrower, nic);
        let at = work.prod_idx_at + RingLayout::words(WORK_WORDS, WORK_CAPACITY);
        RingLayout::at(at, EVENT_CAPACITY)
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
        assert!(entries.max() < Some(l.work_ring(GpuIdx(0), NicIdx(0)).prod_idx_at - 1));
        let last = l.event_ring(GpuIdx(2), NicIdx(1));
        assert_eq!(last.entries_at + EVENT_WORDS * EVENT_CAPACITY as usize, l.words());
    }
}
