//! Checks whether a node has what the eBPF mode needs, without changing anything.

use std::path::{Path, PathBuf};

use aya::{
    programs::{ProgramError, ProgramType, SchedClassifier, tc::TcAttachType},
    sys::{BpfHelper, SyscallError, is_helper_supported, is_program_supported},
};

use super::connections::stale_sockets;
use crate::{
    config::{Config, Ebpf, SocketLoadBalancing, SourceAddress},
    model::mode::{Capabilities, HostFacts, KernelVersion, Mode, Probe, Requirement},
    sys::proc::filesystem,
};

/// The oldest kernel that the programs are made for.
const OLDEST: KernelVersion = KernelVersion::new(5, 10, 0);
const TCX: KernelVersion = KernelVersion::new(6, 6, 0);
const SET_RETVAL: KernelVersion = KernelVersion::new(5, 18, 0);
/// The first kernel in which a process can ask for the cookie of its network namespace
/// (SO_NETNS_COOKIE). Before, a socket program finds it out.
const NETNS_COOKIE: KernelVersion = KernelVersion::new(5, 14, 0);

/// Returns the fields that have no effect with this configuration.
pub(in crate::modes) fn unused_fields(config: &Config) -> Vec<&'static str> {
    let preserves = config.ebpf.source_address == SourceAddress::Preserve;
    UNUSED_FIELDS.iter().copied().chain(preserves.then_some("iptables.masqueradeAll")).collect()
}

/// The fields that never have an effect. `ipvs.excludeCIDRs` is not among them, because it says
/// what stays of a former kube-proxy.
const UNUSED_FIELDS: &[&str] = &[
    "iptables.masqueradeBit",
    "iptables.minSyncPeriod",
    "ipvs.minSyncPeriod",
    "ipvs.scheduler",
    "ipvs.strictARP",
    "ipvs.tcpFinTimeout",
    "ipvs.tcpTimeout",
    "ipvs.udpTimeout",
    "nftables.masqueradeAll",
    "nftables.masqueradeBit",
    "nftables.minSyncPeriod",
];

/// Why a kernel is refused on which packet programs preempt each other.
///
/// The programs of TC and XDP work in maps with one entry for each CPU (`scratch4`, `scratch6`,
/// `icmp_errors`, `service_openings`). A program that preempts another on its CPU would write into
/// the other's packet. Programs of sockets, which may be preempted on every kernel, use none of
/// these maps.
const PREEMPTED: &str = "the kernel is built with CONFIG_PREEMPT_RT and without CONFIG_PREEMPT_RT_NEEDS_BH_LOCK: packet programs \
     of one CPU would preempt each other, and they share memory of the CPU";

pub(super) fn probe(config: &Ebpf, host: &HostFacts) -> Probe {
    answer(config.sockets(), host, &gather(config, host))
}

/// The state of the path at which maps are to be pinned.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum BpfFilesystem {
    Mounted,
    /// Nothing is mounted there, and this process may mount it.
    Mountable,
    Missing,
}

/// The state of the cgroup hierarchy to which socket hooks are attached.
#[derive(Clone, Debug, Eq, PartialEq)]
enum Cgroup2 {
    /// The root of the hierarchy, or the folder that the configuration names.
    Mounted(PathBuf),
    /// It is not mounted, and this process may mount it.
    Mountable,
    /// It is missing. The text says what can be done.
    Missing(String),
}

#[derive(Clone, Debug, Eq, PartialEq)]
struct Facts {
    /// The version of the kernel; `None` if it is not known.
    version: Option<KernelVersion>,
    /// True if /sys/kernel/btf/vmlinux exists.
    btf: bool,
    /// The outcome of loading a program of each needed type, with the reason of a refusal. `None`
    /// if this process may not load any.
    programs: Option<Result<(), String>>,
    /// True if packet programs are attached by links (Linux 6.6).
    tcx: bool,
    cgroup2: Cgroup2,
    bpffs: BpfFilesystem,
    /// True if a refused connection fails with ECONNREFUSED (`bpf_set_retval`, Linux 5.18), false
    /// if with EPERM.
    set_retval: bool,
    /// A text that says whose sockets are ended when their endpoint goes.
    stale_sockets: String,
}

