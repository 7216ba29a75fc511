//! What can be wrong with a demand, a request for a plan, or a table. Every message names the place and the remedy.

use super::Method;
use crate::topo::{Rank, ServerId};

/// A demand that cannot be used. `place` is the file (or other source) that the caller named.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DemandError {
    /// There is nothing in it.
    #[error("{place}: no numbers in it; a demand has one row of byte counts per source rank")]
    Empty {
        /// Where.
        place: String,
    },
    /// A number of cells that no square matrix of that many ranks has.
    #[error("{place}: {cells} cells do not make a {ranks} x {ranks} matrix")]
    Shape {
        /// Where.
        place: String,
        /// Ranks that were named.
        ranks: u32,
        /// Cells that were given.
        cells: usize,
    },
    /// A row is longer or shorter than the matrix is high.
    #[error("{place}:{line}: {found} numbers in this row, but there are {rows} rows; a demand is square")]
    NotSquare {
        /// Where.
        place: String,
        /// Line, from 1.
        line: usize,
        /// Numbers in that line.
        found: usize,
        /// Rows in all.
        rows: usize,
    },
    /// Text where a byte count should be.
    #[error("{place}:{line}: {text:?} (column {column}) is not a whole number of bytes")]
    NotANumber {
        /// Where.
        place: String,
        /// Line, from 1.
        line: usize,
        /// Column of the matrix, from 1.
        column: usize,
        /// What stands there, shortened.
        text: String,
    },
    /// A byte count below zero.
    #[error("{place}:{line}: {text} (column {column}) is negative; byte counts start at 0")]
    Negative {
        /// Where.
        place: String,
        /// Line, from 1.
        line: usize,
        /// Column of the matrix, from 1.
        column: usize,
        /// What stands there, shortened.
        text: String,
    },
    /// A byte count that does not fit.
    #[error("{place}:{line}: {text} (column {column}) is above 2^63 - 1 bytes")]
    TooLarge {
        /// Where.
        place: String,
        /// Line, from 1.
        line: usize,
        /// Column of the matrix, from 1.
        column: usize,
        /// What stands there, shortened.
        text: String,
    },
    /// The cells fit, their sum does not.
    #[error("{place}: the cells add up to more than 2^63 - 1 bytes; lower them")]
    TotalTooLarge {
        /// Where.
        place: String,
    },
    /// Units of no bytes.
    #[error("{place}: the unit must be at least 1 byte")]
    ZeroUnit {
        /// Where.
        place: String,
    },
    /// A number that must not be zero is.
    #[error("{place}: {what} must be at least 1")]
    Zero {
        /// Where.
        place: String,
        /// Which number.
        what: &'static str,
    },
    /// The file is not the JSON it should be.
    #[error("{place}:{line}: {reason}")]
    Json {
        /// Where.
        place: String,
        /// Line, from 1.
        line: usize,
        /// What the parser says.
        reason: String,
    },
    /// A layer that the file does not have.
    #[error("{place}: no layer {layer}: the file has layers {}", Layers(*.layers))]
    NoLayer {
        /// Where.
        place: String,
        /// The layer asked for.
        layer: usize,
        /// How many there are, numbered from 0.
        layers: usize,
    },
    /// Experts cannot be placed in equal blocks.
    #[error(
        "{place}: {experts} experts do not divide over {ranks} ranks; choose servers x GPUs that divides {experts}"
    )]
    ExpertsDoNotDivide {
        /// Where.
        place: String,
        /// Experts in the file.
        experts: usize,
        /// Ranks of the cluster.
        ranks: u32,
    },
    /// An expert load that counts no tokens.
    #[error("{place}: layer {layer}, expert {expert}: {value} is not a whole number of tokens")]
    BadLoad {
        /// Where.
        place: String,
        /// Layer.
        layer: usize,
        /// Expert.
        expert: usize,
        /// What stands there.
        value: String,
    },
    /// No expert of the layer has seen a token.
    #[error("{place}: layer {layer} has no load; choose another layer")]
    NoLoad {
        /// Where.
        place: String,
        /// Layer.
        layer: usize,
    },
    /// A router record of a rank that the cluster does not have.
    #[error("{place}:{line}: rank {rank}, but the cluster has {ranks} ranks")]
    NoRank {
        /// Where.
        place: String,
        /// Line, from 1.
        line: usize,
        /// The record's rank.
        rank: u64,
        /// Ranks of the cluster.
        ranks: u32,
    },
    /// A token is routed to an expert that does not exist.
    #[error("{place}:{line}: expert {expert}, but there are {experts} experts; see --experts")]
    NoExpert {
        /// Where.
        place: String,
        /// Line, from 1.
        line: usize,
        /// The expert named.
        expert: u64,
        /// How many there are.
        experts: u64,
    },
    /// A server's rows or columns do not add up to the sums.
    #[error(
        "{place}: rows and columns do not add up to the sums between {server} and {peer}; exchange them again"
    )]
    SumsDiffer {
        /// Where.
        place: String,
        /// Whose rows and columns.
        server: ServerId,
        /// The other server.
        peer: ServerId,
    },
    /// No record of the trace is of the step and layer asked for.
    #[error("{place}: no record of step {step} and layer {layer}")]
    NoRecord {
        /// Where.
        place: String,
        /// The step asked for.
        step: String,
        /// The layer asked for.
        layer: String,
    },
}

