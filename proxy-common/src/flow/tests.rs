//! Cases that a test cannot cause in the kernel: races, tables that are full at one certain write, lost entries.
//! Round trips of real packets are in `tests/packets`.

mod direct;
mod ends;
mod foreign;
mod guard;
mod interleavings;
mod origins;
mod races;
mod transit;
mod unknown;

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    rc::Rc,
};

use rstest::rstest;

use super::{entries::REFRESH_AFTER, keep::SUSTAINED_AFTER, tcp::REACH, *};
use crate::{
    family::{Slot as _, V4},
    layout::*,
    packet::{
        Ends, Fragment, Headers, Packet, Part, Rewrite, Segment, TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN, Then,
    },
    port::{Port, PortPool},
    reason::Reason,
    select::Origin,
    tables::{
        AffinityTables, Tables,
        host::{HostTables, KnownClient},
    },
};

type A = [u8; 4];

const CLIENT: (A, Port) = ([203, 0, 113, 1], Port::new(40_000));
const FRONTEND: (A, Port) = ([10, 96, 0, 1], Port::new(80));
const OTHER_FRONTEND: (A, Port) = ([10, 96, 0, 2], Port::new(443));
const NODE: A = [192, 0, 2, 1];
const BACKENDS: [A; 2] = [[10, 244, 1, 1], [10, 244, 1, 2]];
const PORT: Port = Port::new(8080);
const SECOND: u64 = 1_000_000_000;
/// Dice that choose the first and the last of a set.
const FIRST: u32 = 0;
const LAST: u32 = u32::MAX;

/// As the programs have it.
fn decide_arriving<T: FlowTables<V4>>(
    tables: &T,
    scratch: &mut Scratch<A>,
    origin: Origin,
) -> Result<(), Reason> {
    decide_arriving_from(tables, scratch, origin, &UnknownSockets)
}

fn decide_arriving_from<T: FlowTables<V4>>(
    tables: &T,
    scratch: &mut Scratch<A>,
    origin: Origin,
    sockets: &impl PodSockets<A>,
) -> Result<(), Reason> {
    scratch.is_parsed = true;
    arriving_known(tables, scratch, origin).unwrap_or_else(|| arriving(tables, scratch, origin, sockets))
}

/// A pod with one connection to each of these.
struct ConnectedTo(Vec<(A, Port)>);

impl PodSockets<A> for ConnectedTo {
    fn is_connected(&self, scratch: &Scratch<A>) -> bool {
        let [backend, client] = scratch.direct_ends();
        client == CLIENT && self.0.contains(&backend)
    }

    fn stays_here(&self, _: &Scratch<A>) -> bool {
        false
    }
}

/// As the programs have it.
fn decide_leaving<T: FlowTables<V4>>(
    tables: &T,
    scratch: &mut Scratch<A>,
    from_host: bool,
) -> Result<(), Reason> {
    scratch.is_parsed = true;
    leaving_known(tables, scratch).unwrap_or_else(|| leaving(tables, scratch, from_host))
}

