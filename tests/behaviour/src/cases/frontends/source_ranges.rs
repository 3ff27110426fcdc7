//! Load-balancer addresses that a Service opens only to some clients.

use std::time::Duration;

use anyhow::{Context as _, Result};
use lab::{
    Dial,
    address::{self, NodeNumber},
    cluster::{NODES, OUTSIDE},
    objects::{Ingress, Service},
    wait,
};

use crate::{
    case::{Case, Variant, Variants},
    check,
    fixtures::{BALANCED, PORT, RESTRICTED},
    state::State,
    world::World,
};

pub(in crate::cases) const CASES: &[Case] = &[
    Case::new("source ranges: their clients are answered, all others dropped", Variants::All, restricted)
        .core()
        .differs(super::policy::accepted_first),
    Case::new("source ranges: their end takes no connection along", Variants::All, connections_stay),
    Case::new(
        "source ranges: answers reach the flows that they are for",
        Variants::All,
        answers_reach_their_flows,
    ),
    Case::new("source ranges: nothing of them stays", Variants::Once, nothing_stays),
];

/// Milliseconds that are long enough to see that nobody answers.
const SILENCE_MS: u64 = 300;
/// Time within which a mode deletes what it no longer uses.
const GONE_WITHIN: Duration = Duration::from_secs(30);
const MANY: u32 = 40;
/// Number of flows of each kind. If their ports were chosen at random out of 64,512, some hundred
/// would coincide.
const FLOWS: u32 = 3_000;

fn load_balancer(node: NodeNumber) -> address::Addresses {
    address::external(node, 91)
}

/// Makes the service with load-balancer addresses that only this client may reach.
fn restricted_to(world: &World, client: &str) -> Result<Service> {
    let own = world.addresses(client)?;
    let addresses = NODES.into_iter().flat_map(|node| load_balancer(node).both());
    Ok(Service {
        load_balancer: addresses.map(|address| Ingress { address, proxied: false }).collect(),
        source_ranges: vec![format!("{}/32", own.v4), format!("{}/128", own.v6)],
        ..RESTRICTED.service()
    })
}

fn restricted(world: &mut World, variant: Variant) -> Result<()> {
    // Each client comes with the node whose address it dials.
    let clients = [(OUTSIDE, 1), (OUTSIDE, 2), ("client-1", 1), ("client-2", 2), ("node1", 1)];
    // The source port is below those that the kernel chooses. Otherwise a client that was allowed
    // before could get an answer through a port of that time.
    let mut source_port = 2_000;
    for allowed in [OUTSIDE, "client-1", "node1"] {
        source_port += 1;
        world.set_service(&restricted_to(world, allowed)?, RESTRICTED.endpoints)?;
        for (client, node) in clients {
            let target = (load_balancer(node).of(variant.family), PORT).into();
            let dial = Dial::new(variant.protocol, target);
            let found = if client == allowed {
                world.answers(client, &dial.times(MANY), RESTRICTED.endpoints).map(drop)
            } else {
                let dial = dial.timeout_ms(SILENCE_MS).source_port(source_port);
                let outcomes = world.dial(client, &dial)?;
                // A hook can only make `connect` fail, so the client is refused at once.
                let by_socket = client == "node1" && world.setting.node_uses_sockets();
                let check = if by_socket { check::refused_at_once } else { check::dropped };
                check(world.setting, &outcomes)
            };
            found.with_context(|| format!("{client} to node {node}, for {allowed} alone"))?;
        }
        // Source ranges close only load-balancer addresses.
        let cluster_ip =
            Dial::new(variant.protocol, world.cluster_ip(&RESTRICTED, variant.family)).times(MANY);
        world.answers("client-2", &cluster_ip, RESTRICTED.endpoints)?;
    }
    world.remove_service(RESTRICTED.name)
}

fn connections_stay(world: &mut World, variant: Variant) -> Result<()> {
    // The endpoint is on another node. Its answers come back because the client is masqueraded.
    const ENDPOINT: [&str; 1] = ["web-2"];
    let restricted = restricted_to(world, OUTSIDE)?;
    world.set_service(&restricted, &ENDPOINT)?;
    let target = (load_balancer(1).of(variant.family), PORT).into();
    let (connection, outcome) = world.agent(OUTSIDE)?.hold(variant.protocol, target)?;
    check::answered_by(&[outcome], &ENDPOINT)?;
    world.set_service(&Service { source_ranges: Vec::new(), ..restricted }, &ENDPOINT)?;
    check::answered_by(&[world.agent(OUTSIDE)?.ping(connection)?], &ENDPOINT)?;
    world.agent(OUTSIDE)?.release(connection)?;
    world.remove_service(RESTRICTED.name)
}

/// Opens flows of two addresses to one endpoint. It sees the node as the source of both.
fn answers_reach_their_flows(world: &mut World, variant: Variant) -> Result<()> {
    crate::cases::skip_confused_flows(world, variant)?;
    world.set_service(&restricted_to(world, OUTSIDE)?, RESTRICTED.endpoints)?;
    for target in
        [world.node_port(&BALANCED, 1, variant.family)?, (load_balancer(1).of(variant.family), PORT).into()]
    {
        let dial = Dial::new(variant.protocol, target).times(FLOWS);
        world.answers(OUTSIDE, &dial, BALANCED.endpoints)?;
    }
    world.remove_service(RESTRICTED.name)
}

fn nothing_stays(world: &mut World, _: Variant) -> Result<()> {
    // A former scenario that failed may have left the service.
    world.objects.remove_service(RESTRICTED.name);
    world.settle_at_rest()?;
    let before = State::read(&world.lab, 1)?;
    world.set_service(&restricted_to(world, OUTSIDE)?, RESTRICTED.endpoints)?;
    world.objects.remove_service(RESTRICTED.name);
    world.settle_at_rest()?;
    // A hook that other scenarios needed may go meanwhile.
    wait::until("nothing is left", GONE_WITHIN, || {
        let now = State::read(&world.lab, 1).map_err(|error| format!("{error:#}"))?;
        let left = now.left(&before);
        if left.is_empty() { Ok(Some(())) } else { Err(left.join("\n")) }
    })
}
