//! Files from outside, as text.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, anyhow};

use crate::failure::Failure;
use crate::memory::check_fits;

/// Larger than any matrix of the most ranks.
const MAX_FILE_BYTES: u64 = 4 << 30;
/// What has no size of its own (a pipe, or a device that never ends) stops here.
const MAX_STREAM_BYTES: u64 = 256 << 20;

/// The text of a file, `-` for standard input.
pub fn read_text(path: &Path) -> Result<String, Failure> {
    let name = path.display();
    let mut bytes = Vec::new();
    let size = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file).map(|m| m.len());
    let most = if size.is_some() { MAX_FILE_BYTES } else { MAX_STREAM_BYTES };
    check_fits(&name.to_string(), size.unwrap_or(0))?;
    let read = if path == Path::new("-") {
        std::io::stdin().lock().take(most).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes))
    };
    read.map_err(|e| without_number(&e)).with_context(|| name.to_string()).map_err(Failure::Input)?;
    if bytes.len() as u64 == most {
        return Err(Failure::Input(anyhow!("{name}: larger than {} MiB", most >> 20)));
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
