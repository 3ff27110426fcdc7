//! Computes what the maps must hold from the desired state. This module has no side effects.

use std::{collections::BTreeSet, iter, sync::Arc};

use ipnet::IpNet;
use proxy_common::{
    layout::{
        BACKEND_DRAINING, BACKEND_LOCAL, BACKEND_WEIGHT_SHIFT, ENCAPSULATION_GENEVE, ENCAPSULATION_IP,
        EndpointSet, FRONTEND_AFFINITY, FRONTEND_DSR, FRONTEND_EXTERNAL, FRONTEND_LEAST_CONNECTION,
        FRONTEND_LOCAL_POLICY, FRONTEND_MAGLEV, FRONTEND_SOURCE_RANGES, FrontendKey, NAME_BYTES, SERVICE_DSR,
        SERVICE_EXTERNAL_LOCAL, SERVICE_HAS_ENDPOINTS, SERVICE_INTERNAL_LOCAL, SERVICE_LEAST_CONNECTION,
        SERVICE_MAGLEV, ServiceName, SourceRange,
    },
    port::Port,
};

use super::{allocate::Range, draining::is_draining, maglev};
use crate::{
    config::Encapsulation,
    model::{
        desired::{DesiredPort, Endpoint, Endpoints, FrontendKind, ServicePortName},
        objects::{self, Algorithm, Forwarding, NodeForwarding, ObjectName, Protocol, TrafficPolicy},
    },
    modes::ebpf::maps::{family::TableFamily, tables::SourceRangeKey},
};

/// The positions of a service port's endpoint sets among its slots. Its first slot is number 0.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Arrangement {
    /// The runs of slots, one after the other.
    pub(crate) runs: Vec<Run>,
    pub(crate) cluster: EndpointSet,
    pub(crate) internal: EndpointSet,
    pub(crate) external: EndpointSet,
}

/// Consecutive slots, and the size of the lookup table of a set that consists of all of them.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Run {
    pub(crate) first: u32,
    /// The index in `Endpoints::all` of each slot's endpoint.
    pub(crate) slots: Vec<u32>,
    /// Binary logarithm of the lookup table's size; 0 if there is no lookup table.
    pub(super) table_bits: u32,
}

impl Run {
    fn set(&self) -> EndpointSet {
        EndpointSet::new(self.first, self.slots.len() as u32).with_table(self.table_bits)
    }

    pub(crate) fn contents<F: TableFamily>(&self, port: &DesiredPort) -> impl Iterator<Item = u32> {
        contents::<F>(port, &self.slots, self.table_bits)
    }

    fn end(&self) -> u32 {
        self.first + self.set().places()
    }
}

/// Returns the index in `Endpoints::all` for each slot of a set, and then for each element of its
/// lookup table.
pub(crate) fn contents<F: TableFamily>(
    port: &DesiredPort,
    slots: &[u32],
    table_bits: u32,
) -> impl Iterator<Item = u32> {
    // The lookup table is computed only on demand, because a comparison with other contents mostly
    // ends within the slots.
    let table = move || match table_bits {
        0 => Vec::new(),
        bits => maglev::table::<F>(port.name.protocol, members(&port.endpoints, slots), bits),
    };
    let copies = iter::once_with(table).flatten().filter_map(|index| slots.get(index as usize));
    slots.iter().chain(copies).copied()
}