/// As the map element that the kernel hands out, it is shared and stays when it is removed.
#[derive(Clone, Copy)]
struct EntryRef(&'static Cell<Flow<A>>);

impl EntryRef {
    fn read(&self) -> Flow<A> {
        self.0.get()
    }

    fn change(&self, change: impl FnOnce(&mut Flow<A>)) {
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

fn apply(flow: &mut Flow<A>, change: Change<A>) {
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
        Change::Left(mark) => flow.left = mark,
        Change::NextHop(hop) => flow.next_hop = hop,
    }
}

type Flows = HashMap<(Stage, FlowKey<A>), &'static Cell<Flow<A>>>;
type Interruption = Box<dyn FnOnce(&Host)>;

/// Both tables of flows, a clock, dice, and what happens before a certain insertion.
struct Host {
    tables: HostTables<V4>,
    flows: RefCell<Flows>,
    foreign: RefCell<HashMap<FlowKey<A>, u64>>,
    moved: RefCell<HashSet<Port>>,
    fragments: RefCell<HashMap<FragmentKey<A>, FirstFragment<A>>>,
    clock: Cell<u64>,
    dice: RefCell<VecDeque<u32>>,
    counted: RefCell<HashMap<Reason, u32>>,
    connections: RefCell<HashMap<u32, u32>>,
    masquerade: Cell<A>,
    /// For aliases and masqueraded sources.
    ports: std::ops::Range<u16>,
    /// Counts down; at 0 the insertion fails as in a full table.
    until_full: Cell<Option<u32>>,
    /// Counts down; at 0 another CPU does this first.
    interruption: RefCell<Option<(u32, Interruption)>>,
    epoch: Cell<u32>,
    route_epoch: Cell<u32>,
    resets_gone: bool,
    sends_past_stack: bool,
    holds_packets: bool,
    holds_openings: bool,
    answers_unknown: bool,
    openings_per_window: u32,
    most_unproven_entries: u32,
    encapsulation: u16,
    openings: RefCell<HashMap<u32, ServiceOpenings>>,
}

impl Host {
    /// Two backends elsewhere, behind two frontends that can be dialled from outside, whose connections are counted.
    fn new() -> Self {
        let mut tables = HostTables::<V4>::default();
        for (index, address) in (0u32..).zip(BACKENDS) {
            tables.slots.insert(index, Slot4::new(address, PORT, index + 1, 0));
            let backend = Backend { address, port: PORT.number(), ..Backend::default() };
            tables.backends.insert(index + 1, backend);
        }
        let set = EndpointSet::new(0, 2);
        let flags = SERVICE_HAS_ENDPOINTS;
        tables
            .services
            .insert(1, Service { cluster: set, internal: set, external: set, flags, affinity_seconds: 0 });
        for (address, port) in [FRONTEND, OTHER_FRONTEND] {
            for protocol in [PROTOCOL_TCP, PROTOCOL_UDP] {
                let key = FrontendKey::of_address(address, port, protocol);
                tables.frontends.insert(
                    key,
                    Frontend { service: 1, flags: FRONTEND_EXTERNAL | FRONTEND_LEAST_CONNECTION },
                );
            }
        }
        Self {
            tables,
            flows: RefCell::default(),
            foreign: RefCell::default(),
            moved: RefCell::default(),
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
            sends_past_stack: false,
            holds_packets: false,
            holds_openings: false,
            answers_unknown: false,
            openings_per_window: 0,
            most_unproven_entries: 0,
            encapsulation: ENCAPSULATION_IP,
            openings: RefCell::default(),
        }
    }

    fn arriving(&self, packet: &Packet<A>, origin: Origin) -> Result<Rewrite<A>, Reason> {
        Ok(self.arrived(packet, origin)?.0)
    }

    fn arrived(&self, packet: &Packet<A>, origin: Origin) -> Result<(Rewrite<A>, Then), Reason> {
        let mut scratch = Scratch { packet: *packet, ..Scratch::default() };
        decide_arriving(self, &mut scratch, origin)?;
        Ok((scratch.action.rewrite, scratch.action.then))
    }

    fn leaving(&self, packet: &Packet<A>) -> Result<Rewrite<A>, Reason> {
        let mut scratch = Scratch { packet: *packet, ..Scratch::default() };
        decide_leaving(self, &mut scratch, false)?;
        assert_eq!(scratch.action.then, Then::Pass);
        Ok(scratch.action.rewrite)
    }

    /// A packet that a process of the node sends.
    fn sent(&self, packet: &Packet<A>) -> Result<Rewrite<A>, Reason> {
        let mut scratch = Scratch { packet: *packet, ..Scratch::default() };
        decide_leaving(self, &mut scratch, true)?;
        assert_eq!(scratch.action.then, Then::Reroute);
        Ok(scratch.action.rewrite)
    }

    fn wait(&self, nanoseconds: u64) {
        self.clock.set(self.clock.get() + nanoseconds);
    }

    /// Of the flow whose client sends such packets.
    fn flow_of(&self, stage: Stage, packet: &Packet<A>) -> Flow<A> {
        self.flow(stage, &packet.key()).unwrap().read()
    }

    /// Another CPU gets there before the `nth` insertion, counted from 0.
    fn interrupt(&self, nth: u32, other: impl FnOnce(&Host) + 'static) {
        *self.interruption.borrow_mut() = Some((nth, Box::new(other)));
    }

    fn entries(&self, stage: Stage) -> usize {
        self.flows.borrow().keys().filter(|(s, _)| *s == stage).count()
    }

    fn counted(&self, reason: Reason) -> u32 {
        self.counted.borrow().get(&reason).copied().unwrap_or(0)
    }

    /// Of each backend that has any: its established flows, and how many connections are counted.
    fn established_and_counted(&self) -> BTreeMap<u32, (i64, i64)> {
        let mut both: BTreeMap<u32, (i64, i64)> = BTreeMap::new();
        for ((stage, key), flow) in self.flows.borrow().iter() {
            let flow = flow.get();
            if collect::is_counted(*stage, key, &flow) {
                both.entry(flow.backend_id).or_default().0 += 1;
            }
            let unproven = collect::unproven(*stage, key, &flow);
            both.entry(unproven_entries::<A>()).or_default().0 += i64::from(unproven);
        }
        for (backend, open) in self.tables.open.borrow().iter() {
            both.entry(*backend).or_default().1 += open;
        }
        both.retain(|_, both| *both != (0, 0));
        both
    }

    /// Each flow has all of its entries, and each entry is of one flow.
    fn assert_whole(&self) {
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

impl Tables<V4> for Host {
    fn frontend(&self, key: &FrontendKey<A>) -> Option<Frontend> {
        self.tables.frontend(key)
    }

    fn node_address(&self, address: &A) -> Option<NodeAddress> {
        self.tables.node_address(address)
    }

    fn service(&self, id: u32) -> Option<Service> {
        self.tables.service(id)
    }

    fn slot(&self, index: u32) -> Option<Slot4> {
        self.tables.slot(index)
    }

    fn backend(&self, id: u32) -> Option<Backend<A>> {
        self.tables.backend(id)
    }
}

impl AffinityTables<V4> for Host {
    type Affinity = KnownClient;

    fn affinity(&self, key: &AffinityKey<A>) -> Option<KnownClient> {
        self.tables.affinity(key)
    }

    fn remember(&self, key: &AffinityKey<A>, affinity: &Affinity) -> bool {
        self.tables.remember(key, affinity)
    }

    /// As on a real node, no two flows are opened at the same nanosecond.
    fn now(&self) -> u64 {
        self.wait(1);
        self.clock.get()
    }

    fn open_connections(&self, backend: u32) -> u64 {
        self.tables.open_connections(backend)
    }

    fn is_in_source_ranges(&self, service: u32, address: &A) -> bool {
        self.tables.is_in_source_ranges(service, address)
    }

    fn pods_told_by(&self) -> u16 {
        self.tables.pods_told_by()
    }

    fn is_in_pod_range(&self, address: &A) -> bool {
        self.tables.is_in_pod_range(address)
    }

    fn brings_pods(&self, interface: u32) -> bool {
        self.tables.brings_pods(interface)
    }

    fn is_in_service_cidrs(&self, address: &A) -> bool {
        self.tables.is_in_service_cidrs(address)
    }

    fn address_of_node(&self) -> A {
        self.tables.address_of_node()
    }
}

impl FlowTables<V4> for Host {
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

    fn foreign(&self, key: &FlowKey<A>) -> Option<u64> {
        self.foreign.borrow().get(key).copied()
    }

    fn note_foreign(&self, key: &FlowKey<A>, now: u64) {
        self.foreign.borrow_mut().insert(*key, now);
    }

    fn forget_foreign(&self, key: &FlowKey<A>) {
        self.foreign.borrow_mut().remove(key);
    }

    fn is_moved(&self, port: Port) -> bool {
        self.moved.borrow().contains(&port)
    }

    fn set_moved(&self, port: Port) {
        self.moved.borrow_mut().insert(port);
    }

    fn is_apart(&self, port: Port) -> bool {
        self.ports.contains(&port.number())
    }

    fn masquerade_address(&self, _interface: u32) -> A {
        self.masquerade.get()
    }

    fn masquerade_port(&self, random: u32, attempt: u32) -> Port {
        let pool = PortPool { ports: self.ports.len() as u32, apart: 0 };
        let place = pool.place(random, attempt) as u16;
        if self.ports.is_empty() { Port::NONE } else { Port::new(self.ports.start + place) }
    }

    fn epoch(&self) -> u32 {
        self.epoch.get()
    }

    fn driver_sends_to(&self, _interface: u32) -> bool {
        true
    }

    fn sends_past_stack(&self) -> bool {
        self.sends_past_stack
    }

    fn driver_redirects_from(&self, _interface: u32) -> bool {
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
        let of_addresses = self.tables.frontends.keys().filter(|key| key.is_of_address());
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

    fn count_opening(&self, service: u32, admit: impl FnOnce(&mut ServiceOpenings) -> bool) -> bool {
        admit(self.openings.borrow_mut().entry(service % OPENING_SERVICES).or_default())
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
        *self.tables.open.borrow_mut().entry(backend).or_default() += counted(flags);
    }

    fn count_closed(&self, backend: u32, flags: u32) {
        *self.tables.open.borrow_mut().entry(backend).or_default() -= counted(flags);
    }
}

fn counted(flags: u32) -> i64 {
    i64::from(flags & FLOW_COUNTED != 0)
}

/// First sequence numbers.
const CLIENT_ISN: u32 = 1_000;
const BACKEND_ISN: u32 = u32::MAX;

/// Of the client, with the numbers of its first segments.
fn packet(source: (A, Port), destination: (A, Port), flags: u8) -> Packet<A> {
    let is_first = flags & TCP_SYN != 0;
    let sequence = CLIENT_ISN + u32::from(!is_first);
    let acknowledgement = if is_first { 0 } else { BACKEND_ISN.wrapping_add(1) };
    numbered(source, destination, Segment::new(flags, sequence, acknowledgement, 0))
}

/// As [`packet`], of the backend.
fn answer(source: (A, Port), destination: (A, Port), flags: u8) -> Packet<A> {
    let sequence = BACKEND_ISN.wrapping_add(u32::from(flags & TCP_SYN == 0));
    numbered(source, destination, Segment::new(flags, sequence, CLIENT_ISN + 1, 0))
}

fn numbered(source: (A, Port), destination: (A, Port), segment: Segment) -> Packet<A> {
    Packet {
        source: source.0,
        destination: destination.0,
        source_port: source.1,
        destination_port: destination.1,
        protocol: PROTOCOL_TCP,
        segment,
        fragment: Fragment::default(),
        headers: Headers::default(),
    }
}

fn datagram(source: (A, Port), destination: (A, Port)) -> Packet<A> {
    Packet { protocol: PROTOCOL_UDP, ..numbered(source, destination, Segment::default()) }
}

fn syn() -> Packet<A> {
    packet(CLIENT, FRONTEND, TCP_SYN)
}

fn source(rewrite: Rewrite<A>) -> (A, Port) {
    (rewrite.source, rewrite.source_port)
}

fn destination(rewrite: Rewrite<A>) -> (A, Port) {
    (rewrite.destination, rewrite.destination_port)
}

/// A client's packet goes through both hooks; answers with what it is when it leaves the node.
fn through(host: &Host, packet: &Packet<A>, origin: Origin) -> Result<Packet<A>, Reason> {
    let inside = rewritten(packet, host.arriving(packet, origin)?);
    match host.leaving(&inside) {
        Ok(rewrite) => Ok(rewritten(&inside, rewrite)),
        Err(Reason::NotAService) => Ok(inside),
        Err(reason) => Err(reason),
    }
}

fn rewritten(packet: &Packet<A>, rewrite: Rewrite<A>) -> Packet<A> {
    Packet {
        source: rewrite.source,
        destination: rewrite.destination,
        source_port: rewrite.source_port,
        destination_port: rewrite.destination_port,
        ..*packet
    }
}

/// A confirmed flow, as its client's entry has it.
fn establish_one(host: &Host, origin: Origin) -> Flow<A> {
    through(host, &syn(), origin).unwrap();
    let flow = host.flow_of(Stage::Opening, &syn());
    host.leaving(&answer((flow.backend, PORT), CLIENT, TCP_SYN | TCP_ACK)).unwrap();
    host.arriving(&packet(CLIENT, FRONTEND, TCP_ACK), origin).unwrap();
    host.assert_whole();
    host.flow_of(Stage::Established, &syn())
}

#[rstest]
#[case::same_backend_before_the_first_write(0, FIRST)]
#[case::same_backend_before_the_second_write(1, FIRST)]
#[case::other_backend_before_the_first_write(0, LAST)]
#[case::other_backend_before_the_second_write(1, LAST)]
fn two_first_packets_at_once_get_one_backend(
    #[case] nth: u32,
    #[case] other_dice: u32,
    #[values(Origin::Workload, Origin::Outside)] origin: Origin,
) {
    let host = Host::new();
    let winner = Rc::new(Cell::new(None));
    let seen = winner.clone();
    host.interrupt(nth, move |host| {
        host.dice.borrow_mut().extend([other_dice, LAST]);
        seen.set(Some(host.arriving(&syn(), origin)));
    });
    let loser = host.arriving(&syn(), origin);
    assert_eq!(Some(loser), winner.get());
    assert!(loser.is_ok());
    host.assert_whole();
    assert_eq!(host.entries(Stage::Opening), 2);
    through(&host, &syn(), origin).unwrap();
    host.assert_whole();
    assert_eq!(host.entries(Stage::Opening), if origin == Origin::Outside { 3 } else { 2 });
}

#[rstest]
fn a_flow_is_created_whole_or_not_at_all(#[values(0, 1)] room: u32) {
    let host = Host::new();
    host.until_full.set(Some(room));
    let refused = host.arriving(&syn(), Origin::Outside);
    assert!(refused.is_err_and(|reason| reason.verdict() == crate::reason::Verdict::Drop));
    assert_eq!(host.entries(Stage::Opening), 0);
}

/// The packet is dropped, and the next one of the same flow finds room.
#[test]
fn without_room_for_a_masqueraded_source_the_packet_is_dropped() {
    let host = Host::new();
    host.until_full.set(Some(2));
    assert_eq!(through(&host, &syn(), Origin::Outside), Err(Reason::MasqueradePortsExhausted));
    host.until_full.set(None);
    assert_eq!(through(&host, &syn(), Origin::Outside).map(|packet| packet.source), Ok(NODE));
    host.assert_whole();
}

#[test]
fn two_packets_that_leave_at_once_may_have_two_sources_and_both_are_answered() {
    let host = Host::new();
    let inside = rewritten(&syn(), host.arriving(&syn(), Origin::Outside).unwrap());
    let other = Rc::new(Cell::new(None));
    let seen = other.clone();
    host.interrupt(0, move |host| {
        host.dice.borrow_mut().push_back(LAST);
        seen.set(Some(host.leaving(&inside).unwrap()));
    });
    let sources = [source(host.leaving(&inside).unwrap()), source(other.get().unwrap())];
    assert_ne!(sources[0], sources[1]);
    for source in sources {
        let answer = answer((BACKENDS[0], PORT), source, TCP_SYN | TCP_ACK);
        assert_eq!(host.arriving(&answer, Origin::Outside).map(destination), Ok(CLIENT));
    }
}

#[rstest]
fn a_flow_is_established_whole_or_not_at_all(#[values(0, 1, 2)] room: u32) {
    let host = Host::new();
    through(&host, &syn(), Origin::Outside).unwrap();
    host.leaving(&answer((BACKENDS[0], PORT), CLIENT, TCP_SYN | TCP_ACK)).unwrap();
    host.until_full.set(Some(room));
    let ack = packet(CLIENT, FRONTEND, TCP_ACK);
    assert_eq!(host.arriving(&ack, Origin::Outside).map(|r| r.destination), Ok(BACKENDS[0]));
    assert_eq!((host.entries(Stage::Opening), host.entries(Stage::Established)), (3, 0));
    assert_eq!(host.counted(Reason::FlowsFull), 1);
    // It is tried again once a second, not at each packet.
    host.until_full.set(None);
    assert!(host.arriving(&ack, Origin::Outside).is_ok());
    assert_eq!(host.entries(Stage::Established), 0);
    host.wait(REFRESH_AFTER);
    assert!(host.arriving(&ack, Origin::Outside).is_ok());
    assert_eq!(host.entries(Stage::Established), 3);
    host.assert_whole();
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Left {
    Client,
    Backend,
    Masquerade,
}

#[rstest]
fn every_entry_restores_the_others(#[values(Left::Client, Left::Backend, Left::Masquerade)] left: Left) {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Outside);
    let keys = [
        (Left::Client, flow.client_key()),
        (Left::Backend, flow.backend_key()),
        (Left::Masquerade, flow.masquerade_key()),
    ];
    for (_, key) in keys.iter().filter(|(of, _)| *of != left) {
        host.remove(Stage::Established, key);
        host.remove(Stage::Opening, key);
    }
    host.wait(REFRESH_AFTER);
    let translated = match left {
        Left::Client => host.arriving(&packet(CLIENT, FRONTEND, TCP_ACK), Origin::Outside),
        Left::Backend => host.leaving(&answer((flow.backend, PORT), CLIENT, TCP_ACK)),
        Left::Masquerade => {
            let masquerade = (NODE, flow.masquerade_port());
            host.arriving(&answer((flow.backend, PORT), masquerade, TCP_ACK), Origin::Outside)
        }
    };
    assert!(translated.is_ok());
    for (_, key) in keys {
        let entry = host.flow(Stage::Established, &key).unwrap().read();
        assert!(entry.last_seen > flow.last_seen + REFRESH_AFTER);
        assert_eq!(entry.backend, flow.backend);
    }
    assert_eq!(host.counted(Reason::FlowRestored), 2);
}

#[test]
fn flows_keep_the_address_that_they_were_opened_with() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Outside);
    host.masquerade.set([192, 0, 2, 2]);
    let answer = answer((flow.backend, PORT), (NODE, flow.masquerade_port()), TCP_ACK);
    assert_eq!(host.arriving(&answer, Origin::Outside).map(destination), Ok(CLIENT));
}

#[test]
fn netfilter_keeps_the_ports_of_its_connections() {
    let host = Host::new();
    let (backend, first) = ((BACKENDS[0], PORT), Port::new(20_000));
    let other = (CLIENT.0, Port::new(50_000));
    // The frontends are those of a service that is gone, and of one that netfilter alone serves.
    let of_netfilter = [(other, (NODE, first)), (CLIENT, CLIENT)].map(|(client, answers_to)| {
        let frontend = ([10, 96, 0, 9], Port::new(80));
        NetfilterConnection { client, frontend, backend, answers_to }
    });
    let of_netfilter = of_netfilter.map(|connection| reserve(&host, &connection));
    let sent = through(&host, &syn(), Origin::Outside).unwrap();
    assert_eq!((sent.source, sent.source_port), (NODE, Port::new(20_001)));
    assert_ne!(host.flow_of(Stage::Opening, &syn()).alias_port(), CLIENT.1);
    // Packets of them are netfilter's, and they live on.
    host.wait(REFRESH_AFTER);
    assert_eq!(
        host.arriving(&answer(backend, (NODE, first), TCP_ACK), Origin::Outside),
        Err(Reason::NotAService)
    );
    assert_eq!(host.leaving(&answer(backend, CLIENT, TCP_ACK)), Err(Reason::NotAService));
    assert_eq!(host.arriving(&packet(CLIENT, backend, TCP_SYN), Origin::Workload), Err(Reason::NotAService));
    for flow in of_netfilter {
        let [_, answers] = flow.netfilter_keys();
        let mut entry = host.flow(Stage::Established, &answers).unwrap().read();
        assert!(entry.last_seen > flow.last_seen);
        (entry.last_seen, entry.state.reset) = (flow.last_seen, 0);
        assert_eq!(entry, flow);
    }
}

/// Reserves both pairs of ends as the controller does.
fn reserve(host: &Host, connection: &NetfilterConnection<A>) -> Flow<A> {
    let flow = Flow::of_netfilter(connection, host.now());
    for key in flow.netfilter_keys() {
        host.insert(Stage::Established, &key, &flow).unwrap();
    }
    flow
}

#[rstest]
fn no_forged_packet_takes_a_connection_from_netfilter(
    #[values(Origin::Workload, Origin::Outside)] origin: Origin,
    #[values(CLIENT, (NODE, Port::new(20_000)), (NODE, Port::new(60_000)))] answers_to: (A, Port),
) {
    let host = Host::new();
    let backend = (BACKENDS[0], PORT);
    let connection = NetfilterConnection { client: CLIENT, frontend: FRONTEND, backend, answers_to };
    let flow = reserve(&host, &connection);
    for flags in [TCP_SYN, TCP_ACK, TCP_RST, TCP_FIN | TCP_ACK, TCP_SYN, TCP_ACK] {
        host.wait(REFRESH_AFTER);
        for (from, to) in [(CLIENT, FRONTEND), (backend, answers_to)] {
            assert_eq!(host.arriving(&packet(from, to, flags), origin), Err(Reason::NotAService));
        }
        assert_eq!(host.leaving(&packet(FRONTEND, CLIENT, flags)), Err(Reason::NotAService));
    }
    assert_eq!((host.entries(Stage::Opening), host.entries(Stage::Established)), (0, 2));
    // Once it has ended, both are free.
    assert_eq!(collect::remove_if(&host, &flow, |_| true), Ok(2));
    assert!(host.arriving(&syn(), origin).is_ok());
}

/// The client may dial again after its connection has ended: the controller is to ask.
#[rstest]
#[case::client_goes_on(TCP_ACK, 0)]
#[case::client_closes(TCP_FIN | TCP_ACK, 0)]
#[case::client_dials(TCP_SYN, RESET_PLAUSIBLE)]
fn a_syn_marks_a_connection_of_netfilters(#[case] flags: u8, #[case] expected: u8) {
    let host = Host::new();
    let backend = (BACKENDS[0], PORT);
    let connection = NetfilterConnection { client: CLIENT, frontend: FRONTEND, backend, answers_to: CLIENT };
    reserve(&host, &connection);
    let passes = host.arriving(&packet(CLIENT, FRONTEND, flags), Origin::Workload);
    assert_eq!(passes, Err(Reason::NotAService));
    let kept = host.flow_of(Stage::Established, &syn());
    assert_eq!((kept.state.reset, kept.state.has_ended()), (expected, false));
    assert_eq!(host.entries(Stage::Opening), 0);
}

/// The client's port is in use towards the backend.
#[rstest]
fn a_new_flow_keeps_away_from_a_connection_of_the_client_to_the_backend(
    #[values(PROTOCOL_TCP, PROTOCOL_UDP)] protocol: u8,
    #[values(true, false)] is_same_backend: bool,
) {
    let host = Host::new();
    let backend = BACKENDS[usize::from(!is_same_backend)];
    let sockets = ConnectedTo(vec![(backend, PORT)]);
    let first = if protocol == PROTOCOL_TCP { syn() } else { datagram(CLIENT, FRONTEND) };
    let mut scratch = Scratch { packet: first, ..Scratch::default() };
    decide_arriving_from(&host, &mut scratch, Origin::Workload, &sockets).unwrap();
    let inside = rewritten(&first, scratch.action.rewrite);
    assert_eq!((inside.destination, inside.source), (BACKENDS[0], CLIENT.0));
    assert_eq!(inside.source_port == CLIENT.1, !is_same_backend);
    // The backend's segments on the client's own connection pass.
    let own = Packet { protocol, ..answer((backend, PORT), CLIENT, TCP_ACK) };
    assert_eq!(host.leaving(&own), Err(Reason::NotAService));
    // The next packets do not ask.
    assert_eq!(host.arriving(&first, Origin::Workload).map(source), Ok((CLIENT.0, inside.source_port)));
    let flags = TCP_SYN | TCP_ACK;
    let reply = Packet { protocol, ..answer((BACKENDS[0], PORT), (CLIENT.0, inside.source_port), flags) };
    let left = host.leaving(&reply).unwrap();
    assert_eq!((source(left), destination(left)), (FRONTEND, CLIENT));
}

/// The pool of aliases has the client's own port, and the dice choose it.
#[test]
fn an_alias_is_never_the_port_that_is_taken() {
    let pool = || Host { ports: CLIENT.1.number()..CLIENT.1.number() + 100, ..Host::new() };
    let host = pool();
    let sockets = ConnectedTo(vec![(BACKENDS[0], PORT)]);
    let mut scratch = Scratch { packet: syn(), ..Scratch::default() };
    decide_arriving_from(&host, &mut scratch, Origin::Workload, &sockets).unwrap();
    assert_ne!(scratch.action.rewrite.source_port, CLIENT.1, "a pod's");
    assert_ne!(pool().sent(&syn()).unwrap().source_port, CLIENT.1, "a process of the node's");
}

#[test]
fn entries_are_left_alone_within_a_second() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    host.wait(REFRESH_AFTER / 2);
    host.remove(Stage::Established, &flow.backend_key());
    host.arriving(&packet(CLIENT, FRONTEND, TCP_ACK), Origin::Workload).unwrap();
    assert_eq!(host.entries(Stage::Established), 1);
    assert_eq!(host.counted(Reason::FlowRestored), 0);
}

/// The element that a lookup found is given to another flow before it is read, or while it is.
#[test]
fn an_element_that_has_become_another_flows_is_none_of_ours() {
    let host = Host::new();
    establish_one(&host, Origin::Workload);
    let other = packet((CLIENT.0, Port::new(40_001)), FRONTEND, TCP_SYN);
    host.arriving(&other, Origin::Workload).unwrap();
    let reused = host.flow_of(Stage::Opening, &other);
    host.flow(Stage::Established, &syn().key()).unwrap().change(|flow| *flow = reused);
    let late = host.arriving(&packet(CLIENT, FRONTEND, TCP_ACK), Origin::Workload);
    assert_eq!(late, Err(Reason::NotAService));
}

#[test]
fn a_client_port_at_one_backend_through_many_frontends_runs_out_of_aliases() {
    let mut host = Host { ports: 20_000..20_007, ..Host::new() };
    let set = EndpointSet::new(0, 1);
    host.tables
        .services
        .insert(1, Service { cluster: set, internal: set, external: set, flags: 1, ..Service::default() });
    let frontends = (1..=20u8).map(|n| ([10, 96, 1, n], Port::new(80)));
    for (address, port) in frontends.clone() {
        let key = FrontendKey::of_address(address, port, PROTOCOL_TCP);
        host.tables.frontends.insert(key, Frontend { service: 1, flags: 0 });
    }
    let opened: Vec<_> =
        frontends.map(|to| host.arriving(&packet(CLIENT, to, TCP_SYN), Origin::Workload)).collect();
    // Its own port and all aliases.
    let good = opened.iter().filter(|result| result.is_ok()).count();
    assert_eq!(good, 8);
    assert_eq!(opened.last(), Some(&Err(Reason::AliasPortsExhausted)));
    let mut ports: Vec<Port> = opened.iter().flatten().map(|rewrite| rewrite.source_port).collect();
    ports.dedup();
    assert_eq!(ports.len(), good);
    host.assert_whole();
}

#[test]
fn the_nodes_own_flows_are_told_apart() {
    let host = Host::new();
    let sent = host.sent(&syn()).unwrap();
    let endpoint = (BACKENDS[0], PORT);
    let answered = |host: &Host, port: Port| {
        let packet = answer(endpoint, (CLIENT.0, port), TCP_SYN | TCP_ACK);
        host.arrived(&packet, Origin::Outside)
            .map(|(rewrite, then)| (source(rewrite), destination(rewrite), then))
    };
    assert_eq!(answered(&host, sent.source_port), Ok((FRONTEND, CLIENT, Then::IntoNode)));
    host.assert_whole();
    // What the node sends to a backend itself is not seen: its answers look like this.
    assert_eq!(answered(&host, CLIENT.1), Err(Reason::NotAService));
    // A pod's flow is none of them.
    let host = Host::new();
    let sent = host.arriving(&syn(), Origin::Workload).unwrap();
    assert_eq!(answered(&host, sent.source_port), Err(Reason::NotAService));
}

#[test]
fn the_nodes_own_flows_are_established_as_any() {
    let host = Host::new();
    let sent = host.sent(&syn()).unwrap();
    let back = answer((BACKENDS[0], PORT), (CLIENT.0, sent.source_port), TCP_SYN | TCP_ACK);
    host.arriving(&back, Origin::Outside).unwrap();
    assert_eq!(host.sent(&packet(CLIENT, FRONTEND, TCP_ACK)), Ok(sent));
    assert_eq!(host.entries(Stage::Established), 2);
}

#[test]
fn the_nodes_own_flows_and_masqueraded_ones_share_one_pool_of_ports() {
    let host = Host::new();
    let own = host.sent(&packet((NODE, CLIENT.1), FRONTEND, TCP_SYN)).unwrap();
    let outside = through(&host, &packet(CLIENT, FRONTEND, TCP_SYN), Origin::Outside).unwrap();
    assert_eq!(destination(own), (outside.destination, outside.destination_port));
    assert_eq!(outside.source, NODE);
    assert_ne!(outside.source_port, own.source_port);
    host.assert_whole();
}

#[test]
fn the_nodes_own_flow_keeps_its_port_where_there_is_no_other() {
    let host = Host { ports: 0..0, ..Host::new() };
    assert_eq!(host.sent(&syn()).unwrap().source_port, CLIENT.1);
}

/// The client port of a flow also dials the flow's backend itself: each answer goes to who asked.
#[test]
fn a_direct_connection_beside_a_flow_has_answers_of_its_own() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    let endpoint = (flow.backend, PORT);

    let sent = host.arriving(&packet(CLIENT, endpoint, TCP_SYN), Origin::Workload).unwrap();
    assert_eq!(destination(sent), endpoint);
    let alias = sent.source_port;
    assert_ne!(alias, CLIENT.1);
    host.assert_whole();
    assert_eq!((flow.service, sent.service), (1, NO_SERVICE));
    assert_eq!(host.connections.borrow().get(&1), Some(&1), "the direct one is no connection of the service");
    let again = host.arriving(&packet(CLIENT, endpoint, TCP_ACK), Origin::Workload).unwrap();
    assert_eq!(again.source_port, alias);

    let direct = host.leaving(&answer(endpoint, (CLIENT.0, alias), TCP_SYN | TCP_ACK)).unwrap();
    assert_eq!((source(direct), destination(direct)), (endpoint, CLIENT));
    let of_flow = host.leaving(&answer(endpoint, CLIENT, TCP_ACK)).unwrap();
    assert_eq!((source(of_flow), destination(of_flow)), (FRONTEND, CLIENT));
}

/// As above, where the endpoint is a frontend too.
#[test]
fn a_connection_to_a_frontend_that_is_the_backend_of_another_flow() {
    let mut host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    let endpoint = (flow.backend, PORT);
    let set = EndpointSet::new(1, 1);
    host.tables
        .services
        .insert(2, Service { cluster: set, internal: set, external: set, flags: 1, ..Service::default() });
    let key = FrontendKey::of_address(endpoint.0, endpoint.1, PROTOCOL_TCP);
    host.tables.frontends.insert(key, Frontend { service: 2, flags: 0 });
    let sent = host.arriving(&packet(CLIENT, endpoint, TCP_SYN), Origin::Workload).unwrap();
    assert_eq!((sent.destination, sent.service), (BACKENDS[1], 2));
    let back = host.leaving(&answer((BACKENDS[1], PORT), CLIENT, TCP_SYN | TCP_ACK)).unwrap();
    assert_eq!((source(back), destination(back)), (endpoint, CLIENT));
    assert_eq!(host.arriving(&packet(CLIENT, endpoint, TCP_ACK), Origin::Workload), Ok(sent));
    assert_eq!(
        host.arriving(&packet(CLIENT, FRONTEND, TCP_ACK), Origin::Workload).map(|r| r.destination),
        Ok(endpoint.0)
    );
    host.assert_whole();
}

/// Removes all entries of a flow, as when its lifetime is over.
fn forget(host: &Host, flow: &Flow<A>) {
    for key in [flow.client_key(), flow.backend_key()] {
        for stage in [Stage::Opening, Stage::Established] {
            host.remove(stage, &key);
        }
    }
}

#[rstest]
fn a_direct_connection_goes_on_when_the_flow_beside_it_is_gone(
    #[values(Origin::Workload, Origin::Outside)] origin: Origin,
) {
    let mut host = Host::new();
    host.tables.slots.values_mut().for_each(|slot| slot.flags = BACKEND_LOCAL);
    let flow = establish_one(&host, origin);
    let endpoint = (flow.backend, PORT);
    let sent = host.arriving(&packet(CLIENT, endpoint, TCP_SYN), origin).unwrap();
    forget(&host, &flow);
    let next = packet(CLIENT, endpoint, TCP_ACK);
    assert_eq!(host.arriving(&next, origin), Ok(sent));
    // A new flow from the same port to the same endpoint changes nothing.
    host.arriving(&syn(), origin).unwrap();
    assert_eq!(host.arriving(&next, origin), Ok(sent));
    host.assert_whole();
}

/// A client elsewhere has forged the ends of the direct connection before it began.
#[test]
fn a_direct_connection_apart_goes_on_when_the_flow_beside_it_is_gone() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    let endpoint = (flow.backend, PORT);
    let first = packet(CLIENT, endpoint, TCP_SYN);
    let forged = host.arriving(&first, Origin::Outside).unwrap();
    let sent = host.arriving(&first, Origin::Workload).unwrap();
    assert_ne!(source(sent), source(forged));
    forget(&host, &flow);
    let next = packet(CLIENT, endpoint, TCP_ACK);
    assert_eq!(host.arriving(&next, Origin::Workload), Ok(sent));
    assert_eq!(host.arriving(&next, Origin::Outside), Ok(forged));
    host.assert_whole();
}

/// Whoever dials an endpoint after both connections have ended reaches it as it is.
#[test]
fn a_direct_connection_is_not_translated_once_both_are_over() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    let endpoint = (flow.backend, PORT);
    let first = packet(CLIENT, endpoint, TCP_SYN);
    let alias = host.arriving(&first, Origin::Workload).unwrap().source_port;
    forget(&host, &flow);
    let refusal = answer(endpoint, (CLIENT.0, alias), TCP_RST | TCP_ACK);
    assert_eq!(host.leaving(&refusal).map(destination), Ok(CLIENT));
    assert_eq!(host.arriving(&first, Origin::Workload), Err(Reason::NotAService));
    assert_eq!((host.entries(Stage::Opening), host.entries(Stage::Established)), (0, 0));
}

