//! Clients that kube-proxy masquerades, and clients to which a traffic policy Local applies, for
//! each way to distinguish pods from other clients.

use anyhow::{Result, ensure};
use proxy_common::{
    flow::Stage,
    layout::*,
    packet::{TCP_ACK, TCP_SYN},
    reason::Reason,
};

use crate::{
    cases::{Group, Scene, scene::*},
    wire::{Endpoint, KnownAddress},
    world::{LOOPBACK, Maps},
};

const SERVICE: u32 = 1;
const LOAD_BALANCER: Endpoint = (KnownAddress::External, 80);
const POLICY_LOCAL: u32 = FRONTEND_EXTERNAL | FRONTEND_LOCAL_POLICY;

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.masquerading::<W>("a client outside is masqueraded to a backend on this node", |s| {
        serve(s, LOAD_BALANCER, FRONTEND_EXTERNAL)?;
        goes(s, "uplink", (KnownAddress::Stranger, 40_000), LOAD_BALANCER, true)
    });
    group.masquerading::<W>("a pod is masqueraded to an external address", |s| {
        serve(s, LOAD_BALANCER, FRONTEND_EXTERNAL)?;
        goes(s, "workload", CLIENT, LOAD_BALANCER, true)
    });
    group.masquerading::<W>("nobody is masqueraded with policy Local", |s| {
        serve(s, LOAD_BALANCER, POLICY_LOCAL)?;
        goes(s, "uplink", (KnownAddress::Stranger, 40_000), LOAD_BALANCER, false)
    });
    group.masquerading::<W>("a pod keeps its address to a cluster IP", |s| {
        serve(s, CLUSTER_IP, 0)?;
        goes(s, "workload", CLIENT, CLUSTER_IP, false)
    });
    group.masquerading::<W>("a stranger is masqueraded to a cluster IP", |s| {
        serve(s, CLUSTER_IP, 0)?;
        goes(s, "workload", (KnownAddress::Stranger, 40_000), CLUSTER_IP, true)
    });
    group.masquerading::<W>("where pods are not known, nobody is masqueraded to a cluster IP", |s| {
        serve(s, CLUSTER_IP, 0)?;
        s.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
        goes(s, "workload", (KnownAddress::Stranger, 40_000), CLUSTER_IP, false)
    });
    group.masquerading::<W>("all are masqueraded to a cluster IP", |s| {
        serve(s, CLUSTER_IP, 0)?;
        s.change_settings(|settings| settings.masquerade_all = 1)?;
        goes(s, "workload", CLIENT, CLUSTER_IP, true)
    });
    group.both::<W>("policy Local is for clients outside, told by their address", |s| {
        client_is_a_pod(s)?;
        reaches(s, "workload_ingress", Some(REMOTE))?;
        let stranger = s.first((KnownAddress::Stranger, 40_000), LOAD_BALANCER);
        s.send("workload_ingress", &stranger, Expect::Dropped)?;
        // The client is a pod of another node. Its answer would not come back by this node.
        s.opens("uplink_ingress", (CLIENT.0, CLIENT.1 + 1), LOAD_BALANCER, REMOTE)?;
        let flow = s.flow_of(Stage::Opening, (CLIENT.0, CLIENT.1 + 1))?;
        ensure!(flow.flags & FLOW_MASQUERADE != 0, "it is not masqueraded");
        Ok(())
    });
    group.both::<W>("policy Local is for clients outside, told by their interface", |s| {
        s.change_settings(|settings| {
            (settings.pods4, settings.pods6) = (PODS_BY_INTERFACE, PODS_BY_INTERFACE)
        })?;
        reaches(s, "workload_ingress", None)?;
        s.world.set_interface(
            LOOPBACK,
            InterfaceSettings { flags: INTERFACE_OF_PODS, ..InterfaceSettings::default() },
        )?;
        reaches(s, "workload_ingress", Some(REMOTE))
    });
    group.both::<W>("policy Local is for everybody where pods are not known", |s| {
        reaches(s, "workload_ingress", None)
    });
}

/// Makes the settings say that pods have the client's address, and no other.
fn client_is_a_pod<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    s.change_settings(|settings| W::set_pod_range(settings, W::address(KnownAddress::Client)))
}

fn serve<W: Maps>(s: &mut Scene<W>, endpoint: Endpoint, flags: u32) -> Result<()> {
    s.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
    client_is_a_pod(s)?;
    s.service(SERVICE, &[(11, LOCAL, true)])?;
    s.frontend(endpoint, SERVICE, flags)
}

/// Sends a first packet, which must reach this node's backend. Its answer must come back.
fn goes<W: Maps>(
    s: &mut Scene<W>,
    side: &str,
    client: Endpoint,
    frontend: Endpoint,
    is_masqueraded: bool,
) -> Result<()> {
    let (ingress, egress) = (format!("{side}_ingress"), format!("{side}_egress"));
    let first = s.opens(&ingress, client, frontend, LOCAL)?;
    let inside = first.to(LOCAL);
    let seen = if is_masqueraded {
        s.world.run("workload_egress", &inside.bytes::<W>())?;
        let source = s.masqueraded(client)?;
        s.send("workload_egress", &inside, Expect::Becomes(&inside.from(source)))?;
        inside.from(source)
    } else {
        s.send("workload_egress", &inside, Expect::Untouched)?;
        inside
    };
    let answer = seen.answer(TCP_SYN | TCP_ACK);
    let expected = if is_masqueraded { Expect::Becomes(&answer.to(client)) } else { Expect::Untouched };
    s.send("workload_ingress", &answer, expected)?;
    let to_client = answer.to(client);
    s.send(&egress, &to_client, Expect::Becomes(&to_client.from(frontend)))?;
    s.counted(&[(Reason::FlowOpened, 1)])
}

/// Sends a client's packet to a service with policy Local whose only endpoint is elsewhere.
fn reaches<W: Maps>(s: &mut Scene<W>, program: &str, backend: Option<Endpoint>) -> Result<()> {
    let cluster = s.set(&[(12, REMOTE, false)])?;
    let service = Service { cluster, flags: SERVICE_HAS_ENDPOINTS, ..Service::default() };
    s.world.set_service(SERVICE, service)?;
    s.frontend(LOAD_BALANCER, SERVICE, POLICY_LOCAL)?;
    let first = s.first(CLIENT, LOAD_BALANCER);
    match backend {
        Some(backend) => s.send(program, &first, Expect::Becomes(&first.to(backend))),
        None => s.send(program, &first, Expect::Dropped),
    }
}
