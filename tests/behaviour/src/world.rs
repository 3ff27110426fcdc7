//! A lab with a proxy on each node, and with every fixture.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, anyhow, ensure};
use lab::{
    Agent, Answer, Dial, Lab, Objects, Outcome, Protocol,
    address::{self, Addresses, FAMILIES, Family, NodeNumber, cluster_ip},
    cluster::{NODES, OUTSIDE, PodProcesses, SECOND_OUTSIDE, SERVER_PORT, network::Network, node_name},
    objects::{Endpoint, Service, State},
    wait,
};

use serde_json::{Map, Value};

use crate::{
    check,
    fixtures::{FIRST_NEWCOMER_INDEX, PODS, PORT, SENTINEL_INDEX, SERVICES, ServiceFixture},
    proxy::{Feed, METRICS, Proxy},
    setting::{Datapath, PathKind, ProxyKind, Setting},
};

/// Time within which a proxy must follow a change, even kube-proxy on a busy machine.
const SETTLES_WITHIN: Duration = Duration::from_secs(60);
/// Milliseconds after which a process of the node checks again whether it is served. A check takes
/// as long if packets to a port that is not served yet are lost.
const BETWEEN_LOOKS_MS: u64 = 50;
/// Milliseconds that a request of [`World::answers`] may always take. A scenario may wait for less,
/// to see that nobody answers. A machine that is busy may delay an answer for longer.
const ANSWERS_WITHIN_MS: u64 = 10_000;

/// Version of the sentinel at rest. No world gets as far by counting.
const AT_REST: u16 = 20_000;

pub struct World {
    pub setting: Setting,
    /// Fields that are merged over the configuration that every lab needs.
    fields: Value,
    pub objects: Objects,
    agents: BTreeMap<String, Agent>,
    proxies: Vec<Proxy>,
    feed: Feed,
    sentinel: u16,
    late_pods: u32,
    networks: Vec<Network>,
    pub lab: Lab,
}

/// Returns the same dial, whose answers may be as late as a busy machine makes them.
fn patient(dial: &Dial) -> Dial {
    dial.clone().timeout_ms(dial.timeout_ms.max(ANSWERS_WITHIN_MS))
}

impl World {
    /// Builds the lab, starts the proxies and waits until they serve every fixture.
    pub fn new(setting: Setting) -> Result<Self> {
        Self::with_services(setting, setting.proxy.is_kube_proxy(), |lab, objects| {
            SERVICES.iter().try_for_each(|service| service.publish(lab, objects, service.endpoints))
        })
    }

    /// Does what [`World::new`] does with services of the caller's choice, from a folder of
    /// manifests or an API server.
    pub fn with_services(
        setting: Setting,
        api_server: bool,
        publish: impl FnOnce(&Lab, &mut Objects) -> Result<()>,
    ) -> Result<Self> {
        let mut lab = Lab::new()?;
        if setting.uses_xdp() {
            lab.equip_with_cards()?;
        }
        for pod in &PODS {
            lab.add_pod(pod.node, pod.name, pod.processes(setting.path == PathKind::Unseen))?;
        }
        let mut agents = BTreeMap::new();
        let hosts = NODES.map(node_name);
        let names = PODS.iter().map(|pod| pod.name).chain(hosts.iter().map(String::as_str)).chain([OUTSIDE]);
        for name in names {
            agents.insert(name.to_owned(), lab.server(name)?);
        }
        let mut objects = Objects::default();
        for node in NODES {
            let pod_ranges = [format!("10.244.{node}.0/24"), format!("fd00:10:244:{node}::/64")];
            objects.set_node(&node_name(node), address::node(node), pod_ranges);
        }
        publish(&lab, &mut objects)?;
        let feed = if api_server { Feed::api_server(&lab)? } else { Feed::manifests(&lab)? };
        let fields = Value::Object(Map::new());
        let proxies = NODES.map(|node| Proxy::new(&lab, setting, &fields, &feed, node));
        let proxies = proxies.into_iter().collect::<Result<_>>()?;
        let mut world = Self {
            setting,
            fields,
            objects,
            agents,
            proxies,
            feed,
            sentinel: 0,
            late_pods: 0,
            networks: Vec::new(),
            lab,
        };
        world.publish()?;
        for proxy in &mut world.proxies {
            proxy.start(&world.lab)?;
        }
        world.settled().context("waiting for the proxies to serve the first objects")?;
        Ok(world)
    }

    pub fn agent(&self, name: &str) -> Result<&Agent> {
        self.agents.get(name).ok_or_else(|| anyhow!("no agent {name}"))
    }

