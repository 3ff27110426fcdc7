//! Measures rates, latencies and processor time of connections between a client and servers in the
//! lab.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use lab::{
    Agent,
    agent::protocol::{Bench, Exercise, Side},
    wait,
};

use super::cpu;
use crate::{
    cluster::Cluster,
    plan::{Measure, Route},
    results::{Figures, Rate, Settings},
    statistics::Spread,
};

/// Number of rounds in which processor time is measured.
const ROUNDS: u32 = 3;
/// Share of failed requests above which a figure means nothing.
const MOST_FAILURES: f64 = 0.001;

/// Measures direct connections and those through the proxy, in turn.
pub(crate) fn rates(
    cluster: &Cluster,
    settings: &Settings,
    measure: Measure,
    route: Route,
) -> Result<Figures> {
    let (exercise, clients) = match measure {
        Measure::Connect => (Exercise::Connect, settings.clients),
        Measure::Request => (Exercise::Request, settings.clients),
        Measure::Datagram => (Exercise::Datagram, settings.clients),
        // The lab has two cores: one sends and one receives.
        Measure::Bulk => (Exercise::Bulk, 1),
        Measure::Start
        | Measure::FirstSync
        | Measure::Cpu
        | Measure::Flood
        | Measure::Forward
        | Measure::Change
        | Measure::ChangesCpu
        | Measure::Rest
        | Measure::Memory
        | Measure::MapMemory
        | Measure::Rollout
        | Measure::Restart
        | Measure::CleanUp => bail!("{measure} is no exercise"),
    };
    let targets = cluster.targets(route, exercise == Exercise::Bulk)?;
    let bench = Bench {
        exercise,
        sides: vec![targets.direct, vec![targets.service]],
        clients,
        seconds: settings.seconds,
        turn_ms: settings.turn_ms,
        pace: None,
    };
    let agent = cluster.dialler(route);
    warm_up(agent, &bench)?;
    let sides = agent.bench(&bench)?;
    let [direct, service] = sides.as_slice() else { bail!("{} sides", sides.len()) };
    let ratio = Spread::of_ratios(&direct.per_second, &service.per_second).context("no turn was answered")?;
    Ok(Figures::Rates { direct: rate(direct, "direct")?, service: rate(service, "the service")?, ratio })
}

/// Makes requests until everything is answered once. Some things are slow only the first time:
/// neighbours are looked up, and a SYN is sent again after a second.
fn warm_up(agent: &Agent, bench: &Bench) -> Result<()> {
    let short = Bench { seconds: 0.0, ..bench.clone() };
    wait::until("an answer of all that is dialled", Duration::from_secs(60), || {
        let sides = agent.bench(&short).map_err(|error| format!("{error:#}"))?;
        let failure = sides.iter().find_map(|side| side.failure.clone());
        let is_warm = sides.iter().all(|side| !side.per_second.is_empty())
            && sides.iter().flat_map(|side| &side.per_second).all(|rate| *rate > 0.0);
        match failure {
            Some(failure) => Err(failure),
            None => Ok(is_warm.then_some(())),
        }
    })
}

fn rate(side: &Side, name: &str) -> Result<Rate> {
    let all = side.answered + side.failed;
    let failure = side.failure.as_deref().unwrap_or("no reason");
    ensure!(
        side.answered > 0 && side.failed as f64 <= all as f64 * MOST_FAILURES,
        "{} of {all} requests to {name} failed: {failure}",
        side.failed
    );
    let per_second = Spread::of(side.per_second.iter().copied()).context("no turns")?;
    Ok(Rate { per_second, p50_micros: side.p50_micros, p99_micros: side.p99_micros })
}

/// Returns true if the Service of this route is served.
pub(crate) fn is_served(cluster: &Cluster, route: Route) -> Result<bool> {
    let bench = Bench {
        exercise: Exercise::Connect,
        sides: vec![vec![cluster.targets(route, false)?.service]],
        clients: 1,
        seconds: 0.0,
        turn_ms: 1,
        pace: None,
    };
    let sides = cluster.dialler(route).bench(&bench)?;
    Ok(sides.iter().all(|side| side.answered > 0))
}

/// Measures the processor time of connections. All contenders have the same pace, so that the
/// machine has idle time left to be measured.
pub(crate) fn processor_time(
    cluster: &Cluster,
    settings: &Settings,
    route: Route,
    is_direct: bool,
) -> Result<Figures> {
    let targets = cluster.targets(route, false)?;
    let side: Vec<SocketAddr> = if is_direct { targets.direct } else { vec![targets.service] };
    let seconds = settings.seconds / f64::from(ROUNDS);
    let bench = Bench {
        exercise: Exercise::Connect,
        sides: vec![side],
        clients: settings.clients,
        seconds,
        turn_ms: settings.turn_ms,
        pace: Some(settings.pace),
    };
    let agent = cluster.dialler(route);
    warm_up(agent, &bench)?;
    let (mut micros, mut busy_at_rest) = (Vec::new(), 0.0_f64);
    for _ in 0..ROUNDS {
        let load = cpu::of_load(Duration::from_secs_f64(seconds / 2.0), || agent.bench(&bench))?;
        let side = load.done.first().context("no side")?;
        rate(side, "it")?;
        micros.push(load.seconds * 1e6 / side.answered as f64);
        busy_at_rest = busy_at_rest.max(load.busy_at_rest);
    }
    Ok(Figures::Cpu { micros: Spread::of(micros).context("no rounds")?, busy_at_rest })
}
