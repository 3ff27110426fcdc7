//! The source is translated too if the answer would not come back otherwise.

use anyhow::{Context as _, Result, ensure};
use proxy_common::{
    flow::Stage,
    layout::{FLOW_HOST_CONNECTION, InterfaceSettings},
    packet::{TCP_ACK, TCP_SYN},
    reason::Reason,
};

use crate::{
    cases::{Group, Scene, scene::*},
    wire::{Endpoint, KnownAddress, Segment},
    world::{LOOPBACK, Maps},
};

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.both::<W>("from outside to a backend elsewhere and back", |s| {
        s.node_port_elsewhere()?;
        let first = s.opens("uplink_ingress", CLIENT, NODE_PORT, REMOTE)?;
        let node = masqueraded(s, "uplink_egress", &first.to(REMOTE), CLIENT)?;
        let answer = first.to(REMOTE).from(node).answer(TCP_SYN | TCP_ACK);
        let to_client = answer.to(CLIENT);
        s.send("uplink_ingress", &answer, Expect::Becomes(&to_client))?;
        s.send("uplink_egress", &to_client, Expect::Becomes(&to_client.from(NODE_PORT)))?;
        // The established flow keeps its port.
        let second = first.flags(TCP_ACK);
        s.send("uplink_ingress", &second, Expect::Becomes(&second.to(REMOTE)))?;
        s.has_masqueraded_flow()?;
        s.send("uplink_egress", &second.to(REMOTE), Expect::Becomes(&second.to(REMOTE).from(node)))?;
        s.send("uplink_ingress", &answer, Expect::Becomes(&to_client))?;
        s.counted(&[(Reason::FlowOpened, 1)])?;
        // Each packet is counted once, where it is between client and frontend.
        let bytes: usize = [&first, &to_client, &second].iter().map(|packet| packet.bytes::<W>().len()).sum();
        s.counted_for_service(3, bytes)
    });
    group.both::<W>("with the address of the interface that it leaves by", |s| {
        s.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
        let mut settings = InterfaceSettings::default();
        W::set_source(&mut settings, W::address(KnownAddress::OtherNode));
        s.world.set_interface(LOOPBACK, settings)?;
        leaves_as(s, KnownAddress::OtherNode)
    });
    group.both::<W>("with the node's address where the interface has none", |s| {
        s.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
        s.world.set_interface(LOOPBACK, InterfaceSettings::default())?;
        leaves_as(s, KnownAddress::Node)
    });
    group.both::<W>("of a pod to itself and back", |s| hairpin_from(s, 40_000, 40_000));
    group.both::<W>("of a pod to itself from its own server port", |s| {
        s.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
        s.cluster_ip()?;
        let first = s.first(LOCAL, CLUSTER_IP);
        // The pod dials from the port at which its server listens. Without an alias port, packets
        // in both directions would have the same ends.
        let output = s.world.run("workload_ingress", &first.bytes::<W>())?;
        let alias = s.flow_of(Stage::Opening, LOCAL)?.alias_port().number();
        ensure!(alias != LOCAL.1);
        ensure!(output.packet == first.to(LOCAL).from((LOCAL.0, alias)).bytes::<W>());
        hairpin_from(s, LOCAL.1, alias)
    });
    group.both::<W>("without an address for it", |s| {
        s.service(1, &[(12, REMOTE, false)])?;
        s.node_port(1)?;
        let first = s.opens("uplink_ingress", CLIENT, NODE_PORT, REMOTE)?;
        s.send("uplink_egress", &first.to(REMOTE), Expect::Dropped)?;
        s.counted(&[(Reason::FlowOpened, 1), (Reason::NoMasqueradeAddress, 1)])
    });
    group.both::<W>("until the ports of a backend are used up", |s| {
        s.node_port_elsewhere()?;
        // There are as many flows as ports, and each gets another port.
        for client in 1..=8 {
            let first = s.opens("uplink_ingress", (KnownAddress::Client, client), NODE_PORT, REMOTE)?;
            masqueraded(s, "uplink_egress", &first.to(REMOTE), first.source)?;
        }
        let first = s.opens("uplink_ingress", (KnownAddress::Client, 9), NODE_PORT, REMOTE)?;
        s.send("uplink_egress", &first.to(REMOTE), Expect::Dropped)?;
        // All ports are free for another backend.
        s.service(1, &[(13, (KnownAddress::OtherNode, 8080), false)])?;
        let first = s.opens(
            "uplink_ingress",
            (KnownAddress::Client, 10),
            NODE_PORT,
            (KnownAddress::OtherNode, 8080),
        )?;
        let inside = first.to((KnownAddress::OtherNode, 8080));
        masqueraded(s, "uplink_egress", &inside, first.source)?;
        ensure!(s.flow_counts()? == (29, 0), "entries {:?}", s.flow_counts()?);
        s.counted(&[(Reason::FlowOpened, 10), (Reason::MasqueradePortsExhausted, 1)])
    });
    group.both::<W>("to this node's address at a port of nobody", |s| {
        s.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
        let packet = s.packet(REMOTE, (KnownAddress::Node, 20_001), TCP_ACK);
        s.send("uplink_ingress", &packet, Expect::Untouched)?;
        s.counted(&[])
    });
    group.both::<W>("beside connections that others masquerade to all ports but one", |s| {
        const FREE: u16 = 20_012;
        s.node_port_elsewhere()?;
        for port in
            MASQUERADE_PORTS.iter().flat_map(|[first, last]| *first..=*last).filter(|port| *port != FREE)
        {
            let packet = of_host_connection(s, port, TCP_SYN);
            s.send("uplink_egress", &packet, Expect::Untouched)?;
        }
        let first = s.opens("uplink_ingress", CLIENT, NODE_PORT, REMOTE)?;
        let node = masqueraded(s, "uplink_egress", &first.to(REMOTE), CLIENT)?;
        ensure!(node.1 == FREE, "port {}", node.1);
        let second = s.opens("uplink_ingress", (KnownAddress::Client, 40_001), NODE_PORT, REMOTE)?;
        s.send("uplink_egress", &second.to(REMOTE), Expect::Dropped)?;
        s.counted(&[(Reason::FlowOpened, 2), (Reason::MasqueradePortsExhausted, 1)])
    });
    group.both::<W>("a host connection gets a port that no flow has", |s| {
        s.node_port_elsewhere()?;
        let first = s.opens("uplink_ingress", CLIENT, NODE_PORT, REMOTE)?;
        let of_flow = masqueraded(s, "uplink_egress", &first.to(REMOTE), CLIENT)?;
        let others = of_host_connection(s, of_flow.1, TCP_SYN);
        s.world.run("uplink_egress", &others.bytes::<W>())?;
        let flows = s.flows(Stage::Opening)?;
        let host_connection = flows
            .iter()
            .find(|(_, flow)| flow.flags & FLOW_HOST_CONNECTION != 0)
            .context("no flow for it")?
            .1;
        let moved = (KnownAddress::Node, host_connection.alias_port().number());
        ensure!(moved.1 != of_flow.1);
        for flags in [TCP_SYN, TCP_ACK] {
            let packet = of_host_connection(s, of_flow.1, flags);
            s.send("uplink_egress", &packet, Expect::Becomes(&packet.from(moved)))?;
        }
        let answer = others.from(moved).answer(TCP_SYN | TCP_ACK);
        s.send("uplink_ingress", &answer, Expect::Becomes(&answer.to(of_flow)))?;
        let of_client = first.to(REMOTE).from(of_flow).answer(TCP_SYN | TCP_ACK);
        s.send("uplink_ingress", &of_client, Expect::Becomes(&of_client.to(CLIENT)))?;
        s.counted(&[(Reason::FlowOpened, 2)])
    });
    // If the answer opened a flow, it would be sent to a backend at the port that it came from. The
    // backend would answer again, without end.
    group.udp::<W>("answers to a host connection's datagram from a node port open no flow", |s| {
        s.node_port_elsewhere()?;
        let sent = of_host_connection(s, NODE_PORT.1, 0);
        s.world.leaves("uplink_egress", &sent.bytes::<W>())?;
        s.send("uplink_ingress", &sent.answer(0), Expect::Untouched)?;
        s.counted(&[])
    });
    // Before, a process of the node has served the node port.
    group.udp::<W>("clients of a socket with a node port are the service's", |s| {
        s.node_port_elsewhere()?;
        let first = s.first(CLIENT, NODE_PORT);
        s.send("uplink_egress", &first.answer(0), Expect::Untouched)?;
        s.send("uplink_ingress", &first, Expect::Becomes(&first.to(REMOTE)))
    });
}

