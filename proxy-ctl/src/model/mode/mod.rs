//! Chooses the mode of a node. The choice is a pure function of what was asked for and of what each
//! mode finds on the node.
//!
//! [`HostFacts`] are what the node has. Each mode's [`Probe`] says whether that is enough, and
//! [`choose`] takes the first mode that can run.

use std::fmt;

use serde_json::Value;

mod choice;
mod facts;
mod kernel_modules;
#[cfg(test)]
pub(crate) mod recorded;
#[cfg(test)]
mod tests;

pub use choice::{ChosenMode, Refusal, RequestedMode, choose};
pub use facts::{Backend, Capabilities, HostFacts, IPVS_PARAMETERS, KernelVersion, Tool, Version};
pub use kernel_modules::{KernelModule, ModuleState, ModuleTexts, Modules};

/// A way to program the kernel.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Mode {
    Ebpf,
    Nftables,
    Iptables,
    Ipvs,
    Userspace,
}

impl Mode {
    pub const ALL: [Self; 5] = [Self::Ebpf, Self::Nftables, Self::Iptables, Self::Ipvs, Self::Userspace];

    /// Returns the name that `/proxyMode` answers with.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ebpf => "ebpf",
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
            Self::Ipvs => "ipvs",
            Self::Userspace => "userspace",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Something that a mode needs or makes use of, and what of it the node has.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Requirement {
    /// The name in `probe --output json`.
    pub key: &'static str,
    /// The name for people.
    pub name: &'static str,
    /// The value that was found on the node. Null if there is none.
    pub found: Value,
    /// The reasons why the mode cannot run. Empty if nothing is missing.
    pub missing: Vec<String>,
}

impl Requirement {
    pub fn new(key: &'static str, name: &'static str, found: impl Into<Value>) -> Self {
        Self { key, name, found: found.into(), missing: Vec::new() }
    }

    /// Adds the reason `why` if the requirement is missing.
    #[must_use]
    pub fn lacking(mut self, is_missing: bool, why: impl FnOnce() -> String) -> Self {
        self.missing.extend(is_missing.then(why));
        self
    }
}

/// These requirements are shared by several modes, each under one key.
impl Requirement {
    /// Returns the requirement for the release of the kernel.
    pub fn kernel(host: &HostFacts) -> Self {
        Self::new("kernel", "kernel", host.kernel_release.as_str())
    }

    /// Returns the requirement for the capabilities of this process.
    pub fn capabilities(held: Capabilities) -> Self {
        let names = [
            (held.sys_admin, "CAP_SYS_ADMIN"),
            (held.bpf, "CAP_BPF"),
            (held.perfmon, "CAP_PERFMON"),
            (held.net_admin, "CAP_NET_ADMIN"),
            (held.setgid, "CAP_SETGID"),
        ];
        let names: Vec<&str> = names.into_iter().filter(|(held, _)| *held).map(|(_, name)| name).collect();
        Self::new("capabilities", "capabilities", names)
    }

    /// Returns the requirement for these parts of the kernel.
    pub fn modules(key: &'static str, name: &'static str, host: &HostFacts, wanted: &[KernelModule]) -> Self {
        let state =
            |module: &KernelModule| (module.name.clone(), host.modules.state(module).to_string().into());
        let found: serde_json::Map<_, _> = wanted.iter().map(state).collect();
        let missing = wanted.iter().filter_map(|module| host.modules.missing(module));
        Self { missing: missing.collect(), ..Self::new(key, name, found) }
    }
}

/// A mode's answer to what it needs on this node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Probe {
    pub mode: Mode,
    pub requirements: Vec<Requirement>,
    /// Remarks that an operator should know of the mode on this node.
    pub remarks: Vec<String>,
}

impl Probe {
    pub fn can_run(&self) -> bool {
        self.obstacles().next().is_none()
    }

    /// Returns the reasons why the mode cannot run here.
    pub fn obstacles(&self) -> impl Iterator<Item = &str> {
        self.requirements.iter().flat_map(|requirement| &requirement.missing).map(String::as_str)
    }
}
