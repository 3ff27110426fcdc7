//! The node and its configuration: the maps `settings`, `lease`, `node_addresses4/6`,
//! `masquerade_ports` and `remapped_ports`.

/// Value of the map `node_addresses4/6` (hash, key: address): the addresses at which node ports are
/// served.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct NodeAddress {
    /// Flags of the address (`NODE_ADDRESS_*`).
    pub flags: u32,
}

/// The address is a loopback address. It serves node ports for processes in the node's own network
/// namespace only.
pub const NODE_ADDRESS_LOOPBACK: u32 = 1;

/// The configuration does not tell traffic of pods from other traffic.
pub const PODS_UNKNOWN: u16 = 0;
/// Traffic of pods has a source in `Settings::pod_range4/6`.
pub const PODS_BY_SOURCE: u16 = 1;
/// Traffic of pods comes in by interfaces with `INTERFACE_OF_PODS`.
pub const PODS_BY_INTERFACE: u16 = 2;

/// Packets with direct server return go to backends on other nodes in IP alone.
pub const ENCAPSULATION_IP: u16 = 0;
/// Packets with direct server return go to backends on other nodes in UDP, by Geneve.
pub const ENCAPSULATION_GENEVE: u16 = 1;

/// Value of the map `settings` (array with one entry): what the programs need to know of the node.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Settings {
    /// The cookie of the node's network namespace, as `bpf_get_netns_cookie` gives it.
    pub host_namespace: u64,
    /// The cookie of the socket by which the controller learns its namespace on kernels without
    /// SO_NETNS_COOKIE.
    pub probe_socket: u64,
    /// The IPv6 source of masqueraded flows, if `interfaces` has none. Unspecified: there is none.
    pub masquerade6: [u8; 16],
    /// The IPv4 source of masqueraded flows, with the meaning of `masquerade6`.
    pub masquerade4: [u8; 4],
    /// The ranges in which the reserved ports of `masquerade_ports` lie. There are up to two,
    /// inclusive, in host byte order; a range with first > last is empty.
    ///
    /// The programs of former versions know reserved ports only by this field.
    pub reserved_ports: [[u16; 2]; 2],
    /// The lowest backend id that was never given.
    pub next_backend: u32,
    /// A number that the controller raises after each change of what frontends lead to. The next
    /// datagram of a flow then compares the flow with the maps again. A segment does so if
    /// connections to gone endpoints are reset.
    pub epoch: u32,
    /// The number of ports in the map `masquerade_ports`, which are used as masquerade and alias
    /// ports.
    pub masquerade_ports: u16,
    /// The number of reserved ports among them, which come first. The kernel gives them to no
    /// socket.
    pub masquerade_ports_reserved: u16,
    /// The IPv6 range of pods' addresses, with `PODS_BY_SOURCE`.
    pub pod_range6: [u8; 16],
    /// The IPv4 range of pods' addresses, with `PODS_BY_SOURCE`.
    pub pod_range4: [u8; 4],
    /// The number of bits of `pod_range6` that count, from its first byte on.
    pub pod_range6_bits: u8,
    /// The number of bits of `pod_range4` that count, from its first byte on.
    pub pod_range4_bits: u8,
    /// 1: all clients of ClusterIPs are masqueraded, if the programs masquerade as kube-proxy does.
    pub masquerade_all: u8,
    /// 1: no packet opens a flow, because not all interfaces have their programs yet.
    pub packets_held: u8,
    /// The way to tell IPv6 traffic of pods from other traffic (`PODS_*`).
    pub pods6: u16,
    /// The encapsulation of packets with direct server return (`ENCAPSULATION_*`). Packets from
    /// other nodes are unpacked from either.
    pub encapsulation: u16,
    /// The way to tell IPv4 traffic of pods from other traffic (`PODS_*`).
    pub pods4: u16,
    /// 1: segments of connections that no map knows are answered, because netfilter translates none
    /// of them.
    pub answers_unknown: u8,
    pub _reserved: u8,
    /// The number of flows of each family that a CPU opens in a window before services are held to
    /// their shares ([`openings_per_window`](crate::flow::openings_per_window)). 0: there is no
    /// limit.
    pub openings_per_window: u32,
    /// The largest number of entries of `flows4`, and of `flows6`, that flows which [prove no
    /// client](super::Flow::proves_no_client) may have. 0: there is no limit.
    pub most_unproven_entries: u32,
}

/// Value of the map `masquerade_ports` (array): masquerade and alias ports, four in an element.
/// [`Settings`] say how many there are.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C, align(8))]
pub struct FourPorts {
    /// The ports in host byte order.
    pub ports: [u16; 4],
}

/// The number of ports that exist, 0 included.
pub const PORTS: u32 = 1 << 16;
/// The number of ports for which `masquerade_ports` has room.
pub const MASQUERADE_PORT_ROOM: u32 = PORTS;

/// Value of the map `lease` (array with one entry): how long the programs may rely on the maps
/// without their controller.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Lease {
    /// The end of the lease, in nanoseconds since boot, suspend included. 0: there is no lease.
    pub end: u64,
}

impl Lease {
    /// Returns true if the lease has ended. No controller has followed changes since then, so the
    /// programs pass everything untouched.
    #[inline(always)]
    pub const fn has_ended(&self, now: u64) -> bool {
        self.end != 0 && now >= self.end
    }
}

const _: () = {
    assert!(size_of::<Settings>() == 96);
    assert!(size_of::<FourPorts>() == 8);
    assert!(size_of::<Lease>() == 8);
};

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::none(0, u64::MAX, false)]
    #[case::goes_on(7, 6, false)]
    #[case::just_now(7, 7, true)]
    #[case::long_ago(7, u64::MAX, true)]
    fn a_lease_ends(#[case] end: u64, #[case] now: u64, #[case] expected: bool) {
        assert_eq!(Lease { end }.has_ended(now), expected);
    }
}
