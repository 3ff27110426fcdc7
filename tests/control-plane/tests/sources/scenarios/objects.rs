//! One object changes at a time.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use control_plane::PROXY;
use proxy_ctl::model::Update;
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

pub(super) fn slices_split_and_merge(world: &mut World) -> Result<()> {
    let mut follower = Follower::listed(world, PROXY)?;
    let one = world.slice("web-1", "web", &[1, 2, 3, 4]);
    let two = world.slice("web-2", "web", &[3, 4]);
    world.create(&world.service("web"))?;
    world.create(&one)?;
    let all: &[&str] = &["10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.3:8080", "10.0.0.4:8080"];
    follower.wait_served(world, &[("web:main", all)])?;

    // As the controller does it: the new slice first, so that some endpoints are in both for a moment.
    let mark = follower.log.len();
    world.create(&two)?;
    world.apply(&world.slice("web-1", "web", &[1, 2]))?;
    follower.wait(world, "both slices", |follower| follower.log.len() >= mark + 2)?;
    follower.wait_served(world, &[("web:main", all)])?;

    world.apply(&world.slice("web-2", "web", &[1, 2, 3, 4]))?;
    world.delete(&one)?;
    follower.wait(world, "the end of the first slice", |follower| follower.log.len() >= mark + 4)?;
    follower.wait_served(world, &[("web:main", all)])?;
    world.delete(&two)?;
    follower.wait_served(world, &[("web:main", &[])])
}

pub(super) fn a_slice_moves_to_another_service(world: &mut World) -> Result<()> {
    let mut follower = Follower::listed(world, PROXY)?;
    let slice = world.slice("moving", "old", &[1]);
    for name in ["old", "new"] {
        world.create(&world.service(name))?;
    }
    world.create(&slice)?;
    follower.wait_served(world, &[("new:main", &[]), ("old:main", &["10.0.0.1:8080"])])?;
    world.merge(&slice, &json!({"metadata": {"labels": {"kubernetes.io/service-name": "new"}}}))?;
    follower.wait_served(world, &[("new:main", &["10.0.0.1:8080"]), ("old:main", &[])])?;
    world.merge(&slice, &json!({"metadata": {"labels": {"kubernetes.io/service-name": null}}}))?;
    follower.wait_served(world, &[("new:main", &[]), ("old:main", &[])])
}

pub(super) fn another_proxys_label_comes_and_goes(world: &mut World) -> Result<()> {
    let label =
        |value: Value| json!({"metadata": {"labels": {"service.kubernetes.io/service-proxy-name": value}}});
    let mut follower = Follower::listed(world, PROXY)?;
    let (web, slice) = (world.service("web"), world.slice("web-1", "web", &[1]));
    world.create(&web)?;
    world.create(&slice)?;
    let served: [(&str, &[&str]); 1] = [("web:main", &["10.0.0.1:8080"])];
    follower.wait_served(world, &served)?;
    for _ in 0..2 {
        world.merge(&web, &label(json!("other-proxy")))?;
        follower.wait_served(world, &[])?;
        world.merge(&web, &label(Value::Null))?;
        follower.wait_served(world, &served)?;
    }
    world.merge(&slice, &label(json!("other-proxy")))?;
    follower.wait_served(world, &[("web:main", &[])])?;
    world.merge(&slice, &label(Value::Null))?;
    follower.wait_served(world, &served)
}

pub(super) fn headless_services_are_not_served(world: &mut World) -> Result<()> {
    let mut follower = Follower::listed(world, PROXY)?;
    let mut headless = world.service("headless");
    headless["spec"]["clusterIP"] = json!("None");
    let mut labelled = world.service("labelled");
    labelled["metadata"]["labels"] = json!({"service.kubernetes.io/headless": ""});
    let mut slice = world.slice("labelled-1", "labelled", &[1]);
    slice["metadata"]["labels"]["service.kubernetes.io/headless"] = json!("");
    for object in [&headless, &labelled, &slice] {
        world.create(object)?;
    }
    // Watches keep the order: when the last ones are here, the others have passed.
    world.create(&world.service("last"))?;
    world.create(&world.slice("last-1", "last", &[9]))?;
    follower.wait_served(world, &[("last:main", &["10.0.0.9:8080"])])?;

    let unlabelled = json!({"metadata": {"labels": {"service.kubernetes.io/headless": null}}});
    world.merge(&labelled, &unlabelled)?;
    world.merge(&slice, &unlabelled)?;
    follower
        .wait_served(world, &[("labelled:main", &["10.0.0.1:8080"]), ("last:main", &["10.0.0.9:8080"])])?;
    world.merge(&labelled, &json!({"metadata": {"labels": {"service.kubernetes.io/headless": ""}}}))?;
    follower.wait_served(world, &[("last:main", &["10.0.0.9:8080"])])
}

pub(super) fn external_name_and_back(world: &mut World) -> Result<()> {
    let mut follower = Follower::listed(world, PROXY)?;
    let web = world.service("web");
    world.create(&web)?;
    world.create(&world.slice("web-1", "web", &[1]))?;
    let served: [(&str, &[&str]); 1] = [("web:main", &["10.0.0.1:8080"])];
    follower.wait_served(world, &served)?;
    let mark = follower.log.len();
    world.merge(
        &web,
        &json!({"spec": {"type": "ExternalName", "externalName": "example.org", "clusterIP": null, "clusterIPs": null,
            "ipFamilies": null, "ipFamilyPolicy": null, "internalTrafficPolicy": null}}),
    )?;
    follower.wait_served(world, &[])?;
    ensure!(
        matches!(follower.since(mark), [Update::DeleteService(name)] if &*name.name == "web"),
        "expected one deletion, got {:?}",
        follower.since(mark)
    );
    world.merge(&web, &json!({"spec": {"type": "ClusterIP", "externalName": null}}))?;
    follower.wait_served(world, &served)
}

/// From the API server's answer to the update in the channel.
pub(super) fn a_change_arrives_at_once(world: &mut World) -> Result<()> {
    let mut follower = Follower::listed(world, PROXY)?;
    world.create(&world.service("web"))?;
    let slice = world.slice("web-1", "web", &[1]);
    world.create(&slice)?;
    follower.wait_served(world, &[("web:main", &["10.0.0.1:8080"])])?;
    let mut delays = Vec::new();
    for last in 2..22 {
        let address = format!("10.0.0.{last}");
        world.merge(&slice, &json!({"endpoints": [{"addresses": [address]}]}))?;
        let acknowledged = Instant::now();
        follower.wait_served(world, &[("web:main", &[&format!("{address}:8080")])])?;
        delays.push(acknowledged.elapsed());
    }
    delays.sort_unstable();
    let (median, longest) = (delays[delays.len() / 2], delays[delays.len() - 1]);
    world.note(format!(
        "from acknowledged change to model, 20 changes: median {median:.1?}, longest {longest:.1?}"
    ));
    // How fast is the machine's affair; that no delay of our own lies in between is not.
    ensure!(median < Duration::from_secs(2), "median {median:?}, longest {longest:?}");
    Ok(())
}
