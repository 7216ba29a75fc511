//! Whose turn it is on a NIC: transfers go in list order, one at a time per direction. The NIC's owner counts what
//! moves and says through which transfer its server may go; the next one is let in a little before the present one
//! ends, so that the NIC does not idle for a credit's way.

use std::collections::VecDeque;
use std::fmt;

use super::call::{Direction, Turn};
use crate::topo::ServerId;

/// The turns of one NIC in one direction.
#[derive(Debug, Default)]
pub struct TurnKeeper {
    left: VecDeque<Turn>,
    lookahead_bytes: u64,
}

/// Every transfer is allowed: nothing is left to wait for.
pub const ALL_TRANSFERS: u32 = u32::MAX;

impl TurnKeeper {
    /// Turns in list order; the next begins when at most `lookahead_bytes` of the present one are left.
    pub fn new(turns: impl IntoIterator<Item = Turn>, lookahead_bytes: u64) -> Self {
        Self { left: turns.into_iter().collect(), lookahead_bytes }
    }

    /// Payload of a transfer with `peer` has moved. Messages of a turn that was let in early may overtake the last ones
    /// of the turn before, so what one turn does not need counts for the next: in sum nothing is lost.
    pub fn moved(&mut self, peer: ServerId, mut bytes: u64) {
        for turn in self.left.iter_mut().filter(|t| t.peer == peer) {
            let counted = bytes.min(turn.bytes);
            turn.bytes -= counted;
            bytes -= counted;
        }
        while self.left.front().is_some_and(|t| t.bytes == 0) {
            self.left.pop_front();
        }
    }

    /// Whether everything has moved.
    pub fn is_finished(&self) -> bool {
        self.left.is_empty()
    }

    /// The last transfer that may run now.
    pub fn through(&self) -> u32 {
        let mut open = self.left.iter().filter(|t| t.bytes > 0);
        match (open.next(), open.next()) {
            (None, _) => ALL_TRANSFERS,
            (Some(present), Some(next)) if present.bytes <= self.lookahead_bytes => next.transfer,
            (Some(present), _) => present.transfer,
        }
    }
}

impl fmt::Display for TurnKeeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.left.iter().find(|t| t.bytes > 0) {
            None => write!(f, "no turn"),
            Some(t) => {
                let way = if t.direction == Direction::Egress { "to" } else { "from" };
                write!(f, "transfer {} ({} bytes {way} {} left)", t.transfer, t.bytes, t.peer)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topo::NicIdx;

    fn turn(transfer: u32, peer: u32, bytes: u64) -> Turn {
        Turn { nic: NicIdx(0), direction: Direction::Egress, transfer, peer: ServerId(peer), bytes }
    }

    #[test]
    fn a_message_that_overtakes_is_not_lost() {
        let mut k = TurnKeeper::new([turn(2, 1, 100), turn(5, 1, 50), turn(7, 2, 10)], 20);
        k.moved(ServerId(1), 90);
        assert_eq!(k.through(), 5);
        k.moved(ServerId(1), 50); // of transfer 5, before the last 10 of transfer 2
        assert_eq!(k.through(), 7);
        k.moved(ServerId(1), 10);
        assert_eq!(k.through(), 7);
        k.moved(ServerId(2), 10);
        assert!(k.is_finished());
    }

    #[test]
    fn one_at_a_time_with_a_look_ahead() {
        let mut k = TurnKeeper::new([turn(2, 1, 100), turn(5, 2, 50), turn(7, 1, 10)], 20);
        assert_eq!(k.through(), 2);
        k.moved(ServerId(1), 79);
        assert_eq!(k.through(), 2);
        k.moved(ServerId(1), 1);
        assert_eq!(k.through(), 5);
        k.moved(ServerId(2), 10);
        assert_eq!(k.through(), 5);
        k.moved(ServerId(1), 20);
        assert_eq!(k.through(), 5);
        k.moved(ServerId(2), 40);
        assert_eq!(k.through(), 7);
        k.moved(ServerId(1), 10);
        assert_eq!(k.through(), ALL_TRANSFERS);
        k.moved(ServerId(1), 10);
    }
}
