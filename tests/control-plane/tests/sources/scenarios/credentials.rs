//! Who we are to the API server, and whom we trust.

use anyhow::{Result, ensure};
use control_plane::PROXY;
use proxy_ctl::{
    model::Update,
    source::kubernetes::{ResourceKind, failure::Reason},
};
use serde_json::{Value, json};

use crate::{
    follower::Follower,
    world::{LIMITED, World},
};

fn role(resources: &[(&str, &str)]) -> Value {
    let rules: Vec<Value> = resources
        .iter()
        .map(|(group, plural)| json!({"apiGroups": [group], "resources": [plural], "verbs": ["list", "watch"]}))
        .collect();
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "limited"},
        "rules": rules,
    })
}

pub(super) fn what_rbac_denies_comes_once_granted(world: &mut World) -> Result<()> {
    world.apply(&role(&[("", "services"), ("", "nodes")]))?;
    world.apply(&json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "limited"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "limited"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": LIMITED.user}],
    }))?;
    world.create(&world.service("web"))?;
    world.create(&world.slice("web-1", "web", &[1]))?;

    let mut follower = Follower::start(world, LIMITED)?;
    follower.wait_served(world, &[("web:main", &[])])?;
    follower.wait(world, "being denied", |follower| {
        follower.state.errors(ResourceKind::EndpointSlices, Reason::Forbidden) >= 2
    })?;
    ensure!(follower.state.connected(ResourceKind::Services), "services are watched");
    ensure!(!follower.state.connected(ResourceKind::EndpointSlices), "slices cannot be watched");
    let sent = follower.log.iter().any(|update| matches!(update, Update::ReplaceSlices(_)));
    ensure!(!sent, "nothing is sent before it has been listed");

    world.apply(&role(&[("", "services"), ("", "nodes"), ("discovery.k8s.io", "endpointslices")]))?;
    follower.wait_served(world, &[("web:main", &["10.0.0.1:8080"])])?;
    ensure!(follower.state.connected(ResourceKind::EndpointSlices), "slices are watched");
    Ok(())
}

pub(super) fn a_new_token_in_the_file_is_used(world: &mut World) -> Result<()> {
    let mut follower = Follower::listed(world, PROXY)?;
    world.create(&world.service("before"))?;
    follower.wait_served(world, &[("before:main", &[])])?;

    world.server.replace_token(PROXY);
    world.server.restart()?;
    world.create(&world.service("after"))?;
    follower.wait(world, "the old token being refused", |follower| {
        follower.state.kinds().into_iter().all(|kind| follower.state.errors(kind, Reason::Unauthorized) > 0)
    })?;
    ensure!(follower.served().len() == 1, "nothing can have come, nothing may have gone");
    world.server.publish_token(PROXY)?;
    follower.wait_served(world, &[("after:main", &[]), ("before:main", &[])])
}

pub(super) fn a_new_ca_in_the_file_is_trusted(world: &mut World) -> Result<()> {
    let mut follower = Follower::listed(world, PROXY)?;
    world.create(&world.service("before"))?;
    follower.wait_served(world, &[("before:main", &[])])?;

    world.server.replace_certificates()?;
    world.server.restart()?;
    world.renew_client()?;
    world.create(&world.service("after"))?;
    follower.wait(world, "the new certificate being refused", |follower| {
        follower.state.kinds().into_iter().all(|kind| follower.state.errors(kind, Reason::Tls) > 0)
    })?;
    ensure!(follower.served().len() == 1, "nothing can have come, nothing may have gone");
    world.server.publish_authority()?;
    follower.wait_served(world, &[("after:main", &[]), ("before:main", &[])])
}
