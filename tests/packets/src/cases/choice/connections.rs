//! Least connection: new flows go to the backend that has fewer connections.

use anyhow::{Result, ensure};
use proxy_common::{
    flow::Stage,
    layout::*,
    packet::{TCP_ACK, TCP_RST, TCP_SYN},
};

use super::affinity::{BOTH, met};
use crate::{
    cases::{Group, Scene, flows::close_from, scene::*},
    wire::{Endpoint, KnownAddress},
    world::Maps,
};

const SERVICE: u32 = 1;
const HERE: u32 = BOTH[0].0;
const ELSEWHERE: u32 = BOTH[1].0;
/// Client ports of new flows. If backends were chosen at random, these flows would not all get the
/// same one.
const PORTS: std::ops::Range<u16> = 1_024..1_084;

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.both::<W>("by least connection goes where fewer are, by either role of interface", |s| {
        serve(s, FRONTEND_LEAST_CONNECTION)?;
        for (here, elsewhere) in [(7, 6), (1, 0), (0, 1), (1_000, 1_001)] {
            s.world.set_connections(HERE, here)?;
            s.world.set_connections(ELSEWHERE, elsewhere)?;
            let fewer = if here < elsewhere { HERE } else { ELSEWHERE };
            all_go_to(s, "workload_ingress", PORTS, fewer)?;
            all_go_to(s, "uplink_ingress", PORTS.start + 1_000..PORTS.end + 1_000, fewer)?;
            forget_flows(s)?;
        }
        Ok(())
    });
    group.both::<W>("by least connection heeds what the controller has collected", |s| {
        serve(s, FRONTEND_LEAST_CONNECTION)?;
        s.world.set_connections(HERE, 7)?;
        s.world.set_connections(ELSEWHERE, 5)?;
        s.world.collect_connections(HERE, 3)?;
        all_go_to(s, "workload_ingress", PORTS, HERE)
    });
    group.both::<W>("by least connection goes to both where these have as many", |s| {
        serve(s, FRONTEND_LEAST_CONNECTION)?;
        let met = met(s, "workload_ingress", CLUSTER_IP, PORTS)?;
        ensure!(met.contains(&HERE) && met.contains(&ELSEWHERE), "went to {met:?}");
        ensure!(
            s.world.connections()?.is_empty(),
            "what only opens is no connection: {:?}",
            s.world.connections()?
        );
        Ok(())
    });
    group.both::<W>("is counted once it is established, until it ends", |s| {
        serve(s, FRONTEND_LEAST_CONNECTION)?;
        s.world.set_connections(ELSEWHERE, 100)?;
        let client = |number: u16| (KnownAddress::Client, 5_000 + number);
        for number in 1..=3 {
            establish(s, client(number))?;
            counted(s, (number.into(), 0))?;
        }
        // Further packets of a connection do not count it again.
        sends(s, client(2), TCP_ACK)?;
        answered(s, client(2), TCP_ACK)?;
        counted(s, (3, 0))?;
        if s.protocol == PROTOCOL_TCP {
            close_from(s, client(1))?;
            counted(s, (3, 1))?;
            sends(s, client(2), TCP_RST)?;
            counted(s, (3, 2))?;
            // The last segments are sent again.
            sends(s, client(2), TCP_RST)?;
            counted(s, (3, 2))?;
        }
        Ok(())
    });
    group.both::<W>("is counted again when its entry was lost and is restored", |s| {
        serve(s, FRONTEND_LEAST_CONNECTION)?;
        s.world.set_connections(ELSEWHERE, 100)?;
        establish(s, CLIENT)?;
        let key = s.flow_of(Stage::Established, CLIENT)?.client_key();
        W::remove_flow(&mut s.world.ebpf, Stage::Established, key)?;
        for stage in [Stage::Opening, Stage::Established] {
            for (key, mut flow) in s.flows(stage)? {
                flow.last_seen = 1;
                W::put_flow(&mut s.world.ebpf, stage, key, flow)?;
            }
        }
        answered(s, CLIENT, TCP_ACK)?;
        s.flow_of(Stage::Established, CLIENT)?;
        counted(s, (2, 0))
    });
    group.both::<W>("is counted, or not, as its service port was when it began", |s| {
        serve(s, 0)?;
        let (before, after) = ((KnownAddress::Client, 5_001), (KnownAddress::Client, 5_002));
        to_here_alone(s)?;
        establish(s, before)?;
        ensure!(s.world.connections()?.is_empty());
        s.frontend(CLUSTER_IP, SERVICE, FRONTEND_LEAST_CONNECTION)?;
        establish(s, after)?;
        counted(s, (1, 0))?;
        s.frontend(CLUSTER_IP, SERVICE, 0)?;
        if s.protocol == PROTOCOL_TCP {
            close_from(s, before)?;
            counted(s, (1, 0))?;
            close_from(s, after)?;
            counted(s, (1, 1))?;
        }
        Ok(())
    });
    group.udp::<W>("is over when it is replaced", |s| {
        serve(s, FRONTEND_LEAST_CONNECTION)?;
        s.world.set_connections(ELSEWHERE, 100)?;
        establish(s, CLIENT)?;
        W::remove_backend(&mut s.world.ebpf, HERE)?;
        let set = s.set(&BOTH[1..])?;
        publish(s, set)?;
        s.world.raise_epoch()?;
        let again = s.first(CLIENT, CLUSTER_IP);
        s.send("workload_ingress", &again, Expect::Becomes(&again.to(REMOTE)))?;
        counted(s, (1, 1))
    });
}

