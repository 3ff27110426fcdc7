//! Reads the [`HostFacts`] of this node. Changes nothing.

use std::fs;

use crate::mode::{Capabilities, HostFacts};

const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;

pub fn gather() -> HostFacts {
    HostFacts {
        kernel_release: read("/proc/sys/kernel/osrelease"),
        capabilities: capabilities(&read("/proc/self/status")),
    }
}

/// Empty where the file cannot be read.
fn read(path: &str) -> String {
    fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
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
}
