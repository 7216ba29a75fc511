//! Messages between ranks after the handshake. Whatever comes in is hostile until parsed.
//!
//! A frame is a header of 24 bytes and a payload: kind (1 byte), call (1), zero (2), rank (4), sequence (8), payload
//! bytes (8), little-endian. A payload is taken in as it arrives: a length alone reserves no memory.

use std::fmt;
use std::io::{self, Read};
use std::sync::Arc;

/// Bytes of a frame before its payload.
pub(super) const HEADER_BYTES: usize = 24;
/// Largest contribution to one collective.
pub const MAX_CONTRIBUTION_BYTES: u64 = 1 << 30;
/// Longest reason of an abort; longer ones are cut.
pub const MAX_REASON_BYTES: usize = 1024;
/// Most bytes that one read takes.
const READ_BYTES: usize = 1 << 20;

/// The kinds of collective calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Call {
    /// Everybody's bytes to everybody.
    Allgather,
    /// Nothing but meeting.
    Barrier,
    /// Rank 0's bytes to everybody.
    Broadcast,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Allgather => "allgather",
            Self::Barrier => "barrier",
            Self::Broadcast => "broadcast",
        })
    }
}

/// A frame that no fuselink process would send here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// A header of no known kind.
    #[error("a frame of unknown kind {kind}/{call}")]
    Kind {
        /// Its first byte.
        kind: u8,
        /// Its second byte.
        call: u8,
    },
    /// A rank that does not exist, or for which the sender must not speak.
    #[error("a frame in the name of rank {rank}")]
    Rank {
        /// The rank in the header.
        rank: u32,
    },
    /// A payload beyond what its kind may carry.
    #[error("a frame of {bytes} bytes, above the cap of {cap}")]
    TooLong {
        /// What the header promises.
        bytes: u64,
        /// The cap.
        cap: u64,
    },
    /// A contribution out of turn.
    #[error("a contribution to collective {seq} out of turn, {expected} was next")]
    Sequence {
        /// The number in the header.
        seq: u64,
        /// The next one of that rank.
        expected: u64,
    },
    /// A message that only rank 0 sends, or one that makes no sense in this state.
    #[error("an unexpected message")]
    Unexpected,
}

/// Bytes that several queues share.
pub(super) type Bytes = Arc<Vec<u8>>;

/// What ranks tell each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Message {
    /// Rank 0: a rank has joined.
    Present { rank: u32 },
    /// A rank's part in a collective.
    Contribution { rank: u32, call: Call, seq: u64, bytes: Bytes },
    /// Rank 0: a rank's connection broke.
    Died { rank: u32 },
    /// A rank's goodbye.
    Left { rank: u32 },
    /// A rank gave up.
    Abort { rank: u32, reason: String },
}

/// A message ready to be sent.
#[derive(Debug, Clone)]
pub(super) struct Frame {
    pub(super) header: [u8; HEADER_BYTES],
    pub(super) payload: Bytes,
}

impl Frame {
    /// Whether it is a contribution.
    pub(super) fn is_part(&self) -> bool {
        self.header[0] == 2
    }
}

impl From<&Message> for Frame {
    fn from(message: &Message) -> Self {
        let none = Bytes::default;
        let (kind, call, rank, seq, payload) = match message {
            Message::Present { rank } => (1, 0, rank, 0, none()),
            Message::Contribution { rank, call, seq, bytes } => {
                (2, call_code(*call), rank, *seq, bytes.clone())
            }
            Message::Died { rank } => (3, 0, rank, 0, none()),
            Message::Left { rank } => (4, 0, rank, 0, none()),
            Message::Abort { rank, reason } => (5, 0, rank, 0, Arc::new(one_line(reason).into_bytes())),
        };
        let mut header = [0; HEADER_BYTES];
        (header[0], header[1]) = (kind, call);
        header[4..8].copy_from_slice(&rank.to_le_bytes());
        header[8..16].copy_from_slice(&seq.to_le_bytes());
        header[16..].copy_from_slice(&(payload.len() as u64).to_le_bytes());
        Self { header, payload }
    }
}

