//! Brings both families to the desired state, with what they share: waiting service ports, ids that
//! no program can read any more, and the ranges of ClusterIPs.

use std::sync::Arc;

use proxy_common::family::{V4, V6};

use super::{
    addresses::service_cidrs::ServiceCidrs,
    adopt::Stray,
    allocate::Range,
    publish::remove_service,
    writer::{Common, Failures, FamilyWriter, Writes},
};
use crate::{
    model::{
        desired::{Changes, DesiredPort},
        node::Host,
        objects::Algorithm,
    },
    modes::{
        Applied,
        ebpf::{EbpfDataplane, error::Error, maps::family::MapFamily},
    },
};

pub(crate) fn finish<F: MapFamily>(writes: Writes<F>, applied: &mut Applied, failures: &mut Failures) {
    *applied += writes.applied;
    failures.merge(writes.failures);
}

pub(crate) fn apply<F: MapFamily>(
    writer: &mut FamilyWriter<F>,
    shared: &mut Common,
    changes: &Changes,
) -> Writes<F> {
    let changed = changes.changed.iter().filter(|port| port.name.family == F::FAMILY);
    let removed = changes.removed.iter().filter(|name| name.family == F::FAMILY);
    writer.apply(shared, changed, removed)
}

pub(crate) fn resync<F: MapFamily>(
    writer: &mut FamilyWriter<F>,
    shared: &mut Common,
    desired: &[Arc<DesiredPort>],
) -> Writes<F> {
    let desired: Vec<_> = desired.iter().filter(|port| port.name.family == F::FAMILY).collect();
    writer.resync(shared, &desired)
}

/// The service ports of both families, and the maps that they are in.
#[derive(Debug)]
pub(crate) struct Services {
    pub(crate) shared: Common,
    pub(crate) v4: FamilyWriter<V4>,
    pub(crate) v6: FamilyWriter<V6>,
    pub(crate) cidrs: ServiceCidrs,
    /// True if the desired state is known. Before, a predecessor's service ports are served.
    pub(crate) is_synced: bool,
}

impl Services {
    /// Raises the epoch, if need be, after all writes of a call.
    pub(crate) fn raise_epoch(&mut self, failures: &mut Failures) {
        failures.see("settings", self.shared.raise_epoch());
    }

    /// Frees the ids and slots that no program can read any more.
    pub(crate) fn free_pending(&mut self) -> Result<(), Error> {
        let Self { shared, v4, v6, .. } = self;
        if shared.ids.has_pending_free()
            || v4.entries.slots.has_pending_free()
            || v6.entries.slots.has_pending_free()
        {
            shared.grace.wait().map_err(Error::Grace)?;
            shared.ids.grace_period_over();
            v4.entries.slots.grace_period_over();
            v6.entries.slots.grace_period_over();
        }
        Ok(())
    }

    /// Writes the ranges of ClusterIPs if they must change.
    pub(crate) fn write_cidrs(&mut self, applied: &mut Applied, failures: &mut Failures) {
        match self.cidrs.write(&self.v4, &self.v6) {
            Ok(written) => *applied += written,
            Err(error) => failures.add("ServiceCIDRs", error),
        }
    }

    /// Returns true if the maps hold the desired state and nothing else.
    pub(crate) fn has_only(&self, desired: &[Arc<DesiredPort>]) -> Result<bool, Error> {
        let Self { shared, v4, v6, is_synced, .. } = self;
        let of = |family| desired.iter().filter(move |port| port.name.family == family);
        let mut published: Vec<_> = v4.published().chain(v6.published()).collect();
        published.sort_unstable_by_key(|(id, _)| *id);
        Ok(*is_synced
            && v4.has_only(shared, of(V4::FAMILY))?
            && v6.has_only(shared, of(V6::FAMILY))?
            && shared.has_only(&published)?)
    }

    pub(crate) fn adopt(&mut self) -> Result<Vec<Stray>, Error> {
        let names = self.shared.adopt()?;
        let largest = self.v4.adopt(&self.shared, &names)?.max(self.v6.adopt(&self.shared, &names)?);
        self.shared.continue_backend_ids(largest)?;
        Ok(names.strays)
    }
}

