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
fn an_address_that_is_no_source(#[case] ip: &str, #[case] flags: AddressFlags, #[case] scope: AddressScope) {
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
