//! Frames that XDP forwards by another interface than they have come by: to other nodes, and to
//! pods.

use std::fs;

use anyhow::{Result, ensure};
use lab::namespace::ip;
use nix::net::if_::if_nametoindex;
use proxy_common::{
    layout::{IN_FRAGMENTS, TAG_CUSTOMER, TO_POD},
    packet::{TCP_ACK, TCP_SYN},
    reason::Reason,
};

use super::forward::{NEXT_HOP, OWN, Uplink, address, opened, tagged};
use crate::{
    cases::{Group, scene::*},
    wire::{Cut, Endpoint, Extra, Segment},
    world::{Maps, Verdict, link_address},
};

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.both::<W>("redirect to a backend behind another uplink and back", |s| {
        let Node { uplink, other, address: node } = Node::allowing_redirects(s)?;
        let first = s.first(CLIENT, NODE_PORT);
        let answer = first.to(REMOTE).from(node).answer(TCP_SYN | TCP_ACK);
        other.sends(s, &answer, &answer.to(CLIENT).from(NODE_PORT))?;
        let second = first.flags(TCP_ACK);
        uplink_sends(s, &uplink, &second, &second.to(REMOTE).from(node), &other)?;
        s.has_masqueraded_flow()?;
        s.counted(&[(Reason::FlowOpened, 1), (Reason::RedirectedByXdp, 2)])?;
        let bytes: usize = [&first, &answer, &second].iter().map(|p| p.bytes::<W>().len()).sum();
        s.counted_for_service(3, bytes)
    });
    group.both::<W>("redirect to a pod once an answer has left, and its answers skip the stack", |s| {
        let (uplink, pod) = node_with_pod(s)?;
        let first = s.first(CLIENT, NODE_PORT);
        let second = first.flags(TCP_ACK);
        let answer = first.to(LOCAL).answer(TCP_SYN | TCP_ACK);
        let sent = Expect::Becomes(&answer.from(NODE_PORT));
        s.send("uplink_ingress", &first, Expect::Becomes(&first.to(LOCAL)))?;
        passes(s, uplink.index, &second.bytes::<W>())?;
        pod.answers_by_stack(s, &answer)?;
        // The answer leaves by a device that has no XDP program. So the client's packets may come
        // by such a device too.
        s.send("uplink_egress", &answer, sent)?;
        passes(s, uplink.index, &second.bytes::<W>())?;
        let_out(s, &uplink, &answer)?;
        pod.answers_by_stack(s, &answer)?;
        uplink_sends(s, &uplink, &second, &second.to(LOCAL), &pod)?;
        pod.answer_skips_stack(s, &answer)?;
        let_out(s, &uplink, &answer)?;
        s.counted(&[(Reason::FlowOpened, 1), (Reason::RedirectedByXdp, 1), (Reason::AnswerSkippedStack, 1)])?;
        let bytes: usize =
            [&first, &second, &answer, &answer, &answer].iter().map(|p| p.bytes::<W>().len()).sum();
        s.counted_for_service(5, bytes)
    });
    group.both::<W>(
        "no redirect to a pod whose interface takes no frames any more, and no answer skips the stack",
        |s| {
            let (uplink, pod) = node_with_pod(s)?;
            let answer = pod.opened(s, &uplink)?;
            pod.answer_skips_stack(s, &answer)?;
            s.world.remove_redirect_target(pod.index | TO_POD)?;
            let second = s.packet(CLIENT, NODE_PORT, TCP_ACK);
            passes(s, uplink.index, &second.bytes::<W>())?;
            s.send("uplink_ingress", &second, Expect::Becomes(&second.to(LOCAL)))?;
            pod.answers_by_stack(s, &answer)
        },
    );
    group.both::<W>("what a router only sends on skips the stack, to uplinks with XDP", |s| {
        let (uplink, pod) = node_with_pod(s)?;
        let answer = pod.opened(s, &uplink)?;
        s.send("workload_ingress", &answer, Expect::Untouched)?;
        s.send("uplink_ingress", &answer, Expect::Untouched)?;
        pod.answers_by_stack(s, &Segment { hop_limit: 1, ..answer.clone() })?;
        pod.answers_by_stack(s, &Segment { extra: Extra::Options, ..answer.clone() })?;
        // If the neighbour is not known, the kernel asks for its link address.
        let client = address::<W>(CLIENT.0);
        ip(None, &format!("neigh del {client} dev {}\n", uplink.device))?;
        pod.answer_skips_stack(s, &answer)?;
        s.world.remove_redirect_source(uplink.index)?;
        pod.answers_by_stack(s, &answer)
    });
    group.both::<W>("a flow stays with the stack whose answer it has to have", |s| {
        let (uplink, pod) = node_with_pod(s)?;
        let answer = pod.opened(s, &uplink)?;
        let client = address::<W>(CLIENT.0);
        ip(None, &format!("route add blackhole {client}\n"))?;
        pod.answers_by_stack(s, &answer)?;
        ip(None, &format!("route del blackhole {client}\n"))?;
        pod.answers_by_stack(s, &answer)?;
        passes(s, uplink.index, &s.packet(CLIENT, NODE_PORT, TCP_ACK).bytes::<W>())
    });
    group.both::<W>("a flow stays with the stack which has had a packet of its client", |s| {
        let (uplink, pod) = node_with_pod(s)?;
        let answer = pod.opened(s, &uplink)?;
        let second = s.packet(CLIENT, NODE_PORT, TCP_ACK);
        s.send("uplink_ingress", &second, Expect::Becomes(&second.to(LOCAL)))?;
        // Connection tracking does not know the flow until the packet has left to the pod.
        pod.answer_skips_stack(s, &answer)?;
        s.send("workload_egress", &second.to(LOCAL), Expect::Untouched)?;
        pod.answers_by_stack(s, &answer)?;
        passes(s, uplink.index, &second.bytes::<W>())
    });
    group.both::<W>("nothing that another pod sends skips the stack", |s| {
        let (uplink, pod) = node_with_pod(s)?;
        let answer = pod.opened(s, &uplink)?;
        let another = Other::leading_to_backends::<W>(s, "third", "02:00:00:00:00:04")?;
        s.world.put_redirect_target(another.index | TO_POD, another.index)?;
        another.answers_by_stack(s, &answer)?;
        pod.answer_skips_stack(s, &answer)
    });
    group.both::<W>("no redirect to a pod of what is masqueraded, as answers come through the stack", |s| {
        let Node { uplink, other, .. } = Node::new(s)?;
        s.world.put_redirect_source(uplink.index, link_address(OWN)?)?;
        s.world.put_redirect_target(other.index | TO_POD, other.index)?;
        passes(s, uplink.index, &s.packet(CLIENT, NODE_PORT, TCP_ACK).bytes::<W>())
    });
    group.both::<W>("no redirect by an uplink of what is for a pod", |s| {
        let (uplink, pod) = node_with_pod(s)?;
        pod.opened(s, &uplink)?;
        s.world.remove_redirect_target(pod.index | TO_POD)?;
        s.world.put_redirect_target(pod.index, pod.index)?;
        passes(s, uplink.index, &s.packet(CLIENT, NODE_PORT, TCP_ACK).bytes::<W>())
    });
    group.both::<W>("what the uplink takes skips the stack, whole or in segments", |s| {
        let (uplink, pod) = node_with_pod(s)?;
        let answer = pod.opened(s, &uplink)?;
        ip(None, "link set uplink mtu 1300\n")?;
        let headers = answer.bytes::<W>().len() - answer.payload.len() - 14;
        let with_payload = |length| Segment { payload: vec![1; length], ..answer.clone() };
        pod.answer_skips_stack(s, &with_payload(1300 - headers))?;
        pod.answers_by_stack(s, &with_payload(1301 - headers))?;
        let merged = |size: usize, verdict| {
            let bytes = with_payload(1400).bytes::<W>();
            let output = s.world.leaves_merged(pod.index, "workload_ingress", &bytes, size as u32)?;
            ensure!(output.verdict == verdict, "segments of {size}: {:?}", output.verdict);
            Ok(())
        };
        merged(1300 - headers, Verdict::Redirected)?;
        merged(1301 - headers, Verdict::GoesOn)
    });
    group.both::<W>("no fragment of an answer skips the stack whose first one does not", |s| {
        const CUT: Cut = Cut { piece: 1_304, id: 7 };
        let (uplink, pod) = node_with_pod(s)?;
        let answer = Segment { payload: vec![1; 1_400], ..pod.opened(s, &uplink)? };
        ip(None, "link set uplink mtu 1300\n")?;
        for fragment in answer.fragments::<W>(CUT) {
            let output = s.world.leaves_by(pod.index, "workload_ingress", &fragment)?;
            ensure!(output.verdict == Verdict::GoesOn && output.packet == fragment, "{:?}", output.verdict);
        }
        Ok(())
    });
    group.both::<W>("answers in fragments skip the stack", |s| {
        const CUT: Cut = Cut { piece: 64, id: 7 };
        let (uplink, pod) = node_with_pod(s)?;
        let answer = Segment { payload: vec![1; 150], ..pod.opened(s, &uplink)? };
        let sent = Segment { hop_limit: answer.hop_limit - 1, ..answer.clone() }.fragments::<W>(CUT);
        for (fragment, sent) in answer.fragments::<W>(CUT).iter().zip(sent) {
            let output = s.world.leaves_by(pod.index, "workload_ingress", fragment)?;
            ensure!(output.verdict == Verdict::Redirected && output.packet == sent, "{:?}", output.verdict);
        }
        let another = Other::leading_to_backends::<W>(s, "third", "02:00:00:00:00:04")?;
        s.world.put_redirect_target(another.index | TO_POD, another.index)?;
        for forged in answer.fragments::<W>(CUT).iter().skip(1) {
            let output = s.world.leaves_by(another.index, "workload_ingress", forged)?;
            ensure!(output.verdict == Verdict::GoesOn, "{:?}", output.verdict);
        }
        Ok(())
    });
    group.both::<W>("redirect by the uplink that the route says", |s| {
        let Node { uplink, other, address: node } = Node::allowing_redirects(s)?;
        let second = s.packet(CLIENT, NODE_PORT, TCP_ACK);
        uplink_sends(s, &uplink, &second, &second.to(REMOTE).from(node), &other)?;
        let third = Other::leading_to_backends::<W>(s, "third", "02:00:00:00:00:04")?;
        passes(s, uplink.index, &second.bytes::<W>())?;
        s.world.put_redirect_target(third.index, third.index)?;
        uplink_sends(s, &uplink, &second, &second.to(REMOTE).from(node), &third)?;
        drop(third);
        other.leads_to_backends::<W>()?;
        s.world.raise_route_epoch()?;
        uplink_sends(s, &uplink, &second, &second.to(REMOTE).from(node), &other)?;
        drop(other);
        uplink.knows::<W>(REMOTE.0, NEXT_HOP)?;
        s.world.raise_route_epoch()?;
        uplink.sends(s, &second, &second.to(REMOTE).from(node))
    });
    group.both::<W>("no redirect to or from an uplink that is not known to do it", |s| {
        let Node { uplink, other, address: node } = Node::new(s)?;
        let second = s.packet(CLIENT, NODE_PORT, TCP_ACK);
        let sent = second.to(REMOTE).from(node);
        passes(s, uplink.index, &second.bytes::<W>())?;
        s.world.put_redirect_source(uplink.index, link_address(OWN)?)?;
        passes(s, uplink.index, &second.bytes::<W>())?;
        s.world.put_redirect_target(other.index, other.index)?;
        uplink_sends(s, &uplink, &second, &sent, &other)?;
        s.world.remove_redirect_source(uplink.index)?;
        passes(s, uplink.index, &second.bytes::<W>())?;
        s.counted(&[(Reason::FlowOpened, 1), (Reason::RedirectedByXdp, 1)])
    });
    group.both::<W>("no redirect of what is longer than the other uplink takes", |s| {
        const MTU: usize = 1_300;
        let Node { uplink, other, address: node } = Node::allowing_redirects(s)?;
        ip(None, &format!("link set {} mtu {MTU}\n", other.name))?;
        let packet = s.packet(CLIENT, NODE_PORT, TCP_ACK);
        let longest = Segment {
            payload: vec![1; MTU + 14 - packet.bytes::<W>().len() + packet.payload.len()],
            ..packet.clone()
        };
        uplink_sends(s, &uplink, &longest, &longest.to(REMOTE).from(node), &other)?;
        let too_long = Segment { payload: [&longest.payload[..], &[1]].concat(), ..packet };
        passes(s, uplink.index, &too_long.bytes::<W>())
    });
    group.both::<W>("no redirect to a neighbour that is not known", |s| {
        let Node { uplink, other, address: node } = Node::allowing_redirects(s)?;
        let second = s.packet(CLIENT, NODE_PORT, TCP_ACK);
        let neighbour = format!("{} dev {}", address::<W>(REMOTE.0), other.name);
        ip(None, &format!("neigh del {neighbour}\n"))?;
        passes(s, uplink.index, &second.bytes::<W>())?;
        ip(None, &format!("neigh add {neighbour} lladdr {NEXT_HOP} nud permanent\n"))?;
        uplink_sends(s, &uplink, &second, &second.to(REMOTE).from(node), &other)
    });
    group.both::<W>("no redirect of what a router does more with than sending it on", |s| {
        let Node { uplink, other, address: node } = Node::allowing_redirects(s)?;
        let second = s.packet(CLIENT, NODE_PORT, TCP_ACK);
        passes(s, uplink.index, &Segment { extra: Extra::Options, ..second.clone() }.bytes::<W>())?;
        passes(s, uplink.index, &Segment { hop_limit: 1, ..second.clone() }.bytes::<W>())?;
        ip(None, &format!("link set {} down\n", other.name))?;
        passes(s, uplink.index, &second.bytes::<W>())?;
        ip(None, &format!("link set {} up\n", other.name))?;
        other.leads_to_backends::<W>()?;
        uplink_sends(s, &uplink, &second, &second.to(REMOTE).from(node), &other)
    });
    group.both::<W>("no redirect of frames for others", |s| {
        let Node { uplink, other, address: node } = Node::allowing_redirects(s)?;
        let answer = s.first(CLIENT, NODE_PORT).to(REMOTE).from(node).answer(TCP_SYN | TCP_ACK);
        // The second uplink has another link address than the first.
        passes(s, other.index, &answer.bytes::<W>())?;
        let second = s.packet(CLIENT, NODE_PORT, TCP_ACK);
        let mut to_all = second.bytes::<W>();
        to_all[..6].fill(0xff);
        passes(s, uplink.index, &to_all)?;
        uplink_sends(s, &uplink, &second, &second.to(REMOTE).from(node), &other)
    });
    group.both::<W>("no redirect of frames with a tag", |s| {
        const TAG: (u16, u16) = (TAG_CUSTOMER, 10);
        let uplink = Uplink::with_tags::<W>(s.world, &[TAG])?.and_neighbours::<W>()?;
        s.node_port_elsewhere()?;
        let node = opened(s, &uplink)?;
        let second = s.packet(CLIENT, NODE_PORT, TCP_ACK);
        uplink.sends(s, &second, &second.to(REMOTE).from(node))?;
        let other = Other::leading_to_backends::<W>(s, "other", OTHER)?;
        for interface in [uplink.index, if_nametoindex(uplink.device)?] {
            s.world.put_redirect_source(interface, link_address(OWN)?)?;
        }
        s.world.put_redirect_target(other.index, other.index)?;
        passes(s, uplink.index, &tagged(&second.bytes::<W>(), &[TAG]))
    });
    group.both::<W>("redirect of frames in fragments", |s| {
        let Node { uplink, other, address: node } = Node::allowing_redirects(s)?;
        ip(None, &format!("link set {} mtu 9000\nlink set uplink mtu 9000\n", other.name))?;
        let packet = s.packet(CLIENT, NODE_PORT, TCP_ACK);
        let short = packet.bytes::<W>();
        let long = Segment { payload: vec![1; 8_000], ..packet.clone() };
        let bytes = long.bytes::<W>();
        let headers = bytes.len() - long.payload.len();
        // The other uplink takes only frames in one piece.
        let output = s.world.run_xdp_in_fragments(uplink.index, headers, &bytes)?;
        ensure!(output.verdict == Verdict::GoesOn && output.packet == bytes, "{:?}", output.verdict);
        let sent = other.sent::<W>(&packet.to(REMOTE).from(node));
        let output = s.world.run_xdp_in_fragments(uplink.index, short.len(), &short)?;
        ensure!(output.verdict == Verdict::Redirected, "in one piece: {:?}", output.verdict);
        ensure!(output.packet == sent, "in one piece: not what leaves");
        let sent = other.sent::<W>(&long.to(REMOTE).from(node));
        s.world.put_redirect_target(other.index | IN_FRAGMENTS, other.index)?;
        let output = s.world.run_xdp_in_fragments(uplink.index, headers, &bytes)?;
        ensure!(output.verdict == Verdict::Redirected, "{:?}", output.verdict);
        ensure!(output.packet == sent, "not what leaves");
        Ok(())
    });
}

