//! Ranks as threads, real descriptors.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::channel;
use std::thread;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{FdFlags, fcntl_getfd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::packet::{Kind, Packet};
use super::*;

const AMPLE: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(400);

#[derive(Clone)]
struct Server(LocalConfig);

impl Server {
    fn new(local_size: u32, deadline: Duration) -> Self {
        let secret = Secret::generate().unwrap();
        Self(LocalConfig { server: 0, local_rank: 0, local_size, job: "test".into(), secret, deadline })
    }

    fn config(&self, local_rank: u32) -> LocalConfig {
        LocalConfig { local_rank, ..self.0.clone() }
    }

    fn start<T: Send + 'static>(
        &self,
        rank: u32,
        run: impl FnOnce(LocalGroup) -> T + Send + 'static,
    ) -> thread::JoinHandle<Result<T, LocalError>> {
        let config = self.config(rank);
        thread::spawn(move || LocalGroup::connect(&config).map(run))
    }

    fn run<T: Send + 'static>(&self, run: impl Fn(LocalGroup) -> T + Clone + Send + 'static) -> Vec<T> {
        let ranks: Vec<_> = (0..self.0.local_size).map(|r| self.start(r, run.clone())).collect();
        ranks.into_iter().map(|r| r.join().unwrap().unwrap()).collect()
    }
}

fn memfd(text: &str) -> File {
    let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
    file.write_all_at(text.as_bytes(), 0).unwrap();
    file
}

fn read(file: &File, bytes: usize, offset: u64) -> String {
    let mut text = vec![0; bytes];
    file.read_exact_at(&mut text, offset).unwrap();
    String::from_utf8(text).unwrap()
}

#[test]
fn each_side_writes_what_the_others_read() {
    Server::new(4, AMPLE).run(|group| {
        let me = group.local_rank();
        let mine: Vec<_> = (0..2).map(|i| memfd(&format!("{me}.{i} from owner"))).collect();
        let fds: Vec<_> = mine.iter().map(AsFd::as_fd).collect();
        let all = group.allgather_fds(&fds, &me.to_le_bytes()).unwrap();
        assert_eq!(all.len(), 4);
        let all: Vec<Vec<File>> = all
            .into_iter()
            .enumerate()
            .map(|(rank, (fds, bytes))| {
                assert_eq!(bytes, (rank as u32).to_le_bytes());
                assert!(fds.iter().all(|fd| fcntl_getfd(fd).unwrap().contains(FdFlags::CLOEXEC)));
                fds.into_iter().map(File::from).collect()
            })
            .collect();
        for (rank, files) in all.iter().enumerate() {
            for (i, file) in files.iter().enumerate() {
                assert_eq!(read(file, 14, 0), format!("{rank}.{i} from owner"));
                file.write_all_at(&[b'a' + me as u8], 100 + u64::from(me)).unwrap();
            }
        }
        group.allgather_fds(&[], &[]).unwrap();
        assert!(
            mine.iter().all(|file| read(file, 4, 100) == "abcd"),
            "every rank has written to the same memory"
        );
    });
}

#[test]
fn three_hundred_descriptors_keep_their_order() {
    // Three ranks in one process hold what three processes would.
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    Server::new(3, AMPLE).run(|group| {
        // Rank r gives 0, 300 or 253 descriptors, of two memories by turns.
        let count = [0, 300, 253][group.local_rank() as usize];
        let two = [memfd("even"), memfd("odd!")];
        let fds: Vec<_> = (0..count).map(|i| two[i % 2].as_fd()).collect();
        let all = group.allgather_fds(&fds, &[7; 100_000]).unwrap();
        for ((fds, bytes), count) in all.into_iter().zip([0, 300, 253]) {
            assert_eq!((fds.len(), bytes.len()), (count, 100_000));
            for (i, fd) in fds.into_iter().enumerate() {
                assert_eq!(read(&File::from(fd), 4, 0), ["even", "odd!"][i % 2]);
            }
        }
    });
}

#[test]
fn one_rank_and_many_calls() {
    let alone = LocalGroup::connect(&Server::new(1, SHORT).config(0)).unwrap();
    let file = memfd("x");
    assert_eq!(alone.allgather_fds(&[file.as_fd()], b"y").unwrap()[0].0.len(), 1);
    let sums = Server::new(8, AMPLE).run(|group| {
        let call = |i: u32| group.allgather_fds(&[], &(i + group.local_rank()).to_le_bytes()).unwrap();
        let sum = |i| call(i).iter().map(|(_, b)| u32::from_le_bytes(b[..].try_into().unwrap())).sum::<u32>();
        (0..200).map(sum).sum::<u32>()
    });
    assert_eq!(sums, [(0..200).map(|i| 8 * i + 28).sum::<u32>(); 8]);
}

