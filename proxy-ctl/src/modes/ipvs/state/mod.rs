//! Compares what the kernel must have with what it has, and orders the writes. This module has no
//! side effects.
//!
//! A change costs time for its service ports only, because only the keys that they have or had are
//! compared.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use rustc_hash::FxHashMap;

use super::{
    plan::{PortObjects, Rank, Server},
    sets::{Set, SetRole},
    snapshot,
};
use crate::{
    model::{desired::ServicePortName, objects::IpFamily},
    names::IPVS_DEVICE,
    sys::net::{
        ipset::{Member, MemberChange},
        ipvs::{Balancing, ServerChange, VirtualSocket},
        link::AddressChange,
    },
};

/// The key of an object that the kernel has or does not have.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Key {
    Server(VirtualSocket),
    Address(IpAddr),
    Member(Set, Member),
}

impl Key {
    pub(super) fn family(self) -> IpFamily {
        match self {
            Self::Server(socket) => IpFamily::of(socket.address.ip()),
            Self::Address(address) => IpFamily::of(address),
            Self::Member(set, _) => set.family,
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server(socket) => write!(f, "virtual server {socket}"),
            Self::Address(address) => write!(f, "address {address} of {IPVS_DEVICE}"),
            Self::Member(set, member) => write!(f, "{member} in set {}", set.name()),
        }
    }
}

/// The objects that all service ports ask for.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    ports: FxHashMap<ServicePortName, PortObjects>,
    /// The service ports that ask for each virtual server, in the order of precedence. The first
    /// one serves.
    servers: BTreeMap<VirtualSocket, BTreeMap<(Rank, ServicePortName), Server>>,
    /// The number of service ports that ask for each address. The next two fields count in the same
    /// way.
    addresses: BTreeMap<IpAddr, usize>,
    members: BTreeMap<(Set, Member), usize>,
    closed_to_node: BTreeMap<VirtualSocket, usize>,
}

