//! Describes how the maps of IPv4 and IPv6 differ.

use std::{
    fmt::Debug,
    hash::Hash,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use aya::Pod;
use proxy_common::{
    family::{self, V4, V6},
    inventory::table,
};

use crate::model::objects;

/// One address family, as the controller and the maps see it.
pub(crate) trait TableFamily:
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

impl TableFamily for V4 {
    const FAMILY: objects::IpFamily = objects::IpFamily::Ipv4;
    const FRONTENDS: &'static str = table::frontends4;
    const FRONTEND_ADDRESSES: &'static str = table::frontend_addresses4;
    const SLOTS: &'static str = table::slots4;
    const BACKENDS: &'static str = table::backends4;
    const FLOWS: &'static str = table::flows4;
    const OPENING_FLOWS: &'static str = table::opening_flows4;
    const AFFINITY: &'static str = table::affinity4;
    const SOURCE_RANGES: &'static str = table::source_ranges4;
    const SERVICE_CIDRS: &'static str = table::service_cidrs4;
    const NODE_ADDRESSES: &'static str = table::node_addresses4;
    const SOCKET_ORIGIN: &'static str = table::socket_origin4;

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

impl TableFamily for V6 {
    const FAMILY: objects::IpFamily = objects::IpFamily::Ipv6;
    const FRONTENDS: &'static str = table::frontends6;
    const FRONTEND_ADDRESSES: &'static str = table::frontend_addresses6;
    const SLOTS: &'static str = table::slots6;
    const BACKENDS: &'static str = table::backends6;
    const FLOWS: &'static str = table::flows6;
    const OPENING_FLOWS: &'static str = table::opening_flows6;
    const AFFINITY: &'static str = table::affinity6;
    const SOURCE_RANGES: &'static str = table::source_ranges6;
    const SERVICE_CIDRS: &'static str = table::service_cidrs6;
    const NODE_ADDRESSES: &'static str = table::node_addresses6;
    const SOCKET_ORIGIN: &'static str = table::socket_origin6;

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
