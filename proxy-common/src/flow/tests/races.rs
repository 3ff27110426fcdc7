//! Packets that two CPUs work on at the same time: whatever the order, no flow stays half, no key has two owners, and none that lives
//! is lost.

use std::collections::BTreeSet;

use rstest::rstest;

use super::{
    interleavings::{End, Work, in_every_order},
    *,
};

/// What a client of affinity is remembered by.
const CLIENT_KEY: AffinityKey<A> =
    AffinityKey { service: 1, client: Client { address: CLIENT.0, origin: CLIENT_OUTSIDE } };
const BACKEND: (A, Port) = (BACKENDS[0], PORT);
const OTHER_CLIENT: (A, Port) = ([203, 0, 113, 2], Port::new(40_000));
/// Another port of the first client.
const OTHER_PORT: (A, Port) = (CLIENT.0, Port::new(40_001));
/// The first that masqueraded flows get.
const NODE_END: (A, Port) = (NODE, Port::new(20_000));

fn of(protocol: u8, packet: Packet<A>) -> Packet<A> {
    Packet { protocol, ..packet }
}

fn from(packet: &Packet<A>) -> (A, Port) {
    (packet.source, packet.source_port)
}

fn to(packet: &Packet<A>) -> (A, Port) {
    (packet.destination, packet.destination_port)
}

/// From where and to whom the backend's answer to a packet that has left the node comes.
fn answered(host: &Host, sent: &Packet<A>) -> Option<((A, Port), (A, Port))> {
    let mut answer = of(sent.protocol, answer(to(sent), from(sent), TCP_ACK));
    if sent.source == NODE {
        answer = rewritten(&answer, host.arriving(&answer, Origin::Outside).ok()?);
        if answer.destination == NODE {
            return Some((from(&answer), to(&answer)));
        }
    }
    let answered = host.leaving(&answer).ok()?;
    Some((source(answered), destination(answered)))
}

/// Entries of a flow that do not lead to its others. What is left of one that has ended, or that the same client has replaced, ages.
fn halves(host: &Host) -> Vec<String> {
    let found_at = |key: &FlowKey<A>| {
        let found = host.flow(Stage::Established, key).or_else(|| host.flow(Stage::Opening, key));
        found.map(|entry| entry.read())
    };
    let mut halves = Vec::new();
    for ((stage, key), flow) in host.flows.borrow().iter() {
        let flow = flow.get();
        for partner in [flow.client_key(), flow.backend_key()] {
            let found = found_at(&partner);
            let is_whole =
                found.is_some_and(|found| found.is_same(&flow) && found.backend_key() == flow.backend_key());
            let is_replaced =
                *key != flow.client_key() && found.is_some_and(|found| found.opened != flow.opened);
            if !is_whole && !is_replaced && !flow.state.has_ended() {
                halves.push(format!("{stage:?} {key:?} of {flow:?}: {found:?}"));
            }
        }
    }
    halves
}

/// As the client sends on.
fn later(work: &Work) -> Work {
    let next = |packet: &Packet<A>| of(packet.protocol, super::packet(from(packet), to(packet), TCP_ACK));
    match work {
        Work::Arrives(packet, origin) => Work::Arrives(next(packet), *origin),
        Work::Passes(packet, origin) => Work::Passes(next(packet), *origin),
        Work::Leaves(packet) => Work::Leaves(next(packet)),
        Work::Collects(flow) => Work::Collects(*flow),
    }
}

/// Each packet of a client is let through and answered, at once and later. Answers how many backends they have gone to.
fn assert_served(End { host, works, order }: &End) -> usize {
    let mut backends = BTreeSet::new();
    let assert_answered = |work: &Work, outcome| {
        let (Work::Arrives(packet, _) | Work::Passes(packet, _) | Work::Leaves(packet)) = work else {
            return None;
        };
        let sent: Packet<A> = match outcome {
            Some(Ok(sent)) => sent,
            refused => panic!("{order}: {work:?}: {refused:?}"),
        };
        assert_eq!(answered(host, &sent), Some((to(packet), from(packet))), "{order}: answer to {sent:?}");
        Some(sent.destination)
    };
    for (work, outcome) in works {
        backends.extend(assert_answered(work, *outcome));
    }
    for _ in 0..2 {
        for (work, _) in works {
            let next = later(work);
            backends.extend(assert_answered(&next, next.on(host)));
        }
        host.wait(2 * REFRESH_AFTER);
    }
    let halves = halves(host);
    assert!(halves.is_empty(), "{order}: {halves:#?}");
    backends.len()
}