pub(crate) const OTHER: &str = "02:00:00:00:00:03";

/// Node with one uplink to clients and another to the backend, and with an open flow.
pub(crate) struct Node {
    pub(crate) uplink: Uplink,
    pub(crate) other: Other,
    /// Source of the flow's packets at the backend.
    pub(crate) address: Endpoint,
}

impl Node {
    pub(crate) fn new<W: Maps>(s: &mut Scene<W>) -> Result<Self> {
        let uplink = Uplink::new::<W>(s.world)?;
        uplink.knows::<W>(CLIENT.0, NEXT_HOP)?;
        let other = Other::leading_to_backends::<W>(s, "other", OTHER)?;
        s.node_port_elsewhere()?;
        let address = opened(s, &uplink)?;
        Ok(Self { uplink, other, address })
    }

    /// Makes the node allow either uplink to send what has come by the other.
    fn allowing_redirects<W: Maps>(s: &mut Scene<W>) -> Result<Self> {
        let node = Self::new(s)?;
        for (interface, own) in
            [(node.uplink.index, link_address(OWN)?), (node.other.index, node.other.address)]
        {
            s.world.put_redirect_source(interface, own)?;
            s.world.put_redirect_target(interface, interface)?;
        }
        Ok(node)
    }
}

/// Interface that is removed when this is dropped.
pub(crate) struct Other {
    pub(crate) index: u32,
    pub(crate) name: &'static str,
    pub(crate) address: [u8; 6],
}