impl Arrangement {
    /// Arranges the endpoint sets among the slots.
    ///
    /// If no set has a lookup table, the slots begin with all endpoints in their order. A set
    /// without lookup table shares slots if it is a contiguous part of them. A set with a lookup
    /// table shares only those of an equal set. Any other set gets slots of its own.
    pub(crate) fn of(endpoints: &Endpoints, algorithm: Algorithm) -> Self {
        let sets = [&endpoints.cluster, &endpoints.internal, &endpoints.external];
        let bits = sets.map(|set| maglev::table_bits(algorithm, members(endpoints, set)));
        // There is mostly one run, and arrangements are kept for all service ports that are written
        // at once.
        let mut runs = Vec::with_capacity(1);
        if bits == [0; 3] {
            runs.push(Run { first: 0, slots: (0..).take(endpoints.all.len()).collect(), table_bits: 0 });
        }
        let mut place = |set: &[u32], table_bits: u32| {
            if set.is_empty() {
                return EndpointSet::default();
            }
            let shared = |run: &Run| {
                let place = run.slots.windows(set.len()).position(|slots| slots == set)? as u32;
                let is_whole = run.table_bits == table_bits && run.slots.len() == set.len();
                let shared = EndpointSet::new(run.first + place, set.len() as u32);
                (table_bits == 0 || is_whole).then_some(shared.with_table(table_bits))
            };
            runs.iter().find_map(shared).unwrap_or_else(|| {
                let run = Run { first: runs.last().map_or(0, Run::end), slots: set.to_vec(), table_bits };
                let own = run.set();
                runs.push(run);
                own
            })
        };
        let cluster = place(sets[0], bits[0]);
        let internal = place(sets[1], bits[1]);
        let external = place(sets[2], bits[2]);
        Self { runs, cluster, internal, external }
    }

    pub(crate) fn has_tables(&self) -> bool {
        self.runs.iter().any(|run| run.table_bits > 0)
    }

    /// Returns the number of slots, with those of lookup tables.
    pub(crate) fn places(&self) -> u32 {
        self.runs.last().map_or(0, Run::end)
    }
}

pub(crate) fn members<'e>(
    endpoints: &'e Endpoints,
    set: &'e [u32],
) -> impl Iterator<Item = &'e Endpoint> + Clone {
    set.iter().filter_map(|index| endpoints.all.get(*index as usize))
}

/// Returns the same set, moved into the range that the service's slots were written to.
pub(crate) fn placed(set: EndpointSet, range: Range) -> EndpointSet {
    if set.count() == 0 {
        return EndpointSet::default();
    }
    EndpointSet::new(range.first + set.first, set.count()).with_table(set.table_bits())
}

/// Returns the smallest range that holds these sets and their lookup tables.
pub(crate) fn span(sets: [EndpointSet; 3]) -> Range {
    let used = || sets.iter().filter(|set| set.count() > 0);
    let first = used().map(|set| set.first).min().unwrap_or(0);
    let end = used().map(|set| u64::from(set.first) + u64::from(set.places())).max().unwrap_or(0);
    Range { first, count: u32::try_from(end - u64::from(first)).unwrap_or(u32::MAX) }
}

pub(super) fn service_flags(port: &DesiredPort, algorithm: Algorithm, forwarding: Forwarding) -> u32 {
    let flags = [
        (forwarding == Forwarding::Dsr, SERVICE_DSR),
        (algorithm == Algorithm::Maglev, SERVICE_MAGLEV),
        (algorithm == Algorithm::LeastConnection, SERVICE_LEAST_CONNECTION),
        (port.endpoints.any, SERVICE_HAS_ENDPOINTS),
        (port.internal_policy == TrafficPolicy::Local, SERVICE_INTERNAL_LOCAL),
        (port.external_policy == TrafficPolicy::Local, SERVICE_EXTERNAL_LOCAL),
    ];
    sum_of(flags)
}

fn sum_of<const N: usize>(flags: [(bool, u32); N]) -> u32 {
    flags.into_iter().filter(|(is_set, _)| *is_set).fold(0, |all, (_, flag)| all | flag)
}

/// Returns the algorithm that the flags of a service stand for.
pub(crate) fn algorithm(flags: u32) -> Algorithm {
    if flags & SERVICE_MAGLEV != 0 {
        Algorithm::Maglev
    } else if flags & SERVICE_LEAST_CONNECTION != 0 {
        Algorithm::LeastConnection
    } else {
        Algorithm::Random
    }
}

/// Returns how packets are forwarded according to the flags of a service.
pub(crate) fn forwarding(flags: u32) -> Forwarding {
    if flags & SERVICE_DSR != 0 { Forwarding::Dsr } else { Forwarding::Snat }
}