fn opened(protocol: u8) -> Host {
    let host = Host::new();
    through(&host, &of(protocol, syn()), Origin::Workload).unwrap();
    host
}

fn opened_from_two_ports() -> Host {
    let host = opened(PROTOCOL_TCP);
    host.arriving(&packet(OTHER_PORT, FRONTEND, TCP_SYN), Origin::Workload).unwrap();
    host
}

/// Two clients' flows, or two of one client, each with a first packet.
#[rstest]
#[case::one_client_and_two_backends([(CLIENT, FRONTEND), (CLIENT, FRONTEND)], [FIRST, LAST])]
#[case::one_client_and_one_backend([(CLIENT, FRONTEND), (CLIENT, FRONTEND)], [FIRST, FIRST])]
#[case::two_clients([(CLIENT, FRONTEND), (OTHER_CLIENT, FRONTEND)], [FIRST, FIRST])]
#[case::one_client_at_two_frontends([(CLIENT, FRONTEND), (CLIENT, OTHER_FRONTEND)], [FIRST, FIRST])]
fn first_packets(
    #[case] ends: [((A, Port), (A, Port)); 2],
    #[case] dice: [u32; 2],
    #[values(PROTOCOL_TCP, PROTOCOL_UDP)] protocol: u8,
    #[values(Origin::Workload, Origin::Outside)] origin: Origin,
) {
    let [one, other] =
        ends.map(|(client, frontend)| Work::Passes(of(protocol, packet(client, frontend, TCP_SYN)), origin));
    let backends = if ends[0] == ends[1] || dice[0] == dice[1] { 1 } else { 2 };
    in_every_order(Host::new, &[(one, &[dice[0]]), (other, &[dice[1]])], |end| {
        assert_eq!(assert_served(end), backends, "{}", end.order);
    });
}

/// Their own ports are taken at the backend, and they want the same alias, or the same other port where they leave the node.
#[rstest]
#[case::aliases(
    opened_from_two_ports,
    [CLIENT, OTHER_PORT].map(|client| Work::Arrives(packet(client, OTHER_FRONTEND, TCP_SYN), Origin::Workload))
)]
#[case::direct_connections(
    opened_from_two_ports,
    [CLIENT, OTHER_PORT].map(|client| Work::Arrives(packet(client, BACKEND, TCP_SYN), Origin::Workload))
)]
#[case::copies_of_a_direct_connection(
    || opened(PROTOCOL_TCP),
    [Work::Arrives(packet(CLIENT, BACKEND, TCP_SYN), Origin::Workload); 2]
)]
#[case::connections_of_others(
    || {
        let host = Host::new();
        through(&host, &syn(), Origin::Outside).unwrap();
        host
    },
    [Work::Leaves(packet(NODE_END, BACKEND, TCP_SYN)); 2]
)]
fn first_packets_that_want_one_port(#[case] before: fn() -> Host, #[case] works: [Work; 2]) {
    in_every_order(before, &works.map(|work| (work, &[FIRST; 4][..])), |end| {
        assert_eq!(assert_served(end), 1, "{}", end.order);
    });
}

/// A connection of which both FINs are acknowledged.
fn closed() -> Host {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    for (sender, segment) in close() {
        says(sender, &host, &flow, segment).unwrap();
    }
    host
}

/// Its backend is gone.
fn abandoned(protocol: u8) -> Host {
    let mut host = opened(protocol);
    host.maps.backends.remove(&1);
    host.epoch.set(1);
    host
}

/// The map of opening flows has evicted this entry.
fn without(protocol: u8, key: fn(&Flow<A>) -> FlowKey<A>) -> Host {
    let host = opened(protocol);
    host.remove(Stage::Opening, &key(&host.flow_of(Stage::Opening, &of(protocol, syn()))));
    host
}