impl Other {
    pub(crate) fn leading_to_backends<W: Maps>(
        s: &mut Scene<W>,
        name: &'static str,
        address: &str,
    ) -> Result<Self> {
        let version = if super::forward::address::<W>(REMOTE.0).is_ipv4() { "ipv4" } else { "ipv6" };
        ip(
            None,
            &format!(
                "link add {name} address {address} type veth peer name {name}-beyond\n\
                 link set {name} up\nlink set {name}-beyond up\n"
            ),
        )?;
        let other = Self { index: if_nametoindex(name)?, name, address: link_address(address)? };
        fs::write(format!("/proc/sys/net/{version}/conf/{name}/forwarding"), "1")?;
        s.world.attach_xdp(name)?;
        other.leads_to_backends::<W>()?;
        s.world.raise_route_epoch()?;
        Ok(other)
    }

    fn leads_to_backends<W: Maps>(&self) -> Result<()> {
        let name = self.name;
        let lead_to = |backend| {
            format!(
                "route replace {backend} dev {name}\n\
                 neigh replace {backend} lladdr {NEXT_HOP} dev {name} nud permanent\n"
            )
        };
        ip(None, &[REMOTE.0, LOCAL.0].map(|backend| lead_to(address::<W>(backend))).concat())
    }

    /// Returns the frame that leaves by the interface.
    pub(crate) fn sent<W: Maps>(&self, becomes: &Segment) -> Vec<u8> {
        let mut sent = becomes.sent_back().bytes::<W>();
        sent[6..12].copy_from_slice(&self.address);
        sent
    }

