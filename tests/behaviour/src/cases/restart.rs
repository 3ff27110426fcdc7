//! The controller dies and comes back.

use anyhow::{Result, ensure};
use lab::{agent::protocol::Load, cluster::NODES};

use crate::{
    case::{Case, Variant, Variants},
    cast::{BALANCED, CHANGING, ON_NODE2},
    check,
    world::World,
};

pub(super) const CASES: &[Case] = &[
    Case::new("connections go on while the controller is dead and after it is back", Variants::All, dead)
        .core(),
    Case::new("what changed while the controller was dead is made up for", Variants::All, made_up),
    Case::new("20 restarts under load fail no connection", Variants::Tcp, under_load),
];

fn dead(world: &mut World, variant: Variant) -> Result<()> {
    let target = world.cluster_ip(&ON_NODE2, variant.family);
    let balanced = world.cluster_ip(&BALANCED, variant.family);
    let (connection, outcome) = world.agent("client-1")?.hold(variant.protocol, target)?;
    check::answered_by(&[outcome], &["web-2"])?;
    let still_works = |world: &World| -> Result<()> {
        check::answered_by(&[world.agent("client-1")?.ping(connection)?], &["web-2"])?;
        for client in ["client-1", "client-2", "node1"] {
            let outcomes = world.dial(client, &lab::Dial::new(variant.protocol, balanced).times(40))?;
            check::answered_by(&outcomes, BALANCED.endpoints)?;
        }
        Ok(())
    };
    for node in NODES {
        world.kill(node)?;
    }
    let while_dead = still_works(world);
    for node in NODES {
        world.start(node)?;
    }
    world.settle()?;
    while_dead?;
    still_works(world)?;
    world.agent("client-1")?.release(connection)
}

fn made_up(world: &mut World, variant: Variant) -> Result<()> {
    world.set_endpoints(&CHANGING, &["web-1"])?;
    for node in NODES {
        world.kill(node)?;
    }
    CHANGING.publish(&world.lab, &mut world.objects, &["web-2"])?;
    for node in NODES {
        world.start(node)?;
    }
    world.settle()?;
    for client in ["client-1", "client-2", "node1"] {
        let target = world.cluster_ip(&CHANGING, variant.family);
        let outcomes = world.dial(client, &lab::Dial::new(variant.protocol, target).times(20))?;
        check::answered_by(&outcomes, &["web-2"])?;
    }
    Ok(())
}

const RESTARTS: u32 = 20;

fn under_load(world: &mut World, variant: Variant) -> Result<()> {
    let load = Load {
        target: world.cluster_ip(&BALANCED, variant.family),
        protocol: variant.protocol,
        clients: 2,
        pause_micros: 1_000,
        timeout_ms: 2_000,
    };
    let clients = ["client-1", "client-2", "node1"];
    let mut loads = Vec::new();
    for client in clients {
        loads.push((client, world.agent(client)?.start_load(&load)?));
    }
    let restarted = (0..RESTARTS).try_for_each(|_| {
        world.restart(1)?;
        world.restart(2)?;
        world.settle()
    });
    let mut tallies = Vec::new();
    for (client, load) in loads {
        tallies.push((client, world.agent(client)?.stop_load(load)?));
    }
    restarted?;
    for (client, tally) in tallies {
        ensure!(
            tally.failed == 0 && tally.answered > 0,
            "{client}: {} connections failed of {}: {:?}",
            tally.failed,
            tally.failed + tally.answered,
            tally.failures
        );
    }
    Ok(())
}
