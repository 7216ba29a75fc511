//! The pipeline on paper: balance ahead of the NICs, redistribution behind them, and what stays in a server beside them,
//! all on the same scale-up links (FAST, NSDI'26, section 4).

use super::CostModel;
use super::steps::Step;
use crate::topo::ServerId;

/// What scale-up adds to the time of the NICs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pipeline {
    /// When every byte is where it is meant to be.
    pub done_ns: u64,
    /// How much later the NICs end because they wait for balance.
    pub balance_ns: u64,
    /// What redistribution takes after the NICs have ended.
    pub spread_ns: u64,
    /// What scale-up links still carry after that: balance, redistribution and the servers' own parts together are more
    /// than NICs leave time for.
    pub own_ns: u64,
}

/// One direction of a server.
#[derive(Clone, Copy, Default)]
struct Side {
    /// Its NICs are done with what came before.
    free_ns: u64,
    /// Its NICs began the present transfer.
    began_ns: u64,
    /// Its scale-up links are done with what came before.
    copied_ns: u64,
}

/// A list and its steps, carried out.
pub(super) struct Run {
    senders: Vec<Side>,
    receivers: Vec<Side>,
    start_ns: u64,
    nics_end_ns: u64,
    spread_end_ns: u64,
}

impl Run {
    pub fn new(servers: usize, model: &CostModel) -> Self {
        let sides = vec![Side::default(); servers];
        Self {
            senders: sides.clone(),
            receivers: sides,
            start_ns: model.start_ns,
            nics_end_ns: 0,
            spread_end_ns: 0,
        }
    }

    /// The next transfer of the list.
    ///
    /// Balance runs one transfer ahead of the NICs, and streams: NICs send what is beside them meanwhile. So it is exposed
    /// before the first transfer at most, unless scale-up is slower than the NICs. Redistribution streams behind.
    pub fn transfer(&mut self, (src, dst): (ServerId, ServerId), step: &Step) {
        let (sender, receiver) = (&mut self.senders[src.idx()], &mut self.receivers[dst.idx()]);
        let balance_ns = sender.copied_ns.max(sender.began_ns);
        let began_ns = sender.free_ns.max(receiver.free_ns).saturating_add(self.start_ns);
        let end_ns = nics_end(began_ns, balance_ns, step.nic_ns, step);
        sender.copied_ns = balance_ns.saturating_add(step.balance.ns);
        (sender.began_ns, sender.free_ns) = (began_ns, end_ns);
        let spread_ns = receiver.copied_ns.max(began_ns);
        receiver.copied_ns = spread_end(spread_ns, end_ns, step);
        receiver.free_ns = end_ns;
        self.nics_end_ns = self.nics_end_ns.max(end_ns);
        self.spread_end_ns = self.spread_end_ns.max(receiver.copied_ns);
    }

    /// Loose pieces, which follow the list and take `nic_ns`.
    pub fn loose(&mut self, nic_ns: u64, step: &Step) {
        let last = |sides: &[Side]| sides.iter().map(|side| side.copied_ns).max().unwrap_or(0);
        let began_ns = self.nics_end_ns;
        let end_ns = nics_end(began_ns, last(&self.senders), nic_ns, step);
        let spread_ns = spread_end(last(&self.receivers).max(began_ns), end_ns, step);
        self.nics_end_ns = end_ns;
        self.spread_end_ns = self.spread_end_ns.max(spread_ns);
    }

    /// What comes of it, when NICs that wait for nobody take `nics_ns` and the busiest scale-up link `scaleup_ns` in all.
    pub fn finish(self, nics_ns: u64, scaleup_ns: u64) -> Pipeline {
        let spread_end_ns = self.nics_end_ns.max(self.spread_end_ns);
        let done_ns = spread_end_ns.max(scaleup_ns);
        Pipeline {
            done_ns,
            balance_ns: self.nics_end_ns.saturating_sub(nics_ns),
            spread_ns: spread_end_ns - self.nics_end_ns,
            own_ns: done_ns - spread_end_ns,
        }
    }
}

