//! The contents of a table as they are in the kernel.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use rustc_hash::FxHashMap;

use super::{
    frame::{COMMENT, definition},
    language::{Language, address_bytes, address_length, hairpin_key},
    names::{PortChain, PortNames},
    objects::{ElementId, ElementValue, Objects, RuleDigest, Set},
    plan::Existing,
    render::{FACTS, Facts, LOCAL},
    slots,
};
use crate::{
    model::{desired::ServicePortName, objects::IpFamily},
    names::NFTABLES_TABLE as TABLE,
    sys::{
        CallError,
        nftables::{Element, ElementData, NfTables, user_data},
    },
};

/// The contents of a table of this proxy.
#[derive(Debug, Default)]
pub(super) struct Contents {
    pub(super) chains: FxHashMap<String, KernelChain>,
    pub(super) sets: BTreeSet<Set>,
    pub(super) elements: Elements,
}

/// Elements by set and key. A BTreeMap that is collected at once wastes no memory. A hash table
/// with the elements of 10,000 service ports would take twice as much, and half as much again while
/// it grows.
#[derive(Debug, Default)]
pub(super) struct Elements(BTreeMap<Set, BTreeMap<Vec<u8>, ElementValue>>);

#[derive(Debug, Default)]
pub(super) struct KernelChain {
    pub(super) rules: Vec<Option<RuleDigest>>,
    /// The first of the slots among which the chain chooses, and their number.
    pub(super) slots: Option<(u32, u32)>,
}

#[derive(Debug)]
pub(super) enum Found {
    Nothing,
    /// A table that cannot be continued: one of the real kube-proxy, a holder that the cleanup has
    /// left, one of another layout, or one that another program has changed.
    Unusable,
    Own(Contents),
}

pub(super) fn read(nftables: &NfTables, language: Language) -> Result<Found, CallError> {
    let family = language.table_family();
    let tables = nftables.commented_tables(family)?;
    let Some(table) = tables.iter().find(|table| table.name == TABLE) else { return Ok(Found::Nothing) };
    if table.comment.as_deref() != Some(COMMENT) {
        return Ok(Found::Unusable);
    }
    let mut contents = Contents::default();
    for set in nftables.sets(family, TABLE)? {
        let (shape, set) = (set.shape, Set::of_name(&set.name));
        if definition(&set, language).shape() != shape {
            return Ok(Found::Unusable);
        }
        // Packets add the elements of such a set: the clients of one service port.
        if !matches!(set, Set::Own(_)) {
            let elements = nftables.elements(family, TABLE, &set.name())?.into_iter();
            let elements =
                elements.map(|Element { key, data, user_data }| (key, ElementValue { data, user_data }));
            contents.elements.0.insert(set.clone(), elements.collect());
        }
        contents.sets.insert(set);
    }
    for chain in nftables.chains(family)?.into_iter().filter(|chain| chain.table == TABLE) {
        contents.chains.entry(chain.name).or_default();
    }
    for rule in nftables.noted_rules(family, TABLE)? {
        let chain = contents.chains.entry(rule.chain).or_default();
        chain.rules.push(RuleDigest::noted(&rule.user_data));
        // The last rule that draws is the one that asks the map.
        chain.slots = rule.random.or(chain.slots);
    }
    Ok(Found::Own(contents))
}

impl Contents {
    /// Takes out those of these objects that are in the table.
    pub(super) fn take(&mut self, objects: &Objects) -> Existing {
        let element = |id: &ElementId| Some((id.clone(), self.elements.remove(id)?));
        let elements: BTreeMap<_, _> = objects.elements.keys().filter_map(element).collect();
        let chain = |name: &String| Some((name.clone(), self.chains.remove(name)?.rules));
        let chains = objects.chains.keys().filter_map(chain).collect();
        let sets = objects.sets.keys().filter(|set| self.sets.remove(set)).cloned().collect();
        Existing { sets, chains, elements, shared: Vec::new() }
    }

