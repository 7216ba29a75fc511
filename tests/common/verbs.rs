//! A NIC over verbs here, and one on another machine that this process drives by asking.
//!
//! `FUSELINK_TEST_PEER` is the address of the other machine's process, `FUSELINK_TEST_LISTEN` where that one listens,
//! `FUSELINK_TEST_NETDEV` the network interface under the RDMA device, on either.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use fuselink::emu::memory::{EmuChunk, EmuWindow};
use fuselink::emu::{EmuGpu, MonotonicClock};
use fuselink::hw::contract::{Cable, End, NicPair};
use fuselink::hw::{
    Chunk, Clock, Gpu, HwError, LinkState, LocalKey, Nanos, Nic, NicCounters, NicDevice, NicEvent, PathId,
    Registrable, Registrar, RemoteKey, Window, Work,
};
use fuselink::topo::{GpuIdx, NicId, NicIdx};
use fuselink::verbs::{VerbsNic, VerbsNicConfig, VerbsSettings};
use serde::{Deserialize, Serialize};

use super::emu::{PORT_BYTES, gpus};

fn env(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set; tests/vm/run sets it"))
}

/// What both ends are started with.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct Settings {
    queue_pairs: u8,
    adaptive_routing: bool,
}

impl Settings {
    pub fn plain() -> Self {
        Self { queue_pairs: 2, adaptive_routing: false }
    }

    pub fn adaptive() -> Self {
        Self { queue_pairs: 4, adaptive_routing: true }
    }

    fn verbs(self) -> VerbsSettings {
        VerbsSettings {
            queue_pairs: self.queue_pairs,
            adaptive_routing: self.adaptive_routing,
            // Emulated machines are slow: a packet may take long, and still nobody should wait for ever.
            timeout: 16,
            retry_count: 3,
            open_timeout: Duration::from_millis(1500),
            ..Default::default()
        }
    }
}

/// A NIC with registered memory beside it.
pub struct Port {
    nic: VerbsNic,
    key: LocalKey,
    remote: RemoteKey,
    gpu: EmuGpu,
    window: EmuWindow,
    chunk: Arc<EmuChunk>,
}

impl Port {
    fn new(id: NicId, settings: Settings) -> Self {
        let gpu = gpus().gpu;
        let chunk = gpu.create_chunk(PORT_BYTES).unwrap();
        let mut window = gpu.reserve_window(PORT_BYTES).unwrap();
        window.map(0, &chunk).unwrap();
        let config = VerbsNicConfig {
            id,
            idx: NicIdx(0),
            relay_gpu: gpu.idx(),
            settings: settings.verbs(),
            flush_by_read: true,
        };
        let mut nic = VerbsNic::open(config).unwrap();
        let fd = chunk.export().unwrap();
        let (dev_ptr, bytes) = (window.dev_ptr(), chunk.bytes());
        let memory = Registrable::Device { fd: fd.as_fd(), gpu: gpu.idx(), dev_ptr, bytes };
        let (key, remote) = nic.register(&memory).unwrap();
        Self { nic, key, remote, gpu, window, chunk }
    }

    fn deregister(&mut self) {
        let (mut registrar, key) = (self.nic.registrar(), self.key);
        std::thread::spawn(move || registrar.deregister(key)).join().unwrap().unwrap();
    }

    fn register_again(&mut self) -> (LocalKey, RemoteKey) {
        let mut registrar = self.nic.registrar();
        let fd = self.chunk.export().unwrap();
        let (gpu, dev_ptr, bytes) = (self.gpu.idx(), self.window.dev_ptr(), self.chunk.bytes());
        let register = move || {
            let memory = Registrable::Device { fd: fd.as_fd(), gpu, dev_ptr, bytes };
            registrar.register(&memory).unwrap()
        };
        (self.key, self.remote) = std::thread::spawn(register).join().unwrap();
        (self.key, self.remote)
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        self.gpu.write(self.window.dev_ptr() + offset, bytes).unwrap();
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) {
        self.gpu.read(self.window.dev_ptr() + offset, bytes).unwrap();
    }
}

