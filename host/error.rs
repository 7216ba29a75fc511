//! The library's error: one variant per failed operation, with its inputs and source.

use crate::hw::HwError;

/// What can go wrong in the library.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A hardware (or emulated) operation failed.
    #[error(transparent)]
    Hw(#[from] HwError),
}

/// Shorthand.
pub type Result<T, E = Error> = std::result::Result<T, E>;
