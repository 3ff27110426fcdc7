//! The decisions of the socket hooks: what a connect() or sendmsg() to a service becomes, and which
//! address the application is shown afterwards.

use crate::{
    balance::Draw,
    family::{Destination, Family, Slot},
    layout::{
        Address, AffinityKey, Client, DatagramOrigins, FRONTEND_AFFINITY, FRONTEND_LEAST_CONNECTION,
        FRONTEND_LOCAL_POLICY, FRONTEND_SOURCE_RANGES, Frontend, PODS_BY_INTERFACE, PODS_UNKNOWN,
        PROTOCOL_TCP, SocketOrigin,
    },
    map_access::{AffinityMaps, Maps},
    port::Port,
    reason::Reason,
    select::{self, Origin},
    unserved,
};

/// Returns the backend that a socket is sent to, or the reason why it is sent to none.
#[inline(always)]
pub fn connect<F: Family>(
    maps: &impl AffinityMaps<F>,
    destination: &Destination<F::Address>,
    origin: Origin,
    random: u32,
) -> Result<SocketOrigin<F::Address>, Reason> {
    let Some(frontend) = select::find(maps, destination, origin) else {
        return Err(unserved::reason(maps, &destination.address));
    };
    if is_left_to_packets(maps, frontend, origin) {
        return Err(Reason::NotAService);
    }
    if !select::allows_source(maps, frontend, &maps.address_of_node()) {
        return Err(Reason::SourceNotAllowed);
    }
    let key = AffinityKey { service: frontend.service, client: Client::NODE };
    let is_inside = origin == Origin::Host || maps.pods_told_by() != PODS_UNKNOWN;
    // The source port is not chosen yet, and mostly the source address is not either.
    let draw = Draw::without_ends(frontend.flags, random);
    let slot = select::choose(maps, frontend, is_inside, &key, draw)?;
    let dialled = (destination.address, destination.port);
    let mut origin =
        SocketOrigin::new(dialled, (slot.address(), slot.port()), slot.backend(), frontend.service);
    if frontend.flags & FRONTEND_LEAST_CONNECTION != 0 {
        origin.count();
    }
    Ok(origin)
}

/// Returns true if the packets decide, because no hook knows from which address or by which
/// interface a pod's socket will send.
#[inline(always)]
fn is_left_to_packets<F: Family>(maps: &impl AffinityMaps<F>, frontend: Frontend, origin: Origin) -> bool {
    const BY_ADDRESS: u32 = FRONTEND_SOURCE_RANGES | FRONTEND_AFFINITY;
    let by_interface = || maps.pods_told_by() == PODS_BY_INTERFACE;
    origin != Origin::Host
        && (frontend.flags & BY_ADDRESS != 0
            || (frontend.flags & FRONTEND_LOCAL_POLICY != 0 && by_interface()))
}

/// Returns the backend that the socket's earlier datagrams to `destination` went to. There is none
/// if the backend is gone, or if the frontend belongs to another service now.
#[inline(always)]
pub fn remembered<F: Family>(
    maps: &impl Maps<F>,
    origins: &DatagramOrigins<F::Address>,
    destination: &Destination<F::Address>,
    client: Origin,
) -> Option<SocketOrigin<F::Address>> {
    for origin in &origins.origins {
        if origin.frontend_port() == destination.port && origin.frontend == destination.address {
            return still_serves(maps, origin, destination, client).then_some(*origin);
        }
    }
    None
}

/// Returns true if a datagram to `destination` goes to the backend that the socket is connected to.
///
/// The datagram names its destination although the socket is connected there. The kernel delivers
/// answers of no other backend to such a socket.
#[inline(always)]
pub fn remembered_peer<F: Family>(
    maps: &impl Maps<F>,
    origin: &SocketOrigin<F::Address>,
    destination: &Destination<F::Address>,
    client: Origin,
) -> bool {
    origin.frontend_port() == destination.port
        && origin.frontend == destination.address
        && still_serves(maps, origin, destination, client)
}

