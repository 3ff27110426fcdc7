//! Packets in fragments. The checksums of the expected fragments are those of the whole packet,
//! computed from scratch.

use anyhow::{Result, ensure};
use proxy_common::{
    flow::Stage,
    layout::FRONTEND_EXTERNAL,
    packet::{TCP_ACK, TCP_SYN},
    reason::Reason,
};

use super::{Group, Scene, scene::*};
use crate::{
    wire::{Cut, Extra, KnownAddress, Link, Segment},
    world::{FRAGMENTS, Maps, Verdict},
};

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.both::<W>("in fragments, there and back", |s| there_and_back(s, &[0, 1, 2, 3], |packet| packet));
    group.both::<W>("in fragments, the later ones in any order and twice", |s| {
        there_and_back(s, &[0, 3, 1, 3, 2], |packet| packet)
    });
    group.both::<W>("in fragments with options", |s| {
        there_and_back(s, &[0, 1, 2, 3], |packet| Segment { extra: Extra::Options, ..packet })
    });
    group.udp::<W>("in fragments, without checksum", |s| {
        there_and_back(s, &[0, 1, 2, 3], |packet| Segment { without_checksum: true, ..packet })
    });
    group.both::<W>("in fragments, device without Ethernet header", |s| {
        s.cluster_ip()?;
        let first = long(Segment { link: Link::Bare, ..s.first(CLIENT, CLUSTER_IP) });
        expect(s, "workload_ingress_l3", &first, &first.to(LOCAL), &[0, 1, 2, 3])
    });
    // In IPv6 this is an atomic fragment, which is a whole packet.
    group.both::<W>("in fragments, the first of which has all payload", |s| {
        s.cluster_ip()?;
        let first = s.first(CLIENT, CLUSTER_IP);
        expect(s, "workload_ingress", &first, &first.to(LOCAL), &[0])?;
        ensure!(W::fragment_map(&mut s.world.ebpf)?.keys().count() == 0);
        s.counted(&[(Reason::FlowOpened, 1)])
    });
    group.both::<W>("in fragments, masqueraded and back", |s| {
        s.node_port_elsewhere()?;
        let first = long(s.first(CLIENT, NODE_PORT));
        let inside = first.to(REMOTE);
        expect(s, "uplink_ingress", &first, &inside, &[0, 1, 2, 3])?;
        s.world.run("uplink_egress", &inside.fragments::<W>(CUT)[0])?;
        let node = s.masqueraded(CLIENT)?;
        let sent = inside.from(node);
        expect(s, "uplink_egress", &inside, &sent, &[0, 1, 2, 3])?;
        let answer = sent.answer(TCP_SYN | TCP_ACK);
        expect(s, "uplink_ingress", &answer, &answer.to(CLIENT), &[0, 1, 2, 3])?;
        let answer = answer.to(CLIENT);
        expect(s, "uplink_egress", &answer, &answer.from(NODE_PORT), &[0, 1, 2, 3])?;
        s.counted(&[(Reason::FlowOpened, 1)])
    });
    group.both::<W>("in fragments, counted for the service", |s| {
        s.cluster_ip()?;
        let first = long(s.first(CLIENT, CLUSTER_IP));
        expect(s, "workload_ingress", &first, &first.to(LOCAL), &[0, 1, 2, 3])?;
        s.counted_for_service(4, first.fragments::<W>(CUT).iter().map(Vec::len).sum())
    });
    group.both::<W>("in fragments, which keep no flow", |s| {
        s.cluster_ip()?;
        let first = long(s.first(CLIENT, CLUSTER_IP));
        expect(s, "workload_ingress", &first, &first.to(LOCAL), &[0])?;
        for (key, flow) in s.flows(Stage::Opening)? {
            W::remove_flow(&mut s.world.ebpf, Stage::Opening, key)?;
            ensure!(flow.last_seen > 0);
        }
        expect(s, "workload_ingress", &first, &first.to(LOCAL), &[1, 2, 3])?;
        ensure!(s.flow_counts()? == (0, 0), "entries {:?}", s.flow_counts()?);
        s.counted(&[(Reason::FlowOpened, 1)])
    });
    group.both::<W>("a later fragment before its first", |s| {
        s.cluster_ip()?;
        let first = long(s.first(CLIENT, CLUSTER_IP));
        expect(s, "workload_ingress", &first, &first, &[3, 2])?;
        s.counted(&[(Reason::Fragment, 2)])?;
        expect(s, "workload_ingress", &first, &first.to(LOCAL), &[0, 1, 2, 3])?;
        s.counted(&[(Reason::FlowOpened, 1), (Reason::Fragment, 2)])
    });
    group.both::<W>("a later fragment of a packet long ago", |s| {
        s.cluster_ip()?;
        let first = long(s.first(CLIENT, CLUSTER_IP));
        expect(s, "workload_ingress", &first, &first.to(LOCAL), &[0, 1])?;
        let mut map = W::fragment_map(&mut s.world.ebpf)?;
        let records = map.iter().collect::<Result<Vec<_>, _>>()?;
        ensure!(records.len() == 1, "{records:?}");
        for (key, mut record) in records {
            record.seen = record.seen.saturating_sub(31_000_000_000);
            map.insert(key, record, 0)?;
        }
        expect(s, "workload_ingress", &first, &first, &[2])?;
        s.counted(&[(Reason::FlowOpened, 1), (Reason::Fragment, 1)])
    });
    group.both::<W>("in fragments, nobody's", |s| {
        s.cluster_ip()?;
        let packet = long(s.first(CLIENT, (KnownAddress::Stranger, 80)));
        for program in PROGRAMS {
            expect(s, program, &packet, &packet, &[0, 1, 2, 3])?;
        }
        s.counted(&[])
    });
    group.both::<W>("in fragments, nobody's with the id of a packet that was translated", |s| {
        s.cluster_ip()?;
        let ours = long(s.first(CLIENT, CLUSTER_IP));
        expect(s, "workload_ingress", &ours, &ours.to(LOCAL), &[0, 1])?;
        let other = ours.to((CLUSTER_IP.0, CLUSTER_IP.1 + 1));
        expect(s, "workload_ingress", &other, &other, &[0, 1, 2, 3])?;
        s.counted(&[(Reason::FlowOpened, 1)])
    });
    group.both::<W>("in fragments, dropped", |s| {
        s.service_without_local_endpoint(1)?;
        s.frontend((KnownAddress::External, 80), 1, FRONTEND_EXTERNAL)?;
        let packet = long(s.first(CLIENT, (KnownAddress::External, 80)));
        for fragment in packet.fragments::<W>(CUT) {
            s.send_bytes("uplink_ingress", &fragment, Expect::Dropped)?;
        }
        s.counted(&[(Reason::NoLocalEndpoints, 1), (Reason::FragmentOfDropped, 3)])
    });
    // A TCP connection is refused by ICMP too, because a RST made of the fragment would be a
    // fragment itself.
    group.both::<W>("in fragments, refused by one answer", |s| {
        s.without_endpoints()?;
        let packet = long(s.first(CLIENT, CLUSTER_IP));
        let fragments = packet.fragments::<W>(CUT);
        // The error quotes all headers, and the first 8 bytes of the transport header.
        let quoted = &fragments[0][14..fragments[0].len() - CUT.piece + 8];
        let answer = s.world.run("workload_ingress", &fragments[0])?;
        ensure!(answer.verdict == Verdict::Redirected, "{:?}", answer.verdict);
        ensure!(answer.packet.ends_with(quoted), "{:02x?}", answer.packet);
        for fragment in &fragments[1..] {
            s.send_bytes("workload_ingress", fragment, Expect::Dropped)?;
        }
        s.counted(&[(Reason::NoEndpoints, 1), (Reason::FragmentOfDropped, 3)])
    });
    group.tcp::<W>("a first fragment without the whole transport header", |s| {
        s.cluster_ip()?;
        let packet = long(s.first(CLIENT, CLUSTER_IP));
        let fragments = packet.fragments::<W>(Cut { piece: 16, ..CUT });
        s.send_bytes("workload_ingress", &fragments[0], Expect::Untouched)?;
        s.send_bytes("workload_ingress", &fragments[1], Expect::Untouched)?;
        s.counted(&[(Reason::Malformed, 1), (Reason::Fragment, 1)])
    });
    group.both::<W>("more packets in fragments than the map holds", |s| {
        s.cluster_ip()?;
        let packets = 4 * FRAGMENTS as u16;
        let first = long(s.first(CLIENT, CLUSTER_IP));
        for id in 0..packets {
            let (before, after) =
                (first.fragments::<W>(Cut { id, ..CUT }), first.to(LOCAL).fragments::<W>(Cut { id, ..CUT }));
            for number in [0, 3] {
                s.send_bytes(
                    "workload_ingress",
                    &before[number],
                    Expect::BecomesBytes(after[number].clone()),
                )?;
            }
        }
        let records = W::fragment_map(&mut s.world.ebpf)?.keys().count();
        ensure!((1..=FRAGMENTS as usize).contains(&records), "{records} records");
        // The record of the first packet has been evicted.
        s.send_bytes("workload_ingress", &first.fragments::<W>(Cut { id: 0, ..CUT })[1], Expect::Untouched)?;
        s.counted(&[(Reason::FlowOpened, 1), (Reason::Fragment, 1)])
    });
    group.host::<W>("of the node itself in fragments and back", |s| {
        s.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
        s.service(1, &[(12, REMOTE, false)])?;
        s.frontend(CLUSTER_IP, 1, 0)?;
        let first = long(s.first(PROCESS, CLUSTER_IP));
        s.world.run("uplink_egress", &first.fragments::<W>(CUT)[0])?;
        let alias = (PROCESS.0, s.flow_of(Stage::Opening, PROCESS)?.alias_port().number());
        let inside = first.to(REMOTE).from(alias);
        expect(s, "uplink_egress", &first, &inside, &[0, 1, 2, 3])?;
        let answer = inside.answer(TCP_SYN | TCP_ACK);
        expect(s, "uplink_ingress", &answer, &answer.from(CLUSTER_IP).to(PROCESS), &[0, 1, 2, 3])?;
        s.counted(&[(Reason::FlowOpened, 1)])
    });
}

