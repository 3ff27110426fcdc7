//! Remembers what is programmed, so that the controller finds differences without reading the maps.
//!
//! Endpoint sets and slots are not repeated here, because they are read through the mapped arrays.

use std::{collections::BTreeMap, sync::Arc};

use proxy_common::{
    inventory::Limit,
    layout::{BACKEND_ACTIVE, BACKEND_LOCAL, BACKEND_TERMINATING, Backend, Frontend, FrontendKey},
    port::Port,
};
use rustc_hash::{FxHashMap, FxHashSet};

use super::{
    addresses::frontend_addresses::AddressBits,
    allocate::{Range, Ranges},
    backends::Backends,
};
use crate::{
    model::desired::{self, DesiredPort, ServicePortName},
    modes::ebpf::{
        error::FullMap,
        maps::{family::MapFamily, handles::SourceRangeKey},
    },
};

/// The state of the maps of one family, as the controller remembers it.
#[derive(Debug)]
pub(crate) struct Entries<F: MapFamily> {
    pub(crate) frontends: FxHashMap<FrontendKey<F::Address>, Frontend>,
    /// The bits of the addresses in `frontends`.
    pub(super) address_bits: AddressBits,
    pub(crate) services: FxHashMap<ServicePortName, Published<F>>,
    pub(crate) cluster_ips: ClusterIps<F::Address>,
    pub(crate) backends: Backends<F::Address>,
    /// The ids in `backends4/6` that no service can refer to.
    pub(super) stray_backends: Vec<u32>,
    /// The owners of `slots4/6`.
    pub(crate) slots: Ranges,
    /// The keys of `source_ranges4/6` that belong to no service.
    pub(super) stray_source_ranges: Vec<SourceRangeKey<F>>,
    /// The number of entries of `source_ranges4/6`.
    pub(crate) source_ranges: u32,
    pub(crate) without_room: WithoutRoom<F>,
}

/// The ClusterIPs of published service ports, and which of them have a cluster-IP entry.
#[derive(Debug)]
pub(crate) struct ClusterIps<A> {
    /// The number of service ports that have each address.
    pub(crate) users: FxHashMap<A, u32>,
    /// The addresses in `users` that have no cluster-IP entry.
    pub(crate) missing: FxHashSet<A>,
    /// The addresses that have a cluster-IP entry, although no service port has them any more.
    pub(crate) gone: FxHashSet<A>,
}

impl<A> ClusterIps<A> {
    pub(crate) fn none() -> Self {
        Self { users: FxHashMap::default(), missing: FxHashSet::default(), gone: FxHashSet::default() }
    }

    /// Returns the number of ClusterIPs without a cluster-IP entry.
    pub(crate) fn missing(&self) -> usize {
        self.missing.len()
    }
}

/// A key of `frontends4/6`, the value that it is to have, and the service port that wants it.
pub(crate) type Wanted<F> =
    (FrontendKey<<F as proxy_common::family::Family>::Address>, Frontend, ServicePortName);

/// The frontends and service ports that the maps have no room for.
#[derive(Debug)]
pub(crate) struct WithoutRoom<F: MapFamily> {
    /// The entries of `frontends4/6` that wait for room, each with its service port.
    pub(crate) frontends: FxHashMap<FrontendKey<F::Address>, (Frontend, ServicePortName)>,
    /// The service ports that wait for room in another map.
    ///
    /// A port that was published before is served with those of its desired endpoints that are in
    /// the maps already. A port that was not published before has nothing in the maps.
    pub(crate) ports: BTreeMap<ServicePortName, Waiting>,
    /// True if this has changed since it was asked for last.
    pub(crate) changed: bool,
    /// The limits whose maps may still grow. Nothing gives way to what waits for such a map.
    pub(crate) may_grow: Vec<Limit>,
    /// True if some frontends were not compared with the served ones yet, to decide which give way.
    pub(super) is_unplanned: bool,
}

/// A service port that waits for room, and the map that has none.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) port: Arc<DesiredPort>,
    pub(crate) full: FullMap,
}

impl<F: MapFamily> WithoutRoom<F> {
    pub(crate) fn none() -> Self {
        Self {
            frontends: FxHashMap::default(),
            ports: BTreeMap::new(),
            changed: false,
            may_grow: Vec::new(),
            is_unplanned: false,
        }
    }

    /// Lets waiting frontends be planned anew, because the map has grown or cannot grow.
    pub(crate) fn plan_anew(&mut self) {
        self.is_unplanned |= !self.frontends.is_empty();
    }

