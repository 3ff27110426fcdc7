//! Connections of the node's own processes that no socket hook translates (`HOST_PACKETS`). There
//! are no routes here, so a translated packet goes on as it was routed. The lab tests the
//! redirects.

use anyhow::{Result, ensure};
use proxy_common::{
    flow::Stage,
    layout::{FLOW_FROM_HOST, PROTOCOL_TCP},
    packet::{TCP_ACK, TCP_SYN},
    reason::Reason,
};

use super::{Group, Scene, refused::refusals::refused, scene::*};
use crate::{wire::KnownAddress, world::Maps};

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.host::<W>("of the node itself to a backend elsewhere and back", |s| {
        s.service(1, &[(12, REMOTE, false)])?;
        s.frontend(CLUSTER_IP, 1, 0)?;
        there_and_back(s, REMOTE, "uplink_ingress")
    });
    group.host::<W>("of the node itself to a pod and back", |s| {
        s.cluster_ip()?;
        there_and_back(s, LOCAL, "workload_ingress")
    });
    group.host::<W>("of the node itself, refused", |s| {
        s.without_endpoints()?;
        let packet = s.first(PROCESS, CLUSTER_IP);
        s.send("uplink_egress", &packet, Expect::Answered(refused::<W>(&packet)))?;
        s.counted(&[(Reason::NoEndpoints, 1)])
    });
    group.host::<W>("of a pod, as ever", |s| {
        s.cluster_ip()?;
        let first = s.opens("workload_ingress", CLIENT, CLUSTER_IP, LOCAL)?;
        let answer = first.to(LOCAL).answer(TCP_SYN | TCP_ACK);
        s.send("workload_ingress", &answer, Expect::Untouched)?;
        s.send("workload_egress", &answer, Expect::Becomes(&answer.from(CLUSTER_IP)))
    });
    group.both::<W>("of the node itself, balanced by its socket", |s| {
        s.cluster_ip()?;
        s.send("uplink_egress", &s.first(PROCESS, CLUSTER_IP), Expect::Untouched)?;
        s.counted(&[])
    });
}

fn there_and_back<W: Maps>(s: &mut Scene<W>, backend: (KnownAddress, u16), ingress: &str) -> Result<()> {
    s.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
    let first = s.first(PROCESS, CLUSTER_IP);
    let output = s.world.run("uplink_egress", &first.bytes::<W>())?;
    let flow = s.flow_of(Stage::Opening, PROCESS)?;
    ensure!(flow.flags == FLOW_FROM_HOST);
    ensure!(flow.alias_port().number() != PROCESS.1, "no alias");
    let alias = (PROCESS.0, flow.alias_port().number());
    let inside = first.to(backend).from(alias);
    ensure!(output.packet == inside.bytes::<W>());
    // The packet then leaves by the interface that leads to the backend.
    s.send("uplink_egress", &inside, Expect::Untouched)?;
    s.send("workload_egress", &inside, Expect::Untouched)?;
    // A connection from the same port to the backend itself is left alone.
    let direct = first.to(backend);
    s.send("workload_egress", &direct, Expect::Untouched)?;
    s.send(ingress, &direct.answer(TCP_SYN | TCP_ACK), Expect::Untouched)?;
    let answer = inside.answer(TCP_SYN | TCP_ACK);
    s.send(ingress, &answer, Expect::Becomes(&answer.from(CLUSTER_IP).to(PROCESS)))?;
    let second = first.flags(TCP_ACK);
    s.send("uplink_egress", &second, Expect::Becomes(&second.to(backend).from(alias)))?;
    let established = if s.protocol == PROTOCOL_TCP { 2 } else { 0 };
    ensure!(s.flow_counts()? == (2, established), "entries {:?}", s.flow_counts()?);
    s.counted(&[(Reason::FlowOpened, 1)])
}
