//! One keeper against hand-written peers: what it makes and maps is counted, and whatever fails leaves nothing behind.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use super::RelayError;
use super::inbox::{Inbox, Outbox, Posted, pair};
use super::keeper::{Keeper, KeeperParts, LotUser, Place};
use super::lending::{Lending, OwnedNicLots};
use super::shared::Shared;
use super::words::{LETTER_BYTES, Letter, Word};
use crate::comm::device::Device;
use crate::doorbell::Class;
use crate::emu::{EmuGpu, EmuGpuConfig, MonotonicClock, ScaleupLinks};
use crate::engine::call::CallId;
use crate::engine::relay::{Lender, Refusal};
use crate::engine::slots::{Lot, SlotConfig, SlotLayout};
use crate::hw::{HwError, LocalKey, Registrable, Registrar, RemoteKey};
use crate::owner::LotKeys;
use crate::shm::SharedMemory;
use crate::topo::{Cluster, GpuIdx, NicIdx, Server, ServerId};

/// A NIC's books, and whether it takes memory.
#[derive(Clone, Default)]
struct FakeNic(Arc<Mutex<(Vec<u32>, u32, bool)>>);

impl Registrar for FakeNic {
    fn register(&mut self, memory: &Registrable<'_>) -> Result<(LocalKey, RemoteKey), HwError> {
        let Registrable::Device { bytes, .. } = *memory else { panic!("lots are a GPU's") };
        let mut nic = self.0.lock().unwrap();
        if nic.2 {
            let source = std::io::Error::other("no pages can be pinned");
            return Err(HwError::Register { nic: NicIdx(0), bytes, source });
        }
        nic.1 += 1;
        let key = nic.1;
        nic.0.push(key);
        Ok((LocalKey(key), RemoteKey { remote_addr: 0, rkey: key.into(), bytes }))
    }

    fn deregister(&mut self, key: LocalKey) -> Result<(), HwError> {
        let keys = &mut self.0.lock().unwrap().0;
        let at = keys.iter().position(|&k| k == key.0);
        keys.remove(at.ok_or(HwError::Deregister { nic: NicIdx(0), key: key.0 })?);
        Ok(())
    }
}

/// What the engine was told.
#[derive(Default)]
struct FakeUser(Mutex<Vec<(NicIdx, Class, Option<u64>)>>);

impl LotUser for FakeUser {
    fn lot_lent(&self, nic: NicIdx, class: Class, dev_ptr: u64, _key: RemoteKey) {
        self.0.lock().unwrap().push((nic, class, Some(dev_ptr)));
    }
    fn recall_lot(&self, nic: NicIdx, class: Class) {
        self.0.lock().unwrap().push((nic, class, None));
    }
}

const CAP: u64 = 64 << 20;
const OWN: GpuIdx = GpuIdx(0);
const PEER: GpuIdx = GpuIdx(1);
/// Beside this rank's GPU, for the peer; and beside the peer's, for this rank.
const THEIRS: Lot = Lot { nic: NicIdx(0), gpu: PEER, class: Class::Put };
const OURS: Lot = Lot { nic: NicIdx(1), gpu: OWN, class: Class::Plan };

/// The keeper of local rank 0 of two, and the peer's inbox.
struct Rig {
    keeper: Keeper,
    shared: Shared,
    nic: FakeNic,
    keys: LotKeys,
    user: Arc<FakeUser>,
    gpu: Arc<Device>,
    to_keeper: Outbox,
    from_keeper: Option<Inbox>,
}

fn rig(memory_bytes: Option<u64>) -> Rig {
    let cluster = Arc::new(Cluster::uniform(2, Server::new(2, &[400_000; 2], 450_000)));
    let config = SlotConfig { slot_bytes: 8192, send_slots: 8, recv_slots: 4, put_bytes: 0 };
    let slots = SlotLayout::new(&cluster, ServerId(0), config).unwrap();
    let links = SharedMemory::create("fuselink-test", ScaleupLinks::words(2)).unwrap();
    let links = ScaleupLinks::new(links.words(), 1 << 40);
    let gpu = EmuGpu::new(EmuGpuConfig { idx: OWN, resident_blocks: 1, links, memory_bytes }).unwrap();
    let (gpu, nic, keys, user) =
        (Arc::new(Device::Emu(gpu)), FakeNic::default(), LotKeys::new(2), Arc::<FakeUser>::default());
    let owned = OwnedNicLots { registrar: Box::new(nic.clone()), keys: keys.clone() };
    let ((inbox, to_keeper), (from_keeper, to_peer)) = (pair().unwrap(), pair().unwrap());
    let unused = Outbox::of(to_peer.as_fd().try_clone_to_owned().unwrap());
    let keeper = Keeper::new(KeeperParts {
        place: Place { cluster, server: ServerId(0), gpu: OWN, slots },
        gpu: Arc::clone(&gpu),
        clock: Box::new(MonotonicClock),
        user: Arc::<FakeUser>::clone(&user),
        inbox,
        outboxes: vec![unused, to_peer],
        lending: Lending::new(BTreeMap::from([(NicIdx(0), owned)])),
    });
    let shared = Shared::new(Lender::new(CAP, 0)).unwrap();
    Rig { keeper, shared, nic, keys, user, gpu, to_keeper, from_keeper: Some(from_keeper) }
}

