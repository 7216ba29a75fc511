//! How a communicator comes to be: agree, meet the server's ranks, share memory, register it, exchange keys, start the
//! proxy.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::bootstrap::Bootstrap;
use super::herald::{self, NoHerald, UdpHerald};
use super::local::{LocalConfig, LocalGroup};
use super::machine::{self, Hardware, Machine, MachineRoot};
use super::memory::{Mapped, MappedParts, words_of};
use super::puts::LaunchParams;
use super::relay::{
    self, Inbox, KeeperParts, Lending, Outbox, OwnedNicLots, Place, RelayBooks, RelayError, RelayKeeper,
    RelayMemory,
};
use super::secret::Secret;
use super::{CommConfig, CommError, Communicator};
use crate::borrow::{BorrowedNic, BorrowerPort};
use crate::channel::{Channel, ChannelConfig, DeviceLayout, LOCAL_DEPTH, StreamConfig};
use crate::credit::{CreditInbox, ReturnInbox};
use crate::doorbell::Class;
use crate::engine::call::CallId;
use crate::engine::lots::{LotsAtStart, is_permanent};
use crate::engine::relay::Lender;
use crate::engine::route::{Policy, RouteLimits};
use crate::engine::slots::{Lot, SlotConfig, SlotLayout};
use crate::engine::{Engine, EngineConfig};
use crate::hw::{Chunk, Clock, Gpu, Herald, NicDevice, PathId, Registrable, RemoteKey};
use crate::load::{LoadConfig, LoadTable};
use crate::owner::{LotKeys, OwnedNic, OwnedNicConfig};
use crate::plan::Planner;
use crate::proxy::{LotPtrs, Port, Proxy, ProxyParts};
use crate::segment::SegmentLayout;
use crate::shm::SharedMemory;
use crate::signals::SignalInbox;
use crate::topo::{Cluster, NicId, NicIdx, Rank, ServerId};

/// Armed slots per queue: enough that a kernel finds the next one when it is done with one.
const ARMED_DEPTH: u32 = 8;
/// Doorbell rings per GPU and descriptors in each.
const DOORBELL_RINGS: u32 = 2;
const DOORBELL_CAPACITY: u64 = 512;
/// Signals of a rank.
const SIGNALS: u32 = 1024;
/// Messages of its own that a rank has on the way through its direct NIC before it looks for others.
const DIRECT_MESSAGES: u64 = 3;
/// Messages of all borrowers together that may be on the way through a NIC.
const BORROWED_MESSAGES: u64 = 8;
/// A credit's way, and what a proxy and a kernel take to notice it: on emulated machines the host's scheduling.
const CREDIT_WAY: Duration = Duration::from_millis(4);
/// An owner's traffic must have rested for this many message times before its NIC counts as idle.
const IDLE_MESSAGES: u64 = 4;
/// Longest lease between two rounds of a proxy.
const LEASE: Duration = Duration::from_millis(200);
/// While a call is open a proxy looks this often per message time, within bounds; while none is, at the upper bound.
const LOOKS_PER_MESSAGE: u32 = 4;
const PROXY_SLEEP: [Duration; 2] = [Duration::from_micros(100), Duration::from_millis(1)];

/// What all ranks must have been started with alike, and what rank 0 decides.
#[derive(Serialize, Deserialize, PartialEq)]
struct Terms {
    cluster: Cluster,
    slot_bytes: u32,
    put_bytes: u32,
    relay_bytes: u64,
    gpu: String,
    emulation: super::EmuOptions,
    nics: String,
    /// From rank 0: what names this job's meeting places, and where its wire is.
    nonce: Vec<u8>,
    machine: Vec<u8>,
}

/// The key of relay memory that an owner has lent from the start: a part of a lot.
#[derive(Serialize, Deserialize, Clone, Copy)]
struct PartCard {
    /// Its number.
    part: usize,
    key: RemoteKey,
}

/// What an owner tells everybody of one NIC.
#[derive(Serialize, Deserialize, Clone)]
struct NicCard {
    nic: NicId,
    endpoint: Vec<u8>,
    parts: Vec<PartCard>,
    segment: RemoteKey,
    /// Where its owner hears of paths beside the NICs.
    herald: Option<SocketAddr>,
}

fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    // Numbers, vectors and strings always serialise.
    serde_json::to_vec(value).unwrap_or_default()
}

fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8], rank: Rank) -> Result<T, CommError> {
    serde_json::from_slice(bytes).map_err(|_| CommError::BadAnswer { rank })
}

/// What the server's ranks share.
struct Shared {
    segment: Arc<SharedMemory>,
    layout: SegmentLayout,
    machine: Machine,
    local: LocalGroup,
}

/// The steps' common facts.
struct Setup<'a> {
    config: &'a CommConfig,
    bootstrap: &'a Bootstrap,
    cluster: Arc<Cluster>,
    rank: Rank,
    server: ServerId,
    slot_config: SlotConfig,
    slots: SlotLayout,
}

impl Setup<'_> {
    fn owned_nics(&self) -> impl Iterator<Item = NicId> + '_ {
        let nics = 0..self.cluster.server(self.server).nics.len() as u32;
        let ids = nics.map(|k| self.cluster.nic_id(self.server, NicIdx(k)));
        ids.filter(|&n| self.cluster.owner_of(n) == self.rank && self.cluster.nic(n).mbit_per_s > 0)
    }

    /// Lots of a NIC of this server that are there from the start.
    fn lots(&self, nic: NicIdx) -> impl Iterator<Item = Lot> + '_ {
        self.slots.lots(nic).filter(|&lot| is_permanent(&self.cluster, self.server, lot))
    }

    /// Compares configurations; returns rank 0's terms.
    fn agree(&self, root: &MachineRoot) -> Result<Terms, CommError> {
        let nonce = if self.rank.0 == 0 {
            Secret::generate().map(|s| s.expose().into()).unwrap_or_default()
        } else {
            Vec::new()
        };
        let own = Terms {
            cluster: (*self.cluster).clone(),
            slot_bytes: self.config.slot_bytes,
            put_bytes: self.config.put_bytes,
            relay_bytes: self.config.relay_bytes,
            gpu: self.config.gpu.name().to_owned(),
            emulation: self.config.emulation,
            nics: self.config.nics.terms(),
            nonce,
            machine: root.address(),
        };
        let all = self.bootstrap.allgather(&encode(&own))?;
        let first: Terms = decode(&all[0], Rank(0))?;
        for (r, bytes) in all.iter().enumerate().skip(1) {
            let rank = Rank(r as u32);
            let terms: Terms = decode(bytes, rank)?;
            let differs = |what| Err(CommError::Differs { rank, what });
            if terms.cluster != first.cluster {
                return differs("cluster");
            }
            if (terms.slot_bytes, terms.relay_bytes) != (first.slot_bytes, first.relay_bytes) {
                return differs("size of slots or relay memory (FUSELINK_SLOT_BYTES, FUSELINK_RELAY_BYTES)");
            }
            if terms.gpu != first.gpu {
                return differs("kind of GPUs (FUSELINK_GPU)");
            }
            if terms.put_bytes != first.put_bytes {
                return differs("size of puts");
            }
            if terms.emulation != first.emulation {
                return differs("emulation");
            }
            if terms.nics != first.nics {
                return differs(
                    "kind of NICs (FUSELINK_NIC, FUSELINK_VERBS_QPS, FUSELINK_VERBS_ADAPTIVE_ROUTING)",
                );
            }
        }
        Ok(first)
    }

    /// Meets the server's ranks and takes what the lowest of them made.
    fn meet_server(&self, root: MachineRoot, terms: &Terms) -> Result<Shared, CommError> {
        let gpu = self.cluster.gpu_of(self.rank);
        let server = self.cluster.server(self.server);
        let local = LocalGroup::connect(&LocalConfig {
            server: self.server.0,
            local_rank: gpu.0,
            local_size: server.gpus,
            job: String::from_utf8_lossy(&terms.nonce).into_owned(),
            secret: self.config.secret.clone(),
            deadline: self.config.timeout,
        })?;
        let layout = SegmentLayout::new(&self.cluster, self.server);
        let mut made = Vec::new();
        if gpu.0 == 0 {
            let segment = SharedMemory::create("fuselink-segment", layout.words())?;
            let (at, words) = layout.load_table();
            LoadTable::init(&segment.words().part(at, words), server.gpus, server.nics.len());
            made = vec![segment, MachineRoot::server_memory(server.gpus)?];
        }
        let fds: Vec<_> = made.iter().map(|m| m.as_fd()).collect();
        let mut answers = local.allgather_fds(&fds, &[])?;
        let (fds, _) = answers.swap_remove(0);
        let lowest = self.cluster.first_rank(self.server);
        let [segment, server_memory] =
            <[OwnedFd; 2]>::try_from(fds).map_err(|_| CommError::BadAnswer { rank: lowest })?;
        let segment = SharedMemory::open(segment, layout.words())?;
        let hardware =
            Hardware { gpu: self.config.gpu, blocks: self.config.blocks, emulation: self.config.emulation };
        let machine = root.build(&self.cluster, self.rank, hardware, &terms.machine, server_memory)?;
        Ok(Shared { segment, layout, machine, local })
    }

    /// Makes this rank's control memory and the permanent lots on its GPU, and maps what it uses of those of all local ranks.
    fn share_memory(&self, shared: &Shared, control_bytes: u64) -> Result<ServerMemory, CommError> {
        let gpu = shared.machine.gpu();
        let mut chunks = vec![gpu.create_chunk(control_bytes)?];
        let owned: Vec<NicId> = self.owned_nics().collect();
        for lot in owned.iter().flat_map(|&nic| self.lots(self.cluster.nic_idx(nic))) {
            for _ in 0..self.slots.parts(lot.class) {
                chunks.push(gpu.create_chunk(self.slots.part_bytes(lot.class))?);
            }
        }
        let fds = chunks.iter().map(|c| c.export()).collect::<Result<Vec<_>, _>>()?;
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let answers = shared.local.allgather_fds(&borrowed, &encode(&owned))?;
        let mut memory = ServerMemory { control: Vec::new(), relay: RelayMemory::default() };
        let mut chunks = chunks.into_iter();
        for (peer, (fds, bytes)) in self.cluster.ranks_of(self.server).zip(answers) {
            let nics: Vec<NicId> = decode(&bytes, peer)?;
            let owner = self.cluster.gpu_of(peer);
            let mut fds = fds.into_iter();
            let mut next = |fds: &mut std::vec::IntoIter<OwnedFd>, bytes| {
                let fd = fds.next().ok_or(CommError::BadAnswer { rank: peer })?;
                let own = if peer == self.rank { chunks.next() } else { None };
                Ok::<_, CommError>(match own {
                    Some(chunk) => chunk,
                    None => gpu.import_chunk(fd, owner, bytes)?,
                })
            };
            memory.control.push(Mapped::of(gpu, next(&mut fds, control_bytes)?)?);
            for nic in nics {
                if self.cluster.server_of_nic(nic) != self.server || self.cluster.owner_of(nic) != peer {
                    return Err(CommError::BadAnswer { rank: peer });
                }
                for lot in self.lots(self.cluster.nic_idx(nic)) {
                    let (parts, bytes) = (self.slots.parts(lot.class), self.slots.part_bytes(lot.class));
                    if peer == self.rank || lot.gpu == self.cluster.gpu_of(self.rank) {
                        let chunks = (0..parts).map(|_| next(&mut fds, bytes)).collect::<Result<_, _>>()?;
                        memory.relay.add(lot, MappedParts::of(gpu, chunks, bytes)?);
                    } else {
                        (0..parts).for_each(|_| drop(fds.next()));
                    }
                }
            }
        }
        Ok(memory)
    }

    /// Registers what owned NICs must reach, and tells everybody.
    fn open_nics(&self, shared: &Shared, memory: &ServerMemory) -> Result<Nics, CommError> {
        let mut devices = Vec::new();
        let mut lending = BTreeMap::new();
        let herald = self.open_herald();
        let herald_at = herald.as_ref().and_then(|socket| socket.local_addr().ok());
        for nic in self.owned_nics() {
            let mut device = shared.machine.open_nic(&self.cluster, nic)?;
            let keys = LotKeys::new(self.slots);
            let parts = self.register_lots(&mut *device, &keys, &memory.relay)?;
            let segment = Registrable::Host {
                host_ptr: shared.segment.words().host_ptr(),
                bytes: shared.layout.words() as u64 * 8,
                fd: shared.segment.as_fd(),
            };
            let (_, segment) = device.register(&segment)?;
            let endpoint = device.endpoint();
            let card = NicCard { nic, endpoint, parts, segment, herald: herald_at };
            let owned = OwnedNicLots { registrar: device.registrar(), keys: keys.clone() };
            lending.insert(device.idx(), owned);
            devices.push((device, keys, card));
        }
        let own: Vec<&NicCard> = devices.iter().map(|(_, _, card)| card).collect();
        let all = self.bootstrap.allgather(&encode(&own))?;
        let mut cards = vec![None; self.cluster.nics() as usize];
        for (r, bytes) in all.iter().enumerate() {
            let rank = Rank(r as u32);
            for card in decode::<Vec<NicCard>>(bytes, rank)? {
                let place = cards.get_mut(card.nic.idx());
                *place.ok_or(CommError::BadAnswer { rank })? = Some(card);
            }
        }
        let devices = devices.into_iter().map(|(device, keys, _)| (device, keys)).collect();
        Ok(Nics { devices, cards, herald, lending })
    }

    fn register_lots(
        &self,
        device: &mut dyn NicDevice,
        keys: &LotKeys,
        relay: &RelayMemory,
    ) -> Result<Vec<PartCard>, CommError> {
        let mut cards = Vec::new();
        for lot in self.lots(device.idx()) {
            let memory = relay.lot(lot).ok_or(CommError::BadAnswer { rank: self.rank })?;
            for (part, chunk) in (0..).zip(&memory.chunks) {
                let (fd, gpu, bytes) = (chunk.export_for_nic()?, chunk.gpu(), chunk.bytes());
                let dev_ptr = memory.dev_ptr() + u64::from(part) * self.slots.part_bytes(lot.class);
                let registrable = Registrable::Device { fd: fd.as_fd(), gpu, dev_ptr, bytes };
                let (local, key) = device.register(&registrable)?;
                keys.set(lot, part, Some(local));
                cards.push(PartCard { part: self.slots.part_number(lot, part), key });
            }
        }
        Ok(cards)
    }

    fn lot_dev_ptrs(&self, relay: &RelayMemory) -> Vec<LotPtrs> {
        let nics = 0..self.cluster.server(self.server).nics.len() as u32;
        nics.map(|k| relay.dev_ptrs(NicIdx(k), self.cluster.gpu_of(self.rank))).collect()
    }

    /// Keys of the parts of all lots of the job, by NIC and number.
    fn lot_keys(&self, cards: &[Option<NicCard>]) -> Result<Vec<Vec<RemoteKey>>, CommError> {
        let of = |(n, card): (usize, &Option<NicCard>)| {
            let nic = NicId(n as u32);
            let slots = SlotLayout::new(&self.cluster, self.cluster.server_of_nic(nic), self.slot_config)?;
            let mut keys = vec![NO_KEY; slots.part_count()];
            for card in card.iter().flat_map(|c| &c.parts) {
                let bad = CommError::BadAnswer { rank: self.cluster.owner_of(nic) };
                *keys.get_mut(card.part).ok_or(bad)? = card.key;
            }
            Ok(keys)
        };
        cards.iter().enumerate().map(of).collect()
    }

    /// Where this rank hears of lots, and its ways to the others.
    fn open_inboxes(&self, shared: &Shared) -> Result<(Inbox, Vec<Outbox>), CommError> {
        let made = relay::pair();
        let (inbox, outbox) =
            made.map_err(|source| RelayError::Os { operation: "make a socket for relay memory", source })?;
        let answers = shared.local.allgather_fds(&[outbox.as_fd()], &[])?;
        let of = |(rank, (fds, _)): (Rank, (Vec<OwnedFd>, _))| {
            let fd = fds.into_iter().next().ok_or(CommError::BadAnswer { rank })?;
            Ok(Outbox::of(fd))
        };
        let outboxes = self.cluster.ranks_of(self.server).zip(answers).map(of);
        Ok((inbox, outboxes.collect::<Result<_, CommError>>()?))
    }

    /// This GPU's pool.
    fn lender(&self) -> Lender {
        let gpu = self.cluster.gpu_of(self.rank);
        let permanent = self.slots.gpu_bytes(&self.cluster, self.server, gpu, LotsAtStart::Permanent);
        Lender::new(self.config.relay_bytes, permanent)
    }

    /// Without one, paths are told of over other paths only.
    fn open_herald(&self) -> Option<UdpSocket> {
        self.bootstrap.local_ip().and_then(|ip| herald::open(ip).ok())
    }

    /// NICs of this server as this rank reaches them.
    fn ports(&self, shared: &Shared, nics: &mut Nics) -> Result<Vec<Port>, CommError> {
        let words = shared.segment.words();
        let gpu = self.cluster.gpu_of(self.rank);
        let specs = &self.cluster.server(self.server).nics;
        let mut ports = Vec::new();
        for (k, spec) in specs.iter().enumerate() {
            let idx = NicIdx(k as u32);
            ports.push(if spec.mbit_per_s == 0 {
                Port::Down
            } else if spec.relay_gpu == gpu {
                let (device, lots) = nics.devices.remove(0);
                Port::Owned(Box::new(self.owned_port(shared, &nics.cards, device, lots)?))
            } else {
                Port::Borrowed(Box::new(BorrowedNic::new(&words, shared.layout, gpu, idx)))
            });
        }
        Ok(ports)
    }

    fn owned_port(
        &self,
        shared: &Shared,
        cards: &[Option<NicCard>],
        mut device: Box<dyn NicDevice>,
        lots: LotKeys,
    ) -> Result<OwnedNic, CommError> {
        let mut paths: Vec<Option<PathId>> = vec![None; cards.len()];
        for card in cards.iter().flatten() {
            if self.cluster.server_of_nic(card.nic) != self.server {
                paths[card.nic.idx()] = Some(device.open_path(card.nic, &card.endpoint)?);
            }
        }
        let owner = self.cluster.gpu_of(self.rank);
        let words = shared.segment.words();
        let others =
            self.cluster.ranks_of(self.server).map(|r| self.cluster.gpu_of(r)).filter(|&g| g != owner);
        let idx = device.idx();
        let ports = others.map(|g| BorrowerPort::new(&words, shared.layout, g, idx)).collect();
        let config = OwnedNicConfig {
            cluster: Arc::clone(&self.cluster),
            server: self.server,
            owner,
            slots: self.slots,
            lots,
            paths,
            borrow_bytes: BORROWED_MESSAGES * u64::from(self.slot_config.slot_bytes),
            timing: self.config.nics.path_timing(),
            path_words: words.part(shared.layout.path_words_at(idx), self.cluster.nics() as usize),
        };
        Ok(OwnedNic::new(device, config, ports))
    }

    fn engine_config(&self, machine: &Machine) -> EngineConfig {
        let scale = machine.scale();
        let message = u64::from(self.slot_config.slot_bytes);
        let rates = self.cluster.servers().iter().flat_map(|s| &s.nics).map(|n| n.mbit_per_s);
        let fastest = machine::emulated_nic_byte_per_s(rates.max().unwrap_or(0), scale);
        let lookahead = (u128::from(fastest) * CREDIT_WAY.as_nanos() / 1_000_000_000) as u64;
        EngineConfig {
            rank: self.rank,
            cluster: Arc::clone(&self.cluster),
            slots: self.slots,
            work_queues: machine.blocks(),
            armed_depth: ARMED_DEPTH,
            limits: RouteLimits {
                direct_bytes: DIRECT_MESSAGES * message,
                borrow_bytes: BORROWED_MESSAGES * message,
                policy: Policy::WHOLE,
            },
            lookahead_bytes: lookahead.max(2 * message),
            direct_nic: self.cluster.direct_nic(self.rank),
            lots: LotsAtStart::Permanent,
            call: CallId(0),
        }
    }

    fn load_config(&self, scale: u64) -> LoadConfig {
        let server = self.cluster.server(self.server);
        let slowest = server.nics.iter().map(|n| n.mbit_per_s).filter(|&r| r > 0).min().unwrap_or(1);
        LoadConfig::of(server, IDLE_MESSAGES * self.message_ns(slowest, scale))
    }

    /// How long a message takes through a NIC.
    fn message_ns(&self, mbit_per_s: u64, scale: u64) -> u64 {
        let rate = machine::emulated_nic_byte_per_s(mbit_per_s, scale).max(1);
        u64::from(self.slot_config.slot_bytes) * 1_000_000_000 / rate
    }

    fn proxy_sleep(&self, scale: u64) -> [Duration; 2] {
        let [shortest, longest] = PROXY_SLEEP;
        let fastest = self.cluster.servers().iter().flat_map(|s| &s.nics).map(|n| n.mbit_per_s).max();
        let message = Duration::from_nanos(self.message_ns(fastest.unwrap_or(0), scale));
        [(message / LOOKS_PER_MESSAGE).clamp(shortest, longest), longest]
    }

    fn stream_config(&self) -> StreamConfig {
        let nics = self.cluster.server(self.server).nics.len() as u32;
        let slots = nics * self.slot_config.recv_slots;
        let put_bytes = self.slot_config.put_bytes;
        StreamConfig {
            ranks: self.cluster.ranks(),
            arrival_depth: slots.next_power_of_two().max(1),
            signals: SIGNALS,
            first_local_rank: self.cluster.first_rank(self.server).0,
            local_ranks: if put_bytes == 0 { 0 } else { self.cluster.server(self.server).gpus },
            local_rank: self.cluster.gpu_of(self.rank).0,
            local_depth: LOCAL_DEPTH,
            local_slot_bytes: put_bytes,
        }
    }

    fn channel_config(&self, work_queues: u32, queues: u32) -> ChannelConfig {
        let classes = Class::ALL.len() as u32;
        let nics = self.cluster.server(self.server).nics.len() as u32;
        let slots = classes * nics * self.slots.slots_per_class();
        ChannelConfig {
            rank: self.rank.0,
            local_ranks: self.cluster.server(self.server).gpus,
            doorbell_rings: DOORBELL_RINGS,
            doorbell_capacity: DOORBELL_CAPACITY,
            queues,
            work_queues,
            armed_depth: ARMED_DEPTH,
            arrival_capacity: slots.next_power_of_two().max(1),
            streams: self.stream_config(),
        }
    }
}

