//! Which cluster: flags, a preset, or a file.

use std::path::Path;

use anyhow::anyhow;
use clap::Args;
use fuselink::topo::{self, Cluster, PRESETS, Server, TopoError};

use crate::failure::Failure;
use crate::input::read_text;

/// Servers when nobody says how many.
const SERVERS: u64 = 2;

/// The cluster flags.
#[derive(Args, Debug, Default)]
#[command(next_help_heading = "Cluster")]
pub struct ClusterArgs {
    /// Number of servers [default: 2]
    #[arg(long, value_name = "S", allow_negative_numbers = true)]
    pub servers: Option<u64>,
    /// GPUs per server, one rank each [default: 8]
    #[arg(long, value_name = "G", allow_negative_numbers = true)]
    pub gpus: Option<u64>,
    /// NICs per server [default: as many as GPUs]
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub nics: Option<u64>,
    /// Gbit/s of a NIC; or a list, one per NIC of a server or of all servers; 0 = down [default: 400]
    #[arg(long, value_name = "X[,..]", allow_hyphen_values = true)]
    pub nic_gbit: Option<String>,
    /// GB/s over scale-up (NVLink), per GPU and direction [default: 450]
    #[arg(long, value_name = "B", allow_hyphen_values = true)]
    pub scaleup_gbyte: Option<String>,
    /// A TOML file that names every server, or a kind of server: hgx-h200, fuselink-testbed, p4d
    #[arg(long, value_name = "FILE|PRESET")]
    pub cluster: Option<String>,
}

impl ClusterArgs {
    /// The cluster asked for; servers are of kind `preset` where nothing is said.
    pub fn cluster(&self, preset: &str) -> Result<Cluster, Failure> {
        match self.cluster.as_deref() {
            None => self.in_flags(preset, true),
            Some(name) if PRESETS.contains(&name) => self.in_flags(name, false),
            Some(file) => self.in_file(file),
        }
        .map_err(Failure::input)
    }

    fn in_file(&self, file: &str) -> anyhow::Result<Cluster> {
        let flags = [
            (self.servers.is_some(), "--servers"),
            (self.gpus.is_some(), "--gpus"),
            (self.nics.is_some(), "--nics"),
            (self.nic_gbit.is_some(), "--nic-gbit"),
            (self.scaleup_gbyte.is_some(), "--scaleup-gbyte"),
        ];
        if let Some((_, flag)) = flags.iter().find(|(given, _)| *given) {
            return Err(anyhow!("{flag} cannot be used with --cluster {file}: a file names every server"));
        }
        let text = read_text(Path::new(file)).map_err(|e| {
            let hint = if Path::new(file).exists() { "" } else { ", and no preset of that name" };
            anyhow!("--cluster {e}{hint}")
        })?;
        Ok(Cluster::from_toml(&text, file)?)
    }

    fn in_flags(&self, preset: &str, free: bool) -> anyhow::Result<Cluster> {
        let kind = Server::preset(preset).ok_or_else(|| anyhow!("no preset {preset:?}"))?;
        if !free && (self.gpus.is_some() || self.nics.is_some()) {
            return Err(anyhow!(
                "--gpus and --nics cannot be used with --cluster {preset}: it says how many"
            ));
        }
        let servers =
            topo::check_count(self.servers.unwrap_or(SERVERS), topo::MAX_RANKS, "the number", "--servers")?;
        let gpus = topo::check_count(
            self.gpus.unwrap_or(kind.gpus.into()),
            topo::MAX_RANKS,
            "the number",
            "--gpus",
        )?;
        topo::check_ranks(u64::from(servers) * u64::from(gpus), "--servers, --gpus")?;
        let default_nics = if self.gpus.is_some() { gpus as usize } else { kind.nics.len() };
        let nics = topo::check_nics(self.nics.unwrap_or(default_nics as u64), "--nics")?;
        let scaleup = match &self.scaleup_gbyte {
            Some(text) => topo::parse_rate(text, "--scaleup-gbyte", "GB/s")?,
            None => kind.scaleup_mbyte_per_s,
        };
        if scaleup == 0 {
            return Err(anyhow!("--scaleup-gbyte must be above 0"));
        }
        let rates = self.rates(servers as usize, nics as usize, kind.nics[0].mbit_per_s)?;
        Ok(Cluster::new(rates.iter().map(|rates| Server::new(gpus, rates, scaleup)).collect()))
    }

    /// Mbit/s of every NIC, by server.
    fn rates(&self, servers: usize, nics: usize, default: u64) -> Result<Vec<Vec<u64>>, TopoError> {
        let place = "--nic-gbit";
        let rates = match &self.nic_gbit {
            None => vec![default],
            Some(text) => text
                .split(',')
                .map(|t| topo::parse_rate(t, place, "Gbit/s"))
                .collect::<Result<Vec<u64>, _>>()?,
        };
        match rates.len() {
            1 => Ok(vec![vec![rates[0]; nics]; servers]),
            n if n == nics => Ok(vec![rates; servers]),
            n if n == nics * servers => Ok(rates.chunks(nics).map(<[u64]>::to_vec).collect()),
            found => Err(TopoError::PerNic { place: place.into(), found, nics: nics * servers }),
        }
    }
}
