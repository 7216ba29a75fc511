//! Words about paths, as datagrams: a NIC whose every path to a server is closed tells the other end beside the NICs.
//! Each carries a proof of the job's secret; a word that is lost, doubled or late does no harm (`engine/path.rs`).

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};

use super::secret::{PROOF_BYTES, Secret};
use crate::hw::Herald;
use crate::topo::NicId;

const LABEL: &str = "path word";
/// From, to, word; then the proof.
const WORD_BYTES: usize = 16;

/// The datagrams of one process.
pub(super) struct UdpHerald {
    socket: UdpSocket,
    secret: Secret,
    job: Vec<u8>,
    /// Where the owner of each NIC of the job listens.
    owners: Vec<Option<SocketAddr>>,
}

/// A socket at an address that the job's other ranks reach; the system chooses the port.
pub(super) fn open(ip: IpAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((ip, 0))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

impl UdpHerald {
    /// Speaks for the job of this name.
    pub(super) fn new(
        socket: UdpSocket,
        secret: Secret,
        job: Vec<u8>,
        owners: Vec<Option<SocketAddr>>,
    ) -> Self {
        Self { socket, secret, job, owners }
    }

    fn decode(&self, datagram: &[u8]) -> Option<(NicId, NicId, u64)> {
        let (word, proof) = datagram.split_at_checked(WORD_BYTES)?;
        if !self.secret.check(LABEL, &[&self.job, word], proof) {
            return None;
        }
        let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| word[at + i]));
        let value = u64::from_le_bytes(std::array::from_fn(|i| word[8 + i]));
        Some((NicId(number(0)), NicId(number(4)), value))
    }
}

impl Herald for UdpHerald {
    fn tell(&mut self, from: NicId, to: NicId, word: u64) {
        let Some(&Some(owner)) = self.owners.get(to.idx()) else { return };
        let mut datagram = [0; WORD_BYTES + PROOF_BYTES];
        datagram[..4].copy_from_slice(&from.0.to_le_bytes());
        datagram[4..8].copy_from_slice(&to.0.to_le_bytes());
        datagram[8..WORD_BYTES].copy_from_slice(&word.to_le_bytes());
        let proof = self.secret.prove(LABEL, &[&self.job, &datagram[..WORD_BYTES]]);
        datagram[WORD_BYTES..].copy_from_slice(&proof);
        // One that cannot be sent is as one that is lost.
        let _ = self.socket.send_to(&datagram, owner);
    }

    fn hear(&mut self) -> Option<(NicId, NicId, u64)> {
        let mut datagram = [0; WORD_BYTES + PROOF_BYTES + 1];
        // Strangers' datagrams are passed over, a few at a time.
        (0..64).find_map(|_| match self.socket.recv(&mut datagram) {
            Ok(bytes) => Some(self.decode(&datagram[..bytes])),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Some(None),
            Err(_) => None, // An earlier datagram found nobody: nothing is lost but that.
        })?
    }
}

/// A process that no other reaches by datagrams.
pub(super) struct NoHerald;

impl Herald for NoHerald {
    fn tell(&mut self, _from: NicId, _to: NicId, _word: u64) {}

    fn hear(&mut self) -> Option<(NicId, NicId, u64)> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn pair(secrets: [&str; 2]) -> [UdpHerald; 2] {
        let sockets = [(); 2].map(|()| open(IpAddr::V4(Ipv4Addr::LOCALHOST)).unwrap());
        let owners: Vec<_> = sockets.iter().map(|s| Some(s.local_addr().unwrap())).collect();
        let mut secrets = secrets.into_iter();
        sockets.map(|socket| {
            let secret = Secret::new(secrets.next().unwrap()).unwrap();
            UdpHerald::new(socket, secret, b"job".to_vec(), owners.clone())
        })
    }

    fn hear(herald: &mut UdpHerald) -> Option<(NicId, NicId, u64)> {
        let by = std::time::Instant::now() + std::time::Duration::from_secs(20);
        loop {
            let heard = herald.hear();
            if heard.is_some() || std::time::Instant::now() > by {
                return heard;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_word_comes_whole() {
        let [mut a, mut b] = pair(["s", "s"]);
        a.tell(NicId(0), NicId(1), u64::MAX >> 1);
        assert_eq!(hear(&mut b), Some((NicId(0), NicId(1), u64::MAX >> 1)));
        assert_eq!(b.hear(), None);
    }

    #[test]
    fn a_word_without_the_secret_is_not_heard() {
        let [mut a, mut b] = pair(["s", "t"]);
        a.tell(NicId(0), NicId(1), 1);
        b.secret = Secret::new("s").unwrap();
        assert!(hear(&mut b).is_some(), "the same word with the secret is");
        let [mut a, mut b] = pair(["s", "t"]);
        a.tell(NicId(0), NicId(1), 1);
        b.tell(NicId(1), NicId(1), 2); // To itself, so that there is something to wait for.
        assert_eq!(hear(&mut b), Some((NicId(1), NicId(1), 2)));
        assert_eq!(b.hear(), None);
    }
}
