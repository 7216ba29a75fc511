//! Fixed windows: one address through which messages leave or come in, whichever NIC carries them. For kernels that know one
//! address only, such as a GEMM that writes its output in place or a captured graph that reads its input.
//!
//! Kernels that use the table are told another address with each slot, and a switch costs them nothing. A fixed window is
//! mapped anew instead, on the slot that the engine has chosen: only between kernels, only by whole chunks, and so only
//! where each slot is a chunk of its own. Either end of a stream may have one; the other end does not notice.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use super::{CommError, Communicator};
use crate::doorbell::{Class, Doorbell, Signal};
use crate::engine::Publish;
use crate::proxy::{ArmedSlot, FixedQueue, ProxyBell};
use crate::topo::Rank;

mod error;
mod place;
mod wait;

pub use error::FixedError;
pub use place::FixedCounters;
use place::Place;

const CLASS: Class = Class::LowLatency;

/// The streams of a communicator that are for fixed windows, for good.
#[derive(Default)]
pub(super) struct FixedStreams {
    sends: Streams<ArmedSlot>,
    recvs: Streams<Publish>,
}

/// By their other end.
type Streams<T> = BTreeMap<Rank, Stream<T>>;

struct Stream<T> {
    queue: Arc<FixedQueue<T>>,
    /// The window that uses it, if there is one.
    user: Weak<()>,
}

/// A window's hold on its stream.
struct End<T> {
    peer: Rank,
    queue: Arc<FixedQueue<T>>,
    bell: ProxyBell,
    _user: Arc<()>,
}

impl<T> Stream<T> {
    fn open(&mut self, peer: Rank, bell: ProxyBell) -> Result<End<T>, FixedError> {
        if self.user.strong_count() > 0 {
            return Err(FixedError::Open { peer });
        }
        let user = Arc::new(());
        self.user = Arc::downgrade(&user);
        Ok(End { peer, queue: Arc::clone(&self.queue), bell, _user: user })
    }
}

impl<T> End<T> {
    fn check(&self, streams: &Streams<T>) -> Result<(), FixedError> {
        let own = streams.get(&self.peer).is_some_and(|stream| Arc::ptr_eq(&stream.queue, &self.queue));
        if own { Ok(()) } else { Err(FixedError::OtherCommunicator { peer: self.peer }) }
    }
}

impl End<Publish> {
    fn give_back(&self, message: Publish) {
        let Publish { class, nic, slot, .. } = message;
        self.bell.ring(Doorbell::Drained { class, nic, slot });
    }
}

/// The sending end of a stream at one address. For each message: [`place`](Self::place), write to
/// [`dev_ptr`](Self::dev_ptr), [`send`](Self::send).
///
/// When it is dropped, a slot that was placed and not sent is the first of the stream's next window. Dropping waits for the
/// GPU's kernels.
pub struct FixedSend {
    end: End<ArmedSlot>,
    place: Place,
    slot: Option<ArmedSlot>,
    placed: bool,
    /// Messages of the stream up to the last one that was sent through this window.
    sent: u64,
}

/// The receiving end of a stream at one address. For each message: [`accept`](Self::accept), read from
/// [`dev_ptr`](Self::dev_ptr), [`release`](Self::release).
///
/// When it is dropped, a message that was accepted and not released is given back. Dropping waits for the GPU's kernels.
pub struct FixedRecv {
    end: End<Publish>,
    place: Place,
    message: Option<Publish>,
    accepted: bool,
}

impl Communicator {
    /// One address through which messages leave for a rank of another server. The stream there is not for kernels any more
    /// ([`ProxyError::FixedStream`](crate::proxy::ProxyError::FixedStream)), not even when the window is gone. Waits for the
    /// kernels that were launched.
    ///
    /// # Errors
    /// [`CommError::NoPuts`]; [`CommError::Fixed`]: [`FixedError::SameServer`], [`FixedError::PartialChunks`],
    /// [`FixedError::Open`], [`FixedError::KernelsUse`], [`FixedError::KernelsRun`]; [`CommError::Hw`].
    pub fn fixed_send(&mut self, dst: Rank) -> Result<FixedSend, CommError> {
        let (bell, place) = self.new_fixed(dst)?;
        if !self.fixed.sends.contains_key(&dst) {
            let [slots_claimed, _] = self.channel.claims_dev_ptrs(self.channel_dev_ptr, dst);
            self.check_unclaimed(dst, slots_claimed)?;
            let queue = Arc::default();
            self.proxy.fix_send(dst, Arc::clone(&queue));
            self.fixed.sends.insert(dst, Stream { queue, user: Weak::new() });
        }
        let stream = self.fixed.sends.get_mut(&dst).ok_or(CommError::Dead)?;
        Ok(FixedSend { end: stream.open(dst, bell)?, place, slot: None, placed: false, sent: 0 })
    }

