//! Networks between the nodes beside the fabric. Each has a range of pods of each node that only it
//! reaches. The nodes accept a packet only from the device that leads to its source, as many
//! distributions and firewalls have it.

use anyhow::{Result, bail};

use super::{NODES, Netns};
use crate::{
    address::{self, Addresses, NodeNumber},
    namespace::{ip, nft, run, sysctl},
};

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Network {
    /// Overlay as flannel builds it. Its device has one address, which nothing else has.
    Vxlan,
    /// Tunnel for IPv4 without link addresses and without a fixed remote, as Calico builds it.
    Ipip,
    /// Tunnel like [`Ipip`](Self::Ipip), for both families.
    WireGuard,
    /// Second network card, here a veth. It has neither the default route nor an address of the
    /// Node.
    SecondUplink,
    /// VLAN on the node's network card. The card shows the VLAN's packets too, with their tag.
    Vlan,
    /// VLAN in a VLAN, in which the client outside is too. Node 1's network card leaves the tags in
    /// the frames.
    VlanInVlan,
}

/// Private and public keys of node 1 and node 2. Any keys would do.
const KEYS: [[&str; 2]; 2] = [
    ["sGi309tBaBbHhgwXbG/8ZV0AVlSINaTVMcdk5rlGPls=", "vD5j9XVhA00P1f2hFZYMOpKRyzvPl54o8jg133R0Rxw="],
    ["iBoKSZ3Ib4rPPKhYLaTdlLddbDZX/UR7Vfqe/+/8QFA=", "vPy/oHwYdxzeK7mQJEG87TI4kg99dabpDjI+AtH4rQI="],
];

const VLAN_IN_VLAN: &str = "link add link eth0 name eth0.9 type vlan id 9\nlink set eth0.9 up\n\
                            link add link eth0.9 name eth0.9.8 type vlan id 8\n";

impl Network {
    /// Returns the name of the pod on node 2 that the network reaches.
    pub fn pod(self) -> &'static str {
        match self {
            Self::Vxlan => "vxlan-web",
            Self::Ipip => "ipip-web",
            Self::WireGuard => "wireguard-web",
            Self::SecondUplink => "second-web",
            Self::Vlan => "vlan-web",
            Self::VlanInVlan => "twice-web",
        }
    }

    pub(super) fn pod_addresses(self) -> Addresses {
        address::pod(self.pods_of(2), 10 + self.number())
    }

    /// Returns the node's addresses on the network.
    pub fn node(self, node: NodeNumber) -> Addresses {
        match self {
            Self::Vxlan | Self::Ipip | Self::WireGuard | Self::Vlan | Self::VlanInVlan => {
                address::pod(self.pods_of(node), 0)
            }
            Self::SecondUplink => address::second_node(node),
        }
    }

    /// Returns the kernel option that the network needs, if this kernel lacks it. It is tried in a
    /// network namespace made for that.
    pub fn missing_option(self) -> Option<&'static str> {
        let (device, option) = match self {
            Self::Vxlan | Self::SecondUplink => return None,
            Self::Ipip => ("link add ipip1 type ipip local 192.0.2.1 remote 192.0.2.2\n", "CONFIG_NET_IPIP"),
            Self::WireGuard => ("link add wg1 type wireguard\n", "CONFIG_WIREGUARD"),
            Self::Vlan | Self::VlanInVlan => (
                "link add card type veth peer name other\nlink add link card name card.7 type vlan id 7\n",
                "CONFIG_VLAN_8021Q",
            ),
        };
        let namespace = format!("px-option-{}", std::process::id());
        let has = ip(None, &format!("netns add {namespace}\n")).and_then(|()| ip(Some(&namespace), device));
        // This fails only if the namespace was not made.
        let _removed = ip(None, &format!("netns del {namespace}\n"));
        has.is_err().then_some(option)
    }

    fn number(self) -> u8 {
        match self {
            Self::Vxlan => 1,
            Self::Ipip => 2,
            Self::SecondUplink => 3,
            Self::Vlan => 4,
            Self::VlanInVlan => 5,
            Self::WireGuard => 6,
        }
    }

    /// Returns the number that replaces a node's number in addresses of its pods.
    fn pods_of(self, node: NodeNumber) -> u8 {
        10 * self.number() + node
    }

    pub(super) fn device(self) -> &'static str {
        match self {
            Self::Vxlan => "flannel.1",
            Self::Ipip => "ipip1",
            Self::WireGuard => "wg1",
            Self::SecondUplink => "eth1",
            Self::Vlan => "eth0.7",
            Self::VlanInVlan => "eth0.9.8",
        }
    }
}

/// Builds another bridge, with a client.
pub(super) fn build_second_fabric(fabric: &Netns, outside: &Netns) -> Result<()> {
    fabric.ip("link add br1 type bridge mcast_snooping 0\nlink set br1 up\n")?;
    plug(fabric, outside, "eth0", outside.addresses)?;
    let (external, node) = (address::external(1, 0), address::second_node(1));
    outside.ip(&format!(
        "route add {}/24 via {}\nroute add {}/64 via {}\n",
        external.v4, node.v4, external.v6, node.v6
    ))
}

/// Returns the name of the port of the second fabric that leads to a device.
pub(super) fn port(netns: &Netns, device: &str) -> String {
    format!("{}-{device}", netns.name)
}

