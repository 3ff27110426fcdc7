//! Direct server return: the node that a client outside dials forwards its packets unchanged, and
//! the endpoint's node answers.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use lab::{
    Dial, Protocol,
    address::NodeNumber,
    cluster::{FABRIC, NODES, OUTSIDE},
    namespace, wait,
};
use scenario::Skip;
use serde_json::{Value, json};

use crate::{
    case::{Case, Variant, Variants},
    check,
    fixtures::DIRECT,
    setting::{ProxyKind, Setting},
    world::World,
};

pub(super) const CASES: &[Case] = &[
    Case::new("dsr: endpoints of another node see the client, which is answered", Variants::All, direct)
        .concerns(is_ebpf)
        .core(),
    Case::new("hybrid: TCP as with dsr, UDP as with snat", Variants::All, hybrid).concerns(is_ebpf),
    Case::new("dsr: a client learns what length fits", Variants::Tcp, long).concerns(is_ebpf).core(),
    Case::new("dsr comes and goes while connections go on", Variants::Tcp, changes).concerns(is_ebpf),
    Case::new("dsr by geneve: endpoints of another node see the client", Variants::All, without_ip_in_ip)
        .concerns(is_ebpf)
        .configured(geneve)
        .core(),
    Case::new("dsr by geneve: a client learns what length fits", Variants::Tcp, long)
        .concerns(is_ebpf)
        .configured(geneve),
    Case::new("dsr: geneve comes and goes while connections go on", Variants::Tcp, other_encapsulation)
        .concerns(is_ebpf),
];

fn geneve() -> Value {
    encapsulation("geneve")
}

fn encapsulation(word: &str) -> Value {
    json!({"ebpf": {"encapsulation": word}})
}

fn is_ebpf(setting: &Setting) -> bool {
    setting.proxy == ProxyKind::Ebpf
}

fn set(world: &mut World, forwarding: Option<&'static str>) -> Result<()> {
    let mut service = DIRECT.service();
    service.forwarding = forwarding;
    world.set_service(&service, DIRECT.endpoints)
}

fn dial(world: &World, variant: Variant) -> Result<Dial> {
    Ok(Dial::new(variant.protocol, world.node_port(&DIRECT, 1, variant.family)?))
}

/// Expects the endpoints to see the client outside itself if `is_direct`, else node 1.
fn see(world: &World, variant: Variant, is_direct: bool) -> Result<()> {
    let own = world.addresses(OUTSIDE)?;
    let answers = world.answers(OUTSIDE, &dial(world, variant)?.times(20), DIRECT.endpoints)?;
    check::saw(&answers, "the client outside", |seen| {
        if is_direct { own.contains(seen) } else { world.is_node_address(1, seen) }
    })
}

fn direct(world: &mut World, variant: Variant) -> Result<()> {
    set(world, Some("dsr"))?;
    see(world, variant, true)
}

fn hybrid(world: &mut World, variant: Variant) -> Result<()> {
    set(world, Some("hybrid"))?;
    see(world, variant, variant.protocol == Protocol::Tcp)
}

/// Sends segments that are as long as the network takes, each as a packet of its own.
fn long(world: &mut World, variant: Variant) -> Result<()> {
    const LONG: usize = 1 << 19;
    set(world, Some("dsr"))?;
    let outside = world.lab.netns(OUTSIDE)?.clone();
    outside.ip("link set eth0 gso_max_segs 1\n")?;
    let before = world.counted(1, "packet_too_big")?;
    let outcomes = world.dial(OUTSIDE, &dial(world, variant)?.payload(LONG));
    outside.ip("link set eth0 gso_max_segs 65535\n")?;
    let own = world.addresses(OUTSIDE)?;
    check::saw(&check::answered(&outcomes?)?, "the client outside", |seen| own.contains(seen))?;
    let told = world.counted(1, "packet_too_big")? - before;
    ensure!((1..100).contains(&told), "the client was told {told} times");
    Ok(())
}

fn changes(world: &mut World, variant: Variant) -> Result<()> {
    set(world, None)?;
    let dial = dial(world, variant)?;
    let mut held = vec![world.agent(OUTSIDE)?.hold_as(&dial)?.0];
    for forwarding in [Some("dsr"), Some("snat")] {
        set(world, forwarding)?;
        see(world, variant, forwarding == Some("dsr"))?;
        held.push(world.agent(OUTSIDE)?.hold_as(&dial)?.0);
        go_on(world, &held).with_context(|| format!("{forwarding:?}"))?;
    }
    release(world, held)
}

/// Expects held connections of the client outside to be answered.
fn go_on(world: &World, held: &[usize]) -> Result<()> {
    let client = world.agent(OUTSIDE)?;
    held.iter().try_for_each(|connection| check::answered(&[client.ping(*connection)?]).map(drop))
}

fn release(world: &World, held: Vec<usize>) -> Result<()> {
    let client = world.agent(OUTSIDE)?;
    held.into_iter().try_for_each(|connection| client.release(connection))
}

/// Drops packets that come from node 1 in IP alone while `meanwhile` runs.
fn dropping_ip_in_ip(world: &mut World, meanwhile: impl FnOnce(&mut World) -> Result<()>) -> Result<()> {
    const DROP: &str = "table netdev network { chain from_node1 { \
        type filter hook ingress device \"node1\" priority 0; \
        meta l4proto { 4, 41 } drop; }; }";
    if control_plane::go::on_path("nft").is_none() {
        bail!(Skip("nft is not installed".into()));
    }
    let fabric = world.lab.netns(FABRIC)?.namespace.clone();
    namespace::nft(&fabric, DROP)?;
    let outcome = meanwhile(world);
    namespace::nft(&fabric, "delete table netdev network")?;
    outcome
}

fn without_ip_in_ip(world: &mut World, variant: Variant) -> Result<()> {
    set(world, Some("dsr"))?;
    dropping_ip_in_ip(world, |world| see(world, variant, true))
}

/// Switches the encapsulation. Node 2 may follow before or after node 1, so it must take packets
/// out of both encapsulations.
fn other_encapsulation(world: &mut World, variant: Variant) -> Result<()> {
    set(world, Some("dsr"))?;
    let dial = dial(world, variant)?;
    let mut held = vec![world.agent(OUTSIDE)?.hold_as(&dial)?.0];
    for word in ["geneve", "ip"] {
        world.reconfigure(encapsulation(word))?;
        NODES.into_iter().try_for_each(|node| follows(world, node, word))?;
        held.push(world.agent(OUTSIDE)?.hold_as(&dial)?.0);
        let serves = |world: &mut World| {
            go_on(world, &held).context(word)?;
            see(world, variant, true)
        };
        if word == "geneve" { dropping_ip_in_ip(world, serves)? } else { serves(world)? }
    }
    release(world, held)?;
    world.reconfigure(json!({}))
}

/// Waits until the node uses this encapsulation.
fn follows(world: &World, node: NodeNumber, word: &str) -> Result<()> {
    const WITHIN: Duration = Duration::from_secs(30);
    wait::until(&format!("{word} on node{node}"), WITHIN, || {
        let services = world.tool(node, &["services", "default/direct", "--output", "json"]);
        let services = services.map_err(|error| format!("{error:#}"))?;
        let is_shown = services.contains(&format!("\"encapsulation\": \"{word}\""));
        if is_shown { Ok(Some(())) } else { Err(services) }
    })
}
