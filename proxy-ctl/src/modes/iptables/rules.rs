//! The rules of one service port, as text. This module has no side effects. [`PortPolicy`] decides
//! what becomes of its clients.
//!
//! Rules are written as iptables-save prints them, so that the kernel's rules can be compared with
//! the desired ones.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;

use super::{
    base::{Abilities, count, serves_localhost},
    names::{self, PortChains, SharedChain, Table},
};
use crate::{
    model::{
        desired::{DesiredPort, Endpoint, Frontend, FrontendKind},
        node::Host,
        objects::{IpFamily, TrafficPolicy},
    },
    modes::netfilter::{ClientPolicy, EndpointSet, Masquerade, Outcome, PortPolicy, rule_text},
    names::LOCALHOST_ACCEPTED,
};

/// A chain of table nat that one service port has for itself.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct OwnChain {
    pub(super) name: String,
    pub(super) rules: Vec<String>,
}

#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct PortRules {
    /// The chains of the service port alone. Each comes after the chains to which it jumps.
    pub(super) chains: Vec<OwnChain>,
    pub(super) shared: Vec<(SharedChain, String)>,
}

impl PortRules {
    /// Returns the number of rules in the table.
    pub(super) fn count(&self, table: Table) -> usize {
        let own = || self.chains.iter().map(|chain| chain.rules.len()).sum();
        let shared = self.shared.iter().filter(|(chain, _)| chain.table() == table).count();
        shared + if table == Table::Nat { own() } else { 0 }
    }
}

/// The settings of the node on which the rules of service ports depend.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct PortSettings {
    /// A match for packets of pods. `None`: pods cannot be distinguished from other clients.
    from_pods: Option<String>,
    /// The part of the host that [`PortPolicy`] reads.
    host: Host,
    /// Addresses of the node. If a source range contains one, the node itself is let in.
    node_addresses: Vec<IpAddr>,
    /// True if packets to node ports on 127.0.0.1 are counted.
    counts_localhost: bool,
    /// True if rules of single endpoints have comments.
    pub(super) endpoint_comments: bool,
}

impl PortSettings {
    pub(super) fn new(family: IpFamily, host: &Host, abilities: Abilities, endpoint_comments: bool) -> Self {
        let is_own = |address: &&IpAddr| IpFamily::of(**address) == family;
        Self {
            from_pods: rule_text::from_pods(host, family),
            // Only the fields that the policy reads are kept, so that other changes of the node do
            // not change the rules.
            host: Host {
                local_traffic: host.local_traffic.clone(),
                masquerade_all: host.masquerade_all,
                ..Host::default()
            },
            node_addresses: host.masquerade_addresses.iter().filter(is_own).copied().collect(),
            counts_localhost: abilities.counts_packets && serves_localhost(family, host),
            endpoint_comments,
        }
    }
}

pub(super) fn port_rules(port: &DesiredPort, settings: &PortSettings) -> PortRules {
    let names = PortChains::new(&port.name);
    let policy = PortPolicy::new(port, &settings.host);
    PortRenderer { port, settings, names, policy, title: port.name.to_string() }.render()
}

struct PortRenderer<'a> {
    port: &'a DesiredPort,
    settings: &'a PortSettings,
    names: PortChains,
    policy: PortPolicy,
    /// The name of the port in comments.
    title: String,
}

