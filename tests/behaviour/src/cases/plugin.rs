//! A network plugin on the same node that masquerades what pods send, by a rule of its own that knows no port of anybody's flows.

use anyhow::{Result, bail, ensure};
use lab::{
    Dial,
    address::Addresses,
    cluster::{OUTSIDE, SERVER_PORT},
    namespace,
};
use scenario::Skip;

use crate::{
    case::{Case, Variant, Variants},
    check,
    fixtures::{ON_NODE1, ON_NODE2},
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
];

/// Of each of both: thirty of them are at a port that a short one of the other gets.
const LASTING: usize = 1_000;
const SHORT: u32 = 2_000;

fn masquerades(world: &mut World, variant: Variant) -> Result<()> {
    super::skip_confused_flows(world, variant)?;
    let backend = world.addresses("web-2")?;
    masquerading(world, "client-1", backend, "masquerade fully-random", |world| {
        beside(world, variant, (backend.of(variant.family), SERVER_PORT).into())
    })
}

/// XDP sends the packets of both sides past connection tracking, which forgets them: the pod's answers must not become connections of the pod.
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

/// While node 1 has a rule for what the pod sends to these addresses.
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
    // A datagram of a pair of ports that was used before would be translated, or not, as it was then.
    state::forget_connections(&world.lab, 1)?;
    let outcome = work(world);
    namespace::end_masquerade(&node)?;
    // Without the table nothing translates what is left of them, and a new datagram of the same ends would be dropped.
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
