//! What a proxy tells over HTTP.

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use lab::{
    address::Family,
    cluster::{NODES, node_name},
};

use crate::{
    case::{Case, Variant, Variants},
    world::World,
};

pub(super) const CASES: &[Case] =
    &[Case::new("health and mode are told on kube-proxy's ports", Variants::Once, health_and_mode).core()];

const HEALTH: u16 = 10_256;
const METRICS: u16 = 10_249;

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
