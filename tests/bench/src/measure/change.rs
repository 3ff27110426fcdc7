//! The measured Service, whose endpoint moves from one pod to the other and back.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use control_plane::objects;
use lab::{Agent, Dial, Outcome, Protocol, address::cluster_ip, cluster::SERVER_PORT};
use serde_json::{Value, json};

use super::cpu;
use crate::{
    cluster::{Cluster, MOVES_BETWEEN, PORT},
    results::{Figures, Settings},
    statistics::Spread,
    subject::Subject,
};

const NAMESPACE: &str = "default";
const NAME: &str = "measured";
/// Pause between two moves. It is longer than kube-proxy's default `minSyncPeriod` of one second,
/// which would otherwise be what is measured.
const BETWEEN_ROUNDS: Duration = Duration::from_millis(1500);
const LIMIT: Duration = Duration::from_secs(600);
/// Factor by which processor time at rest is watched longer than traffic, because it is so little.
const REST: f64 = 12.0;

fn target() -> SocketAddr {
    SocketAddr::new(cluster_ip(77).v4.into(), PORT)
}

fn slice(address: Ipv4Addr) -> Value {
    objects::endpoint_slice(NAMESPACE, NAME, NAME, &[IpAddr::V4(address)], SERVER_PORT)
}

pub(crate) async fn create(api: &kube::Client, addresses: [Ipv4Addr; 2]) -> Result<()> {
    let mut service = objects::service(NAMESPACE, NAME, PORT);
    service["spec"]["clusterIP"] = json!(target().ip());
    objects::apply(api, &service).await?;
    objects::apply(api, &slice(addresses[0])).await
}

/// Milliseconds after which an unanswered SYN is given up. They are few, so that the measured time
/// is not a multiple of a long wait.
const ANSWER_MS: u64 = 10;

fn dial(client: &Agent) -> Result<Option<Outcome>> {
    Ok(client.dial(&Dial::new(Protocol::Tcp, target()).timeout_ms(ANSWER_MS))?.pop())
}

pub(crate) fn is_served(client: &Agent) -> Result<bool> {
    Ok(matches!(dial(client)?, Some(Outcome::Answered(_))))
}

/// Dials until `server` answers.
fn wait_for(client: &Agent, server: &str) -> Result<()> {
    let start = Instant::now();
    loop {
        let outcome = dial(client)?;
        if matches!(&outcome, Some(Outcome::Answered(answer)) if answer.by == server) {
            return Ok(());
        }
        if start.elapsed() > LIMIT {
            let last = outcome.map_or_else(String::new, |outcome| outcome.to_string());
            bail!("{server} did not answer within {} s, last: {last}", LIMIT.as_secs());
        }
    }
}

/// Moves the endpoint to one of its two pods. Returns the milliseconds from the API server's
/// acknowledgement until a client reaches that pod.
pub(crate) fn moved(cluster: &Cluster, to: usize) -> Result<f64> {
    let slice = slice(cluster.moves_between()?[to]);
    cluster.server.run(async |api| {
        objects::apply(&api, &slice).await?;
        let acknowledged = Instant::now();
        wait_for(&cluster.client, MOVES_BETWEEN[to])?;
        Ok(acknowledged.elapsed().as_secs_f64() * 1e3)
    })
}

/// Moves the endpoint `rounds` times, and times how long each move takes to be followed.
pub(crate) fn times(cluster: &Cluster, rounds: usize) -> Result<Figures> {
    let mut times = Vec::with_capacity(rounds);
    // The first move is not timed. The endpoint may be there already, because the rounds of another
    // proxy may have ended anywhere.
    moved(cluster, 0)?;
    for round in 1..=rounds {
        thread::sleep(BETWEEN_ROUNDS);
        times.push(moved(cluster, round % 2)?);
    }
    let longest = times.iter().copied().fold(0.0, f64::max);
    Ok(Figures::Times { millis: Spread::of(times).context("no rounds")?, longest })
}

/// Measures the processor time that the proxy takes for `changes` changes. They come as fast as the
/// API server takes them one by one. Each takes an endpoint from a Service, or gives it back.
pub(crate) fn processor_time(cluster: &Cluster, subject: &Subject, changes: usize) -> Result<Figures> {
    let [first, last] = cluster.moves_between()?.map(slice);
    let apply = |object: &Value| cluster.server.run(async |api| objects::apply(&api, object).await);
    apply(&first)?;
    wait_for(&cluster.client, MOVES_BETWEEN[0])?;
    // Each endpoint that is taken is given back.
    let changes = changes.next_multiple_of(2);
    let process = subject.process()?;
    let before = cpu::of_process(process)?;
    let start = Instant::now();
    cluster.server.run(async |api| {
        for index in 0..changes {
            objects::apply(&api, &changed(cluster.others(), index).unwrap_or_else(|| first.clone())).await?;
        }
        Ok(())
    })?;
    // Events of slices come in their order. A proxy that has followed this change has followed all
    // of them.
    apply(&last)?;
    wait_for(&cluster.client, MOVES_BETWEEN[1])?;
    let elapsed = start.elapsed().as_secs_f64();
    let seconds = cpu::of_process(process)? - before;
    let count = changes as f64;
    Ok(Figures::Changes { cpu_seconds_per_1000: seconds * 1e3 / count, per_second: count / elapsed })
}

/// Measures what the proxy does while nothing changes and no client dials.
pub(crate) fn at_rest(subject: &Subject, settings: &Settings) -> Result<Figures> {
    let watched = settings.seconds * REST;
    let process = subject.process()?;
    let before = cpu::of_process(process)?;
    thread::sleep(Duration::from_secs_f64(watched));
    let seconds = cpu::of_process(process)? - before;
    Ok(Figures::Rest { cpu_millis_per_minute: seconds * 1e3 * 60.0 / watched })
}

/// Returns the slice that the `index`-th change writes, or `None` if there are no other Services.
fn changed(others: &objects::Bulk, index: usize) -> Option<Value> {
    let mut slice = others.slice((index / 2).checked_rem(others.services)?);
    if index.is_multiple_of(2) {
        slice["endpoints"].as_array_mut()?.pop();
    }
    Some(slice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_other_change_gives_back_what_the_one_before_took() {
        let others = objects::Bulk::new("many", 2, 3);
        let endpoints = |index| {
            let slice = changed(&others, index).unwrap();
            (slice["metadata"]["name"].clone(), slice["endpoints"].as_array().unwrap().len())
        };
        let expected = [("s-0", 2), ("s-0", 3), ("s-1", 2), ("s-1", 3), ("s-0", 2)];
        assert_eq!([0, 1, 2, 3, 4].map(endpoints), expected.map(|(name, count)| (json!(name), count)));
        assert_eq!(changed(&objects::Bulk::new("many", 0, 3), 0), None);
    }
}
