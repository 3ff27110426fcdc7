//! The destination is translated where the client's packet comes in, and the answer's source where
//! the answer leaves.

use anyhow::Result;
use proxy_common::{
    layout::{FRONTEND_EXTERNAL, INTERFACE_OF_BRIDGE, INTERFACE_OF_UPLINK, InterfaceSettings},
    packet::{TCP_ACK, TCP_SYN},
    reason::Reason,
};

use super::{Group, Scene, scene::*};
use crate::{
    wire::{KnownAddress, Link, Segment},
    world::Maps,
};

/// Index of the loopback in every namespace.
const LOOPBACK: u32 = 1;

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.both::<W>("to nobody's address goes on untouched", |s| {
        s.cluster_ip()?;
        let packet = s.first(CLIENT, (KnownAddress::Stranger, 80));
        for program in ["workload_ingress", "uplink_ingress", "workload_egress", "uplink_egress"] {
            s.send(program, &packet, Expect::Untouched)?;
        }
        s.counted(&[])
    });
    // BPF_PROG_TEST_RUN runs packets as if they had come by the loopback. None of these frames has
    // its link address.
    group.both::<W>("a frame that is addressed to another host", |s| {
        s.node_port_here()?;
        let first = s.first(CLIENT, NODE_PORT);
        let by_uplink = |flags| InterfaceSettings { flags, ..InterfaceSettings::default() };
        s.world.set_interface(LOOPBACK, by_uplink(INTERFACE_OF_UPLINK))?;
        s.send("uplink_ingress", &first, Expect::Untouched)?;
        s.counted(&[])?;
        s.world.set_interface(LOOPBACK, by_uplink(INTERFACE_OF_UPLINK | INTERFACE_OF_BRIDGE))?;
        s.send("uplink_ingress", &first, Expect::Becomes(&first.to(LOCAL)))
    });
    group.host::<W>("a frame of a pod's answer that was moved to the uplink", |s| {
        s.node_port_here()?;
        let settings = InterfaceSettings { flags: INTERFACE_OF_UPLINK, ..InterfaceSettings::default() };
        s.world.set_interface(LOOPBACK, settings)?;
        let first = s.first(CLIENT, NODE_PORT);
        s.send("uplink_ingress", &first, Expect::Becomes(&first.to(LOCAL)))
    });
    group.both::<W>("to a cluster IP and back", |s| {
        s.cluster_ip()?;
        there_and_back(s, CLUSTER_IP, LOCAL, "workload_ingress", "workload_egress", Link::Ethernet)
    });
    group.both::<W>("to a cluster IP and back, device without Ethernet header", |s| {
        s.cluster_ip()?;
        there_and_back(s, CLUSTER_IP, LOCAL, "workload_ingress_l3", "workload_egress_l3", Link::Bare)
    });
    group.both::<W>("to a node port from a pod and back", |s| {
        s.service(1, &[(12, REMOTE, false)])?;
        s.node_port(1)?;
        // A pod keeps its address: the backend's answer comes back to it by routing.
        let first = s.opens("workload_ingress", CLIENT, NODE_PORT, REMOTE)?;
        s.send("uplink_egress", &first.to(REMOTE), Expect::Untouched)?;
        let answer = first.to(REMOTE).answer(TCP_SYN | TCP_ACK);
        s.send("uplink_ingress", &answer, Expect::Untouched)?;
        s.send("workload_egress", &answer, Expect::Becomes(&answer.from(NODE_PORT)))?;
        s.counted(&[(Reason::FlowOpened, 1)])
    });
    group.both::<W>("to a node port from outside, backend here, and back", |s| {
        s.node_port_here()?;
        there_and_back(s, NODE_PORT, LOCAL, "uplink_ingress", "uplink_egress", Link::Ethernet)
    });
    group.both::<W>("to a load balancer address from outside", |s| {
        s.service(1, &[(11, LOCAL, true)])?;
        s.frontend((KnownAddress::External, 443), 1, FRONTEND_EXTERNAL)?;
        there_and_back(
            s,
            (KnownAddress::External, 443),
            LOCAL,
            "uplink_ingress",
            "uplink_egress",
            Link::Ethernet,
        )
    });
    group.both::<W>("to another port of a cluster IP", |s| {
        s.cluster_ip()?;
        let packet = s.first(CLIENT, (KnownAddress::ClusterIp, 81));
        s.send("workload_ingress", &packet, Expect::Untouched)?;
        s.counted(&[])
    });
    group.both::<W>("to a node port on loopback", |s| {
        s.node_port_here()?;
        let address = W::address(KnownAddress::Node);
        W::put_node_address(&mut s.world.ebpf, address, proxy_common::layout::NODE_ADDRESS_LOOPBACK)?;
        let packet = s.first(CLIENT, NODE_PORT);
        s.send("workload_ingress", &packet, Expect::Untouched)?;
        s.send("uplink_ingress", &packet, Expect::Untouched)
    });
    group.both::<W>("of another protocol than the service", |s| {
        s.cluster_ip()?;
        s.protocol = if s.protocol == 6 { 17 } else { 6 };
        let packet = s.first(CLIENT, CLUSTER_IP);
        s.send("workload_ingress", &packet, Expect::Untouched)
    });
    // Established flows are not translated either. If another proxy serves now, this node's maps
    // may name a backend that is gone.
    group.both::<W>("after the controller's lease", |s| {
        s.cluster_ip()?;
        let (known, new) = (s.first(CLIENT, CLUSTER_IP), s.first((CLIENT.0, CLIENT.1 + 1), CLUSTER_IP));
        let answer = known.to(LOCAL).answer(TCP_SYN | TCP_ACK);
        s.send("workload_ingress", &known, Expect::Becomes(&known.to(LOCAL)))?;
        s.world.set_lease_end(1)?;
        for (program, packet) in
            [("workload_ingress", &known), ("workload_ingress", &new), ("workload_egress", &answer)]
        {
            s.send(program, packet, Expect::Untouched)?;
        }
        s.counted(&[(Reason::FlowOpened, 1)])?;
        s.world.set_lease_end(u64::MAX)?;
        s.send("workload_ingress", &new, Expect::Becomes(&new.to(LOCAL)))?;
        s.send("workload_egress", &answer, Expect::Becomes(&answer.from(CLUSTER_IP)))
    });
}

/// Sends the first packet, its answer, and the packet that follows. On the backend's side, each
/// passes unchanged.
fn there_and_back<W: Maps>(
    s: &mut Scene<W>,
    frontend: (KnownAddress, u16),
    backend: (KnownAddress, u16),
    ingress: &str,
    egress: &str,
    link: Link,
) -> Result<()> {
    let first = Segment { link, ..s.first(CLIENT, frontend) };
    let at_backend = first.to(backend);
    s.send(ingress, &first, Expect::Becomes(&at_backend))?;
    s.send(egress, &at_backend, Expect::Untouched)?;
    let answer = at_backend.answer(TCP_SYN | TCP_ACK);
    s.send(ingress, &answer, Expect::Untouched)?;
    s.send(egress, &answer, Expect::Becomes(&answer.from(frontend)))?;
    let second = first.flags(TCP_ACK);
    s.send(ingress, &second, Expect::Becomes(&second.to(backend)))?;
    s.counted(&[(Reason::FlowOpened, 1)])
}
