//! Links shared max-min fairly, in continuous time: every flow gets as much as it can without taking from one that gets
//! no more (progressive filling).
//!
//! A flow that begins or ends changes the rates only of those that share links with it, or with one that does, and so
//! on; the others are left alone. Rates are settled once per moment, however many flows begin and end in it.

use crate::hw::Nanos;

/// A link of the machine.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct LinkId(pub usize);

/// A flow under way. Later flows have larger numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct FlowId(pub u64);

/// The most links that one flow crosses.
pub const MAX_LINKS: usize = 4;

#[derive(Clone, Copy, Debug)]
struct Flow {
    id: FlowId,
    links: [LinkId; MAX_LINKS],
    link_count: usize,
    /// As of `since`.
    left_bytes: f64,
    since: Nanos,
    byte_per_ns: f64,
    settled: bool,
}

impl Flow {
    fn links(&self) -> &[LinkId] {
        &self.links[..self.link_count]
    }
}

/// The end of what does not move.
const NEVER: Nanos = Nanos::MAX;
/// Rates that differ by no more than this part are the same.
const SAME: f64 = 1e-9;

#[derive(Clone, Debug, Default)]
struct Link {
    byte_per_ns: f64,
    /// Places of the flows that cross it.
    flows: Vec<usize>,
    /// While rates are settled: what is not given away, and how many wait for it.
    room: f64,
    open: u32,
    reached: bool,
    /// In `part` and `shares`.
    place: usize,
}

impl Link {
    /// What it would give each flow that waits for it.
    fn share(&self) -> f64 {
        if self.open == 0 { f64::INFINITY } else { self.room.max(0.0) / f64::from(self.open) }
    }
}

/// The links and what flows over them.
#[derive(Clone, Debug)]
pub struct Fluid {
    links: Vec<Link>,
    flows: Vec<Flow>,
    free: Vec<usize>,
    /// When each flow ends, by place; never where there is none. All of them change at almost every event: looking
    /// through them costs less than keeping them in order.
    ends: Vec<Nanos>,
    /// Links whose flows have changed since rates were settled.
    changed: Vec<LinkId>,
    /// Memory of `settle`: links, and what each would give.
    part: Vec<LinkId>,
    shares: Vec<f64>,
    next_id: u64,
    now: Nanos,
}

impl Fluid {
    /// Links of these rates.
    pub fn new(byte_per_ns: Vec<f64>) -> Self {
        let link = |byte_per_ns| Link { byte_per_ns, ..Link::default() };
        Self {
            links: byte_per_ns.into_iter().map(link).collect(),
            flows: Vec::new(),
            free: Vec::new(),
            ends: Vec::new(),
            changed: Vec::new(),
            part: Vec::new(),
            shares: Vec::new(),
            next_id: 0,
            now: 0,
        }
    }

    /// Begins a flow over some links: at least one, at most [`MAX_LINKS`].
    pub fn start(&mut self, links: &[LinkId], bytes: u64, now: Nanos) -> FlowId {
        self.move_on(now);
        let id = FlowId(self.next_id);
        self.next_id += 1;
        let link_count = links.len().min(MAX_LINKS);
        let mut crossed = [LinkId(0); MAX_LINKS];
        crossed[..link_count].copy_from_slice(&links[..link_count]);
        let flow = Flow {
            id,
            links: crossed,
            link_count,
            left_bytes: bytes as f64,
            since: now,
            byte_per_ns: 0.0,
            settled: false,
        };
        let at = self.free.pop().unwrap_or(self.flows.len());
        match self.flows.get_mut(at) {
            Some(place) => *place = flow,
            None => {
                self.flows.push(flow);
                self.ends.push(NEVER);
            }
        }
        for link in flow.links() {
            self.links[link.0].flows.push(at);
        }
        self.changed.extend_from_slice(flow.links());
        id
    }

