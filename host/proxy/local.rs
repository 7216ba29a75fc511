//! Cells that stay in the server, moved by copy engines instead of kernels, where those are dear
//! (`FL_LOCAL_BY_HOST` in `kernels/abi.h`). The kernel still waits for the peers' done flags, its own among them; here they
//! are written by copies too, each after the bytes that it speaks for.

use std::collections::VecDeque;

use crate::engine::call::CallId;
use crate::hw::{HwError, Mover};
use crate::topo::GpuIdx;

/// One cell, and the flag that says that it was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LocalCell {
    /// The GPU that it is for.
    pub peer: GpuIdx,
    /// From here, in the send buffer.
    pub src_dev_ptr: u64,
    /// To there, in the peer's receive buffer.
    pub dst_dev_ptr: u64,
    /// Its length; may be 0.
    pub bytes: u64,
    /// This rank's done flag in the peer's memory (`FlPeerFlags.done`).
    pub flag_dev_ptr: u64,
}

/// All cells of one call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LocalCells {
    /// The call.
    pub call: CallId,
    /// A cell for each GPU of the server. This rank's own comes last: its flag lets the kernel end, and with it the call.
    pub cells: Vec<LocalCell>,
    /// Longest copy.
    pub chunk_bytes: u64,
    /// A word of device memory that holds the number of the call: what the flags become.
    pub call_word_dev_ptr: u64,
}

/// Copies under way at once: enough that the next is there when one is done.
const AHEAD: usize = 2;

/// Moves the cells, peer after peer as they come to the call.
#[derive(Debug)]
pub(super) struct LocalMoves {
    work: LocalCells,
    /// Cells that are not begun.
    waiting: VecDeque<LocalCell>,
    /// The cell that is being copied, and how far copies have been started.
    present: Option<(LocalCell, u64)>,
    under_way: Vec<u64>,
    flag: Option<u64>,
}

impl LocalMoves {
    pub(super) fn new(work: LocalCells) -> Self {
        let waiting = work.cells.iter().copied().collect();
        Self { work, waiting, present: None, under_way: Vec::new(), flag: None }
    }

    pub(super) fn call(&self) -> CallId {
        self.work.call
    }

    pub(super) fn is_done(&self) -> bool {
        self.waiting.is_empty() && self.present.is_none()
    }

    /// Does what can be done now; `is_ready` tells whether a peer's receive buffer is there. True if anything was done.
    ///
    /// # Errors
    /// As the mover's.
    pub(super) fn step(
        &mut self,
        mover: &mut dyn Mover,
        is_ready: impl Fn(GpuIdx) -> bool,
    ) -> Result<bool, HwError> {
        let mut any = self.take_done(mover)?;
        if self.present.is_none() {
            self.present = self.next_cell(is_ready).map(|cell| (cell, 0));
        }
        let Some((cell, begun)) = &mut self.present else { return Ok(any) };
        while *begun < cell.bytes && self.under_way.len() < AHEAD {
            let bytes = (cell.bytes - *begun).min(self.work.chunk_bytes.max(1));
            self.under_way.push(mover.start(cell.dst_dev_ptr + *begun, cell.src_dev_ptr + *begun, bytes)?);
            *begun += bytes;
            any = true;
        }
        if *begun == cell.bytes && self.under_way.is_empty() && self.flag.is_none() {
            self.flag = Some(mover.start(cell.flag_dev_ptr, self.work.call_word_dev_ptr, 8)?);
            any = true;
        }
        Ok(any)
    }

    fn take_done(&mut self, mover: &mut dyn Mover) -> Result<bool, HwError> {
        let before = self.under_way.len();
        let mut i = 0;
        while i < self.under_way.len() {
            if mover.is_done(self.under_way[i])? {
                self.under_way.swap_remove(i);
            } else {
                i += 1;
            }
        }
        if let Some(flag) = self.flag
            && mover.is_done(flag)?
        {
            (self.flag, self.present) = (None, None);
            return Ok(true);
        }
        Ok(self.under_way.len() < before)
    }

    /// The first whose peer is ready; the last of all only when it is the only one.
    fn next_cell(&mut self, is_ready: impl Fn(GpuIdx) -> bool) -> Option<LocalCell> {
        let last = self.waiting.len().checked_sub(1)?;
        let may_go = |&at: &usize| (at < last || last == 0) && is_ready(self.waiting[at].peer);
        let at = (0..=last).find(may_go)?;
        self.waiting.remove(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies that end when the test says so.
    #[derive(Default)]
    struct Copies {
        started: Vec<(u64, u64, u64)>,
        done: u64,
    }

    impl Mover for Copies {
        fn start(&mut self, dst: u64, src: u64, bytes: u64) -> Result<u64, HwError> {
            self.started.push((dst, src, bytes));
            Ok(self.started.len() as u64)
        }
        fn is_done(&mut self, copy: u64) -> Result<bool, HwError> {
            Ok(copy <= self.done)
        }
    }

    fn cell(peer: u32, bytes: u64) -> LocalCell {
        let at = u64::from(peer) * 1000;
        LocalCell {
            peer: GpuIdx(peer),
            src_dev_ptr: at,
            dst_dev_ptr: 10_000 + at,
            bytes,
            flag_dev_ptr: 20_000 + at,
        }
    }

    #[test]
    fn flags_follow_their_bytes_and_the_own_one_comes_last() {
        let cells = vec![cell(1, 25), cell(2, 0), cell(0, 5)];
        let work = LocalCells { call: CallId(7), cells, chunk_bytes: 10, call_word_dev_ptr: 99 };
        let (mut moves, mut copies) = (LocalMoves::new(work), Copies::default());
        let flag = |peer: u64| (20_000 + 1000 * peer, 99, 8);
        // Peer 1 has not come; peer 2's cell is empty, so only its flag is due.
        let ready = |peer: GpuIdx| peer.0 != 1;
        while moves.step(&mut copies, ready).unwrap() {}
        assert_eq!(copies.started, [flag(2)]);
        copies.done = 1;
        while moves.step(&mut copies, ready).unwrap() {}
        assert_eq!(copies.started.len(), 1, "the own cell waits for all others");
        while moves.step(&mut copies, |_| true).unwrap() {}
        assert_eq!(copies.started[1..], [(11_000, 1000, 10), (11_010, 1010, 10)], "two at once");
        copies.done = 2;
        while moves.step(&mut copies, |_| true).unwrap() {}
        assert_eq!(copies.started[3..], [(11_020, 1020, 5)]);
        copies.done = 3;
        assert!(!moves.step(&mut copies, |_| true).unwrap() || copies.started.len() == 4);
        copies.done = 4;
        while moves.step(&mut copies, |_| true).unwrap() {}
        assert_eq!(copies.started[4..], [flag(1)]);
        copies.done = 5;
        while moves.step(&mut copies, |_| true).unwrap() {}
        assert_eq!(copies.started[5..], [(10_000, 0, 5)]);
        copies.done = 6;
        while moves.step(&mut copies, |_| true).unwrap() {}
        assert_eq!(copies.started[6..], [flag(0)]);
        assert!(!moves.is_done());
        copies.done = 7;
        while moves.step(&mut copies, |_| true).unwrap() {}
        assert!(moves.is_done());
    }
}
