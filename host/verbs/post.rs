//! Work requests, collected and posted with one ring of the doorbell.

use std::io;

use ibverbs_sys as ffi;
use ibverbs_sys::{ibv_send_flags as flags, ibv_wr_opcode as opcode};

use super::ledger::{Entry, Ledger};
use super::raw::RawQueuePair;
use crate::hw::{INLINE_BYTES, RemoteSpan};

/// Where a request's bytes are.
#[derive(Clone, Copy)]
pub(super) enum Bytes {
    /// In registered memory.
    Registered { address: u64, bytes: u32, lkey: u32 },
    /// In the request.
    Inline { data: [u8; INLINE_BYTES], len: u8 },
}

/// One write.
#[derive(Clone, Copy)]
pub(super) struct Request {
    pub id: u64,
    pub bytes: Bytes,
    pub to: RemoteSpan,
    /// Told to the peer, if any.
    pub imm: Option<u32>,
    pub signalled: bool,
}

/// Requests that wait for the doorbell.
#[derive(Default)]
pub(super) struct Batch {
    requests: Vec<Request>,
    // Kept between batches, so that posting allocates nothing.
    list: Vec<ffi::ibv_send_wr>,
    spans: Vec<ffi::ibv_sge>,
}

// SAFETY: the pointers in `list` are set and used within `ring` alone.
unsafe impl Send for Batch {}

fn blank() -> ffi::ibv_send_wr {
    ffi::ibv_send_wr {
        wr_id: 0,
        next: std::ptr::null_mut(),
        sg_list: std::ptr::null_mut(),
        num_sge: 0,
        opcode: opcode::IBV_WR_RDMA_WRITE,
        send_flags: 0,
        __bindgen_anon_1: Default::default(),
        wr: Default::default(),
        qp_type: Default::default(),
        __bindgen_anon_2: Default::default(),
    }
}

impl Batch {
    pub fn push(&mut self, request: Request) {
        self.requests.push(request);
    }

    /// The last request, to signal it after all.
    pub fn last_mut(&mut self) -> Option<&mut Request> {
        self.requests.last_mut()
    }

    fn build(&mut self) {
        self.spans.clear();
        self.spans.extend(self.requests.iter().map(span));
        self.list.clear();
        self.list.extend(self.requests.iter().zip(&mut self.spans).map(|(r, s)| work_request(r, s)));
    }

    /// Posts everything. With an error comes how many requests were not taken.
    pub fn ring(&mut self, queue_pair: &mut RawQueuePair) -> Result<(), (usize, io::Error)> {
        let len = self.requests.len();
        self.build();
        let posted = queue_pair.post_send(&mut self.list);
        self.requests.clear();
        posted.map_err(|(taken, e)| (len - taken, e))
    }
}

fn span(request: &Request) -> ffi::ibv_sge {
    match &request.bytes {
        Bytes::Registered { address, bytes, lkey } => {
            ffi::ibv_sge { addr: *address, length: *bytes, lkey: *lkey }
        }
        Bytes::Inline { data, len } => {
            ffi::ibv_sge { addr: data.as_ptr() as u64, length: (*len).into(), lkey: 0 }
        }
    }
}

fn work_request(request: &Request, span: &mut ffi::ibv_sge) -> ffi::ibv_send_wr {
    let mut wr = blank();
    wr.wr_id = request.id;
    if span.length > 0 {
        (wr.sg_list, wr.num_sge) = (&raw mut *span, 1);
    }
    if request.signalled {
        wr.send_flags |= flags::IBV_SEND_SIGNALED.0;
    }
    if matches!(request.bytes, Bytes::Inline { .. }) {
        wr.send_flags |= flags::IBV_SEND_INLINE.0;
    }
    if let Some(imm) = request.imm {
        wr.opcode = opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
        wr.__bindgen_anon_1.imm_data = imm.to_be();
    }
    let rkey = request.to.rkey as u32; // Checked by the caller to be one.
    wr.wr.rdma = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: request.to.remote_addr, rkey };
    wr
}

/// A read, for [`super::loopback`].
pub(super) fn read(
    queue_pair: &mut RawQueuePair,
    id: u64,
    into: ffi::ibv_sge,
    from: RemoteSpan,
) -> io::Result<()> {
    let mut into = into;
    let mut wr = blank();
    (wr.wr_id, wr.opcode) = (id, opcode::IBV_WR_RDMA_READ);
    (wr.sg_list, wr.num_sge) = (&raw mut into, 1);
    wr.send_flags = flags::IBV_SEND_SIGNALED.0;
    wr.wr.rdma = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
        remote_addr: from.remote_addr,
        rkey: from.rkey as u32,
    };
    queue_pair.post_send(std::slice::from_mut(&mut wr)).map_err(|(_, e)| e)
}

/// A datagram, for [`super::control`].
pub(super) struct Datagram {
    pub id: u64,
    pub from: ffi::ibv_sge,
    pub way: *mut ffi::ibv_ah,
    pub queue_pair: u32,
    pub qkey: u32,
}

pub(super) fn send(queue_pair: &mut RawQueuePair, datagram: Datagram) -> io::Result<()> {
    let mut from = datagram.from;
    let mut wr = blank();
    (wr.wr_id, wr.opcode) = (datagram.id, opcode::IBV_WR_SEND);
    (wr.sg_list, wr.num_sge) = (&raw mut from, 1);
    wr.send_flags = flags::IBV_SEND_SIGNALED.0;
    wr.wr.ud = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_3 {
        ah: datagram.way,
        remote_qpn: datagram.queue_pair,
        remote_qkey: datagram.qkey,
    };
    queue_pair.post_send(std::slice::from_mut(&mut wr)).map_err(|(_, e)| e)
}

/// Does to `messages` messages, `batch` at a time, what posting and completing them takes, but for the device: for benches.
/// Returns how many completions that took.
#[doc(hidden)]
pub fn rehearse(messages: u32, batch: u32) -> u32 {
    let (mut ledger, mut requests, mut ended) = (Ledger::new(256), Batch::default(), Vec::new());
    let (mut left, mut completions) = (messages, 0);
    while left > 0 {
        let now = left.min(batch);
        for i in 0..now {
            let cookie = u64::from(left - i);
            let number = ledger.push(Entry::Message { cookie, bytes: 65_536 });
            let signalled = ledger.must_signal(i + 1 == now);
            let bytes = Bytes::Registered { address: cookie << 16, bytes: 65_536, lkey: 1 };
            let to = RemoteSpan { rkey: 2, remote_addr: cookie << 16 };
            requests.push(Request { id: number.into(), bytes, to, imm: Some(left), signalled });
        }
        requests.build();
        for wr in std::hint::black_box(&requests.list)
            .iter()
            .filter(|wr| wr.send_flags & flags::IBV_SEND_SIGNALED.0 != 0)
        {
            ledger.on_completion(wr.wr_id as u32, Ok(()), &mut ended);
            completions += 1;
        }
        requests.requests.clear();
        std::hint::black_box(&mut ended).clear();
        left -= now;
    }
    completions
}
