//! Frames that XDP forwards out of the uplink that they have come by, and frames that it leaves to
//! the stack.

use std::{fs, net::IpAddr, time::Duration};

use anyhow::{Result, ensure};
use lab::{namespace::ip, wait};
use nix::net::if_::if_nametoindex;
use proxy_common::{
    flow::Stage,
    layout::{TAG_CUSTOMER, TAG_SERVICE, VlanTag},
    packet::{TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN},
    reason::Reason,
};

use crate::{
    cases::{BOTH, Group, WorldKind, scene::*},
    wire::{Cut, Endpoint, Extra, KnownAddress, Segment},
    world::{Maps, Verdict, World},
};

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.both::<W>("XDP forwards to a backend elsewhere and back", |s| {
        let (uplink, node) = opened_with_neighbours(s)?;
        let first = s.first(CLIENT, NODE_PORT);
        let answer = first.to(REMOTE).from(node).answer(TCP_SYN | TCP_ACK);
        let to_client = answer.to(CLIENT).from(NODE_PORT);
        uplink.sends(s, &answer, &to_client)?;
        let second = first.flags(TCP_ACK);
        uplink.sends(s, &second, &second.to(REMOTE).from(node))?;
        s.has_masqueraded_flow()?;
        s.counted(&[(Reason::FlowOpened, 1), (Reason::ForwardedByXdp, 2)])?;
        let bytes: usize = [&first, &answer, &second].iter().map(|p| p.bytes::<W>().len()).sum();
        s.counted_for_service(3, bytes)
    });
    group.both::<W>("XDP forwards a flow that the stack has begun, and the other way round", |s| {
        let (uplink, node) = opened_with_neighbours(s)?;
        let first = s.first(CLIENT, NODE_PORT);
        let answer = first.to(REMOTE).from(node).answer(TCP_SYN | TCP_ACK);
        s.send("uplink_ingress", &answer, Expect::Becomes(&answer.to(CLIENT)))?;
        s.send("uplink_egress", &answer.to(CLIENT), Expect::Becomes(&answer.to(CLIENT).from(NODE_PORT)))?;
        let second = first.flags(TCP_ACK);
        uplink.sends(s, &second, &second.to(REMOTE).from(node))?;
        s.send("uplink_ingress", &second, Expect::Becomes(&second.to(REMOTE)))?;
        s.send("uplink_egress", &second.to(REMOTE), Expect::Becomes(&second.to(REMOTE).from(node)))?;
        s.counted(&[(Reason::FlowOpened, 1), (Reason::ForwardedByXdp, 1)])
    });
    group.tcp::<W>("XDP forwards a connection to its end", |s| {
        let uplink = Uplink::with_neighbours(s)?;
        let (node, client, backend) = connected(s, &uplink)?;
        let fin = Segment { tcp_flags: TCP_FIN | TCP_ACK, ..client.clone() };
        uplink.sends(s, &fin, &fin.to(REMOTE).from(node))?;
        let answer = Segment {
            tcp_flags: TCP_FIN | TCP_ACK,
            acknowledgement: backend.acknowledgement + 1,
            ..backend.clone()
        };
        uplink.sends(s, &answer, &answer.to(CLIENT).from(NODE_PORT))?;
        ensure!(s.flow_counts()? == (3, 3), "entries {:?}", s.flow_counts()?);
        let last = Segment {
            sequence: client.sequence + 1,
            acknowledgement: client.acknowledgement + 1,
            ..client.clone()
        };
        uplink.sends(s, &last, &last.to(REMOTE).from(node))?;
        ensure!(s.flow_counts()? == (3, 0), "entries {:?}", s.flow_counts()?);
        Ok(())
    });
    group.tcp::<W>("XDP forwards a connection that is reset", |s| {
        let uplink = Uplink::with_neighbours(s)?;
        let (_, _, backend) = connected(s, &uplink)?;
        let rst = Segment { tcp_flags: TCP_RST | TCP_ACK, ..backend };
        uplink.sends(s, &rst, &rst.to(CLIENT).from(NODE_PORT))?;
        ensure!(s.flow_counts()? == (3, 0), "entries {:?}", s.flow_counts()?);
        Ok(())
    });
    group.both::<W>("XDP does not forward to a backend of this node", |s| {
        let uplink = Uplink::with_neighbours(s)?;
        s.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
        s.node_port_here()?;
        let first = s.first(CLIENT, NODE_PORT);
        uplink.passes(s, &first.bytes::<W>())?;
        s.send("uplink_ingress", &first, Expect::Becomes(&first.to(LOCAL)))?;
        uplink.passes(s, &first.flags(TCP_ACK).bytes::<W>())?;
        s.counted(&[(Reason::FlowOpened, 1)])
    });
    group.both::<W>("XDP forwards no packet without a flow", |s| {
        let uplink = Uplink::with_neighbours(s)?;
        s.node_port_elsewhere()?;
        uplink.passes(s, &s.first(CLIENT, (KnownAddress::Node, 22)).bytes::<W>())?;
        uplink.passes(s, &s.packet((KnownAddress::Stranger, 80), CLIENT, TCP_ACK).bytes::<W>())?;
        uplink.passes(s, &[0; 14])?;
        // The service has no endpoints, so the stack's programs refuse the packet.
        s.service(1, &[])?;
        uplink.passes(s, &s.first(CLIENT, NODE_PORT).bytes::<W>())?;
        ensure!(s.flow_counts()? == (0, 0), "entries {:?}", s.flow_counts()?);
        s.counted(&[])
    });
    group.both::<W>("XDP does not forward what a router does more with than sending it on", |s| {
        const MTU: usize = 1_500;
        let (uplink, node) = opened_with_neighbours(s)?;
        let packet = s.packet(CLIENT, NODE_PORT, TCP_ACK);
        let options = Segment { extra: Extra::Options, ..packet.clone() };
        uplink.passes(s, &options.bytes::<W>())?;
        uplink.passes(s, &Segment { hop_limit: 1, ..packet.clone() }.bytes::<W>())?;
        let longest = Segment {
            payload: vec![1; MTU + 14 - packet.bytes::<W>().len() + packet.payload.len()],
            ..packet.clone()
        };
        uplink.sends(s, &longest, &longest.to(REMOTE).from(node))?;
        let too_long = Segment { payload: [&longest.payload[..], &[1]].concat(), ..packet.clone() };
        uplink.passes(s, &too_long.bytes::<W>())?;
        let long = Segment { payload: vec![1; 64], ..packet.clone() };
        for fragment in long.fragments::<W>(Cut { id: 7, piece: 32 }) {
            uplink.passes(s, &fragment)?;
        }
        // The error comes from a router beyond the backend's network.
        let from_backend = packet.to(REMOTE).from(node);
        uplink.passes(s, &W::error(KnownAddress::Stranger, KnownAddress::Node, &from_backend))
    });
    // The stack asks for the neighbour, and sends the packet.
    group.both::<W>("XDP does not forward to a neighbour that is not known", |s| {
        let uplink = Uplink::new::<W>(s.world)?;
        s.node_port_elsewhere()?;
        let node = opened(s, &uplink)?;
        let first = s.first(CLIENT, NODE_PORT);
        let answer = first.to(REMOTE).from(node).answer(TCP_SYN | TCP_ACK);
        uplink.passes(s, &answer.bytes::<W>())?;
        uplink.knows::<W>(CLIENT.0, NEXT_HOP)?;
        uplink.sends(s, &answer, &answer.to(CLIENT).from(NODE_PORT))?;
        let second = first.flags(TCP_ACK);
        uplink.passes(s, &second.bytes::<W>())?;
        ensure!(s.flows(Stage::Established)?.is_empty(), "what passes is the stack's to learn from");
        uplink.knows::<W>(REMOTE.0, NEXT_HOP)?;
        uplink.sends(s, &second, &second.to(REMOTE).from(node))?;
        s.counted(&[(Reason::FlowOpened, 1), (Reason::ForwardedByXdp, 2)])
    });
    group.both::<W>("XDP forwards to a next hop that is looked up once for a flow", |s| {
        const LINKS: [&str; 2] = [NEXT_HOP, "02:00:00:00:00:03"];
        let (uplink, _) = opened_with_neighbours(s)?;
        let packet = s.packet(CLIENT, NODE_PORT, TCP_ACK);
        let mut kept = 0;
        let links = || LINKS.into_iter().cycle().skip(1).zip(LINKS.into_iter().cycle());
        for (number, (link, before)) in links().enumerate() {
            // The first link is the next hop again. A flow does not keep its next hop if a new
            // second has just begun.
            if number >= 4 && number.is_multiple_of(LINKS.len()) && kept >= 2 {
                break;
            }
            ensure!(
                number < 100,
                "kept {kept} of {number} times, though only each second it is looked up anew"
            );
            ensure!(uplink.next_hop(s, &packet)? == before, "the neighbour is not known as {before}");
            uplink.knows::<W>(REMOTE.0, link)?;
            kept += usize::from(uplink.next_hop(s, &packet)? == before);
            s.world.raise_route_epoch()?;
            ensure!(uplink.next_hop(s, &packet)? == link, "not looked up after a change of routes");
        }
        uplink.knows::<W>(REMOTE.0, LINKS[1])?;
        wait::until("the next hop to be looked up anew", Duration::from_secs(60), || {
            let link = uplink.next_hop(s, &packet).map_err(|error| format!("{error:#}"))?;
            if link == LINKS[1] { Ok(Some(())) } else { Err(format!("it is {link}")) }
        })
    });
    group.both::<W>("XDP forwards no frames for others", |s| {
        let (uplink, node) = opened_with_neighbours(s)?;
        let second = s.packet(CLIENT, NODE_PORT, TCP_ACK);
        uplink.passes(s, &Segment { back: true, ..second.clone() }.bytes::<W>())?;
        let mut to_all = second.bytes::<W>();
        to_all[..6].fill(0xff);
        uplink.passes(s, &to_all)?;
        uplink.sends(s, &second, &second.to(REMOTE).from(node))
    });
    for (name, tags) in TAGS {
        for protocol in BOTH {
            let name = format!("XDP forwards frames with {name}");
            group.add(&name, protocol, WorldKind::Usual, move |s: &mut Scene<W>| with_tags(s, tags));
        }
    }
    group.both::<W>("XDP forwards frames in fragments", |s| {
        let (uplink, node) = opened_with_neighbours(s)?;
        ip(None, &format!("link set {UPLINK} mtu 9000\n"))?;
        let packet = s.packet(CLIENT, NODE_PORT, TCP_ACK);
        let long = Segment { payload: vec![1; 8_000], ..packet.clone() };
        let sent = long.to(REMOTE).from(node).sent_back();
        let bytes = long.bytes::<W>();
        let headers = bytes.len() - long.payload.len();
        for first in [bytes.len(), headers] {
            let output = s.world.run_xdp_in_fragments(uplink.index, first, &bytes)?;
            ensure!(output.verdict == Verdict::SentBack, "{first} in one piece: {:?}", output.verdict);
            ensure!(output.packet == sent.bytes::<W>(), "{first} in one piece: not what leaves");
        }
        for first in [headers - 1, headers - 8, 14] {
            let output = s.world.run_xdp_in_fragments(uplink.index, first, &bytes)?;
            ensure!(output.verdict == Verdict::GoesOn, "{first} in one piece: {:?}", output.verdict);
            ensure!(output.packet == bytes, "{first} in one piece: it is not untouched");
        }
        // The bytes of all fragments are counted.
        let (first, counted) = (s.first(CLIENT, NODE_PORT).bytes::<W>().len(), s.world.service_counters(1)?);
        let expected = (first + 2 * bytes.len()) as u64;
        ensure!(counted.bytes == expected, "{counted:?}, not {expected} bytes");
        let too_long = Segment { payload: vec![1; 9_000], ..packet };
        let bytes = too_long.bytes::<W>();
        let output = s.world.run_xdp_in_fragments(uplink.index, headers, &bytes)?;
        ensure!(output.verdict == Verdict::GoesOn, "longer than the interface takes: {:?}", output.verdict);
        Ok(())
    });
    group.both::<W>("XDP forwards nothing without a lease", |s| {
        let (uplink, node) = opened_with_neighbours(s)?;
        let second = s.packet(CLIENT, NODE_PORT, TCP_ACK);
        uplink.sends(s, &second, &second.to(REMOTE).from(node))?;
        s.world.set_lease_end(1)?;
        uplink.passes(s, &second.bytes::<W>())
    });
}