fn gather(config: &Ebpf, host: &HostFacts) -> Facts {
    let version = host.kernel();
    let may_mount = host.capabilities.sys_admin;
    // A process that may not load programs learns that from the requirement of capabilities.
    let may_load = capabilities_requirement(host.capabilities).missing.is_empty();
    let asked = || {
        let types = program_types(config.sockets(), version);
        let refused = types.iter().find_map(|kind| refusal(*kind, is_program_supported(*kind)));
        refused.map_or(Ok(()), Err)
    };
    Facts {
        version,
        programs: may_load.then(asked),
        tcx: has_tcx(version),
        btf: Path::new("/sys/kernel/btf/vmlinux").exists(),
        cgroup2: cgroup2(config.cgroup.as_deref(), may_mount),
        bpffs: bpffs(&config.bpffs, may_mount),
        // A process that may not load programs judges by the version.
        set_retval: is_helper_supported(ProgramType::CgroupSockAddr, BpfHelper::BPF_FUNC_set_retval)
            .unwrap_or(version >= Some(SET_RETVAL)),
        stale_sockets: stale_sockets::reach(config.sockets(), may_mount, may_load),
    }
}

/// Returns the types of programs that are loaded at each start.
fn program_types(sockets: SocketLoadBalancing, version: Option<KernelVersion>) -> &'static [ProgramType] {
    let has_socket_programs = sockets != SocketLoadBalancing::Off || version < Some(NETNS_COOKIE);
    if has_socket_programs {
        &[ProgramType::SchedClassifier, ProgramType::CgroupSockAddr]
    } else {
        &[ProgramType::SchedClassifier]
    }
}

/// Returns why the kernel does not load programs of the type. `answer` is the outcome for a program
/// that does nothing. Failures for other causes, such as a lack of memory, may pass and count as
/// none.
fn refusal(kind: ProgramType, answer: Result<bool, ProgramError>) -> Option<String> {
    match answer {
        Ok(false) => Some(format!(
            "the kernel has no programs of type {kind:?} (CONFIG_BPF_SYSCALL, CONFIG_CGROUP_BPF)"
        )),
        Err(ProgramError::SyscallError(SyscallError { io_error, .. }))
            if matches!(io_error.raw_os_error(), Some(libc::EPERM | libc::EACCES | libc::ENOSYS)) =>
        {
            Some(format!(
                "the kernel loads no programs of type {kind:?}, because of its configuration or a seccomp filter: {io_error}"
            ))
        }
        Ok(true) | Err(_) => None,
    }
}

/// Returns true if the kernel has tcx, by asking for the programs of the loopback device. A process
/// that may not ask judges by the version.
fn has_tcx(version: Option<KernelVersion>) -> bool {
    match SchedClassifier::query_tcx("lo", TcAttachType::Ingress) {
        Ok(_) => true,
        Err(ProgramError::SyscallError(SyscallError { io_error, .. }))
            if io_error.raw_os_error() == Some(libc::EINVAL) =>
        {
            false
        }
        Err(_) => version >= Some(TCX),
    }
}

fn cgroup2(configured: Option<&Path>, may_mount: bool) -> Cgroup2 {
    if let Some(folder) = configured {
        let found = match filesystem::is_cgroup2(folder) {
            Ok(true) => return Cgroup2::Mounted(folder.to_owned()),
            Ok(false) => format!("{}, which is on another filesystem", folder.display()),
            Err(error) => format!("{}: {error}", folder.display()),
        };
        return Cgroup2::Missing(format!("ebpf.cgroup must be a folder of cgroup v2, found {found}"));
    }
    match filesystem::cgroup_root().ok().flatten() {
        Some(folder) => Cgroup2::Mounted(folder),
        None if may_mount && filesystem::can_mount_cgroup2() => Cgroup2::Mountable,
        None => Cgroup2::Missing(
            "cgroup v2 is not mounted: mount it, name it in ebpf.cgroup, or set ebpf.socketLoadBalancing to off"
                .to_owned(),
        ),
    }
}

