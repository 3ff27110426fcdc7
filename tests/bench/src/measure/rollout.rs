//! Measures a Service with 1,000 endpoints whose pods are replaced one by one.

use std::{
    net::{IpAddr, Ipv4Addr},
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use control_plane::objects;
use kube::Client;
use serde_json::Value;

use super::change;
use crate::{
    cluster::{Cluster, PORT},
    results::Figures,
    subject::Subject,
};

const NAMESPACE: &str = "default";
const NAME: &str = "rolling";
const ENDPOINTS: usize = 1_000;
/// Number of slices, as many as kube-controller-manager would make.
const SLICES: usize = 10;
const PER_SECOND: u32 = 200;

/// Replaces `changes` endpoints at [`PER_SECOND`], then measures the delay of the change after
/// them.
pub(crate) fn followed(cluster: &Cluster, subject: &Subject, changes: usize) -> Result<Figures> {
    let run = |request| cluster.server.run(async |api| each(&api, request).await);
    run(Request::Create)?;
    let measured = replace(cluster, subject, changes);
    run(Request::Delete)?;
    measured
}

fn replace(cluster: &Cluster, subject: &Subject, changes: usize) -> Result<Figures> {
    change::moved(cluster, 0)?;
    let written = subject.written()?;
    let start = Instant::now();
    cluster.server.run(async |api| {
        for change in 0..changes {
            let due = start + Duration::from_secs(1) * u32::try_from(change)? / PER_SECOND;
            thread::sleep(due.saturating_duration_since(Instant::now()));
            let slice = slice(change % SLICES, change + 1);
            objects::send(&api, "PUT", &objects::path(&slice)?, Some("application/json"), &slice).await?;
        }
        anyhow::Ok(())
    })?;
    let elapsed = start.elapsed().as_secs_f64();
    let behind_millis = change::moved(cluster, 1)?;
    let writes = subject.written()?.zip(written).map(|(after, before)| (after - before) / changes as f64);
    Ok(Figures::Rollout { per_second: changes as f64 / elapsed, behind_millis, writes })
}

#[derive(Clone, Copy)]
enum Request {
    Create,
    Delete,
}

async fn each(api: &Client, request: Request) -> Result<()> {
    let service = objects::service(NAMESPACE, NAME, PORT);
    for object in std::iter::once(service).chain((0..SLICES).map(|index| slice(index, 0))) {
        match request {
            Request::Create => objects::create(api, &object).await?,
            Request::Delete => objects::delete(api, &object).await?,
        }
    }
    Ok(())
}

/// Returns one of the slices after this many changes of the Service.
fn slice(index: usize, changes: usize) -> Value {
    let endpoints = (index..ENDPOINTS).step_by(SLICES);
    let addresses: Vec<IpAddr> = endpoints.map(|endpoint| address(endpoint, changes).into()).collect();
    objects::endpoint_slice(NAMESPACE, &format!("{NAME}-{index}"), NAME, &addresses, 8080)
}

/// Returns the address of an endpoint. Each change gives the next endpoint an address that none has
/// had.
fn address(endpoint: usize, changes: usize) -> Ipv4Addr {
    let replaced = (changes + ENDPOINTS - 1 - endpoint) / ENDPOINTS;
    let number = (endpoint + replaced * ENDPOINTS) as u32;
    Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 120, 0, 0)) + number)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn addresses(index: usize, changes: usize) -> Vec<Value> {
        let slice = slice(index, changes);
        let endpoints = slice["endpoints"].as_array().unwrap();
        endpoints.iter().map(|endpoint| endpoint["addresses"][0].clone()).collect()
    }

    #[rstest]
    #[case::the_first_of_the_first_slice(0, 0)]
    #[case::the_first_of_the_second(1, 1)]
    #[case::the_last(999, 9)]
    #[case::the_first_again(1_000, 0)]
    fn a_change_replaces_one_endpoint_of_one_slice(#[case] change: usize, #[case] of: usize) {
        for index in 0..SLICES {
            let (before, after) = (addresses(index, change), addresses(index, change + 1));
            let changed = before.iter().zip(&after).filter(|(before, after)| before != after).count();
            assert_eq!(changed, usize::from(index == of), "slice {index}");
        }
    }
}
