//! Session affinity: the maps `affinity4/6`.

/// The client is beyond the uplink, so its address may be forged.
pub const CLIENT_OUTSIDE: u32 = 0;
/// The client is in a pod of this node.
pub const CLIENT_WORKLOAD: u32 = 1;
/// The client is the node itself, which is one client, whatever its address is.
pub const CLIENT_NODE: u32 = 2;

/// A client for session affinity.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct Client<A> {
    /// The address of the client. Unspecified: the client is the node itself.
    pub address: A,
    /// The origin of the client (`CLIENT_*`).
    pub origin: u32,
}

/// Key of the map `affinity4/6` (LRU hash): a client of a service port with session affinity.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct AffinityKey<A> {
    /// Index into `services`.
    pub service: u32,
    pub client: Client<A>,
}

/// Value of the map `affinity4/6`: the backend of the client's new connections. It counts until it
/// expires, and only for endpoint sets that have the backend.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct Affinity {
    /// The time of the client's last new connection, in nanoseconds since boot, suspend included.
    pub last_used: u64,
    /// Key of `backends4/6`.
    pub backend: u32,
    /// The `BACKEND_*` flags that the slot had.
    pub flags: u32,
}

const _: () = {
    assert!(size_of::<AffinityKey<[u8; 4]>>() == 12 && size_of::<AffinityKey<[u8; 16]>>() == 24);
    assert!(size_of::<Affinity>() == 16);
};
