//! Changes of the own Node.

use anyhow::{Result, ensure};
use control_plane::PROXY;
use proxy_ctl::model::Update;
use serde_json::{Value, json};

use crate::{
    follower::{Follower, NODE},
    world::World,
};

pub(super) fn node(name: &str, zone: &str, address: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": zone}},
        "spec": {"podCIDRs": ["10.1.0.0/24"], "podCIDR": "10.1.0.0/24"},
        "status": {"addresses": [{"type": "InternalIP", "address": address}]},
    })
}

pub(super) fn the_node_comes_late_changes_and_is_recreated(world: &mut World) -> Result<()> {
    let mut follower = Follower::listed(world, PROXY)?;
    ensure!(follower.model.node().is_none(), "there is no Node yet");
    let zone =
        |follower: &Follower| follower.model.node().and_then(|node| node.zone.as_deref().map(str::to_owned));
    let own = node(NODE, "a", "192.0.2.1");
    world.apply(&node("another-node", "z", "192.0.2.9"))?;
    world.apply(&own)?;
    follower.wait(world, "the Node with its address", |follower| {
        follower.model.node().is_some_and(|node| !node.addresses.is_empty())
    })?;
    ensure!(zone(&follower).as_deref() == Some("a"), "zone is {:?}", zone(&follower));

    // A heartbeat must cause no update.
    let length = follower.log.len();
    for time in ["2026-01-01T00:00:01Z", "2026-01-01T00:00:02Z"] {
        let condition = json!({"type": "Ready", "status": "True", "lastHeartbeatTime": time});
        let mut beating = own.clone();
        beating["status"]["conditions"] = json!([condition]);
        world.apply(&beating)?;
    }
    world.merge(&own, &json!({"metadata": {"labels": {"topology.kubernetes.io/zone": "b"}}}))?;
    follower.wait(world, "the other zone", |follower| zone(follower).as_deref() == Some("b"))?;
    let news = follower.since(length).iter().filter(|update| matches!(update, Update::Node(_))).count();
    ensure!(news == 1, "{news} updates for one change");

    world.delete(&own)?;
    follower.wait(world, "the end of the Node", |follower| follower.model.node().is_none())?;
    world.apply(&node(NODE, "c", "192.0.2.2"))?;
    follower.wait(world, "the new Node", |follower| zone(follower).as_deref() == Some("c"))
}
