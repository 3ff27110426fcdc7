//! Clients on a node that dial a cluster IP.

use anyhow::{Context as _, Result, ensure};
use lab::{
    Dial, Protocol,
    cluster::{NODES, node_name},
};

use crate::{
    case::{Case, Difference, Variant, Variants, says},
    check,
    fixtures::{BALANCED, EMPTY, LONER1, LONER2, ON_NODE1, ON_NODE2},
    setting::Setting,
    world::World,
};

pub(in crate::cases) const CASES: &[Case] = &[
    Case::new("a pod reaches every endpoint of a cluster IP, evenly, as itself", Variants::All, from_pod)
        .core()
        .differs(carried),
    Case::new("a host process reaches every endpoint of a cluster IP", Variants::All, from_host).core(),
    Case::new("a pod that is its service's only endpoint reaches itself", Variants::All, hairpin).core(),
    Case::new("a service without endpoints refuses at once", Variants::All, refused).core(),
    Case::new("two services are kept apart", Variants::All, apart),
    Case::new("requests of 5,000 bytes arrive whole", Variants::Tcp, large),
    Case::new("one source port talks to several services", Variants::All, same_source_port),
];

/// Explains the settings in which endpoints see the node instead of any client.
pub(in crate::cases) fn carried(setting: &Setting, _: Variant) -> Option<Difference> {
    let why = "in mode userspace the process opens the connections that endpoints see";
    setting.datapath().is_a_process().then_some(Difference { why, says: says::OTHER_CLIENT })
}

fn from_pod(world: &mut World, variant: Variant) -> Result<()> {
    for client in ["client-1", "client-2"] {
        let own = world.addresses(client)?;
        let dial = Dial::new(variant.protocol, world.cluster_ip(&BALANCED, variant.family));
        let answers = world.answers(client, &dial.times(check::MANY), BALANCED.endpoints)?;
        check::roughly_even(&answers)?;
        check::saw(&answers, client, |seen| own.contains(seen))?;
    }
    Ok(())
}

fn from_host(world: &mut World, variant: Variant) -> Result<()> {
    for node in NODES {
        let dial = Dial::new(variant.protocol, world.cluster_ip(&BALANCED, variant.family)).times(40);
        let answers = world.answers(&node_name(node), &dial, BALANCED.endpoints)?;
        check::saw(&answers, &node_name(node), |seen| world.is_node_address(node, seen))?;
    }
    Ok(())
}

fn hairpin(world: &mut World, variant: Variant) -> Result<()> {
    for (service, client) in [(&LONER1, "client-1"), (&LONER2, "client-2")] {
        let dial = Dial::new(variant.protocol, world.cluster_ip(service, variant.family)).times(5);
        world.answers(client, &dial, &[client])?;
    }
    Ok(())
}

fn refused(world: &mut World, variant: Variant) -> Result<()> {
    let target = world.cluster_ip(&EMPTY, variant.family);
    for client in ["client-1", "client-2", "node1"] {
        let outcomes = world.dial(client, &Dial::new(variant.protocol, target).times(2))?;
        check::refused_at_once(world.setting, &outcomes).with_context(|| format!("from {client}"))?;
    }
    Ok(())
}

fn apart(world: &mut World, variant: Variant) -> Result<()> {
    for (service, server) in [(&ON_NODE1, "web-1"), (&ON_NODE2, "web-2")] {
        for client in ["client-1", "client-2"] {
            let dial = Dial::new(variant.protocol, world.cluster_ip(service, variant.family)).times(10);
            world.answers(client, &dial, &[server])?;
        }
    }
    Ok(())
}

fn large(world: &mut World, variant: Variant) -> Result<()> {
    for service in [&ON_NODE1, &ON_NODE2] {
        let dial = Dial::new(Protocol::Tcp, world.cluster_ip(service, variant.family)).payload(5_000);
        for answer in world.answers("client-1", &dial, service.endpoints)? {
            ensure!(answer.bytes == 5_000, "{} of 5000 bytes arrived", answer.bytes);
        }
    }
    Ok(())
}

fn same_source_port(world: &mut World, variant: Variant) -> Result<()> {
    for (service, server) in [(&ON_NODE1, "web-1"), (&ON_NODE2, "web-2"), (&ON_NODE1, "web-1")] {
        let dial = Dial::new(variant.protocol, world.cluster_ip(service, variant.family));
        world.answers("client-1", &dial.source_port(23_456), &[server])?;
    }
    Ok(())
}
