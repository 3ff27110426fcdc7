//! Decides whether a virtual server is kube-proxy's, by its address or by the members of
//! kube-proxy's sets.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use proxy_common::port::NODE_PORTS;

use crate::{
    cleanup::Error,
    names,
    sys::{
        CallError,
        net::{
            ipset::{IpSets, Member, SetKind},
            ipvs::VirtualSocket,
            link,
        },
    },
};

/// Addresses of this node, and members of sets, which show which virtual servers are kube-proxy's.
#[derive(Debug, Default)]
pub(crate) struct Addresses {
    /// The addresses of kube-ipvs0, which kube-proxy gives to Services. A Service's address that
    /// another interface has need not be among them.
    of_services: BTreeSet<IpAddr>,
    of_node: BTreeSet<IpAddr>,
    members: Members,
}

/// The members of kube-proxy's sets for virtual servers whose addresses are not on kube-ipvs0.
#[derive(Debug, Default, Eq, PartialEq)]
struct Members {
    sockets: BTreeSet<VirtualSocket>,
    /// The protocol and the port of node ports, from any range. They count on the node's addresses.
    node_ports: BTreeSet<(u16, u16)>,
}

impl Members {
    fn read() -> Result<Self, CallError> {
        let mut all = Self::default();
        let Some(sets) = IpSets::open()? else { return Ok(all) };
        for set in names::SOCKET_SETS.into_iter().flat_map(names::ip_sets) {
            for member in sets.members(&set, SetKind::Sockets)?.unwrap_or_default() {
                if let Member::Socket(socket) = member {
                    all.sockets.insert(socket);
                }
            }
        }
        let of_ports = |(ipv4, protocol)| names::ip_sets(ipv4).into_iter().map(move |set| (set, protocol));
        for (set, protocol) in names::NODE_PORT_SETS.into_iter().flat_map(of_ports) {
            for member in sets.members(&set, SetKind::Ports)?.unwrap_or_default() {
                if let Member::Port(port) = member {
                    all.node_ports.insert((protocol, port));
                }
            }
        }
        Ok(all)
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Owner {
    KubeProxy,
    Unknown,
    Other,
}

impl Addresses {
    /// Reads the addresses and sets. Returns `None` if kube-proxy's device does not exist.
    pub(crate) fn read() -> Result<Option<Self>, Error> {
        let Some(device) = link::index(names::IPVS_DEVICE)? else { return Ok(None) };
        let mut addresses = Self { members: Members::read()?, ..Self::default() };
        for link::Address { interface, address, .. } in link::addresses()? {
            if interface == device {
                addresses.of_services.insert(address);
            } else if !address.is_loopback() {
                addresses.of_node.insert(address);
            }
        }
        Ok(Some(addresses))
    }

    pub(crate) fn owner(&self, server: VirtualSocket, keeps: &[IpNet]) -> Owner {
        let VirtualSocket { protocol, address: socket } = server;
        let is_node_port = || {
            NODE_PORTS.contains(&socket.port())
                || self.members.node_ports.contains(&(protocol, socket.port()))
        };
        let address = socket.ip();
        if keeps.iter().any(|network| network.contains(&address)) {
            Owner::Other
        } else if self.of_services.contains(&address)
            || self.members.sockets.contains(&server)
            || self.of_node.contains(&address) && is_node_port()
        {
            Owner::KubeProxy
        } else {
            Owner::Unknown
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use nix::sched::{CloneFlags, unshare};
    use rstest::rstest;

    use super::*;
    use crate::sys::net::ipset::MemberChange;

    pub(in crate::cleanup) fn tcp(socket: &str) -> VirtualSocket {
        VirtualSocket { protocol: 6, address: socket.parse().unwrap() }
    }

    pub(in crate::cleanup) fn write(sets: &IpSets, name: &str, kind: SetKind, ipv4: bool, member: Member) {
        sets.create(name, kind, ipv4).unwrap();
        assert!(sets.write(name, kind, &[MemberChange::Add(member)]).unwrap().is_empty());
    }

    #[rstest]
    #[case::cluster_ip("10.96.0.1:443", Owner::KubeProxy)]
    #[case::cluster_ip_of_ipv6("[fd00::a]:53", Owner::KubeProxy)]
    #[case::node_port("192.0.2.10:30080", Owner::KubeProxy)]
    #[case::node_port_of_ipv6("[2001:db8::10]:32767", Owner::KubeProxy)]
    #[case::other_port_of_the_node("192.0.2.10:80", Owner::Unknown)]
    #[case::port_after_the_range("192.0.2.10:32768", Owner::Unknown)]
    #[case::address_of_no_link("198.51.100.1:30080", Owner::Unknown)]
    #[case::excluded("192.0.2.99:30080", Owner::Other)]
    #[case::external_ip_of_the_node("192.0.2.10:443", Owner::KubeProxy)]
    #[case::external_ip_of_another_interface("203.0.113.1:443", Owner::KubeProxy)]
    #[case::excluded_external_ip("192.0.2.98:443", Owner::Other)]
    #[case::node_port_of_another_range("192.0.2.10:9080", Owner::KubeProxy)]
    #[case::such_a_port_of_an_address_of_no_link("198.51.100.1:9080", Owner::Unknown)]
    #[case::node_port_of_another_protocol("192.0.2.10:9053", Owner::Unknown)]
    fn virtual_servers_are_kube_proxys_by_address_and_sets(#[case] socket: &str, #[case] expected: Owner) {
        let ips = |texts: [&str; 2]| texts.map(|text| text.parse::<IpAddr>().unwrap()).into();
        let mut of_node: BTreeSet<IpAddr> = ips(["192.0.2.10", "2001:db8::10"]);
        of_node.insert([192, 0, 2, 99].into());
        let external = ["192.0.2.10:443", "203.0.113.1:443", "192.0.2.98:443"];
        let members =
            Members { sockets: external.map(tcp).into(), node_ports: [(6, 9080), (17, 9053)].into() };
        let addresses = Addresses { of_services: ips(["10.96.0.1", "fd00::a"]), of_node, members };
        let keeps = ["192.0.2.96/29".parse().unwrap()];
        assert_eq!(addresses.owner(tcp(socket), &keeps), expected);
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_members_of_both_families_are_read() {
        // The thread ends with the test, and its network namespace with it.
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let Some(sets) = IpSets::load().unwrap() else {
            println!("skipped: the kernel has no ipset (CONFIG_IP_SET)");
            return;
        };
        assert_eq!(Members::read().unwrap(), Members::default());
        let (external, balanced) = (tcp("192.0.2.10:80"), tcp("[2001:db8::10]:80"));
        let sctp = VirtualSocket { protocol: 132, ..tcp("192.0.2.10:9132") };
        let of_sockets = [
            ("KUBE-EXTERNAL-IP-LOCAL", true, external),
            ("KUBE-6-LOAD-BALANCER", false, balanced),
            ("KUBE-NODE-PORT-SCTP-HASH", true, sctp),
            ("KUBE-CLUSTER-IP", true, tcp("10.96.0.1:80")),
        ];
        for (name, ipv4, socket) in of_sockets {
            write(&sets, name, SetKind::Sockets, ipv4, Member::Socket(socket));
        }
        write(&sets, "KUBE-NODE-PORT-TCP", SetKind::Ports, true, Member::Port(9080));
        write(&sets, "KUBE-6-NODE-PORT-UDP", SetKind::Ports, false, Member::Port(9053));
        let expected = Members {
            sockets: [external, balanced, sctp].into(),
            node_ports: [(6, 9080), (17, 9053)].into(),
        };
        assert_eq!(Members::read().unwrap(), expected);
    }
}
