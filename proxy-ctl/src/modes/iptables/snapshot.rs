//! Reads what is programmed from the output of iptables-save, with or without a controller. Rules
//! have the names of service ports in their comments.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;
use rustc_hash::FxHashMap;

use super::names::{self, SharedChain, Table};
use crate::{
    model::{
        desired::ServicePortName,
        objects::{IpFamily, ObjectName, Protocol, TrafficPolicy},
    },
    modes::{EndpointSnapshot, FrontendSnapshot, ServiceSnapshot, Snapshot},
    sys::xtables::saved::{SavedLine, after, words},
};

/// A chain of one service port, reduced to what says where connections go.
#[derive(Debug, Default)]
struct Chain {
    /// The endpoint to which the chain translates.
    endpoint: Option<SocketAddr>,
    /// The chains to which the chain jumps.
    leads_to: Vec<String>,
    affinity_seconds: u32,
    /// True if every client's source is replaced.
    masquerades_all: bool,
}

#[derive(Debug, Default)]
struct Port {
    frontends: Vec<FrontendSnapshot>,
    internal: Option<String>,
    external: Option<String>,
    rejected: bool,
    dropped: [bool; 2],
}

#[derive(Debug)]
pub(super) struct Reader {
    family: IpFamily,
    chains: FxHashMap<String, Chain>,
    ports: BTreeMap<ServicePortName, Port>,
}

impl Reader {
    pub(super) fn new(family: IpFamily) -> Self {
        Self { family, chains: FxHashMap::default(), ports: BTreeMap::new() }
    }

    pub(super) fn take(&mut self, table: Table, line: &str) {
        let SavedLine::Rule { chain, rule } = SavedLine::parse(line) else { return };
        let rule = words(rule);
        match SharedChain::of(table.name(), chain) {
            Some(shared) => self.take_shared(shared, &rule),
            None if table == Table::Nat && chain.starts_with("KUBE-S") || chain.starts_with("KUBE-EXT-") => {
                self.take_own(chain, &rule);
            }
            None => {}
        }
    }

    fn take_own(&mut self, name: &str, rule: &[(String, bool)]) {
        let chain = self.chains.entry(name.to_owned()).or_default();
        let Some(target) = after(rule, &["-j"]) else { return };
        match target.as_str() {
            "DNAT" => {
                let to = after(rule, &["--to-destination"]);
                chain.endpoint = to.and_then(|address| address.parse().ok());
            }
            names::MARK_MASQUERADE => {
                let has = |flag: &str| rule.iter().any(|(word, quoted)| !quoted && word == flag);
                chain.masquerades_all |= !has("-s") && !has("-i") && !has("-d") && !has("addrtype");
            }
            _ => match after(rule, &["--seconds"]) {
                Some(seconds) => chain.affinity_seconds = seconds.parse().unwrap_or(0),
                None => chain.leads_to.push(target),
            },
        }
    }

    fn take_shared(&mut self, shared: SharedChain, rule: &[(String, bool)]) {
        let (Some(comment), Some(target)) = (after(rule, &["--comment"]), after(rule, &["-j"])) else {
            return;
        };
        let (title, what) = comment.split_once(' ').unwrap_or((&comment, ""));
        // In the chain of node ports, only the rule that counts packets to 127.0.0.0/8 has an
        // address.
        let address = after(rule, &["-d"]).filter(|_| shared != SharedChain::NodePorts);
        let address = address.and_then(|text| text.parse::<IpNet>().ok()).map(|net| net.addr());
        let port = after(rule, &["--dport"]).and_then(|text| text.parse().ok());
        let protocol = match after(rule, &["-p"]).as_deref() {
            Some("tcp") => Protocol::Tcp,
            Some("udp") => Protocol::Udp,
            Some("sctp") => Protocol::Sctp,
            _ => return,
        };
        let (Some((namespace, name)), Some(port)) = (title.split_once('/'), port) else { return };
        let (name, port_name) = name.split_once(':').unwrap_or((name, ""));
        let name = ServicePortName {
            service: ObjectName::new(namespace, name),
            port: port_name.into(),
            protocol,
            family: self.family,
        };
        let known = self.ports.entry(name).or_default();
        let is_cluster_ip = shared == SharedChain::Refused || what == "cluster IP";
        match shared {
            SharedChain::Services | SharedChain::NodePorts if is_cluster_ip => known.internal = Some(target),
            SharedChain::Services | SharedChain::NodePorts => {
                // A chain of source ranges jumps to the service port's external chain.
                known.external = Some(target.replacen("KUBE-FW-", "KUBE-EXT-", 1));
            }
            SharedChain::Refused | SharedChain::RefusedExternal => {
                known.rejected |= target == "REJECT";
                known.dropped[usize::from(shared == SharedChain::RefusedExternal)] |= target == "DROP";
            }
            SharedChain::HealthChecks | SharedChain::Firewall => return,
        }
        let frontend = FrontendSnapshot { address, port, external: !is_cluster_ip };
        if !known.frontends.contains(&frontend) {
            known.frontends.push(frontend);
        }
    }

