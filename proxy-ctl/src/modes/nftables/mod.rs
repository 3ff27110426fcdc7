//! Mode nftables turns the desired state into the tables `ip kube-proxy` and `ip6 kube-proxy`, by
//! netlink alone.
//!
//! `frame` says what a table holds whatever Services there are, and `render` what one service port
//! adds, both as plain data (`objects`). `plan` turns the difference between the kernel's state and
//! the desired state into one transaction. `table` keeps what is programmed, and commits.
//! `contents` reads a table that is there, and `snapshot` says what it serves.

mod affinity;
mod contents;
mod error;
mod frame;
mod language;
mod names;
mod objects;
mod plan;
pub(super) mod probe;
mod render;
mod slots;
mod snapshot;
mod table;
#[cfg(test)]
mod tests;
mod trial;

use std::sync::Arc;

pub use self::error::{Error, RefusedPorts};
use self::{frame::Context, snapshot::Pinned, table::FamilyTable};
use super::{
    Applied, Dataplane, MapUsage, MetricFamily, Programmed, Removed, Snapshot, UnservedField, Usage,
    entry::{Entry, TrackedFlows},
    mode_lock::lock,
};
use crate::{
    model::{
        desired::{Changes, DesiredPort},
        mode::Mode,
        node::Host,
        objects::IpFamily,
    },
    names::NFTABLES_TABLE as TABLE,
    sys::{
        has_ipv6,
        net::namespace_lock::NamespaceLock,
        nftables::{Batch, NfTables, TableFamily},
    },
};

pub(super) const ENTRY: Entry = Entry {
    tracked_flows: TrackedFlows::All,
    drains: false,
    keeps_min_sync_period: false,
    reads_service_cidrs: |_| true,
    delegates: false,
    can_be_secondary: true,
    probe: |config, host| {
        let mut probe = probe::probe(config, host);
        if probe.can_run() {
            probe.requirements.push(trial::requirement());
        }
        probe
    },
    prepare: |_| Ok(()),
    open: |_| Ok(Box::new(NftablesDataplane::open()?)),
    read: |_| match Pinned::open()? {
        Some(pinned) => Ok(Some(Box::new(pinned))),
        None => Ok(None),
    },
    controller: |_| NamespaceLock::holder(Mode::Nftables.name()),
    cleanup: |_, _| Ok(cleanup()?),
};

/// The tables of this network namespace. They stay in place when this value is dropped.
pub struct NftablesDataplane {
    nftables: NfTables,
    /// One table for each IP family that the node has.
    tables: Vec<FamilyTable>,
    sync_failures: [u64; 2],
    cleanup_failures: [u64; 2],
    _lock: NamespaceLock,
}

const fn index_of(family: IpFamily) -> usize {
    match family {
        IpFamily::Ipv4 => 0,
        IpFamily::Ipv6 => 1,
    }
}

impl NftablesDataplane {
    /// Opens the mode. Nothing is changed before the first [`Dataplane::resync`]. Needs
    /// CAP_NET_ADMIN.
    pub fn open() -> Result<Self, Error> {
        let lock = lock(Mode::Nftables)?;
        let nftables = NfTables::load()?.ok_or(Error::NoNetlink)?;
        let without = trial::refusals(&nftables, IpFamily::Ipv6)?;
        let families = if without.is_empty() && has_ipv6() {
            &IpFamily::ALL[..]
        } else {
            tracing::info!("this node has no IPv6: Services are served by IPv4 alone");
            &IpFamily::ALL[..1]
        };
        let tables = families.iter().map(|family| FamilyTable::new(*family)).collect();
        let (sync_failures, cleanup_failures) = Default::default();
        Ok(Self { nftables, tables, sync_failures, cleanup_failures, _lock: lock })
    }

    /// Does the same with each table, also after an error, because the IP families do not depend on
    /// each other.
    fn each(
        &mut self,
        work: impl Fn(&mut FamilyTable, &NfTables) -> Result<Applied, Error>,
    ) -> Result<Applied, super::Error> {
        let (mut applied, mut failed) = (Applied::default(), None);
        for table in &mut self.tables {
            match work(table, &self.nftables) {
                Ok(done) => applied += done,
                Err(error) => {
                    self.sync_failures[index_of(table.family())] += 1;
                    // The first error names a cause. The next attempt names what else has failed.
                    failed.get_or_insert(error);
                }
            }
        }
        match failed {
            Some(error) => Err(error.into()),
            None => Ok(applied),
        }
    }
}