    pub(crate) fn holds(&self, key: &FrontendKey<F::Address>, frontend: &Frontend) -> bool {
        self.frontends.get(key).is_some_and(|(waiting, _)| waiting == frontend)
    }

    pub(crate) fn insert(&mut self, (key, frontend, name): Wanted<F>) {
        self.frontends.insert(key, (frontend, name));
        self.changed = true;
    }

    pub(super) fn insert_port(&mut self, port: &Arc<DesiredPort>, full: FullMap) {
        let waiting = Waiting { port: Arc::clone(port), full };
        let before = self.ports.insert(port.name.clone(), waiting);
        self.changed |= before.is_none_or(|before| before.full != full);
    }

    /// Replaces the state of the port if it waits.
    pub(super) fn replace_port(&mut self, port: &Arc<DesiredPort>) {
        if let Some(waiting) = self.ports.get_mut(&port.name) {
            waiting.port = Arc::clone(port);
        }
    }

    /// Removes a port that is written, could not be written for another reason, or is not desired
    /// any more.
    pub(super) fn remove_port(&mut self, name: &ServicePortName) {
        self.changed |= self.ports.remove(name).is_some();
    }

    /// Removes a frontend that this service does not want any more.
    pub(crate) fn remove(&mut self, key: &FrontendKey<F::Address>, service: u32) {
        if self.frontends.get(key).is_some_and(|(waiting, _)| waiting.service == service) {
            self.frontends.remove(key);
            self.changed = true;
        }
    }
}

/// A service port as it is in the maps.
#[derive(Debug)]
pub(crate) struct Published<F: MapFamily> {
    /// The index into `services`.
    pub(crate) id: u32,
    /// Its range of slots; `None` if the range is unusable (out of bounds, or another's).
    pub(crate) range: Option<Range>,
    pub(crate) frontends: Box<[FrontendKey<F::Address>]>,
    /// The ClusterIPs that are counted as used by it.
    pub(crate) cluster_ips: Box<[F::Address]>,
    /// The keys in `source_ranges4/6`.
    pub(crate) source_ranges: Box<[SourceRangeKey<F>]>,
    pub(crate) used: UsedEndpoints,
    /// The endpoints that no set uses, that still serve, and that have a backend. Flows and sockets
    /// stay with it.
    pub(crate) kept: Box<[desired::Endpoint]>,
}

/// The endpoints that a published service port counts as used.
#[derive(Debug)]
pub(crate) enum UsedEndpoints {
    /// The endpoints of the desired state that it was published from, which the model shares.
    Desired(Arc<DesiredPort>),
    /// The endpoints that its slots refer to. It was adopted, and its new state could not be
    /// written.
    Adopted(Box<[desired::Endpoint]>),
    /// No endpoint yet. The service port was adopted, and was not looked at since.
    NotCounted,
}

impl UsedEndpoints {
    pub(crate) fn endpoints(&self) -> &[desired::Endpoint] {
        match self {
            Self::Desired(port) => &port.endpoints.all,
            Self::Adopted(endpoints) => endpoints,
            Self::NotCounted => &[],
        }
    }
}

/// The identity of a backend. All service ports that use an endpoint share one backend, except that
/// each has its own for UDP.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct BackendKey<A> {
    pub(crate) address: A,
    pub(crate) port: Port,
    /// The IANA number of the protocol.
    pub(crate) protocol: u8,
    /// The owner, like [`Backend::owner`].
    pub(crate) owner: u32,
}

impl<A: Copy> BackendKey<A> {
    pub(crate) fn of(backend: &Backend<A>) -> Self {
        let Backend { address, port, protocol, owner, .. } = *backend;
        Self { address, port: Port::new(port), protocol, owner }
    }
}

/// The users of a backend, and what its map entry says.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Uses {
    /// The key in `backends4/6`.
    pub(crate) id: u32,
    /// The number of service ports that use it. The next two count those that see it terminating,
    /// and as local.
    count: u32,
    terminating: u32,
    local: u32,
    /// The number of service ports that keep it for the flows and sockets that it has.
    keepers: u32,
    written_uses: u32,
    written_state: u8,
    written_local: bool,
}

impl Uses {
    /// Returns the uses of a backend that the maps hold as `backend`. It has no counted users
    /// yet.
    pub(crate) fn of<A>(id: u32, backend: &Backend<A>) -> Self {
        let mut uses = Self { id, ..Self::default() };
        uses.wrote(backend);
        uses
    }

