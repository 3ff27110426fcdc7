//! The maps as the decisions see them: BPF maps in the kernel, hash maps in tests.

use crate::{
    balance,
    family::Family,
    layout::{Affinity, AffinityKey, Backend, EndpointSet, Frontend, FrontendKey, NodeAddress, Service},
};

/// The lookups that find a frontend and its backends. Values are copies, because an element of a
/// map may change meanwhile.
pub trait Maps<F: Family> {
    fn frontend(&self, key: &FrontendKey<F::Address>) -> Option<Frontend>;
    fn node_address(&self, address: &F::Address) -> Option<NodeAddress>;
    /// Returns the service. Each endpoint set is read by one load, but two sets may be of different
    /// moments.
    fn service(&self, id: u32) -> Option<Service>;
    fn slot(&self, index: u32) -> Option<F::Slot>;
    fn backend(&self, id: u32) -> Option<Backend<F::Address>>;
}

/// An entry of `affinity4/6`, in place.
///
/// The kernel may give its memory to another client at any time. What is written then is lost, or
/// it becomes the other client's. That client's next connection goes to the backend if the endpoint
/// set has it.
pub trait AffinityEntry: Copy {
    fn read(&self) -> Affinity;
    /// Sets [`Affinity::last_used`].
    fn prolong(&self, now: u64);
    fn write(&self, affinity: Affinity);
}

/// The lookups that choose a backend.
pub trait AffinityMaps<F: Family>: Maps<F> {
    type Affinity: AffinityEntry;

    fn affinity(&self, key: &AffinityKey<F::Address>) -> Option<Self::Affinity>;
    /// Inserts an entry. Returns false if there is one already, or if there is no memory.
    fn remember(&self, key: &AffinityKey<F::Address>, affinity: &Affinity) -> bool;
    /// Returns the nanoseconds since boot, suspend included.
    fn now(&self) -> u64;
    /// Returns how many connections of the backend are open, as far as they are counted
    /// ([`Connections::open`](crate::layout::Connections::open)).
    fn open_connections(&self, backend: u32) -> u64;
    /// Returns the index that [`balance::less_busy`] chooses.
    fn less_busy(&self, set: EndpointSet, bits: u32) -> u32
    where
        Self: Sized,
    {
        balance::less_busy(self, set, bits)
    }
    /// Returns true if the address is in one of the service's `source_ranges4/6`.
    fn is_in_source_ranges(&self, service: u32, address: &F::Address) -> bool;
    /// Returns true if the address is in `service_cidrs4/6`, and packets to unallocated addresses
    /// are dropped.
    fn is_in_service_cidrs(&self, address: &F::Address) -> bool;
    /// Returns the node's own address, or the unspecified one if the node has none of this family.
    fn address_of_node(&self) -> F::Address;
    /// Returns `PODS_*`: how traffic of pods is told from other traffic.
    fn pods_told_by(&self) -> u16;
    /// Returns true if the address is in the pod range of the settings.
    fn is_in_pod_range(&self, address: &F::Address) -> bool;
    /// Returns true if the interface has `INTERFACE_OF_PODS`.
    fn brings_pods(&self, interface: u32) -> bool;
}

#[cfg(test)]
pub(crate) mod host {
    //! Maps for tests of the decisions.

    use std::{
        cell::{Cell, RefCell},
        collections::HashMap,
    };

    use super::*;
    use crate::layout::*;

    pub(crate) struct HostMaps<F: Family> {
        pub(crate) frontends: HashMap<FrontendKey<F::Address>, Frontend>,
        pub(crate) node_addresses: HashMap<F::Address, NodeAddress>,
        pub(crate) services: HashMap<u32, Service>,
        pub(crate) slots: HashMap<u32, F::Slot>,
        pub(crate) backends: HashMap<u32, Backend<F::Address>>,
        pub(crate) source_ranges: HashMap<u32, Vec<(F::Address, u32)>>,
        pub(crate) service_cidrs: Vec<(F::Address, u32)>,
        pub(crate) address_of_node: F::Address,
        pub(crate) pods_told_by: u16,
        pub(crate) pod_range: (F::Address, u32),
        pub(crate) pod_interface: u32,
        pub(crate) affinity: RefCell<HashMap<AffinityKey<F::Address>, KnownClient>>,
        pub(crate) clock: Cell<u64>,
        pub(crate) open: RefCell<HashMap<u32, i64>>,
    }

