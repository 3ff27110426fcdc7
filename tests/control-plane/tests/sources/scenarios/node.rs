//! The own Node.

use anyhow::{Context, Result, ensure};
use control_plane::PROXY;
use kube::{Client, client::Body};
use proxy_ctl::{config::Encoding, model::Update};
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

    // A heartbeat is no news.
    let mark = follower.log.len();
    for time in ["2026-01-01T00:00:01Z", "2026-01-01T00:00:02Z"] {
        let condition = json!({"type": "Ready", "status": "True", "lastHeartbeatTime": time});
        let mut beating = own.clone();
        beating["status"]["conditions"] = json!([condition]);
        world.apply(&beating)?;
    }
    world.merge(&own, &json!({"metadata": {"labels": {"topology.kubernetes.io/zone": "b"}}}))?;
    follower.wait(world, "the other zone", |follower| zone(follower).as_deref() == Some("b"))?;
    let news = follower.since(mark).iter().filter(|update| matches!(update, Update::Node(_))).count();
    ensure!(news == 1, "{news} updates for one change");

    world.delete(&own)?;
    follower.wait(world, "the end of the Node", |follower| follower.model.node().is_none())?;
    world.apply(&node(NODE, "c", "192.0.2.2"))?;
    follower.wait(world, "the new Node", |follower| zone(follower).as_deref() == Some("c"))
}

/// Puts the object back with other bytes of the same length in it, some of which are no text: nobody minds.
async fn exchange(client: &Client, path: &str, changes: &[(&[u8], &[u8])]) -> Result<()> {
    let media_type = Encoding::Protobuf.media_type();
    let get = || http::Request::get(path).header("accept", media_type).body(Body::empty());
    let mut object = client.send(get()?).await?.into_body().collect_bytes().await?.to_vec();
    for (from, to) in changes {
        let mut found = 0;
        while let Some(at) = object.windows(from.len()).position(|bytes| bytes == *from) {
            object[at..at + from.len()].copy_from_slice(to);
            found += 1;
        }
        ensure!(found > 0, "{path} has no {:?}", from.escape_ascii().to_string());
    }
    let put = http::Request::put(path).header("content-type", media_type).header("accept", media_type);
    let answer = client.send(put.body(Body::from(object))?).await.context("PUT")?;
    ensure!(answer.status().is_success(), "PUT {path}: {}", answer.status());
    let stored = client.send(get()?).await?.into_body().collect_bytes().await?;
    ensure!(stored.windows(4).any(|bytes| bytes == b"caf\xe9"), "{path}: the API server has mended it");
    Ok(())
}

pub(super) fn what_is_no_text_is_served_all_the_same(world: &mut World) -> Result<()> {
    let zone =
        |follower: &Follower| follower.model.node().and_then(|node| node.zone.as_deref().map(str::to_owned));
    let drink = json!({"drink": "caf~"});
    let (mut web, mut own) = (world.service("web"), node(NODE, "zone-a", "192.0.2.1"));
    web["metadata"]["annotations"] = drink.clone();
    own["metadata"]["annotations"] = drink;
    world.create(&web)?;
    world.apply(&own)?;
    let mut follower = Follower::listed_in(world, PROXY, Encoding::Protobuf)?;
    follower.wait_served(world, &[("web:main", &[])])?;
    ensure!(zone(&follower).as_deref() == Some("zone-a"), "zone is {:?}", zone(&follower));

    let mark = follower.log.len();
    let service = format!("/api/v1/namespaces/{}/services/web", world.namespace());
    world.block_on(async {
        exchange(world.client(), &service, &[(b"caf~", b"caf\xe9"), (b"main", b"mine")]).await?;
        let node = format!("/api/v1/nodes/{NODE}");
        exchange(world.client(), &node, &[(b"caf~", b"caf\xe9"), (b"zone-a", b"zone-b")]).await
    })?;
    follower.wait_served(world, &[("web:mine", &[])])?;
    follower.wait(world, "the other zone", |follower| zone(follower).as_deref() == Some("zone-b"))?;
    let lost = |update: &&Update| matches!(update, Update::DeleteService(_) | Update::Node(None));
    let lost = follower.since(mark).iter().find(lost);
    ensure!(lost.is_none(), "{lost:?}");

    // The same in a list, and in both encodings.
    for encoding in Encoding::ALL {
        let mut other = Follower::listed_in(world, PROXY, encoding)?;
        other.wait_served(world, &[("web:mine", &[])])?;
        ensure!(zone(&other).as_deref() == Some("zone-b"), "zone is {:?} in {encoding:?}", zone(&other));
    }
    world.delete(&web)?;
    world.delete(&own)
}
