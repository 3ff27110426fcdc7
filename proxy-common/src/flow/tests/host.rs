//! A node on the host: the flow maps with a clock, dice and counters, and what happens on another
//! CPU before a certain insertion.

use super::*;

/// As the map element that the kernel hands out, it is shared and stays when it is removed.
#[derive(Clone, Copy)]
pub(super) struct EntryRef(pub(super) &'static Cell<Flow<A>>);

impl EntryRef {
    pub(super) fn read(&self) -> Flow<A> {
        self.0.get()
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut Flow<A>)) {
        let mut flow = self.0.get();
        change(&mut flow);
        self.0.set(flow);
    }
}

impl FlowEntry<A> for EntryRef {
    fn read_into(&self, flow: &mut Flow<A>) {
        *flow = self.read();
    }

    fn opened(&self) -> u64 {
        self.0.get().opened
    }

    fn write(&self, change: Change<A>) {
        self.change(|flow| apply(flow, change));
    }
}

pub(super) fn apply(flow: &mut Flow<A>, change: Change<A>) {
    match change {
        Change::LastSeen(now) => flow.last_seen = now,
        Change::Epoch(epoch) => flow.epoch = epoch,
        Change::Reached(by, number) => by.numbers_of(flow).reached = number,
        Change::Awaited(by, number) => by.numbers_of(flow).awaited = number,
        Change::Progress(progress) => flow.state.progress = progress,
        Change::ClientFin(fin) => flow.state.client_fin = fin,
        Change::BackendFin(fin) => flow.state.backend_fin = fin,
        Change::Reset(reset) => flow.state.reset = reset,
        Change::Masquerade(address, port) => {
            flow.masquerade = address;
            flow.set_masquerade_port(port);
        }
        Change::ForwardToken(token) => flow.forward_token = token,
        Change::NextHop(hop) => flow.next_hop = hop,
    }
}

pub(super) type Flows = HashMap<(Stage, FlowKey<A>), &'static Cell<Flow<A>>>;
pub(super) type Interruption = Box<dyn FnOnce(&Host)>;

/// Both flow maps, a clock, dice, and what happens before a certain insertion.
pub(super) struct Host {
    pub(super) maps: HostMaps<V4>,
    pub(super) flows: RefCell<Flows>,
    pub(super) host_connections: RefCell<HashMap<FlowKey<A>, u64>>,
    pub(super) remapped: RefCell<HashSet<Port>>,
    pub(super) fragments: RefCell<HashMap<FragmentKey<A>, FirstFragment<A>>>,
    pub(super) clock: Cell<u64>,
    pub(super) dice: RefCell<VecDeque<u32>>,
    pub(super) counted: RefCell<HashMap<Reason, u32>>,
    pub(super) connections: RefCell<HashMap<u32, u32>>,
    pub(super) masquerade: Cell<A>,
    /// For aliases and masqueraded sources.
    pub(super) ports: std::ops::Range<u16>,
    /// Counts down; at 0 the insertion fails as in a full map.
    pub(super) until_full: Cell<Option<u32>>,
    /// Counts down; at 0 another CPU does this first.
    pub(super) interruption: RefCell<Option<(u32, Interruption)>>,
    pub(super) epoch: Cell<u32>,
    pub(super) route_epoch: Cell<u32>,
    pub(super) resets_gone: bool,
    pub(super) may_skip_stack: bool,
    pub(super) holds_packets: bool,
    pub(super) holds_openings: bool,
    pub(super) answers_unknown: bool,
    pub(super) openings_per_window: u32,
    pub(super) most_unproven_entries: u32,
    pub(super) encapsulation: u16,
    pub(super) openings: RefCell<HashMap<u32, ServiceOpenings>>,
}

