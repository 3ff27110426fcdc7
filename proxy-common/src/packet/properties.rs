//! Properties that hold for any bytes that come as a packet.
//!
//! Every test run checks them with some packets (`tests`), and cargo-fuzz (`../../fuzz`) with as
//! many as one has time for. A property that does not hold panics.

use core::{cell::Cell, fmt::Debug, ops::Range};

use super::{Headers, Network, Packet, Part, Rewrite, Segment, parse, rewrite};
use crate::{
    family::{V4, V6},
    layout::{Address, PROTOCOL_UDP},
    port::Port,
    reason::Reason,
};

const ETHERNET: u32 = 14;

/// Parses bytes. The first byte of `input` says what they are: bit 0 is the family, and bit 1 says
/// whether there is an Ethernet header.
pub fn parses(input: &[u8]) {
    let Some((kind, bytes)) = input.split_first() else { return };
    let (mut bytes, network) = (bytes.to_vec(), network_of(*kind));
    if kind & 1 == 0 {
        parsed::<V4>(&mut bytes, network);
    } else {
        parsed::<V6>(&mut bytes, network);
    }
}

/// Rewrites a packet and reverses it. `input` is the same as for [`parses`], with the new ends
/// before the packet.
pub fn rewrites_and_reverses(input: &[u8]) {
    let Some((kind, rest)) = input.split_first() else { return };
    let network = network_of(*kind);
    if kind & 1 == 0 {
        rewritten_and_reversed::<V4, 4>(rest, network);
    } else {
        rewritten_and_reversed::<V6, 16>(rest, network);
    }
}

const fn network_of(kind: u8) -> u32 {
    if kind & 2 == 0 { 0 } else { ETHERNET }
}

fn parsed<F: Network<Address: Debug>>(bytes: &mut [u8], network: u32) -> Option<Packet<F::Address>> {
    let before = bytes.to_vec();
    let mut packet = Packet::default();
    let outcome = parse::<F, _>(Cell::from_mut(bytes).as_slice_of_cells(), network, &mut packet);
    assert_eq!(bytes, before, "parsing changes nothing");
    // In the kernel the value still holds what was parsed from the packet before.
    let mut after_another = another();
    let outcome_after = parse::<F, _>(Cell::from_mut(bytes).as_slice_of_cells(), network, &mut after_another);
    assert_eq!(outcome_after, outcome, "the packet before does not matter");
    if let Err(reason) = outcome {
        assert!(matches!(reason, Reason::NotAService | Reason::Malformed | Reason::ExtensionHeaders));
        return None;
    }
    assert_eq!(after_another, packet, "the packet before does not matter");
    let end = end_of::<F>(bytes, network);
    assert!(end <= bytes.len(), "it is as long as its header says");
    if !packet.is_later_fragment() {
        let ports = packet.headers.transport as usize;
        assert!(ports + 4 <= end, "ports are in the packet");
        assert_eq!(bytes[ports..ports + 4], ports_of(&packet), "ports are where they should be");
    }
    Some(packet)
}

/// Returns a packet that has nothing in common with most packets.
fn another<A: Address>() -> Packet<A> {
    let port = Port::new(0xabcd);
    let mut packet = Packet::<A> {
        source_port: port,
        destination_port: port,
        protocol: 0xab,
        segment: Segment::new(0xff, 1, 2, 3),
        fragment: super::Fragment { part: Part::Later, id: 0xabcd },
        headers: Headers { network: 1, transport: 2, outer: 3, icmp: 4, end: 5 },
        ..Packet::default()
    };
    packet.source.as_mut().fill(0xab);
    packet.destination.as_mut().fill(0xcd);
    packet
}

/// Returns the end of the packet, as its network header says.
fn end_of<F: Network>(bytes: &[u8], network: u32) -> usize {
    let network = network as usize;
    let (field, start) = if F::CHECKSUM.is_some() { (2, network) } else { (4, network + 40) };
    match u16::from_be_bytes([bytes[network + field], bytes[network + field + 1]]) {
        0 => bytes.len(),
        length => start + usize::from(length),
    }
}

/// Returns the ports as the transport header has them. A quoted packet has its ends in the reverse
/// order.
fn ports_of<A: Address>(packet: &Packet<A>) -> [u8; 4] {
    let (source, destination) = (packet.source_port.to_network(), packet.destination_port.to_network());
    let [first, second] = if packet.is_error() { [destination, source] } else { [source, destination] };
    [first[0], first[1], second[0], second[1]]
}

fn rewritten_and_reversed<F: Network<Address: Debug>, const N: usize>(input: &[u8], network: u32) {
    let Some((ends, bytes)) = input.split_at_checked(2 * N + 4) else { return };
    let mut bytes = bytes.to_vec();
    let Some(packet) = parsed::<F>(&mut bytes, network) else { return };
    let (addresses, ports) = ends.split_at(2 * N);
    let mut there = Rewrite::<F::Address> {
        source_port: Port::from_network([ports[0], ports[1]]),
        destination_port: Port::from_network([ports[2], ports[3]]),
        ..Rewrite::default()
    };
    there.source.as_mut().copy_from_slice(&addresses[..N]);
    there.destination.as_mut().copy_from_slice(&addresses[N..]);
    if packet.is_later_fragment() {
        (there.source_port, there.destination_port) = (Port::NONE, Port::NONE);
    }
    let original = bytes.clone();
    let fields = Fields::of::<F>(&original, network, &packet);
    let translated = with_ends(packet, &there);

    write::<F>(&mut bytes, &packet, &there);
    assert_eq!(
        parsed::<F>(&mut bytes, network),
        Some(translated),
        "it has its new ends, all else is as before"
    );
    fields.assert_same_defects(&original, &bytes);
    for (at, (old, new)) in original.iter().zip(&bytes).enumerate() {
        assert!(old == new || fields.has(at), "byte {at} of {original:02x?} is another");
    }

    let back = Rewrite {
        source: packet.source,
        destination: packet.destination,
        source_port: packet.source_port,
        destination_port: packet.destination_port,
        ..there
    };
    write::<F>(&mut bytes, &translated, &back);
    fields.assert_reversed(&original, &bytes);
}