pub(crate) type Tag = (u16, u16);

/// Ethertype and id of each tag, the outer tag first.
pub(crate) const TAGS: [(&str, &[Tag]); 3] = [
    ("a tag", &[(TAG_CUSTOMER, 10)]),
    ("a tag of 802.1ad", &[(TAG_SERVICE, 4_094)]),
    ("two tags", &[(TAG_SERVICE, 10), (TAG_CUSTOMER, 20)]),
];

fn with_tags<W: Maps>(s: &mut Scene<W>, tags: &'static [Tag]) -> Result<()> {
    let uplink = Uplink::with_tags::<W>(s.world, tags)?.and_neighbours::<W>()?;
    s.node_port_elsewhere()?;
    let node = opened(s, &uplink)?;
    let first = s.first(CLIENT, NODE_PORT);
    let answer = first.to(REMOTE).from(node).answer(TCP_SYN | TCP_ACK);
    uplink.sends(s, &answer, &answer.to(CLIENT).from(NODE_PORT))?;
    let second = first.flags(TCP_ACK);
    uplink.sends(s, &second, &second.to(REMOTE).from(node))?;
    // The counter of the service port leaves out the bytes of the VLAN tags.
    let bytes: usize = [&first, &answer, &second].iter().map(|packet| packet.bytes::<W>().len()).sum();
    let counted = s.world.service_counters(1)?;
    ensure!(counted.bytes == bytes as u64, "{counted:?}, not {bytes} bytes");
    // The interface without tags has no route, another tag has no device, and a third tag is not
    // looked at.
    let inner = (TAG_CUSTOMER, 30);
    let others: [&[Tag]; 4] = [&[], &[inner], &[(TAG_CUSTOMER, 0)], &[tags, &[inner, inner][..]].concat()];
    others.into_iter().try_for_each(|tags| uplink.frame_passes(s, &tagged(&second.bytes::<W>(), tags)))?;
    let cut = tagged(&second.bytes::<W>(), tags);
    uplink.frame_passes(s, &cut[..14 + 4 * tags.len()])
}

