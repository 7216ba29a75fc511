//! Who holds which relay memory: the two ends of one lot, as state machines. [`Lender`] is the owner of a GPU, whose memory
//! is capped; [`Borrowings`] is a rank that would send and receive by its NICs.
//!
//! ```text
//! borrower   Absent -> Asked ----> Offered -> Lent -> Recalled -> Absent
//!                 \ ask  / lent              ^           \ returned: nothing uses it, nothing maps it
//! lender     Free -> Making -----> Lent -------> Recalled -> Freeing -> Free
//! ```
//!
//! Each ask has a number, and every word about a lot bears it, so that a word that comes late is known as such. Words
//! between two ranks are not lost and stay in order; nothing is assumed of how they meet.

mod borrowings;
mod lender;
#[cfg(test)]
mod tests;

pub use borrowings::{Borrowings, Recall};
pub use lender::{Answer, Lender, Made, Refusal, RelayCounters};
