//! The control plane among real sockets: who is let in, what everybody learns of an end, and that nothing hangs.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use fuselink::comm::bootstrap::{
    Bootstrap, BootstrapConfig, BootstrapError, Call, MAX_CONTRIBUTION_BYTES, PROTOCOL_VERSION, Refusal,
    Waiting,
};
use fuselink::comm::secret::Secret;
use fuselink::topo::Rank;

/// Ample on a loaded machine; a healthy test never waits for it.
const AMPLE: Duration = Duration::from_secs(60);
/// For calls that are to run out of time.
const SHORT: Duration = Duration::from_millis(400);

struct Job {
    listener: Option<TcpListener>,
    root: SocketAddr,
    secret: Secret,
    size: u32,
    deadline: Duration,
}

impl Job {
    fn new(size: u32, deadline: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let root = listener.local_addr().unwrap();
        Self { listener: Some(listener), root, secret: Secret::generate().unwrap(), size, deadline }
    }

    fn config(&self, rank: u32) -> BootstrapConfig {
        let &Self { root, size, deadline, .. } = self;
        BootstrapConfig { rank: Rank(rank), size, root, secret: self.secret.clone(), deadline }
    }

    /// Starts a rank's thread.
    fn start<T: Send + 'static>(
        &mut self,
        rank: u32,
        run: impl FnOnce(Bootstrap) -> T + Send + 'static,
    ) -> Started<T> {
        let config = self.config(rank);
        let listener = if rank == 0 { self.listener.take() } else { None };
        thread::spawn(move || meet(&config, listener).map(run))
    }

    /// Runs the same code on every rank.
    fn run<T: Send + 'static>(mut self, run: impl Fn(Bootstrap) -> T + Clone + Send + 'static) -> Vec<T> {
        let ranks: Vec<_> = (0..self.size).map(|r| self.start(r, run.clone())).collect();
        ranks.into_iter().map(|r| r.join().unwrap().unwrap()).collect()
    }
}

type Started<T> = thread::JoinHandle<Result<T, BootstrapError>>;

fn meet(config: &BootstrapConfig, listener: Option<TcpListener>) -> Result<Bootstrap, BootstrapError> {
    match listener {
        Some(listener) => Bootstrap::listen(config, listener),
        None => Bootstrap::connect(config),
    }
}

/// Blocks until the job has failed.
fn await_failure(bootstrap: &Bootstrap) -> BootstrapError {
    let (tell, told) = channel();
    bootstrap.on_failure(move |failure| tell.send(failure.clone()).unwrap());
    told.recv_timeout(AMPLE).expect("the failure is told")
}

#[track_caller]
fn assert_died(error: &BootstrapError, rank: u32) {
    assert!(matches!(error, BootstrapError::PeerDied { rank: Rank(r) } if *r == rank), "{error}");
}

// A hand-made peer, for what the library's own never does.

fn greeting(version: u32, rank: u32, size: u32) -> Vec<u8> {
    let mut m = b"fuselink".to_vec();
    m.extend(version.to_le_bytes());
    m.push(1);
    m.extend(rank.to_le_bytes());
    m.extend(size.to_le_bytes());
    m.extend([9; 32]);
    m
}

fn send(stream: &mut TcpStream, message: &[u8]) {
    stream.write_all(&(message.len() as u32).to_le_bytes()).unwrap();
    stream.write_all(message).unwrap();
}

fn receive(stream: &mut TcpStream) -> Vec<u8> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut message = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut message).unwrap();
    message
}

/// A relay between a rank and rank 0 whose connections a test can cut: what a rank's sudden end looks like. It cuts
/// them itself once the rank has sent `bytes`.
fn relay_to(root: SocketAddr, bytes: u64) -> (SocketAddr, thread::JoinHandle<(TcpStream, TcpStream)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let connect = move || {
        let (near, _) = listener.accept().unwrap();
        let far = TcpStream::connect(root).unwrap();
        for (a, b, bytes) in [(&near, &far, bytes), (&far, &near, u64::MAX)] {
            let (from, mut to) = (a.try_clone().unwrap(), b.try_clone().unwrap());
            let mut ends = (near.try_clone().unwrap(), far.try_clone().unwrap());
            thread::spawn(move || {
                let _ = std::io::copy(&mut from.take(bytes), &mut to);
                cut(&mut ends);
            });
        }
        (near, far)
    };
    (address, thread::spawn(connect))
}

