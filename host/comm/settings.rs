//! Every environment variable that the library reads. Nothing else in the library asks the environment.

mod verbs;

use std::ffi::OsString;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::num::NonZeroU16;
use std::time::Duration;

use super::NicBackend;
use super::bootstrap::BootstrapConfig;
use super::device::GpuKind;
use super::secret::{Secret, SecretError};
use crate::topo::Rank;
use crate::verbs::VerbsSettings;

/// Where a rank and a size may come from, best first. The first pair of which both are set counts.
const PLACES: [(&str, &str); 5] = [
    ("FUSELINK_RANK", "FUSELINK_SIZE"),
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
];

/// An environment variable, or the lack of one, is wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// It is not UTF-8.
    #[error("{name} is not valid UTF-8")]
    NotUnicode {
        /// The variable.
        name: &'static str,
    },
    /// It is not the number that is wanted.
    #[error("{name}={value:?} is not {wanted}")]
    Malformed {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        wanted: &'static str,
    },
    /// Of a pair, one is set.
    #[error("{set} is set but {unset} is not; set both or neither")]
    Half {
        /// The variable that is there.
        set: &'static str,
        /// The one that is not.
        unset: &'static str,
    },
    /// Rank and size do not fit each other.
    #[error("{rank_name}={rank} is not below {size_name}={size}; ranks count from 0")]
    Place {
        /// Where the rank came from.
        rank_name: &'static str,
        /// The rank.
        rank: u32,
        /// Where the size came from.
        size_name: &'static str,
        /// Number of ranks.
        size: u32,
    },
    /// The relay pool does not hold one slot.
    #[error("FUSELINK_RELAY_BYTES={relay_bytes} is less than one slot (FUSELINK_SLOT_BYTES={slot_bytes})")]
    NoSlotFits {
        /// The pool.
        relay_bytes: u64,
        /// One slot.
        slot_bytes: u64,
    },
    /// A job of several ranks lacks what they need to meet.
    #[error("a job of {size} ranks needs {name}; {advice}")]
    Lacking {
        /// Number of ranks.
        size: u32,
        /// The variable.
        name: &'static str,
        /// What to put there.
        advice: &'static str,
    },
    /// The root's name has no address.
    #[error("cannot resolve {host}:{port}, the address of rank 0: {source}")]
    Resolve {
        /// The name.
        host: String,
        /// The port.
        port: u16,
        /// The system's reason.
        source: io::Error,
    },
    /// The secret cannot be used.
    #[error("FUSELINK_SECRET: {source}")]
    Secret {
        /// Why.
        #[from]
        source: SecretError,
    },
}

/// Where rank 0 listens, before its name is looked up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootAddr {
    /// A host name or an address.
    pub host: String,
    /// A TCP port.
    pub port: u16,
}

