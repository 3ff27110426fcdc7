//! A network plugin on the same node that masquerades what pods send. Its rule knows no ports of
//! other flows.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use lab::{
    Dial, Outcome,
    address::Addresses,
    cluster::{OUTSIDE, SERVER_PORT},
    namespace,
    taken::Taken,
    wait,
};
use scenario::Skip;
use serde_json::Value;

use crate::{
    case::{Case, Variant, Variants},
    check,
    fixtures::{ON_NODE1, ON_NODE2},
    setting::{PathKind, ProxyKind},
    state,
    world::World,
};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "a network plugin's masquerade and the proxy's lose no answer of each other",
        Variants::All,
        masquerades,
    ),
    Case::new(
        "a client outside keeps its connection to a pod that a plugin masquerades",
        Variants::All,
        forgotten,
    )
    .concerns(|setting| setting.uses_xdp()),
    Case::new(
        "a pod reaches Services although its interface takes no packet programs",
        Variants::Once,
        without_programs,
    )
    .core()
    .concerns(|setting| setting.proxy == ProxyKind::Ebpf && setting.path == PathKind::Packets),
];

/// Number of connections of each of the two clients. Thirty of them have a port that a short
/// connection of the other client gets.
const LASTING: usize = 1_000;
const SHORT: u32 = 2_000;

fn masquerades(world: &mut World, variant: Variant) -> Result<()> {
    super::skip_confused_flows(world, variant)?;
    let backend = world.addresses("web-2")?;
    masquerading(world, "client-1", backend, "masquerade fully-random", |world| {
        beside(world, variant, (backend.of(variant.family), SERVER_PORT).into())
    })
}

/// XDP forwards the packets of both sides without connection tracking, which forgets the
/// connections. The pod's answers must not become connections of the pod.
fn forgotten(world: &mut World, variant: Variant) -> Result<()> {
    let client = world.addresses(OUTSIDE)?;
    masquerading(world, "web-1", client, "masquerade", |world| {
        let agent = world.agent(OUTSIDE)?;
        let node_port = world.node_port(&ON_NODE1, 1, variant.family)?;
        let held = agent.hold_many(variant.protocol, &[node_port], 20)?;
        let pinged = (0..2).try_for_each(|_| {
            state::forget_connections(&world.lab, 1)?;
            let lost = agent.ping_many(&held)?;
            ensure!(lost.is_empty(), "{} of {} lost: {:?}", lost.len(), held.len(), lost.first());
            Ok(())
        });
        held.into_iter().try_for_each(|connection| agent.release(connection))?;
        pinged
    })
}

/// Runs `work` while node 1 has a rule for what the pod sends to these addresses.
fn masquerading(
    world: &mut World,
    pod: &str,
    to: Addresses,
    what: &str,
    work: impl FnOnce(&mut World) -> Result<()>,
) -> Result<()> {
    if control_plane::go::on_path("nft").is_none() {
        bail!(Skip("nft is not installed".into()));
    }
    let node = world.lab.netns("node1")?.namespace.clone();
    let pod = world.addresses(pod)?;
    let rules = [
        format!("ip saddr {} ip daddr {} {what}", pod.v4, to.v4),
        format!("ip6 saddr {} ip6 daddr {} {what}", pod.v6, to.v6),
    ];
    namespace::masquerade(&node, &rules)?;
    // A datagram between ports that were used before would be translated, or not, as it was then.
    state::forget_connections(&world.lab, 1)?;
    let outcome = work(world);
    namespace::end_masquerade(&node)?;
    // Without the table nothing translates what is left of the connections, and a new datagram with
    // the same ends would be dropped.
    state::forget_connections(&world.lab, 1)?;
    outcome
}

fn beside(world: &mut World, variant: Variant, endpoint: std::net::SocketAddr) -> Result<()> {
    let node_port = world.node_port(&ON_NODE2, 1, variant.family)?;
    let paths = [(OUTSIDE, node_port), ("client-1", endpoint)];
    for (lasting, short) in [(paths[0], paths[1]), (paths[1], paths[0])] {
        let agent = world.agent(lasting.0)?;
        let held = agent.hold_many(variant.protocol, &[lasting.1], LASTING)?;
        let dial = Dial::new(variant.protocol, short.1).times(SHORT);
        let answers = world.answers(short.0, &dial, &["web-2"])?;
        check::saw(&answers, short.0, |seen| world.is_node_address(1, seen))?;
        let lost = agent.ping_many(&held)?;
        ensure!(lost.is_empty(), "{} of {LASTING} lost: {:?}", lost.len(), &lost[..lost.len().min(3)]);
        for connection in held {
            agent.release(connection)?;
        }
    }
    Ok(())
}

