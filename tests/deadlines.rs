//! Nobody waits for ever: what a collective says when something it waits for does not come.

mod common;

use std::time::Duration;

use common::{config, prepare, run_ranks};
use fuselink::comm::CommError;
use fuselink::comm::bootstrap::BootstrapError;
use fuselink::plan::{Demand, Method};
use fuselink::topo::{Cluster, Rank, Server};

fn two_by_two() -> Cluster {
    Cluster::uniform(2, Server::new(2, &[400_000; 2], 450_000))
}

/// Everybody but `absent` runs an all-to-all of `demand`; returns everybody's error as text.
fn errors_without(absent: Rank, demand: &Demand) -> Vec<String> {
    let mut config = config(&two_by_two(), 1000, 16384);
    config.timeout = Duration::from_secs(1);
    let results = run_ranks(&config, |mut comm| -> Result<(), CommError> {
        let plan = comm.plan_demand(demand, Method::Static)?;
        let (send, recv) = (comm.alloc(plan.send_bytes())?, comm.alloc(plan.recv_bytes())?);
        prepare(&comm, &plan, demand, &send, &recv, 0);
        comm.barrier()?;
        if comm.rank() != absent {
            comm.all_to_all(&plan, &send, &recv)?;
        }
        // Who needs nothing of the absent rank comes here at once, and is told of the failure here.
        Ok(comm.bootstrap()?.barrier_within(Duration::from_secs(60))?)
    });
    results.into_iter().map(|r| r.unwrap_err().to_string()).collect()
}

#[test]
fn a_remote_rank_that_does_not_take_part_is_named() {
    let demand = Demand::new(4, vec![0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 500_000, 0, 0, 0], 1).unwrap();
    let errors = errors_without(Rank(3), &demand);
    let cause = errors.iter().find(|e| e.starts_with("no progress")).unwrap_or_else(|| panic!("{errors:#?}"));
    assert!(cause.contains("messages from rank 3 (0 of 31 have come"), "{cause}");
    // The others, and the absent rank itself, are told.
    assert!(errors[3].contains("messages from rank 3"), "{}", errors[3]);
}

#[test]
fn a_local_rank_that_does_not_take_part_is_named() {
    let demand = Demand::new(4, vec![0, 100, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], 1).unwrap();
    let errors = errors_without(Rank(1), &demand);
    let named = errors.iter().any(|e| e.contains("local rank 1 did not take part in call 1"));
    assert!(named, "{errors:#?}");
}

#[test]
fn a_rank_that_leaves_ends_the_job_for_all() {
    let mut config = config(&two_by_two(), 1000, 16384);
    config.timeout = Duration::from_secs(20);
    let results = run_ranks(&config, |comm| {
        if comm.rank() == Rank(2) {
            return Ok(());
        }
        comm.barrier()
    });
    for (r, result) in results.into_iter().enumerate().filter(|(r, _)| *r != 2) {
        let Err(CommError::Bootstrap(e)) = result else { panic!("rank {r}: {result:?}") };
        let named = matches!(
            e,
            BootstrapError::PeerLeft { .. }
                | BootstrapError::PeerDied { .. }
                | BootstrapError::Aborted { .. }
        );
        assert!(named && e.to_string().contains("rank 2"), "rank {r}: {e}");
    }
}

#[test]
fn ranks_that_were_started_differently_are_refused() {
    let base = config(&two_by_two(), 1000, 16384);
    let errors = common::connect_ranks(&base, |rank, config| {
        if rank == Rank(1) {
            config.slot_bytes = 8192;
        }
    });
    let text = "rank 1 was started with another size of slots or relay memory";
    assert!(errors.iter().all(|e| e.as_ref().is_some_and(|e| e.contains(text))), "{errors:#?}");
}
