//! Selection of a frontend by the destination, and of a backend by the frontend.

use crate::{
    affinity,
    balance::Draw,
    family::{Destination, Family, Slot},
    layout::*,
    map_access::{AffinityMaps, Maps},
    reason::Reason,
};

/// The location of a client, seen from this node.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Origin {
    /// The client is in a pod of this node.
    #[default]
    Workload,
    /// The client is a process in this node's own network namespace.
    Host,
    /// The client is beyond the uplink.
    Outside,
}

/// Returns the frontend that serves `destination`, if any. It is a ClusterIP, else a node port on
/// an address of this node, else an external address.
#[inline(always)]
pub fn find<F: Family>(
    maps: &impl Maps<F>,
    destination: &Destination<F::Address>,
    origin: Origin,
) -> Option<Frontend> {
    find_where(maps, destination, || has_node_ports(maps, &destination.address, origin))
}

/// Does what [`find`] does. `has_node_ports` says whether node ports are served at the
/// destination's address.
#[inline(always)]
pub(crate) fn find_where<F: Family>(
    maps: &impl Maps<F>,
    destination: &Destination<F::Address>,
    has_node_ports: impl FnOnce() -> bool,
) -> Option<Frontend> {
    let Destination { address, port, protocol } = *destination;
    /// The frontend that stands for none. An `Option` in its place would make LLVM use a register
    /// that holds nothing, which the verifier refuses to read.
    const NONE: Frontend = Frontend { service: NO_SERVICE, flags: FRONTEND_EXTERNAL };
    let of_address = maps.frontend(&FrontendKey::of_address(address, port, protocol)).unwrap_or(NONE);
    let found = if of_address.flags & FRONTEND_EXTERNAL != 0 && has_node_ports() {
        maps.frontend(&FrontendKey::of_node_port(port, protocol)).unwrap_or(of_address)
    } else {
        of_address
    };
    (found.service != NO_SERVICE).then_some(found)
}

/// Returns true if node ports are served at the address. A pod's loopback addresses are not the
/// node's.
#[inline(always)]
fn has_node_ports<F: Family>(maps: &impl Maps<F>, address: &F::Address, origin: Origin) -> bool {
    let Some(node_address) = maps.node_address(address) else { return false };
    node_address.flags & NODE_ADDRESS_LOOPBACK == 0 || origin == Origin::Host
}

/// The classification of a client by kube-proxy's `detectLocalMode`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(u32)]
pub enum Detected {
    /// The configuration does not tell pods from others.
    #[default]
    Unknown,
    Pod,
    NoPod,
}

/// Classifies the client of a packet by its address, or by the interface that the packet came in
/// by.
#[inline(always)]
pub fn detect<F: Family>(maps: &impl AffinityMaps<F>, address: &F::Address, interface: u32) -> Detected {
    let is_pod = match maps.pods_told_by() {
        PODS_BY_SOURCE => maps.is_in_pod_range(address),
        PODS_BY_INTERFACE => maps.brings_pods(interface),
        _ => return Detected::Unknown,
    };
    if is_pod { Detected::Pod } else { Detected::NoPod }
}

/// Returns true if the client is inside, so that the external traffic policy does not apply to it.
#[inline(always)]
pub fn is_inside(origin: Origin, detected: Detected) -> bool {
    origin == Origin::Host || detected == Detected::Pod
}

/// Returns true if kube-proxy would masquerade this client, which is no process of the node.
#[inline(always)]
pub fn kube_proxy_masquerades(frontend: Frontend, detected: Detected, all: bool) -> bool {
    if frontend.flags & FRONTEND_EXTERNAL == 0 {
        all || detected == Detected::NoPod
    } else {
        frontend.flags & FRONTEND_LOCAL_POLICY == 0
    }
}

/// Returns true if the frontend serves clients with this address.
#[inline(always)]
pub fn allows_source<F: Family>(
    maps: &impl AffinityMaps<F>,
    frontend: Frontend,
    client: &F::Address,
) -> bool {
    frontend.flags & FRONTEND_SOURCE_RANGES == 0 || maps.is_in_source_ranges(frontend.service, client)
}

