//! Who dials a service without endpoint learns it at once.

use anyhow::{Result, ensure};
use proxy_common::{
    layout::{LOG_LINES_PER_SECOND, PROTOCOL_TCP},
    packet::{TCP_ACK, TCP_RST},
    reason::Reason,
};

use super::{Group, Scene, scene::*};
use crate::{
    wire::{Extra, KnownAddress, Link, Segment},
    world::Tables,
};

pub(crate) fn cases<W: Tables + 'static>(group: &mut Group) {
    group.both::<W>("refused: no endpoint", |s| no_endpoint(s, "workload_ingress", |packet| packet));
    group.both::<W>("refused: no endpoint, device without Ethernet header", |s| {
        no_endpoint(s, "workload_ingress_l3", |packet| Segment { link: Link::Bare, ..packet })
    });
    group.both::<W>("refused: a packet with options", |s| {
        no_endpoint(s, "workload_ingress", |packet| Segment { extra: Extra::ManyOptions, ..packet })
    });
    group.both::<W>("refused: a packet with payload", |s| {
        no_endpoint(s, "workload_ingress", |packet| Segment { payload: vec![0xa5; 333], ..packet })
    });
    group.both::<W>("refused from outside: node port without endpoint", node_port);
    group.both::<W>("refused: the service is just being removed", service_gone);
    group.both::<W>("refused: logged when asked for, a bounded number in a second", logged);
    group.both::<W>("dropped: endpoints elsewhere only and policy Local", no_local_endpoint);
}

pub(crate) fn refused<W: Tables>(packet: &Segment) -> Vec<u8> {
    if packet.protocol != PROTOCOL_TCP {
        return W::unreachable(packet);
    }
    Segment {
        sequence: 0,
        // The payload of a SYN is not taken, as by a server that does not know TCP Fast Open.
        acknowledgement: packet.sequence + 1,
        window: 0,
        hop_limit: 64,
        back: true,
        ..packet.answer(TCP_RST | TCP_ACK)
    }
    .bytes::<W>()
}

fn expect_refused<W: Tables>(s: &mut Scene<W>, program: &str, packet: &Segment) -> Result<()> {
    s.send(program, packet, Expect::Answered(refused::<W>(packet)))?;
    ensure!(s.flow_counts()? == (0, 0));
    s.counted(&[(Reason::NoEndpoints, 1)])
}

/// `change` makes the packet of the first one of a connection.
fn no_endpoint<W: Tables>(s: &mut Scene<W>, program: &str, change: fn(Segment) -> Segment) -> Result<()> {
    s.service(1, &[])?;
    s.frontend(CLUSTER_IP, 1, 0)?;
    let packet = change(s.first(CLIENT, CLUSTER_IP));
    expect_refused(s, program, &packet)
}

fn logged<W: Tables>(s: &mut Scene<W>) -> Result<()> {
    const MORE_THAN_IN_TWO_SECONDS: usize = 2 * LOG_LINES_PER_SECOND as usize + 1;
    s.service(1, &[])?;
    s.frontend(CLUSTER_IP, 1, 0)?;
    let packet = s.first(CLIENT, CLUSTER_IP);
    s.send("workload_ingress", &packet, Expect::Answered(refused::<W>(&packet)))?;
    ensure!(s.world.logged()? == 0, "logged without being asked");
    s.world.switch_log(true)?;
    s.send("workload_ingress", &packet.to((KnownAddress::Stranger, 80)), Expect::Untouched)?;
    ensure!(s.world.logged()? == 0, "a packet that is not refused was logged");
    for _ in 0..MORE_THAN_IN_TWO_SECONDS {
        s.send("workload_ingress", &packet, Expect::Answered(refused::<W>(&packet)))?;
    }
    let lines = s.world.logged()?;
    ensure!((1..MORE_THAN_IN_TWO_SECONDS).contains(&lines), "{lines} lines");
    Ok(())
}

fn node_port<W: Tables>(s: &mut Scene<W>) -> Result<()> {
    s.service(1, &[])?;
    s.node_port(1)?;
    let packet = s.first(CLIENT, NODE_PORT);
    expect_refused(s, "uplink_ingress", &packet)
}

fn service_gone<W: Tables>(s: &mut Scene<W>) -> Result<()> {
    // Beyond the table: as good as none.
    s.frontend(CLUSTER_IP, 1_000, 0)?;
    let packet = s.first(CLIENT, CLUSTER_IP);
    s.send("workload_ingress", &packet, Expect::Answered(refused::<W>(&packet)))?;
    s.counted(&[(Reason::ServiceGone, 1)])
}

fn no_local_endpoint<W: Tables>(s: &mut Scene<W>) -> Result<()> {
    s.service_without_local_endpoint(1)?;
    s.frontend((KnownAddress::External, 80), 1, proxy_common::layout::FRONTEND_EXTERNAL)?;
    s.send("uplink_ingress", &s.first(CLIENT, (KnownAddress::External, 80)), Expect::Dropped)?;
    s.counted(&[(Reason::NoLocalEndpoints, 1)])
}
