//! Keeps one allocation for each distinct name, because a node's name stands in thousands of
//! endpoints.

use std::sync::Arc;

use rustc_hash::FxHashSet;

use super::objects::{EndpointSlice, Hints, Service};

const SMALLEST_SWEEP: usize = 1024;

#[derive(Debug, Default)]
pub(crate) struct NameInterner {
    strings: Interner<str>,
    hints: Interner<Hints>,
}

impl NameInterner {
    pub(super) fn intern_service(&mut self, service: &mut Service) {
        self.strings.intern(&mut service.name.name);
        self.intern_shared_of_service(service);
    }

    pub(super) fn intern_slice(&mut self, slice: &mut EndpointSlice) {
        self.strings.intern(&mut slice.service);
        self.intern_shared_of_slice(slice);
    }

    /// Interns the names that the Service has in common with other Services.
    pub(crate) fn intern_shared_of_service(&mut self, service: &mut Service) {
        self.strings.intern(&mut service.name.namespace);
        for port in &mut service.ports {
            self.strings.intern(&mut port.name);
        }
    }

    /// Interns the names that the slice has in common with slices of other Services.
    pub(crate) fn intern_shared_of_slice(&mut self, slice: &mut EndpointSlice) {
        self.strings.intern(&mut slice.name.namespace);
        for port in &mut slice.ports {
            self.strings.intern(&mut port.name);
        }
        for endpoint in &mut slice.endpoints {
            if let Some(node) = &mut endpoint.node {
                self.strings.intern(node);
            }
            if let Some(hints) = &mut endpoint.hints {
                self.hints.intern(hints);
            }
        }
    }
}

#[derive(Debug)]
struct Interner<T: ?Sized> {
    known: FxHashSet<Arc<T>>,
    /// The size of `known` at which names that nothing else holds are dropped.
    sweep_at: usize,
}

impl<T: ?Sized> Default for Interner<T> {
    fn default() -> Self {
        Self { known: FxHashSet::default(), sweep_at: SMALLEST_SWEEP }
    }
}

impl<T: ?Sized + Eq + std::hash::Hash> Interner<T> {
    fn intern(&mut self, name: &mut Arc<T>) {
        if let Some(known) = self.known.get(&**name) {
            *name = Arc::clone(known);
            return;
        }
        self.known.insert(Arc::clone(name));
        if self.known.len() >= self.sweep_at {
            self.known.retain(|name| Arc::strong_count(name) > 1);
            self.sweep_at = SMALLEST_SWEEP.max(self.known.len() * 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::test_support::{remote, service, slice};

    #[test]
    fn equal_names_share_one_allocation() {
        let mut interner = Interner::default();
        let (mut first, mut second): (Arc<str>, Arc<str>) = ("node-1".into(), "node-1".into());
        interner.intern(&mut first);
        interner.intern(&mut second);
        assert!(Arc::ptr_eq(&first, &second));
    }

    #[test]
    fn names_that_are_held_are_not_looked_at_again_before_there_are_twice_as_many() {
        let mut interner = Interner::default();
        let held: Vec<Arc<str>> = (0..=SMALLEST_SWEEP)
            .map(|number| {
                let mut name = Arc::from(format!("pod-{number}"));
                interner.intern(&mut name);
                name
            })
            .collect();
        assert_eq!((held.len(), interner.sweep_at), (SMALLEST_SWEEP + 1, 2 * SMALLEST_SWEEP));
    }

    #[test]
    fn services_and_slices_share_their_names() {
        let mut interner = NameInterner::default();
        let [mut first, mut second] = ["test/a", "test/b"].map(|name| service(name, &["10.96.0.1"]));
        let [mut slice, mut other] =
            ["test/a-1", "test/a-2"].map(|name| slice(name, "a", vec![remote("10.0.0.1")]));
        interner.intern_service(&mut first);
        interner.intern_service(&mut second);
        interner.intern_slice(&mut slice);
        interner.intern_slice(&mut other);
        assert!(Arc::ptr_eq(&first.name.namespace, &second.name.namespace));
        assert!(Arc::ptr_eq(&first.name.name, &slice.service));
        let node = |slice: &EndpointSlice| slice.endpoints[0].node.clone().unwrap();
        assert!(Arc::ptr_eq(&node(&slice), &node(&other)));
    }

    #[test]
    fn names_that_nobody_holds_are_dropped() {
        let mut interner = Interner::default();
        let mut kept: Arc<str> = "kept".into();
        interner.intern(&mut kept);
        for number in 0..SMALLEST_SWEEP * 10 {
            interner.intern(&mut Arc::from(format!("pod-{number}")));
        }
        assert!(interner.known.len() < SMALLEST_SWEEP, "{} names", interner.known.len());
        let mut again: Arc<str> = "kept".into();
        interner.intern(&mut again);
        assert!(Arc::ptr_eq(&kept, &again));
    }
}
