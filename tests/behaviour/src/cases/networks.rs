//! Nodes with several networks. Each network reaches, and accepts, only its own addresses.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Result, bail, ensure};
use lab::{
    Answer, Dial, Protocol,
    address::external,
    cluster::{OUTSIDE, SECOND_OUTSIDE, drivers_tell_what_they_take, network::Network},
    objects::{Ingress, Service},
    wait,
};
use scenario::Skip;
use serde_json::Value;

use crate::{
    case::{Case, Difference, Run, Variant, Variants, says},
    check,
    fixtures::{OVER_NETWORK, PORT},
    setting::{PathKind, ProxyKind, Setting},
    world::World,
};

pub(super) const CASES: &[Case] = &[
    Case::new("networks: clients elsewhere reach a backend over a vxlan overlay", Variants::All, |world, variant| {
        over(world, variant, Network::Vxlan)
    }),
    Case::new("networks: clients elsewhere reach a backend over an ipip tunnel", Variants::V4, |world, variant| {
        over(world, variant, Network::Ipip)
    }),
    Case::new("networks: clients elsewhere reach a backend over WireGuard", Variants::All, |world, variant| {
        over(world, variant, Network::WireGuard)
    }),
    Case::new("networks: clients elsewhere reach a backend over a second uplink", Variants::All, |world, variant| {
        over(world, variant, Network::SecondUplink)
    }),
    of_xdp(
        "networks: packets between a client outside and a backend over a second uplink skip the stack",
        Variants::All,
        redirected,
    ),
    of_xdp(
        "networks: packets between a client outside and a backend over a vxlan overlay skip the stack",
        Variants::All,
        |world, variant| by_node_port(world, variant, Network::Vxlan, "skipped_stack"),
    ),
    of_xdp(
        "networks: packets between a client outside and a backend over an ipip tunnel skip the stack",
        Variants::V4,
        |world, variant| by_node_port(world, variant, Network::Ipip, "skipped_stack"),
    ),
    of_xdp(
        "networks: packets between a client outside and a backend over WireGuard skip the stack",
        Variants::All,
        |world, variant| by_node_port(world, variant, Network::WireGuard, "skipped_stack"),
    ),
    Case::new("networks: clients elsewhere reach a backend over a VLAN of the card", Variants::All, |world, variant| {
        over(world, variant, Network::Vlan)
    })
    .core(),
    // This case comes after those of a network card that strips tags.
    of_xdp(
        "networks: packets between a client and a backend in a VLAN of a VLAN skip the stack",
        Variants::All,
        tagged_twice,
    ),
    Case::new("networks: a process of the node reaches a backend over a vxlan overlay", Variants::All, from_node)
        .differs(source_of_the_frontends_route),
    Case::new(
        "networks: a client beyond a second uplink reaches a backend on another node",
        Variants::All,
        client_beyond,
    ),
    Case::new(
        "networks: external policy Local: a client beyond a second uplink gets the endpoint of the node, and keeps its address",
        Variants::All,
        local_beyond,
    ),
    Case::new(
        "networks: external policy Local: no endpoint on the node, a client beyond a second uplink is dropped",
        Variants::All,
        none_beyond,
    )
    .differs(super::frontends::policy::accepted_first),
];

/// Makes a case of the small set, where packets skip the network stack.
const fn of_xdp(name: &'static str, variants: Variants, run: Run) -> Case {
    Case::new(name, variants, run).concerns(|setting| setting.uses_xdp()).core()
}

fn source_of_the_frontends_route(setting: &Setting, _: Variant) -> Option<Difference> {
    let why = "without socket hooks, what a process of the node sends keeps the source that the route to the frontend has given it";
    (setting.proxy == ProxyKind::Ebpf && setting.path == PathKind::Off)
        .then_some(Difference { why, says: says::NOT_ANSWERED })
}

const SILENCE_MS: u64 = 300;

