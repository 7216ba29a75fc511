//! TCP until two ranks have met: connecting with retries, and the handshake's messages.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::BootstrapConfig;
use super::error::BootstrapError;
use crate::comm::handshake::{HandshakeError, MAX_MESSAGE_BYTES, Pipe, Terms, apply};
use crate::comm::join::Door;
use crate::comm::wake::left;

/// First pause between two attempts; doubles up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
/// Longest pause between two attempts.
const LAST_PAUSE: Duration = Duration::from_millis(200);
/// Longest that one attempt waits for the other host.
const ATTEMPT: Duration = Duration::from_secs(3);
/// Connections that may queue up before they are taken.
const BACKLOG: i32 = 4096;

/// Connects to rank 0 and proves the secret; tries again while nobody is there.
pub(super) fn reach(
    config: &BootstrapConfig,
    terms: &Terms,
    until: Instant,
) -> Result<TcpStream, BootstrapError> {
    let root = config.root;
    let mut pause = FIRST_PAUSE;
    loop {
        let source = match attempt(config, terms, until) {
            Ok(stream) => return Ok(stream),
            Err(HandshakeError::Refused(refusal)) => return Err(BootstrapError::Refused { root, refusal }),
            Err(HandshakeError::Io { step, source }) => {
                io::Error::new(source.kind(), format!("{source} while {step}"))
            }
        };
        if left(until) <= pause {
            let (waited, source) = (config.deadline, Arc::new(source));
            return Err(BootstrapError::Connect { root, waited, source });
        }
        thread::sleep(pause);
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

fn attempt(config: &BootstrapConfig, terms: &Terms, until: Instant) -> Result<TcpStream, HandshakeError> {
    let failed = |source| HandshakeError::Io { step: "connecting", source };
    let patience = left(until).min(ATTEMPT).max(Duration::from_millis(1));
    let stream = TcpStream::connect_timeout(&config.root, patience).map_err(failed)?;
    // A port of this host that nobody listens on may be chosen for our own end: we would talk to ourselves.
    if stream.local_addr().ok() == stream.peer_addr().ok() {
        return Err(failed(io::ErrorKind::ConnectionRefused.into()));
    }
    let mut pipe = TcpPipe(stream);
    apply(&mut pipe, terms, until)?;
    Ok(pipe.0)
}

/// Makes a listening socket ready for many ranks at once, and non-blocking.
pub(super) fn widen(listener: &TcpListener) -> io::Result<()> {
    rustix::net::listen(listener, BACKLOG)?;
    listener.set_nonblocking(true)
}

/// Carries the handshake: each message behind its length (4 bytes, little-endian).
pub(crate) struct TcpPipe(pub(super) TcpStream);

impl Pipe for TcpPipe {
    fn send(&mut self, message: &[u8], until: Instant) -> io::Result<()> {
        // All messages of a handshake fit into a fresh socket's buffer.
        self.0.set_write_timeout(Some(left(until).max(Duration::from_millis(1))))?;
        self.0.write_all(&[&(message.len() as u32).to_le_bytes(), message].concat())
    }

    fn recv(&mut self, until: Instant) -> io::Result<Vec<u8>> {
        let mut length = [0; 4];
        self.fill(&mut length, until)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > MAX_MESSAGE_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut message = vec![0; length];
        self.fill(&mut message, until)?;
        Ok(message)
    }
}

impl TcpPipe {
    /// As `read_exact`, but with one deadline for all reads: bytes that trickle in buy no time.
    fn fill(&mut self, mut into: &mut [u8], until: Instant) -> io::Result<()> {
        while !into.is_empty() {
            let left = left(until);
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.0.set_read_timeout(Some(left))?;
            match self.0.read(into) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => into = &mut into[n..],
                Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

impl Door for TcpListener {
    type Pipe = TcpPipe;

    fn as_fd(&self) -> BorrowedFd<'_> {
        AsFd::as_fd(self)
    }

    fn accept(&self) -> io::Result<Option<(TcpPipe, String)>> {
        use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
        match TcpListener::accept(self) {
            Ok((stream, from)) => Ok(Some((TcpPipe(stream), from.to_string()))),
            // A caller that has hung up already is nobody's failure.
            Err(e) if matches!(e.kind(), WouldBlock | Interrupted | ConnectionAborted) => Ok(None),
            Err(e) => Err(e),
        }
    }
}
