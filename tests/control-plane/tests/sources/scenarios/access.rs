//! Rights that RBAC must grant, the effect of missing ones, and tokens that end.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use control_plane::objects::{self, Subject};
use kube::{
    Client,
    config::{KubeConfigOptions, Kubeconfig},
};
use proxy_ctl::{
    events::{Event, Outcome, Recorder, Type},
    kubernetes::{ListMethod, ResourceKind, Verb, failure::FailureReason},
};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use crate::{
    follower::{Follower, NODE, copy_at},
    scenarios::node::node,
    world::{LIMITED, World},
};

const ACCOUNT: &str = "kube-proxy";
const ROLE: &str = "system:node-proxier";

/// Makes the account as kubeadm does: ServiceAccount kube-system/kube-proxy, bound to ClusterRole
/// system:node-proxier and to nothing else.
fn account(world: &World) -> Result<()> {
    world.apply(&objects::namespace("kube-system"))?;
    world.apply(&objects::service_account("kube-system", ACCOUNT))?;
    let to = Subject::ServiceAccount("kube-system", ACCOUNT);
    world.apply(&objects::cluster_role_binding("kubeadm:node-proxier", ROLE, to))
}

fn token(world: &World) -> Result<String> {
    world.block_on(objects::token(world.client(), "kube-system", ACCOUNT))
}

pub(super) fn the_role_of_kube_proxy_is_enough(world: &mut World) -> Result<()> {
    account(world)?;
    let role = world.get(&format!("/apis/rbac.authorization.k8s.io/v1/clusterroles/{ROLE}"))?;
    let allows = |group: &str, resource: &str, verb: &str| {
        let has = |list: &Value, one: &str| list.as_array().is_some_and(|list| list.contains(&json!(one)));
        role["rules"].as_array().into_iter().flatten().any(|rule| {
            has(&rule["apiGroups"], group) && has(&rule["resources"], resource) && has(&rule["verbs"], verb)
        })
    };
    ensure!(!allows("", "pods", "list") && !allows("", "secrets", "get"), "the role has grown: {role}");

    let node = node(NODE, "a", "192.0.2.1");
    world.apply(&node)?;
    let kubeconfig = world.server.kubeconfig_with("account", &token(world)?)?;
    let mut follower = Follower::start_with(world, &kubeconfig)?;
    world.create(&world.service("web"))?;
    world.create(&world.slice("web-1", "web", &[1]))?;
    follower.wait_served(world, &[("web:main", &["10.0.0.1:8080"])])?;
    let all = [
        ResourceKind::Services,
        ResourceKind::EndpointSlices,
        ResourceKind::Nodes,
        ResourceKind::ServiceCidrs,
    ];
    follower.wait(world, "everything being watched", |follower| {
        follower.state.kinds() == all && all.into_iter().all(|kind| follower.state.connected(kind))
    })?;
    follower.wait(world, "the Node", |follower| follower.model.node().is_some())?;
    let ranges = |follower: &Follower| {
        follower.model.service_cidrs().iter().flatten().map(ToString::to_string).collect::<Vec<_>>()
    };
    follower.wait(world, "the ranges of service addresses", |follower| {
        ranges(follower) == ["10.96.0.0/12", "fd00:10:96::/112"]
    })?;
    for kind in all {
        ensure!(follower.state.errors(kind, FailureReason::Forbidden) == 0, "{kind} is forbidden");
        ensure!(
            follower.state.lists(kind, ListMethod::Streamed) == 1,
            "{kind} was not listed by a streaming list"
        );
    }
    for wanted in [false, true] {
        follower.wants_service_cidrs.send_replace(wanted);
        follower.wait(world, "the ranges as long as they are wanted", |follower| {
            let is_watched = follower.state.kinds().contains(&ResourceKind::ServiceCidrs);
            (is_watched, !ranges(follower).is_empty()) == (wanted, wanted)
        })?;
    }

    let recorder = world.block_on(async { Recorder::new(follower.api.clone(), NODE, "host") });
    for _ in 0..3 {
        recorder.record(Event::node(Type::Normal, "Starting", "StartKubeProxy", ""));
    }
    recorder.record(Event::node(Type::Warning, "FailedToStartMetricServer", "StartKubeProxy", "in use"));
    world.block_on(recorder.flush());
    let counts = [Outcome::Written, Outcome::Refused].map(|outcome| recorder.count(outcome));
    ensure!(counts == [4, 0], "events written, refused: {counts:?}");
    let events = world.get("/apis/events.k8s.io/v1/namespaces/default/events")?;
    let of = |reason: &str| {
        let all = events["items"].as_array().cloned().unwrap_or_default();
        let mut found =
            all.into_iter().filter(|event| event["reason"] == reason && event["regarding"]["name"] == NODE);
        let first = found.next();
        ensure!(found.next().is_none(), "more than one event {reason}");
        first.with_context(|| format!("no event {reason} in {events}"))
    };
    let starting = of("Starting")?;
    ensure!(starting["series"]["count"] == 3, "{starting}");
    ensure!(starting["regarding"]["kind"] == "Node" && starting["type"] == "Normal", "{starting}");
    ensure!(starting["reportingController"] == "kube-proxy", "{starting}");
    ensure!(starting["reportingInstance"] == "kube-proxy-host", "{starting}");
    let failed = of("FailedToStartMetricServer")?;
    ensure!(failed["note"] == "in use" && failed["type"] == "Warning", "{failed}");
    world.delete(&node)
}