#[test]
fn a_direct_connection_after_a_flow_that_ended_is_no_flow() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    for (speaker, segment) in close() {
        says(speaker, &host, &flow, segment).unwrap();
    }
    let endpoint = (flow.backend, PORT);
    let direct = packet(CLIENT, endpoint, TCP_SYN);
    assert_eq!(host.arriving(&direct, Origin::Workload), Err(Reason::NotAService));
    assert_eq!(host.leaving(&answer(endpoint, CLIENT, TCP_SYN | TCP_ACK)), Err(Reason::NotAService));
}

#[rstest]
#[case::another_client_port((CLIENT.0, Port::new(40_001)), TCP_SYN)]
#[case::in_the_middle_of_a_connection(CLIENT, TCP_ACK)]
fn a_direct_packet_without_a_rival_passes(#[case] client: (A, Port), #[case] flags: u8) {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    let direct = packet(client, (flow.backend, PORT), flags);
    assert_eq!(host.arriving(&direct, Origin::Workload), Err(Reason::NotAService));
}

#[rstest]
#[case::segment(PROTOCOL_TCP, TCP_SYN, Err(Reason::UnknownPort))]
#[case::datagram(PROTOCOL_UDP, 0, Err(Reason::UnknownPort))]
#[case::of_a_connection_that_netfilter_translates(PROTOCOL_TCP, TCP_ACK, Err(Reason::NotAService))]
#[case::answer(PROTOCOL_TCP, TCP_SYN | TCP_ACK, Err(Reason::NotAService))]
fn what_opens_something_at_another_port_of_a_cluster_ip_is_refused(
    #[case] protocol: u8,
    #[case] flags: u8,
    #[case] expected: Result<(), Reason>,
) {
    let mut host = Host::new();
    host.tables.frontends.insert(FrontendKey::of_cluster_ip(FRONTEND.0), Frontend::NONE);
    let other = Packet { protocol, ..packet(CLIENT, (FRONTEND.0, Port::new(81)), flags) };
    for origin in [Origin::Workload, Origin::Outside] {
        assert_eq!(host.arriving(&other, origin).map(drop), expected);
    }
    assert_eq!(host.sent(&other).map(drop), expected);
    assert_eq!(host.leaving(&other), Err(Reason::NotAService), "the node only forwards it");
    let mut scratch = Scratch { packet: other, is_made_here: true, ..Scratch::default() };
    let is_datagram = protocol == PROTOCOL_UDP;
    let of_a_socket_that_a_hook_has_seen = if is_datagram { expected } else { Err(Reason::NotAService) };
    assert_eq!(leaving(&host, &mut scratch, false), of_a_socket_that_a_hook_has_seen);
    assert!(host.arriving(&syn(), Origin::Workload).is_ok());
}

