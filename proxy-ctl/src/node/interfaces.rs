//! Decides which interfaces get packet programs, and in which role. This module has no side
//! effects.

use crate::model::node::{Role, RoleReason};

/// The properties of an interface that decide its role.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LinkFacts {
    pub loopback: bool,
    pub kind: LinkKind,
    /// The device that it is a port of.
    pub master: Option<Master>,
    /// True if it has one of the addresses by which the cluster knows this node.
    pub node_address: bool,
    /// True if a default route of the main table leaves through it.
    pub default_route: bool,
    /// True if it has an address in a network that it is connected to, and that has no pods of this
    /// cluster.
    pub own_network: bool,
    /// The role that `ebpf.interfaces` gives it.
    pub configured: Option<Role>,
}

/// The kinds of devices that are treated differently.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum LinkKind {
    /// A network card: no virtual device.
    Physical,
    /// One end of a pair (veth, netkit) whose other end is in a pod.
    Pair,
    /// A tap device to a virtual machine.
    Tun,
    Bridge,
    Bond,
    Vrf,
    /// A device that forwards to no network: dummy, ifb, nlmon.
    Sink,
    /// A device to a network of its own: vlan, vxlan, wireguard, ipip, macvlan and the like.
    Network,
}

/// The device that another is a port of.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Master {
    /// A bond or a team.
    Bond,
    /// A bridge. True means that it has a node address or a default route, so that it is an uplink
    /// itself.
    Bridge(bool),
    /// VRF, Open vSwitch and others, which do not change what the port receives.
    Other,
}

/// The reason why no program is attached to an interface.
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

/// Returns the role of the interface, or why it has none. The first matching rule decides. The
/// interfaces that `ebpf.interfaces` leaves out are removed later.
pub fn role(link: &LinkFacts) -> Result<(Role, RoleReason), Ignored> {
    if link.loopback {
        return Err(Ignored::Loopback);
    }
    if let Some(role) = link.configured {
        return Ok((role, RoleReason::Configured));
    }
    if link.master == Some(Master::Bond) {
        return Err(Ignored::BondPort);
    }
    if link.node_address {
        return Ok((Role::Uplink, RoleReason::NodeAddress));
    }
    if link.default_route {
        return Ok((Role::Uplink, RoleReason::DefaultRoute));
    }
    match (link.kind, link.master) {
        // CNI plugins give the node's end an address of a pod range, or one with the full prefix.
        (LinkKind::Pair | LinkKind::Tun, _) if link.own_network => Ok((Role::Uplink, RoleReason::OwnNetwork)),
        (LinkKind::Pair, _) => Ok((Role::Workload, RoleReason::Pair)),
        (LinkKind::Tun, _) => Ok((Role::Workload, RoleReason::Tap)),
        (LinkKind::Bridge, _) => Err(Ignored::Bridge),
        (LinkKind::Vrf, _) => Err(Ignored::Vrf),
        (LinkKind::Sink, _) => Err(Ignored::Sink),
        (_, Some(Master::Bridge(true))) => Err(Ignored::BridgePort),
        (LinkKind::Physical | LinkKind::Bond | LinkKind::Network, _) => {
            Ok((Role::Uplink, RoleReason::Network))
        }
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
        own_network: false,
        configured: None,
    };
    const NETWORK: Result<(Role, RoleReason), Ignored> = Ok((Role::Uplink, RoleReason::Network));
    const POD: Result<(Role, RoleReason), Ignored> = Ok((Role::Workload, RoleReason::Pair));

    const fn of(kind: LinkKind) -> LinkFacts {
        LinkFacts { kind, ..CARD }
    }

    const fn port(kind: LinkKind, master: Master) -> LinkFacts {
        LinkFacts { kind, master: Some(master), ..CARD }
    }

    #[rstest]
    #[case::card(CARD, NETWORK)]
    #[case::card_with_the_node_address(
        LinkFacts { node_address: true, ..CARD },
        Ok((Role::Uplink, RoleReason::NodeAddress))
    )]
    #[case::loopback(LinkFacts { loopback: true, node_address: true, ..CARD }, Err(Ignored::Loopback))]
    #[case::card_in_a_bond(port(LinkKind::Physical, Master::Bond), Err(Ignored::BondPort))]
    #[case::bond(of(LinkKind::Bond), NETWORK)]
    #[case::card_in_the_uplink_bridge(
        port(LinkKind::Physical, Master::Bridge(true)),
        Err(Ignored::BridgePort)
    )]
    #[case::card_in_another_bridge(port(LinkKind::Physical, Master::Bridge(false)), NETWORK)]
    #[case::uplink_bridge(
        LinkFacts { node_address: true, ..of(LinkKind::Bridge) },
        Ok((Role::Uplink, RoleReason::NodeAddress))
    )]
    #[case::pod_bridge(of(LinkKind::Bridge), Err(Ignored::Bridge))]
    #[case::pod(of(LinkKind::Pair), POD)]
    #[case::pod_on_a_bridge(port(LinkKind::Pair, Master::Bridge(false)), POD)]
    #[case::pod_on_the_uplink_bridge(port(LinkKind::Pair, Master::Bridge(true)), POD)]
    #[case::virtual_machine(of(LinkKind::Tun), Ok((Role::Workload, RoleReason::Tap)))]
    #[case::node_in_a_namespace(
        LinkFacts { default_route: true, ..of(LinkKind::Pair) },
        Ok((Role::Uplink, RoleReason::DefaultRoute))
    )]
    #[case::second_uplink_of_a_node_in_a_namespace(
        LinkFacts { own_network: true, ..of(LinkKind::Pair) },
        Ok((Role::Uplink, RoleReason::OwnNetwork))
    )]
    #[case::pod_that_is_an_uplink_by_choice(
        LinkFacts { configured: Some(Role::Uplink), ..of(LinkKind::Pair) },
        Ok((Role::Uplink, RoleReason::Configured))
    )]
    #[case::uplink_that_leads_to_pods_by_choice(
        LinkFacts { configured: Some(Role::Workload), node_address: true, ..CARD },
        Ok((Role::Workload, RoleReason::Configured))
    )]
    #[case::bridge_that_has_a_role_by_choice(
        LinkFacts { configured: Some(Role::Uplink), ..of(LinkKind::Bridge) },
        Ok((Role::Uplink, RoleReason::Configured))
    )]
    #[case::tunnel_to_other_nodes(of(LinkKind::Network), NETWORK)]
    #[case::vrf(of(LinkKind::Vrf), Err(Ignored::Vrf))]
    #[case::card_in_a_vrf(port(LinkKind::Physical, Master::Other), NETWORK)]
    #[case::dummy(of(LinkKind::Sink), Err(Ignored::Sink))]
    fn roles(#[case] link: LinkFacts, #[case] expected: Result<(Role, RoleReason), Ignored>) {
        assert_eq!(role(&link), expected);
    }
}
