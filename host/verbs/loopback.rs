//! Flushing: a read by the same NIC of memory that it has written. A completion alone does not order the payload in a GPU's
//! memory against what others read elsewhere; a read cannot overtake the writes before it, and takes them along.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ibverbs_sys as ffi;

use super::memory::{HostMemory, Registered};
use super::post;
use super::queue_pair::{Local, Prepared, Ready, Remote};
use super::raw::{Completions, Domain, QueuePairParts, status_name};
use super::wire::Place;
use crate::hw::RemoteSpan;

/// Longest that a read within one NIC may take.
const FLUSH_WITHIN: Duration = Duration::from_secs(2);

/// A queue pair that is connected to itself.
pub(super) struct Loopback {
    queue_pair: Ready,
    completions: Arc<Completions>,
    sink: HostMemory,
}

impl Loopback {
    pub fn new(domain: &Arc<Domain>, local: &Local<'_>, place: &Place) -> io::Result<Self> {
        let completions = Arc::new(Completions::new(domain.context(), 4)?);
        let parts = QueuePairParts {
            domain: Arc::clone(domain),
            sends: Arc::clone(&completions),
            receives: Arc::clone(&completions),
            shared: None,
            kind: ffi::ibv_qp_type::IBV_QPT_RC,
            send_depth: 2,
            recv_depth: 1,
            inline_bytes: 0,
        };
        let prepared = Prepared::new(parts, local.settings.port)?;
        let itself = Remote { place: *place, queue_pair: prepared.number(), psn: 0 };
        let queue_pair = prepared.connect(local, &itself, 0)?;
        Ok(Self { queue_pair, completions, sink: HostMemory::new(domain, 1)? })
    }

    /// Returns once everything that the NIC wrote to the device of `memory` is there for all to see.
    pub fn flush(&mut self, memory: &Registered) -> io::Result<()> {
        let from = RemoteSpan { rkey: memory.rkey().into(), remote_addr: memory.start() };
        let sink = self.sink.memory();
        let into = ffi::ibv_sge { addr: sink.start(), length: 1, lkey: sink.lkey() };
        post::read(self.queue_pair.raw(), 0, into, from)?;
        let deadline = Instant::now() + FLUSH_WITHIN;
        let mut completion = [ffi::ibv_wc::default()];
        loop {
            match self.completions.poll(&mut completion)?.first().map(|wc| wc.error()) {
                Some(None) => return Ok(()),
                Some(Some((status, _))) => {
                    return Err(io::Error::other(format!(
                        "the NIC's read of its own memory failed: {}",
                        status_name(status)
                    )));
                }
                None if Instant::now() > deadline => {
                    return Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        format!("no answer within {FLUSH_WITHIN:?}"),
                    ));
                }
                None => std::thread::yield_now(),
            }
        }
    }
}
