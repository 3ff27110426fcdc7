//! Changes of one object at a time.

use anyhow::Result;
use control_plane::PROXY;
use serde_json::{Value, json};

use crate::{follower::Follower, world::World};

pub(super) fn objects_are_created_patched_and_deleted(world: &mut World) -> Result<()> {
    let mut follower = Follower::listed(world, PROXY)?;
    let (web, slice) = (world.service("web"), world.slice("web-1", "web", &[1, 2]));
    world.create(&web)?;
    follower.wait_served(world, &[("web:main", &[])])?;
    world.create(&slice)?;
    follower.wait_served(world, &[("web:main", &["10.0.0.1:8080", "10.0.0.2:8080"])])?;

    world.merge(
        &slice,
        &json!({"endpoints": [{"addresses": ["10.0.0.3"]}], "ports": [{"name": "main", "port": 81}]}),
    )?;
    follower.wait_served(world, &[("web:main", &["10.0.0.3:81"])])?;
    world.merge(
        &slice,
        &json!({"endpoints": [{"addresses": ["10.0.0.3"], "conditions": {"ready": false}}]}),
    )?;
    follower.wait_served(world, &[("web:main", &[])])?;
    world.merge(&web, &json!({"spec": {"ports": [{"name": "other", "port": 443}]}}))?;
    follower.wait_served(world, &[("web:other", &[])])?;

    world.delete(&slice)?;
    world.delete(&web)?;
    follower.wait_served(world, &[])
}

/// Sets labels of another proxy, and of a headless Service. The API server leaves such objects out
/// of lists and watches.
pub(super) fn labels_that_exclude_objects_come_and_go(world: &mut World) -> Result<()> {
    let mut follower = Follower::listed(world, PROXY)?;
    let (web, slice) = (world.service("web"), world.slice("web-1", "web", &[1]));
    world.create(&web)?;
    world.create(&slice)?;
    let served: [(&str, &[&str]); 1] = [("web:main", &["10.0.0.1:8080"])];
    follower.wait_served(world, &served)?;
    for label in ["service.kubernetes.io/service-proxy-name", "service.kubernetes.io/headless"] {
        let labelled = |value: Value| json!({"metadata": {"labels": {label: value}}});
        for (object, without) in [(&web, &[] as &[(&str, &[&str])]), (&slice, &[("web:main", &[])])] {
            world.merge(object, &labelled(json!("other")))?;
            follower.wait_served(world, without)?;
            world.merge(object, &labelled(Value::Null))?;
            follower.wait_served(world, &served)?;
        }
    }
    Ok(())
}

/// Changes the type. The API server then gives or takes cluster IPs, node ports, and the status of
/// a load balancer.
pub(super) fn a_service_changes_its_type_and_its_status(world: &mut World) -> Result<()> {
    let mut follower = Follower::listed(world, PROXY)?;
    let web = world.service("web");
    let of_type = |name: &str| json!({"spec": {"type": name}});
    let at = |address: &str, mode: &str| {
        let mut balanced = web.clone();
        balanced["status"] = json!({"loadBalancer": {"ingress": [{"ip": address, "ipMode": mode}]}});
        balanced
    };
    world.create(&web)?;
    follower.wait_frontends(world, &["ClusterIp"])?;
    world.merge(&web, &of_type("NodePort"))?;
    follower.wait_frontends(world, &["ClusterIp", "NodePort"])?;
    world.merge(&web, &of_type("LoadBalancer"))?;
    for address in ["203.0.113.1", "203.0.113.2"] {
        world.apply(&at(address, "VIP"))?;
        follower.wait_frontends(world, &["ClusterIp", "NodePort", &format!("LoadBalancer {address}")])?;
    }
    world.apply(&at("203.0.113.2", "Proxy"))?;
    follower.wait_frontends(world, &["ClusterIp", "NodePort"])?;
    world.merge(&web, &of_type("ClusterIP"))?;
    follower.wait_frontends(world, &["ClusterIp"])?;
    world.merge(&web, &json!({"spec": {"type": "LoadBalancer", "allocateLoadBalancerNodePorts": false}}))?;
    world.apply(&at("203.0.113.3", "VIP"))?;
    follower.wait_frontends(world, &["ClusterIp", "LoadBalancer 203.0.113.3"])?;
    world.merge(&web, &json!({"spec": {"type": "ExternalName", "externalName": "web.example"}}))?;
    follower.wait_frontends(world, &[])?;
    world.merge(&web, &json!({"spec": {"type": "ClusterIP", "externalName": null}}))?;
    follower.wait_frontends(world, &["ClusterIp"])
}