#[test]
fn datagrams_of_a_flow_whose_port_is_gone_are_refused() {
    let mut host = Host::new();
    let datagram = datagram(CLIENT, FRONTEND);
    assert!(host.arriving(&datagram, Origin::Workload).is_ok());
    host.tables.frontends.remove(&FrontendKey::of_address(FRONTEND.0, FRONTEND.1, PROTOCOL_UDP));
    host.tables.frontends.insert(FrontendKey::of_cluster_ip(FRONTEND.0), Frontend::NONE);
    host.epoch.set(1);
    assert_eq!(host.arriving(&datagram, Origin::Workload), Err(Reason::UnknownPort));
}

/// Many client ports have dialled a service, and now dial its backend itself: no alias is left for the last one.
#[test]
fn a_connection_to_a_backend_itself_takes_over_from_no_other() {
    let host = Host { ports: 0..0, ..Host::new() };
    let flow = establish_one(&host, Origin::Workload);
    let direct = packet(CLIENT, (flow.backend, PORT), TCP_SYN);
    assert_eq!(host.arriving(&direct, Origin::Workload), Err(Reason::AliasPortsExhausted));
    let of_flow = host.leaving(&answer((flow.backend, PORT), CLIENT, TCP_ACK)).unwrap();
    assert_eq!(source(of_flow), FRONTEND);
}