/// Returns the number of an encapsulation in
/// [`Settings::encapsulation`](proxy_common::layout::Settings::encapsulation).
pub(crate) fn encapsulation_number(encapsulation: Encapsulation) -> u16 {
    match encapsulation {
        Encapsulation::Ip => ENCAPSULATION_IP,
        Encapsulation::Geneve => ENCAPSULATION_GENEVE,
    }
}

/// Returns the encapsulation that has this number: the reverse of [`encapsulation_number`].
pub(crate) fn encapsulation(number: u16) -> Encapsulation {
    if number == ENCAPSULATION_GENEVE { Encapsulation::Geneve } else { Encapsulation::Ip }
}

/// Returns `Snat` or `Dsr`, which applies to the frontends of this service port.
pub(super) fn forwarding_of(port: &DesiredPort, of_node: NodeForwarding) -> Forwarding {
    if port.endpoints.need_snat {
        return Forwarding::Snat;
    }
    of_node.of(port.forwarding, port.name.protocol)
}

pub(super) fn backend_flags(endpoint: &Endpoint) -> u32 {
    let more_than_one = u32::from(endpoint.weight.saturating_sub(1));
    let flags = [(endpoint.local, BACKEND_LOCAL), (is_draining(endpoint), BACKEND_DRAINING)];
    more_than_one << BACKEND_WEIGHT_SHIFT | sum_of(flags)
}

/// Returns the keys of the port's frontends with their `FRONTEND_*` flags, sorted and each once.
pub(crate) fn frontends<F: TableFamily>(
    port: &DesiredPort,
    algorithm: Algorithm,
    forwarding: Forwarding,
) -> Vec<(FrontendKey<F::Address>, u32)> {
    let of_port = [
        (port.affinity_seconds.is_some(), FRONTEND_AFFINITY),
        (algorithm == Algorithm::Maglev, FRONTEND_MAGLEV),
        (algorithm == Algorithm::LeastConnection, FRONTEND_LEAST_CONNECTION),
    ];
    let of_port = sum_of(of_port);
    let external = [
        (true, FRONTEND_EXTERNAL),
        (port.external_policy == TrafficPolicy::Local, FRONTEND_LOCAL_POLICY),
        (forwarding == Forwarding::Dsr, FRONTEND_DSR),
    ];
    let external = sum_of(external);
    let mut keys: Vec<_> = port
        .frontends
        .iter()
        .filter_map(|frontend| {
            let (number, protocol) = (Port::new(frontend.port), port.name.protocol.number());
            let of_address =
                || Some(FrontendKey::of_address(F::address(frontend.address)?, number, protocol));
            let (key, flags) = match frontend.kind {
                FrontendKind::ClusterIp => (of_address()?, 0),
                FrontendKind::NodePort => (FrontendKey::of_node_port(number, protocol), external),
                FrontendKind::ExternalIp => (of_address()?, external),
                FrontendKind::LoadBalancer if port.source_ranges.is_empty() => (of_address()?, external),
                FrontendKind::LoadBalancer => (of_address()?, external | FRONTEND_SOURCE_RANGES),
            };
            Some((key, flags | of_port))
        })
        .collect();
    keys.sort_unstable_by_key(|(key, flags)| (key.scope, key.address, key.port(), *flags));
    keys.dedup_by_key(|(key, _)| *key);
    keys
}

/// Returns the port's ClusterIPs, sorted and each once.
pub(crate) fn cluster_ips<F: TableFamily>(port: &DesiredPort) -> Box<[F::Address]> {
    let cluster_ips = port.frontends.iter().filter(|frontend| frontend.kind == FrontendKind::ClusterIp);
    let addresses: BTreeSet<_> = cluster_ips.filter_map(|frontend| F::address(frontend.address)).collect();
    addresses.into_iter().collect()
}

