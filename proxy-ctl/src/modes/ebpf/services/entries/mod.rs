//! Computes what the maps must hold from the desired state. This module has no side effects.

use std::{collections::BTreeSet, iter, sync::Arc};

use ipnet::IpNet;
use proxy_common::{
    layout::{
        BACKEND_DRAINING, BACKEND_LOCAL, BACKEND_WEIGHT_SHIFT, ENCAPSULATION_GENEVE, ENCAPSULATION_IP,
        EndpointSet, FRONTEND_AFFINITY, FRONTEND_DSR, FRONTEND_EXTERNAL, FRONTEND_LEAST_CONNECTION,
        FRONTEND_LOCAL_POLICY, FRONTEND_MAGLEV, FRONTEND_SOURCE_RANGES, FrontendKey, NAME_BYTES, SERVICE_DSR,
        SERVICE_EXTERNAL_LOCAL, SERVICE_HAS_ENDPOINTS, SERVICE_INTERNAL_LOCAL, SERVICE_LEAST_CONNECTION,
        SERVICE_MAGLEV, ServiceName, SourceRange,
    },
    port::Port,
};

use super::{allocate::Range, maglev};
use crate::{
    model::{
        desired::{DesiredPort, Endpoint, Endpoints, FrontendKind, ServicePortName},
        node::Encapsulation,
        objects::{self, Algorithm, Forwarding, NodeForwarding, ObjectName, Protocol, TrafficPolicy},
    },
    modes::ebpf::maps::{family::MapFamily, handles::SourceRangeKey, resize::end_of_slots},
};

/// The positions of a service port's endpoint sets among its slots. Its first slot is number 0.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Arrangement {
    /// The runs of slots, one after the other.
    pub(crate) runs: Vec<Run>,
    pub(crate) cluster: EndpointSet,
    pub(crate) internal: EndpointSet,
    pub(crate) external: EndpointSet,
}

/// Consecutive slots, and the size of the lookup table of a set that consists of all of them.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Run {
    pub(crate) first: u32,
    /// The index in `Endpoints::all` of each slot's endpoint.
    pub(crate) slots: Vec<u32>,
    /// Binary logarithm of the lookup table's size; 0 if there is no lookup table.
    pub(super) table_bits: u32,
}

impl Run {
    fn set(&self) -> EndpointSet {
        EndpointSet::new(self.first, self.slots.len() as u32).with_table(self.table_bits)
    }

    pub(crate) fn contents<F: MapFamily>(&self, port: &DesiredPort) -> impl Iterator<Item = u32> {
        contents::<F>(port, &self.slots, self.table_bits)
    }

    fn end(&self) -> u32 {
        self.first + self.set().slot_count()
    }
}

/// Returns the index in `Endpoints::all` for each slot of a set, and then for each element of its
/// lookup table.
pub(crate) fn contents<F: MapFamily>(
    port: &DesiredPort,
    slots: &[u32],
    table_bits: u32,
) -> impl Iterator<Item = u32> {
    // The lookup table is computed only on demand, because a comparison with other contents mostly
    // ends within the slots.
    let table = move || match table_bits {
        0 => Vec::new(),
        bits => maglev::table::<F>(port.name.protocol, members(&port.endpoints, slots), bits),
    };
    let copies = iter::once_with(table).flatten().filter_map(|index| slots.get(index as usize));
    slots.iter().chain(copies).copied()
}

impl Arrangement {
    /// Arranges the endpoint sets among the slots.
    ///
    /// If no set has a lookup table, the slots begin with all endpoints in their order. A set
    /// without lookup table shares slots if it is a contiguous part of them. A set with a lookup
    /// table shares only those of an equal set. Any other set gets slots of its own.
    pub(crate) fn of(endpoints: &Endpoints, algorithm: Algorithm) -> Self {
        let sets = [&endpoints.cluster, &endpoints.internal, &endpoints.external];
        let bits = sets.map(|set| maglev::table_bits(algorithm, members(endpoints, set)));
        // There is mostly one run, and arrangements are kept for all service ports that are written
        // at once.
        let mut runs = Vec::with_capacity(1);
        if bits == [0; 3] {
            runs.push(Run { first: 0, slots: (0..).take(endpoints.all.len()).collect(), table_bits: 0 });
        }
        let mut arrange = |set: &[u32], table_bits: u32| {
            if set.is_empty() {
                return EndpointSet::default();
            }
            let shared = |run: &Run| {
                let position = run.slots.windows(set.len()).position(|slots| slots == set)? as u32;
                let is_whole = run.table_bits == table_bits && run.slots.len() == set.len();
                let shared = EndpointSet::new(run.first + position, set.len() as u32);
                (table_bits == 0 || is_whole).then_some(shared.with_table(table_bits))
            };
            runs.iter().find_map(shared).unwrap_or_else(|| {
                let run = Run { first: runs.last().map_or(0, Run::end), slots: set.to_vec(), table_bits };
                let own = run.set();
                runs.push(run);
                own
            })
        };
        let cluster = arrange(sets[0], bits[0]);
        let internal = arrange(sets[1], bits[1]);
        let external = arrange(sets[2], bits[2]);
        Self { runs, cluster, internal, external }
    }

