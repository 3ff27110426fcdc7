//! Packets to unknown ports of ClusterIPs, packets to addresses that no service has, and pings.

use std::net::UdpSocket;

use anyhow::ensure;
use lab::namespace::ip;
use proxy_common::{
    layout::PROTOCOL_TCP,
    packet::{TCP_ACK, TCP_RST},
    reason::Reason,
};

use super::refusals::refused;
use crate::{
    cases::{
        Group, WorldKind,
        forwarding::forward::{Uplink, address},
        scene::*,
    },
    wire::{Cut, Endpoint, KnownAddress, Link, Segment},
    world::Maps,
};

const OTHER_PORT: Endpoint = (CLUSTER_IP.0, 81);
/// Length of a prefix that covers all [`KnownAddress`]es.
const BITS: u32 = 24;
/// Payload length of a ping for which the kernel needs more than one piece of memory.
const LONG: usize = 1_400;

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.both::<W>("another port of a ClusterIP is refused", |s| {
        s.cluster_ip()?;
        let first = s.first(CLIENT, OTHER_PORT);
        s.send("workload_ingress", &first, Expect::Untouched)?;
        s.cluster_ip_entry(CLUSTER_IP.0)?;
        for program in ["workload_ingress", "uplink_ingress"] {
            s.send(program, &first, Expect::Answered(refused::<W>(&first)))?;
        }
        let bare = Segment { link: Link::Bare, ..first.clone() };
        s.send("workload_ingress_l3", &bare, Expect::Answered(refused::<W>(&bare)))?;
        s.counted(&[(Reason::UnknownPort, 3)])?;
        ensure!(s.flow_counts()? == (0, 0));
        if s.protocol == PROTOCOL_TCP {
            // The segment may belong to a connection that netfilter translates.
            for flags in [TCP_ACK, TCP_ACK | TCP_RST, TCP_RST] {
                s.send("workload_ingress", &first.flags(flags), Expect::Untouched)?;
            }
        }
        let served = s.opens("workload_ingress", CLIENT, CLUSTER_IP, LOCAL)?;
        let elsewhere = served.to((KnownAddress::OtherClusterIp, 81));
        s.send("workload_ingress", &elsewhere, Expect::Untouched)?;
        // Port 0 is as unknown as any other.
        let none = served.to((CLUSTER_IP.0, 0));
        s.send("workload_ingress", &none, Expect::Answered(refused::<W>(&none)))?;
        s.counted(&[(Reason::UnknownPort, 4), (Reason::FlowOpened, 1)])
    });
    group.udp::<W>("another port of a ClusterIP: a datagram in fragments is refused", |s| {
        s.cluster_ip_entry(CLUSTER_IP.0)?;
        let long = Segment { payload: vec![0xa5; 100], ..s.first(CLIENT, OTHER_PORT) };
        let fragments = long.fragments::<W>(Cut { id: 9, piece: 64 });
        let verdict = s.world.run("workload_ingress", &fragments[0])?.verdict;
        ensure!(verdict == crate::world::Verdict::Redirected, "{verdict:?}");
        s.send_bytes("workload_ingress", &fragments[1], Expect::Dropped)?;
        s.counted(&[(Reason::UnknownPort, 1), (Reason::FragmentOfDropped, 1)])
    });
    group.udp::<W>("another port of a ClusterIP: a socket of the node has it as its source", |s| {
        s.cluster_ip_entry(CLUSTER_IP.0)?;
        let uplink = Uplink::new::<W>(s.world)?;
        let (own, peer) = (address::<W>(CLUSTER_IP.0), address::<W>(LOCAL.0));
        ip(None, &format!("addr add {own} dev {} nodad\n", uplink.device))?;
        let socket = UdpSocket::bind((own, 0))?;
        let answer = s.first(LOCAL, (CLUSTER_IP.0, socket.local_addr()?.port()));
        s.send("workload_ingress", &answer, Expect::Answered(refused::<W>(&answer)))?;
        socket.connect((peer, LOCAL.1))?;
        s.send("workload_ingress", &answer, Expect::Untouched)?;
        let stranger = answer.from((LOCAL.0, LOCAL.1 + 1));
        s.send("workload_ingress", &stranger, Expect::Answered(refused::<W>(&stranger)))?;
        s.counted(&[(Reason::UnknownPort, 2)])
    });
    group.both::<W>("another port of a ClusterIP that the node has itself", |s| {
        s.cluster_ip_entry(CLUSTER_IP.0)?;
        W::put_node_address(&mut s.world.ebpf, W::address(CLUSTER_IP.0), 0)?;
        s.send("uplink_ingress", &s.first(CLIENT, OTHER_PORT), Expect::Untouched)?;
        s.counted(&[])
    });
    // The hook at `connect()` lets datagram sockets pass, so their datagrams are refused here.
    group.both::<W>("another port of a ClusterIP, of the node's sockets", |s| {
        s.cluster_ip_entry(CLUSTER_IP.0)?;
        let first = s.first(PROCESS, OTHER_PORT);
        let output = s.world.leaves("uplink_egress", &first.bytes::<W>())?;
        ensure!(output.packet == first.bytes::<W>(), "what is forwarded has met another hook");
        if s.protocol == PROTOCOL_TCP {
            s.send("uplink_egress", &first, Expect::Untouched)?;
            return s.counted(&[]);
        }
        s.send("uplink_egress", &first, Expect::Answered(refused::<W>(&first)))?;
        s.counted(&[(Reason::UnknownPort, 1)])
    });
    group.host::<W>("another port of a ClusterIP, of the node itself, is refused", |s| {
        s.cluster_ip()?;
        s.cluster_ip_entry(CLUSTER_IP.0)?;
        let first = s.first(PROCESS, OTHER_PORT);
        s.send("uplink_egress", &first, Expect::Answered(refused::<W>(&first)))?;
        s.counted(&[(Reason::UnknownPort, 1)])
    });
    for (protocol, world) in
        [(PROTOCOL_TCP, WorldKind::Resetting), (crate::cases::PROTOCOL_UDP, WorldKind::Resetting)]
    {
        group.add::<W>("an address that no service has is dropped", protocol, world, |s| {
            let first = s.first(CLIENT, OTHER_PORT);
            s.send("workload_ingress", &first, Expect::Untouched)?;
            W::put_service_cidr(&mut s.world.ebpf, W::address(CLUSTER_IP.0), BITS)?;
            s.send("workload_ingress", &first, Expect::Dropped)?;
            s.send("uplink_ingress", &first, Expect::Dropped)?;
            s.counted(&[(Reason::UnallocatedAddress, 2)])?;
            if s.protocol == PROTOCOL_TCP {
                s.send("workload_ingress", &first.flags(TCP_ACK), Expect::Untouched)?;
            }
            W::put_node_address(&mut s.world.ebpf, W::address(KnownAddress::Node), 0)?;
            s.send("workload_ingress", &first.to((KnownAddress::Node, 81)), Expect::Untouched)?;
            s.cluster_ip_entry(CLUSTER_IP.0)?;
            s.send("workload_ingress", &first, Expect::Answered(refused::<W>(&first)))?;
            s.cluster_ip()?;
            s.opens("workload_ingress", CLIENT, CLUSTER_IP, LOCAL)?;
            s.counted(&[(Reason::UnallocatedAddress, 2), (Reason::UnknownPort, 1), (Reason::FlowOpened, 1)])
        });
    }
    group.both::<W>("an address that no service has passes", |s| {
        W::put_service_cidr(&mut s.world.ebpf, W::address(CLUSTER_IP.0), BITS)?;
        s.send("workload_ingress", &s.first(CLIENT, OTHER_PORT), Expect::Untouched)?;
        s.counted(&[])
    });
    group.resetting::<W>("pings of a ClusterIP are answered", |s| {
        s.cluster_ip_entry(CLUSTER_IP.0)?;
        let mut count = 0;
        for length in [0, 1, 56, LONG] {
            let request = message(CLIENT, CLUSTER_IP, length);
            for program in ["workload_ingress", "uplink_ingress"] {
                s.send_bytes(program, &W::echo(&request, false), Expect::Answered(answer::<W>(&request)))?;
            }
            count += 2;
        }
        let bare = Segment { link: Link::Bare, ..message(CLIENT, CLUSTER_IP, 56) };
        s.send_bytes("workload_ingress_l3", &W::echo(&bare, false), Expect::Answered(answer::<W>(&bare)))?;
        count += 1;
        s.counted(&[(Reason::PingAnswered, count)])
    });
    group.resetting::<W>("pings of a ClusterIP, of the node itself", |s| {
        s.cluster_ip_entry(CLUSTER_IP.0)?;
        let request = message(PROCESS, CLUSTER_IP, 56);
        let bytes = W::echo(&request, false);
        s.send_bytes("uplink_egress", &bytes, Expect::Answered(answer::<W>(&request)))?;
        s.send_bytes("workload_egress", &bytes, Expect::Untouched)?;
        let output = s.world.leaves("uplink_egress", &bytes)?;
        ensure!(output.packet == bytes, "what is forwarded has met another hook");
        s.counted(&[(Reason::PingAnswered, 1)])
    });
    group.resetting::<W>("pings that are not answered", |s| {
        s.cluster_ip_entry(CLUSTER_IP.0)?;
        let request = message(CLIENT, CLUSTER_IP, 56);
        let elsewhere = ping::<W>(CLIENT, (KnownAddress::Stranger, 0), 56);
        s.send_bytes("workload_ingress", &elsewhere, Expect::Untouched)?;
        s.send_bytes("workload_ingress", &W::echo(&request, true), Expect::Untouched)?;
        // The protocol is not ICMP, although the bytes look like an echo request.
        let strange = W::packet(&request, 200, &[8, 0, 0, 0, 0, 0, 0, 0]);
        s.send_bytes("workload_ingress", &strange, Expect::Untouched)?;
        W::put_node_address(&mut s.world.ebpf, W::address(CLUSTER_IP.0), 0)?;
        s.send_bytes("workload_ingress", &W::echo(&request, false), Expect::Untouched)?;
        s.counted(&[])
    });
    group.tcp::<W>("pings of a ClusterIP are left alone", |s| {
        s.cluster_ip_entry(CLUSTER_IP.0)?;
        s.send_bytes("workload_ingress", &ping::<W>(CLIENT, CLUSTER_IP, 56), Expect::Untouched)?;
        s.counted(&[])
    });
}

fn message(source: Endpoint, destination: Endpoint, length: usize) -> Segment {
    let payload = (0..length).map(|byte| byte as u8).collect();
    Segment { payload, ..crate::wire::udp(source, destination) }
}

fn ping<W: Maps>(source: Endpoint, destination: Endpoint, length: usize) -> Vec<u8> {
    W::echo(&message(source, destination, length), false)
}

fn answer<W: Maps>(request: &Segment) -> Vec<u8> {
    let (source, destination) = (request.destination, request.source);
    W::echo(&Segment { source, destination, hop_limit: 64, back: true, ..request.clone() }, true)
}
