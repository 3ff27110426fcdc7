//! Interfaces and the routes by which packets leave: the maps `interfaces`, `vlan_devices`,
//! `redirect_sources`, `redirect_targets` and `route_epoch`.

/// The interface brings traffic of pods.
pub const INTERFACE_OF_PODS: u16 = 1;
/// The interface is an uplink. Packets may skip the stack and leave by it.
pub const INTERFACE_OF_UPLINK: u16 = 2;
/// The packets of the interface have no link headers, as with IPIP and WireGuard.
pub const INTERFACE_WITHOUT_LINK_HEADERS: u16 = 4;

/// The interface is the port of a bridge, so frames for the bridge come by it, too.
pub const INTERFACE_OF_BRIDGE: u16 = 8;

/// Value of the map `interfaces` (hash, key: interface index). Only interfaces that differ from the
/// default have an entry.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct InterfaceSettings {
    /// The source address of flows that are masqueraded and leave by the interface. Unspecified:
    /// the interface has none of this family, and the address in
    /// [`Settings`](super::Settings) is taken.
    pub masquerade6: [u8; 16],
    /// The IPv4 source address, with the meaning of `masquerade6`.
    pub masquerade4: [u8; 4],
    /// Flags of the interface (`INTERFACE_*`).
    pub flags: u16,
    /// The length of the longest packet that leaves by the interface, without link header. 0: there
    /// is no limit. Uplinks have a value.
    pub mtu: u16,
}

/// Key of the map `vlan_devices` (hash). The value is the index of the interface to which the stack
/// gives a packet with this tag. The map has only uplinks.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
#[repr(C)]
pub struct VlanTag {
    /// The index of the interface by which the packet comes. For the inner one of two tags it is
    /// the interface of the outer tag.
    pub interface: u32,
    /// The Ethertype of the tag (`TAG_*`), in host byte order.
    pub protocol: u16,
    /// The VLAN id, 1 to 4094.
    pub id: u16,
}

/// The size of the maps `redirect_sources` and `redirect_targets`.
pub const REDIRECTS: u32 = 512;

/// Value of the map `redirect_sources` (hash, key: interface index): the link address of an uplink
/// whose frames XDP may send out by other interfaces. The uplink only overhears frames to other
/// addresses.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct LinkAddress {
    pub bytes: [u8; 6],
    pub _padding: [u8; 2],
}

/// Value of the map `redirect_targets` (map of devices): uplinks and interfaces of pods by which
/// XDP may send frames that have come by others. It has the layout of the kernel's
/// `bpf_devmap_val`.
///
/// The key is the interface index, with [`TO_POD`] for a pod's interface and with [`IN_FRAGMENTS`]
/// for frames in fragments. When a device goes, the kernel removes its entries.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct RedirectTarget {
    pub interface: u32,
    /// The program that the kernel runs on each frame. 0: there is none.
    pub program: u32,
}

/// The bit in the key for frames in fragments. No interface index has this bit, nor that of
/// [`TO_POD`].
pub const IN_FRAGMENTS: u32 = 1 << 31;
pub const TO_POD: u32 = 1 << 30;

/// The Ethertype of 802.1Q.
pub const TAG_CUSTOMER: u16 = 0x8100;
/// The Ethertype of 802.1ad.
pub const TAG_SERVICE: u16 = 0x88a8;

/// Value of the map `route_epoch` (mmapable array with one entry).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C, align(8))]
pub struct RouteEpoch {
    /// A number that the controller raises after each change of routes, neighbours or interfaces.
    /// Next hops are then looked up again.
    pub number: u32,
    pub _reserved: u32,
}

const _: () = {
    assert!(size_of::<InterfaceSettings>() == 24);
    assert!(size_of::<RouteEpoch>() == 8);
    assert!(size_of::<VlanTag>() == 8);
    assert!(size_of::<LinkAddress>() == 8);
    assert!(size_of::<RedirectTarget>() == 8);
};