    pub fn addresses(&self, name: &str) -> Result<Addresses> {
        Ok(self.lab.netns(name)?.addresses)
    }

    /// Returns true if the node itself may have the address as a source.
    pub fn is_node_address(&self, node: NodeNumber, address: std::net::IpAddr) -> bool {
        let mut others = self.networks.iter().map(|network| network.node(node));
        address::node(node).contains(address)
            || address::pod(node, 1).contains(address)
            || others.any(|addresses| addresses.contains(address))
    }

    pub fn dial(&self, from: &str, dial: &Dial) -> Result<Vec<Outcome>> {
        self.agent(from)?.dial(dial)
    }

    /// Dials, and expects every request to be answered by one of these servers, and each of them to
    /// answer. A shorter limit of the dial does not apply, because the scenario expects the
    /// answers.
    pub fn answers(&self, from: &str, dial: &Dial, by: &[&str]) -> Result<Vec<Answer>> {
        let loses_datagrams = self.setting.datapath() == Datapath::Ipvs && dial.protocol == Protocol::Udp;
        let dial = if loses_datagrams { dial.clone() } else { patient(dial) };
        let mut outcomes = self.dial(from, &dial)?;
        if loses_datagrams {
            self.ask_again(from, &dial, &mut outcomes)?;
        }
        check::answered_by(&outcomes, by).with_context(|| format!("from {from} to {}", dial.target))
    }

    /// Dials, and expects every request to be answered, whoever answers. A shorter limit of the
    /// dial does not apply.
    pub fn answered(&self, from: &str, dial: &Dial) -> Result<Vec<Answer>> {
        check::answered(&self.dial(from, &patient(dial))?)
    }

    /// Sends one of a hundred datagrams that had no answer again, from another port. IPVS confuses
    /// flows of one client port to the same endpoint by two addresses. See docs/differences.md.
    fn ask_again(&self, from: &str, dial: &Dial, outcomes: &mut [Outcome]) -> Result<()> {
        let most = outcomes.len().div_ceil(100);
        let silent = outcomes.iter_mut().filter(|outcome| **outcome == Outcome::TimedOut);
        for outcome in silent.take(most) {
            let again = self.dial(from, &dial.clone().times(1))?;
            *outcome = again.into_iter().next().context("no outcome")?;
        }
        Ok(())
    }

    /// Dials until every request is answered.
    pub fn until_answered(&self, from: &str, dial: &Dial, limit: Duration) -> Result<()> {
        wait::until(&format!("{from} is answered by {}", dial.target), limit, || {
            let outcomes = self.dial(from, dial).map_err(|error| error.to_string())?;
            check::answered(&outcomes).map(|_| Some(())).map_err(|error| error.to_string())
        })
    }

    pub fn proxy(&mut self, node: NodeNumber) -> Result<&mut Proxy> {
        self.proxies.iter_mut().find(|proxy| proxy.node == node).ok_or_else(|| anyhow!("no node {node}"))
    }

    /// Kills a node's proxy (SIGKILL) and starts it again. Does not wait until it serves.
    pub fn restart(&mut self, node: NodeNumber) -> Result<()> {
        self.kill(node)?;
        self.start(node)
    }

    /// Starts new proxies beside those that run, and returns the former ones.
    pub fn swap(&mut self, setting: Setting) -> Result<Vec<Proxy>> {
        let next = NODES.map(|node| Proxy::new(&self.lab, setting, &self.fields, &self.feed, node));
        let next = next.into_iter().collect::<Result<Vec<_>>>()?;
        let former = std::mem::replace(&mut self.proxies, next);
        self.setting = setting;
        self.proxies.iter_mut().try_for_each(|proxy| proxy.start(&self.lab))?;
        Ok(former)
    }

    /// Merges these fields over the configuration that every lab needs. If they differ from the
    /// former fields, the proxies are killed and started again.
    pub fn configure(&mut self, fields: Value) -> Result<()> {
        if self.fields == fields {
            return Ok(());
        }
        self.fields = fields;
        self.proxies.iter_mut().try_for_each(Proxy::kill)?;
        self.swap(self.setting)?;
        self.settle()
    }

    /// Merges fields as [`configure`](Self::configure) does, but the running proxies follow their
    /// files.
    pub fn reconfigure(&mut self, fields: Value) -> Result<()> {
        self.fields = fields;
        self.switch(self.setting)
    }

