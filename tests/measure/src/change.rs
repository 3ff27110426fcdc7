//! The Service that is dialled, and its endpoint that moves from one pod to the other and back.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use control_plane::objects;
use lab::{Agent, Dial, Outcome, Protocol, address::cluster_ip, cluster::SERVER_PORT};
use serde_json::{Value, json};

const SERVERS: [&str; 2] = ["server-a", "server-b"];
const NAMESPACE: &str = "default";
const NAME: &str = "measured";
const PORT: u16 = 80;
/// More than kube-proxy's default `minSyncPeriod` of one second, which would else be what is measured.
const BETWEEN_ROUNDS: Duration = Duration::from_millis(1500);
const LIMIT: Duration = Duration::from_secs(600);

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

/// A SYN that nobody answers is not waited for longer than this: what is measured is no multiple of it.
const ANSWER_MS: u64 = 10;

fn dial(client: &Agent) -> Result<Option<Outcome>> {
    Ok(client.dial(&Dial::new(Protocol::Tcp, target()).timeout_ms(ANSWER_MS))?.pop())
}

pub(crate) fn is_served(client: &Agent) -> Result<bool> {
    Ok(matches!(dial(client)?, Some(Outcome::Answered(_))))
}

/// Dials until somebody answers; `false`: nobody did within the limit.
pub(crate) fn wait_for_any(client: &Agent, limit: Duration) -> Result<bool> {
    let start = Instant::now();
    while !is_served(client)? {
        if start.elapsed() > limit {
            return Ok(false);
        }
    }
    Ok(true)
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

/// Moves the endpoint `rounds` times; returns how long each move took to be followed, in ascending order.
pub(crate) async fn measure(
    api: &kube::Client,
    client: &Agent,
    addresses: [Ipv4Addr; 2],
    rounds: usize,
) -> Result<Vec<Duration>> {
    let mut times = Vec::with_capacity(rounds);
    for round in 1..=rounds {
        thread::sleep(BETWEEN_ROUNDS);
        let to = round % 2;
        objects::apply(api, &slice(addresses[to])).await?;
        let acknowledged = Instant::now();
        wait_for(client, SERVERS[to])?;
        times.push(acknowledged.elapsed());
    }
    times.sort_unstable();
    Ok(times)
}
