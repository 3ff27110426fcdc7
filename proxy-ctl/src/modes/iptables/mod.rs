//! Mode iptables turns the desired state into rules as kube-proxy writes them, by iptables-restore.
//!
//! `rules` says which rules a service port has, and `base` which rules jump to them. `state` is
//! what iptables-save prints. `plan` turns these into input of iptables-restore. All of that is
//! pure. `writer` runs the tools for one family.
//!
//! A change costs time for the rules of the changed service ports, and what iptables itself adds:
//! the backend legacy copies the whole table each time.

use std::{fs, io, sync::Arc};

use self::{
    base::{Abilities, serves_localhost},
    error::Error,
    metrics::PacketCounts,
    names::Table,
    writer::Writer,
};
use super::{
    Applied, Dataplane, Known, MapUsage, MetricFamily, NodeSnapshot, Programmed, Snapshot, UnservedField,
    Usage,
    entry::{BoxedProgrammed, Entry, TrackedFlows},
    mode_lock::lock,
    netfilter::{chains::can_translate, own_rules},
};
use crate::{
    cleanup,
    model::{
        desired::{Changes, DesiredPort},
        mode::Mode,
        node::Host,
        objects::IpFamily,
    },
    names::{INVALID_DROPPED, LOCALHOST_ACCEPTED, PACKET_COUNTERS},
    sys::{
        CallError, has_ipv6,
        net::{namespace_lock::NamespaceLock, packet_counters::PacketCounters},
        xtables::{self, Backend, Tools},
    },
};

mod base;
mod error;
mod metrics;
mod names;
mod plan;
pub(super) mod probe;
mod rules;
mod snapshot;
mod state;
mod trial;
mod writer;

#[cfg(test)]
mod tests;

#[cfg(test)]
pub(crate) use self::metrics::sample_metrics;

const ROUTE_LOCALNET: &str = "/proc/sys/net/ipv4/conf/all/route_localnet";
const BE_LIBERAL: &str = "/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal";

pub(super) const ENTRY: Entry = Entry {
    tracked_flows: TrackedFlows::All,
    drains: false,
    keeps_min_sync_period: true,
    reads_service_cidrs: |_| false,
    delegates: false,
    can_be_secondary: true,
    probe: probe::probe,
    prepare: |config| {
        if config.serves_node_ports_on_loopback() {
            route_localnet()?;
        }
        Ok(())
    },
    open: |config| {
        if config.serves_node_ports_on_loopback() {
            try_route_localnet();
        }
        Ok(Box::new(IptablesDataplane::open(xtables::choose().map_err(Error::from)?.backend)?))
    },
    read: |_| Ok(Tables::open()?.map(|tables| Box::new(tables) as BoxedProgrammed)),
    controller: |_| NamespaceLock::holder(Mode::Iptables.name()),
    cleanup: |_, keeps| own_rules::remove_own(Mode::Iptables, keeps),
};

/// Sets the parameter without which connections from 127.0.0.1 to a node port cannot leave by
/// another interface. Nothing else needs it, and only [`base`]'s rules for node ports on loopback
/// keep neighbours from what listens there (CVE-2020-8558).
fn route_localnet() -> Result<(), Error> {
    let failed = |source| Error::RouteLocalnet { path: ROUTE_LOCALNET, source };
    if fs::read_to_string(ROUTE_LOCALNET).map_err(failed)?.trim() == "1" {
        return Ok(());
    }
    fs::write(ROUTE_LOCALNET, "1").map_err(failed)
}

fn try_route_localnet() {
    if let Err(error) = route_localnet() {
        tracing::warn!(%error, "node ports are not served on 127.0.0.1");
    }
}

/// The rules of this network namespace. They stay in place when this value is dropped.
#[derive(Debug)]
pub struct IptablesDataplane {
    writers: Vec<Writer>,
    /// True if the kernel has packet counters. `None` before the first write, because the node is
    /// set up after the mode is opened.
    has_counters: Option<bool>,
    _lock: NamespaceLock,
}

