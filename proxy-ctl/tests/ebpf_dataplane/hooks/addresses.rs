//! The node's addresses and interfaces in the maps.

use super::*;

/// Waits for a state of the host. It panics after a minute with the last one.
pub(super) async fn until(
    hosts: &mut tokio::sync::watch::Receiver<Option<NodeNetwork>>,
    holds: impl Fn(&NodeNetwork) -> bool,
) {
    let waiting = hosts.wait_for(|host| host.as_ref().is_some_and(&holds));
    let result = tokio::time::timeout(Duration::from_secs(60), waiting).await.map(|found| found.is_ok());
    assert_eq!(result, Ok(true), "{:?}", hosts.borrow());
}

#[test]
fn the_node_is_followed_by_netlink() {
    let Some(_sandbox) = Sandbox::new() else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (own_node, own_nodes) = tokio::sync::watch::channel(OwnNode::Absent);
        let (sender, mut hosts) = tokio::sync::watch::channel(None);
        let stop = CancellationToken::new();
        let (configs, followed) = tokio::sync::watch::channel(Arc::new(Config::default()));
        let watching = node::watch(own_nodes, followed, sender, stop.clone());
        let changing = async {
            until(&mut hosts, |host| host.interfaces.is_empty() && host.addresses.len() == 2).await;
            veth("dpa");
            let role = |host: &NodeNetwork, name| {
                host.interfaces
                    .iter()
                    .find(|interface| interface.name == name)
                    .map(|interface| interface.role)
            };
            until(&mut hosts, |host| role(host, "dpa") == Some(Role::Workload)).await;
            let own: IpAddr = "192.0.2.1".parse().unwrap();
            run("ip", "address add 192.0.2.1/24 dev dpa");
            until(&mut hosts, |host| {
                host.addresses.contains(&own) && role(host, "dpa") == Some(Role::Uplink)
            })
            .await;
            configs.send_modify(|config| {
                let config = Arc::make_mut(config);
                config.ebpf.interfaces.workloads.extend(NamePattern::parse("dpa"));
            });
            until(&mut hosts, |host| role(host, "dpa") == Some(Role::Workload)).await;
            configs.send_modify(|config| *config = Arc::default());
            own_node.send(OwnNode::Present(Node { addresses: vec![own], ..Node::default() })).unwrap();
            until(&mut hosts, |host| {
                role(host, "dpa") == Some(Role::Uplink) && host.masquerade_addresses == [own]
            })
            .await;
            run("ip", "route add default via 192.0.2.2");
            own_node.send(OwnNode::Absent).unwrap();
            until(&mut hosts, |host| host.masquerade_addresses == [own]).await;
            run("ip", "link set dpa down");
            until(&mut hosts, |host| host.masquerade_addresses.is_empty()).await;
            run("ip", "address del 192.0.2.1/24 dev dpa");
            until(&mut hosts, |host| role(host, "dpa") == Some(Role::Workload)).await;
            run("ip", "link del dpa");
            until(&mut hosts, |host| host.interfaces.is_empty()).await;
            stop.cancel();
        };
        let (watched, ()) = tokio::join!(watching, changing);
        watched.unwrap();
    });
}

#[test]
fn where_there_is_no_room_for_all_addresses_the_nodes_own_are_served() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let own: IpAddr = "192.0.2.9".parse().unwrap();
    let mut host = host(&[]);
    host.masquerade_addresses = vec![own];
    host.node_port_addresses = (1..=70).map(|last| IpAddr::from([10, 9, 0, last])).chain([own]).collect();
    let error = dataplane.take_host(&host).unwrap_err();
    assert!(error.is_of_node_addresses(), "{error}");
    let served = sandbox.snapshot().node.node_port_addresses;
    assert!(served.len() == 64 && served.contains(&(own, false)), "{served:?}");
}

#[test]
fn settings_of_uplinks_follow_their_addresses_and_mtu() {
    let Some(sandbox) = Sandbox::new() else { return };
    let dpa = veth("dpa");
    let mut dataplane = sandbox.open();
    let map: Map<u32, InterfaceSettings> = sandbox.map("interfaces");
    let mut host = host(&[("dpa", Role::Uplink)]);
    let mut take = |addresses: &[IpAddr], mtu: u32| {
        host.interfaces[0].masquerade_addresses = addresses.to_vec();
        host.interfaces[0].mtu = mtu;
        let applied = dataplane.take_host(&host).unwrap();
        (map.read_all().unwrap(), applied.written + applied.removed)
    };
    let v4 = [203, 0, 113, 7];
    let v6 = "2001:db8::7".parse::<std::net::Ipv6Addr>().unwrap().octets();
    let none = InterfaceSettings { mtu: 1_500, flags: INTERFACE_OF_UPLINK, ..InterfaceSettings::default() };
    let both = vec![(dpa, InterfaceSettings { masquerade4: v4, masquerade6: v6, ..none })];
    assert_eq!(take(&[v4.into(), v6.into()], 1_500).0, both);
    assert_eq!(take(&[v4.into(), v6.into()], 1_500), (both, 0));
    let one = InterfaceSettings { masquerade4: v4, ..none };
    assert_eq!(take(&[v4.into()], 1_500), (vec![(dpa, one)], 1));
    assert_eq!(take(&[v4.into()], 9_000), (vec![(dpa, InterfaceSettings { mtu: 9_000, ..one })], 1));
    assert_eq!(take(&[], 1_500), (vec![(dpa, none)], 1));
    let of_any = InterfaceSettings { mtu: 0, ..none };
    assert_eq!(take(&[], 65_536), (vec![(dpa, of_any)], 1), "it takes packets of any length");
}

#[test]
fn tags_of_vlans_lead_to_their_devices() {
    let Some(sandbox) = Sandbox::new() else { return };
    // The second device stands for a VLAN device, which not every kernel has.
    let (dpa, dpb) = (veth("dpa"), veth("dpb"));
    let mut dataplane = sandbox.open();
    let map: Map<VlanTag, u32> = sandbox.map("vlan_devices");
    let mut host = host(&[("dpa", Role::Uplink), ("dpb", Role::Uplink)]);
    let mut devices = |id| {
        host.interfaces[1].device = Device::Vlan(Vlan { below: dpa, protocol: TAG_CUSTOMER, id });
        let applied = dataplane.take_host(&host).unwrap();
        (map.read_all().unwrap(), applied.written + applied.removed)
    };
    let tag = |id| VlanTag { interface: dpa, protocol: TAG_CUSTOMER, id };
    assert_eq!(devices(10).0, [(tag(10), dpb)]);
    assert_eq!(devices(10), (vec![(tag(10), dpb)], 0));
    assert_eq!(devices(20), (vec![(tag(20), dpb)], 2));
}
