//! The variables about NICs.

use std::time::Duration;

use super::{Env, SettingsError, malformed};
use crate::comm::NicBackend;
use crate::verbs::VerbsSettings;
use crate::verbs::settings::MTUS;

impl Env<'_> {
    pub(super) fn nic_backend(&self) -> Result<NicBackend, SettingsError> {
        match self.text("FUSELINK_NIC")?.as_deref().map(str::trim) {
            None | Some("emu") => Ok(NicBackend::Emu),
            Some("verbs") => Ok(NicBackend::Verbs),
            Some(other) => Err(malformed("FUSELINK_NIC", other, "emu or verbs")),
        }
    }

    /// A number within bounds.
    fn within<T: TryFrom<u64>>(
        &self,
        name: &'static str,
        (least, most): (u64, u64),
        wanted: &'static str,
    ) -> Result<Option<T>, SettingsError> {
        let fit = |n: u64| {
            let number = Some(n).filter(|n| (least..=most).contains(n)).and_then(|n| T::try_from(n).ok());
            number.ok_or_else(|| malformed(name, &n.to_string(), wanted))
        };
        self.number(name)?.map(fit).transpose()
    }

    fn switch(&self, name: &'static str) -> Result<Option<bool>, SettingsError> {
        Ok(self.within::<u8>(name, (0, 1), "0 or 1")?.map(|n| n == 1))
    }

    pub(super) fn verbs(&self) -> Result<VerbsSettings, SettingsError> {
        let default = VerbsSettings::default();
        let class = "a traffic class, from 0 to 255";
        let byte = (0, 255);
        let depth = ((16, 32_768), "from 16 to 32768");
        let mtu = self.number("FUSELINK_VERBS_MTU")?.unwrap_or(default.mtu_bytes.into());
        let is_mtu = MTUS.iter().any(|(bytes, _)| u64::from(*bytes) == mtu);
        if !is_mtu {
            return Err(malformed("FUSELINK_VERBS_MTU", &mtu.to_string(), "256, 512, 1024, 2048 or 4096"));
        }
        let open_ms =
            self.within("FUSELINK_VERBS_OPEN_MS", (1, 3_600_000), "from 1 to 3600000 milliseconds")?;
        Ok(VerbsSettings {
            devices: self.devices()?,
            port: self.within("FUSELINK_VERBS_PORT", (1, 255), "a port, from 1")?.unwrap_or(default.port),
            gid_index: self.within("FUSELINK_VERBS_GID_INDEX", byte, "an index, from 0 to 255")?,
            traffic_class: self
                .within("FUSELINK_VERBS_TRAFFIC_CLASS", byte, class)?
                .unwrap_or(default.traffic_class),
            control_traffic_class: self.within("FUSELINK_VERBS_CONTROL_TRAFFIC_CLASS", byte, class)?,
            service_level: self
                .within("FUSELINK_VERBS_SERVICE_LEVEL", (0, 15), "from 0 to 15")?
                .unwrap_or(default.service_level),
            mtu_bytes: mtu as u16,
            timeout: self
                .within("FUSELINK_VERBS_TIMEOUT", (1, 31), "from 1 to 31")?
                .unwrap_or(default.timeout),
            retry_count: self
                .within("FUSELINK_VERBS_RETRY_COUNT", (0, 7), "from 0 to 7")?
                .unwrap_or(default.retry_count),
            rnr_retry: self
                .within("FUSELINK_VERBS_RNR_RETRY", (0, 7), "from 0 to 7")?
                .unwrap_or(default.rnr_retry),
            rnr_timer: self
                .within("FUSELINK_VERBS_RNR_TIMER", (0, 31), "from 0 to 31")?
                .unwrap_or(default.rnr_timer),
            queue_pairs: self
                .within("FUSELINK_VERBS_QPS", (2, 8), "from 2 to 8")?
                .unwrap_or(default.queue_pairs),
            send_depth: self
                .within("FUSELINK_VERBS_SEND_DEPTH", depth.0, depth.1)?
                .unwrap_or(default.send_depth),
            recv_depth: self
                .within("FUSELINK_VERBS_RECV_DEPTH", depth.0, depth.1)?
                .unwrap_or(default.recv_depth),
            adaptive_routing: self
                .switch("FUSELINK_VERBS_ADAPTIVE_ROUTING")?
                .unwrap_or(default.adaptive_routing),
            dma_buf: self.switch("FUSELINK_VERBS_DMA_BUF")?.unwrap_or(default.dma_buf),
            open_timeout: open_ms.map_or(default.open_timeout, Duration::from_millis),
        })
    }

    fn devices(&self) -> Result<Vec<String>, SettingsError> {
        let name = "FUSELINK_VERBS_DEVICES";
        let Some(text) = self.text(name)? else { return Ok(Vec::new()) };
        let devices: Vec<String> = text.split(',').map(|d| d.trim().to_owned()).collect();
        if devices.iter().any(String::is_empty) {
            return Err(malformed(name, &text, "names or PCI bus ids, separated by commas"));
        }
        Ok(devices)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{read, rejected};
    use super::*;

    #[test]
    fn nics_are_emulated_unless_said_otherwise() {
        assert_eq!(read(&[]).unwrap().nic, NicBackend::Emu);
        assert_eq!(read(&[]).unwrap().verbs, VerbsSettings::default());
        assert_eq!(read(&[("FUSELINK_NIC", "verbs")]).unwrap().nic, NicBackend::Verbs);
        rejected(&[("FUSELINK_NIC", "tcp")], "is not emu or verbs");
    }

    #[test]
    fn each_variable_reaches_its_setting() {
        let vars = [
            ("FUSELINK_VERBS_DEVICES", "mlx5_0, 0000:1a:00.0"),
            ("FUSELINK_VERBS_PORT", "2"),
            ("FUSELINK_VERBS_GID_INDEX", "3"),
            ("FUSELINK_VERBS_TRAFFIC_CLASS", "106"),
            ("FUSELINK_VERBS_CONTROL_TRAFFIC_CLASS", "192"),
            ("FUSELINK_VERBS_SERVICE_LEVEL", "4"),
            ("FUSELINK_VERBS_MTU", "1024"),
            ("FUSELINK_VERBS_TIMEOUT", "18"),
            ("FUSELINK_VERBS_RETRY_COUNT", "6"),
            ("FUSELINK_VERBS_RNR_RETRY", "5"),
            ("FUSELINK_VERBS_RNR_TIMER", "9"),
            ("FUSELINK_VERBS_QPS", "4"),
            ("FUSELINK_VERBS_SEND_DEPTH", "512"),
            ("FUSELINK_VERBS_RECV_DEPTH", "1024"),
            ("FUSELINK_VERBS_ADAPTIVE_ROUTING", "1"),
            ("FUSELINK_VERBS_DMA_BUF", "0"),
            ("FUSELINK_VERBS_OPEN_MS", "250"),
        ];
        let expected = VerbsSettings {
            devices: vec!["mlx5_0".into(), "0000:1a:00.0".into()],
            port: 2,
            gid_index: Some(3),
            traffic_class: 106,
            control_traffic_class: Some(192),
            service_level: 4,
            mtu_bytes: 1024,
            timeout: 18,
            retry_count: 6,
            rnr_retry: 5,
            rnr_timer: 9,
            queue_pairs: 4,
            send_depth: 512,
            recv_depth: 1024,
            adaptive_routing: true,
            dma_buf: false,
            open_timeout: Duration::from_millis(250),
        };
        assert_eq!(read(&vars).unwrap().verbs, expected);
    }

    #[test]
    fn values_out_of_bounds_are_refused_by_name() {
        rejected(&[("FUSELINK_VERBS_MTU", "1500")], "FUSELINK_VERBS_MTU=\"1500\" is not 256");
        rejected(&[("FUSELINK_VERBS_QPS", "1")], "FUSELINK_VERBS_QPS");
        rejected(&[("FUSELINK_VERBS_SERVICE_LEVEL", "16")], "from 0 to 15");
        rejected(&[("FUSELINK_VERBS_PORT", "0")], "from 1");
        rejected(&[("FUSELINK_VERBS_ADAPTIVE_ROUTING", "yes")], "a whole number");
        rejected(&[("FUSELINK_VERBS_DEVICES", "mlx5_0,,mlx5_1")], "separated by commas");
        rejected(&[("FUSELINK_VERBS_TIMEOUT", "0")], "from 1 to 31");
    }
}
