//! The ways to carry out an all-to-all.

use std::fmt;
use std::str::FromStr;

use super::PlanError;

/// How a demand becomes a schedule.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Method {
    /// The least predicted cost of all that follow, down to `Rounds`.
    Auto,
    /// The least predicted cost of those without loose pieces.
    Ordered,
    /// Balanced over NICs and rails, in no order.
    Loose,
    /// Server s sends to s + 1, then s + 2, and so on.
    SpreadOut,
    /// Exact Birkhoff decomposition (FAST, NSDI'26): the busiest server never idles.
    Birkhoff,
    /// The pair whose servers have most left goes next, as soon as both are free.
    OpenShop,
    /// Rounds of nearly equal jobs, without barriers between them.
    Rounds,
    /// Every byte leaves by its source's direct NIC and enters by its destination's.
    Static,
    /// Runs of one message cycle over all NICs.
    Spray,
    /// No NIC is chosen beforehand: the engine takes idle ones (FuseLink, OSDI'25).
    FuseLink,
}

impl Method {
    /// Every method, in the order in which they are listed to people.
    pub const ALL: &[Self] = &[
        Self::Auto,
        Self::Ordered,
        Self::Loose,
        Self::SpreadOut,
        Self::Birkhoff,
        Self::OpenShop,
        Self::Rounds,
        Self::Static,
        Self::Spray,
        Self::FuseLink,
    ];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Ordered => "ordered",
            Self::Loose => "loose",
            Self::SpreadOut => "spreadout",
            Self::Birkhoff => "birkhoff",
            Self::OpenShop => "openshop",
            Self::Rounds => "rounds",
            Self::Static => "static",
            Self::Spray => "spray",
            Self::FuseLink => "fuselink",
        }
    }

    /// Whether its messages are credited by their turn in a list; the others use standing credits.
    pub fn is_planned(self) -> bool {
        !matches!(self, Self::Static | Self::Spray | Self::FuseLink)
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Method {
    type Err = PlanError;

    /// `fast`, the name under which runs compare it with other methods, is `auto`.
    fn from_str(name: &str) -> Result<Self, PlanError> {
        let method = match name {
            "fast" => Some(Self::Auto),
            _ => Self::ALL.iter().copied().find(|m| m.name() == name),
        };
        method.ok_or_else(|| PlanError::UnknownMethod {
            name: name.chars().take(24).collect(),
            methods: Self::ALL.iter().map(|m| m.name()).collect::<Vec<_>>().join(", "),
        })
    }
}
