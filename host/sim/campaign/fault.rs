//! Faults as NICs that wrap NICs: what they do wrong is drawn from a seed.

use std::collections::VecDeque;

use super::random::Random;
use crate::hw::{
    HwError, LocalKey, Nanos, Nic, NicCounters, NicDevice, NicEvent, PathId, Registrable, RemoteKey, Work,
};
use crate::topo::{GpuIdx, NicId, NicIdx};

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

impl<N: NicDevice> Nic for Fault<N> {
    fn idx(&self) -> NicIdx {
        self.inner.idx()
    }

    fn post(&mut self, work: &[Work], now: Nanos) -> Result<usize, HwError> {
        self.inner.post(work, now)
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

    fn flush(&mut self) -> Result<(), HwError> {
        self.inner.flush()
    }
}

impl<N: NicDevice> NicDevice for Fault<N> {
    fn relay_gpu(&self) -> GpuIdx {
        self.inner.relay_gpu()
    }

    fn register(&mut self, memory: &Registrable<'_>) -> Result<(LocalKey, RemoteKey), HwError> {
        self.inner.register(memory)
    }

    fn endpoint(&self) -> Vec<u8> {
        self.inner.endpoint()
    }

    fn open_path(&mut self, peer: NicId, endpoint: &[u8]) -> Result<PathId, HwError> {
        self.inner.open_path(peer, endpoint)
    }

    fn fence(&mut self, path: PathId) -> Result<(), HwError> {
        self.inner.fence(path)
    }

    fn is_drained(&mut self, path: PathId) -> bool {
        self.held.is_empty() && self.inner.is_drained(path)
    }

    fn reopen(&mut self, path: PathId) -> Result<(), HwError> {
        self.inner.reopen(path)
    }

    fn counters(&self) -> NicCounters {
        self.inner.counters()
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

impl<N: NicDevice> Nic for Mutant<N> {
    fn idx(&self) -> NicIdx {
        self.inner.idx()
    }

    fn post(&mut self, work: &[Work], now: Nanos) -> Result<usize, HwError> {
        self.inner.post(work, now)
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<NicEvent>) -> Result<(), HwError> {
        self.inner.poll(now, events)
    }

    fn flush(&mut self) -> Result<(), HwError> {
        if self.mutation == Some(Mutation::NoFlush) { Ok(()) } else { self.inner.flush() }
    }
}

impl<N: NicDevice> NicDevice for Mutant<N> {
    fn relay_gpu(&self) -> GpuIdx {
        self.inner.relay_gpu()
    }

    fn register(&mut self, memory: &Registrable<'_>) -> Result<(LocalKey, RemoteKey), HwError> {
        self.inner.register(memory)
    }

    fn endpoint(&self) -> Vec<u8> {
        self.inner.endpoint()
    }

    fn open_path(&mut self, peer: NicId, endpoint: &[u8]) -> Result<PathId, HwError> {
        self.inner.open_path(peer, endpoint)
    }

    fn fence(&mut self, path: PathId) -> Result<(), HwError> {
        if self.mutation == Some(Mutation::NoFence) { Ok(()) } else { self.inner.fence(path) }
    }

    fn is_drained(&mut self, path: PathId) -> bool {
        self.inner.is_drained(path)
    }

    fn reopen(&mut self, path: PathId) -> Result<(), HwError> {
        self.inner.reopen(path)
    }

    fn counters(&self) -> NicCounters {
        self.inner.counters()
    }
}
