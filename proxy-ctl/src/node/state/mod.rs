//! Converts netlink messages into the node's links, addresses and default routes, and these into a
//! [`NodeNetwork`]. This module has no side effects.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressFlags, AddressMessage, AddressScope},
    link::{InfoData, InfoKind, InfoVlan, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage},
    route::{RouteAttribute, RouteHeader, RouteMessage, RouteType},
};

use super::interfaces::{LinkFacts, LinkKind, Master, role};
use crate::{
    config::Interfaces,
    model::node::{Device, Interface, NodeNetwork, Role, Vlan},
    names::IPVS_DEVICE,
};

#[derive(Clone, Debug, Eq, PartialEq)]
struct Link {
    name: String,
    loopback: bool,
    ethernet: bool,
    mtu: u32,
    address: Option<[u8; 6]>,
    is_up: bool,
    kind: LinkKind,
    /// The index of the device that it is a port of.
    master: Option<u32>,
    vlan: Option<Vlan>,
    /// The network namespace of the other end, as in [`Interface::namespace`].
    namespace: Option<u32>,
}

impl Link {
    fn device(&self) -> Device {
        match (self.vlan, self.kind) {
            (Some(vlan), _) => Device::Vlan(vlan),
            (None, LinkKind::Physical) => Device::Card,
            (None, LinkKind::Bond) => Device::Bond,
            (
                None,
                LinkKind::Pair
                | LinkKind::Tun
                | LinkKind::Bridge
                | LinkKind::Vrf
                | LinkKind::Sink
                | LinkKind::Network,
            ) => Device::Other,
        }
    }
}

/// The properties of an address of an interface.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Assignment {
    prefix_length: u8,
    /// True if the kernel may choose it as a source when it masquerades.
    is_source: bool,
    /// The position of the address among those of the interface, in the kernel's order.
    position: u32,
}

/// The facts about the node that come from the cluster and the configuration.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Surroundings {
    /// The addresses of the own Node, in order of preference. Empty as long as they are not known.
    pub(super) node_addresses: Vec<IpAddr>,
    /// The ranges of pod addresses.
    pub(super) pod_ranges: Vec<IpNet>,
    pub(super) interfaces: Interfaces,
}

/// A default route. The order is by metric, so that the best route is first.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct DefaultRoute {
    v6: bool,
    metric: u32,
    interface: u32,
}

/// The links, addresses and default routes from all netlink messages so far.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct State {
    links: BTreeMap<u32, Link>,
    addresses: BTreeMap<(u32, IpAddr), Assignment>,
    next_position: u32,
    default_routes: BTreeSet<DefaultRoute>,
    /// True once CNI's bandwidth plugin has made a device.
    limits_bandwidth: bool,
}

/// The beginning of the names of devices that CNI's bandwidth plugin makes, one for each pod that
/// it limits.
const LIMITING_DEVICE: &str = "bwp";

impl State {
    /// Applies a message of a dump or of a change.
    pub(super) fn apply(&mut self, message: &RouteNetlinkMessage) {
        #[expect(clippy::wildcard_enum_match_arm, reason = "some sixty other kinds of messages")]
        match message {
            RouteNetlinkMessage::NewLink(link) if is_whole(link) => {
                let index = link.header.index;
                let found = parse_link(link);
                self.limits_bandwidth |=
                    found.kind == LinkKind::Sink && found.name.starts_with(LIMITING_DEVICE);
                self.links.insert(index, found);
                // IPv4 routes of a link that goes down vanish without a message.
                if !link.header.flags.contains(LinkFlags::Up) {
                    self.default_routes.retain(|route| route.interface != index);
                }
            }
            RouteNetlinkMessage::DelLink(link) if is_whole(link) => {
                let index = link.header.index;
                self.links.remove(&index);
                self.addresses.retain(|(interface, _), _| *interface != index);
                self.default_routes.retain(|route| route.interface != index);
            }
            RouteNetlinkMessage::NewAddress(address) => {
                if let Some((key, assignment)) = parse_address(address) {
                    self.assign(key, assignment);
                }
            }
            RouteNetlinkMessage::DelAddress(address) => {
                if let Some((key, _)) = parse_address(address) {
                    self.addresses.remove(&key);
                }
            }
            RouteNetlinkMessage::NewRoute(route) => self.default_routes.extend(parse_default_route(route)),
            RouteNetlinkMessage::DelRoute(route) => {
                for gone in parse_default_route(route) {
                    self.default_routes.remove(&gone);
                }
            }
            _ => {}
        }
    }

