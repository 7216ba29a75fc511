//! Owner and borrowers over real rings, on a device that does what the test says.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};

use proptest::prelude::*;

use super::service::SHARE;
use super::*;
use crate::borrow::BorrowedNic;
use crate::engine::immediate::Immediate;
use crate::engine::slots::{Lot, SlotConfig};
use crate::hw::{
    INLINE_BYTES, Lane, LocalKey, LocalSpan, NicCounters, Registrable, Registrar, RemoteKey, RemoteSpan,
    WorkOp,
};
use crate::segment::SegmentLayout;
use crate::shm::SharedMemory;
use crate::topo::Server;

const PEERS: [NicId; 2] = [NicId(1), NicId(2)];
const BYTES: u32 = 512;

#[derive(Default)]
struct State {
    /// What was posted, by call of `post`.
    batches: Vec<Vec<Work>>,
    /// Paths that have no room.
    full: HashSet<PathId>,
    events: Vec<NicEvent>,
    completed: usize,
}

#[derive(Clone, Default)]
struct Device(Arc<Mutex<State>>);

impl Device {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    fn posted(&self) -> Vec<Work> {
        self.state().batches.concat()
    }

    /// The next `count` messages that are not completed yet are.
    fn complete(&self, count: usize) {
        let messages: Vec<_> =
            self.posted().into_iter().filter(|w| matches!(w.op, WorkOp::Write { .. })).collect();
        let mut state = self.state();
        let end = messages.len().min(state.completed + count);
        for work in &messages[state.completed..end] {
            state.events.push(NicEvent::Completed { cookie: work.cookie, result: Ok(()) });
        }
        state.completed = end;
    }

    fn tell(&self, event: NicEvent) {
        self.state().events.push(event);
    }
}

impl Nic for Device {
    fn idx(&self) -> NicIdx {
        NicIdx(0)
    }
    fn post(&mut self, work: &[Work], _now: Nanos) -> Result<usize, HwError> {
        let mut state = self.state();
        let taken = work.iter().take_while(|w| !state.full.contains(&w.path)).count();
        if taken > 0 {
            state.batches.push(work[..taken].to_vec());
        }
        Ok(taken)
    }
    fn poll(&mut self, _now: Nanos, events: &mut Vec<NicEvent>) -> Result<(), HwError> {
        events.append(&mut self.state().events);
        Ok(())
    }
    fn flush(&mut self) -> Result<(), HwError> {
        Ok(())
    }
}

impl NicDevice for Device {
    fn relay_gpu(&self) -> GpuIdx {
        GpuIdx(0)
    }
    fn register(&mut self, _memory: &Registrable<'_>) -> Result<(LocalKey, RemoteKey), HwError> {
        Ok((LocalKey(0), RemoteKey { remote_addr: 0, rkey: 0, bytes: 0 }))
    }
    fn registrar(&self) -> Box<dyn Registrar> {
        unreachable!("an owner registers nothing")
    }
    fn endpoint(&self) -> Vec<u8> {
        Vec::new()
    }
    fn open_path(&mut self, peer: NicId, _endpoint: &[u8]) -> Result<PathId, HwError> {
        Ok(PathId(peer.0))
    }
    fn fence(&mut self, _path: PathId) -> Result<(), HwError> {
        Ok(())
    }
    fn is_drained(&mut self, _path: PathId) -> bool {
        true
    }
    fn reopen(&mut self, _path: PathId) -> Result<(), HwError> {
        Ok(())
    }
    fn counters(&self) -> NicCounters {
        NicCounters::default()
    }
}

/// GPU 0 of a server owns its only NIC; the other three borrow it.
struct World {
    device: Device,
    nic: OwnedNic,
    borrowed: Vec<BorrowedNic>,
    slots: SlotLayout,
    now: Nanos,
    _segment: Arc<SharedMemory>,
}

const BORROWERS: usize = 3;

fn gpu_of(b: usize) -> GpuIdx {
    GpuIdx(b as u32 + 1)
}

