//! Decides which frontends and service ports get room if a map has no room for all. This module has
//! no side effects.
//!
//! ClusterIPs and node ports come first, because external addresses are whatever somebody writes
//! into a Service. The Services share the rest equally for their external addresses. A Service that
//! wants less leaves its rest to the others.

use std::{collections::BTreeMap, sync::Arc};

use rustc_hash::FxHashMap;

use crate::model::{
    desired::{DesiredPort, FrontendKind},
    objects::ObjectName,
};

/// The entries that want room in a map, and those that could give it up.
#[derive(Debug)]
pub(super) struct Demand<T> {
    /// The number of entries that nobody has.
    pub(super) free: usize,
    /// The ClusterIPs and node ports without an entry.
    pub(super) internal: Vec<T>,
    /// The external addresses without an entry.
    pub(super) external: Vec<T>,
    /// The external addresses that have an entry.
    pub(super) present: Vec<T>,
}

#[derive(Debug, Eq, PartialEq)]
pub(super) struct Plan<T> {
    pub(super) admit: Vec<T>,
    pub(super) evict: Vec<T>,
    pub(super) left_out: Vec<T>,
}

struct Wishes<T> {
    present: Vec<T>,
    wanted: Vec<T>,
}

/// Returns which frontends get an entry, which lose theirs, and which get none. Once a plan is
/// carried out, the next one for the same demand changes nothing.
pub(super) fn plan<T>(demand: Demand<T>, owner: impl Fn(&T) -> &ObjectName) -> Plan<T> {
    let Demand { free, internal: mut admit, external, present } = demand;
    let room = free + present.len();
    let mut left_out = admit.split_off(admit.len().min(room));
    let mut evict = Vec::new();
    let mut services: BTreeMap<ObjectName, Wishes<T>> = BTreeMap::new();
    let mut add = |one: T, is_present: bool| {
        let none = || Wishes { present: Vec::new(), wanted: Vec::new() };
        let wishes = services.entry(owner(&one).clone()).or_insert_with(none);
        if is_present { &mut wishes.present } else { &mut wishes.wanted }.push(one);
    };
    present.into_iter().for_each(|one| add(one, true));
    external.into_iter().for_each(|one| add(one, false));
    let mut services: Vec<Wishes<T>> = services.into_values().collect();
    // If no equal share is possible, a Service that has one entry more than others keeps it.
    services.sort_by_key(|service| (service.present.len() + service.wanted.len(), service.present.len()));
    let mut room = room - admit.len();
    let mut sharers = services.len();
    for Wishes { mut present, mut wanted } in services {
        let share = (room / sharers).min(present.len() + wanted.len());
        (room, sharers) = (room - share, sharers - 1);
        evict.extend(present.split_off(present.len().min(share)));
        left_out.extend(wanted.split_off(wanted.len().min(share - present.len())));
        admit.append(&mut wanted);
    }
    Plan { admit, evict, left_out }
}

