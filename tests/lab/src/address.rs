//! The lab's addressing plan.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use serde::{Deserialize, Serialize};

/// Number of a node, 1 or 2.
pub type NodeNumber = u8;

pub const SERVICE_RANGE4: &str = "10.96.0.0/12";
pub const SERVICE_RANGE6: &str = "fd00:10:96::/112";
pub const POD_RANGE4: &str = "10.244.0.0/16";
pub const POD_RANGE6: &str = "fd00:10:244::/48";

#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub enum Family {
    V4,
    V6,
}

pub const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

impl Family {
    pub fn of(address: IpAddr) -> Self {
        if address.to_canonical().is_ipv4() { Self::V4 } else { Self::V6 }
    }

    pub fn loopback(self) -> IpAddr {
        match self {
            Self::V4 => Ipv4Addr::LOCALHOST.into(),
            Self::V6 => Ipv6Addr::LOCALHOST.into(),
        }
    }
}

impl std::fmt::Display for Family {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// One address of each family.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Addresses {
    pub v4: Ipv4Addr,
    pub v6: Ipv6Addr,
}

impl Addresses {
    pub fn of(&self, family: Family) -> IpAddr {
        match family {
            Family::V4 => self.v4.into(),
            Family::V6 => self.v6.into(),
        }
    }

    pub fn both(&self) -> [IpAddr; 2] {
        FAMILIES.map(|family| self.of(family))
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        self.both().contains(&address.to_canonical())
    }

    /// Returns both addresses with `port`.
    pub fn with_port(&self, port: u16) -> [SocketAddr; 2] {
        self.both().map(|address| SocketAddr::new(address, port))
    }
}

/// Returns the addresses of a host on the network between the nodes.
pub fn fabric(host: u8) -> Addresses {
    Addresses {
        v4: Ipv4Addr::new(192, 0, 2, host),
        v6: Ipv6Addr::new(0x2001, 0xdb8, 0xc0, 0, 0, 0, 0, u16::from(host)),
    }
}

/// Returns the addresses of the fabric's own end. It is the nodes' default gateway, and an API
/// server listens there.
pub fn gateway() -> Addresses {
    fabric(1)
}

pub fn node(number: NodeNumber) -> Addresses {
    fabric(10 + number)
}

pub fn outside() -> Addresses {
    fabric(100)
}

/// Returns the `index`-th pod address of a node. On node 2, index 1 is the node's own address on
/// the bridge.
pub fn pod(node: NodeNumber, index: u8) -> Addresses {
    Addresses {
        v4: Ipv4Addr::new(10, 244, node, index),
        v6: Ipv6Addr::new(0xfd00, 0x10, 0x244, u16::from(node), 0, 0, 0, u16::from(index)),
    }
}

/// Returns a node's addresses on the second network between the nodes.
pub fn second_node(number: NodeNumber) -> Addresses {
    second(10 + number)
}

/// Returns the addresses of the client on the second network.
pub fn second_outside() -> Addresses {
    second(100)
}

fn second(host: u8) -> Addresses {
    Addresses {
        v4: Ipv4Addr::new(203, 0, 113, host),
        v6: Ipv6Addr::new(0x2001, 0xdb8, 0xc1, 0, 0, 0, 0, u16::from(host)),
    }
}

/// Returns the `index`-th address that the client outside sends to a node, for load balancers and
/// external IPs. No interface has it.
pub fn external(node: NodeNumber, index: u8) -> Addresses {
    Addresses {
        v4: Ipv4Addr::new(198, 18, node, index),
        v6: Ipv6Addr::new(0x2001, 0xdb8, 0xee, u16::from(node), 0, 0, 0, u16::from(index)),
    }
}

/// Returns the `index`-th cluster IP.
pub fn cluster_ip(index: u16) -> Addresses {
    let [high, low] = index.to_be_bytes();
    Addresses {
        v4: Ipv4Addr::new(10, 96, high, low),
        v6: Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, index),
    }
}

/// Returns an IPv4 address as an IPv6 socket writes it, and an IPv6 address unchanged.
pub fn mapped(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(v4) => SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port()),
        SocketAddr::V6(_) => address,
    }
}
