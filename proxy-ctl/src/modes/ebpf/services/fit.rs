//! Decides which frontends get room in `frontends4/6`, and says what does not fit, there and in
//! other maps. Cluster-IP entries are the first to make room.

use std::{cmp::Reverse, collections::BTreeMap, sync::Arc};

use proxy_common::{
    inventory::Limit,
    layout::{FRONTEND_EXTERNAL, Frontend, FrontendKey, SCOPE_ADDRESS, SCOPE_NODE_PORT},
};

use super::{
    programmed::{Published, UsedEndpoints, Wanted},
    writer::{FamilyWriter, Writes},
};
use crate::{
    model::desired::{DesiredPort, Endpoint, FrontendKind, ServicePortName},
    modes::{
        Effect, UnservedField,
        ebpf::{error::FullMap, maps::family::MapFamily},
        unserved,
    },
};

impl<F: MapFamily> FamilyWriter<F> {
    /// Returns the frontends to write: those of these writes and those that wait, as far as there
    /// is room for them.
    ///
    /// ClusterIPs and node ports come first, because external addresses are whatever somebody
    /// writes into a Service.
    pub(crate) fn fit(&mut self, writes: &mut Writes<F>) -> Vec<Wanted<F>> {
        let wanted = std::mem::take(&mut writes.frontends);
        let is_programmed = |(key, ..): &Wanted<F>| self.entries.frontends.contains_key(key);
        let (mut fitting, new): (Vec<_>, Vec<_>) = wanted.into_iter().partition(is_programmed);
        let free = (self.frontend_capacity() as usize).saturating_sub(self.entries.frontends.len());
        let waiting = &mut self.entries.without_room;
        if new.is_empty() && (waiting.frontends.is_empty() || (free == 0 && !waiting.is_unplanned)) {
            return fitting;
        }
        if waiting.frontends.is_empty() && new.len() <= free {
            fitting.extend(new);
            return fitting;
        }
        waiting.changed = true;
        let mut unprogrammed = std::mem::take(&mut waiting.frontends);
        unprogrammed.extend(new.into_iter().map(|(key, frontend, name)| (key, (frontend, name))));
        let is_short = unprogrammed.len() > free;
        waiting.is_unplanned = is_short && waiting.may_grow.contains(&Limit::Frontends);
        if waiting.is_unplanned {
            waiting.frontends = unprogrammed;
            return fitting;
        }
        let mut free = free + self.evict_cluster_ip_entries(unprogrammed.len().saturating_sub(free), writes);
        let unprogrammed = unprogrammed.into_iter().map(|(key, (frontend, name))| (key, frontend, name));
        let (external, internal): (Vec<_>, Vec<_>) =
            unprogrammed.partition(|(key, frontend, _)| is_external(key, frontend));
        free += self.remove_externals(internal.len().saturating_sub(free), writes);
        let mut in_turn = internal.into_iter().chain(external);
        fitting.extend(in_turn.by_ref().take(free));
        in_turn.for_each(|one| self.entries.without_room.insert(one));
        fitting
    }

    /// Removes up to `count` external addresses, which wait then. The service port with the most of
    /// them gives way first. Returns how many were removed.
    fn remove_externals(&mut self, count: usize, writes: &mut Writes<F>) -> usize {
        if count == 0 {
            return 0;
        }
        let mut present = self.present_externals();
        present.sort_by_key(|of_port| Reverse(of_port.len()));
        let mut removed = 0;
        for one in present.into_iter().flatten().take(count) {
            match self.maps.frontends.remove(&one.0) {
                Ok(found) => {
                    writes.applied.removed += u64::from(found);
                    self.forget_frontend(&one.0);
                    self.entries.without_room.insert(one);
                    removed += 1;
                }
                Err(error) => writes.failures.add(&one.2, error),
            }
        }
        removed
    }

