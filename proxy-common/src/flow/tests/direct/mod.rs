//! Direct server return: at the node that the client dials, and at the backend's.

mod life;
mod sent;
mod taken_out;

use super::*;

const NODE_PORT: (A, Port) = (NODE, Port::new(30_080));
/// Of the node that the client dials, as the backend's node sees it.
const OTHER_NODE: A = [192, 0, 2, 2];
const OTHERS_NODE_PORT: (A, Port) = (OTHER_NODE, Port::new(30_080));
const BACKEND: A = BACKENDS[0];

/// Both frontends and a node port have the flag. `local`: the backends are this node's.
fn node(local: bool) -> Host {
    let mut host = Host::new();
    for slot in host.maps.slots.values_mut() {
        slot.flags = if local { BACKEND_LOCAL } else { 0 };
    }
    for protocol in [PROTOCOL_TCP, PROTOCOL_UDP] {
        let key = FrontendKey::of_node_port(NODE_PORT.1, protocol);
        host.maps.frontends.insert(key, Frontend { service: 1, flags: 0 });
    }
    for frontend in host.maps.frontends.values_mut() {
        frontend.flags = FRONTEND_EXTERNAL | FRONTEND_DSR;
    }
    host.maps.node_addresses.insert(NODE, NodeAddress::default());
    host
}

/// What becomes of a packet that leaves.
fn left(host: &Host, packet: &Packet<A>) -> Result<(Packet<A>, Ends<A>), Reason> {
    let mut scratch = Scratch { packet: *packet, interface: 1, ..Scratch::default() };
    decide_leaving(host, &mut scratch, false)?;
    assert_eq!(scratch.action.then, Then::Encapsulate);
    encapsulating(host, &mut scratch)?;
    Ok((rewritten(packet, scratch.action.rewrite), scratch.tunnel))
}

/// A client's packet goes through both hooks of the node that it dials.
fn sent_on(host: &Host, packet: &Packet<A>) -> Result<(Packet<A>, Ends<A>), Reason> {
    let inside = rewritten(packet, host.arriving(packet, Origin::Outside)?);
    left(host, &inside)
}

/// It comes in another packet.
fn unpacked(host: &Host, packet: &Packet<A>, tunnel: Ends<A>) -> Result<Packet<A>, Reason> {
    let mut scratch = Scratch { packet: *packet, outer_length: 20, tunnel, ..Scratch::default() };
    arriving(host, &mut scratch, Origin::Outside, &UnknownSockets)?;
    Ok(rewritten(packet, scratch.action.rewrite))
}

fn from_other_node() -> Ends<A> {
    Ends { source: OTHER_NODE, destination: BACKEND, source_port: Port::NONE }
}

fn of_protocol(protocol: u8, packet: Packet<A>) -> Packet<A> {
    if protocol == PROTOCOL_UDP { Packet { protocol, segment: Segment::default(), ..packet } } else { packet }
}

/// A segment of the client after its SYN; offset of its sequence number.
fn client(flags: u8, offset: u32, payload: u32) -> Packet<A> {
    let acknowledgement = BACKEND_ISN.wrapping_add(1);
    numbered(CLIENT, FRONTEND, Segment::new(flags, CLIENT_ISN + 1 + offset, acknowledgement, payload))
}

/// Returns a segment as [`client`] does, which acknowledges so many bytes of the backend.
fn acknowledges(flags: u8, offset: u32, received: u32) -> Packet<A> {
    let acknowledgement = BACKENDS_NEXT.wrapping_add(received);
    numbered(CLIENT, FRONTEND, Segment::new(flags, CLIENT_ISN + 1 + offset, acknowledgement, 0))
}
