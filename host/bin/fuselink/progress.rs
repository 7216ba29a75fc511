//! The progress line of a long command: on standard error, and only where somebody looks at it.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::job::Event;

/// A line that says how far a run is.
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A line; indicatif draws none where standard error is not a terminal.
    pub fn new(quiet: bool) -> Self {
        let bar = if quiet { ProgressBar::hidden() } else { ProgressBar::new(0) };
        let style = ProgressStyle::with_template("{spinner} {msg:<10} {bar:30} {pos}/{len}, {elapsed}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message("starting");
        bar.enable_steady_tick(Duration::from_millis(200));
        Self { bar }
    }

    /// Goes on.
    pub fn on_event(&mut self, event: &Event) {
        if let Event::Progress { method, done, of } = event {
            self.bar.set_length(u64::from(*of));
            self.bar.set_position(u64::from(*done));
            self.bar.set_message(method.clone());
        }
    }

    /// Shows how far a series of runs is.
    pub fn step(&self, what: &str, done: u64, of: u64) {
        self.bar.set_length(of);
        self.bar.set_position(done);
        self.bar.set_message(what.to_owned());
    }

    /// Takes the line away.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