/// When the NICs have sent what takes them `nic_ns` from `began_ns` on, and what balance brings from `balance_ns` on.
fn nics_end(began_ns: u64, balance_ns: u64, nic_ns: u64, step: &Step) -> u64 {
    let own = began_ns.saturating_add(nic_ns);
    if step.balance.ns == 0 {
        return own;
    }
    // NICs with nothing beside them start with the first message that comes; the last one has to be sent as well.
    let first = balance_ns.saturating_add(step.balance.message_ns).saturating_add(step.waiting_nic_ns);
    let last = balance_ns.saturating_add(step.balance.ns).saturating_add(step.last_nic_ns);
    own.max(if step.waiting_nic_ns > 0 { first } else { 0 }).max(last)
}

/// When redistribution is done that may begin at `from_ns`, and whose last message comes at `nics_end_ns`.
fn spread_end(from_ns: u64, nics_end_ns: u64, step: &Step) -> u64 {
    if step.spread.ns == 0 {
        return from_ns;
    }
    from_ns.saturating_add(step.spread.ns).max(nics_end_ns.saturating_add(step.spread.message_ns))
}

#[cfg(test)]
mod tests {
    use super::super::steps::Copies;
    use super::*;

    const PAIR: (ServerId, ServerId) = (ServerId(0), ServerId(1));

    fn step(nic_ns: u64, balance: (u64, u64), spread: (u64, u64)) -> Step {
        let copies = |(ns, message_ns)| Copies { ns, message_ns };
        Step {
            nic_ns,
            waiting_nic_ns: 0,
            balance: copies(balance),
            spread: copies(spread),
            last_nic_ns: if balance.0 > 0 { 10 } else { 0 },
        }
    }

    fn run(steps: &[Step], nics_ns: u64, scaleup_ns: u64) -> Pipeline {
        let mut run = Run::new(2, &CostModel { start_ns: 0, ..CostModel::default() });
        steps.iter().for_each(|step| run.transfer(PAIR, step));
        run.finish(nics_ns, scaleup_ns)
    }

    #[test]
    fn fast_scale_up_shows_in_the_last_message_alone() {
        let steps = [step(100, (20, 2), (20, 2)); 3];
        let exposed = Pipeline { done_ns: 302, balance_ns: 0, spread_ns: 2, own_ns: 0 };
        assert_eq!(run(&steps, 300, 120), exposed);
    }

    #[test]
    fn balance_is_exposed_before_the_first_transfer_only() {
        // The first cannot end before its balance and one message more; that of the second is done by then.
        let steps = [step(100, (150, 2), (0, 0)), step(100, (90, 2), (0, 0))];
        assert_eq!(run(&steps, 200, 240).balance_ns, 60);
        let all_moved = Step { waiting_nic_ns: 100, ..step(100, (50, 7), (0, 0)) };
        assert_eq!(run(&[all_moved, all_moved], 200, 100).balance_ns, 7);
    }

    #[test]
    fn redistribution_that_is_slower_than_nics_is_exposed_after_the_last() {
        let steps = [step(100, (0, 0), (150, 2)); 2];
        assert_eq!(
            run(&steps, 200, 300),
            Pipeline { done_ns: 300, balance_ns: 0, spread_ns: 100, own_ns: 0 }
        );
    }

    #[test]
    fn own_parts_fill_what_nics_leave() {
        let steps = [step(100, (20, 2), (20, 2)); 3];
        assert_eq!(run(&steps, 300, 290).done_ns, 302);
        assert_eq!(run(&steps, 300, 400), Pipeline { done_ns: 400, balance_ns: 0, spread_ns: 2, own_ns: 98 });
        assert_eq!(run(&[], 0, 70), Pipeline { done_ns: 70, balance_ns: 0, spread_ns: 0, own_ns: 70 });
    }

    #[test]
    fn loose_pieces_stream_too() {
        let mut run = Run::new(2, &CostModel::default());
        run.loose(100, &step(90, (20, 2), (30, 3)));
        assert_eq!(run.finish(100, 50), Pipeline { done_ns: 103, balance_ns: 0, spread_ns: 3, own_ns: 0 });
    }
}