/// Two peers of UDP that send from the port at which they are dialled: an answer of one's flow is not an opening of the other's.
#[test]
fn symmetric_peers_keep_their_flows_apart() {
    let mut host = Host::new();
    let peers = [(CLIENT.0, PORT), (BACKENDS[0], PORT)];
    host.tables.slots.insert(2, Slot4::new(peers[0].0, PORT, 3, 0));
    host.tables.backends.insert(3, Backend::default());
    let set = EndpointSet::new(2, 1);
    host.tables
        .services
        .insert(2, Service { cluster: set, internal: set, external: set, flags: 1, ..Service::default() });
    let frontends = [FRONTEND, ([10, 96, 0, 9], PORT)];
    let key = FrontendKey::of_address(frontends[1].0, frontends[1].1, PROTOCOL_UDP);
    host.tables.frontends.insert(key, Frontend { service: 2, flags: 0 });

    let there = host.arriving(&datagram(peers[0], frontends[0]), Origin::Workload).unwrap();
    assert_eq!((source(there), destination(there)), (peers[0], peers[1]));
    let back = host.arriving(&datagram(peers[1], frontends[1]), Origin::Workload).unwrap();
    assert_eq!(destination(back), peers[0]);
    assert_ne!(source(back), peers[1], "these would be the ends of the first flow");
    // Answers to both, as the node sees them on both hooks.
    let first = datagram(peers[1], peers[0]);
    assert_eq!(host.arriving(&first, Origin::Workload), Err(Reason::NotAService));
    assert_eq!(host.leaving(&first).map(source), Ok(frontends[0]));
    let second = datagram(peers[0], source(back));
    assert_eq!(host.arriving(&second, Origin::Workload), Err(Reason::NotAService));
    let second = host.leaving(&second).unwrap();
    assert_eq!((source(second), destination(second)), (frontends[1], peers[1]));
    host.assert_whole();
    assert_eq!(host.entries(Stage::Opening), 4);
}

