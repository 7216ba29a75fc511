//! The only raw verbs calls. Each object owns what it was made from, so nothing is destroyed under it.
//!
//! The safe types of the `ibverbs` crate have no shared receive queues, no registration of given addresses, no events and
//! no states but the way up; the bindings under it (`ibverbs-sys`) have all of it.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use ibverbs_sys as ffi;
use rustix::fs::OFlags;

use super::gid::{Gid, GidKind, GidRow};

/// A call that returns an errno.
fn check(errno: i32) -> io::Result<()> {
    if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno.abs())) }
}

/// A call that returns an object, or sets errno.
fn object<T>(ptr: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(ptr).ok_or_else(io::Error::last_os_error)
}

/// Drop cannot do more about it.
fn destroyed(what: &str, errno: i32) {
    if let Err(e) = check(errno) {
        eprintln!("fuselink: cannot destroy a {what}: {e}");
    }
}

fn text(chars: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().map(|&c| c as u8).take_while(|&b| b != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The devices that the system has.
pub(super) struct DeviceList {
    list: NonNull<*mut ffi::ibv_device>,
    len: usize,
}

impl DeviceList {
    pub fn new() -> io::Result<Self> {
        let mut len = 0;
        // SAFETY: the call writes one int.
        let list = unsafe { ffi::ibv_get_device_list(&raw mut len) };
        Ok(Self { list: object(list)?, len: len.max(0) as usize })
    }

    fn device(&self, i: usize) -> &ffi::ibv_device {
        assert!(i < self.len);
        // SAFETY: the list has `len` entries (checked), none of them null, alive until it is freed.
        unsafe { &**self.list.as_ptr().add(i) }
    }

    /// Opens the device of a name.
    pub fn open(&self, name: &str) -> io::Result<Context> {
        let i = (0..self.len).find(|&i| text(&self.device(i).name) == name);
        let i = i.ok_or(io::Error::from(rustix::io::Errno::NODEV))?;
        let device = std::ptr::from_ref(self.device(i)).cast_mut();
        // SAFETY: the device is of this list, which is alive.
        let ptr = object(unsafe { ffi::ibv_open_device(device) })?;
        let context = Context { ptr };
        context.never_block()?;
        Ok(context)
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list is this object's own; contexts that were opened from it outlive it.
        unsafe { ffi::ibv_free_device_list(self.list.as_ptr()) };
    }
}

/// A port as it is now.
#[derive(Clone, Copy, Debug)]
pub(super) struct PortNow {
    pub up: bool,
    pub ethernet: bool,
    pub lid: u16,
    pub mtu: u32,
}

/// What the device tells by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AsyncEvent {
    /// A port changed: link, LID or GID.
    Port,
    /// No more receives will complete for this queue pair.
    LastReceive(u32),
    /// A queue pair failed by itself.
    QueuePairFailed(u32),
    /// The device is gone.
    Fatal,
    /// Nothing to do.
    Other,
}

/// An open device.
pub(super) struct Context {
    ptr: NonNull<ffi::ibv_context>,
}

// SAFETY: verbs calls are thread safe.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Reading events must not wait.
    fn never_block(&self) -> io::Result<()> {
        // SAFETY: the context is alive, and its descriptor is open as long as it is.
        let fd = unsafe { BorrowedFd::borrow_raw(self.ptr.as_ref().async_fd) };
        let flags = rustix::fs::fcntl_getfl(fd)?;
        Ok(rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK)?)
    }

    pub fn port(&self, port: u8) -> io::Result<PortNow> {
        let mut attr = ffi::ibv_port_attr::default();
        // SAFETY: the call fills the part of the struct that it knows of, which is its beginning.
        check(unsafe { ffi::ibv_query_port(self.ptr.as_ptr(), port, (&raw mut attr).cast()) })?;
        Ok(PortNow {
            up: attr.state == ffi::ibv_port_state::IBV_PORT_ACTIVE,
            ethernet: u32::from(attr.link_layer) == ffi::IBV_LINK_LAYER_ETHERNET,
            lid: attr.lid,
            mtu: attr.active_mtu,
        })
    }

    /// The addresses of a port.
    pub fn gids(&self, port: u8) -> io::Result<Vec<GidRow>> {
        let mut table = vec![ffi::ibv_gid_entry::default(); 1024];
        let (len, entry_bytes) = (table.len(), size_of::<ffi::ibv_gid_entry>());
        // SAFETY: the table has room for `len` entries of that size.
        let found =
            unsafe { ffi::_ibv_query_gid_table(self.ptr.as_ptr(), table.as_mut_ptr(), len, 0, entry_bytes) };
        if found < 0 {
            return Err(io::Error::from_raw_os_error(-found as i32));
        }
        let of_port = table[..found as usize].iter().filter(|e| e.port_num == u32::from(port));
        Ok(of_port.filter_map(gid_row).collect())
    }

    /// The next event; `None` when there is none now.
    pub fn next_event(&self) -> Option<AsyncEvent> {
        let mut event = std::mem::MaybeUninit::<ffi::ibv_async_event>::zeroed();
        // SAFETY: the call writes an event, or fails; the descriptor does not block.
        if unsafe { ffi::ibv_get_async_event(self.ptr.as_ptr(), event.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: the call succeeded, and all bit patterns of an event are valid.
        let mut event = unsafe { event.assume_init() };
        let queue_pair = |event: &ffi::ibv_async_event| {
            // SAFETY: events of these types name a queue pair, which lives until the event is acknowledged.
            unsafe { (*event.element.qp).qp_num }
        };
        let told = match event.event_type {
            ffi::IBV_EVENT_PORT_ACTIVE
            | ffi::IBV_EVENT_PORT_ERR
            | ffi::IBV_EVENT_LID_CHANGE
            | ffi::IBV_EVENT_GID_CHANGE => AsyncEvent::Port,
            ffi::IBV_EVENT_QP_LAST_WQE_REACHED => AsyncEvent::LastReceive(queue_pair(&event)),
            ffi::IBV_EVENT_QP_FATAL | ffi::IBV_EVENT_QP_REQ_ERR | ffi::IBV_EVENT_QP_ACCESS_ERR => {
                AsyncEvent::QueuePairFailed(queue_pair(&event))
            }
            ffi::IBV_EVENT_DEVICE_FATAL => AsyncEvent::Fatal,
            _ => AsyncEvent::Other,
        };
        // SAFETY: it was got above and is acknowledged once.
        unsafe { ffi::ibv_ack_async_event(&raw mut event) };
        Some(told)
    }
}

fn gid_row(entry: &ffi::ibv_gid_entry) -> Option<GidRow> {
    let kind = match entry.gid_type {
        ffi::IBV_GID_TYPE_IB => GidKind::InfiniBand,
        ffi::IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
        ffi::IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
        _ => return None,
    };
    // SAFETY: both views of the union are sixteen plain bytes.
    let gid = Gid(unsafe { entry.gid.raw });
    Some(GidRow { index: u8::try_from(entry.gid_index).ok()?, kind, gid })
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: everything made from the context holds it, so nothing is left.
        destroyed("device context", unsafe { ffi::ibv_close_device(self.ptr.as_ptr()) });
    }
}

