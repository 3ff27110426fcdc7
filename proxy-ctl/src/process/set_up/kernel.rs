//! Computes which kernel parameters a configuration asks for, which is pure, and sets them.
//!
//! A timeout is written only if it has another value, and a limit only if it is lower than what is
//! asked for. A setting of zero leaves the parameter alone. kube-proxy does the same.
//!
//! Three things are no reason to end, because the datapath works without them:
//!
//! - The module of a parameter is not loaded.
//! - A file system is mounted read-only, as /sys and /proc/sys are in a container without
//!   privileges.
//! - The process of an ordinary user lacks the right to write a parameter.

use std::{
    fs, io,
    io::Write as _,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{config::Conntrack, node::facts};

/// A file of the kernel that holds a number.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::process) struct Parameter {
    /// The path from the root directory, without a leading slash.
    pub(in crate::process) path: &'static str,
    pub(in crate::process) wanted: Wanted,
    /// The field of the configuration that asks for it.
    pub(in crate::process) field: &'static str,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::process) enum Wanted {
    Exactly(u64),
    AtLeast(u64),
}

impl Wanted {
    const fn value(self) -> u64 {
        match self {
            Self::Exactly(value) | Self::AtLeast(value) => value,
        }
    }

    const fn is_met_by(self, found: u64) -> bool {
        match self {
            Self::Exactly(value) => found == value,
            Self::AtLeast(value) => found >= value,
        }
    }
}

const NETFILTER: [&str; 6] = [
    "proc/sys/net/netfilter/nf_conntrack_max",
    "proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established",
    "proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close_wait",
    "proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal",
    "proc/sys/net/netfilter/nf_conntrack_udp_timeout",
    "proc/sys/net/netfilter/nf_conntrack_udp_timeout_stream",
];
const HASH_SIZE: &str = "sys/module/nf_conntrack/parameters/hashsize";

/// The largest limit that results from `maxPerCore` on a machine with many cores.
const MOST_SCALED: u64 = 1 << 20;

/// Returns the parameters that the configuration asks for on a node with this many cores, in the
/// order of writing.
pub(in crate::process) fn wanted(config: &Conntrack, cores: u32) -> Vec<Parameter> {
    let [max, established, close_wait, be_liberal, udp, udp_stream] = NETFILTER;
    let mut parameters = Vec::new();
    let mut add = |path, wanted, field| parameters.push(Parameter { path, wanted, field });
    if let Some(entries) = conntrack_max(config, cores) {
        // The limit is never lowered (kubernetes#141943). Lowering an administrator's limit drops
        // connections, and fails where the file is read-only.
        add(max, Wanted::AtLeast(entries), "conntrack.maxPerCore");
        add(HASH_SIZE, Wanted::AtLeast(entries / 4), "conntrack.maxPerCore");
    }
    let mut timeout = |path, timeout: Duration, field| {
        if !timeout.is_zero() {
            add(path, Wanted::Exactly(timeout.as_secs()), field);
        }
    };
    timeout(established, config.tcp_established_timeout, "conntrack.tcpEstablishedTimeout");
    timeout(close_wait, config.tcp_close_wait_timeout, "conntrack.tcpCloseWaitTimeout");
    timeout(udp, config.udp_timeout, "conntrack.udpTimeout");
    timeout(udp_stream, config.udp_stream_timeout, "conntrack.udpStreamTimeout");
    if config.tcp_be_liberal {
        add(be_liberal, Wanted::Exactly(1), "conntrack.tcpBeLiberal");
    }
    parameters
}

/// Returns the limit of connections, or `None` if it stays as it is.
fn conntrack_max(config: &Conntrack, cores: u32) -> Option<u64> {
    let scaled = u64::from(config.max_per_core) * u64::from(cores);
    match scaled {
        0 => None,
        scaled if scaled > MOST_SCALED => Some(MOST_SCALED),
        scaled => Some(scaled.max(u64::from(config.min))),
    }
}

