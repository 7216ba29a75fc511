//! Parts of an emulated machine, for tests that need no communicator.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use fuselink::emu::memory::{EmuChunk, EmuWindow};
use fuselink::emu::{EmuGpu, EmuGpuConfig, EmuNic, ScaleupLinks, Wire, WireConfig};
use fuselink::hw::contract::{Cable, End, Gpus, NicPair, Third};
use fuselink::hw::{
    Chunk, Gpu, LinkState, LocalKey, Nanos, NicDevice, PathId, Registrable, RemoteKey, Window,
};
use fuselink::shm::SharedMemory;
use fuselink::topo::{GpuIdx, NicId, NicIdx};

/// Two GPUs of a server that run `resident_blocks` at once, and whose links carry `byte_per_s`.
pub fn gpus_of(resident_blocks: u32, byte_per_s: u64) -> Gpus<EmuGpu> {
    gpus_with_links(resident_blocks, byte_per_s).0
}

/// The same, with the links.
pub fn gpus_with_links(resident_blocks: u32, byte_per_s: u64) -> (Gpus<EmuGpu>, ScaleupLinks) {
    let memory = SharedMemory::create("fuselink-test", ScaleupLinks::words(2)).unwrap();
    let gpu = |idx| {
        let links = ScaleupLinks::new(memory.words(), byte_per_s);
        EmuGpu::new(EmuGpuConfig { idx: GpuIdx(idx), resident_blocks, links, memory_bytes: None }).unwrap()
    };
    (Gpus { gpu: gpu(0), peer: gpu(1) }, ScaleupLinks::new(memory.words(), byte_per_s))
}

/// Two GPUs with links that nobody waits for.
pub fn gpus() -> Gpus<EmuGpu> {
    gpus_of(2, 1 << 40)
}

/// A NIC with registered memory beside it.
pub struct Port {
    pub nic: EmuNic,
    pub key: LocalKey,
    pub remote: RemoteKey,
    gpu: Arc<EmuGpu>,
    window: EmuWindow,
    chunk: Arc<EmuChunk>,
}

pub const PORT_BYTES: u64 = 2 << 20;

impl Port {
    /// NIC `id` of the wire, the only one of its server.
    pub fn new(wire: &Wire, id: NicId) -> Self {
        let gpu = Arc::new(gpus().gpu);
        Self::with(EmuNic::new(wire.clone(), id, NicIdx(0), gpu.idx()), gpu)
    }

    /// The same, as if the host could not map the GPU's memory.
    pub fn staged(wire: &Wire, id: NicId) -> Self {
        let gpu = Arc::new(gpus().gpu);
        let copies = Arc::<EmuGpu>::clone(&gpu);
        Self::with(EmuNic::staged(wire.clone(), id, NicIdx(0), gpu.idx(), copies), gpu)
    }

    fn with(mut nic: EmuNic, gpu: Arc<EmuGpu>) -> Self {
        let chunk = gpu.create_chunk(PORT_BYTES).unwrap();
        let mut window = gpu.reserve_window(PORT_BYTES).unwrap();
        window.map(0, &chunk).unwrap();
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

    fn register_again(&mut self) {
        let mut registrar = self.nic.registrar();
        let fd = self.chunk.export().unwrap();
        let (gpu, dev_ptr, bytes) = (self.gpu.idx(), self.window.dev_ptr(), self.chunk.bytes());
        let register = move || {
            let memory = Registrable::Device { fd: fd.as_fd(), gpu, dev_ptr, bytes };
            registrar.register(&memory).unwrap()
        };
        (self.key, self.remote) = std::thread::spawn(register).join().unwrap();
    }

    pub fn open_path(&mut self, peer: &Port, peer_id: NicId) -> PathId {
        self.nic.open_path(peer_id, &peer.nic.endpoint()).unwrap()
    }
}

/// Two NICs, and a third beside them, in virtual time: every look at the clock takes 10 us, a message of 4 KiB 41.
pub struct Pair {
    wire: Wire,
    ports: [Port; 3],
    paths: [PathId; 2],
    path_to_third: PathId,
    now: Nanos,
}

const NICS: [NicId; 3] = [NicId(0), NicId(1), NicId(2)];

impl Pair {
    pub fn new() -> Self {
        Self::of(Port::new)
    }

    /// NICs whose GPUs' memory the host cannot map.
    pub fn staged() -> Self {
        Self::of(Port::staged)
    }

    fn of(port: impl Fn(&Wire, NicId) -> Port) -> Self {
        let wire = Wire::create(WireConfig { nic_byte_per_s: vec![100_000_000; 3] }).unwrap();
        let [mut a, mut b, mut third] = NICS.map(|id| port(&wire, id));
        let paths = [a.open_path(&b, NICS[1]), b.open_path(&a, NICS[0])];
        let path_to_third = a.open_path(&third, NICS[2]);
        third.open_path(&a, NICS[0]);
        Self { wire, ports: [a, b, third], paths, path_to_third, now: 1 }
    }
}

impl NicPair for Pair {
    type Nic = EmuNic;

    fn nic(&mut self, end: End) -> &mut EmuNic {
        &mut self.ports[end as usize].nic
    }
    fn id(&self, end: End) -> NicId {
        NICS[end as usize]
    }
    fn path(&self, end: End) -> PathId {
        self.paths[end as usize]
    }
    fn key(&self, end: End) -> LocalKey {
        self.ports[end as usize].key
    }
    fn remote(&self, end: End) -> RemoteKey {
        self.ports[end as usize].remote
    }
    fn write(&mut self, end: End, offset: u64, bytes: &[u8]) {
        let port = &self.ports[end as usize];
        port.gpu.write(port.window.dev_ptr() + offset, bytes).unwrap();
    }
    fn read(&mut self, end: End, offset: u64, bytes: &mut [u8]) {
        let port = &self.ports[end as usize];
        port.gpu.read(port.window.dev_ptr() + offset, bytes).unwrap();
    }
    fn elsewhere(&mut self, _end: End) -> (OwnedFd, GpuIdx, u64) {
        let chunk = gpus().peer.create_chunk(1).unwrap();
        (chunk.export().unwrap(), chunk.gpu(), chunk.bytes())
    }
    fn deregister(&mut self, end: End) {
        self.ports[end as usize].deregister();
    }
    fn register_again(&mut self, end: End) {
        self.ports[end as usize].register_again();
    }
    fn now(&mut self) -> Nanos {
        self.now += 10_000;
        self.now
    }
}

impl Cable for Pair {
    fn set_link(&mut self, end: End, state: LinkState) {
        self.wire.set_link(NICS[end as usize], state);
    }
}

impl Third for Pair {
    fn third(&mut self) -> &mut EmuNic {
        &mut self.ports[2].nic
    }
    fn path_to_third(&self) -> PathId {
        self.path_to_third
    }
    fn third_remote(&self) -> RemoteKey {
        self.ports[2].remote
    }
}

/// A chunk of the peer's, as the GPU under test sees it.
pub fn import(gpus: &Gpus<EmuGpu>, bytes: u64) -> Arc<<EmuGpu as Gpu>::Chunk> {
    let theirs = gpus.peer.create_chunk(bytes).unwrap();
    gpus.gpu.import_chunk(theirs.export().unwrap(), theirs.gpu(), theirs.bytes()).unwrap()
}
