//! Clients everywhere that dial a node port.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use lab::{
    Dial, Protocol,
    address::{Family, NodeNumber, fabric},
    cluster::{NODES, OUTSIDE, node_name, pods_can_take_frames},
    namespace, wait,
};
use scenario::Skip;

use crate::{
    case::{Case, Difference, Variant, Variants, says},
    check,
    fixtures::{BALANCED, EMPTY, ON_NODE1, ON_NODE2, ServiceFixture},
    setting::{Datapath, PathKind, ProxyKind, Setting},
    world::World,
};

pub(in crate::cases) const CASES: &[Case] = &[
    Case::new("a pod reaches a node port on its own node", Variants::All, |world, variant| {
        balanced(world, variant, [("client-1", 1), ("client-2", 2)])
    })
    .core(),
    Case::new("a pod keeps its address towards a node port", Variants::All, pod_preserved)
        .differs(masquerades),
    Case::new("a pod reaches a node port on another node", Variants::All, |world, variant| {
        balanced(world, variant, [("client-1", 2), ("client-2", 1)])
    }),
    Case::new("a host process reaches a node port on its own address", Variants::All, |world, variant| {
        balanced(world, variant, [("node1", 1), ("node2", 2)])
    }),
    Case::new("a host process reaches a node port on 127.0.0.1", Variants::V4, host_to_loopback)
        .differs(no_loopback),
    Case::new("a host process reaches a node port on another node", Variants::All, |world, variant| {
        balanced(world, variant, [("node1", 2), ("node2", 1)])
    }),
    Case::new("a client outside reaches a backend on the node it dials", Variants::All, |world, variant| {
        from_outside(world, variant, [(&ON_NODE1, 1), (&ON_NODE2, 2)], |_, _| true)
    })
    .core(),
    Case::new(
        "a client outside keeps its address towards a backend on the node",
        Variants::All,
        |world, variant| {
            let own = world.addresses(OUTSIDE)?;
            from_outside(world, variant, [(&ON_NODE1, 1), (&ON_NODE2, 2)], |_, seen| own.contains(seen))
        },
    )
    .differs(masquerades),
    Case::new(
        "a client outside reaches a backend on another node, masqueraded",
        Variants::All,
        |world, variant| {
            from_outside(world, variant, [(&ON_NODE2, 1), (&ON_NODE1, 2)], |node, seen| {
                world.is_node_address(node, seen)
            })
        },
    )
    .core(),
    Case::new(
        "packets between a client outside and another node skip the stack",
        Variants::All,
        is_forwarded_by_xdp,
    )
    .concerns(|setting| setting.uses_xdp())
    .core(),
    Case::new(
        "packets from a client outside to a pod of the node skip the stack",
        Variants::Tcp,
        is_forwarded_to_pod,
    )
    .concerns(|setting| setting.uses_xdp())
    .core(),
    Case::new("a client outside reaches every endpoint of a node port", Variants::All, outside_balanced),
    Case::new("a node port without endpoints refuses at once", Variants::All, refused),
    Case::new("a node port is served at an address as long as the node has it", Variants::All, late_address)
        .concerns(serves_every_address),
];

/// Returns true for modes that serve node ports on every address if `nodePortAddresses` is not set.
fn serves_every_address(setting: &Setting) -> bool {
    matches!(setting.datapath(), Datapath::Ebpf | Datapath::Iptables)
}

fn masquerades(setting: &Setting, _: Variant) -> Option<Difference> {
    let why = "kube-proxy masquerades whatever comes through a node port, in every mode";
    (setting.datapath() != Datapath::Ebpf).then_some(Difference { why, says: says::OTHER_CLIENT })
}

/// Returns the setting whose proxy serves processes of a node that dial a node port of that node.
/// Mode ebpf without socket hooks delegates this to mode nftables.
fn of_own_node(setting: Setting) -> Setting {
    match (setting.proxy, setting.path) {
        (ProxyKind::Ebpf, PathKind::Off) => Setting::new(ProxyKind::Nftables, setting.path),
        _ => setting,
    }
}

fn no_loopback(setting: &Setting, _: Variant) -> Option<Difference> {
    let why = "kube-proxy serves node ports on loopback in mode iptables only";
    matches!(of_own_node(*setting).datapath(), Datapath::Nftables | Datapath::Ipvs)
        .then_some(Difference { why, says: says::NOT_ANSWERED })
}

/// Expects each client to reach every endpoint by the node port of this node.
fn balanced(world: &World, variant: Variant, paths: [(&str, NodeNumber); 2]) -> Result<()> {
    paths.into_iter().try_for_each(|(client, node)| {
        let dial = Dial::new(variant.protocol, world.node_port(&BALANCED, node, variant.family)?).times(40);
        world.answers(client, &dial, BALANCED.endpoints).map(drop)
    })
}

fn pod_preserved(world: &mut World, variant: Variant) -> Result<()> {
    for (client, node) in [("client-1", 1), ("client-2", 2)] {
        let own = world.addresses(client)?;
        for service in [&ON_NODE1, &ON_NODE2] {
            let dial = Dial::new(variant.protocol, world.node_port(service, node, variant.family)?);
            let answers = world.answers(client, &dial, service.endpoints)?;
            check::saw(&answers, client, |seen| own.contains(seen))?;
        }
    }
    Ok(())
}