/// Returns the frame with these tags, each of which has a priority too.
pub(crate) fn tagged(frame: &[u8], tags: &[Tag]) -> Vec<u8> {
    const PRIORITY: u16 = 0xa000;
    let (ends, rest) = frame.split_at(12);
    let tags = tags.iter().flat_map(|(protocol, id)| [*protocol, PRIORITY | id]);
    [ends, &tags.flat_map(u16::to_be_bytes).collect::<Vec<_>>(), rest].concat()
}

/// Interface that leads to everybody. It is removed when this is dropped.
pub(crate) struct Uplink {
    pub(crate) index: u32,
    /// Device of the tags, or the interface itself if there are none.
    pub(crate) device: &'static str,
    /// Tags that all frames of the uplink have.
    tags: &'static [Tag],
}

const UPLINK: &str = "uplink";
/// Device that stands for a VLAN device, which not every kernel has. The programs know only the
/// numbers of both.
const TAGGED: &str = "tagged";
// Link addresses that [`Segment`] uses.
pub(crate) const OWN: &str = "02:00:00:00:00:01";
pub(crate) const NEXT_HOP: &str = "02:00:00:00:00:02";

impl Uplink {
    pub(crate) fn new<W: Maps>(world: &mut World) -> Result<Self> {
        Self::with_tags::<W>(world, &[])
    }