impl IptablesDataplane {
    /// Opens the mode, and adopts what is there. Nothing is changed before the first
    /// [`Dataplane::resync`]. Needs CAP_NET_ADMIN.
    pub fn open(backend: Backend) -> Result<Self, Error> {
        let lock = lock(Mode::Iptables)?;
        let writer = |(family, tools): (IpFamily, Tools)| {
            let random_fully = tools.has_random_fully();
            let abilities = Abilities { random_fully, ..Abilities::default() };
            Writer::new(family, tools, abilities)
        };
        let writers = families(backend).into_iter().map(writer).collect();
        Ok(Self { writers, has_counters: None, _lock: lock })
    }

    /// Reads what the rules depend on: packet counters and kernel parameters. The parameters are
    /// read at each call, because they change with the configuration while the process runs.
    fn prepare(&mut self) -> Result<(), Error> {
        let has_counters = match self.has_counters {
            Some(known) => known,
            None => {
                let has_counters = make_counters()?;
                if !has_counters {
                    tracing::info!(
                        "packets are not counted: the kernel has no CONFIG_NETFILTER_NETLINK_ACCT"
                    );
                }
                has_counters
            }
        };
        let parameters = Parameters::read()?;
        self.has_counters = Some(has_counters);
        self.writers.iter_mut().for_each(|writer| writer.prepare(parameters, has_counters));
        Ok(())
    }
}

/// Kernel parameters on which rules depend.
#[derive(Clone, Copy, Debug)]
struct Parameters {
    /// True if conntrack takes packets outside of the window for valid. False before conntrack is
    /// loaded.
    is_liberal: bool,
    routes_localnet: bool,
}

impl Parameters {
    fn read() -> Result<Self, Error> {
        Ok(Self { is_liberal: is_set(BE_LIBERAL)?, routes_localnet: is_set(ROUTE_LOCALNET)? })
    }
}