/// A protection domain.
pub(super) struct Domain {
    ptr: NonNull<ffi::ibv_pd>,
    context: Arc<Context>,
}

// SAFETY: verbs calls are thread safe.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    pub fn new(context: &Arc<Context>) -> io::Result<Self> {
        // SAFETY: the context is alive.
        let ptr = object(unsafe { ffi::ibv_alloc_pd(context.ptr.as_ptr()) })?;
        Ok(Self { ptr, context: Arc::clone(context) })
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: everything made in the domain holds it, so nothing is left.
        destroyed("protection domain", unsafe { ffi::ibv_dealloc_pd(self.ptr.as_ptr()) });
    }
}

fn access() -> ffi::ibv_access_flags {
    ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
        | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE
        | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ
}

/// Registered memory. Whoever registers it sees to it that the memory outlives this.
pub(super) struct Region {
    ptr: NonNull<ffi::ibv_mr>,
    _domain: Arc<Domain>,
}

// SAFETY: verbs calls are thread safe.
unsafe impl Send for Region {}

impl Region {
    /// By address. The kernel checks that the addresses are the process's own.
    pub fn of_address(domain: &Arc<Domain>, address: u64, bytes: u64) -> io::Result<Self> {
        let (pd, flags) = (domain.ptr.as_ptr(), access().0 as i32);
        let start = std::ptr::without_provenance_mut(address as usize);
        // SAFETY: the call pins pages and reads none of them; wrong addresses are an error.
        let ptr = object(unsafe { ffi::ibv_reg_mr(pd, start, bytes as usize, flags) })?;
        Ok(Self { ptr, _domain: Arc::clone(domain) })
    }