fn write<F: Network>(bytes: &mut [u8], packet: &Packet<F::Address>, to: &Rewrite<F::Address>) {
    let written = rewrite::<F, _>(Cell::from_mut(bytes).as_slice_of_cells(), packet, to);
    assert_eq!(written, Ok(()), "what was parsed can be rewritten");
}

pub(super) fn with_ends<A: Address>(packet: Packet<A>, ends: &Rewrite<A>) -> Packet<A> {
    Packet {
        source: ends.source,
        destination: ends.destination,
        source_port: ends.source_port,
        destination_port: ends.destination_port,
        ..packet
    }
}

/// The fields of a packet that a translation changes.
#[derive(Default)]
struct Fields {
    addresses_and_ports: Vec<Range<usize>>,
    /// The source address of an ICMP error itself, which reversing does not restore.
    teller: Range<usize>,
    checksums: Vec<Coverage>,
}

struct Coverage {
    /// The offset of the checksum.
    at: usize,
    covered: Vec<Range<usize>>,
}

impl Fields {
    fn of<F: Network>(bytes: &[u8], network: u32, packet: &Packet<F::Address>) -> Self {
        let mut fields = Self::default();
        let end = end_of::<F>(bytes, network);
        let headers = packet.headers;
        let outer = fields.network_header::<F>(bytes, network);
        let (mut pseudo, transport) = (outer.clone(), headers.transport as usize);
        if packet.is_error() {
            fields.teller = fields.addresses_and_ports[0].clone();
            pseudo = fields.network_header::<F>(bytes, headers.network);
            let icmp = headers.icmp as usize;
            let addresses = if F::CHECKSUM.is_none() { outer } else { 0..0 };
            fields.checksums.push(Coverage { at: icmp + 2, covered: vec![addresses, icmp..end] });
        }
        if !packet.is_later_fragment() {
            fields.addresses_and_ports.push(transport..transport + 4);
            let is_udp = packet.protocol == PROTOCOL_UDP;
            let at = transport + if is_udp { 6 } else { 16 };
            let is_none = is_udp && bytes.get(at..at + 2) == Some(&[0, 0]);
            if at + 2 <= end && !is_none {
                fields.checksums.push(Coverage { at, covered: vec![pseudo, transport..end] });
            }
        }
        fields
    }

    /// Adds the fields of a network header, and returns the range of its addresses.
    fn network_header<F: Network>(&mut self, bytes: &[u8], network: u32) -> Range<usize> {
        let at = |offset: u32| (network + offset) as usize;
        let length = size_of::<F::Address>();
        for offset in [F::SOURCE, F::DESTINATION] {
            self.addresses_and_ports.push(at(offset)..at(offset) + length);
        }
        if let Some(offset) = F::CHECKSUM {
            let header = at(0)..at(0) + usize::from(bytes[at(0)] & 0xf) * 4;
            self.checksums.push(Coverage { at: at(offset), covered: vec![header] });
        }
        at(F::SOURCE)..at(F::DESTINATION) + length
    }

    fn has(&self, at: usize) -> bool {
        self.addresses_and_ports.iter().any(|range| range.contains(&at))
            || self.checksums.iter().any(|checksum| (checksum.at..checksum.at + 2).contains(&at))
    }

    /// Asserts that a correct checksum is still correct, and that a wrong one is wrong by as much
    /// as before.
    fn assert_same_defects(&self, before: &[u8], after: &[u8]) {
        for Coverage { at, covered } in &self.checksums {
            assert_eq!(sum(before, covered), sum(after, covered), "checksum at {at} of {before:02x?}");
        }
    }

    fn assert_reversed(&self, original: &[u8], reversed: &[u8]) {
        self.assert_same_defects(original, reversed);
        let is_checksum =
            |at| self.checksums.iter().any(|checksum| (checksum.at..checksum.at + 2).contains(&at));
        for (at, (old, new)) in original.iter().zip(reversed).enumerate() {
            // Checksums may differ in their bytes, because 0 and 0xffff are the same. Their defects
            // are compared above.
            let may_differ = is_checksum(at) || self.teller.contains(&at);
            assert!(old == new || may_differ, "byte {at} of {original:02x?} is not reversed");
        }
    }
}

/// Returns the sum modulo 0xffff, as RFC 1071 has it.
fn sum(bytes: &[u8], ranges: &[Range<usize>]) -> u64 {
    let words = ranges.iter().flat_map(|range| bytes[range.clone()].chunks(2));
    words.map(|word| u64::from(word[0]) << 8 | u64::from(*word.get(1).unwrap_or(&0))).sum::<u64>() % 0xffff
}
