//! One call: everybody's parts to everybody, through local rank 0.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::meet::told;
use super::packet::{Kind, PACKET_BYTES, PACKET_FDS, Packet, PacketError};
use super::{Given, LocalError, MAX_BYTES, MAX_FDS};
use crate::comm::wake::{left, wait};

/// Pause when the system holds as many descriptors in flight as the user may have: others must take theirs first.
const CROWDED: Duration = Duration::from_millis(2);

/// The connection to another rank.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) rank: u32,
    pub(super) fd: OwnedFd,
    pub(super) out: VecDeque<Arc<Packet>>,
}

/// How far a write got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flushed {
    /// Nothing is left.
    All,
    /// The socket is full.
    Full,
    /// Too many descriptors are in flight.
    Crowded,
}

impl Peer {
    pub(super) fn new(rank: u32, fd: OwnedFd) -> Self {
        Self { rank, fd, out: VecDeque::new() }
    }

    /// Writes what the socket takes.
    pub(super) fn flush(&mut self) -> Result<Flushed, LocalError> {
        while let Some(packet) = self.out.front() {
            match packet.send(&self.fd) {
                Ok(()) => drop(self.out.pop_front()),
                Err(Errno::AGAIN | Errno::NOBUFS) => return Ok(Flushed::Full),
                Err(Errno::TOOMANYREFS) => return Ok(Flushed::Crowded),
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    return Err(LocalError::Gone { local_rank: self.rank });
                }
                Err(e) => return Err(LocalError::os("send to a local rank")(e.into())),
            }
        }
        Ok(Flushed::All)
    }

    /// Takes one packet, if there is one.
    pub(super) fn recv(&self) -> Result<Option<Packet>, LocalError> {
        let local_rank = self.rank;
        loop {
            return match Packet::recv(&self.fd) {
                Ok(Some(Ok(packet))) => Ok(Some(packet)),
                Ok(Some(Err(source))) => Err(LocalError::Protocol { local_rank, source }),
                Ok(None) => Err(LocalError::Gone { local_rank }),
                Err(Errno::AGAIN) => Ok(None),
                // Reported once, ahead of what the peer sent before it went.
                Err(Errno::CONNRESET) => continue,
                Err(e) => Err(LocalError::os("receive from a local rank")(e.into())),
            };
        }
    }
}

/// What one rank gives.
#[derive(Debug, Default)]
pub(super) struct Part {
    fds: Vec<Arc<OwnedFd>>,
    bytes: Vec<u8>,
    whole: bool,
}

impl Part {
    /// This rank's own part. The descriptors are duplicated.
    pub(super) fn own(fds: &[BorrowedFd<'_>], bytes: &[u8]) -> io::Result<Self> {
        let fds = fds.iter().map(|fd| fd.try_clone_to_owned().map(Arc::new)).collect::<io::Result<_>>()?;
        Ok(Self { fds, bytes: bytes.to_vec(), whole: true })
    }

    /// The part as packets: at least one, only the last marked so.
    fn packets(&self, rank: u32, seq: u64) -> impl Iterator<Item = Packet> {
        let count = self.bytes.len().div_ceil(PACKET_BYTES).max(self.fds.len().div_ceil(PACKET_FDS)).max(1);
        let mut bytes = self.bytes.chunks(PACKET_BYTES);
        let mut fds = self.fds.chunks(PACKET_FDS);
        (0..count).map(move |i| Packet {
            kind: Kind::Part,
            last: i + 1 == count,
            rank,
            seq,
            bytes: bytes.next().unwrap_or_default().to_vec(),
            fds: fds.next().unwrap_or_default().to_vec(),
        })
    }

    /// Adds a packet. `false` when there is no room for it.
    fn add(&mut self, packet: &Packet) -> bool {
        let fits = self.fds.len() + packet.fds.len() <= MAX_FDS
            && self.bytes.len() + packet.bytes.len() <= MAX_BYTES;
        if self.whole || !fits {
            return false;
        }
        self.fds.extend_from_slice(&packet.fds);
        self.bytes.extend_from_slice(&packet.bytes);
        self.whole = packet.last;
        true
    }
}

/// A call under way.
pub(super) struct Exchange<'a> {
    peers: &'a mut [Peer],
    rank: u32,
    seq: u64,
    parts: Vec<Part>,
}

