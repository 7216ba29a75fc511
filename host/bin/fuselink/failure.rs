//! How a command fails: one line, and an exit code that says whose fault it was.

use std::fmt;

use clap::error::ErrorKind;

/// Why a command did not succeed.
#[derive(Debug)]
pub enum Failure {
    /// What was asked cannot be: exit code 2.
    Input(anyhow::Error),
    /// It was tried, and failed: exit code 1.
    Run(anyhow::Error),
    /// Somebody asked it to stop, with this signal: exit code 128 + signal, as shells have it.
    Interrupted(u8),
}

impl Failure {
    /// For `map_err` on anything that judges input.
    pub fn input(e: impl Into<anyhow::Error>) -> Self {
        Self::Input(e.into())
    }

    /// For `map_err` on anything else.
    pub fn run(e: impl Into<anyhow::Error>) -> Self {
        Self::Run(e.into())
    }

    /// The first paragraph of clap's complaint; the usage that follows it is in `--help`.
    pub fn arguments(e: &clap::Error) -> Self {
        if e.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
            return Self::Input(anyhow::anyhow!("no command was given; see --help"));
        }
        let text = e.to_string();
        let first = text.split("\n\n").next().unwrap_or_default();
        let first = first.strip_prefix("error: ").unwrap_or(first);
        Self::Input(anyhow::anyhow!("{first}; see --help"))
    }

    /// The process's exit code.
    pub fn code(&self) -> u8 {
        match self {
            Self::Input(_) => 2,
            Self::Run(_) => 1,
            Self::Interrupted(signal) => 128 + signal,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::Input(e) | Self::Run(e) => format!("{e:#}"),
            Self::Interrupted(_) => "interrupted; all ranks have been stopped".to_owned(),
        };
        let words: Vec<&str> = text.split_whitespace().collect();
        f.write_str(&words.join(" "))
    }
}
