//! A client that dials a service without endpoints learns so at once.

use std::time::Instant;

use anyhow::{Result, bail, ensure};
use proxy_common::{
    layout::{ICMP_ERRORS_PER_SECOND, LOG_LINES_PER_SECOND, PROTOCOL_TCP, RESETS_PER_SECOND},
    packet::{TCP_ACK, TCP_RST},
    reason::Reason,
};

use crate::{
    cases::{BOTH, Group, Scene, WorldKind, scene::*},
    wire::{Extra, KnownAddress, Link, Segment},
    world::{Maps, Verdict},
};

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.both::<W>("refused: no endpoint", |s| no_endpoint(s, "workload_ingress", |packet| packet));
    group.both::<W>("refused: no endpoint, device without Ethernet header", |s| {
        no_endpoint(s, "workload_ingress_l3", |packet| Segment { link: Link::Bare, ..packet })
    });
    group.both::<W>("refused: a packet with options", |s| {
        no_endpoint(s, "workload_ingress", |packet| Segment { extra: Extra::ManyOptions, ..packet })
    });
    for (name, length) in [
        ("refused: a packet with payload", 334),
        ("refused: a packet with a payload of odd length", 333),
        ("refused: a packet with a byte of payload", 1),
        ("refused: a packet as long as a device takes", 1_400),
    ] {
        for protocol in BOTH {
            group.add::<W>(name, protocol, WorldKind::Usual, move |s| {
                s.without_endpoints()?;
                let packet = Segment { payload: vec![0xa5; length], ..s.first(CLIENT, CLUSTER_IP) };
                expect_refused(s, "workload_ingress", &packet)
            });
        }
    }
    group.both::<W>("refused from outside: node port without endpoint", |s| {
        s.service(1, &[])?;
        s.node_port(1)?;
        let packet = s.first(CLIENT, NODE_PORT);
        expect_refused(s, "uplink_ingress", &packet)
    });
    group.udp::<W>("refused: a flood, a bounded number in a second", |s| {
        let start = Instant::now();
        let (answered, dropped) = refused_in_flood(s, 20_000)?;
        // Each CPU counts for itself, and a new second may begin with the first packet.
        let cpus = std::thread::available_parallelism()?.get() as u64;
        let most = ICMP_ERRORS_PER_SECOND * cpus * (start.elapsed().as_secs() + 2);
        ensure!(answered > 0 && answered <= most, "{answered} answers, at most {most}");
        s.counted(&[(Reason::NoEndpoints, 20_000), (Reason::RefusalsLimited, dropped)])
    });
    group.tcp::<W>("refused: many SYNs, each", |s| {
        let (answered, dropped) = refused_in_flood(s, 3_000)?;
        ensure!((answered, dropped) == (3_000, 0));
        Ok(())
    });
    group.tcp::<W>("refused: a flood of SYNs, a bounded number in a second", |s| {
        let sent = 3 * RESETS_PER_SECOND;
        let (answered, dropped) = refused_in_flood(s, sent)?;
        // A new second may begin meanwhile.
        ensure!(answered >= RESETS_PER_SECOND && dropped > 0, "{answered} answered, {dropped} dropped");
        s.counted(&[(Reason::NoEndpoints, sent), (Reason::RefusalsLimited, dropped)])
    });
    group.both::<W>("refused: the service is just being removed", |s| {
        // The service's number is beyond the end of the map, so it has no entry.
        s.frontend(CLUSTER_IP, 1_000, 0)?;
        let packet = s.first(CLIENT, CLUSTER_IP);
        s.send("workload_ingress", &packet, Expect::Answered(refused::<W>(&packet)))?;
        s.counted(&[(Reason::ServiceGone, 1)])
    });
    group.both::<W>("refused: logged when asked for, a bounded number in a second", |s| {
        s.without_endpoints()?;
        let packet = s.first(CLIENT, CLUSTER_IP);
        s.send("workload_ingress", &packet, Expect::Answered(refused::<W>(&packet)))?;
        ensure!(s.world.logged()? == 0, "logged without being asked");
        s.world.switch_log(true)?;
        s.send("workload_ingress", &packet.to((KnownAddress::Stranger, 80)), Expect::Untouched)?;
        ensure!(s.world.logged()? == 0, "a packet that is not refused was logged");
        let (start, mut refusals) = (Instant::now(), 0);
        // A new second may begin with the first packet and with the last one.
        let most = || LOG_LINES_PER_SECOND as usize * (start.elapsed().as_secs() as usize + 2);
        while refusals <= most() {
            s.send("workload_ingress", &packet, Expect::Answered(refused::<W>(&packet)))?;
            refusals += 1;
        }
        let lines = s.world.logged()?;
        ensure!((1..refusals).contains(&lines), "{lines} lines of {refusals} refusals");
        Ok(())
    });
    group.both::<W>("dropped: endpoints elsewhere only and policy Local", |s| {
        s.service_without_local_endpoint(1)?;
        s.frontend((KnownAddress::External, 80), 1, proxy_common::layout::FRONTEND_EXTERNAL)?;
        s.send("uplink_ingress", &s.first(CLIENT, (KnownAddress::External, 80)), Expect::Dropped)?;
        s.counted(&[(Reason::NoLocalEndpoints, 1)])
    });
}

pub(crate) fn refused<W: Maps>(packet: &Segment) -> Vec<u8> {
    if packet.protocol != PROTOCOL_TCP {
        return W::unreachable(packet);
    }
    Segment {
        sequence: 0,
        // The RST does not acknowledge the SYN's payload, like a server that does not know TCP Fast
        // Open.
        acknowledgement: packet.sequence + 1,
        window: 0,
        hop_limit: 64,
        back: true,
        // A payload would come from the attacker, and go to an address that the attacker has
        // forged.
        payload: Vec::new(),
        ..packet.answer(TCP_RST | TCP_ACK)
    }
    .bytes::<W>()
}

fn expect_refused<W: Maps>(s: &mut Scene<W>, program: &str, packet: &Segment) -> Result<()> {
    s.send(program, packet, Expect::Answered(refused::<W>(packet)))?;
    ensure!(s.flow_counts()? == (0, 0));
    s.counted(&[(Reason::NoEndpoints, 1)])
}

/// Returns how many of the packets were answered, and how many were dropped.
fn refused_in_flood<W: Maps>(s: &mut Scene<W>, packets: u64) -> Result<(u64, u64)> {
    s.without_endpoints()?;
    let (mut answered, mut dropped) = (0, 0);
    let packet = s.first(CLIENT, CLUSTER_IP).bytes::<W>();
    for _ in 0..packets {
        match s.world.run("workload_ingress", &packet)?.verdict {
            Verdict::Redirected => answered += 1,
            Verdict::Dropped => dropped += 1,
            other @ (Verdict::GoesOn | Verdict::SentBack) => bail!("{other:?}"),
        }
    }
    Ok((answered, dropped))
}

/// Sends the first packet of a connection after `change`, and expects it to be refused.
fn no_endpoint<W: Maps>(s: &mut Scene<W>, program: &str, change: fn(Segment) -> Segment) -> Result<()> {
    s.without_endpoints()?;
    let packet = change(s.first(CLIENT, CLUSTER_IP));
    expect_refused(s, program, &packet)
}
