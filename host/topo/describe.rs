//! Clusters from text: presets, rates, and TOML files that name every server.

use super::{Cluster, GpuIdx, Server, TopoError};

/// The most ranks of a cluster: a matrix of that many is 2 GiB.
pub const MAX_RANKS: u64 = 1 << 14;
const MAX_NICS: u64 = 1 << 10;
const MAX_MILLI_RATE: u64 = 1_000_000_000;

/// The kinds of server that have a name.
pub const PRESETS: &[&str] = &["hgx-h200", "fuselink-testbed", "p4d"];

impl Server {
    /// A kind of server by name; see [`PRESETS`].
    pub fn preset(name: &str) -> Option<Self> {
        match name {
            // NVLink 4: 900 GB/s in both directions together; eight 400 Gbit/s NICs.
            "hgx-h200" => Some(Self::new(8, &[400_000; 8], 450_000)),
            // FuseLink, OSDI'25, section 6.1.
            "fuselink-testbed" => Some(Self::new(8, &[400_000; 8], 200_000)),
            // AWS p4d.24xlarge: eight A100 (NVLink 3, 600 GB/s both ways), four 100 Gbit/s EFA devices.
            "p4d" => Some(Self::new(8, &[100_000; 4], 300_000)),
            _ => None,
        }
    }
}

/// A rate such as `12.5`, in thousandths: Gbit/s become Mbit/s, GB/s become MB/s.
///
/// # Errors
/// [`TopoError::Rate`] for anything but 0 to 1000000 with at most 3 decimals.
pub fn parse_rate(text: &str, place: &str, unit: &'static str) -> Result<u64, TopoError> {
    let error = || TopoError::Rate { place: place.into(), text: text.chars().take(24).collect(), unit };
    let (whole, fraction) = text.trim().split_once('.').unwrap_or((text.trim(), ""));
    let fraction = fraction.trim_end_matches('0');
    let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || whole.len() > 7 || fraction.len() > 3 || !digits(whole) || !digits(fraction) {
        return Err(error());
    }
    let milli = format!("{whole}{fraction:0<3}").parse::<u64>().map_err(|_| error())?;
    if milli > MAX_MILLI_RATE { Err(error()) } else { Ok(milli) }
}

/// A count of something, from 1 to `most`.
///
/// # Errors
/// [`TopoError::Count`].
pub fn check_count(found: u64, most: u64, what: &'static str, place: &str) -> Result<u32, TopoError> {
    match found {
        1.. if found <= most => Ok(found as u32),
        _ => Err(TopoError::Count { place: place.into(), what, found, most }),
    }
}

/// Refuses clusters of more than [`MAX_RANKS`] ranks.
///
/// # Errors
/// [`TopoError::Count`].
pub fn check_ranks(ranks: u64, place: &str) -> Result<(), TopoError> {
    check_count(ranks, MAX_RANKS, "servers x GPUs", place).map(|_| ())
}

/// Checks a number of NICs per server.
///
/// # Errors
/// [`TopoError::Count`].
pub fn check_nics(found: u64, place: &str) -> Result<u32, TopoError> {
    check_count(found, MAX_NICS, "the number of NICs", place)
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    server: Vec<toml::Spanned<ServerEntry>>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct ServerEntry {
    /// That many servers alike, numbered one after the other.
    #[serde(default = "one")]
    count: u64,
    /// Take what is not said from a kind of server that has a name.
    preset: Option<String>,
    gpus: Option<u64>,
    nics: Option<u64>,
    nic_gbit: Option<OneOrMany>,
    /// Per NIC, the GPU beside it.
    relay_gpu: Option<Vec<u32>>,
    scaleup_gbyte: Option<Number>,
}

#[derive(serde::Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(Number),
    Many(Vec<Number>),
}

#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Number {
    Whole(u64),
    Float(f64),
}

impl Number {
    fn milli(&self, place: &str, unit: &'static str) -> Result<u64, TopoError> {
        let text = match self {
            Self::Whole(n) => n.to_string(),
            Self::Float(f) => f.to_string(),
        };
        parse_rate(&text, place, unit)
    }
}

fn one() -> u64 {
    1
}

impl Cluster {
    /// Reads a cluster that names every server:
    ///
    /// ```toml
    /// [[server]]
    /// gpus = 8
    /// nics = 8                # as many as GPUs, when left out
    /// nic_gbit = 400          # one for all, or a list; 0 = down; 400 when left out
    /// scaleup_gbyte = 450     # per GPU and direction; 450 when left out
    /// relay_gpu = [0, 1, 2, 3, 4, 5, 6, 7] # the GPU beside each NIC; dealt out evenly when left out
    /// count = 2               # so many alike; 1 when left out
    /// [[server]]
    /// preset = "p4d"          # a kind of server by name
    /// ```
    ///
    /// # Errors
    /// [`TopoError`] with `place` and, for TOML itself, the line.
    pub fn from_toml(text: &str, place: &str) -> Result<Self, TopoError> {
        let file: File = toml::from_str(text).map_err(|e| {
            let line = line_of(text, e.span().map_or(0, |span| span.start));
            TopoError::Toml { place: place.into(), line, reason: e.message().replace('\n', ", ") }
        })?;
        let mut servers = Vec::new();
        let mut ranks = 0u64;
        for entry in &file.server {
            let line = line_of(text, entry.span().start);
            let entry = entry.get_ref();
            let server = entry.server(place, line)?;
            let place = format!("{place}:{line}");
            let count = check_count(entry.count, MAX_RANKS, "count", &place)?;
            ranks += u64::from(count) * u64::from(server.gpus);
            check_ranks(ranks, &place)?;
            servers.extend(std::iter::repeat_n(server, count as usize));
        }
        check_ranks(ranks, place)?;
        Ok(Self::new(servers))
    }
}