impl<'a> Exchange<'a> {
    pub(super) fn new(peers: &'a mut [Peer], rank: u32, size: u32, seq: u64, own: Part) -> Self {
        for packet in own.packets(rank, seq).map(Arc::new) {
            peers.iter_mut().for_each(|p| p.out.push_back(packet.clone()));
        }
        let mut parts: Vec<_> = (0..size).map(|_| Part::default()).collect();
        parts[rank as usize] = own;
        Self { peers, rank, seq, parts }
    }

    /// Moves packets until all is here and all is sent. `false`: the time is up.
    pub(super) fn run(&mut self, until: Instant) -> Result<bool, LocalError> {
        loop {
            for at in 0..self.peers.len() {
                self.read(at)?;
            }
            let mut flushed = Vec::with_capacity(self.peers.len());
            for peer in self.peers.iter_mut() {
                flushed.push(peer.flush()?);
            }
            if self.parts.iter().all(|p| p.whole) && flushed.iter().all(|f| *f == Flushed::All) {
                return Ok(true);
            }
            if left(until).is_zero() {
                return Ok(false);
            }
            self.wait(&flushed, until)?;
        }
    }

    /// Whether a peer still owes us packets of this call. Those of the next stay in its socket.
    fn owes(&self, peer: &Peer) -> bool {
        match self.rank {
            0 => !self.parts[peer.rank as usize].whole,
            _ => self.parts.iter().any(|p| !p.whole),
        }
    }

    fn read(&mut self, at: usize) -> Result<(), LocalError> {
        while self.owes(&self.peers[at])
            && let Some(packet) = self.peers[at].recv()?
        {
            self.take(at, packet)?;
        }
        Ok(())
    }

    fn take(&mut self, at: usize, packet: Packet) -> Result<(), LocalError> {
        let from = self.peers[at].rank;
        if packet.kind != Kind::Part {
            return Err(told(from, &packet));
        }
        let (rank, seq) = (packet.rank, packet.seq);
        let in_turn = seq == self.seq && rank != self.rank && (from == 0 || rank == from);
        let added = in_turn && self.parts.get_mut(rank as usize).is_some_and(|p| p.add(&packet));
        if !added {
            let source = PacketError::OutOfTurn { rank, seq };
            return Err(LocalError::Protocol { local_rank: from, source });
        }
        if self.rank == 0 {
            let packet = Arc::new(packet);
            self.peers.iter_mut().filter(|p| p.rank != from).for_each(|p| p.out.push_back(packet.clone()));
        }
        Ok(())
    }

    fn wait(&self, flushed: &[Flushed], until: Instant) -> Result<(), LocalError> {
        let mut fds = Vec::with_capacity(self.peers.len());
        for (peer, flushed) in self.peers.iter().zip(flushed) {
            let read = if self.owes(peer) { PollFlags::IN } else { PollFlags::empty() };
            let write = if *flushed == Flushed::Full { PollFlags::OUT } else { PollFlags::empty() };
            // A peer that is done may hang up: that is no event of this call.
            if !(read | write).is_empty() {
                fds.push(PollFd::new(&peer.fd, read | write));
            }
        }
        let crowded = flushed.contains(&Flushed::Crowded);
        let until = if crowded { until.min(Instant::now() + CROWDED) } else { until };
        wait(&mut fds, Some(until)).map_err(LocalError::os("wait for local ranks")).map(drop)
    }

    /// Who has not given its part. Only rank 0, when it has not either: the others' pass through it.
    pub(super) fn missing(&self) -> Vec<u32> {
        let missing: Vec<u32> = (0..).zip(&self.parts).filter(|(_, p)| !p.whole).map(|(r, _)| r).collect();
        if missing.first() == Some(&0) { vec![0] } else { missing }
    }

    /// What everybody gave.
    pub(super) fn finish(self) -> io::Result<Vec<Given>> {
        let sole = |fd: Arc<OwnedFd>| Arc::try_unwrap(fd).or_else(|shared| shared.try_clone());
        let give = |p: Part| Ok((p.fds.into_iter().map(sole).collect::<io::Result<_>>()?, p.bytes));
        self.parts.into_iter().map(give).collect()
    }
}