impl Wanted {
    /// Takes over what a service port asks for. `None`: the service port is gone. Adds the keys
    /// that may differ now to `touched`.
    pub(super) fn set(
        &mut self,
        name: &ServicePortName,
        objects: Option<PortObjects>,
        touched: &mut BTreeSet<Key>,
    ) {
        if self.ports.get(name) == objects.as_ref() {
            return;
        }
        if let Some(old) = self.ports.remove(name) {
            touched.extend(keys(&old));
            for (socket, (rank, _)) in old.servers {
                if let Some(claims) = self.servers.get_mut(&socket) {
                    claims.remove(&(rank, name.clone()));
                    if claims.is_empty() {
                        self.servers.remove(&socket);
                    }
                }
            }
            old.addresses.iter().for_each(|address| release(&mut self.addresses, address));
            old.members.iter().for_each(|member| release(&mut self.members, member));
            old.closed_to_node.iter().for_each(|socket| release(&mut self.closed_to_node, socket));
        }
        if let Some(objects) = objects {
            touched.extend(keys(&objects));
            for (socket, (rank, server)) in &objects.servers {
                let claims = self.servers.entry(*socket).or_default();
                claims.insert((*rank, name.clone()), server.clone());
            }
            objects.addresses.iter().for_each(|address| *self.addresses.entry(*address).or_default() += 1);
            objects.members.iter().for_each(|member| *self.members.entry(*member).or_default() += 1);
            for socket in &objects.closed_to_node {
                *self.closed_to_node.entry(*socket).or_default() += 1;
            }
            self.ports.insert(name.clone(), objects);
        }
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &ServicePortName> {
        self.ports.keys()
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = Key> {
        let servers = self.servers.keys().map(|socket| Key::Server(*socket));
        let addresses = self.addresses.keys().map(|address| Key::Address(*address));
        let members = self.members.keys().map(|(set, member)| Key::Member(*set, *member));
        servers.chain(addresses).chain(members)
    }

    pub(super) fn closed_to_node(&self) -> impl Iterator<Item = VirtualSocket> {
        self.closed_to_node.keys().copied()
    }

    pub(super) fn server(&self, socket: VirtualSocket) -> Option<(&ServicePortName, &Server)> {
        let ((_, name), server) = self.servers.get(&socket)?.first_key_value()?;
        Some((name, server))
    }

    pub(super) fn has(&self, key: Key) -> bool {
        match key {
            Key::Server(socket) => self.servers.contains_key(&socket),
            Key::Address(address) => self.addresses.contains_key(&address),
            Key::Member(set, member) => self.members.contains_key(&(set, member)),
        }
    }

    pub(super) fn has_members(&self, set: Set) -> bool {
        const FIRST: Member = Member::Address(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        self.members.range((set, FIRST)..).next().is_some_and(|((of, _), _)| *of == set)
    }

    /// Returns the service ports that ask for these keys. It is slow, and meant for errors.
    pub(super) fn asking(
        &self,
        is_meant: impl Fn(&Key) -> bool,
    ) -> impl Iterator<Item = (&ServicePortName, Key)> {
        let asked = self.ports.iter().flat_map(|(name, objects)| keys(objects).map(move |key| (name, key)));
        asked.filter(move |(_, key)| is_meant(key))
    }
}

fn keys(objects: &PortObjects) -> impl Iterator<Item = Key> {
    let servers = objects.servers.keys().map(|socket| Key::Server(*socket));
    let addresses = objects.addresses.iter().map(|address| Key::Address(*address));
    let members = objects.members.iter().map(|(set, member)| Key::Member(*set, *member));
    servers.chain(addresses).chain(members)
}

fn release<K: Ord>(counts: &mut BTreeMap<K, usize>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

/// A virtual server as the kernel has it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct ProgrammedServer {
    pub(super) balancing: Balancing,
    /// The destinations. True if the destination gets new connections, false if it is drained.
    pub(super) destinations: BTreeMap<SocketAddr, bool>,
}

/// The objects of this mode that the kernel has.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct KernelObjects {
    pub(super) servers: BTreeMap<VirtualSocket, ProgrammedServer>,
    /// The addresses of the device. False if an address is not as this mode adds it: kube-proxy
    /// adds those of IPv6 in another way.
    pub(super) addresses: BTreeMap<IpAddr, bool>,
    pub(super) members: BTreeSet<(Set, Member)>,
}

impl KernelObjects {
    pub(super) fn keys(&self) -> impl Iterator<Item = Key> {
        let servers = self.servers.keys().map(|socket| Key::Server(*socket));
        let addresses = self.addresses.keys().map(|address| Key::Address(*address));
        let members = self.members.iter().map(|(set, member)| Key::Member(*set, *member));
        servers.chain(addresses).chain(members)
    }

    /// Leaves out virtual servers that are in no set of frontends: others have made them.
    pub(super) fn without_others(mut self) -> Self {
        let members = &self.members;
        let is_own = |socket: &VirtualSocket| {
            let family = IpFamily::of(socket.address.ip());
            let forms = [Member::Socket(*socket), Member::Port(socket.address.port())];
            let of_node = snapshot::protocol(*socket).map(SetRole::NodePort);
            let roles = SetRole::FRONTENDS.into_iter().chain(of_node);
            let mut sets = roles.map(|role| Set { role, family });
            sets.any(|set| forms.iter().any(|member| members.contains(&(set, *member))))
        };
        self.servers.retain(|socket, _| is_own(socket));
        self
    }

    /// Returns virtual servers with destinations that are drained.
    pub(super) fn draining(&self) -> impl Iterator<Item = VirtualSocket> {
        let drains = |server: &ProgrammedServer| server.destinations.values().any(|is_used| !is_used);
        self.servers.iter().filter(move |(_, server)| drains(server)).map(|(socket, _)| *socket)
    }

    /// Records a change that the kernel has made.
    pub(super) fn record(&mut self, change: Change) {
        match change {
            Change::Server(ServerChange::Create(socket, balancing)) => {
                self.servers.insert(socket, ProgrammedServer { balancing, destinations: BTreeMap::new() });
            }
            Change::Server(ServerChange::Set(socket, balancing)) => {
                self.servers.entry(socket).and_modify(|server| server.balancing = balancing);
            }
            Change::Server(ServerChange::Remove(socket)) => {
                self.servers.remove(&socket);
            }
            Change::Server(ServerChange::AddDestination(socket, address)) => {
                self.destination(socket, address, Some(true));
            }
            Change::Server(ServerChange::UseDestination(socket, address, is_used)) => {
                self.destination(socket, address, Some(is_used));
            }
            Change::Server(ServerChange::RemoveDestination(socket, address)) => {
                self.destination(socket, address, None);
            }
            Change::Address(AddressChange::Add(address)) => {
                self.addresses.insert(address, true);
            }
            Change::Address(AddressChange::Remove(address)) => {
                self.addresses.remove(&address);
            }
            Change::Member(set, MemberChange::Add(member)) => {
                self.members.insert((set, member));
            }
            Change::Member(set, MemberChange::Remove(member)) => {
                self.members.remove(&(set, member));
            }
        }
    }

    fn destination(&mut self, socket: VirtualSocket, address: SocketAddr, is_used: Option<bool>) {
        let Some(server) = self.servers.get_mut(&socket) else { return };
        match is_used {
            Some(is_used) => server.destinations.insert(address, is_used),
            None => server.destinations.remove(&address),
        };
    }
}

/// One write to the kernel.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Change {
    Server(ServerChange),
    Address(AddressChange),
    Member(Set, MemberChange),
}

impl Change {
    pub(super) const fn key(&self) -> Key {
        match self {
            Self::Server(change) => Key::Server(change.socket()),
            Self::Address(AddressChange::Add(address) | AddressChange::Remove(address)) => {
                Key::Address(*address)
            }
            Self::Member(set, MemberChange::Add(member) | MemberChange::Remove(member)) => {
                Key::Member(*set, *member)
            }
        }
    }

