//! How two processes prove to each other that they belong to one job. The same over TCP and Unix sockets.
//!
//! ```text
//! peer                                             root
//!   | hello: magic, version, rank, size, nonce ------> |   another version is refused at once
//!   | <------------------------- hello: magic, nonce   |
//!   | proof: HMAC(secret, "peer", all so far) -------> |   a wrong proof, then a wrong size or rank, is refused
//!   | <-- verdict, with HMAC(secret, "root", all so far) |  the peer believes no verdict without it
//! ```
//!
//! The roles are part of what is proven, so that neither side can echo the other's proof; so is the realm (which
//! meeting it is), so that a proof for one meeting opens no other. What follows on the connection is not
//! authenticated message by message: the network is trusted not to take over a TCP connection.

use std::io;
use std::time::Instant;

use super::secret::{NONCE_BYTES, Nonce, PROOF_BYTES, Secret, nonce};

/// Version of everything that crosses the control plane.
pub const PROTOCOL_VERSION: u32 = 1;
/// Longest message of the handshake.
pub(crate) const MAX_MESSAGE_BYTES: usize = 128;

const MAGIC: &[u8; 8] = b"fuselink";
const PREFIX_BYTES: usize = 13;
const HELLO: u8 = 1;
const ROOT_HELLO: u8 = 2;
const PROOF: u8 = 3;
const VERDICT: u8 = 4;

/// Why two processes do not meet. The text is the same on both sides.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// They run different protocols.
    #[error(
        "protocol versions differ: rank 0 speaks {root}, the peer speaks {peer}; run the same fuselink build everywhere"
    )]
    Version {
        /// Of rank 0.
        root: u32,
        /// Of the other.
        peer: u32,
    },
    /// The peer did not prove the secret.
    #[error(
        "rank {rank} has another job secret than rank 0; set the same FUSELINK_SECRET on every rank, and one root address per job"
    )]
    Secret {
        /// Who the peer said it was.
        rank: u32,
    },
    /// Rank 0 did not prove the secret.
    #[error(
        "the process at the root address does not know the job secret; is the address that of another job or program?"
    )]
    RootSecret,
    /// They disagree about the number of ranks.
    #[error(
        "sizes differ: rank 0 was started with {root} ranks, rank {rank} with {peer}; set the same FUSELINK_SIZE on every rank"
    )]
    Size {
        /// Who the peer is.
        rank: u32,
        /// Of rank 0.
        root: u32,
        /// Of the other.
        peer: u32,
    },
    /// Two processes have one rank.
    #[error("rank {rank} has come twice; give every process a FUSELINK_RANK of its own")]
    DuplicateRank {
        /// The rank.
        rank: u32,
    },
    /// It is no fuselink process, or not a sane one.
    #[error("not a fuselink process ({detail}); is another program using the address?")]
    NotFuselink {
        /// What was wrong.
        detail: &'static str,
    },
    /// It belongs to another user.
    #[error("the process belongs to user {seen}, this one to user {expected}; run a job's ranks as one user")]
    User {
        /// Of this process.
        expected: u32,
        /// Of the other.
        seen: u32,
    },
}

/// A handshake failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HandshakeError {
    #[error("{source} while {step}")]
    Io { step: &'static str, source: io::Error },
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// Carries the messages of a handshake, each at most [`MAX_MESSAGE_BYTES`].
pub(crate) trait Pipe {
    /// Sends one message.
    fn send(&mut self, message: &[u8], until: Instant) -> io::Result<()>;
    /// Receives one message; `InvalidData` when it is longer than any of the handshake.
    fn recv(&mut self, until: Instant) -> io::Result<Vec<u8>>;
}

/// What this side brings to the meeting.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    /// Which meeting it is.
    pub(crate) realm: Vec<u8>,
    /// Proven by both.
    pub(crate) secret: Secret,
    /// Who this is.
    pub(crate) rank: u32,
    /// How many ranks meet.
    pub(crate) size: u32,
}

/// A peer that has proven the secret and waits for its verdict.
#[derive(Debug)]
pub(crate) struct Applicant {
    /// Who it says it is; below the size.
    pub(crate) rank: u32,
    transcript: Vec<u8>,
}

