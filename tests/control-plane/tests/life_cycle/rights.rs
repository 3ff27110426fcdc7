//! Scenarios in which the API server does not allow everything. What is denied is named, and the
//! rest works.

use anyhow::{Result, ensure};
use control_plane::objects::{self, Subject};
use scenario::Skip;
use serde_json::{Value, json};

use crate::{
    node::{Node, nothing_is_programmed},
    proxy::{answers, get, metric},
    scenarios::PROGRAMMED,
    until::until,
    world::World,
};

/// Right that ClusterRole system:node-proxier grants, as API group and plural.
type Right = (&'static str, &'static str);

const SERVICES: Right = ("", "services");
const SLICES: Right = ("discovery.k8s.io", "endpointslices");
const NODES: Right = ("", "nodes");
/// Right that only kube-proxy uses.
const RANGES: Right = ("networking.k8s.io", "servicecidrs");
const EVENTS: Right = ("events.k8s.io", "events");

/// ServiceAccount with a role of its own.
struct Account {
    name: &'static str,
    kubeconfig: String,
}

impl Account {
    /// Makes an account that has these rights and no others.
    fn with(world: &World, name: &'static str, rights: &[Right]) -> Result<Self> {
        world.apply(&objects::service_account("default", name))?;
        world.apply(&objects::cluster_role_binding(name, name, Subject::ServiceAccount("default", name)))?;
        let kubeconfig = world.server.kubeconfig_with(name, &world.token("default", name)?)?;
        let account = Self { name, kubeconfig: kubeconfig.display().to_string() };
        account.grant(world, rights)?;
        Ok(account)
    }

    /// Gives the account these rights and no others, from now on.
    fn grant(&self, world: &World, rights: &[Right]) -> Result<()> {
        let rule = |(group, plural): &Right| {
            let verbs = if *plural == "events" { &["create", "patch"] } else { &["list", "watch"] };
            (*group, *plural, verbs as &[&str])
        };
        world.apply(&objects::cluster_role(self.name, &rights.iter().map(rule).collect::<Vec<_>>()))
    }

    /// Returns the configuration with which a proxy uses this account.
    fn configuration(&self) -> Value {
        json!({"clientConnection": {"kubeconfig": self.kubeconfig}})
    }
}

fn is_denied(own: &Node, resource: &str) -> Result<()> {
    for verb in ["list", "watch"] {
        let name = format!("proxy_source_denied{{resource=\"{resource}\",verb=\"{verb}\"}}");
        is_counted(own, &name)?;
    }
    Ok(())
}

/// Waits until a metric is 1, which may be a moment after the reason was logged.
fn is_counted(own: &Node, name: &str) -> Result<()> {
    // A metric without a sample does not have this name yet.
    let is_it = || Ok(metric(&own.metrics(), name).is_ok_and(|value| value == 1.0).then_some(()));
    until(name, is_it, String::new)
}

fn is_watched(own: &Node, resource: &str) -> Result<()> {
    is_counted(own, &format!("proxy_source_connected{{resource=\"{resource}\"}}"))
}

/// Expects what is denied to be named, and to be used once it is granted. Without Services or their
/// endpoints there is nothing to serve. Other resources are not missed.
pub(crate) fn what_rbac_denies_is_named_and_comes_once_granted(world: &mut World) -> Result<()> {
    for (name, number, denied) in [("without-slices", 19, SLICES), ("without-services", 20, SERVICES)] {
        let allowed: Vec<Right> =
            [SERVICES, SLICES, NODES].into_iter().filter(|right| *right != denied).collect();
        let account = Account::with(world, name, &allowed)?;
        let own = Node::known(world, name, number)?;
        let mut proxy = own.start(&account.configuration())?;
        let (group, resource) = denied;
        proxy.says(&format!(
            "the API server does not allow list and watch of {resource} in API group \\\"{group}\\\""
        ))?;
        nothing_is_programmed(&own)?;
        is_denied(&own, resource)?;
        answers(&own.healthz(), "/livez", 200)?;

        account.grant(world, &[SERVICES, SLICES, NODES])?;
        proxy.says(PROGRAMMED)?;
        own.serves()?;
        answers(&own.healthz(), "/healthz", 200)?;
        proxy.says("nobody sees this proxy's events, everything else works")?;
        is_watched(&own, resource)?;
        proxy.runs()?;
    }
    Ok(())
}

/// Expects Services to work without the right to read Nodes, as if there were no such Node.
/// kube-proxy waits however long it takes, and opens no port.
pub(crate) fn without_the_right_to_read_nodes_services_work(world: &mut World) -> Result<()> {
    let allowed = [SERVICES, SLICES, RANGES, EVENTS];
    let account = Account::with(world, "without-nodes", &allowed)?;
    let own = Node::known(world, "without-nodes", 21)?;
    let real = Node::known(world, "real-without-nodes", 22)?;
    let mut configuration = account.configuration();
    let mut proxy = own.start(&configuration)?;
    configuration["mode"] = json!("nftables");
    let kube_proxy = real.start_kube_proxy_if_here(&configuration)?;

    proxy.says("the API server does not allow list and watch of nodes in API group")?;
    proxy.says("Timed out waiting for node to exist")?;
    proxy.says("Can't determine this node's IP, assuming loopback")?;
    proxy.says(PROGRAMMED)?;
    own.serves()?;
    answers(&own.healthz(), "/livez", 200)?;
    answers(&own.healthz(), "/healthz", 503)?;
    is_denied(&own, "nodes")?;
    world.event(own.name, "Starting")?;
    proxy.runs()?;
    if let Ok(kube_proxy) = &kube_proxy {
        kube_proxy.says("cannot list resource \\\"nodes\\\"")?;
        ensure!(get(&real.healthz(), "/livez")?.is_none(), "kube-proxy does not wait for the right any more");
    }

    account.grant(world, &[&allowed[..], &[NODES]].concat())?;
    proxy.ends()?.is(1, "NodeIPs changed for the node: they were none, now they are 192.0.2.1")?;
    own.serves()?;
    let _proxy = own.run(&account.configuration())?;
    answers(&own.healthz(), "/healthz", 200)?;
    let _kube_proxy = kube_proxy.map_err(Skip)?;
    answers(&real.healthz(), "/healthz", 200)
}