/// Returns the state of the bpffs. A folder that does not exist yet is on the file system of its
/// parent.
fn bpffs(path: &Path, may_mount: bool) -> BpfFilesystem {
    let existing = path.ancestors().find(|ancestor| ancestor.exists());
    let mounted = existing.is_some_and(|existing| filesystem::is_bpffs(existing).unwrap_or(false));
    match (mounted, may_mount) {
        (true, _) => BpfFilesystem::Mounted,
        (false, true) => BpfFilesystem::Mountable,
        (false, false) => BpfFilesystem::Missing,
    }
}

fn answer(sockets: SocketLoadBalancing, host: &HostFacts, facts: &Facts) -> Probe {
    let mut remarks = vec![format!("the kernel is {}", host.kernel_release)];
    remarks.push(if facts.tcx {
        "packet programs are attached by tcx".to_owned()
    } else {
        format!("packet programs are attached by clsact: the kernel has no tcx ({TCX})")
    });
    remarks.push(match sockets {
        SocketLoadBalancing::All => "sockets of every process are translated when they connect".to_owned(),
        SocketLoadBalancing::Host => {
            "sockets of the node's own network namespace are translated when they connect".to_owned()
        }
        SocketLoadBalancing::Off => "sockets are left alone, every packet is translated".to_owned(),
    });
    if sockets != SocketLoadBalancing::Off && !facts.set_retval {
        remarks.push(format!(
            "a service without endpoints refuses connections with EPERM: the kernel has no bpf_set_retval \
             ({SET_RETVAL})"
        ));
    }
    let HostFacts { kernel_release, capabilities, .. } = host;
    let requirements = vec![
        Requirement::kernel(host)
            .lacking(facts.version.is_some_and(|version| version < OLDEST), || {
                format!("the kernel is {kernel_release}, {OLDEST} or newer is needed")
            })
            .lacking(host.softirqs_preempt_each_other(), || PREEMPTED.to_owned()),
        Requirement::new("btf", "BTF", facts.btf).lacking(!facts.btf, || {
            "the kernel has no BTF (/sys/kernel/btf/vmlinux; CONFIG_DEBUG_INFO_BTF)".to_owned()
        }),
        programs_requirement(facts.programs.as_ref()),
        cgroup2_requirement(&facts.cgroup2, sockets),
        bpffs_requirement(facts.bpffs),
        capabilities_requirement(*capabilities),
        Requirement::new("packetHook", "packet programs by", if facts.tcx { "tcx" } else { "clsact" }),
        // This is how `connect` fails for a client of a Service without endpoints.
        Requirement::new(
            "refusesWith",
            "no endpoint",
            if facts.set_retval { "ECONNREFUSED" } else { "EPERM" },
        ),
        // Otherwise, a connected datagram socket stays with an endpoint that is gone.
        Requirement::new("endsSocketsOf", "ends sockets of", facts.stale_sockets.clone()),
    ];
    Probe { mode: Mode::Ebpf, requirements, remarks }
}

fn programs_requirement(programs: Option<&Result<(), String>>) -> Requirement {
    let (state, refusal) = match programs {
        None => ("not tried", None),
        Some(Ok(())) => ("loaded", None),
        Some(Err(refusal)) => ("refused", Some(refusal)),
    };
    Requirement::new("programs", "trial programs", state)
        .lacking(refusal.is_some(), || refusal.cloned().unwrap_or_default())
}

fn cgroup2_requirement(cgroup2: &Cgroup2, sockets: SocketLoadBalancing) -> Requirement {
    let requirement = |found: Option<String>| Requirement::new("cgroup2", "cgroup v2", found);
    match cgroup2 {
        Cgroup2::Mounted(folder) => requirement(Some(folder.display().to_string())),
        Cgroup2::Mountable => requirement(Some("mountable".to_owned())),
        Cgroup2::Missing(why) => {
            requirement(None).lacking(sockets != SocketLoadBalancing::Off, || why.clone())
        }
    }
}