#[inline(always)]
fn still_serves<F: Family>(
    maps: &impl Maps<F>,
    origin: &SocketOrigin<F::Address>,
    destination: &Destination<F::Address>,
    client: Origin,
) -> bool {
    let Some(frontend) = select::find(maps, destination, client) else { return false };
    // Only a pod's packets can tell whether the pod is in the source ranges.
    let is_decided = client == Origin::Host || frontend.flags & FRONTEND_SOURCE_RANGES == 0;
    frontend.service == origin.service() && is_decided && maps.backend(origin.backend_id).is_some()
}

/// Returns true if a connected socket's backend no longer serves the frontend that was dialled.
/// Only user space calls it.
pub fn is_stale<F: Family>(
    maps: &impl Maps<F>,
    origin: &SocketOrigin<F::Address>,
    protocol: u8,
    client: Origin,
) -> bool {
    if protocol == PROTOCOL_TCP {
        // A connection stays with its backend, even if the frontend leads elsewhere now.
        return maps.backend(origin.backend_id).is_none();
    }
    let dialled = Destination { address: origin.frontend, port: origin.frontend_port(), protocol };
    !still_serves(maps, origin, &dialled, client)
}

/// Remembers the backend of a datagram. It replaces an origin with the same frontend or the same
/// backend, because both would answer alike, else the oldest one.
#[inline(always)]
pub fn remember<A: Address>(origins: &mut DatagramOrigins<A>, new: &SocketOrigin<A>) {
    for origin in &mut origins.origins {
        let same_frontend = origin.frontend_port() == new.frontend_port() && origin.frontend == new.frontend;
        let same_backend = origin.backend_port() == new.backend_port() && origin.backend == new.backend;
        if same_frontend || same_backend {
            *origin = *new;
            return;
        }
    }
    let oldest = origins.next as usize;
    for (index, origin) in origins.origins.iter_mut().enumerate() {
        if index == oldest {
            *origin = *new;
        }
    }
    origins.next = if oldest + 1 >= origins.origins.len() { 0 } else { origins.next + 1 };
}

/// Forgets the origins of the backend at `destination`, to which the application sends directly.
/// From now on the application is shown the backend's own address.
#[inline(always)]
pub fn clear_origins_of_backend<A: Address>(origins: &mut DatagramOrigins<A>, destination: &Destination<A>) {
    for origin in &mut origins.origins {
        let ports = origin.backend_port().number() ^ destination.port.number();
        if u64::from(ports) | origin.backend.difference(&destination.address) == 0 {
            origin.set_backend_port(Port::NONE);
            origin.set_frontend_port(Port::NONE);
        }
    }
}

/// Returns the frontend that the application dialled, if `peer` is the backend that it was given.
#[inline(always)]
pub fn shown<A: Address>(origin: &SocketOrigin<A>, peer: &A, port: Port) -> Option<(A, Port)> {
    (origin.backend_port() == port && origin.backend == *peer && origin.frontend_port() != Port::NONE)
        .then_some((origin.frontend, origin.frontend_port()))
}

