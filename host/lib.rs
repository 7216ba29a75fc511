//! GPU-initiated transport over every NIC of a server, and a scheduler for skewed all-to-all(v).
//!
//! Read in this order: [`topo`] (machines), [`plan`] (schedules), [`engine`] (one message), [`hw`] (what a machine
//! must do), [`emu`] (a machine made of memory and time), [`comm`] (the objects that users hold). docs/design.md has
//! the picture.

pub mod abi;
pub mod comm;
pub mod error;
pub mod hw;
pub mod plan;
pub mod topo;

pub use error::Error;
