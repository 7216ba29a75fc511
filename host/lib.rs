//! GPU-initiated transport over every NIC of a server, and a scheduler for skewed all-to-all(v).
//!
//! Read in this order: [`topo`] (machines), [`plan`] (schedules), [`engine`] (one message), [`hw`] (what a machine
//! must do), [`emu`] (a machine made of memory and time), [`proxy`] (the thread that joins them), [`comm`] (the
//! objects that users hold). docs/design.md has the picture.

pub mod abi;
pub mod doorbell;
pub mod ring;
pub mod topo;
pub mod words;

// Under loom only the rings are built: model checking replaces the atomics, which memory shared with others cannot.
#[cfg(not(loom))]
pub mod borrow;
#[cfg(not(loom))]
pub mod channel;
#[cfg(not(loom))]
pub mod collective;
#[cfg(not(loom))]
pub mod comm;
#[cfg(not(loom))]
pub mod credit;
#[cfg(all(feature = "cuda", not(loom)))]
pub mod cuda;
#[cfg(not(loom))]
pub mod emu;
#[cfg(not(loom))]
pub mod engine;
#[cfg(not(loom))]
pub mod error;
#[cfg(not(loom))]
pub mod hw;
#[cfg(not(loom))]
pub mod load;
#[cfg(not(loom))]
pub mod owner;
#[cfg(not(loom))]
pub mod payload;
#[cfg(not(loom))]
pub mod plan;
#[cfg(not(loom))]
pub mod proxy;
#[cfg(not(loom))]
pub mod segment;
#[cfg(not(loom))]
pub mod shm;
#[cfg(not(loom))]
pub mod signals;
#[cfg(not(loom))]
pub mod sim;
#[cfg(not(loom))]
pub mod space;
#[cfg(not(loom))]
pub mod verbs;

#[cfg(not(loom))]
pub use error::Error;
