//! Sockets that go on sending while their endpoint goes: conntrack would hold on to what is no longer there.

use std::time::Duration;

use anyhow::{Context as _, Result};
use lab::{Agent, Outcome, Protocol, cluster::OUTSIDE, wait};

use crate::{
    case::{Case, Variant, Variants},
    check,
    fixtures::DATAGRAMS,
    setting::{PathKind, ProxyKind, Setting},
    world::World,
};

pub(super) const CASES: &[Case] = &[
    Case::new("datagrams of one socket go to another endpoint when theirs goes", Variants::Udp, moved)
        .core()
        .differs(connected_once),
    Case::new(
        "datagrams of one socket reach endpoints that come after there were none",
        Variants::Udp,
        emptied,
    )
    .differs(connected_once),
    Case::new(
        "datagrams of one socket reach a service that was removed and comes back",
        Variants::Udp,
        recreated,
    )
    .differs(connected_once),
];

fn connected_once(setting: &Setting, _: Variant) -> Option<&'static str> {
    let by_sockets = matches!(setting.path, PathKind::Sockets | PathKind::Packets | PathKind::Unseen);
    (setting.proxy == ProxyKind::Ebpf && by_sockets)
        .then_some("a connected datagram socket was given its endpoint by connect, and meets no hook again")
}

/// A proxy cleans conntrack after it has written its rules, which `settle` waits for.
const RECOVERS_WITHIN: Duration = Duration::from_secs(10);

const CLIENTS: [&str; 4] = ["client-1", "client-2", "node1", OUTSIDE];

fn moved(world: &mut World, variant: Variant) -> Result<()> {
    through(world, variant, |world| world.set_endpoints(&DATAGRAMS, &["web-2"]))
}

fn emptied(world: &mut World, variant: Variant) -> Result<()> {
    through(world, variant, |world| {
        world.set_endpoints(&DATAGRAMS, &[])?;
        world.set_endpoints(&DATAGRAMS, &["web-2"])
    })
}

fn recreated(world: &mut World, variant: Variant) -> Result<()> {
    through(world, variant, |world| {
        world.remove_service(DATAGRAMS.name)?;
        world.set_endpoints(&DATAGRAMS, &["web-2"])
    })
}

/// Sockets of all clients talk to `web-1` before, and to `web-2` after the change.
fn through(world: &mut World, variant: Variant, change: impl FnOnce(&mut World) -> Result<()>) -> Result<()> {
    world.set_endpoints(&DATAGRAMS, &["web-1"])?;
    let mut held = Vec::new();
    for client in CLIENTS {
        let target = match client {
            OUTSIDE => world.node_port(&DATAGRAMS, 1, variant.family)?,
            _ => world.cluster_ip(&DATAGRAMS, variant.family),
        };
        let (socket, outcome) = world.agent(client)?.hold(Protocol::Udp, target)?;
        check::answered_by(&[outcome], &["web-1"])?;
        held.push((client, socket));
    }
    change(world)?;
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