impl RootAddr {
    /// Looks the name up. Of several addresses the first counts, on every rank alike, IPv4 before IPv6.
    ///
    /// # Errors
    /// [`SettingsError::Resolve`].
    pub fn resolve(&self) -> Result<SocketAddr, SettingsError> {
        let failed = |source| SettingsError::Resolve { host: self.host.clone(), port: self.port, source };
        let mut found: Vec<_> = (self.host.as_str(), self.port).to_socket_addrs().map_err(failed)?.collect();
        found.sort_by_key(SocketAddr::is_ipv6);
        let none = || failed(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
        found.into_iter().next().ok_or_else(none)
    }
}

/// What the environment says. An empty variable counts as unset.
#[derive(Debug, Clone)]
pub struct Settings {
    /// This process's rank, from 0. `FUSELINK_RANK`, else `RANK` (torchrun), `OMPI_COMM_WORLD_RANK` (Open MPI),
    /// `PMIX_RANK`, `SLURM_PROCID`; always from the same source as the size. Default 0.
    pub rank: Rank,
    /// Number of ranks in the job. `FUSELINK_SIZE`, else `WORLD_SIZE`, `OMPI_COMM_WORLD_SIZE`, `SLURM_NTASKS`.
    /// Default 1.
    pub size: u32,
    /// Where rank 0 listens, `host:port` (`[address]:port` for IPv6). `FUSELINK_ROOT`, else `MASTER_ADDR` and
    /// `MASTER_PORT` (torchrun; give `FUSELINK_ROOT` when torch itself listens on that port). Default: none; a job
    /// of one rank needs none.
    pub root: Option<RootAddr>,
    /// What all ranks prove to each other, any text. `FUSELINK_SECRET`. Default: none; a job of one rank needs none.
    pub secret: Option<Secret>,
    /// Cap of the relay memory of one GPU, in bytes, K, M or G (powers of 1024). The slots of the GPU's own traffic are part of
    /// it and always there; the rest is lent to other ranks of the server when they want it. With less there are fewer and
    /// smaller slots, then fewer lenders: who gets nothing takes its direct NIC. `FUSELINK_RELAY_BYTES`. Default 256M.
    pub relay_bytes: u64,
    /// Size of one slot, hence of the largest message, in bytes, K, M or G. `FUSELINK_SLOT_BYTES`. Default 512K.
    pub slot_bytes: u64,
    /// The GPUs: `emu` (emulated), `cuda` (the device whose number is the rank's place in its server, of those that
    /// the process sees), or `cuda:N` (that device). `FUSELINK_GPU`. Default emu.
    pub gpu: GpuKind,
    /// Blocks of the library's grids, 1 to 65535: multiprocessors that it takes from the computation, against the speed at which
    /// bytes are copied. `FUSELINK_BLOCKS`. Default: as many as suit the GPU (docs/cuda.md).
    pub blocks: Option<NonZeroU16>,
    /// Longest that any wait may take, in milliseconds, at least 1. `FUSELINK_TIMEOUT_MS`. Default 10000.
    pub timeout: Duration,
    /// What carries messages between servers: `emu` or `verbs`. `FUSELINK_NIC`. Default `emu`.
    pub nic: NicBackend,
    /// How NICs over verbs are used. `FUSELINK_VERBS_*`: each field names its own.
    pub verbs: VerbsSettings,
}

impl Settings {
    /// Default of [`Settings::relay_bytes`].
    pub const RELAY_BYTES: u64 = 256 << 20;
    /// Default of [`Settings::slot_bytes`].
    pub const SLOT_BYTES: u64 = 512 << 10;
    /// Default of [`Settings::timeout`].
    pub const TIMEOUT: Duration = Duration::from_millis(10_000);

    /// Reads the environment of the process.
    ///
    /// # Errors
    /// As [`from_lookup`](Self::from_lookup).
    pub fn from_env() -> Result<Self, SettingsError> {
        Self::from_lookup(|name| std::env::var_os(name))
    }

    /// Reads an environment given as a function from names to values.
    ///
    /// # Errors
    /// [`SettingsError`], for the first variable that is wrong.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, SettingsError> {
        let env = Env(&lookup);
        let (rank, size) = env.place()?;
        let relay_bytes = env.bytes("FUSELINK_RELAY_BYTES")?.unwrap_or(Self::RELAY_BYTES);
        let slot_bytes = env.bytes("FUSELINK_SLOT_BYTES")?.unwrap_or(Self::SLOT_BYTES);
        if !(1..=u64::from(u32::MAX)).contains(&slot_bytes) {
            let wanted = "at least 1 byte and below 4G";
            return Err(malformed("FUSELINK_SLOT_BYTES", &slot_bytes.to_string(), wanted));
        }
        if relay_bytes < slot_bytes {
            return Err(SettingsError::NoSlotFits { relay_bytes, slot_bytes });
        }
        let secret = env.text("FUSELINK_SECRET")?.map(|s| Secret::new(&s)).transpose()?;
        let (root, timeout) = (env.root()?, env.timeout()?.unwrap_or(Self::TIMEOUT));
        let (nic, verbs, gpu, blocks) = (env.nic_backend()?, env.verbs()?, env.gpu()?, env.blocks()?);
        Ok(Self { rank, size, root, secret, relay_bytes, slot_bytes, gpu, blocks, timeout, nic, verbs })
    }

    /// What the ranks need to meet.
    ///
    /// # Errors
    /// [`SettingsError::Lacking`] when a job of several ranks has no root address or secret;
    /// [`SettingsError::Resolve`].
    pub fn bootstrap(&self) -> Result<BootstrapConfig, SettingsError> {
        let (rank, size, deadline) = (self.rank, self.size, self.timeout);
        let lacking = |name, advice| SettingsError::Lacking { size, name, advice };
        let alone = size == 1;
        let root = match &self.root {
            Some(root) if !alone => root.resolve()?,
            None if !alone => {
                return Err(lacking("FUSELINK_ROOT", "set it to HOST:PORT of rank 0 on every rank"));
            }
            _ => SocketAddr::from(([127, 0, 0, 1], 0)),
        };
        let secret = match &self.secret {
            Some(secret) => secret.clone(),
            None if alone => Secret::generate()?,
            None => return Err(lacking("FUSELINK_SECRET", "set it to one random text on every rank")),
        };
        Ok(BootstrapConfig { rank, size, root, secret, deadline })
    }
}