impl Programmed for NftablesDataplane {
    fn snapshot(&self) -> Result<Snapshot, super::Error> {
        Ok(snapshot::read(&self.nftables)?)
    }

    fn usage(&self) -> Result<Usage, super::Error> {
        let usage = |name, used: fn(&FamilyTable) -> usize| {
            let used: usize = self.tables.iter().map(used).sum();
            MapUsage { name, used: used as u64, capacity: 0, can_fill_up: false, bytes: 0 }
        };
        let maps =
            vec![usage("servicePorts", FamilyTable::ports), usage("endpoints", FamilyTable::endpoints)];
        Ok(Usage { maps, reasons: Vec::new() })
    }

    fn metrics(&self) -> Result<Vec<MetricFamily>, super::Error> {
        Ok(families(self.sync_failures, self.cleanup_failures))
    }
}

impl Dataplane for NftablesDataplane {
    fn apply(&mut self, changes: &Changes) -> Result<Applied, super::Error> {
        self.each(|table, nftables| {
            let family = table.family();
            let changed = changes.changed.iter().map(|port| (port.name.clone(), Some(Arc::clone(port))));
            let removed = changes.removed.iter().map(|name| (name.clone(), None));
            let own: Vec<_> = removed.chain(changed).filter(|(name, _)| name.family == family).collect();
            table.apply(nftables, &own)
        })
    }

    fn resync(&mut self, desired: &[Arc<DesiredPort>]) -> Result<Applied, super::Error> {
        self.each(|table, nftables| {
            let own = desired.iter().filter(|port| port.name.family == table.family());
            let own: Vec<_> = own.cloned().collect();
            table.resync(nftables, &own)
        })
    }

    fn set_host(&mut self, host: &Host) -> Result<Applied, super::Error> {
        self.each(|table, nftables| {
            let context = Context::new(table.family(), host);
            table.set_context(nftables, context)
        })
    }

    fn collect_garbage(&mut self) -> Result<(), super::Error> {
        let mut failed = None;
        for table in &mut self.tables {
            if let Err(error) = table.collect(&self.nftables) {
                self.cleanup_failures[index_of(table.family())] += 1;
                failed = Some(error);
            }
        }
        failed.map_or(Ok(()), |error| Err(error.into()))
    }

    fn unserved_fields(&self, port: &DesiredPort) -> Vec<UnservedField> {
        super::unserved::balancing(port, "mode nftables draws endpoints at random, each alike")
    }
}

/// Returns the metric families from the counts of each IP family.
fn families(sync_failures: [u64; 2], cleanup_failures: [u64; 2]) -> Vec<MetricFamily> {
    let family = |name, help, counts: [u64; 2]| {
        MetricFamily::of_families(name, help, IpFamily::ALL.into_iter().zip(counts))
    };
    vec![
        family(
            "kubeproxy_sync_proxy_rules_nftables_sync_failures",
            "Transactions of nf_tables that have failed.",
            sync_failures,
        ),
        family(
            "kubeproxy_sync_proxy_rules_nftables_cleanup_failures",
            "Deletions of what is no longer used that have failed.",
            cleanup_failures,
        ),
    ]
}

/// Returns a sample of each metric family.
#[cfg(test)]
pub(crate) fn sample_metrics() -> Vec<MetricFamily> {
    families([1, 0], [0, 1])
}

/// Removes the tables that this proxy has made, in one transaction each. Fails with [`Error::Lock`]
/// if a controller runs.
fn cleanup() -> Result<Removed, Error> {
    let mut removed = Removed::default();
    let Some(nftables) = NfTables::open()? else { return Ok(removed) };
    let mut held = None;
    for family in TableFamily::ALL {
        if !snapshot::is_own(&nftables, family)? {
            continue;
        }
        if held.is_none() {
            held = Some(lock(Mode::Nftables)?);
        }
        let mut batch = Batch::default();
        batch.delete_table(family, TABLE);
        match nftables.commit(batch)?.first() {
            // Another program has deleted the table first.
            None | Some(crate::sys::net::netlink::Refused { errno: libc::ENOENT, .. }) => {}
            Some(refused) => {
                return Err(Error::Deletion(std::io::Error::from_raw_os_error(refused.errno)));
            }
        }
        removed.objects.push(format!("nftables {} {TABLE}", family.name()));
    }
    Ok(removed)
}
