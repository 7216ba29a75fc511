//! An emulated GPU: threads that run the kernels' blocks, in launch order.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::thread::futex;

use super::block_order::BlockOrder;
use super::clock::{self, MonotonicClock};
use super::in_place::Moved;
use super::memory::{Capacity, EmuChunk, EmuMapped, EmuWindow, GRANULARITY_BYTES};
use super::pacer::ScaleupLinks;
use crate::hw::{Clock, Gpu, HwError, Kernel, Launch, Mover, Teller};
use crate::space::AddressMap;
use crate::topo::GpuIdx;

/// What an emulated GPU is made of.
pub struct EmuGpuConfig {
    /// Its place in the server.
    pub idx: GpuIdx,
    /// Blocks that run at once, each on a thread of its own.
    pub resident_blocks: u32,
    /// The server's links.
    pub links: ScaleupLinks,
    /// How much memory it has; `None`: as much as the host gives.
    pub memory_bytes: Option<u64>,
}

/// Mirrors `FlBlock` in kernels/simt.h: what a kernel built as C++ is called with.
#[repr(C)]
pub struct Block {
    block_idx: u32,
    block_count: u32,
    world: *const c_void,
    copy: unsafe extern "C" fn(*const c_void, u64, u64, u64),
    pause: unsafe extern "C" fn(*const c_void, u32),
    count: unsafe extern "C" fn(*const c_void, u64, u64, u32),
}

/// A kernel built as C++: what `FL_KERNEL` defines.
pub type EmuKernel = unsafe extern "C" fn(block: *const Block, params_dev_ptr: u64);

unsafe extern "C" {
    fn fl_all_to_all(block: *const Block, params_dev_ptr: u64);
    fn fl_put(block: *const Block, params_dev_ptr: u64);
    fn fl_take(block: *const Block, params_dev_ptr: u64);
}

/// Wakes blocks that pause: a count of what has been told to kernels, on which they sleep.
///
/// A block notes the count, polls everything it waits for, and sleeps only while the count is still the same: what is
/// published before the count moves is seen by the poll after it.
#[derive(Default)]
struct News {
    count: AtomicU32,
    sleepers: AtomicU32,
}

