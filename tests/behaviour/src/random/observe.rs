//! Has one random cluster after another served in one lab, and dials its probes.

use std::{collections::BTreeMap, fmt};

use anyhow::{Context as _, Result};
use lab::{
    Agent, Dial, Outcome, Protocol,
    address::Addresses,
    cluster::{NODES, node_name},
    objects::Objects,
};

use super::{
    cluster::{Cluster, Probe, Service, Spec},
    expected::{Expected, expected, scenario, second_server},
    round::{Round, SECOND_PORT},
};
use crate::{
    fixtures::PODS,
    setting::Setting,
    table::{Client, Found, by_client, told},
    world::World,
};

/// Number of connections of a probe that one of several endpoints ought to answer. One endpoint too
/// many among four is overlooked with a chance of 3 %.
const AT_FIRST: u32 = 12;
const BY_ONE: u32 = 3;

/// Lab with one proxy.
pub struct Runner {
    pub world: World,
    round: u32,
}

/// Outcome of a probe.
#[derive(Clone, Debug)]
pub struct Seen {
    pub scenario: String,
    pub probe: Probe,
    pub expected: Expected,
    pub found: Found,
    /// Differences in the words of docs/differences.md.
    pub differences: Vec<String>,
}

impl fmt::Display for Seen {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Probe { client, destination, port, family } = self.probe;
        write!(
            formatter,
            "{}: {client} to {destination}, port {} {family}: expected {}, found {}",
            self.scenario,
            port.name(),
            self.expected,
            self.found
        )
    }
}

struct Job {
    service: usize,
    is_affine: bool,
    seen: Seen,
    dial: Dial,
    outcomes: Vec<Outcome>,
}

impl Runner {
    pub fn start(setting: Setting) -> Result<Self> {
        let world = World::with_services(setting, setting.proxy.is_kube_proxy(), |_, _| Ok(()))?;
        for pod in &PODS {
            let addresses = world.addresses(pod.name)?.with_port(SECOND_PORT);
            world.agent(pod.name)?.serve_as(&second_server(pod.name), &addresses)?;
        }
        Ok(Self { world, round: 0 })
    }

    /// Has the cluster served instead of the one before, first as it was before its changes. Then
    /// dials its probes.
    pub fn run(&mut self, cluster: &Cluster) -> Result<Vec<Seen>> {
        self.round += 1;
        let round = Round { number: self.round };
        let zones = NODES.into_iter().zip(cluster.zones);
        let change = |(node, zone)| self.world.objects.set_zone(&node_name(node), zone);
        let is_new_zone = zones.map(change).fold(false, |any, changed| any | changed);
        if is_new_zone && self.world.setting.proxy.is_kube_proxy() {
            // Proxies watch an API server's nodes on their own. So a service that is served does
            // not show that a proxy has read of the nodes. A folder of manifests is read as a
            // whole.
            self.world.objects.clear_services();
            self.world.settle()?;
        }
        if cluster.services().any(|(_, service)| service.before.is_some()) {
            self.publish(cluster, round, |service| service.before.as_ref())?;
        }
        self.publish(cluster, round, |service| Some(&service.now))?;
        self.dial(cluster, round)
    }

    /// Returns the objects of the cluster that ran last, as a folder of manifests has them, before
    /// and after its changes.
    pub fn manifests(&self, cluster: &Cluster) -> Result<String> {
        let round = Round { number: self.round };
        let mut objects = self.world.objects.clone();
        round.write(&self.world.lab, &mut objects, cluster, |service| service.before.as_ref())?;
        let before = text_of(&objects)?;
        round.write(&self.world.lab, &mut objects, cluster, |service| Some(&service.now))?;
        Ok(format!("# at first\n{before}# then\n{}", text_of(&objects)?))
    }

    fn publish<'a>(
        &mut self,
        cluster: &'a Cluster,
        round: Round,
        spec: impl Fn(&'a Service) -> Option<&'a Spec>,
    ) -> Result<()> {
        round.write(&self.world.lab, &mut self.world.objects, cluster, spec)?;
        self.world.settle().context("waiting for the proxies to serve a random cluster")
    }