/// The line that a byte is on, from 1.
fn line_of(text: &str, byte: usize) -> usize {
    text.bytes().take(byte).filter(|&b| b == b'\n').count() + 1
}

impl ServerEntry {
    fn server(&self, file: &str, line: usize) -> Result<Server, TopoError> {
        let place = &format!("{file}:{line}");
        let base = match &self.preset {
            Some(name) => Some(Server::preset(name).ok_or_else(|| TopoError::Toml {
                place: file.into(),
                line,
                reason: format!("no preset {name:?}; there are {}", PRESETS.join(", ")),
            })?),
            None => None,
        };
        let gpus = match (self.gpus, &base) {
            (Some(gpus), _) => gpus,
            (None, Some(base)) => base.gpus.into(),
            (None, None) => 0,
        };
        let gpus = check_count(gpus, MAX_RANKS, "gpus", place)?;
        let nics = self.nics.or(base.as_ref().map(|b| b.nics.len() as u64)).unwrap_or(gpus.into());
        let nics = check_nics(nics, place)? as usize;
        let rates = match &self.nic_gbit {
            None => vec![base.as_ref().map_or(400_000, |b| b.nics[0].mbit_per_s); nics],
            Some(OneOrMany::One(rate)) => vec![rate.milli(place, "Gbit/s")?; nics],
            Some(OneOrMany::Many(rates)) if rates.len() == nics => {
                rates.iter().map(|r| r.milli(place, "Gbit/s")).collect::<Result<_, _>>()?
            }
            Some(OneOrMany::Many(rates)) => {
                return Err(TopoError::PerNic { place: place.into(), found: rates.len(), nics });
            }
        };
        let scaleup = match &self.scaleup_gbyte {
            Some(rate) => rate.milli(place, "GB/s")?,
            None => base.map_or(450_000, |b| b.scaleup_mbyte_per_s),
        };
        if scaleup == 0 {
            return Err(TopoError::NoScaleup { place: place.into() });
        }
        let mut server = Server::new(gpus, &rates, scaleup);
        self.place_nics(&mut server, place)?;
        Ok(server)
    }

    fn place_nics(&self, server: &mut Server, place: &str) -> Result<(), TopoError> {
        let Some(relay_gpu) = &self.relay_gpu else { return Ok(()) };
        if relay_gpu.len() != server.nics.len() {
            let (found, nics) = (relay_gpu.len(), server.nics.len());
            return Err(TopoError::PerNic { place: place.into(), found, nics });
        }
        for (nic, (spec, &gpu)) in server.nics.iter_mut().zip(relay_gpu).enumerate() {
            if gpu >= server.gpus {
                return Err(TopoError::NoGpu { place: place.into(), nic, gpu, gpus: server.gpus });
            }
            spec.relay_gpu = GpuIdx(gpu);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Cluster, TopoError> {
        Cluster::from_toml(text, "c.toml")
    }

    #[test]
    fn rates_are_exact() {
        let rate = |text| parse_rate(text, "--nic-gbit", "Gbit/s");
        assert_eq!(rate("400"), Ok(400_000));
        assert_eq!(rate(" 12.5 "), Ok(12_500));
        assert_eq!(rate("0"), Ok(0));
        assert_eq!(rate("0.001"), Ok(1));
        assert_eq!(rate("1.500000"), Ok(1_500));
        for bad in ["", "-1", "1e3", "0.0001", "x", ".5", "1000001", "99999999999999999999", "1.2.3"] {
            assert!(rate(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn servers_may_differ() {
        let text = "[[server]]\ngpus = 8\nnics = 4\nnic_gbit = [100, 0, 12.5, 400]\ncount = 2\n\
                    [[server]]\npreset = \"p4d\"\n[[server]]\ngpus = 2\nrelay_gpu = [1, 0]\n";
        let c = read(text).unwrap();
        assert_eq!((c.server_count(), c.ranks(), c.nics()), (4, 26, 14));
        assert_eq!(c.servers()[1].nics[2].mbit_per_s, 12_500);
        assert_eq!(c.servers()[2], Server::preset("p4d").unwrap());
        assert_eq!(c.servers()[3].nics[0].relay_gpu, GpuIdx(1));
    }

    #[test]
    fn each_mistake_is_named() {
        for (text, message) in [
            ("", "c.toml:1: missing field `server`"),
            ("server = []", "c.toml: servers x GPUs must be from 1 to 16384, not 0"),
            ("[[server]]\nnics = 2", "c.toml:1: gpus must be from 1"),
            ("[[server]]\ngpus = 2\nspeed = 3", "c.toml:3: unknown field `speed`"),
            ("[[server]]\ngpus = 2\nnic_gbit = [1]", "c.toml:1: 1 values for 2 NICs"),
            ("[[server]]\ngpus = 2\nnic_gbit = -4", "c.toml:1: \"-4\" is no rate"),
            ("[[server]]\ngpus = 2\nrelay_gpu = [0, 2]", "c.toml:1: NIC 1 cannot be beside GPU 2"),
            ("[[server]]\ngpus = 99999999", "c.toml:1: gpus must be from 1 to 16384"),
            ("[[server]]\npreset = \"x\"", "c.toml:1: no preset \"x\""),
            ("[[server", "c.toml:1: "),
        ] {
            let found = read(text).unwrap_err().to_string();
            assert!(found.starts_with(message) && !found.contains('\n'), "{found}");
        }
    }
}
