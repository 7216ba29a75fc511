//! What of the environment is meant for a run whose ranks this program starts itself. What a launcher around it says of
//! ranks is not.

use fuselink::comm::settings::{Settings, SettingsError};

/// Variables of the run as a whole.
fn is_ours(name: &str) -> bool {
    const WHOLE: [&str; 5] =
        ["FUSELINK_BLOCKS", "FUSELINK_GPU", "FUSELINK_NIC", "FUSELINK_RELAY_BYTES", "FUSELINK_TIMEOUT_MS"];
    WHOLE.contains(&name) || name.starts_with("FUSELINK_VERBS_")
}

/// The settings of such a run.
pub fn settings() -> Result<Settings, SettingsError> {
    Settings::from_lookup(|name| std::env::var_os(name).filter(|_| is_ours(name)))
}
