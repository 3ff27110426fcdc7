//! Divides service ports between the two modes.

use std::{collections::BTreeMap, sync::Arc};

use super::WithSecondary;
use crate::{
    model::{
        desired::{Changes, DesiredPort, Frontend, ServicePortName},
        node::Host,
    },
    modes::{Effect, UnservedField, servable},
};

/// The parts of a service port, by the mode that serves them.
pub(super) struct Parts {
    /// The part that the active mode serves.
    pub(super) own: Option<Arc<DesiredPort>>,
    pub(super) delegated: Option<Arc<DesiredPort>>,
}

/// Changes, by the mode that writes them and when.
#[derive(Default)]
pub(super) struct Split {
    /// Changes of the active mode.
    pub(super) own: Changes,
    /// Changes of the secondary mode that are written before those of the active mode: frontends
    /// that it did not serve.
    pub(super) arriving: Changes,
    /// Changes of the secondary mode that are written after those of the active mode.
    pub(super) delegated: Changes,
}

impl Parts {
    pub(super) fn of(port: &Arc<DesiredPort>, unserved_fields: &[UnservedField]) -> Self {
        let Some(own) = servable(Arc::clone(port), unserved_fields) else {
            return Self { own: None, delegated: Some(Arc::clone(port)) };
        };
        let is_delegated = |frontend: &Frontend| {
            let effect = Effect::NotToOwnNode(frontend.kind);
            unserved_fields.iter().any(|one| one.effect == effect)
        };
        let frontends: Vec<_> = port.frontends.iter().filter(|one| is_delegated(one)).cloned().collect();
        let delegated =
            (!frontends.is_empty()).then(|| Arc::new(DesiredPort { frontends, ..DesiredPort::clone(port) }));
        Self { own: Some(own), delegated }
    }
}

pub(super) const fn can_be_delegated(one: &UnservedField) -> bool {
    match one.effect {
        Effect::NotToOwnNode(_) | Effect::NotServed => true,
        Effect::ServedDifferently
        | Effect::Refused
        | Effect::PartlyServed
        | Effect::Delegated
        | Effect::LeftToNode => false,
    }
}

/// Returns the node as the secondary mode sees it.
pub(super) fn secondary_host(host: &Host) -> Host {
    Host { shares_addresses: true, ..host.clone() }
}

impl WithSecondary {
    pub(super) fn parts(&self, port: &Arc<DesiredPort>) -> Parts {
        let parts = Parts::of(port, &self.active.unserved_fields(port));
        if self.programs_come_later && parts.own.is_some() {
            Parts { delegated: None, ..parts }
        } else if self.delegates_everything {
            Parts { delegated: Some(Arc::clone(port)), ..parts }
        } else {
            parts
        }
    }

    /// Splits `changes` by the mode that writes them.
    pub(super) fn split(&mut self, changes: &Changes) -> Split {
        let mut split = Split::default();
        let Split { own, arriving, delegated } = &mut split;
        for port in &changes.changed {
            self.desired.insert(Arc::clone(port));
            let parts = self.parts(port);
            let is_own = parts.own.is_some();
            match parts.own {
                Some(port) => own.changed.push(port),
                None => own.removed.push(port.name.clone()),
            }
            match parts.delegated {
                Some(part) => {
                    let before = self.take_back(&port.name);
                    self.delegate(&part);
                    let is_known =
                        |one: &Frontend| before.as_ref().is_some_and(|before| before.frontends.contains(one));
                    // If the active mode serves the port too, it is written first, because it is
                    // faster.
                    let is_for_few = self.delegates_everything && is_own;
                    let arrives = !is_for_few && !part.frontends.iter().all(is_known);
                    (if arrives { &mut *arriving } else { &mut *delegated }).changed.push(part);
                }
                None => {
                    let Some(part) = self.take_back(&port.name) else { continue };
                    self.passing.insert(port.name.clone(), part);
                    delegated.removed.push(port.name.clone());
                }
            }
            self.failure_changed |= self.failure.is_some();
        }
        for name in &changes.removed {
            self.desired.remove(name);
            own.removed.push(name.clone());
            if self.take_back(name).is_some() {
                delegated.removed.push(name.clone());
                self.failure_changed |= self.failure.is_some();
            }
        }
        split
    }

    pub(super) fn delegate(&mut self, part: &Arc<DesiredPort>) {
        self.was_delegated.add_all(part);
        self.delegated.insert(part.name.clone(), Arc::clone(part));
    }

    /// Takes the service port from the secondary mode, and returns the part that it served.
    pub(super) fn take_back(&mut self, name: &ServicePortName) -> Option<Arc<DesiredPort>> {
        let passing = self.passing.remove(name);
        self.delegated.remove(name).or(passing)
    }

    /// Returns what is delegated but not served, because the secondary mode cannot be opened.
    pub(super) fn delegated_but_unserved(&self) -> BTreeMap<ServicePortName, Vec<UnservedField>> {
        let Some(failure) = &self.failure else { return BTreeMap::new() };
        let mode = self.secondary.mode();
        let told = |one: &UnservedField| UnservedField {
            field: one.field,
            effect: one.effect,
            instead: format!(
                "not served: the secondary mode {mode}, which would serve it, cannot be opened: {failure}"
            )
            .into(),
        };
        let fields = |port: &Arc<DesiredPort>| {
            let unserved_fields = self.active.unserved_fields(port);
            unserved_fields.iter().filter(|one| can_be_delegated(one)).map(told).collect()
        };
        // Ports that the active mode serves too have no such fields, so they are left out.
        let with_fields = self.delegated.iter().map(|(name, port)| (name.clone(), fields(port)));
        with_fields.filter(|(_, fields): &(_, Vec<_>)| !fields.is_empty()).collect()
    }
}