impl World {
    fn new(borrow_bytes: u64) -> Self {
        let own = Server::new(BORROWERS as u32 + 1, &[1], 1);
        let cluster = Arc::new(Cluster::new(vec![own, Server::new(2, &[1; 2], 1)]));
        let server = ServerId(0);
        let layout = SegmentLayout::new(&cluster, server);
        let segment = SharedMemory::create("fuselink-owner-test", layout.words()).unwrap();
        let sizes = SlotConfig { slot_bytes: BYTES, send_slots: 8, recv_slots: 2, put_bytes: BYTES };
        let slots = SlotLayout::new(&cluster, server, sizes).unwrap();
        let words = segment.words();
        let device = Device::default();
        let lots = LotKeys::new(BORROWERS as u32 + 1);
        for (gpu, class) in (0..=BORROWERS as u32).flat_map(|gpu| Class::ALL.map(|class| (gpu, class))) {
            lots.set(Lot { nic: NicIdx(0), gpu: GpuIdx(gpu), class }, Some(LocalKey(0)));
        }
        let config = OwnedNicConfig {
            server,
            owner: GpuIdx(0),
            slots,
            lots,
            paths: (0..3).map(|n| (n > 0).then_some(PathId(n))).collect(),
            borrow_bytes,
            timing: PathTiming::default(),
            path_words: words.part(layout.path_words_at(NicIdx(0)), 3),
            cluster,
        };
        let port = |b| BorrowerPort::new(&words, layout, gpu_of(b), NicIdx(0));
        let borrowed = |b| BorrowedNic::new(&words, layout, gpu_of(b), NicIdx(0));
        Self {
            nic: OwnedNic::new(Box::new(device.clone()), config, (0..BORROWERS).map(port).collect()),
            borrowed: (0..BORROWERS).map(borrowed).collect(),
            device,
            slots,
            now: 1,
            _segment: segment,
        }
    }

    fn message_to(&self, peer: NicId, gpu: GpuIdx, class: Class, number: u64, bytes: u32) -> Work {
        let slot = (number % 8) as u32;
        let local = LocalSpan { key: LocalKey(0), offset: self.slots.send_offset(class, slot), bytes };
        let imm = Immediate::new(class, GpuIdx(0), slot, number).encode();
        let op = WorkOp::Write { local, remote: RemoteSpan { rkey: number, remote_addr: gpu.0.into() }, imm };
        Work { path: PathId(peer.0), lane: class.into(), op, cookie: number }
    }

    fn message(&self, b: usize, class: Class, number: u64) -> Work {
        self.message_to(PEERS[0], gpu_of(b), class, number, BYTES)
    }

    fn hand_over(&mut self, b: usize, work: &[Work]) {
        assert_eq!(self.borrowed[b].post(work, self.now).unwrap(), work.len());
    }

    fn serve(&mut self) {
        self.nic.serve_borrowers(self.now).unwrap();
    }

    /// The owner's round, and what it heard itself.
    fn poll(&mut self) -> Vec<NicEvent> {
        let mut own = Vec::new();
        self.nic.poll(self.now, &mut own).unwrap();
        own
    }

    fn hear(&mut self, b: usize) -> Vec<NicEvent> {
        let mut events = Vec::new();
        self.borrowed[b].poll(self.now, &mut events).unwrap();
        events
    }

    /// What was posted: GPU and number of each message, `None` for inline writes.
    fn posted(&self) -> Vec<Option<(u64, u64)>> {
        self.device.posted().iter().map(name).collect()
    }
}

fn name(work: &Work) -> Option<(u64, u64)> {
    match work.op {
        WorkOp::Write { remote, .. } => Some((remote.remote_addr, remote.rkey)),
        WorkOp::Inline { .. } => None,
    }
}

fn inline(lane: Lane) -> Work {
    let op = WorkOp::Inline {
        remote: RemoteSpan { rkey: 0, remote_addr: 0 },
        data: [1; INLINE_BYTES],
        len: INLINE_BYTES as u8,
    };
    Work { path: PathId(PEERS[0].0), lane, op, cookie: 0 }
}

fn arrival(class: Class, b: usize, seq: u64) -> NicEvent {
    NicEvent::Arrived { from: PEERS[0], imm: Immediate::new(class, gpu_of(b), 0, seq).encode(), bytes: 1 }
}

/// A put that has to wait for bytes to leave the device must not keep the credit behind it from the peer that would free them.
#[test]
fn work_of_a_class_that_waits_leaves_the_others_going() {
    let mut w = World::new(u64::from(BYTES));
    let puts: Vec<_> = (0..3).map(|n| w.message(0, Class::Put, n)).collect();
    let [plan, low_latency] = [(Class::Plan, 10), (Class::LowLatency, 20)].map(|(c, n)| w.message(0, c, n));
    w.hand_over(0, &puts);
    w.hand_over(0, &[plan, inline(Lane::LowLatency), low_latency, inline(Lane::Control)]);
    w.serve();
    let expected = [None, None, Some((1, 20)), Some((1, 10)), Some((1, 0))];
    assert_eq!(w.posted(), expected, "a control word, a signal and its message, a plan's, and the first put");
    assert_eq!(w.nic.ring_counters().served[Lane::Put as usize].waited, 1);
    w.device.complete(3);
    w.poll();
    w.serve();
    assert_eq!(w.posted()[5..], [Some((1, 1))]);
}

