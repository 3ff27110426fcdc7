//! What a node has, as far as modes ask for it. Parsed from texts; whoever may look reads them.

use std::{collections::BTreeMap, fmt};

use super::Modules;

/// Kernel parameters that mode ipvs may want another value of, below /proc/sys.
pub const IPVS_PARAMETERS: [&str; 7] = [
    "net/ipv4/vs/conntrack",
    "net/ipv4/vs/conn_reuse_mode",
    "net/ipv4/vs/expire_nodest_conn",
    "net/ipv4/vs/expire_quiescent_template",
    "net/ipv4/ip_forward",
    "net/ipv4/conf/all/arp_ignore",
    "net/ipv4/conf/all/arp_announce",
];

/// Of a kernel or a tool; a third number is 0 where there is none.
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

    /// From a text that begins with it, such as `6.1.0-rc7-amd64`.
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

/// What this process may do.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Capabilities {
    pub sys_admin: bool,
    /// 5.8; `sys_admin` includes it.
    pub bpf: bool,
    /// 5.8; `sys_admin` includes it.
    pub perfmon: bool,
    pub net_admin: bool,
    pub setgid: bool,
}

/// Where the rules of an iptables tool go.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Backend {
    /// Tables of their own in the kernel.
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

/// iptables-save or ip6tables-save.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Tool {
    pub version: Version,
    pub backend: Backend,
}

impl Tool {
    /// From `iptables-save v1.8.9 (nf_tables)`. Tools older than 1.8 have one backend, and do not name it.
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

/// What each mode asks of a node, gathered by whoever may look.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct HostFacts {
    /// As `uname -r`.
    pub kernel_release: String,
    pub capabilities: Capabilities,
    pub modules: Modules,
    /// At most one of each backend.
    pub iptables: Vec<Tool>,
    pub ip6tables: Vec<Tool>,
    /// The newest protocol that the kernel's ipset speaks; the tools' versions from 6.0 on have protocol 6. `None`: it is not
    /// loaded, or does not answer this process.
    pub ipset_protocol: Option<u8>,
    /// Packets to 127.0.0.0/8 may be translated to other addresses (net.ipv4.conf.all.route_localnet). `None`: the kernel has no
    /// such parameter.
    pub route_localnet: Option<bool>,
    /// Of [`IPVS_PARAMETERS`] those that are there. IPVS makes its own when it is loaded.
    pub ipvs_parameters: BTreeMap<&'static str, u32>,
    /// This process may write kernel parameters of the network.
    pub parameters_writable: bool,
    pub ipv6: bool,
    /// KUBE_PROXY_NFTABLES_SKIP_KERNEL_VERSION_CHECK is set.
    pub skip_nftables_kernel_check: bool,
    /// The kernel is built with CONFIG_PREEMPT_RT.
    pub realtime: bool,
}

/// The first kernel whose CONFIG_PREEMPT_RT lets softirqs of one CPU preempt each other.
const SOFTIRQS_PREEMPT: KernelVersion = KernelVersion::new(6, 18, 0);
/// Has them wait for each other, as they did before.
const SOFTIRQ_LOCK: &str = "CONFIG_PREEMPT_RT_NEEDS_BH_LOCK";

impl HostFacts {
    /// `None`: not known.
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