/// Returns the port's entries of `source_ranges4/6`, sorted and each once.
pub(crate) fn source_ranges<F: TableFamily>(port: &DesiredPort, service: u32) -> Box<[SourceRangeKey<F>]> {
    if !port.frontends.iter().any(|frontend| frontend.kind == FrontendKind::LoadBalancer) {
        return Box::default();
    }
    let key = |range: &IpNet| {
        let address = F::address(range.network())?;
        Some(SourceRange::of_prefix(service, address, range.prefix_len().into()))
    };
    let keys: BTreeSet<_> = port.source_ranges.iter().filter_map(key).collect();
    keys.into_iter().collect()
}

/// Returns the name as the map `service_names` has it. It is `None` if a part is longer than
/// [`NAME_BYTES`], which Kubernetes does not allow.
pub(crate) fn name(port: &ServicePortName) -> Option<ServiceName> {
    fn padded(text: &str) -> Option<[u8; NAME_BYTES]> {
        let mut bytes = [0; NAME_BYTES];
        bytes.get_mut(..text.len())?.copy_from_slice(text.as_bytes());
        Some(bytes)
    }
    Some(ServiceName {
        namespace: padded(&port.service.namespace)?,
        name: padded(&port.service.name)?,
        port: padded(&port.port)?,
        protocol: port.protocol.number(),
        family: match port.family {
            objects::IpFamily::Ipv4 => 4,
            objects::IpFamily::Ipv6 => 6,
        },
    })
}

/// Returns the service port that an entry of `service_names` names: the reverse of [`name`]. It is
/// `None` if the entry was not written by [`name`].
pub(crate) fn port_name(name: &ServiceName) -> Option<ServicePortName> {
    fn text(bytes: &[u8; NAME_BYTES]) -> Option<Arc<str>> {
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(NAME_BYTES);
        std::str::from_utf8(&bytes[..end]).ok().map(Arc::from)
    }
    Some(ServicePortName {
        service: ObjectName { namespace: text(&name.namespace)?, name: text(&name.name)? },
        port: text(&name.port)?,
        protocol: protocol(name.protocol)?,
        family: match name.family {
            4 => objects::IpFamily::Ipv4,
            6 => objects::IpFamily::Ipv6,
            _ => return None,
        },
    })
}

/// Returns the owner of a service port's backends, for `Backend::owner`.
///
/// TCP has owner 0, because its flows keep a backend that has left the service. Other protocols
/// have a hash of the name. FNV-1a makes it the same in every version. Two names with the same hash
/// share backends, which has no other effect.
pub(crate) fn owner(port: &ServicePortName) -> u32 {
    if port.protocol == Protocol::Tcp {
        return 0;
    }
    let names = [&port.service.namespace, &port.service.name, &port.port];
    let bytes = names.into_iter().flat_map(|name| name.bytes().chain([0]));
    let hash = bytes.fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    hash.max(1)
}

