//! The tables. Sizes are what the controller sets at load, unless it is told otherwise.
#![expect(non_upper_case_globals, reason = "a symbol is its table's name, which people read in bpftool")]

use aya_ebpf::{
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC},
    btf_maps::{Array, HashMap, LruHashMap, PerCpuArray, SkStorage},
    macros::btf_map,
};
use proxy_common::{flow::Scratch, layout::*, reason::REASONS};

const MMAPABLE: usize = BPF_F_MMAPABLE as usize;
const NO_PREALLOC: usize = BPF_F_NO_PREALLOC as usize;

type A4 = [u8; 4];
type A6 = [u8; 16];

macro_rules! tables {
    ($($name:ident: $kind:ty;)+) => {
        $(
            #[btf_map]
            pub(crate) static $name: $kind = <$kind>::new();
        )+
    };
}

tables! {
    frontends4: HashMap<FrontendKey<A4>, Frontend, 131_072, NO_PREALLOC>;
    frontends6: HashMap<FrontendKey<A6>, Frontend, 131_072, NO_PREALLOC>;
    services: Array<Service, 131_072, MMAPABLE>;
    service_names: HashMap<u32, ServiceName, 131_072, NO_PREALLOC>;
    slots4: Array<Slot4, 524_288, MMAPABLE>;
    slots6: Array<Slot6, 524_288, MMAPABLE>;
    backends4: HashMap<u32, Backend<A4>, 262_144, NO_PREALLOC>;
    backends6: HashMap<u32, Backend<A6>, 262_144, NO_PREALLOC>;
    node_addresses4: HashMap<A4, NodeAddress, 1_024, NO_PREALLOC>;
    node_addresses6: HashMap<A6, NodeAddress, 1_024, NO_PREALLOC>;
    flows4: HashMap<FlowKey<A4>, Flow<A4>, 524_288, NO_PREALLOC>;
    flows6: HashMap<FlowKey<A6>, Flow<A6>, 524_288, NO_PREALLOC>;
    opening_flows4: LruHashMap<FlowKey<A4>, Flow<A4>, 65_536>;
    opening_flows6: LruHashMap<FlowKey<A6>, Flow<A6>, 65_536>;
    socket_origin4: SkStorage<SocketOrigin<A4>>;
    socket_origin6: SkStorage<SocketOrigin<A6>>;
    datagrams4: SkStorage<DatagramOrigins<A4>>;
    datagrams6: SkStorage<DatagramOrigins<A6>>;
    settings: Array<Settings, 1>;
    counters: PerCpuArray<u64, { REASONS as usize }>;
    service_counters: PerCpuArray<ServiceCounters, 1_024>;
    scratch4: PerCpuArray<Scratch<A4>, 1>;
    scratch6: PerCpuArray<Scratch<A6>, 1>;
}