impl Host {
    /// Two backends elsewhere, behind two frontends that can be dialled from outside, whose connections are counted.
    pub(super) fn new() -> Self {
        let mut maps = HostMaps::<V4>::default();
        for (index, address) in (0u32..).zip(BACKENDS) {
            maps.slots.insert(index, Slot4::new(address, PORT, index + 1, 0));
            let backend = Backend { address, port: PORT.number(), ..Backend::default() };
            maps.backends.insert(index + 1, backend);
        }
        let set = EndpointSet::new(0, 2);
        let flags = SERVICE_HAS_ENDPOINTS;
        maps.services
            .insert(1, Service { cluster: set, internal: set, external: set, flags, affinity_seconds: 0 });
        for (address, port) in [FRONTEND, OTHER_FRONTEND] {
            for protocol in [PROTOCOL_TCP, PROTOCOL_UDP] {
                let key = FrontendKey::of_address(address, port, protocol);
                maps.frontends.insert(
                    key,
                    Frontend { service: 1, flags: FRONTEND_EXTERNAL | FRONTEND_LEAST_CONNECTION },
                );
            }
        }
        Self {
            maps,
            flows: RefCell::default(),
            host_connections: RefCell::default(),
            remapped: RefCell::default(),
            fragments: RefCell::default(),
            clock: Cell::new(100 * SECOND),
            dice: RefCell::default(),
            counted: RefCell::default(),
            connections: RefCell::default(),
            masquerade: Cell::new(NODE),
            ports: 20_000..20_100,
            until_full: Cell::new(None),
            interruption: RefCell::default(),
            epoch: Cell::default(),
            route_epoch: Cell::default(),
            resets_gone: false,
            may_skip_stack: false,
            holds_packets: false,
            holds_openings: false,
            answers_unknown: false,
            openings_per_window: 0,
            most_unproven_entries: 0,
            encapsulation: ENCAPSULATION_IP,
            openings: RefCell::default(),
        }
    }

    pub(super) fn arriving(&self, packet: &Packet<A>, origin: Origin) -> Result<Rewrite<A>, Reason> {
        Ok(self.arrived(packet, origin)?.0)
    }

    pub(super) fn arrived(&self, packet: &Packet<A>, origin: Origin) -> Result<(Rewrite<A>, Then), Reason> {
        let mut scratch = Scratch { packet: *packet, ..Scratch::default() };
        decide_arriving(self, &mut scratch, origin)?;
        Ok((scratch.action.rewrite, scratch.action.then))
    }

    pub(super) fn leaving(&self, packet: &Packet<A>) -> Result<Rewrite<A>, Reason> {
        let mut scratch = Scratch { packet: *packet, ..Scratch::default() };
        decide_leaving(self, &mut scratch, false)?;
        assert_eq!(scratch.action.then, Then::Pass);
        Ok(scratch.action.rewrite)
    }

    /// A packet that a process of the node sends.
    pub(super) fn sent(&self, packet: &Packet<A>) -> Result<Rewrite<A>, Reason> {
        let mut scratch = Scratch { packet: *packet, ..Scratch::default() };
        decide_leaving(self, &mut scratch, true)?;
        assert_eq!(scratch.action.then, Then::Reroute);
        Ok(scratch.action.rewrite)
    }

    pub(super) fn wait(&self, nanoseconds: u64) {
        self.clock.set(self.clock.get() + nanoseconds);
    }

    /// Of the flow whose client sends such packets.
    pub(super) fn flow_of(&self, stage: Stage, packet: &Packet<A>) -> Flow<A> {
        self.flow(stage, &packet.key()).unwrap().read()
    }

    /// Another CPU gets there before the `nth` insertion, counted from 0.
    pub(super) fn interrupt(&self, nth: u32, other: impl FnOnce(&Host) + 'static) {
        *self.interruption.borrow_mut() = Some((nth, Box::new(other)));
    }

    pub(super) fn entries(&self, stage: Stage) -> usize {
        self.flows.borrow().keys().filter(|(s, _)| *s == stage).count()
    }

    pub(super) fn counted(&self, reason: Reason) -> u32 {
        self.counted.borrow().get(&reason).copied().unwrap_or(0)
    }

    /// Of each backend that has any: its established flows, and how many connections are counted.
    pub(super) fn established_and_counted(&self) -> BTreeMap<u32, (i64, i64)> {
        let mut both: BTreeMap<u32, (i64, i64)> = BTreeMap::new();
        for ((stage, key), flow) in self.flows.borrow().iter() {
            let flow = flow.get();
            if collect::is_counted(*stage, key, &flow) {
                both.entry(flow.backend_id).or_default().0 += 1;
            }
            let unproven = collect::unproven(*stage, key, &flow);
            both.entry(unproven_entries::<A>()).or_default().0 += i64::from(unproven);
        }
        for (backend, open) in self.maps.open.borrow().iter() {
            both.entry(*backend).or_default().1 += open;
        }
        both.retain(|_, both| *both != (0, 0));
        both
    }