#[derive(Debug, thiserror::Error)]
pub(in crate::process) enum Error {
    #[error("reading {} for {field}: {source}", path.display())]
    Read { path: PathBuf, field: &'static str, source: io::Error },
    #[error("setting {} to {value} for {field}: {source}{}", path.display(), hint(source))]
    Write { path: PathBuf, value: u64, field: &'static str, source: io::Error },
}

fn hint(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::PermissionDenied {
        "; this needs privileges in the node's own network namespace, which --init-only uses once; 0 leaves the \
         parameter as it is"
    } else {
        ""
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum ParameterOutcome {
    AsWanted,
    Set,
    /// The kernel has no such parameter, because its module is not loaded.
    Missing,
    ReadOnly,
    Forbidden,
}

/// Parameters that could not be set, which does not end the start.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(in crate::process) struct Skipped {
    pub(in crate::process) missing: Vec<PathBuf>,
    pub(in crate::process) read_only: Vec<PathBuf>,
    /// Parameters that this process may not write, because it runs without CAP_NET_ADMIN.
    pub(in crate::process) forbidden: Vec<PathBuf>,
}

/// The kernel's files below a root directory.
#[derive(Clone, Debug)]
pub(in crate::process) struct Kernel {
    root: PathBuf,
    /// True if it is an error that parameters may not be set, because the process should have the
    /// right to.
    must_set: bool,
}

impl Default for Kernel {
    fn default() -> Self {
        Self { must_set: facts::capabilities().net_admin, ..Self::below("/") }
    }
}

impl Kernel {
    pub(in crate::process) fn below(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), must_set: true }
    }

    /// Sets parameters that differ, and logs the new values. Stops at the first error.
    pub(in crate::process) fn set(&self, parameters: &[Parameter]) -> Result<Skipped, Error> {
        let mut skipped = Skipped::default();
        for parameter in parameters {
            match self.set_one(parameter)? {
                ParameterOutcome::AsWanted => {}
                ParameterOutcome::Set => {
                    tracing::info!(
                        parameter = format!("/{}", parameter.path),
                        value = parameter.wanted.value(),
                        "Set sysctl"
                    );
                }
                ParameterOutcome::Missing => skipped.missing.push(self.path(parameter.path)),
                ParameterOutcome::ReadOnly => skipped.read_only.push(self.path(parameter.path)),
                ParameterOutcome::Forbidden => skipped.forbidden.push(self.path(parameter.path)),
            }
        }
        Ok(skipped)
    }

    fn set_one(&self, parameter: &Parameter) -> Result<ParameterOutcome, Error> {
        let Parameter { path, wanted, field } = *parameter;
        let path = self.path(path);
        match read(&path) {
            Ok(found) if wanted.is_met_by(found) => return Ok(ParameterOutcome::AsWanted),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(ParameterOutcome::Missing),
            Err(error) if self.forgives(&error) => return Ok(ParameterOutcome::Forbidden),
            // A parameter that is only raised must be readable.
            Err(source) if matches!(wanted, Wanted::AtLeast(_)) => {
                return Err(Error::Read { path, field, source });
            }
            Ok(_) | Err(_) => {}
        }
        let value = wanted.value();
        match write(&path, value) {
            Ok(()) => Ok(ParameterOutcome::Set),
            Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => Ok(ParameterOutcome::ReadOnly),
            Err(error) if self.forgives(&error) => Ok(ParameterOutcome::Forbidden),
            Err(source) => Err(Error::Write { path, value, field, source }),
        }
    }

    fn forgives(&self, error: &io::Error) -> bool {
        !self.must_set && error.kind() == io::ErrorKind::PermissionDenied
    }

    /// Returns the number of online CPUs of the machine, with those that this process may not use.
    /// `None` if it is unknown.
    pub(in crate::process) fn cores(&self) -> Option<u32> {
        let folder = self.path("sys/devices/system/cpu");
        let names = fs::read_dir(&folder).ok()?;
        let is_core = |name: &str| {
            name.strip_prefix("cpu")
                .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
        };
        // The first CPU often has no such file, because it is always on.
        let is_on = |name: &str| read(&folder.join(name).join("online")).map_or(true, |on| on != 0);
        let names = names.filter_map(|found| found.ok()?.file_name().into_string().ok());
        let count = names.filter(|name| is_core(name) && is_on(name)).count();
        u32::try_from(count).ok().filter(|count| *count > 0)
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }
}

fn read(path: &Path) -> io::Result<u64> {
    let text = fs::read_to_string(path)?;
    text.trim().parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Writes a parameter. It never creates a file, because a parameter that is not there cannot be
/// set.
fn write(path: &Path, value: u64) -> io::Result<()> {
    fs::OpenOptions::new().write(true).truncate(true).open(path)?.write_all(value.to_string().as_bytes())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use tempfile::TempDir;

    use super::*;
    use crate::config::Config;

    fn untouched() -> Conntrack {
        Conntrack {
            max_per_core: 0,
            min: 131_072,
            tcp_established_timeout: Duration::ZERO,
            tcp_close_wait_timeout: Duration::ZERO,
            udp_timeout: Duration::ZERO,
            udp_stream_timeout: Duration::ZERO,
            tcp_be_liberal: false,
        }
    }

    #[rstest]
    #[case::scaled(32_768, 131_072, 8, Some(262_144))]
    #[case::at_least_the_minimum(32_768, 131_072, 2, Some(131_072))]
    #[case::no_minimum(32_768, 0, 2, Some(65_536))]
    #[case::capped(32_768, 131_072, 64, Some(1_048_576))]
    #[case::the_cap_is_above_the_minimum(32_768, 2_000_000, 64, Some(1_048_576))]
    #[case::zero_ignores_the_minimum(0, 131_072, 8, None)]
    fn the_limit_of_connections(
        #[case] max_per_core: u32,
        #[case] min: u32,
        #[case] cores: u32,
        #[case] expected: Option<u64>,
    ) {
        assert_eq!(conntrack_max(&Conntrack { max_per_core, min, ..untouched() }, cores), expected);
    }

    #[test]
    fn defaults_are_those_of_kube_proxy() {
        let wanted: Vec<_> = wanted(&Config::default().conntrack, 8)
            .into_iter()
            .map(|parameter| (parameter.path.rsplit('/').next().unwrap(), parameter.wanted))
            .collect();
        assert_eq!(
            wanted,
            [
                ("nf_conntrack_max", Wanted::AtLeast(262_144)),
                ("hashsize", Wanted::AtLeast(65_536)),
                ("nf_conntrack_tcp_timeout_established", Wanted::Exactly(86_400)),
                ("nf_conntrack_tcp_timeout_close_wait", Wanted::Exactly(3_600)),
            ]
        );
    }

    #[test]
    fn zero_leaves_everything_alone() {
        assert_eq!(wanted(&untouched(), 8), []);
    }

    fn kernel(files: &[(&str, &str)]) -> (TempDir, Kernel) {
        let root = TempDir::new().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let kernel = Kernel::below(root.path());
        (root, kernel)
    }

    const MAX: Parameter =
        Parameter { path: NETFILTER[0], wanted: Wanted::AtLeast(131_072), field: "conntrack.maxPerCore" };
    const HASH: Parameter =
        Parameter { path: HASH_SIZE, wanted: Wanted::AtLeast(32_768), field: "conntrack.maxPerCore" };
    const ESTABLISHED: Parameter = Parameter {
        path: NETFILTER[1],
        wanted: Wanted::Exactly(86_400),
        field: "conntrack.tcpEstablishedTimeout",
    };

    /// Returns the text of a kernel's file after the default parameters of a node with four cores
    /// were set.
    fn after_defaults(path: &str, before: &str) -> String {
        let (root, kernel) = kernel(&[(path, before)]);
        kernel.set(&wanted(&Config::default().conntrack, 4)).unwrap();
        fs::read_to_string(root.path().join(path)).unwrap()
    }

    /// An administrator, or kube-proxy before 1.36, may have set a limit of several million
    /// connections.
    #[rstest]
    #[case::lower_is_raised("65536\n", "131072")]
    #[case::equal_is_not_written("131072\n", "131072\n")]
    #[case::higher_is_not_written("262144\n", "262144\n")]
    #[case::higher_than_the_cap_is_not_written("4194304\n", "4194304\n")]
    fn the_limit_of_connections_is_only_raised(#[case] before: &str, #[case] after: &str) {
        assert_eq!(after_defaults(NETFILTER[0], before), after);
    }

    #[rstest]
    #[case::lower_is_raised("16384\n", "32768")]
    #[case::higher_is_not_written("65536\n", "65536\n")]
    fn the_hash_table_only_grows(#[case] before: &str, #[case] after: &str) {
        assert_eq!(after_defaults(HASH_SIZE, before), after);
    }

    #[rstest]
    #[case::lower("3600\n", "86400")]
    #[case::higher("432000\n", "86400")]
    #[case::longer_than_the_new_one("1000000000\n", "86400")]
    #[case::equal("86400\n", "86400\n")]
    #[case::unreadable("many\n", "86400")]
    fn a_timeout_is_written_if_it_differs(#[case] before: &str, #[case] after: &str) {
        assert_eq!(after_defaults(NETFILTER[1], before), after);
    }

    #[test]
    fn a_module_that_is_not_loaded_is_no_error() {
        let (root, kernel) = kernel(&[]);
        let skipped = kernel.set(&[MAX, HASH]).unwrap();
        assert_eq!(skipped.missing, [root.path().join(NETFILTER[0]), root.path().join(HASH_SIZE)]);
        assert!(fs::read_dir(root.path()).unwrap().next().is_none(), "nothing is made");
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_what_is_mounted_read_only_is_left() {
        use nix::{
            mount::{MntFlags, MsFlags, mount, umount2},
            sched::{CloneFlags, unshare},
        };
        let files = [(NETFILTER[0], "4194304\n"), (HASH_SIZE, "65536\n"), (NETFILTER[1], "3600\n")];
        let (root, kernel) = kernel(&files);
        let path = root.path().to_owned();
        let none = None::<&str>;
        // The thread has a mount namespace of its own.
        let skipped = std::thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNS).unwrap();
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
            mount(Some(&path), &path, none, MsFlags::MS_BIND, none).unwrap();
            let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
            mount(none, &path, none, read_only, none).unwrap();
            let skipped = kernel.set(&[MAX, HASH, ESTABLISHED]);
            umount2(&path, MntFlags::MNT_DETACH).unwrap();
            skipped
        });
        let skipped = skipped.join().unwrap().unwrap();
        assert_eq!(
            skipped.read_only,
            [root.path().join(NETFILTER[1])],
            "limit and hash table are large enough"
        );
        for (path, text) in files {
            assert_eq!(fs::read_to_string(root.path().join(path)).unwrap(), text);
        }
    }