/// Pod on node 1 whose interface takes no programs. On path `packets`, hooks do not serve its
/// sockets.
const POD: &str = "client-1";
/// Time within which the proxy notices such an interface. It checks interfaces every 10 s, and it
/// removes netfilter's rules 30 s after the last such interface has gone.
const LOOKED_AT_WITHIN: Duration = Duration::from_secs(90);

fn without_programs(world: &mut World, variant: Variant) -> Result<()> {
    if control_plane::go::on_path("nft").is_none() || control_plane::go::on_path("conntrack").is_none() {
        bail!(Skip("nft or conntrack is not installed".into()));
    }
    if !Taken::can_be_made()? {
        bail!(Skip("this kernel has no ifb devices (CONFIG_IFB)".into()));
    }
    let node = world.lab.netns("node1")?.namespace.clone();
    let device = format!("cali{}", world.addresses(POD)?.v4.octets()[3]);
    ensure!(unattached(world)?.is_empty(), "an interface refuses before");
    let taken = Taken::take(&node, &device, &world.lab.bpffs(1).join("proxy-ctl/links"))?;
    let served = while_taken(world, variant, &device);
    taken.give_back()?;
    let held = served?;
    let attached = || match unattached(world) {
        Ok(problems) if problems.is_empty() => Ok(Some(())),
        other => Err(format!("{other:?}")),
    };
    wait::until("programs are attached again", LOOKED_AT_WITHIN, attached)?;
    // The rules go on translating the held connection, and the programs translate new ones.
    let pinged = world.agent(POD)?.ping(held)?;
    ensure!(matches!(pinged, Outcome::Answered(_)), "the pod's connection: {pinged:?}");
    for fixture in [&ON_NODE1, &ON_NODE2] {
        let dial = Dial::new(variant.protocol, world.cluster_ip(fixture, variant.family)).times(20);
        world.answers(POD, &dial, fixture.endpoints)?;
    }
    world.agent(POD)?.release(held)?;
    state::forget_connections(&world.lab, 1)?;
    if !check::is_kernel((6, 6))? {
        // Each new pod of this node now waits for its programs, so the rules stay.
        return Ok(());
    }
    let removed = || {
        let tables = namespace::nft(&node, "list tables").map_err(|error| format!("{error:#}"))?;
        if tables.contains("kube-proxy") { Err(tables) } else { Ok(Some(())) }
    };
    wait::until("netfilter's rules are removed", LOOKED_AT_WITHIN, removed)
}

/// Returns a connection of the pod that netfilter's rules translate.
fn while_taken(world: &World, variant: Variant, device: &str) -> Result<usize> {
    let told = || match unattached(world) {
        Ok(problems) if problems.len() == 1 && problems[0].contains("serves its pod") => Ok(Some(problems)),
        other => Err(format!("{other:?}")),
    };
    let problems = wait::until("status names the interface", LOOKED_AT_WITHIN, told)?;
    ensure!(problems[0].starts_with(&format!("{device}: ")), "{problems:?}");
    let target = world.cluster_ip(&ON_NODE2, variant.family);
    world.until_answered(POD, &Dial::new(variant.protocol, target), LOOKED_AT_WITHIN)?;
    for fixture in [&ON_NODE1, &ON_NODE2] {
        let dial = Dial::new(variant.protocol, world.cluster_ip(fixture, variant.family)).times(20);
        // The active mode serves all other clients.
        for client in [POD, "client-2", "node1"] {
            world.answers(client, &dial, fixture.endpoints)?;
        }
        let node_port = world.node_port(fixture, 1, variant.family)?;
        for client in [POD, OUTSIDE] {
            world.answers(client, &Dial::new(variant.protocol, node_port).times(20), fixture.endpoints)?;
        }
    }
    let (held, outcome) = world.agent(POD)?.hold(variant.protocol, target)?;
    ensure!(matches!(outcome, Outcome::Answered(_)), "{outcome:?}");
    Ok(held)
}

/// Returns the lines of `status` on node 1 about interfaces without programs.
fn unattached(world: &World) -> Result<Vec<String>> {
    let status: Value = serde_json::from_str(&world.tool(1, &["status", "--output", "json"])?)?;
    let lines = status["unattached"].as_array().map(Vec::as_slice).unwrap_or_default();
    Ok(lines.iter().filter_map(|line| line.as_str().map(str::to_owned)).collect())
}
