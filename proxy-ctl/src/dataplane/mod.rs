//! A mode programs the node: one folder each behind one trait.
//!
//! A dataplane is used from one thread; calls block on system calls and are short.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

pub mod ebpf;
mod supports;

pub use supports::{Effect, Unsupported, servable};

use crate::model::desired::{Changes, DesiredPort, ServicePortName};

/// What every mode can do.
pub trait Dataplane: Send {
    /// Writes what changed. After an error the dataplane serves the old or the new state of each service
    /// port, and the caller tries again with [`Dataplane::resync`].
    fn apply(&mut self, changes: &Changes) -> Result<Applied, Error>;

    /// Makes the node serve exactly `desired`: writes what differs from what is programmed, removes the rest.
    fn resync(&mut self, desired: &[Arc<DesiredPort>]) -> Result<Applied, Error>;

    /// Takes over the node's own addresses and interfaces. Called before the first `resync`, and on change.
    fn set_host(&mut self, host: &Host) -> Result<Applied, Error>;

    /// Removes what nobody uses any more (expired flows, interfaces that are gone). Called about once a second.
    fn collect_garbage(&mut self) -> Result<(), Error>;

    /// How full and how large the tables are, and the counters by reason, for metrics.
    fn usage(&self) -> Result<Usage, Error>;

    /// What this mode does not honour of the service port; empty: it is served as its Service asks.
    fn supports(&self, port: &DesiredPort) -> Vec<Unsupported>;
}

/// The node as its dataplane sees it.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Host {
    /// Every address on which node ports are served; loopback ones serve the host's own processes only.
    pub node_port_addresses: BTreeSet<IpAddr>,
    /// Source of translated flows, at most one of each family.
    pub masquerade_addresses: Vec<IpAddr>,
    pub interfaces: Vec<Interface>,
}

#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Interface {
    pub index: u32,
    pub name: String,
    pub role: Role,
    /// False: packets start at the IP header (tun, wireguard, ipip).
    pub ethernet: bool,
}

/// Where an interface leads.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Role {
    /// To pods.
    Workload,
    /// To other nodes and the outside.
    Uplink,
}

/// What a call has written: table entries, rules or the like.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Applied {
    pub written: u64,
    pub removed: u64,
}

impl std::ops::AddAssign for Applied {
    fn add_assign(&mut self, other: Self) {
        self.written += other.written;
        self.removed += other.removed;
    }
}

/// State of a dataplane in numbers.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    pub tables: Vec<TableUsage>,
    /// Decisions since the tables were created.
    pub reasons: Vec<ReasonUsage>,
    /// Service ports in no order.
    pub services: Vec<ServiceUsage>,
    /// Service ports that there is no room to count.
    pub uncounted_services: u64,
}

/// How often packets or calls met one decision.
#[derive(Clone, Debug)]
pub struct ReasonUsage {
    pub name: &'static str,
    /// What becomes of them: `pass`, `refuse` or `drop`.
    pub verdict: &'static str,
    pub count: u64,
}

/// What the clients of a service port did since it is served; counters may wrap.
#[derive(Clone, Debug)]
pub struct ServiceUsage {
    pub name: ServicePortName,
    /// Sockets that were connected, and flows that were opened.
    pub connections: u64,
    /// Of flows, both directions; those of sockets are not seen.
    pub packets: u64,
    pub bytes: u64,
}

#[derive(Clone, Debug)]
pub struct TableUsage {
    pub name: &'static str,
    pub used: u64,
    pub capacity: u64,
    /// New entries are refused or evict others when all of `capacity` is used.
    pub can_fill_up: bool,
    pub bytes: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Ebpf(#[from] ebpf::Error),
}

impl Error {
    /// Node ports are not served on all of the node's addresses. Everything else is served.
    pub fn is_of_node_addresses(&self) -> bool {
        let Self::Ebpf(error) = self;
        matches!(error, ebpf::Error::NodeAddresses { .. })
    }

    /// Somebody else programs this node now: trying again would take it from them.
    pub fn is_taken_over(&self) -> bool {
        let Self::Ebpf(error) = self;
        matches!(error, ebpf::Error::Locked { .. })
    }
}
