//! What can be wrong with a description of a machine.

/// A cluster that cannot be. `place` is the file or flag that the caller named.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TopoError {
    /// The text is not TOML, or has other keys than a cluster has.
    #[error("{place}:{line}: {reason}")]
    Toml {
        /// Where.
        place: String,
        /// Line, from 1.
        line: usize,
        /// What the parser says.
        reason: String,
    },
    /// A count outside what a cluster can have.
    #[error("{place}: {what} must be from 1 to {most}, not {found}")]
    Count {
        /// Where.
        place: String,
        /// Of what.
        what: &'static str,
        /// What was given.
        found: u64,
        /// The most.
        most: u64,
    },
    /// A rate that is no number, negative, finer than 1 Mbit/s or beyond reason.
    #[error("{place}: {text:?} is no rate; give 0 to 1000000 {unit} with at most 3 decimals")]
    Rate {
        /// Where.
        place: String,
        /// What was given.
        text: String,
        /// What it counts.
        unit: &'static str,
    },
    /// GPUs of a server that cannot reach each other.
    #[error("{place}: the scale-up rate must be above 0")]
    NoScaleup {
        /// Where.
        place: String,
    },
    /// A list of one value per NIC that has another length.
    #[error("{place}: {found} values for {nics} NICs; give one for all, or one per NIC")]
    PerNic {
        /// Where.
        place: String,
        /// Values given.
        found: usize,
        /// NICs there are.
        nics: usize,
    },
    /// A NIC is said to be beside a GPU that does not exist.
    #[error("{place}: NIC {nic} cannot be beside GPU {gpu}: the server has {gpus}, numbered from 0")]
    NoGpu {
        /// Where.
        place: String,
        /// The NIC.
        nic: usize,
        /// The GPU.
        gpu: u32,
        /// GPUs there are.
        gpus: u32,
    },
}