    /// By dma-buf; the NIC knows it from address `iova` on.
    pub fn of_dma_buf(domain: &Arc<Domain>, fd: BorrowedFd<'_>, bytes: u64, iova: u64) -> io::Result<Self> {
        let (pd, flags) = (domain.ptr.as_ptr(), access().0 as i32);
        // SAFETY: the descriptor is open; one that is not a dma-buf is an error.
        let ptr = unsafe { ffi::ibv_reg_dmabuf_mr(pd, 0, bytes as usize, iova, fd.as_raw_fd(), flags) };
        Ok(Self { ptr: object(ptr)?, _domain: Arc::clone(domain) })
    }

    pub fn lkey(&self) -> u32 {
        // SAFETY: the region is alive; the field does not change.
        unsafe { self.ptr.as_ref().lkey }
    }

    pub fn rkey(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.ptr.as_ref().rkey }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the region is this object's own.
        destroyed("memory region", unsafe { ffi::ibv_dereg_mr(self.ptr.as_ptr()) });
    }
}

/// A completion queue.
pub(super) struct Completions {
    ptr: NonNull<ffi::ibv_cq>,
    _context: Arc<Context>,
}

// SAFETY: verbs calls are thread safe.
unsafe impl Send for Completions {}
// SAFETY: as above.
unsafe impl Sync for Completions {}

impl Completions {
    pub fn new(context: &Arc<Context>, entries: usize) -> io::Result<Self> {
        let (ctx, entries) = (context.ptr.as_ptr(), entries as i32);
        // SAFETY: the context is alive; no channel, no user data.
        let ptr = object(unsafe { ffi::ibv_create_cq(ctx, entries, null_mut(), null_mut(), 0) })?;
        Ok(Self { ptr, _context: Arc::clone(context) })
    }

    /// Makes room for at least `entries`; what is in it stays.
    pub fn grow(&self, entries: usize) -> io::Result<()> {
        // SAFETY: the queue is alive; nobody resizes it at the same time, since a NIC has one owner.
        let now = unsafe { self.ptr.as_ref().cqe } as usize;
        if now >= entries {
            return Ok(());
        }
        // SAFETY: as above.
        check(unsafe { ffi::ibv_resize_cq(self.ptr.as_ptr(), entries.next_power_of_two() as i32 - 1) })
    }

    /// Takes as many as there are and fit.
    pub fn poll<'a>(&self, into: &'a mut [ffi::ibv_wc]) -> io::Result<&'a [ffi::ibv_wc]> {
        let (cq, len) = (self.ptr.as_ptr(), into.len() as i32);
        // SAFETY: the queue is alive, and so is its context's table of operations.
        let poll = unsafe { (*self.ptr.as_ref().context).ops.poll_cq };
        let poll = poll.ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: at most `len` entries are written.
        let found = unsafe { poll(cq, len, into.as_mut_ptr()) };
        if found < 0 {
            Err(io::Error::other("the completion queue failed"))
        } else {
            Ok(&into[..found as usize])
        }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: queue pairs that use it hold it, so none is left.
        destroyed("completion queue", unsafe { ffi::ibv_destroy_cq(self.ptr.as_ptr()) });
    }
}

