//! Services, endpoints and interfaces change while the proxies run.

use std::time::Duration;

use anyhow::{Result, ensure};
use lab::{Dial, Outcome, cluster::NODES, wait};

use crate::{
    case::{Case, Variant, Variants},
    check,
    fixtures::{BALANCED, CHANGING},
    world::World,
};

pub(super) const CASES: &[Case] = &[
    Case::new("an endpoint that is removed gets no new connection", Variants::All, endpoint_removed).core(),
    Case::new("an endpoint that is added gets its share", Variants::All, endpoint_added),
    Case::new("the last endpoint goes: refused; one comes: served", Variants::All, emptied),
    Case::new("a service that is removed is no longer served", Variants::All, service_removed),
    Case::new("an established connection survives changes of other endpoints", Variants::All, established),
    Case::new("a pod that is started later is served", Variants::All, late_pod).core(),
    Case::new("an endpoint in a pod that is started later is reached", Variants::All, late_endpoint),
];

const CLIENTS: [&str; 3] = ["client-1", "client-2", "node1"];

fn expect(world: &World, variant: Variant, servers: &[&str]) -> Result<()> {
    for client in CLIENTS {
        let target = world.cluster_ip(&CHANGING, variant.family);
        let outcomes = world.dial(client, &Dial::new(variant.protocol, target).times(40))?;
        check::answered_by(&outcomes, servers)?;
    }
    Ok(())
}

fn endpoint_removed(world: &mut World, variant: Variant) -> Result<()> {
    world.set_endpoints(&CHANGING, &["web-1", "web-2"])?;
    expect(world, variant, &["web-1", "web-2"])?;
    world.set_endpoints(&CHANGING, &["web-2"])?;
    expect(world, variant, &["web-2"])?;
    world.set_endpoints(&CHANGING, &["web-1"])?;
    expect(world, variant, &["web-1"])
}

fn endpoint_added(world: &mut World, variant: Variant) -> Result<()> {
    world.set_endpoints(&CHANGING, &["web-1"])?;
    expect(world, variant, &["web-1"])?;
    world.set_endpoints(&CHANGING, &["web-1", "web-2", "web-3"])?;
    expect(world, variant, &["web-1", "web-2", "web-3"])
}

fn emptied(world: &mut World, variant: Variant) -> Result<()> {
    world.set_endpoints(&CHANGING, &[])?;
    let target = world.cluster_ip(&CHANGING, variant.family);
    for client in CLIENTS {
        check::refused_at_once(world.setting, &world.dial(client, &Dial::new(variant.protocol, target))?)?;
    }
    world.set_endpoints(&CHANGING, &["web-2"])?;
    expect(world, variant, &["web-2"])
}

fn service_removed(world: &mut World, variant: Variant) -> Result<()> {
    world.set_endpoints(&CHANGING, &["web-1"])?;
    expect(world, variant, &["web-1"])?;
    world.remove_service(CHANGING.name)?;
    let target = world.cluster_ip(&CHANGING, variant.family);
    for client in CLIENTS {
        let dial = Dial::new(variant.protocol, target).timeout_ms(300);
        check::dropped(world.setting, &world.dial(client, &dial)?)?;
    }
    world.set_endpoints(&CHANGING, &["web-1"])?;
    expect(world, variant, &["web-1"])
}

fn established(world: &mut World, variant: Variant) -> Result<()> {
    world.set_endpoints(&CHANGING, &["web-1"])?;
    let target = world.cluster_ip(&CHANGING, variant.family);
    let mut held = Vec::new();
    for client in CLIENTS {
        let (connection, outcome) = world.agent(client)?.hold(variant.protocol, target)?;
        check::answered_by(&[outcome], &["web-1"])?;
        held.push((client, connection));
    }
    for endpoints in [&["web-1", "web-2"][..], &["web-1", "web-2", "web-3"], &["web-3", "web-1"]] {
        world.set_endpoints(&CHANGING, endpoints)?;
        for (client, connection) in &held {
            check::answered_by(&[world.agent(client)?.ping(*connection)?], &["web-1"])?;
        }
    }
    for (client, connection) in held {
        world.agent(client)?.release(connection)?;
    }
    Ok(())
}

/// How long a new interface may go without its programs.
const ATTACHED_WITHIN: Duration = Duration::from_secs(2);

fn late_pod(world: &mut World, variant: Variant) -> Result<()> {
    for node in NODES {
        let client = world.add_late_pod(node)?;
        let target = world.cluster_ip(&BALANCED, variant.family);
        let dial = Dial::new(variant.protocol, target).timeout_ms(200);
        let world = &*world;
        wait::until(&format!("{client} on node{node} is served"), ATTACHED_WITHIN, || {
            let outcomes = world.dial(&client, &dial).map_err(|error| error.to_string())?;
            match outcomes.first() {
                Some(Outcome::Answered(_)) => Ok(Some(())),
                Some(other) => Err(other.to_string()),
                None => Ok(None),
            }
        })?;
        let outcomes = world.dial(&client, &dial.times(40))?;
        let own = world.addresses(&client)?;
        for answer in check::answered_by(&outcomes, BALANCED.endpoints)? {
            let seen = answer.source.ip();
            let is_carried = world.setting.datapath().is_a_process() && world.is_node_address(node, seen);
            ensure!(own.contains(seen) || is_carried, "{} saw {}", answer.by, answer.source);
        }
    }
    Ok(())
}

fn late_endpoint(world: &mut World, variant: Variant) -> Result<()> {
    for node in NODES {
        let server = world.add_late_pod(node)?;
        world.set_endpoints(&CHANGING, &[&server])?;
        expect(world, variant, &[&server])?;
    }
    world.set_endpoints(&CHANGING, CHANGING.endpoints)
}