    /// When the next flow ends, if all goes on as it does.
    pub fn next_end(&mut self) -> Option<Nanos> {
        self.settle();
        self.ends.iter().copied().min().filter(|&end| end != NEVER)
    }

    /// Moves on to `now` and takes out the flows that have ended, in the order of their start.
    pub fn take_ended(&mut self, now: Nanos) -> Vec<FlowId> {
        self.move_on(now);
        let mut ended = Vec::new();
        for at in 0..self.ends.len() {
            if self.ends[at] <= now {
                ended.push(self.flows[at].id);
                self.remove(at);
            }
        }
        ended.sort_unstable();
        ended
    }

    fn remove(&mut self, at: usize) {
        let flow = self.flows[at];
        for link in flow.links() {
            let on = &mut self.links[link.0].flows;
            if let Some(place) = on.iter().position(|&f| f == at) {
                on.swap_remove(place);
            }
        }
        self.changed.extend_from_slice(flow.links());
        self.ends[at] = NEVER;
        self.free.push(at);
    }

    fn move_on(&mut self, now: Nanos) {
        if now > self.now {
            self.settle();
            self.now = now;
        }
    }

    /// Shares anew what the changed links, and all that hang together with them, have to give.
    fn settle(&mut self) {
        if self.changed.is_empty() {
            return;
        }
        self.gather();
        while let Some((rate, full)) = self.tightest() {
            for place in 0..self.links[full.0].flows.len() {
                let at = self.links[full.0].flows[place];
                if !self.flows[at].settled {
                    self.give(at, rate);
                }
            }
        }
        for link in self.part.drain(..) {
            self.links[link.0].reached = false;
            for &at in &self.links[link.0].flows {
                self.flows[at].settled = false;
            }
        }
    }

    /// The links that hang together with the changed ones, in `part`.
    fn gather(&mut self) {
        let mut waiting = std::mem::take(&mut self.changed);
        while let Some(id) = waiting.pop() {
            let link = &mut self.links[id.0];
            if link.reached {
                continue;
            }
            (link.reached, link.room, link.open) = (true, link.byte_per_ns, link.flows.len() as u32);
            self.part.push(id);
            for &at in &self.links[id.0].flows {
                let next = self.flows[at].links().iter().filter(|l| !self.links[l.0].reached);
                waiting.extend(next);
            }
        }
        self.changed = waiting;
        // Which of two equal links is first must not hang on the order in which they were found.
        self.part.sort_unstable();
        self.shares.clear();
        for (place, id) in self.part.iter().enumerate() {
            let link = &mut self.links[id.0];
            link.place = place;
            self.shares.push(link.share());
        }
    }

    /// The link that gives its flows least.
    fn tightest(&self) -> Option<(f64, LinkId)> {
        let mut least = (f64::INFINITY, 0);
        for (place, &share) in self.shares.iter().enumerate() {
            if share < least.0 {
                least = (share, place);
            }
        }
        (least.0 < f64::INFINITY).then(|| (least.0, self.part[least.1]))
    }

