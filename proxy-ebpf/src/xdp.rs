//! The way of a packet from outside to a backend, or back from another node to the client: XDP forwards it before the stack has it, by the
//! interface that it has come by, by another uplink, or to a pod. All other packets pass, as they are, to the programs of TC.

use aya_ebpf::bindings::xdp_action;
use proxy_common::{
    family::{V4, V6},
    flow::{self, FlowMaps, Forwarder, NextHop, Scratch},
    layout::{IN_FRAGMENTS, TAG_CUSTOMER, TAG_SERVICE, TO_POD, VlanTag},
    packet::{
        Bytes as _, Network, Packet, Then, Tunnel, outer_length, parse, rewrite_headers, shorten_lifetime,
        write_outer,
    },
    reason::Reason,
};

use crate::{
    bytes::{
        direct::Direct as _,
        frame::{ETHERNET, Frame},
    },
    event::TellPacket,
    maps::{
        self,
        map_access::{KernelMaps, count, count_packet, lease_has_ended, recently},
    },
    route::{self, FOUND, Route},
};

trait XdpFamily: Network + Route + TellPacket + Tunnel {
    /// Of the field with the packet's length, in two bytes.
    const LENGTH: u32;
    /// Bytes before those that the field counts.
    const UNCOUNTED: u32;
}

impl XdpFamily for V4 {
    const LENGTH: u32 = 2;
    const UNCOUNTED: u32 = 0;
}

impl XdpFamily for V6 {
    const LENGTH: u32 = 4;
    const UNCOUNTED: u32 = 40;
}

#[inline(always)]
pub(crate) fn forward(frame: Frame) -> u32 {
    let mut network = ETHERNET;
    let mut interface = frame.interface();
    let Ok(mut ethertype) = frame.load(network - 2) else { return xdp_action::XDP_PASS };
    for _ in 0..TAGS {
        match device_of_tag(frame, network, ethertype, interface) {
            Tagged::No => break,
            Tagged::Unknown => return xdp_action::XDP_PASS,
            Tagged::Of(device, inner) => (interface, ethertype) = (device, inner),
        }
        network += TAG;
    }
    match u16::from_be_bytes(ethertype) {
        V4::ETHERTYPE => forward_of::<V4>(frame, network, interface),
        V6::ETHERTYPE => forward_of::<V6>(frame, network, interface),
        _ => xdp_action::XDP_PASS,
    }
}

/// How many tags of VLANs are followed.
const TAGS: usize = 2;
/// Bytes of one.
const TAG: u32 = 4;
/// Bytes of a link address.
const LINK_ADDRESS: u32 = 6;

enum Tagged {
    No,
    /// It is the stack's.
    Unknown,
    /// The interface, and the ethertype that follows.
    Of(u32, [u8; 2]),
}

/// A frame that may have a tag at `offset`, and that would be of `interface` without.
#[inline(always)]
fn device_of_tag(frame: Frame, offset: u32, ethertype: [u8; 2], interface: u32) -> Tagged {
    /// The rest is a priority.
    const ID: u16 = 0xfff;
    let protocol = u16::from_be_bytes(ethertype);
    if protocol != TAG_CUSTOMER && protocol != TAG_SERVICE {
        return Tagged::No;
    }
    let Ok([high, low, inner @ ..]) = frame.load::<{ TAG as usize }>(offset) else { return Tagged::Unknown };
    let tag = VlanTag { interface, protocol, id: u16::from_be_bytes([high, low]) & ID };
    // SAFETY: copied at once. An element that is removed meanwhile becomes no other tag's before the next change.
    match unsafe { maps::vlan_devices.get(tag) } {
        Some(device) => Tagged::Of(*device, inner),
        None => Tagged::Unknown,
    }
}

// Not inlined: the stack of both families would lie beside each other.
#[inline(never)]
fn forward_of<F: XdpFamily>(frame: Frame, network: u32, interface: u32) -> u32
where
    KernelMaps: FlowMaps<F>,
{
    let Some(scratch) = F::scratch() else { return xdp_action::XDP_PASS };
    // Through memory, which the verifier knows nothing of: it would go on once for each number of tags.
    scratch.packet.headers.network = network;
    if lease_has_ended(|| recently(&mut scratch.clock))
        || parse_frame::<F>(frame, &mut scratch.packet).is_err()
    {
        return xdp_action::XDP_PASS;
    }
    // What has come too far, the stack answers.
    if !frame.read(network + F::LIFETIME).is_ok_and(|[lifetime]: [u8; 1]| lifetime > 1) {
        return xdp_action::XDP_PASS;
    }
    scratch.interface = interface;
    scratch.is_made_here = false;
    if flow::forward(&KernelMaps, scratch, &frame).is_err() {
        return xdp_action::XDP_PASS;
    }
    let sent = if scratch.action.then == Then::Encapsulate {
        let Some(frame) = frame.grown(outer_length::<F>(&scratch.tunnel)) else {
            count(Reason::NoHeadroom);
            return xdp_action::XDP_PASS;
        };
        send_in_another::<F>(frame, scratch)
    } else {
        send::<F>(frame, scratch)
    };
    match sent {
        Ok(()) => {
            let (reason, verdict) = if scratch.next_hop.interface != scratch.interface {
                (Reason::RedirectedByXdp, xdp_action::XDP_REDIRECT)
            } else {
                (Reason::ForwardedByXdp, xdp_action::XDP_TX)
            };
            count(reason);
            // As the stack has it, without tags and outer headers.
            let length = frame.length() - scratch.packet.headers.network + ETHERNET;
            count_packet(scratch.action.rewrite.service, length);
            verdict
        }
        Err(reason) => {
            count(reason);
            F::tell_packet(reason);
            xdp_action::XDP_DROP
        }
    }
}