    /// An entry that is shared, like the map element that the kernel hands out.
    #[derive(Clone, Copy)]
    pub(crate) struct KnownClient(&'static Cell<Affinity>);

    impl KnownClient {
        pub(crate) fn new(affinity: Affinity) -> Self {
            Self(Box::leak(Box::new(Cell::new(affinity))))
        }
    }

    impl AffinityEntry for KnownClient {
        fn read(&self) -> Affinity {
            self.0.get()
        }

        fn prolong(&self, now: u64) {
            self.0.set(Affinity { last_used: now, ..self.0.get() });
        }

        fn write(&self, affinity: Affinity) {
            self.0.set(affinity);
        }
    }

    /// Returns true if the address is in one of these prefixes.
    fn contain<F: Family>(prefixes: &[(F::Address, u32)], address: &F::Address) -> bool {
        prefixes.iter().any(|(range, bits)| address.is_in(range, *bits))
    }

    impl<F: Family> Default for HostMaps<F> {
        fn default() -> Self {
            Self {
                frontends: HashMap::new(),
                node_addresses: HashMap::new(),
                services: HashMap::new(),
                slots: HashMap::new(),
                backends: HashMap::new(),
                source_ranges: HashMap::new(),
                service_cidrs: Vec::new(),
                address_of_node: F::Address::UNSPECIFIED,
                pods_told_by: PODS_UNKNOWN,
                pod_range: (F::Address::UNSPECIFIED, 0),
                pod_interface: u32::MAX,
                affinity: RefCell::default(),
                clock: Cell::new(1_000_000_000_000),
                open: RefCell::default(),
            }
        }
    }

    impl<F: Family<Address: std::hash::Hash>> Maps<F> for HostMaps<F> {
        fn frontend(&self, key: &FrontendKey<F::Address>) -> Option<Frontend> {
            self.frontends.get(key).copied()
        }

        fn node_address(&self, address: &F::Address) -> Option<NodeAddress> {
            self.node_addresses.get(address).copied()
        }

        fn service(&self, id: u32) -> Option<Service> {
            self.services.get(&id).copied()
        }

        fn slot(&self, index: u32) -> Option<F::Slot> {
            self.slots.get(&index).copied()
        }

        fn backend(&self, id: u32) -> Option<Backend<F::Address>> {
            self.backends.get(&id).copied()
        }
    }

    impl<F: Family<Address: std::hash::Hash>> AffinityMaps<F> for HostMaps<F> {
        type Affinity = KnownClient;

        fn affinity(&self, key: &AffinityKey<F::Address>) -> Option<KnownClient> {
            self.affinity.borrow().get(key).copied()
        }

        fn remember(&self, key: &AffinityKey<F::Address>, affinity: &Affinity) -> bool {
            let mut known = self.affinity.borrow_mut();
            !known.contains_key(key) && known.insert(*key, KnownClient::new(*affinity)).is_none()
        }

        fn now(&self) -> u64 {
            self.clock.get()
        }

        fn open_connections(&self, backend: u32) -> u64 {
            self.open.borrow().get(&backend).map_or(0, |open| (*open).try_into().unwrap_or(0))
        }

        fn is_in_source_ranges(&self, service: u32, address: &F::Address) -> bool {
            self.source_ranges.get(&service).is_some_and(|all| contain::<F>(all, address))
        }

        fn is_in_service_cidrs(&self, address: &F::Address) -> bool {
            contain::<F>(&self.service_cidrs, address)
        }

        fn address_of_node(&self) -> F::Address {
            self.address_of_node
        }

        fn pods_told_by(&self) -> u16 {
            self.pods_told_by
        }

        fn is_in_pod_range(&self, address: &F::Address) -> bool {
            let (range, bits) = &self.pod_range;
            address.is_in(range, *bits)
        }

        fn brings_pods(&self, interface: u32) -> bool {
            interface == self.pod_interface
        }
    }
}
