//! Direct server return: the node that a client dials, and the one that answers. One world is both: its tables are filled as each has them.

use anyhow::{Result, ensure};
use proxy_common::{
    flow::Stage,
    layout::*,
    packet::{TCP_ACK, TCP_SYN},
    port::Port,
    reason::Reason,
};

use super::{
    Group, Scene,
    scene::*,
    transit::{OWN, Uplink},
};
use crate::{
    wire::{Cut, Endpoint, KnownAddress, Segment, Tunnel},
    world::{Tables, Verdict},
};

/// Served by every node alike.
const LOAD_BALANCER: Endpoint = (KnownAddress::External, 80);
/// Of the node that the client dials, seen from the other.
const OTHERS_NODE_PORT: Endpoint = (KnownAddress::OtherNode, NODE_PORT.1);
const SERVICE: u32 = 1;
const FLAGS: u32 = FRONTEND_EXTERNAL | FRONTEND_DSR;

pub(crate) fn cases<W: Tables + 'static>(group: &mut Group) {
    group.both::<W>("direct: to a node port of this node and its backend elsewhere", |s| {
        dialled(s)?;
        sent_on(s, NODE_PORT, KnownAddress::Node)
    });
    group.both::<W>("direct: to a load balancer and a backend elsewhere", |s| {
        dialled(s)?;
        sent_on(s, LOAD_BALANCER, KnownAddress::Node)
    });
    group.both::<W>("direct: to a backend of this node", |s| {
        serve(s, &[(11, LOCAL, true)])?;
        s.opens("uplink_ingress", CLIENT, LOAD_BALANCER, LOCAL).map(drop)
    });
    group.both::<W>("direct: to a backend of this node that is said to be elsewhere", |s| {
        dialled(s)?;
        let first = s.first(CLIENT, LOAD_BALANCER);
        s.send("uplink_ingress", &first, Expect::Becomes(&first.to(REMOTE)))?;
        s.send("workload_egress", &first.to(REMOTE), Expect::Untouched)?;
        let answer = first.to(REMOTE).answer(TCP_SYN | TCP_ACK);
        s.send("workload_ingress", &answer, Expect::Untouched)?;
        s.send("uplink_egress", &answer, Expect::Becomes(&answer.from(LOAD_BALANCER)))
    });
    group.both::<W>("direct: taken out and answered", |s| {
        backends_node(s)?;
        for dialled in [LOAD_BALANCER, OTHERS_NODE_PORT] {
            let client = (CLIENT.0, CLIENT.1 + u16::from(dialled == LOAD_BALANCER));
            let first = s.first(client, dialled);
            arrives(s, &first, Expect::Becomes(&first.to(LOCAL)))?;
            let answer = first.to(LOCAL).answer(TCP_SYN | TCP_ACK);
            s.send("uplink_egress", &answer, Expect::Becomes(&answer.from(dialled)))?;
            let next = first.flags(TCP_ACK);
            arrives(s, &next, Expect::Becomes(&next.to(LOCAL)))?;
            ensure!(s.flow_of(Stage::Opening, client)?.flags == 0, "an ordinary flow");
        }
        s.counted(&[(Reason::FlowOpened, 2)])
    });
    // What one role makes is what the other takes.
    group.both::<W>("direct: from one node to the other and back to the client", |s| {
        dialled(s)?;
        let first = Segment { payload: vec![7; 300], ..s.first(CLIENT, LOAD_BALANCER) };
        s.send("uplink_ingress", &first, Expect::Becomes(&first.to(REMOTE)))?;
        let carried = s.world.forward("uplink_egress", &first.to(REMOTE).bytes::<W>())?.packet;
        s.world.clear()?;
        s.service(SERVICE, &[(12, REMOTE, true)])?;
        s.frontend(LOAD_BALANCER, SERVICE, FLAGS)?;
        let becomes = first.to(REMOTE).bytes::<W>();
        s.send_bytes("uplink_ingress", &carried, Expect::BecomesBytes(becomes))?;
        let answer = first.to(REMOTE).answer(TCP_SYN | TCP_ACK);
        s.send("uplink_egress", &answer, Expect::Becomes(&answer.from(LOAD_BALANCER)))
    });
    group.both::<W>("direct: what is not for this node passes as it is", |s| {
        backends_node(s)?;
        let to = |source, destination| Tunnel { source, destination };
        let first = s.first(CLIENT, LOAD_BALANCER);
        let others = [
            // To an endpoint of another node, and to none.
            first.in_tunnel::<W>(to(KnownAddress::OtherNode, KnownAddress::RemoteBackend)),
            first.in_tunnel::<W>(to(KnownAddress::OtherNode, KnownAddress::Stranger)),
            // To a node port of who has not sent it.
            s.first(CLIENT, OTHERS_NODE_PORT)
                .in_tunnel::<W>(to(KnownAddress::Stranger, KnownAddress::LocalBackend)),
            // To what no service has.
            s.first(CLIENT, (KnownAddress::Stranger, 80)).in_tunnel::<W>(tunnel()),
        ];
        for bytes in others {
            s.send_bytes("uplink_ingress", &bytes, Expect::Untouched)?;
        }
        if s.protocol == PROTOCOL_TCP {
            let segment = first.flags(TCP_ACK).in_tunnel::<W>(tunnel());
            s.send_bytes("uplink_ingress", &segment, Expect::Untouched)?;
        }
        // From a pod.
        s.send_bytes("workload_ingress", &first.in_tunnel::<W>(tunnel()), Expect::Untouched)?;
        ensure!(s.flow_counts()? == (0, 0), "entries {:?}", s.flow_counts()?);
        s.counted(&[])
    });
    group.both::<W>("direct: a service without it takes nothing out", |s| {
        s.service(SERVICE, &[(11, LOCAL, true)])?;
        s.frontend(LOAD_BALANCER, SERVICE, FRONTEND_EXTERNAL)?;
        let bytes = s.first(CLIENT, LOAD_BALANCER).in_tunnel::<W>(tunnel());
        s.send_bytes("uplink_ingress", &bytes, Expect::Untouched)
    });
    group.both::<W>("direct: cut short anywhere, and one in one in another", |s| {
        backends_node(s)?;
        let whole = s.first(CLIENT, LOAD_BALANCER).in_tunnel::<W>(tunnel());
        // The kernel gives programs no shorter ones.
        let shortest = if W::NAME == "ipv4" { 34 } else { 54 };
        for length in shortest..whole.len() {
            s.send_bytes("uplink_ingress", &whole[..length], Expect::Untouched)?;
        }
        let nested = W::in_tunnel(&whole, tunnel());
        s.send_bytes("uplink_ingress", &nested, Expect::Untouched)?;
        ensure!(s.flow_counts()? == (0, 0), "entries {:?}", s.flow_counts()?);
        s.send_bytes(
            "uplink_ingress",
            &whole,
            Expect::BecomesBytes(s.first(CLIENT, LOAD_BALANCER).to(LOCAL).bytes::<W>()),
        )
    });
    group.both::<W>("direct: fragments", |s| {
        dialled(s)?;
        let cut = Cut { id: 7, piece: 32 };
        let packet = Segment { payload: vec![7; 100], ..s.first(CLIENT, LOAD_BALANCER) };
        let fragments = packet.fragments::<W>(cut).into_iter().zip(packet.to(REMOTE).fragments::<W>(cut));
        let carried: Vec<_> = fragments
            .map(|(fragment, inside)| {
                s.send_bytes("uplink_ingress", &fragment, Expect::BecomesBytes(inside.clone()))?;
                let carried = W::in_tunnel(&fragment, to_remote(KnownAddress::Node));
                s.send_bytes("uplink_egress", &inside, Expect::BecomesBytes(carried.clone()))?;
                Ok(carried)
            })
            .collect::<Result<_>>()?;
        s.world.clear()?;
        s.service(SERVICE, &[(12, REMOTE, true)])?;
        s.frontend(LOAD_BALANCER, SERVICE, FLAGS)?;
        for (carried, inside) in carried.iter().zip(packet.to(REMOTE).fragments::<W>(cut)) {
            s.send_bytes("uplink_ingress", carried, Expect::BecomesBytes(inside))?;
        }
        Ok(())
    });
    group.both::<W>("direct: errors about answers go to the backend", |s| {
        dialled(s)?;
        let first = s.first(CLIENT, LOAD_BALANCER);
        s.send("uplink_ingress", &first, Expect::Becomes(&first.to(REMOTE)))?;
        let quoted = first.answer(TCP_ACK);
        let error = W::error(CLIENT.0, LOAD_BALANCER.0, &quoted);
        let inside = W::error(CLIENT.0, REMOTE.0, &quoted.from(REMOTE));
        s.send_bytes("uplink_ingress", &error, Expect::BecomesBytes(inside.clone()))?;
        let carried = W::in_tunnel(&error, to_remote(KnownAddress::Node));
        s.send_bytes("uplink_egress", &inside, Expect::BecomesBytes(carried.clone()))?;
        s.world.clear()?;
        s.service(SERVICE, &[(12, REMOTE, true)])?;
        s.frontend(LOAD_BALANCER, SERVICE, FLAGS)?;
        s.send_bytes("uplink_ingress", &first.in_tunnel::<W>(to_remote(KnownAddress::OtherNode)), {
            Expect::BecomesBytes(first.to(REMOTE).bytes::<W>())
        })?;
        s.send_bytes("uplink_ingress", &carried, Expect::BecomesBytes(inside))
    });
    group.both::<W>("direct: the client is told of a packet that is too long with its header", |s| {
        let uplink = Uplink::new::<W>(s.world)?;
        uplink.knows::<W>(CLIENT.0, OWN)?;
        dialled(s)?;
        let first = s.first(CLIENT, LOAD_BALANCER);
        s.send("uplink_ingress", &first, Expect::Becomes(&first.to(REMOTE)))?;
        let room = MTU + 14 - first.bytes::<W>().len() + first.payload.len();
        let header = if W::NAME == "ipv4" { 20 } else { 40 };
        let of =
            |length: usize| Segment { payload: vec![1; length], ..s.packet(CLIENT, LOAD_BALANCER, TCP_ACK) };
        let (fits, longer) = (of(room - header), of(room - header + 1));
        let output = s.world.leaves_by(uplink.index, "uplink_egress", &fits.to(REMOTE).bytes::<W>())?;
        ensure!(output.verdict == Verdict::GoesOn, "{:?}", output.verdict);
        ensure!(output.packet == fits.in_tunnel::<W>(to_remote(KnownAddress::Node)), "not as it was");
        let output = s.world.leaves_by(uplink.index, "uplink_egress", &longer.to(REMOTE).bytes::<W>())?;
        ensure!(output.verdict == Verdict::Redirected, "{:?}", output.verdict);
        // It fits into the interface, so that this much less does with the header.
        let told = longer.bytes::<W>().len() - 14 - header;
        ensure!(output.packet == W::too_big(&longer, told), "another error");
        s.counted(&[(Reason::FlowOpened, 1), (Reason::PacketTooBig, 1)])
    });
    group.both::<W>("direct: merged datagrams are as long as each of them", |s| {
        let uplink = Uplink::new::<W>(s.world)?;
        uplink.knows::<W>(CLIENT.0, OWN)?;
        dialled(s)?;
        let first = s.first(CLIENT, LOAD_BALANCER);
        s.send("uplink_ingress", &first, Expect::Becomes(&first.to(REMOTE)))?;
        let headers = first.bytes::<W>().len() - first.payload.len() - 14;
        let header = if W::NAME == "ipv4" { 20 } else { 40 };
        let fits = MTU - headers - header;
        for (size, is_too_long) in [(fits, false), (fits + 1, true)] {
            let packet = Segment { payload: vec![1; 2 * size], ..s.packet(CLIENT, LOAD_BALANCER, TCP_ACK) };
            let inside = packet.to(REMOTE).bytes::<W>();
            let output = s.world.leaves_merged(uplink.index, "uplink_egress", &inside, size as u32)?;
            // Segments of a stream are cut to what fits.
            let is_told = is_too_long && s.protocol == PROTOCOL_UDP;
            let expected = if is_told { Verdict::Redirected } else { Verdict::Dropped };
            ensure!(output.verdict == expected, "{size}: {:?}", output.verdict);
            let told = headers + size - header;
            ensure!(!is_told || output.packet == W::too_big(&packet, told), "another error");
        }
        Ok(())
    });
}

