//! The inventory of maps, limits and programs, each listed once.
//!
//! The kernel crate defines maps and programs from these lists. The controller sizes, checks, opens
//! and attaches them by the same lists.

macro_rules! limits {
    ($($limit:ident $field:ident: $name:literal, $default:literal, first $first:expr;)+) => {
        /// A size that users set.
        #[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
        pub enum Limit { $($limit,)+ }

        impl Limit {
            pub const ALL: &'static [Self] = &[$(Self::$limit,)+];

            /// Returns the name of the field of `ebpf.limits`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$limit => $name,)+ }
            }

            /// Returns how many entries each map of this limit has if users set nothing.
            pub const fn default_entries(self) -> u32 {
                match self { $(Self::$limit => $default,)+ }
            }

            /// Returns how many entries the maps have room for at first if the limit is set to
            /// `limit`. They grow up to it when more is desired.
            pub const fn first_entries(self, limit: u32) -> u32 {
                let first: u32 = match self { $(Self::$limit => $first,)+ };
                if first < limit { first } else { limit }
            }
        }

        /// The most entries that the maps of each limit have room for.
        #[derive(Clone, Copy, Debug, Eq, PartialEq)]
        pub struct Limits { $(pub $field: u32,)+ }

        impl Default for Limits {
            fn default() -> Self {
                Self { $($field: $default,)+ }
            }
        }

        impl Limits {
            pub const fn entries(&self, limit: Limit) -> u32 {
                match limit { $(Limit::$limit => self.$field,)+ }
            }
        }
    };
}

/// The value of `first` for maps that have the size of the limit from the beginning.
const FIXED: u32 = u32::MAX;

limits! {
    Frontends frontends: "frontends", 1_048_576, first 131_072;
    Services services: "services", 1_048_576, first 131_072;
    Slots slots: "slots", 4_194_304, first 524_288;
    Backends backends: "backends", 2_097_152, first 262_144;
    Flows flows: "flows", 524_288, first FIXED;
    OpeningFlows opening_flows: "openingFlows", 65_536, first FIXED;
    Affinity affinity: "affinity", 65_536, first FIXED;
    Fragments fragments: "fragments", 16_384, first FIXED;
    SourceRanges source_ranges: "sourceRanges", 262_144, first FIXED;
    NodeAddresses node_addresses: "nodeAddresses", 1_024, first FIXED;
    ServiceCounters service_counters: "serviceCounters", 1_024, first FIXED;
}