/// The peer's side: returns once rank 0 has let it in.
pub(crate) fn apply(pipe: &mut impl Pipe, terms: &Terms, until: Instant) -> Result<(), HandshakeError> {
    let hello = encode(HELLO, &[&terms.rank.to_le_bytes(), &terms.size.to_le_bytes(), &fresh()?]);
    send(pipe, &hello, until, "greeting rank 0")?;
    let answer = recv(pipe, until, "waiting for rank 0's greeting")?;
    if let Some(verdict) = root_says(&answer, ROOT_HELLO)? {
        return Err(judge(terms, &[], verdict).err().unwrap_or(Refusal::RootSecret).into());
    }
    let mut transcript = [hello, answer].concat();
    let proof = encode(PROOF, &[&terms.secret.prove("peer", &[&terms.realm, &transcript])]);
    send(pipe, &proof, until, "proving the secret to rank 0")?;
    transcript.extend(proof);
    let answer = recv(pipe, until, "waiting for rank 0's verdict")?;
    match root_says(&answer, VERDICT)? {
        Some(verdict) => Ok(judge(terms, &transcript, verdict)?),
        None => Err(malformed().into()),
    }
}

/// Rank 0's side, up to the verdict. Who fails it has been told.
pub(crate) fn examine(
    pipe: &mut impl Pipe,
    terms: &Terms,
    until: Instant,
) -> Result<Applicant, HandshakeError> {
    let hello = recv(pipe, until, "waiting for a greeting")?;
    let (rank, size) = match peer_hello(&hello) {
        Err(refusal) => return Err(refuse(pipe, terms, &[], refusal, until)),
        Ok(fields) => fields,
    };
    let answer = encode(ROOT_HELLO, &[&fresh()?]);
    send(pipe, &answer, until, "answering a greeting")?;
    let mut transcript = [hello, answer].concat();
    let message = recv(pipe, until, "waiting for a proof of the secret")?;
    let proof = body(&message, PROOF).filter(|p| p.len() == PROOF_BYTES).ok_or_else(malformed)?;
    if !terms.secret.check("peer", &[&terms.realm, &transcript], proof) {
        return Err(refuse(pipe, terms, &[], Refusal::Secret { rank }, until));
    }
    transcript.extend(&message);
    if size != terms.size {
        let refusal = Refusal::Size { rank, root: terms.size, peer: size };
        return Err(refuse(pipe, terms, &transcript, refusal, until));
    }
    if rank >= size {
        let refusal = Refusal::NotFuselink { detail: "its rank is not below its size" };
        return Err(refuse(pipe, terms, &transcript, refusal, until));
    }
    Ok(Applicant { rank, transcript })
}

/// Rank 0's verdict on a peer that has passed [`examine`].
pub(crate) fn answer(
    pipe: &mut impl Pipe,
    terms: &Terms,
    applicant: &Applicant,
    refusal: Option<&Refusal>,
    until: Instant,
) -> Result<(), HandshakeError> {
    let verdict = encode_verdict(terms, &applicant.transcript, refusal);
    send(pipe, &verdict, until, "sending a verdict")
}

fn send(
    pipe: &mut impl Pipe,
    message: &[u8],
    until: Instant,
    step: &'static str,
) -> Result<(), HandshakeError> {
    pipe.send(message, until).map_err(|source| HandshakeError::Io { step, source })
}

fn recv(pipe: &mut impl Pipe, until: Instant, step: &'static str) -> Result<Vec<u8>, HandshakeError> {
    pipe.recv(until).map_err(|source| match source.kind() {
        io::ErrorKind::InvalidData => malformed().into(),
        _ => HandshakeError::Io { step, source },
    })
}

fn fresh() -> Result<Nonce, HandshakeError> {
    let failed = |e| HandshakeError::Io { step: "making a nonce", source: io::Error::other(e) };
    nonce().map_err(failed)
}

fn malformed() -> Refusal {
    Refusal::NotFuselink { detail: "a malformed message" }
}

fn encode(kind: u8, parts: &[&[u8]]) -> Vec<u8> {
    let mut message = MAGIC.to_vec();
    message.extend(PROTOCOL_VERSION.to_le_bytes());
    message.push(kind);
    parts.iter().for_each(|p| message.extend(*p));
    message
}

/// Version and kind. The prefix stays as it is in all versions.
fn prefix(message: &[u8]) -> Result<(u32, u8), Refusal> {
    if message.len() < PREFIX_BYTES || !message.starts_with(MAGIC) {
        return Err(Refusal::NotFuselink { detail: "no fuselink greeting" });
    }
    Ok((u32_at(message, MAGIC.len()), message[PREFIX_BYTES - 1]))
}

/// The body of a message of this version and kind.
fn body(message: &[u8], kind: u8) -> Option<&[u8]> {
    (prefix(message) == Ok((PROTOCOL_VERSION, kind))).then(|| &message[PREFIX_BYTES..])
}