const MTU: usize = 1_500;

/// What the node knows that the client dials.
fn dialled<W: Tables>(s: &mut Scene<W>) -> Result<()> {
    serve(s, &[(12, REMOTE, false)])
}

/// As [`dialled`]; of its service port.
fn serve<W: Tables>(s: &mut Scene<W>, backends: &[(u32, Endpoint, bool)]) -> Result<()> {
    s.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
    s.service(SERVICE, backends)?;
    s.frontend(LOAD_BALANCER, SERVICE, FLAGS)?;
    s.node_port(SERVICE)?;
    node_port(s)
}

fn node_port<W: Tables>(s: &mut Scene<W>) -> Result<()> {
    let key = FrontendKey::of_node_port(Port::new(NODE_PORT.1), s.protocol);
    W::put_frontend(&mut s.world.ebpf, key, Frontend { service: SERVICE, flags: FLAGS })
}

/// What the node of `LOCAL` knows.
fn backends_node<W: Tables>(s: &mut Scene<W>) -> Result<()> {
    s.service(SERVICE, &[(11, LOCAL, true), (12, REMOTE, false)])?;
    s.frontend(LOAD_BALANCER, SERVICE, FLAGS)?;
    node_port(s)
}

/// In what another node sends packets to `LOCAL`.
fn tunnel() -> Tunnel {
    Tunnel { source: KnownAddress::OtherNode, destination: KnownAddress::LocalBackend }
}

fn to_remote(source: KnownAddress) -> Tunnel {
    Tunnel { source, destination: KnownAddress::RemoteBackend }
}

fn arrives<W: Tables>(s: &mut Scene<W>, packet: &Segment, expected: Expect) -> Result<()> {
    s.send_bytes("uplink_ingress", &packet.in_tunnel::<W>(tunnel()), expected)
}

/// The client's packets leave in packets from this address, as they came.
fn sent_on<W: Tables>(s: &mut Scene<W>, dialled: Endpoint, from: KnownAddress) -> Result<()> {
    for flags in [TCP_SYN, TCP_ACK] {
        let packet = s.packet(CLIENT, dialled, flags);
        s.send("uplink_ingress", &packet, Expect::Becomes(&packet.to(REMOTE)))?;
        let carried = packet.in_tunnel::<W>(to_remote(from));
        s.send_bytes("uplink_egress", &packet.to(REMOTE).bytes::<W>(), Expect::BecomesBytes(carried))?;
    }
    ensure!(s.flow_of(Stage::Opening, CLIENT)?.flags == FLOW_DSR, "a flow of one direction");
    s.counted(&[(Reason::FlowOpened, 1)])
}
