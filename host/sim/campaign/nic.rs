//! A simulated NIC: the hardware traits on the simulated wire.

use std::collections::BTreeMap;

use super::wire::{Cargo, Done, SimWire};
use crate::hw::{
    HwError, LinkState, LocalKey, Nanos, Nic, NicCounters, NicDevice, NicEvent, PathId, Registrable,
    Registrar, RemoteKey, Work, WorkError, WorkOp,
};
use crate::topo::{GpuIdx, NicId, NicIdx};

/// Work that a NIC takes before it is polled again.
const QUEUE_DEPTH: usize = 64;

/// A NIC of the simulated wire. Path numbers are the peers' NIC numbers.
pub struct SimNic {
    wire: SimWire,
    id: NicId,
    idx: NicIdx,
    relay_gpu: GpuIdx,
    link: LinkState,
    counters: NicCounters,
    /// Posted since the last poll.
    fresh: usize,
    fenced: Vec<PathId>,
}

impl SimNic {
    /// NIC `id` of the job, number `idx` of its server.
    pub fn new(wire: SimWire, id: NicId, idx: NicIdx, relay_gpu: GpuIdx) -> Self {
        let (link, counters) = (LinkState::Up, NicCounters::default());
        Self { wire, id, idx, relay_gpu, link, counters, fresh: 0, fenced: Vec::new() }
    }

    fn send(&mut self, item: &Work) {
        let to = NicId(item.path.0);
        let mut wire = self.wire.lock();
        if self.fenced.contains(&item.path) || wire.lane_is_broken(self.id, to) {
            let now = wire.now();
            let result = Err(WorkError::Flushed);
            return wire.complete(self.id, now, Done { to, cookie: item.cookie, result });
        }
        let (remote, cargo) = match item.op {
            WorkOp::Write { local, remote, imm } => {
                let bytes = wire.read_relay(self.id, u64::from(local.key.0) + local.offset, local.bytes);
                self.counters.tx_bytes += u64::from(local.bytes);
                (remote, Cargo::Payload { bytes, imm })
            }
            WorkOp::Inline { remote, data, .. } => {
                let word = u64::from_ne_bytes(std::array::from_fn(|i| data[i]));
                (remote, Cargo::Word(word))
            }
        };
        wire.send(self.id, to, item.cookie, (remote.rkey, remote.remote_addr), cargo);
    }
}

impl Nic for SimNic {
    fn idx(&self) -> NicIdx {
        self.idx
    }

    fn post(&mut self, work: &[Work], _now: Nanos) -> Result<usize, HwError> {
        let taken = work.len().min(QUEUE_DEPTH - self.fresh);
        work[..taken].iter().for_each(|item| self.send(item));
        self.fresh += taken;
        Ok(taken)
    }

    fn poll(&mut self, _now: Nanos, events: &mut Vec<NicEvent>) -> Result<(), HwError> {
        self.fresh = 0;
        let mut wire = self.wire.lock();
        let link = wire.link(self.id);
        if link != self.link {
            self.link = link;
            events.push(NicEvent::Link(link));
        }
        let done = wire.take_done(self.id).into_iter();
        events.extend(done.map(|d| NicEvent::Completed { cookie: d.cookie, result: d.result }));
        for landed in wire.take_landed(self.id) {
            self.counters.rx_bytes += u64::from(landed.bytes);
            events.push(NicEvent::Arrived { from: landed.from, imm: landed.imm, bytes: landed.bytes });
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), HwError> {
        self.wire.lock().flush(self.id);
        Ok(())
    }
}

impl NicDevice for SimNic {
    fn relay_gpu(&self) -> GpuIdx {
        self.relay_gpu
    }

    fn register(&mut self, memory: &Registrable<'_>) -> Result<(LocalKey, RemoteKey), HwError> {
        let (Registrable::Device { bytes, .. } | Registrable::Host { bytes, .. }) = *memory;
        let rkey = SimWire::relay_key(self.id);
        Ok((LocalKey(0), RemoteKey { remote_addr: 0, rkey, bytes }))
    }

    fn registrar(&self) -> Box<dyn Registrar> {
        let (wire, id, idx) = (self.wire.clone(), self.id, self.idx);
        Box::new(SimRegistrar { wire, id, idx, bytes_of: BTreeMap::new() })
    }

    fn endpoint(&self) -> Vec<u8> {
        self.id.0.to_le_bytes().to_vec()
    }

    fn open_path(&mut self, peer: NicId, _endpoint: &[u8]) -> Result<PathId, HwError> {
        Ok(PathId(peer.0))
    }

    fn fence(&mut self, path: PathId) -> Result<(), HwError> {
        let peer = NicId(path.0);
        self.fenced.push(path);
        let mut wire = self.wire.lock();
        wire.give_up(self.id, peer);
        wire.shut(peer, self.id);
        Ok(())
    }

    fn is_drained(&mut self, path: PathId) -> bool {
        self.wire.lock().is_drained(self.id, NicId(path.0))
    }

    fn reopen(&mut self, path: PathId) -> Result<(), HwError> {
        self.fenced.retain(|&p| p != path);
        self.wire.lock().reopen(self.id, NicId(path.0));
        Ok(())
    }

    fn counters(&self) -> NicCounters {
        self.counters
    }
}

/// Memory of its own beside a NIC; where it lies is its key. What is taken back is out of bounds for everybody.
struct SimRegistrar {
    wire: SimWire,
    id: NicId,
    idx: NicIdx,
    bytes_of: BTreeMap<u32, u64>,
}

impl Registrar for SimRegistrar {
    fn register(&mut self, memory: &Registrable<'_>) -> Result<(LocalKey, RemoteKey), HwError> {
        let (Registrable::Device { bytes, .. } | Registrable::Host { bytes, .. }) = *memory;
        let place = self.wire.add_memory(self.id, bytes);
        self.bytes_of.insert(place as u32, bytes);
        let rkey = SimWire::relay_key(self.id);
        Ok((LocalKey(place as u32), RemoteKey { remote_addr: place, rkey, bytes }))
    }

    fn deregister(&mut self, key: LocalKey) -> Result<(), HwError> {
        let unknown = HwError::Deregister { nic: self.idx, key: key.0 };
        let bytes = self.bytes_of.remove(&key.0).ok_or(unknown)?;
        self.wire.take_memory(self.id, key.0.into(), bytes);
        Ok(())
    }
}