    /// Each flow has all of its entries, and each entry is of one flow.
    pub(super) fn assert_whole(&self) {
        let flows = self.flows.borrow();
        for ((stage, _), flow) in flows.iter() {
            let flow = flow.get();
            let mut keys = vec![flow.client_key(), flow.backend_key()];
            if flow.is_masqueraded() {
                keys.push(flow.masquerade_key());
            }
            for key in keys {
                let partner = flows.get(&(*stage, key)).map(|partner| partner.get());
                let same = |partner: Flow<A>| {
                    (partner.backend, partner.alias_port(), partner.masquerade_port())
                        == (flow.backend, flow.alias_port(), flow.masquerade_port())
                };
                assert!(partner.is_some_and(same), "{stage:?} {key:?} of {flow:?}: {partner:?}");
            }
        }
    }
}

impl Maps<V4> for Host {
    fn frontend(&self, key: &FrontendKey<A>) -> Option<Frontend> {
        self.maps.frontend(key)
    }

    fn node_address(&self, address: &A) -> Option<NodeAddress> {
        self.maps.node_address(address)
    }

    fn service(&self, id: u32) -> Option<Service> {
        self.maps.service(id)
    }

    fn slot(&self, index: u32) -> Option<Slot4> {
        self.maps.slot(index)
    }

    fn backend(&self, id: u32) -> Option<Backend<A>> {
        self.maps.backend(id)
    }
}

impl AffinityMaps<V4> for Host {
    type Affinity = KnownClient;

    fn affinity(&self, key: &AffinityKey<A>) -> Option<KnownClient> {
        self.maps.affinity(key)
    }

    fn remember(&self, key: &AffinityKey<A>, affinity: &Affinity) -> bool {
        self.maps.remember(key, affinity)
    }

    /// As on a real node, no two flows are opened at the same nanosecond.
    fn now(&self) -> u64 {
        self.wait(1);
        self.clock.get()
    }

    fn open_connections(&self, backend: u32) -> u64 {
        self.maps.open_connections(backend)
    }

    fn is_in_source_ranges(&self, service: u32, address: &A) -> bool {
        self.maps.is_in_source_ranges(service, address)
    }

    fn pods_told_by(&self) -> u16 {
        self.maps.pods_told_by()
    }

    fn is_in_pod_range(&self, address: &A) -> bool {
        self.maps.is_in_pod_range(address)
    }

    fn brings_pods(&self, interface: u32) -> bool {
        self.maps.brings_pods(interface)
    }

    fn is_in_service_cidrs(&self, address: &A) -> bool {
        self.maps.is_in_service_cidrs(address)
    }

    fn address_of_node(&self) -> A {
        self.maps.address_of_node()
    }
}

impl FlowMaps<V4> for Host {
    type Entry = EntryRef;

    fn flow(&self, stage: Stage, key: &FlowKey<A>) -> Option<EntryRef> {
        self.flows.borrow().get(&(stage, *key)).copied().map(EntryRef)
    }

    fn insert(&self, stage: Stage, key: &FlowKey<A>, flow: &Flow<A>) -> Result<(), InsertError> {
        let due = match &mut *self.interruption.borrow_mut() {
            Some((0, _)) => true,
            Some((left, _)) => {
                *left -= 1;
                false
            }
            None => false,
        };
        if due && let Some((_, other)) = self.interruption.take() {
            other(self);
        }
        match self.until_full.get() {
            Some(0) => return Err(InsertError::Full),
            Some(left) => self.until_full.set(Some(left - 1)),
            None => {}
        }
        let mut flows = self.flows.borrow_mut();
        if flows.contains_key(&(stage, *key)) {
            return Err(InsertError::Exists);
        }
        // Leaked, as a map element lives on for who still reads it.
        flows.insert((stage, *key), Box::leak(Box::new(Cell::new(*flow))));
        Ok(())
    }