/// Time within which a node serves a new interface.
const APPEARS_WITHIN: Duration = Duration::from_secs(30);

/// Dials a node port of node 1 whose endpoint is a pod of node 2. The nodes reach that pod only
/// over `network`. Its answers come back over `network` only if node 1 masquerades with its address
/// there.
fn over(world: &mut World, variant: Variant, network: Network) -> Result<()> {
    if let Some(option) = network.missing_option() {
        bail!(Skip(format!("this kernel has no {option}")));
    }
    world.add_network(network)?;
    world.set_service(&OVER_NETWORK.service(), &[network.pod()])?;
    let target = world.node_port(&OVER_NETWORK, 1, variant.family)?;
    for client in [OUTSIDE, "client-2", "node2"] {
        let answers = dial(world, client, variant, target, network.pod())?;
        check::saw(&answers, client, |seen| network.node(1).contains(seen))?;
    }
    Ok(())
}

fn redirected(world: &mut World, variant: Variant) -> Result<()> {
    if !drivers_tell_what_they_take() {
        bail!(Skip("this kernel does not tell which frames a veth takes (6.3)".to_owned()));
    }
    by_node_port(world, variant, Network::SecondUplink, "redirected_by_xdp")
}

fn by_node_port(world: &mut World, variant: Variant, network: Network, reason: &str) -> Result<()> {
    over(world, variant, network)?;
    let target = world.node_port(&OVER_NETWORK, 1, variant.family)?;
    counted(world, variant, target, network, reason)
}

/// Dials node 1, whose card leaves the tags. Node 2's card strips them, so packets that come there
/// take the way through the stack.
fn tagged_twice(world: &mut World, variant: Variant) -> Result<()> {
    const NETWORK: Network = Network::VlanInVlan;
    if let Some(option) = NETWORK.missing_option() {
        bail!(Skip(format!("this kernel has no {option}")));
    }
    world.add_network(NETWORK)?;
    world.set_service(&OVER_NETWORK.service(), &[NETWORK.pod()])?;
    let port = world.node_port(&OVER_NETWORK, 1, variant.family)?.port();
    let target = SocketAddr::new(NETWORK.node(1).of(variant.family), port);
    dial(world, OUTSIDE, variant, target, NETWORK.pod())?;
    let has_xdp = if drivers_tell_what_they_take() {
        "its driver veth has XDP"
    } else {
        "its driver veth may have XDP, which kernels before 6.3 do not tell"
    };
    let says = [(1, "native", has_xdp), (2, "no", "ethtool -K eth0 rx-vlan-hw-parse off")];
    for (node, xdp, why) in says {
        wait::until("status tells what the uplink has", APPEARS_WITHIN, || {
            let status =
                world.tool(node, &["status", "--output", "json"]).map_err(|error| error.to_string())?;
            let status: Value = serde_json::from_str(&status).map_err(|error| error.to_string())?;
            let uplinks = status["xdp"].as_array().map(Vec::as_slice).unwrap_or_default();
            let card = uplinks.iter().find(|uplink| uplink["interface"] == "eth0").ok_or("no eth0")?;
            let is_told =
                card["xdp"] == xdp && card["reason"].as_str().is_some_and(|told| told.contains(why));
            if is_told { Ok(Some(())) } else { Err(format!("node{node}: {card}")) }
        })?;
    }
    counted(world, variant, target, NETWORK, "forwarded_by_xdp")
}

