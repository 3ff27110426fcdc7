//! Rules that the real kube-proxy leaves, and their removal. Its own `--cleanup` shows what must be
//! left then.

mod cleanup;
mod former;
mod takeover;

use anyhow::{Result, ensure};
use control_plane::objects;
use serde_json::json;

pub(crate) use self::{
    cleanup::{
        a_chain_that_only_others_lead_to_is_emptied, clean_up_leaves_what_kube_proxys_leaves,
        what_others_use_of_kube_proxy_stays_and_is_named, who_masquerades_by_a_map_still_does,
    },
    takeover::{
        a_kube_proxy_that_still_runs_is_named_and_not_fought,
        a_legacy_table_that_cannot_be_written_keeps_no_other,
        connections_that_it_leaves_live_on_where_nobody_else_translates, health_checks_stay_accepted,
        run_leaves_them_where_it_is_told_to, run_removes_them_and_connections_live_on,
        what_comes_back_while_something_else_cannot_be_removed_is_not_fought,
        what_forwarded_connections_need_stays_where_others_are_dropped,
        what_is_delegated_holds_no_removal_back,
    },
};
use crate::{node::Node, world::World};

const CLUSTER_IP: &str = "10.96.77.77";
const ENDPOINT: &str = "10.0.0.77";
const PORT: u16 = 8077;

/// Makes a Node, and a Service with a known address, a node port and an endpoint on this machine.
fn with_service(world: &World, node: &'static str, number: u16) -> Result<Node> {
    let own = Node::known(world, node, number)?;
    let mut service = objects::service("default", "former-rules", PORT);
    service["spec"]["clusterIP"] = json!(CLUSTER_IP);
    service["spec"]["type"] = json!("NodePort");
    world.apply(&service)?;
    let slice =
        objects::endpoint_slice("default", "former-rules-1", "former-rules", &[ENDPOINT.parse()?], PORT);
    world.apply(&slice)?;
    Ok(own)
}

fn is_as(expected: &str, found: &str) -> Result<()> {
    ensure!(expected == found, "expected\n{expected}\nfound\n{found}");
    Ok(())
}
