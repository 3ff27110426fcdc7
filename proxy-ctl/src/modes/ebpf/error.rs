//! Errors of the eBPF mode, with what to do about them.

use std::{fmt, io, net::IpAddr, path::PathBuf, time::Duration};

use proxy_common::inventory::Limit;

use crate::{
    model::desired::ServicePortName,
    modes::{self, ErrorKind},
    sys::{CallError, proc::lock::Holder},
};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{}: {source}", path.display())]
    Folder { path: PathBuf, source: io::Error },
    #[error("{} is not a bpffs and one cannot be mounted there: {source}", path.display())]
    NoBpffs { path: PathBuf, source: io::Error },
    #[error("no cgroup v2 is mounted; mount one or set ebpf.socketLoadBalancing: off")]
    NoCgroup,
    #[error("another controller, {holder}, runs on {}; stop it first", path.display())]
    Locked { path: PathBuf, holder: Holder },
    #[error("map {name} in {} {difference}; `proxy-ctl cleanup` removes it and all other maps", path.display())]
    Shape { name: &'static str, path: PathBuf, difference: Difference },
    #[error(transparent)]
    Full(FullMap),
    #[error("map {name}: {source}")]
    Map { name: &'static str, source: CallError },
    #[error("the kernel programs cannot be loaded: {0}")]
    Load(#[source] Box<aya::EbpfError>),
    #[error("the log of the kernel programs cannot be followed: {0}")]
    KernelLog(#[source] io::Error),
    #[error("program {program}: {source}")]
    Program { program: &'static str, source: Box<aya::programs::ProgramError> },
    #[error("the object has no program {0}")]
    NoProgram(&'static str),
    #[error("attaching {program} to {target}: {source}")]
    Attach { program: &'static str, target: String, source: CallError },
    #[error("the interface has a queueing discipline of another program ({0}), which clsact cannot join")]
    IngressQdiscTaken(String),
    #[error("queueing disciplines cannot be listed: {0}")]
    Qdiscs(#[source] CallError),
    #[error("detaching from {target}: {source}")]
    Detach { target: String, source: CallError },
    #[error("link {}: {source}", path.display())]
    Link { path: PathBuf, source: CallError },
    #[error("the cookie of the node's network namespace cannot be learned: {0}")]
    Namespace(#[source] CallError),
    #[error("listing translated connections: {0}")]
    Conntrack(#[source] CallError),
    #[error("ending sockets whose endpoint is gone: {0}")]
    Sockets(#[source] CallError),
    #[error("counting sockets that were sent to endpoints: {0}")]
    CountingSockets(#[source] CallError),
    #[error("sockets of pods cannot be ended: {0}; to enter their network namespaces needs CAP_SYS_ADMIN")]
    OtherNamespaces(#[source] CallError),
    #[error("/proc/thread-self/mountinfo, or a network namespace that it lists: {0}")]
    Mounts(#[source] io::Error),
    #[error(
        "some are in network namespaces that are not mounted in sight; those of pods are mounted below /run/netns"
    )]
    OutOfSight,
    #[error(
        "copying the maps of flows took {took:?}, and no flow may be held for more than {most:?}; start again when there are fewer flows"
    )]
    SlowCopy { took: Duration, most: Duration },
    #[error("waiting for a grace period: {0}")]
    Grace(#[source] CallError),
    #[error("following changes of routes: {0}")]
    Routes(#[source] CallError),
    #[error(
        "no backend id is left, because each is given only once; after `proxy-ctl cleanup` they start anew"
    )]
    BackendIdsExhausted,
    #[error("{port}: endpoint address {address} is not of the service port's family")]
    WrongFamily { port: ServicePortName, address: IpAddr },
    #[error("{0}: namespace, name and port name must have at most 64 bytes each")]
    NameTooLong(ServicePortName),
    #[error("{failed} writes failed; the first, {what}: {source}")]
    Incomplete { failed: usize, what: String, source: Box<Error> },
    #[error("not all addresses of this node serve node ports: {source}")]
    NodeAddresses { source: Box<Error> },
    #[error("{0} watches already, and events have one reader; end it first")]
    Watched(Holder),
    #[error("the maps were removed or replaced; this process gets no more events")]
    NoLongerWatched,
    #[error("nothing of proxy-ctl is pinned in {}", .0.display())]
    NotThere(PathBuf),
}

/// A map that has no room for an entry.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("map {name} is full with {capacity} entries; ebpf.limits.{} sets another size", limit.name())]
pub struct FullMap {
    pub name: &'static str,
    pub capacity: u32,
    pub limit: Limit,
}

/// Difference between a pinned map and what is expected: the value found, then the expected one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Difference {
    Kind(u32, u32),
    KeySize(u32, usize),
    ValueSize(u32, usize),
    Entries(u32, u32, Option<Limit>),
    Flags(u32, u32),
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kind(found, expected) => write!(f, "is a BPF map of type {found}, not {expected}"),
            Self::KeySize(found, expected) => write!(f, "has keys of {found} bytes, not {expected}"),
            Self::ValueSize(found, expected) => write!(f, "has values of {found} bytes, not {expected}"),
            Self::Entries(found, expected, Some(limit)) => {
                write!(f, "has room for {found} entries, but ebpf.limits.{} is {expected}", limit.name())
            }
            Self::Entries(found, expected, None) => {
                write!(f, "has room for {found} entries, not {expected}")
            }
            Self::Flags(found, expected) => write!(f, "has flags {found:#x}, not {expected:#x}"),
        }
    }
}

impl Error {
    /// Converts an error of writing node addresses. A full map leaves out only some addresses. Any
    /// other error is one of the node's whole dataplane.
    pub(super) fn of_node_addresses(self) -> Self {
        if matches!(self, Self::Full(_)) { Self::NodeAddresses { source: Box::new(self) } } else { self }
    }

    pub fn is_not_there(&self) -> bool {
        matches!(self, Self::NotThere(_))
    }

    /// Returns true if the maps are missing, or some of them.
    pub fn is_missing_maps(&self) -> bool {
        matches!(self, Self::NotThere(_))
            || matches!(self, Self::Map { source, .. } if source.errno() == libc::ENOENT)
    }
}

impl From<Error> for modes::Error {
    fn from(error: Error) -> Self {
        let kind = if matches!(error, Error::NodeAddresses { .. }) {
            ErrorKind::NodeAddresses
        } else if matches!(error, Error::Locked { .. }) {
            ErrorKind::TakenOver
        } else {
            ErrorKind::Other
        };
        Self::new(kind, error)
    }
}