impl EbpfDataplane {
    /// Follows the node's algorithm and forwarding, for all service ports that name none.
    pub(crate) fn use_choices(&mut self, host: &Host, applied: &mut Applied, failures: &mut Failures) {
        let chosen = (host.algorithm, host.forwarding);
        if (self.services.shared.algorithm, self.services.shared.forwarding) == chosen {
            return;
        }
        (self.services.shared.algorithm, self.services.shared.forwarding) = chosen;
        self.count_connections(host.algorithm == Algorithm::LeastConnection, failures);
        self.prepare(failures);
        finish(self.services.v4.publish_by_the_nodes_choices(&mut self.services.shared), applied, failures);
        finish(self.services.v6.publish_by_the_nodes_choices(&mut self.services.shared), applied, failures);
        self.publish_waiting(applied, failures);
    }

    /// Publishes what waits, after something has made room in either family: both share `services`.
    pub(crate) fn publish_waiting(&mut self, applied: &mut Applied, failures: &mut Failures) {
        loop {
            finish(self.services.v4.publish_waiting(&mut self.services.shared), applied, failures);
            finish(self.services.v6.publish_waiting(&mut self.services.shared), applied, failures);
            let demand = self.services.demand();
            if demand.is_empty() {
                return;
            }
            self.grow_or_rest(&demand, failures);
            self.services.v4.entries.without_room.plan_anew();
            self.services.v6.entries.without_room.plan_anew();
        }
    }

    /// Adopts what the maps hold, and writes what differs from the desired state.
    pub(crate) fn write_everything(
        &mut self,
        desired: &[Arc<DesiredPort>],
        applied: &mut Applied,
        failures: &mut Failures,
    ) -> Result<(), Error> {
        let strays = self.services.adopt()?;
        self.count_connections(self.services.shared.goes_by_connections(desired), failures);
        self.prepare(failures);
        if !self.services.is_synced {
            self.grow_ahead(desired, failures);
        }
        let Services { shared, v4, v6, .. } = &mut self.services;
        finish(resync(v4, shared, desired), applied, failures);
        finish(resync(v6, shared, desired), applied, failures);
        for Stray { id, is_claimed } in strays {
            match remove_service(shared, id, applied) {
                // Programs may still be reading it.
                Ok(()) if is_claimed => shared.ids.free_later(Range { first: id, count: 1 }),
                Ok(()) => {}
                Err(error) => failures.add(format_args!("service {id}, which is not desired"), error),
            }
        }
        self.publish_waiting(applied, failures);
        Ok(())
    }

    /// Writes what has changed.
    pub(crate) fn write_changes(&mut self, changes: &Changes) -> Result<Applied, crate::modes::Error> {
        let (mut applied, mut failures) = Default::default();
        self.count_connections(self.services.shared.goes_by_connections(&changes.changed), &mut failures);
        self.prepare(&mut failures);
        let Services { shared, v4, v6, .. } = &mut self.services;
        finish(apply(v4, shared, changes), &mut applied, &mut failures);
        finish(apply(v6, shared, changes), &mut applied, &mut failures);
        self.publish_waiting(&mut applied, &mut failures);
        self.services.write_cidrs(&mut applied, &mut failures);
        self.services.raise_epoch(&mut failures);
        self.connections.end_stale_sockets(&mut self.services.shared);
        failures.into_result()?;
        Ok(applied)
    }

    /// Makes the maps hold exactly `desired`.
    pub(crate) fn write_desired(
        &mut self,
        desired: &[Arc<DesiredPort>],
    ) -> Result<Applied, crate::modes::Error> {
        let (mut applied, mut failures) = Default::default();
        // Fast path: an inspection usually finds nothing to repair.
        if self.services.has_only(desired)? {
            self.prepare(&mut failures);
        } else {
            self.write_everything(desired, &mut applied, &mut failures)?;
        }
        self.services.is_synced = true;
        if failures.is_empty() {
            self.services.cidrs.synced();
        }
        self.services.write_cidrs(&mut applied, &mut failures);
        self.services.raise_epoch(&mut failures);
        self.connections.end_stale_sockets(&mut self.services.shared);
        self.services.shared.maps.services.forget();
        self.services.v4.maps.slots.forget();
        self.services.v6.maps.slots.forget();
        // The lease is resumed even if something could not be written, because the other service
        // ports are served as desired.
        match self.lease.resume(&self.services.shared.maps.lease) {
            Ok(true) => self.keep_netfilter_ports(),
            Ok(false) => {}
            Err(error) => failures.add("lease", error),
        }
        failures.into_result()?;
        Ok(applied)
    }
}