    /// Takes out everything of a service port that is in the table. Returns the elements that it
    /// shares with other service ports. They stay.
    pub(super) fn take_all(&mut self, name: &ServicePortName) -> Vec<ElementId> {
        let (names, mut shared) = (PortNames::new(name), Vec::new());
        for chain in [PortChain::Service, PortChain::Local, PortChain::External, PortChain::Firewall] {
            let Some(chain) = self.chains.remove(&names.chain(chain)) else { continue };
            let Some((first, count)) = chain.slots else { continue };
            for slot in first..first.saturating_add(count) {
                let (set, key) = (Set::Endpoints(slots::map_of(first)), slot.to_ne_bytes().to_vec());
                let endpoint = self.elements.remove(&ElementId { set, key });
                let endpoint = endpoint.as_ref().and_then(|value| endpoint_of(value, name.family));
                if let Some((address, true)) = endpoint {
                    let key = hairpin_key(address.ip(), name.protocol, address.port());
                    shared.push(ElementId { set: Set::HairpinConnections, key });
                }
            }
        }
        self.sets.remove(&Set::own(names.affinity()));
        let comment = name.to_string();
        self.elements.retain(|set, key, value| {
            let is_own = user_data::comment(&value.user_data) == Some(comment.as_str());
            if is_own && let Some(address) = cluster_ip(set, key, value, name.family) {
                shared.push(ElementId { set: Set::ClusterIps, key: address_bytes(address) });
            }
            !is_own
        });
        shared
    }

    pub(super) fn slots_of(&self, names: &PortNames, chain: PortChain) -> Option<(u32, u32)> {
        self.chains.get(&names.chain(chain))?.slots
    }
}

impl Elements {
    /// Returns the elements of one set, sorted by key.
    pub(super) fn of_set(&self, set: &Set) -> impl Iterator<Item = (&[u8], &ElementValue)> {
        self.0.get(set).into_iter().flatten().map(|(key, value)| (key.as_slice(), value))
    }

    pub(super) fn get(&self, set: &Set, key: &[u8]) -> Option<&ElementValue> {
        self.0.get(set)?.get(key)
    }

    pub(super) fn remove(&mut self, id: &ElementId) -> Option<ElementValue> {
        self.0.get_mut(&id.set)?.remove(&id.key)
    }

    fn retain(&mut self, mut keep: impl FnMut(&Set, &[u8], &ElementValue) -> bool) {
        for (set, elements) in &mut self.0 {
            elements.retain(|key, value| keep(set, key, value));
        }
    }

    pub(super) fn into_ids(self) -> impl Iterator<Item = ElementId> {
        let of_set = |(set, elements): (Set, BTreeMap<Vec<u8>, _>)| {
            elements.into_keys().map(move |key| ElementId { set: set.clone(), key })
        };
        self.0.into_iter().flat_map(of_set)
    }
}

/// Reads an element of a map of endpoints: the endpoint, and whether it is on this node.
pub(super) fn endpoint_of(value: &ElementValue, family: IpFamily) -> Option<(SocketAddr, bool)> {
    let ElementData::Value(bytes) = &value.data else { return None };
    let port = bytes.get(address_length(family)..)?.first_chunk()?;
    let address = SocketAddr::new(address(bytes, family)?, u16::from_be_bytes(*port));
    Some((address, user_data::comment(&value.user_data) == Some(LOCAL)))
}

/// Returns the ClusterIP of an element of any set, if the element is a frontend with a ClusterIP.
fn cluster_ip(set: &Set, key: &[u8], value: &ElementValue, family: IpFamily) -> Option<IpAddr> {
    let has_address = matches!(set, Set::ServiceIps | Set::NoEndpointServices);
    let is_internal =
        user_data::get(&value.user_data, FACTS).and_then(Facts::read).is_some_and(|facts| !facts.external);
    if has_address && is_internal { address(key, family) } else { None }
}

/// Returns the address at the beginning of these bytes.
pub(super) fn address(bytes: &[u8], family: IpFamily) -> Option<IpAddr> {
    Some(match family {
        IpFamily::Ipv4 => IpAddr::from(*bytes.first_chunk::<4>()?),
        IpFamily::Ipv6 => IpAddr::from(*bytes.first_chunk::<16>()?),
    })
}