/// Makes both backends serve `CLUSTER_IP`.
pub(crate) fn serve<W: Maps>(s: &mut Scene<W>, flags: u32) -> Result<()> {
    s.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
    let set = s.set(&BOTH)?;
    publish(s, set)?;
    s.frontend(CLUSTER_IP, SERVICE, flags)
}

fn to_here_alone<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    let set = s.set(&BOTH[..1])?;
    publish(s, set)
}

fn publish<W: Maps>(s: &mut Scene<W>, set: EndpointSet) -> Result<()> {
    let flags = SERVICE_HAS_ENDPOINTS;
    let service = Service { cluster: set, internal: set, external: set, flags, affinity_seconds: 0 };
    s.world.set_service(SERVICE, service)
}

fn all_go_to<W: Maps>(
    s: &mut Scene<W>,
    program: &str,
    ports: std::ops::Range<u16>,
    backend: u32,
) -> Result<()> {
    let met = met(s, program, CLUSTER_IP, ports)?;
    ensure!(met.iter().all(|one| *one == backend), "{program}: went to {met:?}, expected {backend}");
    Ok(())
}

fn forget_flows<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    for (key, _) in s.flows(Stage::Opening)? {
        W::remove_flow(&mut s.world.ebpf, Stage::Opening, key)?;
    }
    Ok(())
}

/// Expects this many flows of this node's backend to be opened and closed.
fn counted<W: Maps>(s: &mut Scene<W>, expected: (u64, u64)) -> Result<()> {
    let counted = s.world.connections()?.get(&HERE).copied();
    ensure!(counted == Some(expected), "counted {counted:?}, expected {expected:?}");
    Ok(())
}

fn sends<W: Maps>(s: &mut Scene<W>, client: Endpoint, flags: u8) -> Result<()> {
    let packet = s.packet(client, CLUSTER_IP, flags);
    s.send("workload_ingress", &packet, Expect::Becomes(&packet.to(LOCAL)))
}

fn answered<W: Maps>(s: &mut Scene<W>, client: Endpoint, flags: u8) -> Result<()> {
    let answer = s.answer(LOCAL, client, flags);
    s.send("workload_egress", &answer, Expect::Becomes(&answer.from(CLUSTER_IP)))
}

/// Sends the first packets of a connection to this node's backend, until its flow is established.
fn establish<W: Maps>(s: &mut Scene<W>, client: Endpoint) -> Result<()> {
    s.opens("workload_ingress", client, CLUSTER_IP, LOCAL)?;
    answered(s, client, TCP_SYN | TCP_ACK)?;
    if s.protocol == PROTOCOL_UDP {
        // A flow of datagrams is established once both sides have sent for some seconds.
        s.age(Stage::Opening)?;
        answered(s, client, 0)?;
    }
    sends(s, client, TCP_ACK)?;
    s.flow_of(Stage::Established, client).map(drop)
}
