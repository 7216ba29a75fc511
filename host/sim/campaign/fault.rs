//! Faults as NICs that wrap NICs: what they do wrong is drawn from a seed.

use std::collections::VecDeque;

use super::random::Random;
use super::wrap::Wrap;
use crate::hw::{HwError, Nanos, NicDevice, NicEvent, PathId};

/// How often what goes wrong: once in so many; 0 is never.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FaultRates {
    /// Completions that are never told.
    pub lost_completion: u64,
    /// At most this many of them.
    pub most_lost: u64,
    /// Completions that are told late.
    pub late_completion: u64,
    /// Arrivals that are told late; those behind them wait.
    pub late_arrival: u64,
    /// Allocations of relay memory that fail, and those that cannot be mapped.
    pub no_memory: u64,
    /// How late.
    pub late_ns: (Nanos, Nanos),
}

/// A NIC that fails at times.
pub struct Fault<N> {
    inner: N,
    rates: FaultRates,
    random: Random,
    lost: u64,
    /// Events held back, in order, and until when.
    held: VecDeque<(Nanos, NicEvent)>,
}

impl<N: NicDevice> Fault<N> {
    /// Wraps a NIC.
    pub fn new(inner: N, rates: FaultRates, seed: u64) -> Self {
        Self { inner, rates, random: Random::new(seed), lost: 0, held: VecDeque::new() }
    }

    fn strikes(&mut self, rate: u64) -> bool {
        rate > 0 && self.random.one_in(rate)
    }

    /// When an event is to be told; `None`: never.
    fn told_at(&mut self, event: &NicEvent, now: Nanos) -> Option<Nanos> {
        let late_ns = self.rates.late_ns;
        let late = match event {
            NicEvent::Completed { result: Ok(()), .. } => {
                if self.lost < self.rates.most_lost && self.strikes(self.rates.lost_completion) {
                    self.lost += 1;
                    return None;
                }
                self.strikes(self.rates.late_completion)
            }
            NicEvent::Arrived { .. } => self.strikes(self.rates.late_arrival),
            _ => false,
        };
        Some(if late { now + self.random.between(late_ns.0, late_ns.1) } else { now })
    }
}

impl<N: NicDevice> Wrap for Fault<N> {
    type Inner = N;

    fn inner(&self) -> &N {
        &self.inner
    }

    fn inner_mut(&mut self) -> &mut N {
        &mut self.inner
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<NicEvent>) -> Result<(), HwError> {
        let mut fresh = Vec::new();
        self.inner.poll(now, &mut fresh)?;
        for event in fresh {
            if let Some(at) = self.told_at(&event, now) {
                self.held.push_back((at, event));
            }
        }
        while let Some((_, event)) = self.held.front().filter(|(at, _)| *at <= now) {
            events.push(*event);
            self.held.pop_front();
        }
        Ok(())
    }

    fn is_drained(&mut self, path: PathId) -> bool {
        self.held.is_empty() && self.inner.is_drained(path)
    }
}

/// What a mutant leaves out: a campaign that passes with one of them proves nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mutation {
    /// Paths are not closed at the device: what is on the way still lands.
    NoFence,
    /// Arrivals are told before their payload can be seen.
    NoFlush,
    /// Any answer is believed, also one from before the path was closed.
    NoGeneration,
    /// Relay memory is taken back without waiting for what uses it.
    NoRecall,
}

/// A NIC that leaves something out.
pub struct Mutant<N> {
    inner: N,
    mutation: Option<Mutation>,
}

impl<N: NicDevice> Mutant<N> {
    /// Wraps a NIC.
    pub fn new(inner: N, mutation: Option<Mutation>) -> Self {
        Self { inner, mutation }
    }
}

impl<N: NicDevice> Wrap for Mutant<N> {
    type Inner = N;

    fn inner(&self) -> &N {
        &self.inner
    }

    fn inner_mut(&mut self) -> &mut N {
        &mut self.inner
    }

    fn flush(&mut self) -> Result<(), HwError> {
        if self.mutation == Some(Mutation::NoFlush) { Ok(()) } else { self.inner.flush() }
    }

    fn fence(&mut self, path: PathId) -> Result<(), HwError> {
        if self.mutation == Some(Mutation::NoFence) { Ok(()) } else { self.inner.fence(path) }
    }
}