/// Calls the macro `$define` with every pinned map, as `name: kind(key, value), entries`. The types
/// are those of `layout`, with `A4` and `A6` for the addresses. Entries in brackets are a
/// [`Limit`]. The documentation of a map of IPv4 is that of its twin of IPv6 too, which comes next
/// to it, and docs/design/map-list.md has it.
///
/// - `preallocated_hash`: a hash map whose memory is allocated with it, as in former versions.
/// - `devices`: a hash of devices that frames can be sent by.
/// - `lpm_trie`: its keys are a [`PrefixKey`](crate::layout::PrefixKey) of the type.
/// - `ring`: it has no keys, and its size is in bytes.
#[macro_export]
macro_rules! maps {
    ($define:ident) => {
        $define! {
            /// The service of each address, port, protocol and scope that clients dial. The
            /// controller writes it.
            frontends4: hash(FrontendKey<A4>, Frontend), [Frontends];
            frontends6: hash(FrontendKey<A6>, Frontend), [Frontends];
            /// Each service port with its three endpoint sets and its session affinity. The
            /// controller writes it.
            services: shared_array(u32, Service), [Services];
            /// A bit for each hash of a frontend's address, by which most packets of no Service are
            /// recognized. The controller writes it.
            frontend_addresses4: shared_array(u32, u64), FRONTEND_ADDRESS_WORDS;
            frontend_addresses6: shared_array(u32, u64), FRONTEND_ADDRESS_WORDS;
            /// The name of each service port, for people and for the next controller. No program
            /// reads it.
            service_names: hash(u32, ServiceName), [Services];
            /// The endpoint sets, each followed by its lookup table if it has one. The controller
            /// writes it.
            slots4: shared_array(u32, Slot4), [Slots];
            slots6: shared_array(u32, Slot6), [Slots];
            /// Endpoints by an id that is never given again. One that no service uses is kept for
            /// flows and sockets. The controller writes it.
            backends4: hash(u32, Backend<A4>), [Backends];
            backends6: hash(u32, Backend<A6>), [Backends];
            /// Established flows, with an entry for each pair of ends of their packets. Programs
            /// write it, and the controller removes what has expired.
            flows4: hash(FlowKey<A4>, Flow<A4>), [Flows];
            flows6: hash(FlowKey<A6>, Flow<A6>), [Flows];
            /// Flows whose client is not proven yet. Programs write it, and the controller removes
            /// what has expired.
            opening_flows4: lru_hash(FlowKey<A4>, Flow<A4>), [OpeningFlows];
            opening_flows6: lru_hash(FlowKey<A6>, Flow<A6>), [OpeningFlows];
            /// Host connections, which leave with an address that flows are masqueraded to.
            /// Programs write it.
            host_connections4: lru_hash(FlowKey<A4>, HostConnection), [OpeningFlows];
            host_connections6: lru_hash(FlowKey<A6>, HostConnection), [OpeningFlows];
            /// The backend of each client of a service with session affinity. Programs write it,
            /// and the controller removes what has expired.
            affinity4: lru_hash(AffinityKey<A4>, Affinity), [Affinity];
            affinity6: lru_hash(AffinityKey<A6>, Affinity), [Affinity];
            /// The client addresses that may dial a service with source ranges. The controller
            /// writes it.
            source_ranges4: lpm_trie(SourceRange<A4>, u32), [SourceRanges];
            source_ranges6: lpm_trie(SourceRange<A6>, u32), [SourceRanges];
            /// The ranges of ClusterIPs, if packets to unallocated addresses are dropped. The
            /// controller writes it.
            service_cidrs4: lpm_trie(A4, u32), SERVICE_CIDRS;
            service_cidrs6: lpm_trie(A6, u32), SERVICE_CIDRS;
            /// The fate of a packet's first fragment, which the others share. Programs write it.
            fragments4: lru_hash(FragmentKey<A4>, FirstFragment<A4>), [Fragments];
            fragments6: lru_hash(FragmentKey<A6>, FirstFragment<A6>), [Fragments];
            /// The addresses of the node, at which node ports are served. The controller writes it.
            node_addresses4: hash(A4, NodeAddress), [NodeAddresses];
            node_addresses6: hash(A6, NodeAddress), [NodeAddresses];
            /// The interfaces that differ from the default. The controller writes it.
            interfaces: hash(u32, InterfaceSettings), [NodeAddresses];
            /// The VLAN interface that receives a tagged packet. The controller writes it.
            vlan_devices: hash(VlanTag, u32), [NodeAddresses];
            /// The network namespace of the pod behind each interface. The controller writes it.
            pod_namespaces: hash(u32, u32), [NodeAddresses];
            /// The interfaces whose packets XDP may redirect. The controller writes it.
            redirect_sources: preallocated_hash(u32, LinkAddress), REDIRECTS;
            /// The interfaces that XDP may redirect packets to. The controller writes it.
            redirect_targets: devices(u32, RedirectTarget), REDIRECTS;
            /// Source ports for masquerading, in the order of their use. The controller writes it.
            masquerade_ports: shared_array(u32, FourPorts), (MASQUERADE_PORT_ROOM / 4);
            /// Ports of flows whose entries have another key than their packets have. Programs and
            /// the controller write it.
            remapped_ports: array(u32, u32), PORTS;
            /// The destination that a connected socket has dialled, and its backend. Programs write
            /// it.
            socket_origin4: socket_storage(u32, SocketOrigin<A4>), 0;
            socket_origin6: socket_storage(u32, SocketOrigin<A6>), 0;
            /// The services that an unconnected socket has sent datagrams to, and the backends.
            /// Programs write it.
            datagrams4: socket_storage(u32, DatagramOrigins<A4>), 0;
            datagrams6: socket_storage(u32, DatagramOrigins<A6>), 0;
            /// The settings that the controller tells all programs.
            settings: array(u32, Settings), 1;
            /// The time until which programs serve (`ebpf.withdrawAfter`). The controller writes
            /// it.
            lease: array(u32, Lease), 1;
            /// A number that the controller raises after each change of routes, neighbours or
            /// interfaces.
            route_epoch: shared_array(u32, RouteEpoch), 1;
            /// The number of decisions for each reason. Programs write it.
            counters: per_cpu_array(u32, u64), REASONS;
            /// The choice of events that somebody watches for. `proxy-ctl monitor` writes it.
            event_control: array(u32, EventControl), 1;
            /// The events for `proxy-ctl monitor`. Programs write it.
            events: ring(u32, Event), EVENT_BYTES;
            /// The connections, packets and bytes of a service. Programs write it.
            service_counters: per_cpu_array(u32, ServiceCounters), [ServiceCounters];
            /// The connections of a backend that programs have seen begin and end, for least
            /// connection. Programs write it.
            connections: hash(u32, Connections), [Backends];
            /// The connections of a backend that have ended without the programs. The controller
            /// writes it.
            collected: hash(u32, Collected), [Backends];
        }
    };
}