const CUT: Cut = Cut { id: 0x4711, piece: 512 };

/// Gives the packet a payload that takes four fragments, the last of which is shorter.
fn long(packet: Segment) -> Segment {
    let payload = (0..1_700u32).map(|n| (n.wrapping_mul(n) >> 3) as u8).collect();
    Segment { payload, ..packet }
}

/// Sends the fragments with these numbers in this order. Each must become the fragment of `becomes`
/// with its number.
fn expect<W: Maps>(
    s: &mut Scene<W>,
    program: &str,
    packet: &Segment,
    becomes: &Segment,
    order: &[usize],
) -> Result<()> {
    let (before, after) = (packet.fragments::<W>(CUT), becomes.fragments::<W>(CUT));
    for number in order {
        s.send_bytes(program, &before[*number], Expect::BecomesBytes(after[*number].clone()))?;
    }
    Ok(())
}

fn there_and_back<W: Maps>(s: &mut Scene<W>, order: &[usize], change: fn(Segment) -> Segment) -> Result<()> {
    s.cluster_ip()?;
    let first = change(long(s.first(CLIENT, CLUSTER_IP)));
    let inside = first.to(LOCAL);
    let answer = inside.answer(TCP_SYN | TCP_ACK);
    expect(s, "workload_ingress", &first, &inside, order)?;
    expect(s, "workload_egress", &inside, &inside, order)?;
    expect(s, "workload_ingress", &answer, &answer, order)?;
    expect(s, "workload_egress", &answer, &answer.from(CLUSTER_IP), order)?;
    s.counted(&[(Reason::FlowOpened, 1)])
}
