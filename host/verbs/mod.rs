//! NICs over verbs: InfiniBand and RoCE, reliable connections, one-sided writes.
//!
//! | file | holds |
//! |---|---|
//! | [`settings`] | everything that can be set, with its default and its reason |
//! | [`gid`] | which address of a RoCE port is used |
//! | [`wire`] | what two NICs tell each other: addresses and hellos |
//! | [`handshake`] | how the two ends of a path agree on their queue pairs, lazily and again after a failure |
//! | [`ledger`] | work on a queue pair of which only some is signalled |
//! | [`lanes`] | one order over several queue pairs |
//! | [`advice`] | what to do about an errno |
//!
//! The rest needs the feature `verbs`: `raw` (the only raw calls), `device`, `port`, `memory`, `queue_pair`,
//! `post`, `path`, `control`, `loopback` and `nic`, which joins them.
//!
//! **A path** is a set of `q >= 2` queue pairs between two NICs: the first carries control words, so that a credit never
//! waits behind bulk data, the others carry messages in turn. Paths cost nothing until they are used: a NIC's address, which
//! the bootstrap carries, names one datagram queue pair, and over that the two ends exchange the numbers of their queue
//! pairs when the first message is posted.

pub mod advice;
pub mod gid;
pub mod handshake;
pub mod lanes;
pub mod ledger;
pub mod settings;
pub mod wire;

#[cfg(feature = "verbs")]
mod control;
#[cfg(feature = "verbs")]
mod device;
#[cfg(feature = "verbs")]
mod loopback;
#[cfg(feature = "verbs")]
mod memory;
#[cfg(feature = "verbs")]
mod nic;
#[cfg(feature = "verbs")]
mod path;
#[cfg(feature = "verbs")]
mod port;
#[cfg(feature = "verbs")]
mod post;
#[cfg(feature = "verbs")]
mod queue_pair;
#[cfg(feature = "verbs")]
mod raw;

#[cfg(feature = "verbs")]
pub use device::{DeviceInfo, devices};
#[cfg(feature = "verbs")]
pub use nic::{PathState, VerbsNic, VerbsNicConfig, VerbsTraffic};
#[doc(hidden)]
#[cfg(feature = "verbs")]
pub use post::rehearse;
pub use settings::VerbsSettings;