/// Memory of the server's ranks, as this GPU sees it.
pub(super) struct ServerMemory {
    /// By local rank.
    pub control: Vec<Mapped>,
    pub relay: RelayMemory,
}

struct Nics {
    devices: Vec<(Box<dyn NicDevice>, LotKeys)>,
    cards: Vec<Option<NicCard>>,
    herald: Option<UdpSocket>,
    /// By NIC: for lots that are lent later.
    lending: BTreeMap<NicIdx, OwnedNicLots>,
}

/// Makes a communicator. Collective over the job.
pub(super) fn connect(config: &CommConfig, bootstrap: &Bootstrap) -> Result<Communicator, CommError> {
    let cluster = Arc::new(config.cluster.clone());
    let (rank, ranks) = (bootstrap.rank(), bootstrap.size());
    if ranks != cluster.ranks() {
        return Err(CommError::WrongSize { ranks, gpus: cluster.ranks() });
    }
    let server = cluster.server_of(rank);
    let slot_config = SlotConfig::fit(&cluster, config.slot_bytes, config.put_bytes, config.relay_bytes)?;
    let slots = SlotLayout::new(&cluster, server, slot_config)?;
    let setup = Setup { config, bootstrap, cluster: Arc::clone(&cluster), rank, server, slot_config, slots };
    let root = MachineRoot::new(&cluster, rank, config.emulation, &config.nics)?;
    let terms = setup.agree(&root)?;
    let shared = setup.meet_server(root, &terms)?;
    let scale = shared.machine.scale();
    let engine = Engine::new(setup.engine_config(&shared.machine));
    let channel_config = setup.channel_config(shared.machine.blocks(), engine.config().queues());
    let memory = setup.share_memory(&shared, DeviceLayout::new(&channel_config).bytes)?;
    let mut nics = setup.open_nics(&shared, &memory)?;
    let (channel, channel_dev_ptr) =
        make_channel(&shared.machine, channel_config, &memory, cluster.gpu_of(rank).0)?;
    let ports = setup.ports(&shared, &mut nics)?;
    let (inbox, outboxes) = setup.open_inboxes(&shared)?;
    let books = RelayBooks::new(setup.lender())?;
    let parts = ProxyParts {
        clock: shared.machine.clock(),
        channel: channel.proxy_end(),
        tell_kernels: shared.machine.gpu().teller(),
        ports,
        lot_dev_ptrs: setup.lot_dev_ptrs(&memory.relay),
        lot_keys: setup.lot_keys(&nics.cards)?,
        slots: server_slots(&cluster, slot_config)?,
        mover: shared.machine.gpu().mover(),
        herald: speak(config, &terms, &mut nics),
        herald_ns: setup.config.nics.path_timing().repeat_ns / 4,
        segment_keys: nics.cards.iter().map(|c| c.as_ref().map_or(NO_KEY, |c| c.segment)).collect(),
        on_lot_returned: books.on_returned(),
        returns: ReturnInbox::new(shared.segment.words(), &cluster, rank),
        inbox: CreditInbox::new(shared.segment.words(), &cluster, rank),
        signals: SignalInbox::new(shared.segment.words(), &cluster, rank),
        load: load_table(&setup, &shared)?,
        lease_ns: LEASE.as_nanos() as u64,
        sleep: setup.proxy_sleep(scale),
        engine,
    };
    let params = LaunchParams::new(shared.machine.gpu())?;
    let proxy = Arc::new(Proxy::start(parts, Arc::clone(&channel))?);
    let keeper = KeeperParts {
        place: Place { cluster: Arc::clone(&cluster), server, gpu: cluster.gpu_of(rank), slots },
        gpu: shared.machine.shared_gpu(),
        clock: shared.machine.clock(),
        user: Arc::<Proxy>::clone(&proxy),
        inbox,
        outboxes,
        lending: Lending::new(nics.lending),
    };
    let relay = RelayKeeper::start(books, keeper, shared.machine.clock())?;
    // Nobody may send before everybody's rings and keys are in place.
    bootstrap.barrier()?;
    let clock: Box<dyn Clock> = shared.machine.clock();
    let load = load_table(&setup, &shared)?;
    Ok(Communicator {
        proxy,
        bootstrap: None,
        local: shared.local,
        machine: shared.machine,
        memory,
        relay,
        in_use: Vec::new(),
        params,
        channel,
        channel_dev_ptr,
        cluster,
        rank,
        server,
        message_bytes: slot_config.slot_bytes,
        put_bytes: slot_config.put_bytes,
        slots,
        fixed: Default::default(),
        timeout: config.timeout,
        model: config.model,
        planner: Planner::new(),
        clock,
        load,
        calls: 0,
        dead: false,
    })
}

