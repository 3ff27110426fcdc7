//! Pings of cluster IPs.

use std::{net::UdpSocket, time::Duration};

use anyhow::{Context as _, Result, ensure};
use lab::{address::Family, cluster::OUTSIDE, namespace};
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use serde_json::json;

use crate::{
    case::{Case, Variant, Variants},
    fixtures::{BALANCED, EMPTY},
    setting::ProxyKind,
    world::World,
};

pub(super) const CASES: &[Case] =
    &[Case::new("pings of a cluster IP are answered where that is wanted", Variants::Tcp, pings)
        .concerns(|setting| setting.proxy == ProxyKind::Ebpf)
        .configured(|| json!({"ebpf": {"answerPing": true}}))];

const ANSWERED_WITHIN: Duration = Duration::from_secs(2);
/// The last one fills a packet.
const LENGTHS: [usize; 3] = [0, 56, 1_300];

fn pings(world: &mut World, variant: Variant) -> Result<()> {
    for client in ["client-1", "client-2", "node1", OUTSIDE] {
        for service in [&BALANCED, &EMPTY] {
            let target = world.cluster_ip(service, variant.family).ip();
            let namespace = world.lab.netns(client)?.namespace.clone();
            namespace::sysctl(&namespace, &[("net/ipv4/ping_group_range", "0 0")])?;
            namespace::within(&namespace, || {
                let socket = ping_socket(variant.family)?;
                socket.connect((target, 0))?;
                LENGTHS.iter().try_for_each(|length| ping(&socket, variant.family, *length))
            })
            .with_context(|| format!("from {client} to {target}"))?;
        }
    }
    Ok(())
}

/// The kernel writes id and checksum of what it sends, and drops what has a wrong one.
fn ping_socket(family: Family) -> Result<UdpSocket> {
    let (domain, protocol) = match family {
        Family::V4 => (AddressFamily::Inet, SockProtocol::Icmp),
        Family::V6 => (AddressFamily::Inet6, SockProtocol::IcmpV6),
    };
    let socket = UdpSocket::from(socket(domain, SockType::Datagram, SockFlag::SOCK_CLOEXEC, protocol)?);
    socket.set_read_timeout(Some(ANSWERED_WITHIN))?;
    Ok(socket)
}

fn ping(socket: &UdpSocket, family: Family, length: usize) -> Result<()> {
    let (request, reply) = match family {
        Family::V4 => (8, 0),
        Family::V6 => (128, 129),
    };
    let mut message = vec![0xa5; 8 + length];
    message[..8].copy_from_slice(&[request, 0, 0, 0, 0, 0, 0, 7]);
    socket.send(&message)?;
    let mut answer = vec![0; message.len() + 1];
    let received = socket.recv(&mut answer).with_context(|| format!("a ping of {length} bytes"))?;
    ensure!(answer[0] == reply && answer[..received][8..] == message[8..], "another answer: {answer:?}");
    Ok(())
}