/// Does what [`shown`] does, for all services that an unconnected socket talks to.
#[inline(always)]
pub fn shown_datagram<A: Address>(origins: &DatagramOrigins<A>, peer: &A, port: Port) -> Option<(A, Port)> {
    for origin in &origins.origins {
        if let Some(frontend) = shown(origin, peer, port) {
            return Some(frontend);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{
        family::V4,
        layout::{
            Backend, DATAGRAM_ORIGINS, EndpointSet, FRONTEND_EXTERNAL, FrontendKey, PODS_BY_SOURCE,
            PROTOCOL_UDP, Service, Slot4,
        },
        map_access::host::HostMaps,
    };

    fn origin(frontend: u8, backend: u8) -> SocketOrigin<[u8; 4]> {
        let frontend = ([10, 96, 0, frontend], Port::new(53));
        SocketOrigin::new(frontend, ([10, 244, 0, backend], Port::new(5353)), u32::from(backend), 1)
    }

    fn remembering(origins: &[(u8, u8)]) -> DatagramOrigins<[u8; 4]> {
        let mut all = DatagramOrigins::default();
        for (frontend, backend) in origins {
            remember(&mut all, &origin(*frontend, *backend));
        }
        all
    }

    fn udp(address: [u8; 4], port: u16) -> Destination<[u8; 4]> {
        Destination { address, port: Port::new(port), protocol: PROTOCOL_UDP }
    }

    #[rstest]
    #[case::backend_exists(&[(1, 1)], &[1], Some(1))]
    #[case::backend_gone(&[(1, 1)], &[], None)]
    #[case::never_sent_there(&[(2, 1)], &[1], None)]
    #[case::one_of_several(&[(2, 2), (1, 1), (3, 3)], &[1, 2, 3], Some(1))]
    fn datagrams_stay_with_their_backend(
        #[case] sent: &[(u8, u8)],
        #[case] alive: &[u32],
        #[case] expected: Option<u32>,
    ) {
        let maps = maps(alive, 1);
        let found = remembered(&maps, &remembering(sent), &udp([10, 96, 0, 1], 53), Origin::Workload);
        assert_eq!(found.map(|o| o.backend_id), expected);
    }

    /// The frontend 10.96.0.1:53 of `service`, and backends.
    fn maps(backends: &[u32], service: u32) -> HostMaps<V4> {
        let mut maps = HostMaps::<V4>::default();
        for id in backends {
            maps.backends.insert(*id, Backend::default());
        }
        let key = FrontendKey::of_address([10, 96, 0, 1], Port::new(53), PROTOCOL_UDP);
        maps.frontends.insert(key, Frontend { service, flags: 0 });
        maps
    }

    #[rstest]
    #[case::to_the_frontend([10, 96, 0, 1], Ok(origin(1, 1)))]
    #[case::to_an_address_of_nobody([10, 96, 0, 2], Err(Reason::NotAService))]
    fn a_socket_connects_to_a_backend(
        #[case] address: [u8; 4],
        #[case] expected: Result<SocketOrigin<[u8; 4]>, Reason>,
    ) {
        let mut maps = maps(&[1], 1);
        let internal = EndpointSet::new(4, 1);
        maps.services.insert(1, Service { internal, ..Service::default() });
        maps.slots.insert(4, Slot4::new([10, 244, 0, 1], Port::new(5353), 1, 0));
        assert_eq!(connect(&maps, &udp(address, 53), Origin::Workload, 0), expected);
    }

    #[rstest]
    #[case::by_random(0, false)]
    #[case::by_least_connection(FRONTEND_LEAST_CONNECTION, true)]
    fn a_socket_that_is_counted_stays_its_services(#[case] flags: u32, #[case] is_counted: bool) {
        let mut maps = maps(&[1], 1);
        for frontend in maps.frontends.values_mut() {
            frontend.flags = flags;
        }
        let internal = EndpointSet::new(4, 1);
        maps.services.insert(1, Service { internal, ..Service::default() });
        maps.slots.insert(4, Slot4::new([10, 244, 0, 1], Port::new(5353), 1, 0));
        let to = udp([10, 96, 0, 1], 53);
        let connected = connect(&maps, &to, Origin::Workload, 0).unwrap();
        assert_eq!((connected.service(), connected.is_counted()), (1, is_counted));
        assert!(remembered_peer(&maps, &connected, &to, Origin::Workload));
        let mut closed = connected;
        closed.stop_counting();
        assert_eq!(closed, origin(1, 1));
    }

    const EXTERNAL_LOCAL: u32 = FRONTEND_EXTERNAL | FRONTEND_LOCAL_POLICY;

    /// Backend 1 is on this node, 2 elsewhere.
    #[rstest]
    #[case::affinity(FRONTEND_AFFINITY, PODS_UNKNOWN, Origin::Workload, Err(Reason::NotAService))]
    #[case::affinity_of_the_node(FRONTEND_AFFINITY, PODS_UNKNOWN, Origin::Host, Ok(2))]
    #[case::policy_local(EXTERNAL_LOCAL, PODS_BY_SOURCE, Origin::Workload, Ok(2))]
    #[case::where_pods_are_not_known(EXTERNAL_LOCAL, PODS_UNKNOWN, Origin::Workload, Ok(1))]
    #[case::where_interfaces_tell(
        EXTERNAL_LOCAL,
        PODS_BY_INTERFACE,
        Origin::Workload,
        Err(Reason::NotAService)
    )]
    #[case::the_node(EXTERNAL_LOCAL, PODS_UNKNOWN, Origin::Host, Ok(2))]
    #[case::policy_cluster(FRONTEND_EXTERNAL, PODS_BY_INTERFACE, Origin::Workload, Ok(2))]
    fn by_whom_and_how_pods_are_told(
        #[case] flags: u32,
        #[case] pods_told_by: u16,
        #[case] origin: Origin,
        #[case] expected: Result<u32, Reason>,
    ) {
        let mut maps = HostMaps::<V4> { pods_told_by, ..maps(&[1, 2], 1) };
        for frontend in maps.frontends.values_mut() {
            frontend.flags = flags;
        }
        let all = EndpointSet::new(4, 2);
        let external = EndpointSet::new(4, 1);
        let service = Service { cluster: all, internal: all, external, ..Service::default() };
        maps.services.insert(1, service);
        for id in [1, 2] {
            maps.slots.insert(3 + id, Slot4::new([10, 244, 0, id as u8], Port::new(5353), id, 0));
        }
        let connected = connect(&maps, &udp([10, 96, 0, 1], 53), origin, u32::MAX);
        assert_eq!(connected.map(|origin| origin.backend_id), expected);
    }

    #[rstest]
    #[case::the_node_is_in_a_range(Origin::Host, &[([192, 0, 2, 0], 25)], Ok(1))]
    #[case::the_node_is_in_none(Origin::Host, &[([192, 0, 2, 128], 25)], Err(Reason::SourceNotAllowed))]
    #[case::no_range_of_this_family_is_left(Origin::Host, &[], Err(Reason::SourceNotAllowed))]
    #[case::a_pods_packets_decide(Origin::Workload, &[([0; 4], 0)], Err(Reason::NotAService))]
    fn where_a_service_names_source_ranges(
        #[case] origin: Origin,
        #[case] ranges: &[([u8; 4], u32)],
        #[case] expected: Result<u32, Reason>,
    ) {
        let mut maps = maps(&[1], 1);
        let to = udp([10, 96, 0, 1], 53);
        let key = FrontendKey::of_address(to.address, to.port, to.protocol);
        let flags = FRONTEND_EXTERNAL | FRONTEND_SOURCE_RANGES;
        maps.frontends.insert(key, Frontend { service: 1, flags });
        let cluster = EndpointSet::new(4, 1);
        maps.services.insert(1, Service { cluster, ..Service::default() });
        maps.slots.insert(4, Slot4::new([10, 244, 0, 1], Port::new(5353), 1, 0));
        maps.address_of_node = [192, 0, 2, 11];
        maps.source_ranges.insert(1, ranges.to_vec());
        assert_eq!(connect(&maps, &to, origin, 0).map(|origin| origin.backend_id), expected);
    }

    #[test]
    fn datagrams_leave_the_backend_when_their_frontend_is_removed_or_passes_to_another_service() {
        let (sent, to) = (remembering(&[(1, 1)]), udp([10, 96, 0, 1], 53));
        assert!(remembered(&maps(&[1], 1), &sent, &to, Origin::Workload).is_some());
        assert_eq!(remembered(&maps(&[1], 2), &sent, &to, Origin::Workload), None);
        let mut removed = maps(&[1], 1);
        removed.frontends.clear();
        assert_eq!(remembered(&removed, &sent, &to, Origin::Workload), None);
    }

    #[rstest]
    #[case::of_a_pod(Origin::Workload, false)]
    #[case::of_the_node(Origin::Host, true)]
    fn a_socket_keeps_its_backend_when_source_ranges_come(#[case] client: Origin, #[case] keeps: bool) {
        let (sent, to) = (remembering(&[(1, 1)]), udp([10, 96, 0, 1], 53));
        let mut maps = maps(&[1], 1);
        for frontend in maps.frontends.values_mut() {
            frontend.flags = FRONTEND_EXTERNAL | FRONTEND_SOURCE_RANGES;
        }
        assert_eq!(remembered(&maps, &sent, &to, client).is_some(), keeps);
        assert_eq!(is_stale(&maps, &origin(1, 1), PROTOCOL_UDP, client), !keeps);
    }

    #[rstest]
    #[case::where_it_is_connected_to([10, 96, 0, 1], 1, true)]
    #[case::another_address([10, 96, 0, 2], 1, false)]
    #[case::the_frontend_is_of_another_service([10, 96, 0, 1], 2, false)]
    fn a_connected_socket_names_its_peer(
        #[case] address: [u8; 4],
        #[case] service: u32,
        #[case] expected: bool,
    ) {
        let to = udp(address, 53);
        assert_eq!(remembered_peer(&maps(&[1], service), &origin(1, 1), &to, Origin::Workload), expected);
        assert!(!remembered_peer(&maps(&[], service), &origin(1, 1), &to, Origin::Workload));
    }

    #[rstest]
    #[case::all_is_as_it_was(PROTOCOL_UDP, &[1], 1, false)]
    #[case::the_backend_is_gone(PROTOCOL_UDP, &[2], 1, true)]
    #[case::the_frontend_is_of_another_service(PROTOCOL_UDP, &[1], 2, true)]
    #[case::the_backend_of_a_connection_is_gone(PROTOCOL_TCP, &[2], 1, true)]
    #[case::a_connection_stays_with_its_backend(PROTOCOL_TCP, &[1], 2, false)]
    fn sockets_whose_backend_is_gone(
        #[case] protocol: u8,
        #[case] backends: &[u32],
        #[case] service: u32,
        #[case] expected: bool,
    ) {
        let maps = maps(backends, service);
        assert_eq!(is_stale(&maps, &origin(1, 1), protocol, Origin::Workload), expected);
    }

    #[rstest]
    #[case::answer_of_the_backend(&[(1, 1)], [10, 244, 0, 1], Some([10, 96, 0, 1]))]
    #[case::stranger(&[(1, 1)], [10, 244, 0, 9], None)]
    #[case::second_service(&[(1, 1), (2, 2)], [10, 244, 0, 2], Some([10, 96, 0, 2]))]
    #[case::backend_serves_the_later_service(&[(1, 1), (2, 1)], [10, 244, 0, 1], Some([10, 96, 0, 2]))]
    #[case::service_moved_to_another_backend(&[(1, 1), (1, 2)], [10, 244, 0, 1], None)]
    fn answers_show_the_frontend(
        #[case] sent: &[(u8, u8)],
        #[case] peer: [u8; 4],
        #[case] expected: Option<[u8; 4]>,
    ) {
        assert_eq!(
            shown_datagram(&remembering(sent), &peer, Port::new(5353)).map(|(address, _)| address),
            expected
        );
    }

    #[test]
    fn the_oldest_service_makes_room() {
        let many: Vec<(u8, u8)> = (1..=DATAGRAM_ORIGINS as u8 + 1).map(|n| (n, n)).collect();
        let origins = remembering(&many);
        assert_eq!(shown_datagram(&origins, &[10, 244, 0, 1], Port::new(5353)), None);
        for (frontend, backend) in &many[1..] {
            assert_eq!(
                shown_datagram(&origins, &[10, 244, 0, *backend], Port::new(5353)),
                Some(([10, 96, 0, *frontend], Port::new(53)))
            );
        }
    }

    #[test]
    fn sending_to_the_backend_itself_shows_the_backend() {
        let mut origins = remembering(&[(1, 1), (2, 2)]);
        clear_origins_of_backend(&mut origins, &udp([10, 244, 0, 1], 5353));
        assert_eq!(shown_datagram(&origins, &[10, 244, 0, 1], Port::new(5353)), None);
        assert!(shown_datagram(&origins, &[10, 244, 0, 2], Port::new(5353)).is_some());
    }

    #[test]
    fn an_unused_origin_shows_nothing() {
        assert_eq!(shown_datagram(&DatagramOrigins::<[u8; 4]>::default(), &[0; 4], Port::NONE), None);
    }
}