fn bpffs_requirement(bpffs: BpfFilesystem) -> Requirement {
    let state = match bpffs {
        BpfFilesystem::Mounted => "mounted",
        BpfFilesystem::Mountable => "mountable",
        BpfFilesystem::Missing => "missing",
    };
    Requirement::new("bpffs", "bpffs", state).lacking(bpffs == BpfFilesystem::Missing, || {
        "there is no bpffs: mount -t bpf bpf /sys/fs/bpf, or name one in ebpf.bpffs".to_owned()
    })
}

fn capabilities_requirement(capabilities: Capabilities) -> Requirement {
    let Capabilities { sys_admin, bpf, perfmon, net_admin, .. } = capabilities;
    let missing = |name: &'static str, purpose: &'static str| {
        move || format!("{name} is missing, to {purpose} programs")
    };
    Requirement::capabilities(capabilities)
        .lacking(!sys_admin && !bpf, missing("CAP_BPF", "load"))
        .lacking(!sys_admin && !perfmon, missing("CAP_PERFMON", "load"))
        .lacking(!net_admin, missing("CAP_NET_ADMIN", "attach"))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::model::mode::{ModuleTexts, Modules};

    const ALL: Capabilities =
        Capabilities { sys_admin: false, bpf: true, perfmon: true, net_admin: true, setgid: false };

    fn able() -> Facts {
        Facts {
            version: KernelVersion::parse("6.12.9-amd64"),
            btf: true,
            programs: Some(Ok(())),
            tcx: true,
            cgroup2: Cgroup2::Mounted("/sys/fs/cgroup".into()),
            bpffs: BpfFilesystem::Mounted,
            set_retval: true,
            stale_sockets: "the node".to_owned(),
        }
    }

    fn old() -> Facts {
        Facts { version: KernelVersion::parse("5.10.0-39-amd64"), tcx: false, set_retval: false, ..able() }
    }

    fn answer_with(sockets: SocketLoadBalancing, capabilities: Capabilities, facts: &Facts) -> Probe {
        answer(
            sockets,
            &HostFacts { kernel_release: "its release".into(), capabilities, ..HostFacts::default() },
            facts,
        )
    }

    const RT_OPTION: &str = "CONFIG_PREEMPT_RT_NEEDS_BH_LOCK";

    #[rstest]
    #[case::no_realtime(false, "7.2.0", Some(format!("# {RT_OPTION} is not set")), false)]
    #[case::with_the_lock(true, "7.2.0-rt", Some(format!("{RT_OPTION}=y")), false)]
    #[case::without_the_lock(true, "6.12.60-rt", Some(format!("# {RT_OPTION} is not set")), true)]
    #[case::before_the_option(true, "6.18.0-rt", Some("CONFIG_PREEMPT_RT=y".to_owned()), false)]
    #[case::unknown_and_new(true, "6.18.0-rt", None, true)]
    #[case::unknown_and_old(true, "6.12.9-rt", None, false)]
    fn packet_programs_must_not_preempt_each_other(
        #[case] realtime: bool,
        #[case] release: &str,
        #[case] config: Option<String>,
        #[case] refused: bool,
    ) {
        let modules = Modules::parse(&ModuleTexts { config, ..ModuleTexts::default() });
        let kernel_release = release.to_owned();
        let host = HostFacts { realtime, kernel_release, modules, capabilities: ALL, ..HostFacts::default() };
        let probe = answer(SocketLoadBalancing::All, &host, &able());
        let obstacles: Vec<_> = probe.obstacles().collect();
        assert_eq!(obstacles.iter().any(|why| why.contains("CONFIG_PREEMPT_RT")), refused, "{obstacles:?}");
        assert_eq!(probe.can_run(), !refused);
    }

    #[rstest]
    #[case::new_kernel(able(), ALL, "tcx")]
    #[case::old_kernel(old(), ALL, "clsact")]
    #[case::old_kernel_refuses_otherwise(old(), ALL, "EPERM")]
    #[case::mountable(Facts { bpffs: BpfFilesystem::Mountable, ..able() }, ALL, "tcx")]
    #[case::mountable_cgroup(Facts { cgroup2: Cgroup2::Mountable, ..able() }, ALL, "tcx")]
    #[case::all_of_root(
        able(),
        Capabilities { sys_admin: true, net_admin: true, ..Capabilities::default() },
        "its release"
    )]
    #[case::unknown_release(Facts { version: None, ..able() }, ALL, "its release")]
    fn possible(#[case] facts: Facts, #[case] capabilities: Capabilities, #[case] remark: &str) {
        let probe = answer_with(SocketLoadBalancing::All, capabilities, &facts);
        assert_eq!(probe.obstacles().count(), 0, "{probe:?}");
        assert!(probe.remarks.iter().any(|given| given.contains(remark)), "{:?}", probe.remarks);
    }

    #[rstest]
    #[case::kernel(Facts { version: KernelVersion::parse("5.4.0"), ..able() }, ALL, "5.10 or newer is needed")]
    #[case::btf(Facts { btf: false, ..able() }, ALL, "BTF")]
    #[case::programs(Facts { programs: Some(Err("no programs of type CgroupSockAddr".into())), ..able() }, ALL, "CgroupSockAddr")]
    #[case::cgroup(Facts { cgroup2: cgroup2(Some(Path::new("/proc")), true), ..able() }, ALL, "found /proc")]
    #[case::bpffs(Facts { bpffs: BpfFilesystem::Missing, ..able() }, ALL, "mount -t bpf")]
    #[case::capability(able(), Capabilities { net_admin: false, ..ALL }, "CAP_NET_ADMIN is missing")]
    fn impossible(#[case] facts: Facts, #[case] capabilities: Capabilities, #[case] obstacle: &str) {
        let probe = answer_with(SocketLoadBalancing::All, capabilities, &facts);
        let obstacles: Vec<_> = probe.obstacles().collect();
        assert!(obstacles.len() == 1 && obstacles[0].contains(obstacle), "{obstacles:?}");
    }

    fn failed(errno: i32) -> Result<bool, ProgramError> {
        let io_error = std::io::Error::from_raw_os_error(errno);
        Err(ProgramError::SyscallError(SyscallError { call: "bpf_prog_load", io_error }))
    }

    #[rstest]
    #[case::loads(Ok(true), None)]
    #[case::no_such_type(Ok(false), Some("the kernel has no programs of type CgroupSockAddr"))]
    #[case::seccomp(failed(libc::EPERM), Some("a seccomp filter: Operation not permitted"))]
    #[case::no_bpf(failed(libc::ENOSYS), Some("Function not implemented"))]
    #[case::disturbed_by_a_signal(failed(libc::EAGAIN), None)]
    #[case::no_memory(failed(libc::ENOMEM), None)]
    fn a_kernel_that_loads_no_programs(
        #[case] answer: Result<bool, ProgramError>,
        #[case] expected: Option<&str>,
    ) {
        let refused = refusal(ProgramType::CgroupSockAddr, answer);
        assert_eq!(refused.is_some(), expected.is_some(), "{refused:?}");
        assert!(refused.unwrap_or_default().contains(expected.unwrap_or_default()));
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_the_kernel_is_asked() {
        let host = crate::node::facts::gather();
        let facts = gather(&Ebpf::default(), &host);
        assert_eq!(facts.programs, Some(Ok(())));
        assert!(has_tcx(None) || host.kernel() < Some(TCX));
    }

    #[test]
    fn without_socket_hooks_no_cgroup_is_needed() {
        let facts = Facts { cgroup2: Cgroup2::Missing("no".into()), set_retval: false, ..able() };
        let probe = answer_with(SocketLoadBalancing::Off, ALL, &facts);
        assert_eq!(probe.obstacles().count(), 0, "{probe:?}");
        assert!(!probe.remarks.iter().any(|remark| remark.contains("EPERM")), "{:?}", probe.remarks);
    }
}
