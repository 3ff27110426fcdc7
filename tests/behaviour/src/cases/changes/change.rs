//! Services, endpoints and interfaces change while the proxies run.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lab::{
    Dial, Protocol,
    address::{self, Addresses, FAMILIES, Family},
    cluster::{NODES, OUTSIDE},
    objects::{Endpoint, Ingress, Service, State},
    wait,
};
use serde_json::json;

use crate::{
    case::{Case, Variant, Variants},
    check,
    fixtures::{BALANCED, CHANGING, PORT, SHIFTING},
    world::World,
};

pub(in crate::cases) const CASES: &[Case] = &[
    Case::new("an endpoint that is removed gets no new connection", Variants::All, endpoint_removed).core(),
    Case::new("an endpoint that is added gets its share", Variants::All, endpoint_added),
    Case::new("the last endpoint goes: refused; one comes: served", Variants::All, emptied),
    Case::new("a service that is removed is no longer served", Variants::All, service_removed),
    Case::new("of one port for two protocols one goes, the other stays", Variants::All, protocol_removed),
    Case::new("a service changes its type and its load-balancer addresses", Variants::Once, type_changed),
    Case::new("the second family of a service goes and comes", Variants::Once, family_removed),
    Case::new("zone hints follow the zone of the node", Variants::Once, zone_changed),
    Case::new("an established connection survives changes of other endpoints", Variants::All, established),
    Case::new("a pod that is started later is served", Variants::All, late_pod).core(),
    Case::new("an endpoint in a pod that is started later is reached", Variants::All, late_endpoint),
];

/// Milliseconds that are long enough to see that nobody answers.
const SILENCE_MS: u64 = 200;

const CLIENTS: [&str; 3] = ["client-1", "client-2", "node1"];

/// Number of connections for each expected server. One of three servers is left out with a chance
/// of 3 × (2/3)^60, less than 1e-10. A second server beside the only expected one stays unseen with
/// a chance of one in a million.
const CONNECTIONS: u32 = 20;

