//! [`Demand`] -> [`Schedule`] -> [`PlanTable`]. Pure: no clock, no threads, no I/O, integers only, so that every rank
//! computes the same plan from the same matrix, bit for bit.
//!
//! A [`Schedule`] is an ordered list of transfers between servers. Every server does its sends in list order and its
//! receives in list order, one at a time; a transfer starts when both sides are free. One list orders all, so there
//! is no barrier, no incast and no deadlock. How it comes about:
//!
//! 1. `sums`: the demand seen from above, server to server.
//! 2. `orders`: a method puts the pairs of servers (or parts of them) in order; the least predicted cost wins.
//! 3. `rails`, `balance`, `tile`: the bytes of each pair are dealt to NICs in proportion to their rates, so that few
//!    of them cross scale-up on either side.
//! 4. [`PlanTable`]: what one rank does, in the layout that kernels walk.
//!
//! [`replay`] prices a schedule from its pieces alone and shares no code with the steps above.

#![forbid(unsafe_code)]

mod balance;
mod birkhoff;
mod bits;
mod bound;
mod cells;
mod compile;
mod cost;
mod demand;
mod direct;
mod error;
mod list;
mod loose;
mod method;
mod openshop;
mod orders;
mod pipeline;
mod planner;
mod rails;
mod random;
mod repair;
mod replay;
mod rounds;
mod schedule;
mod spray;
mod spreadout;
mod steps;
mod sums;
mod table;
mod tile;

pub use bound::Bound;
pub use cells::LocalDemand;
pub use cost::CostModel;
pub use demand::{Demand, ExpertLoads, MAX_TOTAL_BYTES, RouterTrace, SyntheticMoe};
pub use error::{DemandError, PlanError, TableError};
pub use method::Method;
pub use pipeline::Pipeline;
pub use planner::{Planned, Planner, Request};
pub use replay::{Replay, Span, replay};
pub use schedule::{Piece, Schedule, schedule};
pub use sums::ServerSums;
pub use table::{PlanTable, plan_lane, put_lane};