/// Returns true if the parameter is set. Returns false for a parameter that the kernel does not
/// have.
fn is_set(path: &'static str) -> Result<bool, Error> {
    match fs::read_to_string(path) {
        Ok(value) => Ok(value.trim() != "0"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(Error::File { path, source }),
    }
}

/// Makes the packet counters. Returns false if the kernel has none.
fn make_counters() -> Result<bool, CallError> {
    let counters = PacketCounters::open()?;
    for name in PACKET_COUNTERS {
        if !counters.create(name)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn read_counters() -> Result<PacketCounts, CallError> {
    let counters = PacketCounters::open()?;
    let [invalid, localhost] = [INVALID_DROPPED, LOCALHOST_ACCEPTED].map(|name| counters.packets(name));
    Ok(PacketCounts { invalid: invalid?, localhost: localhost? })
}

/// Returns the IP families in which this node can be programmed.
fn families(backend: Backend) -> Vec<(IpFamily, Tools)> {
    let find = |family: IpFamily| {
        let tools = Tools::find(family.into(), backend)?;
        let is_there = family == IpFamily::Ipv4 || has_ipv6();
        let can_translate = || can_translate(family, || tools.save(Table::Nat.name(), |_| ()));
        (is_there && can_translate()).then_some((family, tools))
    };
    IpFamily::ALL.into_iter().filter_map(find).collect()
}

/// The rules in the kernel, read by the tools.
struct Tables(Vec<(IpFamily, Tools)>);

impl Tables {
    /// Finds the tools. `None`: there are no rules of this proxy in this mode, or no tools that
    /// could read them.
    fn open() -> Result<Option<Self>, Error> {
        if !cleanup::has_owner_tag(Mode::Iptables)? {
            return Ok(None);
        }
        Ok(xtables::choose().ok().map(|chosen| Self(families(chosen.backend))))
    }
}

fn read_snapshot<'a>(families: impl Iterator<Item = (IpFamily, &'a Tools)>) -> Result<Snapshot, Error> {
    let (mut snapshot, mut addresses) = (Snapshot::default(), Vec::new());
    for (family, tools) in families {
        let mut reader = snapshot::Reader::new(family);
        for table in [Table::Nat, Table::Filter] {
            tools.save(table.name(), |line| {
                reader.take(table, line);
                if table == Table::Nat {
                    addresses.extend(snapshot::node_port_address(line));
                }
            })?;
        }
        reader.finish(&mut snapshot);
    }
    let node_port_addresses = addresses.into_iter().map(|address| (address, address.is_loopback())).collect();
    snapshot.node = NodeSnapshot { node_port_addresses, ..NodeSnapshot::default() };
    Ok(snapshot)
}

/// Returns the usage of each table. `rules` is the number of rules in it, of both IP families.
fn usage(rules: [u64; 3]) -> Usage {
    let of = |table: Table| MapUsage {
        name: table.name(),
        used: rules[table as usize],
        capacity: 0,
        can_fill_up: false,
        bytes: 0,
    };
    Usage { maps: [Table::Nat, Table::Filter].map(of).into(), reasons: Vec::new() }
}

impl Programmed for Tables {
    fn snapshot(&self) -> Result<Snapshot, super::Error> {
        Ok(read_snapshot(self.0.iter().map(|(family, tools)| (*family, tools)))?)
    }

    fn usage(&self) -> Result<Usage, super::Error> {
        let mut rules = [0; 3];
        for (_, tools) in &self.0 {
            for table in Table::ALL {
                let count = |line: &str| rules[table as usize] += u64::from(line.starts_with("-A KUBE-"));
                tools.save(table.name(), count).map_err(Error::from)?;
            }
        }
        Ok(usage(rules))
    }
}

impl Programmed for IptablesDataplane {
    fn snapshot(&self) -> Result<Snapshot, super::Error> {
        Ok(read_snapshot(self.writers.iter().map(|writer| (writer.family, &writer.tools)))?)
    }

    fn usage(&self) -> Result<Usage, super::Error> {
        let mut rules = [0; 3];
        for writer in &self.writers {
            rules.iter_mut().zip(writer.rules()).for_each(|(all, more)| *all += more);
        }
        Ok(usage(rules))
    }

    fn metrics(&self) -> Result<Vec<MetricFamily>, super::Error> {
        let counts: Vec<_> = self.writers.iter().map(metrics::Counts::of).collect();
        let is_counted = self.writers.iter().any(Writer::counts_packets);
        let packets =
            if is_counted { read_counters().map_err(Error::from)? } else { PacketCounts::default() };
        Ok(metrics::families(&counts, packets))
    }
}

impl IptablesDataplane {
    /// Writes in both IP families, also if one fails.
    fn in_each(
        &mut self,
        mut write: impl FnMut(&mut Writer) -> Result<Applied, Error>,
    ) -> Result<Applied, super::Error> {
        let (mut applied, mut failed) = (Applied::default(), None);
        for writer in &mut self.writers {
            match write(writer) {
                Ok(more) => applied += more,
                Err(error) => failed = failed.or(Some(error.of(writer.family))),
            }
        }
        failed.map_or(Ok(applied), |error| Err(error.into()))
    }
}

impl Dataplane for IptablesDataplane {
    fn apply(&mut self, changes: &Changes) -> Result<Applied, super::Error> {
        self.in_each(|writer| writer.apply(changes))
    }

    fn resync(&mut self, desired: &[Arc<DesiredPort>]) -> Result<Applied, super::Error> {
        self.prepare()?;
        self.in_each(|writer| writer.resync(desired))
    }

    fn set_host(&mut self, host: &Host) -> Result<Applied, super::Error> {
        let is_prepared = self.has_counters.is_some();
        if is_prepared {
            self.prepare()?;
        }
        let applied = self.in_each(|writer| writer.set_host(host))?;
        // nodePortAddresses may have changed since the mode was opened. The rules that keep
        // neighbours out are there by now.
        if is_prepared && serves_localhost(IpFamily::Ipv4, host) {
            try_route_localnet();
        }
        Ok(applied)
    }

    fn invalidate(&mut self, known: Known) {
        if known == Known::Everything {
            self.writers.iter_mut().for_each(Writer::invalidate);
        }
    }

    fn collect_garbage(&mut self) -> Result<(), super::Error> {
        self.in_each(|writer| writer.watch().map(|()| Applied::default())).map(drop)
    }

    fn unserved_fields(&self, port: &DesiredPort) -> Vec<UnservedField> {
        super::unserved::balancing(port, "mode iptables draws endpoints at random, each alike")
    }
}