fn host_to_loopback(world: &mut World, variant: Variant) -> Result<()> {
    let port = world.node_port(&BALANCED, 1, Family::V4)?.port();
    let target = SocketAddr::new(variant.family.loopback(), port);
    let dial = Dial::new(variant.protocol, target).times(40);
    for node in NODES {
        world.answers(&node_name(node), &dial, BALANCED.endpoints)?;
    }
    Ok(())
}

/// Dials the node ports of these nodes from outside. `sees` returns true for addresses that an
/// endpoint may see as the client's.
fn from_outside(
    world: &World,
    variant: Variant,
    paths: [(&ServiceFixture, NodeNumber); 2],
    sees: impl Fn(NodeNumber, IpAddr) -> bool,
) -> Result<()> {
    paths.into_iter().try_for_each(|(service, node)| {
        let dial = Dial::new(variant.protocol, world.node_port(service, node, variant.family)?).times(10);
        let answers = world.answers(OUTSIDE, &dial, service.endpoints)?;
        check::saw(&answers, "the client outside", |seen| sees(node, seen))
    })
}

/// Expects XDP to forward all packets but the first one of each flow.
fn is_forwarded_by_xdp(world: &mut World, variant: Variant) -> Result<()> {
    // A connection has five such packets: the backend's SYN, its acknowledgement, the request, the
    // answer, and the ends.
    let of_each = if variant.protocol == Protocol::Tcp { 5 } else { 1 };
    by_xdp(world, variant, &ON_NODE2, "forwarded_by_xdp", of_each)
}

fn is_forwarded_to_pod(world: &mut World, variant: Variant) -> Result<()> {
    if !pods_can_take_frames() {
        bail!(Skip("this kernel does not tell what programs a veth has (6.6)".to_owned()));
    }
    // A connection has three such packets: the acknowledgement of the backend's SYN, the request,
    // and one that acknowledges the answer or ends the connection.
    by_xdp(world, variant, &ON_NODE1, "redirected_by_xdp", 3)?;
    // A connection has two such packets among these: the acknowledgement of the request, the
    // answer, and the end.
    by_xdp(world, variant, &ON_NODE1, "answer_skipped_stack", 2)
}

/// Expects `of_each` packets of each connection or datagram to skip the stack. The next hops are
/// known after a few requests.
fn by_xdp(
    world: &mut World,
    variant: Variant,
    service: &ServiceFixture,
    reason: &str,
    of_each: u64,
) -> Result<()> {
    const REQUESTS: u16 = 20;
    let before = world.counted(1, reason)?;
    let target = world.node_port(service, 1, variant.family)?;
    let dial = Dial::new(variant.protocol, target).times(REQUESTS.into());
    world.answers(OUTSIDE, &dial, service.endpoints)?;
    let packets = world.counted(1, reason)? - before;
    ensure!(packets >= of_each * u64::from(REQUESTS - 4), "{packets} packets of {REQUESTS} requests");
    Ok(())
}

fn outside_balanced(world: &mut World, variant: Variant) -> Result<()> {
    for node in NODES {
        let dial = Dial::new(variant.protocol, world.node_port(&BALANCED, node, variant.family)?);
        check::roughly_even(&world.answers(OUTSIDE, &dial.times(check::MANY), BALANCED.endpoints)?)?;
    }
    Ok(())
}

fn refused(world: &mut World, variant: Variant) -> Result<()> {
    let setting = world.setting;
    for (client, setting) in [(OUTSIDE, setting), ("client-1", setting), ("node1", of_own_node(setting))] {
        let target = world.node_port(&EMPTY, 1, variant.family)?;
        let outcomes = world.dial(client, &Dial::new(variant.protocol, target).times(2))?;
        check::refused_at_once(setting, &outcomes).with_context(|| format!("from {client}"))?;
    }
    Ok(())
}

const FOLLOWS_WITHIN: Duration = Duration::from_secs(30);

fn late_address(world: &mut World, variant: Variant) -> Result<()> {
    let number = world.node_port(&BALANCED, 1, variant.family)?.port();
    let address = fabric(200).of(variant.family);
    let node = world.lab.netns(&node_name(1))?.namespace.clone();
    let assigned = match variant.family {
        Family::V4 => format!("{address}/24 dev eth0"),
        Family::V6 => format!("{address}/64 dev eth0 nodad"),
    };
    let dial = Dial::new(variant.protocol, SocketAddr::new(address, number)).timeout_ms(300);
    let clients = [OUTSIDE, "client-1", "node1"];
    namespace::ip(Some(&node), &format!("addr add {assigned}\n"))?;
    let served = clients.into_iter().try_for_each(|client| {
        world.until_answered(client, &dial, FOLLOWS_WITHIN)?;
        world.answers(client, &dial.clone().times(40), BALANCED.endpoints).map(drop)
    });
    namespace::ip(Some(&node), &format!("addr del {}\n", assigned.trim_end_matches(" nodad")))?;
    served?;
    clients.into_iter().try_for_each(|client| {
        wait::until(&format!("{client} is not served at the former address"), FOLLOWS_WITHIN, || {
            let outcomes = world.dial(client, &dial).map_err(|error| error.to_string())?;
            Ok(check::answered(&outcomes).is_err().then_some(()))
        })
    })
}