    pub(crate) fn has_tables(&self) -> bool {
        self.runs.iter().any(|run| run.table_bits > 0)
    }

    /// Returns the number of slots, with those of lookup tables.
    pub(crate) fn slot_count(&self) -> u32 {
        self.runs.last().map_or(0, Run::end)
    }
}

pub(crate) fn members<'e>(
    endpoints: &'e Endpoints,
    set: &'e [u32],
) -> impl Iterator<Item = &'e Endpoint> + Clone {
    set.iter().filter_map(|index| endpoints.all.get(*index as usize))
}

/// Returns the same set, moved into the range that the service's slots were written to.
pub(crate) fn moved_into(set: EndpointSet, range: Range) -> EndpointSet {
    if set.count() == 0 {
        return EndpointSet::default();
    }
    EndpointSet::new(range.first + set.first, set.count()).with_table(set.table_bits())
}

/// Returns the smallest range that holds these sets and their lookup tables.
pub(crate) fn span(sets: [EndpointSet; 3]) -> Range {
    let used = sets.iter().filter(|set| set.count() > 0);
    let first = used.map(|set| set.first).min().unwrap_or(0);
    let end = end_of_slots(sets);
    Range { first, count: u32::try_from(end - u64::from(first)).unwrap_or(u32::MAX) }
}

/// Returns true if the endpoint was added by [`with_draining`](super::draining::with_draining),
/// provided that others of the set have weight.
pub(super) const fn is_draining(endpoint: &Endpoint) -> bool {
    endpoint.local && endpoint.terminating && endpoint.weight == 0
}

pub(super) fn service_flags(port: &DesiredPort, algorithm: Algorithm, forwarding: Forwarding) -> u32 {
    let flags = [
        (forwarding == Forwarding::Dsr, SERVICE_DSR),
        (algorithm == Algorithm::Maglev, SERVICE_MAGLEV),
        (algorithm == Algorithm::LeastConnection, SERVICE_LEAST_CONNECTION),
        (port.endpoints.any, SERVICE_HAS_ENDPOINTS),
        (port.internal_policy == TrafficPolicy::Local, SERVICE_INTERNAL_LOCAL),
        (port.external_policy == TrafficPolicy::Local, SERVICE_EXTERNAL_LOCAL),
    ];
    sum_of(flags)
}

fn sum_of<const N: usize>(flags: [(bool, u32); N]) -> u32 {
    flags.into_iter().filter(|(is_set, _)| *is_set).fold(0, |all, (_, flag)| all | flag)
}

/// Returns the algorithm that the flags of a service stand for.
pub(crate) fn algorithm(flags: u32) -> Algorithm {
    if flags & SERVICE_MAGLEV != 0 {
        Algorithm::Maglev
    } else if flags & SERVICE_LEAST_CONNECTION != 0 {
        Algorithm::LeastConnection
    } else {
        Algorithm::Random
    }
}

/// Returns how packets are forwarded according to the flags of a service.
pub(crate) fn forwarding(flags: u32) -> Forwarding {
    if flags & SERVICE_DSR != 0 { Forwarding::Dsr } else { Forwarding::Snat }
}

/// Returns the number of an encapsulation in
/// [`Settings::encapsulation`](proxy_common::layout::Settings::encapsulation).
pub(crate) fn encapsulation_number(encapsulation: Encapsulation) -> u16 {
    match encapsulation {
        Encapsulation::Ip => ENCAPSULATION_IP,
        Encapsulation::Geneve => ENCAPSULATION_GENEVE,
    }
}

/// Returns the encapsulation that has this number: the reverse of [`encapsulation_number`].
pub(crate) fn encapsulation(number: u16) -> Encapsulation {
    if number == ENCAPSULATION_GENEVE { Encapsulation::Geneve } else { Encapsulation::Ip }
}

/// Returns `Snat` or `Dsr`, which applies to the frontends of this service port.
pub(super) fn forwarding_of(port: &DesiredPort, of_node: NodeForwarding) -> Forwarding {
    if port.endpoints.need_snat {
        return Forwarding::Snat;
    }
    of_node.of(port.forwarding, port.name.protocol)
}

pub(super) fn backend_flags(endpoint: &Endpoint) -> u32 {
    let more_than_one = u32::from(endpoint.weight.saturating_sub(1));
    let flags = [(endpoint.local, BACKEND_LOCAL), (is_draining(endpoint), BACKEND_DRAINING)];
    more_than_one << BACKEND_WEIGHT_SHIFT | sum_of(flags)
}

