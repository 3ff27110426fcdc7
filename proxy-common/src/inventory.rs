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
/// [`Limit`].
///
/// - `maps_of_…`: Programs write flows at any time, so a flow map can only change its size while
///   they work on it. They find it in an array of two maps, `<map>_maps`
///   ([`layout::MAP_IN_USE`](crate::layout::MAP_IN_USE)). The types are those of the inner maps.
/// - `preallocated_hash`: a hash map whose memory is allocated with it, as in former versions.
/// - `devices`: a hash of devices that frames can be sent by.
/// - `lpm_trie`: its keys are a [`PrefixKey`](crate::layout::PrefixKey) of the type.
/// - `ring`: it has no keys, and its size is in bytes.
#[macro_export]
macro_rules! tables {
    ($define:ident) => {
        $define! {
            frontends4: hash(FrontendKey<A4>, Frontend), [Frontends];
            frontends6: hash(FrontendKey<A6>, Frontend), [Frontends];
            services: shared_array(u32, Service), [Services];
            frontend_addresses4: shared_array(u32, u64), FRONTEND_ADDRESS_WORDS;
            frontend_addresses6: shared_array(u32, u64), FRONTEND_ADDRESS_WORDS;
            service_names: hash(u32, ServiceName), [Services];
            slots4: shared_array(u32, Slot4), [Slots];
            slots6: shared_array(u32, Slot6), [Slots];
            backends4: hash(u32, Backend<A4>), [Backends];
            backends6: hash(u32, Backend<A6>), [Backends];
            flows4: hash(FlowKey<A4>, Flow<A4>), [Flows];
            flows6: hash(FlowKey<A6>, Flow<A6>), [Flows];
            opening_flows4: lru_hash(FlowKey<A4>, Flow<A4>), [OpeningFlows];
            opening_flows6: lru_hash(FlowKey<A6>, Flow<A6>), [OpeningFlows];
            foreign_flows4: lru_hash(FlowKey<A4>, ForeignFlow), [OpeningFlows];
            foreign_flows6: lru_hash(FlowKey<A6>, ForeignFlow), [OpeningFlows];
            flows4_maps: maps_of_hash(FlowKey<A4>, Flow<A4>), 2;
            flows6_maps: maps_of_hash(FlowKey<A6>, Flow<A6>), 2;
            opening_flows4_maps: maps_of_lru_hash(FlowKey<A4>, Flow<A4>), 2;
            opening_flows6_maps: maps_of_lru_hash(FlowKey<A6>, Flow<A6>), 2;
            foreign_flows4_maps: maps_of_lru_hash(FlowKey<A4>, ForeignFlow), 2;
            foreign_flows6_maps: maps_of_lru_hash(FlowKey<A6>, ForeignFlow), 2;
            affinity4: lru_hash(AffinityKey<A4>, Affinity), [Affinity];
            affinity6: lru_hash(AffinityKey<A6>, Affinity), [Affinity];
            source_ranges4: lpm_trie(SourceRange<A4>, u32), [SourceRanges];
            source_ranges6: lpm_trie(SourceRange<A6>, u32), [SourceRanges];
            service_cidrs4: lpm_trie(A4, u32), SERVICE_CIDRS;
            service_cidrs6: lpm_trie(A6, u32), SERVICE_CIDRS;
            fragments4: lru_hash(FragmentKey<A4>, FirstFragment<A4>), [Fragments];
            fragments6: lru_hash(FragmentKey<A6>, FirstFragment<A6>), [Fragments];
            node_addresses4: hash(A4, NodeAddress), [NodeAddresses];
            node_addresses6: hash(A6, NodeAddress), [NodeAddresses];
            interfaces: hash(u32, InterfaceSettings), [NodeAddresses];
            vlan_devices: hash(VlanTag, u32), [NodeAddresses];
            pod_namespaces: hash(u32, u32), [NodeAddresses];
            redirect_sources: preallocated_hash(u32, LinkAddress), REDIRECTS;
            redirect_targets: devices(u32, RedirectTarget), REDIRECTS;
            masquerade_ports: shared_array(u32, FourPorts), (MASQUERADE_PORT_ROOM / 4);
            moved_ports: array(u32, u32), PORTS;
            socket_origin4: socket_storage(u32, SocketOrigin<A4>), 0;
            socket_origin6: socket_storage(u32, SocketOrigin<A6>), 0;
            datagrams4: socket_storage(u32, DatagramOrigins<A4>), 0;
            datagrams6: socket_storage(u32, DatagramOrigins<A6>), 0;
            settings: array(u32, Settings), 1;
            lease: array(u32, Lease), 1;
            route_epoch: shared_array(u32, RouteEpoch), 1;
            counters: per_cpu_array(u32, u64), REASONS;
            event_control: array(u32, EventControl), 1;
            events: ring(u32, Event), EVENT_BYTES;
            service_counters: per_cpu_array(u32, ServiceCounters), [ServiceCounters];
            connections: hash(u32, Connections), [Backends];
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
#[expect(non_upper_case_globals, reason = "a constant is spelled as the table that it names")]
pub mod table {
    macro_rules! names {
        ($($name:ident: $kind:ident $types:tt, $entries:tt;)+) => {
            $(pub const $name: &str = stringify!($name);)+
        };
    }
    tables!(names);

    /// The flow maps that change size while programs write them, each with the array in which
    /// programs find it.
    pub const RESIZABLE: [(&str, &str); 6] = [
        (flows4, flows4_maps),
        (flows6, flows6_maps),
        (opening_flows4, opening_flows4_maps),
        (opening_flows6, opening_flows6_maps),
        (foreign_flows4, foreign_flows4_maps),
        (foreign_flows6, foreign_flows6_maps),
    ];

    /// The map of the programs' log. It is not pinned: each load of the programs has its own.
    pub const kernel_log: &str = "kernel_log";
}

/// Names of the programs.
#[expect(non_upper_case_globals, reason = "a constant is spelled as the program that it names")]
pub mod program {
    macro_rules! names {
        ($($name:ident: $place:tt;)+) => {
            $(pub const $name: &str = stringify!($name);)+
            /// Every program on an interface.
            pub const ON_INTERFACES: &[&str] = &[$($name,)+];
        };
    }
    packet_programs!(names);

    /// The XDP program of uplinks, which runs before the network stack.
    pub const uplink_transit: &str = "uplink_transit";
    /// The XDP program of uplinks for kernels whose drivers hand over frames in fragments.
    pub const uplink_transit_frags: &str = "uplink_transit_frags";
    /// The program on the cgroup that runs when a socket is closed. It is attached only while
    /// sockets are counted.
    pub const sock_release: &str = "sock_release";
    /// The program that tells the controller its own network namespace on kernels where no system
    /// call does. It is attached to the hook of `connect4` for a moment.
    pub const learn_namespace: &str = "learn_namespace";
}
