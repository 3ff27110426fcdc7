//! Reads what the tables in the kernel serve, without a controller.

use std::{collections::BTreeMap, net::IpAddr};

use super::{
    contents::{self, Contents, Found, address, endpoint_of},
    error::Error,
    frame::COMMENT,
    language::{Language, address_length},
    names::{PortChain, PortNames},
    objects::Set,
    render::{FACTS, Facts},
    slots,
};
use crate::{
    model::{
        desired::ServicePortName,
        objects::{IpFamily, ObjectName, Protocol, TrafficPolicy},
    },
    modes::{
        self, EndpointSnapshot, FrontendSnapshot, NodeSnapshot, Programmed, ServiceSnapshot, Snapshot, Usage,
    },
    names::NFTABLES_TABLE as TABLE,
    sys::{
        CallError,
        nftables::{NfTables, TableFamily, user_data},
    },
};

/// The tables in the kernel, read while no dataplane has them open.
pub(super) struct Pinned(NfTables);

impl Pinned {
    /// Opens the tables. `None`: there is no table of this proxy.
    pub(super) fn open() -> Result<Option<Self>, Error> {
        let Some(nftables) = NfTables::open()? else { return Ok(None) };
        for family in TableFamily::ALL {
            if is_own(&nftables, family)? {
                return Ok(Some(Self(nftables)));
            }
        }
        Ok(None)
    }
}

impl Programmed for Pinned {
    fn snapshot(&self) -> Result<Snapshot, modes::Error> {
        Ok(read(&self.0)?)
    }

    fn usage(&self) -> Result<Usage, modes::Error> {
        Ok(Usage::default())
    }
}

pub(super) fn is_own(nftables: &NfTables, family: TableFamily) -> Result<bool, CallError> {
    let tables = nftables.commented_tables(family)?;
    Ok(tables.iter().any(|table| table.name == TABLE && table.comment.as_deref() == Some(COMMENT)))
}

pub(super) fn read(nftables: &NfTables) -> Result<Snapshot, Error> {
    let mut snapshot = Snapshot::default();
    for family in IpFamily::ALL {
        if let Found::Own(contents) = contents::read(nftables, Language { family })? {
            decode(&contents, family, &mut snapshot);
        }
    }
    Ok(snapshot)
}

fn decode(contents: &Contents, family: IpFamily, snapshot: &mut Snapshot) {
    let mut services: BTreeMap<ServicePortName, ServiceSnapshot> = BTreeMap::new();
    for set in [Set::ServiceIps, Set::ServiceNodePorts, Set::NoEndpointServices, Set::NoEndpointNodePorts] {
        let has_address = matches!(set, Set::ServiceIps | Set::NoEndpointServices);
        for (key, value) in contents.elements.of_set(&set) {
            let noted = &value.user_data;
            let Some((address, protocol, port)) = frontend(key, has_address, family) else { continue };
            let Some(name) = user_data::comment(noted).and_then(|text| name(text, protocol, family)) else {
                continue;
            };
            let Some(facts) = user_data::get(noted, FACTS).and_then(Facts::read) else { continue };
            let service = services.entry(name.clone()).or_insert_with(|| service(contents, name, facts));
            let frontend = FrontendSnapshot { address, port, external: facts.external };
            if !service.frontends.contains(&frontend) {
                service.frontends.push(frontend);
            }
        }
    }
    let sorted = services.into_values().map(|mut service| {
        service.frontends.sort_unstable();
        service
    });
    snapshot.add_family(sorted.collect());
    let addresses = contents.elements.of_set(&Set::NodePortIps).filter_map(|(key, _)| address(key, family));
    let NodeSnapshot { node_port_addresses, .. } = &mut snapshot.node;
    node_port_addresses.extend(addresses.map(|address| (address, false)));
    node_port_addresses.sort_unstable();
}

fn service(contents: &Contents, name: ServicePortName, facts: Facts) -> ServiceSnapshot {
    let names = PortNames::new(&name);
    let of_policy = |policy| {
        let chain = match policy {
            TrafficPolicy::Cluster => PortChain::Service,
            TrafficPolicy::Local => PortChain::Local,
        };
        endpoints(contents, contents.slots_of(&names, chain), name.family)
    };
    ServiceSnapshot {
        cluster: of_policy(TrafficPolicy::Cluster),
        internal: of_policy(facts.internal_policy),
        external: of_policy(facts.external_policy),
        any_endpoints: facts.any_endpoints,
        internal_policy: facts.internal_policy,
        external_policy: facts.external_policy,
        affinity_seconds: facts.affinity_seconds,
        ..ServiceSnapshot::new(name)
    }
}

fn endpoints(contents: &Contents, slots: Option<(u32, u32)>, family: IpFamily) -> Vec<EndpointSnapshot> {
    let Some((first, count)) = slots else { return Vec::new() };
    let set = Set::Endpoints(slots::map_of(first));
    let at = |slot: u32| {
        let element = contents.elements.get(&set, &slot.to_ne_bytes())?;
        let (address, local) = endpoint_of(element, family)?;
        Some(EndpointSnapshot { address, local, backend: 0 })
    };
    (first..first.saturating_add(count)).filter_map(at).collect()
}

fn frontend(key: &[u8], has_address: bool, family: IpFamily) -> Option<(Option<IpAddr>, Protocol, u16)> {
    let (address, rest) = if has_address {
        (Some(address(key, family)?), key.get(address_length(family)..)?)
    } else {
        (None, key)
    };
    let [number, _, _, _, high, low, ..] = *rest else { return None };
    let protocols = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];
    let protocol = protocols.into_iter().find(|protocol| protocol.number() == number)?;
    Some((address, protocol, u16::from_be_bytes([high, low])))
}

/// Parses `namespace/name:port`, the written form of a service port's name.
fn name(text: &str, protocol: Protocol, family: IpFamily) -> Option<ServicePortName> {
    let (service, port) = text.split_once(':').unwrap_or((text, ""));
    let (namespace, name) = service.split_once('/')?;
    Some(ServicePortName { service: ObjectName::new(namespace, name), port: port.into(), protocol, family })
}