    /// One address at which messages of a rank of another server are read; else as [`fixed_send`](Self::fixed_send).
    ///
    /// # Errors
    /// As there.
    pub fn fixed_recv(&mut self, src: Rank) -> Result<FixedRecv, CommError> {
        let (bell, place) = self.new_fixed(src)?;
        if !self.fixed.recvs.contains_key(&src) {
            let [_, messages_claimed] = self.channel.claims_dev_ptrs(self.channel_dev_ptr, src);
            self.check_unclaimed(src, messages_claimed)?;
            let queue = Arc::default();
            self.proxy.fix_recv(src, Arc::clone(&queue));
            self.fixed.recvs.insert(src, Stream { queue, user: Weak::new() });
        }
        let stream = self.fixed.recvs.get_mut(&src).ok_or(CommError::Dead)?;
        Ok(FixedRecv { end: stream.open(src, bell)?, place, message: None, accepted: false })
    }

    fn new_fixed(&mut self, peer: Rank) -> Result<(ProxyBell, Place), CommError> {
        self.bootstrap()?;
        if self.put_bytes == 0 {
            return Err(CommError::NoPuts);
        }
        if peer.0 >= self.cluster.ranks() || self.cluster.server_of(peer) == self.server {
            return Err(FixedError::SameServer { peer }.into());
        }
        if !self.slots.has_chunk_per_slot(CLASS) {
            return Err(FixedError::PartialChunks { put_bytes: self.put_bytes }.into());
        }
        self.quiesce()?; // The driver may wait for kernels before it reserves addresses.
        let place = Place::new(self.machine.shared_gpu(), self.slots.part_bytes(CLASS))?;
        Ok((self.proxy.bell().ok_or(CommError::Dead)?, place))
    }
}

impl FixedSend {
    /// The address, as this rank's kernels see it. It never changes.
    pub fn dev_ptr(&self) -> u64 {
        self.place.dev_ptr()
    }

    /// Longest message.
    pub fn bytes(&self) -> u64 {
        self.place.bytes()
    }

    /// What placing has cost so far.
    pub fn counters(&self) -> FixedCounters {
        self.place.counters()
    }

    /// Maps the window on the next slot that the engine has armed for the destination: both NICs are chosen, a credit and a
    /// send slot taken. Waits for that, and until nothing that this communicator has launched is queued or running, each for
    /// the communicator's time-out at most. *What was launched otherwise and touches the window must have ended.* Placing
    /// again before the message is sent changes nothing.
    ///
    /// # Errors
    /// [`FixedError::NoSlot`], [`FixedError::KernelsRun`], [`CommError::Hw`]: the window is mapped as before, and may be
    /// placed again. [`FixedError::OtherCommunicator`]. Others end the communicator.
    pub fn place(&mut self, comm: &mut Communicator) -> Result<(), CommError> {
        self.end.check(&comm.fixed.sends)?;
        if self.placed {
            return Ok(());
        }
        if self.slot.is_none() {
            self.slot = comm.take_next(&self.end.queue)?;
        }
        let no_slot = FixedError::NoSlot { dst: self.end.peer, waited: comm.timeout };
        let slot = self.slot.ok_or(no_slot)?;
        let offset = comm.slots.send_offset(CLASS, slot.slot);
        comm.show(&mut self.place, slot.nic, offset)?;
        self.placed = true;
        Ok(())
    }

    /// Sends what lies at the address: `bytes` of it, and what the message does to a signal of the destination besides. A
    /// message of 0 bytes is its signal alone. Waits for kernels as [`place`](Self::place) does; *what others write there
    /// must be written*. From here on nobody may write there before the window is placed again.
    ///
    /// # Errors
    /// [`FixedError::NotPlaced`], [`FixedError::TooLong`], [`FixedError::NoSuchSignal`], [`FixedError::KernelsRun`],
    /// [`FixedError::OtherCommunicator`]: nothing was sent. Others end the communicator.
    pub fn send(
        &mut self,
        comm: &mut Communicator,
        bytes: u64,
        signal: Option<Signal>,
    ) -> Result<(), CommError> {
        self.end.check(&comm.fixed.sends)?;
        let (dst, most, signals) = (self.end.peer, self.bytes(), comm.channel.signals());
        if bytes > most {
            return Err(FixedError::TooLong { bytes, most }.into());
        }
        if let Some(signal) = signal.filter(|s| s.number >= signals || s.value >> 63 != 0) {
            return Err(FixedError::NoSuchSignal { signal, signals }.into());
        }
        let Some(slot) = self.slot.filter(|_| self.placed) else {
            return Err(FixedError::NotPlaced { dst }.into());
        };
        comm.quiesce()?;
        (self.slot, self.placed, self.sent) = (None, false, slot.idx + 1);
        let queue = comm.channel.put_queue(dst);
        self.end.bell.ring(Doorbell::Send { class: CLASS, queue, idx: slot.idx, bytes, signal });
        Ok(())
    }