    /// Writes the configuration of this setting for the running proxies.
    pub fn switch(&mut self, setting: Setting) -> Result<()> {
        self.setting = setting;
        let (lab, fields, feed) = (&self.lab, &self.fields, &self.feed);
        self.proxies.iter_mut().try_for_each(|proxy| proxy.configure(lab, setting, fields, feed))
    }

    pub fn kill(&mut self, node: NodeNumber) -> Result<()> {
        self.proxy(node)?.kill()
    }

    /// Kills the proxy of every node, and starts them again after `meanwhile`, even if that fails.
    /// Returns the result of `meanwhile`.
    pub fn while_dead<T>(&mut self, meanwhile: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        NODES.into_iter().try_for_each(|node| self.kill(node))?;
        let found = meanwhile(self);
        NODES.into_iter().try_for_each(|node| self.start(node))?;
        self.settle()?;
        found
    }

    pub fn start(&mut self, node: NodeNumber) -> Result<()> {
        let lab = &self.lab;
        let proxy = self.proxies.iter_mut().find(|proxy| proxy.node == node);
        proxy.ok_or_else(|| anyhow!("no node {node}"))?.start(lab)
    }

    /// Gives a service other endpoints, and waits until every node has followed.
    pub fn set_endpoints(&mut self, service: &ServiceFixture, endpoints: &[&str]) -> Result<()> {
        service.publish(&self.lab, &mut self.objects, endpoints)?;
        self.settle()
    }

    /// Returns pods as endpoints in these states.
    pub fn endpoints(&self, pods: &[(&str, State)]) -> Result<Vec<Endpoint>> {
        let endpoint = |(name, state): &(&str, State)| {
            let pod = self.lab.netns(name)?;
            Ok(Endpoint { state: *state, ..Endpoint::ready(pod.addresses, pod.node.unwrap_or_default()) })
        };
        pods.iter().map(endpoint).collect()
    }

    /// Writes a service with ready pods as its endpoints, and waits until every node has followed.
    pub fn set_service(&mut self, service: &Service, pods: &[&str]) -> Result<()> {
        let pods: Vec<(&str, State)> = pods.iter().map(|pod| (*pod, State::Ready)).collect();
        self.objects.set_service(service, &self.endpoints(&pods)?);
        self.settle()
    }

    pub fn remove_service(&mut self, name: &str) -> Result<()> {
        self.objects.remove_service(name);
        self.settle()
    }

    /// Publishes the objects and waits until every node serves them.
    pub fn settle(&mut self) -> Result<()> {
        self.publish()?;
        self.settled()?;
        if self.setting.proxy == ProxyKind::KubeProxyIpvs {
            NODES.into_iter().try_for_each(|node| self.synced_on(node))?;
        }
        Ok(())
    }

    /// Waits until kube-proxy in mode ipvs has ended a sync of each family. It first writes virtual
    /// servers, then the sets and rules of all Services. Then it removes what is old, including
    /// entries of connection tracking. It also syncs every 30 s if nothing has changed.
    fn synced_on(&self, node: NodeNumber) -> Result<()> {
        const COUNTER: &str = "kubeproxy_sync_proxy_rules_duration_seconds_count";
        let ended = || -> Result<BTreeMap<String, u64>> {
            let body = self.metrics(node)?;
            let counters = body.lines().filter_map(|line| line.strip_prefix(COUNTER)?.rsplit_once(' '));
            counters.map(|(family, count)| Ok((family.to_owned(), count.parse()?))).collect()
        };
        let before = ended()?;
        wait::until(&format!("kube-proxy on node{node} has ended a sync"), SETTLES_WITHIN * 2, || {
            let now = ended().map_err(|error| format!("{error:#}"))?;
            let is_newer =
                |(family, count): (&String, &u64)| *count > before.get(family).copied().unwrap_or(0);
            let is_ended = now.len() == FAMILIES.len() && now.iter().all(is_newer);
            if is_ended { Ok(Some(())) } else { Err(format!("syncs: {before:?} before, {now:?} now")) }
        })
    }

    /// Publishes the objects. The sentinel moves to a new port with each version. It is written
    /// last, so a proxy that serves the new port has read all that was written before.
    fn publish(&mut self) -> Result<()> {
        self.sentinel += 1;
        let mut sentinel =
            Service::new("sentinel", cluster_ip(SENTINEL_INDEX), self.sentinel_port(), SERVER_PORT, None);
        for port in &mut sentinel.ports {
            port.name = format!("{}-{}", port.name, self.sentinel);
        }
        let server = self.addresses("web-1")?;
        self.objects.set_service(&sentinel, &[Endpoint::ready(server, 1)]);
        self.feed.publish(&self.objects)
    }

