//! The decision about clients that dial no frontend.

use crate::{
    family::Family,
    layout::{FrontendKey, PROTOCOL_UDP},
    map_access::{AffinityMaps, Maps},
    reason::Reason,
};

/// Returns the reason for a new connection to this address that has no frontend.
#[inline(always)]
pub fn reason<F: Family>(maps: &impl AffinityMaps<F>, address: &F::Address) -> Reason {
    let reason = if maps.frontend(&FrontendKey::of_cluster_ip(*address)).is_some() {
        Reason::UnknownPort
    } else if maps.is_in_service_cidrs(address) {
        Reason::UnallocatedAddress
    } else {
        return Reason::NotAService;
    };
    if is_of_node(maps, address) { Reason::NotAService } else { reason }
}

/// Returns the reason for a socket that connects. A datagram socket may connect to a port that no
/// service port has, because that sends nothing.
///
/// Resolvers connect only to learn by which source address a destination would be reached.
#[inline(always)]
pub fn at_connect(reason: Reason, protocol: u8) -> Reason {
    if is_datagram_to_nobody(reason, protocol) { Reason::NotAService } else { reason }
}

/// Returns true for a datagram that is refused only because no service port has its destination.
/// Such a datagram may be an answer.
#[inline(always)]
pub fn is_datagram_to_nobody(reason: Reason, protocol: u8) -> bool {
    protocol == PROTOCOL_UDP && matches!(reason, Reason::UnknownPort | Reason::UnallocatedAddress)
}

/// Returns true if the address is a ClusterIP that the node does not have itself.
#[inline(always)]
pub fn is_cluster_ip<F: Family>(maps: &impl Maps<F>, address: &F::Address) -> bool {
    maps.frontend(&FrontendKey::of_cluster_ip(*address)).is_some() && !is_of_node(maps, address)
}

/// Returns true if the node has the address. Such an address is never refused, for two reasons: a
/// DNS cache listens at the ClusterIP that it stands in for, and a Service with the node's own
/// address must not lock the node out.
#[inline(always)]
fn is_of_node<F: Family>(maps: &impl Maps<F>, address: &F::Address) -> bool {
    maps.node_address(address).is_some()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{
        family::V4,
        layout::{Frontend, NodeAddress, PROTOCOL_TCP},
        map_access::host::HostMaps,
        port::Port,
        select::{self, Origin},
        socket,
    };

    const CLUSTER_IP: [u8; 4] = [10, 96, 0, 1];
    const CLUSTER_IP_OF_NODE: [u8; 4] = [10, 96, 0, 10];
    const UNALLOCATED: [u8; 4] = [10, 96, 0, 7];
    const UNALLOCATED_OF_NODE: [u8; 4] = [10, 96, 0, 8];
    const ELSEWHERE: [u8; 4] = [10, 97, 0, 1];

    fn maps() -> HostMaps<V4> {
        let mut maps = HostMaps::<V4> { service_cidrs: vec![([10, 96, 0, 0], 24)], ..HostMaps::default() };
        for address in [CLUSTER_IP, CLUSTER_IP_OF_NODE] {
            maps.frontends.insert(FrontendKey::of_cluster_ip(address), Frontend::NONE);
        }
        for address in [CLUSTER_IP_OF_NODE, UNALLOCATED_OF_NODE] {
            maps.node_addresses.insert(address, NodeAddress { flags: 0 });
        }
        maps
    }

    #[rstest]
    #[case::cluster_ip(CLUSTER_IP, Reason::UnknownPort)]
    #[case::cluster_ip_that_the_node_has(CLUSTER_IP_OF_NODE, Reason::NotAService)]
    #[case::unallocated(UNALLOCATED, Reason::UnallocatedAddress)]
    #[case::unallocated_that_the_node_has(UNALLOCATED_OF_NODE, Reason::NotAService)]
    #[case::elsewhere(ELSEWHERE, Reason::NotAService)]
    fn who_serves_nobody(#[case] address: [u8; 4], #[case] expected: Reason) {
        let maps = maps();
        assert_eq!(reason::<V4>(&maps, &address), expected);
        assert_eq!(is_cluster_ip::<V4>(&maps, &address), expected == Reason::UnknownPort);
        for (protocol, port) in [(PROTOCOL_TCP, 81), (PROTOCOL_UDP, 81), (PROTOCOL_TCP, 0)] {
            let destination = crate::family::Destination { address, port: Port::new(port), protocol };
            assert_eq!(select::find::<V4>(&maps, &destination, Origin::Workload), None);
            let dialled = socket::connect::<V4>(&maps, &destination, Origin::Workload, 0);
            assert_eq!(dialled, Err(expected));
        }
    }

    #[rstest]
    #[case::segments(PROTOCOL_TCP, Reason::UnknownPort, Reason::UnknownPort)]
    #[case::datagrams(PROTOCOL_UDP, Reason::UnknownPort, Reason::NotAService)]
    #[case::datagrams_to_nobody(PROTOCOL_UDP, Reason::UnallocatedAddress, Reason::NotAService)]
    #[case::datagrams_to_a_service(PROTOCOL_UDP, Reason::NoEndpoints, Reason::NoEndpoints)]
    fn datagram_sockets_may_connect_anywhere(
        #[case] protocol: u8,
        #[case] reason: Reason,
        #[case] expected: Reason,
    ) {
        assert_eq!(at_connect(reason, protocol), expected);
    }
}