    fn remove(&self, stage: Stage, key: &FlowKey<A>) -> bool {
        self.flows.borrow_mut().remove(&(stage, *key)).is_some()
    }

    fn first_fragment(&self, key: &FragmentKey<A>, into: &mut FirstFragment<A>) -> bool {
        let fragments = self.fragments.borrow();
        fragments.get(key).map(|first| *into = *first).is_some()
    }

    fn record_fragment(&self, key: &FragmentKey<A>, first: &FirstFragment<A>) {
        self.fragments.borrow_mut().insert(*key, *first);
    }

    fn host_connection(&self, key: &FlowKey<A>) -> Option<u64> {
        self.host_connections.borrow().get(key).copied()
    }

    fn note_host_connection(&self, key: &FlowKey<A>, now: u64) {
        self.host_connections.borrow_mut().insert(*key, now);
    }

    fn forget_host_connection(&self, key: &FlowKey<A>) {
        self.host_connections.borrow_mut().remove(key);
    }

    fn is_remapped(&self, port: Port) -> bool {
        self.remapped.borrow().contains(&port)
    }

    fn set_remapped(&self, port: Port) {
        self.remapped.borrow_mut().insert(port);
    }

    fn is_reserved(&self, port: Port) -> bool {
        self.ports.contains(&port.number())
    }

    fn masquerade_address(&self, _interface: u32) -> A {
        self.masquerade.get()
    }

    fn masquerade_port(&self, random: u32, attempt: u32) -> Port {
        let pool = PortPool { ports: self.ports.len() as u32, reserved: 0 };
        let index = pool.index(random, attempt) as u16;
        if self.ports.is_empty() { Port::NONE } else { Port::new(self.ports.start + index) }
    }

    fn epoch(&self) -> u32 {
        self.epoch.get()
    }

    fn xdp_sends_to(&self, _interface: u32) -> bool {
        true
    }

    fn may_skip_stack(&self) -> bool {
        self.may_skip_stack
    }

    fn xdp_redirects_from(&self, _interface: u32) -> bool {
        true
    }

    fn route_epoch(&self) -> u32 {
        self.route_epoch.get()
    }

    fn resets_gone(&self) -> bool {
        self.resets_gone
    }

    fn masquerades_as_kube_proxy(&self) -> bool {
        false
    }

    fn masquerades_all(&self) -> bool {
        false
    }

    fn holds_packets(&self) -> bool {
        self.holds_packets
    }

    fn holds_openings(&self) -> bool {
        self.holds_openings
    }

    fn answers_unknown(&self) -> bool {
        self.answers_unknown
    }

    fn may_be_frontend(&self, address: &A) -> bool {
        let of_addresses = self.maps.frontends.keys().filter(|key| key.is_of_address());
        of_addresses
            .map(|key| key.address)
            .any(|one| frontend_address_bit(&one) == frontend_address_bit(address))
    }

    fn openings_per_window(&self) -> u32 {
        self.openings_per_window
    }

    fn most_unproven_entries(&self) -> u32 {
        self.most_unproven_entries
    }

    fn encapsulation(&self) -> u16 {
        self.encapsulation
    }

    fn count_opening(&self, service: u32, allow: impl FnOnce(&mut ServiceOpenings) -> bool) -> bool {
        allow(self.openings.borrow_mut().entry(service % OPENING_SERVICES).or_default())
    }

    fn random(&self) -> u32 {
        self.dice.borrow_mut().pop_front().unwrap_or(FIRST)
    }

    fn count(&self, reason: Reason) {
        *self.counted.borrow_mut().entry(reason).or_default() += 1;
    }

    fn count_connection(&self, service: u32) {
        *self.connections.borrow_mut().entry(service).or_default() += 1;
    }

    fn count_opened(&self, backend: u32, flags: u32) {
        *self.maps.open.borrow_mut().entry(backend).or_default() += counted(flags);
    }

    fn count_closed(&self, backend: u32, flags: u32) {
        *self.maps.open.borrow_mut().entry(backend).or_default() -= counted(flags);
    }
}

pub(super) fn counted(flags: u32) -> i64 {
    i64::from(flags & FLOW_COUNTED != 0)
}