/// A receive queue that the queue pairs of a NIC share.
pub(super) struct SharedReceives {
    ptr: NonNull<ffi::ibv_srq>,
    _domain: Arc<Domain>,
}

// SAFETY: verbs calls are thread safe.
unsafe impl Send for SharedReceives {}
// SAFETY: as above.
unsafe impl Sync for SharedReceives {}

impl SharedReceives {
    pub fn new(domain: &Arc<Domain>, depth: u32) -> io::Result<Self> {
        let attr = ffi::ibv_srq_attr { max_wr: depth, max_sge: 1, srq_limit: 0 };
        let mut init = ffi::ibv_srq_init_attr { srq_context: null_mut(), attr };
        // SAFETY: the domain is alive; the call reads and updates the struct.
        let ptr = object(unsafe { ffi::ibv_create_srq(domain.ptr.as_ptr(), &raw mut init) })?;
        Ok(Self { ptr, _domain: Arc::clone(domain) })
    }

    /// Places for `count` more arrivals. They hold no memory: a write says itself where it goes.
    pub fn post(&self, count: usize) -> io::Result<()> {
        let mut list =
            vec![ffi::ibv_recv_wr { wr_id: 0, next: null_mut(), sg_list: null_mut(), num_sge: 0 }; count];
        let first = list.as_mut_ptr();
        for (i, wr) in list.iter_mut().enumerate().take(count.saturating_sub(1)) {
            wr.next = first.wrapping_add(i + 1);
        }
        if list.is_empty() {
            return Ok(());
        }
        // SAFETY: the queue is alive, and so is its context's table of operations.
        let post = unsafe { (*self.ptr.as_ref().context).ops.post_srq_recv };
        let post = post.ok_or(io::ErrorKind::Unsupported)?;
        let mut bad = null_mut();
        // SAFETY: the list is linked within itself and ends in null; the device copies it.
        check(unsafe { post(self.ptr.as_ptr(), first, &raw mut bad) })
    }
}

impl Drop for SharedReceives {
    fn drop(&mut self) {
        // SAFETY: queue pairs that use it hold it, so none is left.
        destroyed("shared receive queue", unsafe { ffi::ibv_destroy_srq(self.ptr.as_ptr()) });
    }
}

/// What a queue pair is made of.
pub(super) struct QueuePairParts {
    pub domain: Arc<Domain>,
    pub sends: Arc<Completions>,
    pub receives: Arc<Completions>,
    /// `None`: a receive queue of its own, of `recv_depth`.
    pub shared: Option<Arc<SharedReceives>>,
    pub kind: ffi::ibv_qp_type::Type,
    pub send_depth: u32,
    pub recv_depth: u32,
    pub inline_bytes: u32,
}

/// A queue pair in whatever state.
pub(super) struct RawQueuePair {
    ptr: NonNull<ffi::ibv_qp>,
    _parts: QueuePairParts,
}

// SAFETY: verbs calls are thread safe.
unsafe impl Send for RawQueuePair {}

