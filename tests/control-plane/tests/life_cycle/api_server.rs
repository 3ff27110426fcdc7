//! Scenarios of an API server that is away, or that does not allow everything.

use anyhow::{Result, ensure};
use control_plane::objects;
use serde_json::{Value, json};

use crate::{
    node::Node,
    proxy::{answers, metric},
    scenarios::{ADDRESS, PROGRAMMED},
    until::{LIMIT, until},
    world::{World, node},
};

/// How long is proved where no process has to run for it: see the scenarios of the source.
pub(crate) fn an_api_server_that_is_away_changes_nothing(world: &mut World) -> Result<()> {
    let own = Node::new(world, "alone", 17)?;
    let late = Node::new(world, "alone-from-the-start", 18)?;
    for own in [&own, &late] {
        world.apply(&node(own.name, ADDRESS, &[]))?;
    }
    let mut proxy = own.start(&json!({}))?;
    proxy.says(PROGRAMMED)?;
    own.serves()?;

    world.server.kill();
    proxy.says("Connection refused")?;
    let mut started_late = late.start(&json!({}))?;
    started_late.says("Connection refused")?;
    answers(&own.healthz(), "/healthz", 200)?;
    own.serves()?;
    nothing_is_programmed(&late)?;

    world.server.start_again()?;
    let added = objects::service("default", "added", 81);
    world.apply(&added)?;
    proxy.says("again after")?;
    until(
        "the new Service",
        LIMIT,
        || Ok(own.services()?.to_string().contains("\"added\"").then_some(())),
        || proxy.log(),
    )?;
    started_late.says(PROGRAMMED)?;
    late.serves()?;
    world.delete(&added)?;
    for proxy in [&mut proxy, &mut started_late] {
        proxy.runs()?;
        // Four kinds of objects are watched, and each is tried more than once.
        let told = proxy.log().lines().filter(|line| line.contains("Connection refused")).count();
        ensure!(told == 1, "one outage is told {told} times:\n{}", proxy.log());
    }
    Ok(())
}

/// The tables are there and empty.
fn nothing_is_programmed(own: &Node) -> Result<()> {
    let services = until("the tables", LIMIT, || Ok(own.services().ok()), String::new)?;
    ensure!(services == json!([]), "programmed before all was listed: {services}");
    Ok(())
}

fn rule(group: &str, resource: &str) -> Value {
    json!({"apiGroups": [group], "resources": [resource], "verbs": ["list", "watch"]})
}

fn role(rules: &[Value]) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": "life-limited"}, "rules": rules,
    })
}

pub(crate) fn what_rbac_denies_is_named_and_the_rest_works(world: &mut World) -> Result<()> {
    world.apply(&json!({
        "apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": {"namespace": "default", "name": "life-limited"},
    }))?;
    let mut rules = vec![rule("", "services"), rule("", "nodes")];
    world.apply(&role(&rules))?;
    world.apply(&json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": {"name": "life-limited"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "life-limited"},
        "subjects": [{"kind": "ServiceAccount", "namespace": "default", "name": "life-limited"}],
    }))?;
    let kubeconfig =
        world.server.kubeconfig_with("life-limited", &world.token("default", "life-limited")?)?;
    let own = Node::new(world, "limited", 19)?;
    world.apply(&node(own.name, ADDRESS, &[]))?;

    let mut proxy = own.start(&json!({"clientConnection": {"kubeconfig": kubeconfig}}))?;
    for kind in ["endpointslices in API group", "servicecidrs in API group"] {
        proxy.says(&format!("the API server does not allow list and watch of {kind}"))?;
    }
    nothing_is_programmed(&own)?;
    for verb in ["list", "watch"] {
        let name = format!("proxy_source_denied{{resource=\"endpointslices\",verb=\"{verb}\"}}");
        ensure!(metric(&own.metrics(), &name)? == 1.0, "{name}");
    }

    rules.push(rule("discovery.k8s.io", "endpointslices"));
    world.apply(&role(&rules))?;
    proxy.says(PROGRAMMED)?;
    own.serves()?;
    answers(&own.healthz(), "/healthz", 200)?;
    proxy.says("nobody sees this proxy's events, everything else works")?;
    let connected = |resource: &str| {
        metric(&own.metrics(), &format!("proxy_source_connected{{resource=\"{resource}\"}}"))
    };
    ensure!(
        connected("endpointslices")? == 1.0 && connected("servicecidrs")? == 0.0,
        "ServiceCIDRs are denied still"
    );
    proxy.runs()?;
    Ok(())
}
