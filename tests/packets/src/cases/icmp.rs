//! ICMP errors must reach who sent the quoted packet, as errors about that packet.

use anyhow::Result;
use proxy_common::packet::{TCP_ACK, TCP_SYN};

use super::{Group, Scene, scene::*};
use crate::{
    wire::{Endpoint, KnownAddress, Segment},
    world::Maps,
};

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.both::<W>("quoted by its backend on this node", |s| {
        s.cluster_ip()?;
        let first = s.opens("workload_ingress", CLIENT, CLUSTER_IP, LOCAL)?;
        let inside = first.to(LOCAL);
        s.send_bytes("workload_ingress", &W::error(LOCAL.0, CLIENT.0, &inside), Expect::Untouched)?;
        expect(s, "workload_egress", (LOCAL.0, CLIENT.0, &inside), (CLUSTER_IP.0, CLIENT.0, &first))
    });
    group.both::<W>("quoted by its backend elsewhere", |s| of_masqueraded(s, REMOTE.0));
    group.both::<W>("quoted by a router on the way to its backend", |s| {
        of_masqueraded(s, KnownAddress::Stranger)
    });
    group.both::<W>("an answer quoted by its client", |s| of_answer(s, CLIENT.0));
    group.both::<W>("an answer quoted by a router on the way to its client", |s| {
        of_answer(s, KnownAddress::Stranger)
    });
    // Anybody can quote a packet of a flow that he knows of. He must not learn the backend or the
    // ports that replace the client's.
    group.both::<W>("quoted to somebody who has not sent it", |s| {
        let (first, node) = masqueraded(s)?;
        let inside = first.to(REMOTE);
        let answer = first.answer(TCP_SYN | TCP_ACK);
        let quoted = [
            &first,
            &inside,
            &inside.from(node),
            &answer,
            &answer.from(REMOTE),
            &answer.from(REMOTE).to(node),
        ];
        for packet in quoted {
            let error = W::error(KnownAddress::Stranger, KnownAddress::External, packet);
            for program in ["uplink_ingress", "uplink_egress"] {
                s.send_bytes(program, &error, Expect::Untouched)?;
            }
        }
        Ok(())
    });
    group.both::<W>("quoted, and of no flow", |s| {
        s.cluster_ip()?;
        let packet = s.packet(CLIENT, CLUSTER_IP, TCP_ACK);
        for program in PROGRAMS {
            s.send_bytes(program, &W::error(CLUSTER_IP.0, CLIENT.0, &packet), Expect::Untouched)?;
        }
        s.counted(&[])
    });
    // The bytes after the end of the error are no part of it, even where the quoted checksum would
    // be.
    group.both::<W>("quoted, with bytes behind the error", |s| {
        s.cluster_ip()?;
        let first = s.opens("workload_ingress", CLIENT, CLUSTER_IP, LOCAL)?;
        let inside = first.to(LOCAL);
        let behind = |error: Vec<u8>| [error, vec![0x55; 64]].concat();
        let wanted = behind(W::error(CLUSTER_IP.0, CLIENT.0, &first));
        s.send_bytes(
            "workload_egress",
            &behind(W::error(LOCAL.0, CLIENT.0, &inside)),
            Expect::BecomesBytes(wanted),
        )
    });
}

/// Sends the error through a program, and expects another one.
fn expect<W: Maps>(
    s: &mut Scene<W>,
    program: &str,
    (source, destination, quoted): (KnownAddress, KnownAddress, &Segment),
    expected: (KnownAddress, KnownAddress, &Segment),
) -> Result<()> {
    let wanted = W::error(expected.0, expected.1, expected.2);
    s.send_bytes(program, &W::error(source, destination, quoted), Expect::BecomesBytes(wanted))
}

/// Opens a flow of a client outside to a backend elsewhere. Returns its first packet, and the end
/// that replaces the client.
fn masqueraded<W: Maps>(s: &mut Scene<W>) -> Result<(Segment, Endpoint)> {
    s.node_port_elsewhere()?;
    let first = s.opens("uplink_ingress", CLIENT, NODE_PORT, REMOTE)?;
    s.world.run("uplink_egress", &first.to(REMOTE).bytes::<W>())?;
    let node = s.masqueraded(CLIENT)?;
    Ok((first, node))
}

fn of_masqueraded<W: Maps>(s: &mut Scene<W>, teller: KnownAddress) -> Result<()> {
    let (first, node) = masqueraded(s)?;
    let inside = first.to(REMOTE);
    let sent = inside.from(node);
    expect(s, "uplink_ingress", (teller, node.0, &sent), (teller, CLIENT.0, &inside))?;
    expect(s, "uplink_egress", (teller, CLIENT.0, &inside), (NODE_PORT.0, CLIENT.0, &first))
}

fn of_answer<W: Maps>(s: &mut Scene<W>, teller: KnownAddress) -> Result<()> {
    let (first, node) = masqueraded(s)?;
    let answer = first.answer(TCP_SYN | TCP_ACK);
    let inside = answer.from(REMOTE);
    let sent = inside.to(node);
    expect(s, "uplink_ingress", (teller, NODE_PORT.0, &answer), (teller, REMOTE.0, &inside))?;
    expect(s, "uplink_egress", (teller, REMOTE.0, &inside), (node.0, REMOTE.0, &sent))
}
