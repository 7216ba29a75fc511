//! Where a rank hears of lots: a socket of datagrams, whose other end all ranks of the server hold.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

use super::words::{BadField, LETTER_BYTES, Letter, Word};

const SEND_CONTROL: usize = rustix::cmsg_space!(ScmRights(1));
/// Room for more than belongs into a letter: what did not fit would be lost and counted as nothing.
const RECV_CONTROL: usize = rustix::cmsg_space!(ScmRights(4));

/// How far a letter got.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Posted {
    /// It is in the inbox.
    Sent,
    /// The inbox is full, or the system holds too many descriptors: later.
    Later,
    /// Its rank has gone.
    Gone,
}

/// A letter, with its descriptor.
pub type Taken = (Letter, Option<OwnedFd>);

/// A rank's own end.
pub struct Inbox(OwnedFd);

/// The other end, as another rank holds it.
pub struct Outbox(OwnedFd);

/// A new inbox, and what others are to be given.
///
/// # Errors
/// The system's.
pub fn pair() -> io::Result<(Inbox, Outbox)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (own, others) = socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    Ok((Inbox(own), Outbox(others)))
}

impl Outbox {
    /// What another rank gave.
    pub fn of(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Sends a letter, or nothing of it. Never blocks.
    ///
    /// # Errors
    /// The system's.
    pub fn post(&self, letter: &Letter, fd: Option<BorrowedFd<'_>>) -> io::Result<Posted> {
        let mut space = [MaybeUninit::uninit(); SEND_CONTROL];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = fd.into_iter().collect();
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let bytes = letter.encode();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            return match sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, flags) {
                Ok(_) => Ok(Posted::Sent),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS) => Ok(Posted::Later),
                Err(Errno::CONNREFUSED | Errno::NOTCONN | Errno::PIPE | Errno::CONNRESET) => Ok(Posted::Gone),
                Err(e) => Err(e.into()),
            };
        }
    }
}

impl AsFd for Outbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Inbox {
    /// The next letter, with its descriptor. Never blocks.
    ///
    /// # Errors
    /// The system's; inside, what no rank would send.
    pub fn take(&self) -> io::Result<Option<Result<Taken, BadField>>> {
        let mut bytes = [0; LETTER_BYTES + 1];
        let mut space = [MaybeUninit::uninit(); RECV_CONTROL];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let got = loop {
            match recvmsg(&self.0, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
                Ok(got) => break got,
                Err(Errno::AGAIN) => return Ok(None),
                // All others have let go of their ends.
                Err(Errno::CONNRESET) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        // No descriptor could be had (RLIMIT_NOFILE): the letter stands, and its lot cannot be used.
        let short = got.flags.contains(ReturnFlags::CTRUNC);
        Ok(Some(Self::parse(&bytes[..got.bytes], fds, short)))
    }

    fn parse(bytes: &[u8], mut fds: Vec<OwnedFd>, short: bool) -> Result<Taken, BadField> {
        let letter = Letter::decode(bytes)?;
        let due = usize::from(matches!(letter.word, Word::Lent(_)));
        if fds.len() != due && !(short && fds.is_empty()) {
            return Err(BadField("descriptors", fds.len() as u64));
        }
        Ok((letter, fds.pop()))
    }
}
