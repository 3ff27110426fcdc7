//! A CPU that gets on by one access, and the maps that several CPUs change.

use std::{
    collections::{BTreeMap, BTreeSet},
    panic::resume_unwind,
};

use super::*;

/// The CPU that made an element, and at which of its accesses: the same in all orders.
pub(super) type Id = (usize, usize);

/// Who made what was there before.
pub(super) const NO_CPU: usize = usize::MAX;

/// What several CPUs change.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub(super) struct Shared {
    /// Also those that were removed: who has found one may still read it, and write to it.
    pub(super) elements: BTreeMap<Id, Flow<A>>,
    pub(super) flows: BTreeMap<(Stage, FlowKey<A>), Id>,
    pub(super) host_connections: BTreeMap<FlowKey<A>, u64>,
    pub(super) remapped: BTreeSet<Port>,
    /// Open ones of each backend.
    pub(super) connections: BTreeMap<u32, i64>,
    /// In the order in which they were remembered.
    pub(super) affinity: Vec<(AffinityKey<A>, Affinity)>,
}

impl Shared {
    pub(super) fn of(host: &Host) -> Self {
        let mut shared = Self::default();
        let mut flows: Vec<_> = host.flows.borrow().iter().map(|(key, flow)| (*key, flow.get())).collect();
        flows.sort_unstable_by_key(|(key, _)| *key);
        for (number, (key, flow)) in flows.into_iter().enumerate() {
            shared.elements.insert((NO_CPU, number), flow);
            shared.flows.insert(key, (NO_CPU, number));
        }
        shared.host_connections =
            host.host_connections.borrow().iter().map(|(key, seen)| (*key, *seen)).collect();
        shared.remapped = host.remapped.borrow().iter().copied().collect();
        shared.connections = host.maps.open.borrow().clone().into_iter().collect();
        shared.affinity =
            host.maps.affinity.borrow().iter().map(|(key, affinity)| (*key, affinity.read())).collect();
        shared
    }

    pub(super) fn write_to(&self, host: &Host) {
        let element = |id: &Id| &*Box::leak(Box::new(Cell::new(self.elements[id])));
        *host.flows.borrow_mut() = self.flows.iter().map(|(key, id)| (*key, element(id))).collect();
        *host.host_connections.borrow_mut() = self.host_connections.clone().into_iter().collect();
        *host.remapped.borrow_mut() = self.remapped.clone().into_iter().collect();
        *host.maps.open.borrow_mut() = self.connections.clone().into_iter().collect();
        *host.maps.affinity.borrow_mut() =
            self.affinity.iter().map(|(key, affinity)| (*key, KnownClient::new(*affinity))).collect();
    }
}

/// What a CPU was told by an access.
#[derive(Clone, Copy, Debug, Hash)]
pub(super) enum Answer {
    Done,
    Element(Option<Id>),
    Copy(Flow<A>),
    Entry(Option<Flow<A>>),
    Inserted(Result<(), InsertError>),
    Seen(Option<u64>),
    Remapped(bool),
    Client(Option<usize>),
    Affinity(Affinity),
    Remembered(bool),
    Removed(bool),
    Open(u64),
}

/// One that gets on by one access.
pub(in crate::flow::tests) struct Cpu<'a> {
    /// What no packet changes.
    pub(super) host: &'a Host,
    pub(super) number: usize,
    pub(super) shared: RefCell<Shared>,
    pub(super) answers: RefCell<Vec<Answer>>,
    pub(super) accesses: Cell<usize>,
    pub(super) is_spent: Cell<bool>,
    pub(super) clock: Cell<u64>,
    pub(super) dice: RefCell<VecDeque<u32>>,
}

/// Why a CPU's work is left.
pub(super) struct Waits;

impl<'a> Cpu<'a> {
    pub(super) fn access(&self, access: impl FnOnce(&mut Shared, Id) -> Answer) -> Answer {
        let number = self.accesses.get();
        self.accesses.set(number + 1);
        let recorded = self.answers.borrow().get(number).copied();
        if let Some(answer) = recorded {
            return answer;
        }
        if self.is_spent.replace(true) {
            resume_unwind(Box::new(Waits));
        }
        let answer = access(&mut self.shared.borrow_mut(), (self.number, number));
        self.answers.borrow_mut().push(answer);
        answer
    }