/// Two first packets of one client that has dialled the same before. After what has ended, each of the two may count the other's new flow
/// to the old one: then they go to two backends, and later ones to one of these.
#[rstest]
#[case::after_a_closed_connection(PROTOCOL_TCP, closed, [FIRST, LAST], 2)]
#[case::connection_whose_backend_is_gone(PROTOCOL_TCP, || abandoned(PROTOCOL_TCP), [LAST, LAST], 1)]
#[case::datagrams_whose_backend_is_gone(PROTOCOL_UDP, || abandoned(PROTOCOL_UDP), [LAST, LAST], 1)]
#[case::connection_without_its_clients_entry(
    PROTOCOL_TCP, || without(PROTOCOL_TCP, Flow::client_key), [FIRST, LAST], 1)]
#[case::datagrams_without_their_clients_entry(
    PROTOCOL_UDP, || without(PROTOCOL_UDP, Flow::client_key), [FIRST, LAST], 1)]
fn first_packets_anew(
    #[case] protocol: u8,
    #[case] before: fn() -> Host,
    #[case] dice: [u32; 2],
    #[case] most_backends: usize,
) {
    let work = Work::Arrives(of(protocol, syn()), Origin::Workload);
    in_every_order(before, &[(work, &[dice[0]]), (work, &[dice[1]])], |end| {
        let backends = assert_served(end);
        assert!(backends <= most_backends, "{}", end.order);
    });
}

fn answered_once() -> Host {
    let host = opened(PROTOCOL_TCP);
    host.leaving(&answer(BACKEND, CLIENT, TCP_SYN | TCP_ACK)).unwrap();
    host
}

fn established(said: &[(Side, Segment)]) -> Host {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    for (sender, segment) in said {
        says(*sender, &host, &flow, *segment).unwrap();
    }
    host
}

/// So that its next segment stamps all entries.
fn silent(said: &[(Side, Segment)]) -> Host {
    let host = established(said);
    host.wait(2 * REFRESH_AFTER);
    host
}

fn work((sender, segment): (Side, Segment)) -> Work {
    match sender {
        Side::Client => Work::Arrives(numbered(CLIENT, FRONTEND, segment), Origin::Workload),
        Side::Backend => Work::Leaves(numbered(BACKEND, CLIENT, segment)),
    }
}

fn fins() -> [(Side, Segment); 2] {
    [
        of_client(TCP_FIN | TCP_ACK, CLIENTS, BACKENDS_NEXT),
        of_backend(TCP_FIN | TCP_ACK, BACKENDS_NEXT, CLIENTS),
    ]
}

fn acknowledgements_of_fins() -> [(Side, Segment); 2] {
    [of_client(TCP_ACK, CLIENTS + 1, BACKENDS_NEXT + 1), of_backend(TCP_ACK, BACKENDS_NEXT + 1, CLIENTS + 1)]
}

/// The connection goes on, whole, among these.
#[rstest]
#[case::acknowledgement_and_data(
    answered_once,
    of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT),
    of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT),
    Stage::Established
)]
#[case::acknowledgement_and_another_answer(answered_once, of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT),
    of_backend(TCP_SYN | TCP_ACK, BACKEND_ISN, CLIENTS), Stage::Established)]
#[case::acknowledgement_and_data_of_the_backend(
    answered_once,
    of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT),
    of_backend(TCP_ACK, BACKENDS_NEXT, CLIENTS),
    Stage::Established
)]
#[case::data_of_both(|| silent(&[]), of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT),
    of_backend(TCP_ACK, BACKENDS_NEXT, CLIENTS), Stage::Established)]
#[case::data_and_a_forged_reset(|| silent(&[]), of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT),
    of_backend(TCP_RST, FORGED, 0), Stage::Established)]
#[case::fins_of_both(|| established(&[]), fins()[0], fins()[1], Stage::Established)]
#[case::fins_of_both_after_silence(|| silent(&[]), fins()[0], fins()[1], Stage::Established)]
#[case::answer_and_another_syn(|| opened(PROTOCOL_TCP), of_backend(TCP_SYN | TCP_ACK, BACKEND_ISN, CLIENTS),
    (Side::Client, syn().segment), Stage::Opening)]