/// The caller has checked that four bytes are there.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Rank and size in a peer's hello.
fn peer_hello(message: &[u8]) -> Result<(u32, u32), Refusal> {
    let (version, _) = prefix(message)?;
    if version != PROTOCOL_VERSION {
        return Err(Refusal::Version { root: PROTOCOL_VERSION, peer: version });
    }
    match body(message, HELLO) {
        Some(b) if b.len() == 8 + NONCE_BYTES => Ok((u32_at(b, 0), u32_at(b, 4))),
        _ => Err(malformed()),
    }
}

/// `None`: the message is of the wanted kind and well formed; `Some`: it is a verdict, and this is its body.
fn root_says(message: &[u8], wanted: u8) -> Result<Option<&[u8]>, Refusal> {
    let (version, _) = prefix(message)?;
    if version != PROTOCOL_VERSION {
        return Err(Refusal::Version { root: version, peer: PROTOCOL_VERSION });
    }
    if let Some(verdict) = body(message, VERDICT) {
        return Ok(Some(verdict));
    }
    match body(message, wanted) {
        Some(b) if b.len() == NONCE_BYTES => Ok(None),
        _ => Err(malformed()),
    }
}

fn refuse(
    pipe: &mut impl Pipe,
    terms: &Terms,
    transcript: &[u8],
    refusal: Refusal,
    until: Instant,
) -> HandshakeError {
    // Whether or not the peer can still be told, it is refused.
    let _ = pipe.send(&encode_verdict(terms, transcript, Some(&refusal)), until);
    refusal.into()
}

/// code, two numbers, and the root's proof over them and all that was said.
fn encode_verdict(terms: &Terms, transcript: &[u8], refusal: Option<&Refusal>) -> Vec<u8> {
    let (code, a, b) = match refusal {
        None => (0u8, 0, 0),
        Some(Refusal::Version { .. }) => (1, 0, 0),
        Some(Refusal::Secret { .. }) => (2, 0, 0),
        Some(Refusal::Size { root, peer, .. }) => (3, *root, *peer),
        Some(Refusal::DuplicateRank { .. }) => (4, 0, 0),
        Some(_) => (5, 0, 0),
    };
    let fields = [&[code][..], &a.to_le_bytes(), &b.to_le_bytes()].concat();
    let proof = terms.secret.prove("root", &[&terms.realm, transcript, &fields]);
    encode(VERDICT, &[&fields, &proof])
}

