//! Packets of masqueraded flows that skip the stack at TC because XDP has not forwarded them: to a
//! backend behind any uplink, and back.

use anyhow::{Result, ensure};
use lab::namespace::ip;
use proxy_common::{
    flow::Stage,
    layout::{INTERFACE_OF_UPLINK, INTERFACE_WITHOUT_LINK_HEADERS, InterfaceSettings, PROTOCOL_UDP},
    packet::{TCP_ACK, TCP_FIN, TCP_SYN},
    reason::Reason,
};

use super::{
    forward::{NEXT_HOP, address},
    redirect::Node,
};
use crate::{
    cases::{Group, scene::*},
    wire::{Cut, Extra, Link, Segment},
    world::{Maps, Verdict, link_address},
};

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.skip_stack::<W>(
        "a flow skips the stack once it has let a packet out, to the backend and back",
        |s| {
            let Connection { node, second, answer } = Connection::opened(s)?;
            let (uplink, other) = (node.uplink.index, node.other.index);
            node.skips_stack(s, uplink, &second, &second.to(REMOTE))?;
            node.by_stack(
                s,
                "uplink_egress",
                other,
                &second.to(REMOTE),
                &second.to(REMOTE).from(node.address),
            )?;
            node.skips_stack(s, other, &answer, &answer.to(CLIENT))?;
            node.by_stack(
                s,
                "uplink_egress",
                uplink,
                &answer.to(CLIENT),
                &answer.to(CLIENT).from(NODE_PORT),
            )?;
            s.counted(&[(Reason::FlowOpened, 1), (Reason::SkippedStack, 2)])
        },
    );
    group.skip_stack::<W>(
        "an established flow skips the stack, also when it is compared with the maps",
        |s| {
            let Connection { node, second, answer } = Connection::established(s)?;
            node.skips_stack(s, node.uplink.index, &second, &second.to(REMOTE))?;
            s.world.raise_epoch()?;
            node.skips_stack(s, node.uplink.index, &second, &second.to(REMOTE))?;
            node.skips_stack(s, node.other.index, &answer, &answer.to(CLIENT))
        },
    );
    group.resetting::<W>("what opens a connection goes by the stack, also where one is open", |s| {
        let Connection { node, .. } = Connection::established(s)?;
        let first = s.first(CLIENT, NODE_PORT);
        node.by_stack(s, "uplink_ingress", node.uplink.index, &first, &first.to(REMOTE))
    });
    group.skip_stack::<W>("the end of a connection skips the stack", |s| {
        let Connection { node, second, answer } = Connection::established(s)?;
        let ends = second.flags(TCP_FIN | TCP_ACK);
        node.skips_stack(s, node.uplink.index, &ends, &ends.to(REMOTE))?;
        let ends = answer.flags(TCP_FIN | TCP_ACK);
        node.skips_stack(s, node.other.index, &ends, &ends.to(CLIENT))
    });
    group.skip_stack::<W>("only to interfaces that are uplinks", |s| {
        let Connection { node, second, answer } = Connection::opened(s)?;
        s.world.set_interface(node.other.index, InterfaceSettings::default())?;
        node.by_stack(s, "uplink_ingress", node.uplink.index, &second, &second.to(REMOTE))?;
        node.skips_stack(s, node.other.index, &answer, &answer.to(CLIENT))
    });
    group.skip_stack::<W>("to an interface without link headers, and back", |s| {
        let Connection { node, second, answer } = Connection::opened(s)?;
        let flags = INTERFACE_OF_UPLINK | INTERFACE_WITHOUT_LINK_HEADERS;
        s.world
            .set_interface(node.other.index, InterfaceSettings { flags, ..InterfaceSettings::default() })?;
        node.skips_stack(s, node.uplink.index, &second, &second.to(REMOTE))?;
        let answer = Segment { link: Link::Bare, ..answer };
        let output = s.world.leaves_by(node.other.index, "uplink_ingress_l3", &answer.bytes::<W>())?;
        ensure!(output.verdict == Verdict::Redirected, "{:?}", output.verdict);
        let sent = Segment { hop_limit: answer.hop_limit - 1, ..answer.to(CLIENT) };
        let (header, packet) = output.packet.split_at(14);
        ensure!(header == [0; 14] && packet == sent.bytes::<W>(), "it became {:02x?}", output.packet);
        s.counted(&[(Reason::FlowOpened, 1), (Reason::SkippedStack, 2)])
    });
    group.skip_stack::<W>("only what a router does no more with than sending it on", |s| {
        let Connection { node, second, .. } = Connection::opened(s)?;
        let (uplink, other) = (node.uplink.index, node.other.name);
        for packet in
            [Segment { extra: Extra::Options, ..second.clone() }, Segment { hop_limit: 1, ..second.clone() }]
        {
            node.by_stack(s, "uplink_ingress", uplink, &packet, &packet.to(REMOTE))?;
        }
        ip(None, &format!("link set {other} mtu 1300\n"))?;
        let headers = second.bytes::<W>().len() - second.payload.len() - 14;
        let with_payload = |length| Segment { payload: vec![1; length], ..second.clone() };
        let (longest, longer) = (with_payload(1_300 - headers), with_payload(1_301 - headers));
        node.skips_stack(s, uplink, &longest, &longest.to(REMOTE))?;
        node.by_stack(s, "uplink_ingress", uplink, &longer, &longer.to(REMOTE))
    });
    group.skip_stack::<W>("not what a switch floods", |s| {
        let Connection { node, second, .. } = Connection::opened(s)?;
        let mut flooded = second.bytes::<W>();
        flooded[..6].copy_from_slice(&link_address(NEXT_HOP)?);
        let output = s.world.leaves_by(node.uplink.index, "uplink_ingress", &flooded)?;
        ensure!(output.verdict == Verdict::GoesOn, "{:?}", output.verdict);
        Ok(())
    });
    group.skip_stack::<W>("also where the kernel has to ask for the link address", |s| {
        let Connection { node, second, .. } = Connection::opened(s)?;
        ip(None, &format!("neigh del {} dev {}\n", address::<W>(REMOTE.0), node.other.name))?;
        node.skips_stack(s, node.uplink.index, &second, &second.to(REMOTE))
    });
    group.skip_stack::<W>("fragments go by the stack", |s| {
        let Connection { node, second, .. } = Connection::opened(s)?;
        let long = Segment { payload: vec![1; 150], ..second };
        let cut = Cut { piece: 64, id: 7 };
        for (fragment, sent) in long.fragments::<W>(cut).iter().zip(long.to(REMOTE).fragments::<W>(cut)) {
            let output = s.world.leaves_by(node.uplink.index, "uplink_ingress", fragment)?;
            ensure!(output.verdict == Verdict::GoesOn && output.packet == sent, "{:?}", output.verdict);
        }
        Ok(())
    });
}

