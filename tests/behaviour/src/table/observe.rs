//! Publishes the services of scenarios, dials as their rows say, and reports what was found.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::{Mutex, PoisonError},
    thread,
};

use anyhow::{Result, anyhow};
use lab::{
    Agent, Dial, Outcome, Protocol,
    address::{self, Addresses, FAMILIES, Family, cluster_ip},
    cluster::{NODES, SERVER_PORT},
    objects::{Endpoint, Ingress, Service},
};

use super::{
    Client, Configuration, Destination, EndpointRow, Expected, Found, Row, SCENARIOS, Scenario, Source, names,
};
use crate::{case::Variant, fixtures::PORT, setting::Datapath, world::World};

/// Port that no service has.
const UNDEFINED_PORT: u16 = 81;
/// Default of Kubernetes for the time of affinity.
const THREE_HOURS: u32 = 10_800;

/// Addresses and ports of the `index`-th scenario alone. Conntrack knows an earlier datagram by its
/// addresses.
struct ScenarioAddresses {
    index: u8,
}

impl ScenarioAddresses {
    fn cluster_ips(&self) -> Addresses {
        cluster_ip(100 + u16::from(self.index))
    }

    /// Returns a node port of the first 86 of the range. The API server gives others to services
    /// that ask for no number, such as for health checks.
    fn node_port(&self) -> u16 {
        30_000 + u16::from(self.index)
    }

    fn load_balancer(&self, node: u8) -> Addresses {
        address::external(node, 1 + self.index)
    }

    fn external_ip(&self, node: u8) -> Addresses {
        address::external(node, 128 + self.index)
    }

    fn target(&self, destination: Destination, family: Family) -> SocketAddr {
        let (address, port) = match destination {
            Destination::ClusterIp => (self.cluster_ips().of(family), PORT),
            Destination::UndefinedPort => (self.cluster_ips().of(family), UNDEFINED_PORT),
            Destination::NodePort(node) => (address::node(node).of(family), self.node_port()),
            Destination::NodePortOnBridge => (address::pod(2, 1).of(family), self.node_port()),
            Destination::NodePortOnLoopback => (family.loopback(), self.node_port()),
            Destination::LoadBalancer(node) => (self.load_balancer(node).of(family), PORT),
            Destination::ExternalIp(node) => (self.external_ip(node).of(family), PORT),
        };
        SocketAddr::new(address, port)
    }
}

/// Has only the services of this configuration's scenarios served.
pub fn publish(world: &mut World, configuration: Configuration) -> Result<()> {
    // The proxies are configured first. The real kube-proxy does not wait for its node's zone
    // before it writes its first rules, but it knows the zone for objects that come later.
    world.configure(configuration.fields())?;
    for name in world.objects.services() {
        world.objects.remove_service(&name);
    }
    for (_, addresses, scenario) in scenarios_of(configuration) {
        let service = service(&addresses, scenario);
        let endpoints = scenario.endpoints.iter().map(|endpoint| of_pod(world, endpoint));
        let endpoints = endpoints.collect::<Result<Vec<_>>>()?;
        world.objects.set_service(&service, &endpoints);
    }
    world.settle()
}

/// Returns the configuration's scenarios, each with its number in [`SCENARIOS`].
fn scenarios_of(
    configuration: Configuration,
) -> impl Iterator<Item = (usize, ScenarioAddresses, &'static Scenario)> {
    let numbered = (0..).zip((0..).map(|index| ScenarioAddresses { index })).zip(SCENARIOS);
    numbered
        .map(|((number, addresses), scenario)| (number, addresses, scenario))
        .filter(move |(_, _, scenario)| scenario.configuration == configuration)
}