    pub(crate) fn with_tags<W: Maps>(world: &mut World, tags: &'static [Tag]) -> Result<Self> {
        let device = if tags.is_empty() { UPLINK } else { TAGGED };
        let node = address::<W>(KnownAddress::Node);
        let (version, address) = if node.is_ipv4() {
            ("ipv4", format!("{node}/24"))
        } else {
            ("ipv6", format!("{node}/64 nodad"))
        };
        ip(
            None,
            &format!(
                "link add {UPLINK} address {OWN} type veth peer name beyond\n\
             link add {TAGGED} address {OWN} type veth peer name tagged-beyond\n\
             link set {UPLINK} up\n\
             link set beyond up\n\
             link set {TAGGED} up\n\
             link set tagged-beyond up\n\
             addr add {address} dev {device}\n"
            ),
        )?;
        let uplink = Self { index: if_nametoindex(UPLINK)?, device, tags };
        fs::write(format!("/proc/sys/net/{version}/conf/{device}/forwarding"), "1")?;
        world.attach_xdp(UPLINK)?;
        uplink.put_vlan_devices(world)?;
        Ok(uplink)
    }

    /// Writes the devices of the tags. A device between the interface and the one with the address
    /// needs only a number.
    fn put_vlan_devices(&self, world: &mut World) -> Result<()> {
        const BETWEEN: u32 = 1_000_000;
        let mut interface = self.index;
        for (index, &(protocol, id)) in self.tags.iter().enumerate() {
            let device = if index + 1 == self.tags.len() { if_nametoindex(self.device)? } else { BETWEEN };
            world.put_vlan_device(VlanTag { interface, protocol, id }, device)?;
            interface = device;
        }
        Ok(())
    }

