//! The maps of the programs, by IP family.

use std::os::fd::AsFd as _;

use anyhow::{Context as _, Result, bail};
use aya::{
    Ebpf, Pod,
    maps::{Array, HashMap, LpmTrie, Map, MapData, PerCpuArray, lpm_trie},
};
use proxy_common::{
    family::{Family, Slot as _, V4, V6},
    flow::Stage,
    inventory::map_name,
    layout::*,
    port::Port,
};
use proxy_ctl::sys::bpf::map::Map as TypedMap;

use crate::wire::{Endpoint, Wire};

pub(crate) type FlowOf<W> = Flow<<W as Family>::Address>;
pub(crate) type FlowKeyOf<W> = FlowKey<<W as Family>::Address>;
pub(super) type FragmentMap<'a, W> =
    HashMap<&'a mut MapData, FragmentKey<<W as Family>::Address>, FirstFragment<<W as Family>::Address>>;
pub(super) type AffinityMap<'a, W> = HashMap<&'a mut MapData, AffinityKey<<W as Family>::Address>, Affinity>;
pub(super) type SourceRanges<'a, W> = LpmTrie<&'a mut MapData, SourceRange<<W as Family>::Address>, u32>;
pub(super) type ServiceCidrs<'a, W> = LpmTrie<&'a mut MapData, <W as Family>::Address, u32>;
pub(super) type FlowMap<'a, W> = HashMap<&'a mut MapData, FlowKeyOf<W>, FlowOf<W>>;

/// Names and accessors of the maps of one IP family.
pub(crate) trait Maps: Wire + Family<Address: Pod, Slot: Pod> {
    const FRONTENDS: &'static str;
    const FRONTEND_ADDRESSES: &'static str;
    const SLOTS: &'static str;
    const BACKENDS: &'static str;
    const NODE_ADDRESSES: &'static str;
    const FLOWS: &'static str;
    const OPENING_FLOWS: &'static str;
    const FRAGMENTS: &'static str;
    const AFFINITY: &'static str;
    const SOURCE_RANGES: &'static str;
    const SERVICE_CIDRS: &'static str;

    fn set_masquerade(settings: &mut Settings, address: Self::Address);
    fn set_source(interface: &mut InterfaceSettings, address: Self::Address);
    /// Makes the settings say that this address, and no other, is a pod's.
    fn set_pod_range(settings: &mut Settings, address: Self::Address);

    fn put_frontend(ebpf: &mut Ebpf, key: FrontendKey<Self::Address>, frontend: Frontend) -> Result<()> {
        Ok(hash(ebpf, Self::FRONTENDS)?.insert(key, frontend, 0)?)
    }

    fn remove_frontend(ebpf: &mut Ebpf, key: &FrontendKey<Self::Address>) -> Result<()> {
        Ok(hash::<FrontendKey<Self::Address>, Frontend>(ebpf, Self::FRONTENDS)?.remove(key)?)
    }

    /// Writes one word of the bitmap of frontend addresses, by which the programs recognise packets
    /// of no Service.
    fn put_frontend_addresses(ebpf: &mut Ebpf, word: u32, bits: u64) -> Result<()> {
        Ok(array(ebpf, Self::FRONTEND_ADDRESSES)?.set(word, bits, 0)?)
    }

    fn put_slot(ebpf: &mut Ebpf, index: u32, endpoint: Endpoint, backend: u32, flags: u32) -> Result<()> {
        let slot = Self::Slot::new(Self::address(endpoint.0), Port::new(endpoint.1), backend, flags);
        Ok(array(ebpf, Self::SLOTS)?.set(index, slot, 0)?)
    }

    fn put_backend(ebpf: &mut Ebpf, id: u32, backend: Backend<Self::Address>) -> Result<()> {
        Ok(hash(ebpf, Self::BACKENDS)?.insert(id, backend, 0)?)
    }

    fn remove_backend(ebpf: &mut Ebpf, id: u32) -> Result<()> {
        Ok(hash::<u32, Backend<Self::Address>>(ebpf, Self::BACKENDS)?.remove(&id)?)
    }

