//! Packets of masqueraded flows that TC sends on without the stack, where XDP has not: to a backend behind any uplink, and back.

use anyhow::{Result, ensure};
use lab::namespace::ip;
use proxy_common::{
    flow::Stage,
    layout::{INTERFACE_OF_UPLINK, InterfaceSettings, PROTOCOL_UDP},
    packet::{TCP_ACK, TCP_FIN, TCP_SYN},
    reason::Reason,
};

use super::{Group, redirect::Node, scene::*, transit::address};
use crate::{
    wire::{Cut, Extra, Segment},
    world::{Tables, Verdict},
};

pub(super) fn cases<W: Tables + 'static>(group: &mut Group) {
    group.past_stack::<W>("an established flow goes past the stack, to the backend and back", |s| {
        let connection = Connection::established(s)?;
        let Connection { node, second, answer } = &connection;
        let (uplink, other) = (node.uplink.index, node.other.index);
        past_stack(s, uplink, second, &second.to(REMOTE))?;
        by_stack(s, "uplink_egress", other, &second.to(REMOTE), &second.to(REMOTE).from(node.address))?;
        past_stack(s, other, answer, &answer.to(CLIENT))?;
        by_stack(s, "uplink_egress", uplink, &answer.to(CLIENT), &answer.to(CLIENT).from(NODE_PORT))?;
        s.counted(&[(Reason::FlowOpened, 1), (Reason::SentPastStack, 2)])
    });
    group.past_stack::<W>("so does what the tables have to be asked for again", |s| {
        let Connection { node, second, .. } = Connection::established(s)?;
        s.world.raise_epoch()?;
        past_stack(s, node.uplink.index, &second, &second.to(REMOTE))
    });
    group.resetting::<W>("what opens a connection goes by the stack, also where one is open", |s| {
        let Connection { node, .. } = Connection::established(s)?;
        let first = s.first(CLIENT, NODE_PORT);
        by_stack(s, "uplink_ingress", node.uplink.index, &first, &first.to(REMOTE))
    });
    group.past_stack::<W>("the end of a connection goes past the stack", |s| {
        let Connection { node, second, answer } = Connection::established(s)?;
        let (uplink, other) = (node.uplink.index, node.other.index);
        let ends = second.flags(TCP_FIN | TCP_ACK);
        past_stack(s, uplink, &ends, &ends.to(REMOTE))?;
        let ends = answer.flags(TCP_FIN | TCP_ACK);
        past_stack(s, other, &ends, &ends.to(CLIENT))
    });
    group.past_stack::<W>("only to interfaces that are uplinks", |s| {
        let Connection { node, second, answer } = Connection::established(s)?;
        s.world.set_interface(node.other.index, InterfaceSettings::default())?;
        by_stack(s, "uplink_ingress", node.uplink.index, &second, &second.to(REMOTE))?;
        past_stack(s, node.other.index, &answer, &answer.to(CLIENT))
    });
    group.past_stack::<W>("only what a router does no more with than sending it on", |s| {
        let Connection { node, second, .. } = Connection::established(s)?;
        let (uplink, other) = (node.uplink.index, node.other.name);
        for packet in
            [Segment { extra: Extra::Options, ..second.clone() }, Segment { hop_limit: 1, ..second.clone() }]
        {
            by_stack(s, "uplink_ingress", uplink, &packet, &packet.to(REMOTE))?;
        }
        ip(None, &format!("link set {other} mtu 1300\n"))?;
        let headers = second.bytes::<W>().len() - second.payload.len() - 14;
        let with_payload = |length| Segment { payload: vec![1; length], ..second.clone() };
        let (longest, longer) = (with_payload(1_300 - headers), with_payload(1_301 - headers));
        past_stack(s, uplink, &longest, &longest.to(REMOTE))?;
        by_stack(s, "uplink_ingress", uplink, &longer, &longer.to(REMOTE))
    });
    group.past_stack::<W>("also where the kernel has to ask for the link address", |s| {
        let Connection { node, second, .. } = Connection::established(s)?;
        ip(None, &format!("neigh del {} dev {}\n", address::<W>(REMOTE.0), node.other.name))?;
        past_stack(s, node.uplink.index, &second, &second.to(REMOTE))
    });
    group.past_stack::<W>("fragments go by the stack", |s| {
        let Connection { node, second, .. } = Connection::established(s)?;
        let long = Segment { payload: vec![1; 150], ..second };
        let cut = Cut { piece: 64, id: 7 };
        for (fragment, sent) in long.fragments::<W>(cut).iter().zip(long.to(REMOTE).fragments::<W>(cut)) {
            let output = s.world.leaves_by(node.uplink.index, "uplink_ingress", fragment)?;
            ensure!(output.verdict == Verdict::GoesOn && output.packet == sent, "{:?}", output.verdict);
        }
        Ok(())
    });
}

/// From a client outside to a backend behind another uplink.
struct Connection {
    node: Node,
    /// The client's next packet.
    second: Segment,
    /// The backend's.
    answer: Segment,
}

impl Connection {
    fn established<W: Tables>(s: &mut Scene<W>) -> Result<Self> {
        let node = Node::new(s)?;
        let Node { uplink, other, address } = &node;
        for interface in [uplink.index, other.index] {
            let settings = InterfaceSettings { flags: INTERFACE_OF_UPLINK, ..InterfaceSettings::default() };
            s.world.set_interface(interface, settings)?;
        }
        let second = s.packet(CLIENT, NODE_PORT, TCP_ACK);
        let answer = |flags| second.to(REMOTE).from(*address).answer(flags);
        let first = answer(TCP_SYN | TCP_ACK);
        let answered = |s: &Scene<W>| {
            let inside = first.to(CLIENT);
            by_stack(s, "uplink_ingress", other.index, &first, &inside)?;
            by_stack(s, "uplink_egress", uplink.index, &inside, &inside.from(NODE_PORT))
        };
        answered(s)?;
        if s.protocol == PROTOCOL_UDP {
            // Datagrams are established by traffic of both sides for seconds.
            s.age(Stage::Opening)?;
            answered(s)?;
        }
        by_stack(s, "uplink_ingress", uplink.index, &second, &second.to(REMOTE))?;
        s.flow_of(Stage::Established, CLIENT)?;
        let answer = answer(TCP_ACK);
        Ok(Self { node, second, answer })
    }
}

fn by_stack<W: Tables>(
    s: &Scene<W>,
    program: &str,
    interface: u32,
    packet: &Segment,
    becomes: &Segment,
) -> Result<()> {
    let output = s.world.leaves_by(interface, program, &packet.bytes::<W>())?;
    let becomes = becomes.bytes::<W>();
    ensure!(output.verdict == Verdict::GoesOn, "{packet:?}: {:?}", output.verdict);
    ensure!(output.packet == becomes, "it became {:02x?}, not {becomes:02x?}", output.packet);
    Ok(())
}

/// The kernel writes the link addresses when the program has ended.
fn past_stack<W: Tables>(s: &Scene<W>, interface: u32, packet: &Segment, becomes: &Segment) -> Result<()> {
    let becomes = Segment { hop_limit: becomes.hop_limit - 1, ..becomes.clone() }.bytes::<W>();
    let output = s.world.leaves_by(interface, "uplink_ingress", &packet.bytes::<W>())?;
    ensure!(output.verdict == Verdict::Redirected, "{packet:?}: {:?}", output.verdict);
    ensure!(output.packet == becomes, "it became {:02x?}, not {becomes:02x?}", output.packet);
    Ok(())
}