    pub(crate) fn add(&mut self, endpoint: &desired::Endpoint) {
        self.count += 1;
        self.terminating += u32::from(endpoint.terminating);
        self.local += u32::from(endpoint.local);
    }

    pub(super) fn subtract(&mut self, endpoint: &desired::Endpoint) {
        self.count = self.count.saturating_sub(1);
        self.terminating = self.terminating.saturating_sub(u32::from(endpoint.terminating));
        self.local = self.local.saturating_sub(u32::from(endpoint.local));
    }

    pub(crate) fn keep(&mut self) {
        self.keepers += 1;
    }

    pub(super) fn stop_keeping(&mut self) {
        self.keepers = self.keepers.saturating_sub(1);
    }

    /// Returns true if nobody uses or keeps the backend.
    pub(crate) fn is_unused(&self) -> bool {
        self.count == 0 && self.keepers == 0
    }

    /// Returns what the map should hold. The backend is terminating only if every user says so, or
    /// if there is none.
    pub(crate) fn wanted<A: Copy>(&self, key: &BackendKey<A>) -> Backend<A> {
        Backend {
            address: key.address,
            port: key.port.number(),
            protocol: key.protocol,
            state: if self.terminating < self.count { BACKEND_ACTIVE } else { BACKEND_TERMINATING },
            uses: self.count,
            flags: if self.local > 0 || (self.count == 0 && self.written_local) { BACKEND_LOCAL } else { 0 },
            owner: key.owner,
        }
    }

    pub(crate) fn wrote<A>(&mut self, backend: &Backend<A>) {
        self.written_uses = backend.uses;
        self.written_state = backend.state;
        self.written_local = backend.flags & BACKEND_LOCAL != 0;
    }

    pub(crate) fn is_written<A>(&self, wanted: &Backend<A>) -> bool {
        self.written_uses == wanted.uses
            && self.written_state == wanted.state
            && self.written_local == (wanted.flags & BACKEND_LOCAL != 0)
    }
}

impl<F: MapFamily> Entries<F> {
    /// Returns the state of empty maps.
    pub(crate) fn empty(slots: u32) -> Self {
        Self {
            frontends: FxHashMap::default(),
            address_bits: AddressBits::default(),
            services: FxHashMap::default(),
            cluster_ips: ClusterIps::none(),
            backends: Backends::default(),
            stray_backends: Vec::new(),
            slots: Ranges::new(slots),
            stray_source_ranges: Vec::new(),
            source_ranges: 0,
            without_room: WithoutRoom::none(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: BackendKey<[u8; 4]> =
        BackendKey { address: [10, 0, 0, 1], port: Port::new(80), protocol: 6, owner: 0 };

    fn endpoint(terminating: bool, local: bool) -> desired::Endpoint {
        desired::Endpoint { address: [10, 0, 0, 1].into(), port: 80, local, terminating, weight: 1 }
    }

    #[test]
    fn a_backend_terminates_when_all_its_users_say_so() {
        let mut uses = Uses::default();
        uses.add(&endpoint(true, false));
        assert_eq!(uses.wanted(&KEY).state, BACKEND_TERMINATING);
        uses.add(&endpoint(false, false));
        assert_eq!(uses.wanted(&KEY).state, BACKEND_ACTIVE);
        uses.subtract(&endpoint(false, false));
        assert_eq!(uses.wanted(&KEY).state, BACKEND_TERMINATING);
    }

    #[test]
    fn a_backend_without_users_is_kept() {
        let mut uses = Uses::default();
        uses.add(&endpoint(false, true));
        uses.wrote(&uses.wanted(&KEY));
        uses.keep();
        uses.subtract(&endpoint(false, true));
        assert!(!uses.is_unused());
        let kept = Backend { uses: 0, state: BACKEND_TERMINATING, ..uses.wanted(&KEY) };
        assert_eq!((uses.wanted(&KEY), kept.flags), (kept, BACKEND_LOCAL));
        uses.stop_keeping();
        assert!(uses.is_unused());
    }

    #[test]
    fn what_was_written_is_compared_field_by_field() {
        let mut uses = Uses::default();
        uses.add(&endpoint(false, true));
        let wanted = uses.wanted(&KEY);
        assert!(!uses.is_written(&wanted));
        uses.wrote(&wanted);
        assert!(uses.is_written(&wanted));
        for other in [
            Backend { uses: 2, ..wanted },
            Backend { state: BACKEND_TERMINATING, ..wanted },
            Backend { flags: 0, ..wanted },
        ] {
            assert!(!uses.is_written(&other));
        }
    }
}
