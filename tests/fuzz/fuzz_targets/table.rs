//! Plan tables from outside, made of valid ones by changing a few words: refused, or safe to walk.

#![no_main]

use std::sync::LazyLock;

use fuselink::plan::{self, CostModel, Demand, Method, PlanTable};
use fuselink::topo::{Cluster, Rank, Server};
use libfuzzer_sys::fuzz_target;

/// A word that is overwritten: which of all 4-byte words, and with what or by how much.
type Edit = (u16, bool, u32);

static TABLES: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let cluster = Cluster::uniform(3, Server::new(2, &[400_000; 2], 450_000));
    let demand = Demand::new(6, (0..36).map(|i| i * 700 % 5000).collect(), 1).expect("a square");
    let bytes = |(method, rank)| {
        let schedule = plan::schedule(&cluster, &demand, method, &CostModel::default()).expect("a plan");
        let table = PlanTable::compile(&cluster, &demand, &schedule, Rank(rank), 1000).expect("a table");
        table.as_bytes().to_vec()
    };
    let methods = [Method::OpenShop, Method::Birkhoff, Method::Loose, Method::Static, Method::FuseLink];
    methods.into_iter().flat_map(|method| [(method, 0), (method, 5)]).map(bytes).collect()
});

fuzz_target!(|input: (u8, Vec<Edit>, Option<u16>)| {
    let (which, edits, cut) = input;
    let mut bytes = TABLES[usize::from(which) % TABLES.len()].clone();
    for (at, add, value) in edits {
        let words = bytes.len() / 4;
        let word = &mut bytes.as_chunks_mut::<4>().0[usize::from(at) % words];
        let old = if add { u32::from_le_bytes(*word) } else { 0 };
        *word = old.wrapping_add(value).to_le_bytes();
    }
    bytes.truncate(cut.map_or(usize::MAX, usize::from));
    check(&bytes);
});

fn check(bytes: &[u8]) {
    let Ok(table) = PlanTable::parse(bytes) else { return };
    let header = table.header();
    assert_eq!(PlanTable::parse(table.as_bytes()).as_ref(), Ok(&table));
    assert_eq!(table.as_bytes(), &bytes[..table.as_bytes().len()]);
    let mut sends = 0;
    for lane in table.lanes() {
        assert_eq!(lane.first_send, sends);
        sends += lane.sends;
    }
    assert_eq!(sends, header.sends);
    table.sends().for_each(|s| assert!(s.dst < header.ranks && s.bytes > 0));
    let recvs: usize = (0..header.ranks).map(|src| table.recvs_from(Rank(src)).len()).sum();
    assert_eq!(recvs, table.recvs().len());
    table.locals().for_each(|l| assert!(l.dst < header.ranks));
    table.turns().for_each(|t| assert!(t.direction < 2));
}
