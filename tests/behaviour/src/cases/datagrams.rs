//! Sockets that go on sending while their endpoint goes. Conntrack would keep sending their
//! datagrams to it.

use std::time::Duration;

use anyhow::{Context as _, Result};
use lab::{Agent, Dial, Outcome, Protocol, cluster::OUTSIDE, objects::State, wait};

use crate::{
    case::{Case, Difference, Variant, Variants},
    check,
    fixtures::DATAGRAMS,
    setting::{Datapath, Setting},
    world::World,
};

pub(super) const CASES: &[Case] = &[
    Case::new("datagrams of one socket go to another endpoint when theirs goes", Variants::Udp, moved).core(),
    Case::new(
        "datagrams of one socket reach endpoints that come after there were none",
        Variants::Udp,
        emptied,
    ),
    Case::new(
        "datagrams of one socket reach a service that was removed and comes back",
        Variants::Udp,
        recreated,
    ),
    Case::new(
        "datagrams of one socket stay with an endpoint that terminates and serves",
        Variants::Udp,
        terminating,
    )
    .core()
    .differs(ended_with_the_choice),
];

fn ended_with_the_choice(setting: &Setting, _: Variant) -> Option<Difference> {
    let why = match setting.datapath() {
        Datapath::Userspace => "mode userspace ends a session when its endpoint is no longer chosen",
        Datapath::Ipvs => "mode ipvs removes a destination of datagrams when its endpoint terminates",
        Datapath::Ebpf | Datapath::Nftables | Datapath::Iptables => return None,
    };
    // The next datagram goes to the other endpoint, or it only makes the kernel forget the former
    // one.
    Some(Difference { why, says: &["expected answers by [\"web-1\"]", "is not answered: "] })
}

/// Time within which a proxy cleans conntrack. It does so after it has written its rules, for which
/// `settle` waits.
const RECOVERS_WITHIN: Duration = Duration::from_secs(30);

const CLIENTS: [&str; 4] = ["client-1", "client-2", "node1", OUTSIDE];

fn moved(world: &mut World, variant: Variant) -> Result<()> {
    through(world, variant, |world| world.set_endpoints(&DATAGRAMS, &["web-2"]))
}

fn emptied(world: &mut World, variant: Variant) -> Result<()> {
    world.set_endpoints(&DATAGRAMS, &["web-1"])?;
    let held = hold(world, variant)?;
    world.set_endpoints(&DATAGRAMS, &[])?;
    // kube-proxy up to 1.36 keeps the flows of a Service without endpoints.
    if !world.setting.proxy.is_kube_proxy() {
        // An ICMP error reaches only connected sockets, the first one of each client.
        for (client, socket) in held.iter().step_by(2) {
            let agent = world.agent(client)?;
            wait::until(&format!("{client} is refused"), RECOVERS_WITHIN, || match agent.ping(*socket) {
                Ok(Outcome::Refused { .. }) => Ok(Some(())),
                Ok(other) => Err(other.to_string()),
                Err(error) => Err(format!("{error:#}")),
            })?;
        }
    }
    world.set_endpoints(&DATAGRAMS, &["web-2"])?;
    follow(world, held)
}

fn recreated(world: &mut World, variant: Variant) -> Result<()> {
    through(world, variant, |world| {
        world.remove_service(DATAGRAMS.name)?;
        world.set_endpoints(&DATAGRAMS, &["web-2"])
    })
}

/// Expects sockets to stay with an endpoint that terminates, until it ends.
fn terminating(world: &mut World, variant: Variant) -> Result<()> {
    world.set_endpoints(&DATAGRAMS, &["web-1"])?;
    let held = hold(world, variant)?;
    let endpoints = world.endpoints(&[("web-1", State::Terminating), ("web-2", State::Ready)])?;
    world.objects.set_service(&DATAGRAMS.service(), &endpoints);
    world.settle()?;
    for (client, socket) in &held {
        for _ in 0..3 {
            let outcome = world.agent(client)?.ping(*socket)?;
            check::answered_by(&[outcome], &["web-1"]).with_context(|| format!("from {client}"))?;
        }
    }
    let endpoints = world.endpoints(&[("web-1", State::Ended), ("web-2", State::Ready)])?;
    world.objects.set_service(&DATAGRAMS.service(), &endpoints);
    world.settle()?;
    follow(world, held)
}

/// Client, and the number of a socket there.
type HeldSocket = (&'static str, usize);

/// Expects sockets of all clients to talk to `web-1` before the change and to `web-2` after it.
fn through(world: &mut World, variant: Variant, change: impl FnOnce(&mut World) -> Result<()>) -> Result<()> {
    world.set_endpoints(&DATAGRAMS, &["web-1"])?;
    let held = hold(world, variant)?;
    change(world)?;
    follow(world, held)
}

/// Opens connected and unconnected sockets of all clients, which `web-1` answers.
fn hold(world: &World, variant: Variant) -> Result<Vec<HeldSocket>> {
    let mut held = Vec::new();
    for client in CLIENTS {
        let target = match client {
            OUTSIDE => world.node_port(&DATAGRAMS, 1, variant.family)?,
            _ => world.cluster_ip(&DATAGRAMS, variant.family),
        };
        let dial = Dial::new(Protocol::Udp, target);
        for dial in [dial.clone(), dial.unconnected()] {
            let (socket, outcome) = world.agent(client)?.hold_as(&dial)?;
            check::answered_by(&[outcome], &["web-1"])?;
            held.push((client, socket));
        }
    }
    Ok(held)
}

/// Expects `web-2` to answer the sockets, and closes them.
fn follow(world: &World, held: Vec<HeldSocket>) -> Result<()> {
    for (client, socket) in &held {
        answered_by_web_2(world.agent(client)?, *socket).with_context(|| format!("from {client}"))?;
    }
    held.into_iter().try_for_each(|(client, socket)| world.agent(client)?.release(socket))
}

fn answered_by_web_2(agent: &Agent, socket: usize) -> Result<()> {
    wait::until("an answer by web-2", RECOVERS_WITHIN, || {
        let outcome = agent.ping(socket).map_err(|error| format!("{error:#}"))?;
        let is_there = matches!(&outcome, Outcome::Answered(answer) if answer.by == "web-2");
        if is_there { Ok(Some(())) } else { Err(outcome.to_string()) }
    })
}
