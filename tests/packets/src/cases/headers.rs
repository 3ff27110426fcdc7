//! Headers as networks have them: with options, extensions, wrong lengths and missing checksums.

use anyhow::{Result, ensure};
use proxy_common::{
    family::{V4, V6},
    layout::PROTOCOL_TCP,
    packet::{TCP_ACK, TCP_SYN},
    reason::Reason,
};

use super::{Group, Scene, WorldKind, refused::refusals::refused, scene::*};
use crate::{
    wire::{Cut, DESTINATION_OPTIONS, Extra, HOP_BY_HOP, Segment},
    world::Maps,
};

const ROUTING: u8 = 43;
const OPTIONS: &[u8] = &[0, 0, 1, 4, 0, 0, 0, 0];
/// IPv6 routing header with no segments left. Its third byte is the type, and its fourth the number
/// of segments left.
const ROUTED: &[u8] = &[0, 2, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const TO_BE_ROUTED: &[u8] = &[0, 2, 4, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Adds the cases that only one family has.
pub(crate) fn family_cases(group: &mut Group) {
    // The lengths are in words of 4 bytes. Less than five words are no header, and 15 words are
    // more than the packet has.
    group.both::<V4>("with an IPv4 header of every wrong length", |s| {
        s.cluster_ip()?;
        let mut bytes = s.first(CLIENT, CLUSTER_IP).bytes::<V4>();
        for words in [0, 1, 2, 3, 4, 15] {
            bytes[14] = 0x40 | words;
            for program in PROGRAMS {
                s.send_bytes(program, &bytes, Expect::Untouched)?;
            }
        }
        s.counted(&[(Reason::Malformed, 24)])
    });
    group.both::<V6>("with a routing header that has no segments left", |s| {
        translated(s, |packet| Segment {
            extra: Extra::Chain(&[(HOP_BY_HOP, OPTIONS), (ROUTING, ROUTED), (DESTINATION_OPTIONS, OPTIONS)]),
            ..packet
        })
    });
    group.both::<V6>("with a routing header that has segments left", |s| {
        untouched(s, Extra::Chain(&[(ROUTING, TO_BE_ROUTED)]), &[])
    });
    group.both::<V6>("with more extension headers than are followed", |s| {
        untouched(s, Extra::Chain(&[(DESTINATION_OPTIONS, OPTIONS); 5]), &[(Reason::ExtensionHeaders, 2)])
    });
    group.both::<V6>("with an extension header that says to be longer than the packet", |s| {
        untouched(
            s,
            Extra::Chain(&[(DESTINATION_OPTIONS, &[0, 255, 1, 4, 0, 0, 0, 0])]),
            &[(Reason::Malformed, 2)],
        )
    });
}

/// Adds the cases of many segments in one packet (BIG TCP), whose header has the length 0. The
/// programs do not need the true length here.
pub(crate) fn longer_than_the_header_can_say(group: &mut Group) {
    const PAYLOAD: usize = 1_201;
    const JUMBO: &[u8] = &[0, 0, 0xc2, 4, 0, 0, 0, 0];
    group.tcp::<V4>("refused: a packet that is longer than its header can say", |s| {
        s.without_endpoints()?;
        let packet = Segment { payload: vec![0xa5; PAYLOAD], ..s.first(CLIENT, CLUSTER_IP) };
        let mut bytes = packet.bytes::<V4>();
        let word = |bytes: &[u8], at: usize| u32::from(u16::from_be_bytes([bytes[at], bytes[at + 1]]));
        // RFC 1624 says how a checksum changes with a field.
        let sum = (!word(&bytes, 24) & 0xffff) + (!word(&bytes, 16) & 0xffff);
        let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
        bytes[24..26].copy_from_slice(&checksum.to_be_bytes());
        bytes[16..18].fill(0);
        s.send_bytes("workload_ingress", &bytes, Expect::Answered(refused::<V4>(&packet)))
    });
    for (name, extra, answered) in [
        ("refused: a packet without a length", Extra::None, Extra::None),
        (
            "refused: a jumbogram",
            Extra::Chain(&[(HOP_BY_HOP, JUMBO)]),
            Extra::Chain(&[(HOP_BY_HOP, OPTIONS)]),
        ),
    ] {
        group.add::<V6>(name, PROTOCOL_TCP, WorldKind::Usual, move |s| {
            s.without_endpoints()?;
            let packet = Segment { payload: vec![0xa5; PAYLOAD], extra, ..s.first(CLIENT, CLUSTER_IP) };
            let mut bytes = packet.bytes::<V6>();
            let length = bytes.len() as u32 - 14 - 40;
            if matches!(extra, Extra::Chain(_)) {
                bytes[58..62].copy_from_slice(&length.to_be_bytes());
            }
            bytes[18..20].fill(0);
            let answer = refused::<V6>(&Segment { extra: answered, ..packet });
            s.send_bytes("workload_ingress", &bytes, Expect::Answered(answer))
        });
    }
}

fn untouched(s: &mut Scene<V6>, extra: Extra, counted: &[(Reason, u64)]) -> Result<()> {
    s.cluster_ip()?;
    let packet = Segment { extra, ..s.first(CLIENT, CLUSTER_IP) };
    s.send("workload_ingress", &packet, Expect::Untouched)?;
    s.send("workload_egress", &packet, Expect::Untouched)?;
    s.counted(counted)
}

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.both::<W>("with options, there and back", |s| {
        translated(s, |packet| Segment { extra: Extra::Options, ..packet })
    });
    group.both::<W>("with many options", |s| {
        translated(s, |packet| Segment { extra: Extra::ManyOptions, ..packet })
    });
    group.both::<W>("cut short anywhere", |s| cut_short(s, |packet| packet));
    group.both::<W>("with options, cut short anywhere", |s| {
        cut_short(s, |packet| Segment { extra: Extra::Options, ..packet })
    });
    group.both::<W>("with many options, cut short anywhere", |s| {
        cut_short(s, |packet| Segment { extra: Extra::ManyOptions, ..packet })
    });
    group.both::<W>("a fragment, cut short anywhere", |s| {
        s.cluster_ip()?;
        let packet = Segment { payload: vec![7; 60], ..s.first(CLIENT, CLUSTER_IP) };
        let fragments = packet.fragments::<W>(Cut { id: 7, piece: 32 });
        all_cut_short(s, &fragments[0])?;
        // A later fragment is looked up only if it is whole.
        for length in shortest(&fragments[1])..fragments[1].len() {
            s.send_bytes("workload_ingress", &fragments[1][..length], Expect::Untouched)?;
        }
        s.send_bytes("workload_ingress", &fragments[1], Expect::Untouched)?;
        let cut =
            4 * (fragments[0].len() - shortest(&fragments[0])) + fragments[1].len() - shortest(&fragments[1]);
        s.counted(&[(Reason::Malformed, cut as u64), (Reason::Fragment, 1)])
    });
    // The error quotes too little to name a flow.
    group.both::<W>("an ICMP error, cut short anywhere", |s| {
        s.cluster_ip()?;
        let first = s.opens("workload_ingress", CLIENT, CLUSTER_IP, LOCAL)?;
        let whole = W::error(LOCAL.0, CLIENT.0, &first.to(LOCAL));
        // The ports of the quoted packet are the first four of the quoted bytes.
        let quoted = if s.protocol == PROTOCOL_TCP && W::NAME == "ipv6" { 20 } else { 8 };
        let ports = whole.len() - quoted + 4;
        for length in shortest(&whole)..ports {
            for program in PROGRAMS {
                s.send_bytes(program, &whole[..length], Expect::Untouched)?;
            }
        }
        s.counted(&[(Reason::FlowOpened, 1), (Reason::Malformed, 4 * (ports - shortest(&whole)) as u64)])
    });
    // The length in the network header is less than the headers take, or less or more than the
    // packet has.
    group.both::<W>("of every length that its header can lie about", |s| {
        s.cluster_ip()?;
        let packet = s.first(CLIENT, CLUSTER_IP);
        let (network, field) = if W::NAME == "ipv4" { (0, 16) } else { (40, 18) };
        let (good, translated) = (packet.bytes::<W>(), packet.to(LOCAL).bytes::<W>());
        let whole = good.len() - 14 - network;
        let least = shortest(&good) - 14 - network + if s.protocol == PROTOCOL_TCP { 20 } else { 8 };
        let with = |bytes: &[u8], length: usize| {
            let mut bytes = bytes.to_vec();
            let old = u16::from_be_bytes([bytes[field], bytes[field + 1]]);
            bytes[field..field + 2].copy_from_slice(&(length as u16).to_be_bytes());
            if network == 0 {
                let checksum = u16::from_be_bytes([bytes[24], bytes[25]]);
                bytes[24..26].copy_from_slice(&moved(checksum, old, length as u16).to_be_bytes());
            }
            bytes
        };
        let mut malformed = 0;
        for length in (1..whole + 40).chain([u16::MAX.into()]) {
            let sent = with(&good, length);
            if (least..=whole).contains(&length) {
                let expected = with(&translated, length);
                s.send_bytes("workload_ingress", &sent, Expect::BecomesBytes(expected))?;
            } else {
                s.send_bytes("workload_ingress", &sent, Expect::Untouched)?;
                malformed += 1;
            }
        }
        s.counted(&[(Reason::FlowOpened, 1), (Reason::Malformed, malformed)])
    });
    // The checksum is wrong as if a word of the payload had been changed on the way.
    group.both::<W>("with a transport checksum that is wrong and stays so", |s| {
        s.cluster_ip()?;
        let packet = Segment { payload: b"question".to_vec(), ..s.first(CLIENT, CLUSTER_IP) };
        let spoilt = |mut bytes: Vec<u8>| {
            let last = bytes.len() - 1;
            bytes[last] ^= 0x55;
            bytes
        };
        let expected = spoilt(packet.to(LOCAL).bytes::<W>());
        s.send_bytes("workload_ingress", &spoilt(packet.bytes::<W>()), Expect::BecomesBytes(expected))
    });
    // The lengths are in words of 4 bytes. Less than five words, or more than the packet has, are
    // no header.
    group.tcp::<W>("with a TCP header of every length", |s| {
        s.cluster_ip()?;
        let packet = Segment { payload: vec![1; 20], ..s.first(CLIENT, CLUSTER_IP) };
        let (good, translated) = (packet.bytes::<W>(), packet.to(LOCAL).bytes::<W>());
        let field = shortest(&good) + 12;
        for words in 0..16u8 {
            let with = |bytes: &[u8]| {
                let mut bytes = bytes.to_vec();
                bytes[field] = words << 4;
                bytes
            };
            let expected = if (5..=10).contains(&words) {
                Expect::BecomesBytes(with(&translated))
            } else {
                Expect::Untouched
            };
            s.send_bytes("workload_ingress", &with(&good), expected)?;
        }
        s.counted(&[(Reason::FlowOpened, 1), (Reason::Malformed, 10)])
    });
    group.both::<W>("of another protocol than TCP, UDP and ICMP", |s| {
        const ESP: u8 = 50;
        const AH: u8 = 51;
        const NONE: u8 = 59;
        const SCTP: u8 = 132;
        const UNKNOWN: u8 = 253;
        s.cluster_ip()?;
        let whole = s.first(CLIENT, CLUSTER_IP).bytes::<W>();
        let field = if W::NAME == "ipv4" { 23 } else { 20 };
        for protocol in [ESP, AH, NONE, SCTP, UNKNOWN] {
            let mut bytes = whole.clone();
            bytes[field] = protocol;
            for program in PROGRAMS {
                s.send_bytes(program, &bytes, Expect::Untouched)?;
            }
        }
        s.counted(&[])
    });
    group.both::<W>("with two VLAN tags", |s| {
        s.cluster_ip()?;
        let whole = s.first(CLIENT, CLUSTER_IP).bytes::<W>();
        for outer in [0x88a8u16, 0x8100] {
            let tags = [&outer.to_be_bytes()[..], &[0, 7, 0x81, 0x00, 0, 8]].concat();
            let bytes = [&whole[..12], &tags, &whole[12..]].concat();
            for program in PROGRAMS {
                s.send_bytes(program, &bytes, Expect::Untouched)?;
            }
        }
        s.counted(&[])
    });
    group.both::<W>("of every payload length up to 64", |s| {
        s.cluster_ip()?;
        for length in 0..=64u8 {
            let payload = (0..length).map(|n| n.wrapping_mul(0x55) ^ length).collect();
            let packet = Segment { payload, ..s.first((CLIENT.0, 1000 + u16::from(length)), CLUSTER_IP) };
            expect_translated(s, &packet)?;
        }
        s.counted(&[(Reason::FlowOpened, 65)])
    });
    group.udp::<W>("without checksum stays without", |s| {
        translated(s, |packet| Segment { without_checksum: true, ..packet })
    });
    group.udp::<W>("a checksum that comes out as 0", |s| {
        s.cluster_ip()?;
        // For some two bytes of payload the checksum after translation would be zero. It is written
        // as 0xffff.
        let with =
            |word: u16| Segment { payload: word.to_be_bytes().to_vec(), ..s.first(CLIENT, CLUSTER_IP) };
        let checksum = |packet: &Segment| {
            let bytes = packet.to(LOCAL).bytes::<W>();
            u16::from_be_bytes([bytes[bytes.len() - 4], bytes[bytes.len() - 3]])
        };
        let words: Vec<u16> = (0..=u16::MAX).filter(|word| checksum(&with(*word)) == 0xffff).collect();
        ensure!(!words.is_empty());
        let packets: Vec<Segment> = words.into_iter().map(with).collect();
        for packet in &packets {
            expect_translated(s, packet)?;
        }
        Ok(())
    });
}

fn expect_translated<W: Maps>(s: &mut Scene<W>, packet: &Segment) -> Result<()> {
    s.send("workload_ingress", packet, Expect::Becomes(&packet.to(LOCAL)))?;
    let answer = packet.to(LOCAL).answer(TCP_SYN | TCP_ACK);
    s.send("workload_egress", &answer, Expect::Becomes(&answer.from(CLUSTER_IP)))
}

/// Sends the first packet of a connection after `change`, and expects it to be translated.
fn translated<W: Maps>(s: &mut Scene<W>, change: fn(Segment) -> Segment) -> Result<()> {
    s.cluster_ip()?;
    let packet = change(s.first(CLIENT, CLUSTER_IP));
    expect_translated(s, &packet)
}

/// Returns the shortest length that can be tried. BPF_PROG_TEST_RUN takes nothing shorter than an
/// Ethernet header, and since Linux 6.17 the IP header must be whole.
fn shortest(whole: &[u8]) -> usize {
    14 + if whole[12] == 0x08 { 20 } else { 40 }
}

/// Expects each shorter packet to go on unchanged, because its header says that more should be
/// there.
fn all_cut_short<W: Maps>(s: &mut Scene<W>, whole: &[u8]) -> Result<()> {
    for length in shortest(whole)..whole.len() {
        for program in PROGRAMS {
            s.send_bytes(program, &whole[..length], Expect::Untouched)?;
        }
    }
    let cut = 4 * (whole.len() - shortest(whole)) as u64;
    s.counted(&[(Reason::Malformed, cut)])
}

fn cut_short<W: Maps>(s: &mut Scene<W>, change: fn(Segment) -> Segment) -> Result<()> {
    s.cluster_ip()?;
    let whole = change(s.first(CLIENT, CLUSTER_IP)).bytes::<W>();
    all_cut_short(s, &whole)
}

/// Returns the checksum after one of the words that it covers has changed.
fn moved(checksum: u16, old: u16, new: u16) -> u16 {
    let mut sum = u32::from(!checksum) + u32::from(!old) + u32::from(new);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
