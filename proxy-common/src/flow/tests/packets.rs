//! The clients, frontends and packets of these tests, and the way of a packet through the hooks.

use super::*;

pub(super) type A = [u8; 4];

pub(super) const CLIENT: (A, Port) = ([203, 0, 113, 1], Port::new(40_000));
pub(super) const FRONTEND: (A, Port) = ([10, 96, 0, 1], Port::new(80));
pub(super) const OTHER_FRONTEND: (A, Port) = ([10, 96, 0, 2], Port::new(443));
pub(super) const NODE: A = [192, 0, 2, 1];
pub(super) const BACKENDS: [A; 2] = [[10, 244, 1, 1], [10, 244, 1, 2]];
pub(super) const PORT: Port = Port::new(8080);
pub(super) const SECOND: u64 = 1_000_000_000;
/// Dice that choose the first and the last of a set.
pub(super) const FIRST: u32 = 0;
pub(super) const LAST: u32 = u32::MAX;

/// As the programs have it.
pub(super) fn decide_arriving<T: FlowMaps<V4>>(
    maps: &T,
    scratch: &mut Scratch<A>,
    origin: Origin,
) -> Result<(), Reason> {
    decide_arriving_from(maps, scratch, origin, &UnknownSockets)
}

pub(super) fn decide_arriving_from<T: FlowMaps<V4>>(
    maps: &T,
    scratch: &mut Scratch<A>,
    origin: Origin,
    sockets: &impl PodSockets<A>,
) -> Result<(), Reason> {
    scratch.is_parsed = true;
    arriving_fast(maps, scratch, origin).unwrap_or_else(|| arriving(maps, scratch, origin, sockets))
}

/// A pod with one connection to each of these.
pub(super) struct ConnectedTo(pub(super) Vec<(A, Port)>);

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
pub(super) fn decide_leaving<T: FlowMaps<V4>>(
    maps: &T,
    scratch: &mut Scratch<A>,
    from_host: bool,
) -> Result<(), Reason> {
    scratch.is_parsed = true;
    leaving_fast(maps, scratch).unwrap_or_else(|| leaving(maps, scratch, from_host))
}

/// First sequence numbers.
pub(super) const CLIENT_ISN: u32 = 1_000;
pub(super) const BACKEND_ISN: u32 = u32::MAX;

/// Of the client, with the numbers of its first segments.
pub(super) fn packet(source: (A, Port), destination: (A, Port), flags: u8) -> Packet<A> {
    let is_first = flags & TCP_SYN != 0;
    let sequence = CLIENT_ISN + u32::from(!is_first);
    let acknowledgement = if is_first { 0 } else { BACKEND_ISN.wrapping_add(1) };
    numbered(source, destination, Segment::new(flags, sequence, acknowledgement, 0))
}

/// As [`packet`], of the backend.
pub(super) fn answer(source: (A, Port), destination: (A, Port), flags: u8) -> Packet<A> {
    let sequence = BACKEND_ISN.wrapping_add(u32::from(flags & TCP_SYN == 0));
    numbered(source, destination, Segment::new(flags, sequence, CLIENT_ISN + 1, 0))
}

pub(super) fn numbered(source: (A, Port), destination: (A, Port), segment: Segment) -> Packet<A> {
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

pub(super) fn datagram(source: (A, Port), destination: (A, Port)) -> Packet<A> {
    Packet { protocol: PROTOCOL_UDP, ..numbered(source, destination, Segment::default()) }
}

pub(super) fn syn() -> Packet<A> {
    packet(CLIENT, FRONTEND, TCP_SYN)
}

pub(super) fn source(rewrite: Rewrite<A>) -> (A, Port) {
    (rewrite.source, rewrite.source_port)
}

pub(super) fn destination(rewrite: Rewrite<A>) -> (A, Port) {
    (rewrite.destination, rewrite.destination_port)
}

/// A client's packet goes through both hooks; answers with what it is when it leaves the node.
pub(super) fn through(host: &Host, packet: &Packet<A>, origin: Origin) -> Result<Packet<A>, Reason> {
    let inside = rewritten(packet, host.arriving(packet, origin)?);
    match host.leaving(&inside) {
        Ok(rewrite) => Ok(rewritten(&inside, rewrite)),
        Err(Reason::NotAService) => Ok(inside),
        Err(reason) => Err(reason),
    }
}

pub(super) fn rewritten(packet: &Packet<A>, rewrite: Rewrite<A>) -> Packet<A> {
    Packet {
        source: rewrite.source,
        destination: rewrite.destination,
        source_port: rewrite.source_port,
        destination_port: rewrite.destination_port,
        ..*packet
    }
}

/// A confirmed flow, as its client's entry has it.
pub(super) fn establish_one(host: &Host, origin: Origin) -> Flow<A> {
    through(host, &syn(), origin).unwrap();
    let flow = host.flow_of(Stage::Opening, &syn());
    host.leaving(&answer((flow.backend, PORT), CLIENT, TCP_SYN | TCP_ACK)).unwrap();
    host.arriving(&packet(CLIENT, FRONTEND, TCP_ACK), origin).unwrap();
    host.assert_whole();
    host.flow_of(Stage::Established, &syn())
}

pub(super) fn says(
    sender: Side,
    host: &Host,
    flow: &Flow<A>,
    segment: Segment,
) -> Result<Rewrite<A>, Reason> {
    match sender {
        Side::Client => host.arriving(&numbered(CLIENT, FRONTEND, segment), Origin::Workload),
        Side::Backend => host.leaving(&numbered((flow.backend, PORT), CLIENT, segment)),
    }
}

/// What the next segment of either has as its number.
pub(super) const CLIENTS: u32 = CLIENT_ISN + 1;
pub(super) const BACKENDS_NEXT: u32 = BACKEND_ISN.wrapping_add(1);

pub(super) fn of_client(flags: u8, sequence: u32, acknowledgement: u32) -> (Side, Segment) {
    (Side::Client, Segment::new(flags, sequence, acknowledgement, 0))
}

pub(super) fn of_backend(flags: u8, sequence: u32, acknowledgement: u32) -> (Side, Segment) {
    (Side::Backend, Segment::new(flags, sequence, acknowledgement, 0))
}

/// Both sides close.
pub(super) fn close() -> Vec<(Side, Segment)> {
    vec![
        of_client(TCP_FIN | TCP_ACK, CLIENTS, BACKENDS_NEXT),
        of_backend(TCP_FIN | TCP_ACK, BACKENDS_NEXT, CLIENTS + 1),
        of_client(TCP_ACK, CLIENTS + 1, BACKENDS_NEXT + 1),
    ]
}

pub(super) const FORGED: u32 = 0x7000_0000;

/// Numbers that are believed, as they are near the true ones.
pub(super) const GUESSED: u32 = BACKENDS_NEXT + 0x1000;