fn call_code(call: Call) -> u8 {
    match call {
        Call::Allgather => 1,
        Call::Barrier => 2,
        Call::Broadcast => 3,
    }
}

/// A reason without line breaks or other control characters, within its cap.
pub(super) fn one_line(text: &str) -> String {
    let mut line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let mut end = line.len().min(MAX_REASON_BYTES);
    while !line.is_char_boundary(end) {
        end -= 1;
    }
    line.truncate(end);
    line
}

/// A header that has been checked.
#[derive(Debug, Clone, Copy)]
struct Header {
    kind: u8,
    call: Call,
    rank: u32,
    seq: u64,
    bytes: u64,
}

impl Header {
    fn parse(raw: &[u8; HEADER_BYTES], ranks: u32) -> Result<Self, WireError> {
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| raw[at + i]));
        let rank = u32::from_le_bytes(std::array::from_fn(|i| raw[4 + i]));
        let (kind, seq, bytes) = (raw[0], u64_at(8), u64_at(16));
        let (call, cap) = match (kind, raw[1]) {
            (1 | 3 | 4, 0) => (Call::Barrier, 0),
            (2, 1) => (Call::Allgather, MAX_CONTRIBUTION_BYTES),
            (2, 2) => (Call::Barrier, 0),
            (2, 3) => (Call::Broadcast, MAX_CONTRIBUTION_BYTES),
            (5, 0) => (Call::Barrier, MAX_REASON_BYTES as u64),
            (kind, call) => return Err(WireError::Kind { kind, call }),
        };
        if rank >= ranks {
            return Err(WireError::Rank { rank });
        }
        if bytes > cap {
            return Err(WireError::TooLong { bytes, cap });
        }
        Ok(Self { kind, call, rank, seq, bytes })
    }

    fn message(self, payload: Vec<u8>) -> Message {
        let rank = self.rank;
        match self.kind {
            1 => Message::Present { rank },
            2 => Message::Contribution { rank, call: self.call, seq: self.seq, bytes: Arc::new(payload) },
            3 => Message::Died { rank },
            4 => Message::Left { rank },
            _ => Message::Abort { rank, reason: one_line(&String::from_utf8_lossy(&payload)) },
        }
    }
}

/// What a read gave.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// A whole message.
    Message(Message),
    /// Part of one; there may be more to read.
    Partial,
    /// Nothing to read now.
    Blocked,
    /// The connection has ended, in the middle of a message or not.
    Ended,
}

/// Puts messages together from whatever pieces the stream gives.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    raw: Vec<u8>,
    header: Option<Header>,
    payload: Vec<u8>,
}

impl Decoder {
    /// Reads up to the end of one message, from a stream that does not block.
    pub(super) fn read(&mut self, from: &mut impl Read, ranks: u32) -> Result<Step, WireError> {
        let header = match self.header {
            Some(header) => header,
            None => match fill(from, &mut self.raw, HEADER_BYTES) {
                Step::Partial if self.raw.len() == HEADER_BYTES => {
                    let raw = std::array::from_fn(|i| self.raw[i]);
                    self.raw.clear();
                    *self.header.insert(Header::parse(&raw, ranks)?)
                }
                step => return Ok(step),
            },
        };
        // The cap of a gigabyte keeps this in range.
        let bytes = header.bytes as usize;
        if self.payload.len() < bytes {
            let step = fill(from, &mut self.payload, bytes);
            if step != Step::Partial || self.payload.len() < bytes {
                return Ok(step);
            }
        }
        self.header = None;
        Ok(Step::Message(header.message(std::mem::take(&mut self.payload))))
    }
}

