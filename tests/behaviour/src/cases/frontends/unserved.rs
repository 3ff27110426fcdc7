//! Pings of cluster IPs, and addresses that no Service has.

use std::{
    net::{SocketAddr, UdpSocket},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use lab::{
    Dial, Outcome,
    address::{self, Family, SERVICE_RANGE4, SERVICE_RANGE6, cluster_ip},
    cluster::{FABRIC, NODES, OUTSIDE},
    namespace,
    objects::Key,
};
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use serde_json::{Value, json};

use crate::{
    case::{Case, Variant, Variants},
    fixtures::{BALANCED, EMPTY, PORT},
    setting::ProxyKind,
    world::World,
};

pub(in crate::cases) const CASES: &[Case] = &[
    Case::new("pings of a cluster IP are answered where that is wanted", Variants::Tcp, pings)
        .concerns(|setting| setting.proxy == ProxyKind::Ebpf)
        .configured(fields),
    Case::new(
        "packets to an address of a ServiceCIDR that no Service has are dropped",
        Variants::Tcp,
        unallocated,
    )
    .concerns(|setting| matches!(setting.proxy, ProxyKind::Ebpf | ProxyKind::Nftables))
    .configured(fields),
];

fn fields() -> Value {
    json!({"ebpf": {"answerPing": true, "unallocatedServiceAddresses": "drop"}})
}

/// Index of a cluster IP that no Service of a lab has.
const UNALLOCATED_INDEX: u16 = 64_000;
/// Milliseconds after which a packet counts as dropped. An ICMP error ends `connect` only after its
/// second SYN, 1 s later. The first error comes while `connect` holds the socket, and is ignored.
const SILENCE: u64 = 1_600;
/// Milliseconds within which the ICMP error of an address without a route comes, on a busy machine
/// too.
const TOLD_WITHIN_MS: u64 = 10_000;

fn unallocated(world: &mut World, variant: Variant) -> Result<()> {
    // The fabric has no route to the address. It needs routes to the pods, so that its ICMP errors
    // reach them.
    let fabric = world.lab.netns(FABRIC)?.namespace.clone();
    let routes = |what: &str| {
        let route = |node| {
            let (via, pods) = (address::node(node), address::pod(node, 0));
            format!(
                "route {what} {}/24 via {}\nroute {what} {}/64 via {}\n",
                pods.v4, via.v4, pods.v6, via.v6
            )
        };
        namespace::ip(Some(&fabric), &String::from_iter(NODES.map(route)))
    };
    routes("add")?;
    let key = ("ServiceCIDR", "unallocated".to_owned());
    let found = while_known_and_not(world, variant, &key);
    world.objects.remove(&key);
    routes("del")?;
    world.settle()?;
    found
}

fn while_known_and_not(world: &mut World, variant: Variant, key: &Key) -> Result<()> {
    let range = json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": key.0,
        "metadata": {"name": key.1},
        "spec": {"cidrs": [SERVICE_RANGE4, SERVICE_RANGE6]},
    });
    all_meet(world, variant, false)?;
    world.objects.set(key.0, &key.1, range);
    world.settle()?;
    all_meet(world, variant, true)
}

/// Dials with all clients at the same time.
fn all_meet(world: &World, variant: Variant, is_known: bool) -> Result<()> {
    thread::scope(|scope| {
        let clients = ["node1", OUTSIDE, "client-2", "client-1"];
        let dials = clients.map(|client| scope.spawn(move || meets(world, client, variant, is_known)));
        dials.into_iter().try_for_each(|dial| dial.join().map_err(|_| anyhow!("a client panicked"))?)
    })
    .with_context(|| format!("while the range is known: {is_known}"))
}

/// Dials the address that no Service has, and then a cluster IP.
fn meets(world: &World, client: &str, variant: Variant, is_known: bool) -> Result<()> {
    let target = SocketAddr::new(cluster_ip(UNALLOCATED_INDEX).of(variant.family), PORT);
    let timeout_ms = if is_known { SILENCE } else { TOLD_WITHIN_MS };
    let outcomes = world.dial(client, &Dial::new(variant.protocol, target).timeout_ms(timeout_ms))?;
    let found = outcomes.into_iter().next().context("no outcome")?;
    // If a hook sees the process, `connect` fails.
    let has_hook = match client {
        OUTSIDE => false,
        "node1" => world.setting.node_uses_sockets(),
        _ => world.setting.pods_use_sockets(),
    };
    let is_right = match (is_known, has_hook) {
        (false, _) => matches!(found, Outcome::Unreachable),
        (true, false) => matches!(found, Outcome::TimedOut),
        (true, true) => matches!(found, Outcome::Refused { .. }),
    };
    ensure!(is_right, "from {client}: {found}");
    let served = Dial::new(variant.protocol, world.cluster_ip(&BALANCED, variant.family));
    world.answered(client, &served).with_context(|| format!("from {client} to a cluster IP")).map(drop)
}

const ANSWERED_WITHIN: Duration = Duration::from_secs(10);
/// Payload lengths of the pings. The last one fills a packet.
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

/// Opens a ping socket. The kernel writes id and checksum of what it sends, and drops what comes
/// with a wrong checksum.
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