/// Sends the first packet out of the node, and returns its new source.
fn masqueraded<W: Maps>(
    s: &mut Scene<W>,
    egress: &str,
    packet: &Segment,
    client: Endpoint,
) -> Result<Endpoint> {
    let output = s.world.run(egress, &packet.bytes::<W>())?;
    let node = s.masqueraded(client)?;
    let port = node.1;
    ensure!(MASQUERADE_PORTS.iter().any(|[low, high]| (*low..=*high).contains(&port)), "port {port}");
    ensure!(output.packet == packet.from(node).bytes::<W>());
    s.send(egress, packet, Expect::Becomes(&packet.from(node)))?;
    Ok(node)
}

/// Expects a packet to a backend elsewhere to leave with this source, and its answer to come back.
fn leaves_as<W: Maps>(s: &mut Scene<W>, source: KnownAddress) -> Result<()> {
    s.service(1, &[(12, REMOTE, false)])?;
    s.node_port(1)?;
    let first = s.opens("uplink_ingress", CLIENT, NODE_PORT, REMOTE)?;
    let inside = first.to(REMOTE);
    s.world.run("uplink_egress", &inside.bytes::<W>())?;
    let source = (source, s.flow_of(Stage::Opening, CLIENT)?.masquerade_port().number());
    s.send("uplink_egress", &inside, Expect::Becomes(&inside.from(source)))?;
    let answer = inside.from(source).answer(TCP_SYN | TCP_ACK);
    s.send("uplink_ingress", &answer, Expect::Becomes(&answer.to(CLIENT)))?;
    s.counted(&[(Reason::FlowOpened, 1)])
}

