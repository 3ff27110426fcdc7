//! API servers that know less than others, or that fail.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use proxy_ctl::kubernetes::{ListMethod, ResourceKind, failure::FailureReason};
use serde_json::json;

use crate::{fake::Fake, follower::Follower, world::World};

/// Returns the largest number of lists that the time allows: one, one more at once, and one after
/// each pause. The shortest pauses are 0.8 s, 1.6 s and so on. On a busy machine three failures
/// were seen late, and there were more lists meanwhile.
fn most_lists(elapsed: Duration) -> u64 {
    let mut pauses = (0_u32..).map(|number| Duration::from_millis(800).saturating_mul(1 << number.min(5)));
    let (mut lists, mut left) = (2, elapsed);
    while let Some(rest) = pauses.next().and_then(|pause| left.checked_sub(pause)) {
        (lists, left) = (lists + 1, rest);
    }
    lists
}

/// Makes watches end at once, again and again. The lists in between must keep a distance from each
/// other. A 410 in between is normal once, and no more than once.
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
        // The frame has three bytes that are no message.
        (
            "application/vnd.kubernetes.protobuf;stream=watch",
            &[0, 0, 0, 3, 0xff, 0xff, 0xff],
            FailureReason::Malformed,
        ),
    ];
    for (content, body, reason) in cases {
        fake.spoil_services(Some((content, body.to_vec())));
        // The time is taken before the follower begins, because this thread may not run for a while
        // after that.
        let begin = Instant::now();
        let mut follower = Follower::start_with(world, &fake.kubeconfig(world)?)?;
        follower.wait(world, "three failures", |follower| {
            follower.state.errors(ResourceKind::Services, reason) >= 3
        })?;
        // One list may follow at once. The next one comes after at least 0.8 s.
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

/// Lists and watches everything of an API server that knows neither streaming lists nor
/// ServiceCIDRs, within the limits that kube-proxy has by default.
pub(super) fn everything_is_listed_and_watched_within_the_burst(world: &mut World) -> Result<()> {
    const BURST: usize = 10;
    let fake = Fake::start(world)?;
    let mut follower = Follower::start_with(world, &fake.kubeconfig(world)?)?;
    follower.wait_listed(world)?;
    let watched = [ResourceKind::Services, ResourceKind::EndpointSlices, ResourceKind::Nodes];
    follower.wait(world, "all watches", |follower| {
        follower.state.kinds() == watched && watched.into_iter().all(|kind| follower.state.watches(kind) > 0)
    })?;
    let requests = fake.requests();
    ensure!(requests.len() <= BURST, "{} requests: {requests:#?}", requests.len());
    let mut lists =
        requests.iter().filter(|request| request.contains('?') && !request.contains("watch=true"));
    ensure!(
        lists.all(|list| list.contains("resourceVersion=0")),
        "a first list asks for more than the API server has in memory: {requests:#?}"
    );
    Ok(())
}