    pub(super) fn count(&self, backend: u32, connections: i64) {
        self.access(|shared, _| {
            *shared.connections.entry(backend).or_default() += connections;
            Answer::Done
        });
    }

    pub(super) fn element(
        &'a self,
        access: impl FnOnce(&mut Shared, Id) -> Option<Id>,
    ) -> Option<Element<'a>> {
        let Answer::Element(found) = self.access(|shared, id| Answer::Element(access(shared, id))) else {
            unreachable!("another access")
        };
        found.map(|id| Element { cpu: self, id })
    }
}

#[derive(Clone, Copy)]
pub(in crate::flow::tests) struct Element<'a> {
    pub(super) cpu: &'a Cpu<'a>,
    pub(super) id: Id,
}

impl FlowEntry<A> for Element<'_> {
    fn read_into(&self, flow: &mut Flow<A>) {
        let Answer::Copy(copy) = self.cpu.access(|shared, _| Answer::Copy(shared.elements[&self.id])) else {
            unreachable!("another access")
        };
        *flow = copy;
    }

    /// Never changes here, so that it is no access.
    fn opened(&self) -> u64 {
        let copies = self.cpu.shared.borrow();
        copies.elements[&self.id].opened
    }

    fn write(&self, change: Change<A>) {
        self.cpu.access(|shared, _| {
            if let Some(flow) = shared.elements.get_mut(&self.id) {
                apply(flow, change);
            }
            Answer::Done
        });
    }
}

/// An entry, by its index in `Shared::affinity`.
#[derive(Clone, Copy)]
pub(in crate::flow::tests) struct Known<'a> {
    pub(super) cpu: &'a Cpu<'a>,
    pub(super) index: usize,
}

impl AffinityEntry for Known<'_> {
    fn read(&self) -> Affinity {
        let answer = self.cpu.access(|shared, _| Answer::Affinity(shared.affinity[self.index].1));
        let Answer::Affinity(affinity) = answer else { unreachable!("another access") };
        affinity
    }

    fn prolong(&self, now: u64) {
        self.cpu.access(|shared, _| {
            shared.affinity[self.index].1.last_used = now;
            Answer::Done
        });
    }

    fn write(&self, affinity: Affinity) {
        self.cpu.access(|shared, _| {
            shared.affinity[self.index].1 = affinity;
            Answer::Done
        });
    }
}

impl<'a> AffinityMaps<V4> for &'a Cpu<'a> {
    type Affinity = Known<'a>;

    fn affinity(&self, key: &AffinityKey<A>) -> Option<Known<'a>> {
        let answer = self
            .access(|shared, _| Answer::Client(shared.affinity.iter().position(|(client, _)| client == key)));
        let Answer::Client(found) = answer else { unreachable!("another access") };
        found.map(|index| Known { cpu: self, index })
    }

    fn remember(&self, key: &AffinityKey<A>, affinity: &Affinity) -> bool {
        let answer = self.access(|shared, _| {
            let is_new = shared.affinity.iter().all(|(client, _)| client != key);
            shared.affinity.extend(is_new.then_some((*key, *affinity)));
            Answer::Remembered(is_new)
        });
        let Answer::Remembered(is_new) = answer else { unreachable!("another access") };
        is_new
    }

    fn now(&self) -> u64 {
        self.clock.set(self.clock.get() + 100);
        self.clock.get()
    }

    fn open_connections(&self, backend: u32) -> u64 {
        let answer = self.access(|shared, _| {
            let open = shared.connections.get(&backend).copied().unwrap_or(0);
            Answer::Open(open.try_into().unwrap_or(0))
        });
        let Answer::Open(open) = answer else { unreachable!("another access") };
        open
    }

    fn is_in_source_ranges(&self, service: u32, address: &A) -> bool {
        self.host.is_in_source_ranges(service, address)
    }

    fn is_in_service_cidrs(&self, address: &A) -> bool {
        self.host.is_in_service_cidrs(address)
    }

    fn address_of_node(&self) -> A {
        self.host.address_of_node()
    }

    fn pods_told_by(&self) -> u16 {
        self.host.pods_told_by()
    }

    fn is_in_pod_range(&self, address: &A) -> bool {
        self.host.is_in_pod_range(address)
    }

    fn brings_pods(&self, interface: u32) -> bool {
        self.host.brings_pods(interface)
    }
}

