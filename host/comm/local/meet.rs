//! Meeting at the abstract socket, and words about failures.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, recv, send, socket_with, sockopt,
};

use super::exchange::Peer;
use super::packet::{Kind, Packet, PacketError};
use super::{LocalConfig, LocalError, Refusal};
use crate::comm::handshake::{HandshakeError, MAX_MESSAGE_BYTES, Pipe, Terms, apply};
use crate::comm::join::{Door, Host, JoinError, admit_all};
use crate::comm::secret::hex;
use crate::comm::wake::{Wake, left, wait_for, within};

/// First pause between two attempts; doubles up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
/// Longest pause between two attempts.
const LAST_PAUSE: Duration = Duration::from_millis(50);
/// Connections that may queue up before they are taken.
const BACKLOG: i32 = 1024;
const CALL: &str = "connecting";

/// The meeting place. Who does not know the secret cannot tell it.
pub(super) fn name(config: &LocalConfig) -> String {
    let place = config.secret.prove("local name", &[config.job.as_bytes(), &config.server.to_le_bytes()]);
    format!("fuselink-{}", &hex(&place)[..32])
}

/// Meets the others at `name`. Local rank 0 gets a peer per rank, in rank order, others one: rank 0.
pub(super) fn meet(config: &LocalConfig, name: &str) -> Result<Vec<Peer>, LocalError> {
    let until = within(config.deadline);
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())
        .map_err(|e| LocalError::os("name the meeting place")(e.into()))?;
    let realm = [b"local/", &config.server.to_le_bytes()[..], config.job.as_bytes()].concat();
    let terms =
        Terms { realm, secret: config.secret.clone(), rank: config.local_rank, size: config.local_size };
    if config.local_rank == 0 {
        host(config, &terms, &address, until)
    } else {
        let fd = reach(config, &terms, &address, until)?;
        let peer = Peer::new(0, fd);
        let mut peers = vec![peer];
        let outcome = wait_present(config, &peers[0], until);
        outcome.inspect_err(|failure| tell(&mut peers, config.local_rank, failure))?;
        Ok(peers)
    }
}

fn socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Local rank 0: lets the others in.
fn host(
    config: &LocalConfig,
    terms: &Terms,
    address: &SocketAddrUnix,
    until: Instant,
) -> Result<Vec<Peer>, LocalError> {
    let server = config.server;
    let failed = |e: Errno| LocalError::Listen { server, source: Arc::new(e.into()) };
    let door = LocalDoor(socket().map_err(failed)?);
    bind(&door.0, address).map_err(failed)?;
    listen(&door.0, BACKLOG).map_err(failed)?;
    let wake = Arc::new(Wake::new().map_err(LocalError::os("make an event descriptor"))?);
    let mut root = Root { peers: Vec::new() };
    let failure = match admit_all(&door, terms, until, &wake, &mut root) {
        Ok(()) => {
            root.peers.sort_by_key(|p| p.rank);
            return Ok(root.peers);
        }
        Err(JoinError::Stopped(failure)) => failure,
        Err(JoinError::Refused { from, refusal }) => LocalError::RefusedPeer { server, from, refusal },
        Err(JoinError::Os { operation, source }) => LocalError::os(operation)(source),
        Err(JoinError::Missing { turned_away }) => {
            let missing =
                (1..config.local_size).filter(|r| root.peers.iter().all(|p| p.rank != *r)).collect();
            LocalError::Timeout { call: CALL, server, missing, waited: config.deadline, turned_away }
        }
    };
    tell(&mut root.peers, 0, &failure);
    Err(failure)
}

struct Root {
    peers: Vec<Peer>,
}

impl Host for Root {
    type Pipe = LocalPipe;
    type Stop = LocalError;

    fn welcome(&mut self, rank: u32, pipe: LocalPipe) -> Result<(), LocalError> {
        let present = |rank| Arc::new(Packet::word(Kind::Present, rank, Vec::new()));
        let mut peer = Peer::new(rank, pipe.0);
        for other in &mut self.peers {
            peer.out.push_back(present(other.rank));
            other.out.push_back(present(rank));
        }
        self.peers.push(peer);
        // What the sockets do not take now goes out with the first call.
        self.peers.iter_mut().try_for_each(|p| p.flush().map(drop))
    }

    fn check(&mut self) -> Result<(), LocalError> {
        Ok(())
    }
}

