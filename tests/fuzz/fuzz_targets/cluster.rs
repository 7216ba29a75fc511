//! Cluster files: a cluster within the limits, or one line that says what is wrong.

#![no_main]

use fuselink::topo::{Cluster, MAX_RANKS, NicId};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    match Cluster::from_toml(text, "f") {
        Ok(cluster) => {
            assert!((1..=MAX_RANKS).contains(&cluster.ranks().into()));
            (0..cluster.nics()).for_each(|nic| assert!(cluster.owner_of(NicId(nic)).0 < cluster.ranks()));
        }
        Err(error) => assert_eq!(error.to_string().lines().count(), 1, "{:?}", error.to_string()),
    }
});
