//! Cases that a test cannot cause in the kernel: races, tables that are full at one certain write, lost entries.
//! Round trips of real packets are in `tests/packets`.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, VecDeque},
    rc::Rc,
};

use rstest::rstest;

use super::{entries::REFRESH_AFTER, *};
use crate::{
    family::{Slot as _, V4},
    packet::{TCP_ACK, TCP_SYN},
    port::Port,
    tables::host::HostTables,
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

/// As the map element that the kernel hands out, it is shared and stays when it is removed.
#[derive(Clone, Copy)]
struct EntryRef(&'static Cell<Flow<A>>);

impl EntryRef {
    fn change(&self, change: impl FnOnce(&mut Flow<A>)) {
        let mut flow = self.0.get();
        change(&mut flow);
        self.0.set(flow);
    }
}

impl FlowEntry<A> for EntryRef {
    fn read(&self) -> Flow<A> {
        self.0.get()
    }

    fn flags(&self) -> u32 {
        self.0.get().flags
    }

    fn last_seen(&self) -> u64 {
        self.0.get().last_seen
    }

    fn set_last_seen(&self, now: u64) {
        self.change(|flow| flow.last_seen = now);
    }

    fn add_flags(&self, flags: u32) {
        self.change(|flow| flow.flags |= flags);
    }
}

type Flows = HashMap<(Stage, FlowKey<A>), &'static Cell<Flow<A>>>;
type Interruption = Box<dyn FnOnce(&Host)>;

/// Both tables of flows, a clock, dice, and what happens before a certain insertion.
struct Host {
    tables: HostTables<V4>,
    flows: RefCell<Flows>,
    clock: Cell<u64>,
    dice: RefCell<VecDeque<u32>>,
    counted: RefCell<HashMap<Reason, u32>>,
    connections: RefCell<HashMap<u32, u32>>,
    masquerade: Cell<A>,
    /// For aliases and masqueraded sources.
    ports: PortRanges,
    /// Counts down; at 0 the insertion fails as in a full table.
    until_full: Cell<Option<u32>>,
    /// Counts down; at 0 another CPU does this first.
    interruption: RefCell<Option<(u32, Interruption)>>,
    /// Another CPU does this before the next lookup in the table of opening flows.
    before_lookup: RefCell<Option<Interruption>>,
}

impl Host {
    /// Two backends elsewhere, behind two frontends that can be dialled from outside.
    fn new() -> Self {
        let mut tables = HostTables::<V4>::default();
        for (index, address) in (0u32..).zip(BACKENDS) {
            tables.slots.insert(index, Slot4::new(address, PORT, index + 1, 0));
            tables.backends.insert(index + 1, Backend::default());
        }
        let set = EndpointSet { first: 0, count: 2 };
        let flags = SERVICE_HAS_ENDPOINTS;
        tables
            .services
            .insert(1, Service { cluster: set, internal: set, external: set, flags, affinity_seconds: 0 });
        for (address, port) in [FRONTEND, OTHER_FRONTEND] {
            for protocol in [PROTOCOL_TCP, PROTOCOL_UDP] {
                let key = FrontendKey::of_address(address, port, protocol);
                tables.frontends.insert(key, Frontend { service: 1, flags: FRONTEND_EXTERNAL });
            }
        }
        Self {
            tables,
            flows: RefCell::default(),
            clock: Cell::new(100 * SECOND),
            dice: RefCell::default(),
            counted: RefCell::default(),
            connections: RefCell::default(),
            masquerade: Cell::new(NODE),
            ports: PortRanges([[20_000, 20_099], [1, 0]]),
            until_full: Cell::new(None),
            interruption: RefCell::default(),
            before_lookup: RefCell::default(),
        }
    }

    fn arriving(&self, packet: &Packet<A>, origin: Origin) -> Result<Rewrite<A>, Reason> {
        arriving(self, &mut Scratch::default(), packet, origin)
    }

    fn leaving(&self, packet: &Packet<A>) -> Result<Rewrite<A>, Reason> {
        leaving(self, &mut Scratch::default(), packet)
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

    /// Each flow has all of its entries, and each entry is of one flow.
    fn assert_whole(&self) {
        let flows = self.flows.borrow();
        for ((stage, _), flow) in flows.iter() {
            let flow = flow.get();
            let mut keys = vec![flow.forward_key(), flow.reply_key()];
            if flow.is_masqueraded() {
                keys.push(flow.masqueraded_reply_key());
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

impl FlowTables<V4> for Host {
    type Entry = EntryRef;

    fn flow(&self, stage: Stage, key: &FlowKey<A>) -> Option<EntryRef> {
        if stage == Stage::Opening
            && let Some(other) = self.before_lookup.take()
        {
            other(self);
        }
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

    fn replace(&self, stage: Stage, key: &FlowKey<A>, flow: &Flow<A>) {
        self.flows.borrow_mut().insert((stage, *key), Box::leak(Box::new(Cell::new(*flow))));
    }

    fn remove(&self, stage: Stage, key: &FlowKey<A>) {
        self.flows.borrow_mut().remove(&(stage, *key));
    }

    fn masquerade(&self) -> Masquerade<A> {
        Masquerade { address: self.masquerade.get(), ports: self.ports }
    }

    fn now(&self) -> u64 {
        self.clock.get()
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
}

fn packet(source: (A, Port), destination: (A, Port), tcp_flags: u8) -> Packet<A> {
    Packet {
        source: source.0,
        destination: destination.0,
        source_port: source.1,
        destination_port: destination.1,
        protocol: PROTOCOL_TCP,
        tcp_flags,
    }
}

fn syn() -> Packet<A> {
    packet(CLIENT, FRONTEND, TCP_SYN)
}

/// An established flow, and its state.
fn establish_one(host: &Host, origin: Origin) -> Flow<A> {
    host.arriving(&syn(), origin).unwrap();
    let flow = host.flow(Stage::Opening, &syn().key(TUPLE_FORWARD)).unwrap().read();
    let answer = packet((flow.backend, PORT), CLIENT, TCP_SYN | TCP_ACK);
    host.leaving(&answer).unwrap();
    host.arriving(&packet(CLIENT, FRONTEND, TCP_ACK), origin).unwrap();
    host.assert_whole();
    flow
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
    let tuples = if origin == Origin::Outside { 3 } else { 2 };
    assert_eq!(host.entries(Stage::Opening), tuples);
}

#[rstest]
fn a_flow_is_created_whole_or_not_at_all(#[values(0, 1, 2)] room: u32) {
    let host = Host::new();
    host.until_full.set(Some(room));
    let refused = host.arriving(&syn(), Origin::Outside);
    assert!(refused.is_err_and(|reason| reason.verdict() == crate::reason::Verdict::Drop));
    assert_eq!(host.entries(Stage::Opening), 0);
}

#[rstest]
fn a_flow_is_established_whole_or_not_at_all(#[values(0, 1, 2)] room: u32) {
    let host = Host::new();
    host.arriving(&syn(), Origin::Outside).unwrap();
    host.leaving(&packet((BACKENDS[0], PORT), CLIENT, TCP_SYN | TCP_ACK)).unwrap();
    host.until_full.set(Some(room));
    let ack = packet(CLIENT, FRONTEND, TCP_ACK);
    assert_eq!(host.arriving(&ack, Origin::Outside).map(|r| r.address), Ok(BACKENDS[0]));
    assert_eq!((host.entries(Stage::Opening), host.entries(Stage::Established)), (3, 0));
    assert_eq!(host.counted(Reason::FlowsFull), 1);
    // There is room again.
    host.until_full.set(None);
    assert!(host.arriving(&ack, Origin::Outside).is_ok());
    assert_eq!(host.entries(Stage::Established), 3);
}

#[rstest]
#[case::client(TUPLE_FORWARD)]
#[case::answer(TUPLE_REPLY)]
#[case::masqueraded_answer(TUPLE_MASQUERADED_REPLY)]
fn every_entry_restores_the_others(#[case] left: u8) {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Outside);
    let keys = [flow.forward_key(), flow.reply_key(), flow.masqueraded_reply_key()];
    for key in keys.iter().filter(|key| key.tuple != left) {
        host.remove(Stage::Established, key);
        host.remove(Stage::Opening, key);
    }
    host.clock.set(host.clock.get() + REFRESH_AFTER + 1);
    let translated = match left {
        TUPLE_FORWARD => host.arriving(&packet(CLIENT, FRONTEND, TCP_ACK), Origin::Outside),
        TUPLE_REPLY => host.leaving(&packet((flow.backend, PORT), CLIENT, TCP_ACK)),
        _ => host.arriving(
            &packet((flow.backend, PORT), (NODE, flow.masquerade_port()), TCP_ACK),
            Origin::Outside,
        ),
    };
    assert!(translated.is_ok());
    for key in keys {
        let entry = host.flow(Stage::Established, &key).unwrap().read();
        assert_eq!((entry.last_seen, entry.backend), (host.clock.get(), flow.backend));
    }
    assert_eq!(host.counted(Reason::FlowRestored), 2);
}

#[test]
fn flows_keep_the_address_that_they_were_opened_with() {
    const NEW: A = [192, 0, 2, 2];
    let mut host = Host::new();
    let flow = establish_one(&host, Origin::Outside);
    host.masquerade.set(NEW);
    let answer = packet((flow.backend, PORT), (NODE, flow.masquerade_port()), TCP_ACK);
    assert_eq!(host.arriving(&answer, Origin::Outside), Err(Reason::NotAService), "not the node's any more");
    for own in [NODE, NEW] {
        host.tables.node_addresses.insert(own, NodeAddress::default());
    }
    assert_eq!(host.arriving(&answer, Origin::Outside).map(|rewrite| rewrite.address), Ok(CLIENT.0));
}

#[test]
fn netfilter_keeps_the_ports_of_its_connections() {
    let host = Host::new();
    let (backend, first) = ((BACKENDS[0], PORT), Port::new(20_000));
    let of_netfilter = |answers_to, is_masqueraded| {
        Flow::of_netfilter(backend, answers_to, is_masqueraded, host.clock.get())
    };
    for (key, flow) in [of_netfilter((NODE, first), true), of_netfilter(CLIENT, false)] {
        host.insert(Stage::Established, &key, &flow).unwrap();
    }
    host.dice.borrow_mut().extend([FIRST, FIRST]);
    host.arriving(&syn(), Origin::Outside).unwrap();
    let flow = host.flow(Stage::Opening, &syn().key(TUPLE_FORWARD)).unwrap().read();
    assert_eq!((flow.backend, flow.masquerade_port()), (BACKENDS[0], Port::new(20_001)));
    assert_ne!(flow.alias_port(), CLIENT.1);
    // Answers to them are netfilter's, and they live on.
    host.clock.set(host.clock.get() + REFRESH_AFTER + 1);
    let answer = packet(backend, (NODE, first), TCP_ACK);
    assert_eq!(host.arriving(&answer, Origin::Outside), Err(Reason::NotAService));
    assert_eq!(host.leaving(&packet(backend, CLIENT, TCP_ACK)), Err(Reason::NotAService));
    for (key, flow) in [of_netfilter((NODE, first), true), of_netfilter(CLIENT, false)] {
        assert_eq!(host.flow(Stage::Established, &key).unwrap().read(), flow);
    }
}

#[test]
fn entries_are_left_alone_within_a_second() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    host.clock.set(host.clock.get() + REFRESH_AFTER);
    host.remove(Stage::Established, &flow.reply_key());
    host.arriving(&packet(CLIENT, FRONTEND, TCP_ACK), Origin::Workload).unwrap();
    assert_eq!(host.entries(Stage::Established), 1);
    assert_eq!(host.counted(Reason::FlowRestored), 0);
}

#[test]
fn established_between_the_two_lookups_is_found() {
    let host = Host::new();
    let opened = host.arriving(&syn(), Origin::Workload).unwrap();
    host.leaving(&packet((opened.address, PORT), CLIENT, TCP_SYN | TCP_ACK)).unwrap();
    let ack = packet(CLIENT, FRONTEND, TCP_ACK);
    *host.before_lookup.borrow_mut() = Some(Box::new(move |host| {
        host.arriving(&ack, Origin::Workload).unwrap();
        let flow = host.flow(Stage::Established, &ack.key(TUPLE_FORWARD)).unwrap().read();
        // The table of opening flows evicts the copies.
        for key in [flow.forward_key(), flow.reply_key()] {
            host.remove(Stage::Opening, &key);
        }
    }));
    assert_eq!(host.arriving(&ack, Origin::Workload), Ok(opened));
    assert_eq!((host.entries(Stage::Opening), host.entries(Stage::Established)), (0, 2));
}

#[test]
fn a_client_port_at_one_backend_through_many_frontends_runs_out_of_aliases() {
    let mut host = Host::new();
    let set = EndpointSet { first: 0, count: 1 };
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
    // Its own port and the aliases that were tried.
    let good = opened.iter().filter(|result| result.is_ok()).count();
    assert_eq!(good, 8);
    assert_eq!(opened.last(), Some(&Err(Reason::AliasPortsExhausted)));
    let mut ports: Vec<Port> = opened.iter().flatten().map(|rewrite| rewrite.other_port).collect();
    ports.dedup();
    assert_eq!(ports.len(), good);
    host.assert_whole();
}

#[test]
fn the_nodes_own_flows_are_told_apart() {
    let host = Host::new();
    let sent = host.arriving(&syn(), Origin::Host).unwrap();
    let answered = |host: &Host, port: Port| {
        let packet = packet((BACKENDS[0], PORT), (CLIENT.0, port), TCP_SYN | TCP_ACK);
        let found = answer::<V4, _>(host, &mut Scratch::default(), &packet, FLOW_FROM_HOST);
        found.map(|rewrite| (rewrite.address, rewrite.port, rewrite.other_port))
    };
    assert_eq!(answered(&host, sent.other_port), Some((FRONTEND.0, FRONTEND.1, CLIENT.1)));
    host.assert_whole();
    // What the node sends to a backend itself is not seen: its answers look like this.
    assert_eq!(answered(&host, CLIENT.1), None);
    // A pod's flow is none of them.
    let host = Host::new();
    let sent = host.arriving(&syn(), Origin::Workload).unwrap();
    assert_eq!(answered(&host, sent.other_port), None);
}

#[test]
fn the_nodes_own_flows_and_masqueraded_ones_share_one_pool_of_ports() {
    let host = Host::new();
    let client = (NODE, CLIENT.1);
    host.dice.borrow_mut().extend([FIRST, FIRST, FIRST]);
    let own = host.arriving(&packet(client, FRONTEND, TCP_SYN), Origin::Host).unwrap();
    host.dice.borrow_mut().extend([FIRST, FIRST, FIRST]);
    let outside = host.arriving(&packet(CLIENT, FRONTEND, TCP_SYN), Origin::Outside).unwrap();
    assert_eq!((own.address, own.port), (outside.address, outside.port));
    let masquerade = host.leaving(&packet(CLIENT, (outside.address, outside.port), TCP_SYN)).unwrap();
    assert_eq!(masquerade.address, NODE);
    assert_ne!(masquerade.port, own.other_port);
    host.assert_whole();
}

#[test]
fn the_nodes_own_flow_keeps_its_port_where_there_is_no_other() {
    let host = Host { ports: PortRanges::EMPTY, ..Host::new() };
    assert_eq!(host.arriving(&syn(), Origin::Host).unwrap().other_port, CLIENT.1);
}

#[rstest]
#[case::opening(PROTOCOL_TCP, 0, 60)]
#[case::open(PROTOCOL_TCP, FLOW_ANSWERED, 86_400)]
#[case::half_closed(PROTOCOL_TCP, FLOW_ANSWERED | FLOW_CLIENT_CLOSED, 3600)]
#[case::closed(PROTOCOL_TCP, FLOW_ANSWERED | FLOW_CLIENT_CLOSED | FLOW_BACKEND_CLOSED, 60)]
#[case::reset(PROTOCOL_TCP, FLOW_ANSWERED | FLOW_RESET, 10)]
#[case::datagrams_unanswered(PROTOCOL_UDP, 0, 30)]
#[case::datagrams(PROTOCOL_UDP, FLOW_ANSWERED, 120)]
fn lifetimes(#[case] protocol: u8, #[case] flags: u32, #[case] seconds: u64) {
    assert_eq!(lifetime_seconds(protocol, flags), seconds);
}

/// The client port of a flow also dials the flow's backend itself: each answer goes to who asked.
#[test]
fn a_direct_connection_beside_a_flow_has_answers_of_its_own() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    let endpoint = (flow.backend, PORT);

    let sent = host.arriving(&packet(CLIENT, endpoint, TCP_SYN), Origin::Workload).unwrap();
    assert_eq!((sent.address, sent.port), endpoint);
    let alias = sent.other_port;
    assert_ne!(alias, CLIENT.1);
    host.assert_whole();
    assert_eq!((flow.service, sent.service), (1, NO_SERVICE));
    assert_eq!(host.connections.borrow().get(&1), Some(&1), "the direct one is no connection of the service");
    let again = host.arriving(&packet(CLIENT, endpoint, TCP_ACK), Origin::Workload).unwrap();
    assert_eq!(again.other_port, alias);

    let direct = host.leaving(&packet(endpoint, (CLIENT.0, alias), TCP_ACK)).unwrap();
    assert_eq!((direct.address, direct.port, direct.other_port), (endpoint.0, PORT, CLIENT.1));
    let of_flow = host.leaving(&packet(endpoint, CLIENT, TCP_ACK)).unwrap();
    assert_eq!((of_flow.address, of_flow.port, of_flow.other_port), (FRONTEND.0, FRONTEND.1, CLIENT.1));
}

#[rstest]
#[case::client_closed(Speaker::Client, TCP_FIN | TCP_ACK)]
#[case::client_reset(Speaker::Client, TCP_RST)]
#[case::backend_closed(Speaker::Backend, TCP_FIN | TCP_ACK)]
fn a_direct_connection_after_a_flow_that_ended_is_no_flow(#[case] speaker: Speaker, #[case] said: u8) {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    speaker.says(&host, &flow, said);
    let direct = packet(CLIENT, (flow.backend, PORT), TCP_SYN);
    assert_eq!(host.arriving(&direct, Origin::Workload), Err(Reason::NotAService));
    let answer = packet((flow.backend, PORT), CLIENT, TCP_SYN | TCP_ACK);
    assert_eq!(host.leaving(&answer), Err(Reason::NotAService));
}

#[rstest]
#[case::another_client_port((CLIENT.0, Port::new(40_001)), TCP_SYN)]
#[case::in_the_middle_of_a_connection(CLIENT, TCP_ACK)]
fn a_direct_packet_without_a_rival_passes(#[case] client: (A, Port), #[case] tcp_flags: u8) {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    let direct = packet(client, (flow.backend, PORT), tcp_flags);
    assert_eq!(host.arriving(&direct, Origin::Workload), Err(Reason::NotAService));
}

#[test]
fn what_comes_from_outside_to_a_cluster_ip_keeps_its_source() {
    let mut host = Host::new();
    let key = FrontendKey::of_address(FRONTEND.0, FRONTEND.1, PROTOCOL_TCP);
    host.tables.frontends.insert(key, Frontend { service: 1, flags: 0 });
    host.arriving(&syn(), Origin::Outside).unwrap();
    assert_eq!(host.entries(Stage::Opening), 2);
}

/// Many client ports have dialled a service, and now dial its backend itself: no alias is left for the last one.
#[test]
fn a_connection_to_a_backend_itself_takes_over_from_no_other() {
    let host = Host { ports: PortRanges::EMPTY, ..Host::new() };
    let flow = establish_one(&host, Origin::Workload);
    let direct = packet(CLIENT, (flow.backend, PORT), TCP_SYN);
    assert_eq!(host.arriving(&direct, Origin::Workload), Err(Reason::AliasPortsExhausted));
    let of_flow = host.leaving(&packet((flow.backend, PORT), CLIENT, TCP_ACK)).unwrap();
    assert_eq!((of_flow.address, of_flow.port), FRONTEND);
}

/// As above.
#[test]
fn datagrams_to_a_backend_itself_take_over_where_no_alias_is_left() {
    let host = Host { ports: PortRanges::EMPTY, ..Host::new() };
    let datagram = |from, to| Packet { protocol: PROTOCOL_UDP, ..packet(from, to, 0) };
    let opened = host.arriving(&datagram(CLIENT, FRONTEND), Origin::Workload).unwrap();
    let endpoint = (opened.address, opened.port);
    let direct = datagram(CLIENT, endpoint);
    assert_eq!(host.arriving(&direct, Origin::Workload), Err(Reason::NotAService));
    assert_eq!(host.leaving(&datagram(endpoint, CLIENT)), Err(Reason::NotAService));
    assert_eq!(host.counted(Reason::FlowReplaced), 1);
    assert_eq!(host.entries(Stage::Opening), 0);
}

/// The table of opening flows evicts one entry of a flow, and another flow takes the key.
#[test]
fn a_flow_whose_answers_are_anothers_by_now_is_opened_again() {
    let host = Host::new();
    let datagram = |from, to| Packet { protocol: PROTOCOL_UDP, ..packet(from, to, 0) };
    let clients = [CLIENT, (CLIENT.0, Port::new(40_001))];
    let open = |client| {
        host.arriving(&datagram(client, FRONTEND), Origin::Workload).unwrap();
        // Its port is taken, so it gets an alias; the dice give both flows the same.
        host.arriving(&datagram(client, (BACKENDS[0], PORT)), Origin::Workload).unwrap().other_port
    };
    let evicted = open(clients[0]);
    let answer = datagram((BACKENDS[0], PORT), (CLIENT.0, evicted));
    assert_eq!(host.leaving(&answer).unwrap().other_port, clients[0].1);
    host.remove(Stage::Opening, &answer.key(TUPLE_REPLY));
    assert_eq!(open(clients[1]), evicted);

    let again = host.arriving(&datagram(clients[0], (BACKENDS[0], PORT)), Origin::Workload).unwrap();
    assert_ne!(again.other_port, evicted);
    assert_eq!(host.leaving(&answer).unwrap().other_port, clients[1].1);
    host.assert_whole();
}

/// As above: the other flow is established by then, and no packet of the first may enter its connection.
#[test]
fn a_connection_whose_answers_are_anothers_by_now_has_no_flow() {
    let host = Host::new();
    let open = |client| {
        host.arriving(&packet(client, FRONTEND, TCP_SYN), Origin::Workload).unwrap();
        // Its port is taken at this backend, so it gets an alias; the dice give both flows the same.
        let alias =
            host.arriving(&packet(client, OTHER_FRONTEND, TCP_SYN), Origin::Workload).unwrap().other_port;
        let answer = packet((BACKENDS[0], PORT), (CLIENT.0, alias), TCP_SYN | TCP_ACK);
        assert_eq!(host.leaving(&answer).unwrap().other_port, client.1);
        answer
    };
    let answer = open(CLIENT);
    host.remove(Stage::Opening, &answer.key(TUPLE_REPLY));
    let other = (CLIENT.0, Port::new(40_001));
    assert_eq!(open(other), answer);
    host.arriving(&packet(other, OTHER_FRONTEND, TCP_ACK), Origin::Workload).unwrap();

    let late = host.arriving(&packet(CLIENT, OTHER_FRONTEND, TCP_ACK), Origin::Workload);
    assert_eq!(late, Err(Reason::TcpWithoutFlow));
    host.assert_whole();
}

#[derive(Clone, Copy, Debug)]
enum Speaker {
    Client,
    Backend,
}

impl Speaker {
    fn says(self, host: &Host, flow: &Flow<A>, tcp_flags: u8) {
        match self {
            Self::Client => host.arriving(&packet(CLIENT, FRONTEND, tcp_flags), Origin::Workload).unwrap(),
            Self::Backend => host.leaving(&packet((flow.backend, PORT), CLIENT, tcp_flags)).unwrap(),
        };
    }
}

/// Whose answers must come back through this node, and whose port must be another one.
#[rstest]
#[case::from_outside_to_another_node(CLIENT, Origin::Outside, 0, true, false)]
#[case::from_outside_to_this_node(CLIENT, Origin::Outside, BACKEND_LOCAL, false, false)]
#[case::from_a_pod(CLIENT, Origin::Workload, 0, false, false)]
#[case::from_the_backends_own_port_elsewhere((CLIENT.0, PORT), Origin::Workload, 0, false, false)]
#[case::from_the_backend_itself((BACKENDS[0], CLIENT.1), Origin::Workload, BACKEND_LOCAL, true, false)]
#[case::from_the_backends_own_port((BACKENDS[0], PORT), Origin::Workload, BACKEND_LOCAL, true, true)]
#[case::from_a_backend_in_the_nodes_namespace((BACKENDS[0], CLIENT.1), Origin::Host, BACKEND_LOCAL, false, true)]
fn clients_and_how_their_flows_are_told_apart(
    #[case] client: (A, Port),
    #[case] origin: Origin,
    #[case] slot_flags: u32,
    #[case] masqueraded: bool,
    #[case] alias: bool,
) {
    let mut host = Host::new();
    host.tables.slots.insert(0, Slot4::new(BACKENDS[0], PORT, 1, slot_flags));
    let first = packet(client, FRONTEND, TCP_SYN);
    assert_eq!(host.arriving(&first, origin).unwrap().address, BACKENDS[0]);
    let flow = host.flow(Stage::Opening, &first.key(TUPLE_FORWARD)).unwrap().read();
    assert_eq!((flow.is_masqueraded(), flow.alias_port() != client.1), (masqueraded, alias));
    assert_eq!(host.entries(Stage::Opening), if masqueraded { 3 } else { 2 });
    host.assert_whole();
}

#[rstest]
#[case::nobody_ended_it(Speaker::Client, TCP_ACK, false)]
#[case::backend_goes_on(Speaker::Backend, TCP_ACK, false)]
#[case::client_closed(Speaker::Client, TCP_FIN | TCP_ACK, true)]
#[case::client_reset(Speaker::Client, TCP_RST, true)]
#[case::backend_closed(Speaker::Backend, TCP_FIN | TCP_ACK, true)]
#[case::backend_reset(Speaker::Backend, TCP_RST, true)]
fn a_syn_on_a_connection_that_ended_chooses_anew(
    #[case] speaker: Speaker,
    #[case] said: u8,
    #[case] ended: bool,
    #[values(false, true)] backend_is_gone: bool,
) {
    let mut host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    speaker.says(&host, &flow, said);
    if backend_is_gone {
        host.tables.backends.remove(&flow.backend_id);
    }
    host.dice.borrow_mut().push_back(LAST);
    let backend = host.arriving(&syn(), Origin::Workload).unwrap().address;
    assert_eq!(backend, if ended { BACKENDS[1] } else { BACKENDS[0] }, "a connection that is up stays");
    assert_eq!(host.counted(Reason::FlowReplaced), u32::from(ended));
}

#[rstest]
#[case::connection(PROTOCOL_TCP, TCP_SYN)]
#[case::datagrams(PROTOCOL_UDP, 0)]
fn what_was_never_answered_chooses_anew_when_its_backend_is_gone(
    #[case] protocol: u8,
    #[case] tcp_flags: u8,
    #[values(false, true)] gone: bool,
) {
    let mut host = Host::new();
    let first = Packet { protocol, ..packet(CLIENT, FRONTEND, tcp_flags) };
    assert_eq!(host.arriving(&first, Origin::Workload).unwrap().address, BACKENDS[0]);
    if gone {
        host.tables.backends.remove(&1);
    }
    host.dice.borrow_mut().push_back(LAST);
    let again = host.arriving(&first, Origin::Workload).unwrap().address;
    assert_eq!(again, if gone { BACKENDS[1] } else { BACKENDS[0] });
}

#[rstest]
#[case::nobody_answered(None)]
#[case::the_backend_refused(Some(TCP_RST))]
fn a_client_that_was_never_answered_establishes_nothing(#[case] answer: Option<u8>) {
    let host = Host::new();
    host.arriving(&syn(), Origin::Workload).unwrap();
    if let Some(tcp_flags) = answer {
        host.leaving(&packet((BACKENDS[0], PORT), CLIENT, tcp_flags)).unwrap();
    }
    host.arriving(&packet(CLIENT, FRONTEND, TCP_ACK), Origin::Workload).unwrap();
    assert_eq!((host.entries(Stage::Opening), host.entries(Stage::Established)), (2, 0));
}
