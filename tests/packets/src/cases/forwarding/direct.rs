//! Direct server return, at the node that a client dials and at the node that answers. One world
//! plays both nodes: each case fills its maps as one of them has them. Each case is run with
//! packets in IP alone and in Geneve.

use anyhow::{Context as _, Result, ensure};
use lab::namespace::ip;
use proxy_common::{
    flow::Stage,
    layout::*,
    packet::{TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN},
    port::Port,
    reason::Reason,
};

use super::{
    forward::{OWN, TAGS, Uplink},
    redirect::{self, Other},
};
use crate::{
    cases::{BOTH, Group, Scene, WorldKind, scene::*},
    wire::{Cut, Endpoint, KnownAddress, Segment, Tunnel},
    world::{Maps, Output, Verdict, link_address},
};

/// Outer headers that packets get.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(crate) enum Way {
    Ip,
    Geneve,
}

pub(crate) const WAYS: [(Way, &str); 2] = [(Way::Ip, "direct"), (Way::Geneve, "direct by geneve")];

impl Way {
    const fn encapsulation(self) -> u16 {
        match self {
            Self::Ip => ENCAPSULATION_IP,
            Self::Geneve => ENCAPSULATION_GENEVE,
        }
    }

    /// Returns the length of the outer headers.
    fn header<W: Maps>(self) -> usize {
        ip_header::<W>() + if self == Self::Geneve { 16 } else { 0 }
    }
}

pub(crate) fn ip_header<W: Maps>() -> usize {
    if W::NAME == "ipv4" { 20 } else { 40 }
}

/// Adds a case for both protocols and both encapsulations.
fn each<W: Maps + 'static>(group: &mut Group, name: &str, body: fn(&mut Scene<W>, Way) -> Result<()>) {
    for (way, label) in WAYS {
        for protocol in BOTH {
            group.add::<W>(&format!("{label}: {name}"), protocol, WorldKind::Usual, move |s| body(s, way));
        }
    }
}