/// Returns the slot of a backend for a new connection to `frontend`. `is_inside` is what
/// [`is_inside`] says of the client.
///
/// The affinity of `key` decides first. Without it `draw` decides.
#[inline(always)]
pub fn choose<F: Family>(
    maps: &impl AffinityMaps<F>,
    frontend: Frontend,
    is_inside: bool,
    key: &AffinityKey<F::Address>,
    draw: Draw,
) -> Result<F::Slot, Reason> {
    slot_at(maps, choose_index(maps, frontend, is_inside, key, draw)?)
}

/// Does what [`choose`] does, and returns the index of the backend's slot.
#[inline(always)]
pub(crate) fn choose_index<F: Family>(
    maps: &impl AffinityMaps<F>,
    frontend: Frontend,
    is_inside: bool,
    key: &AffinityKey<F::Address>,
    draw: Draw,
) -> Result<u32, Reason> {
    let service = maps.service(frontend.service).ok_or(Reason::ServiceGone)?;
    let set = set_with_endpoints(&service, frontend, is_inside)?;
    Ok(if service.affinity_seconds == 0 {
        draw.pick(maps, set)
    } else {
        affinity::index(maps, set, service.affinity_seconds, key, draw)
    })
}

/// Chooses as [`choose_index`] does, by the draw alone: affinity neither decides nor remembers.
#[inline(always)]
pub(crate) fn drawn_index<F: Family>(
    maps: &impl AffinityMaps<F>,
    frontend: Frontend,
    is_inside: bool,
    draw: Draw,
) -> Result<u32, Reason> {
    let service = maps.service(frontend.service).ok_or(Reason::ServiceGone)?;
    Ok(draw.pick(maps, set_with_endpoints(&service, frontend, is_inside)?))
}

#[inline(always)]
fn set_with_endpoints(service: &Service, frontend: Frontend, is_inside: bool) -> Result<EndpointSet, Reason> {
    let set = endpoint_set(service, frontend, is_inside);
    if set.count() != 0 {
        Ok(set)
    } else if service.flags & SERVICE_HAS_ENDPOINTS != 0 {
        Err(Reason::NoLocalEndpoints)
    } else {
        Err(Reason::NoEndpoints)
    }
}

/// Returns the slot that was chosen, unless it has gone out of use meanwhile.
#[inline(always)]
pub(crate) fn slot_at<F: Family>(maps: &impl Maps<F>, index: u32) -> Result<F::Slot, Reason> {
    let slot = maps.slot(index).ok_or(Reason::SlotGone)?;
    if slot.backend() == 0 { Err(Reason::SlotGone) } else { Ok(slot) }
}

