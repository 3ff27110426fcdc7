//! Which mode a node gets, and why: a pure function of what was asked for and of what the node can do.

use std::{fmt, path::PathBuf};

use crate::config::{RequestedMode, SocketLoadBalancing};

/// The oldest kernel that the eBPF programs are made for.
const OLDEST: KernelVersion = KernelVersion { major: 5, minor: 10 };

/// How a node is programmed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Mode {
    Ebpf,
}

impl Mode {
    /// As `/proxyMode` answers.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ebpf => "ebpf",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub struct KernelVersion {
    pub major: u32,
    pub minor: u32,
}

impl KernelVersion {
    /// From a release such as `6.1.0-rc7-amd64`.
    pub fn parse(release: &str) -> Option<Self> {
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        Some(Self { major: numbers.next()?.ok()?, minor: numbers.next()?.ok()? })
    }
}

impl fmt::Display for KernelVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What lies at the path where tables are to be pinned.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum BpfFilesystem {
    Mounted,
    /// Nothing is there, and this process may mount it.
    Mountable,
    Missing,
}

/// Where the socket hooks are attached.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Cgroup2 {
    /// The root of the hierarchy, or the folder that the configuration names.
    Mounted(PathBuf),
    /// It is not mounted, and this process may mount it.
    Mountable,
    Missing,
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
}

/// How packet programs are attached to interfaces.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PacketHook {
    /// 6.6.
    Tcx,
    Clsact,
}

impl PacketHook {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        }
    }
}

/// What the node can do.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct HostFacts {
    /// As `uname -r`.
    pub kernel_release: String,
    /// /sys/kernel/btf/vmlinux is there.
    pub btf: bool,
    pub cgroup2: Cgroup2,
    pub bpffs: BpfFilesystem,
    pub capabilities: Capabilities,
    pub packet_hook: PacketHook,
    /// A refused connection fails with ECONNREFUSED (`bpf_set_retval`, 5.18), else with EPERM.
    pub set_retval: bool,
}

/// What was asked for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Request {
    pub mode: RequestedMode,
    pub socket_load_balancing: SocketLoadBalancing,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ChosenMode {
    pub mode: Mode,
    /// Why this mode, and what is less than best on this node.
    pub reasons: Vec<String>,
}

#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Refusal {
    #[error("mode {0} is not built yet: use ebpf")]
    NotBuilt(RequestedMode),
    #[error("mode ebpf cannot run here: {}", .0.join("; "))]
    Impossible(Vec<String>),
}

pub fn choose(request: Request, facts: &HostFacts) -> Result<ChosenMode, Refusal> {
    let asked = match request.mode {
        RequestedMode::Ebpf => "ebpf was asked for",
        RequestedMode::Automatic => "no mode was asked for, and this node can do ebpf",
        RequestedMode::Nftables
        | RequestedMode::Iptables
        | RequestedMode::Ipvs
        | RequestedMode::Userspace => return Err(Refusal::NotBuilt(request.mode)),
    };
    let obstacles = obstacles(request, facts);
    if !obstacles.is_empty() {
        return Err(Refusal::Impossible(obstacles));
    }
    let reasons = std::iter::once(asked.to_owned()).chain(remarks(request, facts)).collect();
    Ok(ChosenMode { mode: Mode::Ebpf, reasons })
}

/// Why the programs could not do their work here.
fn obstacles(request: Request, facts: &HostFacts) -> Vec<String> {
    let HostFacts { kernel_release, btf, cgroup2, bpffs, capabilities, .. } = facts;
    let mut obstacles = Vec::new();
    match KernelVersion::parse(kernel_release) {
        Some(version) if version < OLDEST => {
            obstacles.push(format!("the kernel is {kernel_release}, {OLDEST} or newer is needed"));
        }
        Some(_) | None => {}
    }
    if !btf {
        obstacles.push("the kernel has no BTF (/sys/kernel/btf/vmlinux; CONFIG_DEBUG_INFO_BTF)".to_owned());
    }
    let needs_cgroup = request.socket_load_balancing != SocketLoadBalancing::Off;
    if needs_cgroup && *cgroup2 == Cgroup2::Missing {
        obstacles.push(
            "cgroup v2 is not mounted: mount it, name it in ebpf.cgroup, or set ebpf.socketLoadBalancing to off"
                .to_owned(),
        );
    }
    if *bpffs == BpfFilesystem::Missing {
        obstacles
            .push("there is no bpffs: mount -t bpf bpf /sys/fs/bpf, or name one in ebpf.bpffs".to_owned());
    }
    let Capabilities { sys_admin, bpf, perfmon, net_admin } = *capabilities;
    let held = [
        (sys_admin || bpf, "CAP_BPF", "to load programs"),
        (sys_admin || perfmon, "CAP_PERFMON", "to load programs"),
        (net_admin, "CAP_NET_ADMIN", "to attach programs"),
    ];
    for (_, name, purpose) in held.into_iter().filter(|(held, ..)| !held) {
        obstacles.push(format!("{name} is missing, {purpose}"));
    }
    obstacles
}

