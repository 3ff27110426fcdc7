//! Choice of a backend from an endpoint set with a lookup table.

use anyhow::{Result, ensure};
use proxy_common::{balance, layout::*, port::Port};

use super::affinity::{BOTH, met};
use crate::{
    cases::{Group, Scene, scene::*},
    wire::KnownAddress,
    world::Maps,
};

const SERVICE: u32 = 1;
/// Lookup table with indices of two backends. Two thirds lead to the second one.
pub(crate) const TABLE: [usize; 16] = [1, 0, 1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1];
const PORTS: std::ops::Range<u16> = 1_024..1_084;

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.both::<W>("with Maglev goes where its hash says, by either role of interface", |s| {
        for program in ["workload_ingress", "uplink_ingress"] {
            serve(s, &TABLE, FRONTEND_MAGLEV, 0)?;
            let (first, last) = if program == "workload_ingress" { (1_024, 1_084) } else { (2_024, 2_084) };
            let expected: Vec<u32> = (first..last).map(|port| expected(s, port)).collect();
            ensure!(expected.contains(&BOTH[0].0) && expected.contains(&BOTH[1].0), "{expected:?}");
            let met = met(s, program, CLUSTER_IP, first..last)?;
            ensure!(met == expected, "{program}: went to {met:?}, expected {expected:?}");
        }
        Ok(())
    });
    // On another node, the backends have other ids, and their slots lie elsewhere.
    group.both::<W>("with Maglev goes to the same backend on another node", |s| {
        serve(s, &TABLE, FRONTEND_MAGLEV, 0)?;
        let here = met(s, "uplink_ingress", CLUSTER_IP, PORTS)?;
        for stage in [proxy_common::flow::Stage::Opening, proxy_common::flow::Stage::Established] {
            for (key, _) in s.flows(stage)? {
                W::remove_flow(&mut s.world.ebpf, stage, key)?;
            }
        }
        let others = BOTH.map(|(id, endpoint, local)| (id + 100, endpoint, local));
        s.set(&others)?;
        let set = s.set_with_table(&others, &TABLE)?;
        publish(s, set, 0)?;
        let there = met(s, "uplink_ingress", CLUSTER_IP, PORTS)?;
        ensure!(here == there, "went to {here:?}, there to {there:?}");
        Ok(())
    });
    group.both::<W>("with Maglev and affinity goes by the client alone", |s| {
        serve(s, &TABLE, FRONTEND_MAGLEV | FRONTEND_AFFINITY, 60)?;
        let met = met(s, "workload_ingress", CLUSTER_IP, PORTS)?;
        let expected = expected(s, 0);
        ensure!(met.iter().all(|backend| *backend == expected), "went to {met:?}, expected {expected}");
        Ok(())
    });
    group.both::<W>("at random draws from the lookup table", |s| {
        serve(s, &[1; 16], 0, 0)?;
        let met = met(s, "workload_ingress", CLUSTER_IP, PORTS)?;
        ensure!(met.iter().all(|backend| *backend == BOTH[1].0), "went to {met:?}");
        Ok(())
    });
}

/// Makes both backends serve `CLUSTER_IP`.
pub(crate) fn serve<W: Maps>(
    s: &mut Scene<W>,
    table: &[usize],
    flags: u32,
    affinity_seconds: u32,
) -> Result<()> {
    s.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
    let set = s.set_with_table(&BOTH, table)?;
    publish(s, set, affinity_seconds)?;
    s.frontend(CLUSTER_IP, SERVICE, flags)
}

fn publish<W: Maps>(s: &mut Scene<W>, set: EndpointSet, affinity_seconds: u32) -> Result<()> {
    let flags = SERVICE_HAS_ENDPOINTS;
    let service = Service { cluster: set, internal: set, external: set, flags, affinity_seconds };
    s.world.set_service(SERVICE, service)
}

/// Returns the backend for a flow from this port of the client. Port 0 stands for the client
/// whatever its port.
fn expected<W: Maps>(s: &Scene<W>, port: u16) -> u32 {
    let client = W::address(KnownAddress::Client);
    let hash = balance::connection_hash((&client, Port::new(port)), Port::new(CLUSTER_IP.1), s.protocol);
    BOTH[TABLE[(hash >> 28) as usize]].0
}
