//! The first start on a node, where nothing has served before, while clients connect.

use std::{collections::BTreeMap, net::SocketAddr, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use lab::{
    Protocol,
    address::{FAMILIES, Family},
    agent::protocol::Load,
    cluster::{NODES, OUTSIDE, node_name},
    wait,
};

use crate::{
    case::{Case, Variant, Variants},
    cases::sctp,
    fixtures::{BALANCED, ON_NODE1, ON_NODE2, SCTP, ServiceFixture},
    proxy::HEALTH,
    setting::{Datapath, PathKind, Setting},
    state,
    world::World,
};

pub(in crate::cases) const CASES: &[Case] =
    &[Case::new("no connection that is opened during a start is lost", Variants::Once, loses_none)
        .core()
        .concerns(has_secondary_mode)];

/// The paths whose pods have the programs of `socketLoadBalancing` as it is by default, or none.
fn has_secondary_mode(setting: &Setting) -> bool {
    setting.datapath() == Datapath::Ebpf && matches!(setting.path, PathKind::Sockets | PathKind::Off)
}

/// The environment variable that says how many connections are opened during starts.
const CONNECTIONS: &str = "CONNECTIONS_DURING_STARTS";
const USUAL_CONNECTIONS: u64 = 500;
/// A start is over this time after the process has reported that it is ready.
const AFTER_READY: Duration = Duration::from_secs(2);
const READY_WITHIN: Duration = Duration::from_secs(30);
/// A connection lasts for longer than it takes from the first write of Services to the last hook.
const LASTS_MS: u64 = 1_000;
/// A SYN that nobody answers is sent again after 1 s, 3 s and 7 s.
const TIMEOUT_MS: u64 = 8_000;
/// Between two attempts of a client.
const PAUSE_MICROS: u64 = 10_000;
/// The number of connections at a time that a client has to each target.
const CLIENTS: u32 = 6;
const SERVERS: [&str; 2] = ["web-1", "web-2"];

/// Sums up what clients have met in all starts.
#[derive(Default)]
struct Met {
    starts: u32,
    opened: u64,
    lost: Vec<String>,
    /// Attempts that nobody accepted before the proxies said that they were ready, and after that.
    /// They are counted by the error that the clients got.
    not_opened: [BTreeMap<String, u64>; 2],
}

/// The secondary mode has a port of its own by a Service with SCTP, and without socket hooks also
/// the node ports, for processes of the node itself.
fn loses_none(world: &mut World, _: Variant) -> Result<()> {
    let wanted = match std::env::var(CONNECTIONS) {
        Ok(number) => number.parse().with_context(|| format!("{CONNECTIONS} is {number}"))?,
        Err(_) => USUAL_CONNECTIONS,
    };
    world.set_service(&sctp::service(), SCTP.endpoints)?;
    let lose = |world: &World, is_on| {
        SERVERS.into_iter().try_for_each(|server| state::lose_answers_to_syns(&world.lab, server, is_on))
    };
    lose(world, true)?;
    let mut met = Met::default();
    let started = loop {
        match start(world, &mut met) {
            Ok(()) if met.opened < wanted && u64::from(met.starts) < wanted => {}
            ended => break ended,
        }
    };
    eprintln!("{}: {met}", world.setting);
    lose(world, false)?;
    started.with_context(|| world.logs())?;
    world.remove_service(SCTP.name)?;
    ensure!(met.opened >= wanted, "{met}");
    ensure!(met.lost.is_empty(), "{met}:\n{}", met.lost.join("\n"));
    Ok(())
}

/// Starts the proxies where nothing of them is. Netfilter forgets what it knows of a former start.
/// A client may use the port of an entry that was left half open, and the rules of the secondary
/// mode drop its segments as invalid once netfilter tracks connections again.
fn start(world: &mut World, met: &mut Met) -> Result<()> {
    for node in NODES {
        world.proxy(node)?.terminate()?;
        world.cleanup(node, &[])?;
        state::forget_connections(&world.lab, node)?;
    }
    let mut loads = Vec::new();
    for (client, target) in targets(world)? {
        let load = Load {
            clients: CLIENTS,
            pause_micros: PAUSE_MICROS,
            timeout_ms: TIMEOUT_MS * u64::from(wait::patience()),
            lasts_ms: LASTS_MS,
            ..Load::new(Protocol::Tcp, target)
        };
        let number = world.agent(&client)?.start_load(&load)?;
        loads.push((client, target, number));
    }
    NODES.into_iter().try_for_each(|node| world.start(node))?;
    NODES.into_iter().try_for_each(|node| ready(world, node))?;
    let mut before = Vec::new();
    for (client, _, load) in &loads {
        before.push(world.agent(client)?.peek_load(*load)?.failures);
    }
    thread::sleep(AFTER_READY);
    for (client, ..) in &loads {
        world.agent(client)?.end_loads()?;
    }
    met.starts += 1;
    for ((client, target, load), before) in loads.into_iter().zip(before) {
        let tally = world.agent(&client)?.stop_load(load)?;
        met.opened += tally.opened;
        for lost in tally.lost {
            let known = known_of(world, &lost);
            met.lost.push(format!("{client} to {target}: {lost}\n{known}{}", world.logs()));
        }
        for (what, failed) in tally.failures {
            let early = before.get(&what).copied().unwrap_or_default();
            *met.not_opened[0].entry(what.clone()).or_default() += early;
            *met.not_opened[1].entry(what).or_default() += failed - early;
        }
    }
    Ok(())
}

/// Returns what the nodes know of the port of a lost connection's client.
fn known_of(world: &World, lost: &str) -> String {
    let port = lost.split_once(" to ").and_then(|(client, _)| client.rsplit_once(':')).map(|(_, port)| port);
    let Some(port) = port else { return String::new() };
    let mut known = String::new();
    for node in NODES {
        let name = node_name(node);
        let flows = world.tool(node, &["flows"]).unwrap_or_else(|error| format!("{error:#}"));
        let tracked = state::connections(&world.lab, node).unwrap_or_else(|error| format!("{error:#}"));
        for line in flows.lines().chain(tracked.lines()).filter(|line| line.contains(port)) {
            known.push_str(&format!("  {name}: {line}\n"));
        }
    }
    known
}

/// Clients of each kind, and what they dial: cluster IPs, and node ports of both nodes.
fn targets(world: &World) -> Result<Vec<(String, SocketAddr)>> {
    let mut targets = Vec::new();
    for client in ["client-1", "client-2", "node1"] {
        for service in [&ON_NODE2, &BALANCED] {
            targets.push((client.to_owned(), world.cluster_ip(service, Family::V4)));
        }
    }
    for family in FAMILIES {
        let node_port = |service: &ServiceFixture, node| world.node_port(service, node, family);
        targets.push((OUTSIDE.to_owned(), node_port(&BALANCED, 1)?));
        targets.push((OUTSIDE.to_owned(), node_port(&ON_NODE1, 1)?));
        targets.push((OUTSIDE.to_owned(), node_port(&ON_NODE2, 1)?));
        targets.push(("client-1".to_owned(), node_port(&BALANCED, 1)?));
        targets.push(("client-1".to_owned(), node_port(&BALANCED, 2)?));
        targets.push((node_name(1), node_port(&BALANCED, 1)?));
        targets.push((node_name(1), node_port(&BALANCED, 2)?));
    }
    Ok(targets)
}

fn ready(world: &World, node: u8) -> Result<()> {
    let agent = world.agent(&node_name(node))?;
    wait::until(&format!("the proxy on node{node} is ready"), READY_WITHIN, || {
        match agent.http_get(SocketAddr::new(Family::V4.loopback(), HEALTH), "/readyz") {
            Ok((200, _)) => Ok(Some(())),
            Ok((_, body)) => Err(body),
            Err(error) => Err(format!("{error:#}")),
        }
    })
}

impl std::fmt::Display for Met {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { starts, opened, lost, not_opened: [early, late] } = self;
        write!(
            formatter,
            "{} lost of {opened} connections that were opened in {starts} starts; not opened before \
             the proxies were ready: {early:?}, and after: {late:?}",
            lost.len()
        )
    }
}