fn cut((near, far): &mut (TcpStream, TcpStream)) {
    // Both may be gone already.
    let _ = near.shutdown(std::net::Shutdown::Both);
    let _ = far.shutdown(std::net::Shutdown::Both);
}

#[test]
fn one_rank_needs_no_socket() {
    let root = "192.0.2.1:1".parse().unwrap();
    let secret = Secret::generate().unwrap();
    let config = BootstrapConfig { rank: Rank(0), size: 1, root, secret, deadline: SHORT };
    let alone = Bootstrap::connect(&config).unwrap();
    assert_eq!(alone.allgather(b"x").unwrap(), [b"x"]);
    assert_eq!(alone.broadcast(b"y").unwrap(), b"y");
    alone.barrier().unwrap();
    alone.abort("enough");
    assert!(matches!(alone.barrier(), Err(BootstrapError::Aborted { rank: Rank(0), .. })));
}

#[test]
fn allgather_of_empty_short_and_uneven_parts() {
    let gathered = Job::new(4, AMPLE).run(|b| {
        let rank = b.rank().0;
        let empty = b.allgather(&[]).unwrap();
        let uneven = b.allgather(&vec![rank as u8; rank as usize * 1000]).unwrap();
        let from_root = b.broadcast(format!("by {rank}").as_bytes()).unwrap();
        b.barrier().unwrap();
        b.close().unwrap();
        (empty, uneven, from_root)
    });
    for (empty, uneven, from_root) in gathered {
        assert_eq!(empty, vec![Vec::<u8>::new(); 4]);
        assert!(uneven.iter().enumerate().all(|(r, part)| *part == vec![r as u8; r * 1000]));
        assert_eq!(from_root, b"by 0");
    }
}

#[test]
fn allgather_of_eight_mebibytes() {
    const BYTES: usize = 8 << 20;
    let part = |rank: u32| -> Vec<u8> { (0..BYTES).map(|i| (i as u32 * 31 + rank) as u8).collect() };
    let right = Job::new(3, AMPLE).run(move |b| {
        let parts = b.allgather(&part(b.rank().0)).unwrap();
        (0..3).all(|r| parts[r as usize] == part(r))
    });
    assert_eq!(right, [true; 3]);
}

#[test]
fn more_than_the_cap_is_refused_before_anything_is_sent() {
    let alone = BootstrapConfig { size: 1, ..Job::new(1, SHORT).config(0) };
    let alone = Bootstrap::connect(&alone).unwrap();
    let result = alone.allgather(&vec![0; MAX_CONTRIBUTION_BYTES as usize + 1]);
    assert!(matches!(result, Err(BootstrapError::TooLong { .. })), "{result:?}");
    alone.barrier().unwrap();
}

#[test]
fn thirty_two_ranks_make_a_hundred_calls() {
    let sums = Job::new(32, AMPLE).run(|b| {
        let mut sum = 0u64;
        for i in 0..100u32 {
            let parts = b.allgather(&(b.rank().0 * i).to_le_bytes()).unwrap();
            sum +=
                parts.iter().map(|p| u64::from(u32::from_le_bytes(p[..].try_into().unwrap()))).sum::<u64>();
        }
        b.close().map(|()| sum)
    });
    let expected = (0..100).map(|i| i * (31 * 32 / 2)).sum::<u64>();
    for sum in sums {
        // A rank that has its last result may leave while others are still reading theirs.
        assert_eq!(sum.unwrap(), expected);
    }
}

#[test]
fn a_wrong_secret_is_refused_on_both_sides() {
    let mut job = Job::new(2, SHORT);
    let impostor = BootstrapConfig { secret: Secret::new("guess").unwrap(), ..job.config(1) };
    let root = job.start(0, drop);
    let refused = Bootstrap::connect(&impostor).unwrap_err();
    assert!(
        matches!(refused, BootstrapError::Refused { refusal: Refusal::Secret { rank: 1 }, .. }),
        "{refused}"
    );
    assert!(refused.to_string().contains("FUSELINK_SECRET"), "{refused}");
    let missing = root.join().unwrap().unwrap_err();
    let BootstrapError::Timeout { call: Waiting::Connect, missing: ranks, turned_away, .. } = &missing else {
        panic!("{missing}");
    };
    assert_eq!((ranks.as_slice(), turned_away.len()), (&[Rank(1)][..], 1));
    assert!(missing.to_string().contains("another job secret"), "{missing}");
}