fn expect(world: &World, variant: Variant, servers: &[&str]) -> Result<()> {
    for client in CLIENTS {
        let target = world.cluster_ip(&CHANGING, variant.family);
        let count = CONNECTIONS * u32::try_from(servers.len())?;
        world.answers(client, &Dial::new(variant.protocol, target).times(count), servers)?;
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

/// Removes IPv6, because only the second family of a Service can be removed.
fn family_removed(world: &mut World, _: Variant) -> Result<()> {
    world.set_endpoints(&CHANGING, &["web-1"])?;
    let both = CHANGING.service().object();
    let mut one = both.clone();
    one["spec"]["ipFamilyPolicy"] = json!("SingleStack");
    one["spec"]["ipFamilies"] = json!(["IPv4"]);
    one["spec"]["clusterIPs"] = json!([one["spec"]["clusterIP"]]);
    for (service, has_both) in [(one, false), (both, true)] {
        world.objects.set("Service", CHANGING.name, service);
        world.settle()?;
        for (client, family) in CLIENTS.into_iter().flat_map(|client| FAMILIES.map(|family| (client, family)))
        {
            let target = world.cluster_ip(&CHANGING, family);
            let dial = Dial::new(Protocol::Tcp, target).timeout_ms(SILENCE_MS);
            match has_both || family == Family::V4 {
                true => world.answers(client, &dial, &["web-1"]).map(drop),
                false => check::dropped(world.setting, &world.dial(client, &dial)?),
            }
            .with_context(|| format!("{client}, {family}, both families: {has_both}"))?;
        }
    }
    Ok(())
}

/// Removes the protocol that is not the variant's.
fn protocol_removed(world: &mut World, variant: Variant) -> Result<()> {
    let both = SHIFTING.service();
    let mut one = both.clone();
    one.ports.retain(|port| port.protocol == variant.protocol);
    let other = if variant.protocol == Protocol::Tcp { Protocol::Udp } else { Protocol::Tcp };
    let targets = [
        ("client-1", world.cluster_ip(&SHIFTING, variant.family)),
        ("node1", world.cluster_ip(&SHIFTING, variant.family)),
        (OUTSIDE, world.node_port(&SHIFTING, 1, variant.family)?),
    ];
    let dial = |protocol, target| Dial::new(protocol, target).timeout_ms(SILENCE_MS);
    for (service, other_is_served) in [(&both, true), (&one, false), (&both, true)] {
        world.set_service(service, &["web-1"])?;
        for (client, target) in targets {
            world.answers(client, &dial(variant.protocol, target), &["web-1"])?;
            if other_is_served {
                world.answers(client, &dial(other, target), &["web-1"])?;
            } else {
                let outcomes = world.dial(client, &dial(other, target))?;
                ensure!(check::answered(&outcomes).is_err(), "{client}, {other}: {outcomes:?}");
            }
        }
    }
    world.remove_service(SHIFTING.name)
}

fn type_changed(world: &mut World, variant: Variant) -> Result<()> {
    let [first, second] = [92, 93].map(|index| address::external(1, index));
    let number = world.node_port(&SHIFTING, 1, variant.family)?;
    let targets = [number, (first.of(variant.family), PORT).into(), (second.of(variant.family), PORT).into()];
    let ingress =
        |addresses: Addresses, proxied| addresses.both().map(|address| Ingress { address, proxied }).to_vec();
    // Each step has its node ports and load-balancer addresses, and says which of the targets are
    // then served.
    let steps = [
        ("NodePort", true, vec![], [true, false, false]),
        ("LoadBalancer", true, ingress(first, false), [true, true, false]),
        ("LoadBalancer at another address", true, ingress(second, false), [true, false, true]),
        ("ipMode Proxy", true, ingress(second, true), [true, false, false]),
        ("LoadBalancer without node ports", false, ingress(first, false), [false, true, false]),
        ("ClusterIP", false, vec![], [false, false, false]),
    ];
    for (step, has_node_ports, load_balancer, served) in steps {
        let mut service = Service { load_balancer, ..SHIFTING.service() };
        if !has_node_ports {
            service.ports.iter_mut().for_each(|port| port.node_port = None);
        }
        world.set_service(&service, &["web-1"])?;
        for (target, is_served) in targets.into_iter().zip(served) {
            let dial = Dial::new(variant.protocol, target).timeout_ms(SILENCE_MS);
            if is_served {
                for client in [OUTSIDE, "client-1"] {
                    world.answers(client, &dial, &["web-1"]).context(step)?;
                }
            } else {
                let outcomes = world.dial(OUTSIDE, &dial)?;
                ensure!(check::answered(&outcomes).is_err(), "{step}: {target}: {outcomes:?}");
            }
        }
    }
    world.remove_service(SHIFTING.name)
}

/// Time within which a change of the Node is followed. It and the sentinel are two streams of an
/// API server.
const FOLLOWED_WITHIN: Duration = Duration::from_secs(30);

fn zone_changed(world: &mut World, variant: Variant) -> Result<()> {
    let ready = [("web-1", State::Ready), ("web-2", State::Ready)];
    let zones: [&'static [&'static str]; 2] = [&["zone-of-node1"], &["zone-of-node2"]];
    let endpoints = world.endpoints(&ready)?.into_iter().zip(zones);
    let endpoints: Vec<Endpoint> =
        endpoints.map(|(endpoint, zones)| Endpoint { zones, ..endpoint }).collect();
    world.objects.set_service(&SHIFTING.service(), &endpoints);
    for (zone, server) in [("zone-of-node1", "web-1"), ("zone-of-node2", "web-2"), ("zone-of-node1", "web-1")]
    {
        world.objects.set_zone("node1", Some(zone));
        world.settle()?;
        for family in FAMILIES {
            let target = world.cluster_ip(&SHIFTING, family);
            let dial = Dial::new(variant.protocol, target).times(20);
            wait::until(&format!("{server} alone answers in {zone}"), FOLLOWED_WITHIN, || {
                let answers = world.answers("client-1", &dial, &[server]);
                answers.map(|_| Some(())).map_err(|error| format!("{error:#}"))
            })?;
        }
    }
    world.remove_service(SHIFTING.name)
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

/// Time within which a new interface gets its programs, on a busy machine too.
const ATTACHED_WITHIN: Duration = Duration::from_secs(10);

fn late_pod(world: &mut World, variant: Variant) -> Result<()> {
    for node in NODES {
        let client = world.add_late_pod(node)?;
        let target = world.cluster_ip(&BALANCED, variant.family);
        let dial = Dial::new(variant.protocol, target).timeout_ms(200);
        world.until_answered(&client, &dial, ATTACHED_WITHIN)?;
        let answers = world.answers(&client, &dial.times(40), BALANCED.endpoints)?;
        let (own, is_process) = (world.addresses(&client)?, world.setting.datapath().is_a_process());
        check::saw(&answers, &client, |seen| {
            own.contains(seen) || is_process && world.is_node_address(node, seen)
        })?;
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
