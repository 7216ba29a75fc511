//! One order over several queue pairs. Each keeps its own order; whoever deals items out to lanes strictly in turn can have
//! them back in that order, with no number on any of them.

use std::collections::VecDeque;

/// Items of several lanes, given back in the order in which they were dealt out.
#[derive(Debug)]
pub struct InTurn<T> {
    lanes: Vec<VecDeque<T>>,
    next: usize,
}

impl<T> InTurn<T> {
    /// At least one lane; the first item is of lane 0.
    pub fn new(lanes: usize) -> Self {
        Self { lanes: (0..lanes.max(1)).map(|_| VecDeque::new()).collect(), next: 0 }
    }

    /// The next item of a lane.
    pub fn put(&mut self, lane: usize, item: T) {
        self.lanes[lane].push_back(item);
    }

    /// The next item of all, if it has come.
    pub fn take(&mut self) -> Option<T> {
        let item = self.lanes[self.next].pop_front()?;
        self.next = (self.next + 1) % self.lanes.len();
        Some(item)
    }

    /// Nothing more will come: what has come, in turn as far as that goes, and starts again at lane 0.
    pub fn drain(&mut self) -> Vec<T> {
        let mut items = Vec::new();
        while self.lanes.iter().any(|l| !l.is_empty()) {
            items.extend(self.lanes[self.next].pop_front());
            self.next = (self.next + 1) % self.lanes.len();
        }
        self.next = 0;
        items
    }
}

/// Deals items out to lanes in turn.
#[derive(Debug, Clone, Copy)]
pub struct Dealer {
    lanes: usize,
    next: usize,
}

impl Dealer {
    /// The counterpart of [`InTurn::new`].
    pub fn new(lanes: usize) -> Self {
        Self { lanes: lanes.max(1), next: 0 }
    }

    /// The lane of the next item.
    pub fn lane(&self) -> usize {
        self.next
    }

    /// It was dealt out.
    pub fn dealt(&mut self) {
        self.next = (self.next + 1) % self.lanes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// However lanes run ahead of each other, the order is that of the dealer.
        #[test]
        fn order_is_kept(lanes in 1usize..5, steps in prop::collection::vec(0usize..5, 0..200)) {
            let mut dealer = Dealer::new(lanes);
            let mut on_the_way = vec![VecDeque::new(); lanes];
            for i in 0..100u32 {
                on_the_way[dealer.lane()].push_back(i);
                dealer.dealt();
            }
            let mut turn = InTurn::new(lanes);
            let mut seen = Vec::new();
            for lane in steps {
                let lane = lane % lanes;
                if let Some(item) = on_the_way[lane].pop_front() {
                    turn.put(lane, item);
                }
                while let Some(item) = turn.take() {
                    seen.push(item);
                }
            }
            prop_assert!(seen.iter().copied().eq(0..seen.len() as u32));
            let arrived = 100 - on_the_way.iter().map(VecDeque::len).sum::<usize>();
            let rest = turn.drain();
            prop_assert_eq!(seen.len() + rest.len(), arrived, "what came is given back, gaps or not");
            prop_assert!(turn.take().is_none());
        }
    }
}
