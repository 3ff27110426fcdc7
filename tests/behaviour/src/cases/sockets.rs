//! Addresses that an application sees of its own socket.

use std::net::SocketAddr;

use anyhow::{Result, bail, ensure};
use lab::{Dial, Protocol, address::mapped, cluster::SERVER_PORT, namespace};
use scenario::Skip;

use crate::{
    case::{Case, Variant, Variants},
    check,
    fixtures::{BALANCED, EMPTY, ON_NODE1, ON_NODE2},
    world::World,
};

pub(super) const CASES: &[Case] = &[
    Case::new("getpeername answers with the address that was dialled", Variants::All, peer_name).core(),
    Case::new("recvfrom answers with the address that was sent to", Variants::Udp, unconnected).core(),
    Case::new("one unconnected socket talks to two services", Variants::Udp, shared),
    Case::new("one unconnected IPv6 socket talks to two mapped services", Variants::Udp, shared_mapped),
    Case::new("an IPv4-mapped IPv6 socket is an IPv4 client", Variants::V4, mapped_socket).core(),
    Case::new("an unconnected mapped socket gets mapped answers", Variants::Udp, mapped_unconnected),
    Case::new("a non-blocking connect reaches every endpoint", Variants::Tcp, non_blocking),
    Case::new("a non-blocking connect is refused where nobody serves", Variants::Tcp, non_blocking_refused),
    Case::new("a sidecar that redirects connections", Variants::Tcp, redirected),
    Case::new("connections to other addresses are left alone", Variants::All, direct),
];

const CLIENTS: [&str; 3] = ["client-1", "client-2", "node1"];

fn peer_name(world: &mut World, variant: Variant) -> Result<()> {
    let target = world.cluster_ip(&BALANCED, variant.family);
    every_client(world, &Dial::new(variant.protocol, target).times(40), target)
}

fn unconnected(world: &mut World, variant: Variant) -> Result<()> {
    let target = world.cluster_ip(&BALANCED, variant.family);
    every_client(world, &Dial::new(Protocol::Udp, target).unconnected().times(40), target)
}

/// Expects every endpoint to answer, and each client to see this address as its peer.
fn every_client(world: &World, dial: &Dial, peer: SocketAddr) -> Result<()> {
    for client in CLIENTS {
        for answer in world.answers(client, dial, BALANCED.endpoints)? {
            ensure!(answer.peer == peer, "dialled {}, peer is {}", dial.target, answer.peer);
        }
    }
    Ok(())
}

/// Number of rounds of an unconnected socket, which sends a datagram to both targets in each.
const ROUNDS: u32 = 5;

fn shared(world: &mut World, variant: Variant) -> Result<()> {
    from_one_socket(world, variant, false)
}

fn shared_mapped(world: &mut World, variant: Variant) -> Result<()> {
    from_one_socket(world, variant, true)
}

fn from_one_socket(world: &World, variant: Variant, is_mapped: bool) -> Result<()> {
    let targets = [&ON_NODE1, &ON_NODE2].map(|service| world.cluster_ip(service, variant.family));
    let outcomes = world.agent("client-1")?.dial_shared(&targets, ROUNDS, is_mapped)?;
    let peers = if is_mapped { targets.map(mapped) } else { targets };
    ensure!(outcomes.len() == ROUNDS as usize * peers.len(), "{} outcomes: {outcomes:?}", outcomes.len());
    for pair in outcomes.chunks(peers.len()) {
        for ((answer, peer), server) in check::answered(pair)?.iter().zip(peers).zip(["web-1", "web-2"]) {
            ensure!(answer.by == server, "{peer} was answered by {}", answer.by);
            ensure!(answer.peer == peer, "sent to {peer}, answer is from {}", answer.peer);
        }
    }
    Ok(())
}

fn mapped_socket(world: &mut World, variant: Variant) -> Result<()> {
    let target = world.cluster_ip(&BALANCED, variant.family);
    every_client(world, &Dial::new(variant.protocol, target).mapped().times(40), mapped(target))
}

fn mapped_unconnected(world: &mut World, variant: Variant) -> Result<()> {
    let target = world.cluster_ip(&BALANCED, variant.family);
    let dial = Dial::new(Protocol::Udp, target).mapped().unconnected().times(20);
    for answer in world.answered("client-1", &dial)? {
        ensure!(answer.peer == mapped(target), "answer is from {}, not {}", answer.peer, mapped(target));
    }
    Ok(())
}

fn non_blocking(world: &mut World, variant: Variant) -> Result<()> {
    let target = world.cluster_ip(&BALANCED, variant.family);
    let dial = Dial::new(Protocol::Tcp, target).non_blocking().times(40);
    world.answers("client-1", &dial, BALANCED.endpoints).map(drop)
}

fn non_blocking_refused(world: &mut World, variant: Variant) -> Result<()> {
    let dial = Dial::new(Protocol::Tcp, world.cluster_ip(&EMPTY, variant.family)).non_blocking();
    check::refused_at_once(world.setting, &world.dial("client-1", &dial)?)
}

/// Redirects a pod's connections to a sidecar, as Istio does. The sidecar asks where each was sent.
/// A socket hook has chosen the backend before any netfilter rule sees the packet.
fn redirected(world: &mut World, variant: Variant) -> Result<()> {
    const SIDECAR: u16 = 15_001;
    if control_plane::go::on_path("nft").is_none() {
        bail!(Skip("nft is not installed".into()));
    }
    let client = world.lab.netns("client-1")?.namespace.clone();
    let service = world.cluster_ip(&ON_NODE2, variant.family);
    let backend = (world.addresses("web-2")?.of(variant.family), SERVER_PORT).into();
    world.agent("client-1")?.serve(&[(variant.family.loopback(), SIDECAR).into()])?;
    let chain = "type nat hook output priority -100";
    let rule = format!("tcp dport {{ {}, {SERVER_PORT} }} redirect to :{SIDECAR}", service.port());
    namespace::nft(&client, &format!("table inet sidecar {{ chain output {{ {chain}; {rule}; }}; }}"))?;
    let outcomes = world.dial("client-1", &Dial::new(Protocol::Tcp, service));
    namespace::nft(&client, "delete table inet sidecar")?;
    let expected = if world.setting.pods_use_sockets() { backend } else { service };
    for answer in check::answered_by(&outcomes?, &["client-1"])? {
        ensure!(answer.original == Some(expected), "{:?}, expected {expected}", answer.original);
    }
    Ok(())
}

fn direct(world: &mut World, variant: Variant) -> Result<()> {
    for server in ["web-1", "web-2", "web-3"] {
        let target = (world.addresses(server)?.of(variant.family), SERVER_PORT).into();
        for client in CLIENTS {
            for answer in world.answers(client, &Dial::new(variant.protocol, target), &[server])? {
                ensure!(answer.peer == target, "dialled {target}, peer is {}", answer.peer);
            }
        }
    }
    Ok(())
}