/// The table of opening flows evicts one entry of a flow, and another flow takes the key.
#[rstest]
#[case::connection(PROTOCOL_TCP)]
#[case::datagrams(PROTOCOL_UDP)]
fn a_flow_whose_answers_are_anothers_by_now_enters_no_connection(#[case] protocol: u8) {
    let host = Host::new();
    let of = |packet: Packet<A>| Packet { protocol, ..packet };
    let open = |client| {
        host.arriving(&of(packet(client, FRONTEND, TCP_SYN)), Origin::Workload).unwrap();
        // Its port is taken at this backend, so it gets an alias; the dice give both flows the same.
        let alias = host
            .arriving(&of(packet(client, OTHER_FRONTEND, TCP_SYN)), Origin::Workload)
            .unwrap()
            .source_port;
        let answer = of(answer((BACKENDS[0], PORT), (CLIENT.0, alias), TCP_SYN | TCP_ACK));
        assert_eq!(host.leaving(&answer).map(destination), Ok(client));
        answer
    };
    let answer = open(CLIENT);
    host.remove(Stage::Opening, &answer.key());
    let other = (CLIENT.0, Port::new(40_001));
    assert_eq!(open(other), answer);
    if protocol == PROTOCOL_TCP {
        host.arriving(&packet(other, OTHER_FRONTEND, TCP_ACK), Origin::Workload).unwrap();
    }
    host.wait(SUSTAINED_AFTER);
    if protocol == PROTOCOL_UDP {
        host.flow(Stage::Opening, &of(packet(CLIENT, OTHER_FRONTEND, 0)).key())
            .unwrap()
            .write(Change::Progress(PROGRESS_SUSTAINED));
    }
    let late = host.arriving(&of(packet(CLIENT, OTHER_FRONTEND, TCP_ACK)), Origin::Workload);
    assert_eq!(late, Err(Reason::FlowReplaced));
    assert_eq!(host.leaving(&answer).map(destination), Ok(other));
    host.assert_whole();
}

/// Whose answers must come back through this node, and whose port must be another one.
#[rstest]
#[case::from_outside_to_another_node(CLIENT, Origin::Outside, 0, true, false)]
#[case::from_outside_to_this_node(CLIENT, Origin::Outside, BACKEND_LOCAL, false, false)]
#[case::from_a_pod(CLIENT, Origin::Workload, 0, false, false)]
#[case::from_the_backends_own_port_elsewhere((CLIENT.0, PORT), Origin::Workload, 0, false, false)]
#[case::from_the_backend_itself((BACKENDS[0], CLIENT.1), Origin::Workload, BACKEND_LOCAL, true, false)]
#[case::from_the_backends_own_port((BACKENDS[0], PORT), Origin::Workload, BACKEND_LOCAL, true, true)]
fn clients_and_how_their_flows_are_told_apart(
    #[case] client: (A, Port),
    #[case] origin: Origin,
    #[case] slot_flags: u32,
    #[case] masqueraded: bool,
    #[case] alias: bool,
    #[values(0, FRONTEND_EXTERNAL)] frontend_flags: u32,
) {
    let mut host = Host::new();
    host.tables.slots.insert(0, Slot4::new(BACKENDS[0], PORT, 1, slot_flags));
    let key = FrontendKey::of_address(FRONTEND.0, FRONTEND.1, PROTOCOL_TCP);
    host.tables.frontends.insert(key, Frontend { service: 1, flags: frontend_flags });
    let first = packet(client, FRONTEND, TCP_SYN);
    let sent = through(&host, &first, origin).unwrap();
    assert_eq!(sent.destination, BACKENDS[0]);
    let flow = host.flow_of(Stage::Opening, &first);
    assert_eq!((flow.is_masqueraded(), flow.alias_port() != client.1), (masqueraded, alias));
    assert_eq!(sent.source, if masqueraded { NODE } else { client.0 });
    assert_eq!(host.entries(Stage::Opening), if masqueraded { 3 } else { 2 });
    host.assert_whole();
}

#[test]
fn a_backend_in_the_nodes_namespace_that_dials_itself_gets_an_alias() {
    let host = Host::new();
    let client = (BACKENDS[0], CLIENT.1);
    assert_ne!(host.sent(&packet(client, FRONTEND, TCP_SYN)).map(source), Ok(client));
    assert_eq!(host.entries(Stage::Opening), 2);
}

/// An external IP that is an endpoint's own address.
#[test]
fn a_frontend_that_is_its_own_backend() {
    let mut host = Host::new();
    let endpoint = (BACKENDS[0], PORT);
    let key = FrontendKey::of_address(endpoint.0, endpoint.1, PROTOCOL_TCP);
    host.tables
        .frontends
        .insert(key, Frontend { service: 1, flags: FRONTEND_EXTERNAL | FRONTEND_LEAST_CONNECTION });
    let sent = host.arriving(&packet(CLIENT, endpoint, TCP_SYN), Origin::Workload).unwrap();
    assert_eq!(destination(sent), endpoint);
    let back = host.leaving(&answer(endpoint, source(sent), TCP_SYN | TCP_ACK)).unwrap();
    assert_eq!((source(back), destination(back)), (endpoint, CLIENT));
    host.assert_whole();
}

fn says(speaker: Speaker, host: &Host, flow: &Flow<A>, segment: Segment) -> Result<Rewrite<A>, Reason> {
    match speaker {
        Speaker::Client => host.arriving(&numbered(CLIENT, FRONTEND, segment), Origin::Workload),
        Speaker::Backend => host.leaving(&numbered((flow.backend, PORT), CLIENT, segment)),
    }
}

/// What the next segment of either has as its number.
const CLIENTS: u32 = CLIENT_ISN + 1;
const BACKENDS_NEXT: u32 = BACKEND_ISN.wrapping_add(1);

fn of_client(flags: u8, sequence: u32, acknowledgement: u32) -> (Speaker, Segment) {
    (Speaker::Client, Segment::new(flags, sequence, acknowledgement, 0))
}

fn of_backend(flags: u8, sequence: u32, acknowledgement: u32) -> (Speaker, Segment) {
    (Speaker::Backend, Segment::new(flags, sequence, acknowledgement, 0))
}

/// Both sides close.
fn close() -> Vec<(Speaker, Segment)> {
    vec![
        of_client(TCP_FIN | TCP_ACK, CLIENTS, BACKENDS_NEXT),
        of_backend(TCP_FIN | TCP_ACK, BACKENDS_NEXT, CLIENTS + 1),
        of_client(TCP_ACK, CLIENTS + 1, BACKENDS_NEXT + 1),
    ]
}

const FORGED: u32 = 0x7000_0000;

#[rstest]
#[case::nobody_ended_it(vec![of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT)], false)]
#[case::backend_goes_on(vec![of_backend(TCP_ACK, BACKENDS_NEXT, CLIENTS)], false)]
#[case::both_closed(close(), true)]
#[case::backend_closed_first(vec![
    of_backend(TCP_FIN | TCP_ACK, BACKENDS_NEXT, CLIENTS),
    of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT + 1),
    of_client(TCP_FIN | TCP_ACK, CLIENTS, BACKENDS_NEXT + 1),
    of_backend(TCP_ACK, BACKENDS_NEXT + 1, CLIENTS + 1),
], true)]
#[case::only_the_client_closed(close()[..2].to_vec(), false)]
#[case::client_reset(vec![of_client(TCP_RST, CLIENTS, 0)], true)]
#[case::backend_reset(vec![of_backend(TCP_RST, BACKENDS_NEXT, 0)], true)]
#[case::client_reset_while_data_is_on_its_way(vec![of_client(TCP_RST, CLIENTS + 1_000, 0)], false)]
#[case::forged_reset(vec![of_client(TCP_RST, FORGED, 0)], false)]
#[case::forged_reset_of_the_backend(vec![of_backend(TCP_RST, FORGED, 0)], false)]
#[case::forged_fin(vec![of_client(TCP_FIN | TCP_ACK, FORGED, FORGED)], false)]
#[case::forged_fins_of_both(vec![
    of_client(TCP_FIN | TCP_ACK, FORGED, FORGED),
    of_backend(TCP_FIN | TCP_ACK, FORGED, FORGED),
], false)]
#[case::data_then_a_reset_that_follows_it(vec![
    of_client(TCP_ACK, FORGED, FORGED),
    of_client(TCP_RST, FORGED, 0),
], false)]
#[case::a_reset_of_what_a_forged_client_acknowledged(vec![
    of_client(TCP_ACK, FORGED, FORGED),
    of_backend(TCP_RST, FORGED, 0),
], false)]
#[case::the_same_of_a_client_who_guesses_one_number(vec![
    of_client(TCP_ACK, CLIENTS, FORGED),
    of_backend(TCP_RST, FORGED, 0),
], false)]
fn a_syn_goes_to_another_backend_only_after_a_connection_that_ended(
    #[case] said: Vec<(Speaker, Segment)>,
    #[case] ended: bool,
    #[values(false, true)] backend_is_gone: bool,
) {
    let mut host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    for (speaker, segment) in said {
        says(speaker, &host, &flow, segment).unwrap();
    }
    let stage = if ended { Stage::Opening } else { Stage::Established };
    assert_eq!(host.entries(Stage::Established), if ended { 0 } else { 2 }, "what has ended leaves at once");
    assert_eq!(host.flow_of(stage, &syn()).state.has_ended(), ended);
    if backend_is_gone {
        host.tables.backends.remove(&flow.backend_id);
    }
    host.dice.borrow_mut().push_back(LAST);
    let backend = host.arriving(&syn(), Origin::Workload).unwrap().destination;
    assert_eq!(backend, if ended { BACKENDS[1] } else { BACKENDS[0] }, "a connection that is up stays");
    assert_eq!(host.counted(Reason::FlowReplaced), u32::from(ended));
}