    fn dial(&self, cluster: &Cluster, round: Round) -> Result<Vec<Seen>> {
        let mut jobs: BTreeMap<Client, Vec<Job>> = BTreeMap::new();
        for (number, service) in cluster.services() {
            for probe in &service.probes {
                let Some(job) = self.job(cluster, number, service, *probe, round) else { continue };
                jobs.entry(probe.client).or_default().push(job);
            }
        }
        by_client(&self.world, jobs, carry_out)
    }

    fn job(
        &self,
        cluster: &Cluster,
        number: usize,
        service: &Service,
        probe: Probe,
        round: Round,
    ) -> Option<Job> {
        let expected = expected(cluster, service, &probe, self.world.setting.datapath())?;
        let protocol = probe.port.protocol();
        let silence_ms = match (&expected, protocol) {
            // A connection that netfilter refuses by ICMP is refused only after the second SYN, 1 s
            // later.
            (Expected::Dropped, Protocol::Tcp | Protocol::Sctp)
                if self.world.setting.datapath().is_netfilter() =>
            {
                1_600
            }
            (Expected::Dropped, _) => 500,
            (Expected::Refused | Expected::Answered { .. }, _) => 4_000,
        };
        Some(Job {
            service: number,
            is_affine: service.now.affinity,
            dial: Dial::new(protocol, round.target(number, &probe)).timeout_ms(silence_ms),
            outcomes: Vec::new(),
            seen: Seen {
                scenario: scenario(cluster, service, &probe),
                probe,
                expected,
                found: Found::Dropped,
                differences: Vec::new(),
            },
        })
    }
}

/// Dials all probes at the same time, except those that share affinity. The first of these chooses
/// the endpoint for the others.
fn carry_out(agent: &Agent, own: Addresses, jobs: Vec<Job>) -> Result<Vec<Seen>> {
    let mut groups: Vec<Vec<Job>> = Vec::new();
    for job in jobs {
        let shares = |group: &&mut Vec<Job>| {
            let (probe, service) = (job.seen.probe, job.service);
            let key = |other: &Job| (other.service, other.seen.probe.port, other.seen.probe.family);
            group.iter().any(|other| job.is_affine && key(other) == (service, probe.port, probe.family))
        };
        match groups.iter_mut().find(shares) {
            Some(group) => group.push(job),
            None => groups.push(vec![job]),
        }
    }
    dial(agent, &mut groups, |job| match &job.seen.expected {
        Expected::Answered { by, .. } if by.len() > 1 => AT_FIRST,
        Expected::Answered { .. } | Expected::Refused | Expected::Dropped => BY_ONE,
    })?;
    // Only probes that some endpoint has not answered get more connections.
    dial(agent, &mut groups, |job| {
        let met = job.outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Answered(_))).count();
        let is_whole = job.seen.expected.differences(&told(&job.outcomes, own, job.seen.probe.client));
        match met == job.outcomes.len() && !is_whole.is_empty() {
            true => job.seen.expected.connections().saturating_sub(AT_FIRST),
            false => 0,
        }
    })?;
    let judged = groups.into_iter().flatten().map(|Job { mut seen, outcomes, .. }| {
        seen.found = told(&outcomes, own, seen.probe.client);
        let Probe { client, destination, .. } = seen.probe;
        let differences = seen.expected.differences(&seen.found);
        let in_words = |difference| format!("{}: {client} to {destination}: {difference}", seen.scenario);
        seen.differences = differences.into_iter().map(in_words).collect();
        seen
    });
    Ok(judged.collect())
}

/// Makes as many more connections of each probe as `count` says.
fn dial(agent: &Agent, groups: &mut [Vec<Job>], count: impl Fn(&Job) -> u32) -> Result<()> {
    let dials = |group: &Vec<Job>| group.iter().map(|job| job.dial.clone().times(count(job))).collect();
    let outcomes = agent.dial_groups(groups.iter().map(dials).collect())?;
    for (job, outcomes) in groups.iter_mut().flatten().zip(outcomes.into_iter().flatten()) {
        job.outcomes.extend(outcomes);
    }
    Ok(())
}

fn text_of(objects: &Objects) -> Result<String> {
    objects.iter().try_fold(String::new(), |text, (_, object)| {
        Ok(format!("{text}---\n{}\n", serde_json::to_string(object)?))
    })
}
