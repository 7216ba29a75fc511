//! NICs around NICs: a wrapper says what it does otherwise, and the rest goes to the NIC inside.

use crate::hw::{
    HwError, LocalKey, Nanos, Nic, NicCounters, NicDevice, NicEvent, PathId, Registrable, Registrar,
    RemoteKey, Work,
};
use crate::topo::{GpuIdx, NicId, NicIdx};

/// A NIC around another. Each method stands for the one of [`Nic`] or [`NicDevice`] of that name; by default it passes on.
pub trait Wrap: Send {
    /// What it is around.
    type Inner: NicDevice;

    /// The NIC inside.
    fn inner(&self) -> &Self::Inner;
    /// The same.
    fn inner_mut(&mut self) -> &mut Self::Inner;

    /// [`Nic::post`].
    ///
    /// # Errors
    /// As there.
    fn post(&mut self, work: &[Work], now: Nanos) -> Result<usize, HwError> {
        self.inner_mut().post(work, now)
    }

    /// [`Nic::poll`].
    ///
    /// # Errors
    /// As there.
    fn poll(&mut self, now: Nanos, events: &mut Vec<NicEvent>) -> Result<(), HwError> {
        self.inner_mut().poll(now, events)
    }

    /// [`Nic::flush`].
    ///
    /// # Errors
    /// As there.
    fn flush(&mut self) -> Result<(), HwError> {
        self.inner_mut().flush()
    }

    /// [`NicDevice::fence`].
    ///
    /// # Errors
    /// As there.
    fn fence(&mut self, path: PathId) -> Result<(), HwError> {
        self.inner_mut().fence(path)
    }

    /// [`NicDevice::is_drained`].
    fn is_drained(&mut self, path: PathId) -> bool {
        self.inner_mut().is_drained(path)
    }

    /// [`NicDevice::reopen`].
    ///
    /// # Errors
    /// As there.
    fn reopen(&mut self, path: PathId) -> Result<(), HwError> {
        self.inner_mut().reopen(path)
    }
}

impl<W: Wrap> Nic for W {
    fn idx(&self) -> NicIdx {
        self.inner().idx()
    }

    fn post(&mut self, work: &[Work], now: Nanos) -> Result<usize, HwError> {
        Wrap::post(self, work, now)
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<NicEvent>) -> Result<(), HwError> {
        Wrap::poll(self, now, events)
    }

    fn flush(&mut self) -> Result<(), HwError> {
        Wrap::flush(self)
    }
}

impl<W: Wrap> NicDevice for W {
    fn relay_gpu(&self) -> GpuIdx {
        self.inner().relay_gpu()
    }

    fn register(&mut self, memory: &Registrable<'_>) -> Result<(LocalKey, RemoteKey), HwError> {
        self.inner_mut().register(memory)
    }

    fn registrar(&self) -> Box<dyn Registrar> {
        self.inner().registrar()
    }

    fn endpoint(&self) -> Vec<u8> {
        self.inner().endpoint()
    }

    fn open_path(&mut self, peer: NicId, endpoint: &[u8]) -> Result<PathId, HwError> {
        self.inner_mut().open_path(peer, endpoint)
    }

    fn fence(&mut self, path: PathId) -> Result<(), HwError> {
        Wrap::fence(self, path)
    }

    fn is_drained(&mut self, path: PathId) -> bool {
        Wrap::is_drained(self, path)
    }

    fn reopen(&mut self, path: PathId) -> Result<(), HwError> {
        Wrap::reopen(self, path)
    }

    fn counters(&self) -> NicCounters {
        self.inner().counters()
    }
}