impl News {
    fn tell(&self) {
        // SeqCst with `wait`: either this sees the sleeper, or the sleeper sees the new count.
        self.count.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            // A failed wake costs the sleepers their time-out and nothing else.
            let _ = futex::wake(&self.count, futex::Flags::PRIVATE, i32::MAX as u32);
        }
    }

    /// Sleeps until there is news since the last call of this thread, or for `longest`.
    fn wait(&self, longest: Duration) {
        let now = self.count.load(Ordering::SeqCst);
        if SEEN.replace(now) != now {
            return;
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let timeout = rustix::thread::Timespec { tv_sec: 0, tv_nsec: longest.subsec_nanos().into() };
        // News, the time-out and a signal all mean: look again.
        let _ = futex::wait(&self.count, futex::Flags::PRIVATE, now, Some(&timeout));
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

thread_local! {
    /// The count of news that this block last looked at.
    static SEEN: Cell<u32> = const { Cell::new(0) };
    /// What this block has copied to and from slots.
    static MOVED: RefCell<Moved> = RefCell::default();
}

/// What a block's copies and pauses need.
struct World {
    news: News,
    idx: GpuIdx,
    addresses: Arc<AddressMap>,
    links: ScaleupLinks,
    /// First address that a kernel touched and that was not mapped; 0 = none.
    fault: AtomicU64,
    /// The GPU is going away: nothing is paced any more, so that kernels that were told to stop do.
    stop: AtomicBool,
}

/// How far a copy may be ahead of its link before the block waits: sleeping for less costs the host more than it paces.
const AHEAD_NS: u64 = 100_000;
/// How soon a block that is paced notices that its GPU is going away.
const LONGEST_SLEEP_NS: u64 = 50_000_000;

impl World {
    /// A kernel's copy.
    fn copy(&self, dst: u64, src: u64, bytes: u64) {
        match self.move_bytes(dst, src, bytes) {
            Ok(done) => self.keep_pace(done),
            Err(at) => self.fail_at(at),
        }
        MOVED.with_borrow_mut(|moved| [dst, src].into_iter().for_each(|at| moved.note(at, bytes)));
    }

    /// A kernel has stored bytes to a slot, or loaded them from there: those that no copy has moved take their links' time.
    fn count_in_place(&self, dev_ptr: u64, bytes: u64, stores: bool) {
        let bytes = MOVED.with_borrow_mut(|moved| moved.take_rest(dev_ptr, bytes));
        if bytes == 0 {
            return;
        }
        match self.addresses.owner(dev_ptr, bytes) {
            Some(Some(gpu)) if gpu != self.idx => {
                let (from, to) = if stores { (self.idx, gpu) } else { (gpu, self.idx) };
                self.keep_pace(self.links.reserve(from, to, bytes, MonotonicClock.now()));
            }
            Some(_) => {}
            None => self.fail_at(dev_ptr),
        }
    }

    fn keep_pace(&self, done: u64) {
        if done > MonotonicClock.now() + AHEAD_NS {
            self.wait_until(done);
        }
    }

    fn fail_at(&self, dev_ptr: u64) {
        // Relaxed: read after the block has ended, which is ordered by the launch's lock.
        let _ = self.fault.compare_exchange(0, dev_ptr, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Moves the bytes; returns when the links on the way are done with them, or the address that is not mapped.
    fn move_bytes(&self, dst: u64, src: u64, bytes: u64) -> Result<u64, u64> {
        let to = self.addresses.owner(dst, bytes).ok_or(dst)?;
        let from = self.addresses.owner(src, bytes).ok_or(src)?;
        let now = MonotonicClock.now();
        let mut done = now;
        if let Some(from) = from.filter(|&g| g != self.idx) {
            done = done.max(self.links.reserve(from, self.idx, bytes, now));
        }
        if let Some(to) = to.filter(|&g| g != self.idx) {
            done = done.max(self.links.reserve(self.idx, to, bytes, now));
        }
        // SAFETY: both ranges are mapped (checked against the address map, whose windows the launcher keeps quiet),
        // and the two do not overlap (contract of fl_block_copy and of `Mover::start`).
        unsafe { std::ptr::copy_nonoverlapping(src as *const u8, dst as *mut u8, bytes as usize) };
        Ok(done)
    }

    /// In parts, so that a link of hardly any rate does not outlast the GPU.
    fn wait_until(&self, done: u64) {
        // Relaxed: the flag orders nothing.
        while MonotonicClock.now() < done && !self.stop.load(Ordering::Relaxed) {
            clock::sleep_until(done.min(MonotonicClock.now() + LONGEST_SLEEP_NS));
        }
    }
}

/// # Safety
/// `world` comes from a `Block` made by `run_block`, which outlives the kernel.
unsafe extern "C" fn copy_hook(world: *const c_void, dst: u64, src: u64, bytes: u64) {
    // SAFETY: contract above.
    let world = unsafe { &*world.cast::<World>() };
    world.copy(dst, src, bytes);
}

/// # Safety
/// `world` comes from a `Block` made by `run_block`, which outlives the kernel.
unsafe extern "C" fn count_hook(world: *const c_void, dev_ptr: u64, bytes: u64, stores: u32) {
    // SAFETY: contract above.
    let world = unsafe { &*world.cast::<World>() };
    world.count_in_place(dev_ptr, bytes, stores != 0);
}

const FIRST_PAUSE: Duration = Duration::from_micros(100);
/// Longest sleep of a block that waits for something which nobody tells it of: a peer's flag.
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// # Safety
/// `world` comes from a `Block` made by `run_block`, which outlives the kernel.
unsafe extern "C" fn pause_hook(world: *const c_void, idle_rounds: u32) {
    // SAFETY: contract above.
    let world = unsafe { &*world.cast::<World>() };
    world.news.wait((FIRST_PAUSE * idle_rounds).min(LONGEST_PAUSE));
}

#[derive(Clone, Copy)]
struct Running {
    launch: Launch,
    entry: EmuKernel,
    next_block: u32,
    finished_blocks: u32,
}

#[derive(Default)]
struct Stream {
    queue: VecDeque<(Launch, EmuKernel)>,
    running: Option<Running>,
    order: BlockOrder,
    launches: u64,
    stop: bool,
}

struct Shared {
    world: World,
    stream: Mutex<Stream>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Stream> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An emulated GPU of this process.
pub struct EmuGpu {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    memory: Arc<Capacity>,
    kernels: Mutex<HashMap<&'static str, EmuKernel>>,
}

impl EmuGpu {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`HwError::Os`] when the system refuses threads.
    pub fn new(config: EmuGpuConfig) -> Result<Self, HwError> {
        let EmuGpuConfig { idx, resident_blocks, links, memory_bytes } = config;
        let memory = Capacity::new(memory_bytes);
        let addresses = Arc::new(AddressMap::default());
        let world = World {
            news: News::default(),
            idx,
            addresses,
            links,
            fault: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        };
        let shared = Arc::new(Shared { world, stream: Mutex::default(), changed: Condvar::new() });
        // Made before its threads: when one cannot be started, those that were end with it.
        let mut gpu = Self { shared, threads: Vec::new(), memory, kernels: Mutex::default() };
        for n in 0..resident_blocks.max(1) {
            let shared = Arc::clone(&gpu.shared);
            let thread = std::thread::Builder::new()
                .name(format!("gpu{}-block{n}", idx.0))
                .spawn(move || run_blocks(&shared))
                .map_err(|source| HwError::Os { operation: "start a thread of an emulated GPU", source })?;
            gpu.threads.push(thread);
        }
        Ok(gpu)
    }

    /// Memory that chunks made here take of it.
    pub fn taken_bytes(&self) -> u64 {
        self.memory.taken_bytes()
    }

    /// In which order the blocks of later launches run.
    pub fn set_block_order(&self, order: BlockOrder) {
        self.shared.lock().order = order;
    }

    /// Gives the GPU a user's kernel, for [`Kernel::Custom`] of that name.
    ///
    /// # Safety
    /// `entry` is what `FL_KERNEL(name, Params)` of kernels/simt.h defines, and its launches have such parameters.
    pub unsafe fn add_kernel(&self, name: &'static str, entry: EmuKernel) {
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner).insert(name, entry);
    }

    fn entry(&self, kernel: Kernel) -> Option<EmuKernel> {
        match kernel {
            Kernel::AllToAll => Some(fl_all_to_all),
            Kernel::Put => Some(fl_put),
            Kernel::Take => Some(fl_take),
            Kernel::Custom { name, .. } => {
                self.kernels.lock().unwrap_or_else(PoisonError::into_inner).get(name).copied()
            }
        }
    }

    fn check_mapped(&self, dev_ptr: u64, bytes: u64) -> Result<(), HwError> {
        match self.shared.world.addresses.owner(dev_ptr, bytes) {
            Some(_) => Ok(()),
            None => Err(HwError::NotMapped { gpu: self.idx(), dev_ptr, bytes }),
        }
    }
}

/// Copies from the host's side: at once, and done when the links would be.
struct EmuMover {
    shared: Arc<Shared>,
    started: u64,
    /// Copies under way, and when they are done.
    done_at: HashMap<u64, u64>,
}

impl Mover for EmuMover {
    fn start(&mut self, dst_dev_ptr: u64, src_dev_ptr: u64, bytes: u64) -> Result<u64, HwError> {
        let world = &self.shared.world;
        let moved = world.move_bytes(dst_dev_ptr, src_dev_ptr, bytes);
        let done_at = moved.map_err(|dev_ptr| HwError::NotMapped { gpu: world.idx, dev_ptr, bytes })?;
        self.started += 1;
        self.done_at.insert(self.started, done_at);
        Ok(self.started)
    }

    fn is_done(&mut self, copy: u64) -> Result<bool, HwError> {
        let done = self.done_at.get(&copy).is_none_or(|&at| at <= MonotonicClock.now());
        if done {
            self.done_at.remove(&copy);
        }
        Ok(done)
    }
}

/// A resident block's thread: takes the next block of the launch at the head of the stream.
fn run_blocks(shared: &Shared) {
    clock::sharpen_sleep();
    let mut stream = shared.lock();
    loop {
        if stream.running.is_none() {
            let next = stream.queue.pop_front();
            stream.launches += u64::from(next.is_some());
            stream.running =
                next.map(|(launch, entry)| Running { launch, entry, next_block: 0, finished_blocks: 0 });
        }
        let (stopping, order, launches) = (stream.stop, stream.order, stream.launches);
        match &mut stream.running {
            Some(r) if r.next_block < r.launch.blocks => {
                let (grid, n) = (*r, r.next_block);
                r.next_block += 1;
                if r.next_block < grid.launch.blocks {
                    shared.changed.notify_one();
                }
                drop(stream);
                run_block(&shared.world, grid, order.block(n, grid.launch.blocks, launches));
                stream = shared.lock();
                finish_block(&mut stream);
                shared.changed.notify_all();
            }
            _ if stopping => return,
            _ => stream = shared.changed.wait(stream).unwrap_or_else(PoisonError::into_inner),
        }
    }
}

fn finish_block(stream: &mut Stream) {
    if let Some(r) = &mut stream.running {
        r.finished_blocks += 1;
        if r.finished_blocks == r.launch.blocks {
            stream.running = None;
        }
    }
}

fn run_block(world: &World, grid: Running, block_idx: u32) {
    let world = std::ptr::from_ref(world).cast();
    let block_count = grid.launch.blocks;
    MOVED.take();
    let block =
        Block { block_idx, block_count, world, copy: copy_hook, pause: pause_hook, count: count_hook };
    // SAFETY: `block` has FlBlock's layout and outlives the call; `launch` checked that the parameters are mapped. For
    // a user's kernel: the contract of `add_kernel`.
    unsafe { (grid.entry)(&block, grid.launch.params_dev_ptr) };
}

impl Gpu for EmuGpu {
    type Chunk = EmuChunk;
    type Window = EmuWindow;
    type Mapped = EmuMapped;

    fn idx(&self) -> GpuIdx {
        self.shared.world.idx
    }

    fn granularity_bytes(&self) -> u64 {
        GRANULARITY_BYTES
    }

    fn create_chunk(&self, bytes: u64) -> Result<Arc<EmuChunk>, HwError> {
        EmuChunk::create(self.idx(), bytes, &self.memory).map(Arc::new)
    }

    fn import_chunk(&self, fd: OwnedFd, owner: GpuIdx, bytes: u64) -> Result<Arc<EmuChunk>, HwError> {
        EmuChunk::import(fd, owner, bytes).map(Arc::new)
    }

    fn reserve_window(&self, bytes: u64) -> Result<EmuWindow, HwError> {
        EmuWindow::reserve(bytes, Arc::clone(&self.shared.world.addresses))
    }

    fn map_host(&self, bytes: usize) -> Result<EmuMapped, HwError> {
        EmuMapped::new(bytes, Arc::clone(&self.shared.world.addresses))
    }

    fn write(&self, dev_ptr: u64, bytes: &[u8]) -> Result<(), HwError> {
        self.check_mapped(dev_ptr, bytes.len() as u64)?;
        // SAFETY: the destination is mapped (checked) and is never a Rust object.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), dev_ptr as *mut u8, bytes.len()) };
        Ok(())
    }

    fn read(&self, dev_ptr: u64, bytes: &mut [u8]) -> Result<(), HwError> {
        self.check_mapped(dev_ptr, bytes.len() as u64)?;
        // SAFETY: the source is mapped (checked) and is never a Rust object.
        unsafe { std::ptr::copy_nonoverlapping(dev_ptr as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn teller(&self) -> Teller {
        let shared = Arc::clone(&self.shared);
        Box::new(move || shared.world.news.tell())
    }

    fn mover(&self) -> Box<dyn Mover> {
        Box::new(EmuMover { shared: Arc::clone(&self.shared), started: 0, done_at: HashMap::new() })
    }

    fn launch(&self, launch: Launch) -> Result<(), HwError> {
        let refuse = |reason: &str| HwError::Launch {
            gpu: self.idx(),
            kernel: launch.kernel.name(),
            reason: reason.to_owned(),
        };
        if launch.blocks == 0 {
            return Err(refuse("a grid needs at least one block"));
        }
        self.check_mapped(launch.params_dev_ptr, launch.kernel.params_bytes())
            .map_err(|_| refuse("its parameters are not in device memory"))?;
        let entry = self
            .entry(launch.kernel)
            .ok_or_else(|| refuse("this GPU was given no kernel of that name (EmuGpu::add_kernel)"))?;
        self.shared.lock().queue.push_back((launch, entry));
        self.shared.changed.notify_all();
        Ok(())
    }

    fn synchronize(&self, timeout: Duration) -> Result<(), HwError> {
        let deadline = Instant::now() + timeout;
        let mut stream = self.shared.lock();
        while stream.running.is_some() || !stream.queue.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(HwError::KernelTimeout { gpu: self.idx(), waited: timeout });
            }
            let (s, _) =
                self.shared.changed.wait_timeout(stream, left).unwrap_or_else(PoisonError::into_inner);
            stream = s;
        }
        drop(stream);
        match self.shared.world.fault.swap(0, Ordering::Relaxed) {
            0 => Ok(()),
            dev_ptr => Err(HwError::NotMapped { gpu: self.idx(), dev_ptr, bytes: 1 }),
        }
    }
}

impl Drop for EmuGpu {
    /// Kernels must have ended (the owner aborts them first); then the threads do.
    fn drop(&mut self) {
        let mut stream = self.shared.lock();
        stream.queue.clear();
        stream.stop = true;
        self.shared.world.stop.store(true, Ordering::Relaxed);
        drop(stream);
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                eprintln!("fuselink: a thread of emulated GPU {} panicked", self.shared.world.idx.0);
            }
        }
    }
}