fn set_own_link(state: LinkState) {
    let word = if state == LinkState::Up { "up" } else { "down" };
    let netdev = env("FUSELINK_TEST_NETDEV");
    let done = Command::new("ip").args(["link", "set", &netdev, word]).status().unwrap();
    assert!(done.success());
}

#[derive(Serialize, Deserialize)]
pub enum Ask {
    /// A NIC and memory as new.
    Fresh(Settings),
    OpenPath(NicId, Vec<u8>),
    Post(Vec<Work>),
    Poll,
    Flush,
    Counters,
    Fence(PathId),
    IsDrained(PathId),
    Reopen(PathId),
    Write(u64, Vec<u8>),
    Read(u64, usize),
    SetLink(LinkState),
    Deregister,
    RegisterAgain,
}

#[derive(Serialize, Deserialize)]
pub struct Card {
    endpoint: Vec<u8>,
    key: LocalKey,
    remote: RemoteKey,
}

/// A connection on which questions and answers go as lines of JSON.
pub struct Talk {
    reader: BufReader<TcpStream>,
    writer: TcpStream,
}

impl Talk {
    fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self { reader: BufReader::new(stream.try_clone().unwrap()), writer: stream }
    }

    fn say<T: Serialize>(&mut self, value: &T) {
        let mut line = serde_json::to_vec(value).unwrap();
        line.push(b'\n');
        self.writer.write_all(&line).unwrap();
    }

    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        (self.reader.read_line(&mut line).ok()? > 0).then_some(line)
    }

    fn ask<T: for<'a> Deserialize<'a>>(&mut self, ask: &Ask) -> T {
        self.say(ask);
        let line = self.line().expect("the peer has gone");
        serde_json::from_str(&line).unwrap()
    }
}

/// The other machine's part: does what it is asked, one driver after the other.
pub fn serve() {
    let listener = TcpListener::bind(env("FUSELINK_TEST_LISTEN")).unwrap();
    println!("peer: listening on {}", listener.local_addr().unwrap());
    for stream in listener.incoming() {
        let mut talk = Talk::new(stream.unwrap());
        let mut port = None;
        while let Some(line) = talk.line() {
            answer(&mut talk, &mut port, serde_json::from_str(&line).unwrap());
        }
        set_own_link(LinkState::Up); // Whatever the driver left behind.
    }
}

fn answer(talk: &mut Talk, port: &mut Option<Port>, ask: Ask) {
    if let Ask::Fresh(settings) = ask {
        drop(port.take());
        let port = port.insert(Port::new(NICS[1], settings));
        return talk.say(&Card { endpoint: port.nic.endpoint(), key: port.key, remote: port.remote });
    }
    let port = port.as_mut().expect("no NIC was asked for");
    let now = MonotonicClock.now();
    match ask {
        Ask::Fresh(_) => {}
        Ask::OpenPath(peer, endpoint) => talk.say(&port.nic.open_path(peer, &endpoint).unwrap()),
        Ask::Post(work) => talk.say(&port.nic.post(&work, now).map_err(|e| e.to_string())),
        Ask::Poll => {
            let mut events = Vec::new();
            port.nic.poll(now, &mut events).unwrap();
            talk.say(&events);
        }
        Ask::Flush => talk.say(&port.nic.flush().map_err(|e| e.to_string())),
        Ask::Counters => talk.say(&port.nic.counters()),
        Ask::Fence(path) => talk.say(&port.nic.fence(path).map_err(|e| e.to_string())),
        Ask::IsDrained(path) => talk.say(&port.nic.is_drained(path)),
        Ask::Reopen(path) => talk.say(&port.nic.reopen(path).map_err(|e| e.to_string())),
        Ask::Write(offset, bytes) => {
            port.write(offset, &bytes);
            talk.say(&());
        }
        Ask::Read(offset, len) => {
            let mut bytes = vec![0; len];
            port.read(offset, &mut bytes);
            talk.say(&bytes);
        }
        Ask::SetLink(state) => {
            set_own_link(state);
            talk.say(&());
        }
        Ask::Deregister => {
            port.deregister();
            talk.say(&());
        }
        Ask::RegisterAgain => talk.say(&port.register_again()),
    }
}