    /// Sends a pod's answer, which must pass to the stack.
    fn answers_by_stack<W: Maps>(&self, s: &Scene<W>, answer: &Segment) -> Result<()> {
        let bytes = answer.bytes::<W>();
        let output = s.world.leaves_by(self.index, "workload_ingress", &bytes)?;
        ensure!(output.verdict == Verdict::GoesOn && output.packet == bytes, "{:?}", output.verdict);
        Ok(())
    }

    /// Sends a pod's answer, which must skip the stack. The kernel writes the link addresses after
    /// the program has ended.
    fn answer_skips_stack<W: Maps>(&self, s: &Scene<W>, answer: &Segment) -> Result<()> {
        let sent = Segment { hop_limit: answer.hop_limit - 1, ..answer.clone() }.bytes::<W>();
        let output = s.world.leaves_by(self.index, "workload_ingress", &answer.bytes::<W>())?;
        ensure!(output.verdict == Verdict::Redirected, "{:?}", output.verdict);
        ensure!(output.packet == sent, "it became {:02x?}, not {sent:02x?}", output.packet);
        Ok(())
    }

    /// Opens a flow to the pod, of which XDP has forwarded a packet. Returns the pod's first
    /// answer.
    fn opened<W: Maps>(&self, s: &mut Scene<W>, uplink: &Uplink) -> Result<Segment> {
        let first = s.first(CLIENT, NODE_PORT);
        let answer = first.to(LOCAL).answer(TCP_SYN | TCP_ACK);
        let second = first.flags(TCP_ACK);
        s.send("uplink_ingress", &first, Expect::Becomes(&first.to(LOCAL)))?;
        let_out(s, uplink, &answer)?;
        uplink_sends(s, uplink, &second, &second.to(LOCAL), self)?;
        Ok(answer)
    }

