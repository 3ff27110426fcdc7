//! The facts of a node that modes ask for. They are parsed from texts, which code with access to
//! the node has read.

use std::{collections::BTreeMap, fmt};

use super::Modules;

/// The kernel parameters below /proc/sys that mode ipvs may want another value of.
pub const IPVS_PARAMETERS: [&str; 7] = [
    "net/ipv4/vs/conntrack",
    "net/ipv4/vs/conn_reuse_mode",
    "net/ipv4/vs/expire_nodest_conn",
    "net/ipv4/vs/expire_quiescent_template",
    "net/ipv4/ip_forward",
    "net/ipv4/conf/all/arp_ignore",
    "net/ipv4/conf/all/arp_announce",
];

/// The version of a kernel or a tool. If it has no third number, `patch` is 0.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub struct Version {
    major: u32,
    minor: u32,
    patch: u32,
}

pub type KernelVersion = Version;

impl Version {
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self { major, minor, patch }
    }

    /// Parses a text that begins with a version, such as `6.1.0-rc7-amd64`.
    pub fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        let (major, minor) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
        Some(Self { major, minor, patch: numbers.next().and_then(Result::ok).unwrap_or(0) })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)?;
        if self.patch > 0 { write!(f, ".{}", self.patch) } else { Ok(()) }
    }
}

/// The capabilities of this process.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Capabilities {
    pub sys_admin: bool,
    /// CAP_BPF, which exists since Linux 5.8. A process with CAP_SYS_ADMIN does not need it.
    pub bpf: bool,
    /// CAP_PERFMON, which exists since Linux 5.8. A process with CAP_SYS_ADMIN does not need it.
    pub perfmon: bool,
    pub net_admin: bool,
    pub setgid: bool,
}

/// The part of the kernel that an iptables tool writes its rules to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Backend {
    /// The tables of iptables itself.
    Legacy,
    NfTables,
}

impl Backend {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Legacy => "legacy",
            Self::NfTables => "nf_tables",
        }
    }
}

/// The tool iptables-save or ip6tables-save.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Tool {
    pub version: Version,
    pub backend: Backend,
}

impl Tool {
    /// Parses a text such as `iptables-save v1.8.9 (nf_tables)`. Tools older than 1.8 have one
    /// backend, and do not name it.
    pub fn parse(told: &str) -> Option<Self> {
        let version = Version::parse(told.split_once(" v")?.1)?;
        let backend = if told.contains("(nf_tables)") { Backend::NfTables } else { Backend::Legacy };
        Some(Self { version, backend })
    }
}

impl fmt::Display for Tool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.version, self.backend.name())
    }
}

/// Everything that some mode asks of a node. Code with access to the node gathers it.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct HostFacts {
    /// The text that `uname -r` prints.
    pub kernel_release: String,
    pub capabilities: Capabilities,
    pub modules: Modules,
    /// The iptables tools, at most one of each backend.
    pub iptables: Vec<Tool>,
    pub ip6tables: Vec<Tool>,
    /// The newest protocol that the kernel's ipset speaks. The tools speak protocol 6 from version
    /// 6.0 on. `None` if ipset is not loaded, or does not answer this process.
    pub ipset_protocol: Option<u8>,
    /// True if packets to 127.0.0.0/8 may be translated to other addresses
    /// (net.ipv4.conf.all.route_localnet). `None` if the kernel has no such parameter.
    pub route_localnet: Option<bool>,
    /// The values of those [`IPVS_PARAMETERS`] that exist. IPVS creates its own when it is loaded.
    pub ipvs_parameters: BTreeMap<&'static str, u32>,
    /// True if this process may write kernel parameters of the network.
    pub parameters_writable: bool,
    pub ipv6: bool,
    /// True if KUBE_PROXY_NFTABLES_SKIP_KERNEL_VERSION_CHECK is set.
    pub skip_nftables_kernel_check: bool,
    /// True if the kernel is built with CONFIG_PREEMPT_RT.
    pub realtime: bool,
}

/// The first kernel whose CONFIG_PREEMPT_RT lets softirqs of one CPU preempt each other.
const SOFTIRQS_PREEMPT: KernelVersion = KernelVersion::new(6, 18, 0);
/// The kernel option that makes softirqs of one CPU wait for each other, as before Linux 6.18.
const SOFTIRQ_LOCK: &str = "CONFIG_PREEMPT_RT_NEEDS_BH_LOCK";

impl HostFacts {
    /// Returns the kernel's version, or `None` if it is not known.
    pub fn kernel(&self) -> Option<KernelVersion> {
        Version::parse(&self.kernel_release)
    }

    /// Returns true if work that runs with softirqs off can be preempted by other such work on the
    /// same CPU.
    pub fn softirqs_preempt_each_other(&self) -> bool {
        self.realtime
            && match self.modules.option(SOFTIRQ_LOCK) {
                Some("n") => true,
                // A kernel without the option always has the lock.
                Some(_) => false,
                None => self.kernel() >= Some(SOFTIRQS_PREEMPT),
            }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::patch("6.12.9-amd64", Some(Version::new(6, 12, 9)))]
    #[case::candidate("7.2-rc1", Some(Version::new(7, 2, 0)))]
    #[case::two_numbers("5.10", Some(Version::new(5, 10, 0)))]
    #[case::no_number("next-20261101", None)]
    #[case::one_number("7", None)]
    fn versions(#[case] text: &str, #[case] version: Option<Version>) {
        assert_eq!(Version::parse(text), version);
    }

    #[rstest]
    #[case::nft("iptables-save v1.8.9 (nf_tables)\n", Some((Version::new(1, 8, 9), Backend::NfTables)))]
    #[case::legacy("ip6tables-save v1.8.10 (legacy)\n", Some((Version::new(1, 8, 10), Backend::Legacy)))]
    #[case::before_backends("iptables v1.6.1", Some((Version::new(1, 6, 1), Backend::Legacy)))]
    #[case::another_program("Usage: iptables", None)]
    fn tools(#[case] told: &str, #[case] expected: Option<(Version, Backend)>) {
        assert_eq!(Tool::parse(told).map(|tool| (tool.version, tool.backend)), expected);
    }
}