    /// Returns true if there is room for all frontends that these ports can need, so that it does
    /// not matter which are written first.
    pub(super) fn has_room_for_frontends<'a>(
        &self,
        ports: impl Iterator<Item = &'a Arc<DesiredPort>>,
    ) -> bool {
        let most: usize = ports.map(|port| port.frontends.len()).sum();
        let needed = self.entries.frontends.len() + most;
        self.entries.without_room.frontends.is_empty() && needed <= self.frontend_capacity() as usize
    }

    fn frontend_capacity(&self) -> u32 {
        self.maps.frontends.map().capacity()
    }

    /// Returns the external addresses that are served, by service port.
    fn present_externals(&self) -> Vec<Vec<Wanted<F>>> {
        let of_port = |(name, published): (&ServicePortName, &Published<F>)| {
            let present = published.frontends.iter().filter_map(|key| {
                let frontend = self.entries.frontends.get(key)?;
                let is_own = frontend.service == published.id && is_external(key, frontend);
                is_own.then(|| (*key, *frontend, name.clone()))
            });
            present.collect()
        };
        self.entries.services.iter().map(of_port).collect()
    }

    /// Returns the service ports that there is no room for, whole or in part, each with the fields
    /// that ask for it.
    pub(crate) fn without_room(&self) -> BTreeMap<ServicePortName, Vec<UnservedField>> {
        let ports = self.entries.without_room.ports.iter();
        let mut all: BTreeMap<ServicePortName, Vec<UnservedField>> =
            ports.map(|(name, waiting)| (name.clone(), vec![self.waits(name, waiting.full)])).collect();
        for (key, (frontend, name)) in &self.entries.without_room.frontends {
            let field = unserved::field(self.kind(key, frontend, name));
            let reasons = all.entry(name.clone()).or_default();
            if !reasons.iter().any(|one| one.field == field) {
                reasons.push(self.no_room(field));
            }
        }
        for reasons in all.values_mut() {
            reasons.sort_unstable();
        }
        all
    }

    /// Returns true if a service port that waits has all its endpoints served, so that only its
    /// lookup table has no room.
    fn serves_all_endpoints(&self, name: &ServicePortName) -> bool {
        let waiting = self.entries.without_room.ports.get(name);
        let served = self.entries.services.get(name).map(|published| published.used.endpoints());
        let addresses = |endpoints: &[Endpoint]| -> Vec<_> {
            endpoints.iter().map(|one| (one.address, one.port)).collect()
        };
        waiting.zip(served).is_some_and(|(waiting, served)| {
            !served.is_empty() && addresses(&waiting.port.endpoints.all) == addresses(served)
        })
    }

    fn waits(&self, name: &ServicePortName, full: FullMap) -> UnservedField {
        let FullMap { name: map, capacity, limit } = full;
        let field = if limit == Limit::Services {
            "spec.ports"
        } else if limit == Limit::SourceRanges {
            "spec.loadBalancerSourceRanges"
        } else {
            "endpoints"
        };
        let (effect, what) = if limit == Limit::SourceRanges {
            (
                Effect::PartlyServed,
                "the former source ranges are in force, or nobody is served at load-balancer addresses",
            )
        } else if self.serves_all_endpoints(name) {
            (Effect::ServedDifferently, "its endpoints are drawn at random, each alike")
        } else if self.entries.services.contains_key(name) {
            (Effect::PartlyServed, "only endpoints that it had before are served")
        } else {
            (Effect::NotServed, "not served")
        };
        let limit = limit.name();
        let instead = format!(
            "{what}: map {map} has room for {capacity} entries (ebpf.limits.{limit}), too few for it"
        );
        UnservedField { field, effect, instead: instead.into() }
    }

    fn no_room(&self, field: &'static str) -> UnservedField {
        let (map, capacity, limit) = (F::FRONTENDS, self.frontend_capacity(), Limit::Frontends.name());
        let instead = format!(
            "not all of it is served: map {map} has room for {capacity} entries (ebpf.limits.{limit}) and is full"
        );
        UnservedField { field, effect: Effect::PartlyServed, instead: instead.into() }
    }

    /// Returns the kind of a frontend. The maps do not distinguish external IPs from load-balancer
    /// addresses, so the frontend counts as an external IP if the service port has one.
    fn kind(
        &self,
        key: &FrontendKey<F::Address>,
        frontend: &Frontend,
        name: &ServicePortName,
    ) -> FrontendKind {
        if key.scope == SCOPE_NODE_PORT {
            return FrontendKind::NodePort;
        }
        if frontend.flags & FRONTEND_EXTERNAL == 0 {
            return FrontendKind::ClusterIp;
        }
        let published = self.entries.services.get(name).map(|published| &published.used);
        let Some(UsedEndpoints::Desired(port)) = published else { return FrontendKind::ExternalIp };
        let has_external_ips = port.frontends.iter().any(|one| one.kind == FrontendKind::ExternalIp);
        if has_external_ips { FrontendKind::ExternalIp } else { FrontendKind::LoadBalancer }
    }
}

fn is_external<A>(key: &FrontendKey<A>, frontend: &Frontend) -> bool {
    key.scope == SCOPE_ADDRESS && frontend.flags & FRONTEND_EXTERNAL != 0
}