#[case::answer_and_a_forged_reset(|| opened(PROTOCOL_TCP), of_backend(TCP_SYN | TCP_ACK, BACKEND_ISN, CLIENTS),
    of_client(TCP_RST, FORGED, 0), Stage::Opening)]
fn segments_of_a_connection_that_goes_on(
    #[case] before: fn() -> Host,
    #[case] one: (Side, Segment),
    #[case] other: (Side, Segment),
    #[case] stage: Stage,
) {
    in_every_order(before, &[(work(one), &[]), (work(other), &[])], |End { host, works, order }| {
        assert!(works.iter().all(|(_, outcome)| matches!(outcome, Some(Ok(_)))), "{order}");
        assert_eq!(
            host.entries(Stage::Established),
            if stage == Stage::Established { 2 } else { 0 },
            "{order}"
        );
        assert!(halves(host).is_empty(), "{order}: {:#?}", halves(host));
        assert!(!host.flow_of(stage, &syn()).state.has_ended(), "{order}");
    });
}

const MINUTE: u64 = 60;
const HOUR: u64 = 3_600;

/// The connection leaves the established ones, or its entries there know that it has ended, and are collected soon. After a RST the backend
/// answers what it still gets with another. A FIN in the very moment in which the connection becomes established may be forgotten: then the
/// connection counts as half closed.
#[rstest]
#[case::acknowledgement_and_reset(answered_once, of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT),
    of_backend(TCP_RST, BACKENDS_NEXT, 0), vec![of_backend(TCP_RST, BACKENDS_NEXT, 0)], MINUTE)]
#[case::acknowledgement_and_reset_that_refuses(answered_once, of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT),
    of_backend(TCP_RST | TCP_ACK, BACKENDS_NEXT, CLIENTS), vec![of_backend(TCP_RST, BACKENDS_NEXT, 0)], MINUTE)]
#[case::acknowledgement_and_reset_of_the_client(answered_once, of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT),
    of_client(TCP_RST, CLIENTS, 0), vec![of_backend(TCP_RST, BACKENDS_NEXT, 0)], MINUTE)]
#[case::data_and_reset(|| silent(&[]), of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT),
    of_backend(TCP_RST, BACKENDS_NEXT, 0), vec![of_backend(TCP_RST, BACKENDS_NEXT, 0)], MINUTE)]
#[case::data_of_the_backend_and_reset(|| silent(&[]), of_backend(TCP_ACK, BACKENDS_NEXT, CLIENTS),
    of_client(TCP_RST, CLIENTS, 0), vec![of_client(TCP_RST, CLIENTS, 0)], MINUTE)]
#[case::resets_of_both(|| silent(&[]), of_backend(TCP_RST, BACKENDS_NEXT, 0), of_client(TCP_RST, CLIENTS, 0), vec![], MINUTE)]
#[case::acknowledgement_and_fin_of_the_backend(answered_once, of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT),
    fins()[1], vec![
        of_client(TCP_FIN | TCP_ACK, CLIENTS, BACKENDS_NEXT + 1),
        of_backend(TCP_ACK, BACKENDS_NEXT + 1, CLIENTS + 1),
    ], HOUR)]
#[case::acknowledgement_and_fin_of_the_client(answered_once, of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT), fins()[0], vec![
        of_backend(TCP_FIN | TCP_ACK, BACKENDS_NEXT, CLIENTS + 1),
        of_client(TCP_ACK, CLIENTS + 1, BACKENDS_NEXT + 1),
    ], HOUR)]
#[case::fins_of_both(|| established(&[]), fins()[0], fins()[1], acknowledgements_of_fins().to_vec(), MINUTE)]
#[case::fins_of_both_after_silence(|| silent(&[]), fins()[0], fins()[1], acknowledgements_of_fins().to_vec(), MINUTE)]
#[case::acknowledgements_of_both_fins(|| established(&fins()), acknowledgements_of_fins()[0],
    acknowledgements_of_fins()[1], vec![], MINUTE)]