    #[rstest]
    #[case::with_the_right_to(true)]
    #[case::as_an_ordinary_user(false)]
    fn what_may_not_be_set(#[case] must_set: bool) {
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        let kernel = Kernel { must_set, ..Kernel::below("/") };
        assert_eq!(kernel.forgives(&denied), !must_set);
        assert!(!kernel.forgives(&io::Error::from(io::ErrorKind::InvalidInput)), "that is no want of rights");
    }

    #[test]
    fn a_hash_size_that_makes_no_sense_is_an_error_that_names_its_field() {
        let (_root, kernel) = kernel(&[(HASH_SIZE, "many\n")]);
        let error = kernel.set(&[HASH]).unwrap_err().to_string();
        assert!(error.contains("conntrack.maxPerCore") && error.contains("hashsize"), "{error}");
    }

    #[test]
    fn cores_that_are_switched_off_do_not_count() {
        let (root, kernel) = kernel(&[
            ("sys/devices/system/cpu/cpu0/topology/core_id", "0\n"),
            ("sys/devices/system/cpu/cpu1/online", "1\n"),
            ("sys/devices/system/cpu/cpu2/online", "0\n"),
            ("sys/devices/system/cpu/cpufreq/boost", "0\n"),
            ("sys/devices/system/cpu/cpuidle/current_driver", "none\n"),
        ]);
        assert_eq!(kernel.cores(), Some(2));
        assert_eq!(Kernel::below(root.path().join("nothing")).cores(), None);
    }
}
