//! Decides which interfaces get packet programs, and in which role. Pure.

use crate::dataplane::Role;

/// The properties of an interface that decide its role.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LinkFacts {
    pub loopback: bool,
    pub kind: LinkKind,
    /// What it is a port of.
    pub master: Option<Master>,
    /// One of the addresses by which the cluster knows this node.
    pub node_address: bool,
    /// A default route of the main table leaves through it.
    pub default_route: bool,
}

/// Kinds of devices, as far as they are treated differently.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum LinkKind {
    /// No virtual device: a network card.
    Physical,
    /// One end of a pair whose other end is in a pod: veth, netkit.
    Pair,
    /// To a virtual machine: tap.
    Tun,
    Bridge,
    Bond,
    Vrf,
    /// Forwards to no network: dummy, ifb, nlmon.
    Sink,
    /// vlan, vxlan, wireguard, ipip, macvlan and the like: a network of its own.
    Network,
}

/// The device that another is a port of.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Master {
    /// bond, team.
    Bond,
    /// A bridge; true: with a node address or default route, so that it is an uplink itself.
    Bridge(bool),
    /// VRF, Open vSwitch and others, which do not change what the port receives.
    Other,
}

/// Why no program is attached to an interface.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Ignored {
    #[error("loopback: nothing enters or leaves the node there")]
    Loopback,
    #[error("port of a bond: its packets are translated on the bond")]
    BondPort,
    #[error("port of a bridge that leads to the network: its packets are translated on the bridge")]
    BridgePort,
    #[error("bridge of pods: packets are translated on its ports")]
    Bridge,
    #[error("VRF: packets are translated on its ports")]
    Vrf,
    #[error("forwards to no network")]
    Sink,
}

/// The role of the interface, or why it has none. The first matching rule decides; `ebpf.interfaces` is applied
/// afterwards.
pub fn role(link: &LinkFacts) -> Result<Role, Ignored> {
    if link.loopback {
        return Err(Ignored::Loopback);
    }
    if link.master == Some(Master::Bond) {
        return Err(Ignored::BondPort);
    }
    if link.node_address || link.default_route {
        return Ok(Role::Uplink);
    }
    match (link.kind, link.master) {
        (LinkKind::Pair | LinkKind::Tun, _) => Ok(Role::Workload),
        (LinkKind::Bridge, _) => Err(Ignored::Bridge),
        (LinkKind::Vrf, _) => Err(Ignored::Vrf),
        (LinkKind::Sink, _) => Err(Ignored::Sink),
        (_, Some(Master::Bridge(true))) => Err(Ignored::BridgePort),
        (LinkKind::Physical | LinkKind::Bond | LinkKind::Network, _) => Ok(Role::Uplink),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const CARD: LinkFacts = LinkFacts {
        loopback: false,
        kind: LinkKind::Physical,
        master: None,
        node_address: false,
        default_route: false,
    };

    const fn of(kind: LinkKind) -> LinkFacts {
        LinkFacts { kind, ..CARD }
    }

    const fn port(kind: LinkKind, master: Master) -> LinkFacts {
        LinkFacts { kind, master: Some(master), ..CARD }
    }

    #[rstest]
    #[case::card(CARD, Ok(Role::Uplink))]
    #[case::card_with_the_node_address(LinkFacts { node_address: true, ..CARD }, Ok(Role::Uplink))]
    #[case::loopback(LinkFacts { loopback: true, node_address: true, ..CARD }, Err(Ignored::Loopback))]
    #[case::card_in_a_bond(port(LinkKind::Physical, Master::Bond), Err(Ignored::BondPort))]
    #[case::bond(of(LinkKind::Bond), Ok(Role::Uplink))]
    #[case::card_in_the_uplink_bridge(
        port(LinkKind::Physical, Master::Bridge(true)),
        Err(Ignored::BridgePort)
    )]
    #[case::card_in_another_bridge(port(LinkKind::Physical, Master::Bridge(false)), Ok(Role::Uplink))]
    #[case::uplink_bridge(LinkFacts { node_address: true, ..of(LinkKind::Bridge) }, Ok(Role::Uplink))]
    #[case::pod_bridge(of(LinkKind::Bridge), Err(Ignored::Bridge))]
    #[case::pod(of(LinkKind::Pair), Ok(Role::Workload))]
    #[case::pod_on_a_bridge(port(LinkKind::Pair, Master::Bridge(false)), Ok(Role::Workload))]
    #[case::pod_on_the_uplink_bridge(port(LinkKind::Pair, Master::Bridge(true)), Ok(Role::Workload))]
    #[case::virtual_machine(of(LinkKind::Tun), Ok(Role::Workload))]
    #[case::node_in_a_namespace(LinkFacts { default_route: true, ..of(LinkKind::Pair) }, Ok(Role::Uplink))]
    #[case::tunnel_to_other_nodes(of(LinkKind::Network), Ok(Role::Uplink))]
    #[case::vrf(of(LinkKind::Vrf), Err(Ignored::Vrf))]
    #[case::card_in_a_vrf(port(LinkKind::Physical, Master::Other), Ok(Role::Uplink))]
    #[case::dummy(of(LinkKind::Sink), Err(Ignored::Sink))]
    fn roles(#[case] link: LinkFacts, #[case] expected: Result<Role, Ignored>) {
        assert_eq!(role(&link), expected);
    }
}
