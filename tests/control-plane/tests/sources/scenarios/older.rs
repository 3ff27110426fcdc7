//! API servers that have other APIs for endpoints.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use control_plane::PROXY;
use proxy_ctl::source::kubernetes::{ListMethod, ResourceKind, failure::FailureReason};
use serde_json::{Value, json};

use crate::{
    fake::{Fake, SLICES},
    follower::{Follower, NODE},
    world::World,
};

fn endpoints(world: &World, name: &str, subsets: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Endpoints",
        "metadata": {"namespace": world.namespace(), "name": name}, "subsets": subsets,
    })
}

fn subset(addresses: &[&str], port: u16) -> Value {
    let addresses: Vec<Value> = addresses.iter().map(|address| json!({"ip": address})).collect();
    json!({"addresses": addresses, "ports": [{"name": "main", "protocol": "TCP", "port": port}]})
}

/// A real API server with EndpointSlices switched off; it is upgraded, and goes back.
pub(super) fn without_slices_endpoints_are_watched(world: &mut World) -> Result<()> {
    let mut before = Follower::listed(world, PROXY)?;
    world.server.set_flags(vec!["--runtime-config=discovery.k8s.io/v1=false".into()]);
    world.server.restart()?;
    let web = world.service("web");
    world.create(&web)?;
    let object =
        endpoints(world, "web", json!([subset(&["10.0.0.1", "10.0.0.2"], 8080), subset(&["10.0.0.3"], 81)]));
    world.create(&object)?;

    let served: [(&str, &[&str]); 1] = [("web:main", &["10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.3:81"])];
    let mut follower = Follower::listed(world, PROXY)?;
    follower.wait_served(world, &served)?;
    let watched =
        [ResourceKind::Services, ResourceKind::Endpoints, ResourceKind::Nodes, ResourceKind::ServiceCidrs];
    follower.wait(world, "these are watched", |follower| follower.state.kinds() == watched)?;
    ensure!(follower.state.lists(ResourceKind::Endpoints, ListMethod::Whole) == 1, "listed in pages");
    // One that followed before the server went back follows too.
    before.wait_served(world, &served)?;
    ensure!(before.state.kinds().contains(&ResourceKind::Endpoints), "{:?}", before.state.kinds());

    // One step for one object, whatever becomes of its subsets.
    world.apply(&endpoints(world, "web", json!([subset(&["10.0.0.4"], 8080)])))?;
    follower.wait_served(world, &[("web:main", &["10.0.0.4:8080"])])?;
    let mut not_ready = subset(&["10.0.0.4"], 8080);
    not_ready["notReadyAddresses"] = json!([{"ip": "10.0.0.5"}]);
    world.apply(&endpoints(world, "web", json!([not_ready, subset(&["10.0.0.6"], 82)])))?;
    follower.wait_served(world, &[("web:main", &["10.0.0.4:8080", "10.0.0.6:82"])])?;
    world.delete(&object)?;
    follower.wait_served(world, &[("web:main", &[])])?;

    world.server.set_flags(Vec::new());
    world.server.restart()?;
    world.create(&world.slice("web-1", "web", &[7]))?;
    for follower in [&mut follower, &mut before] {
        follower.wait_served(world, &[("web:main", &["10.0.0.7:8080"])])?;
        ensure!(!follower.state.kinds().contains(&ResourceKind::Endpoints), "{:?}", follower.state.kinds());
        ensure!(follower.state.connected(ResourceKind::EndpointSlices), "slices are watched");
    }
    Ok(())
}

fn slice_v1beta1(world: &World, name: &str, endpoints: Value) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1beta1", "kind": "EndpointSlice",
        "metadata": {
            "namespace": world.namespace(), "name": name, "labels": {"kubernetes.io/service-name": "web"},
        },
        "addressType": "IPv4", "endpoints": endpoints,
        "ports": [{"name": "main", "protocol": "TCP", "port": 8080}],
    })
}

/// What no real API server serves any more.
pub(super) fn slices_of_v1beta1_are_watched(world: &mut World) -> Result<()> {
    let fake = Fake::start(world)?;
    let mut web = world.service("web");
    web["spec"]["clusterIP"] = json!("10.96.0.10");
    web["spec"]["internalTrafficPolicy"] = json!("Local");
    fake.apply(&web);
    // As the controller of 1.19 writes them: the node is in the topology only.
    let here = json!({"addresses": ["10.0.0.1"], "conditions": {"ready": true},
        "topology": {"kubernetes.io/hostname": NODE, "topology.kubernetes.io/zone": "a"}});
    let there = json!({"addresses": ["10.0.0.2"], "conditions": {"ready": true},
        "topology": {"kubernetes.io/hostname": "another-node"}});
    fake.apply(&slice_v1beta1(world, "web-1", json!([here, there])));

    let mut follower = Follower::start_with(world, &fake.kubeconfig(world)?)?;
    let local = |follower: &Follower| {
        let desired = follower.model.desired();
        let ports = desired.iter().flat_map(|port| &port.endpoints.all);
        ports.map(|endpoint| endpoint.address.to_string()).collect::<Vec<_>>()
    };
    follower.wait(world, "the local endpoint", |follower| local(follower) == ["10.0.0.1"])?;
    // This server has no ServiceCIDRs, which shows when they are asked for.
    let watched = [ResourceKind::Services, ResourceKind::EndpointSlices, ResourceKind::Nodes];
    follower.wait(world, "these are watched", |follower| follower.state.kinds() == watched)?;
    ensure!(
        fake.requests().iter().any(|request| request.starts_with(&format!("GET {SLICES}?"))),
        "v1beta1 is asked"
    );

    let also_here = json!({"addresses": ["10.0.0.3"], "topology": {"kubernetes.io/hostname": NODE}});
    let second = slice_v1beta1(world, "web-2", json!([also_here]));
    fake.apply(&second);
    follower.wait(world, "the second slice", |follower| local(follower) == ["10.0.0.1", "10.0.0.3"])?;
    fake.delete(&second);
    follower.wait(world, "its end", |follower| local(follower) == ["10.0.0.1"])?;

    let mut upgraded = world.slice("web-1", "web", &[4]);
    upgraded["endpoints"][0]["nodeName"] = json!(NODE);
    fake.upgrade(vec![upgraded]);
    follower.wait(world, "the slices of v1", |follower| local(follower) == ["10.0.0.4"])?;
    ensure!(follower.replaced_slices() == 2, "one list of each version");
    Ok(())
}