    /// Waits until all that was sent through this window is in the memory of its destination, for the communicator's
    /// time-out at most.
    ///
    /// # Errors
    /// [`FixedError::NotFlushed`]; [`FixedError::OtherCommunicator`]. Others end the communicator.
    pub fn flush(&self, comm: &mut Communicator) -> Result<(), CommError> {
        self.end.check(&comm.fixed.sends)?;
        let (dst, sent) = (self.end.peer, self.sent);
        let channel = Arc::clone(&comm.channel);
        let has_come = || channel.completed(dst) >= sent;
        comm.wait_for(&self.end.queue, has_come)?;
        if has_come() {
            return Ok(());
        }
        let missing = sent - channel.completed(dst);
        Err(FixedError::NotFlushed { dst, missing, waited: comm.timeout }.into())
    }
}

impl FixedRecv {
    /// The address, as this rank's kernels see it. It never changes.
    pub fn dev_ptr(&self) -> u64 {
        self.place.dev_ptr()
    }

    /// Longest message.
    pub fn bytes(&self) -> u64 {
        self.place.bytes()
    }

    /// What placing has cost so far.
    pub fn counters(&self) -> FixedCounters {
        self.place.counters()
    }

    /// Maps the window on the source's next message, where it lies, and returns its length. Waits for it, and for kernels,
    /// as [`FixedSend::place`] does; *what was launched otherwise and touches the window must have ended*. Messages that are
    /// their signal alone are not seen here.
    ///
    /// # Errors
    /// [`FixedError::NotReleased`]; [`FixedError::NoMessage`], [`FixedError::KernelsRun`], [`CommError::Hw`]: the window is
    /// mapped as before, and may accept again. [`FixedError::OtherCommunicator`]. Others end the communicator.
    pub fn accept(&mut self, comm: &mut Communicator) -> Result<u64, CommError> {
        self.end.check(&comm.fixed.recvs)?;
        let src = self.end.peer;
        if self.accepted {
            return Err(FixedError::NotReleased { src }.into());
        }
        if self.message.is_none() {
            self.message = comm.take_next(&self.end.queue)?;
        }
        let message = self.message.ok_or(FixedError::NoMessage { src, waited: comm.timeout })?;
        let offset = comm.slots.recv_offset(CLASS, message.slot);
        comm.show(&mut self.place, message.nic, offset)?;
        self.accepted = true;
        Ok(message.bytes.into())
    }

    /// Gives the message's slot back, once the kernels that this communicator has launched have ended; *what others read
    /// there must be read*. From here on nobody may read there before the next message is accepted.
    ///
    /// # Errors
    /// [`FixedError::NotAccepted`]; [`FixedError::KernelsRun`]: it may be released again. [`FixedError::OtherCommunicator`].
    /// Others end the communicator.
    pub fn release(&mut self, comm: &mut Communicator) -> Result<(), CommError> {
        self.end.check(&comm.fixed.recvs)?;
        let src = self.end.peer;
        let Some(message) = self.message.filter(|_| self.accepted) else {
            return Err(FixedError::NotAccepted { src }.into());
        };
        comm.quiesce()?;
        (self.message, self.accepted) = (None, false);
        self.end.give_back(message);
        Ok(())
    }
}

impl Drop for FixedSend {
    fn drop(&mut self) {
        self.slot.take().into_iter().for_each(|slot| self.end.queue.put_back(slot));
    }
}

impl Drop for FixedRecv {
    fn drop(&mut self) {
        match self.message.take() {
            Some(message) if !self.accepted => self.end.queue.put_back(message),
            // A kernel that does not end may still read it: then its slot is lost.
            Some(message) if self.place.is_quiet() => self.end.give_back(message),
            _ => {}
        }
    }
}
