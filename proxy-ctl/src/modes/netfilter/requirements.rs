//! The requirements of modes that write rules.

use std::collections::BTreeSet;

use crate::model::mode::{Backend, HostFacts, KernelModule, Requirement, Tool, Version};

/// The oldest version of the tools. From it on, `iptables-restore -w` waits for the lock of other
/// programs.
const OLDEST_TOOL: Version = Version::new(1, 6, 2);

/// Returns the requirement of CAP_NET_ADMIN, which is all that writing rules needs.
pub(in crate::modes) fn net_admin(host: &HostFacts) -> Requirement {
    Requirement::capabilities(host.capabilities)
        .lacking(!host.capabilities.net_admin, || "CAP_NET_ADMIN is missing, to write rules".to_owned())
}

/// Returns the requirement of the tools of iptables for either family, with the part of the kernel
/// to which each writes.
pub(in crate::modes) fn iptables(host: &HostFacts) -> Requirement {
    let tools: Vec<&Tool> = host.iptables.iter().chain(&host.ip6tables).collect();
    let found: BTreeSet<String> = tools.iter().map(ToString::to_string).collect();
    let recent: Vec<_> = tools.iter().filter(|tool| tool.version >= OLDEST_TOOL).collect();
    let unusable = || recent.iter().map(|tool| host.modules.missing(&kernel_side(tool.backend)));
    let why = match (tools.is_empty(), recent.is_empty()) {
        (true, _) => Some(format!(
            "there is no iptables on PATH: install version {OLDEST_TOOL} or newer, or use the image, which has it"
        )),
        (false, true) => Some(format!("iptables {OLDEST_TOOL} or newer is needed")),
        (false, false) if unusable().all(|missing| missing.is_some()) => unusable().next().flatten(),
        (false, false) => None,
    };
    let found: Vec<String> = found.into_iter().collect();
    Requirement { missing: why.into_iter().collect(), ..Requirement::new("iptables", "iptables", found) }
}

/// Returns which family is not served for want of tools.
pub(in crate::modes) fn unserved_family(host: &HostFacts) -> Option<String> {
    match (host.iptables.is_empty(), host.ip6tables.is_empty()) {
        (false, true) if host.ipv6 => Some("IPv6 is not served: there is no ip6tables".to_owned()),
        (true, false) => Some("IPv4 is not served: there is no iptables, only ip6tables".to_owned()),
        _ => None,
    }
}

fn kernel_side(backend: Backend) -> KernelModule {
    match backend {
        Backend::Legacy => KernelModule::new("x_tables", "CONFIG_NETFILTER_XTABLES"),
        Backend::NfTables => nf_tables(),
    }
}

pub(in crate::modes) fn nf_tables() -> KernelModule {
    KernelModule::named("nf_tables")
}