    /// Publishes the objects as they are at rest: the same each time, whatever was published
    /// between. Waits until every node serves them.
    pub fn settle_at_rest(&mut self) -> Result<()> {
        let next = std::mem::replace(&mut self.sentinel, AT_REST);
        let settled = self.settle();
        self.sentinel = next;
        settled
    }

    fn sentinel_port(&self) -> u16 {
        10_000 + self.sentinel
    }

    /// Waits until the host processes of every node reach the newest sentinel.
    pub fn settled(&mut self) -> Result<()> {
        for node in NODES {
            self.settled_on(node)?;
        }
        Ok(())
    }

    pub fn settled_on(&mut self, node: NodeNumber) -> Result<()> {
        self.served_on(node, cluster_ip(SENTINEL_INDEX), self.sentinel_port())?;
        self.active_on(node)
    }

    /// Waits until the proxy reports that it serves, once after each start and each change of its
    /// mode. Processes of the node are served earlier than packets of interfaces.
    fn active_on(&mut self, node: NodeNumber) -> Result<()> {
        let setting = self.setting;
        if setting.proxy.is_kube_proxy() || std::mem::replace(&mut self.proxy(node)?.seen_active, true) {
            return Ok(());
        }
        wait::until(
            &format!("mode {} active on node{node}", setting.datapath().mode()),
            SETTLES_WITHIN,
            || {
                let mode = self.proxy_mode(node).map_err(|error| format!("{error:#}"))?;
                let took = self.metric(node, "proxy_first_sync_duration_seconds");
                let took = took.map_err(|error| format!("{error:#}"))?;
                let is_active = mode == setting.datapath().mode() && took.is_some_and(|took| took > 0.0);
                if is_active { Ok(Some(())) } else { Err(format!("mode {mode}, first sync {took:?}")) }
            },
        )
    }

    /// Publishes the objects, and waits by a new Service until every node serves them. Programs
    /// that a former proxy has left refuse the port that the sentinel gets next.
    pub fn settle_by_new_service(&mut self) -> Result<()> {
        let address = cluster_ip(FIRST_NEWCOMER_INDEX + self.sentinel);
        let name = format!("newcomer-{}", self.sentinel);
        let server = self.addresses("web-1")?;
        let service = Service::new(&name, address, PORT, SERVER_PORT, None);
        self.objects.set_service(&service, &[Endpoint::ready(server, 1)]);
        self.publish()?;
        let served = NODES.into_iter().try_for_each(|node| {
            self.served_on(node, address, PORT)?;
            self.active_on(node)
        });
        self.objects.remove_service(&name);
        served
    }