struct Env<'a>(&'a dyn Fn(&str) -> Option<OsString>);

impl Env<'_> {
    fn text(&self, name: &'static str) -> Result<Option<String>, SettingsError> {
        match (self.0)(name).filter(|v| !v.is_empty()) {
            None => Ok(None),
            Some(value) => value.into_string().map(Some).map_err(|_| SettingsError::NotUnicode { name }),
        }
    }

    fn number(&self, name: &'static str) -> Result<Option<u64>, SettingsError> {
        let parse = |v: String| v.trim().parse().map_err(|_| malformed(name, &v, "a whole number"));
        self.text(name)?.map(parse).transpose()
    }

    fn bytes(&self, name: &'static str) -> Result<Option<u64>, SettingsError> {
        let wanted = "a number of bytes, as 1048576, 1024K, 1M or 1G";
        let parse = |v: String| parse_bytes(v.trim()).ok_or_else(|| malformed(name, &v, wanted));
        self.text(name)?.map(parse).transpose()
    }

    fn timeout(&self) -> Result<Option<Duration>, SettingsError> {
        let name = "FUSELINK_TIMEOUT_MS";
        // A deadline is added to clocks; a year is as good as no end and overflows none.
        let fits = |ms: u64| (1..=365 * 86_400_000).contains(&ms).then(|| Duration::from_millis(ms));
        let wanted = "between 1 millisecond and a year";
        let check = |ms: u64| fits(ms).ok_or_else(|| malformed(name, &ms.to_string(), wanted));
        self.number(name)?.map(check).transpose()
    }

    fn gpu(&self) -> Result<GpuKind, SettingsError> {
        let name = "FUSELINK_GPU";
        let wanted = "emu, cuda or cuda:N";
        let parse = |v: String| GpuKind::parse(v.trim()).ok_or_else(|| malformed(name, &v, wanted));
        Ok(self.text(name)?.map(parse).transpose()?.unwrap_or_default())
    }

    fn blocks(&self) -> Result<Option<NonZeroU16>, SettingsError> {
        let name = "FUSELINK_BLOCKS";
        let fit = |n: u64| u16::try_from(n).ok().and_then(NonZeroU16::new);
        let fit = |n: u64| fit(n).ok_or_else(|| malformed(name, &n.to_string(), "between 1 and 65535"));
        self.number(name)?.map(fit).transpose()
    }

    fn u32(&self, name: &'static str) -> Result<Option<u32>, SettingsError> {
        let fit = |n: u64| u32::try_from(n).map_err(|_| malformed(name, &n.to_string(), "below 4294967296"));
        self.number(name)?.map(fit).transpose()
    }

    /// Rank and size, from one source.
    fn place(&self) -> Result<(Rank, u32), SettingsError> {
        let mut half = None;
        for (rank_name, size_name) in PLACES {
            let ours = rank_name == "FUSELINK_RANK";
            match (self.text(rank_name)?.is_some(), self.text(size_name)?.is_some()) {
                (true, true) => return self.pair(rank_name, size_name),
                // Ours are never set by accident; the others' may be.
                (true, false) if ours => {
                    return Err(SettingsError::Half { set: rank_name, unset: size_name });
                }
                (false, true) if ours => {
                    return Err(SettingsError::Half { set: size_name, unset: rank_name });
                }
                (true, false) => half = half.or(Some((rank_name, size_name))),
                (false, _) => {}
            }
        }
        match half {
            Some((set, unset)) => Err(SettingsError::Half { set, unset }),
            None => Ok((Rank(0), 1)),
        }
    }

    fn pair(&self, rank_name: &'static str, size_name: &'static str) -> Result<(Rank, u32), SettingsError> {
        // Both are set.
        let (rank, size) = (self.u32(rank_name)?.unwrap_or(0), self.u32(size_name)?.unwrap_or(1));
        if rank < size {
            Ok((Rank(rank), size))
        } else {
            Err(SettingsError::Place { rank_name, rank, size_name, size })
        }
    }

    fn root(&self) -> Result<Option<RootAddr>, SettingsError> {
        let name = "FUSELINK_ROOT";
        if let Some(text) = self.text(name)? {
            let root = parse_root(text.trim());
            return root.map(Some).ok_or_else(|| malformed(name, &text, "HOST:PORT"));
        }
        let (host, port) = (self.text("MASTER_ADDR")?, self.text("MASTER_PORT")?);
        let (Some(host), Some(port)) = (host, port) else { return Ok(None) };
        match port.trim().parse() {
            Ok(port) => Ok(Some(RootAddr { host, port })),
            Err(_) => Err(malformed("MASTER_PORT", &port, "a port number")),
        }
    }
}