#[test]
fn servers_of_one_host_do_not_meet() {
    let first = Server::new(2, AMPLE);
    let second = Server(LocalConfig { server: 1, ..first.0.clone() });
    let give =
        |text: &'static [u8]| move |group: LocalGroup| group.allgather_fds(&[], text).unwrap()[0].1.clone();
    let (a, b) = (
        thread::spawn(move || first.run(give(b"first"))),
        thread::spawn(move || second.run(give(b"second"))),
    );
    assert_eq!(a.join().unwrap(), [b"first", b"first"]);
    assert_eq!(b.join().unwrap(), [b"second", b"second"]);
}

#[test]
fn a_wrong_secret_finds_no_meeting_place() {
    let server = Server::new(2, SHORT);
    let root = server.start(0, drop);
    let wrong = LocalConfig { secret: Secret::new("guess").unwrap(), ..server.config(1) };
    let error = LocalGroup::connect(&wrong).unwrap_err();
    assert!(matches!(error, LocalError::Connect { .. }), "{error}");
    assert!(error.to_string().contains("FUSELINK_SECRET"), "{error}");
    let missing = root.join().unwrap().unwrap_err();
    assert!(matches!(&missing, LocalError::Timeout { missing, .. } if missing == &[1]), "{missing}");
}

#[test]
fn a_wrong_secret_at_the_right_place_is_refused_on_both_sides() {
    let server = Server::new(2, SHORT);
    let root = server.start(0, drop);
    let wrong = LocalConfig { secret: Secret::new("guess").unwrap(), ..server.config(1) };
    let error = meet::meet(&wrong, &meet::name(&server.0)).unwrap_err();
    assert!(matches!(error, LocalError::Refused { refusal: Refusal::Secret { rank: 1 }, .. }), "{error}");
    let missing = root.join().unwrap().unwrap_err();
    assert!(missing.to_string().contains("another job secret"), "{missing}");
}

/// The peer's and rank 0's errors name the same reason.
#[track_caller]
fn assert_refused(peer: &LocalError, root: &LocalError, expected: &Refusal) {
    assert!(matches!(peer, LocalError::Refused { refusal, .. } if refusal == expected), "{peer}");
    assert!(matches!(root, LocalError::RefusedPeer { refusal, .. } if refusal == expected), "{root}");
}

#[test]
fn a_wrong_size_is_refused_on_both_sides() {
    let server = Server::new(3, AMPLE);
    let root = server.start(0, drop);
    let peer = LocalGroup::connect(&LocalConfig { local_size: 4, ..server.config(1) }).unwrap_err();
    assert_refused(&peer, &root.join().unwrap().unwrap_err(), &Refusal::Size { rank: 1, root: 3, peer: 4 });
}

#[test]
fn a_rank_that_comes_twice_is_refused_on_both_sides() {
    let server = Server::new(3, AMPLE);
    let root = server.start(0, drop);
    let ends = [server.start(1, drop), server.start(1, drop)].map(|t| t.join().unwrap().unwrap_err());
    let refused =
        ends.iter().find(|e| matches!(e, LocalError::Refused { .. })).expect("one of the two is refused");
    assert_refused(refused, &root.join().unwrap().unwrap_err(), &Refusal::DuplicateRank { rank: 1 });
    assert!(ends.iter().all(|e| e.to_string().contains("rank 1 has come twice")), "{ends:?}");
}

#[test]
fn hostile_packets_fail_the_call_and_name_their_sender() {
    let part =
        |rank, seq| Packet { kind: Kind::Part, last: false, rank, seq, bytes: Vec::new(), fds: Vec::new() };
    // At rank 0, from rank 1: another's name, our name, another call, a rank beyond the size, rank 0's word.
    let hostile =
        [part(2, 0), part(0, 0), part(1, 1), part(9, 0), Packet::word(Kind::Present, 1, Vec::new())];
    for packet in hostile {
        let (ours, theirs) = pair();
        packet.send(&theirs).unwrap();
        let mut peers = [Peer::new(1, ours)];
        let error =
            Exchange::new(&mut peers, 0, 3, 0, Part::own(&[], b"x").unwrap()).run(within(AMPLE)).unwrap_err();
        let LocalError::Protocol { local_rank: 1, source: PacketError::OutOfTurn { rank, seq } } = error
        else {
            panic!("{error}");
        };
        assert_eq!((rank, seq), (packet.rank, packet.seq));
    }
}

