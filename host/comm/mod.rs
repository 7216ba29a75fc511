//! What users hold, and how ranks find each other.

pub mod bootstrap;
mod handshake;
mod join;
pub mod local;
pub mod secret;
pub mod settings;
mod wake;
