//! The engine in virtual time: the very code that the proxy runs, on links that are shared max-min fairly, one thread, no
//! host. Paper-scale results come from here; the same input gives the same result, to the nanosecond.
//!
//! - [`fluid`]: links and flows.
//! - [`world`]: servers, NICs, kernels and proxies around the engines.
//! - [`experiments`]: what the papers measured, as functions that return rows.

pub mod campaign;
pub mod experiments;
pub mod fluid;
mod machine;
pub mod world;