    pub(super) fn of_server(&self) -> Option<ServerChange> {
        if let Self::Server(change) = self { Some(change.clone()) } else { None }
    }

    pub(super) const fn of_address(&self) -> Option<AddressChange> {
        if let Self::Address(change) = self { Some(*change) } else { None }
    }

    pub(super) const fn of_member(&self) -> Option<MemberChange> {
        if let Self::Member(_, change) = self { Some(*change) } else { None }
    }

    pub(super) const fn removes(&self) -> bool {
        matches!(
            self,
            Self::Server(ServerChange::Remove(_) | ServerChange::RemoveDestination(..))
                | Self::Address(AddressChange::Remove(_))
                | Self::Member(_, MemberChange::Remove(_))
        )
    }

    /// Returns true if the write must precede the rules, because it fills a set that they match.
    pub(super) fn precedes_rules(&self) -> bool {
        self.step() <= 1
    }

    const fn set(&self) -> Option<Set> {
        if let Self::Member(set, _) = self { Some(*set) } else { None }
    }

    /// Returns the step of the write. Sets and destinations come before addresses, so that no
    /// connection comes to a virtual server without them.
    ///
    /// Rules refuse connections to an address of the device that is in no set of frontends. So the
    /// set of the device's addresses is filled last and emptied first. Another set restricts an
    /// address to the sources in other sets. So of the sets that rules match, it is filled last and
    /// emptied first.
    fn step(&self) -> u8 {
        let restricts = |set: &Set| set.role == SetRole::LoadBalancerRestricted;
        let of_device = |set: &Set| set.role == SetRole::DeviceAddresses;
        match self {
            Self::Member(set, MemberChange::Add(_)) if restricts(set) => 1,
            Self::Member(set, MemberChange::Add(_)) if of_device(set) => 5,
            Self::Member(_, MemberChange::Add(_)) => 0,
            Self::Server(ServerChange::Create(..) | ServerChange::Set(..)) => 2,
            Self::Server(ServerChange::AddDestination(..) | ServerChange::UseDestination(_, _, true)) => 3,
            Self::Address(AddressChange::Add(_)) => 4,
            Self::Server(ServerChange::UseDestination(..) | ServerChange::RemoveDestination(..)) => 6,
            Self::Member(set, MemberChange::Remove(_)) if of_device(set) => 7,
            Self::Address(AddressChange::Remove(_)) => 8,
            Self::Server(ServerChange::Remove(_)) => 9,
            Self::Member(set, MemberChange::Remove(_)) if restricts(set) => 10,
            Self::Member(_, MemberChange::Remove(_)) => 11,
        }
    }
}

/// Returns the writes, in order, that make `programmed` equal to `wanted` at these keys.
pub(super) fn differences(
    wanted: &Wanted,
    programmed: &KernelObjects,
    touched: impl IntoIterator<Item = Key>,
) -> Vec<Change> {
    let mut changes = Vec::new();
    for key in touched {
        match key {
            Key::Server(socket) => {
                let wanted = wanted.server(socket).map(|(_, server)| server);
                server_changes(socket, wanted, programmed.servers.get(&socket), &mut changes);
            }
            Key::Address(address) => {
                match (wanted.addresses.contains_key(&address), programmed.addresses.get(&address)) {
                    (true, None | Some(false)) => {
                        changes.push(Change::Address(AddressChange::Add(address)));
                    }
                    (false, Some(_)) => changes.push(Change::Address(AddressChange::Remove(address))),
                    (true, Some(true)) | (false, None) => {}
                }
            }
            Key::Member(set, member) => {
                let at = (set, member);
                match (wanted.members.contains_key(&at), programmed.members.contains(&at)) {
                    (true, false) => changes.push(Change::Member(set, MemberChange::Add(member))),
                    (false, true) => changes.push(Change::Member(set, MemberChange::Remove(member))),
                    (true, true) | (false, false) => {}
                }
            }
        }
    }
    // Within a step, all members of one set are written by one call.
    changes.sort_by_key(|change| (change.step(), change.set()));
    changes
}

fn server_changes(
    socket: VirtualSocket,
    wanted: Option<&Server>,
    programmed: Option<&ProgrammedServer>,
    changes: &mut Vec<Change>,
) {
    let mut change = |change| changes.push(Change::Server(change));
    let Some(wanted) = wanted else {
        if programmed.is_some() {
            change(ServerChange::Remove(socket));
        }
        return;
    };
    let none = BTreeMap::new();
    let found = programmed.map_or(&none, |programmed| &programmed.destinations);
    match programmed {
        None => change(ServerChange::Create(socket, wanted.balancing.clone())),
        Some(programmed) if programmed.balancing != wanted.balancing => {
            change(ServerChange::Set(socket, wanted.balancing.clone()));
        }
        Some(_) => {}
    }
    for address in &wanted.destinations {
        match found.get(address) {
            None => change(ServerChange::AddDestination(socket, *address)),
            Some(false) => change(ServerChange::UseDestination(socket, *address, true)),
            Some(true) => {}
        }
    }
    for (address, is_used) in found.iter().filter(|(address, _)| !wanted.destinations.contains(*address)) {
        match (drains(socket), is_used) {
            (true, true) => change(ServerChange::UseDestination(socket, *address, false)),
            // It is removed once it has no connections.
            (true, false) => {}
            (false, _) => change(ServerChange::RemoveDestination(socket, *address)),
        }
    }
}

/// Returns true if connections to a destination that is gone go on, as those of TCP do. Datagrams
/// must find another destination at once. kube-proxy does the same with SCTP.
fn drains(socket: VirtualSocket) -> bool {
    i32::from(socket.protocol) == libc::IPPROTO_TCP
}

#[cfg(test)]
pub(super) mod tests;
