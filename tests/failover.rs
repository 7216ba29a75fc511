//! NICs that fail while bytes move, on the emulated cluster: the rest goes over the others, nothing is lost or doubled, and a
//! link that returns is used again.

mod common;

use std::time::{Duration, Instant};

use common::{config, mismatches, prepare, run_ranks};
use fuselink::comm::{Cables, Communicator};
use fuselink::hw::LinkState;
use fuselink::plan::{Demand, Method};
use fuselink::topo::{Cluster, NicId, Rank, Server};

const SLOT: u32 = 8192;
const CELL: u64 = 300_000;
const DEADLINE: Duration = Duration::from_secs(60);
/// The NIC whose cable is pulled: the second of the first server.
const VICTIM: NicId = NicId(1);

/// When the cable is put back.
#[derive(Clone, Copy, PartialEq)]
enum Back {
    Never,
    MeanWhile,
}

fn wait(what: &str, done: impl Fn() -> bool) {
    let by = Instant::now() + DEADLINE;
    while !done() {
        assert!(Instant::now() < by, "waited for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Pulls the cable once the NIC has carried something, and puts it back once another one has carried more.
fn pull(cables: &Cables, back: Back) {
    let tx = |nic: u32| cables.counters(NicId(nic)).tx_bytes;
    wait("the first bytes", || tx(VICTIM.0) > 0);
    cables.set(VICTIM, LinkState::Down);
    if back == Back::MeanWhile {
        let at = tx(0);
        wait("bytes on another NIC", || tx(0) > at + CELL / 10);
        cables.set(VICTIM, LinkState::Up);
    }
}

/// Three times the same exchange; the cable is pulled in the first. Returns what the victim carried in each.
fn exchange(comm: &mut Communicator, demand: &Demand, method: Method, back: Back) -> Vec<u64> {
    let plan = comm.plan_demand(demand, method).unwrap();
    let (send, recv) = (comm.alloc(plan.send_bytes()).unwrap(), comm.alloc(plan.recv_bytes()).unwrap());
    let cables = comm.cables().expect("emulated NICs have cables");
    let round = |iteration: u64| {
        prepare(comm, &plan, demand, &send, &recv, iteration);
        comm.barrier().unwrap();
        let before = cables.counters(VICTIM).tx_bytes;
        comm.barrier().unwrap();
        std::thread::scope(|scope| {
            if iteration == 0 && comm.rank() == Rank(0) {
                scope.spawn(|| pull(&cables, back));
            }
            comm.all_to_all(&plan, &send, &recv).unwrap();
        });
        assert_eq!(mismatches(comm, &plan, demand, &recv, iteration), 0, "{method}, iteration {iteration}");
        comm.barrier().unwrap();
        if back == Back::MeanWhile {
            let all_open = || comm.path_counters().opened == comm.path_counters().closed;
            wait("all paths to open again", all_open);
        }
        comm.barrier().unwrap();
        cables.counters(VICTIM).tx_bytes - before
    };
    (0..3).map(round).collect()
}

fn fails_and_goes_on(method: Method, back: Back) {
    let cluster = Cluster::uniform(2, Server::new(2, &[400_000; 2], 450_000));
    let ranks = cluster.ranks();
    let demand = Demand::new(ranks, vec![CELL; (ranks * ranks) as usize], 1).unwrap();
    let config = config(&cluster, 2000, SLOT);
    let carried = run_ranks(&config, |mut comm| exchange(&mut comm, &demand, method, back));
    match back {
        Back::Never => assert_eq!(carried[0][1..], [0, 0], "{method}: a NIC without a link carries nothing"),
        Back::MeanWhile => assert!(carried[0][2] > 0, "{method}: a link that is back carries again"),
    }
}

/// A plan made after the link went down leaves the NIC out.
#[test]
fn the_next_plan_leaves_the_nic_out() {
    let cluster = Cluster::uniform(2, Server::new(2, &[400_000; 2], 450_000));
    let ranks = cluster.ranks();
    let demand = Demand::new(ranks, vec![CELL / 4; (ranks * ranks) as usize], 1).unwrap();
    let config = config(&cluster, 2000, SLOT);
    let predicted = run_ranks(&config, |mut comm| {
        let before = comm.plan_demand(&demand, Method::Birkhoff).unwrap().predicted();
        let cables = comm.cables().unwrap();
        comm.barrier().unwrap();
        cables.set(VICTIM, LinkState::Down);
        if comm.rank() == Rank(VICTIM.0) {
            wait("the owner to see it", || comm.path_counters().closed > 0);
        }
        comm.barrier().unwrap();
        let plan = comm.plan_demand(&demand, Method::Birkhoff).unwrap();
        let (send, recv) = (comm.alloc(plan.send_bytes()).unwrap(), comm.alloc(plan.recv_bytes()).unwrap());
        prepare(&comm, &plan, &demand, &send, &recv, 0);
        comm.barrier().unwrap();
        comm.all_to_all(&plan, &send, &recv).unwrap();
        assert_eq!(mismatches(&comm, &plan, &demand, &recv, 0), 0);
        comm.barrier().unwrap();
        [before, plan.predicted()]
    });
    assert!(predicted[0][1] > predicted[0][0], "half of a server's NICs take longer: {predicted:?}");
}

#[test]
fn static_goes_on_without_the_nic() {
    fails_and_goes_on(Method::Static, Back::Never);
}

#[test]
fn static_uses_a_link_that_is_back() {
    fails_and_goes_on(Method::Static, Back::MeanWhile);
}

#[test]
fn fuselink_goes_on_without_the_nic() {
    fails_and_goes_on(Method::FuseLink, Back::Never);
}

#[test]
fn fuselink_uses_a_link_that_is_back() {
    fails_and_goes_on(Method::FuseLink, Back::MeanWhile);
}

#[test]
fn a_plan_without_order_goes_on_without_the_nic() {
    fails_and_goes_on(Method::Loose, Back::Never);
}

#[test]
fn an_ordered_plan_goes_on_without_the_nic() {
    fails_and_goes_on(Method::Birkhoff, Back::Never);
}

#[test]
fn an_ordered_plan_uses_a_link_that_is_back() {
    fails_and_goes_on(Method::Birkhoff, Back::MeanWhile);
}