impl Maps<V4> for &Cpu<'_> {
    fn frontend(&self, key: &FrontendKey<A>) -> Option<Frontend> {
        self.host.frontend(key)
    }

    fn node_address(&self, address: &A) -> Option<NodeAddress> {
        self.host.node_address(address)
    }

    fn service(&self, id: u32) -> Option<Service> {
        self.host.service(id)
    }

    fn slot(&self, index: u32) -> Option<Slot4> {
        self.host.slot(index)
    }

    fn backend(&self, id: u32) -> Option<Backend<A>> {
        self.host.backend(id)
    }
}

impl<'a> FlowMaps<V4> for &'a Cpu<'a> {
    type Entry = Element<'a>;

    fn flow(&self, stage: Stage, key: &FlowKey<A>) -> Option<Element<'a>> {
        self.element(|shared, _| shared.flows.get(&(stage, *key)).copied())
    }

    fn insert(&self, stage: Stage, key: &FlowKey<A>, flow: &Flow<A>) -> Result<(), InsertError> {
        let answer = self.access(|shared, id| {
            if shared.flows.contains_key(&(stage, *key)) {
                return Answer::Inserted(Err(InsertError::Exists));
            }
            shared.elements.insert(id, *flow);
            shared.flows.insert((stage, *key), id);
            Answer::Inserted(Ok(()))
        });
        let Answer::Inserted(result) = answer else { unreachable!("another access") };
        result
    }

    fn remove(&self, stage: Stage, key: &FlowKey<A>) -> bool {
        let answer = self.access(|shared, _| Answer::Removed(shared.flows.remove(&(stage, *key)).is_some()));
        let Answer::Removed(is_removed) = answer else { unreachable!("another access") };
        is_removed
    }

    fn host_connection(&self, key: &FlowKey<A>) -> Option<u64> {
        let Answer::Seen(seen) =
            self.access(|shared, _| Answer::Seen(shared.host_connections.get(key).copied()))
        else {
            unreachable!("another access")
        };
        seen
    }

    fn note_host_connection(&self, key: &FlowKey<A>, now: u64) {
        self.access(|shared, _| {
            shared.host_connections.insert(*key, now);
            Answer::Done
        });
    }

    fn forget_host_connection(&self, key: &FlowKey<A>) {
        self.access(|shared, _| {
            shared.host_connections.remove(key);
            Answer::Done
        });
    }

    fn is_remapped(&self, port: Port) -> bool {
        let Answer::Remapped(is_remapped) =
            self.access(|shared, _| Answer::Remapped(shared.remapped.contains(&port)))
        else {
            unreachable!("another access")
        };
        is_remapped
    }

    fn set_remapped(&self, port: Port) {
        self.access(|shared, _| {
            shared.remapped.insert(port);
            Answer::Done
        });
    }

    fn is_reserved(&self, port: Port) -> bool {
        self.host.is_reserved(port)
    }

    fn first_fragment(&self, _: &FragmentKey<A>, _: &mut FirstFragment<A>) -> bool {
        unreachable!("no packet is a fragment")
    }

    fn record_fragment(&self, _: &FragmentKey<A>, _: &FirstFragment<A>) {
        unreachable!("no packet is a fragment")
    }

    fn masquerade_address(&self, interface: u32) -> A {
        self.host.masquerade_address(interface)
    }

    fn masquerade_port(&self, random: u32, attempt: u32) -> Port {
        self.host.masquerade_port(random, attempt)
    }

    fn epoch(&self) -> u32 {
        self.host.epoch()
    }

    fn xdp_sends_to(&self, interface: u32) -> bool {
        self.host.xdp_sends_to(interface)
    }

    fn may_skip_stack(&self) -> bool {
        self.host.may_skip_stack()
    }

    fn xdp_redirects_from(&self, interface: u32) -> bool {
        self.host.xdp_redirects_from(interface)
    }

    fn route_epoch(&self) -> u32 {
        self.host.route_epoch()
    }

    fn resets_gone(&self) -> bool {
        self.host.resets_gone()
    }

    fn masquerades_as_kube_proxy(&self) -> bool {
        self.host.masquerades_as_kube_proxy()
    }

    fn masquerades_all(&self) -> bool {
        self.host.masquerades_all()
    }

    fn holds_packets(&self) -> bool {
        self.host.holds_packets()
    }

    fn holds_openings(&self) -> bool {
        self.host.holds_openings()
    }

    fn answers_unknown(&self) -> bool {
        self.host.answers_unknown()
    }

    fn may_be_frontend(&self, address: &A) -> bool {
        self.host.may_be_frontend(address)
    }

    fn openings_per_window(&self) -> u32 {
        0
    }

    fn most_unproven_entries(&self) -> u32 {
        0
    }

    fn encapsulation(&self) -> u16 {
        ENCAPSULATION_IP
    }

    fn count_opening(&self, _: u32, _: impl FnOnce(&mut ServiceOpenings) -> bool) -> bool {
        unreachable!("any number may open")
    }

    fn random(&self) -> u32 {
        self.dice.borrow_mut().pop_front().unwrap_or(FIRST)
    }

    // Each CPU counts for itself.
    fn count(&self, _: Reason) {}

    fn count_connection(&self, _: u32) {}

    fn count_opened(&self, backend: u32, flags: u32) {
        Cpu::count(self, backend, counted(flags));
    }

    fn count_closed(&self, backend: u32, flags: u32) {
        Cpu::count(self, backend, -counted(flags));
    }
}

