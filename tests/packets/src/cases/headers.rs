//! Headers as networks have them: options, extensions, fragments, lies, missing checksums.

use anyhow::{Result, ensure};
use proxy_common::{
    packet::{TCP_ACK, TCP_SYN},
    reason::Reason,
};

use super::{Group, Scene, scene::*};
use crate::{
    wire::{Extra, Segment},
    world::Tables,
};

pub(crate) fn cases<W: Tables + 'static>(group: &mut Group) {
    group.both::<W>("with options, there and back", |s| {
        translated(s, |packet| Segment { extra: Extra::Options, ..packet })
    });
    group.both::<W>("with many options", |s| {
        translated(s, |packet| Segment { extra: Extra::ManyOptions, ..packet })
    });
    group.both::<W>("a fragment goes on untouched", fragment);
    group.both::<W>("cut short anywhere", cut_short);
    group.both::<W>("of every payload length up to 64", payloads);
    group.udp::<W>("without checksum stays without", |s| {
        translated(s, |packet| Segment { without_checksum: true, ..packet })
    });
    group.udp::<W>("a checksum that comes out as 0", zero_checksum);
}

fn expect_translated<W: Tables>(s: &mut Scene<W>, packet: &Segment) -> Result<()> {
    s.send("workload_ingress", packet, Expect::Becomes(&packet.to(LOCAL)))?;
    let answer = packet.to(LOCAL).answer(TCP_SYN | TCP_ACK);
    s.send("workload_egress", &answer, Expect::Becomes(&answer.from(CLUSTER_IP)))
}

/// `change` makes the packet of the first one of a connection.
fn translated<W: Tables>(s: &mut Scene<W>, change: fn(Segment) -> Segment) -> Result<()> {
    s.cluster_ip()?;
    let packet = change(s.first(CLIENT, CLUSTER_IP));
    expect_translated(s, &packet)
}

fn fragment<W: Tables>(s: &mut Scene<W>) -> Result<()> {
    s.cluster_ip()?;
    let packet = Segment { extra: Extra::Fragment, ..s.first(CLIENT, CLUSTER_IP) };
    s.send("workload_ingress", &packet, Expect::Untouched)?;
    s.send("workload_egress", &packet, Expect::Untouched)?;
    s.counted(&[(Reason::Fragment, 2)])
}

/// BPF_PROG_TEST_RUN takes nothing shorter than this, and an IP header must be whole since 6.17.
fn shortest(whole: &[u8]) -> usize {
    14 + if whole[12] == 0x08 { 20 } else { 40 }
}

fn cut_short<W: Tables>(s: &mut Scene<W>) -> Result<()> {
    s.cluster_ip()?;
    let whole = s.first(CLIENT, CLUSTER_IP).bytes::<W>();
    let transport = shortest(&whole);
    let needed = transport + if s.protocol == proxy_common::layout::PROTOCOL_TCP { 14 } else { 8 };
    for length in transport..needed {
        s.send_bytes("workload_ingress", &whole[..length], Expect::Untouched)?;
        s.send_bytes("workload_egress", &whole[..length], Expect::Untouched)?;
    }
    s.counted(&[(Reason::Malformed, 2 * (needed - transport) as u64)])
}

fn payloads<W: Tables>(s: &mut Scene<W>) -> Result<()> {
    s.cluster_ip()?;
    for length in 0..=64u8 {
        let payload = (0..length).map(|n| n.wrapping_mul(0x55) ^ length).collect();
        let packet = Segment { payload, ..s.first((CLIENT.0, 1000 + u16::from(length)), CLUSTER_IP) };
        expect_translated(s, &packet)?;
    }
    s.counted(&[(Reason::FlowOpened, 65)])
}

fn zero_checksum<W: Tables>(s: &mut Scene<W>) -> Result<()> {
    s.cluster_ip()?;
    // Some two bytes of payload make the sum after translation zero, which is written as 0xffff.
    let with = |word: u16| Segment { payload: word.to_be_bytes().to_vec(), ..s.first(CLIENT, CLUSTER_IP) };
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
}