// Not inlined: what it needs of the stack would be added to what keeping a flow needs.
#[inline(never)]
fn parse_frame<F: XdpFamily>(frame: Frame, packet: &mut Packet<F::Address>) -> Result<(), Reason> {
    parse::<F, _>(frame, packet.headers.network, packet)
}

impl<F: XdpFamily> Forwarder<F> for Frame
where
    KernelMaps: FlowMaps<F>,
{
    #[inline(always)]
    fn packet_length(&self, Scratch { packet, action, tunnel, .. }: &Scratch<F::Address>) -> u32 {
        let length = self.length() - packet.headers.network;
        if action.then == Then::Encapsulate { length + outer_length::<F>(tunnel) } else { length }
    }

    #[inline(always)]
    fn look_up(&self, scratch: &mut Scratch<F::Address>) -> bool {
        look_up::<F>(*self, scratch) == YES
    }

    /// Back by its interface, and so with the same tags, or by another. The frame is for the interface that it has come by: others only see it.
    #[inline(always)]
    fn can_send(&self, scratch: &Scratch<F::Address>) -> bool {
        let Scratch { packet, interface, next_hop, .. } = scratch;
        if scratch.is_for_pod() {
            is_redirectable(*self, packet.headers.network, next_hop.interface | TO_POD)
        } else if next_hop.interface == *interface {
            // The link address that packets leave with is the interface's own.
            self.read(0) == Ok(next_hop.source)
        } else {
            is_redirectable(*self, packet.headers.network, next_hop.interface)
        }
    }
}

/// Answered by [`look_up`].
const YES: u32 = 1;
const NO: u32 = 0;

/// Sets `scratch.next_hop`.
// Not inlined: the parameters would lie on the stack beside what opening a flow needs.
#[inline(never)]
fn look_up<F: XdpFamily>(frame: Frame, scratch: &mut Scratch<F::Address>) -> u32
where
    KernelMaps: FlowMaps<F>,
{
    // What is longer than the next hop takes is the stack's, which tells the sender.
    let length = Forwarder::<F>::packet_length(&frame, scratch);
    let Ok(length) = u16::try_from(length) else { return NO };
    let Scratch { packet, action, interface, next_hop, .. } = scratch;
    let rewrite = &action.rewrite;
    let mut parameters = route::parameters::<F>(*interface, &rewrite.source, &rewrite.destination);
    let ports = (rewrite.source_port, rewrite.destination_port);
    route::set_transport(&mut parameters, packet.protocol, ports, length);
    if route::look_up(frame.context(), &mut parameters) != FOUND {
        return NO;
    }
    next_hop.destination = parameters.dmac;
    next_hop.source = parameters.smac;
    next_hop.interface = parameters.ifindex;
    // SAFETY: an integer whichever it is. The kernel has replaced the length by the most that goes there; before 5.12 it is still the length.
    next_hop.longest = unsafe { parameters.__bindgen_anon_1.tot_len };
    YES
}

/// Can it leave by `target`, a key of `redirect_targets` for another interface than it has come by? Tells the kernel so, which is without effect
/// unless the program ends with `XDP_REDIRECT`: nothing can fail between a look at the map and that.
#[inline(always)]
fn is_redirectable(frame: Frame, network: u32, target: u32) -> bool {
    // A tag would go with it.
    if network != ETHERNET {
        return false;
    }
    // SAFETY: read at once. An element that is removed meanwhile becomes no other interface's before the next change.
    let Some(own) = (unsafe { maps::redirect_sources.get(frame.interface()) }) else { return false };
    if frame.read(0) != Ok(own.bytes) {
        return false;
    }
    let key = if frame.is_whole() { target } else { target | IN_FRAGMENTS };
    maps::redirect_targets.redirect(key, xdp_action::XDP_PASS.into()).is_ok()
}

#[inline(always)]
fn send<F: XdpFamily>(
    frame: Frame,
    Scratch { packet, action, next_hop, .. }: &Scratch<F::Address>,
) -> Result<(), Reason> {
    rewrite_headers::<F, _>(frame, packet, &action.rewrite)?;
    shorten_lifetime::<F, _>(frame, packet.headers.network)?;
    set_link_addresses(frame, next_hop)
}

/// As [`send`], in another packet. The first bytes of the frame are room for that one's headers; the old link header lies behind them. What
/// pads a short frame stays behind both packets.
// Not inlined, for its stack.
#[inline(never)]
fn send_in_another<F: XdpFamily>(
    frame: Frame,
    Scratch { packet, tunnel, next_hop, .. }: &Scratch<F::Address>,
) -> Result<(), Reason> {
    let room = outer_length::<F>(tunnel);
    let network = packet.headers.network;
    let inner = network + room;
    shorten_lifetime::<F, _>(frame, inner)?;
    // Tags, and the ethertype.
    let mut offset = 2 * LINK_ADDRESS;
    for _ in 0..=TAGS * 2 {
        if offset < network {
            frame.store(offset, frame.load::<2>(offset + room)?)?;
            offset += 2;
        }
    }
    let length = u32::from(u16::from_be_bytes(frame.load(inner + F::LENGTH)?)) + F::UNCOUNTED;
    write_outer::<F, _>(frame, network, (frame.load(inner)?, length), tunnel)?;
    set_link_addresses(frame, next_hop)
}

#[inline(always)]
fn set_link_addresses(frame: Frame, next_hop: &NextHop) -> Result<(), Reason> {
    frame.store(0, next_hop.destination)?;
    frame.store(LINK_ADDRESS, next_hop.source)
}
