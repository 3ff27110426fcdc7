//! Addresses that move to another node: their connections are unknown there.

use std::time::Duration;

use anyhow::Result;
use lab::{
    Dial,
    address::{self, Addresses, NodeNumber},
    agent::protocol::Outcome,
    cluster::OUTSIDE,
    objects::{Ingress, Service},
    wait,
};

use crate::{
    case::{Case, Variant, Variants},
    check,
    fixtures::{DIRECT, PORT},
    setting::{ProxyKind, Setting},
    world::World,
};

pub(in crate::cases) const CASES: &[Case] = &[
    Case::new("an address moves to another node: its clients are reset at once", Variants::Tcp, reset).core(),
    Case::new("an address moves to another node: by their hash, connections go on", Variants::Tcp, goes_on)
        .concerns(is_ebpf)
        .core(),
];

/// Each node has one of them.
const ENDPOINTS: [&str; 2] = ["web-1", "web-2"];
/// All of them go to the same endpoint with a chance of 2 * 0.5^8.
const CONNECTIONS: usize = 8;
/// Mode ebpf answers once it has looked for connections of others, a minute after it has begun to
/// serve.
const ANSWERS_WITHIN: Duration = Duration::from_secs(150);
const AT_ONCE_MS: u64 = 1_000;

fn is_ebpf(setting: &Setting) -> bool {
    setting.proxy == ProxyKind::Ebpf
}

fn moving() -> Addresses {
    address::external(1, 92)
}

/// The client outside sends packets to the address by this node.
fn lead_by(world: &World, node: NodeNumber) -> Result<()> {
    let (to, via) = (moving(), address::node(node));
    let script =
        format!("route replace {}/32 via {}\nroute replace {}/128 via {}\n", to.v4, via.v4, to.v6, via.v6);
    world.lab.netns(OUTSIDE)?.ip(&script)
}

fn serve(world: &mut World, service: Service) -> Result<()> {
    let load_balancer = moving().both().map(|address| Ingress { address, proxied: false }).into();
    world.set_service(&Service { load_balancer, ..service }, &ENDPOINTS)
}

/// Opens connections through node 1, and sends a request over each after the address has moved to
/// node 2.
fn move_once(world: &World, variant: Variant) -> Result<Vec<Outcome>> {
    let target = (moving().of(variant.family), PORT).into();
    let dial = Dial::new(variant.protocol, target).timeout_ms(AT_ONCE_MS);
    let client = world.agent(OUTSIDE)?;
    lead_by(world, 1)?;
    let mut held = Vec::new();
    for _ in 0..CONNECTIONS {
        let (connection, outcome) = client.hold_as(&dial)?;
        held.push(connection);
        check::answered(&[outcome])?;
    }
    lead_by(world, 2)?;
    let outcomes = held.iter().map(|one| client.ping(*one)).collect();
    held.into_iter().try_for_each(|one| client.release(one))?;
    outcomes
}

fn reset(world: &mut World, variant: Variant) -> Result<()> {
    serve(world, DIRECT.service())?;
    let outcome = wait::until("connections are reset", ANSWERS_WITHIN, || {
        move_once(world, variant)
            .map(|outcomes| outcomes.iter().all(is_reset).then_some(()))
            .map_err(|error| format!("{error:#}"))
    });
    lead_by(world, 1)?;
    outcome?;
    world.remove_service(DIRECT.name)
}

/// It goes by the connection alone, and endpoints answer the client themselves.
fn goes_on(world: &mut World, variant: Variant) -> Result<()> {
    let service = Service { algorithm: Some("maglev"), forwarding: Some("dsr"), ..DIRECT.service() };
    serve(world, service)?;
    let outcome = wait::until("connections go on", ANSWERS_WITHIN, || {
        let outcomes = move_once(world, variant).map_err(|error| format!("{error:#}"))?;
        check::answered_by(&outcomes, &ENDPOINTS).map(Some).map_err(|error| format!("{error:#}"))
    });
    lead_by(world, 1)?;
    outcome?;
    world.remove_service(DIRECT.name)
}

fn is_reset(outcome: &Outcome) -> bool {
    const ECONNRESET: &str = "os error 104";
    matches!(outcome, Outcome::Failed(error) if error.contains(ECONNRESET))
}