/// Returns the protocol that has this IANA number.
pub(crate) fn protocol(number: u8) -> Option<Protocol> {
    [Protocol::Tcp, Protocol::Udp, Protocol::Sctp].into_iter().find(|protocol| protocol.number() == number)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use proptest::prelude::*;
    use proxy_common::family::{Slot, V4, V6};
    use rstest::rstest;

    use super::*;
    use crate::model::{
        Model,
        desired::Frontend,
        objects::Forwarding::{Dsr, Hybrid, Snat},
        test_support::{HERE, THERE, remote, service, slice, target},
    };

    fn endpoints(count: u8, cluster: &[u32], internal: &[u32], external: &[u32]) -> Endpoints {
        let endpoint = |n| Endpoint {
            address: std::net::Ipv4Addr::new(10, 0, 0, n).into(),
            port: 80,
            local: false,
            terminating: false,
            weight: 1,
        };
        Endpoints {
            all: (0..count).map(endpoint).collect(),
            cluster: cluster.into(),
            internal: internal.into(),
            external: external.into(),
            any: count > 0,
            need_snat: false,
            unused: Box::default(),
        }
    }

    #[rstest]
    #[case::all_the_same(&[0, 1, 2], &[0, 1, 2], &[0, 1, 2], 3)]
    #[case::local_ones_come_first(&[0, 1, 2], &[0, 1, 2], &[0], 3)]
    #[case::remote_run(&[0, 1, 2], &[1, 2], &[], 3)]
    #[case::a_gap_needs_slots_of_its_own(&[0, 1, 2], &[0, 2], &[0], 5)]
    #[case::two_equal_gaps_share_them(&[0, 1, 2], &[0, 2], &[0, 2], 5)]
    #[case::none(&[], &[], &[], 3)]
    fn slots_are_shared(
        #[case] cluster: &[u32],
        #[case] internal: &[u32],
        #[case] external: &[u32],
        #[case] slots: u32,
    ) {
        let arrangement = Arrangement::of(&endpoints(3, cluster, internal, external), Algorithm::Random);
        assert_eq!(arrangement.places(), slots);
        assert_eq!(arrangement.runs[0].slots, [0, 1, 2]);
        assert!(!arrangement.has_tables());
    }

    #[rstest]
    #[case::all_the_same(&[0, 1, 2], &[0, 1, 2], &[0, 1, 2], 3 + 512)]
    #[case::one_endpoint_needs_none(&[0, 1, 2], &[0, 1, 2], &[0], 3 + 512)]
    #[case::each_set_has_its_own(&[0, 1, 2], &[0, 1, 2], &[0, 1], 3 + 512 + 2 + 512)]
    #[case::three_tables(&[0, 1, 2], &[1, 2], &[0, 1], 3 + 512 + 2 * (2 + 512))]
    fn tables_follow_their_sets(
        #[case] cluster: &[u32],
        #[case] internal: &[u32],
        #[case] external: &[u32],
        #[case] places: u32,
    ) {
        let arrangement = Arrangement::of(&endpoints(3, cluster, internal, external), Algorithm::Maglev);
        assert_eq!((arrangement.places(), arrangement.has_tables()), (places, true));
    }

    proptest! {
        #[test]
        fn each_set_is_where_its_range_says(
            cluster in prop::collection::vec(0..6_u32, 0..6),
            internal in prop::collection::vec(0..6_u32, 0..6),
            external in prop::collection::vec(0..6_u32, 0..6),
            weights in prop::array::uniform6(prop_oneof![Just(1_u8), Just(0), any::<u8>()]),
            algorithm in prop_oneof![Just(Algorithm::Random), Just(Algorithm::Maglev), Just(Algorithm::LeastConnection)],
        ) {
            let mut endpoints = endpoints(6, &cluster, &internal, &external);
            endpoints.all.iter_mut().zip(weights).for_each(|(endpoint, weight)| endpoint.weight = weight);
            let port = DesiredPort { endpoints, ..port(Vec::new()) };
            let arrangement = Arrangement::of(&port.endpoints, algorithm);
            let all: Vec<u32> = arrangement.runs.iter().flat_map(|run| run.contents::<V4>(&port)).collect();
            prop_assert_eq!(all.len() as u32, arrangement.places());
            let sets = [(arrangement.cluster, cluster), (arrangement.internal, internal), (arrangement.external, external)];
            prop_assert_eq!(span(sets.each_ref().map(|(set, _)| *set)).count <= arrangement.places(), true);
            for (set, members) in sets {
                let (first, count) = (set.first as usize, set.count() as usize);
                prop_assert_eq!(&all[first..first + count], members.as_slice());
                let table = &all[first + count..first + set.places() as usize];
                let has_weight = |index: &u32| weights[*index as usize] > 0;
                let has_any = members.iter().any(has_weight);
                prop_assert!(table.iter().all(|index| members.contains(index) && (has_weight(index) || !has_any)));
            }
        }
    }

    /// Returns the slots of each set that the model makes of endpoints with these addresses, some
    /// of them on this node.
    fn chosen<F: TableFamily>(endpoints: &[(IpAddr, bool)], ports: &[u16]) -> [Vec<F::Slot>; 3] {
        let mut model = Model::new(HERE);
        let mut service = service(
            "default/web",
            &[match F::FAMILY {
                objects::IpFamily::Ipv4 => "10.96.0.1",
                objects::IpFamily::Ipv6 => "fd00::1",
            }],
        );
        service.ports[0].node_port = Some(30_080);
        service.external_policy = TrafficPolicy::Local;
        model.apply_service(service);
        for (number, port) in ports.iter().enumerate() {
            let of_port = endpoints.iter().skip(number).step_by(ports.len());
            let ready = |(address, is_local): &(IpAddr, bool)| {
                let node = if *is_local { HERE } else { THERE };
                objects::Endpoint { node: Some(node.into()), ..remote(&address.to_string()) }
            };
            let slice = slice(&format!("default/web-{number}"), "web", of_port.map(ready).collect());
            model.apply_slice(
                objects::EndpointSlice { family: F::FAMILY, ..slice }.ports(vec![target("", *port)]),
            );
        }
        let desired = Arc::clone(&model.take_changes().changed[0]);
        let Endpoints { all, cluster, internal, external, .. } = &desired.endpoints;
        let slot = |index: &u32| {
            let one = &all[*index as usize];
            let address = F::address(one.address).unwrap();
            F::Slot::new(address, Port::new(one.port), 1, backend_flags(one))
        };
        [cluster, internal, external].map(|set| set.iter().map(slot).collect())
    }

    fn assert_sorted<S: Slot>(sets: [Vec<S>; 3]) {
        for set in sets {
            assert!(set.windows(2).all(|two| two[0].precedes(&two[1])));
        }
    }

    proptest! {
        /// Programs search the sorted sets for the backend of a client with affinity.
        #[test]
        fn sets_are_sorted(
            hosts in prop::collection::vec((any::<[u8; 3]>(), any::<bool>()), 1..40),
            ports in prop::collection::vec(1..4_u16, 1..4),
        ) {
            let v4 = |&([a, b, c], is_local): &([u8; 3], bool)| (IpAddr::from([10, a, b, c]), is_local);
            let v6 = |&([a, b, c], is_local): &([u8; 3], bool)| {
                (IpAddr::from([0xfd, a, 0, 0, 0, 0, 0, b, 0, 0, 0, 0, 0, 0, 0, c]), is_local)
            };
            assert_sorted(chosen::<V4>(&hosts.iter().map(v4).collect::<Vec<_>>(), &ports));
            assert_sorted(chosen::<V6>(&hosts.iter().map(v6).collect::<Vec<_>>(), &ports));
        }
    }

    fn port(frontends: Vec<Frontend>) -> DesiredPort {
        DesiredPort {
            name: ServicePortName {
                service: ObjectName::new("default", "web"),
                port: "http".into(),
                protocol: Protocol::Tcp,
                family: objects::IpFamily::Ipv4,
            },
            frontends,
            unserved: Box::default(),
            internal_policy: TrafficPolicy::Cluster,
            external_policy: TrafficPolicy::Cluster,
            health_check_node_port: None,
            endpoints: Endpoints::default(),
            affinity_seconds: None,
            source_ranges: Vec::new(),
            algorithm: None,
            forwarding: None,
        }
    }

    #[test]
    fn frontends_have_scope_and_flags_of_their_kind() {
        let frontend = |kind, address: &str, port| Frontend { kind, address: address.parse().unwrap(), port };
        let port = port(vec![
            frontend(FrontendKind::NodePort, "0.0.0.0", 30080),
            frontend(FrontendKind::ClusterIp, "10.96.0.1", 80),
            frontend(FrontendKind::ExternalIp, "192.0.2.1", 80),
        ]);
        let http = |address| FrontendKey::of_address(address, Port::new(80), 6);
        assert_eq!(
            frontends::<V4>(&port, Algorithm::Random, Snat),
            [
                (http([10, 96, 0, 1]), 0),
                (http([192, 0, 2, 1]), FRONTEND_EXTERNAL),
                (FrontendKey::of_node_port(Port::new(30080), 6), FRONTEND_EXTERNAL),
            ]
        );
    }

    #[test]
    fn addresses_of_the_other_family_are_no_frontends() {
        let address = "10.96.0.1".parse().unwrap();
        let port = port(vec![Frontend { kind: FrontendKind::ClusterIp, address, port: 80 }]);
        assert!(frontends::<V6>(&port, Algorithm::Random, Snat).is_empty());
    }

    #[rstest]
    #[case::plain(None, TrafficPolicy::Cluster, [0, FRONTEND_EXTERNAL])]
    #[case::affinity(Some(60), TrafficPolicy::Cluster, [FRONTEND_AFFINITY, FRONTEND_EXTERNAL | FRONTEND_AFFINITY])]
    #[case::policy_local(None, TrafficPolicy::Local, [0, FRONTEND_EXTERNAL | FRONTEND_LOCAL_POLICY])]
    fn flags_of_frontends(
        #[case] affinity_seconds: Option<u32>,
        #[case] external_policy: TrafficPolicy,
        #[case] expected: [u32; 2],
    ) {
        let frontend = |kind, address: &str| Frontend { kind, address: address.parse().unwrap(), port: 80 };
        let of_both = vec![
            frontend(FrontendKind::ClusterIp, "10.96.0.1"),
            frontend(FrontendKind::ExternalIp, "192.0.2.2"),
        ];
        let port = DesiredPort { affinity_seconds, external_policy, ..port(of_both) };
        let flags: Vec<u32> =
            frontends::<V4>(&port, Algorithm::Random, Snat).into_iter().map(|(_, flags)| flags).collect();
        assert_eq!(flags, expected);
        for (algorithm, flag) in
            [(Algorithm::Maglev, FRONTEND_MAGLEV), (Algorithm::LeastConnection, FRONTEND_LEAST_CONNECTION)]
        {
            let flags = frontends::<V4>(&port, algorithm, Snat).into_iter().map(|(_, flags)| flags);
            assert!(flags.zip(expected).all(|(flags, expected)| flags == expected | flag));
        }
    }

    const ANY: NodeForwarding = NodeForwarding { by_default: Snat, allows_more: true };

    const fn up_to(by_default: Forwarding) -> NodeForwarding {
        NodeForwarding { by_default, allows_more: false }
    }

    #[rstest]
    #[case::by_default(None, up_to(Snat), Protocol::Tcp, Snat)]
    #[case::as_the_node(None, up_to(Dsr), Protocol::Udp, Dsr)]
    #[case::not_as_the_node(Some(Snat), up_to(Dsr), Protocol::Tcp, Snat)]
    #[case::hybrid_tcp(Some(Hybrid), up_to(Dsr), Protocol::Tcp, Dsr)]
    #[case::hybrid_udp(Some(Hybrid), up_to(Dsr), Protocol::Udp, Snat)]
    #[case::more_than_the_node(Some(Dsr), up_to(Snat), Protocol::Tcp, Snat)]
    #[case::hybrid_is_more_than_the_node(Some(Hybrid), up_to(Snat), Protocol::Tcp, Snat)]
    #[case::as_much_as_a_hybrid_node(Some(Dsr), up_to(Hybrid), Protocol::Tcp, Dsr)]
    #[case::more_than_a_hybrid_node(Some(Dsr), up_to(Hybrid), Protocol::Udp, Snat)]
    #[case::more_where_that_is_allowed(Some(Dsr), ANY, Protocol::Udp, Dsr)]
    #[case::nothing_where_more_is_allowed(None, ANY, Protocol::Tcp, Snat)]
    fn forwarding_of_a_service_port(
        #[case] forwarding: Option<Forwarding>,
        #[case] of_node: NodeForwarding,
        #[case] protocol: Protocol,
        #[case] expected: Forwarding,
    ) {
        let frontend = |kind, address: &str| Frontend { kind, address: address.parse().unwrap(), port: 80 };
        let of_both = vec![
            frontend(FrontendKind::ClusterIp, "10.96.0.1"),
            frontend(FrontendKind::ExternalIp, "192.0.2.2"),
        ];
        let mut port = DesiredPort { forwarding, ..port(of_both) };
        port.name.protocol = protocol;
        let found = forwarding_of(&port, of_node);
        assert_eq!(found, expected);
        let flags = frontends::<V4>(&port, Algorithm::Random, found).into_iter().map(|(_, flags)| flags);
        let flag = if expected == Dsr { FRONTEND_DSR } else { 0 };
        assert_eq!(flags.collect::<Vec<_>>(), [0, FRONTEND_EXTERNAL | flag]);
        assert_eq!(super::forwarding(service_flags(&port, Algorithm::Maglev, found)), expected);
    }

    #[rstest]
    #[case::known_on_their_nodes(false, Dsr)]
    #[case::not_known_there(true, Snat)]
    fn endpoints_that_need_snat(#[case] need_snat: bool, #[case] expected: Forwarding) {
        let endpoints = Endpoints { need_snat, ..Endpoints::default() };
        let port = DesiredPort { forwarding: Some(Dsr), endpoints, ..port(Vec::new()) };
        assert_eq!(forwarding_of(&port, ANY), expected);
        assert_eq!(forwarding_of(&port, up_to(Dsr)), expected);
    }

    #[test]
    fn source_ranges_close_load_balancer_addresses() {
        let frontend = |kind, address: &str| Frontend { kind, address: address.parse().unwrap(), port: 80 };
        let mut port = port(vec![
            frontend(FrontendKind::LoadBalancer, "192.0.2.1"),
            frontend(FrontendKind::ExternalIp, "192.0.2.2"),
        ]);
        let flags = |port: &DesiredPort| {
            frontends::<V4>(port, Algorithm::Random, Snat)
                .into_iter()
                .map(|(_, flags)| flags)
                .collect::<Vec<_>>()
        };
        assert_eq!(flags(&port), [FRONTEND_EXTERNAL; 2]);
        assert!(source_ranges::<V4>(&port, 7).is_empty());
        port.source_ranges =
            ["198.51.100.9/24", "198.51.100.0/24", "0.0.0.0/0"].map(|range| range.parse().unwrap()).into();
        assert_eq!(flags(&port), [FRONTEND_EXTERNAL | FRONTEND_SOURCE_RANGES, FRONTEND_EXTERNAL]);
        let of_prefix = |address, bits| SourceRange::of_prefix(7, address, bits);
        assert_eq!(*source_ranges::<V4>(&port, 7), [of_prefix([0; 4], 0), of_prefix([198, 51, 100, 0], 24)]);
        port.frontends.remove(0);
        assert!(source_ranges::<V4>(&port, 7).is_empty());
    }

    #[rstest]
    #[case("default", "kubernetes", "https")]
    #[case("n", "s", "")]
    #[case(&"n".repeat(63), &"s".repeat(64), &"p".repeat(15))]
    fn names_come_back(#[case] namespace: &str, #[case] service: &str, #[case] port: &str) {
        let original = ServicePortName {
            service: ObjectName::new(namespace, service),
            port: port.into(),
            protocol: Protocol::Udp,
            family: objects::IpFamily::Ipv6,
        };
        assert_eq!(port_name(&name(&original).unwrap()), Some(original));
    }

    #[test]
    fn a_name_that_is_too_long_has_no_layout() {
        let mut original = port(Vec::new()).name;
        original.service.name = "s".repeat(NAME_BYTES + 1).into();
        assert_eq!(name(&original), None);
    }

    #[test]
    fn the_span_of_sets_ignores_empty_ones() {
        let set = EndpointSet::new;
        assert_eq!(span([set(0, 0), set(7, 2), set(4, 1)]), Range { first: 4, count: 5 });
        assert_eq!(span([set(9, 0); 3]), Range::default());
    }
}