/// Grants these rules to [`LIMITED`] alone.
pub(super) fn grant(world: &World, rules: &[(&str, &str, &[&str])]) -> Result<()> {
    world.apply(&objects::cluster_role("limited", rules))?;
    world.apply(&objects::cluster_role_binding("limited", "limited", Subject::User(LIMITED.user)))
}

const BOTH: &[&str] = &["list", "watch"];

/// Expects the source to list such a resource again and again, as kube-proxy does.
pub(super) fn a_resource_that_may_be_listed_only_is_listed_again(world: &mut World) -> Result<()> {
    let rest: [(&str, &str, &[&str]); 3] = [
        ("", "nodes", BOTH),
        ("discovery.k8s.io", "endpointslices", BOTH),
        ("networking.k8s.io", "servicecidrs", BOTH),
    ];
    grant(world, &[&[("", "services", &["list"] as &[&str])], rest.as_slice()].concat())?;
    world.create(&world.service("first"))?;
    let mut follower = Follower::start(world, LIMITED)?;
    follower.wait_served(world, &[("first:main", &[])])?;
    world.create(&world.service("second"))?;
    follower.wait_served(world, &[("first:main", &[]), ("second:main", &[])])?;
    ensure!(follower.state.denied(ResourceKind::Services) == [Verb::Watch], "watch is denied, list is not");
    ensure!(follower.state.lists(ResourceKind::Services, ListMethod::Whole) >= 2, "by listing again");

    grant(world, &[&[("", "services", BOTH)], rest.as_slice()].concat())?;
    follower.wait(world, "the watch", |follower| {
        follower.state.denied(ResourceKind::Services).is_empty()
            && follower.state.connected(ResourceKind::Services)
    })
}

/// Deletes the account and makes it again, which ends all its tokens. Connections break. Some time
/// later the kubelet writes a new token into the file, and the plugin hands out a new one.
pub(super) fn revoked_tokens_are_replaced(world: &mut World) -> Result<()> {
    account(world)?;
    let first = token(world)?;
    let plugin = plugin(world, "plugged", &first)?;
    let relay = world.relay()?;
    let rotated = world.server.kubeconfig_with("rotated", &first)?;
    let mut followers = [&rotated, &world.server.kubeconfig_with_plugin("plugged", &plugin)?]
        .into_iter()
        .map(|kubeconfig| Follower::start_with(world, &copy_at(world, kubeconfig, relay.address)?))
        .collect::<Result<Vec<_>>>()?;
    world.create(&world.service("before"))?;
    for follower in &mut followers {
        follower.wait_served(world, &[("before:main", &[])])?;
    }

    world.delete(&objects::service_account("kube-system", ACCOUNT))?;
    account(world)?;
    wait_refused(world, &rotated)?;
    relay.cut();
    relay.restore();
    for follower in &mut followers {
        follower.wait(world, "the old token being refused", |follower| {
            let mut kinds = follower.state.kinds().into_iter();
            kinds.all(|kind| follower.state.errors(kind, FailureReason::Unauthorized) > 0)
        })?;
    }
    world.create(&world.service("after"))?;
    ensure!(
        followers.iter().all(|follower| follower.served().len() == 1),
        "nothing can have come, nothing may have gone"
    );
    let second = token(world)?;
    fs::write(world.server.directory().join("rotated.token"), &second).context("writing the token")?;
    self::plugin(world, "plugged", &second)?;
    for follower in &mut followers {
        follower.wait_served(world, &[("after:main", &[]), ("before:main", &[])])?;
        for kind in follower.state.kinds() {
            ensure!(follower.state.lists(kind, ListMethod::Streamed) == 1, "{kind} goes on where it was");
        }
    }
    Ok(())
}

/// Waits until the token is refused. The API server goes on accepting a revoked token for some
/// seconds.
fn wait_refused(world: &World, kubeconfig: &Path) -> Result<()> {
    world.block_on(async {
        let config = Kubeconfig::read_from(kubeconfig)?;
        let config = kube::Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await?;
        let client = Client::try_from(config)?;
        let refused = async {
            loop {
                let answer = objects::get(&client, "/api/v1/services?limit=1").await;
                match answer.as_ref().map_err(|error| error.downcast_ref()) {
                    Err(Some(kube::Error::Api(status))) if status.code == 401 => return,
                    _ => sleep(Duration::from_millis(100)).await,
                }
            }
        };
        timeout(Duration::from_secs(60), refused)
            .await
            .context("the revoked token is still accepted after 60 s")
    })
}

/// Writes a credential plugin that hands out this token without saying how long it is valid.
fn plugin(world: &World, name: &str, token: &str) -> Result<PathBuf> {
    let path = world.server.directory().join(format!("{name}.plugin"));
    let credential = json!({
        "apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": token},
    });
    // The plugin may be running, so its file is replaced instead of being written.
    let draft = path.with_extension("draft");
    fs::write(&draft, format!("#!/bin/sh\ncat <<'END'\n{credential}\nEND\n"))
        .context("writing the plugin")?;
    fs::set_permissions(&draft, fs::Permissions::from_mode(0o755)).context("making the plugin executable")?;
    fs::rename(&draft, &path).context("putting the plugin in place")?;
    Ok(path)
}
