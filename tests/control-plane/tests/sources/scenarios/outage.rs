//! The API server is away.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use control_plane::PROXY;
use proxy_ctl::{
    events::{Event, Outcome, Recorder, Type},
    source::kubernetes::failure::FailureReason,
};

use crate::{
    follower::{Follower, NODE},
    relay::Relay,
    world::World,
};

/// From the kill to when it can be reached again. What the node cannot see happens in the second half: for it
/// the way to the API server is still cut while that serves again.
const AWAY: Duration = Duration::from_secs(60);

pub(super) fn an_api_server_that_is_away_for_a_minute(world: &mut World) -> Result<()> {
    let relay = Relay::start(world)?;
    let mut follower = Follower::start_through(world, PROXY, relay.address)?;
    follower.wait_listed(world)?;
    world.create(&world.service("keep"))?;
    world.create(&world.service("drop"))?;
    world.create(&world.slice("keep-1", "keep", &[1]))?;
    let before: [(&str, &[&str]); 2] = [("drop:main", &[]), ("keep:main", &["10.0.0.1:8080"])];
    follower.wait_served(world, &before)?;
    let served = follower.served();
    let recorder = world.block_on(async { Recorder::new(follower.api.clone(), NODE, "away") });

    let killed = Instant::now();
    world.server.kill();
    follower.wait(world, "all watches to fail", |follower| {
        follower.state.kinds().into_iter().all(|kind| !follower.state.connected(kind))
    })?;
    // What was received before the kill, such as the end of an earlier scenario's objects.
    follower.take_received();
    let mark = follower.log.len();
    // A proxy that starts now, and something to tell.
    let mut late = Follower::start(world, PROXY)?;
    recorder.record(Event::node(Type::Normal, "Starting", "StartKubeProxy", ""));
    late.wait(world, "a start without an API server", |late| {
        late.state.kinds().into_iter().all(|kind| late.state.errors(kind, FailureReason::Unreachable) > 0)
    })?;
    follower.wait(world, "half of the time", |_| killed.elapsed() > AWAY / 2)?;
    ensure!(late.log.is_empty(), "nothing is sent before it has been listed");
    relay.cut();
    world.server.start_again()?;
    world.create(&world.service("new"))?;
    world.create(&world.slice("new-1", "new", &[2]))?;
    world.delete(&world.service("drop"))?;
    world.create(&world.slice("keep-2", "keep", &[3]))?;
    follower.wait(world, "the rest of the time", |_| killed.elapsed() >= AWAY)?;
    let since = follower.since(mark);
    ensure!(since.is_empty(), "nothing changes while it is away; received: {since:?}");
    ensure!(follower.served() == served, "nothing that is served changes while it is away");

    relay.mend();
    let back = Instant::now();
    let after: [(&str, &[&str]); 2] =
        [("keep:main", &["10.0.0.1:8080", "10.0.0.3:8080"]), ("new:main", &["10.0.0.2:8080"])];
    follower.wait_served(world, &after)?;
    world.note(format!("followed again {:.1?} after an outage of {AWAY:.0?}", back.elapsed()));
    late.wait_served(world, &after)?;
    follower.wait(world, "all watches", |follower| {
        follower.state.kinds().into_iter().all(|kind| follower.state.connected(kind))
    })?;
    world.block_on(recorder.flush());
    ensure!(recorder.count(Outcome::Written) == 1, "the event is written in the end");
    Ok(())
}