    fn put_node_address(ebpf: &mut Ebpf, address: Self::Address, flags: u32) -> Result<()> {
        Ok(hash(ebpf, Self::NODE_ADDRESSES)?.insert(address, NodeAddress { flags }, 0)?)
    }

    fn flow_map_name(stage: Stage) -> &'static str {
        match stage {
            Stage::Established => Self::FLOWS,
            Stage::Opening => Self::OPENING_FLOWS,
        }
    }

    fn flow_map(ebpf: &mut Ebpf, stage: Stage) -> Result<FlowMap<'_, Self>> {
        hash(ebpf, Self::flow_map_name(stage))
    }

    fn put_flow(ebpf: &mut Ebpf, stage: Stage, key: FlowKeyOf<Self>, flow: FlowOf<Self>) -> Result<()> {
        Ok(Self::flow_map(ebpf, stage)?.insert(key, flow, 0)?)
    }

    fn remove_flow(ebpf: &mut Ebpf, stage: Stage, key: FlowKeyOf<Self>) -> Result<()> {
        Ok(Self::flow_map(ebpf, stage)?.remove(&key)?)
    }

    fn flows(ebpf: &mut Ebpf, stage: Stage) -> Result<Vec<(FlowKeyOf<Self>, FlowOf<Self>)>> {
        Ok(Self::flow_map(ebpf, stage)?.iter().collect::<Result<Vec<_>, _>>()?)
    }

    fn affinity_map(ebpf: &mut Ebpf) -> Result<AffinityMap<'_, Self>> {
        hash(ebpf, Self::AFFINITY)
    }

    fn source_ranges(ebpf: &mut Ebpf) -> Result<SourceRanges<'_, Self>> {
        let map = ebpf.map_mut(Self::SOURCE_RANGES).context(Self::SOURCE_RANGES)?;
        Ok(LpmTrie::try_from(map)?)
    }

    /// Allows the range of `bits` bits that contains the address for a service.
    fn put_source_range(ebpf: &mut Ebpf, service: u32, address: Self::Address, bits: u32) -> Result<()> {
        let PrefixKey { bits, data } = SourceRange::of_prefix(service, address, bits);
        let key = lpm_trie::Key::new(bits, data);
        Ok(Self::source_ranges(ebpf)?.insert(&key, 0, 0)?)
    }

    fn service_cidrs(ebpf: &mut Ebpf) -> Result<ServiceCidrs<'_, Self>> {
        let map = ebpf.map_mut(Self::SERVICE_CIDRS).context(Self::SERVICE_CIDRS)?;
        Ok(LpmTrie::try_from(map)?)
    }

    /// Adds the ServiceCIDR of `bits` bits that contains the address.
    fn put_service_cidr(ebpf: &mut Ebpf, address: Self::Address, bits: u32) -> Result<()> {
        Ok(Self::service_cidrs(ebpf)?.insert(&lpm_trie::Key::new(bits, address), 0, 0)?)
    }

    fn fragment_map(ebpf: &mut Ebpf) -> Result<FragmentMap<'_, Self>> {
        hash(ebpf, Self::FRAGMENTS)
    }

    fn clear_source_ranges(ebpf: &mut Ebpf) -> Result<()> {
        let mut ranges = Self::source_ranges(ebpf)?;
        let keys = ranges.keys().collect::<Result<Vec<_>, _>>()?;
        Ok(keys.iter().try_for_each(|key| ranges.remove(key))?)
    }

    fn clear(ebpf: &mut Ebpf) -> Result<()> {
        Self::clear_source_ranges(ebpf)?;
        let mut cidrs = Self::service_cidrs(ebpf)?;
        let keys = cidrs.keys().collect::<Result<Vec<_>, _>>()?;
        keys.iter().try_for_each(|key| cidrs.remove(key))?;
        clear(Self::fragment_map(ebpf)?)?;
        clear(Self::affinity_map(ebpf)?)?;
        clear(hash::<FrontendKey<Self::Address>, Frontend>(ebpf, Self::FRONTENDS)?)?;
        clear(hash::<u32, Backend<Self::Address>>(ebpf, Self::BACKENDS)?)?;
        clear(hash::<Self::Address, NodeAddress>(ebpf, Self::NODE_ADDRESSES)?)?;
        clear(Self::flow_map(ebpf, Stage::Established)?)?;
        clear(Self::flow_map(ebpf, Stage::Opening)?)
    }
}