struct Layers(usize);

impl std::fmt::Display for Layers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            0 => f.write_str("none"),
            n => write!(f, "0 to {}", n - 1),
        }
    }
}

/// A plan that cannot be made.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The matrix is for another number of ranks.
    #[error("the demand is for {demand_ranks} ranks, but the cluster has {cluster_ranks}")]
    WrongSize {
        /// Rows of the matrix.
        demand_ranks: u32,
        /// Ranks of the cluster.
        cluster_ranks: u32,
    },
    /// A server has traffic and no NIC that is up.
    #[error("{server} has {bytes} bytes to send or receive, but all of its {nics} NICs are down")]
    NoNic {
        /// Which.
        server: ServerId,
        /// Its NICs.
        nics: usize,
        /// Its traffic, the larger direction.
        bytes: u64,
    },
    /// A rank that the cluster does not have.
    #[error("no {rank}: the cluster has {ranks} ranks")]
    NoRank {
        /// Which.
        rank: Rank,
        /// Ranks of the cluster.
        ranks: u32,
    },
    /// One server's part of a demand does not say enough.
    #[error("{method} for {rank} needs the whole matrix, not one server's part of it")]
    NeedsWholeMatrix {
        /// How it should be planned.
        method: Method,
        /// Whose table it should be.
        rank: Rank,
    },
    /// Messages of no bytes.
    #[error("messages must hold at least 1 byte")]
    ZeroMessage,
    /// More messages than a sequence number can count.
    #[error("{src} to {dst} needs more than 2^32 - 1 messages of {message_bytes} bytes; use larger messages")]
    TooManyMessages {
        /// Sender.
        src: Rank,
        /// Receiver.
        dst: Rank,
        /// Payload of a message.
        message_bytes: u64,
    },
    /// A cluster, or a demand, that is larger than a plan can name.
    #[error("{found} {what}; a plan can name {limit}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many there are.
        found: usize,
        /// The most.
        limit: usize,
    },
    /// No method of that name.
    #[error("unknown method {name:?}; methods are {methods}")]
    UnknownMethod {
        /// What was asked for.
        name: String,
        /// Those that exist.
        methods: String,
    },
}

/// Bytes that are no table of this version.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// Shorter than a header, or than the header says.
    #[error("plan table is cut short: {bytes} bytes, {needed} needed")]
    Short {
        /// Bytes there are.
        bytes: usize,
        /// Bytes there should be.
        needed: u64,
    },
    /// A field of the header, or of an entry, says what cannot be.
    #[error("plan table: bad {field} {value} (entry {index})")]
    BadField {
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// Which entry of its array; 0 in the header.
        index: usize,
    },
}