/// Sends a pod's packets to itself. `port` is the client's, and `inside` is the port that the node
/// sees instead.
fn hairpin_from<W: Maps>(s: &mut Scene<W>, port: u16, inside: u16) -> Result<()> {
    s.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
    s.cluster_ip()?;
    let client = (LOCAL.0, port);
    let client_inside = (LOCAL.0, inside);
    let first = s.first(client, CLUSTER_IP);
    let to_backend = first.from(client_inside).to(LOCAL);
    s.send("workload_ingress", &first, Expect::Becomes(&to_backend))?;
    let node = masqueraded(s, "workload_egress", &to_backend, client)?;
    let answer = to_backend.from(node).answer(TCP_SYN | TCP_ACK);
    let to_client = answer.to(client_inside);
    s.send("workload_ingress", &answer, Expect::Becomes(&to_client))?;
    s.send("workload_egress", &to_client, Expect::Becomes(&to_client.from(CLUSTER_IP).to(client)))?;
    s.counted(&[(Reason::FlowOpened, 1)])
}

/// Makes a packet that leaves with the node's address, but belongs to no flow that is masqueraded.
fn of_host_connection<W: Maps>(s: &Scene<W>, port: u16, flags: u8) -> Segment {
    s.packet((KnownAddress::Node, port), REMOTE, flags)
}