    /// Waits until the host processes of the node reach this cluster IP.
    fn served_on(&mut self, node: NodeNumber, address: Addresses, port: u16) -> Result<()> {
        for family in FAMILIES {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                let target = SocketAddr::new(address.of(family), port);
                let timeout_ms = BETWEEN_LOOKS_MS * u64::from(wait::patience());
                let dial = Dial::new(protocol, target).timeout_ms(timeout_ms);
                let agent = self.agents.get(&node_name(node)).ok_or_else(|| anyhow!("no agent"))?;
                let proxy = self.proxies.iter_mut().find(|proxy| proxy.node == node);
                let proxy = proxy.ok_or_else(|| anyhow!("no proxy on node {node}"))?;
                let what = format!("node{node} serves version {} over {protocol} {family}", self.sentinel);
                let served = wait::until(&what, SETTLES_WITHIN, || {
                    if let Some(status) = proxy.ended() {
                        return Ok(Some(Err(anyhow!("the proxy ended: {status}"))));
                    }
                    let outcomes = agent.dial(&dial).map_err(|error| error.to_string())?;
                    match outcomes.first() {
                        Some(Outcome::Answered(_)) => Ok(Some(Ok(()))),
                        Some(other) => Err(other.to_string()),
                        None => Ok(None),
                    }
                });
                served.and_then(|served| served).with_context(|| proxy.log_tail())?;
            }
        }
        Ok(())
    }

    /// Adds a pod that did not exist when the proxies started, with its agent. Returns its name.
    pub fn add_late_pod(&mut self, node: NodeNumber) -> Result<String> {
        self.late_pods += 1;
        let name = format!("late-{}", self.late_pods);
        let unseen = self.setting.path == PathKind::Unseen;
        let processes = if unseen { PodProcesses::Elsewhere } else { PodProcesses::InNodeCgroup };
        self.lab.add_pod(node, &name, processes)?;
        self.agents.insert(name.clone(), self.lab.server(&name)?);
        Ok(name)
    }

    /// Adds a network between the nodes while the proxies run, unless it is there already.
    pub fn add_network(&mut self, network: Network) -> Result<()> {
        if self.lab.add_network(network)? {
            self.networks.push(network);
            let client = (network == Network::SecondUplink).then_some(SECOND_OUTSIDE);
            for name in client.into_iter().chain([network.pod()]) {
                self.agents.insert(name.to_owned(), self.lab.server(name)?);
            }
        }
        Ok(())
    }

    /// Ends the API server that feeds the proxies, if there is one.
    pub fn kill_api_server(&mut self) {
        if let Feed::ApiServer(server) = &mut self.feed {
            server.kill();
        }
    }

    /// Returns the cluster IP of a service with the port that every service has.
    pub fn cluster_ip(&self, service: &ServiceFixture, family: Family) -> SocketAddr {
        SocketAddr::new(cluster_ip(service.index).of(family), PORT)
    }

    /// Returns the node port of a service on a node's own address.
    pub fn node_port(
        &self,
        service: &ServiceFixture,
        node: NodeNumber,
        family: Family,
    ) -> Result<SocketAddr> {
        let port = service.node_port.ok_or_else(|| anyhow!("{} has no node port", service.name))?;
        Ok(SocketAddr::new(address::node(node).of(family), port))
    }

    /// Returns a metric of the node's proxy, or `None` if it has none of that name.
    pub fn metric(&self, node: NodeNumber, name: &str) -> Result<Option<f64>> {
        Ok(self.metrics(node)?.lines().filter_map(|line| line.strip_prefix(name)).find_map(|rest| {
            let rest =
                rest.strip_prefix('{').map_or(rest, |labels| labels.split_once('}').map_or("", |l| l.1));
            rest.strip_prefix(' ')?.trim().parse().ok()
        }))
    }

    fn metrics(&self, node: NodeNumber) -> Result<String> {
        let address = SocketAddr::new(Family::V4.loopback(), METRICS);
        let (status, body) = self.agent(&node_name(node))?.http_get(address, "/metrics")?;
        ensure!(status == 200, "/metrics answered {status}");
        Ok(body)
    }

    /// Returns how many packets and sockets of the node were counted for this reason.
    pub fn counted(&self, node: NodeNumber, reason: &str) -> Result<u64> {
        let body = self.metrics(node)?;
        let counter = format!("proxy_reasons_total{{reason=\"{reason}\"");
        let line = body.lines().find(|line| line.starts_with(&counter)).context("no such counter")?;
        Ok(line.rsplit(' ').next().context("no value")?.parse()?)
    }

    /// Returns the mode that the node's proxy reports.
    pub fn proxy_mode(&self, node: NodeNumber) -> Result<String> {
        let address = SocketAddr::new(Family::V4.loopback(), METRICS);
        let (status, body) = self.agent(&node_name(node))?.http_get(address, "/proxyMode")?;
        ensure!(status == 200, "/proxyMode answered {status}");
        Ok(body)
    }

    /// Runs `proxy-ctl cleanup` on a node, with these additional arguments.
    pub fn cleanup(&self, node: NodeNumber, arguments: &[&str]) -> Result<()> {
        let netns = self.lab.netns(&node_name(node))?;
        let mut command = self.lab.command(netns, &lab::program("proxy-ctl")?)?;
        let output = command.arg("cleanup").args(arguments).arg("--bpffs").arg(self.lab.bpffs(node)).output();
        let output = output.context("starting proxy-ctl cleanup")?;
        ensure!(output.status.success(), "cleanup: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// Returns the last lines that each proxy has written.
    pub fn logs(&self) -> String {
        self.proxies.iter().map(Proxy::log_tail).collect::<Vec<_>>().join("\n")
    }

    /// Returns the node's proxy.
    pub fn proxy_on(&self, node: NodeNumber) -> Result<&Proxy> {
        self.proxies.iter().find(|proxy| proxy.node == node).ok_or_else(|| anyhow!("no node {node}"))
    }

    /// Returns the output of a command of the node's proxy-ctl, for example `services`.
    pub fn tool(&self, node: NodeNumber, arguments: &[&str]) -> Result<String> {
        self.proxy_on(node)?.tool(&self.lab, arguments)
    }

    /// Leaves the lab up when this process ends, with servers that go on answering.
    pub fn keep(mut self) -> Result<()> {
        let names: Vec<String> = std::mem::take(&mut self.agents).into_keys().collect();
        for name in names {
            self.lab.lasting_server(&name)?;
        }
        self.lab.keep();
        Ok(())
    }
}