    /// Sends a frame by this interface, which must leave by the first uplink.
    fn sends<W: Maps>(&self, s: &Scene<W>, packet: &Segment, becomes: &Segment) -> Result<()> {
        let mut frame = packet.bytes::<W>();
        frame[..6].copy_from_slice(&self.address);
        redirects(s, self.index, &frame, &becomes.sent_back().bytes::<W>())
    }
}

/// Makes a node with one uplink, and with a pod that answers at a node port.
pub(crate) fn node_with_pod<W: Maps>(s: &mut Scene<W>) -> Result<(Uplink, Other)> {
    let uplink = Uplink::new::<W>(s.world)?;
    uplink.knows::<W>(CLIENT.0, NEXT_HOP)?;
    let pod = Other::leading_to_backends::<W>(s, "pod", OTHER)?;
    s.node_port_here()?;
    s.world.put_redirect_source(uplink.index, link_address(OWN)?)?;
    s.world.put_redirect_target(pod.index | TO_POD, pod.index)?;
    Ok((uplink, pod))
}

/// Sends a pod's answer that the stack has routed out by the uplink.
fn let_out<W: Maps>(s: &Scene<W>, uplink: &Uplink, answer: &Segment) -> Result<()> {
    let output = s.world.leaves_by(uplink.index, "uplink_egress", &answer.bytes::<W>())?;
    let is_sent = output.packet == answer.from(NODE_PORT).bytes::<W>();
    ensure!(output.verdict == Verdict::GoesOn && is_sent, "{:?}", output.verdict);
    Ok(())
}

impl Drop for Other {
    fn drop(&mut self) {
        if let Err(error) = ip(None, &format!("link del {}\n", self.name)) {
            eprintln!("{error:#}");
        }
    }
}

fn uplink_sends<W: Maps>(
    s: &Scene<W>,
    uplink: &Uplink,
    packet: &Segment,
    becomes: &Segment,
    by: &Other,
) -> Result<()> {
    redirects(s, uplink.index, &packet.bytes::<W>(), &by.sent::<W>(becomes))
}

pub(crate) fn redirects<W: Maps>(s: &Scene<W>, interface: u32, frame: &[u8], sent: &[u8]) -> Result<()> {
    let output = s.world.run_xdp(interface, frame)?;
    ensure!(output.verdict == Verdict::Redirected, "{:?}", output.verdict);
    ensure!(output.packet == sent, "it became {:02x?}, not {sent:02x?}", output.packet);
    Ok(())
}

fn passes<W: Maps>(s: &Scene<W>, interface: u32, frame: &[u8]) -> Result<()> {
    let output = s.world.run_xdp(interface, frame)?;
    ensure!(output.verdict == Verdict::GoesOn, "{:?}", output.verdict);
    ensure!(output.packet == frame, "it is not untouched");
    Ok(())
}
