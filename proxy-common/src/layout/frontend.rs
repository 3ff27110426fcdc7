//! Addresses that clients dial, and ranges of clients that may: the maps `frontends4/6`,
//! `frontend_addresses4/6`, `source_ranges4/6` and `service_cidrs4/6`.

use super::{Address, NO_SERVICE};
use crate::port::Port;

/// The scope of a frontend that is the address in the key.
pub const SCOPE_ADDRESS: u8 = 0;
/// The scope of a frontend that is this port on every address of `node_addresses4/6`. The address
/// in the key is unspecified.
pub const SCOPE_NODE_PORT: u8 = 1;

/// Key of the map `frontends4/6` (hash): what clients dial.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct FrontendKey<A> {
    pub address: A,
    port: u16,
    /// The IANA protocol number.
    pub protocol: u8,
    /// The scope of the frontend (`SCOPE_*`).
    pub scope: u8,
}

impl<A: Address> FrontendKey<A> {
    #[inline(always)]
    pub fn of_address(address: A, port: Port, protocol: u8) -> Self {
        Self { address, port: port.number(), protocol, scope: SCOPE_ADDRESS }
    }

    #[inline(always)]
    pub fn of_node_port(port: Port, protocol: u8) -> Self {
        Self { address: A::UNSPECIFIED, port: port.number(), protocol, scope: SCOPE_NODE_PORT }
    }

    /// Returns the key of the entry which says that the address is a ClusterIP. Clients of its
    /// ports without a frontend of their own are refused.
    ///
    /// Port and protocol are 0, so that no packet looks the entry up. Its value is
    /// [`Frontend::NONE`].
    #[inline(always)]
    pub fn of_cluster_ip(address: A) -> Self {
        Self { address, port: 0, protocol: 0, scope: SCOPE_ADDRESS }
    }

    #[inline(always)]
    pub fn is_cluster_ip(&self) -> bool {
        self.port == 0 && self.protocol == 0
    }

    /// Returns true for a frontend that is served at its address alone.
    pub fn is_of_address(&self) -> bool {
        self.scope == SCOPE_ADDRESS && !self.is_cluster_ip()
    }
}

/// The number of words of `frontend_addresses4/6`, arrays with a bit for each hash of an address.
///
/// The bit is set if some address with this hash has a frontend. Most packets without a flow are
/// not for Services, and one load tells that.
pub const FRONTEND_ADDRESS_WORDS: u32 = 8_192;

/// The frontend can be dialled from outside: it is a node port, an external IP or a load-balancer
/// IP.
///
/// Clients outside get the service's `external` set, and clients on this node its `cluster` set.
/// Without the flag the frontend is a ClusterIP, and every client gets `internal`.
pub const FRONTEND_EXTERNAL: u32 = 1;

/// Only clients in `source_ranges4/6` of the service are allowed.
pub const FRONTEND_SOURCE_RANGES: u32 = 2;

/// The external traffic policy is Local. The flag is set only together with `FRONTEND_EXTERNAL`.
pub const FRONTEND_LOCAL_POLICY: u32 = 4;

/// The service has session affinity, which goes by the address of the client.
pub const FRONTEND_AFFINITY: u32 = 8;

/// New connections draw their backend by a hash of their ends, if these are known. So each node
/// chooses the same backend.
pub const FRONTEND_MAGLEV: u32 = 16;

/// New connections draw two backends, and go to the one with fewer connections for its weight.
pub const FRONTEND_LEAST_CONNECTION: u32 = 32;
/// Packets of clients outside go to backends on other nodes inside a packet of this node, and the
/// answers go straight to the client (direct server return).
///
/// The flag is set only together with `FRONTEND_EXTERNAL`.
pub const FRONTEND_DSR: u32 = 64;

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Frontend {
    /// Index into `services`.
    pub service: u32,
    /// Flags of the frontend (`FRONTEND_*`).
    pub flags: u32,
}

impl Frontend {
    /// The frontend of no service.
    pub const NONE: Self = Self { service: NO_SERVICE, flags: 0 };
}

/// Key of an LPM trie.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(C)]
pub struct PrefixKey<K> {
    /// The number of bits of `data` that count, from its first byte on.
    pub bits: u32,
    pub data: K,
}

/// Key of the map `source_ranges4/6` (LPM trie): client addresses that may dial frontends with
/// `FRONTEND_SOURCE_RANGES`.
///
/// All bits of `service` count, and those of the range's prefix. The values have no meaning.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(C)]
pub struct SourceRange<A> {
    /// Index into `services`.
    pub service: u32,
    pub address: A,
}

impl<A: Address> SourceRange<A> {
    /// Returns the key of a range with this many bits.
    pub const fn of_prefix(service: u32, address: A, bits: u32) -> PrefixKey<Self> {
        PrefixKey { bits: u32::BITS + bits, data: Self { service, address } }
    }
}

/// The size of the maps `service_cidrs4/6` (LPM tries): the ranges of ClusterIPs, if packets to
/// unallocated addresses are dropped. The values have no meaning.
pub const SERVICE_CIDRS: u32 = 256;

ports! {
    FrontendKey: port;
}

const _: () = {
    assert!(size_of::<FrontendKey<[u8; 4]>>() == 8 && size_of::<FrontendKey<[u8; 16]>>() == 20);
    assert!(size_of::<Frontend>() == 8);
    assert!(
        size_of::<PrefixKey<SourceRange<[u8; 4]>>>() == 12
            && size_of::<PrefixKey<SourceRange<[u8; 16]>>>() == 24
    );
};