/// Returns the keys of the port's frontends with their `FRONTEND_*` flags, sorted and each once.
pub(crate) fn frontends<F: MapFamily>(
    port: &DesiredPort,
    algorithm: Algorithm,
    forwarding: Forwarding,
) -> Vec<(FrontendKey<F::Address>, u32)> {
    let of_port = [
        (port.affinity_seconds.is_some(), FRONTEND_AFFINITY),
        (algorithm == Algorithm::Maglev, FRONTEND_MAGLEV),
        (algorithm == Algorithm::LeastConnection, FRONTEND_LEAST_CONNECTION),
    ];
    let of_port = sum_of(of_port);
    let external = [
        (true, FRONTEND_EXTERNAL),
        (port.external_policy == TrafficPolicy::Local, FRONTEND_LOCAL_POLICY),
        (forwarding == Forwarding::Dsr, FRONTEND_DSR),
    ];
    let external = sum_of(external);
    let mut keys: Vec<_> = port
        .frontends
        .iter()
        .filter_map(|frontend| {
            let (number, protocol) = (Port::new(frontend.port), port.name.protocol.number());
            let of_address =
                || Some(FrontendKey::of_address(F::address(frontend.address)?, number, protocol));
            let (key, flags) = match frontend.kind {
                FrontendKind::ClusterIp => (of_address()?, 0),
                FrontendKind::NodePort => (FrontendKey::of_node_port(number, protocol), external),
                FrontendKind::ExternalIp => (of_address()?, external),
                FrontendKind::LoadBalancer if port.source_ranges.is_empty() => (of_address()?, external),
                FrontendKind::LoadBalancer => (of_address()?, external | FRONTEND_SOURCE_RANGES),
            };
            Some((key, flags | of_port))
        })
        .collect();
    keys.sort_unstable_by_key(|(key, flags)| (key.scope, key.address, key.port(), *flags));
    keys.dedup_by_key(|(key, _)| *key);
    keys
}

/// Returns the port's ClusterIPs, sorted and each once.
pub(crate) fn cluster_ips<F: MapFamily>(port: &DesiredPort) -> Box<[F::Address]> {
    let cluster_ips = port.frontends.iter().filter(|frontend| frontend.kind == FrontendKind::ClusterIp);
    let addresses: BTreeSet<_> = cluster_ips.filter_map(|frontend| F::address(frontend.address)).collect();
    addresses.into_iter().collect()
}

/// Returns the port's entries of `source_ranges4/6`, sorted and each once.
pub(crate) fn source_ranges<F: MapFamily>(port: &DesiredPort, service: u32) -> Box<[SourceRangeKey<F>]> {
    if !port.frontends.iter().any(|frontend| frontend.kind == FrontendKind::LoadBalancer) {
        return Box::default();
    }
    let key = |range: &IpNet| {
        let address = F::address(range.network())?;
        Some(SourceRange::of_prefix(service, address, range.prefix_len().into()))
    };
    let keys: BTreeSet<_> = port.source_ranges.iter().filter_map(key).collect();
    keys.into_iter().collect()
}

/// Returns the name as the map `service_names` has it. It is `None` if a part is longer than
/// [`NAME_BYTES`], which Kubernetes does not allow.
pub(crate) fn name(port: &ServicePortName) -> Option<ServiceName> {
    fn padded(text: &str) -> Option<[u8; NAME_BYTES]> {
        let mut bytes = [0; NAME_BYTES];
        bytes.get_mut(..text.len())?.copy_from_slice(text.as_bytes());
        Some(bytes)
    }
    Some(ServiceName {
        namespace: padded(&port.service.namespace)?,
        name: padded(&port.service.name)?,
        port: padded(&port.port)?,
        protocol: port.protocol.number(),
        family: match port.family {
            objects::IpFamily::Ipv4 => 4,
            objects::IpFamily::Ipv6 => 6,
        },
    })
}

/// Returns the service port that an entry of `service_names` names: the reverse of [`name`]. It is
/// `None` if the entry was not written by [`name`].
pub(crate) fn port_name(name: &ServiceName) -> Option<ServicePortName> {
    fn text(bytes: &[u8; NAME_BYTES]) -> Option<Arc<str>> {
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(NAME_BYTES);
        std::str::from_utf8(&bytes[..end]).ok().map(Arc::from)
    }
    Some(ServicePortName {
        service: ObjectName { namespace: text(&name.namespace)?, name: text(&name.name)? },
        port: text(&name.port)?,
        protocol: protocol(name.protocol)?,
        family: match name.family {
            4 => objects::IpFamily::Ipv4,
            6 => objects::IpFamily::Ipv6,
            _ => return None,
        },
    })
}

/// Returns the owner of a service port's backends, for `Backend::owner`.
///
/// TCP has owner 0, because its flows keep a backend that has left the service. Other protocols
/// have a hash of the name. FNV-1a makes it the same in every version. Two names with the same hash
/// share backends, which has no other effect.
pub(crate) fn owner(port: &ServicePortName) -> u32 {
    if port.protocol == Protocol::Tcp {
        return 0;
    }
    let names = [&port.service.namespace, &port.service.name, &port.port];
    let bytes = names.into_iter().flat_map(|name| name.bytes().chain([0]));
    let hash = bytes.fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    hash.max(1)
}

/// Returns the protocol that has this IANA number.
pub(crate) fn protocol(number: u8) -> Option<Protocol> {
    [Protocol::Tcp, Protocol::Udp, Protocol::Sctp].into_iter().find(|protocol| protocol.number() == number)
}

#[cfg(test)]
mod tests;
