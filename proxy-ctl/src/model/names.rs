//! One allocation for each distinct name: a node's name stands in thousands of endpoints.

use std::sync::Arc;

use rustc_hash::FxHashSet;

use super::objects::{EndpointSlice, Hints, Service};

const SMALLEST_SWEEP: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct Names {
    strings: Shared<str>,
    hints: Shared<Hints>,
}

impl Names {
    pub(super) fn share_service(&mut self, service: &mut Service) {
        self.strings.share(&mut service.name.namespace);
        self.strings.share(&mut service.name.name);
        for port in &mut service.ports {
            self.strings.share(&mut port.name);
        }
    }

    pub(super) fn share_slice(&mut self, slice: &mut EndpointSlice) {
        self.strings.share(&mut slice.name.namespace);
        self.strings.share(&mut slice.service);
        for port in &mut slice.ports {
            self.strings.share(&mut port.name);
        }
        for endpoint in &mut slice.endpoints {
            if let Some(node) = &mut endpoint.node {
                self.strings.share(node);
            }
            if let Some(hints) = &mut endpoint.hints {
                self.hints.share(hints);
            }
        }
    }
}

#[derive(Debug)]
struct Shared<T: ?Sized> {
    known: FxHashSet<Arc<T>>,
    /// Number of names at which those that nobody else holds are dropped.
    sweep_at: usize,
}

impl<T: ?Sized> Default for Shared<T> {
    fn default() -> Self {
        Self { known: FxHashSet::default(), sweep_at: SMALLEST_SWEEP }
    }
}

impl<T: ?Sized + Eq + std::hash::Hash> Shared<T> {
    fn share(&mut self, name: &mut Arc<T>) {
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

    #[test]
    fn equal_names_share_one_allocation() {
        let mut shared = Shared::default();
        let (mut first, mut second): (Arc<str>, Arc<str>) = ("node-1".into(), "node-1".into());
        shared.share(&mut first);
        shared.share(&mut second);
        assert!(Arc::ptr_eq(&first, &second));
    }

    #[test]
    fn names_that_nobody_holds_are_forgotten() {
        let mut shared = Shared::default();
        let mut kept: Arc<str> = "kept".into();
        shared.share(&mut kept);
        for number in 0..SMALLEST_SWEEP * 10 {
            shared.share(&mut Arc::from(format!("pod-{number}")));
        }
        assert!(shared.known.len() < SMALLEST_SWEEP, "{} names", shared.known.len());
        let mut again: Arc<str> = "kept".into();
        shared.share(&mut again);
        assert!(Arc::ptr_eq(&kept, &again));
    }
}