/// Whether a cluster's slots fit a cap on the relay memory of a GPU, before anything is started.
///
/// # Errors
/// [`CommError::Slots`].
pub fn check_slots(cluster: &Cluster, slot_bytes: u32, relay_bytes: u64) -> Result<(), CommError> {
    Ok(SlotConfig::fit(cluster, slot_bytes, 0, relay_bytes).map(drop)?)
}

/// The key of a NIC that is down; nothing is ever sent there.
const NO_KEY: RemoteKey = RemoteKey { remote_addr: 0, rkey: 0, bytes: 0 };

fn server_slots(cluster: &Cluster, config: SlotConfig) -> Result<Vec<SlotLayout>, CommError> {
    let layouts = (0..cluster.server_count()).map(|s| SlotLayout::new(cluster, ServerId(s), config));
    Ok(layouts.collect::<Result<_, _>>()?)
}

fn speak(config: &CommConfig, terms: &Terms, nics: &mut Nics) -> Box<dyn Herald> {
    let owners = nics.cards.iter().map(|c| c.as_ref().and_then(|c| c.herald)).collect();
    match nics.herald.take() {
        Some(socket) => Box::new(UdpHerald::new(socket, config.secret.clone(), terms.nonce.clone(), owners)),
        None => Box::new(NoHerald),
    }
}