    /// Replaces the state by a new list. `limits_bandwidth` stays true even if the devices are
    /// gone.
    pub(super) fn replace(&mut self, listed: Self) {
        let limits_bandwidth = self.limits_bandwidth | listed.limits_bandwidth;
        *self = Self { limits_bandwidth, ..listed };
    }

    fn assign(&mut self, key: (u32, IpAddr), assignment: Assignment) {
        let former = self.addresses.get(&key);
        // The kernel puts an address that becomes primary behind the others.
        let position = match former.filter(|former| former.is_source || !assignment.is_source) {
            Some(former) => former.position,
            None => {
                self.next_position += 1;
                self.next_position
            }
        };
        self.addresses.insert(key, Assignment { position, ..assignment });
    }

    pub(super) fn host(&self, around: &Surroundings) -> NodeNetwork {
        let node_addresses = &around.node_addresses;
        let uplinks: BTreeSet<u32> = self
            .own_addresses()
            .filter(|(_, address)| node_addresses.contains(address))
            .map(|(index, _)| *index)
            .chain(self.default_routes.iter().map(|route| route.interface))
            .collect();
        let interfaces = self.links.iter().filter_map(|(index, link)| {
            let (role, reason) = role(&self.facts(*index, link, &uplinks, around)).ok()?;
            Some(Interface {
                index: *index,
                name: link.name.clone(),
                role,
                reason,
                ethernet: link.ethernet,
                device: link.device(),
                mtu: link.mtu,
                link_address: link.address,
                is_up: role == Role::Uplink || link.is_up,
                has_vlans: self
                    .links
                    .values()
                    .any(|other| other.vlan.is_some_and(|vlan| vlan.below == *index)),
                bridge: self.bridge_of(link).map(|(_, bridge)| bridge.name.clone()),
                namespace: link.namespace.filter(|_| link.kind == LinkKind::Pair),
                masquerade_addresses: match role {
                    Role::Uplink => self.masquerade_by(*index, link, node_addresses),
                    Role::Workload => Vec::new(),
                },
            })
        });
        let masquerade = [false, true].into_iter().filter_map(|v6| self.masquerade(v6, node_addresses));
        NodeNetwork {
            addresses: self.own_addresses().map(|(_, ip)| *ip).filter(is_routable).collect(),
            masquerade_addresses: masquerade.collect(),
            interfaces: interfaces.collect(),
            limits_bandwidth: self.limits_bandwidth,
        }
    }

    /// Returns all addresses but those of Services.
    fn own_addresses(&self) -> impl Iterator<Item = &(u32, IpAddr)> {
        self.addresses.keys().filter(|(index, _)| !self.is_of_services(*index))
    }

    /// Returns true for the device to which kube-proxy's mode ipvs gives the addresses of Services.
    fn is_of_services(&self, index: u32) -> bool {
        self.links.get(&index).is_some_and(|link| link.name == IPVS_DEVICE)
    }

    fn facts(&self, index: u32, link: &Link, uplinks: &BTreeSet<u32>, around: &Surroundings) -> LinkFacts {
        let is_own_network = |ip: &IpAddr, assignment: &Assignment| {
            let whole = if ip.is_ipv4() { 32 } else { 128 };
            assignment.prefix_length < whole
                && assignment.is_source
                && !around.pod_ranges.iter().any(|range| range.contains(ip))
        };
        LinkFacts {
            loopback: link.loopback,
            kind: link.kind,
            master: link.master.map(|master| self.master(master, uplinks)),
            node_address: !self.is_of_services(index)
                && self.addresses_of(index).any(|(ip, _)| around.node_addresses.contains(ip)),
            default_route: self.default_routes.iter().any(|route| route.interface == index),
            own_network: self.addresses_of(index).any(|(ip, assignment)| is_own_network(ip, assignment)),
            configured: around.interfaces.role(&link.name),
        }
    }

    fn addresses_of(&self, index: u32) -> impl Iterator<Item = (&IpAddr, &Assignment)> {
        let of_this = (index, IpAddr::from([0; 4]))..(index + 1, IpAddr::from([0; 4]));
        self.addresses.range(of_this).map(|((_, ip), assignment)| (ip, assignment))
    }