/// Connection of a client outside to a backend behind another uplink.
struct Connection {
    node: Node,
    /// Next packet of the client.
    second: Segment,
    /// Answer of the backend.
    answer: Segment,
}

impl Connection {
    fn opened<W: Maps>(s: &mut Scene<W>) -> Result<Self> {
        let node = Node::new(s)?;
        for interface in [node.uplink.index, node.other.index] {
            let settings = InterfaceSettings { flags: INTERFACE_OF_UPLINK, ..InterfaceSettings::default() };
            s.world.set_interface(interface, settings)?;
        }
        let second = s.packet(CLIENT, NODE_PORT, TCP_ACK);
        let answer = second.to(REMOTE).from(node.address).answer(TCP_SYN | TCP_ACK);
        Ok(Self { node, second, answer })
    }

    fn established<W: Maps>(s: &mut Scene<W>) -> Result<Self> {
        let Self { node, second, answer: first } = Self::opened(s)?;
        let answered = |s: &Scene<W>| {
            let inside = first.to(CLIENT);
            node.skips_stack(s, node.other.index, &first, &inside)?;
            node.by_stack(s, "uplink_egress", node.uplink.index, &inside, &inside.from(NODE_PORT))
        };
        answered(s)?;
        if s.protocol == PROTOCOL_UDP {
            // A flow of datagrams is established once both sides have sent for some seconds.
            s.age(Stage::Opening)?;
            answered(s)?;
        }
        node.skips_stack(s, node.uplink.index, &second, &second.to(REMOTE))?;
        s.flow_of(Stage::Established, CLIENT)?;
        let answer = first.flags(TCP_ACK);
        Ok(Self { node, second, answer })
    }
}

impl Node {
    /// Returns the packet as it comes or leaves by the interface, with the link address of that
    /// interface.
    fn frame<W: Maps>(&self, interface: u32, packet: &Segment) -> Vec<u8> {
        let mut frame = packet.bytes::<W>();
        if interface == self.other.index && packet.link == Link::Ethernet {
            frame[..6].copy_from_slice(&self.other.address);
        }
        frame
    }

    fn by_stack<W: Maps>(
        &self,
        s: &Scene<W>,
        program: &str,
        interface: u32,
        packet: &Segment,
        becomes: &Segment,
    ) -> Result<()> {
        let output = s.world.leaves_by(interface, program, &self.frame::<W>(interface, packet))?;
        let becomes = self.frame::<W>(interface, becomes);
        ensure!(output.verdict == Verdict::GoesOn, "{packet:?}: {:?}", output.verdict);
        ensure!(output.packet == becomes, "it became {:02x?}, not {becomes:02x?}", output.packet);
        Ok(())
    }

    /// Expects the packet to skip the stack. The kernel writes the link addresses after the program
    /// has ended.
    fn skips_stack<W: Maps>(
        &self,
        s: &Scene<W>,
        interface: u32,
        packet: &Segment,
        becomes: &Segment,
    ) -> Result<()> {
        let becomes = Segment { hop_limit: becomes.hop_limit - 1, ..becomes.clone() };
        let becomes = self.frame::<W>(interface, &becomes);
        let output = s.world.leaves_by(interface, "uplink_ingress", &self.frame::<W>(interface, packet))?;
        ensure!(output.verdict == Verdict::Redirected, "{packet:?}: {:?}", output.verdict);
        ensure!(output.packet == becomes, "it became {:02x?}, not {becomes:02x?}", output.packet);
        Ok(())
    }
}
