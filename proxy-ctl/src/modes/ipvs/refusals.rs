//! Objects that the kernel refuses, such as an invalid endpoint or a member of a full set. The
//! service ports that lack them are reported, and everything else is served. A refused object is
//! tried again when its service port changes, and with each resync.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    mem,
    net::SocketAddr,
    sync::Arc,
};

use rustc_hash::FxHashMap;

use super::{
    sets::SetRole,
    state::{Change, Key, Wanted},
};
use crate::{
    model::desired::{DesiredPort, FrontendKind, ServicePortName},
    modes::{Effect, UnservedField, unserved::field},
    sys::{CallError, net::ipvs::ServerChange},
};

/// The fields that are not served as asked, by service port.
type UnservedFields = BTreeMap<ServicePortName, Vec<UnservedField>>;

#[derive(Debug)]
struct Refusal {
    /// True if a destination of the virtual server was refused, and not the virtual server.
    of_destination: bool,
    /// A text for people that names the object and the reason.
    text: String,
}

#[derive(Debug, Default)]
pub(super) struct Refusals {
    by_key: BTreeMap<Key, Refusal>,
    /// True if the refusals may differ from those at the last [`Self::take`].
    changed: bool,
}

impl Refusals {
    /// Takes over the results of all writes at `touched`. Returns the errors that say more than
    /// that an object is refused. They mean that the known state of the kernel is out of date, or
    /// that it takes nothing from this process.
    pub(super) fn tried(
        &mut self,
        touched: &BTreeSet<Key>,
        refused: Vec<(Change, CallError)>,
        wanted: &Wanted,
    ) -> Vec<(Key, CallError)> {
        self.changed |= !refused.is_empty() || self.by_key.keys().any(|key| touched.contains(key));
        self.by_key.retain(|key, _| !touched.contains(key));
        let mut failures = Vec::new();
        for (change, error) in refused {
            let key = change.key();
            match self.by_key.entry(key) {
                // If a virtual server is refused, its destinations are refused too.
                Entry::Occupied(known) if !known.get().of_destination => {}
                _ if is_failure(&error) => failures.push((key, error)),
                Entry::Occupied(_) => {}
                Entry::Vacant(_) if !wanted.has(key) => {
                    tracing::warn!(%error, "{key} could not be removed; it is tried again");
                }
                Entry::Vacant(vacant) => {
                    vacant.insert(Refusal::new(&change, &error));
                }
            }
        }
        failures
    }

    /// Returns what service ports lack. `None`: the same as at the last call.
    pub(super) fn take(
        &mut self,
        wanted: &Wanted,
        desired: &FxHashMap<ServicePortName, Arc<DesiredPort>>,
    ) -> Option<UnservedFields> {
        if !mem::take(&mut self.changed) {
            return None;
        }
        let mut ports = UnservedFields::new();
        if self.by_key.is_empty() {
            return Some(ports);
        }
        let mut lacking: BTreeMap<(&ServicePortName, &'static str, Effect), (&str, usize)> = BTreeMap::new();
        for (name, key) in wanted.asking(|key| self.by_key.contains_key(key)) {
            if let (Some(refusal), Some(port)) = (self.by_key.get(&key), desired.get(name)) {
                let (field, effect) = lacks(key, refusal, port);
                lacking.entry((name, field, effect)).or_insert((&refusal.text, 0)).1 += 1;
            }
        }
        for ((name, field, effect), (text, count)) in lacking {
            let more = if count == 1 { String::new() } else { format!(", and {} more", count - 1) };
            let instead = format!("the kernel refuses {text}{more}").into();
            ports.entry(name.clone()).or_default().push(UnservedField { field, effect, instead });
        }
        Some(ports)
    }
}

fn is_failure(error: &CallError) -> bool {
    use libc::{EEXIST, ENODEV, ENOENT, ENOMEM, EPERM, ESRCH};
    matches!(error.errno(), EPERM | ENOMEM | ENOENT | ESRCH | EEXIST | ENODEV)
}

impl Refusal {
    fn new(change: &Change, error: &CallError) -> Self {
        let destination = match change {
            Change::Server(
                ServerChange::AddDestination(_, address)
                | ServerChange::UseDestination(_, address, _)
                | ServerChange::RemoveDestination(_, address),
            ) => Some(*address),
            Change::Server(ServerChange::Create(..) | ServerChange::Set(..) | ServerChange::Remove(_))
            | Change::Address(_)
            | Change::Member(..) => None,
        };
        let key = change.key();
        let text = match destination {
            Some(destination) => format!("endpoint {destination} of {key}: {error}"),
            None => format!("{key}: {error}"),
        };
        Self { of_destination: destination.is_some(), text }
    }
}

/// Returns the field that is not served as asked, and what is served nevertheless.
fn lacks(key: Key, refusal: &Refusal, port: &DesiredPort) -> (&'static str, Effect) {
    let kind = |is_it: &dyn Fn(SocketAddr) -> bool| {
        let mut frontends = port.frontends.iter().filter(|one| one.kind != FrontendKind::NodePort);
        let found = frontends.find(|one| is_it(SocketAddr::new(one.address, one.port)));
        found.map_or(FrontendKind::NodePort, |one| one.kind)
    };
    match key {
        Key::Server(_) if refusal.of_destination => ("endpoints", Effect::ServedDifferently),
        Key::Server(socket) => (field(kind(&|one| one == socket.address)), Effect::PartlyServed),
        Key::Address(address) => (field(kind(&|one| one.ip() == address)), Effect::PartlyServed),
        Key::Member(set, _) => lacks_in(set.role),
    }
}

/// Returns the same for a member of a set. Clients of an address that is in no set of frontends are
/// refused. The other sets say how clients are treated.
fn lacks_in(role: SetRole) -> (&'static str, Effect) {
    let source_ranges = "spec.loadBalancerSourceRanges";
    let policy = "spec.externalTrafficPolicy";
    match role {
        SetRole::ClusterIp => (field(FrontendKind::ClusterIp), Effect::PartlyServed),
        SetRole::ExternalIp | SetRole::ExternalIpLocal => {
            (field(FrontendKind::ExternalIp), Effect::PartlyServed)
        }
        SetRole::LoadBalancer => (field(FrontendKind::LoadBalancer), Effect::PartlyServed),
        SetRole::LoadBalancerFromItself | SetRole::LoadBalancerSources => {
            (source_ranges, Effect::PartlyServed)
        }
        SetRole::LoadBalancerRestricted => (source_ranges, Effect::ServedDifferently),
        SetRole::LoadBalancerLocal | SetRole::NodePortLocal(_) => (policy, Effect::ServedDifferently),
        SetRole::NodePort(_) => (field(FrontendKind::NodePort), Effect::ServedDifferently),
        SetRole::HealthCheckPort => ("spec.healthCheckNodePort", Effect::ServedDifferently),
        SetRole::Hairpin => ("endpoints", Effect::ServedDifferently),
        SetRole::DeviceAddresses => (field(FrontendKind::ClusterIp), Effect::ServedDifferently),
    }
}