#[test]
fn parts_beyond_the_cap_fail_the_call() {
    let (ours, theirs) = pair();
    let sender = thread::spawn(move || {
        let bytes = vec![0; packet::PACKET_BYTES];
        let packet = Packet { kind: Kind::Part, last: false, rank: 1, seq: 0, bytes, fds: Vec::new() };
        let mut peer = Peer::new(0, theirs);
        loop {
            peer.out.push_back(Arc::new(packet.clone()));
            match peer.flush() {
                Ok(_) => thread::yield_now(),
                Err(e) => return e,
            }
        }
    });
    let mut peers = vec![Peer::new(1, ours)];
    let error =
        Exchange::new(&mut peers, 0, 2, 0, Part::own(&[], &[]).unwrap()).run(within(AMPLE)).unwrap_err();
    assert!(matches!(error, LocalError::Protocol { local_rank: 1, .. }), "{error}");
    drop(peers);
    assert!(matches!(sender.join().unwrap(), LocalError::Gone { local_rank: 0 }));
}

fn pair() -> (OwnedFd, OwnedFd) {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

#[test]
fn two_roots_are_one_too_many() {
    let server = Server::new(2, AMPLE);
    let (tell, ends) = channel();
    for _ in 0..2 {
        let (tell, config) = (tell.clone(), server.config(0));
        thread::spawn(move || tell.send(LocalGroup::connect(&config)).unwrap());
    }
    // The second finds the first, which cannot be done before its peer has come.
    let second = ends.recv_timeout(AMPLE).unwrap();
    assert!(matches!(second, Err(LocalError::Listen { .. })), "{second:?}");
    server.start(1, drop).join().unwrap().unwrap();
    ends.recv_timeout(AMPLE).unwrap().unwrap();
}

#[test]
fn a_rank_that_never_comes_is_named_by_all() {
    let server = Server::new(4, SHORT);
    let ranks = [0, 1, 3].map(|r| server.start(r, drop));
    for rank in ranks {
        let error = rank.join().unwrap().unwrap_err();
        match &error {
            LocalError::Timeout { missing, .. } => assert_eq!(missing, &[2]),
            LocalError::Failed { reason, .. } => {
                assert!(reason.contains("local ranks 2 have not come"), "{reason}")
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn a_rank_missing_from_a_call_is_named_by_all() {
    let server = Server::new(3, SHORT);
    let (done, wait) = channel::<()>();
    let idle = server.start(2, move |group| {
        let _ = wait.recv();
        group.allgather_fds(&[], &[]).unwrap_err()
    });
    let ranks = [0, 1].map(|r| server.start(r, |group| group.allgather_fds(&[], b"x").unwrap_err()));
    for rank in ranks {
        let error = rank.join().unwrap().unwrap();
        match &error {
            LocalError::Timeout { missing, .. } => assert_eq!(missing, &[2]),
            LocalError::Failed { reason, .. } => {
                assert!(reason.contains("local ranks 2 have not come"), "{reason}")
            }
            other => panic!("{other}"),
        }
    }
    drop(done);
    idle.join().unwrap().unwrap();
}

#[test]
fn a_rank_that_goes_fails_the_call_everywhere_and_for_good() {
    let server = Server::new(3, AMPLE);
    let ranks = [0, 1, 2].map(|r| {
        server.start(r, move |group| {
            group.allgather_fds(&[], &[]).unwrap();
            if r == 2 {
                return None;
            }
            let first = group.allgather_fds(&[], &[]).unwrap_err();
            Some((first, group.allgather_fds(&[], &[]).unwrap_err()))
        })
    });
    let ends = ranks.map(|r| r.join().unwrap().unwrap());
    for (first, later) in ends.into_iter().flatten() {
        assert!(matches!(first, LocalError::Gone { local_rank: 2 }), "{first}");
        assert!(matches!(later, LocalError::Gone { local_rank: 2 }), "{later}");
    }
}

#[test]
fn a_root_that_goes_is_named() {
    let server = Server::new(3, AMPLE);
    let ranks = [0, 1, 2].map(|r| {
        server.start(
            r,
            move |group| if r == 0 { None } else { Some(group.allgather_fds(&[], &[]).unwrap_err()) },
        )
    });
    let ends = ranks.map(|r| r.join().unwrap());
    for end in ends {
        match end {
            Ok(None) => {}
            Ok(Some(error)) | Err(error) => {
                assert!(matches!(error, LocalError::Gone { local_rank: 0 }), "{error}")
            }
        }
    }
}

#[test]
fn more_than_the_cap_is_refused_before_anything_is_sent() {
    let alone = LocalGroup::connect(&Server::new(1, SHORT).config(0)).unwrap();
    let file = memfd("");
    let too_many = vec![file.as_fd(); MAX_FDS + 1];
    assert!(matches!(alone.allgather_fds(&too_many, &[]), Err(LocalError::TooMuch { .. })));
    alone.allgather_fds(&[], &[]).unwrap();
}
