//! What two NICs tell each other. A NIC's [`Address`] travels in the bootstrap; a [`Hello`] is a datagram from NIC to NIC.
//! Both are little-endian, of fixed size and version.

use super::gid::Gid;
use crate::topo::NicId;

/// Most queue pairs of a path.
pub const MAX_QUEUE_PAIRS: usize = 8;
/// Size of an encoded [`Hello`].
pub const HELLO_BYTES: usize = 112;

const ADDRESS_MAGIC: [u8; 4] = *b"FLa1";
const HELLO_MAGIC: [u8; 4] = *b"FLh1";

/// Where a port is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Place {
    /// Its address on RoCE, and across InfiniBand subnets.
    pub gid: Gid,
    /// Its address in an InfiniBand subnet; 0 on RoCE.
    pub lid: u16,
    /// Code of the longest packet it carries.
    pub mtu: u8,
}

/// How a NIC is reached by datagram, and what it expects to be told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Address {
    /// Which NIC of the job it is.
    pub nic: NicId,
    /// Its datagram queue pair.
    pub queue_pair: u32,
    /// The key of that.
    pub qkey: u32,
    /// Where it is.
    pub place: Place,
    /// Whoever knows it has met the job.
    pub token: u64,
}

/// Where the lengths of messages are told under adaptive routing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LengthRing {
    /// First address.
    pub remote_addr: u64,
    /// Its key.
    pub rkey: u32,
    /// Words of eight bytes, in equal parts for each lane; 0: lengths come with the messages.
    pub words: u32,
}

/// One end's offer for a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// Who says it.
    pub from: NicId,
    /// Whom it is for.
    pub to: NicId,
    /// What the address of `to` holds.
    pub token: u64,
    /// Of the path.
    pub generation: u32,
    /// The peer's first queue pair, if this end is connected to it; else 0.
    pub connected_to: u32,
    /// First packet number of each queue pair.
    pub psn: u32,
    /// This end does not know yet whether the peer is connected to it.
    pub asks: bool,
    /// Where this end is now.
    pub place: Place,
    /// Where the peer tells lengths.
    pub lengths: LengthRing,
    /// This end's queue pairs; the unused ones are 0.
    pub queue_pairs: [u32; MAX_QUEUE_PAIRS],
}

/// Writes fields one after the other.
struct Writer(Vec<u8>);

impl Writer {
    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend(bytes);
        self
    }
    fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }
    fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }
    fn place(&mut self, place: &Place) -> &mut Self {
        self.bytes(&place.gid.0).bytes(&place.lid.to_le_bytes()).bytes(&[place.mtu, 0])
    }
}

/// Reads them again.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }
    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
    fn place(&mut self) -> Option<Place> {
        let (gid, lid, [mtu, _]) = (Gid(self.array()?), u16::from_le_bytes(self.array()?), self.array()?);
        Some(Place { gid, lid, mtu })
    }
}

impl Address {
    /// As bytes for the bootstrap.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer(ADDRESS_MAGIC.to_vec());
        w.u32(self.nic.0).u32(self.queue_pair).u32(self.qkey).u64(self.token).place(&self.place);
        w.0
    }

    /// `None` for anything else.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut r = Reader(bytes);
        (r.array()? == ADDRESS_MAGIC).then_some(())?;
        let (nic, queue_pair, qkey, token) = (NicId(r.u32()?), r.u32()?, r.u32()?, r.u64()?);
        let place = r.place()?;
        r.0.is_empty().then_some(Self { nic, queue_pair, qkey, place, token })
    }
}

impl Hello {
    /// As a datagram.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer(HELLO_MAGIC.to_vec());
        w.u32(self.from.0).u32(self.to.0).u64(self.token);
        w.u32(self.generation).u32(self.connected_to).u32(self.psn).u32(self.asks.into()).place(&self.place);
        w.u64(self.lengths.remote_addr).u32(self.lengths.rkey).u32(self.lengths.words);
        for number in self.queue_pairs {
            w.u32(number);
        }
        w.0.resize(HELLO_BYTES, 0);
        w.0
    }

    /// `None` for anything else.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut r = Reader(bytes.get(..HELLO_BYTES)?);
        (r.array()? == HELLO_MAGIC).then_some(())?;
        let (from, to, token) = (NicId(r.u32()?), NicId(r.u32()?), r.u64()?);
        let (generation, connected_to, psn) = (r.u32()?, r.u32()?, r.u32()?);
        let (asks, place) = (r.u32()? != 0, r.place()?);
        let lengths = LengthRing { remote_addr: r.u64()?, rkey: r.u32()?, words: r.u32()? };
        let mut queue_pairs = [0; MAX_QUEUE_PAIRS];
        for q in &mut queue_pairs {
            *q = r.u32()?;
        }
        Some(Self { from, to, token, generation, connected_to, psn, asks, place, lengths, queue_pairs })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn place() -> impl Strategy<Value = Place> {
        any::<([u8; 16], u16, u8)>().prop_map(|(gid, lid, mtu)| Place { gid: Gid(gid), lid, mtu })
    }

    proptest! {
        #[test]
        fn addresses_come_back(nic: u32, queue_pair: u32, qkey: u32, token: u64, place in place()) {
            let address = Address { nic: NicId(nic), queue_pair, qkey, place, token };
            let bytes = address.encode();
            prop_assert_eq!(Address::decode(&bytes), Some(address));
            prop_assert_eq!(Address::decode(&bytes[1..]), None);
            prop_assert_eq!(Address::decode(&[&bytes[..], &[0]].concat()), None);
        }

        #[test]
        fn hellos_come_back(ids: (u32, u32, u64), numbers: (u32, u32, u32), asks: bool, place in place(),
                            ring: (u64, u32, u32), queue_pairs: [u32; MAX_QUEUE_PAIRS]) {
            let hello = Hello {
                from: NicId(ids.0), to: NicId(ids.1), token: ids.2,
                generation: numbers.0, connected_to: numbers.1, psn: numbers.2, asks,
                place, queue_pairs,
                lengths: LengthRing { remote_addr: ring.0, rkey: ring.1, words: ring.2 },
            };
            let bytes = hello.encode();
            prop_assert_eq!(bytes.len(), HELLO_BYTES);
            prop_assert_eq!(Hello::decode(&bytes), Some(hello));
            prop_assert_eq!(Hello::decode(&bytes[..HELLO_BYTES - 1]), None);
        }

        #[test]
        fn garbage_is_nothing(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert_eq!(Address::decode(&bytes), None);
            prop_assert_eq!(Hello::decode(&bytes), None);
        }
    }
}
