//! Session affinity: a client's new connections go to the endpoint of its last one.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use lab::{Dial, cluster::OUTSIDE, objects::Service};

use crate::{
    case::{Case, Difference, Variant, Variants, says},
    fixtures::AFFINE,
    setting::{Datapath, PathKind, Setting},
    world::World,
};

pub(super) const CASES: &[Case] = &[
    Case::new("affinity: a client stays with its endpoint", Variants::All, stays).core(),
    Case::new("affinity: cluster IP and node port share it", Variants::All, shared)
        .concerns(|setting| !chooses_by_address(setting)),
    Case::new("affinity: it ends with its endpoint", Variants::All, ends_with_its_endpoint),
    Case::new("affinity: it outlives the controller", Variants::Once, outlives_the_controller)
        .differs(ends_with_the_process),
    // Conntrack still knows some ports of former sockets, and with UDP also their endpoints. So
    // this runs over TCP only.
    Case::new("affinity: switched on and off", Variants::Tcp, switched),
    Case::new("affinity: it lasts while connections come, and expires after", Variants::Once, expires)
        .differs(lasts_as_long_as_connections),
];

/// Default of Kubernetes for `sessionAffinityConfig`.
const THREE_HOURS: u32 = 10_800;
/// Time of affinity, longer than a busy machine takes for a round of connections.
const SECONDS: u32 = 6;

/// Number of connections of a client. They leave out one of three endpoints with a chance of 3 ×
/// (2/3)^60, less than 1e-10.
const MANY: u32 = 60;

const CLIENTS: [&str; 4] = ["client-1", "client-2", "node1", OUTSIDE];

fn affine(seconds: Option<u32>) -> Service {
    Service { affinity_seconds: seconds, ..AFFINE.service() }
}

fn set(world: &mut World, seconds: Option<u32>, endpoints: &[&str]) -> Result<()> {
    world.set_service(&affine(seconds), endpoints)
}

/// Dials the cluster IP, or the node port of node 1 for the client outside.
fn dial(world: &World, client: &str, variant: Variant) -> Result<Dial> {
    let target = match client {
        OUTSIDE => world.node_port(&AFFINE, 1, variant.family)?,
        _ => world.cluster_ip(&AFFINE, variant.family),
    };
    Ok(Dial::new(variant.protocol, target))
}

/// Returns the one server that answers all of `count` connections.
fn one_server(world: &World, client: &str, dial: Dial, count: u32) -> Result<String> {
    let answers = world.answered(client, &dial.times(count))?;
    let [first, others @ ..] = answers.as_slice() else { bail!("nobody answered {client}") };
    match others.iter().find(|other| other.by != first.by) {
        Some(other) => bail!("{client} was answered by {} and by {}", first.by, other.by),
        None => Ok(first.by.clone()),
    }
}

fn stays(world: &mut World, variant: Variant) -> Result<()> {
    set(world, Some(THREE_HOURS), AFFINE.endpoints)?;
    for client in CLIENTS {
        one_server(world, client, dial(world, client, variant)?, MANY)?;
    }
    Ok(())
}

fn shared(world: &mut World, variant: Variant) -> Result<()> {
    set(world, Some(THREE_HOURS), AFFINE.endpoints)?;
    // The secondary mode serves the node's own node ports on path `off`. It knows no client of the
    // active mode.
    let of_node = (world.setting.path != PathKind::Off).then_some(("node1", 1));
    for (client, node) in [("client-1", 1), ("client-2", 2)].into_iter().chain(of_node) {
        let node_port = Dial::new(variant.protocol, world.node_port(&AFFINE, node, variant.family)?);
        let by_cluster_ip = one_server(world, client, dial(world, client, variant)?, 5)?;
        let by_node_port = one_server(world, client, node_port, MANY)?;
        ensure!(by_cluster_ip == by_node_port, "{client}: {by_cluster_ip}, by the node port {by_node_port}");
    }
    Ok(())
}

