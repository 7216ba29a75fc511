//! Memory that is taken from a NIC while it runs.

use super::pair::{Driver, End, Message, NicPair};
use crate::hw::{HwError, NicEvent, WorkError, WorkOp};

const BYTES: u32 = 4096;

fn message(imm: u32) -> Message {
    Message { offset: 0, bytes: BYTES, imm }
}

/// One message from A to B, seen at both ends.
fn carry<P: NicPair>(d: &mut Driver<P>, imm: u32) {
    let before = [End::A, End::B].map(|end| d.events(end).len());
    d.post_all(End::A, &[d.write(End::A, message(imm))]);
    d.poll_until(End::A, before[0] + 1);
    d.poll_until(End::B, before[1] + 1);
    assert_eq!(d.events(End::A)[before[0]], NicEvent::Completed { cookie: imm.into(), result: Ok(()) });
}

/// Slots are registered while others send.
pub fn memory_registered_by_another_thread_carries<P: NicPair>(pair: &mut P) {
    pair.register_again(End::A);
    pair.register_again(End::B);
    let mut d = Driver::new(pair);
    d.fill(End::A, 0, BYTES as usize, 7);
    carry(&mut d, 1);
    assert_eq!(d.bytes(End::B, 0, BYTES as usize), [7; BYTES as usize]);
}

/// Bytes of another owner of the memory would be sent.
pub fn a_key_that_was_taken_back_is_refused<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    carry(&mut d, 1);
    let late = d.write(End::A, message(2));
    d.pair.deregister(End::A);
    let result = d.post(End::A, &[late]);
    assert!(matches!(result, Err(HwError::BadWork { .. })), "{result:?}");
    d.pair.register_again(End::A);
    let result = d.post(End::A, &[late]);
    assert!(matches!(result, Err(HwError::BadWork { .. })), "an old key was used again: {result:?}");
    carry(&mut d, 3);
}

/// A late write would land in memory that belongs to somebody else by now.
pub fn a_write_to_memory_that_was_taken_back_fails<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    d.fill(End::A, 0, BYTES as usize, 1);
    carry(&mut d, 1);
    d.pair.deregister(End::B);
    d.fill(End::A, 0, BYTES as usize, 2);
    let (sent, arrived) = (d.events(End::A).len(), d.events(End::B).len());
    d.post_all(End::A, &[d.write(End::A, message(2))]);
    d.poll_until(End::A, sent + 1);
    let refused = NicEvent::Completed { cookie: 2, result: Err(WorkError::RemoteAccess) };
    assert_eq!(d.events(End::A)[sent], refused);
    d.settle();
    let told = d.events(End::B)[arrived..].iter().any(|e| matches!(e, NicEvent::Arrived { .. }));
    assert!(!told, "an arrival of a write that was refused");
    assert_eq!(d.bytes(End::B, 0, BYTES as usize), [1; BYTES as usize]);
}

/// The next registration must not open the old key's door.
pub fn a_key_does_not_open_what_is_registered_after_it<P: NicPair>(pair: &mut P) {
    let mut d = Driver::new(pair);
    let late = d.write(End::A, message(1));
    let old = d.pair.remote(End::B);
    d.pair.deregister(End::B);
    d.pair.register_again(End::B);
    let WorkOp::Write { remote, .. } = late.op else { panic!("a write") };
    assert_eq!(remote.rkey, old.rkey);
    assert_ne!(old.rkey, d.pair.remote(End::B).rkey, "the key is used again");
    d.post_all(End::A, &[late]);
    d.poll_until(End::A, 1);
    let refused = NicEvent::Completed { cookie: 1, result: Err(WorkError::RemoteAccess) };
    assert_eq!(d.events(End::A)[0], refused);
}

/// Memory that is taken back twice would be somebody else's the second time.
pub fn a_key_is_taken_back_once<P: NicPair>(pair: &mut P) {
    use crate::hw::NicDevice;
    let key = pair.key(End::A);
    let mut registrar = pair.nic(End::A).registrar();
    registrar.deregister(key).expect("it is there");
    let again = registrar.deregister(key);
    assert!(matches!(again, Err(HwError::Deregister { .. })), "{again:?}");
}