/// The last segments may be lost and sent again.
#[test]
fn copies_of_the_last_segments_are_translated() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    for (speaker, segment) in close() {
        says(speaker, &host, &flow, segment).unwrap();
    }
    host.wait(2 * REFRESH_AFTER);
    for (speaker, segment) in close() {
        assert!(says(speaker, &host, &flow, segment).is_ok());
    }
    assert_eq!((host.entries(Stage::Opening), host.entries(Stage::Established)), (2, 0));
}

/// Else what its lifetime is counted from would be the last packet before the silence.
#[test]
fn what_ends_after_a_silence_is_kept_from_its_end_on() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    host.wait(60 * REFRESH_AFTER);
    let (speaker, reset) = of_client(TCP_RST, CLIENTS, 0);
    let ended = host.clock.get();
    says(speaker, &host, &flow, reset).unwrap();
    assert!(host.flow_of(Stage::Opening, &syn()).last_seen >= ended);
}

/// Which comes to a masquerade, whose entry learns nothing of what goes on.
#[test]
fn a_connection_that_goes_on_after_a_reset_is_not_ended_by_its_next_answer() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Outside);
    let (speaker, reset) = of_client(TCP_RST, CLIENTS, 0);
    says(speaker, &host, &flow, reset).unwrap();
    assert_eq!(host.entries(Stage::Established), 0);
    host.wait(2 * REFRESH_AFTER);
    host.arriving(&packet(CLIENT, FRONTEND, TCP_ACK), Origin::Outside).unwrap();
    assert_eq!(host.entries(Stage::Established), 0, "the client may be one that keeps rows for nothing");
    let endpoint = (flow.backend, PORT);
    for _ in 0..2 {
        host.arriving(&answer(endpoint, (NODE, flow.masquerade_port()), TCP_ACK), Origin::Outside).unwrap();
        host.leaving(&answer(endpoint, CLIENT, TCP_ACK)).unwrap();
        assert_eq!(host.entries(Stage::Established), 3);
    }
}

/// Two CPUs of the client send an acknowledgement and its RST, which comes first. The backend answers the other with nothing, or with a
/// RST that counts no more.
#[rstest]
#[case::of_the_answer(BACKENDS_NEXT + 100, None)]
#[case::of_the_handshake(BACKENDS_NEXT, Some(of_backend(TCP_RST, BACKENDS_NEXT, 0)))]
fn an_acknowledgement_that_a_reset_has_overtaken_opens_nothing_again(
    #[case] acknowledgement: u32,
    #[case] answer: Option<(Speaker, Segment)>,
) {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    says(Speaker::Backend, &host, &flow, Segment::new(TCP_ACK, BACKENDS_NEXT, CLIENTS, 100)).unwrap();
    let last = [
        of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT + 100),
        of_client(TCP_RST | TCP_ACK, CLIENTS, BACKENDS_NEXT + 100),
        of_client(TCP_ACK, CLIENTS, acknowledgement),
    ];
    for (speaker, segment) in last.into_iter().chain(answer) {
        says(speaker, &host, &flow, segment).unwrap();
    }
    assert_eq!(host.entries(Stage::Established), 0);
    assert!(host.flow_of(Stage::Opening, &syn()).state.has_ended());
}

#[rstest]
#[case::before_the_answer(0)]
#[case::after_it(1)]
fn a_forged_refusal_keeps_no_connection_from_being_established(#[case] answers_before: usize) {
    let host = Host::new();
    host.arriving(&syn(), Origin::Workload).unwrap();
    let flow = host.flow_of(Stage::Opening, &syn());
    let answer = of_backend(TCP_SYN | TCP_ACK, BACKEND_ISN, CLIENTS);
    let mut said = vec![answer, of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT)];
    said.insert(answers_before, of_backend(TCP_RST | TCP_ACK, 0, CLIENTS));
    for (speaker, segment) in said {
        says(speaker, &host, &flow, segment).unwrap();
    }
    assert!(!host.flow_of(Stage::Established, &syn()).state.has_ended());
}

#[rstest]
#[case::far_off(FORGED, 86_400)]
#[case::near(CLIENTS + 1_000, 10_800)]
fn a_forged_reset_cuts_no_silent_connection_short(#[case] sequence: u32, #[case] seconds: u64) {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    let (speaker, reset) = of_client(TCP_RST, sequence, 0);
    says(speaker, &host, &flow, reset).unwrap();
    let lifetime = |host: &Host| {
        FlowLifetimes::default().of(PROTOCOL_TCP, host.flow_of(Stage::Established, &syn()).state).as_secs()
    };
    assert_eq!(lifetime(&host), seconds);
    // Its next segment shows that it lives.
    says(Speaker::Backend, &host, &flow, Segment::new(TCP_ACK, BACKENDS_NEXT, CLIENTS, 0)).unwrap();
    assert_eq!(lifetime(&host), 86_400);
}

#[rstest]
#[case::connection(PROTOCOL_TCP, TCP_SYN)]
#[case::datagrams(PROTOCOL_UDP, 0)]
fn what_was_never_answered_chooses_anew_when_its_backend_is_gone(
    #[case] protocol: u8,
    #[case] flags: u8,
    #[values(false, true)] gone: bool,
) {
    let mut host = Host::new();
    let first = Packet { protocol, ..packet(CLIENT, FRONTEND, flags) };
    assert_eq!(host.arriving(&first, Origin::Workload).map(|r| r.destination), Ok(BACKENDS[0]));
    if gone {
        host.tables.backends.remove(&1);
    }
    host.epoch.set(1);
    host.dice.borrow_mut().push_back(LAST);
    let again = host.arriving(&first, Origin::Workload).unwrap().destination;
    assert_eq!(again, if gone { BACKENDS[1] } else { BACKENDS[0] });
}

#[rstest]
#[case::data(Segment::new(TCP_ACK, CLIENTS, BACKENDS_NEXT, 10), true)]
#[case::end(Segment::new(TCP_FIN | TCP_ACK, CLIENTS, BACKENDS_NEXT, 0), true)]
#[case::reset(Segment::new(TCP_RST, CLIENTS, 0, 0), false)]
#[case::opening(Segment::new(TCP_SYN, CLIENT_ISN, 0, 0), false)]
#[case::acknowledges_nothing(Segment::new(0, CLIENTS, 0, 10), false)]
fn connections_to_a_gone_backend_are_reset_where_that_is_wanted(
    #[case] segment: Segment,
    #[case] is_answered: bool,
    #[values(false, true)] wanted: bool,
    #[values(false, true)] gone: bool,
) {
    let mut host = Host { resets_gone: wanted, ..Host::new() };
    let flow = establish_one(&host, Origin::Workload);
    if gone {
        host.tables.backends.remove(&flow.backend_id);
    }
    host.epoch.set(1);
    let is_reset = is_answered && wanted && gone;
    for _ in 0..2 {
        let outcome = says(Speaker::Client, &host, &flow, segment);
        assert_eq!(outcome.err(), is_reset.then_some(Reason::BackendGone));
    }
    if is_reset {
        assert_eq!((host.entries(Stage::Opening), host.entries(Stage::Established)), (2, 0));
    }
}

#[test]
fn packets_that_are_held_open_nothing_and_go_on_with_their_flow() {
    let mut host = Host::new();
    let (known, new) = (datagram(CLIENT, FRONTEND), datagram((CLIENT.0, Port::new(41_000)), FRONTEND));
    let expected = host.arriving(&known, Origin::Workload).map(|rewrite| rewrite.destination);
    host.holds_packets = true;
    assert_eq!(host.arriving(&known, Origin::Workload).map(|rewrite| rewrite.destination), expected);
    assert_eq!(host.arriving(&new, Origin::Workload).err(), Some(Reason::NotAService));
    host.holds_packets = false;
    assert!(host.arriving(&new, Origin::Workload).is_ok());
}

/// While flows are copied, a connection that goes on is translated, and what dials no frontend is
/// none of ours.
#[test]
fn no_tcp_flow_opens_while_openings_are_held() {
    let mut host = Host::new();
    let (known, new) = (syn(), packet((CLIENT.0, Port::new(41_000)), FRONTEND, TCP_SYN));
    let expected = host.arriving(&known, Origin::Workload).map(|rewrite| rewrite.destination);
    host.holds_openings = true;
    assert_eq!(host.arriving(&known, Origin::Workload).map(|rewrite| rewrite.destination), expected);
    assert_eq!(host.arriving(&new, Origin::Workload).err(), Some(Reason::OpeningsHeld));
    assert!(host.arriving(&datagram(CLIENT, FRONTEND), Origin::Workload).is_ok());
    let dialled = host.arriving(&packet(CLIENT, ([192, 0, 2, 200], PORT), TCP_SYN), Origin::Workload);
    assert_eq!(dialled.err(), Some(Reason::NotAService));
    host.holds_openings = false;
    assert!(host.arriving(&new, Origin::Workload).is_ok());
}

