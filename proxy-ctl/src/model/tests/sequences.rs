//! Any sequence of updates that leads to the same objects leads to the same desired state.

use std::collections::BTreeMap;

use proptest::{collection::vec, prelude::*};

use crate::model::{
    Model, Update,
    desired::{Changes, DesiredPort, ServicePortName},
    objects::{Endpoint, EndpointSlice, ObjectName, Protocol, Service, ServicePort, TrafficPolicy},
    test_support::*,
};

type Replica = BTreeMap<ServicePortName, std::sync::Arc<DesiredPort>>;

/// Draws from few names and addresses, so that they meet.
fn object_name(kind: &'static str) -> impl Strategy<Value = ObjectName> {
    (0..2, 0..3).prop_map(move |(namespace, number)| name(&format!("ns{namespace}/{kind}{number}")))
}

fn policy() -> impl Strategy<Value = TrafficPolicy> {
    prop_oneof![Just(TrafficPolicy::Cluster), Just(TrafficPolicy::Local)]
}

fn service_port() -> impl Strategy<Value = ServicePort> {
    let protocol = prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp)];
    let node_port = proptest::option::of(30000..30002u16);
    (0..2, protocol, 80..82u16, node_port).prop_map(|(number, protocol, port, node_port)| ServicePort {
        name: format!("p{number}").into(),
        protocol,
        port,
        node_port,
    })
}

fn any_service() -> impl Strategy<Value = Service> {
    let addresses = prop_oneof![
        (0..4u8).prop_map(|n| vec![format!("10.96.0.{n}")]),
        (0..4u8).prop_map(|n| vec![format!("fd00::{n}")]),
        (0..4u8).prop_map(|n| vec![format!("10.96.0.{n}"), format!("fd00::{n}")]),
    ];
    let external = vec(0..3u8, 0..2);
    (object_name("s"), 0..2i64, vec(service_port(), 0..3), addresses, external, policy(), policy()).prop_map(
        |(name, created, ports, cluster_ips, external, internal_policy, external_policy)| {
            let cluster_ips: Vec<&str> = cluster_ips.iter().map(String::as_str).collect();
            let mut service = service(&name.to_string(), &cluster_ips)
                .created(created)
                .ports(ports)
                .policies(internal_policy, external_policy);
            for number in external {
                service = service.external_ip(&format!("192.0.2.{number}"));
            }
            service
        },
    )
}

fn any_endpoint(v6: bool) -> impl Strategy<Value = Endpoint> {
    (0..4u8, any::<[bool; 4]>(), proptest::option::of(0..3)).prop_map(
        move |(number, [ready, serving, terminating, here], zone)| {
            let address = if v6 { format!("fd01::{number}") } else { format!("10.0.0.{number}") };
            let endpoint = if here { local(&address) } else { remote(&address) };
            let endpoint = Endpoint { ready, serving, terminating, ..endpoint };
            match zone {
                Some(zone) => endpoint.zones(&[&format!("z{zone}")]),
                None => endpoint,
            }
        },
    )
}

fn any_slice() -> impl Strategy<Value = EndpointSlice> {
    any::<bool>().prop_flat_map(|v6| {
        (object_name("e"), 0..3, vec(any_endpoint(v6), 0..4), vec((0..2, 8080..8082u16), 1..3)).prop_map(
            |(name, service, endpoints, ports)| {
                let ports =
                    ports.into_iter().map(|(number, port)| target(&format!("p{number}"), port)).collect();
                slice(&name.to_string(), &format!("s{service}"), endpoints).ports(ports)
            },
        )
    })
}