    fn give(&mut self, at: usize, rate: f64) {
        let flow = &mut self.flows[at];
        flow.settled = true;
        for link in &flow.links[..flow.link_count] {
            let link = &mut self.links[link.0];
            link.room -= rate;
            link.open -= 1;
            self.shares[link.place] = link.share();
        }
        // What only rounding has changed goes on as it was.
        if (flow.byte_per_ns - rate).abs() <= rate * SAME && self.ends[at] != NEVER {
            return;
        }
        flow.left_bytes -= flow.byte_per_ns * (self.now - flow.since) as f64;
        (flow.since, flow.byte_per_ns) = (self.now, rate);
        let left_ns = (flow.left_bytes.max(0.0) / rate).ceil() as Nanos;
        self.ends[at] = self.now.saturating_add(left_ns);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rate(fluid: &mut Fluid, id: FlowId) -> f64 {
        fluid.settle();
        fluid.flows.iter().find(|f| f.id == id).unwrap().byte_per_ns
    }

    #[test]
    fn max_min_fair() {
        // Two flows share link 0 (10); one of them also crosses link 1 (2): it gets 2, the other the rest.
        let mut fluid = Fluid::new(vec![10.0, 2.0]);
        let slow = fluid.start(&[LinkId(0), LinkId(1)], 1000, 0);
        let fast = fluid.start(&[LinkId(0)], 1000, 0);
        assert_eq!((rate(&mut fluid, slow), rate(&mut fluid, fast)), (2.0, 8.0));
        assert_eq!(fluid.next_end(), Some(125));
        assert_eq!(fluid.take_ended(124), []);
        assert_eq!(fluid.take_ended(125), [fast]);
        assert_eq!(fluid.next_end(), Some(500));
        assert_eq!(fluid.take_ended(500), [slow]);
        assert_eq!(fluid.next_end(), None);
    }

    #[test]
    fn who_comes_later_takes_its_share_from_then_on() {
        let mut fluid = Fluid::new(vec![10.0]);
        let first = fluid.start(&[LinkId(0)], 1000, 0);
        let second = fluid.start(&[LinkId(0)], 100, 50);
        assert_eq!((rate(&mut fluid, first), rate(&mut fluid, second)), (5.0, 5.0));
        assert_eq!(fluid.take_ended(70), [second]);
        assert_eq!(rate(&mut fluid, first), 10.0);
        assert_eq!(fluid.next_end(), Some(110));
    }

    /// What a link that is shared among all flows at once gives, from the definition.
    fn is_max_min(fluid: &Fluid) -> Result<(), TestCaseError> {
        for link in &fluid.links {
            let used: f64 = link.flows.iter().map(|&at| fluid.flows[at].byte_per_ns).sum();
            prop_assert!(used <= link.byte_per_ns + 1e-6, "{used} on a link of {}", link.byte_per_ns);
        }
        let alive = fluid.flows.iter().zip(&fluid.ends).filter(|(_, end)| **end != NEVER);
        for (flow, _) in alive {
            // Each flow crosses a full link on which nobody gets more.
            let held = flow.links().iter().any(|l| {
                let link = &fluid.links[l.0];
                let rates = link.flows.iter().map(|&at| fluid.flows[at].byte_per_ns);
                let (sum, most) = rates.fold((0.0, 0.0f64), |(s, m), r| (s + r, m.max(r)));
                sum >= link.byte_per_ns - 1e-6 && flow.byte_per_ns >= most - 1e-6
            });
            prop_assert!(held, "{flow:?}");
        }
        Ok(())
    }

    proptest! {
        /// Flows come and go; settling only what hangs together leaves all rates max-min fair, and every byte moves.
        #[test]
        fn rates_stay_max_min_fair(
            begins in proptest::collection::vec((0usize..6, 0usize..6, 1u64..5000, 0u64..50), 1..40)
        ) {
            let mut fluid = Fluid::new(vec![1.0, 2.0, 3.0, 5.0, 8.0, 13.0]);
            let (mut now, mut ended, mut last) = (0, 0, 0);
            for &(a, b, bytes, pause) in &begins {
                now += pause;
                while let Some(end) = fluid.next_end().filter(|&e| e <= now) {
                    prop_assert!(end >= last);
                    last = end;
                    ended += fluid.take_ended(end).len();
                }
                let links = if a == b { vec![LinkId(a)] } else { vec![LinkId(a), LinkId(b)] };
                fluid.start(&links, bytes, now);
                fluid.settle();
                is_max_min(&fluid)?;
            }
            while let Some(end) = fluid.next_end() {
                ended += fluid.take_ended(end).len();
                fluid.settle();
                is_max_min(&fluid)?;
            }
            prop_assert_eq!(ended, begins.len());
            prop_assert!(fluid.links.iter().all(|l| l.flows.is_empty()));
        }
    }
}