fn service(addresses: &ScenarioAddresses, scenario: &Scenario) -> Service {
    let asks = &scenario.asks;
    let name = format!("scenario-{}", addresses.index);
    let both =
        |of: &dyn Fn(u8) -> Addresses| NODES.into_iter().flat_map(|node| of(node).both()).collect::<Vec<_>>();
    let load_balancer = both(&|node| addresses.load_balancer(node));
    let ingress = load_balancer.into_iter().map(|address| Ingress { address, proxied: asks.proxied });
    Service {
        internal_local: asks.internal_local,
        external_local: asks.external_local,
        affinity_seconds: asks.affinity.then_some(THREE_HOURS),
        external_ips: both(&|node| addresses.external_ip(node)),
        load_balancer: ingress.collect(),
        source_ranges: asks.source_ranges.iter().map(|range| (*range).to_owned()).collect(),
        ..Service::new(&name, addresses.cluster_ips(), PORT, SERVER_PORT, Some(addresses.node_port()))
    }
}

fn of_pod(world: &World, endpoint: &EndpointRow) -> Result<Endpoint> {
    let EndpointRow { pod, state, zones, nodes } = *endpoint;
    let pod = world.lab.netns(pod)?;
    Ok(Endpoint {
        addresses: pod.addresses,
        node: pod.node.unwrap_or_default(),
        state,
        zones,
        nodes,
        weight: None,
    })
}

/// Outcome of a row's connections. It is that of the first variant that is not as expected, or of
/// the last one.
pub type Observed = (Variant, Found);

/// Number of the scenario, and of the row in it.
pub type RowNumber = (usize, usize);

/// Dials all rows of the configuration's scenarios, all clients at once where that changes nothing.
pub fn observe(
    world: &World,
    configuration: Configuration,
    variants: &[Variant],
) -> Result<BTreeMap<RowNumber, Observed>> {
    let mut jobs: BTreeMap<Client, Vec<Job<'_>>> = BTreeMap::new();
    for (number, addresses, scenario) in scenarios_of(configuration) {
        for (row_number, row) in scenario.rows.iter().enumerate() {
            let expected = row.expected(world.setting.datapath());
            for variant in
                variants.iter().filter(|variant| row.family.is_none_or(|family| family == variant.family))
            {
                let target = addresses.target(row.destination, variant.family);
                let job = Job { at: (number, row_number), row, expected, variant: *variant, target };
                jobs.entry(row.client).or_default().push(job);
            }
        }
    }
    let datapath = world.setting.datapath();
    // If two clients dial at the same time, each may get every second turn, which is always the
    // same endpoint's.
    let turn = Mutex::new(());
    let observed = by_client(world, jobs, |agent, own, jobs| {
        // These connections are dialled at the same time. Most end only a second later, and none
        // takes a turn or chooses an endpoint.
        let (silent, others): (Vec<Job<'_>>, Vec<Job<'_>>) =
            jobs.into_iter().partition(|job| matches!(job.expected, Expected::Refused | Expected::Dropped));
        let dials = silent.iter().map(|job| vec![job.dial(datapath)]).collect();
        let first = agent.dial_groups(dials)?.into_iter().map(|group| group.concat());
        let told = |job: &Job<'_>, outcomes| {
            Ok((job.at, job.expected, (job.variant, found(agent, own, datapath, job, outcomes)?)))
        };
        let silent = silent.iter().zip(first).map(|(job, outcomes)| told(job, outcomes));
        let others = others.iter().map(|job| {
            let _turn = datapath.takes_turns().then(|| turn.lock().unwrap_or_else(PoisonError::into_inner));
            told(job, agent.dial(&job.dial(datapath))?)
        });
        silent.chain(others).collect()
    });
    let mut results: BTreeMap<RowNumber, Observed> = BTreeMap::new();
    for (at, expected, result) in observed? {
        let is_worse = results.get(&at).is_none_or(|(_, earlier)| expected.is(earlier));
        if is_worse {
            results.insert(at, result);
        }
    }
    Ok(results)
}

struct Job<'a> {
    at: RowNumber,
    row: &'a Row,
    expected: Expected,
    variant: Variant,
    target: SocketAddr,
}