    /// Returns the source addresses for packets that are masqueraded and leave by this interface.
    /// There is one of the interface's own for each family, preferably the Node's. A port of a
    /// bridge that has none of its own uses the addresses of the bridge.
    fn masquerade_by(&self, index: u32, link: &Link, node_addresses: &[IpAddr]) -> Vec<IpAddr> {
        let bridge = self.bridge_of(link).map(|(index, _)| index);
        let source = |v6: bool| {
            let of = |index: u32| self.source_on(index, v6, node_addresses);
            of(index).or_else(|| bridge.and_then(of))
        };
        [false, true].into_iter().filter_map(source).collect()
    }

    /// Returns the bridge that an interface is a port of, with its index.
    fn bridge_of(&self, port: &Link) -> Option<(u32, &Link)> {
        let index = port.master?;
        self.links.get(&index).filter(|master| master.kind == LinkKind::Bridge).map(|bridge| (index, bridge))
    }

    fn source_on(&self, index: u32, v6: bool, node_addresses: &[IpAddr]) -> Option<IpAddr> {
        let sources = || self.addresses_of(index).filter(|(ip, of)| ip.is_ipv6() == v6 && of.is_source);
        let of_node = node_addresses.iter().find(|node| sources().any(|(ip, _)| ip == *node));
        of_node.or_else(|| sources().min_by_key(|(_, of)| of.position).map(|(ip, _)| ip)).copied()
    }

    fn master(&self, index: u32, uplinks: &BTreeSet<u32>) -> Master {
        match self.links.get(&index).map(|link| link.kind) {
            Some(LinkKind::Bond) => Master::Bond,
            Some(LinkKind::Bridge) => Master::Bridge(uplinks.contains(&index)),
            Some(
                LinkKind::Physical
                | LinkKind::Pair
                | LinkKind::Tun
                | LinkKind::Vrf
                | LinkKind::Sink
                | LinkKind::Network,
            )
            | None => Master::Other,
        }
    }

    /// Returns the Node's address if this machine has it. Otherwise returns an address of the
    /// interface that the default route leaves by.
    fn masquerade(&self, v6: bool, node_addresses: &[IpAddr]) -> Option<IpAddr> {
        let local = |ip: &IpAddr| self.own_addresses().any(|(_, address)| address == ip);
        let of_node = node_addresses.iter().find(|ip| ip.is_ipv6() == v6 && !ip.is_loopback() && local(ip));
        let by_route = || {
            let route = self.default_routes.iter().find(|route| route.v6 == v6)?;
            let of_uplink = self.own_addresses().filter(|(index, _)| *index == route.interface);
            of_uplink.map(|(_, ip)| ip).find(|ip| ip.is_ipv6() == v6 && is_routable(ip))
        };
        of_node.or_else(by_route).copied()
    }
}

/// Returns false for link-local IPv6 addresses, which are only valid together with an interface.
fn is_routable(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(_) => true,
        IpAddr::V6(address) => !address.is_unicast_link_local(),
    }
}

/// Returns true if the message is about a whole link. Messages of the bridge family are about
/// ports: a deletion there does not delete the link.
fn is_whole(link: &LinkMessage) -> bool {
    link.header.interface_family == AddressFamily::Unspec
}

fn parse_link(message: &LinkMessage) -> Link {
    let mut link = Link {
        name: String::new(),
        loopback: message.header.flags.contains(LinkFlags::Loopback),
        ethernet: message.header.link_layer_type == LinkLayerType::Ether,
        mtu: 0,
        address: None,
        is_up: message.header.flags.contains(LinkFlags::LowerUp),
        kind: LinkKind::Physical,
        master: None,
        vlan: None,
        namespace: None,
    };
    let (mut below, mut tag) = (None, None);
    for attribute in &message.attributes {
        #[expect(clippy::wildcard_enum_match_arm, reason = "some seventy other attributes")]
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::Controller(index) => link.master = Some(*index),
            LinkAttribute::LinkInfo(infos) => {
                link.kind = infos.iter().find_map(parse_kind).unwrap_or(LinkKind::Physical);
                tag = infos.iter().find_map(parse_tag);
            }
            LinkAttribute::Address(address) => link.address = address.as_slice().try_into().ok(),
            LinkAttribute::Link(index) => below = Some(*index),
            LinkAttribute::LinkNetNsId(number) => link.namespace = u32::try_from(*number).ok(),
            _ => {}
        }
    }
    // If the message has LinkNetNsId, the index belongs to another network namespace.
    let is_elsewhere = |attribute: &LinkAttribute| matches!(attribute, LinkAttribute::LinkNetNsId(_));
    if !message.attributes.iter().any(is_elsewhere) {
        link.vlan = below.zip(tag).map(|(below, (protocol, id))| Vlan { below, protocol, id });
    }
    // Taps of virtual machines have link addresses. Tun devices without link addresses are tunnels,
    // such as a VPN or flannel's udp backend.
    if link.kind == LinkKind::Tun && !link.ethernet {
        link.kind = LinkKind::Network;
    }
    link
}