#[case::acknowledgements_of_both_fins_after_silence(|| silent(&fins()), acknowledgements_of_fins()[0],
    acknowledgements_of_fins()[1], vec![], MINUTE)]
#[case::last_acknowledgement_and_another_fin(|| silent(&close()[..2]), close()[2], close()[1], vec![close()[2]], MINUTE)]
#[case::last_acknowledgement_and_that_of_the_backend(|| silent(&close()[..2]), close()[2],
    acknowledgements_of_fins()[1], vec![], MINUTE)]
fn segments_that_end_a_connection(
    #[case] before: fn() -> Host,
    #[case] one: (Side, Segment),
    #[case] other: (Side, Segment),
    #[case] then: Vec<(Side, Segment)>,
    #[case] most_seconds: u64,
) {
    in_every_order(before, &[(work(one), &[]), (work(other), &[])], |End { host, order, .. }| {
        for next in &then {
            work(*next).on(host);
        }
        let entries = host.flows.borrow();
        let established = entries.iter().filter(|((stage, _), _)| *stage == Stage::Established);
        let states: Vec<FlowState> = established.map(|(_, flow)| flow.get().state).collect();
        let state = states.iter().fold(FlowState::default(), |all, state| all.union(state));
        let lifetime = FlowLifetimes::default().of(PROTOCOL_TCP, state).as_secs();
        assert!(states.is_empty() || lifetime <= most_seconds, "{order}: {states:?}");
    });
}

/// The last segment of a connection races with the first of the next one, which has the same ends.
/// Demoting the old flow must not touch the new one.
#[test]
fn the_end_of_a_connection_and_the_next() {
    let last = work(close()[2]);
    let first = Work::Arrives(syn(), Origin::Workload);
    in_every_order(
        || established(&close()[..2]),
        &[(last, &[]), (first, &[LAST])],
        |End { host, works, order }| {
            let sent = works[1].1.unwrap().unwrap();
            assert_eq!(answered(host, &sent), Some((FRONTEND, CLIENT)), "{order}");
            let halves = halves(host);
            assert!(halves.is_empty(), "{order}: {halves:#?}");
        },
    );
}

/// A client whose backend is gone dials anew while the old backend's last packet is on its way.
#[rstest]
#[case::connection(PROTOCOL_TCP)]
#[case::datagrams(PROTOCOL_UDP)]
fn a_late_answer_and_the_next_flow(#[case] protocol: u8) {
    let before = || {
        let host = abandoned(protocol);
        host.wait(2 * REFRESH_AFTER);
        host
    };
    let late = Work::Leaves(of(protocol, answer(BACKEND, CLIENT, TCP_SYN | TCP_ACK)));
    let first = Work::Arrives(of(protocol, syn()), Origin::Workload);
    in_every_order(before, &[(late, &[]), (first, &[LAST])], |End { host, works, order }| {
        assert_eq!(answered(host, &works[1].1.unwrap().unwrap()), Some((FRONTEND, CLIENT)), "{order}");
        let next = later(&first).on(host).unwrap().unwrap();
        assert_eq!(answered(host, &next), Some((FRONTEND, CLIENT)), "{order}");
        host.wait(2 * REFRESH_AFTER);
        later(&first).on(host);
        let halves = halves(host);
        assert!(halves.is_empty(), "{order}: {halves:#?}");
    });
}

/// Of one that the backend answers for seconds.
#[rstest]
#[case::of_both(PROGRESS_ANSWERED, [false, true])]
#[case::of_the_client(PROGRESS_SUSTAINED, [true, true])]
#[case::of_both_when_it_becomes_established(PROGRESS_SUSTAINED, [false, true])]
fn datagrams(#[case] progress: u8, #[case] by_client: [bool; 2]) {
    let before = || {
        let host = opened(PROTOCOL_UDP);
        host.wait(2 * SUSTAINED_AFTER);
        for flow in host.flows.borrow().values() {
            EntryRef(flow).write(Change::Progress(progress));
        }
        host
    };
    let works = by_client.map(|by_client| {
        let work = if by_client {
            Work::Arrives(datagram(CLIENT, FRONTEND), Origin::Workload)
        } else {
            Work::Leaves(datagram(BACKEND, CLIENT))
        };
        (work, &[][..])
    });
    in_every_order(before, &works, |End { host, works, order }| {
        assert!(works.iter().all(|(_, outcome)| matches!(outcome, Some(Ok(_)))), "{order}");
        for _ in 0..2 {
            host.arriving(&datagram(CLIENT, FRONTEND), Origin::Workload).unwrap();
            host.leaving(&datagram(BACKEND, CLIENT)).unwrap();
            host.wait(2 * REFRESH_AFTER);
        }
        assert_eq!(host.entries(Stage::Established), 2, "{order}");
        assert!(halves(host).is_empty(), "{order}");
    });
}