/// Returns the service ports in the order in which they are asked what room they need.
///
/// Published ports come first, so that they keep their room. Ports with ClusterIPs or node ports
/// come before those that have external addresses only. Within each of these classes, the smallest
/// port of every namespace comes first, then the second of every namespace, and so on.
pub(super) fn in_turn<'a>(
    mut ports: Vec<&'a Arc<DesiredPort>>,
    is_published: impl Fn(&DesiredPort) -> bool,
) -> Vec<&'a Arc<DesiredPort>> {
    let is_internal = |kind| matches!(kind, FrontendKind::ClusterIp | FrontendKind::NodePort);
    let class = |port: &DesiredPort| {
        (!is_published(port), !port.frontends.iter().any(|frontend| is_internal(frontend.kind)))
    };
    ports.sort_by_cached_key(|port| (class(port), port.endpoints.all.len(), port.name.clone()));
    let mut before: FxHashMap<_, usize> = FxHashMap::default();
    let turn = |port: &'a Arc<DesiredPort>| {
        let class = class(port);
        let before = before.entry((class, Arc::clone(&port.name.service.namespace))).or_default();
        *before += 1;
        ((class, *before), port)
    };
    let mut turns: Vec<_> = ports.into_iter().map(turn).collect();
    turns.sort_by_key(|(turn, _)| *turn);
    turns.into_iter().map(|(_, port)| port).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Frontend = (ObjectName, u32);

    fn of(service: u8, numbers: std::ops::Range<u32>) -> Vec<Frontend> {
        let name = ObjectName::new("test", format!("{service}"));
        numbers.map(|number| (name.clone(), number)).collect()
    }

    fn planned(demand: Demand<Frontend>) -> Plan<Frontend> {
        plan(demand, |(owner, _)| owner)
    }

    #[test]
    fn a_cluster_ip_takes_the_place_of_an_external_address() {
        let demand = Demand { free: 0, internal: of(1, 0..2), external: Vec::new(), present: of(2, 0..3) };
        let Plan { admit, evict, left_out } = planned(demand);
        assert_eq!((admit, evict.len(), left_out), (of(1, 0..2), 2, Vec::new()));
    }

    #[test]
    fn what_no_external_address_can_make_room_for_is_left_out() {
        let demand = Demand { free: 1, internal: of(1, 0..4), external: of(3, 0..1), present: of(2, 0..1) };
        let Plan { admit, evict, left_out } = planned(demand);
        assert_eq!((admit, evict), (of(1, 0..2), of(2, 0..1)));
        assert_eq!(left_out, [of(1, 2..4), of(3, 0..1)].concat());
    }

    #[test]
    fn a_service_with_many_addresses_leaves_room_for_the_few_of_another() {
        let demand = Demand { free: 0, internal: Vec::new(), external: of(2, 0..2), present: of(1, 0..100) };
        let Plan { admit, evict, left_out } = planned(demand);
        assert_eq!((admit, evict.len(), left_out), (of(2, 0..2), 2, Vec::new()));
    }

    #[test]
    fn the_published_the_internal_and_the_first_of_each_namespace_come_first() {
        use crate::model::test_support::service;
        let mut model = crate::model::Model::new("node");
        let names = ["greedy/a", "greedy/b", "greedy/c", "small/large", "small/web", "other/published"];
        model.replace_services(
            (1..).zip(names).map(|(n, name)| service(name, &[&format!("10.96.0.{n}")])).collect(),
        );
        let ports = model.take_changes().changed;
        let named = |port: &DesiredPort| port.name.service.to_string();
        let in_turn = in_turn(ports.iter().collect(), |port| named(port) == "other/published");
        let in_turn: Vec<_> = in_turn.into_iter().map(|port| named(port)).collect();
        assert_eq!(
            in_turn,
            ["other/published", "greedy/a", "small/large", "greedy/b", "small/web", "greedy/c"]
        );
    }

    proptest! {
        #[test]
        fn no_place_is_wasted_and_a_second_plan_changes_nothing(
            free in 0..20_usize,
            internal in 0..20_u32,
            external in prop::collection::vec(0..20_u32, 0..5),
            present in prop::collection::vec(0..20_u32, 0..5),
        ) {
            let all = |counts: &[u32], from: u32| -> Vec<Frontend> {
                let services = counts.iter().zip(0..);
                services.flat_map(|(count, service)| of(service, from..from + count)).collect()
            };
            let (external, present) = (all(&external, 0), all(&present, 100));
            let demand = Demand {
                free,
                internal: of(9, 0..internal),
                external: external.clone(),
                present: present.clone(),
            };
            let Plan { admit, evict, left_out } = planned(demand);
            let left_free = free + evict.len() - admit.len();
            prop_assert!(left_free == 0 || (left_out.is_empty() && evict.is_empty()));
            let is_internal = |one: &Frontend| one.0 == of(9, 0..1)[0].0;
            let (internal, admitted): (Vec<_>, Vec<_>) = admit.into_iter().partition(is_internal);
            prop_assert!(!left_out.iter().any(is_internal) || internal.len() == free + present.len());

            let kept: Vec<_> = present.into_iter().filter(|one| !evict.contains(one)).collect();
            let again = planned(Demand {
                free: left_free,
                internal: left_out.iter().filter(|one| is_internal(one)).cloned().collect(),
                external: left_out.into_iter().chain(evict).filter(|one| !is_internal(one)).collect(),
                present: [kept, admitted].concat(),
            });
            prop_assert_eq!((again.admit, again.evict), (Vec::new(), Vec::new()));
        }
    }
}
