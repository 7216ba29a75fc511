//! By which NICs control words (credits, answers, states) reach each other server. One way at a time: words overtake each
//! other on different ways, and a late one must not undo a newer one, so a new way is taken only when nothing can land
//! over the old one any more; then everything that still counts is told again.

use super::EngineConfig;
use super::recovery::Paths;
use crate::topo::{NicId, NicIdx, ServerId};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Open(NicIdx, NicId),
    /// Closed here; the other end may still take in what was sent over it.
    Closing(NicIdx, NicId),
    /// No path is open.
    None,
}

/// The present way to each server.
#[derive(Debug)]
pub(super) struct ControlWays {
    ways: Vec<Way>,
    /// Servers that must be told everything again.
    anew: Vec<ServerId>,
}

impl ControlWays {
    pub(super) fn new(config: &EngineConfig) -> Self {
        let servers = config.cluster.server_count();
        let mut ways = Self { ways: vec![Way::None; servers as usize], anew: Vec::new() };
        for server in (0..servers).map(ServerId) {
            ways.ways[server.idx()] = first_open(config, server, |_, _| true);
        }
        ways
    }

    /// The way to a server, if words may be sent now.
    pub(super) fn to(&self, server: ServerId) -> Option<(NicIdx, NicId)> {
        match self.ways[server.idx()] {
            Way::Open(via, peer) => Some((via, peer)),
            _ => None,
        }
    }

    pub(super) fn on_down(&mut self, server: ServerId, via: NicIdx, peer: NicId) {
        let way = &mut self.ways[server.idx()];
        if *way == Way::Open(via, peer) {
            *way = Way::Closing(via, peer);
        }
    }

    pub(super) fn on_peer_fenced(
        &mut self,
        config: &EngineConfig,
        paths: &Paths,
        server: ServerId,
        via: NicIdx,
        peer: NicId,
    ) {
        if self.ways[server.idx()] == Way::Closing(via, peer) {
            self.ways[server.idx()] = Way::None;
            self.choose(config, paths, server);
        }
    }

    pub(super) fn on_up(
        &mut self,
        config: &EngineConfig,
        paths: &Paths,
        server: ServerId,
        pair: (NicIdx, NicId),
    ) {
        // Up comes after both ends were closed.
        if matches!(self.ways[server.idx()], Way::None)
            || self.ways[server.idx()] == Way::Closing(pair.0, pair.1)
        {
            self.ways[server.idx()] = Way::None;
            self.choose(config, paths, server);
        }
    }

    fn choose(&mut self, config: &EngineConfig, paths: &Paths, server: ServerId) {
        let way = first_open(config, server, |via, peer| paths.is_open(via, peer));
        self.ways[server.idx()] = way;
        if way != Way::None {
            self.anew.push(server);
        }
    }

    /// A server to which everything that counts must be told again.
    pub(super) fn take_anew(&mut self) -> Option<ServerId> {
        self.anew.pop()
    }
}

/// The first pair of NICs that may be used, this rank's direct NIC and its rail peer first.
fn first_open(config: &EngineConfig, server: ServerId, is_open: impl Fn(NicIdx, NicId) -> bool) -> Way {
    if server == config.server() {
        return Way::None;
    }
    let order = |nics: usize| {
        let first = config.direct_nic.map_or(0, NicIdx::idx);
        (0..nics).map(move |k| NicIdx(((first + k) % nics) as u32))
    };
    let peers = config.cluster.server(server).nics.len();
    let pairs = order(config.nics()).flat_map(|via| order(peers).map(move |peer| (via, peer)));
    let up = |nic: NicId| config.cluster.nic(nic).mbit_per_s > 0;
    let mut usable = pairs
        .map(|(via, peer)| (via, config.cluster.nic_id(server, peer)))
        .filter(|&(via, peer)| config.is_up(via) && up(peer) && is_open(via, peer));
    usable.next().map_or(Way::None, |(via, peer)| Way::Open(via, peer))
}

/// Any open path to a server: for the owners' words about paths, which may be told over any.
pub(super) fn any_open(config: &EngineConfig, paths: &Paths, server: ServerId) -> Option<(NicIdx, NicId)> {
    match first_open(config, server, |via, peer| paths.is_open(via, peer)) {
        Way::Open(via, peer) => Some((via, peer)),
        _ => None,
    }
}