fn ends_with_its_endpoint(world: &mut World, variant: Variant) -> Result<()> {
    for client in CLIENTS {
        set(world, Some(THREE_HOURS), AFFINE.endpoints)?;
        let first = one_server(world, client, dial(world, client, variant)?, 5)?;
        let others: Vec<&str> = AFFINE.endpoints.iter().copied().filter(|name| *name != first).collect();
        set(world, Some(THREE_HOURS), &others)?;
        let next = one_server(world, client, dial(world, client, variant)?, MANY)?;
        ensure!(next != first, "{client} is still answered by {first}, which is no endpoint any more");
        // The former endpoint of the client is now an endpoint like any other.
        set(world, Some(THREE_HOURS), AFFINE.endpoints)?;
        let last = one_server(world, client, dial(world, client, variant)?, MANY)?;
        ensure!(last == next, "{client} went from {next} to {last} when another endpoint came");
    }
    Ok(())
}

fn ends_with_the_process(setting: &Setting, _: Variant) -> Option<Difference> {
    let why = "in mode userspace the process itself knows the clients";
    setting.datapath().is_a_process().then_some(Difference { why, says: says::NOT_ANSWERED })
}

/// Returns true for IPVS, where each virtual server remembers its own clients. A client gets the
/// same endpoint by two of them only by chance.
fn chooses_by_address(setting: &Setting) -> bool {
    setting.datapath() == Datapath::Ipvs
}

fn lasts_as_long_as_connections(setting: &Setting, _: Variant) -> Option<Difference> {
    let why = "IPVS remembers a client as long as it knows a connection of it, which is for minutes after the last packet";
    (setting.datapath() == Datapath::Ipvs).then_some(Difference { why, says: &[" s has not expired"] })
}

/// Checks all clients, protocols and families at once. By chance, all of them keep their endpoints
/// in one of 3^16 runs.
fn outlives_the_controller(world: &mut World, _: Variant) -> Result<()> {
    set(world, Some(THREE_HOURS), AFFINE.endpoints)?;
    let before = servers(world)?;
    let while_dead = world.while_dead(|world| servers(world))?;
    let after = servers(world)?;
    ensure!(while_dead == before, "without a controller {while_dead:?}, before {before:?}");
    ensure!(after == before, "with the next controller {after:?}, before {before:?}");
    Ok(())
}

fn switched(world: &mut World, variant: Variant) -> Result<()> {
    for _ in 0..2 {
        set(world, None, AFFINE.endpoints)?;
        for client in CLIENTS {
            let dial = dial(world, client, variant)?.times(MANY);
            world.answers(client, &dial, AFFINE.endpoints).context("off")?;
        }
        set(world, Some(THREE_HOURS), AFFINE.endpoints)?;
        for client in CLIENTS {
            one_server(world, client, dial(world, client, variant)?, MANY).context("on")?;
        }
    }
    Ok(())
}

/// Checks all clients, protocols and families at once. When affinity has expired, all of them find
/// their former endpoints by chance in one of 3^16 runs.
fn expires(world: &mut World, _: Variant) -> Result<()> {
    set(world, Some(SECONDS), AFFINE.endpoints)?;
    let first = servers(world)?;
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(u64::from(SECONDS) + 1) {
        // Each connection renews affinity. The loop goes on for longer than the timeout of
        // affinity, to show that renewed affinity lasts longer than that.
        thread::sleep(Duration::from_secs(1));
        let asked = Instant::now();
        let now = servers(world)?;
        ensure!(asked.elapsed() < Duration::from_secs(u64::from(SECONDS) - 2), "this machine is too slow");
        ensure!(now == first, "after {:?}: {now:?}, before {first:?}", start.elapsed());
    }
    // Nobody connects while affinity is to expire, because a connection would renew it.
    thread::sleep(Duration::from_secs(u64::from(SECONDS) + 2));
    let last = servers(world)?;
    ensure!(last != first, "affinity of {SECONDS} s has not expired");
    Ok(())
}

fn servers(world: &World) -> Result<Vec<String>> {
    let mut servers = Vec::new();
    for client in CLIENTS {
        for variant in Variants::All.list() {
            servers.push(one_server(world, client, dial(world, client, variant)?, 1)?);
        }
    }
    Ok(servers)
}