/// Appends to `into` until it holds `whole` bytes or one read's worth has come.
fn fill(from: &mut impl Read, into: &mut Vec<u8>, whole: usize) -> Step {
    let want = (whole - into.len()).min(READ_BYTES);
    into.reserve(want);
    match from.take(want as u64).read_to_end(into) {
        Ok(n) if n == want => Step::Partial,
        Ok(_) => Step::Ended,
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Step::Blocked,
        Err(_) => Step::Ended,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Gives bytes in pieces, and would block between them.
    struct Trickle(Vec<u8>, usize, bool);

    impl Read for Trickle {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            self.2 = !self.2;
            if self.2 && !self.0.is_empty() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let n = self.1.min(buf.len()).min(self.0.len());
            buf[..n].copy_from_slice(&self.0[..n]);
            self.0.drain(..n);
            Ok(n)
        }
    }

    fn decode(bytes: Vec<u8>, piece: usize) -> (Vec<Message>, Option<WireError>) {
        let (mut decoder, mut messages) = (Decoder::default(), Vec::new());
        let mut stream = Trickle(bytes, piece, false);
        loop {
            match decoder.read(&mut stream, 8) {
                Ok(Step::Message(m)) => messages.push(m),
                Ok(Step::Ended) => return (messages, None),
                Ok(_) => {}
                Err(e) => return (messages, Some(e)),
            }
        }
    }

    fn encode(message: &Message) -> Vec<u8> {
        let frame = Frame::from(message);
        [&frame.header[..], &frame.payload].concat()
    }

    fn any_message() -> impl Strategy<Value = Message> {
        let bytes = proptest::collection::vec(any::<u8>(), 0..300);
        let call = prop_oneof![Just(Call::Allgather), Just(Call::Broadcast)];
        prop_oneof![
            (0u32..8).prop_map(|rank| Message::Present { rank }),
            (0u32..8).prop_map(|rank| Message::Died { rank }),
            (0u32..8).prop_map(|rank| Message::Left { rank }),
            (0u32..8, "[a-zäöü]{0,40}").prop_map(|(rank, reason)| Message::Abort { rank, reason }),
            (0u32..8, any::<u64>(), call, bytes).prop_map(|(rank, seq, call, bytes)| {
                Message::Contribution { rank, call, seq, bytes: Arc::new(bytes) }
            }),
        ]
    }

    proptest! {
        #[test]
        fn messages_survive_any_cut(messages in proptest::collection::vec(any_message(), 0..6), piece in 1usize..40) {
            let bytes = messages.iter().flat_map(encode).collect();
            prop_assert_eq!(decode(bytes, piece), (messages, None));
        }

        #[test]
        fn hostile_bytes_end_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400), kind in 0u8..7) {
            let mut bytes = bytes;
            if let Some(first) = bytes.first_mut() { *first = kind; }
            decode(bytes, 17);
        }
    }

    #[test]
    fn a_huge_length_reserves_nothing() {
        let mut bytes = encode(&Message::Contribution {
            rank: 1,
            call: Call::Allgather,
            seq: 0,
            bytes: Bytes::default(),
        });
        bytes[16..24].copy_from_slice(&MAX_CONTRIBUTION_BYTES.to_le_bytes());
        let mut decoder = Decoder::default();
        decoder.read(&mut &bytes[..], 8).unwrap();
        assert!(decoder.payload.capacity() <= 2 * READ_BYTES);
        bytes[16..24].copy_from_slice(&(MAX_CONTRIBUTION_BYTES + 1).to_le_bytes());
        let too_long = WireError::TooLong { bytes: MAX_CONTRIBUTION_BYTES + 1, cap: MAX_CONTRIBUTION_BYTES };
        assert_eq!(decode(bytes, 64).1, Some(too_long));
    }

    #[test]
    fn reasons_are_one_line_of_bounded_length() {
        assert_eq!(one_line("a\nb\u{1b}c"), "a b c");
        assert!(one_line(&"ü".repeat(5000)).len() <= MAX_REASON_BYTES);
    }
}
