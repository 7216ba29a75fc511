//! Standard output and files.

use std::io::{ErrorKind, Write};
use std::path::Path;

use anyhow::Context;

use crate::failure::Failure;

/// Writes to standard output. A reader that has seen enough (`| head`) is no failure.
pub fn print(bytes: &[u8]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(Failure::run(e)),
        _ => Ok(()),
    }
}

/// Writes a file whole or not at all.
pub fn write_file(path: &Path, text: &str) -> Result<(), Failure> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let written = std::fs::write(&partial, text).and_then(|()| std::fs::rename(&partial, path));
    if written.is_err() {
        // The error that matters is the first one.
        let _ = std::fs::remove_file(&partial);
    }
    written.with_context(|| format!("cannot write {}", path.display())).map_err(Failure::Run)
}
