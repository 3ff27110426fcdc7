//! Entries of the pinned maps that a packet can write.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
    net::IpAddr,
    path::PathBuf,
};

use anyhow::{Context as _, Result};
use aya::Pod;
use lab::{
    Lab,
    address::{Family, NodeNumber},
};
use proxy_common::{
    inventory::map_name,
    layout::{
        Address, Affinity, AffinityKey, Collected, Connections, FirstFragment, Flow, FlowKey, FragmentKey,
        HostConnection, LAYOUT_VERSION, unproven_entries,
    },
};
use proxy_ctl::sys::bpf::{map::Map, pinned};

/// The maps of [`Counts`], without the number of their IP family. `connections` has both families.
/// The other maps that the programs write are arrays and storage of sockets, to which no packet
/// adds an entry.
pub(super) const MAPS: [&str; 6] =
    ["flows", "opening_flows", "affinity", "fragments", "host_connections", "connections"];

/// Number of entries in each of [`MAPS`].
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Counts(pub(super) [usize; MAPS.len()]);

impl Counts {
    /// Returns the larger count of each map.
    pub(super) fn most(mut self, other: &Self) -> Self {
        for (count, other) in self.0.iter_mut().zip(other.0) {
            *count = (*count).max(other);
        }
        self
    }

    pub(super) fn flows(&self) -> usize {
        self.0[0]
    }

    pub(super) fn opening_flows(&self) -> usize {
        self.0[1]
    }

    pub(super) fn affinity(&self) -> usize {
        self.0[2]
    }

    /// Returns the counts of the maps whose entries do not belong to single flows.
    pub(super) fn others(&self) -> [usize; 3] {
        let [_, _, affinity, fragments, host_connections, _] = self.0;
        [affinity, fragments, host_connections]
    }
}

/// The client of a flow, and its protocol.
pub(super) type Client = (IpAddr, u16, u8);

/// The entries of a flow map.
#[derive(Debug, Default)]
pub(super) struct Entries {
    /// The entries of the clients that were asked for.
    pub(super) of_clients: BTreeMap<Client, Vec<Entry>>,
    /// The number of entries of the other clients, by the client's port.
    pub(super) of_others: BTreeMap<u16, usize>,
}

/// An entry of a flow map, reduced to its key and to the other keys of its flow.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    /// The keys that the flow has.
    pub(super) keys: BTreeSet<String>,
}

/// The pinned maps of a node.
pub(super) struct PinnedMaps {
    folder: PathBuf,
}

impl PinnedMaps {
    pub(super) fn of(lab: &Lab, node: NodeNumber) -> Self {
        Self { folder: lab.bpffs(node).join(format!("proxy-ctl/v{LAYOUT_VERSION}/maps")) }
    }

    fn open<K: Pod + Default, V: Pod + Default>(&self, name: &str) -> Result<Map<K, V>> {
        let map = pinned(&self.folder.join(name)).and_then(Map::new);
        map.with_context(|| format!("opening {name}"))?.with_context(|| format!("opening {name}"))
    }

    fn entries<K: Pod + Default, V: Pod + Default>(&self, name: &str) -> Result<Vec<(K, V)>> {
        self.open(name)?.read_all().with_context(|| format!("reading {name}"))
    }

    fn count<K: Pod + Default, V: Pod + Default>(&self, name: &str) -> Result<usize> {
        Ok(self.entries::<K, V>(name)?.len())
    }

    pub(super) fn counts(&self, family: Family) -> Result<Counts> {
        let [flows, opening, affinity, fragments, host_connections] = match family {
            Family::V4 => [
                self.count::<FlowKey<[u8; 4]>, Flow<[u8; 4]>>(map_name::flows4)?,
                self.count::<FlowKey<[u8; 4]>, Flow<[u8; 4]>>(map_name::opening_flows4)?,
                self.count::<AffinityKey<[u8; 4]>, Affinity>(map_name::affinity4)?,
                self.count::<FragmentKey<[u8; 4]>, FirstFragment<[u8; 4]>>(map_name::fragments4)?,
                self.count::<FlowKey<[u8; 4]>, HostConnection>(map_name::host_connections4)?,
            ],
            Family::V6 => [
                self.count::<FlowKey<[u8; 16]>, Flow<[u8; 16]>>(map_name::flows6)?,
                self.count::<FlowKey<[u8; 16]>, Flow<[u8; 16]>>(map_name::opening_flows6)?,
                self.count::<AffinityKey<[u8; 16]>, Affinity>(map_name::affinity6)?,
                self.count::<FragmentKey<[u8; 16]>, FirstFragment<[u8; 16]>>(map_name::fragments6)?,
                self.count::<FlowKey<[u8; 16]>, HostConnection>(map_name::host_connections6)?,
            ],
        };
        let connections = self.count::<u32, Connections>(map_name::connections)?;
        Ok(Counts([flows, opening, affinity, fragments, host_connections, connections]))
    }

    /// Returns the programs' count of the entries of established flows that prove no client.
    pub(super) fn unproven(&self, family: Family) -> Result<u64> {
        let id = match family {
            Family::V4 => unproven_entries::<[u8; 4]>(),
            Family::V6 => unproven_entries::<[u8; 16]>(),
        };
        let counted = self.open::<u32, Connections>(map_name::connections)?.get(&id)?.unwrap_or_default();
        let collected = self.open::<u32, Collected>(map_name::collected)?.get(&id)?.unwrap_or_default();
        Ok(counted.open(collected.sum()))
    }

    /// Returns the entries of the map of established flows, and of that of opening flows.
    pub(super) fn flows(&self, family: Family, clients: &BTreeSet<Client>) -> Result<[Entries; 2]> {
        Ok(match family {
            Family::V4 => [
                self.flows_of::<[u8; 4]>(map_name::flows4, clients)?,
                self.flows_of::<[u8; 4]>(map_name::opening_flows4, clients)?,
            ],
            Family::V6 => [
                self.flows_of::<[u8; 16]>(map_name::flows6, clients)?,
                self.flows_of::<[u8; 16]>(map_name::opening_flows6, clients)?,
            ],
        })
    }

    fn flows_of<A: Address + Debug>(&self, name: &str, clients: &BTreeSet<Client>) -> Result<Entries>
    where
        IpAddr: From<A>,
    {
        let mut found = Entries::default();
        for (key, flow) in self.entries::<FlowKey<A>, Flow<A>>(name)? {
            let client = (IpAddr::from(flow.client), flow.client_port().number(), flow.protocol);
            if !clients.contains(&client) {
                *found.of_others.entry(client.1).or_default() += 1;
                continue;
            }
            let masquerade = flow.is_masqueraded().then(|| flow.masquerade_key());
            let keys = [flow.client_key(), flow.backend_key()].into_iter().chain(masquerade);
            let keys = keys.map(|key| format!("{key:?}")).collect();
            found.of_clients.entry(client).or_default().push(Entry { key: format!("{key:?}"), keys });
        }
        Ok(found)
    }
}