impl Rig {
    fn say(&mut self, lot: Lot, ask: u32, word: Word, fd: Option<OwnedFd>) -> Result<(), RelayError> {
        let letter = Letter { from: PEER, lot, ask, word };
        assert_eq!(self.to_keeper.post(&letter, fd.as_ref().map(AsFd::as_fd)).unwrap(), Posted::Sent);
        self.keeper.round(&self.shared)
    }

    fn hear(&self) -> Option<(Lot, u32, Word, Option<OwnedFd>)> {
        let inbox = self.from_keeper.as_ref().expect("the peer is there");
        inbox.take().unwrap().map(|got| got.unwrap()).map(|(l, fd)| (l.lot, l.ask, l.word, fd))
    }

    fn taken_bytes(&self) -> u64 {
        match &*self.gpu {
            Device::Emu(gpu) => gpu.taken_bytes(),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => panic!("an emulated one"),
        }
    }

    /// Memory, registrations and keys that are there.
    fn held(&self) -> (u64, usize, bool) {
        (self.taken_bytes(), self.nic.0.lock().unwrap().0.len(), self.keys.key(THEIRS).is_some())
    }

    /// This rank wants a lot: returns the number of its ask.
    fn want(&mut self, call: u64) -> u32 {
        let asks = self.shared.books().borrowings.want(&[(OURS.nic, OURS.class)], CallId(call));
        let [(_, ask)] = asks[..] else { panic!("{asks:?}") };
        let letter = Letter { from: OWN, lot: OURS, ask, word: Word::Ask };
        self.shared.books().letters.push_back(letter);
        self.keeper.round(&self.shared).unwrap();
        let heard = self.hear().map(|(lot, ask, word, _)| (lot, ask, word));
        assert_eq!(heard, Some((OURS, ask, Word::Ask)));
        ask
    }
}

/// Memory as a peer would lend it.
fn memory(bytes: u64) -> OwnedFd {
    crate::shm::memfd("fuselink-gpu", bytes).unwrap()
}

const LENT: Word = Word::Lent(RemoteKey { remote_addr: 0, rkey: 9, bytes: 2 << 20 });

#[test]
fn a_lot_is_made_lent_taken_back_and_gone() {
    let mut rig = rig(None);
    rig.say(THEIRS, 1, Word::Ask, None).unwrap();
    let Some((THEIRS, 1, Word::Lent(key), Some(fd))) = rig.hear() else { panic!("not lent") };
    assert_eq!((key.rkey, rustix::fs::fstat(&fd).unwrap().st_size), (1, 2 << 20));
    assert_eq!(rig.held(), (2 << 20, 1, true));
    let recalled = rig.shared.books().lender.recall(u64::MAX, 0);
    assert_eq!(recalled, [(THEIRS, 1)]);
    assert_eq!(rig.held(), (2 << 20, 1, true), "its borrower may still use it");
    rig.shared.gate.enter();
    rig.say(THEIRS, 1, Word::Returned, None).unwrap();
    assert_eq!(rig.held(), (2 << 20, 0, false), "unreachable at once, unmapped when no kernel runs");
    rig.shared.gate.leave();
    rig.keeper.round(&rig.shared).unwrap();
    assert_eq!(rig.held(), (0, 0, false));
    assert_eq!(rig.shared.books().lender.counters().bytes, 0);
}

#[test]
fn what_cannot_be_registered_leaves_nothing() {
    let mut rig = rig(None);
    rig.nic.0.lock().unwrap().2 = true;
    rig.say(THEIRS, 1, Word::Ask, None).unwrap();
    assert!(matches!(rig.hear(), Some((THEIRS, 1, Word::Refused(Refusal::Memory), None))));
    assert_eq!(rig.held(), (0, 0, false));
    rig.nic.0.lock().unwrap().2 = false;
    rig.say(THEIRS, 2, Word::Ask, None).unwrap();
    assert!(matches!(rig.hear(), Some((_, 2, Word::Refused(Refusal::HeldBack), None))), "not again at once");
}

#[test]
fn a_gpu_without_memory_refuses() {
    let mut rig = rig(Some(1 << 20));
    rig.say(THEIRS, 1, Word::Ask, None).unwrap();
    assert!(matches!(rig.hear(), Some((_, 1, Word::Refused(Refusal::Memory), None))));
    assert_eq!((rig.held(), rig.shared.books().lender.counters().bytes), ((0, 0, false), 0));
}

