//! Reports of a proxy over HTTP, and its commands.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use lab::{
    Dial, Protocol,
    address::Family,
    cluster::{NODES, node_name},
};
use serde_json::{Value, json};

use crate::{
    case::{Case, Variant, Variants},
    check,
    fixtures::{EMPTY, ON_NODE2},
    proxy::{HEALTH, METRICS},
    setting::{Datapath, PathKind},
    watch::Watch,
    world::World,
};

pub(super) const CASES: &[Case] = &[
    Case::new("health and mode are told on kube-proxy's ports", Variants::Once, health_and_mode).core(),
    Case::new("open connections are listed, and new ones told as they come", Variants::All, connections)
        .core()
        .concerns(|setting| setting.datapath() == Datapath::Ebpf && !setting.proxy.is_kube_proxy()),
    Case::new("a mode without flows says so", Variants::Once, without_flows)
        .concerns(|setting| setting.datapath() != Datapath::Ebpf && !setting.proxy.is_kube_proxy()),
];

fn health_and_mode(world: &mut World, _: Variant) -> Result<()> {
    let mode = world.setting.datapath().mode();
    for node in NODES {
        let agent = world.agent(&node_name(node))?;
        let own = world.addresses(&node_name(node))?.of(Family::V4);
        for path in ["/healthz", "/livez"] {
            let (status, body) = agent.http_get(SocketAddr::new(own, HEALTH), path)?;
            ensure!(status == 200, "{path} answered {status}: {body}");
        }
        let metrics = SocketAddr::new(Family::V4.loopback(), METRICS);
        let (status, body) = agent.http_get(metrics, "/proxyMode")?;
        ensure!(status == 200 && body == mode, "/proxyMode answered {status}: {body}");
    }
    Ok(())
}

fn connections(world: &mut World, Variant { protocol, family }: Variant) -> Result<()> {
    const CLIENT: &str = "client-1";
    /// Port that no other scenario uses. A datagram from a port that was used shortly before would
    /// open no flow.
    const CLIENT_PORT: u16 = 2_200;
    let client = world.addresses(CLIENT)?.of(family);
    let service = world.cluster_ip(&ON_NODE2, family);
    let watch = Watch::begin(world, 1)?;
    let agent = world.agent(CLIENT)?;
    let (held, outcome) = agent.hold_as(&Dial::new(protocol, service).source_port(CLIENT_PORT))?;
    check::answered_by(&[outcome], &["web-2"])?;
    let refused = agent.dial(&Dial::new(protocol, world.cluster_ip(&EMPTY, family)))?;
    check::refused_at_once(world.setting, &refused)?;

    let is_packets = world.setting.path != PathKind::Sockets;
    let opening = if is_packets { ("opened", "flow_opened") } else { ("connected", "socket_connected") };
    let by = if is_packets { "packet" } else { "socket" };
    let is_clients = |event: &Value| match event["client"].as_str() {
        Some(end) => end.parse::<SocketAddr>().is_ok_and(|end| end.ip() == client),
        None => !is_packets,
    };
    let expected = |service: &str, frontend: SocketAddr, (kind, reason): (&str, &str)| {
        json!({
            "kind": kind, "reason": reason, "by": by, "protocol": protocol.to_string(),
            "service": {"namespace": "default", "name": service}, "frontend": frontend.to_string(),
        })
    };
    let opened =
        watch.find(&expected(ON_NODE2.name, service, opening), is_clients).context("of the opened one")?;
    let empty = world.cluster_ip(&EMPTY, family);
    watch
        .find(&expected(EMPTY.name, empty, ("refused", "no_endpoints")), is_clients)
        .context("of the refused one")?;
    watch.end()?;

    let backend = &opened["backend"];
    let name = format!("default/{}", ON_NODE2.name);
    let range = client.to_string();
    let arguments = ["flows", "--service", &name, "--client", &range, "--output", "json"];
    let mut flows: Vec<Value> = serde_json::from_str(&world.tool(1, &arguments)?)?;
    // Flows of earlier cases are still there.
    flows.retain(|flow| flow["client"] == opened["client"] && flow["frontend"] == opened["frontend"]);
    if is_packets {
        let [flow] = flows.as_slice() else { anyhow::bail!("{} times in {flows:?}", flows.len()) };
        let state = if protocol == Protocol::Tcp { "established" } else { "answered" };
        ensure!(flow["state"] == state && flow["backend"] == *backend, "{flow}");
    } else {
        ensure!(flows.is_empty(), "a socket has no flow: {flows:?}");
    }
    world.agent(CLIENT)?.release(held)
}

fn without_flows(world: &mut World, _: Variant) -> Result<()> {
    let mode = world.setting.datapath().mode();
    let text = world.tool(1, &["flows"])?;
    ensure!(text.contains(&format!("no flows in mode {mode}")), "{text}");
    ensure!(world.tool(1, &["flows", "--output", "json"])?.trim() == "[]");
    let refusal = world.tool(1, &["monitor"]).err().context("nobody makes events")?.to_string();
    ensure!(refusal.contains(&format!("no events in mode {mode}")), "{refusal}");
    Ok(())
}
