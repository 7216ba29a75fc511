//! The collective on emulated clusters: every method, every byte, and each method's signature in the NICs' counters.

mod common;

use fuselink::plan::{Demand, Method};
use fuselink::topo::{Cluster, Server};

const METHODS: [Method; 5] =
    [Method::Static, Method::Spray, Method::FuseLink, Method::Birkhoff, Method::Loose];

#[test]
fn smoke() {
    let cluster = Cluster::uniform(2, Server::new(2, &[400_000; 2], 450_000));
    let cells = (0..16).map(|i| 100_000 + 1000 * i).collect();
    let demand = Demand::new(4, cells, 1).unwrap();
    let config = common::config(&cluster, 1000, 16384);
    for method in METHODS {
        let out = common::run(&config, &demand, method).unwrap();
        assert_eq!(out.mismatches, 0, "{method}");
        println!("{method}: {:?}", out.nics);
    }
}