/// What an operator should know of this node.
fn remarks(request: Request, facts: &HostFacts) -> Vec<String> {
    let mut remarks = vec![format!("the kernel is {}", facts.kernel_release)];
    remarks.push(match facts.packet_hook {
        PacketHook::Tcx => "packet programs are attached by tcx".to_owned(),
        PacketHook::Clsact => {
            "packet programs are attached by clsact: the kernel has no tcx (6.6)".to_owned()
        }
    });
    remarks.push(match request.socket_load_balancing {
        SocketLoadBalancing::All => "sockets of every process are translated when they connect".to_owned(),
        SocketLoadBalancing::Host => {
            "sockets of the node's own network namespace are translated when they connect".to_owned()
        }
        SocketLoadBalancing::Off => "sockets are left alone, every packet is translated".to_owned(),
    });
    if request.socket_load_balancing != SocketLoadBalancing::Off && !facts.set_retval {
        remarks.push(
            "a service without endpoints refuses connections with EPERM: the kernel has no bpf_set_retval (5.18)"
                .to_owned(),
        );
    }
    remarks
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn able() -> HostFacts {
        HostFacts {
            kernel_release: "6.12.9-amd64".into(),
            btf: true,
            cgroup2: Cgroup2::Mounted("/sys/fs/cgroup".into()),
            bpffs: BpfFilesystem::Mounted,
            capabilities: Capabilities { sys_admin: false, bpf: true, perfmon: true, net_admin: true },
            packet_hook: PacketHook::Tcx,
            set_retval: true,
        }
    }

    fn old() -> HostFacts {
        HostFacts {
            kernel_release: "5.10.0-39-amd64".into(),
            packet_hook: PacketHook::Clsact,
            set_retval: false,
            ..able()
        }
    }

    fn request(mode: RequestedMode) -> Request {
        Request { mode, socket_load_balancing: SocketLoadBalancing::All }
    }

    #[rstest]
    #[case::nothing_asked(RequestedMode::Automatic, able(), "no mode was asked for")]
    #[case::asked(RequestedMode::Ebpf, able(), "ebpf was asked for")]
    #[case::old_kernel(RequestedMode::Ebpf, old(), "clsact")]
    #[case::old_kernel_refuses_otherwise(RequestedMode::Automatic, old(), "EPERM")]
    #[case::mountable(RequestedMode::Ebpf, HostFacts { bpffs: BpfFilesystem::Mountable, ..able() }, "tcx")]
    #[case::mountable_cgroup(RequestedMode::Ebpf, HostFacts { cgroup2: Cgroup2::Mountable, ..able() }, "tcx")]
    #[case::all_of_root(
        RequestedMode::Ebpf,
        HostFacts {
            capabilities: Capabilities { sys_admin: true, net_admin: true, ..Capabilities::default() },
            ..able()
        },
        "6.12.9-amd64"
    )]
    #[case::unknown_release(RequestedMode::Ebpf, HostFacts { kernel_release: "next".into(), ..able() }, "next")]
    fn chosen(#[case] mode: RequestedMode, #[case] facts: HostFacts, #[case] reason: &str) {
        let choice = choose(request(mode), &facts).unwrap();
        assert_eq!(choice.mode, Mode::Ebpf);
        assert!(choice.reasons.iter().any(|given| given.contains(reason)), "{:?}", choice.reasons);
    }

    #[rstest]
    #[case::kernel(HostFacts { kernel_release: "5.4.0-200-generic".into(), ..able() }, "5.10 or newer is needed")]
    #[case::btf(HostFacts { btf: false, ..able() }, "BTF")]
    #[case::cgroup(HostFacts { cgroup2: Cgroup2::Missing, ..able() }, "ebpf.socketLoadBalancing")]
    #[case::bpffs(HostFacts { bpffs: BpfFilesystem::Missing, ..able() }, "mount -t bpf")]
    #[case::capability(
        HostFacts { capabilities: Capabilities { net_admin: false, ..able().capabilities }, ..able() },
        "CAP_NET_ADMIN is missing"
    )]
    fn impossible(#[case] facts: HostFacts, #[case] obstacle: &str) {
        let refusal = choose(request(RequestedMode::Automatic), &facts).unwrap_err();
        let Refusal::Impossible(obstacles) = &refusal else { panic!("{refusal:?}") };
        assert_eq!(obstacles.len(), 1, "{obstacles:?}");
        assert!(refusal.to_string().contains(obstacle), "{refusal}");
    }

    #[test]
    fn without_socket_hooks_no_cgroup_is_needed() {
        let request = Request { mode: RequestedMode::Ebpf, socket_load_balancing: SocketLoadBalancing::Off };
        let facts = HostFacts { cgroup2: Cgroup2::Missing, set_retval: false, ..able() };
        let choice = choose(request, &facts).unwrap();
        assert!(!choice.reasons.iter().any(|reason| reason.contains("EPERM")), "{:?}", choice.reasons);
    }

    #[rstest]
    fn not_built(
        #[values(
            RequestedMode::Iptables,
            RequestedMode::Ipvs,
            RequestedMode::Nftables,
            RequestedMode::Userspace
        )]
        mode: RequestedMode,
    ) {
        let refusal = choose(request(mode), &able()).unwrap_err();
        assert_eq!(refusal.to_string(), format!("mode {mode} is not built yet: use ebpf"));
    }

    #[rstest]
    #[case("6.12.9-amd64", Some((6, 12)))]
    #[case("7.2-rc1", Some((7, 2)))]
    #[case("5.10", Some((5, 10)))]
    #[case("next-20261101", None)]
    fn releases(#[case] release: &str, #[case] version: Option<(u32, u32)>) {
        let parsed = KernelVersion::parse(release).map(|version| (version.major, version.minor));
        assert_eq!(parsed, version);
    }
}