impl StoredFlows<A> for Host {
    type Error = Infallible;

    fn get(&self, stage: Stage, key: &FlowKey<A>) -> Result<Option<Flow<A>>, Infallible> {
        Ok(self.flow(stage, key).map(|entry| entry.read()))
    }

    fn take(&self, stage: Stage, key: &FlowKey<A>) -> Result<Option<Flow<A>>, Infallible> {
        Ok(self.flows.borrow_mut().remove(&(stage, *key)).map(Cell::get))
    }

    fn put_back(&self, stage: Stage, key: &FlowKey<A>, flow: &Flow<A>) -> Result<bool, Infallible> {
        Ok(self.insert(stage, key, flow).is_ok())
    }

    fn count_collected(&self, backend: u32, connections: i64) -> Result<(), Infallible> {
        *self.maps.open.borrow_mut().entry(backend).or_default() -= connections;
        Ok(())
    }
}

impl StoredFlows<A> for &Cpu<'_> {
    type Error = Infallible;

    fn get(&self, stage: Stage, key: &FlowKey<A>) -> Result<Option<Flow<A>>, Infallible> {
        let answer = self.access(|shared, _| {
            let found = shared.flows.get(&(stage, *key));
            Answer::Entry(found.map(|id| shared.elements[id]))
        });
        Ok(answer.entry())
    }

    fn take(&self, stage: Stage, key: &FlowKey<A>) -> Result<Option<Flow<A>>, Infallible> {
        let answer = self.access(|shared, _| {
            let taken = shared.flows.remove(&(stage, *key));
            Answer::Entry(taken.map(|id| shared.elements[&id]))
        });
        Ok(answer.entry())
    }

    fn put_back(&self, stage: Stage, key: &FlowKey<A>, flow: &Flow<A>) -> Result<bool, Infallible> {
        Ok(self.insert(stage, key, flow).is_ok())
    }

    fn count_collected(&self, backend: u32, connections: i64) -> Result<(), Infallible> {
        Cpu::count(self, backend, -connections);
        Ok(())
    }
}