/// Calls the macro `$define` with every program on the cgroup, as `name: attach type`.
#[macro_export]
macro_rules! socket_programs {
    ($define:ident) => {
        $define! {
            connect4: BPF_CGROUP_INET4_CONNECT;
            connect6: BPF_CGROUP_INET6_CONNECT;
            sendmsg4: BPF_CGROUP_UDP4_SENDMSG;
            sendmsg6: BPF_CGROUP_UDP6_SENDMSG;
            recvmsg4: BPF_CGROUP_UDP4_RECVMSG;
            recvmsg6: BPF_CGROUP_UDP6_RECVMSG;
            getpeername4: BPF_CGROUP_INET4_GETPEERNAME;
            getpeername6: BPF_CGROUP_INET6_GETPEERNAME;
        }
    };
}

/// Calls the macro `$define` with every program on an interface, as
/// `name: (role, direction, has Ethernet header)`. The role is that of the interface.
#[macro_export]
macro_rules! packet_programs {
    ($define:ident) => {
        $define! {
            workload_ingress: (Workload, Ingress, true);
            workload_egress: (Workload, Egress, true);
            uplink_ingress: (Uplink, Ingress, true);
            uplink_egress: (Uplink, Egress, true);
            workload_ingress_l3: (Workload, Ingress, false);
            workload_egress_l3: (Workload, Egress, false);
            uplink_ingress_l3: (Uplink, Ingress, false);
            uplink_egress_l3: (Uplink, Egress, false);
        }
    };
}

/// Names of the maps.
#[expect(non_upper_case_globals, reason = "a constant is spelled as the map that it names")]
pub mod map_name {
    macro_rules! names {
        ($($(#[doc = $doc:literal])* $name:ident: $kind:ident $types:tt, $entries:tt;)+) => {
            $(pub const $name: &str = stringify!($name);)+
        };
    }
    maps!(names);

    /// The maps in which programs keep flows, in the order in which they are copied if they get
    /// another size.
    pub const OF_FLOWS: [&str; 6] =
        [opening_flows4, opening_flows6, flows4, flows6, host_connections4, host_connections6];

    /// The pinned maps of former versions that no program needs any more.
    pub const FORMER: [&str; 6] = [
        "flows4_maps",
        "flows6_maps",
        "opening_flows4_maps",
        "opening_flows6_maps",
        "foreign_flows4_maps",
        "foreign_flows6_maps",
    ];

    /// The names that maps had in former versions, each with today's name.
    pub const RENAMED: [(&str, &str); 3] = [
        ("foreign_flows4", host_connections4),
        ("foreign_flows6", host_connections6),
        ("moved_ports", remapped_ports),
    ];

    /// The map of the programs' log. It is not pinned: each load of the programs has its own.
    pub const kernel_log: &str = "kernel_log";
    /// The map with the time, in nanoseconds since boot, until which no flow opens. It is not
    /// pinned either: what a killed controller has held is free again when that time comes.
    pub const openings_held_until: &str = "openings_held_until";
}

/// Names of the programs.
#[expect(non_upper_case_globals, reason = "a constant is spelled as the program that it names")]
pub mod program {
    macro_rules! names {
        ($($name:ident: $index:tt;)+) => {
            $(pub const $name: &str = stringify!($name);)+
            /// Every program on an interface.
            pub const ON_INTERFACES: &[&str] = &[$($name,)+];
        };
    }
    packet_programs!(names);

    macro_rules! further {
        ($($(#[doc = $doc:literal])+ $name:ident;)+) => {
            $($(#[doc = $doc])+ pub const $name: &str = stringify!($name);)+
            /// Every program that is in none of the lists above, with its documentation.
            pub const FURTHER: &[(&str, &str)] = &[$(($name, concat!($($doc),+)),)+];
        };
    }
    further! {
        /// The XDP program of uplinks, which runs before the network stack.
        xdp_forward;
        /// The XDP program of uplinks for kernels whose drivers hand over frames in fragments, from
        /// Linux 5.18 on.
        xdp_forward_frags;
        /// The program on the cgroup that runs when a socket is closed. It is attached only while
        /// sockets are counted.
        sock_release;
        /// The program that tells the controller its own network namespace on kernels where no
        /// system call does. It is attached to the hook of `connect4` for a moment.
        learn_namespace;
    }
}
