//! Describes how the maps of IPv4 and IPv6 differ.

use std::{
    fmt::Debug,
    hash::Hash,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use aya::Pod;
use proxy_common::{
    family::{self, V4, V6},
    inventory::map_name,
};

use crate::model::objects;

/// One address family, as the controller and the maps see it.
pub(crate) trait MapFamily:
    family::Family<Address: Pod + Hash + Ord + Send + Debug, Slot: Pod + PartialEq + Send + Debug>
{
    const FAMILY: objects::IpFamily;
    /// Names of the family's maps.
    const FRONTENDS: &'static str;
    const FRONTEND_ADDRESSES: &'static str;
    const SLOTS: &'static str;
    const BACKENDS: &'static str;
    const FLOWS: &'static str;
    const OPENING_FLOWS: &'static str;
    const AFFINITY: &'static str;
    const SOURCE_RANGES: &'static str;
    const SERVICE_CIDRS: &'static str;
    const NODE_ADDRESSES: &'static str;
    const SOCKET_ORIGIN: &'static str;

    /// Returns the address, or `None` if it is of the other family.
    fn address(address: IpAddr) -> Option<Self::Address>;
    fn ip(address: Self::Address) -> IpAddr;
}

impl MapFamily for V4 {
    const FAMILY: objects::IpFamily = objects::IpFamily::Ipv4;
    const FRONTENDS: &'static str = map_name::frontends4;
    const FRONTEND_ADDRESSES: &'static str = map_name::frontend_addresses4;
    const SLOTS: &'static str = map_name::slots4;
    const BACKENDS: &'static str = map_name::backends4;
    const FLOWS: &'static str = map_name::flows4;
    const OPENING_FLOWS: &'static str = map_name::opening_flows4;
    const AFFINITY: &'static str = map_name::affinity4;
    const SOURCE_RANGES: &'static str = map_name::source_ranges4;
    const SERVICE_CIDRS: &'static str = map_name::service_cidrs4;
    const NODE_ADDRESSES: &'static str = map_name::node_addresses4;
    const SOCKET_ORIGIN: &'static str = map_name::socket_origin4;

    fn address(address: IpAddr) -> Option<[u8; 4]> {
        match address {
            IpAddr::V4(address) => Some(address.octets()),
            IpAddr::V6(_) => None,
        }
    }

    fn ip(address: [u8; 4]) -> IpAddr {
        Ipv4Addr::from(address).into()
    }
}

impl MapFamily for V6 {
    const FAMILY: objects::IpFamily = objects::IpFamily::Ipv6;
    const FRONTENDS: &'static str = map_name::frontends6;
    const FRONTEND_ADDRESSES: &'static str = map_name::frontend_addresses6;
    const SLOTS: &'static str = map_name::slots6;
    const BACKENDS: &'static str = map_name::backends6;
    const FLOWS: &'static str = map_name::flows6;
    const OPENING_FLOWS: &'static str = map_name::opening_flows6;
    const AFFINITY: &'static str = map_name::affinity6;
    const SOURCE_RANGES: &'static str = map_name::source_ranges6;
    const SERVICE_CIDRS: &'static str = map_name::service_cidrs6;
    const NODE_ADDRESSES: &'static str = map_name::node_addresses6;
    const SOCKET_ORIGIN: &'static str = map_name::socket_origin6;

    fn address(address: IpAddr) -> Option<[u8; 16]> {
        match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(address) => Some(address.octets()),
        }
    }

    fn ip(address: [u8; 16]) -> IpAddr {
        Ipv6Addr::from(address).into()
    }
}