fn plug(fabric: &Netns, netns: &Netns, device: &str, own: Addresses) -> Result<()> {
    let port = port(netns, device);
    let (here, there) = (&fabric.namespace, &netns.namespace);
    ip(None, &format!("link add {port} netns {here} type veth peer name {device} netns {there}\n"))?;
    ip(Some(here), &format!("link set {port} master br1 up\n"))?;
    ip(
        Some(there),
        &format!(
            "link set {device} up\naddr add {}/24 dev {device}\naddr add {}/64 dev {device} nodad\n",
            own.v4, own.v6
        ),
    )
}

pub(super) fn connect(network: Network, fabric: &Netns, node: &Netns, number: NodeNumber) -> Result<()> {
    let Some(other) = NODES.into_iter().find(|other| *other != number) else { bail!("no other node") };
    let (device, own, its) = (network.device(), network.node(number), network.node(other));
    let (under, its_under) = (address::node(number).v4, address::node(other).v4);
    let pods = address::pod(network.pods_of(other), 0);
    let script = match network {
        Network::Vxlan => format!(
            "link add {device} address {} type vxlan id 1 local {under} remote {its_under} dev eth0 dstport 8472 nolearning\n\
             addr add {}/32 dev {device}\naddr add {}/128 dev {device} nodad\nlink set {device} up\n\
             neigh add {its4} lladdr {there} dev {device} nud permanent\n\
             neigh add {its6} lladdr {there} dev {device} nud permanent\n\
             route add {}/24 via {its4} dev {device} onlink\nroute add {}/64 via {its6} dev {device} onlink\n",
            link_address(number),
            own.v4,
            own.v6,
            pods.v4,
            pods.v6,
            there = link_address(other),
            its4 = its.v4,
            its6 = its.v6,
        ),
        Network::Ipip => format!(
            "link add {device} type ipip local {under} ttl 64\n\
             addr add {}/32 dev {device}\nlink set {device} up\n\
             route add {}/24 via {its_under} dev {device} onlink\n",
            own.v4, pods.v4
        ),
        Network::WireGuard => format!(
            "link add {device} type wireguard\naddr add {}/32 dev {device}\naddr add {}/128 dev {device} nodad\n\
             link set {device} up\nroute add {}/24 dev {device}\nroute add {}/64 dev {device}\n",
            own.v4, own.v6, pods.v4, pods.v6
        ),
        Network::SecondUplink => {
            plug(fabric, node, device, own)?;
            format!("route add {}/24 via {}\nroute add {}/64 via {}\n", pods.v4, its.v4, pods.v6, its.v6)
        }
        Network::Vlan | Network::VlanInVlan => format!(
            "{made}addr add {}/32 dev {device}\naddr add {}/128 dev {device} nodad\nlink set {device} up\n\
             route add {}/24 via {} dev {device} onlink\nroute add {}/64 via {} dev {device} onlink\n",
            own.v4,
            own.v6,
            pods.v4,
            its.v4,
            pods.v6,
            its.v6,
            made = if network == Network::Vlan {
                "link add link eth0 name eth0.7 type vlan id 7\n"
            } else {
                VLAN_IN_VLAN
            },
        ),
    };
    node.ip(&script)?;
    if network == Network::WireGuard {
        let key_of = |node: NodeNumber| KEYS[usize::from(node) - 1];
        let ([private, _], [_, public]) = (key_of(number), key_of(other));
        let set = format!(
            "echo {private} | wg set {device} private-key /dev/stdin listen-port 51820 \
             peer {public} endpoint {its_under}:51820 allowed-ips 0.0.0.0/0,::/0"
        );
        run(&node.namespace, "sh", &["-c", &set])?;
    }
    filter_by_reverse_path(node, device)
}

/// Makes the client outside and node 1 reach each other by [`Network::VlanInVlan`].
pub(super) fn join_vlan_in_vlan(outside: &Netns, node: &Netns) -> Result<()> {
    let network = Network::VlanInVlan;
    let (device, of_node, own) = (network.device(), network.node(1), address::pod(network.pods_of(9), 0));
    let route =
        |to: Addresses| format!("route add {} dev {device}\nroute add {} dev {device}\n", to.v4, to.v6);
    outside.ip(&format!(
        "{VLAN_IN_VLAN}link set {device} up\naddr add {}/32 dev {device}\naddr add {}/128 dev {device} nodad\n{}",
        own.v4,
        own.v6,
        route(of_node)
    ))?;
    node.ip(&route(own))
}

fn link_address(node: NodeNumber) -> String {
    format!("ee:ee:ee:ee:01:{node:02x}")
}

/// Filters strictly by reverse path. The kernel itself does this for IPv4 only; firewalld does the
/// same for IPv6.
fn filter_by_reverse_path(node: &Netns, device: &str) -> Result<()> {
    // The kernel uses the larger of both values.
    sysctl(
        &node.namespace,
        &[("net/ipv4/conf/all/rp_filter", "0"), (&format!("net/ipv4/conf/{device}/rp_filter"), "1")],
    )?;
    nft(
        &node.namespace,
        &format!(
            "add table ip6 lab; add chain ip6 lab paths {{ type filter hook prerouting priority raw; }}; \
             add rule ip6 lab paths iifname \"{device}\" ip6 saddr != fe80::/10 fib saddr . iif oif missing counter drop"
        ),
    )
    .map(drop)
}
