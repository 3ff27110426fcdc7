//! Service ports: the maps `services`, `service_names` and `service_counters`.

use super::EndpointSet;

/// The index into `services` that is never used.
pub const NO_SERVICE: u32 = u32::MAX;

/// Some endpoint of the service is usable on some node. An empty endpoint set then means "drop"
/// (policy Local without a local endpoint), and otherwise "refuse".
pub const SERVICE_HAS_ENDPOINTS: u32 = 1;
/// The internal traffic policy is Local. Like the flags below, it is for people alone: the endpoint
/// sets and the flags of frontends are what follows from it.
pub const SERVICE_INTERNAL_LOCAL: u32 = 2;
pub const SERVICE_EXTERNAL_LOCAL: u32 = 4;
/// The frontends of the service have `FRONTEND_MAGLEV`.
pub const SERVICE_MAGLEV: u32 = 8;
/// The frontends of the service have `FRONTEND_LEAST_CONNECTION`.
pub const SERVICE_LEAST_CONNECTION: u32 = 16;
/// The frontends of the service have `FRONTEND_DSR`.
pub const SERVICE_DSR: u32 = 32;

/// Value of the map `services` (mmapable array, index: service id), with one entry for each service
/// port. An entry that is all zero is unused.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Service {
    /// The endpoint set with every usable endpoint of the cluster.
    pub cluster: EndpointSet,
    /// The endpoint set for clients of the ClusterIP, by the internal traffic policy.
    pub internal: EndpointSet,
    /// The endpoint set for clients from outside, by the external traffic policy.
    pub external: EndpointSet,
    /// Flags of the service (`SERVICE_*`).
    pub flags: u32,
    /// The duration of session affinity in seconds; 0: the service has none.
    pub affinity_seconds: u32,
}

/// The room for a namespace, a name or a port name. Kubernetes allows 63 bytes.
pub const NAME_BYTES: usize = 64;

/// Value of the map `service_names` (hash, key: service id): which service port has an id. It is
/// for people and for the next controller, and no program reads it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(C)]
pub struct ServiceName {
    /// The namespace. It is padded with zeros, and so are the next two fields.
    pub namespace: [u8; NAME_BYTES],
    pub name: [u8; NAME_BYTES],
    /// The name of the port. All zero: it is the service's only port, which has no name.
    pub port: [u8; NAME_BYTES],
    /// The IANA protocol number.
    pub protocol: u8,
    /// The IP family, 4 or 6.
    pub family: u8,
}

impl Default for ServiceName {
    fn default() -> Self {
        let empty = [0; NAME_BYTES];
        Self { namespace: empty, name: empty, port: empty, protocol: 0, family: 0 }
    }
}

/// Value of the map `service_counters` (per-CPU array, index: that of `services`): what the clients
/// of a service did. Services with larger indexes than the map has are not counted.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct ServiceCounters {
    /// The number of sockets that were connected, of first datagrams of unconnected sockets to the
    /// service, and of flows that were opened.
    pub connections: u64,
    /// The number of packets of flows, in both directions. Packets of sockets that were sent to a
    /// backend at `connect` are not seen.
    pub packets: u64,
    /// The bytes of these packets as the hook sees them: with the link header, and merged segments
    /// as one packet.
    pub bytes: u64,
}

const _: () = {
    assert!(size_of::<Service>() == 32);
    assert!(size_of::<ServiceName>() == 194);
    assert!(size_of::<ServiceCounters>() == 24);
};