fn any_update() -> impl Strategy<Value = Update> {
    prop_oneof![
        8 => any_service().prop_map(Update::ApplyService),
        8 => any_slice().prop_map(Update::ApplySlice),
        4 => object_name("s").prop_map(Update::DeleteService),
        4 => object_name("e").prop_map(Update::DeleteSlice),
        1 => vec(any_service(), 0..4).prop_map(Update::ReplaceServices),
        1 => vec(any_slice(), 0..4).prop_map(Update::ReplaceSlices),
        2 => proptest::option::of(proptest::option::of(0..3)).prop_map(|zone| {
            Update::Node(zone.map(|zone| node(zone.map(|zone| format!("z{zone}")).as_deref())))
        }),
    ]
}

/// The objects that exist in the end.
#[derive(Default)]
struct Objects {
    services: BTreeMap<ObjectName, Service>,
    slices: BTreeMap<ObjectName, EndpointSlice>,
    node: Option<Update>,
}

impl Objects {
    fn update(&mut self, update: Update) {
        match update {
            Update::ReplaceServices(services) => {
                self.services.clear();
                for service in services {
                    self.services.insert(service.name.clone(), service);
                }
            }
            Update::ApplyService(service) => {
                self.services.insert(service.name.clone(), service);
            }
            Update::DeleteService(name) => {
                self.services.remove(&name);
            }
            Update::ReplaceSlices(slices) => {
                self.slices.clear();
                for slice in slices {
                    self.slices.insert(slice.name.clone(), slice);
                }
            }
            Update::ApplySlice(slice) => {
                self.slices.insert(slice.name.clone(), slice);
            }
            Update::DeleteSlice(name) => {
                self.slices.remove(&name);
            }
            node @ Update::Node(_) => self.node = Some(node),
            Update::ReplaceServiceCidrs(_) | Update::ApplyServiceCidr(_) | Update::DeleteServiceCidr(_) => {}
        }
    }

    fn model(self) -> Model {
        let mut model = Model::new(HERE);
        self.node.into_iter().for_each(|node| model.update(node));
        // The order is the reverse of that in which a source lists them.
        self.slices.into_values().rev().for_each(|slice| model.apply_slice(slice));
        self.services.into_values().rev().for_each(|service| model.apply_service(service));
        model.take_changes();
        model
    }
}

fn apply(replica: &mut Replica, changes: &Changes) -> Result<(), TestCaseError> {
    let mut mentioned = std::collections::BTreeSet::new();
    for port in &changes.changed {
        prop_assert!(mentioned.insert(port.name.clone()), "{} twice", port.name);
        let before = replica.insert(port.name.clone(), port.clone());
        prop_assert!(before.as_ref() != Some(port), "{} is unchanged", port.name);
    }
    for name in &changes.removed {
        prop_assert!(mentioned.insert(name.clone()), "{} twice", name);
        prop_assert!(replica.remove(name).is_some(), "{} was not there", name);
    }
    prop_assert!(changes.changed.is_sorted_by_key(|port| &port.name));
    prop_assert!(changes.removed.is_sorted());
    Ok(())
}

proptest! {
    #[test]
    fn any_sequence_is_as_if_built_from_the_final_objects(
        updates in vec((any_update(), any::<bool>()), 0..40)
    ) {
        let mut model = Model::new(HERE);
        let mut replica = Replica::new();
        let mut objects = Objects::default();
        for (update, take) in updates {
            model.update(update.clone());
            objects.update(update);
            if take {
                apply(&mut replica, &model.take_changes())?;
            }
        }
        apply(&mut replica, &model.take_changes())?;
        let desired = model.desired();
        prop_assert_eq!(&replica.into_values().collect::<Vec<_>>(), &desired);
        let fresh = objects.model();
        prop_assert_eq!(&desired, &fresh.desired());
        prop_assert_eq!(model.conflicts(), fresh.conflicts());
        let mut frontends: Vec<_> = desired
            .iter()
            .flat_map(|port| port.frontends.iter().map(|f| (f.address, f.port, port.name.protocol)))
            .collect();
        let all = frontends.len();
        frontends.sort_unstable();
        frontends.dedup();
        prop_assert_eq!(frontends.len(), all, "a frontend belongs to one service port");
    }
}
