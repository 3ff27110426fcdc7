//! Answers the lookups of the shared decision code from the maps, so that user space decides as the
//! kernel programs do.

use std::cell::RefCell;

use proxy_common::{
    layout::{Backend, Frontend, FrontendKey, NodeAddress, Service},
    map_access::Maps,
};

use super::{
    family::MapFamily,
    handles::{CommonMaps, FamilyMaps},
};
use crate::modes::ebpf::Error;

pub(crate) struct Lookups<'a, F: MapFamily> {
    common: &'a CommonMaps,
    maps: &'a FamilyMaps<F>,
    /// The error of a lookup that failed. An entry that could not be read must not count as
    /// missing.
    failure: RefCell<Option<Error>>,
}

impl<'a, F: MapFamily> Lookups<'a, F> {
    pub(crate) fn new(common: &'a CommonMaps, maps: &'a FamilyMaps<F>) -> Self {
        Self { common, maps, failure: RefCell::default() }
    }

    /// Returns what `decide` returns, or the error of a lookup that failed meanwhile.
    pub(crate) fn ask<T>(&self, decide: impl FnOnce(&Self) -> T) -> Result<T, Error> {
        let decided = decide(self);
        self.failure.take().map_or(Ok(decided), Err)
    }

    fn found<T>(&self, result: Result<Option<T>, Error>) -> Option<T> {
        result.unwrap_or_else(|error| {
            self.failure.replace(Some(error));
            None
        })
    }
}

impl<F: MapFamily> Maps<F> for Lookups<'_, F> {
    fn frontend(&self, key: &FrontendKey<F::Address>) -> Option<Frontend> {
        self.found(self.maps.frontends.get(key))
    }

    fn node_address(&self, address: &F::Address) -> Option<NodeAddress> {
        self.found(self.maps.node_addresses.get(address))
    }

    fn service(&self, id: u32) -> Option<Service> {
        self.common.services.get(id as usize)
    }

    fn slot(&self, index: u32) -> Option<F::Slot> {
        self.maps.slots.get(index as usize)
    }

    fn backend(&self, id: u32) -> Option<Backend<F::Address>> {
        self.found(self.maps.backends.get(&id))
    }
}
