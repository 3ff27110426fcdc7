//! Switches from each mode to each other, by a changed file and by another process, and from and to
//! the real kube-proxy. Clients connect meanwhile. A matrix of failed connections is printed.

mod matrix;
mod run;
mod switch;

use std::{process::ExitCode, sync::Arc};

use anyhow::Result;
use behaviour::{
    fixtures::{BALANCED, EXTERNAL_LOCAL_ON_NODE1, RESTRICTED, ServiceFixture},
    proxy,
    selection::Selection,
    setting::{PathKind, ProxyKind, Setting},
    world::World,
};
use clap::Parser;
use lab::{
    Lab, Objects,
    address::{self, Addresses, NodeNumber},
    cluster::{NODES, OUTSIDE, node_name},
    objects::{Endpoint, Ingress, Service},
};
use scenario::{Outcome, Scenario as Test, Shared, Trial};

use crate::{
    matrix::{Matrix, print},
    run::{FIRST_PORT, Run},
    switch::{Switch, ours, with_the_real_one},
};

// clap names a group of arguments after its struct, and the harness already has one named
// `Arguments`.
#[derive(Parser)]
struct CommandLine {
    #[command(flatten)]
    selection: Selection,
    /// TCP connections that are held open over each switch
    #[arg(long, default_value_t = 1_000)]
    connections: usize,
}

const SERVICES: [&ServiceFixture; 2] = [&BALANCED, &EXTERNAL_LOCAL_ON_NODE1];

fn main() -> ExitCode {
    let CommandLine { selection, connections } = CommandLine::parse();
    if let Err(error) = lab::cluster::remove_on_signals() {
        eprintln!("switching: {error:#}");
        return ExitCode::FAILURE;
    }
    let (modes, skipped): (Vec<_>, Vec<_>) =
        selection.ours().into_iter().partition(|mode| missing(*mode).is_none());
    let matrix = Matrix::default();
    let mut trials: Vec<Trial> = skipped.iter().map(|mode| skip(*mode)).collect();
    trials.extend(trials_of(ours(&modes, selection.lean), false, connections, &matrix));
    let with_the_real_one = with_the_real_one(&selection.real(), &modes, selection.lean);
    if !with_the_real_one.is_empty() {
        trials.extend(trials_of(with_the_real_one, true, connections, &matrix));
    }
    let is_listing = selection.harness.list;
    let result = scenario::run(selection.harness, trials);
    if !is_listing {
        print(&matrix);
    }
    result
}

/// Returns why this machine cannot run the proxy. If that cannot be found out, the scenarios report
/// it.
fn missing(proxy: ProxyKind) -> Option<String> {
    proxy::missing_for(proxy).ok().flatten()
}

fn skip(mode: ProxyKind) -> Trial {
    let run = move |(): &mut ()| Ok(Outcome::Skipped(missing(mode).unwrap_or_default()));
    let mut trials = Shared::new(|| Ok(Ok(()))).trials([Test::new(format!("from and to {mode}"), run)]);
    // The list has exactly one element.
    trials.remove(0)
}

fn trials_of(switches: Vec<Switch>, api_server: bool, connections: usize, matrix: &Matrix) -> Vec<Trial> {
    let matrix = Arc::clone(matrix);
    let mut proxies: Vec<ProxyKind> = switches.iter().flat_map(|switch| [switch.from, switch.to]).collect();
    proxies.sort_unstable();
    proxies.dedup();
    let first = proxies.first().copied();
    let run = Shared::new(move || {
        let Some(first) = first else { return Ok(Err("no mode can be tested here".to_owned())) };
        if let Some(reason) = proxies.iter().find_map(|proxy| missing(*proxy)) {
            return Ok(Err(reason));
        }
        let world = World::with_services(setting(first), api_server, |lab, objects| {
            SERVICES.iter().try_for_each(|service| service.publish(lab, objects, service.endpoints))?;
            publish_restricted(lab, objects)?;
            NODES.into_iter().try_for_each(|node| masquerade_as_plugins_do(lab, node))
        })?;
        let (nothing, parameters, fresh) = Default::default();
        let mut run = Run { world, connections, free_port: FIRST_PORT, nothing, parameters, fresh, matrix };
        run.start_each(&proxies)?;
        Ok(Ok(run))
    });
    let switch = |switch: Switch| {
        Test::new(switch.to_string(), move |run: &mut Run| {
            run.switch(switch).inspect_err(|error| eprintln!("{switch}: {error:#}"))
        })
    };
    let cleanup = format!("clean-up after all{}", if api_server { ", the real one among them" } else { "" });
    run.trials(switches.into_iter().map(switch).chain([Test::new(cleanup, Run::clean_up)]))
}

/// Returns the load-balancer addresses of [`RESTRICTED`].
fn load_balancer() -> Addresses {
    address::external(1, 91)
}

/// Publishes [`RESTRICTED`], whose load-balancer addresses only the client outside may reach.
fn publish_restricted(lab: &Lab, objects: &mut Objects) -> Result<()> {
    let endpoint = |name: &&str| {
        let pod = lab.netns(name)?;
        Ok(Endpoint::ready(pod.addresses, pod.node.unwrap_or_default()))
    };
    let endpoints = RESTRICTED.endpoints.iter().map(endpoint).collect::<Result<Vec<_>>>()?;
    let client = lab.netns(OUTSIDE)?.addresses;
    let ingress = |address| Ingress { address, proxied: false };
    let service = Service {
        load_balancer: load_balancer().both().into_iter().map(ingress).collect(),
        source_ranges: vec![format!("{}/32", client.v4), format!("{}/128", client.v6)],
        ..RESTRICTED.service()
    };
    objects.set_service(&service, &endpoints);
    Ok(())
}

/// Masquerades what pods send out of the cluster, as network plugins do, so that netfilter tracks
/// connections in each mode. Without that, it does not know connections that mode ebpf translates
/// at sockets. A new connection could then get the port of a silent one; see docs/life-cycle.md.
fn masquerade_as_plugins_do(lab: &Lab, node: NodeNumber) -> Result<()> {
    let of = |family, pods| format!("{family} saddr {pods} {family} daddr != {pods} masquerade");
    let rules = [of("ip", address::POD_RANGE4), of("ip6", address::POD_RANGE6)];
    lab::namespace::masquerade(&lab.netns(&node_name(node))?.namespace, &rules)
}

fn setting(proxy: ProxyKind) -> Setting {
    Setting::new(proxy, PathKind::Sockets)
}