impl PortRenderer<'_> {
    fn render(self) -> PortRules {
        let mut rules = PortRules::default();
        for frontend in &self.port.frontends {
            self.frontend(frontend, &mut rules.shared);
        }
        if let Some(number) = self.port.health_check_node_port {
            let comment = self.comment(" health check node port");
            let rule = format!("-p tcp {comment} -m tcp --dport {number} -j ACCEPT");
            rules.shared.push((SharedChain::HealthChecks, rule));
        }
        self.own_chains(&mut rules.chains);
        rules
    }

    fn comment(&self, text: &str) -> String {
        format!("-m comment --comment \"{}{text}\"", self.title)
    }

    /// Returns a match for packets to the frontend.
    fn destination(&self, frontend: &Frontend, comment: &str) -> String {
        let protocol = self.port.name.protocol.name().to_ascii_lowercase();
        let Frontend { kind, address, port } = frontend;
        let address = match kind {
            FrontendKind::NodePort => String::new(),
            FrontendKind::ClusterIp | FrontendKind::ExternalIp | FrontendKind::LoadBalancer => {
                format!("-d {} ", IpNet::from(*address))
            }
        };
        format!("{address}-p {protocol} {comment} -m {protocol} --dport {port}")
    }

    fn frontend(&self, frontend: &Frontend, rules: &mut Vec<(SharedChain, String)>) {
        let (clients, suffix, refused) = match frontend.kind {
            FrontendKind::ClusterIp => (self.policy.internal, " cluster IP", SharedChain::Refused),
            FrontendKind::ExternalIp => (self.policy.external, " external IP", SharedChain::RefusedExternal),
            FrontendKind::LoadBalancer => {
                (self.policy.external, " loadbalancer IP", SharedChain::RefusedExternal)
            }
            FrontendKind::NodePort => (self.policy.external, "", SharedChain::RefusedExternal),
        };
        let is_restricted =
            frontend.kind == FrontendKind::LoadBalancer && !self.port.source_ranges.is_empty();
        let leads_to = match frontend.kind {
            FrontendKind::ClusterIp => self.set_chain(clients),
            FrontendKind::NodePort | FrontendKind::ExternalIp | FrontendKind::LoadBalancer => {
                let chain = if is_restricted { self.names.firewall() } else { self.names.external() };
                self.external_serves().then_some(chain)
            }
        };
        if let Some(chain) = leads_to {
            let matches = self.destination(frontend, &self.comment(suffix));
            let shared = match frontend.kind {
                FrontendKind::NodePort => SharedChain::NodePorts,
                FrontendKind::ClusterIp | FrontendKind::ExternalIp | FrontendKind::LoadBalancer => {
                    SharedChain::Services
                }
            };
            rules.push((shared, format!("{matches} -j {chain}")));
            if frontend.kind == FrontendKind::NodePort && self.settings.counts_localhost {
                // This rule is inserted after the other one, and so stands before it in the chain.
                let counted = count(LOCALHOST_ACCEPTED);
                rules.push((shared, format!("-d 127.0.0.0/8 {matches} {counted}-j {chain}")));
            }
            if is_restricted {
                let why = self.comment(&format!(" traffic not accepted by {}", self.names.firewall()));
                let matches = self.destination(frontend, &why);
                rules.push((SharedChain::Firewall, format!("{matches} -j DROP")));
            }
        }
        let (why, verdict) = match clients.outcome {
            Outcome::Balance(_) => return,
            Outcome::Reject => {
                let how = rule_text::port_unreachable(self.port.name.family);
                (" has no endpoints", format!("REJECT --reject-with {how}"))
            }
            Outcome::Drop => (" has no local endpoints", "DROP".to_owned()),
        };
        let mut matches = self.destination(frontend, &self.comment(why));
        if frontend.kind == FrontendKind::NodePort {
            matches = matches.replacen(" -m comment", " -m addrtype --dst-type LOCAL -m comment", 1);
        }
        rules.push((refused, format!("{matches} -j {verdict}")));
    }

    fn is_external(&self) -> bool {
        self.port.frontends.iter().any(|frontend| frontend.kind != FrontendKind::ClusterIp)
    }

    /// Returns true if some client that dials an external address gets an endpoint.
    fn external_serves(&self) -> bool {
        let PortPolicy { external, external_from_pods, external_from_node, .. } = self.policy;
        let clients = [Some(external), external_from_pods, external_from_node];
        clients.into_iter().flatten().any(|clients| matches!(clients.outcome, Outcome::Balance(_)))
    }

    /// Returns the chain that balances over the clients' endpoints.
    fn set_chain(&self, clients: ClientPolicy) -> Option<String> {
        let Outcome::Balance(set) = clients.outcome else { return None };
        Some(if self.is_local(set) { self.names.local() } else { self.names.cluster() })
    }

    fn is_local(&self, set: EndpointSet) -> bool {
        match set {
            EndpointSet::Cluster => false,
            EndpointSet::Internal => self.port.internal_policy == TrafficPolicy::Local,
            EndpointSet::External => self.port.external_policy == TrafficPolicy::Local,
        }
    }

    /// Returns true if rules of this port jump to the chain of the set.
    fn uses(&self, set: EndpointSet) -> bool {
        let PortPolicy { internal, external, external_from_pods, external_from_node } = self.policy;
        let of = |clients: Option<ClientPolicy>| {
            clients.is_some_and(|clients| clients.outcome == Outcome::Balance(set))
        };
        let externally = self.is_external()
            && [Some(external), external_from_pods, external_from_node].into_iter().any(of);
        of(Some(internal)) || externally
    }

    fn own_chains(&self, chains: &mut Vec<OwnChain>) {
        let all = [EndpointSet::Cluster, EndpointSet::Internal, EndpointSet::External];
        // Sets of the same traffic policy are equal.
        let of_policy =
            |local: bool| all.into_iter().find(|set| self.is_local(*set) == local && self.uses(*set));
        let used: Vec<EndpointSet> = [false, true].into_iter().filter_map(of_policy).collect();
        let mut endpoints: Vec<u32> = used.iter().flat_map(|set| set.of(self.port)).copied().collect();
        endpoints.sort_unstable();
        endpoints.dedup();
        let endpoint = |index: &u32| self.port.endpoints.all.get(*index as usize);
        chains.extend(endpoints.iter().filter_map(endpoint).map(|endpoint| self.endpoint_chain(endpoint)));
        for set in used {
            let name = if self.is_local(set) { self.names.local() } else { self.names.cluster() };
            let mut rules = self.masquerade_internal(set);
            let endpoints: Vec<&Endpoint> = set.of(self.port).iter().filter_map(endpoint).collect();
            self.balance(&endpoints, &mut rules);
            chains.push(OwnChain { name, rules });
        }
        if self.is_external() && self.external_serves() {
            chains.push(OwnChain { name: self.names.external(), rules: self.external_rules() });
            if !self.port.source_ranges.is_empty() && self.load_balancers().next().is_some() {
                chains.push(OwnChain { name: self.names.firewall(), rules: self.firewall_rules() });
            }
        }
    }

    fn load_balancers(&self) -> impl Iterator<Item = &Frontend> {
        self.port.frontends.iter().filter(|frontend| frontend.kind == FrontendKind::LoadBalancer)
    }

    /// Returns the rules that masquerade clients of the ClusterIP, if the set's chain is the one
    /// that they come to.
    fn masquerade_internal(&self, set: EndpointSet) -> Vec<String> {
        let Outcome::Balance(internal) = self.policy.internal.outcome else { return Vec::new() };
        if self.is_local(internal) != self.is_local(set) {
            return Vec::new();
        }
        let who = match (self.policy.internal.masquerade, &self.settings.from_pods) {
            (Masquerade::Nobody, _) | (Masquerade::AllButPods, None) => return Vec::new(),
            (Masquerade::AllButPods, Some(pods)) => format!("! {pods}"),
            (Masquerade::Everybody, _) => String::new(),
        };
        let cluster_ips = self.port.frontends.iter().filter(|one| one.kind == FrontendKind::ClusterIp);
        let rule = |frontend: &Frontend| {
            let matches = self.destination(frontend, &self.comment(" cluster IP"));
            let rule = format!("{matches} -j {}", names::MARK_MASQUERADE);
            match who.split_once("-i ") {
                // iptables-save prints interfaces behind addresses.
                Some((not, interface)) => rule.replacen(" -p ", &format!(" {not}-i {interface} -p "), 1),
                None if who.is_empty() => rule,
                None => format!("{who} {rule}"),
            }
        };
        cluster_ips.map(rule).collect()
    }

    fn endpoint_comment(&self, text: &str) -> String {
        if self.settings.endpoint_comments { format!("{} ", self.comment(text)) } else { String::new() }
    }

    fn balance(&self, endpoints: &[&Endpoint], rules: &mut Vec<String>) {
        let chain =
            |endpoint: &Endpoint| self.names.endpoint(SocketAddr::new(endpoint.address, endpoint.port));
        let comment = |endpoint: &Endpoint| {
            self.endpoint_comment(&format!(" -> {}", SocketAddr::new(endpoint.address, endpoint.port)))
        };
        if let Some(seconds) = self.port.affinity_seconds {
            for endpoint in endpoints {
                let (comment, chain) = (comment(endpoint), chain(endpoint));
                let recent = self.recent(&format!("--rcheck --seconds {seconds} --reap"), &chain);
                rules.push(format!("{comment}{recent} -j {chain}"));
            }
        }
        for (index, endpoint) in endpoints.iter().enumerate() {
            let left = endpoints.len() - index;
            let (comment, chain) = (comment(endpoint), chain(endpoint));
            let chance = if left > 1 { chance(left) } else { String::new() };
            rules.push(format!("{comment}{chance}-j {chain}"));
        }
    }

    fn recent(&self, what: &str, chain: &str) -> String {
        let mask = match self.port.name.family {
            IpFamily::Ipv4 => "255.255.255.255",
            IpFamily::Ipv6 => "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
        };
        format!("-m recent {what} --name {chain} --mask {mask} --rsource")
    }

    fn endpoint_chain(&self, endpoint: &Endpoint) -> OwnChain {
        let address = SocketAddr::new(endpoint.address, endpoint.port);
        let name = self.names.endpoint(address);
        let comment = self.endpoint_comment("");
        let protocol = self.port.name.protocol.name().to_ascii_lowercase();
        let affinity = match self.port.affinity_seconds {
            Some(_) => format!("{} ", self.recent("--set", &name)),
            None => String::new(),
        };
        let rules = vec![
            // This rule masquerades a client that is its own endpoint.
            format!("-s {} {comment}-j {}", IpNet::from(endpoint.address), names::MARK_MASQUERADE),
            format!("-p {protocol} {comment}{affinity}-m {protocol} -j DNAT --to-destination {address}"),
        ];
        OwnChain { name, rules }
    }

    fn external_rules(&self) -> Vec<String> {
        let PortPolicy { external, external_from_pods, external_from_node, .. } = self.policy;
        let mut rules = Vec::new();
        let from = |who: &str,
                    rules: &mut Vec<String>,
                    clients: ClientPolicy,
                    masquerade: &str,
                    route: &str| {
            let who = if who.is_empty() { String::new() } else { format!("{who} ") };
            let comment = |text: &str| {
                let comment =
                    |text| format!("-m comment --comment \"{text} {} external destinations\" ", self.title);
                if text.is_empty() { String::new() } else { comment(text) }
            };
            let (address, others) =
                if who.starts_with("-m") { ("", who.as_str()) } else { (who.as_str(), "") };
            if clients.masquerade == Masquerade::Everybody {
                rules.push(format!("{address}{}{others}-j {}", comment(masquerade), names::MARK_MASQUERADE));
            }
            if let Some(chain) = self.set_chain(clients) {
                rules.push(format!("{address}{}{others}-j {chain}", comment(route)));
            }
        };
        if let (Some(clients), Some(pods)) = (external_from_pods, &self.settings.from_pods) {
            from(pods, &mut rules, clients, "", "pod traffic for");
        }
        if let Some(clients) = external_from_node {
            let node = "-m addrtype --src-type LOCAL";
            from(node, &mut rules, clients, "masquerade LOCAL traffic for", "route LOCAL traffic for");
        }
        from("", &mut rules, external, "masquerade traffic for", "");
        rules
    }

    fn firewall_rules(&self) -> Vec<String> {
        let comment = self.comment(" loadbalancer IP");
        let external = self.names.external();
        let rule = |from: IpNet| {
            // iptables-save prints no address for a range that contains everybody.
            let source = if from.prefix_len() == 0 { String::new() } else { format!("-s {} ", from.trunc()) };
            format!("{source}{comment} -j {external}")
        };
        let mut rules: Vec<String> = self.port.source_ranges.iter().copied().map(rule).collect();
        let ranges = &self.port.source_ranges;
        let has_node = |range: &IpNet| self.settings.node_addresses.iter().any(|node| range.contains(node));
        if ranges.iter().any(has_node) {
            // A node that dials the address also has it as its source, where the address is one of
            // the node's own.
            rules.extend(self.load_balancers().map(|frontend| rule(frontend.address.into())));
        }
        let others = format!(
            "-m comment --comment \"other traffic to {} will be dropped by {}\"",
            self.title,
            names::PROXY_FIREWALL
        );
        rules.push(others);
        rules
    }
}

/// Returns a match for one of `left` packets. The kernel stores the probability in units of 2⁻³¹,
/// and the tools print the stored value.
fn chance(left: usize) -> String {
    let one = f64::from(1_u32 << 31);
    let units = (one / left as f64).round();
    format!("-m statistic --mode random --probability {:.11} ", units / one)
}
