//! The section `ebpf`: settings that only this proxy has.

use std::path::PathBuf;

use super::fields::Fields;

/// Whose connections the socket hooks translate.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum SocketLoadBalancing {
    /// Those of every process on the node, pods included.
    #[default]
    All,
    /// Those of processes in the node's own network namespace.
    Host,
    /// Nobody's: every packet is translated.
    Off,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Ebpf {
    pub socket_load_balancing: SocketLoadBalancing,
    pub interfaces: Interfaces,
    pub limits: Limits,
    /// The cgroup v2 folder whose processes are served; `None`: the mount in /proc/mounts.
    pub cgroup: Option<PathBuf>,
    pub bpffs: PathBuf,
}

impl Default for Ebpf {
    fn default() -> Self {
        Self {
            socket_load_balancing: SocketLoadBalancing::default(),
            interfaces: Interfaces::default(),
            limits: Limits::default(),
            cgroup: None,
            bpffs: PathBuf::from("/sys/fs/bpf"),
        }
    }
}

/// Interfaces that the packet programs are attached to.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Interfaces {
    /// Empty: all.
    pub include: Vec<NamePattern>,
    pub exclude: Vec<NamePattern>,
}

impl Interfaces {
    pub fn select(&self, name: &str) -> bool {
        let included = self.include.is_empty() || self.include.iter().any(|pattern| pattern.matches(name));
        included && !self.exclude.iter().any(|pattern| pattern.matches(name))
    }
}

/// An interface name, in which one `*` at the end stands for anything.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NamePattern {
    name: String,
    prefix: bool,
}

impl NamePattern {
    /// `IFNAMSIZ` without the final zero.
    const LONGEST: usize = 15;

    pub fn parse(text: &str) -> Option<Self> {
        let (name, prefix) = text.strip_suffix('*').map_or((text, false), |name| (name, true));
        let forbidden = |c: char| c == '*' || c == '/' || c.is_whitespace();
        let usable = !text.is_empty() && name.len() <= Self::LONGEST && !name.contains(forbidden);
        usable.then(|| Self { name: name.to_owned(), prefix })
    }

    pub fn matches(&self, name: &str) -> bool {
        if self.prefix { name.starts_with(&self.name) } else { name == self.name }
    }
}

impl std::fmt::Display for NamePattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.name, if self.prefix { "*" } else { "" })
    }
}

/// Entries that the tables have room for; `None`: the dataplane's default.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Limits {
    pub frontends: Option<u32>,
    pub services: Option<u32>,
    pub slots: Option<u32>,
    pub backends: Option<u32>,
    pub flows: Option<u32>,
    pub opening_flows: Option<u32>,
    pub node_addresses: Option<u32>,
}

/// What a kernel accepts for the largest of these tables with room to spare.
const MOST_ENTRIES: u32 = 1 << 26;

pub(super) fn read(ebpf: &Fields<'_>) -> Ebpf {
    let defaults = Ebpf::default();
    let socket_load_balancing = ebpf.choice(
        "socketLoadBalancing",
        &[
            ("all", Some(SocketLoadBalancing::All)),
            ("host", Some(SocketLoadBalancing::Host)),
            ("off", Some(SocketLoadBalancing::Off)),
        ],
    );
    // The only forms that exist so far; each other word is an error that says so.
    ebpf.choice("sourceAddress", &[("preserve", Some(())), ("masquerade", None)]);
    ebpf.choice("xdp", &[("auto", Some(())), ("off", Some(())), ("native", None), ("generic", None)]);
    ebpf.choice("forwarding", &[("snat", Some(())), ("dsr", None), ("hybrid", None)]);
    ebpf.choice("algorithm", &[("random", Some(())), ("maglev", None), ("leastConnection", None)]);
    Ebpf {
        socket_load_balancing: socket_load_balancing.unwrap_or_default(),
        interfaces: interfaces(&ebpf.section("interfaces")),
        limits: limits(&ebpf.section("limits")),
        cgroup: folder(ebpf, "cgroup"),
        bpffs: folder(ebpf, "bpffs").unwrap_or(defaults.bpffs),
    }
}

fn folder(ebpf: &Fields<'_>, name: &'static str) -> Option<PathBuf> {
    ebpf.parsed(name, "an absolute path", |text| Some(PathBuf::from(text)).filter(|path| path.is_absolute()))
}

fn interfaces(interfaces: &Fields<'_>) -> Interfaces {
    let allowed = "an interface name of at most 15 characters, with a * at its end for a prefix";
    Interfaces {
        include: interfaces.list("include", allowed, NamePattern::parse),
        exclude: interfaces.list("exclude", allowed, NamePattern::parse),
    }
}

fn limits(limits: &Fields<'_>) -> Limits {
    Limits {
        frontends: limits.count("frontends", MOST_ENTRIES),
        services: limits.count("services", MOST_ENTRIES),
        slots: limits.count("slots", MOST_ENTRIES),
        backends: limits.count("backends", MOST_ENTRIES),
        flows: limits.count("flows", MOST_ENTRIES),
        opening_flows: limits.count("openingFlows", MOST_ENTRIES),
        node_addresses: limits.count("nodeAddresses", MOST_ENTRIES),
    }
}