    fn endpoints(&self, chain: Option<&str>) -> Vec<SocketAddr> {
        let Some(chain) = chain.and_then(|name| self.chains.get(name)) else { return Vec::new() };
        chain.leads_to.iter().filter_map(|name| self.chains.get(name)?.endpoint).collect()
    }

    /// Adds what was read to the snapshot. It is called once for each family.
    pub(super) fn finish(self, snapshot: &mut Snapshot) {
        let mut services = Vec::with_capacity(self.ports.len());
        for (name, port) in &self.ports {
            let external_chain = port.external.as_deref().and_then(|name| self.chains.get(name));
            let is_local = |chain: &str| chain.starts_with("KUBE-SVL-");
            let leads_to = |local: bool| {
                let own = port.internal.iter().chain(external_chain.iter().flat_map(|chain| &chain.leads_to));
                own.map(String::as_str).find(|chain| is_local(chain) == local)
            };
            let local = self.endpoints(leads_to(true));
            let cluster = self.endpoints(leads_to(false));
            let internal_policy = match &port.internal {
                Some(chain) if is_local(chain) => TrafficPolicy::Local,
                None if port.dropped[0] => TrafficPolicy::Local,
                _ => TrafficPolicy::Cluster,
            };
            let external_policy = match external_chain {
                Some(chain) if !chain.masquerades_all => TrafficPolicy::Local,
                None if port.dropped[1] => TrafficPolicy::Local,
                _ => TrafficPolicy::Cluster,
            };
            let of = |policy| if policy == TrafficPolicy::Local { &local } else { &cluster };
            let seconds =
                [true, false].into_iter().filter_map(leads_to).filter_map(|name| self.chains.get(name));
            let sets = [&cluster, of(internal_policy), of(external_policy)];
            let shown = |set: &Vec<SocketAddr>| -> Vec<EndpointSnapshot> {
                let one = |address: &SocketAddr| EndpointSnapshot {
                    address: *address,
                    local: local.contains(address),
                    backend: 0,
                };
                set.iter().map(one).collect()
            };
            let [cluster, internal, external] = sets.map(shown);
            services.push(ServiceSnapshot {
                frontends: port.frontends.clone(),
                any_endpoints: !port.rejected,
                cluster,
                internal,
                external,
                internal_policy,
                external_policy,
                affinity_seconds: seconds.map(|chain| chain.affinity_seconds).max().unwrap_or(0),
                ..ServiceSnapshot::new(name.clone())
            });
        }
        snapshot.add_family(services);
    }
}

/// Returns the address in a rule of KUBE-SERVICES that jumps to the chain of node ports.
pub(super) fn node_port_address(line: &str) -> Option<IpAddr> {
    let SavedLine::Rule { chain: names::SERVICES, rule } = SavedLine::parse(line) else { return None };
    let rule = words(rule);
    let leads_there = after(&rule, &["-j"]).as_deref() == Some(names::NODE_PORTS);
    let address = leads_there.then(|| after(&rule, &["-d"])).flatten()?;
    address.parse::<IpNet>().ok().map(|net| net.addr())
}