/// Does the work of all clients at the same time.
pub(crate) fn by_client<J: Send, D: Send>(
    world: &World,
    jobs: BTreeMap<Client, Vec<J>>,
    work: impl Fn(&Agent, Addresses, Vec<J>) -> Result<Vec<D>> + Sync,
) -> Result<Vec<D>> {
    let mut clients = Vec::new();
    for (client, jobs) in jobs {
        let name = client.agent();
        clients.push((world.agent(&name)?, world.addresses(&name)?, jobs));
    }
    let work = &work;
    thread::scope(|scope| {
        let start = |(agent, own, jobs)| scope.spawn(move || work(agent, own, jobs));
        let threads: Vec<_> = clients.into_iter().map(start).collect();
        let mut all = Vec::new();
        for thread in threads {
            all.extend(thread.join().map_err(|_| anyhow!("a client's thread panicked"))??);
        }
        Ok(all)
    })
}

impl Job<'_> {
    /// Returns a dial of one connection of the row.
    fn dial(&self, datapath: Datapath) -> Dial {
        let silence_ms = match (self.expected, self.variant.protocol) {
            // A connection that netfilter refuses by ICMP is refused only after the second SYN, 1 s
            // later.
            (Expected::Dropped, Protocol::Tcp | Protocol::Sctp) if datapath.is_netfilter() => 1_600,
            (Expected::Dropped, _) => 300,
            (Expected::Answered(..) | Expected::Sticks(..) | Expected::Refused, _) => 4_000,
        };
        Dial::new(self.variant.protocol, self.target).timeout_ms(silence_ms)
    }
}

/// Returns the outcome of a row whose first connection had these outcomes. If it was answered, as
/// many more connections follow as show whom else the row reaches.
fn found(
    agent: &Agent,
    own: Addresses,
    datapath: Datapath,
    job: &Job,
    mut outcomes: Vec<Outcome>,
) -> Result<Found> {
    if let [Outcome::Answered(_)] = outcomes.as_slice() {
        outcomes.extend(agent.dial(&job.dial(datapath).times(job.expected.connections() - 1))?);
    }
    Ok(told(&outcomes, own, job.row.client))
}

/// Returns the outcome of one kind of connection, from a client with these addresses.
pub(crate) fn told(outcomes: &[Outcome], own: Addresses, client: Client) -> Found {
    let mut by = BTreeSet::new();
    for outcome in outcomes {
        match outcome {
            Outcome::Answered(answer) => {
                let is_node = NODES.into_iter().any(|node| {
                    address::node(node).contains(answer.source.ip())
                        || address::pod(node, 1).contains(answer.source.ip())
                });
                let source = match (is_node, own.contains(answer.source.ip())) {
                    (true, _) => Source::Node,
                    (false, true) => Source::Client,
                    (false, false) => return Found::Other(format!("{} saw {}", answer.by, answer.source)),
                };
                by.insert((answer.by.clone(), source));
            }
            Outcome::Refused { .. } if by.is_empty() => return Found::Refused,
            Outcome::TimedOut | Outcome::Unreachable if by.is_empty() => return Found::Dropped,
            Outcome::NotPermitted if by.is_empty() && matches!(client, Client::Node(_)) => {
                return Found::NotPermitted;
            }
            Outcome::Refused { .. }
            | Outcome::TimedOut
            | Outcome::Unreachable
            | Outcome::NotPermitted
            | Outcome::Failed(_) => {
                let before = Vec::from_iter(names(&by)).join("+");
                return Found::Other(format!("{outcome} after answers by {before}"));
            }
        }
    }
    Found::Answered(by)
}

/// Returns all protocols and families, or one family of each protocol.
pub fn variants(lean: bool) -> Vec<Variant> {
    if lean {
        return vec![
            Variant { protocol: Protocol::Tcp, family: Family::V4 },
            Variant { protocol: Protocol::Udp, family: Family::V6 },
        ];
    }
    let protocols = [Protocol::Tcp, Protocol::Udp];
    let of = |protocol| FAMILIES.map(|family| Variant { protocol, family });
    protocols.into_iter().flat_map(of).collect()
}