/// Address that every node serves.
pub(crate) const LOAD_BALANCER: Endpoint = (KnownAddress::External, 80);
/// Node port of the node that the client dials, as the other node sees it.
const OTHERS_NODE_PORT: Endpoint = (KnownAddress::OtherNode, NODE_PORT.1);
const SERVICE: u32 = 1;
const FLAGS: u32 = FRONTEND_EXTERNAL | FRONTEND_DSR;

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    geneve_cases::<W>(group);
    forward_cases::<W>(group);
    each::<W>(group, "to a node port of this node and its backend elsewhere", |s, way| {
        dialled(s, way)?;
        sent_on(s, NODE_PORT, KnownAddress::Node, way)
    });
    each::<W>(group, "to a load balancer and a backend elsewhere", |s, way| {
        dialled(s, way)?;
        sent_on(s, LOAD_BALANCER, KnownAddress::Node, way)
    });
    each::<W>(group, "to a backend of this node", |s, _| {
        serve(s, &[(11, LOCAL, true)])?;
        s.opens("uplink_ingress", CLIENT, LOAD_BALANCER, LOCAL).map(drop)
    });
    each::<W>(group, "to a backend of this node that is said to be elsewhere", |s, way| {
        dialled(s, way)?;
        let first = s.first(CLIENT, LOAD_BALANCER);
        s.send("uplink_ingress", &first, Expect::Becomes(&first.to(REMOTE)))?;
        s.send("workload_egress", &first.to(REMOTE), Expect::Untouched)?;
        let answer = first.to(REMOTE).answer(TCP_SYN | TCP_ACK);
        s.send("workload_ingress", &answer, Expect::Untouched)?;
        s.send("uplink_egress", &answer, Expect::Becomes(&answer.from(LOAD_BALANCER)))
    });
    each::<W>(group, "taken out and answered", |s, way| {
        backends_node(s)?;
        for dialled in [LOAD_BALANCER, OTHERS_NODE_PORT] {
            let client = (CLIENT.0, CLIENT.1 + u16::from(dialled == LOAD_BALANCER));
            let first = s.first(client, dialled);
            arrives(s, &first, way, Expect::Becomes(&first.to(LOCAL)))?;
            let answer = first.to(LOCAL).answer(TCP_SYN | TCP_ACK);
            s.send("uplink_egress", &answer, Expect::Becomes(&answer.from(dialled)))?;
            let next = first.flags(TCP_ACK);
            arrives(s, &next, way, Expect::Becomes(&next.to(LOCAL)))?;
            ensure!(s.flow_of(Stage::Opening, client)?.flags == 0, "an ordinary flow");
        }
        s.counted(&[(Reason::FlowOpened, 2)])
    });
    // One role must accept what the other makes.
    each::<W>(group, "from one node to the other and back to the client", |s, way| {
        dialled(s, way)?;
        let first = Segment { payload: vec![7; 300], ..s.first(CLIENT, LOAD_BALANCER) };
        s.send("uplink_ingress", &first, Expect::Becomes(&first.to(REMOTE)))?;
        let carried = s.world.leaves("uplink_egress", &first.to(REMOTE).bytes::<W>())?.packet;
        s.world.clear()?;
        s.service(SERVICE, &[(12, REMOTE, true)])?;
        s.frontend(LOAD_BALANCER, SERVICE, FLAGS)?;
        let becomes = first.to(REMOTE).bytes::<W>();
        s.send_bytes("uplink_ingress", &carried, Expect::BecomesBytes(becomes))?;
        let answer = first.to(REMOTE).answer(TCP_SYN | TCP_ACK);
        s.send("uplink_egress", &answer, Expect::Becomes(&answer.from(LOAD_BALANCER)))
    });
    each::<W>(group, "what is not for this node passes as it is", |s, way| {
        backends_node(s)?;
        let to = |source, destination| Tunnel { source, destination, ..tunnel(way) };
        let first = s.first(CLIENT, LOAD_BALANCER);
        let others = [
            // The outer destination is an endpoint of another node, or no endpoint.
            first.in_tunnel::<W>(to(KnownAddress::OtherNode, KnownAddress::RemoteBackend)),
            first.in_tunnel::<W>(to(KnownAddress::OtherNode, KnownAddress::Stranger)),
            // The node port belongs to another node than the one that sent the packet.
            s.first(CLIENT, OTHERS_NODE_PORT)
                .in_tunnel::<W>(to(KnownAddress::Stranger, KnownAddress::LocalBackend)),
            // No service has the inner destination.
            s.first(CLIENT, (KnownAddress::Stranger, 80)).in_tunnel::<W>(tunnel(way)),
        ];
        for bytes in others {
            s.send_bytes("uplink_ingress", &bytes, Expect::Untouched)?;
        }
        if s.protocol == PROTOCOL_TCP {
            let segment = first.flags(TCP_ACK).in_tunnel::<W>(tunnel(way));
            s.send_bytes("uplink_ingress", &segment, Expect::Untouched)?;
        }
        // A pod sends the packet.
        s.send_bytes("workload_ingress", &first.in_tunnel::<W>(tunnel(way)), Expect::Untouched)?;
        ensure!(s.flow_counts()? == (0, 0), "entries {:?}", s.flow_counts()?);
        s.counted(&[])
    });
    for (way, label) in WAYS {
        let name = format!("{label}: a segment of no flow is its endpoint's to answer");
        group.add::<W>(&name, PROTOCOL_TCP, WorldKind::Usual, move |s| {
            backends_node(s)?;
            s.change_settings(|settings| settings.answers_unknown = 1)?;
            for dialled in [LOAD_BALANCER, OTHERS_NODE_PORT] {
                let client = (CLIENT.0, CLIENT.1 + u16::from(dialled == LOAD_BALANCER));
                let segment = s.packet(client, dialled, TCP_ACK);
                for _ in 0..2 {
                    arrives(s, &segment, way, Expect::Becomes(&segment.to(LOCAL)))?;
                }
                ensure!(s.flow_of(Stage::Opening, client)?.flags == FLOW_RESUMED, "it proves its client");
                let reset = Segment {
                    sequence: segment.acknowledgement,
                    acknowledgement: 0,
                    ..segment.to(LOCAL).answer(TCP_RST)
                };
                s.send("uplink_egress", &reset, Expect::Becomes(&reset.from(dialled)))?;
                ensure!(s.flow_of(Stage::Opening, client)?.state.reset == RESET_CONFIRMED, "it goes on");
            }
            s.counted(&[(Reason::FlowOpened, 2)])
        });
    }
    each::<W>(group, "a service without it takes nothing out", |s, way| {
        s.service(SERVICE, &[(11, LOCAL, true)])?;
        s.frontend(LOAD_BALANCER, SERVICE, FRONTEND_EXTERNAL)?;
        let bytes = s.first(CLIENT, LOAD_BALANCER).in_tunnel::<W>(tunnel(way));
        s.send_bytes("uplink_ingress", &bytes, Expect::Untouched)
    });
    each::<W>(group, "cut short anywhere, and one in one in another", |s, way| {
        backends_node(s)?;
        let whole = s.first(CLIENT, LOAD_BALANCER).in_tunnel::<W>(tunnel(way));
        // The kernel gives no shorter packets to programs.
        let shortest = if W::NAME == "ipv4" { 34 } else { 54 };
        for length in shortest..whole.len() {
            s.send_bytes("uplink_ingress", &whole[..length], Expect::Untouched)?;
        }
        let nested = W::in_tunnel(&whole, tunnel(way));
        s.send_bytes("uplink_ingress", &nested, Expect::Untouched)?;
        ensure!(s.flow_counts()? == (0, 0), "entries {:?}", s.flow_counts()?);
        s.send_bytes(
            "uplink_ingress",
            &whole,
            Expect::BecomesBytes(s.first(CLIENT, LOAD_BALANCER).to(LOCAL).bytes::<W>()),
        )
    });
    each::<W>(group, "fragments", |s, way| {
        dialled(s, way)?;
        let cut = Cut { id: 7, piece: 32 };
        let packet = Segment { payload: vec![7; 100], ..s.first(CLIENT, LOAD_BALANCER) };
        let fragments = packet.fragments::<W>(cut).into_iter().zip(packet.to(REMOTE).fragments::<W>(cut));
        let carried: Vec<_> = fragments
            .map(|(fragment, inside)| {
                s.send_bytes("uplink_ingress", &fragment, Expect::BecomesBytes(inside.clone()))?;
                leaves(s, &inside, &fragment, KnownAddress::Node, way)
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
    each::<W>(group, "errors about answers go to the backend", |s, way| {
        dialled(s, way)?;
        let first = s.first(CLIENT, LOAD_BALANCER);
        s.send("uplink_ingress", &first, Expect::Becomes(&first.to(REMOTE)))?;
        let quoted = first.answer(TCP_ACK);
        let error = W::error(CLIENT.0, LOAD_BALANCER.0, &quoted);
        let inside = W::error(CLIENT.0, REMOTE.0, &quoted.from(REMOTE));
        s.send_bytes("uplink_ingress", &error, Expect::BecomesBytes(inside.clone()))?;
        let carried = leaves(s, &inside, &error, KnownAddress::Node, way)?;
        s.world.clear()?;
        s.service(SERVICE, &[(12, REMOTE, true)])?;
        s.frontend(LOAD_BALANCER, SERVICE, FLAGS)?;
        let opening =
            first.in_tunnel::<W>(Tunnel { destination: KnownAddress::RemoteBackend, ..tunnel(way) });
        s.send_bytes("uplink_ingress", &opening, Expect::BecomesBytes(first.to(REMOTE).bytes::<W>()))?;
        s.send_bytes("uplink_ingress", &carried, Expect::BecomesBytes(inside))
    });
    each::<W>(group, "the client is told of a packet that is too long with its header", |s, way| {
        let uplink = Uplink::new::<W>(s.world)?;
        uplink.knows::<W>(CLIENT.0, OWN)?;
        s.world.set_interface(
            uplink.index,
            InterfaceSettings { mtu: MTU as u16, ..InterfaceSettings::default() },
        )?;
        dialled(s, way)?;
        let first = s.first(CLIENT, LOAD_BALANCER);
        s.send("uplink_ingress", &first, Expect::Becomes(&first.to(REMOTE)))?;
        let room = MTU + 14 - first.bytes::<W>().len() + first.payload.len();
        let header = way.header::<W>();
        let of =
            |length: usize| Segment { payload: vec![1; length], ..s.packet(CLIENT, LOAD_BALANCER, TCP_ACK) };
        let (fits, longer) = (of(room - header), of(room - header + 1));
        let output = s.world.leaves_by(uplink.index, "uplink_egress", &fits.to(REMOTE).bytes::<W>())?;
        let length = output.packet.len();
        is_carried::<W>(&output, &fits.bytes::<W>(), KnownAddress::Node, way)?;
        ensure!(length == MTU + 14, "{length} bytes");
        let output = s.world.leaves_by(uplink.index, "uplink_egress", &longer.to(REMOTE).bytes::<W>())?;
        ensure!(output.verdict == Verdict::Redirected, "{:?}", output.verdict);
        // The packet would have to be shorter by the header, because without it the packet just
        // fits into the interface.
        let told = longer.bytes::<W>().len() - 14 - header;
        ensure!(output.packet == W::too_big(&longer, told), "another error");
        s.counted(&[(Reason::FlowOpened, 1), (Reason::PacketTooBig, 1)])
    });
    for (way, label) in WAYS {
        let name = format!("{label}: the client is told so beside a flood of refused packets");
        group.add::<W>(&name, PROTOCOL_UDP, WorldKind::Usual, move |s| told_beside_a_flood(s, way));
    }
    each::<W>(group, "merged datagrams are as long as each of them", |s, way| {
        let uplink = Uplink::new::<W>(s.world)?;
        uplink.knows::<W>(CLIENT.0, OWN)?;
        s.world.set_interface(
            uplink.index,
            InterfaceSettings { mtu: MTU as u16, ..InterfaceSettings::default() },
        )?;
        dialled(s, way)?;
        let first = s.first(CLIENT, LOAD_BALANCER);
        s.send("uplink_ingress", &first, Expect::Becomes(&first.to(REMOTE)))?;
        let headers = first.bytes::<W>().len() - first.payload.len() - 14;
        let header = way.header::<W>();
        let fits = MTU - headers - header;
        for (size, is_too_long) in [(fits, false), (fits + 1, true)] {
            let packet = Segment { payload: vec![1; 2 * size], ..s.packet(CLIENT, LOAD_BALANCER, TCP_ACK) };
            let inside = packet.to(REMOTE).bytes::<W>();
            let output = s.world.leaves_merged(uplink.index, "uplink_egress", &inside, size as u32)?;
            // Segments of a stream can be cut until they fit.
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

fn told_beside_a_flood<W: Maps>(s: &mut Scene<W>, way: Way) -> Result<()> {
    let uplink = Uplink::new::<W>(s.world)?;
    uplink.knows::<W>(CLIENT.0, OWN)?;
    let settings = InterfaceSettings { mtu: MTU as u16, ..InterfaceSettings::default() };
    s.world.set_interface(uplink.index, settings)?;
    dialled(s, way)?;
    let first = s.first(CLIENT, LOAD_BALANCER);
    s.send("uplink_ingress", &first, Expect::Becomes(&first.to(REMOTE)))?;
    // The service's number is beyond the end of the map, so it has no endpoints.
    s.frontend(CLUSTER_IP, 1_000, 0)?;
    let refused = s.first(CLIENT, CLUSTER_IP).bytes::<W>();
    // The number is twice the limit of a second, because a new second may begin meanwhile.
    let mut is_answered = |_| Ok(s.world.run("workload_ingress", &refused)?.verdict != Verdict::Dropped);
    let most = 2 * ICMP_ERRORS_PER_SECOND;
    let answered =
        (0..=most).map(&mut is_answered).take_while(|one: &Result<bool>| !matches!(one, Ok(false)));
    ensure!(answered.collect::<Result<Vec<_>>>()?.len() as u64 <= most, "no flood uses the budget up");
    let longer = Segment { payload: vec![1; MTU], ..s.packet(CLIENT, LOAD_BALANCER, TCP_ACK) };
    let output = s.world.leaves_by(uplink.index, "uplink_egress", &longer.to(REMOTE).bytes::<W>())?;
    ensure!(output.verdict == Verdict::Redirected, "{:?}", output.verdict);
    Ok(())
}

/// Fills the maps as on the node that the client dials.
pub(crate) fn dialled<W: Maps>(s: &mut Scene<W>, way: Way) -> Result<()> {
    serve(s, &[(12, REMOTE, false)])?;
    s.change_settings(|settings| settings.encapsulation = way.encapsulation())
}

/// Writes the service port of [`dialled`] with these backends.
fn serve<W: Maps>(s: &mut Scene<W>, backends: &[(u32, Endpoint, bool)]) -> Result<()> {
    s.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
    s.service(SERVICE, backends)?;
    s.frontend(LOAD_BALANCER, SERVICE, FLAGS)?;
    s.node_port(SERVICE)?;
    node_port(s)
}

fn node_port<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    let key = FrontendKey::of_node_port(Port::new(NODE_PORT.1), s.protocol);
    W::put_frontend(&mut s.world.ebpf, key, Frontend { service: SERVICE, flags: FLAGS })
}

/// Fills the maps as on the node of `LOCAL`.
pub(crate) fn backends_node<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    s.service(SERVICE, &[(11, LOCAL, true), (12, REMOTE, false)])?;
    s.frontend(LOAD_BALANCER, SERVICE, FLAGS)?;
    node_port(s)
}

/// Returns the outer ends with which another node sends packets to `LOCAL`.
pub(crate) fn tunnel(way: Way) -> Tunnel {
    let port = (way == Way::Geneve).then_some(50_000);
    Tunnel { source: KnownAddress::OtherNode, destination: KnownAddress::LocalBackend, port }
}

fn arrives<W: Maps>(s: &mut Scene<W>, packet: &Segment, way: Way, expected: Expect) -> Result<()> {
    s.send_bytes("uplink_ingress", &packet.in_tunnel::<W>(tunnel(way)), expected)
}

/// Expects a packet between client and backend to leave as the client has sent it, in a packet from
/// this address to `REMOTE`. Returns that packet.
fn leaves<W: Maps>(
    s: &mut Scene<W>,
    inside: &[u8],
    sent: &[u8],
    from: KnownAddress,
    way: Way,
) -> Result<Vec<u8>> {
    let output = s.world.run("uplink_egress", inside)?;
    is_carried::<W>(&output, sent, from, way)?;
    Ok(output.packet)
}

/// Returns the source port of a packet of Geneve.
fn source_port<W: Maps>(packet: &[u8]) -> u16 {
    let offset = 14 + ip_header::<W>();
    u16::from_be_bytes([packet[offset], packet[offset + 1]])
}

fn is_carried<W: Maps>(output: &Output, sent: &[u8], from: KnownAddress, way: Way) -> Result<()> {
    ensure!(output.verdict == Verdict::GoesOn, "{:?}", output.verdict);
    let port = (way == Way::Geneve).then(|| source_port::<W>(&output.packet));
    ensure!(port.is_none_or(|port| (32_768..49_152).contains(&port)), "from port {port:?}");
    let tunnel = Tunnel { source: from, destination: KnownAddress::RemoteBackend, port };
    let expected = W::in_tunnel(sent, tunnel);
    ensure!(output.packet == expected, "became\n  {:02x?}\nexpected\n  {expected:02x?}", output.packet);
    Ok(())
}

/// Expects the client's packets to leave unchanged inside packets from this address.
fn sent_on<W: Maps>(s: &mut Scene<W>, dialled: Endpoint, from: KnownAddress, way: Way) -> Result<()> {
    let mut ports = Vec::new();
    for flags in [TCP_SYN, TCP_ACK] {
        let packet = s.packet(CLIENT, dialled, flags);
        s.send("uplink_ingress", &packet, Expect::Becomes(&packet.to(REMOTE)))?;
        let inside = packet.to(REMOTE).bytes::<W>();
        let carried = leaves(s, &inside, &packet.bytes::<W>(), from, way)?;
        ports.push(source_port::<W>(&carried));
        // A device below this one has programs too, which must not change the packet again.
        s.send_bytes("uplink_egress", &carried, Expect::Untouched)?;
    }
    ports.dedup();
    ensure!(way == Way::Ip || ports.len() == 1, "a flow from ports {ports:?}");
    ensure!(s.flow_of(Stage::Opening, CLIENT)?.flags == FLOW_DSR, "a flow of one direction");
    s.counted(&[(Reason::FlowOpened, 1)])
}

/// Adds the cases of packets that XDP forwards.
fn forward_cases<W: Maps + 'static>(group: &mut Group) {
    each::<W>(group, "XDP forwards", |s, way| {
        let uplink = Uplink::new::<W>(s.world)?.and_neighbours::<W>()?;
        dialled(s, way)?;
        for (number, frontend) in (0..).zip([LOAD_BALANCER, NODE_PORT]) {
            let first = s.first((CLIENT.0, CLIENT.1 + number), frontend);
            let tunnel = let_out(s, &uplink, &first, way)?;
            sends_on(s, &uplink, &first.flags(TCP_ACK), tunnel)?;
        }
        s.counted(&[(Reason::FlowOpened, 2), (Reason::ForwardedByXdp, 2)])?;
        let bytes = 4 * s.first(CLIENT, LOAD_BALANCER).bytes::<W>().len();
        let counted = s.world.service_counters(SERVICE)?;
        ensure!(counted.bytes == bytes as u64, "{counted:?}, not {bytes} bytes, without outer headers");
        Ok(())
    });
    each::<W>(group, "XDP forwards a short frame that is padded", |s, way| {
        const PADDING: [u8; 6] = [0xaa; 6];
        let uplink = Uplink::new::<W>(s.world)?.and_neighbours::<W>()?;
        dialled(s, way)?;
        let first = s.first(CLIENT, LOAD_BALANCER);
        let tunnel = let_out(s, &uplink, &first, way)?;
        let packet = first.flags(TCP_ACK);
        let output = s.world.run_xdp(uplink.index, &[&packet.bytes::<W>()[..], &PADDING].concat())?;
        ensure!(output.verdict == Verdict::SentBack, "{:?}", output.verdict);
        let sent = [&packet.sent_back().in_tunnel::<W>(tunnel)[..], &PADDING].concat();
        ensure!(output.packet == sent, "became\n  {:02x?}\nexpected\n  {sent:02x?}", output.packet);
        Ok(())
    });
    each::<W>(group, "XDP forwards by another uplink", |s, way| {
        let uplink = Uplink::new::<W>(s.world)?;
        let other = Other::leading_to_backends::<W>(s, "other", redirect::OTHER)?;
        s.world.put_redirect_source(uplink.index, link_address(OWN)?)?;
        s.world.put_redirect_target(other.index, other.index)?;
        dialled(s, way)?;
        let first = s.first(CLIENT, LOAD_BALANCER);
        let tunnel = let_out(s, &uplink, &first, way)?;
        let packet = first.flags(TCP_ACK);
        let sent = W::in_tunnel(&other.sent::<W>(&packet), tunnel);
        redirect::redirects(s, uplink.index, &packet.bytes::<W>(), &sent)
    });
    each::<W>(group, "XDP forwards frames in fragments", |s, way| {
        let uplink = Uplink::new::<W>(s.world)?.and_neighbours::<W>()?;
        ip(None, "link set uplink mtu 9000\n")?;
        dialled(s, way)?;
        let first = s.first(CLIENT, LOAD_BALANCER);
        let tunnel = let_out(s, &uplink, &first, way)?;
        let long = Segment { payload: vec![1; 8_000], ..first.flags(TCP_ACK) };
        let bytes = long.bytes::<W>();
        for first in [bytes.len(), bytes.len() - long.payload.len()] {
            let output = s.world.run_xdp_in_fragments(uplink.index, first, &bytes)?;
            ensure!(output.verdict == Verdict::SentBack, "{first} in one piece: {:?}", output.verdict);
            let sent = long.sent_back().in_tunnel::<W>(tunnel);
            ensure!(output.packet == sent, "{first} in one piece: not what leaves");
        }
        Ok(())
    });
    for (name, tags) in TAGS {
        for (way, label) in WAYS {
            let name = format!("{label}: XDP forwards frames with {name}");
            group.add::<W>(&name, PROTOCOL_UDP, WorldKind::Usual, move |s| {
                let uplink = Uplink::with_tags::<W>(s.world, tags)?.and_neighbours::<W>()?;
                dialled(s, way)?;
                let first = s.first(CLIENT, LOAD_BALANCER);
                let tunnel = let_out(s, &uplink, &first, way)?;
                sends_on(s, &uplink, &first, tunnel)
            });
        }
    }
    each::<W>(group, "XDP does not forward what is the stack's", |s, way| {
        let uplink = Uplink::new::<W>(s.world)?.and_neighbours::<W>()?;
        dialled(s, way)?;
        let first = s.first(CLIENT, LOAD_BALANCER);
        let tunnel = let_out(s, &uplink, &first, way)?;
        let packet = first.flags(TCP_ACK);
        uplink.passes(s, &Segment { hop_limit: 1, ..packet.clone() }.bytes::<W>())?;
        uplink.passes(s, &W::error(CLIENT.0, LOAD_BALANCER.0, &first.answer(TCP_ACK)))?;
        for fragment in
            (Segment { payload: vec![1; 64], ..packet.clone() }).fragments::<W>(Cut { id: 7, piece: 32 })
        {
            uplink.passes(s, &fragment)?;
        }
        let room = MTU + 14 - packet.bytes::<W>().len() + packet.payload.len() - way.header::<W>();
        let of = |length: usize| Segment { payload: vec![1; length], ..packet.clone() };
        sends_on(s, &uplink, &of(room), tunnel)?;
        uplink.passes(s, &of(room + 1).bytes::<W>())
    });
    for (way, label) in WAYS {
        let name = format!("{label}: XDP forwards a connection to its end");
        group.add::<W>(&name, PROTOCOL_TCP, WorldKind::Usual, move |s| {
            let uplink = Uplink::new::<W>(s.world)?.and_neighbours::<W>()?;
            dialled(s, way)?;
            let first = s.first(CLIENT, LOAD_BALANCER);
            let tunnel = let_out(s, &uplink, &first, way)?;
            let next = first.flags(TCP_ACK);
            sends_on(s, &uplink, &next, tunnel)?;
            let state = s.flow_of(Stage::Opening, CLIENT)?.state;
            ensure!(state.progress == PROGRESS_CONFIRMED, "{state:?}");
            sends_on(s, &uplink, &Segment { tcp_flags: TCP_FIN | TCP_ACK, ..next }, tunnel)?;
            let state = s.flow_of(Stage::Opening, CLIENT)?.state;
            ensure!(state.client_fin == FIN_ACKNOWLEDGED, "{state:?}");
            Ok(())
        });
    }
}

/// Makes the stack let the client's first packet out. Returns the outer ends with which it leaves.
fn let_out<W: Maps>(s: &mut Scene<W>, uplink: &Uplink, first: &Segment, way: Way) -> Result<Tunnel> {
    uplink.passes(s, &first.bytes::<W>())?;
    s.send("uplink_ingress", first, Expect::Becomes(&first.to(REMOTE)))?;
    // XDP also passes the next packets until one has left.
    uplink.passes(s, &first.flags(TCP_ACK).bytes::<W>())?;
    let inside = first.to(REMOTE).bytes::<W>();
    // The packet that the node itself sends changes nothing, because it says nothing about the
    // stack's verdict on the client.
    leaves(s, &inside, &first.bytes::<W>(), KnownAddress::Node, way)?;
    uplink.passes(s, &first.flags(TCP_ACK).bytes::<W>())?;
    let output = s.world.leaves("uplink_egress", &inside)?;
    is_carried::<W>(&output, &first.bytes::<W>(), KnownAddress::Node, way)?;
    let port = (way == Way::Geneve).then(|| source_port::<W>(&output.packet));
    Ok(Tunnel { source: KnownAddress::Node, destination: KnownAddress::RemoteBackend, port })
}

/// Expects XDP to forward the packet inside one with these ends.
fn sends_on<W: Maps>(s: &Scene<W>, uplink: &Uplink, packet: &Segment, tunnel: Tunnel) -> Result<()> {
    uplink.sends_bytes(s, packet, &packet.sent_back().in_tunnel::<W>(tunnel))
}

/// Adds cases with changed Geneve packets to `LOCAL`: bytes behind the outer IP header differ. Some
/// of these packets are still taken out of the tunnel, and the others pass unchanged.
fn geneve_cases<W: Maps + 'static>(group: &mut Group) {
    /// Length of the headers of UDP and Geneve.
    const HEADERS: usize = 16;
    type Change = fn(&mut Vec<u8>, usize);
    const ARE_TAKEN_OUT: [Change; 3] = [
        |bytes, udp| bytes[udp + 6] = 1,
        |bytes, udp| bytes[udp + 15] = 1,
        |bytes, udp| with_options(bytes, udp, &[0, 1, 7, 1, 1, 2, 3, 4]),
    ];
    const PASS: [(&str, Change); 8] = [
        ("another port", |bytes, udp| bytes[udp + 3] += 1),
        ("another version", |bytes, udp| bytes[udp + 8] |= 0x40),
        ("control", |bytes, udp| bytes[udp + 9] |= 0x80),
        ("critical options", |bytes, udp| {
            with_options(bytes, udp, &[0, 1, 0x87, 1, 1, 2, 3, 4]);
            bytes[udp + 9] |= 0x40;
        }),
        ("options that are not there", |bytes, udp| bytes[udp + 8] |= 0x3f),
        ("Ethernet", |bytes, udp| bytes[udp + 10..udp + 12].copy_from_slice(&[0x65, 0x58])),
        ("the other family", |bytes, udp| bytes[udp + 10] ^= 0x8e),
        ("a virtual network", |bytes, udp| bytes[udp + 14] = 1),
    ];
    group.both::<W>("direct by geneve: other headers", |s| {
        backends_node(s)?;
        let udp = 14 + ip_header::<W>();
        let first = s.first(CLIENT, LOAD_BALANCER);
        let whole = first.in_tunnel::<W>(tunnel(Way::Geneve));
        ensure!(whole[udp + HEADERS..] == first.bytes::<W>()[14..], "it begins elsewhere");
        for (what, change) in PASS {
            let mut bytes = whole.clone();
            change(&mut bytes, udp);
            s.send_bytes("uplink_ingress", &bytes, Expect::Untouched).context(what)?;
        }
        ensure!(s.flow_counts()? == (0, 0), "entries {:?}", s.flow_counts()?);
        for change in ARE_TAKEN_OUT {
            let mut bytes = whole.clone();
            change(&mut bytes, udp);
            let becomes = first.to(LOCAL).bytes::<W>();
            s.send_bytes("uplink_ingress", &bytes, Expect::BecomesBytes(becomes))?;
        }
        s.counted(&[(Reason::FlowOpened, 1)])
    });
    group.both::<W>("direct by geneve: to a frontend at that port", |s| {
        const OWN: Endpoint = (KnownAddress::LocalBackend, 6081);
        backends_node(s)?;
        // The frontend's endpoint serves Geneve itself.
        let key = FrontendKey::of_address(W::address(KnownAddress::External), Port::new(6081), PROTOCOL_UDP);
        s.service(2, &[(13, OWN, true)])?;
        W::put_frontend(&mut s.world.ebpf, key, Frontend { service: 2, flags: FRONTEND_EXTERNAL })?;
        let to = Tunnel { destination: KnownAddress::External, ..tunnel(Way::Geneve) };
        let first = s.first(CLIENT, LOAD_BALANCER);
        let becomes = first.in_tunnel::<W>(Tunnel { destination: OWN.0, ..to });
        s.send_bytes("uplink_ingress", &first.in_tunnel::<W>(to), Expect::BecomesBytes(becomes))?;
        s.counted(&[(Reason::FlowOpened, 1)])
    });
}

/// Inserts options after the Geneve header, and corrects all lengths.
fn with_options(bytes: &mut Vec<u8>, udp: usize, options: &[u8]) {
    bytes.splice(udp + 16..udp + 16, options.iter().copied());
    bytes[udp + 8] |= (options.len() / 4) as u8;
    let added = options.len() as u16;
    for offset in [udp + 4, if udp == 34 { 16 } else { 18 }] {
        let length = u16::from_be_bytes([bytes[offset], bytes[offset + 1]]) + added;
        bytes[offset..offset + 2].copy_from_slice(&length.to_be_bytes());
    }
}
