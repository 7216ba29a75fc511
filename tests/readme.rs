//! The library example of README.md: compiled, run, and the same text as there.

// [example]
use std::net::TcpListener;
use std::time::Duration;

use fuselink::comm::bootstrap::{Bootstrap, BootstrapConfig};
use fuselink::comm::secret::Secret;
use fuselink::comm::{CommConfig, CommError, Communicator, EmuOptions, GpuKind, Nics};
use fuselink::hw::Gpu;
use fuselink::plan::{CostModel, Method};
use fuselink::topo::{Cluster, Rank, Server};

/// One rank of four, on two servers of two GPUs and two 400 Gbit/s NICs each. Returns what it received.
fn rank(me: BootstrapConfig, listener: Option<TcpListener>) -> Result<Vec<u8>, CommError> {
    let secret = me.secret.clone();
    let bootstrap = match listener {
        Some(listener) => Bootstrap::listen(&me, listener)?,
        None => Bootstrap::connect(&me)?,
    };
    let slot_bytes = 64 << 10;
    let config = CommConfig {
        cluster: Cluster::uniform(2, Server::new(2, &[400_000; 2], 450_000)),
        secret,
        slot_bytes,
        put_bytes: 0,
        relay_bytes: 64 << 20,
        timeout: Duration::from_secs(10),
        model: CostModel { message_bytes: slot_bytes.into(), ..CostModel::default() },
        gpu: GpuKind::default(),
        blocks: None,
        emulation: EmuOptions::at_scale(1000),
        nics: Nics::Emulated,
    };
    let mut comm = Communicator::connect(config, bootstrap)?;
    let counts = [1000; 4]; // bytes to each rank
    let plan = comm.plan_all_to_all(&counts, Method::Auto)?;
    let send = comm.alloc(plan.send_bytes())?;
    let recv = comm.alloc(plan.recv_bytes())?;
    comm.gpu().write(send.dev_ptr(), &[me.rank.0 as u8; 4000])?;
    comm.all_to_all(&plan, &send, &recv)?;
    let mut received = vec![0; 4000];
    comm.gpu().read(recv.dev_ptr(), &mut received)?;
    comm.barrier()?; // nobody leaves while others still need it
    Ok(received)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let (root, secret) = (listener.local_addr()?, Secret::generate()?);
    let mut listener = Some(listener);
    let ranks: Vec<_> = (0..4)
        .map(|r| {
            let (rank_id, secret, deadline) = (Rank(r), secret.clone(), Duration::from_secs(10));
            let me = BootstrapConfig { rank: rank_id, size: 4, root, secret, deadline };
            let listener = listener.take(); // rank 0 gets it
            std::thread::spawn(move || rank(me, listener))
        })
        .collect();
    for thread in ranks {
        let received = thread.join().unwrap()?;
        assert!(received.chunks(1000).zip(0..).all(|(cell, src)| cell.iter().all(|&b| b == src)));
    }
    Ok(())
}
// [/example]

#[test]
fn the_example_runs() {
    main().unwrap();
}

#[test]
fn the_readme_shows_this_example() {
    let (own, readme) = (include_str!("readme.rs"), include_str!("../README.md"));
    let begin = own.find("// [example]\n").unwrap() + "// [example]\n".len();
    let end = own.find("// [/example]").unwrap();
    assert!(readme.contains(&own[begin..end]), "README.md shows another example than tests/readme.rs");
}