#[test]
fn a_borrowed_lot_is_mapped_used_and_unmapped_before_its_owner_hears() {
    let mut rig = rig(None);
    let ask = rig.want(1);
    rig.say(OURS, ask, LENT, Some(memory(2 << 20))).unwrap();
    assert!(matches!(rig.user.0.lock().unwrap()[..], [(NicIdx(1), Class::Plan, Some(_))]));
    assert!(rig.shared.books().borrowings.is_lent((OURS.nic, OURS.class)));
    rig.say(OURS, ask, Word::Recall, None).unwrap();
    assert!(rig.hear().is_none(), "the engine still uses it");
    assert_eq!(rig.keeper.holdings.borrowed.len(), 1);
    rig.shared.gate.enter();
    rig.shared.returned(OURS.nic, OURS.class);
    rig.keeper.round(&rig.shared).unwrap();
    assert!(rig.hear().is_none(), "a kernel runs, and it is mapped");
    rig.shared.gate.leave();
    rig.keeper.round(&rig.shared).unwrap();
    assert!(matches!(rig.hear(), Some((OURS, n, Word::Returned, None)) if n == ask));
    assert!(rig.keeper.holdings.borrowed.is_empty());
}

#[test]
fn what_cannot_be_mapped_goes_back() {
    let mut rig = rig(None);
    let ask = rig.want(1);
    rig.say(OURS, ask, LENT, Some(memory(4096))).unwrap();
    assert!(matches!(rig.hear(), Some((OURS, n, Word::Returned, None)) if n == ask), "memory too small");
    assert!(rig.keeper.holdings.borrowed.is_empty() && rig.user.0.lock().unwrap().is_empty());
    let ask = rig.want(2);
    rig.shared.gate.enter();
    rig.say(OURS, ask, LENT, Some(memory(2 << 20))).unwrap();
    rig.say(OURS, ask, Word::Recall, None).unwrap();
    assert!(
        matches!(rig.hear(), Some((OURS, n, Word::Returned, None)) if n == ask),
        "recalled before it was mapped"
    );
    rig.shared.gate.leave();
    rig.keeper.round(&rig.shared).unwrap();
    assert!(rig.keeper.holdings.borrowed.is_empty() && rig.user.0.lock().unwrap().is_empty());
}

#[test]
fn what_a_peer_must_not_say_is_an_error_with_its_name() {
    let permanent = Lot { gpu: PEER, class: Class::LowLatency, ..THEIRS };
    let bad: [(Lot, Word, &str); 6] = [
        (THEIRS, Word::Returned, "return"),
        (permanent, Word::Ask, "class"),
        (Lot { gpu: OWN, ..THEIRS }, Word::Ask, "GPU"),
        (Lot { nic: NicIdx(7), ..THEIRS }, Word::Ask, "NIC"),
        (OURS, Word::Ask, "NIC"),
        (THEIRS, Word::Recall, "NIC"),
    ];
    for (lot, word, expected) in bad {
        let error = rig(None).say(lot, 1, word, None).unwrap_err();
        let named =
            matches!(&error, RelayError::BadWord { rank, field, .. } if rank.0 == 1 && *field == expected);
        assert!(named, "{word:?}: {error}");
    }
    let mut twice = rig(None);
    twice.say(THEIRS, 1, Word::Ask, None).unwrap();
    assert!(twice.say(THEIRS, 2, Word::Ask, None).is_err(), "it has it");
    let mut unwanted = rig(None);
    let error = unwanted.say(THEIRS, 1, Word::Ask, Some(memory(4096))).unwrap_err();
    assert!(error.to_string().contains("descriptors"), "{error}");
    let mut garbage = rig(None);
    rustix::net::send(&garbage.to_keeper, &[7; LETTER_BYTES - 1], rustix::net::SendFlags::empty()).unwrap();
    assert!(matches!(
        garbage.keeper.round(&garbage.shared),
        Err(RelayError::BadLetter { field: "length", .. })
    ));
}

#[test]
fn a_full_inbox_delays_and_loses_nothing() {
    let mut rig = rig(None);
    for ask in 0..2000 {
        let letter = Letter { from: OWN, lot: THEIRS, ask, word: Word::Recall };
        rig.shared.books().letters.push_back(letter);
    }
    let mut heard = 0;
    while heard < 2000 {
        rig.keeper.round(&rig.shared).unwrap();
        while let Some((_, ask, word, _)) = rig.hear() {
            assert_eq!((ask, word), (heard, Word::Recall));
            heard += 1;
        }
    }
}

#[test]
fn a_rank_that_has_left_is_not_waited_for() {
    let mut rig = rig(None);
    rig.from_keeper = None;
    rig.say(THEIRS, 1, Word::Ask, None).unwrap();
    rig.keeper.round(&rig.shared).unwrap();
    assert_eq!(rig.held(), (0, 0, false), "what never reached it came back");
    let wanted = [(OURS.nic, OURS.class)];
    let asks = rig.shared.books().borrowings.want(&wanted, CallId(1));
    let letter = Letter { from: OWN, lot: OURS, ask: asks[0].1, word: Word::Ask };
    rig.shared.books().letters.push_back(letter);
    rig.keeper.round(&rig.shared).unwrap();
    assert!(rig.shared.books().borrowings.is_settled(&wanted));
    assert!(rig.shared.books().borrowings.want(&wanted, CallId(1000)).is_empty());
}
