//! The thread that moves frames: all connections of a rank, none of which blocks.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::error::BootstrapError;
use super::group::Group;
use super::wire::{Decoder, Frame, HEADER_BYTES, Message, Step};
use crate::comm::wake::wait;
use crate::topo::Rank;

/// Reads in a row from one connection before others have their turn.
const TURN: usize = 16;

/// One connection.
struct Link {
    peer: u32,
    stream: TcpStream,
    decoder: Decoder,
    queue: VecDeque<Frame>,
    /// Bytes of the first frame in the queue that are sent.
    sent: usize,
    said_goodbye: bool,
    ended: bool,
}

/// Moves frames until the group is closed and everything is said.
pub(super) fn run(group: &Arc<Group>) {
    let mut io = Io { group: group.clone(), links: Vec::new() };
    while io.turn() {}
}

struct Io {
    group: Arc<Group>,
    links: Vec<Link>,
}

impl Io {
    /// One round; `false` when there is nothing left to do.
    fn turn(&mut self) -> bool {
        let closing = self.collect();
        self.flush();
        self.reap();
        if closing.is_some_and(|until| self.links.is_empty() || Instant::now() >= until) {
            return false;
        }
        match self.wait(closing) {
            Ok(ready) => ready.into_iter().for_each(|i| self.read(i)),
            Err(e) => {
                self.fail(BootstrapError::os("wait for messages")(e));
                return false;
            }
        }
        true
    }

    /// Takes over what the callers' threads have left: connections, frames, the wish to close.
    fn collect(&mut self) -> Option<Instant> {
        let mut state = self.group.lock();
        for (peer, stream) in state.joined.drain(..) {
            let (decoder, queue) = Default::default();
            self.links.push(Link {
                peer,
                stream,
                decoder,
                queue,
                sent: 0,
                said_goodbye: false,
                ended: false,
            });
        }
        let rank = self.group.rank;
        for link in &mut self.links {
            let goodbye = state.closing.is_some() || state.left[link.peer as usize];
            if goodbye && !link.said_goodbye {
                link.said_goodbye = true;
                state.tell(link.peer, &Message::Left { rank });
            }
            if let Some(outbox) = &mut state.outbox[link.peer as usize] {
                link.queue.append(outbox);
            }
        }
        state.closing
    }

    /// Writes what the connections take.
    fn flush(&mut self) {
        let mut written = Written::default();
        self.links.iter_mut().for_each(|link| link.write(&mut written));
        if written.done > 0 {
            let mut state = self.group.lock();
            state.unsent -= written.done;
            state.parts_sent += written.parts;
            drop(state);
            self.group.notify();
        }
    }

    /// Drops connections that have ended, and those on which both sides have said goodbye.
    fn reap(&mut self) {
        let mut lost = Vec::new();
        let mut state = self.group.lock();
        let closing = state.closing.is_some();
        let before = state.unsent;
        self.links.retain(|link| {
            let left = state.left[link.peer as usize];
            let finished = left && link.said_goodbye && link.queue.is_empty();
            let keep = !link.ended && !finished;
            if !keep {
                let waiting = state.outbox[link.peer as usize].take().map_or(0, |q| q.len());
                state.unsent -= link.queue.len() + waiting;
                if !left && !closing {
                    lost.push(link.peer);
                }
            }
            keep
        });
        let changed = state.unsent != before;
        drop(state);
        if changed {
            self.group.notify();
        }
        for peer in lost {
            self.fail(BootstrapError::PeerDied { rank: Rank(peer) });
        }
    }

    /// Which connections have something to read.
    fn wait(&self, until: Option<Instant>) -> io::Result<Vec<usize>> {
        let mut fds = vec![PollFd::from_borrowed_fd(AsFd::as_fd(&self.group.wake), PollFlags::IN)];
        for link in &self.links {
            let out = if link.queue.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
            fds.push(PollFd::new(&link.stream, PollFlags::IN | out));
        }
        wait(&mut fds, until)?;
        if !fds[0].revents().is_empty() {
            self.group.wake.clear();
        }
        let readable = PollFlags::IN | PollFlags::HUP | PollFlags::ERR;
        let ready = |i: &usize| fds[*i + 1].revents().intersects(readable);
        Ok((0..self.links.len()).filter(ready).collect())
    }

    /// Reads from one connection.
    fn read(&mut self, at: usize) {
        for _ in 0..TURN {
            let link = &mut self.links[at];
            let step = match link.decoder.read(&mut &link.stream, self.group.size) {
                Ok(step) => step,
                Err(source) => {
                    link.ended = true;
                    let rank = Rank(link.peer);
                    return self.fail(BootstrapError::Protocol { rank, source });
                }
            };
            match step {
                Step::Message(message) => self.handle(at, message),
                Step::Partial => {}
                Step::Blocked => return,
                Step::Ended => {
                    link.ended = true;
                    return;
                }
            }
        }
    }

    fn handle(&mut self, at: usize, message: Message) {
        let peer = self.links[at].peer;
        let mut state = self.group.lock();
        // After a failure only goodbyes matter.
        if state.has_failed() && !matches!(message, Message::Left { .. }) {
            return;
        }
        let outcome = state.handle(peer, message);
        drop(state);
        self.group.notify();
        if let Err(failure) = outcome {
            self.fail(failure);
        }
    }

    /// Fails the group. The others are written to first: once the failure is known here, this process may end.
    fn fail(&mut self, failure: BootstrapError) {
        self.group.announce(&failure);
        self.collect();
        self.flush();
        self.group.publish(failure);
    }
}

/// What a round of writing came to.
#[derive(Default)]
struct Written {
    /// Frames that need no more work.
    done: usize,
    /// Those of them that are contributions and went out.
    parts: u64,
}

impl Link {
    /// Writes until the connection takes no more.
    fn write(&mut self, written: &mut Written) {
        while let Some(frame) = self.queue.front() {
            let header = &frame.header[self.sent.min(HEADER_BYTES)..];
            let payload = &frame.payload[self.sent.saturating_sub(HEADER_BYTES)..];
            let left = header.len() + payload.len();
            let parts = [IoSlice::new(header), IoSlice::new(payload)];
            // Not a plain write: in a C program that would raise SIGPIPE.
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(&self.stream, &parts, &mut SendAncillaryBuffer::default(), flags) {
                Ok(n) if n == left => {
                    written.done += 1;
                    written.parts += u64::from(frame.is_part());
                    self.queue.pop_front();
                    self.sent = 0;
                }
                Ok(n) => self.sent += n,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => break,
                Err(_) => {
                    // What the peer said before it went is still to be read; the end is seen there.
                    written.done += self.queue.len();
                    self.queue.clear();
                    break;
                }
            }
        }
    }
}

/// Settings of a connection that lives as long as the job: small messages at once, and a silent host is noticed
/// within about the deadline.
pub(super) fn prepare(stream: &TcpStream, deadline: Duration) -> io::Result<()> {
    use rustix::net::sockopt;
    let part = |n: u32| (deadline / n).max(Duration::from_secs(1));
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, part(2))?;
    sockopt::set_tcp_keepintvl(stream, part(8))?;
    sockopt::set_tcp_keepcnt(stream, 4)?;
    let millis = u32::try_from(deadline.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(stream, millis.max(1000))?;
    Ok(())
}
