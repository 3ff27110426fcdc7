//! Clients that are let in by the source ranges of a Service's load-balancer addresses.

use anyhow::{Result, ensure};
use proxy_common::{layout::*, packet::TCP_ACK, reason::Reason};

use crate::{
    cases::{Group, Scene, scene::*},
    wire::{Endpoint, KnownAddress},
    world::Maps,
};

const SERVICE: u32 = 1;
/// Address that has source ranges.
const LOAD_BALANCER: Endpoint = CLUSTER_IP;

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.both::<W>("a client in a source range is served", |s| served(s, 0));
    group.both::<W>("a client in a source range of some bits is served", |s| served(s, 7));
    group.both::<W>("a client in a source range that all are in is served", |s| served(s, W::Address::BITS));
    group.both::<W>("a client in no source range is dropped", |s| {
        serve(s)?;
        allow(s, SERVICE, KnownAddress::Node, 0)?;
        expect_dropped(s)
    });
    group.both::<W>("source ranges of another service let nobody in", |s| {
        serve(s)?;
        allow(s, SERVICE + 1, KnownAddress::Client, W::Address::BITS)?;
        expect_dropped(s)
    });
    group.both::<W>("source ranges close no node port", |s| {
        serve(s)?;
        s.node_port(SERVICE)?;
        s.opens("uplink_ingress", CLIENT, NODE_PORT, LOCAL).map(drop)
    });
    group.both::<W>("source ranges end no flow", |s| {
        serve(s)?;
        allow(s, SERVICE, KnownAddress::Client, 0)?;
        s.opens("uplink_ingress", CLIENT, LOAD_BALANCER, LOCAL)?;
        W::clear_source_ranges(&mut s.world.ebpf)?;
        let next = s.packet(CLIENT, LOAD_BALANCER, TCP_ACK);
        s.send("uplink_ingress", &next, Expect::Becomes(&next.to(LOCAL)))?;
        let other = s.first((CLIENT.0, CLIENT.1 + 1), LOAD_BALANCER);
        s.send("uplink_ingress", &other, Expect::Dropped)
    });
    group.host::<W>("the node is served where it is in a source range", |s| {
        serve(s)?;
        let first = s.first((KnownAddress::Node, 1_024), LOAD_BALANCER);
        s.send("uplink_egress", &first, Expect::Dropped)?;
        allow(s, SERVICE, KnownAddress::Node, 0)?;
        s.world.run("uplink_egress", &first.bytes::<W>())?;
        s.counted(&[(Reason::SourceNotAllowed, 1), (Reason::FlowOpened, 1)])
    });
}

fn serve<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    s.service(SERVICE, &[(11, LOCAL, true)])?;
    s.frontend(LOAD_BALANCER, SERVICE, FRONTEND_EXTERNAL | FRONTEND_SOURCE_RANGES)
}

/// Allows a source range that contains `address`. Its prefix is `without` bits shorter than the
/// whole address.
fn allow<W: Maps>(s: &mut Scene<W>, service: u32, address: KnownAddress, without: u32) -> Result<()> {
    W::put_source_range(&mut s.world.ebpf, service, W::address(address), W::Address::BITS - without)
}

fn served<W: Maps>(s: &mut Scene<W>, without: u32) -> Result<()> {
    serve(s)?;
    allow(s, SERVICE, KnownAddress::Client, without)?;
    for (program, port) in [("workload_ingress", 1_024), ("uplink_ingress", 1_025)] {
        s.opens(program, (KnownAddress::Client, port), LOAD_BALANCER, LOCAL)?;
    }
    s.counted(&[(Reason::FlowOpened, 2)])
}

fn expect_dropped<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    for program in ["workload_ingress", "uplink_ingress"] {
        let first = s.first(CLIENT, LOAD_BALANCER);
        s.send(program, &first, Expect::Dropped)?;
    }
    ensure!(s.flow_counts()? == (0, 0), "there is a flow");
    s.counted(&[(Reason::SourceNotAllowed, 2)])
}
