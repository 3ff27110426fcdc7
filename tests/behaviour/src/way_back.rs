//! Switches from proxy-ctl to the real kube-proxy and back, while clients connect and endpoints
//! change.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lab::{
    Dial, Protocol,
    agent::protocol::{Load, Tally},
    wait,
};

use crate::{
    case::Variants,
    check,
    fixtures::CHANGING,
    proxy::Proxy,
    setting::{PathKind, ProxyKind, Setting},
    world::World,
};

const CLIENTS: [&str; 3] = ["client-1", "client-2", "node1"];
/// Time within which hooks pass everything on: `ebpf.withdrawAfter`, and what a busy machine needs.
const WITHDRAWN_WITHIN: Duration = Duration::from_secs(60);
const ANSWERED_WITHIN: Duration = Duration::from_secs(60);

pub type Run = fn(&mut World) -> Result<()>;

/// Scenarios in order. Each leaves proxy-ctl in charge.
pub const SCENARIOS: [(&str, Run); 2] = [
    ("a clean-up leaves the answers to kube-proxy, and the way back too", cleaned),
    ("after the lease kube-proxy answers, until a controller is back", withdrawn),
];

/// Returns true for the paths that are tested. Other paths have no other hooks.
pub fn concerns(setting: Setting) -> bool {
    setting.proxy == ProxyKind::Ebpf && matches!(setting.path, PathKind::Sockets | PathKind::Packets)
}

pub fn world(setting: Setting) -> Result<World> {
    let setting = Setting { withdraws: true, ..setting };
    World::with_services(setting, true, |lab, objects| CHANGING.publish(lab, objects, &["web-1"]))
}

fn cleaned(world: &mut World) -> Result<()> {
    let ours = world.setting;
    world.set_endpoints(&CHANGING, &["web-1"])?;
    let loads = start_loads(world)?;
    // kube-proxy starts first, as with a chart.
    let mut former = world.swap(real(ours))?;
    former.iter_mut().try_for_each(Proxy::kill)?;
    // Hooks that nobody updates do not know the new endpoint. Only kube-proxy sends clients to it.
    CHANGING.publish(&world.lab, &mut world.objects, &["web-2"])?;
    world.settle_by_new_service()?;
    only(world, "web-1").context("the hooks that are left: what a clean-up is for")?;
    for proxy in &former {
        proxy.tool(&world.lab, &["cleanup"])?;
    }
    // The kernel detaches the programs in the background.
    wait::until("the end of the hooks", WITHDRAWN_WITHIN, || {
        only(world, "web-2").map(Some).map_err(|error| format!("{error:#}"))
    })?;
    only(world, "web-2").context("after the clean-up")?;
    // A client that has lost a datagram still waits for its answer.
    wait::until("the answers of web-2 to every client", ANSWERED_WITHIN, || {
        let tallies = loads.iter().map(|(client, _, load)| world.agent(client)?.peek_load(*load));
        let tallies = tallies.collect::<Result<Vec<Tally>>>().map_err(|error| format!("{error:#}"))?;
        Ok(tallies.iter().all(|tally| tally.backends.contains_key("web-2")).then_some(()))
    })?;

    back_to(world, ours)?;
    // Packets that are under way when filters are removed are lost, once on each node. Sockets do
    // not notice.
    let lost = if ours.path == PathKind::Sockets { 0 } else { 2 };
    for (what, tally) in stop_loads(world, loads)? {
        ensure!(tally.failed <= lost && tally.answered > 0, "{what}: {tally:?}");
        ensure!(
            ["web-1", "web-2"].iter().all(|name| tally.backends.contains_key(*name)),
            "{what}: {tally:?}"
        );
    }
    Ok(())
}

fn withdrawn(world: &mut World) -> Result<()> {
    let ours = world.setting;
    world.set_endpoints(&CHANGING, &["web-1"])?;
    only(world, "web-1")?;
    let mut former = world.swap(real(ours))?;
    for proxy in &mut former {
        let status = proxy.tool(&world.lab, &["status"])?;
        ensure!(status.contains("without a controller, translation ends in"), "{status}");
        proxy.kill()?;
    }
    world.set_endpoints(&CHANGING, &["web-2"])?;
    wait::until("the end of the lease", WITHDRAWN_WITHIN, || {
        let statuses = former.iter().map(|proxy| proxy.tool(&world.lab, &["status"]));
        let statuses = statuses.collect::<Result<String>>().map_err(|error| format!("{error:#}"))?;
        Ok((statuses.matches("has ended: nothing is translated").count() == former.len()).then_some(()))
    })?;
    only(world, "web-2").context("after the lease")?;
    back_to(world, ours)
}

/// Starts proxy-ctl again, which takes over what it and kube-proxy have left.
fn back_to(world: &mut World, ours: Setting) -> Result<()> {
    for node in lab::cluster::NODES {
        world.kill(node)?;
    }
    world.swap(ours)?;
    world.set_endpoints(&CHANGING, &["web-1"])?;
    only(world, "web-1").context("back")
}

fn real(ours: Setting) -> Setting {
    Setting { proxy: ProxyKind::KubeProxyNftables, ..ours }
}

/// Expects only this server to answer every client, by each protocol and family.
fn only(world: &World, server: &str) -> Result<()> {
    for client in CLIENTS {
        for variant in Variants::All.list() {
            let dial = Dial::new(variant.protocol, world.cluster_ip(&CHANGING, variant.family)).times(20);
            check::answered_by(&world.dial(client, &dial)?, &[server])
                .with_context(|| format!("{client}, {variant}"))?;
        }
    }
    Ok(())
}

type Loads = Vec<(&'static str, Protocol, usize)>;

fn start_loads(world: &World) -> Result<Loads> {
    let mut loads = Vec::new();
    for client in CLIENTS {
        for variant in Variants::All.list() {
            let target = world.cluster_ip(&CHANGING, variant.family);
            let load = Load::new(variant.protocol, target);
            loads.push((client, variant.protocol, world.agent(client)?.start_load(&load)?));
        }
    }
    Ok(loads)
}

fn stop_loads(world: &World, loads: Loads) -> Result<Vec<(String, Tally)>> {
    let stop = |(client, protocol, load): (&str, Protocol, usize)| {
        Ok((format!("{client}, {protocol}"), world.agent(client)?.stop_load(load)?))
    };
    loads.into_iter().map(stop).collect()
}
