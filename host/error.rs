//! The library's error: one variant per failed operation, with its inputs and source.

use crate::hw::HwError;
use crate::plan::{DemandError, PlanError, TableError};
use crate::topo::TopoError;

/// What can go wrong in the library.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A hardware (or emulated) operation failed.
    #[error(transparent)]
    Hw(#[from] HwError),
    /// A machine cannot be as described.
    #[error(transparent)]
    Topo(#[from] TopoError),
    /// A demand cannot be used.
    #[error(transparent)]
    Demand(#[from] DemandError),
    /// A plan cannot be made.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A plan table is not one.
    #[error(transparent)]
    Table(#[from] TableError),
}

/// Shorthand.
pub type Result<T, E = Error> = std::result::Result<T, E>;
