//! Choice of a connection's endpoint by algorithms and weights.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use lab::{
    Dial,
    cluster::{NODES, OUTSIDE},
    objects::Endpoint,
    wait,
};

use crate::{
    case::{Case, Variant, Variants},
    check,
    fixtures::WEIGHED,
    setting::{ProxyKind, Setting},
    world::World,
};

pub(super) const CASES: &[Case] = &[
    Case::new("maglev: nodes choose alike", Variants::All, alike).concerns(is_ebpf).core(),
    // The case leaves out UDP, because a datagram from a port that was used shortly before belongs
    // to the former flow.
    Case::new("weights: an endpoint without weight has no new connections", Variants::Tcp, weights)
        .concerns(is_ebpf)
        .core(),
    Case::new(
        "leastConnection: an endpoint with more open connections has no new ones",
        Variants::Tcp,
        least,
    )
    .concerns(is_ebpf)
    .core(),
    Case::new("algorithms and weights change while connections go on", Variants::Tcp, changes)
        .concerns(is_ebpf),
];

fn is_ebpf(setting: &Setting) -> bool {
    setting.proxy == ProxyKind::Ebpf
}

const CLIENTS: [&str; 3] = ["client-1", "node1", OUTSIDE];
/// Number of connections where the lesser of two endpoints has two fifths of the weight. One is
/// left out with a chance of at most 2e-9.
const MANY: u32 = 40;
/// Number of connections where two endpoints have a quarter of the weight each. One is left out
/// with a chance of 2 × 0.75^100, less than 1e-12. With 40 connections the chance was 2e-5 for each
/// client, family and path, or one in two thousand runs of all tests.
const OF_A_QUARTER: u32 = 100;

/// Writes the service with one endpoint for each weight.
fn set(world: &mut World, algorithm: Option<&'static str>, weights: &[u8]) -> Result<()> {
    let mut endpoints = Vec::new();
    for (name, weight) in WEIGHED.endpoints.iter().zip(weights) {
        let pod = world.lab.netns(name)?;
        let ready = Endpoint::ready(pod.addresses, pod.node.unwrap_or_default());
        endpoints.push(Endpoint { weight: Some(*weight), ..ready });
    }
    let mut service = WEIGHED.service();
    service.algorithm = algorithm;
    world.objects.set_service(&service, &endpoints);
    world.settle()
}

/// Dials the cluster IP, or the node port of node 1 for the client outside.
fn dial(world: &World, client: &str, variant: Variant) -> Result<Dial> {
    let target = match client {
        OUTSIDE => world.node_port(&WEIGHED, 1, variant.family)?,
        _ => world.cluster_ip(&WEIGHED, variant.family),
    };
    Ok(Dial::new(variant.protocol, target))
}

/// Expects both nodes to choose the same endpoint for a connection, as if a load balancer had moved
/// it from one node to the other.
fn alike(world: &mut World, variant: Variant) -> Result<()> {
    set(world, Some("maglev"), &[1, 1, 2])?;
    let mut met = Vec::new();
    for port in (20_000..).take(MANY as usize / 2) {
        let mut servers = Vec::new();
        for node in NODES {
            let target = world.node_port(&WEIGHED, node, variant.family)?;
            let answers = world.answered(OUTSIDE, &Dial::new(variant.protocol, target).source_port(port))?;
            servers.extend(answers.into_iter().map(|answer| answer.by));
        }
        ensure!(servers.windows(2).all(|two| two[0] == two[1]), "port {port}: {servers:?}");
        met.extend(servers);
    }
    for endpoint in WEIGHED.endpoints {
        ensure!(met.iter().any(|server| server == endpoint), "{endpoint} has no connection: {met:?}");
    }
    for client in CLIENTS {
        let dial = dial(world, client, variant)?.times(OF_A_QUARTER);
        world.answers(client, &dial, WEIGHED.endpoints)?;
    }
    Ok(())
}

fn weights(world: &mut World, variant: Variant) -> Result<()> {
    for algorithm in [None, Some("maglev")] {
        set(world, algorithm, &[0, 3, 2])?;
        for client in CLIENTS {
            let dial = dial(world, client, variant)?.times(MANY);
            world
                .answers(client, &dial, &WEIGHED.endpoints[1..])
                .with_context(|| format!("{algorithm:?}"))?;
        }
    }
    Ok(())
}

const COUNTED_ANEW_WITHIN: Duration = Duration::from_secs(60);
/// Number of connections of each client that are held to one endpoint.
const HELD: usize = 5;

fn least(world: &mut World, variant: Variant) -> Result<()> {
    let [busy, idle, _] = WEIGHED.endpoints else { bail!("{:?}", WEIGHED.endpoints) };
    for client in CLIENTS {
        set(world, Some("leastConnection"), &[1])?;
        let one = dial(world, client, variant)?;
        let mut held = Vec::new();
        for _ in 0..HELD {
            held.push(world.agent(client)?.hold_as(&one)?.0);
        }
        set(world, Some("leastConnection"), &[1, 1])?;
        world.answers(client, &one.clone().times(MANY), &[*idle]).with_context(|| client.to_owned())?;
        set(world, None, &[1, 1])?;
        world.answers(client, &one.clone().times(MANY), &[*busy, *idle])?;
        set(world, Some("leastConnection"), &[1, 1])?;
        // Open connections are counted anew within ten seconds, if the service did not use them
        // when the proxy last looked.
        wait::until(&format!("{client} is sent to the idle endpoint"), COUNTED_ANEW_WITHIN, || {
            let answers = world.answers(client, &one.clone().times(MANY), &[*idle]);
            answers.map(|_| Some(())).map_err(|error| format!("{error:#}"))
        })?;
        for connection in held {
            world.agent(client)?.release(connection)?;
        }
        world.answers(client, &one.times(MANY), &[*busy, *idle])?;
    }
    Ok(())
}

fn changes(world: &mut World, variant: Variant) -> Result<()> {
    set(world, None, &[1, 0, 0])?;
    let mut held = Vec::new();
    for client in CLIENTS {
        let dial = dial(world, client, variant)?;
        held.push((client, world.agent(client)?.hold_as(&dial)?.0));
    }
    let steps = [
        (Some("maglev"), [1, 0, 0]),
        (Some("maglev"), [0, 1, 0]),
        (Some("leastConnection"), [0, 1, 0]),
        (Some("random"), [0, 1, 0]),
        (None, [0, 0, 1]),
    ];
    for (algorithm, weights) in steps {
        set(world, algorithm, &weights)?;
        let serves = WEIGHED.endpoints.iter().zip(weights).filter(|(_, weight)| *weight > 0);
        let serves: Vec<&str> = serves.map(|(name, _)| *name).collect();
        for (client, connection) in &held {
            world.answers(client, &dial(world, client, variant)?.times(MANY), &serves)?;
            let outcome = world.agent(client)?.ping(*connection)?;
            world_answered_by(&[outcome], WEIGHED.endpoints[0])
                .with_context(|| format!("{client} {algorithm:?}"))?;
        }
    }
    for (client, connection) in held {
        world.agent(client)?.release(connection)?;
    }
    Ok(())
}

fn world_answered_by(outcomes: &[lab::Outcome], server: &str) -> Result<()> {
    check::answered_by(outcomes, &[server]).map(drop)
}