macro_rules! maps {
    ($family:ty, $masquerade:ident, $pods:ident, $pod_range:ident, $bits:ident, $($name:ident: $map:ident),+) => {
        impl Maps for $family {
            $(const $name: &'static str = map_name::$map;)+

            fn set_masquerade(settings: &mut Settings, address: Self::Address) {
                settings.$masquerade = address;
            }

            fn set_source(interface: &mut InterfaceSettings, address: Self::Address) {
                interface.$masquerade = address;
            }

            fn set_pod_range(settings: &mut Settings, address: Self::Address) {
                settings.$pods = PODS_BY_SOURCE;
                settings.$pod_range = address;
                settings.$bits = Self::Address::BITS as u8;
            }
        }
    };
}

maps!(V4, masquerade4, pods4, pod_range4, pod_range4_bits, FRONTENDS: frontends4, FRONTEND_ADDRESSES: frontend_addresses4, SLOTS: slots4, BACKENDS: backends4,
    NODE_ADDRESSES: node_addresses4, FLOWS: flows4, OPENING_FLOWS: opening_flows4, FRAGMENTS: fragments4,
    AFFINITY: affinity4, SOURCE_RANGES: source_ranges4, SERVICE_CIDRS: service_cidrs4);
maps!(V6, masquerade6, pods6, pod_range6, pod_range6_bits, FRONTENDS: frontends6, FRONTEND_ADDRESSES: frontend_addresses6, SLOTS: slots6, BACKENDS: backends6,
    NODE_ADDRESSES: node_addresses6, FLOWS: flows6, OPENING_FLOWS: opening_flows6, FRAGMENTS: fragments6,
    AFFINITY: affinity6, SOURCE_RANGES: source_ranges6, SERVICE_CIDRS: service_cidrs6);

pub(super) fn hash<'a, K: Pod, V: Pod>(
    ebpf: &'a mut Ebpf,
    name: &str,
) -> Result<HashMap<&'a mut MapData, K, V>> {
    let map = ebpf.map_mut(name).with_context(|| format!("no map {name}"))?;
    HashMap::try_from(map).with_context(|| format!("map {name}"))
}

pub(super) fn array<'a, V: Pod>(ebpf: &'a mut Ebpf, name: &str) -> Result<Array<&'a mut MapData, V>> {
    let map = ebpf.map_mut(name).with_context(|| format!("no map {name}"))?;
    Array::try_from(map).with_context(|| format!("map {name}"))
}

pub(super) fn per_cpu<'a, V: Pod>(ebpf: &'a mut Ebpf, name: &str) -> Result<PerCpuArray<&'a mut MapData, V>> {
    let map = ebpf.map_mut(name).with_context(|| format!("no map {name}"))?;
    PerCpuArray::try_from(map).with_context(|| format!("map {name}"))
}

pub(super) fn clear<K: Pod, V: Pod>(mut map: HashMap<&mut MapData, K, V>) -> Result<()> {
    let keys = map.keys().collect::<Result<Vec<_>, _>>()?;
    for key in keys {
        map.remove(&key)?;
    }
    Ok(())
}

pub(super) fn map_data<'a>(ebpf: &'a Ebpf, name: &str) -> Result<&'a MapData> {
    match ebpf.map(name) {
        Some(Map::HashMap(map) | Map::LruHashMap(map)) => Ok(map),
        other => bail!("{name} is {other:?}"),
    }
}

pub(super) fn open<K: Pod + Default, V: Pod + Default>(map: &MapData) -> Result<TypedMap<K, V>> {
    Ok(TypedMap::new(map.fd().as_fd().try_clone_to_owned()?)??)
}