fn malformed(name: &'static str, value: &str, wanted: &'static str) -> SettingsError {
    SettingsError::Malformed { name, value: value.to_owned(), wanted }
}

/// `HOST:PORT`, an IPv6 address in brackets.
fn parse_root(text: &str) -> Option<RootAddr> {
    let (host, port) = text.rsplit_once(':')?;
    let bracketed = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
    let host = bracketed.unwrap_or(host);
    let port = port.parse().ok()?;
    let sane = !host.is_empty() && (bracketed.is_some() || !host.contains([':', '[', ']']));
    sane.then(|| RootAddr { host: host.to_owned(), port })
}

/// A number, with K, M or G for powers of 1024.
fn parse_bytes(text: &str) -> Option<u64> {
    let shift = match text.bytes().last()?.to_ascii_uppercase() {
        b'K' => 10,
        b'M' => 20,
        b'G' => 30,
        _ => return text.parse().ok(),
    };
    text[..text.len() - 1].parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    pub(super) fn read(vars: &[(&str, &str)]) -> Result<Settings, SettingsError> {
        Settings::from_lookup(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into()))
    }

    #[track_caller]
    pub(super) fn rejected(vars: &[(&str, &str)], says: &str) {
        let error = read(vars).unwrap_err().to_string();
        assert!(error.contains(says) && !error.contains('\n'), "{error}");
    }

    #[test]
    fn an_empty_environment_is_a_job_of_one() {
        for vars in [&[][..], &[("FUSELINK_RANK", ""), ("FUSELINK_SECRET", "")]] {
            let s = read(vars).unwrap();
            assert_eq!((s.rank, s.size, s.root.is_none(), s.secret.is_none()), (Rank(0), 1, true, true));
            assert_eq!((s.relay_bytes, s.slot_bytes), (Settings::RELAY_BYTES, Settings::SLOT_BYTES));
            assert_eq!((s.timeout, s.gpu, s.blocks), (Duration::from_secs(10), GpuKind::Emu, None));
            assert_eq!(s.bootstrap().unwrap().size, 1);
        }
    }

    #[test]
    fn each_launcher_is_understood_and_the_sources_do_not_mix() {
        let place = |vars: &[_]| read(vars).map(|s| (s.rank.0, s.size)).unwrap();
        let slurm = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "9")];
        let pmix = [("PMIX_RANK", "2"), ("SLURM_NTASKS", "9")];
        let ompi = [("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "8")];
        let torch = [("RANK", "4"), ("WORLD_SIZE", "7")];
        let own = [("FUSELINK_RANK", "5"), ("FUSELINK_SIZE", "6")];
        let mut vars = Vec::new();
        for (source, expected) in
            [(slurm, (1, 9)), (pmix, (2, 9)), (ompi, (3, 8)), (torch, (4, 7)), (own, (5, 6))]
        {
            vars.extend(source);
            assert_eq!(place(&source), expected);
            assert_eq!(place(&vars), expected, "the better source wins");
        }
        assert_eq!(place(&[("RANK", "corporal"), ompi[0], ompi[1]]), (3, 8), "a stray RANK is not torchrun");
        assert_eq!(place(&[("SLURM_NTASKS", "9")]), (0, 1), "an allocation without a step");
    }

    #[test]
    fn half_a_place_is_an_error_that_names_the_other_half() {
        rejected(&[("FUSELINK_RANK", "1")], "FUSELINK_SIZE is not");
        rejected(&[("FUSELINK_SIZE", "2"), ("RANK", "0"), ("WORLD_SIZE", "2")], "FUSELINK_RANK is not");
        rejected(&[("RANK", "1")], "WORLD_SIZE is not");
    }

    #[test]
    fn wrong_values_are_named_with_what_is_wanted() {
        rejected(
            &[("FUSELINK_RANK", "2"), ("FUSELINK_SIZE", "2")],
            "FUSELINK_RANK=2 is not below FUSELINK_SIZE=2",
        );
        rejected(&[("FUSELINK_RANK", "-1"), ("FUSELINK_SIZE", "2")], "FUSELINK_RANK=\"-1\"");
        rejected(&[("FUSELINK_RANK", "0"), ("FUSELINK_SIZE", "4294967296")], "FUSELINK_SIZE");
        rejected(&[("FUSELINK_TIMEOUT_MS", "0")], "1 millisecond");
        rejected(&[("FUSELINK_TIMEOUT_MS", "18446744073709551615")], "a year");
        rejected(&[("FUSELINK_TIMEOUT_MS", "1s")], "a whole number");
        rejected(&[("FUSELINK_RELAY_BYTES", "1T")], "1G");
        rejected(&[("FUSELINK_RELAY_BYTES", "18446744073709551615K")], "FUSELINK_RELAY_BYTES");
        rejected(&[("FUSELINK_RELAY_BYTES", "1é")], "FUSELINK_RELAY_BYTES");
        rejected(&[("FUSELINK_RELAY_BYTES", "1K")], "FUSELINK_SLOT_BYTES=524288");
        rejected(&[("FUSELINK_SLOT_BYTES", "0")], "at least 1");
        rejected(&[("FUSELINK_SLOT_BYTES", "4G")], "below 4G");
        rejected(&[("MASTER_ADDR", "h"), ("MASTER_PORT", "70000")], "MASTER_PORT");
        for blocks in ["0", "65536"] {
            rejected(&[("FUSELINK_BLOCKS", blocks)], "between 1 and 65535");
        }
        for gpu in ["rocm", "cuda:", "cuda:-1", "CUDA"] {
            rejected(&[("FUSELINK_GPU", gpu)], "emu, cuda or cuda:N");
        }
        for root in ["h", "h:", ":1", "h:x", "::1:5", "[::1:5"] {
            rejected(&[("FUSELINK_ROOT", root)], "HOST:PORT");
        }
    }

    #[test]
    fn a_value_that_is_no_text_is_named() {
        let lookup = |name: &str| (name == "FUSELINK_SECRET").then(|| OsString::from_vec(vec![0xff]));
        let error = Settings::from_lookup(lookup).unwrap_err();
        assert!(matches!(error, SettingsError::NotUnicode { name: "FUSELINK_SECRET" }));
    }

    #[test]
    fn sizes_roots_and_gpus_parse() {
        let gpu = |text| read(&[("FUSELINK_GPU", text)]).unwrap().gpu;
        let cuda = |ordinal| GpuKind::Cuda { ordinal };
        assert_eq!([gpu("emu"), gpu("cuda"), gpu("cuda:3")], [GpuKind::Emu, cuda(None), cuda(Some(3))]);
        let blocks = |text| read(&[("FUSELINK_BLOCKS", text)]).unwrap().blocks.unwrap().get();
        assert_eq!([blocks("1"), blocks("48")], [1, 48]);
        let bytes = |text| read(&[("FUSELINK_RELAY_BYTES", text)]).unwrap().relay_bytes;
        assert_eq!(
            [bytes("1048576"), bytes("1024k"), bytes("2M"), bytes("3G")],
            [1 << 20, 1 << 20, 2 << 20, 3 << 30]
        );
        let root = |text| read(&[("FUSELINK_ROOT", text)]).unwrap().root.unwrap();
        assert_eq!(root("node-1:29500"), RootAddr { host: "node-1".into(), port: 29500 });
        assert_eq!(root("[::1]:5").resolve().unwrap(), "[::1]:5".parse().unwrap());
        let torch = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")];
        assert_eq!(
            read(&torch).unwrap().root.unwrap().resolve().unwrap(),
            "127.0.0.1:29500".parse().unwrap()
        );
    }

    #[test]
    fn several_ranks_need_root_and_secret() {
        let two = [
            ("FUSELINK_RANK", "1"),
            ("FUSELINK_SIZE", "2"),
            ("FUSELINK_ROOT", "127.0.0.1:9"),
            ("FUSELINK_SECRET", "s"),
        ];
        let config = read(&two).unwrap().bootstrap().unwrap();
        assert_eq!((config.rank, config.size, config.root.port()), (Rank(1), 2, 9));
        for (cut, name) in [(3, "FUSELINK_SECRET"), (2, "FUSELINK_ROOT")] {
            let error = read(&two[..cut]).unwrap().bootstrap().unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    #[test]
    fn settings_never_print_the_secret() {
        let s = read(&[("FUSELINK_SECRET", "hunter2")]).unwrap();
        assert!(!format!("{s:?}").contains("hunter2"));
    }
}