    fn with_neighbours<W: Maps>(s: &mut Scene<W>) -> Result<Self> {
        Self::new::<W>(s.world)?.and_neighbours::<W>()
    }

    pub(crate) fn and_neighbours<W: Maps>(self) -> Result<Self> {
        self.knows::<W>(CLIENT.0, NEXT_HOP)?;
        self.knows::<W>(REMOTE.0, NEXT_HOP)?;
        Ok(self)
    }

    pub(crate) fn knows<W: Maps>(&self, neighbour: KnownAddress, link: &str) -> Result<()> {
        let address = address::<W>(neighbour);
        ip(None, &format!("neigh replace {address} lladdr {link} dev {} nud permanent\n", self.device))
    }

    /// Returns the link address that the packet is sent to.
    fn next_hop<W: Maps>(&self, s: &Scene<W>, packet: &Segment) -> Result<String> {
        let output = s.world.run_xdp(self.index, &packet.bytes::<W>())?;
        ensure!(output.verdict == Verdict::SentBack, "{packet:?}: {:?}", output.verdict);
        let bytes = output.packet.iter().take(6).map(|byte| format!("{byte:02x}"));
        Ok(bytes.collect::<Vec<_>>().join(":"))
    }

    /// Expects the packet to leave as `becomes`, to the next hop.
    pub(crate) fn sends<W: Maps>(&self, s: &Scene<W>, packet: &Segment, becomes: &Segment) -> Result<()> {
        self.sends_bytes(s, packet, &becomes.sent_back().bytes::<W>())
    }

