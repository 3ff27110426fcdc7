//! Reads the [`HostFacts`] of this node. Changes nothing.

use std::{
    env, fs,
    io::Read as _,
    process::{Child, Command, Stdio},
};

use flate2::read::GzDecoder;
use nix::unistd::{AccessFlags, access};

use crate::{
    model::mode::{Capabilities, HostFacts, IPVS_PARAMETERS, ModuleTexts, Modules, Tool},
    sys::{has_ipv6, net::ipset::IpSets},
};

const CAP_SETGID: u32 = 6;
const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;

const ROUTE_LOCALNET: &str = "/proc/sys/net/ipv4/conf/all/route_localnet";
const SKIP_NFTABLES_CHECK: &str = "KUBE_PROXY_NFTABLES_SKIP_KERNEL_VERSION_CHECK";

pub fn gather() -> HostFacts {
    let kernel_release = read("/proc/sys/kernel/osrelease").unwrap_or_default();
    let [iptables, ip6tables] = all_tools();
    let parameter = |name| Some((name, read(&format!("/proc/sys/{name}"))?.parse().ok()?));
    HostFacts {
        capabilities: capabilities(),
        modules: Modules::parse(&module_texts(&kernel_release)),
        iptables,
        ip6tables,
        ipset_protocol: ipset_protocol(),
        route_localnet: read(ROUTE_LOCALNET).map(|value| value == "1"),
        ipvs_parameters: IPVS_PARAMETERS.into_iter().filter_map(parameter).collect(),
        parameters_writable: access(ROUTE_LOCALNET, AccessFlags::W_OK).is_ok(),
        ipv6: has_ipv6(),
        skip_nftables_kernel_check: env::var_os(SKIP_NFTABLES_CHECK).is_some_and(|value| !value.is_empty()),
        realtime: is_realtime(),
        kernel_release,
    }
}

/// Returns true if the kernel has the patches of PREEMPT_RT or is built with it. Patched kernels
/// have the file, and all such kernels name it in their version.
fn is_realtime() -> bool {
    let version = read("/proc/sys/kernel/version").unwrap_or_default();
    read("/sys/kernel/realtime").is_some_and(|value| value == "1") || version.contains("PREEMPT_RT")
}

/// Returns the trimmed text of a file, or `None` if it cannot be read.
fn read(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn module_texts(kernel_release: &str) -> ModuleTexts {
    let folders = fs::read_dir("/sys/module").ok().map(|folders| {
        let names = folders.filter_map(|folder| folder.ok()?.file_name().into_string().ok());
        names.collect::<Vec<_>>().join("\n")
    });
    ModuleTexts {
        loaded: read("/proc/modules"),
        folders,
        built_in: read(&format!("/lib/modules/{kernel_release}/modules.builtin")),
        installed: read(&format!("/lib/modules/{kernel_release}/modules.dep")),
        config: read(&format!("/boot/config-{kernel_release}")).or_else(config_in_proc),
        disabled: read("/proc/sys/kernel/modules_disabled"),
    }
}

/// Returns the kernel's configuration, which this file has with CONFIG_IKCONFIG_PROC.
fn config_in_proc() -> Option<String> {
    let mut text = String::new();
    GzDecoder::new(fs::File::open("/proc/config.gz").ok()?).read_to_string(&mut text).ok()?;
    Some(text)
}

/// Returns the tools of both families: the first of each backend. All are run at the same time,
/// because each takes some milliseconds.
fn all_tools() -> [Vec<Tool>; 2] {
    const NAMES: [[&str; 3]; 2] = [
        ["iptables-nft-save", "iptables-legacy-save", "iptables-save"],
        ["ip6tables-nft-save", "ip6tables-legacy-save", "ip6tables-save"],
    ];
    let asked = NAMES.map(|names| names.map(ask_version));
    asked.map(|asked| {
        let mut found: Vec<Tool> = Vec::new();
        for tool in asked.into_iter().flatten().filter_map(told) {
            if found.iter().all(|other| other.backend != tool.backend) {
                found.push(tool);
            }
        }
        found
    })
}

/// Starts a tool that prints its version. Returns `None` if there is no such tool.
fn ask_version(name: &str) -> Option<Child> {
    let mut command = Command::new(name);
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    command.spawn().ok()
}

fn told(tool: Child) -> Option<Tool> {
    Tool::parse(&String::from_utf8_lossy(&tool.wait_with_output().ok()?.stdout))
}

fn ipset_protocol() -> Option<u8> {
    IpSets::open().ok().flatten()?.protocol().ok()
}

/// Returns the capabilities of this process.
pub fn capabilities() -> Capabilities {
    effective_capabilities(&read("/proc/self/status").unwrap_or_default())
}

/// Parses the line `CapEff:` of /proc/self/status.
fn effective_capabilities(status: &str) -> Capabilities {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let held = line.and_then(|line| u64::from_str_radix(line.trim(), 16).ok()).unwrap_or(0);
    let holds = |capability: u32| held & (1 << capability) != 0;
    Capabilities {
        sys_admin: holds(CAP_SYS_ADMIN),
        bpf: holds(CAP_BPF),
        perfmon: holds(CAP_PERFMON),
        net_admin: holds(CAP_NET_ADMIN),
        setgid: holds(CAP_SETGID),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_from_the_effective_set() {
        let none = Capabilities::default();
        assert_eq!(effective_capabilities("CapPrm:\t000001ffffffffff\nCapEff:\t0000000000000000\n"), none);
        let datapath = Capabilities { bpf: true, perfmon: true, net_admin: true, ..none };
        assert_eq!(effective_capabilities("CapEff:\t000000c000001000\n"), datapath);
    }
}
