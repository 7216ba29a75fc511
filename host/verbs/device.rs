//! Which RDMA devices there are, and which of them is NIC number k.

use std::path::Path;

use super::advice::{Operation, advise};
use super::raw::{Context, DeviceList};
use super::settings::VerbsSettings;
use crate::hw::HwError;
use crate::topo::NicIdx;

/// An RDMA device of this server.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceInfo {
    /// PCI bus id, lower case, with domain; empty for devices that are not on the bus (soft-RoCE).
    pub bus_id: String,
    /// Such as `mlx5_0`.
    pub name: String,
}

/// The PCI bus id of a device: the name of what its link `device` in sysfs leads to.
fn bus_id(name: &str) -> String {
    let target = std::fs::canonicalize(Path::new("/sys/class/infiniband").join(name).join("device"));
    let name = target.ok().and_then(|t| Some(t.file_name()?.to_string_lossy().to_ascii_lowercase()));
    name.filter(|n| n.split([':', '.']).count() == 4).unwrap_or_default()
}

/// The RDMA devices of this server, by PCI bus id, then by name.
///
/// # Errors
/// [`HwError::Os`] when the kernel has no RDMA.
pub fn devices() -> Result<Vec<DeviceInfo>, HwError> {
    let os = |e| HwError::Os { operation: "list RDMA devices", source: advise(Operation::ListDevices, e) };
    let list = ibverbs::devices().map_err(os)?;
    let names = list.iter().filter_map(|d| Some(d.name()?.to_string_lossy().into_owned()));
    let mut found: Vec<_> = names.map(|name| DeviceInfo { bus_id: bus_id(&name), name }).collect();
    found.sort();
    Ok(found)
}

/// Whether a device is meant by a name or a bus id; a bus id may lack its domain.
fn is_named(info: &DeviceInfo, wanted: &str) -> bool {
    let wanted = wanted.to_ascii_lowercase();
    info.name.eq_ignore_ascii_case(&wanted)
        || info.bus_id == wanted
        || info.bus_id == format!("0000:{wanted}")
}

/// Opens the device that is NIC number `nic` of this server.
pub(super) fn open(settings: &VerbsSettings, nic: NicIdx) -> Result<(DeviceInfo, Context), HwError> {
    let found = devices()?;
    let missing = |what: String| {
        let names: Vec<_> = found.iter().map(|i| format!("{} ({})", i.name, i.bus_id)).collect();
        let known = if names.is_empty() {
            "there are none".into()
        } else {
            format!("there are {}", names.join(", "))
        };
        let source = std::io::Error::other(format!(
            "{what}: {known}; see FUSELINK_VERBS_DEVICES, and in a container pass /dev/infiniband in"
        ));
        HwError::Os { operation: "open an RDMA device", source }
    };
    let chosen = if settings.devices.is_empty() {
        found.get(nic.idx()).ok_or_else(|| missing(format!("no device is left for {nic}")))?
    } else {
        let name = settings.devices.get(nic.idx());
        let name = name.ok_or_else(|| missing(format!("FUSELINK_VERBS_DEVICES names none for {nic}")))?;
        let named = found.iter().find(|info| is_named(info, name));
        named.ok_or_else(|| missing(format!("no device is called {name:?}")))?
    };
    let opened = DeviceList::new().and_then(|list| list.open(&chosen.name));
    let os = |e| HwError::Os { operation: "open an RDMA device", source: advise(Operation::OpenDevice, e) };
    Ok((chosen.clone(), opened.map_err(os)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_by_name_or_bus_id() {
        let info = DeviceInfo { bus_id: "0000:1a:00.0".into(), name: "mlx5_0".into() };
        for wanted in ["mlx5_0", "0000:1A:00.0", "1a:00.0"] {
            assert!(is_named(&info, wanted), "{wanted}");
        }
        for other in ["mlx5_1", "0000:1a:00.1", ""] {
            assert!(!is_named(&info, other), "{other}");
        }
    }
}
