//! Packets between the ranks of a server: up to 32 KiB and 253 descriptors each, on sequenced-packet sockets.
//!
//! A packet starts with a header of 16 bytes: kind (1 byte), last (1), descriptors (2), rank (4), call (8),
//! little-endian. Whatever comes in is hostile until parsed.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Most descriptors in one packet (SCM_MAX_FD of Linux).
pub(super) const PACKET_FDS: usize = 253;
/// Most payload bytes in one packet.
pub(super) const PACKET_BYTES: usize = 32 << 10;
const HEADER_BYTES: usize = 16;
const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(PACKET_FDS));

/// A packet that no fuselink process would send here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PacketError {
    /// Too short, too long, or of no known kind.
    #[error("a malformed packet")]
    Malformed,
    /// Descriptors did not arrive.
    #[error("{promised} descriptors were sent and {came} came; raise the limit on open files (ulimit -n)")]
    DescriptorsLost {
        /// How many the header names.
        promised: usize,
        /// How many there were.
        came: usize,
    },
    /// A part in another's name, of another call, after the last, or beyond the caps.
    #[error("a packet of rank {rank} for call {seq} out of turn")]
    OutOfTurn {
        /// The rank in the header.
        rank: u32,
        /// The call in the header.
        seq: u64,
    },
}

/// What a packet is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Local rank 0: a rank has come.
    Present,
    /// A rank's bytes and descriptors, or some of them.
    Part,
    /// A rank's connection has ended.
    Gone,
    /// The payload lists ranks that have not come, behind the milliseconds waited.
    Missing,
    /// The payload says why the sender failed.
    Failed,
}

const KINDS: [Kind; 5] = [Kind::Present, Kind::Part, Kind::Gone, Kind::Missing, Kind::Failed];

/// One packet.
#[derive(Debug, Clone)]
pub(super) struct Packet {
    pub(super) kind: Kind,
    /// The last of its rank in its call.
    pub(super) last: bool,
    pub(super) rank: u32,
    pub(super) seq: u64,
    pub(super) bytes: Vec<u8>,
    pub(super) fds: Vec<Arc<OwnedFd>>,
}

impl Packet {
    pub(super) fn word(kind: Kind, rank: u32, bytes: Vec<u8>) -> Self {
        Self { kind, last: true, rank, seq: 0, bytes, fds: Vec::new() }
    }

    fn header(&self) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        // Position in KINDS: the declaration order of Kind.
        header[0] = self.kind as u8;
        header[1] = self.last.into();
        header[2..4].copy_from_slice(&(self.fds.len() as u16).to_le_bytes());
        header[4..8].copy_from_slice(&self.rank.to_le_bytes());
        header[8..].copy_from_slice(&self.seq.to_le_bytes());
        header
    }

    /// Sends it, or nothing of it. Never blocks.
    pub(super) fn send(&self, to: &OwnedFd) -> Result<(), Errno> {
        let header = self.header();
        let parts = [IoSlice::new(&header), IoSlice::new(&self.bytes)];
        let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<BorrowedFd<'_>> = self.fds.iter().map(|fd| (**fd).as_fd()).collect();
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(Errno::INVAL);
        }
        retry(|| sendmsg(to, &parts, &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)).map(drop)
    }

    /// Takes one packet. `None`: the connection has ended. Never blocks.
    pub(super) fn recv(from: &OwnedFd) -> Result<Option<Result<Self, PacketError>>, Errno> {
        let mut bytes = vec![0; HEADER_BYTES + PACKET_BYTES];
        let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let got = retry(|| recvmsg(from, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags))?;
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights.map(Arc::new));
            }
        }
        if got.bytes == 0 {
            return Ok(None);
        }
        bytes.truncate(got.bytes);
        let whole = !got.flags.contains(ReturnFlags::TRUNC);
        Ok(Some(if whole { Self::parse(bytes, fds) } else { Err(PacketError::Malformed) }))
    }

    fn parse(mut bytes: Vec<u8>, fds: Vec<Arc<OwnedFd>>) -> Result<Self, PacketError> {
        if bytes.len() < HEADER_BYTES {
            return Err(PacketError::Malformed);
        }
        let payload = bytes.split_off(HEADER_BYTES);
        let promised = usize::from(u16::from_le_bytes([bytes[2], bytes[3]]));
        if promised != fds.len() {
            return Err(PacketError::DescriptorsLost { promised, came: fds.len() });
        }
        Ok(Self {
            kind: *KINDS.get(usize::from(bytes[0])).ok_or(PacketError::Malformed)?,
            last: bytes[1] != 0,
            rank: u32::from_le_bytes(std::array::from_fn(|i| bytes[4 + i])),
            seq: u64::from_le_bytes(std::array::from_fn(|i| bytes[8 + i])),
            bytes: payload,
            fds,
        })
    }
}

fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn hostile_bytes_parse_or_fail_without_panic(bytes in proptest::collection::vec(0u8..=255, 0..64), kind in 0u8..8) {
            let mut bytes = bytes;
            if let Some(first) = bytes.first_mut() { *first = kind; }
            if let Ok(packet) = Packet::parse(bytes.clone(), Vec::new()) {
                proptest::prop_assert_eq!(&packet.header()[4..], &bytes[4..HEADER_BYTES]);
                proptest::prop_assert_eq!(packet.header()[0], bytes[0]);
            }
        }
    }

    #[test]
    fn lost_descriptors_are_noticed() {
        let mut header = Packet::word(Kind::Part, 1, Vec::new()).header();
        header[2] = 3;
        let error = Packet::parse(header.to_vec(), Vec::new()).unwrap_err();
        assert_eq!(error, PacketError::DescriptorsLost { promised: 3, came: 0 });
        assert!(error.to_string().contains("ulimit -n"));
    }
}
