//! A client's new flows go to the backend of its last one.

use anyhow::{Result, bail, ensure};
use proxy_common::{layout::*, reason::Reason};

use crate::{
    cases::{Group, Scene, scene::*},
    wire::{Endpoint, KnownAddress, Segment},
    world::{Maps, Verdict},
};

const SERVICE: u32 = 1;
const SECONDS: u32 = 60;
const LOCAL_ID: u32 = 11;
const REMOTE_ID: u32 = 12;
/// Number of first packets. With that many, neither of two backends is left out by chance.
const MANY: u16 = 60;

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.both::<W>("without affinity goes to each backend", |s| {
        serve(s, &BOTH, 0)?;
        let met = met(s, "workload_ingress", CLUSTER_IP, 1_024..1_024 + MANY)?;
        ensure!(met.contains(&LOCAL_ID) && met.contains(&REMOTE_ID), "went to {met:?}");
        ensure!(known(s)?.is_empty(), "a client is remembered");
        s.counted(&[(Reason::FlowOpened, MANY.into())])
    });
    group.both::<W>("with affinity goes to one backend, by every frontend", |s| {
        serve(s, &BOTH, SECONDS)?;
        s.change_settings(|settings| W::set_pod_range(settings, W::address(KnownAddress::Client)))?;
        let backend = one(s, "workload_ingress", CLUSTER_IP, 1_024..1_024 + MANY)?;
        ensure!(
            one(s, "workload_ingress", NODE_PORT, 2_048..2_048 + MANY)? == backend,
            "another by the node port"
        );
        let known = known(s)?;
        let [(key, affinity)] = known.as_slice() else { bail!("{} clients are known", known.len()) };
        let expected = Client { address: W::address(KnownAddress::Client), origin: CLIENT_WORKLOAD };
        ensure!(key.service == SERVICE && key.client == expected, "another client is known");
        ensure!(affinity.backend == backend, "backend {} is remembered, not {backend}", affinity.backend);
        s.counted(&[(Reason::FlowOpened, u64::from(MANY) * 2), (Reason::ClientRemembered, 1)])
    });
    group.both::<W>("with affinity that has expired chooses anew", |s| {
        serve(s, &BOTH, SECONDS)?;
        let mut all = Vec::new();
        for port in 1_024..1_024 + MANY {
            let backend = one(s, "workload_ingress", CLUSTER_IP, port..port + 1)?;
            let ages = |affinity: &mut Affinity| {
                affinity.last_used = affinity.last_used.saturating_sub(u64::from(SECONDS) * 1_000_000_000);
            };
            set_known(s, ages)?;
            all.push(backend);
        }
        ensure!(all.contains(&LOCAL_ID) && all.contains(&REMOTE_ID), "went to {all:?}");
        let last = one(s, "workload_ingress", CLUSTER_IP, 2_048..2_048 + MANY)?;
        ensure!(known(s)?[0].1.backend == last, "another backend is remembered");
        // The one entry of the client is used again.
        s.counted(&[(Reason::FlowOpened, u64::from(MANY) * 2), (Reason::ClientRemembered, 1)])
    });
    // The backend still serves another service.
    group.both::<W>("with affinity to a backend that is not the service's any more", |s| {
        serve(s, &BOTH, SECONDS)?;
        let first = one(s, "workload_ingress", CLUSTER_IP, 1_024..1_029)?;
        let left: Vec<_> = BOTH.into_iter().filter(|(id, ..)| *id != first).collect();
        serve(s, &left, SECONDS)?;
        let next = one(s, "workload_ingress", CLUSTER_IP, 2_048..2_048 + MANY)?;
        ensure!(next != first, "still goes to backend {first}");
        serve(s, &BOTH, SECONDS)?;
        let last = one(s, "workload_ingress", CLUSTER_IP, 3_072..3_072 + MANY)?;
        ensure!(last == next, "went from backend {next} to {last} when another came");
        Ok(())
    });
    group.both::<W>("with affinity and policy Local reaches no remote backend from outside", |s| {
        serve(s, &BOTH, SECONDS)?;
        // The ClusterIP reaches every backend. Clients outside must not get the remote one by a
        // node port.
        one(s, "uplink_ingress", CLUSTER_IP, 1_024..1_025)?;
        set_known(s, |affinity| (affinity.backend, affinity.flags) = (REMOTE_ID, 0))?;
        ensure!(one(s, "uplink_ingress", CLUSTER_IP, 1_025..1_026)? == REMOTE_ID, "affinity does not count");
        ensure!(one(s, "uplink_ingress", NODE_PORT, 2_048..2_048 + MANY)? == LOCAL_ID, "a remote backend");
        ensure!(known(s)?[0].1.backend == LOCAL_ID, "the remote backend is remembered");
        Ok(())
    });
    group.both::<W>("with affinity to another port of the service", |s| {
        serve(s, &BOTH, SECONDS)?;
        set_service(s, SERVICE + 1, &BOTH, SECONDS)?;
        let other = (CLUSTER_IP.0, CLUSTER_IP.1 + 1);
        s.frontend(other, SERVICE + 1, 0)?;
        one(s, "workload_ingress", CLUSTER_IP, 1_024..1_029)?;
        one(s, "workload_ingress", other, 2_048..2_053)?;
        ensure!(known(s)?.len() == 2, "two ports share affinity");
        Ok(())
    });
    // The node is one client, whatever address it sends from.
    group.host::<W>("of the node has affinity as one client", |s| {
        serve(s, &BOTH, SECONDS)?;
        for (port, source) in (1_024..).zip([KnownAddress::Node, KnownAddress::Client, KnownAddress::Node]) {
            let first = s.first((source, port), CLUSTER_IP);
            s.world.run("uplink_egress", &first.bytes::<W>())?;
        }
        let known = known(s)?;
        let [(key, _)] = known.as_slice() else { bail!("{} clients are known", known.len()) };
        ensure!(key.client == Client::NODE, "the node is known as another client");
        s.counted(&[(Reason::FlowOpened, 3), (Reason::ClientRemembered, 1)])
    });
}