/// The port of a frontend has passed to another Service while the old backend lives.
#[rstest]
#[case::before_the_controller_is_done(0, 0)]
#[case::after(1, 1)]
fn datagrams_follow_their_frontend_to_another_service(#[case] epoch: u32, #[case] backend: usize) {
    let mut host = Host::new();
    let first = datagram(CLIENT, FRONTEND);
    host.arriving(&first, Origin::Workload).unwrap();
    let set = EndpointSet::new(1, 1);
    host.tables
        .services
        .insert(2, Service { cluster: set, internal: set, external: set, flags: 1, ..Service::default() });
    let key = FrontendKey::of_address(FRONTEND.0, FRONTEND.1, PROTOCOL_UDP);
    host.tables.frontends.insert(key, Frontend { service: 2, flags: 0 });
    host.epoch.set(epoch);
    assert_eq!(host.arriving(&first, Origin::Workload).map(|r| r.destination), Ok(BACKENDS[backend]));
}

/// A client with a forged address can send all of these.
#[rstest]
#[case::acknowledges_what_was_not_answered(None, vec![Segment::new(TCP_ACK, CLIENTS, BACKENDS_NEXT, 0)])]
#[case::was_refused(Some(Segment::new(TCP_RST | TCP_ACK, 0, CLIENTS, 0)), vec![
    Segment::new(TCP_ACK, CLIENTS, 1, 0),
])]
#[case::guesses(Some(Segment::new(TCP_SYN | TCP_ACK, BACKEND_ISN, CLIENTS, 0)), vec![
    Segment::new(TCP_ACK, CLIENTS, FORGED, 0),
    Segment::new(TCP_ACK, CLIENTS, BACKEND_ISN, 0),
])]
#[case::sends_data_without_acknowledging(Some(Segment::new(TCP_SYN | TCP_ACK, BACKEND_ISN, CLIENTS, 0)), vec![
    Segment::new(0, CLIENTS, BACKENDS_NEXT, 100),
])]
#[case::resets(Some(Segment::new(TCP_SYN | TCP_ACK, BACKEND_ISN, CLIENTS, 0)), vec![
    Segment::new(TCP_RST, CLIENTS, 0, 0),
    Segment::new(TCP_RST | TCP_ACK, CLIENTS, BACKENDS_NEXT, 0),
])]
#[case::ends(Some(Segment::new(TCP_SYN | TCP_ACK, BACKEND_ISN, CLIENTS, 0)), vec![
    Segment::new(TCP_FIN | TCP_ACK, CLIENTS, FORGED, 0),
])]
fn a_forged_client_establishes_no_connection(#[case] answered: Option<Segment>, #[case] said: Vec<Segment>) {
    let host = Host::new();
    host.arriving(&syn(), Origin::Workload).unwrap();
    if let Some(segment) = answered {
        host.leaving(&numbered((BACKENDS[0], PORT), CLIENT, segment)).unwrap();
    }
    for segment in said {
        let _verdict = host.arriving(&numbered(CLIENT, FRONTEND, segment), Origin::Workload);
        host.wait(2 * REFRESH_AFTER);
    }
    assert_eq!((host.entries(Stage::Opening), host.entries(Stage::Established)), (2, 0));
}

/// The table of opening flows evicts the client's entry after the answer, and it is restored by one or the other side.
#[rstest]
fn a_restored_client_is_confirmed_as_any(#[values(false, true)] by_backend: bool) {
    let host = Host::new();
    let answered = answer((BACKENDS[0], PORT), CLIENT, TCP_SYN | TCP_ACK);
    host.arriving(&syn(), Origin::Workload).unwrap();
    let key = host.flow_of(Stage::Opening, &syn()).client_key();
    host.leaving(&answered).unwrap();
    host.remove(Stage::Opening, &key);
    host.wait(REFRESH_AFTER);
    if by_backend {
        host.leaving(&answered).unwrap();
    } else {
        host.arriving(&syn(), Origin::Workload).unwrap();
    }
    for (acknowledgement, entries) in [(1, 0), (BACKENDS_NEXT, 2)] {
        let segment = Segment::new(TCP_ACK, CLIENTS, acknowledgement, 0);
        host.arriving(&numbered(CLIENT, FRONTEND, segment), Origin::Workload).unwrap();
        assert_eq!(host.entries(Stage::Established), entries);
    }
    host.assert_whole();
}

/// Numbers that are believed, as they are near the true ones.
const GUESSED: u32 = BACKENDS_NEXT + 0x1000;

/// All segments that seemed to end it were forged. It goes on, as the backend answers its client.
#[rstest]
#[case::resets_of_both(vec![
    of_client(TCP_ACK, CLIENTS, GUESSED),
    of_backend(TCP_RST, GUESSED, 0),
])]
#[case::fins_of_both(vec![
    of_client(TCP_FIN | TCP_ACK, CLIENTS + 10, GUESSED),
    of_backend(TCP_ACK, GUESSED, CLIENTS + 11),
    of_backend(TCP_FIN | TCP_ACK, GUESSED + 10, CLIENTS + 11),
    of_client(TCP_ACK, CLIENTS + 11, GUESSED + 11),
])]
fn a_connection_that_only_seemed_to_end_goes_on(#[case] said: Vec<(Speaker, Segment)>) {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    for (speaker, segment) in said {
        says(speaker, &host, &flow, segment).unwrap();
    }
    assert_eq!(host.entries(Stage::Established), 0);
    for _ in 0..2 {
        says(Speaker::Client, &host, &flow, Segment::new(TCP_ACK, CLIENTS, BACKENDS_NEXT, 100)).unwrap();
        says(Speaker::Backend, &host, &flow, Segment::new(TCP_ACK, BACKENDS_NEXT, CLIENTS + 100, 0)).unwrap();
        host.wait(2 * REFRESH_AFTER);
    }
    assert_eq!(host.entries(Stage::Established), 2);
    let state = host.flow_of(Stage::Established, &syn()).state;
    assert_eq!(FlowLifetimes::default().of(PROTOCOL_TCP, state).as_secs(), 86_400);
}

/// Who forges the client can forge a backend on another node too, but not the way that its answers take.
#[test]
fn an_answer_that_has_not_come_to_the_masquerade_is_forged() {
    let host = Host::new();
    through(&host, &syn(), Origin::Outside).unwrap();
    let forged = answer((BACKENDS[0], PORT), CLIENT, TCP_SYN | TCP_ACK);
    assert_eq!(host.arriving(&forged, Origin::Outside), Err(Reason::ForgedAnswer));
}

#[rstest]
#[case::refuses(CLIENTS, true)]
#[case::forged(FORGED, false)]
fn a_refusal_counts_if_it_acknowledges_the_syn(#[case] acknowledgement: u32, #[case] ended: bool) {
    let host = Host::new();
    host.arriving(&syn(), Origin::Workload).unwrap();
    let refusal = Segment::new(TCP_RST | TCP_ACK, 0, acknowledgement, 0);
    host.leaving(&numbered((BACKENDS[0], PORT), CLIENT, refusal)).unwrap();
    assert_eq!(host.flow_of(Stage::Opening, &syn()).state.has_ended(), ended);
}

/// The backend has died, and the client opens a new connection from the same port.
#[rstest]
#[case::soon(30, 0)]
#[case::after_a_minute(61, 1)]
fn a_silent_connection_to_a_backend_that_is_gone_is_given_up(#[case] seconds: u64, #[case] backend: usize) {
    let mut host = Host::new();
    establish_one(&host, Origin::Workload);
    host.tables.backends.remove(&1);
    host.dice.borrow_mut().push_back(LAST);
    // A SYN keeps nothing alive.
    for _ in 0..2 {
        host.wait(seconds * SECOND / 2);
        host.arriving(&syn(), Origin::Workload).unwrap();
    }
    assert_eq!(host.arriving(&syn(), Origin::Workload).map(|r| r.destination), Ok(BACKENDS[backend]));
}

/// The real FIN is followed by a forged one.
#[test]
fn a_forged_fin_does_not_hide_the_real_one() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    let mut said = close();
    said.insert(1, of_client(TCP_FIN | TCP_ACK, FORGED, BACKENDS_NEXT));
    for (speaker, segment) in said {
        says(speaker, &host, &flow, segment).unwrap();
    }
    assert_eq!(host.entries(Stage::Established), 0);
}

/// Seconds at which client (true) and backend send.
#[rstest]
#[case::one_question(&[(0, true), (0, false)], 0)]
#[case::two_questions_at_once(&[(0, true), (0, false), (0, true), (0, false), (0, true)], 0)]
#[case::never_answered(&[(0, true), (1, true), (5, true)], 0)]
#[case::answered_for_seconds(&[(0, true), (0, false), (3, false), (4, false)], 0)]
#[case::both_for_seconds(&[(0, true), (0, false), (3, false), (3, true)], 2)]
fn datagrams_are_established_by_traffic_of_both_for_seconds(
    #[case] sent: &[(u64, bool)],
    #[case] entries: usize,
) {
    let host = Host::new();
    let start = host.clock.get();
    for (second, by_client) in sent {
        host.clock.set(start + second * SECOND);
        if *by_client {
            host.arriving(&datagram(CLIENT, FRONTEND), Origin::Workload).unwrap();
        } else {
            host.leaving(&datagram((BACKENDS[0], PORT), CLIENT)).unwrap();
        }
    }
    assert_eq!(host.entries(Stage::Established), entries);
    host.assert_whole();
}