/// How many lists there is time for: one, one more at once, and one after each pause. The shortest pauses are 0.8 s,
/// 1.6 s and so on; with three failures seen late, on a busy machine, there were more of them.
fn most_lists(elapsed: Duration) -> u64 {
    let mut pauses = (0_u32..).map(|number| Duration::from_millis(800).saturating_mul(1 << number.min(5)));
    let (mut lists, mut left) = (2, elapsed);
    while let Some(rest) = pauses.next().and_then(|pause| left.checked_sub(pause)) {
        (lists, left) = (lists + 1, rest);
    }
    lists
}

/// Watches that end at once, again and again: the lists in between keep away from each other. 410 in between is the
/// usual course of things once, and no more than once.
pub(super) fn watches_that_always_fail_are_tried_ever_less(world: &mut World) -> Result<()> {
    let fake = Fake::start(world)?;
    let mut web = world.service("web");
    web["spec"]["clusterIP"] = json!("10.96.0.10");
    fake.apply(&web);
    let expired =
        json!({"kind": "Status", "apiVersion": "v1", "code": 410, "reason": "Expired", "message": "too old"});
    let expired = format!("{{\"type\":\"ERROR\",\"object\":{expired}}}\n");
    let cases: [(_, &[u8], _); 3] = [
        ("application/json", expired.as_bytes(), FailureReason::Expired),
        ("application/json", b"{\"type\":\"GREETING\",\"object\":{}}\n", FailureReason::Malformed),
        // A frame of three bytes which are no message.
        (
            "application/vnd.kubernetes.protobuf;stream=watch",
            &[0, 0, 0, 3, 0xff, 0xff, 0xff],
            FailureReason::Malformed,
        ),
    ];
    for (content, body, reason) in cases {
        fake.spoil_services(Some((content, body.to_vec())));
        let mut follower = Follower::start_with(world, &fake.kubeconfig(world)?)?;
        let begin = Instant::now();
        follower.wait(world, "three failures", |follower| {
            follower.state.errors(ResourceKind::Services, reason) >= 3
        })?;
        // One at once, if at all; then after at least 0.8 s.
        ensure!(begin.elapsed() >= Duration::from_millis(800), "{reason:?}: within {:?}", begin.elapsed());
        let lists = follower.state.lists(ResourceKind::Services, ListMethod::Whole);
        let most = most_lists(begin.elapsed());
        ensure!((3..=most).contains(&lists), "{reason:?}: {lists} lists for 3 failures, at most {most}");
        follower.wait_served(world, &[("web:main", &[])])?;

        fake.spoil_services(None);
        follower.wait(world, "a watch", |follower| follower.state.connected(ResourceKind::Services))?;
        let mut other = web.clone();
        other["metadata"]["name"] = json!("other");
        other["spec"]["clusterIP"] = json!("10.96.0.11");
        fake.apply(&other);
        follower.wait_served(world, &[("other:main", &[]), ("web:main", &[])])?;
        fake.delete(&other);
    }
    Ok(())
}

/// An API server that knows no streaming lists, and the limits that kube-proxy has by default.
pub(super) fn everything_is_listed_and_watched_within_the_burst(world: &mut World) -> Result<()> {
    const BURST: usize = 10;
    let fake = Fake::start(world)?;
    fake.upgrade(Vec::new());
    let mut follower = Follower::start_with(world, &fake.kubeconfig(world)?)?;
    follower.wait_listed(world)?;
    follower.wait(world, "all watches", |follower| {
        follower.state.kinds().into_iter().all(|kind| follower.state.watches(kind) > 0)
    })?;
    let requests = fake.requests();
    ensure!(requests.len() <= BURST, "{} requests: {requests:#?}", requests.len());
    // That the server has no ServiceCIDRs says nothing about streaming lists: the first request may be theirs.
    let streams = requests
        .iter()
        .filter(|request| request.contains("sendInitialEvents=true") && !request.contains("/servicecidrs?"))
        .count();
    ensure!(streams == 1, "{streams} streaming lists, where the first was refused: {requests:#?}");
    let mut lists =
        requests.iter().filter(|request| request.contains('?') && !request.contains("watch=true"));
    ensure!(
        lists.all(|list| list.contains("resourceVersion=0")),
        "a first list asks for more than the API server has in memory: {requests:#?}"
    );
    Ok(())
}