/// Makes two backends serve `CLUSTER_IP` and `NODE_PORT`. Clients outside get the local one, as
/// with policy Local.
fn serve<W: Maps>(s: &mut Scene<W>, backends: &[(u32, Endpoint, bool)], seconds: u32) -> Result<()> {
    s.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
    set_service(s, SERVICE, backends, seconds)?;
    s.frontend(CLUSTER_IP, SERVICE, 0)?;
    s.node_port(SERVICE)
}

fn set_service<W: Maps>(
    s: &mut Scene<W>,
    id: u32,
    backends: &[(u32, Endpoint, bool)],
    affinity_seconds: u32,
) -> Result<()> {
    let all = s.set(backends)?;
    let local = backends.iter().filter(|(_, _, local)| *local).count() as u32;
    let external = EndpointSet::new(all.first, local);
    let flags = SERVICE_HAS_ENDPOINTS;
    s.world.set_service(id, Service { cluster: all, internal: all, external, flags, affinity_seconds })
}

pub(crate) const BOTH: [(u32, Endpoint, bool); 2] = [(LOCAL_ID, LOCAL, true), (REMOTE_ID, REMOTE, false)];

/// Returns the backends of the first packets that the client sends from these ports.
pub(crate) fn met<W: Maps>(
    s: &mut Scene<W>,
    program: &str,
    to: Endpoint,
    ports: std::ops::Range<u16>,
) -> Result<Vec<u32>> {
    let mut met = Vec::new();
    for port in ports {
        let first = s.first((KnownAddress::Client, port), to);
        let output = s.world.run(program, &first.bytes::<W>())?;
        ensure!(output.verdict != Verdict::Dropped, "dropped; counted {:?}", s.world.counted()?);
        let is = |backend| output.packet == Segment { ..first.to(backend) }.bytes::<W>();
        met.push(match (is(LOCAL), is(REMOTE)) {
            (true, _) => LOCAL_ID,
            (_, true) => REMOTE_ID,
            (false, false) => bail!("went to neither backend"),
        });
    }
    Ok(met)
}

fn one<W: Maps>(s: &mut Scene<W>, program: &str, to: Endpoint, ports: std::ops::Range<u16>) -> Result<u32> {
    let met = met(s, program, to, ports)?;
    ensure!(met.iter().all(|backend| *backend == met[0]), "went to {met:?}");
    Ok(met[0])
}

fn known<W: Maps>(s: &mut Scene<W>) -> Result<Vec<(AffinityKey<W::Address>, Affinity)>> {
    Ok(W::affinity_map(&mut s.world.ebpf)?.iter().collect::<Result<_, _>>()?)
}

fn set_known<W: Maps>(s: &mut Scene<W>, change: impl Fn(&mut Affinity)) -> Result<()> {
    for (key, mut affinity) in known(s)? {
        change(&mut affinity);
        W::affinity_map(&mut s.world.ebpf)?.insert(key, affinity, 0)?;
    }
    Ok(())
}