const NICS: [NicId; 2] = [NicId(0), NicId(1)];

/// A NIC of either machine.
#[expect(clippy::large_enum_variant, reason = "there are two of them")]
pub enum Side {
    Here(Port),
    There(RefCell<Talk>, Card),
}

impl Side {
    fn ask<T: for<'a> Deserialize<'a>>(&self, ask: &Ask) -> T {
        match self {
            Self::There(talk, _) => talk.borrow_mut().ask(ask),
            Self::Here(_) => panic!("this NIC is here"),
        }
    }

    fn key(&self) -> LocalKey {
        match self {
            Self::Here(port) => port.key,
            Self::There(_, card) => card.key,
        }
    }

    fn remote(&self) -> RemoteKey {
        match self {
            Self::Here(port) => port.remote,
            Self::There(_, card) => card.remote,
        }
    }
}

/// What the other machine's process said in a string.
fn from_there<T>(result: Result<T, String>) -> Result<T, HwError> {
    result.map_err(|e| HwError::Os {
        operation: "drive the other machine's NIC",
        source: std::io::Error::other(e),
    })
}

impl Nic for Side {
    fn idx(&self) -> NicIdx {
        NicIdx(0)
    }
    fn post(&mut self, work: &[Work], now: Nanos) -> Result<usize, HwError> {
        match self {
            Self::Here(port) => port.nic.post(work, now),
            Self::There(..) => from_there(self.ask(&Ask::Post(work.to_vec()))),
        }
    }
    fn poll(&mut self, now: Nanos, events: &mut Vec<NicEvent>) -> Result<(), HwError> {
        match self {
            Self::Here(port) => port.nic.poll(now, events)?,
            Self::There(..) => events.extend(self.ask::<Vec<NicEvent>>(&Ask::Poll)),
        }
        Ok(())
    }
    fn flush(&mut self) -> Result<(), HwError> {
        match self {
            Self::Here(port) => port.nic.flush(),
            Self::There(..) => from_there(self.ask(&Ask::Flush)),
        }
    }
}

impl NicDevice for Side {
    fn relay_gpu(&self) -> GpuIdx {
        match self {
            Self::Here(port) => port.nic.relay_gpu(),
            Self::There(..) => GpuIdx(0),
        }
    }
    fn register(&mut self, memory: &Registrable<'_>) -> Result<(LocalKey, RemoteKey), HwError> {
        match self {
            Self::Here(port) => port.nic.register(memory),
            Self::There(..) => panic!("memory does not travel"),
        }
    }
    fn registrar(&self) -> Box<dyn Registrar> {
        match self {
            Self::Here(port) => port.nic.registrar(),
            Self::There(..) => panic!("memory does not travel"),
        }
    }
    fn endpoint(&self) -> Vec<u8> {
        match self {
            Self::Here(port) => port.nic.endpoint(),
            Self::There(_, card) => card.endpoint.clone(),
        }
    }
    fn open_path(&mut self, peer: NicId, endpoint: &[u8]) -> Result<PathId, HwError> {
        match self {
            Self::Here(port) => port.nic.open_path(peer, endpoint),
            Self::There(..) => Ok(self.ask(&Ask::OpenPath(peer, endpoint.to_vec()))),
        }
    }
    fn fence(&mut self, path: PathId) -> Result<(), HwError> {
        match self {
            Self::Here(port) => port.nic.fence(path),
            Self::There(..) => from_there(self.ask(&Ask::Fence(path))),
        }
    }
    fn is_drained(&mut self, path: PathId) -> bool {
        match self {
            Self::Here(port) => port.nic.is_drained(path),
            Self::There(..) => self.ask(&Ask::IsDrained(path)),
        }
    }
    fn reopen(&mut self, path: PathId) -> Result<(), HwError> {
        match self {
            Self::Here(port) => port.nic.reopen(path),
            Self::There(..) => from_there(self.ask(&Ask::Reopen(path))),
        }
    }
    fn counters(&self) -> NicCounters {
        match self {
            Self::Here(port) => port.nic.counters(),
            Self::There(..) => self.ask(&Ask::Counters),
        }
    }
}

