//! Which address of a port is used. An InfiniBand port needs none inside its subnet; a RoCE port has a table of them, of two
//! versions and several kinds, and a wrong choice reaches nobody.

use std::fmt;
use std::net::Ipv6Addr;

/// A port's address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// `::ffff:a.b.c.d`: the interface has an IPv4 address, and this is it.
    pub fn is_ipv4(&self) -> bool {
        Ipv6Addr::from(self.0).to_ipv4_mapped().is_some()
    }

    /// Reaches no further than the next router.
    pub fn is_link_local(&self) -> bool {
        self.0[0] == 0xfe && self.0[1] & 0xc0 == 0x80
    }

    fn is_zero(&self) -> bool {
        self.0 == [0; 16]
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What protocol a row of the table speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// RoCE v1: Ethernet frames of their own type, which no router passes.
    RoceV1,
    /// RoCE v2: UDP.
    RoceV2,
}

/// A row of a port's table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GidRow {
    /// Its index.
    pub index: u8,
    /// Its protocol.
    pub kind: GidKind,
    /// The address.
    pub gid: Gid,
}

/// No row can be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GidError {
    /// The row that was asked for does not exist.
    #[error("the GID table has no entry {index} (FUSELINK_VERBS_GID_INDEX); it has {known:?}")]
    NoSuchRow {
        /// Asked for.
        index: u8,
        /// There are.
        known: Vec<u8>,
    },
    /// A RoCE port has no address of version 2.
    #[error(
        "the port has no RoCE v2 GID: give its network interface an address and bring it up (ip addr add, ip link set up); in a \
         container, share the host's network"
    )]
    NoRoceV2,
    /// The table is empty.
    #[error("the port has no GID: bring its link up, and start a subnet manager (InfiniBand)")]
    Empty,
}

/// The row to use: the one asked for; else RoCE v2 with an IPv4 address, then with a routable IPv6 address, then any
/// RoCE v2; on InfiniBand the first.
///
/// # Errors
/// [`GidError`] when no row can be used.
pub fn choose(rows: &[GidRow], ethernet: bool, asked: Option<u8>) -> Result<GidRow, GidError> {
    let usable = || rows.iter().filter(|r| !r.gid.is_zero());
    if let Some(index) = asked {
        let known = || usable().map(|r| r.index).collect();
        let row = usable().find(|r| r.index == index).copied();
        return row.ok_or_else(|| GidError::NoSuchRow { index, known: known() });
    }
    if !ethernet {
        return usable().min_by_key(|r| r.index).copied().ok_or(GidError::Empty);
    }
    let rank = |r: &&GidRow| (!r.gid.is_ipv4(), r.gid.is_link_local(), r.index);
    usable().filter(|r| r.kind == GidKind::RoceV2).min_by_key(rank).copied().ok_or(GidError::NoRoceV2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(index: u8, kind: GidKind, address: &str) -> GidRow {
        GidRow { index, kind, gid: Gid(address.parse::<Ipv6Addr>().unwrap().octets()) }
    }

    #[test]
    fn ipv4_is_preferred_then_what_routers_pass() {
        let link_local = row(1, GidKind::RoceV2, "fe80::1");
        let v1 = row(2, GidKind::RoceV1, "::ffff:10.0.0.1");
        let v2 = row(3, GidKind::RoceV2, "::ffff:10.0.0.1");
        let routable = row(4, GidKind::RoceV2, "2001:db8::1");
        let unused = row(0, GidKind::RoceV2, "::");
        let pick = |rows: &[GidRow]| choose(rows, true, None).map(|r| r.index);
        assert_eq!(pick(&[unused, link_local, v1, v2, routable]), Ok(3));
        assert_eq!(pick(&[unused, link_local, v1, routable]), Ok(4));
        assert_eq!(pick(&[unused, link_local, v1]), Ok(1));
        assert_eq!(pick(&[unused, v1]), Err(GidError::NoRoceV2));
        let second = row(5, GidKind::RoceV2, "::ffff:10.0.0.2");
        assert_eq!(pick(&[second, v2]), Ok(3), "the first of equals, whatever the order of the table");
    }

    #[test]
    fn infiniband_takes_its_first() {
        let rows = [row(0, GidKind::InfiniBand, "fe80::2"), row(1, GidKind::InfiniBand, "fe80::3")];
        assert_eq!(choose(&rows, false, None).map(|r| r.index), Ok(0));
        assert_eq!(choose(&[], false, None), Err(GidError::Empty));
    }

    #[test]
    fn who_asks_for_a_row_gets_it_or_hears_which_there_are() {
        let rows = [row(1, GidKind::RoceV1, "fe80::1"), row(3, GidKind::RoceV2, "::ffff:10.0.0.1")];
        assert_eq!(choose(&rows, true, Some(1)).map(|r| r.index), Ok(1));
        let error = choose(&rows, true, Some(7)).unwrap_err();
        assert_eq!(error, GidError::NoSuchRow { index: 7, known: vec![1, 3] });
        assert!(error.to_string().contains("FUSELINK_VERBS_GID_INDEX"));
    }
}
