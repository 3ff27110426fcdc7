//! Scenarios in which the API server is away.

use std::{
    env, thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use control_plane::{PROXY, objects};
use serde_json::json;

use crate::{
    node::{Node, nothing_is_programmed},
    proxy::{answers, metric},
    scenarios::PROGRAMMED,
    until::until,
    world::World,
};

/// Length of an outage in seconds, unless the environment variable `OUTAGE_SECONDS` has another.
/// Within this time each watcher tries more than once. With 60 seconds it reaches its longest
/// pause.
const OUTAGE_SECONDS: u64 = 20;
/// Text in the log while the API server cannot be reached. The first connection may be reset or
/// refused.
const UNREACHABLE: &str = "reason=\"unreachable\"";

fn outage() -> Duration {
    let seconds = env::var("OUTAGE_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(seconds.unwrap_or(OUTAGE_SECONDS))
}

pub(crate) fn an_api_server_that_is_away_changes_nothing(world: &mut World) -> Result<()> {
    let own = Node::known(world, "alone", 17)?;
    let late = Node::known(world, "alone-from-the-start", 18)?;
    let mut proxy = own.run(&json!({}))?;
    own.serves()?;

    world.server.kill();
    let away_since = Instant::now();
    proxy.says(UNREACHABLE)?;
    let mut started_late = late.start(&json!({}))?;
    started_late.says(UNREACHABLE)?;
    world.server.replace_token(PROXY);
    // Only the API server itself ends the outage, and it stays away until then.
    thread::sleep(outage().saturating_sub(away_since.elapsed()));
    answers(&own.healthz(), "/healthz", 200)?;
    own.serves()?;
    nothing_is_programmed(&late)?;

    world.server.start_again()?;
    let refused = "proxy_source_errors_total{resource=\"services\",reason=\"unauthorized\"}";
    for own in [&own, &late] {
        // A metric without a sample does not have this reason yet.
        let is_refused = || Ok(metric(&own.metrics(), refused).is_ok_and(|count| count > 0.0).then_some(()));
        until("the former token to be refused", is_refused, || proxy.log())?;
    }
    nothing_is_programmed(&late)?;
    world.server.publish_token(PROXY)?;
    let added = objects::service("default", "added", 81);
    world.apply(&added)?;
    proxy.says("again after")?;
    let added_too = || Ok(own.services()?.to_string().contains("\"added\"").then_some(()));
    until("the new Service", added_too, || proxy.log())?;
    started_late.says(PROGRAMMED)?;
    late.serves()?;
    world.event(late.name, "Starting")?;
    world.delete(&added)?;
    for proxy in [&mut proxy, &mut started_late] {
        proxy.runs()?;
        // Four kinds of objects are watched, and each is tried more than once.
        let told = proxy.log().lines().filter(|line| line.contains(UNREACHABLE)).count();
        ensure!(told == 1, "one outage is told {told} times:\n{}", proxy.log());
    }
    Ok(())
}