/// A NIC here (end A) and one there (end B), as new, with paths between them.
pub struct Pair {
    sides: [Side; 2],
    paths: [PathId; 2],
    settle_time: Duration,
}

impl Pair {
    pub fn new(settings: Settings) -> Self {
        set_own_link(LinkState::Up); // A test that failed may have left it down.
        let stream = TcpStream::connect(env("FUSELINK_TEST_PEER")).expect("the other machine's process");
        let mut talk = Talk::new(stream);
        let card = talk.ask(&Ask::Fresh(settings));
        let mut sides = [Side::Here(Port::new(NICS[0], settings)), Side::There(RefCell::new(talk), card)];
        let endpoints = [sides[0].endpoint(), sides[1].endpoint()];
        let a = sides[0].open_path(NICS[1], &endpoints[1]).unwrap();
        let b = sides[1].open_path(NICS[0], &endpoints[0]).unwrap();
        Self { sides, paths: [a, b], settle_time: Duration::from_millis(300) }
    }

    /// For rules of links: long enough for retries to run out.
    pub fn patient(mut self) -> Self {
        self.settle_time = Duration::from_millis(2500);
        self
    }

    /// The NIC of end A.
    pub fn here(&self) -> &VerbsNic {
        match &self.sides[0] {
            Side::Here(port) => &port.nic,
            Side::There(..) => panic!("end A is here"),
        }
    }

    /// The same.
    pub fn here_mut(&mut self) -> &mut VerbsNic {
        match &mut self.sides[0] {
            Side::Here(port) => &mut port.nic,
            Side::There(..) => panic!("end A is here"),
        }
    }
}

impl NicPair for Pair {
    type Nic = Side;

    fn nic(&mut self, end: End) -> &mut Side {
        &mut self.sides[end as usize]
    }
    fn id(&self, end: End) -> NicId {
        NICS[end as usize]
    }
    fn path(&self, end: End) -> PathId {
        self.paths[end as usize]
    }
    fn key(&self, end: End) -> LocalKey {
        self.sides[end as usize].key()
    }
    fn remote(&self, end: End) -> RemoteKey {
        self.sides[end as usize].remote()
    }
    fn write(&mut self, end: End, offset: u64, bytes: &[u8]) {
        match &self.sides[end as usize] {
            Side::Here(port) => port.write(offset, bytes),
            there => there.ask(&Ask::Write(offset, bytes.to_vec())),
        }
    }
    fn read(&mut self, end: End, offset: u64, bytes: &mut [u8]) {
        match &self.sides[end as usize] {
            Side::Here(port) => port.read(offset, bytes),
            there => bytes.copy_from_slice(&there.ask::<Vec<u8>>(&Ask::Read(offset, bytes.len()))),
        }
    }
    fn elsewhere(&mut self, _end: End) -> (OwnedFd, GpuIdx, u64) {
        let chunk = gpus().peer.create_chunk(1).unwrap();
        (chunk.export().unwrap(), chunk.gpu(), chunk.bytes())
    }
    fn deregister(&mut self, end: End) {
        match &mut self.sides[end as usize] {
            Side::Here(port) => port.deregister(),
            there => there.ask(&Ask::Deregister),
        }
    }
    fn register_again(&mut self, end: End) {
        match &mut self.sides[end as usize] {
            Side::Here(port) => drop(port.register_again()),
            Side::There(talk, card) => (card.key, card.remote) = talk.get_mut().ask(&Ask::RegisterAgain),
        }
    }
    fn now(&mut self) -> Nanos {
        MonotonicClock.now()
    }
    fn settle_time(&self) -> Duration {
        self.settle_time
    }
}

impl Cable for Pair {
    fn set_link(&mut self, end: End, state: LinkState) {
        match &self.sides[end as usize] {
            Side::Here(_) => set_own_link(state),
            there => there.ask(&Ask::SetLink(state)),
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        set_own_link(LinkState::Up);
    }
}