fn load_table(setup: &Setup<'_>, shared: &Shared) -> Result<LoadTable, CommError> {
    let (at, words) = shared.layout.load_table();
    let words = shared.segment.words().part(at, words);
    let gpu = setup.cluster.gpu_of(setup.rank);
    Ok(LoadTable::open(words, setup.load_config(shared.machine.scale()), gpu)?)
}

fn make_channel(
    machine: &Machine,
    config: ChannelConfig,
    memory: &ServerMemory,
    local_rank: u32,
) -> Result<(Arc<Channel>, u64), CommError> {
    let gpu = machine.gpu();
    let channel = Channel::new(config, Arc::new(gpu.map_host(Channel::host_bytes(&config))?));
    let controls: Vec<u64> = memory.control.iter().map(Mapped::dev_ptr).collect();
    let own = controls[local_rank as usize];
    let (channel_dev_ptr, description) = channel.describe(own, &controls, local_rank);
    let words: [u64; 12] = words_of(description);
    gpu.write(channel_dev_ptr, &words.map(u64::to_ne_bytes).concat())?;
    let (at, local_ends) = channel.local_ends(&controls);
    if !local_ends.is_empty() {
        gpu.write(at, &local_ends.into_iter().flat_map(u64::to_ne_bytes).collect::<Vec<_>>())?;
    }
    Ok((Arc::new(channel), channel_dev_ptr))
}