#[inline(always)]
fn endpoint_set(service: &Service, frontend: Frontend, is_inside: bool) -> EndpointSet {
    if frontend.flags & FRONTEND_EXTERNAL == 0 {
        service.internal
    } else if is_inside {
        service.cluster
    } else {
        service.external
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{family::V4, map_access::host::HostMaps, port::Port};

    const VIP: [u8; 4] = [10, 96, 0, 1];
    const NODE: [u8; 4] = [192, 0, 2, 1];
    const LOOPBACK: [u8; 4] = [127, 0, 0, 1];
    const KEY: AffinityKey<[u8; 4]> =
        AffinityKey { service: 7, client: Client { address: [10, 244, 0, 9], origin: CLIENT_WORKLOAD } };

    /// The cluster set has backends 1, 2 and 3, of which 1 is local. The frontends are VIP:80 as a
    /// ClusterIP, and node port 30080.
    fn maps() -> HostMaps<V4> {
        let mut maps = HostMaps::<V4>::default();
        for id in 1..=3u32 {
            let slot = Slot4::new([10, 244, 0, id as u8], Port::new(8080), id, 0);
            maps.slots.insert(9 + id, slot);
        }
        let all = EndpointSet::new(10, 3);
        let local = EndpointSet::new(10, 1);
        let service = Service {
            cluster: all,
            internal: all,
            external: local,
            flags: SERVICE_HAS_ENDPOINTS,
            affinity_seconds: 0,
        };
        maps.services.insert(7, service);
        let cluster_ip = FrontendKey::of_address(VIP, Port::new(80), PROTOCOL_TCP);
        maps.frontends.insert(cluster_ip, Frontend { service: 7, flags: 0 });
        let node_port = FrontendKey::of_node_port(Port::new(30080), PROTOCOL_TCP);
        maps.frontends.insert(node_port, Frontend { service: 7, flags: FRONTEND_EXTERNAL });
        maps.node_addresses.insert(NODE, NodeAddress { flags: 0 });
        maps.node_addresses.insert(LOOPBACK, NodeAddress { flags: NODE_ADDRESS_LOOPBACK });
        maps
    }

    fn to(address: [u8; 4], port: u16) -> Destination<[u8; 4]> {
        Destination { address, port: Port::new(port), protocol: PROTOCOL_TCP }
    }

    #[rstest]
    #[case::cluster_ip(VIP, 80, Origin::Workload, true)]
    #[case::cluster_ip_other_port(VIP, 81, Origin::Workload, false)]
    #[case::node_port_from_pod(NODE, 30080, Origin::Workload, true)]
    #[case::node_port_from_outside(NODE, 30080, Origin::Outside, true)]
    #[case::node_port_on_loopback_from_host(LOOPBACK, 30080, Origin::Host, true)]
    #[case::node_port_on_a_pods_own_loopback(LOOPBACK, 30080, Origin::Workload, false)]
    #[case::node_port_on_an_address_of_nobody(VIP, 30080, Origin::Workload, false)]
    #[case::node_address_other_port(NODE, 80, Origin::Workload, false)]
    fn finds(#[case] address: [u8; 4], #[case] port: u16, #[case] origin: Origin, #[case] found: bool) {
        assert_eq!(find::<V4>(&maps(), &to(address, port), origin).is_some(), found);
    }

    /// Whoever creates a Service can write an address of the node into its `externalIPs`.
    #[rstest]
    #[case::the_number_of_a_node_port(30080, 7)]
    #[case::another_port(80, 8)]
    fn an_external_address_that_is_the_nodes_own(#[case] port: u16, #[case] service: u32) {
        let mut maps = maps();
        let external = FrontendKey::of_address(NODE, Port::new(port), PROTOCOL_TCP);
        maps.frontends.insert(external, Frontend { service: 8, flags: FRONTEND_EXTERNAL });
        let found = find::<V4>(&maps, &to(NODE, port), Origin::Outside).unwrap();
        assert_eq!(found.service, service);
    }

    #[rstest]
    #[case::lowest(0, 1)]
    #[case::end_of_first_third(0x5555_5555, 1)]
    #[case::start_of_second_third(0x5555_5556, 2)]
    #[case::highest(u32::MAX, 3)]
    fn random_bits_are_spread_over_the_set(#[case] random: u32, #[case] backend: u32) {
        let maps = maps();
        let frontend = find::<V4>(&maps, &to(VIP, 80), Origin::Workload).unwrap();
        assert_eq!(choose::<V4>(&maps, frontend, true, &KEY, Draw::random(random)).unwrap().backend, backend);
    }

    #[rstest]
    #[case::outside(Origin::Outside, Detected::NoPod, 1)]
    #[case::outside_where_pods_are_not_known(Origin::Outside, Detected::Unknown, 1)]
    #[case::a_pod_of_another_node(Origin::Outside, Detected::Pod, 3)]
    #[case::a_pod(Origin::Workload, Detected::Pod, 3)]
    #[case::a_pod_that_is_not_known_for_one(Origin::Workload, Detected::NoPod, 1)]
    #[case::a_pod_where_pods_are_not_known(Origin::Workload, Detected::Unknown, 1)]
    #[case::the_node(Origin::Host, Detected::Unknown, 3)]
    fn node_port_with_external_policy_local(
        #[case] origin: Origin,
        #[case] detected: Detected,
        #[case] highest: u32,
    ) {
        let maps = maps();
        let frontend = find::<V4>(&maps, &to(NODE, 30080), origin).unwrap();
        let is_inside = is_inside(origin, detected);
        assert_eq!(
            choose::<V4>(&maps, frontend, is_inside, &KEY, Draw::random(u32::MAX)).unwrap().backend,
            highest
        );
    }

    #[rstest]
    #[case::nothing_is_known(PODS_UNKNOWN, ([10, 244, 0, 0], 16), [10, 244, 0, 9], 5, Detected::Unknown)]
    #[case::in_the_range(PODS_BY_SOURCE, ([10, 244, 0, 0], 16), [10, 244, 255, 9], 9, Detected::Pod)]
    #[case::next_to_the_range(PODS_BY_SOURCE, ([10, 244, 0, 0], 16), [10, 245, 0, 0], 5, Detected::NoPod)]
    #[case::by_the_interface(PODS_BY_INTERFACE, ([0; 4], 0), [203, 0, 113, 1], 5, Detected::Pod)]
    #[case::by_another_interface(PODS_BY_INTERFACE, ([0; 4], 0), [10, 244, 0, 9], 9, Detected::NoPod)]
    fn pods_are_detected(
        #[case] told_by: u16,
        #[case] range: ([u8; 4], u32),
        #[case] address: [u8; 4],
        #[case] interface: u32,
        #[case] expected: Detected,
    ) {
        let maps = HostMaps::<V4> { pods_told_by: told_by, pod_range: range, pod_interface: 5, ..maps() };
        assert_eq!(detect(&maps, &address, interface), expected);
    }

    const CLUSTER_IP: u32 = 0;
    const POLICY_CLUSTER: u32 = FRONTEND_EXTERNAL;
    const POLICY_LOCAL: u32 = FRONTEND_EXTERNAL | FRONTEND_LOCAL_POLICY;

    /// kube-proxy's `TestInternalExternalMasquerade`, as its reference has it (5.4).
    #[rstest]
    #[case::pod_to_cluster_ip(CLUSTER_IP, Detected::Pod, false)]
    #[case::outside_to_cluster_ip(CLUSTER_IP, Detected::NoPod, true)]
    #[case::where_pods_are_not_known(CLUSTER_IP, Detected::Unknown, false)]
    #[case::pod_to_node_port(POLICY_CLUSTER, Detected::Pod, true)]
    #[case::outside_to_node_port(POLICY_CLUSTER, Detected::NoPod, true)]
    #[case::pod_with_policy_local(POLICY_LOCAL, Detected::Pod, false)]
    #[case::outside_with_policy_local(POLICY_LOCAL, Detected::NoPod, false)]
    fn whom_kube_proxy_masquerades(#[case] flags: u32, #[case] detected: Detected, #[case] expected: bool) {
        let frontend = Frontend { service: 7, flags };
        assert_eq!(kube_proxy_masquerades(frontend, detected, false), expected);
        assert_eq!(kube_proxy_masquerades(frontend, detected, true), expected || flags == CLUSTER_IP);
    }

    #[rstest]
    #[case::cluster_ip(VIP, 80, 1)]
    #[case::node_port(NODE, 30080, 3)]
    fn internal_policy_local(#[case] address: [u8; 4], #[case] port: u16, #[case] highest: u32) {
        let mut maps = maps();
        let service = maps.services.get_mut(&7).unwrap();
        service.internal = service.external;
        let frontend = find::<V4>(&maps, &to(address, port), Origin::Workload).unwrap();
        let chosen = choose::<V4>(&maps, frontend, true, &KEY, Draw::random(u32::MAX)).unwrap();
        assert_eq!(chosen.backend, highest);
    }

    #[rstest]
    #[case::nowhere(0, Reason::NoEndpoints)]
    #[case::elsewhere_only(SERVICE_HAS_ENDPOINTS, Reason::NoLocalEndpoints)]
    fn empty_set(#[case] flags: u32, #[case] reason: Reason) {
        let mut maps = maps();
        maps.services.insert(7, Service { flags, ..Service::default() });
        let frontend = find::<V4>(&maps, &to(VIP, 80), Origin::Workload).unwrap();
        assert_eq!(choose::<V4>(&maps, frontend, true, &KEY, Draw::random(5)), Err(reason));
    }

    #[test]
    fn service_or_slot_gone_refuses() {
        let mut maps = maps();
        let frontend = find::<V4>(&maps, &to(VIP, 80), Origin::Workload).unwrap();
        maps.slots.clear();
        assert_eq!(choose::<V4>(&maps, frontend, true, &KEY, Draw::random(5)), Err(Reason::SlotGone));
        maps.services.clear();
        assert_eq!(choose::<V4>(&maps, frontend, true, &KEY, Draw::random(5)), Err(Reason::ServiceGone));
    }
}