/// What the peer makes of a verdict. Only "wrong secret" and "malformed" need no proof: they let nobody in.
fn judge(terms: &Terms, transcript: &[u8], verdict: &[u8]) -> Result<(), Refusal> {
    if verdict.len() != 9 + PROOF_BYTES {
        return Err(malformed());
    }
    let (fields, proof) = verdict.split_at(9);
    let rank = terms.rank;
    match fields[0] {
        2 => return Err(Refusal::Secret { rank }),
        5 => return Err(Refusal::NotFuselink { detail: "rank 0 did not understand this process" }),
        _ => {}
    }
    if !terms.secret.check("root", &[&terms.realm, transcript, fields], proof) {
        return Err(Refusal::RootSecret);
    }
    match fields[0] {
        0 => Ok(()),
        3 => Err(Refusal::Size { rank, root: u32_at(fields, 1), peer: u32_at(fields, 5) }),
        4 => Err(Refusal::DuplicateRank { rank }),
        _ => Err(malformed()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread;
    use std::time::Duration;

    use super::*;

    struct Channel(Sender<Vec<u8>>, Receiver<Vec<u8>>);

    impl Pipe for Channel {
        fn send(&mut self, message: &[u8], _until: Instant) -> io::Result<()> {
            self.0.send(message.to_vec()).map_err(|_| io::ErrorKind::BrokenPipe.into())
        }
        fn recv(&mut self, until: Instant) -> io::Result<Vec<u8>> {
            self.1.recv_timeout(until - Instant::now()).map_err(|_| io::ErrorKind::UnexpectedEof.into())
        }
    }

    fn pair() -> (Channel, Channel) {
        let ((a, from_a), (b, from_b)) = (channel(), channel());
        (Channel(a, from_b), Channel(b, from_a))
    }

    fn terms(secret: &str, rank: u32, size: u32) -> Terms {
        Terms { realm: b"test".to_vec(), secret: Secret::new(secret).unwrap(), rank, size }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    /// Both sides' outcomes; rank 0 gives `verdict` to whoever passes.
    fn meet(root: &Terms, peer: &Terms, verdict: Option<Refusal>) -> [Result<(), HandshakeError>; 2] {
        let (mut a, mut b) = pair();
        thread::scope(|scope| {
            let peer = scope.spawn(move || apply(&mut b, peer, soon()));
            let at_root = examine(&mut a, root, soon())
                .and_then(|applicant| answer(&mut a, root, &applicant, verdict.as_ref(), soon()));
            drop(a);
            [at_root, peer.join().unwrap()]
        })
    }

    fn refusal(result: &Result<(), HandshakeError>) -> &Refusal {
        match result {
            Err(HandshakeError::Refused(refusal)) => refusal,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn equals_meet() {
        let [root, peer] = meet(&terms("s", 0, 2), &terms("s", 1, 2), None);
        root.unwrap();
        peer.unwrap();
    }

    #[test]
    fn both_sides_learn_the_reason() {
        let both = |peer: &Terms, verdict, expected: &Refusal| {
            let [root, peer] = meet(&terms("s", 0, 2), peer, verdict);
            if root.is_err() {
                assert_eq!(refusal(&root), expected);
            }
            assert_eq!(refusal(&peer), expected);
        };
        both(&terms("other", 1, 2), None, &Refusal::Secret { rank: 1 });
        both(&terms("s", 1, 3), None, &Refusal::Size { rank: 1, root: 2, peer: 3 });
        let twice = Refusal::DuplicateRank { rank: 1 };
        both(&terms("s", 1, 2), Some(twice.clone()), &twice);
    }

    #[test]
    fn a_proof_for_another_realm_is_no_proof() {
        let other = Terms { realm: b"elsewhere".to_vec(), ..terms("s", 1, 2) };
        let [root, peer] = meet(&terms("s", 0, 2), &other, None);
        assert_eq!(refusal(&root), &Refusal::Secret { rank: 1 });
        assert_eq!(refusal(&peer), &Refusal::Secret { rank: 1 });
    }

    #[test]
    fn a_root_that_echoes_or_lies_is_not_believed() {
        let (mut a, mut b) = pair();
        thread::scope(|scope| {
            let peer = scope.spawn(move || apply(&mut b, &terms("s", 1, 2), soon()));
            a.recv(soon()).unwrap();
            a.send(&encode(ROOT_HELLO, &[&[7; NONCE_BYTES]]), soon()).unwrap();
            let proof = a.recv(soon()).unwrap();
            let echo = body(&proof, PROOF).unwrap();
            a.send(&encode(VERDICT, &[&[0; 9], echo]), soon()).unwrap();
            assert_eq!(refusal(&peer.join().unwrap()), &Refusal::RootSecret);
        });
    }

    #[test]
    fn other_versions_are_refused_by_either_side() {
        let newer = |kind| {
            let mut message = encode(kind, &[&[0; 8 + NONCE_BYTES]]);
            message[MAGIC.len()] = 9;
            message
        };
        let (mut a, mut b) = pair();
        b.send(&newer(HELLO), soon()).unwrap();
        let at_root = examine(&mut a, &terms("s", 0, 2), soon()).map(|_| ());
        assert_eq!(refusal(&at_root), &Refusal::Version { root: PROTOCOL_VERSION, peer: 9 });
        assert_eq!(body(&b.recv(soon()).unwrap(), VERDICT).map(|v| v[0]), Some(1));
        let (mut a, mut b) = pair();
        a.send(&newer(ROOT_HELLO), soon()).unwrap();
        let at_peer = apply(&mut b, &terms("s", 1, 2), soon());
        assert_eq!(refusal(&at_peer), &Refusal::Version { root: 9, peer: PROTOCOL_VERSION });
    }

    proptest::proptest! {
        #[test]
        fn hostile_messages_are_refused_without_panic(
            messages in proptest::collection::vec(proptest::collection::vec(0u8..=255, 0..200), 1..4),
            greeting in 0u8..6,
        ) {
            let (mut a, mut b) = pair();
            for (i, m) in messages.iter().enumerate() {
                let framed = if i == 0 { encode(greeting, &[m]) } else { m.clone() };
                a.send(&framed, soon()).unwrap();
                b.send(&framed, soon()).unwrap();
            }
            let gone = Instant::now();
            drop((std::mem::replace(&mut a.0, channel().0), std::mem::replace(&mut b.0, channel().0)));
            proptest::prop_assert!(examine(&mut a, &terms("s", 0, 2), gone + Duration::from_secs(1)).is_err());
            proptest::prop_assert!(apply(&mut b, &terms("s", 1, 2), gone + Duration::from_secs(1)).is_err());
        }
    }
}
