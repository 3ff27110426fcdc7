//! Packets in fragments: the maps `fragments4/6`.

/// The packet enters the node.
pub const FRAGMENT_ARRIVING: u8 = 0;
/// The packet leaves the node.
pub const FRAGMENT_LEAVING: u8 = 1;
/// The packet has come inside another packet.
pub const FRAGMENT_UNPACKED: u8 = 2;

/// Key of the map `fragments4/6` (LRU hash): the packet that a fragment is part of, at a hook of
/// one direction.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct FragmentKey<A> {
    pub source: A,
    pub destination: A,
    /// The id of the packet, in host byte order. In IPv4 it has 16 bits.
    pub id: u32,
    /// The IANA protocol number. 0 for IPv6: its stack reassembles without it, and a later fragment
    /// need not have it.
    pub protocol: u8,
    /// The direction of the packet (`FRAGMENT_*`).
    pub direction: u8,
    pub(crate) _reserved: u16,
}

/// The fragments go on as they are.
pub const FATE_PASSED: u32 = 0;
/// The fragments are dropped.
pub const FATE_DROPPED: u32 = 1;
/// The fragments get the recorded addresses, and go on.
pub const FATE_TRANSLATED: u32 = 2;
/// The fragments get the recorded addresses, and go by the route to their new destination.
pub const FATE_REROUTED: u32 = 3;
/// The fragments get the recorded addresses, and enter the node by the interface that leads to
/// their new source.
pub const FATE_INTO_NODE: u32 = 4;
/// The fragments get the recorded addresses, and go to the backend inside a packet.
pub const FATE_ENCAPSULATED: u32 = 5;
/// The fragments are not translated, and skip the stack.
pub const FATE_SKIPS_STACK: u32 = 6;

/// Value of the map `fragments4/6`: the fate of the first fragment, which the others share.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct FirstFragment<A> {
    /// The time at which the first fragment was seen, in nanoseconds since boot, suspend included.
    /// It is the first field for the same reason as in [`Flow`](super::Flow).
    pub seen: u64,
    pub source: A,
    pub destination: A,
    /// Index into `services` that the packet counts for, or `NO_SERVICE`.
    pub service: u32,
    /// The fate of the fragments (`FATE_*`).
    pub fate: u32,
    /// The id of the key. It is repeated, because the kernel may give the element to another packet
    /// at any time.
    pub id: u32,
    /// The index of the interface by which the first fragment has come or left.
    pub interface: u32,
}

const _: () = {
    assert!(size_of::<FragmentKey<[u8; 4]>>() == 16 && size_of::<FragmentKey<[u8; 16]>>() == 40);
    assert!(size_of::<FirstFragment<[u8; 4]>>() == 32 && size_of::<FirstFragment<[u8; 16]>>() == 56);
};
