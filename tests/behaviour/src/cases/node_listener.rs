//! A socket of the node at a ClusterIP, on an interface that has the address. NodeLocal DNSCache
//! has one at the ClusterIP of kube-dns.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lab::{Dial, wait};
use serde_json::Value;

use crate::{
    case::{Case, Variant, Variants},
    check,
    fixtures::RESTRICTED,
    setting::ProxyKind,
    world::World,
};

pub(super) const CASES: &[Case] = &[Case::new(
    "what this node listens for at a ClusterIP reaches its own socket",
    Variants::All,
    own_socket,
)
.concerns(|setting| setting.proxy == ProxyKind::Ebpf)
.core()];

const INTERFACE: &str = "nodelocaldns";
const LISTENER: &str = "node-cache";
const FOLLOWED_WITHIN: Duration = Duration::from_secs(30);
/// The clients on node 1: a pod, and a process of the node itself.
const CLIENTS: [&str; 2] = ["client-1", "node1"];

/// Returns the clients that can reach these servers. Without socket hooks, nobody translates what
/// the node sends to an address of its own, because it does not leave the node.
fn clients<'a>(world: &World, by: &[&str]) -> impl Iterator<Item = &'a str> {
    let all = by == [LISTENER] || world.setting.node_uses_sockets();
    CLIENTS.into_iter().filter(move |client| all || *client != "node1")
}

fn own_socket(world: &mut World, variant: Variant) -> Result<()> {
    world.set_service(&RESTRICTED.service(), RESTRICTED.endpoints)?;
    let at = world.cluster_ip(&RESTRICTED, variant.family);
    let dial = Dial::new(variant.protocol, at).times(40);
    // Nobody but these servers may be reached. A client on another node reaches the endpoints.
    let reach = |world: &World, by: &[&str]| -> Result<()> {
        for client in clients(world, by) {
            world.answers(client, &dial, by)?;
        }
        world.answers("client-2", &dial, RESTRICTED.endpoints).map(drop)
    };
    // One dial is enough: either all of a service port's clients reach the socket, or none.
    let until = |world: &World, by: &[&str]| -> Result<()> {
        for client in clients(world, by) {
            wait::until(&format!("{client} reaches {by:?}"), FOLLOWED_WITHIN, || {
                let outcomes = world.dial(client, &Dial::new(variant.protocol, at).timeout_ms(500));
                let answers = outcomes.and_then(|outcomes| check::answered(&outcomes));
                let answers = answers.map_err(|error| error.to_string())?;
                Ok(answers.iter().all(|answer| by.contains(&answer.by.as_str())).then_some(()))
            })?;
        }
        reach(world, by)
    };
    let is_told = |world: &World| -> Result<bool> {
        let status: Value = serde_json::from_str(&world.tool(1, &["status", "--output", "json"])?)?;
        let all = status["unservedFields"].as_array().cloned().unwrap_or_default();
        let is_it = |one: &Value| {
            one["effect"] == "leftToNode" && one["instead"].to_string().contains(&at.to_string())
        };
        Ok(all.iter().any(is_it))
    };

    let node = world.lab.netns("node1")?.namespace.clone();
    let ip = |script: &str| lab::namespace::ip(Some(&node), script);
    // The test kernels may have no dummy devices, so the interface is a bridge.
    ip(&format!("link add {INTERFACE} type bridge\nlink set {INTERFACE} up\n"))?;
    let (address, length) = (at.ip(), if at.is_ipv4() { 32 } else { 128 });
    let nodad = if at.is_ipv4() { "" } else { " nodad" };
    let add = format!("address add {address}/{length} dev {INTERFACE}{nodad}\n");
    let found = (|| {
        ip(&add)?;
        // A process of the node may now dial a pod from this address, because in IPv6 its prefix is
        // the closest (RFC 6724, rule 8). Until the proxy has followed, no frontend takes the
        // answer.
        wait::until("the address is followed", FOLLOWED_WITHIN, || {
            reach(world, RESTRICTED.endpoints).map(Some).map_err(|error| format!("{error:#}"))
        })?;
        ensure!(!is_told(world)?, "nobody listens there");

        let listener = world.lab.agent("node1")?;
        listener.serve_as(LISTENER, &[at])?;
        until(world, &[LISTENER]).context("a listener")?;
        wait::until("status tells of it", FOLLOWED_WITHIN, || {
            Ok(is_told(world).map_err(|error| error.to_string())?.then_some(()))
        })?;
        drop(listener);
        until(world, RESTRICTED.endpoints).context("the listener's end")?;

        let listener = world.lab.agent("node1")?;
        listener.serve_as(LISTENER, &[at])?;
        until(world, &[LISTENER]).context("another listener")?;
        ip(&format!("address del {address}/{length} dev {INTERFACE}\n"))?;
        until(world, RESTRICTED.endpoints).context("the address's end")?;
        ip(&add)?;
        until(world, &[LISTENER]).context("the address again")
    })();
    ip(&format!("link del {INTERFACE}\n"))?;
    found?;
    until(world, RESTRICTED.endpoints).context("the interface's end")?;
    world.remove_service(RESTRICTED.name)
}
