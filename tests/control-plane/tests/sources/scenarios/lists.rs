//! Lists, broken watches, and lists after these.

use std::{
    env,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use control_plane::{PROXY, objects::Bulk};
use proxy_ctl::{
    config::Encoding,
    kubernetes::{Config, ListMethod, ResourceKind, failure::FailureReason},
    model::Update,
};
use serde_json::json;

use crate::{follower::Follower, world::World};

fn lists(follower: &Follower, kind: ResourceKind) -> u64 {
    [ListMethod::Streamed, ListMethod::Whole]
        .into_iter()
        .map(|method| follower.state.lists(kind, method))
        .sum()
}

/// Expects the answer in an encoding that the client accepts. An API server may choose any of them.
pub(super) fn what_is_accepted_decides_the_answer(world: &mut World) -> Result<()> {
    world.create(&world.service("web"))?;
    let config = Config {
        kubeconfig: Some(world.server.kubeconfig(PROXY)),
        accept_content_types: Some("application/vnd.kubernetes.protobuf;q=0.5,application/json".into()),
        ..Config::default()
    };
    let mut follower = Follower::start_as(world, config)?;
    follower.wait_served(world, &[("web:main", &[])])?;
    let found = follower.state.encoding(ResourceKind::Services);
    ensure!(found == Some(Encoding::Json), "{found:?}");
    Ok(())
}

pub(super) fn a_broken_connection_goes_on_where_it_was(world: &mut World) -> Result<()> {
    let relay = world.relay()?;
    let mut follower = Follower::start_through(world, PROXY, relay.address)?;
    follower.wait_listed(world)?;
    let (keep, drop) = (world.service("keep"), world.service("drop"));
    world.create(&keep)?;
    world.create(&drop)?;
    follower.wait_served(world, &[("drop:main", &[]), ("keep:main", &[])])?;

    relay.cut();
    follower.wait(world, "all watches to fail", |follower| {
        follower.state.kinds().into_iter().all(|kind| !follower.state.connected(kind))
    })?;
    world.delete(&drop)?;
    world.create(&world.service("new"))?;
    world.create(&world.slice("keep-1", "keep", &[1]))?;
    relay.restore();
    follower.wait_served(world, &[("keep:main", &["10.0.0.1:8080"]), ("new:main", &[])])?;
    for kind in follower.state.kinds() {
        ensure!(lists(&follower, kind) == 1, "{kind} were listed {} times", lists(&follower, kind));
    }
    Ok(())
}

/// Expects a connection to be replaced that only seems alive. Only an answer of the API server
/// itself proves a connection, because the relay's kernel acknowledges whatever is sent.
pub(super) fn a_connection_that_only_seems_alive_is_replaced(world: &mut World) -> Result<()> {
    // Unit tests check the exact limits: a dead connection is given up after 40 s, and a new one is
    // made within 10 s. A watch that is not proven lasts 180 s after a bookmark.
    const NOTICED_WITHIN: Duration = Duration::from_secs(120);
    let relay = world.relay()?;
    let mut follower = Follower::start_through(world, PROXY, relay.address)?;
    follower.wait_listed(world)?;
    follower.wait(world, "all watches", |follower| {
        follower.state.kinds().into_iter().all(|kind| follower.state.connected(kind))
    })?;
    relay.freeze();
    let began = Instant::now();
    world.create(&world.service("new"))?;
    follower.wait_served_within(world, NOTICED_WITHIN, &[("new:main", &[])])?;
    world.note(format!("a dead connection was replaced after {:.1?}", began.elapsed()));
    for kind in follower.state.kinds() {
        ensure!(lists(&follower, kind) == 1, "{kind} were listed {} times", lists(&follower, kind));
    }
    Ok(())
}

pub(super) fn what_happened_before_a_compaction_is_seen_in_one_replace(world: &mut World) -> Result<()> {
    let relay = world.relay()?;
    let mut follower = Follower::start_through(world, PROXY, relay.address)?;
    follower.wait_listed(world)?;
    let (changed, gone) = (world.service("changed"), world.service("gone"));
    let slice = world.slice("changed-1", "changed", &[1]);
    for object in [&changed, &gone, &slice, &world.slice("gone-1", "gone", &[2])] {
        world.create(object)?;
    }
    follower
        .wait_served(world, &[("changed:main", &["10.0.0.1:8080"]), ("gone:main", &["10.0.0.2:8080"])])?;

    relay.cut();
    follower.wait(world, "all watches to fail", |follower| {
        follower.state.kinds().into_iter().all(|kind| !follower.state.connected(kind))
    })?;
    world.delete(&gone)?;
    world.delete(&world.slice("gone-1", "gone", &[]))?;
    world.merge(&slice, &json!({"endpoints": [{"addresses": ["10.0.0.7"]}]}))?;
    world.create(&world.service("new"))?;
    world.create(&world.slice("new-1", "new", &[3]))?;
    world.server.compact()?;
    // A restart also ends the API server's own memory of versions.
    world.server.restart()?;
    let length = follower.log.len();
    relay.restore();
    follower.wait_served(world, &[("changed:main", &["10.0.0.7:8080"]), ("new:main", &["10.0.0.3:8080"])])?;

    let since = follower.since(length);
    let services = since.iter().filter(|update| matches!(update, Update::ReplaceServices(_))).count();
    let slices = since.iter().filter(|update| matches!(update, Update::ReplaceSlices(_))).count();
    let unasked = |update: &&Update| !matches!(update, Update::Node(_) | Update::ReplaceServiceCidrs(_));
    let others = since.iter().filter(unasked).count() - services - slices;
    ensure!(
        (services, slices, others) == (1, 1, 0),
        "{services}, {slices} replacements, {others} other updates"
    );
    for kind in [ResourceKind::Services, ResourceKind::EndpointSlices] {
        ensure!(follower.state.errors(kind, FailureReason::Expired) > 0, "410 was counted for {kind}");
        ensure!(lists(&follower, kind) == 2, "{kind} were listed {} times", lists(&follower, kind));
    }
    Ok(())
}

/// Serves 2,000 Services, or as many as `SERVICES` says. The API server takes 10 ms of a core to
/// create one.
pub(super) fn thousands_of_services(world: &mut World) -> Result<()> {
    let services: usize = match env::var("SERVICES") {
        Ok(text) => text.parse().with_context(|| format!("SERVICES must be a number, found {text:?}"))?,
        Err(_) => 2_000,
    };
    let mut follower = Follower::listed(world, PROXY)?;
    let bulk = Bulk::new(world.namespace(), services, 10);
    let (client, creating) = (world.client().clone(), bulk.clone());
    let took = follower.during(world, async move { creating.create(&client).await })?;
    world.note(format!("{services} services and slices created in {took:.1?}"));
    let endpoint = |index: usize| format!("{}:8080", bulk.address(index, 0));
    follower.wait(world, "all of them with their endpoints", |follower| {
        // Computing what is served takes a while, so it is not done for every update.
        follower.log.len() >= 2 * services && {
            let served = follower.served();
            served.len() == services && served.values().all(|endpoints| endpoints.len() == 10)
        }
    })?;
    let served = follower.served();
    for index in [0, 1, services / 2, services - 1] {
        let first = served.get(&format!("s-{index}:main")).and_then(|endpoints| endpoints.first());
        ensure!(first == Some(&endpoint(index)), "s-{index} begins with {first:?}");
    }
    ensure!(lists(&follower, ResourceKind::Services) == 1, "changes come by the watch");

    // A client that comes now finds the same in one list.
    let listed = Follower::listed(world, PROXY)?;
    ensure!(listed.served() == served, "a list and a watch differ");
    Ok(())
}

pub(super) fn refused_streaming_lists_become_plain_ones(world: &mut World) -> Result<()> {
    world.server.set_flags(vec!["--feature-gates=WatchList=false".into()]);
    world.server.restart()?;
    for name in ["stays", "goes"] {
        world.create(&world.service(name))?;
    }
    let mut follower = Follower::listed(world, PROXY)?;
    follower.wait_served(world, &[("goes:main", &[]), ("stays:main", &[])])?;
    follower.wait(world, "all lists", |follower| {
        follower.state.kinds().into_iter().all(|kind| follower.state.connected(kind))
    })?;
    for kind in follower.state.kinds() {
        let streamed = follower.state.lists(kind, ListMethod::Streamed);
        let whole = follower.state.lists(kind, ListMethod::Whole);
        ensure!((streamed, whole) == (0, 1), "{kind}: {streamed} streamed lists, {whole} plain ones");
    }
    // The watch goes on behind the list.
    world.delete(&world.service("goes"))?;
    follower.wait_served(world, &[("stays:main", &[])])?;
    world.server.set_flags(Vec::new());
    world.server.restart()
}