/// Expects all packets but the first one of each flow to be counted for this reason.
fn counted(
    world: &World,
    variant: Variant,
    target: SocketAddr,
    network: Network,
    reason: &str,
) -> Result<()> {
    const REQUESTS: u16 = 20;
    /// Time within which the controller learns what devices can do. It checks them every ten
    /// seconds, and it had seen the other end of the pair before that became a card.
    const KNOWN_WITHIN: Duration = Duration::from_secs(60);
    // A connection has five such packets: the backend's SYN, its acknowledgement, the request, the
    // answer, and the ends.
    let of_each = if variant.protocol == Protocol::Tcp { 5 } else { 1 };
    let request = || {
        let before = world.counted(1, reason)?;
        let dial = Dial::new(variant.protocol, target).times(REQUESTS.into());
        world.answers(OUTSIDE, &dial, &[network.pod()])?;
        let packets = world.counted(1, reason)? - before;
        ensure!(packets >= of_each * u64::from(REQUESTS - 4), "{packets} packets of {REQUESTS} requests");
        Ok(())
    };
    wait::until(&format!("packets are counted as {reason}"), KNOWN_WITHIN, || {
        request().map(Some).map_err(|error: anyhow::Error| error.to_string())
    })
}

fn from_node(world: &mut World, variant: Variant) -> Result<()> {
    world.add_network(Network::Vxlan)?;
    world.set_service(&OVER_NETWORK.service(), &[Network::Vxlan.pod()])?;
    let target = world.cluster_ip(&OVER_NETWORK, variant.family);
    if source_of_the_frontends_route(&world.setting, variant).is_some() {
        // No answer ever comes, so there is nothing to wait for.
        let once = Dial::new(variant.protocol, target).timeout_ms(SILENCE_MS);
        return check::answered(&world.dial("node1", &once)?).map(drop);
    }
    dial(world, "node1", variant, target, Network::Vxlan.pod()).map(drop)
}

fn client_beyond(world: &mut World, variant: Variant) -> Result<()> {
    let target = balance_on_node1(world, variant, false, &["web-2"])?;
    let answers = dial(world, SECOND_OUTSIDE, variant, target, "web-2")?;
    check::saw(&answers, SECOND_OUTSIDE, |seen| world.is_node_address(1, seen))
}

fn local_beyond(world: &mut World, variant: Variant) -> Result<()> {
    let target = balance_on_node1(world, variant, true, &["web-1", "web-2"])?;
    let answers = dial(world, SECOND_OUTSIDE, variant, target, "web-1")?;
    let (is_process, client) = (world.setting.datapath().is_a_process(), world.addresses(SECOND_OUTSIDE)?);
    check::saw(&answers, SECOND_OUTSIDE, |seen| is_process || client.contains(seen))
}

fn none_beyond(world: &mut World, variant: Variant) -> Result<()> {
    // This first shows that the node serves the interface. Otherwise silence would prove nothing.
    local_beyond(world, variant)?;
    let target = balance_on_node1(world, variant, true, &["web-2"])?;
    let dial = Dial::new(variant.protocol, target).timeout_ms(SILENCE_MS);
    check::dropped(world.setting, &world.dial(SECOND_OUTSIDE, &dial)?)
}

/// Writes a service with a load-balancer address that the client sends to node 1 by the second
/// network.
fn balance_on_node1(world: &mut World, variant: Variant, local: bool, pods: &[&str]) -> Result<SocketAddr> {
    world.add_network(Network::SecondUplink)?;
    // Each policy has an address of its own. A datagram from a port that a former scenario has used
    // would go on to its endpoint.
    let load_balancer = external(1, if local { 31 } else { 30 });
    let service = Service {
        external_local: local,
        load_balancer: load_balancer.both().map(|address| Ingress { address, proxied: false }).to_vec(),
        ..OVER_NETWORK.service()
    };
    world.set_service(&service, pods)?;
    Ok(SocketAddr::new(load_balancer.of(variant.family), PORT))
}

/// Makes ten requests, after the first of all is answered.
fn dial(
    world: &World,
    client: &str,
    variant: Variant,
    target: SocketAddr,
    server: &str,
) -> Result<Vec<Answer>> {
    let once = Dial::new(variant.protocol, target).timeout_ms(SILENCE_MS);
    world.until_answered(client, &once, APPEARS_WITHIN)?;
    world.answers(client, &Dial::new(variant.protocol, target).times(10), &[server])
}
