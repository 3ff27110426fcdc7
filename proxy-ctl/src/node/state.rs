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
    place: u32,
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
    next_place: u32,
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
        let place = match former.filter(|former| former.is_source || !assignment.is_source) {
            Some(former) => former.place,
            None => {
                self.next_place += 1;
                self.next_place
            }
        };
        self.addresses.insert(key, Assignment { place, ..assignment });
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
        of_node.or_else(|| sources().min_by_key(|(_, of)| of.place).map(|(ip, _)| ip)).copied()
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

/// Parses an address. Its position ([`Assignment::place`]) is 0 until the address is added to the
/// state.
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
        place: 0,
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
mod tests {
    use rstest::rstest;

    use netlink_packet_route::link::VlanProtocol;

    use super::*;
    use crate::config::NamePattern;

    fn link(index: u32, name: &str, kind: Option<InfoKind>, master: Option<u32>) -> LinkMessage {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.header.link_layer_type = LinkLayerType::Ether;
        message.attributes.push(LinkAttribute::IfName(name.to_owned()));
        message.attributes.extend(master.map(LinkAttribute::Controller));
        message.attributes.extend(kind.map(|kind| LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)])));
        message
    }

    fn new_link(index: u32, name: &str, kind: Option<InfoKind>, master: Option<u32>) -> RouteNetlinkMessage {
        RouteNetlinkMessage::NewLink(link(index, name, kind, master))
    }

    /// Returns a message about `ip`, which may have a prefix length. The default is the full
    /// prefix.
    fn address(index: u32, ip: &str) -> AddressMessage {
        let (ip, length) = ip.split_once('/').map_or((ip, None), |(ip, length)| (ip, Some(length)));
        let ip: IpAddr = ip.parse().unwrap();
        let mut message = AddressMessage::default();
        message.header.index = index;
        message.header.prefix_len =
            length.map_or(if ip.is_ipv4() { 32 } else { 128 }, |length| length.parse().unwrap());
        message.attributes.push(AddressAttribute::Address(ip));
        message
    }

    fn cluster(node_addresses: &[IpAddr]) -> Surroundings {
        Surroundings { node_addresses: node_addresses.to_vec(), ..Surroundings::default() }
    }

    fn sources<'a>(host: &'a NodeNetwork, name: &str) -> &'a [IpAddr] {
        &host.interfaces.iter().find(|interface| interface.name == name).unwrap().masquerade_addresses
    }

    fn new_address(index: u32, ip: &str) -> RouteNetlinkMessage {
        RouteNetlinkMessage::NewAddress(address(index, ip))
    }

    fn route(interface: u32, metric: u32, prefix: u8) -> RouteMessage {
        let mut message = RouteMessage::default();
        message.header.address_family = AddressFamily::Inet;
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        message.header.kind = RouteType::Unicast;
        message.header.destination_prefix_length = prefix;
        message.attributes = vec![RouteAttribute::Oif(interface), RouteAttribute::Priority(metric)];
        message
    }

    fn state(messages: impl IntoIterator<Item = RouteNetlinkMessage>) -> State {
        let mut state = State::default();
        messages.into_iter().for_each(|message| state.apply(&message));
        state
    }

    fn node() -> State {
        let mut lo = link(1, "lo", None, None);
        lo.header.flags = LinkFlags::Loopback;
        state([
            RouteNetlinkMessage::NewLink(lo),
            new_link(2, "eth0", None, None),
            new_link(3, "cni0", Some(InfoKind::Bridge), None),
            new_link(4, "veth1", Some(InfoKind::Veth), Some(3)),
            new_address(1, "127.0.0.1"),
            new_address(2, "192.0.2.10"),
            new_address(2, "fe80::1"),
            new_address(3, "10.244.0.1"),
            RouteNetlinkMessage::NewRoute(route(2, 0, 0)),
        ])
    }

    fn roles(host: &NodeNetwork) -> Vec<(&str, Role)> {
        host.interfaces.iter().map(|interface| (interface.name.as_str(), interface.role)).collect()
    }

    fn ips(addresses: &[&str]) -> Vec<IpAddr> {
        addresses.iter().map(|ip| ip.parse().unwrap()).collect()
    }

    fn vlan(index: u32, below: u32, protocol: VlanProtocol, id: u16) -> LinkMessage {
        let mut message = link(index, &format!("vlan{id}"), None, None);
        message.attributes.push(LinkAttribute::Link(below));
        message.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Vlan),
            LinkInfo::Data(InfoData::Vlan(vec![InfoVlan::Id(id), InfoVlan::Protocol(protocol)])),
        ]));
        message
    }

    #[test]
    fn the_bandwidth_plugin_stays_known_once_it_has_made_a_device() {
        let limits = |state: &State| state.host(&Surroundings::default()).limits_bandwidth;
        let mut state = node();
        state.apply(&new_link(5, "ifb0", Some(InfoKind::Ifb), None));
        assert!(!limits(&state));
        let device = link(6, "bwp5a1527d2fe74", Some(InfoKind::Ifb), None);
        state.apply(&RouteNetlinkMessage::NewLink(device.clone()));
        state.apply(&RouteNetlinkMessage::DelLink(device));
        assert!(limits(&state));
        state.replace(node());
        assert!(limits(&state));
    }

    #[test]
    fn a_workloads_interface_is_up_when_its_other_end_is() {
        let mut pod = link(4, "veth1", Some(InfoKind::Veth), None);
        let is_up = |pod: &LinkMessage| {
            let mut state = node();
            state.apply(&RouteNetlinkMessage::NewLink(pod.clone()));
            state.host(&Surroundings::default()).interfaces.iter().map(|one| one.is_up).collect::<Vec<_>>()
        };
        pod.header.flags = LinkFlags::Up;
        assert_eq!(is_up(&pod), [true, false], "the uplink counts as up");
        pod.header.flags |= LinkFlags::LowerUp;
        assert_eq!(is_up(&pod), [true, true]);
    }

    #[test]
    fn vlans_are_on_other_interfaces() {
        let mut elsewhere = vlan(7, 3, VlanProtocol::Ieee8021Q, 30);
        elsewhere.attributes.push(LinkAttribute::LinkNetNsId(1));
        let host = state([
            new_link(2, "eth0", None, None),
            new_link(3, "eth1", None, None),
            RouteNetlinkMessage::NewLink(vlan(5, 2, VlanProtocol::Ieee8021Ad, 10)),
            RouteNetlinkMessage::NewLink(vlan(6, 5, VlanProtocol::Ieee8021Q, 20)),
            RouteNetlinkMessage::NewLink(elsewhere),
        ])
        .host(&cluster(&[]));
        let found: Vec<_> =
            host.interfaces.iter().map(|of| (of.name.as_str(), of.device, of.has_vlans)).collect();
        let tagged = |below, protocol, id| Device::Vlan(Vlan { below, protocol, id });
        assert_eq!(
            found,
            [
                ("eth0", Device::Card, true),
                ("eth1", Device::Card, false),
                ("vlan10", tagged(2, 0x88a8, 10), true),
                ("vlan20", tagged(5, 0x8100, 20), false),
                ("vlan30", Device::Other, false),
            ]
        );
    }

    #[test]
    fn link_addresses_are_those_of_ethernet() {
        let with = |address: &[u8]| {
            let mut message = link(2, "eth0", None, None);
            message.attributes.push(LinkAttribute::Address(address.to_vec()));
            let host = state([RouteNetlinkMessage::NewLink(message)]).host(&cluster(&[]));
            host.interfaces[0].link_address
        };
        assert_eq!(with(&[2, 0, 0, 0, 0, 1]), Some([2, 0, 0, 0, 0, 1]));
        assert_eq!(with(&[192, 0, 2, 1]), None, "of a tunnel");
    }

    #[test]
    fn the_mtu_is_followed() {
        let with = |mtu: u32| {
            let mut message = link(2, "eth0", None, None);
            message.attributes.push(LinkAttribute::Mtu(mtu));
            RouteNetlinkMessage::NewLink(message)
        };
        let mtu = |messages: &[RouteNetlinkMessage]| {
            state(messages.iter().cloned()).host(&cluster(&[])).interfaces[0].mtu
        };
        assert_eq!(mtu(&[with(1_500)]), 1_500);
        assert_eq!(mtu(&[with(1_500), with(1_450)]), 1_450);
    }

    #[test]
    fn a_plain_node() {
        let host = node().host(&cluster(&[]));
        assert_eq!(roles(&host), [("eth0", Role::Uplink), ("veth1", Role::Workload)]);
        assert_eq!(
            host.addresses.into_iter().collect::<Vec<_>>(),
            ips(&["10.244.0.1", "127.0.0.1", "192.0.2.10"])
        );
        assert_eq!(host.masquerade_addresses, ips(&["192.0.2.10"]));
    }

    /// A Service may have the node's own address as an external IP, so that the device has it too.
    #[test]
    fn addresses_of_services_that_mode_ipvs_has_left_are_not_the_nodes() {
        let mut with_device = node();
        with_device.apply(&new_link(5, "kube-ipvs0", Some(InfoKind::Dummy), None));
        for ip in ["10.96.0.1", "10.96.0.10", "192.0.2.10"] {
            with_device.apply(&new_address(5, ip));
        }
        let node_addresses = ips(&["10.96.0.1", "192.0.2.10"]);
        assert_eq!(with_device.host(&cluster(&node_addresses)), node().host(&cluster(&node_addresses)));
    }

    #[test]
    fn the_nodes_own_address_is_the_source_if_the_node_has_it() {
        assert_eq!(node().host(&cluster(&ips(&["10.244.0.1"]))).masquerade_addresses, ips(&["10.244.0.1"]));
        assert_eq!(node().host(&cluster(&ips(&["203.0.113.9"]))).masquerade_addresses, ips(&["192.0.2.10"]));
    }

    #[test]
    fn a_veth_that_carries_the_node_address_is_an_uplink() {
        let veth = || state([new_link(2, "eth0", Some(InfoKind::Veth), None), new_address(2, "192.0.2.10")]);
        assert_eq!(roles(&veth().host(&cluster(&[]))), [("eth0", Role::Workload)]);
        assert_eq!(roles(&veth().host(&cluster(&ips(&["192.0.2.10"])))), [("eth0", Role::Uplink)]);
    }

    #[rstest]
    #[case::known(InfoKind::Veth, 3, Some(3))]
    #[case::without_number(InfoKind::Veth, -1, None)]
    #[case::no_pod(InfoKind::MacVlan, 3, None)]
    fn a_pair_tells_the_namespace_of_its_other_end(
        #[case] kind: InfoKind,
        #[case] number: i32,
        #[case] namespace: Option<u32>,
    ) {
        let mut pod = link(2, "pod0", Some(kind), None);
        pod.attributes.push(LinkAttribute::LinkNetNsId(number));
        let host = state([RouteNetlinkMessage::NewLink(pod)]).host(&cluster(&[]));
        let namespaces: Vec<_> = host.interfaces.iter().map(|of| of.namespace).collect();
        assert_eq!(namespaces, [namespace]);
    }

    #[test]
    fn a_tap_leads_to_a_virtual_machine_and_a_tun_to_a_network() {
        let mut tun = link(3, "tun0", Some(InfoKind::Tun), None);
        tun.header.link_layer_type = LinkLayerType::None;
        let host = state([new_link(2, "tap0", Some(InfoKind::Tun), None), RouteNetlinkMessage::NewLink(tun)])
            .host(&cluster(&[]));
        assert_eq!(roles(&host), [("tap0", Role::Workload), ("tun0", Role::Uplink)]);
    }

    #[test]
    fn ports_of_the_uplink_bridge_are_left_to_the_bridge() {
        let host = state([
            new_link(2, "eth0", None, Some(3)),
            new_link(3, "br0", Some(InfoKind::Bridge), None),
            RouteNetlinkMessage::NewRoute(route(3, 0, 0)),
        ])
        .host(&cluster(&[]));
        assert_eq!(roles(&host), [("br0", Role::Uplink)]);
    }

    #[test]
    fn a_link_takes_its_addresses_and_routes_along() {
        let mut state = node();
        state.apply(&RouteNetlinkMessage::DelLink(link(2, "eth0", None, None)));
        let host = state.host(&cluster(&[]));
        assert_eq!(roles(&host), [("veth1", Role::Workload)]);
        assert!(host.masquerade_addresses.is_empty());
        assert!(!host.addresses.contains(&ips(&["192.0.2.10"])[0]));
    }

    #[test]
    fn a_port_that_leaves_its_bridge_is_not_gone() {
        let mut state = node();
        let mut leaving = link(4, "veth1", None, None);
        leaving.header.interface_family = AddressFamily::Bridge;
        state.apply(&RouteNetlinkMessage::DelLink(leaving));
        assert_eq!(state, node());
    }

    #[test]
    fn an_address_that_goes_is_gone() {
        let mut state = node();
        state.apply(&RouteNetlinkMessage::DelAddress(address(3, "10.244.0.1")));
        assert!(!state.host(&cluster(&[])).addresses.contains(&ips(&["10.244.0.1"])[0]));
    }

    #[test]
    fn the_peer_of_a_point_to_point_link_is_not_ours() {
        let mut message = address(2, "198.51.100.2");
        message.attributes.push(AddressAttribute::Local("198.51.100.1".parse().unwrap()));
        let state = state([RouteNetlinkMessage::NewAddress(message)]);
        let addresses: Vec<_> = state.host(&cluster(&[])).addresses.into_iter().collect();
        assert_eq!(addresses, ips(&["198.51.100.1"]));
    }

    #[test]
    fn the_best_default_route_decides_the_source() {
        let mut state = node();
        state.apply(&new_link(5, "eth1", None, None));
        state.apply(&new_address(5, "198.51.100.7"));
        state.apply(&RouteNetlinkMessage::NewRoute(route(5, 100, 0)));
        assert_eq!(state.host(&cluster(&[])).masquerade_addresses, ips(&["192.0.2.10"]));
        state.apply(&RouteNetlinkMessage::DelRoute(route(2, 0, 0)));
        assert_eq!(state.host(&cluster(&[])).masquerade_addresses, ips(&["198.51.100.7"]));
    }

    #[test]
    fn a_link_that_goes_down_loses_its_routes() {
        let mut state = node();
        state.apply(&new_link(2, "eth0", None, None));
        assert!(state.host(&cluster(&[])).masquerade_addresses.is_empty());
    }

    #[test]
    fn other_routes_do_not_make_an_uplink() {
        let before = node();
        let mut state = before.clone();
        state.apply(&RouteNetlinkMessage::NewRoute(route(4, 0, 24)));
        assert_eq!(state, before);
    }

    fn second_uplink(kind: Option<InfoKind>, address: AddressMessage) -> State {
        let mut state = node();
        state.apply(&new_link(5, "eth1", kind, None));
        state.apply(&RouteNetlinkMessage::NewAddress(address));
        state
    }

    #[test]
    fn each_uplink_has_its_own_source() {
        let host = second_uplink(None, address(5, "203.0.113.7/24")).host(&cluster(&ips(&["192.0.2.10"])));
        assert_eq!(
            (sources(&host, "eth0"), sources(&host, "eth1")),
            (&*ips(&["192.0.2.10"]), &*ips(&["203.0.113.7"]))
        );
        assert_eq!(host.masquerade_addresses, ips(&["192.0.2.10"]));
        assert!(sources(&host, "veth1").is_empty());
    }

    #[rstest]
    #[case::secondary("203.0.113.7/24", AddressFlags::Secondary, AddressScope::Universe)]
    #[case::of_the_link("169.254.0.7/16", AddressFlags::empty(), AddressScope::Link)]
    #[case::link_local("fe80::7/64", AddressFlags::empty(), AddressScope::Link)]
    #[case::deprecated("2001:db8::7/64", AddressFlags::Deprecated, AddressScope::Universe)]
    #[case::temporary("2001:db8::7/64", AddressFlags::Secondary, AddressScope::Universe)]
    #[case::not_proved_unique("2001:db8::7/64", AddressFlags::Tentative, AddressScope::Universe)]
    fn an_address_that_is_no_source(
        #[case] ip: &str,
        #[case] flags: AddressFlags,
        #[case] scope: AddressScope,
    ) {
        let mut message = address(5, ip);
        message.header.scope = scope;
        message.attributes.push(AddressAttribute::Flags(flags));
        let host = second_uplink(None, message).host(&cluster(&[]));
        assert!(sources(&host, "eth1").is_empty());
    }

    #[test]
    fn the_first_primary_address_is_the_source_unless_another_is_the_nodes() {
        let mut state = second_uplink(None, address(5, "203.0.113.7/24"));
        state.apply(&new_address(5, "198.51.100.7/24"));
        // The kernel sends an address again whenever a lifetime changes.
        state.apply(&new_address(5, "203.0.113.7/24"));
        assert_eq!(sources(&state.host(&cluster(&[])), "eth1"), ips(&["203.0.113.7"]));
        let node = cluster(&ips(&["198.51.100.7"]));
        assert_eq!(sources(&state.host(&node), "eth1"), ips(&["198.51.100.7"]));
        state.apply(&RouteNetlinkMessage::DelAddress(address(5, "203.0.113.7/24")));
        assert_eq!(sources(&state.host(&cluster(&[])), "eth1"), ips(&["198.51.100.7"]));
    }

    #[test]
    fn a_secondary_address_that_becomes_primary_stands_behind_the_others() {
        let mut secondary = address(5, "203.0.113.7/24");
        secondary.attributes.push(AddressAttribute::Flags(AddressFlags::Secondary));
        let mut state = second_uplink(None, secondary);
        state.apply(&new_address(5, "198.51.100.7/24"));
        state.apply(&new_address(5, "203.0.113.7/24"));
        assert_eq!(sources(&state.host(&cluster(&[])), "eth1"), ips(&["198.51.100.7"]));
    }

    #[test]
    fn a_port_of_a_bridge_has_the_source_of_the_bridge() {
        let mut state = node();
        state.apply(&new_link(5, "br1", Some(InfoKind::Bridge), None));
        state.apply(&new_link(6, "eth1", None, Some(5)));
        state.apply(&new_address(5, "203.0.113.7/24"));
        assert_eq!(sources(&state.host(&cluster(&[])), "eth1"), ips(&["203.0.113.7"]));
    }

    #[rstest]
    #[case::a_network("203.0.113.7/24", Role::Uplink)]
    #[case::a_network_of_ipv6("2001:db8:1::7/64", Role::Uplink)]
    #[case::no_network("203.0.113.7/32", Role::Workload)]
    #[case::pods("10.244.1.1/24", Role::Workload)]
    #[case::pods_of_ipv6("fd00:10:244::1/64", Role::Workload)]
    #[case::link_local("fe80::7/64", Role::Workload)]
    fn a_veth_with_an_address_of(#[case] ip: &str, #[case] expected: Role) {
        let pods = ["10.244.0.0/16", "fd00:10:244::/48"].map(|range| range.parse().unwrap());
        let around = Surroundings { pod_ranges: pods.to_vec(), ..Surroundings::default() };
        let host = second_uplink(Some(InfoKind::Veth), address(5, ip)).host(&around);
        assert!(roles(&host).contains(&("eth1", expected)), "{host:?}");
    }

    #[test]
    fn the_configuration_decides_over_roles() {
        let names = |names: &[&str]| names.iter().filter_map(|name| NamePattern::parse(name)).collect();
        let interfaces =
            Interfaces { uplinks: names(&["veth*"]), workloads: names(&["eth0"]), ..Interfaces::default() };
        let around = Surroundings { interfaces, ..Surroundings::default() };
        assert_eq!(roles(&node().host(&around)), [("eth0", Role::Workload), ("veth1", Role::Uplink)]);
    }
}
