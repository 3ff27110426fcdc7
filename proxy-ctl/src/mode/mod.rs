//! Which mode a node gets, and why: a pure function of what was asked for and of what each mode finds on the node.

use std::fmt;

use serde_json::Value;

use crate::config::RequestedMode;

/// How a node is programmed.
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

    /// As `/proxyMode` answers.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ebpf => "ebpf",
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
            Self::Ipvs => "ipvs",
            Self::Userspace => "userspace",
        }
    }

    /// As a configuration asks for it.
    const fn requested(self) -> RequestedMode {
        match self {
            Self::Ebpf => RequestedMode::Ebpf,
            Self::Nftables => RequestedMode::Nftables,
            Self::Iptables => RequestedMode::Iptables,
            Self::Ipvs => RequestedMode::Ipvs,
            Self::Userspace => RequestedMode::Userspace,
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
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
}

/// What each mode asks of a node, gathered by whoever may look.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct HostFacts {
    /// As `uname -r`.
    pub kernel_release: String,
    pub capabilities: Capabilities,
}

/// What a mode needs or makes use of, and what of it the node has.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Requirement {
    /// Name in `probe --output json`.
    pub key: &'static str,
    /// Name for people.
    pub name: &'static str,
    /// Null: there is none.
    pub found: Value,
    /// Why the mode cannot run; empty: nothing is missing.
    pub missing: Vec<String>,
}

impl Requirement {
    pub fn new(key: &'static str, name: &'static str, found: impl Into<Value>) -> Self {
        Self { key, name, found: found.into(), missing: Vec::new() }
    }

    /// Where it is missing, says so.
    #[must_use]
    pub fn lacking(mut self, is_missing: bool, why: impl FnOnce() -> String) -> Self {
        self.missing.extend(is_missing.then(why));
        self
    }
}

/// A mode's answer to what it needs on this node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Probe {
    pub mode: Mode,
    pub requirements: Vec<Requirement>,
    /// What an operator should know of the mode on this node.
    pub remarks: Vec<String>,
}

impl Probe {
    /// Why the mode cannot run here.
    pub fn obstacles(&self) -> impl Iterator<Item = &str> {
        self.requirements.iter().flat_map(|requirement| &requirement.missing).map(String::as_str)
    }
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ChosenMode {
    pub mode: Mode,
    /// Why this mode, and what is less than best on this node.
    pub reasons: Vec<String>,
}

#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Refusal {
    #[error("mode {requested} is not built yet: use {built}")]
    NotBuilt { requested: RequestedMode, built: String },
    #[error("mode {mode} cannot run here: {obstacles}")]
    Impossible { mode: Mode, obstacles: String },
}

/// `probes`: the modes' answers, the mode to prefer first.
pub fn choose(requested: RequestedMode, probes: &[Probe]) -> Result<ChosenMode, Refusal> {
    let is_automatic = requested == RequestedMode::Automatic;
    let candidates = || probes.iter().filter(|probe| is_automatic || probe.mode.requested() == requested);
    if let Some(Probe { mode, remarks, .. }) = candidates().find(|probe| probe.obstacles().next().is_none()) {
        let asked = if is_automatic {
            format!("no mode was asked for, and this node can do {mode}")
        } else {
            format!("{requested} was asked for")
        };
        let reasons = std::iter::once(asked).chain(remarks.iter().cloned()).collect();
        return Ok(ChosenMode { mode: *mode, reasons });
    }
    Err(match candidates().next() {
        Some(probe) => {
            let obstacles: Vec<_> = probe.obstacles().collect();
            Refusal::Impossible { mode: probe.mode, obstacles: obstacles.join("; ") }
        }
        None => {
            let built: Vec<_> = probes.iter().map(|probe| probe.mode.name()).collect();
            Refusal::NotBuilt { requested, built: built.join(" or ") }
        }
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn probe(missing: &[&str]) -> [Probe; 1] {
        let all = Requirement::new("key", "name", true);
        let requirements = missing.iter().fold(vec![all], |mut requirements, why| {
            requirements.push(Requirement::new("key", "name", false).lacking(true, || (*why).to_owned()));
            requirements
        });
        [Probe { mode: Mode::Ebpf, requirements, remarks: vec!["it is fast".to_owned()] }]
    }

    #[rstest]
    #[case::nothing_asked(RequestedMode::Automatic, "no mode was asked for, and this node can do ebpf")]
    #[case::asked(RequestedMode::Ebpf, "ebpf was asked for")]
    fn chosen(#[case] requested: RequestedMode, #[case] reason: &str) {
        let reasons = vec![reason.to_owned(), "it is fast".to_owned()];
        assert_eq!(choose(requested, &probe(&[])), Ok(ChosenMode { mode: Mode::Ebpf, reasons }));
    }

    #[rstest]
    #[case::one(&["no BTF"], "mode ebpf cannot run here: no BTF")]
    #[case::several(&["no BTF", "no bpffs"], "mode ebpf cannot run here: no BTF; no bpffs")]
    fn impossible(
        #[values(RequestedMode::Automatic, RequestedMode::Ebpf)] requested: RequestedMode,
        #[case] missing: &[&str],
        #[case] message: &str,
    ) {
        assert_eq!(choose(requested, &probe(missing)).unwrap_err().to_string(), message);
    }

    #[rstest]
    fn not_built(
        #[values(
            RequestedMode::Iptables,
            RequestedMode::Ipvs,
            RequestedMode::Nftables,
            RequestedMode::Userspace
        )]
        requested: RequestedMode,
    ) {
        let refusal = choose(requested, &probe(&[])).unwrap_err();
        assert_eq!(refusal.to_string(), format!("mode {requested} is not built yet: use ebpf"));
    }
}
