//! How the NICs of two servers pair up, and how much of a tile each pair carries.

use super::cost::mul_div;
use super::tile::Hop;
use crate::topo::{NicIdx, Server};

/// A pair of NICs with its share of a tile.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Route {
    pub hop: Hop,
    /// Units to carry, never 0.
    pub units: u64,
}

/// Deals `units` to pairs of NICs, in proportion to the rates on both sides.
///
/// Servers with equally many NICs pair those of the same index first (rail peers); what is left, and servers of
/// different kind, pair in index order. A NIC that is down gets nothing.
pub(super) fn routes(src: &Server, dst: &Server, units: u64, scratch: &mut Shares, out: &mut Vec<Route>) {
    out.clear();
    shares(src, units, &mut scratch.egress);
    if src.nics == dst.nics {
        scratch.ingress.clone_from(&scratch.egress);
    } else {
        shares(dst, units, &mut scratch.ingress);
    }
    let mut push = |k: usize, l: usize, units: u64| {
        out.push(Route {
            hop: Hop {
                egress: NicIdx(k as u32),
                ingress: NicIdx(l as u32),
                from: src.nics[k].relay_gpu,
                to: dst.nics[l].relay_gpu,
            },
            units,
        });
    };
    let (egress, ingress) = (&mut scratch.egress, &mut scratch.ingress);
    if egress.len() == ingress.len() {
        for (k, (e, i)) in egress.iter_mut().zip(ingress.iter_mut()).enumerate() {
            let both = (*e).min(*i);
            if both > 0 {
                push(k, k, both);
            }
            (*e, *i) = (*e - both, *i - both);
        }
        if src.nics == dst.nics {
            return;
        }
    }
    let (mut k, mut l) = (0, 0);
    while k < egress.len() && l < ingress.len() {
        let both = egress[k].min(ingress[l]);
        if both > 0 {
            push(k, l, both);
        }
        (egress[k], ingress[l]) = (egress[k] - both, ingress[l] - both);
        if egress[k] == 0 {
            k += 1;
        } else {
            l += 1;
        }
    }
}

/// Scratch of [`routes`]: units per NIC on both sides.
#[derive(Clone, Debug, Default)]
pub(super) struct Shares {
    egress: Vec<u64>,
    ingress: Vec<u64>,
}

/// Deals `units` to a server's NICs in proportion to their rates, all of them, each within one of its exact share.
fn shares(server: &Server, units: u64, out: &mut Vec<u64>) {
    out.clear();
    let all = server.mbit_per_s();
    let (mut rate, mut dealt) = (0, 0);
    for nic in &server.nics {
        rate += nic.mbit_per_s;
        let upto = if all == 0 { 0 } else { mul_div(units, rate, all) };
        out.push(upto - dealt);
        dealt = upto;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(src: &[u64], dst: &[u64], units: u64) -> Vec<(u32, u32, u64)> {
        let (src, dst) = (Server::new(8, src, 1), Server::new(8, dst, 1));
        let mut out = Vec::new();
        routes(&src, &dst, units, &mut Shares::default(), &mut out);
        out.iter().map(|r| (r.hop.egress.0, r.hop.ingress.0, r.units)).collect()
    }

    #[test]
    fn equal_servers_use_rail_peers_only() {
        assert_eq!(pairs(&[4; 4], &[4; 4], 10), [(0, 0, 2), (1, 1, 3), (2, 2, 2), (3, 3, 3)]);
    }

    #[test]
    fn fewer_nics_feed_neighbouring_rails() {
        assert_eq!(pairs(&[4; 2], &[4; 4], 8), [(0, 0, 2), (0, 1, 2), (1, 2, 2), (1, 3, 2)]);
    }

    #[test]
    fn a_down_nic_carries_nothing_and_the_rest_share_in_proportion() {
        assert_eq!(
            pairs(&[4, 0, 4, 4], &[4; 4], 12),
            [(0, 0, 3), (2, 2, 3), (3, 3, 3), (0, 1, 1), (2, 1, 1), (3, 1, 1)]
        );
        assert_eq!(pairs(&[4, 2], &[2, 4], 9), [(0, 0, 3), (1, 1, 3), (0, 1, 3)]);
    }

    #[test]
    fn fewer_units_than_nics_leave_nics_out() {
        assert_eq!(pairs(&[4; 4], &[4; 4], 1), [(3, 3, 1)]);
        assert_eq!(pairs(&[4; 4], &[4; 4], 0), []);
    }
}
