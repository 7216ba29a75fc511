//! Files from outside, as text.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, anyhow};

use crate::failure::Failure;

/// Larger than any matrix of the most ranks, smaller than memory; what never ends (a device) stops here.
const MAX_FILE_BYTES: u64 = 4 << 30;

/// The text of a file, `-` for standard input.
pub fn read_text(path: &Path) -> Result<String, Failure> {
    let name = path.display();
    let mut bytes = Vec::new();
    let read = if path == Path::new("-") {
        std::io::stdin().lock().take(MAX_FILE_BYTES).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(MAX_FILE_BYTES).read_to_end(&mut bytes))
    };
    read.map_err(|e| without_number(&e)).with_context(|| name.to_string()).map_err(Failure::Input)?;
    if bytes.len() as u64 == MAX_FILE_BYTES {
        return Err(Failure::Input(anyhow!("{name}: larger than {} GiB", MAX_FILE_BYTES >> 30)));
    }
    String::from_utf8(bytes).map_err(|e| {
        let good = e.utf8_error().valid_up_to();
        let line = e.as_bytes()[..good].iter().filter(|&&b| b == b'\n').count() + 1;
        Failure::Input(anyhow!("{name}:{line}: not UTF-8 text"))
    })
}

/// "No such file or directory", without the number behind it.
fn without_number(e: &std::io::Error) -> anyhow::Error {
    let text = e.to_string();
    anyhow!("{}", text.split(" (os error").next().unwrap_or_default())
}
