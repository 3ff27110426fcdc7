//! The tables as the decisions see them: BPF maps in the kernel, hash maps in tests.

use crate::{
    family::Family,
    layout::{Backend, Frontend, FrontendKey, NodeAddress, Service},
};

/// Lookups that choosing a backend needs. Values are copies: what lies in a map may change meanwhile.
pub trait Tables<F: Family> {
    fn frontend(&self, key: &FrontendKey<F::Address>) -> Option<Frontend>;
    fn node_address(&self, address: &F::Address) -> Option<NodeAddress>;
    /// Each endpoint set is read by one load; the sets among themselves may be of different moments.
    fn service(&self, id: u32) -> Option<Service>;
    fn slot(&self, index: u32) -> Option<F::Slot>;
    fn backend(&self, id: u32) -> Option<Backend<F::Address>>;
}

#[cfg(test)]
pub(crate) mod host {
    //! Tables for tests of the decisions.

    use std::collections::HashMap;

    use super::*;
    use crate::layout::*;

    pub(crate) struct HostTables<F: Family> {
        pub(crate) frontends: HashMap<FrontendKey<F::Address>, Frontend>,
        pub(crate) node_addresses: HashMap<F::Address, NodeAddress>,
        pub(crate) services: HashMap<u32, Service>,
        pub(crate) slots: HashMap<u32, F::Slot>,
        pub(crate) backends: HashMap<u32, Backend<F::Address>>,
    }

    impl<F: Family> Default for HostTables<F> {
        fn default() -> Self {
            Self {
                frontends: HashMap::new(),
                node_addresses: HashMap::new(),
                services: HashMap::new(),
                slots: HashMap::new(),
                backends: HashMap::new(),
            }
        }
    }

    impl<F: Family<Address: std::hash::Hash>> Tables<F> for HostTables<F> {
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
}
