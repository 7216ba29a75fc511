//! Links shared max-min fairly, in continuous time: every flow gets as much as it can without taking from one that gets
//! no more (progressive filling).

use std::collections::BTreeMap;

use crate::hw::Nanos;

/// A link of the machine.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct LinkId(pub usize);

/// A flow under way.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct FlowId(pub u64);

#[derive(Clone, Debug)]
struct Flow {
    links: Vec<LinkId>,
    left_bytes: f64,
    byte_per_ns: f64,
}

/// The links and what flows over them.
#[derive(Clone, Debug)]
pub struct Fluid {
    byte_per_ns: Vec<f64>,
    flows: BTreeMap<FlowId, Flow>,
    next_id: u64,
    now: Nanos,
}

/// A flow with less left than this is done: what rounding leaves behind.
const NOTHING_BYTES: f64 = 1e-3;

impl Fluid {
    /// Links of these rates.
    pub fn new(byte_per_ns: Vec<f64>) -> Self {
        Self { byte_per_ns, flows: BTreeMap::new(), next_id: 0, now: 0 }
    }

    /// Begins a flow over some links; at least one.
    pub fn start(&mut self, links: Vec<LinkId>, bytes: u64, now: Nanos) -> FlowId {
        self.advance(now);
        let id = FlowId(self.next_id);
        self.next_id += 1;
        self.flows.insert(id, Flow { links, left_bytes: bytes as f64, byte_per_ns: 0.0 });
        self.share();
        id
    }

    /// When the next flow ends, if all goes on as it does.
    pub fn next_end(&self) -> Option<Nanos> {
        let end = |f: &Flow| self.now + (f.left_bytes.max(0.0) / f.byte_per_ns).ceil() as Nanos;
        self.flows.values().map(end).min()
    }

    /// Moves on to `now` and takes out the flows that have ended, in the order of their start.
    pub fn take_ended(&mut self, now: Nanos) -> Vec<FlowId> {
        self.advance(now);
        let ended: Vec<FlowId> =
            self.flows.iter().filter(|(_, f)| f.left_bytes <= NOTHING_BYTES).map(|(&id, _)| id).collect();
        for id in &ended {
            self.flows.remove(id);
        }
        if !ended.is_empty() {
            self.share();
        }
        ended
    }

    fn advance(&mut self, now: Nanos) {
        let passed = now.saturating_sub(self.now) as f64;
        for flow in self.flows.values_mut() {
            flow.left_bytes -= flow.byte_per_ns * passed;
        }
        self.now = self.now.max(now);
    }

    /// Progressive filling: the link that gives its flows least is full; they are settled; the rest share what is left.
    fn share(&mut self) {
        let mut room = self.byte_per_ns.clone();
        let mut flows_on = vec![0u32; room.len()];
        let mut open: Vec<&mut Flow> = self.flows.values_mut().collect();
        open.iter().flat_map(|f| &f.links).for_each(|l| flows_on[l.0] += 1);
        while !open.is_empty() {
            let part = |l: usize| (flows_on[l] > 0).then(|| (room[l].max(0.0) / f64::from(flows_on[l]), l));
            let tightest = (0..room.len()).filter_map(part).min_by(|a, b| a.0.total_cmp(&b.0));
            let Some((rate, full)) = tightest else { return };
            open.retain_mut(|flow| {
                let settled = flow.links.contains(&LinkId(full));
                if settled {
                    flow.byte_per_ns = rate;
                    for l in &flow.links {
                        room[l.0] -= rate;
                        flows_on[l.0] -= 1;
                    }
                }
                !settled
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(fluid: &Fluid, id: FlowId) -> f64 {
        fluid.flows[&id].byte_per_ns
    }

    #[test]
    fn max_min_fair() {
        // Two flows share link 0 (10); one of them also crosses link 1 (2): it gets 2, the other the rest.
        let mut fluid = Fluid::new(vec![10.0, 2.0]);
        let slow = fluid.start(vec![LinkId(0), LinkId(1)], 1000, 0);
        let fast = fluid.start(vec![LinkId(0)], 1000, 0);
        assert_eq!((rate(&fluid, slow), rate(&fluid, fast)), (2.0, 8.0));
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
        let first = fluid.start(vec![LinkId(0)], 1000, 0);
        let second = fluid.start(vec![LinkId(0)], 100, 50);
        assert_eq!((rate(&fluid, first), rate(&fluid, second)), (5.0, 5.0));
        assert_eq!(fluid.take_ended(70), [second]);
        assert_eq!(rate(&fluid, first), 10.0);
        assert_eq!(fluid.next_end(), Some(110));
    }
}