/// The controller removes what has expired, and a packet comes in that moment: the flow goes wholly, or stays wholly. It stays if a packet
/// was let through, other than one that keeps no flow.
#[rstest]
#[case::data(|| silent(&[]), 86_400, of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT), true)]
#[case::data_of_the_backend(|| silent(&[]), 86_400, of_backend(TCP_ACK, BACKENDS_NEXT, CLIENTS), true)]
#[case::acknowledgement(answered_once, 60, of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT), true)]
#[case::answer(|| opened(PROTOCOL_TCP), 60, of_backend(TCP_SYN | TCP_ACK, BACKEND_ISN, CLIENTS), true)]
#[case::another_syn(|| opened(PROTOCOL_TCP), 60, (Side::Client, syn().segment), false)]
#[case::reset(|| silent(&[]), 86_400, of_client(TCP_RST, CLIENTS, 0), false)]
#[case::a_new_connection(closed, 60, (Side::Client, syn().segment), true)]
fn collection_and_a_packet(
    #[case] before: fn() -> Host,
    #[case] seconds: u64,
    #[case] said: (Side, Segment),
    #[case] keeps: bool,
    #[values(Flow::client_key, Flow::backend_key)] found_at: fn(&Flow<A>) -> FlowKey<A>,
) {
    let before = || {
        let host = before();
        host.wait(seconds * SECOND);
        host
    };
    let host = before();
    let found =
        [Stage::Established, Stage::Opening].into_iter().find_map(|stage| host.flow(stage, &syn().key()));
    let key = found_at(&found.unwrap().read());
    let found = [Stage::Established, Stage::Opening].into_iter().find_map(|stage| host.flow(stage, &key));
    let collects = Work::Collects(found.unwrap().read());
    in_every_order(before, &[(collects, &[]), (work(said), &[LAST])], |End { host, works, order }| {
        let halves = halves(host);
        assert!(halves.is_empty(), "{order}: {halves:#?}");
        if let (true, Some(Ok(sent))) = (keeps, works[1].1) {
            let next = work(of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT)).on(host);
            assert!(matches!(next, Some(Ok(_))), "{order}: after {sent:?} {next:?}");
        }
    });
}

#[rstest]
#[case::a_client_that_nobody_knows(None)]
#[case::one_whose_affinity_has_expired(Some(Affinity { last_used: 0, backend: 1, flags: 0 }))]
#[case::one_whose_backend_is_gone(Some(Affinity { last_used: 100 * SECOND, backend: 9, flags: 0 }))]
fn connections_of_one_client_at_once_go_to_one_backend(#[case] former: Option<Affinity>) {
    let before = || {
        let mut host = Host::new();
        if let Some(service) = host.maps.services.get_mut(&1) {
            service.affinity_seconds = 60;
        }
        if let Some(affinity) = former {
            host.remember(&CLIENT_KEY, &affinity);
        }
        host
    };
    let opens = |port| Work::Arrives(packet((CLIENT.0, Port::new(port)), FRONTEND, TCP_SYN), Origin::Outside);
    let works = [(opens(40_000), &[FIRST][..]), (opens(40_001), &[LAST][..])];
    let ends = in_every_order(before, &works, |end| {
        let backends: BTreeSet<A> =
            end.works.iter().map(|(_, outcome)| outcome.unwrap().unwrap().destination).collect();
        assert_eq!(backends.len(), 1, "{}", end.order);
    });
    assert!(ends > 1);
}