#[test]
fn a_wrong_size_ends_the_job_on_both_sides() {
    let mut job = Job::new(3, AMPLE);
    let odd = BootstrapConfig { size: 4, ..job.config(1) };
    let root = job.start(0, drop);
    let refused = Bootstrap::connect(&odd).unwrap_err();
    let size = Refusal::Size { rank: 1, root: 3, peer: 4 };
    assert!(matches!(&refused, BootstrapError::Refused { refusal, .. } if *refusal == size), "{refused}");
    let at_root = root.join().unwrap().unwrap_err();
    assert!(matches!(&at_root, BootstrapError::RefusedPeer { refusal, .. } if *refusal == size), "{at_root}");
}

#[test]
fn a_rank_that_comes_twice_ends_the_job_everywhere() {
    let mut job = Job::new(3, AMPLE);
    let root = job.start(0, drop);
    let (first, second) = (job.start(1, drop), job.start(1, drop));
    let at_root = root.join().unwrap().unwrap_err();
    let twice = Refusal::DuplicateRank { rank: 1 };
    assert!(
        matches!(&at_root, BootstrapError::RefusedPeer { refusal, .. } if *refusal == twice),
        "{at_root}"
    );
    let mut ends = [first, second].map(|t| t.join().unwrap().unwrap_err());
    if matches!(ends[0], BootstrapError::Aborted { .. }) {
        ends.reverse();
    }
    assert!(matches!(&ends[0], BootstrapError::Refused { refusal, .. } if *refusal == twice), "{}", ends[0]);
    let BootstrapError::Aborted { rank: Rank(0), reason } = &ends[1] else { panic!("{}", ends[1]) };
    assert!(reason.contains("rank 1 has come twice"), "{reason}");
}

#[test]
fn a_wrong_version_is_refused_with_both_versions() {
    let mut job = Job::new(2, AMPLE);
    let root = job.start(0, |b| b.barrier());
    let mut stream = TcpStream::connect(job.root).unwrap();
    send(&mut stream, &greeting(PROTOCOL_VERSION + 1, 1, 2));
    let answer = receive(&mut stream);
    assert_eq!(answer[..8], *b"fuselink");
    assert_eq!(answer[8..12], PROTOCOL_VERSION.to_le_bytes());
    assert_eq!(answer[12..14], [4, 1], "a verdict: wrong version");
    // The right one still gets in.
    job.start(1, |b| b.barrier()).join().unwrap().unwrap().unwrap();
    root.join().unwrap().unwrap().unwrap();
}

#[test]
fn a_root_of_another_version_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let config = BootstrapConfig { root: listener.local_addr().unwrap(), ..Job::new(2, AMPLE).config(1) };
    let peer = thread::spawn(move || Bootstrap::connect(&config));
    let (mut stream, _) = listener.accept().unwrap();
    receive(&mut stream);
    let mut hello = greeting(PROTOCOL_VERSION + 1, 0, 2);
    hello[12] = 2;
    send(&mut stream, &hello);
    let error = peer.join().unwrap().unwrap_err();
    let version = Refusal::Version { root: PROTOCOL_VERSION + 1, peer: PROTOCOL_VERSION };
    assert!(matches!(&error, BootstrapError::Refused { refusal, .. } if *refusal == version), "{error}");
}

#[test]
fn another_program_at_the_root_address_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let config = BootstrapConfig { root: listener.local_addr().unwrap(), ..Job::new(2, AMPLE).config(1) };
    let peer = thread::spawn(move || Bootstrap::connect(&config));
    let (mut stream, _) = listener.accept().unwrap();
    stream.write_all(b"SSH-2.0-OpenSSH_9.6\r\n").unwrap();
    let error = peer.join().unwrap().unwrap_err();
    assert!(matches!(error, BootstrapError::Refused { refusal: Refusal::NotFuselink { .. }, .. }), "{error}");
}

#[test]
fn garbage_and_silence_at_the_door_hold_nobody_up() {
    let mut job = Job::new(3, AMPLE);
    let root = job.start(0, |b| b.allgather(b"0").unwrap());
    let mut callers: Vec<_> = (0..20).map(|_| TcpStream::connect(job.root).unwrap()).collect();
    let mut noise = [0u8; 4096];
    getrandom::fill(&mut noise).unwrap();
    for (i, caller) in callers.iter_mut().enumerate() {
        // The rest say nothing. Rank 0 may have hung up on the talkers already.
        let _ = match i % 4 {
            0 => caller.write_all(&noise),
            1 => caller.write_all(&u32::MAX.to_le_bytes()),
            2 => caller.write_all(&60u32.to_le_bytes()[..2]),
            _ => Ok(()),
        };
    }
    let started = Instant::now();
    let others = [1, 2].map(|r| job.start(r, move |b| b.allgather(&[b'0' + r as u8]).unwrap()));
    let expected = [b"0", b"1", b"2"];
    assert!(others.into_iter().all(|t| t.join().unwrap().unwrap() == expected));
    assert_eq!(root.join().unwrap().unwrap(), expected);
    assert!(started.elapsed() < AMPLE / 2);
    drop(callers);
}

