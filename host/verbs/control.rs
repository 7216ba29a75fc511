//! The datagram queue pair of a NIC, over which hellos go.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use ibverbs_sys as ffi;
use ibverbs_sys::ibv_qp_attr_mask as mask;
use ibverbs_sys::ibv_qp_state as state;

use super::advice::{Operation, advise};
use super::memory::HostMemory;
use super::post::{self, Datagram};
use super::queue_pair::{Local, address};
use super::raw::{AddressHandle, Completions, Domain, QueuePairParts, RawQueuePair};
use super::wire::{Address, HELLO_BYTES, Hello};
use crate::topo::NicId;

/// Hellos that can be on the way out, and that can come in between two polls. More are lost, and said again.
const PLACES: usize = 64;
/// The device puts the routing header of a datagram in front of it.
const HEADER_BYTES: usize = 40;
/// A place for one datagram.
const PLACE_WORDS: usize = 24;
const _: () = assert!(PLACE_WORDS * 8 >= HEADER_BYTES + HELLO_BYTES);

/// Ids of receives; sends have the others.
const RECEIVE: u64 = 1 << 32;

/// The queue pair with its buffers.
pub(super) struct Control {
    queue_pair: RawQueuePair,
    completions: Arc<Completions>,
    domain: Arc<Domain>,
    /// Places for sends, then for receives.
    memory: HostMemory,
    free: Vec<u64>,
    port: u8,
    qkey: u32,
    ways: HashMap<NicId, AddressHandle>,
}

impl Control {
    pub fn new(domain: &Arc<Domain>, port: u8, qkey: u32) -> io::Result<Self> {
        let completions = Arc::new(Completions::new(domain.context(), 2 * PLACES)?);
        let parts = QueuePairParts {
            domain: Arc::clone(domain),
            sends: Arc::clone(&completions),
            receives: Arc::clone(&completions),
            shared: None,
            kind: ffi::ibv_qp_type::IBV_QPT_UD,
            send_depth: PLACES as u32,
            recv_depth: PLACES as u32,
            inline_bytes: 0,
        };
        let mut queue_pair = RawQueuePair::new(parts).map_err(|e| advise(Operation::CreateQueue, e))?;
        bring_up(&mut queue_pair, port, qkey).map_err(|e| advise(Operation::ConnectQueuePair, e))?;
        let memory = HostMemory::new(domain, 2 * PLACES * PLACE_WORDS)?;
        let (domain, ways) = (Arc::clone(domain), HashMap::new());
        let mut control =
            Self { queue_pair, completions, domain, memory, free: Vec::new(), port, qkey, ways };
        control.fill()?;
        Ok(control)
    }

    /// All places are free: those for receives are given to the device.
    fn fill(&mut self) -> io::Result<()> {
        self.free = (0..PLACES as u64).collect();
        (0..PLACES as u64).try_for_each(|place| self.receive_into(place))
    }

    /// A datagram that could not leave, because the link was down, has stopped the queue pair: it begins anew, under the same
    /// number. What was on the way is lost, as datagrams may be.
    fn restart(&mut self) -> io::Result<()> {
        let mut attr = ffi::ibv_qp_attr { qp_state: state::IBV_QPS_RESET, ..Default::default() };
        self.queue_pair.modify(&mut attr, mask::IBV_QP_STATE)?;
        let mut completions = [ffi::ibv_wc::default(); PLACES];
        while !self.completions.poll(&mut completions)?.is_empty() {}
        bring_up(&mut self.queue_pair, self.port, self.qkey)?;
        self.fill()
    }

    pub fn number(&self) -> u32 {
        self.queue_pair.number()
    }

    fn span(&self, place: u64, bytes: usize) -> ffi::ibv_sge {
        let memory = self.memory.memory();
        let addr = memory.start() + place * PLACE_WORDS as u64 * 8;
        ffi::ibv_sge { addr, length: bytes as u32, lkey: memory.lkey() }
    }

    fn receive_into(&mut self, place: u64) -> io::Result<()> {
        let span = self.span(PLACES as u64 + place, PLACE_WORDS * 8);
        self.queue_pair.post_receive(RECEIVE | place, span)
    }

    /// Addresses have changed: ways are looked up again.
    pub fn forget_ways(&mut self) {
        self.ways.clear();
    }

    /// Sends a hello, or loses it.
    pub fn say(&mut self, local: &Local<'_>, to: &Address, hello: &Hello) -> io::Result<()> {
        let Some(place) = self.free.pop() else { return Ok(()) };
        let words = self.memory.words();
        for (i, bytes) in hello.encode().chunks_exact(8).enumerate() {
            let word = u64::from_ne_bytes(std::array::from_fn(|b| bytes[b]));
            // Relaxed: posting the request hands the bytes to the device.
            words[place as usize * PLACE_WORDS + i].store(word, Ordering::Relaxed);
        }
        let way = match self.ways.entry(to.nic) {
            std::collections::hash_map::Entry::Occupied(e) => e.into_mut(),
            std::collections::hash_map::Entry::Vacant(e) => {
                let way = AddressHandle::new(&self.domain, &mut address(local, &to.place));
                e.insert(way.map_err(|e| {
                    self.free.push(place);
                    advise(Operation::ConnectQueuePair, e)
                })?)
            }
        };
        let way = way.as_ptr();
        let from = self.span(place, HELLO_BYTES);
        post::send(
            &mut self.queue_pair,
            Datagram { id: place, from, way, queue_pair: to.queue_pair, qkey: to.qkey },
        )
    }

    /// The hellos that have come in.
    pub fn hear(&mut self) -> io::Result<Vec<Hello>> {
        let mut completions = [ffi::ibv_wc::default(); 2 * PLACES];
        let queue = Arc::clone(&self.completions);
        let mut heard = Vec::new();
        let found = queue.poll(&mut completions)?;
        for wc in found.iter().filter(|wc| wc.is_valid()) {
            if wc.wr_id() & RECEIVE == 0 {
                self.free.push(wc.wr_id());
                continue;
            }
            let place = wc.wr_id() & !RECEIVE;
            heard.extend(self.read(place));
            self.receive_into(place)?;
        }
        if found.iter().any(|wc| !wc.is_valid()) {
            self.restart()?;
        }
        Ok(heard)
    }

    fn read(&self, place: u64) -> Option<Hello> {
        // Acquire: the device wrote the place before its completion, which was read just now.
        fence(Ordering::Acquire);
        let first = (PLACES + place as usize) * PLACE_WORDS;
        let words = &self.memory.words()[first..first + PLACE_WORDS];
        // Relaxed: see the fence.
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.load(Ordering::Relaxed).to_ne_bytes()).collect();
        Hello::decode(&bytes[HEADER_BYTES..])
    }
}

fn bring_up(queue_pair: &mut RawQueuePair, port: u8, qkey: u32) -> io::Result<()> {
    let mut attr =
        ffi::ibv_qp_attr { qp_state: state::IBV_QPS_INIT, port_num: port, qkey, ..Default::default() };
    let fields = mask::IBV_QP_STATE | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_QKEY;
    queue_pair.modify(&mut attr, fields)?;
    let mut attr = ffi::ibv_qp_attr { qp_state: state::IBV_QPS_RTR, ..Default::default() };
    queue_pair.modify(&mut attr, mask::IBV_QP_STATE)?;
    let mut attr = ffi::ibv_qp_attr { qp_state: state::IBV_QPS_RTS, sq_psn: 0, ..Default::default() };
    queue_pair.modify(&mut attr, mask::IBV_QP_STATE | mask::IBV_QP_SQ_PSN)
}