/// Connects to local rank 0 and proves the secret; tries again while nobody is there.
fn reach(
    config: &LocalConfig,
    terms: &Terms,
    address: &SocketAddrUnix,
    until: Instant,
) -> Result<OwnedFd, LocalError> {
    let server = config.server;
    let mut pause = FIRST_PAUSE;
    loop {
        let source = match attempt(terms, address, until) {
            Ok(fd) => return Ok(fd),
            Err(HandshakeError::Refused(refusal)) => return Err(LocalError::Refused { server, refusal }),
            Err(HandshakeError::Io { step, source }) => {
                io::Error::new(source.kind(), format!("{source} while {step}"))
            }
        };
        if left(until) <= pause {
            let (waited, source) = (config.deadline, Arc::new(source));
            return Err(LocalError::Connect { server, waited, source });
        }
        thread::sleep(pause);
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

fn attempt(terms: &Terms, address: &SocketAddrUnix, until: Instant) -> Result<OwnedFd, HandshakeError> {
    let failed = |e: Errno| HandshakeError::Io { step: "connecting", source: e.into() };
    let fd = socket().map_err(failed)?;
    connect(&fd, address).map_err(failed)?;
    same_user(fd.as_fd()).map_err(failed)??;
    let mut pipe = LocalPipe(fd);
    apply(&mut pipe, terms, until)?;
    Ok(pipe.0)
}

/// Whether the process at the other end is of this process's user, as the kernel saw it connect or listen.
fn same_user(fd: BorrowedFd<'_>) -> Result<Result<(), Refusal>, Errno> {
    let seen = sockopt::socket_peercred(fd)?.uid.as_raw();
    let expected = rustix::process::geteuid().as_raw();
    Ok(if seen == expected { Ok(()) } else { Err(Refusal::User { expected, seen }) })
}

/// Waits until local rank 0 has said that everybody is there.
fn wait_present(config: &LocalConfig, root: &Peer, until: Instant) -> Result<(), LocalError> {
    let mut here: Vec<bool> = (0..config.local_size).map(|r| r == 0 || r == config.local_rank).collect();
    while here.contains(&false) {
        let Some(packet) = root.recv()? else {
            if left(until).is_zero() {
                let missing = (0..).zip(&here).filter(|(_, here)| !**here).map(|(r, _)| r).collect();
                let &LocalConfig { server, deadline: waited, .. } = config;
                return Err(LocalError::Timeout {
                    call: CALL,
                    server,
                    missing,
                    waited,
                    turned_away: Vec::new(),
                });
            }
            match wait_for(root.fd.as_fd(), PollFlags::IN, until) {
                Err(e) if e.kind() != io::ErrorKind::TimedOut => {
                    return Err(LocalError::os("wait for local ranks")(e));
                }
                _ => continue,
            }
        };
        match here.get_mut(packet.rank as usize) {
            Some(here) if packet.kind == Kind::Present => *here = true,
            _ => return Err(told(0, &packet)),
        }
    }
    Ok(())
}

/// Tells the peers why this rank stops, as far as their sockets take it.
pub(super) fn tell(peers: &mut [Peer], rank: u32, failure: &LocalError) {
    let word = match failure {
        LocalError::Gone { local_rank } => Packet::word(Kind::Gone, *local_rank, Vec::new()),
        LocalError::Timeout { missing, waited, .. } => {
            let millis = u32::try_from(waited.as_millis()).unwrap_or(u32::MAX);
            let words = std::iter::once(&millis).chain(missing.iter().take(4096));
            Packet::word(Kind::Missing, rank, words.flat_map(|w| w.to_le_bytes()).collect())
        }
        other => Packet::word(Kind::Failed, rank, other.to_string().into_bytes()),
    };
    let word = Arc::new(word);
    for peer in peers {
        // A peer that is in another call drops the rest of it anyway.
        peer.out.clear();
        peer.out.push_back(word.clone());
        // One that cannot be told will see the connection end.
        let _ = peer.flush();
    }
}

/// The failure that a peer's word means.
pub(super) fn told(from: u32, packet: &Packet) -> LocalError {
    let words = || packet.bytes.chunks_exact(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]]));
    match packet.kind {
        Kind::Gone => LocalError::Gone { local_rank: packet.rank },
        Kind::Missing => LocalError::Failed {
            local_rank: packet.rank,
            reason: {
                let waited = Duration::from_millis(words().next().unwrap_or(0).into());
                let missing: Vec<_> = words().skip(1).map(|r| r.to_string()).collect();
                format!("local ranks {} have not come within {waited:?}", missing.join(", "))
            },
        },
        Kind::Failed => {
            let text = String::from_utf8_lossy(&packet.bytes[..packet.bytes.len().min(1024)]);
            let reason = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
            LocalError::Failed { local_rank: packet.rank, reason }
        }
        Kind::Present | Kind::Part => {
            let source = PacketError::OutOfTurn { rank: packet.rank, seq: packet.seq };
            LocalError::Protocol { local_rank: from, source }
        }
    }
}

/// Carries the handshake, a packet per message.
pub(super) struct LocalPipe(pub(super) OwnedFd);

impl Pipe for LocalPipe {
    fn send(&mut self, message: &[u8], until: Instant) -> io::Result<()> {
        loop {
            match send(&self.0, message, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::AGAIN) => wait_for(self.0.as_fd(), PollFlags::OUT, until)?,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    fn recv(&mut self, until: Instant) -> io::Result<Vec<u8>> {
        let mut message = vec![0; MAX_MESSAGE_BYTES + 1];
        loop {
            match recv(&self.0, &mut message[..], RecvFlags::empty()) {
                Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((n, _)) if n > MAX_MESSAGE_BYTES => return Err(io::ErrorKind::InvalidData.into()),
                Ok((n, _)) => {
                    message.truncate(n);
                    return Ok(message);
                }
                Err(Errno::AGAIN) => wait_for(self.0.as_fd(), PollFlags::IN, until)?,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

struct LocalDoor(OwnedFd);

impl Door for LocalDoor {
    type Pipe = LocalPipe;

    fn as_fd(&self) -> BorrowedFd<'_> {
        AsFd::as_fd(&self.0)
    }

    fn accept(&self) -> io::Result<Option<(LocalPipe, String)>> {
        match accept_with(&self.0, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            // Another user's process is not spoken to.
            Ok(fd) => match same_user(fd.as_fd())? {
                Ok(()) => Ok(Some((LocalPipe(fd), "a process of this host".into()))),
                Err(_) => Ok(None),
            },
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }
}
