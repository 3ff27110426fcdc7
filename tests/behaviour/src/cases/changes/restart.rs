//! The controller ends and starts again.

use std::{fs, os::fd::AsFd as _, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use lab::{
    Dial, Protocol,
    address::{FAMILIES, NodeNumber},
    agent::protocol::Load,
    cluster::NODES,
    wait,
};
use proxy_common::{inventory::map_name, layout::LAYOUT_VERSION};
use proxy_ctl::sys::bpf;
use serde_json::{Value, json};

use crate::{
    case::{Case, Difference, Variant, Variants, says},
    check,
    fixtures::{BALANCED, CHANGING, ON_NODE2, ServiceFixture},
    setting::{Datapath, PathKind, Setting},
    state,
    world::World,
};

pub(in crate::cases) const CASES: &[Case] = &[
    Case::new("connections go on while the controller is dead and after it is back", Variants::Once, dead)
        .core()
        .differs(ends_with_the_process),
    Case::new("what changed while the controller was dead is made up for", Variants::Once, made_up),
    Case::new("a connection that began before anybody served is answered", Variants::Once, began_before)
        .core()
        .concerns(is_ours),
    Case::new(
        "a client uses the port of a connection again that ended while nobody served",
        Variants::Once,
        ended,
    )
    .core()
    .concerns(is_ours),
    Case::new(
        "connections to a process of the node itself go on after a restart",
        Variants::Once,
        of_the_node,
    )
    .differs(ends_with_the_process),
    Case::new("many restarts under load fail no connection", Variants::Once, under_load)
        .differs(fails_with_the_process),
    Case::new("maps get another size under load", Variants::Once, resized)
        .core()
        .concerns(has_maps)
        .configured(|| limits(USUAL)),
    Case::new("a restart without changes writes nothing", Variants::Once, writes_nothing)
        .concerns(is_ours)
        .differs(begins_with_the_process),
];

/// First port of connections that are repeated. It is below those that the kernel chooses from, so
/// no other socket of a client has it.
const SOURCE_PORT: u16 = 24_000;

/// Lets connections begin while the nodes have nothing but what connection tracking knows.
fn began_before(world: &mut World, _: Variant) -> Result<()> {
    let dial_all = |world: &World, timeout_ms| {
        let dial =
            |(client, dial): (_, Dial)| Ok((client, world.dial(client, &dial.timeout_ms(timeout_ms))?));
        dials(world, SOURCE_PORT).map(dial).collect::<Result<Vec<_>>>()
    };
    world.while_dead(|world| {
        for node in NODES {
            world.cleanup(node, &[])?;
            state::track_connections(&world.lab, node, true)?;
        }
        for (client, outcomes) in dial_all(world, 200)? {
            ensure!(check::answered(&outcomes).is_err(), "{client} is answered though nobody serves");
        }
        for node in NODES {
            let known = state::unanswered_connections(&world.lab, node)?;
            let port = format!("sport={SOURCE_PORT}");
            ensure!(known.contains(&port), "node{node} knows no connection from port {SOURCE_PORT}: {known}");
        }
        Ok(())
    })?;
    // The entry may go just after the first SYN. The next SYN comes a second later.
    for (client, outcomes) in dial_all(world, 3_000)? {
        check::answered_by(&outcomes, &["web-2"]).context(client)?;
    }
    NODES.into_iter().try_for_each(|node| state::track_connections(&world.lab, node, false))
}

/// Returns a dial of each client to each family.
fn dials(world: &World, source_port: u16) -> impl Iterator<Item = (&'static str, Dial)> {
    let clients = CLIENTS.into_iter().flat_map(|client| FAMILIES.map(|family| (client, family)));
    clients.map(move |(client, family)| {
        let dial = Dial::new(Protocol::Tcp, world.cluster_ip(&ON_NODE2, family));
        (client, dial.source_port(source_port))
    })
}

/// Repeats connections that have ended, both with what the former process has left in the kernel
/// and without. The nodes do not see that the clients end them.
fn ended(world: &mut World, _: Variant) -> Result<()> {
    for (port, cleans_up) in [(SOURCE_PORT + 1, false), (SOURCE_PORT + 2, true)] {
        let hold = |(client, dial): (_, Dial)| {
            let (connection, outcome) = world.agent(client)?.hold_as(&dial)?;
            check::answered(&[outcome])?;
            Ok((client, connection))
        };
        let held = dials(world, port).map(hold).collect::<Result<Vec<_>>>()?;
        world.while_dead(|world| {
            if cleans_up {
                NODES.into_iter().try_for_each(|node| world.cleanup(node, &[]))?;
            }
            let lab = &world.lab;
            NODES.into_iter().try_for_each(|node| state::lose_resets(lab, node, true))?;
            let release = |(client, connection): (&str, _)| world.agent(client)?.release(connection);
            held.into_iter().try_for_each(release)?;
            NODES.into_iter().try_for_each(|node| state::end_orphans(lab, node))?;
            NODES.into_iter().try_for_each(|node| state::lose_resets(lab, node, false))
        })?;
        for (client, dial) in dials(world, port) {
            // An endpoint that has not seen the end of the former connection answers the second
            // SYN.
            check::answered_by(&world.dial(client, &dial.timeout_ms(3_000))?, &["web-2"])
                .with_context(|| format!("{client} from port {port}, cleaned up: {cleans_up}"))?;
        }
    }
    Ok(())
}

/// Holds connections over a restart. Connection tracking names the node as the server, as it does
/// where a process of mode userspace has ended. A connection that it had forgotten would go to
/// either endpoint.
fn of_the_node(world: &mut World, _: Variant) -> Result<()> {
    const ENDPOINTS: [&str; 2] = ["node2", "web-1"];
    const OF_EACH: usize = 8;
    world.set_endpoints(&CHANGING, &ENDPOINTS)?;
    let targets = FAMILIES.map(|family| world.cluster_ip(&CHANGING, family));
    let hold = |client| Ok((client, world.agent(client)?.hold_many(Protocol::Tcp, &targets, OF_EACH)?));
    let held = CLIENTS.into_iter().map(hold).collect::<Result<Vec<_>>>()?;
    world.while_dead(|_| Ok(()))?;
    for (client, connections) in held {
        let agent = world.agent(client)?;
        if let Some((ends, outcome)) = agent.ping_many(&connections)?.first() {
            bail!("{client}: {ends} is not answered: {outcome:?}");
        }
        connections.into_iter().try_for_each(|connection| agent.release(connection))?;
    }
    Ok(())
}

fn is_ours(setting: &Setting) -> bool {
    !setting.proxy.is_kube_proxy()
}

fn has_maps(setting: &Setting) -> bool {
    setting.datapath() == Datapath::Ebpf
}

fn ends_with_the_process(setting: &Setting, _: Variant) -> Option<Difference> {
    let why = "in mode userspace the process itself carries connections";
    setting.datapath().is_a_process().then_some(Difference { why, says: says::NOT_ANSWERED })
}

fn fails_with_the_process(setting: &Setting, variant: Variant) -> Option<Difference> {
    let difference = ends_with_the_process(setting, variant)?;
    Some(Difference { says: &[" connections failed of "], ..difference })
}

fn begins_with_the_process(setting: &Setting, _: Variant) -> Option<Difference> {
    let why = "in mode userspace each process has listeners of its own";
    setting
        .datapath()
        .is_a_process()
        .then_some(Difference { why, says: &[" after a restart without changes"] })
}

/// Metric of the map entries that the running controller has written.
const WRITES: &str = "proxy_writes_total";
/// Metric that counts how often the controller has compared everything with the maps.
const RESYNCS: &str = "proxy_resyncs_total";
const ADOPTS_WITHIN: Duration = Duration::from_secs(60);

const CLIENTS: [&str; 3] = ["client-1", "client-2", "node1"];

/// Opens connections of a client to a server on the other node, one for each protocol and family.
fn hold_all(world: &World) -> Result<Vec<usize>> {
    let hold = |Variant { protocol, family }| {
        let (connection, outcome) =
            world.agent("client-1")?.hold(protocol, world.cluster_ip(&ON_NODE2, family))?;
        check::answered_by(&[outcome], &["web-2"])?;
        Ok(connection)
    };
    Variants::All.list().into_iter().map(hold).collect()
}

fn all_go_on(world: &World, held: &[usize]) -> Result<()> {
    for connection in held {
        check::answered_by(&[world.agent("client-1")?.ping(*connection)?], &["web-2"])?;
    }
    Ok(())
}

/// Checks all protocols and families in one go, because a start takes seconds.
fn dead(world: &mut World, _: Variant) -> Result<()> {
    let held = hold_all(world)?;
    let still_works = |world: &World| -> Result<()> {
        all_go_on(world, &held)?;
        all_reach(world, &BALANCED, BALANCED.endpoints)
    };
    world.while_dead(|world| still_works(world))?;
    still_works(world)?;
    held.into_iter().try_for_each(|connection| world.agent("client-1")?.release(connection))
}

fn made_up(world: &mut World, _: Variant) -> Result<()> {
    world.set_endpoints(&CHANGING, &["web-1"])?;
    world.while_dead(|world| CHANGING.publish(&world.lab, &mut world.objects, &["web-2"]))?;
    all_reach(world, &CHANGING, &["web-2"])
}

/// Expects each client to reach these servers, and no other, by each protocol and family.
fn all_reach(world: &World, service: &ServiceFixture, servers: &[&str]) -> Result<()> {
    for client in CLIENTS {
        for Variant { protocol, family } in Variants::All.list() {
            let dial = Dial::new(protocol, world.cluster_ip(service, family)).times(40);
            world.answers(client, &dial, servers)?;
        }
    }
    Ok(())
}

/// Returns the number of restarts. Path `unseen` has the programs of `sockets`. With `off`, the
/// kernel verifies programs for seconds at each start, and in an emulated machine any start takes
/// that long.
fn restarts(path: PathKind) -> u32 {
    match path {
        PathKind::Sockets | PathKind::Packets if wait::patience() == 1 => 10,
        PathKind::Sockets | PathKind::Packets | PathKind::Unseen | PathKind::Off => 5,
    }
}

/// Checks both protocols and families at once, from pods on both nodes and from a host process.
fn under_load(world: &mut World, _: Variant) -> Result<()> {
    let restarts = restarts(world.setting.path);
    let load = |load: Load| Load { pause_micros: OFTEN * u64::from(wait::patience()), ..load };
    no_connection_fails(world, load, |world| {
        (0..restarts).try_for_each(|_| {
            world.restart(1)?;
            world.restart(2)?;
            world.settle()
        })
    })
}

const USUAL: u32 = 16_384;
/// Sizes of the maps: one above the usual size, and one below.
const SIZES: [u32; 2] = [131_072, 8_192];

fn limits(entries: u32) -> Value {
    let fields = ["frontends", "services", "slots", "backends", "flows", "openingFlows", "nodeAddresses"];
    let limits: serde_json::Map<_, _> =
        fields.iter().map(|field| ((*field).to_owned(), entries.into())).collect();
    json!({ "ebpf": { "limits": limits } })
}

/// Expects held connections to stay with their server while the maps are resized.
fn resized(world: &mut World, _: Variant) -> Result<()> {
    let held = hold_all(world)?;
    let load = |load: Load| Load {
        pause_micros: SELDOM,
        timeout_ms: THREE_SYNS_MS * u64::from(wait::patience()),
        ..load
    };
    for entries in SIZES {
        no_connection_fails(world, load, |world| {
            world.configure(limits(entries))?;
            NODES.into_iter().try_for_each(|node| has_size(world, node, entries))
        })?;
        all_go_on(world, &held)?;
    }
    held.into_iter().try_for_each(|connection| world.agent("client-1")?.release(connection))
}

/// Waits until the maps of flows have a size, and no entry is to be copied any more.
fn has_size(world: &World, node: NodeNumber, entries: u32) -> Result<()> {
    let pins = world.lab.bpffs(node).join(format!("proxy-ctl/v{LAYOUT_VERSION}"));
    wait::until(&format!("node{node} has resized its maps of flows"), ADOPTS_WITHIN, || {
        for name in map_name::OF_FLOWS {
            let found = bpf::pinned(&pins.join("maps").join(name)).and_then(|map| bpf::map_info(map.as_fd()));
            match found {
                Ok(found) if found.max_entries == entries => {}
                other => return Err(format!("{name} is {other:?}")),
            }
        }
        match fs::read_dir(pins.join("before")).map(Iterator::count) {
            Ok(0) => Ok(Some(())),
            other => Err(format!("there are former maps: {other:?}")),
        }
    })
}

/// Microseconds between connections of a client.
const OFTEN: u64 = 2_000;
/// Microseconds between connections on machines that emulate every instruction.
const SELDOM: u64 = 50_000;
/// Milliseconds in which a SYN is sent three times: at once, after 1 s and after 3 s. TCP
/// connections wait while flow maps are copied, which takes over a second on a busy machine.
const THREE_SYNS_MS: u64 = 5_000;

/// Expects no connection to fail that is opened while `change` happens.
fn no_connection_fails(
    world: &mut World,
    load: impl Fn(Load) -> Load,
    change: impl FnOnce(&mut World) -> Result<()>,
) -> Result<()> {
    let mut loads = Vec::new();
    for client in CLIENTS {
        for Variant { protocol, family } in Variants::All.list() {
            let target = world.cluster_ip(&BALANCED, family);
            let load = load(Load::new(protocol, target));
            loads.push((client, target, protocol, world.agent(client)?.start_load(&load)?));
        }
    }
    let changed = change(world);
    let mut tallies = Vec::new();
    for (client, target, protocol, load) in loads {
        tallies.push((client, target, protocol, world.agent(client)?.stop_load(load)?));
    }
    changed?;
    for (client, target, protocol, tally) in tallies {
        ensure!(
            tally.failed == 0 && tally.answered > 0,
            "{client} to {target} {protocol}: {} connections failed of {}: {:?}",
            tally.failed,
            tally.failed + tally.answered,
            tally.failures
        );
    }
    Ok(())
}

/// Expects a restart without changes to write nothing.
fn writes_nothing(world: &mut World, _: Variant) -> Result<()> {
    for node in NODES {
        world.restart(node)?;
    }
    for node in NODES {
        let world = &*world;
        wait::until(&format!("node{node} has adopted what is programmed"), ADOPTS_WITHIN, || {
            match world.metric(node, RESYNCS) {
                Ok(Some(resyncs)) if resyncs >= 1.0 => Ok(Some(())),
                Ok(other) => Err(format!("{RESYNCS} is {other:?}")),
                Err(error) => Err(error.to_string()),
            }
        })?;
        let written = world.metric(node, WRITES)?;
        ensure!(written == Some(0.0), "node{node}: {WRITES} is {written:?} after a restart without changes");
    }
    Ok(())
}