fn parse_kind(info: &LinkInfo) -> Option<LinkKind> {
    let LinkInfo::Kind(kind) = info else { return None };
    #[expect(clippy::wildcard_enum_match_arm, reason = "every other kind is a network of its own")]
    Some(match kind {
        InfoKind::Veth | InfoKind::Netkit => LinkKind::Pair,
        InfoKind::Tun => LinkKind::Tun,
        InfoKind::Bridge => LinkKind::Bridge,
        InfoKind::Bond | InfoKind::Team => LinkKind::Bond,
        InfoKind::Vrf => LinkKind::Vrf,
        InfoKind::Dummy | InfoKind::Ifb | InfoKind::Nlmon => LinkKind::Sink,
        _ => LinkKind::Network,
    })
}

/// Returns the ethertype and the id of a VLAN device.
fn parse_tag(info: &LinkInfo) -> Option<(u16, u16)> {
    let LinkInfo::Data(InfoData::Vlan(of_vlan)) = info else { return None };
    let (mut protocol, mut id) = (None, None);
    for attribute in of_vlan {
        #[expect(clippy::wildcard_enum_match_arm, reason = "the other attributes do not matter")]
        match attribute {
            InfoVlan::Protocol(of_tag) => protocol = Some(u16::from(*of_tag)),
            InfoVlan::Id(of_tag) => id = Some(*of_tag),
            _ => {}
        }
    }
    protocol.zip(id)
}

/// Parses an address. Its position ([`Assignment::position`]) is 0 until the address is added to
/// the state.
fn parse_address(message: &AddressMessage) -> Option<((u32, IpAddr), Assignment)> {
    let (mut local, mut address) = (None, None);
    let mut flags = AddressFlags::from_bits_retain(message.header.flags.bits().into());
    for attribute in &message.attributes {
        #[expect(clippy::wildcard_enum_match_arm, reason = "the other attributes do not matter")]
        match attribute {
            // The two differ on point-to-point links, where `Address` is the peer's.
            AddressAttribute::Local(ip) => local = Some(*ip),
            AddressAttribute::Address(ip) => address = Some(*ip),
            AddressAttribute::Flags(all) => flags = *all,
            _ => {}
        }
    }
    let ip = local.or(address)?;
    // IPv6 uses the flag `Secondary` for temporary addresses.
    let unfit = AddressFlags::Secondary
        | AddressFlags::Deprecated
        | AddressFlags::Tentative
        | AddressFlags::Dadfailed;
    let assignment = Assignment {
        prefix_length: message.header.prefix_len,
        is_source: message.header.scope == AddressScope::Universe
            && !flags.intersects(unfit)
            && is_routable(&ip),
        position: 0,
    };
    Some(((message.header.index, ip), assignment))
}

/// Returns a route for each next hop. The list is empty if the message is not about a default route
/// of the main table.
fn parse_default_route(message: &RouteMessage) -> Vec<DefaultRoute> {
    let header = &message.header;
    if header.destination_prefix_length != 0
        || header.table != RouteHeader::RT_TABLE_MAIN
        || header.kind != RouteType::Unicast
    {
        return Vec::new();
    }
    let (mut metric, mut interfaces) = (0, Vec::new());
    for attribute in &message.attributes {
        #[expect(clippy::wildcard_enum_match_arm, reason = "the other attributes do not matter")]
        match attribute {
            RouteAttribute::Priority(priority) => metric = *priority,
            RouteAttribute::Oif(index) => interfaces.push(*index),
            RouteAttribute::MultiPath(hops) => interfaces.extend(hops.iter().map(|hop| hop.interface_index)),
            _ => {}
        }
    }
    let v6 = header.address_family == AddressFamily::Inet6;
    interfaces.into_iter().map(|interface| DefaultRoute { v6, metric, interface }).collect()
}

#[cfg(test)]
mod tests;