/// A borrower that sleeps through a flood of one class must find what is urgent of another.
#[test]
fn events_of_a_class_whose_ring_is_full_leave_the_others_going() {
    let mut w = World::new(1 << 20);
    let flood: Vec<_> = (0..1500).map(|seq| arrival(Class::Put, 1, seq)).collect();
    flood.iter().for_each(|&event| w.device.tell(event));
    let urgent = arrival(Class::LowLatency, 1, 7);
    w.device.tell(urgent);
    w.device.tell(arrival(Class::Put, 0, 1));
    w.poll();
    assert_eq!(w.hear(0), [arrival(Class::Put, 0, 1)], "nor does it hold up another borrower");
    let mut heard = w.hear(1);
    assert!(heard.contains(&urgent), "it waits behind {} puts", heard.len());
    assert!(heard.len() < flood.len(), "the flood did not fill its ring");
    while !w.nic.is_quiet() {
        w.poll();
        heard.extend(w.hear(1));
    }
    heard.retain(|&event| event != urgent);
    assert_eq!(heard, flood);
    let told = w.nic.ring_counters().told[Lane::Put as usize];
    assert_eq!(told.passed, flood.len() as u64 + 1);
    assert!(told.waited > 0);
}

/// The bound must not go to the borrower of the lowest number for ever.
#[test]
fn borrowers_take_turns_where_bytes_are_bounded() {
    let mut w = World::new(u64::from(BYTES));
    for b in 0..BORROWERS {
        let puts: Vec<_> = (0..3).map(|n| w.message(b, Class::Put, n)).collect();
        w.hand_over(b, &puts);
    }
    for _ in 0..9 {
        w.serve();
        w.device.complete(1);
        w.poll();
    }
    let expected: Vec<_> = (0..3).flat_map(|n| (1..=3).map(move |gpu| Some((gpu, n)))).collect();
    assert_eq!(w.posted(), expected);
}

/// Nor may many short messages keep a long one from going: whose turn it is keeps it.
#[test]
fn a_long_message_is_not_overtaken_for_ever() {
    let mut w = World::new(u64::from(BYTES));
    let short: Vec<_> =
        (0..40).map(|n| w.message_to(PEERS[0], gpu_of(0), Class::Put, n, BYTES / 4)).collect();
    let long = w.message(1, Class::Put, 0);
    w.hand_over(0, &short);
    w.hand_over(1, &[long]);
    let mut rounds = 0;
    while !w.posted().contains(&Some((2, 0))) {
        w.serve();
        w.device.complete(1);
        w.poll();
        rounds += 1;
        assert!(rounds < 10, "it waits behind {} short ones", w.posted().len());
    }
    assert_eq!(w.posted().len(), 2);
}

/// One doorbell of the NIC for each message would be most of a borrower's cost.
#[test]
fn a_lane_goes_to_the_device_in_one_batch() {
    let mut w = World::new(1 << 20);
    for b in 0..BORROWERS {
        let messages: Vec<_> = (0..5).map(|n| w.message(b, Class::Plan, n)).collect();
        w.hand_over(b, &messages);
    }
    w.serve();
    let batches: Vec<_> = w.device.state().batches.iter().map(Vec::len).collect();
    assert_eq!(batches, [15]);
}

/// A receiver that is slow to make room holds up who sends to it.
#[test]
fn a_path_without_room_holds_up_no_other_borrower() {
    let mut w = World::new(1 << 20);
    let to = |w: &World, b, peer: usize, n| w.message_to(PEERS[peer], gpu_of(b), Class::Plan, n, BYTES);
    let (stuck, behind) = (to(&w, 0, 0, 0), to(&w, 0, 1, 1));
    w.hand_over(0, &[stuck, behind]);
    let others: Vec<_> = (0..40).map(|n| to(&w, 1, 1, n)).collect();
    w.hand_over(1, &others);
    w.device.state().full.insert(PathId(PEERS[0].0));
    w.serve();
    assert_eq!(w.posted().len() as u64, SHARE, "a whole share of the other's");
    assert!(w.posted().iter().all(|item| item.is_some_and(|(gpu, _)| gpu == 2)));
    w.device.state().full.clear();
    w.serve();
    let order: Vec<_> = w.posted().into_iter().flatten().skip(SHARE as usize).collect();
    assert_eq!(order[..4], [(1, 0), (2, SHARE), (1, 1), (2, SHARE + 1)], "first is who was stuck");
}