    /// Expects the packet to leave as these bytes, to which the uplink's tags are added.
    pub(crate) fn sends_bytes<W: Maps>(&self, s: &Scene<W>, packet: &Segment, becomes: &[u8]) -> Result<()> {
        let output = s.world.run_xdp(self.index, &tagged(&packet.bytes::<W>(), self.tags))?;
        ensure!(output.verdict == Verdict::SentBack, "{packet:?}: {:?}", output.verdict);
        let expected = tagged(becomes, self.tags);
        ensure!(
            output.packet == expected,
            "{packet:?} became\n  {:02x?}\nexpected\n  {expected:02x?}",
            output.packet
        );
        Ok(())
    }

    pub(crate) fn passes<W: Maps>(&self, s: &Scene<W>, bytes: &[u8]) -> Result<()> {
        self.frame_passes(s, &tagged(bytes, self.tags))
    }

    fn frame_passes<W: Maps>(&self, s: &Scene<W>, frame: &[u8]) -> Result<()> {
        let output = s.world.run_xdp(self.index, frame)?;
        ensure!(output.verdict == Verdict::GoesOn, "{:?}", output.verdict);
        ensure!(output.packet == frame, "it is not untouched");
        Ok(())
    }
}

impl Drop for Uplink {
    fn drop(&mut self) {
        if let Err(error) = ip(None, &format!("link del {UPLINK}\nlink del {TAGGED}\n")) {
            eprintln!("{error:#}");
        }
    }
}

pub(crate) fn address<W: Maps>(of: KnownAddress) -> IpAddr {
    let address = W::address(of);
    let bytes: &[u8] = address.as_ref();
    match (<[u8; 4]>::try_from(bytes), <[u8; 16]>::try_from(bytes)) {
        (Ok(v4), _) => v4.into(),
        (_, Ok(v6)) => v6.into(),
        _ => unreachable!("addresses have 4 or 16 bytes"),
    }
}

/// Sends the client's first packet through the stack. Returns its source at the backend.
pub(crate) fn opened<W: Maps>(s: &mut Scene<W>, uplink: &Uplink) -> Result<Endpoint> {
    let first = s.first(CLIENT, NODE_PORT);
    uplink.passes(s, &first.bytes::<W>())?;
    ensure!(s.flow_counts()? == (0, 0), "only the stack opens flows: {:?}", s.flow_counts()?);
    s.send("uplink_ingress", &first, Expect::Becomes(&first.to(REMOTE)))?;
    // XDP also passes the next packets until one has left.
    uplink.passes(s, &first.bytes::<W>())?;
    s.world.run("uplink_egress", &first.to(REMOTE).bytes::<W>())?;
    s.masqueraded(CLIENT)
}

pub(crate) fn opened_with_neighbours<W: Maps>(s: &mut Scene<W>) -> Result<(Uplink, Endpoint)> {
    let uplink = Uplink::with_neighbours(s)?;
    s.node_port_elsewhere()?;
    let node = opened(s, &uplink)?;
    Ok((uplink, node))
}

/// Establishes a flow. Returns its source at the backend, and the next packets of client and
/// backend.
fn connected<W: Maps>(s: &mut Scene<W>, uplink: &Uplink) -> Result<(Endpoint, Segment, Segment)> {
    s.node_port_elsewhere()?;
    let node = opened(s, uplink)?;
    let first = s.first(CLIENT, NODE_PORT);
    let answer = first.to(REMOTE).from(node).answer(TCP_SYN | TCP_ACK);
    uplink.sends(s, &answer, &answer.to(CLIENT).from(NODE_PORT))?;
    let to_backend = first.flags(TCP_ACK);
    uplink.sends(s, &to_backend, &to_backend.to(REMOTE).from(node))?;
    ensure!(s.flow_counts()? == (3, 3), "entries {:?}", s.flow_counts()?);
    Ok((node, to_backend, first.to(REMOTE).from(node).answer(TCP_ACK)))
}