#[test]
fn a_rank_that_never_comes_is_named_by_all() {
    let mut job = Job::new(4, SHORT);
    let ranks = [0, 1, 3].map(|r| job.start(r, drop));
    for rank in ranks {
        let error = rank.join().unwrap().unwrap_err();
        match &error {
            BootstrapError::Timeout { call: Waiting::Connect, missing, .. } => {
                assert_eq!(missing, &[Rank(2)])
            }
            BootstrapError::Aborted { reason, .. } => {
                assert!(reason.contains("rank 2 has not come"), "{reason}")
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn a_root_that_never_comes_is_named() {
    let job = Job::new(2, SHORT);
    let config = job.config(1);
    drop(job);
    let error = Bootstrap::connect(&config).unwrap_err();
    assert!(matches!(error, BootstrapError::Connect { .. }), "{error}");
    assert!(error.to_string().contains(&config.root.to_string()), "{error}");
}

#[test]
fn a_rank_missing_from_a_collective_is_named_by_all() {
    let mut job = Job::new(3, SHORT);
    let (done, wait) = channel::<()>();
    let idle = job.start(2, move |b| {
        let _ = wait.recv();
        b.barrier().unwrap_err()
    });
    let ranks = [0, 1].map(|r| job.start(r, |b| b.allgather(b"x").unwrap_err()));
    for rank in ranks {
        let error = rank.join().unwrap().unwrap();
        match &error {
            BootstrapError::Timeout { call, missing, .. } => {
                assert_eq!(*call, Waiting::Collective { call: Call::Allgather, seq: 0 });
                assert_eq!(missing, &[Rank(2)]);
            }
            BootstrapError::Aborted { reason, .. } => {
                assert!(reason.contains("rank 2 has not come"), "{reason}")
            }
            other => panic!("{other}"),
        }
    }
    drop(done);
    assert!(matches!(idle.join().unwrap().unwrap(), BootstrapError::Aborted { .. }));
}

#[test]
fn mismatched_calls_are_an_error_and_no_hang() {
    let errors = Job::new(3, AMPLE).run(|b| match b.rank().0 {
        1 => b.barrier().unwrap_err(),
        _ => b.allgather(b"x").unwrap_err(),
    });
    let text: Vec<_> = errors.iter().map(ToString::to_string).collect();
    assert!(text.iter().all(|t| t.contains("barrier") && t.contains("allgather")), "{text:?}");
}

#[test]
fn a_rank_that_dies_before_a_call_fails_it_everywhere() {
    let mut job = Job::new(4, AMPLE);
    let (relay, connected) = relay_to(job.root, u64::MAX);
    let dying = BootstrapConfig { root: relay, ..job.config(2) };
    let (met, has_met) = channel();
    let dying = thread::spawn(move || {
        let b = Bootstrap::connect(&dying).unwrap();
        met.send(()).unwrap();
        await_failure(&b)
    });
    let ranks = [0, 1, 3].map(|r| {
        job.start(r, |b| {
            let flag = b.failure_flag();
            let told = await_failure(&b);
            assert!(flag.load(Ordering::Acquire));
            (told, b.allgather(b"x").unwrap_err(), b.failure())
        })
    });
    has_met.recv_timeout(AMPLE).unwrap();
    cut(&mut connected.join().unwrap());
    for rank in ranks {
        let (told, later, polled) = rank.join().unwrap().unwrap();
        assert_died(&told, 2);
        assert_died(&later, 2);
        assert_died(&polled.unwrap(), 2);
    }
    assert_died(&dying.join().unwrap(), 0);
}

#[test]
fn a_rank_that_dies_in_the_middle_of_its_part_fails_the_call_everywhere() {
    let mut job = Job::new(3, AMPLE);
    let (relay, _connected) = relay_to(job.root, 1 << 20);
    let dying = BootstrapConfig { root: relay, ..job.config(1) };
    let dying = thread::spawn(move || {
        let b = Bootstrap::connect(&dying).unwrap();
        // Ends well if the system holds all of its part by then.
        drop(b.allgather(&[1; 8 << 20]));
        await_failure(&b)
    });
    let ranks = [0, 2].map(|r| job.start(r, |b| b.allgather(&[2; 1000]).map(drop).unwrap_err()));
    for rank in ranks {
        assert_died(&rank.join().unwrap().unwrap(), 1);
    }
    assert_died(&dying.join().unwrap(), 0);
}

/// Starts a process that is a rank of the job. As rank 0 it inherits the listening socket as its standard input.
fn start_process(job: &mut Job, rank: u32) -> Child {
    let listener = if rank == 0 { job.listener.take() } else { None };
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_rank", "--ignored", "--nocapture"])
        .env("TEST_CHILD", format!("{rank} {} {} {}", job.size, job.root, job.secret.expose()))
        .stdin(listener.map_or(Stdio::null(), |l| OwnedFd::from(l).into()))
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
#[ignore = "the process that a_killed_process_is_named_by_all_others starts and kills"]
fn child_rank() {
    let job = std::env::var("TEST_CHILD").expect("set by a_killed_process_is_named_by_all_others");
    let [rank, size, root, secret] = job.split(' ').collect::<Vec<_>>()[..] else { panic!("{job}") };
    let config = BootstrapConfig {
        rank: Rank(rank.parse().unwrap()),
        size: size.parse().unwrap(),
        root: root.parse().unwrap(),
        secret: Secret::new(secret).unwrap(),
        deadline: AMPLE,
    };
    let inherited = || std::io::stdin().as_fd().try_clone_to_owned().unwrap().into();
    let b = meet(&config, (rank == "0").then(inherited)).unwrap();
    b.barrier().unwrap();
    panic!("not killed, but {}", await_failure(&b));
}

#[test]
fn a_killed_process_is_named_by_all_others() {
    for victim in [0, 2] {
        let mut job = Job::new(3, AMPLE);
        let mut child = start_process(&mut job, victim);
        let (ready, is_ready) = channel();
        let ranks: Vec<_> = (0..3)
            .filter(|r| *r != victim)
            .map(|r| {
                let ready = ready.clone();
                job.start(r, move |b| {
                    b.barrier().unwrap();
                    ready.send(()).unwrap();
                    b.allgather(b"x").unwrap_err()
                })
            })
            .collect();
        (0..2).for_each(|_| is_ready.recv_timeout(AMPLE).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        for rank in ranks {
            assert_died(&rank.join().unwrap().unwrap(), victim);
        }
    }
}

#[test]
fn an_abort_reaches_everybody_with_its_reason() {
    for origin in [0, 2] {
        let errors = Job::new(4, AMPLE).run(move |b| {
            b.barrier().unwrap();
            if b.rank().0 == origin {
                b.abort("GPU fell off\nthe bus");
            }
            (b.barrier().unwrap_err(), b.close().unwrap_err())
        });
        for (pending, at_close) in errors {
            for error in [pending, at_close] {
                let BootstrapError::Aborted { rank, reason } = error else { panic!("{error}") };
                assert_eq!((rank, reason.as_str()), (Rank(origin), "GPU fell off the bus"));
            }
        }
    }
}

#[test]
fn a_clean_close_is_no_death() {
    let mut job = Job::new(3, AMPLE);
    let (gone, is_gone) = channel();
    let leaver = job.start(2, move |b| {
        b.barrier().unwrap();
        drop(b);
        gone.send(()).unwrap();
    });
    let stay = [0, 1].map(|r| {
        job.start(r, |b| {
            b.barrier().unwrap();
            let missed = b.barrier().unwrap_err();
            (missed, b.failure().is_none())
        })
    });
    is_gone.recv_timeout(AMPLE).unwrap();
    leaver.join().unwrap().unwrap();
    for rank in stay {
        let (missed, alive) = rank.join().unwrap().unwrap();
        assert!(alive);
        // Rank 1 may find that rank 0 has left by then, after its own error.
        assert!(matches!(missed, BootstrapError::PeerLeft { rank: Rank(0 | 2), .. }), "{missed}");
    }
}

#[test]
fn a_rank_out_of_range_is_refused_at_once() {
    let config = BootstrapConfig { rank: Rank(2), ..Job::new(2, AMPLE).config(0) };
    assert!(matches!(Bootstrap::connect(&config), Err(BootstrapError::Place { rank: Rank(2), size: 2 })));
    let job = Job::new(2, AMPLE);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    assert!(matches!(
        Bootstrap::listen(&job.config(1), listener),
        Err(BootstrapError::NotRoot { rank: Rank(1) })
    ));
}
