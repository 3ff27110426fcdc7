//! Reads the [`HostFacts`] of this node. Changes nothing.

use std::{fs, path::Path};

use anyhow::bail;

use crate::{
    config::{Ebpf, SocketLoadBalancing},
    mode::{BpfFilesystem, Capabilities, Cgroup2, HostFacts, KernelVersion, PacketHook},
    sys::{bpf, filesystem},
};

const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;

/// A folder named in the configuration must exist already.
pub fn check(config: &Ebpf) -> anyhow::Result<()> {
    let Some(cgroup) = &config.cgroup else { return Ok(()) };
    let needed = config.socket_load_balancing != SocketLoadBalancing::Off;
    let found = filesystem::is_cgroup2(cgroup);
    match found {
        Err(error) if needed => {
            bail!("ebpf.cgroup must be a folder of cgroup v2, found {}: {error}", cgroup.display())
        }
        Ok(false) if needed => {
            bail!(
                "ebpf.cgroup must be a folder of cgroup v2, found {}, which is on another filesystem",
                cgroup.display()
            )
        }
        Ok(_) | Err(_) => Ok(()),
    }
}

pub fn gather(config: &Ebpf) -> HostFacts {
    let kernel_release = read("/proc/sys/kernel/osrelease");
    let version = KernelVersion::parse(&kernel_release).unwrap_or_default();
    let capabilities = capabilities(&read("/proc/self/status"));
    HostFacts {
        btf: Path::new("/sys/kernel/btf/vmlinux").exists(),
        cgroup2: cgroup2(config, capabilities.sys_admin),
        bpffs: bpffs(&config.bpffs, capabilities.sys_admin),
        capabilities,
        packet_hook: packet_hook(version),
        set_retval: has_set_retval().unwrap_or(version >= SET_RETVAL),
        kernel_release,
    }
}

/// Empty where the file cannot be read.
fn read(path: &str) -> String {
    fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
}

const TCX: KernelVersion = KernelVersion { major: 6, minor: 6 };
const SET_RETVAL: KernelVersion = KernelVersion { major: 5, minor: 18 };

fn packet_hook(version: KernelVersion) -> PacketHook {
    if version >= TCX { PacketHook::Tcx } else { PacketHook::Clsact }
}

/// Loads a program that calls it. `None`: this process may not load programs.
fn has_set_retval() -> Option<bool> {
    const CGROUP_SOCK_ADDR: u32 = 18;
    const INET4_CONNECT: u32 = 10;
    // r1 = 0; call bpf_set_retval; r0 = 1; exit
    const PROGRAM: [u64; 4] = [0x0000_0000_0000_01b7, 0x0000_00bb_0000_0085, 0x0000_0001_0000_00b7, 0x95];
    match bpf::load_program(CGROUP_SOCK_ADDR, INET4_CONNECT, &PROGRAM) {
        Ok(_) => Some(true),
        Err(error) if error.errno() == libc::EPERM => None,
        Err(_) => Some(false),
    }
}

fn cgroup2(config: &Ebpf, may_mount: bool) -> Cgroup2 {
    let mounted = config.cgroup.clone().or_else(|| filesystem::cgroup_root().ok().flatten());
    match mounted {
        Some(folder) => Cgroup2::Mounted(folder),
        None if may_mount && filesystem::can_mount_cgroup2() => Cgroup2::Mountable,
        None => Cgroup2::Missing,
    }
}

/// A folder that does not exist yet is on the file system of its parent.
fn bpffs(path: &Path, may_mount: bool) -> BpfFilesystem {
    let existing = path.ancestors().find(|ancestor| ancestor.exists());
    let mounted = existing.is_some_and(|existing| filesystem::is_bpffs(existing).unwrap_or(false));
    match (mounted, may_mount) {
        (true, _) => BpfFilesystem::Mounted,
        (false, true) => BpfFilesystem::Mountable,
        (false, false) => BpfFilesystem::Missing,
    }
}

/// From the line `CapEff:` of /proc/self/status.
fn capabilities(status: &str) -> Capabilities {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let held = line.and_then(|line| u64::from_str_radix(line.trim(), 16).ok()).unwrap_or(0);
    let holds = |capability: u32| held & (1 << capability) != 0;
    Capabilities {
        sys_admin: holds(CAP_SYS_ADMIN),
        bpf: holds(CAP_BPF),
        perfmon: holds(CAP_PERFMON),
        net_admin: holds(CAP_NET_ADMIN),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_from_the_effective_set() {
        let none = Capabilities::default();
        assert_eq!(capabilities("CapPrm:\t000001ffffffffff\nCapEff:\t0000000000000000\n"), none);
        let datapath = Capabilities { bpf: true, perfmon: true, net_admin: true, sys_admin: false };
        assert_eq!(capabilities("CapEff:\t000000c000001000\n"), datapath);
    }

    #[test]
    fn this_kernel_is_described() {
        let facts = gather(&Ebpf::default());
        assert!(KernelVersion::parse(&facts.kernel_release).is_some(), "{}", facts.kernel_release);
    }
}
