//! Identifiers. Each names one thing and cannot be mistaken for another.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $word:literal) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, serde::Serialize, serde::Deserialize,
        )]
        #[repr(transparent)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The identifier as a position in an array.
            #[inline]
            pub fn idx(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($word, " {}"), self.0)
            }
        }
    };
}

id!(
    /// A process with one GPU; numbered through the job, server by server.
    Rank, "rank"
);
id!(
    /// A server; numbered through the job.
    ServerId, "server"
);
id!(
    /// A GPU of one server; its position there.
    GpuIdx, "GPU"
);
id!(
    /// A NIC of one server; its position there.
    NicIdx, "NIC"
);
id!(
    /// A NIC of the job; numbered server by server.
    NicId, "NIC"
);