impl RawQueuePair {
    pub fn new(parts: QueuePairParts) -> io::Result<Self> {
        let mut init = ffi::ibv_qp_init_attr {
            qp_context: null_mut(),
            send_cq: parts.sends.ptr.as_ptr(),
            recv_cq: parts.receives.ptr.as_ptr(),
            srq: parts.shared.as_ref().map_or(null_mut(), |s| s.ptr.as_ptr()),
            cap: ffi::ibv_qp_cap {
                max_send_wr: parts.send_depth,
                max_recv_wr: parts.recv_depth,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: parts.inline_bytes,
            },
            qp_type: parts.kind,
            sq_sig_all: 0,
        };
        // SAFETY: domain and queues are alive, and held for as long as the queue pair.
        let ptr = object(unsafe { ffi::ibv_create_qp(parts.domain.ptr.as_ptr(), &raw mut init) })?;
        Ok(Self { ptr, _parts: parts })
    }

    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is alive; the field does not change.
        unsafe { self.ptr.as_ref().qp_num }
    }

    pub fn modify(&mut self, attr: &mut ffi::ibv_qp_attr, mask: ffi::ibv_qp_attr_mask) -> io::Result<()> {
        // SAFETY: the queue pair is alive; the call reads the fields that the mask names.
        check(unsafe { ffi::ibv_modify_qp(self.ptr.as_ptr(), attr, mask.0 as i32) })
    }

    /// Posts a list and rings the doorbell once. How many were taken comes with an error.
    pub fn post_send(&mut self, list: &mut [ffi::ibv_send_wr]) -> Result<(), (usize, io::Error)> {
        let first = list.as_mut_ptr();
        let last = list.len().saturating_sub(1);
        for (i, wr) in list.iter_mut().enumerate() {
            wr.next = if i < last { first.wrapping_add(i + 1) } else { null_mut() };
        }
        if list.is_empty() {
            return Ok(());
        }
        // SAFETY: the queue pair is alive, and so is its context's table of operations.
        let post = unsafe { (*self.ptr.as_ref().context).ops.post_send };
        let post = post.ok_or_else(|| (0, io::ErrorKind::Unsupported.into()))?;
        let mut bad: *mut ffi::ibv_send_wr = null_mut();
        // SAFETY: the list is linked within itself and ends in null; its memory was registered (or is inline, and copied),
        // and stays until the work has completed.
        let errno = unsafe { post(self.ptr.as_ptr(), first, &raw mut bad) };
        let taken = list.iter().position(|wr| std::ptr::eq(wr, bad)).unwrap_or(0);
        check(errno).map_err(|e| (taken, e))
    }

    /// Gives the device a buffer for a datagram; it must stay until it has been received.
    pub fn post_receive(&mut self, id: u64, mut buffer: ffi::ibv_sge) -> io::Result<()> {
        let mut wr = ffi::ibv_recv_wr { wr_id: id, next: null_mut(), sg_list: &raw mut buffer, num_sge: 1 };
        // SAFETY: the queue pair is alive, and so is its context's table of operations.
        let post = unsafe { (*self.ptr.as_ref().context).ops.post_recv };
        let post = post.ok_or(io::ErrorKind::Unsupported)?;
        let mut bad = null_mut();
        // SAFETY: one request, which the device copies; its buffer is registered memory of the caller's.
        check(unsafe { post(self.ptr.as_ptr(), &raw mut wr, &raw mut bad) })
    }
}

impl Drop for RawQueuePair {
    fn drop(&mut self) {
        // SAFETY: the queue pair is this object's own; its events were acknowledged as they were read.
        destroyed("queue pair", unsafe { ffi::ibv_destroy_qp(self.ptr.as_ptr()) });
    }
}

/// A way to a peer for datagrams.
pub(super) struct AddressHandle {
    ptr: NonNull<ffi::ibv_ah>,
    _domain: Arc<Domain>,
}

// SAFETY: verbs calls are thread safe.
unsafe impl Send for AddressHandle {}

impl AddressHandle {
    pub fn new(domain: &Arc<Domain>, attr: &mut ffi::ibv_ah_attr) -> io::Result<Self> {
        // SAFETY: the domain is alive; the call reads the struct.
        let ptr = object(unsafe { ffi::ibv_create_ah(domain.ptr.as_ptr(), attr) })?;
        Ok(Self { ptr, _domain: Arc::clone(domain) })
    }

    pub fn as_ptr(&self) -> *mut ffi::ibv_ah {
        self.ptr.as_ptr()
    }
}

impl Drop for AddressHandle {
    fn drop(&mut self) {
        // SAFETY: the handle is this object's own.
        destroyed("address handle", unsafe { ffi::ibv_destroy_ah(self.ptr.as_ptr()) });
    }
}

/// The name of a completion's status.
pub(super) fn status_name(status: ffi::ibv_wc_status::Type) -> String {
    // SAFETY: the call returns a string of static life for any number.
    let name = unsafe { CStr::from_ptr(ffi::ibv_wc_status_str(status)) };
    name.to_string_lossy().into_owned()
}