/// What was meant for a path before it was closed spends a credit that does not count any more.
#[test]
fn work_for_a_path_that_was_closed_and_opened_since_is_refused() {
    let mut w = World::new(u64::from(BYTES));
    let [first, second] = [0, 1].map(|n| w.message(0, Class::Put, n));
    w.hand_over(0, &[first, second, inline(Lane::Control)]);
    w.device.tell(NicEvent::Broken(PathId(PEERS[0].0)));
    let mut opened = 0;
    for _ in 0..1000 {
        w.now += PathTiming::default().repeat_ns;
        w.poll();
        // The other end goes the same way.
        let words: Vec<_> = w.nic.take_words().collect();
        words.into_iter().for_each(|(peer, word)| w.nic.on_word(peer, word.encode(), w.now));
        opened = w.nic.path_counters().opened;
        if opened > 0 {
            break;
        }
    }
    assert_eq!(opened, 1);
    w.serve();
    assert_eq!(w.posted(), []);
    let refused = |cookie| NicEvent::Completed { cookie, result: Err(WorkError::Refused) };
    let heard = w.hear(0);
    assert!(heard.ends_with(&[refused(0), refused(1)]), "{heard:?}");
    w.hand_over(0, &[first]);
    w.serve();
    assert_eq!(w.posted(), [Some((1, 0))], "now it is meant as it is");
}

/// A lane's bounds would not bind who chose another lane.
#[test]
fn work_in_the_wrong_lane_is_refused() {
    for lane in [Lane::Control, Lane::Plan, Lane::LowLatency] {
        let mut w = World::new(1 << 20);
        let put = w.message(0, Class::Put, 0);
        w.hand_over(0, &[Work { lane, ..put }]);
        let result = w.nic.serve_borrowers(1);
        assert!(matches!(result, Err(HwError::BadWork { field: "lane", .. })), "{lane:?}: {result:?}");
    }
    for lane in [Lane::Put, Lane::Plan] {
        let mut w = World::new(1 << 20);
        w.hand_over(0, &[inline(lane)]);
        let result = w.nic.serve_borrowers(1);
        assert!(matches!(result, Err(HwError::BadWork { field: "lane", .. })), "{lane:?}: {result:?}");
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    HandOver { b: usize, class: Class, bytes: u32 },
    Serve,
    Complete(usize),
    Room(usize, bool),
}

fn any_class() -> impl Strategy<Value = Class> {
    prop::sample::select(Class::ALL.to_vec())
}

fn any_step() -> impl Strategy<Value = Step> {
    let hand_over = || {
        (0..BORROWERS, any_class(), 1..=BYTES).prop_map(|(b, class, bytes)| Step::HandOver {
            b,
            class,
            bytes,
        })
    };
    prop_oneof![
        8 => hand_over(),
        2 => Just(Step::Serve),
        2 => (1..4usize).prop_map(Step::Complete),
        1 => (0..2usize, any::<bool>()).prop_map(|(path, room)| Step::Room(path, room)),
    ]
}

/// What a test knows of one lane.
#[derive(Default)]
struct Waiting {
    /// By borrower: messages handed over, served.
    handed: [u64; BORROWERS],
    served: [u64; BORROWERS],
    /// By pair of borrowers: items of the second since the first, which waits with one that may go, was served.
    overtaken: HashMap<(usize, usize), u64>,
}

const BOUND: u64 = 3 * BYTES as u64;

fn limit(class: Class) -> u64 {
    match class {
        Class::Plan => u64::MAX,
        Class::Put => BOUND,
        Class::LowLatency => BOUND / 4,
    }
}

fn bytes_of(work: &Work) -> u64 {
    match work.op {
        WorkOp::Write { local, .. } => local.bytes.into(),
        WorkOp::Inline { .. } => 0,
    }
}

proptest! {
    /// Order, bounds and turns, whatever borrowers, device and completions do. Messages of even number go over one path,
    /// the others over the other.
    #[test]
    fn the_wait_behind_borrowers_is_bounded_and_shared(steps in prop::collection::vec(any_step(), 1..200)) {
        let mut w = World::new(BOUND);
        let mut lanes: [Waiting; 3] = Default::default();
        for step in steps {
            match step {
                Step::HandOver { b, class, bytes } => {
                    let lane = &mut lanes[class as usize];
                    let number = lane.handed[b];
                    let work = w.message_to(PEERS[number as usize % 2], gpu_of(b), class, number, bytes);
                    lane.handed[b] += w.borrowed[b].post(&[work], 1).unwrap() as u64;
                }
                Step::Complete(count) => {
                    w.device.complete(count);
                    w.poll();
                }
                Step::Room(path, true) => drop(w.device.state().full.remove(&PathId(PEERS[path].0))),
                Step::Room(path, false) => drop(w.device.state().full.insert(PathId(PEERS[path].0))),
                Step::Serve => {
                    let before = w.posted().len();
                    w.serve();
                    let posted = w.device.posted();
                    check_round(&w, &mut lanes, &posted[before..])?;
                }
            }
            let posted: Vec<_> = w.device.posted();
            let with_device = &posted[w.device.state().completed.min(posted.len())..];
            for class in Class::ALL {
                let held: Vec<_> = with_device.iter().filter(|i| i.lane == class.into()).map(bytes_of).collect();
                prop_assert!(held.len() <= 1 || held.iter().sum::<u64>() <= limit(class), "{:?}: {:?}", class, held);
            }
        }
        // All comes through in the end, and then nothing waits.
        w.device.state().full.clear();
        for _ in 0..400 {
            w.serve();
            w.device.complete(usize::MAX / 2);
            w.poll();
        }
        let served = w.posted().len() as u64;
        prop_assert_eq!(served, lanes.iter().flat_map(|lane| lane.handed).sum::<u64>());
        prop_assert!(w.nic.is_quiet());
    }
}

fn check_round(w: &World, lanes: &mut [Waiting; 3], posted: &[Work]) -> Result<(), TestCaseError> {
    let full = w.device.state().full.clone();
    for class in Class::ALL {
        let lane = &mut lanes[class as usize];
        let mut count = [0; BORROWERS];
        for work in posted.iter().filter(|i| i.lane == class.into()) {
            let (gpu, number) = name(work).unwrap();
            let b = gpu as usize - 1;
            prop_assert_eq!(number, lane.served[b], "in order");
            (count[b], lane.served[b]) = (count[b] + 1, number + 1);
            let may_go = |o: usize| {
                let next = lane.served[o];
                next < lane.handed[o] && !full.contains(&PathId(PEERS[next as usize % 2].0))
            };
            for other in (0..BORROWERS).filter(|&o| o != b) {
                let overtaken = lane.overtaken.entry((other, b)).or_default();
                *overtaken = if full.is_empty() && may_go(other) { *overtaken + 1 } else { 0 };
                prop_assert!(*overtaken <= 1, "{} keeps {} waiting", b, other);
                lane.overtaken.insert((b, other), 0);
            }
        }
        prop_assert!(count.iter().all(|&n| n <= SHARE), "{:?}", count);
    }
    Ok(())
}

proptest! {
    /// Each class hears its events and all news in the order in which they were told, however the borrower sleeps.
    #[test]
    fn news_is_in_order_with_the_events_of_every_class(
        steps in prop::collection::vec((0..12u8, any_class(), 1..700u64), 1..60),
    ) {
        let mut w = World::new(1 << 20);
        let (mut told, mut heard) = (Vec::new(), Vec::new());
        for (kind, class, many) in steps {
            match kind {
                0..=1 => {
                    let state = if many % 2 == 0 { LinkState::Up } else { LinkState::Down };
                    w.nic.borrowers.tell_all(NicEvent::Link(state));
                    told.push(NicEvent::Link(state));
                }
                2..=4 => heard.extend(w.hear(0)),
                5 => w.nic.borrowers.give_kept(),
                _ => for _ in 0..many {
                    let event = arrival(class, 0, told.len() as u64 % 4096);
                    w.nic.borrowers.give(0, class, event);
                    told.push(event);
                }
            }
        }
        while !w.nic.is_quiet() || heard.len() < told.len() {
            w.nic.borrowers.give_kept();
            heard.extend(w.hear(0));
        }
        for class in Class::ALL {
            let of_class = |event: &&NicEvent| match event {
                NicEvent::Arrived { imm, .. } => Immediate::decode(*imm).unwrap().class == class,
                _ => true,
            };
            let [told, heard] = [&told, &heard].map(|e| e.iter().filter(of_class).collect::<Vec<_>>());
            prop_assert_eq!(heard, told);
        }
    }
}
