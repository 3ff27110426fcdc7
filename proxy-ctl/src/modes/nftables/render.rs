//! Renders a service port as chains, sets and elements. This module has no side effects.

use super::{
    frame::{self, Context, REJECT},
    language::{
        CHOSEN, FIRST, Language, address_bytes, change_fwmark, endpoint_bytes, equals, frontend_key, goto,
        hairpin_key, padded, port_key, rule,
    },
    names::{PortChain, PortNames},
    objects::{ElementId, ElementValue, Objects, Rule, Set},
    slots::Slots,
};
use crate::{
    model::{
        desired::{DesiredPort, Endpoint, Frontend, FrontendKind},
        objects::TrafficPolicy,
    },
    modes::netfilter::{ClientPolicy, EndpointSet, Masquerade, Outcome, PortPolicy},
    sys::nftables::{ElementData, Expression, Register, Side, Verdict, user_data},
};

/// The type of the user data with [`Facts`], in a frontend's element.
pub(super) const FACTS: u8 = 64;
/// The comment of an endpoint on this node.
pub(super) const LOCAL: &str = "local";

/// The slots of the lists of endpoints that a service port's clients get. At most two lists differ.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Allocation {
    pub(super) cluster: Option<Slots>,
    pub(super) local: Option<Slots>,
}

/// The numbers of endpoints for an [`Allocation`]. 0: no client gets that list.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Room {
    pub(super) cluster: usize,
    pub(super) local: usize,
}

/// A service port with the policy for its clients.
struct Port<'a> {
    port: &'a DesiredPort,
    context: &'a Context,
    policy: PortPolicy,
    names: PortNames,
    external: bool,
    internal: bool,
}

pub(super) fn room(port: &DesiredPort, context: &Context) -> Room {
    let port = Port::new(port, context);
    let count = |chain| port.list(chain).map_or(0, <[u32]>::len);
    Room { cluster: count(PortChain::Service), local: count(PortChain::Local) }
}

/// Returns the endpoints that some client gets. Some are returned twice.
pub(super) fn used<'a>(port: &'a DesiredPort, context: &'a Context) -> impl Iterator<Item = &'a Endpoint> {
    let of_port = Port::new(port, context);
    let lists = [PortChain::Service, PortChain::Local].map(|chain| of_port.list(chain).unwrap_or_default());
    lists.into_iter().flatten().filter_map(|index| port.endpoints.all.get(*index as usize))
}

pub(super) fn render(port: &DesiredPort, context: &Context, allocation: Allocation) -> Objects {
    let port = Port::new(port, context);
    let mut objects = Objects::default();
    for (chain, slots) in [(PortChain::Service, allocation.cluster), (PortChain::Local, allocation.local)] {
        if let (Some(list), Some(slots)) = (port.list(chain), slots) {
            port.balance(&mut objects, chain, list, slots);
        }
    }
    port.external_chain(&mut objects);
    port.frontends(&mut objects);
    objects.shared.sort_unstable();
    objects.shared.dedup();
    objects
}

impl<'a> Port<'a> {
    fn new(port: &'a DesiredPort, context: &'a Context) -> Self {
        let is_internal = |frontend: &Frontend| frontend.kind == FrontendKind::ClusterIp;
        Self {
            port,
            context,
            policy: PortPolicy::new(port, &context.host),
            names: PortNames::new(&port.name),
            internal: port.frontends.iter().any(is_internal),
            external: !port.frontends.iter().all(is_internal),
        }
    }

    fn language(&self) -> Language {
        self.context.language
    }

    /// Returns the policies of all clients that some rule is about.
    fn clients(&self) -> impl Iterator<Item = ClientPolicy> {
        let PortPolicy { internal, external, external_from_pods, external_from_node } = self.policy;
        let externals = [Some(external), external_from_pods, external_from_node];
        let externals = externals.into_iter().flatten().filter(|_| self.external);
        self.internal.then_some(internal).into_iter().chain(externals)
    }

    /// Returns the chain that balances over the set. Sets of the same traffic policy are equal.
    fn chain_of(&self, set: EndpointSet) -> PortChain {
        let policy = match set {
            EndpointSet::Cluster => TrafficPolicy::Cluster,
            EndpointSet::Internal => self.port.internal_policy,
            EndpointSet::External => self.port.external_policy,
        };
        match policy {
            TrafficPolicy::Cluster => PortChain::Service,
            TrafficPolicy::Local => PortChain::Local,
        }
    }

    /// Returns the endpoints over which the chain balances. `None`: no client is balanced by it.
    fn list(&self, chain: PortChain) -> Option<&'a [u32]> {
        let set = self.clients().find_map(|client| match client.outcome {
            Outcome::Balance(set) if self.chain_of(set) == chain => Some(set),
            Outcome::Balance(_) | Outcome::Reject | Outcome::Drop => None,
        })?;
        Some(set.of(self.port))
    }

    fn balance(&self, objects: &mut Objects, chain: PortChain, list: &[u32], slots: Slots) {
        let map = Set::Endpoints(slots.map());
        let protocol = self.port.name.protocol;
        let endpoints = list.iter().filter_map(|index| self.port.endpoints.all.get(*index as usize));
        for (slot, endpoint) in (slots.first()..).zip(endpoints) {
            let value = endpoint_bytes(endpoint.address, endpoint.port);
            let mut noted = Vec::new();
            if endpoint.local {
                user_data::add_comment(&mut noted, LOCAL);
                let key = hairpin_key(endpoint.address, protocol, endpoint.port);
                objects.shared.push(ElementId { set: Set::HairpinConnections, key });
            }
            let key = slot.to_ne_bytes().to_vec();
            let value = ElementValue { data: ElementData::Value(value), user_data: noted };
            objects.elements.insert(ElementId { set: map.clone(), key }, value);
        }
        let choose = vec![
            Expression::Random { modulus: list.len() as u32, offset: slots.first(), to: FIRST },
            Expression::Lookup { set: map.name().into_owned(), key: FIRST, to: Some(CHOSEN) },
        ];
        let mut rules = Vec::new();
        if let Some(seconds) = self.port.affinity_seconds {
            let affinity = Set::own(self.names.affinity());
            rules = self.affinity_rules(&affinity, seconds, list);
            let definition = frame::definition(&affinity, self.language());
            objects.sets.insert(affinity, definition);
        }
        rules.push(self.translate([choose], CHOSEN));
        objects.chains.insert(self.names.chain(chain), rules);
    }

    /// Returns a rule that replaces the destination by the one that `choose` puts into the register
    /// `chosen`. The rule compares the protocol, because nft needs it to read the rule again.
    fn translate(&self, choose: impl IntoIterator<Item = Vec<Expression>>, chosen: Register) -> Rule {
        let protocol = Language::has_protocol(self.port.name.protocol).to_vec();
        let parts = std::iter::once(protocol).chain(choose);
        rule(parts.chain([vec![self.language().destination_nat(chosen)]]))
    }

    /// Returns the rules of session affinity. A client gets its last endpoint again, if that still
    /// exists. Otherwise its next choice is remembered. If the set is full, a rule that adds to it
    /// does not match, and the rule behind these balances without remembering.
    ///
    /// There are two rules for each endpoint instead of a map from client to endpoint. nft 1.0.6
    /// ends with a failed assertion when it lists rules that look up the result of another lookup.
    fn affinity_rules(&self, affinity: &Set, seconds: u32, list: &[u32]) -> Vec<Rule> {
        let milliseconds = u64::from(seconds) * 1000;
        let remember = Expression::Remember { set: affinity.name().into_owned(), key: FIRST, milliseconds };
        let is_remembered = Expression::Lookup { set: affinity.name().into_owned(), key: FIRST, to: None };
        let endpoints = list.iter().filter_map(|index| self.port.endpoints.all.get(*index as usize));
        let endpoints: Vec<_> = endpoints
            .map(|endpoint| self.language().load_client_of(endpoint.address, endpoint.port))
            .collect();
        let chosen = self.language().endpoint_of_client();
        let again = endpoints.iter().map(|client| {
            let found = vec![is_remembered.clone(), remember.clone()];
            self.translate([client.clone(), found], chosen)
        });
        // Each rule takes one in `left` clients, because `left` endpoints are left.
        let left = (1..=list.len() as u32).rev();
        let first = left.zip(&endpoints).map(|(left, client)| {
            let draw =
                vec![Expression::Random { modulus: left, offset: 0, to: FIRST }, equals(FIRST, vec![0; 4])];
            self.translate([draw, client.clone(), vec![remember.clone()]], chosen)
        });
        again.chain(first).collect()
    }

    /// Adds the chain that sends clients of external frontends to one of the lists, after it has
    /// set the fwmark of those to masquerade.
    fn external_chain(&self, objects: &mut Objects) {
        if !self.has_external_chain() {
            return;
        }
        let target = |client: ClientPolicy| match client.outcome {
            Outcome::Balance(set) => Some(self.names.chain(self.chain_of(set))),
            Outcome::Reject | Outcome::Drop => None,
        };
        let mut rules = Vec::new();
        let near = |client: ClientPolicy, condition: Vec<Expression>| {
            let is_masqueraded = client.masquerade != Masquerade::Nobody;
            let set_fwmark =
                if is_masqueraded { change_fwmark(self.context.fwmark(), true) } else { Vec::new() };
            target(client).map(|chain| rule([condition, set_fwmark, vec![goto(&chain)]]))
        };
        if let Some(pods) = self.policy.external_from_pods {
            for condition in self.context.conditions_of_pods() {
                rules.extend(near(pods, condition).map(|rule| rule.comment("from pods")));
            }
        }
        if let Some(node) = self.policy.external_from_node {
            let condition = Language::is_local(Side::Source);
            rules.extend(near(node, condition).map(|rule| rule.comment("from this node")));
        }
        rules.extend(near(self.policy.external, Vec::new()));
        objects.chains.insert(self.names.chain(PortChain::External), rules);
    }

    fn has_external_chain(&self) -> bool {
        let PortPolicy { external, external_from_pods, external_from_node, .. } = self.policy;
        let balances = |client: ClientPolicy| matches!(client.outcome, Outcome::Balance(_));
        self.external
            && [Some(external), external_from_pods, external_from_node].into_iter().flatten().any(balances)
    }

    fn frontends(&self, objects: &mut Objects) {
        let protocol = self.port.name.protocol;
        for frontend in &self.port.frontends {
            let Frontend { kind, address, port } = *frontend;
            let (services, no_endpoints, key) = if kind == FrontendKind::NodePort {
                (Set::ServiceNodePorts, Set::NoEndpointNodePorts, port_key(protocol, port))
            } else {
                (Set::ServiceIps, Set::NoEndpointServices, frontend_key(address, protocol, port))
            };
            let (client, goes_to) = if kind == FrontendKind::ClusterIp {
                let key = address_bytes(address);
                objects.shared.push(ElementId { set: Set::ClusterIps, key });
                let chain = match self.policy.internal.outcome {
                    Outcome::Balance(set) => Some(self.chain_of(set)),
                    Outcome::Reject | Outcome::Drop => None,
                };
                (self.policy.internal, chain)
            } else {
                (self.policy.external, self.has_external_chain().then_some(PortChain::External))
            };
            let mut add = |set: Set, verdict: Verdict| {
                let value = ElementValue { data: ElementData::Verdict(verdict), user_data: self.facts(kind) };
                objects.elements.insert(ElementId { set, key: key.clone() }, value);
            };
            if let Some(chain) = goes_to {
                add(services, Verdict::Goto(self.names.chain(chain)));
            }
            match client.outcome {
                Outcome::Balance(_) => {}
                Outcome::Reject => add(no_endpoints, Verdict::Goto(REJECT.to_owned())),
                Outcome::Drop => add(no_endpoints, Verdict::Drop),
            }
            if kind == FrontendKind::LoadBalancer && !self.port.source_ranges.is_empty() {
                add(Set::FirewallIps, Verdict::Goto(self.names.chain(PortChain::Firewall)));
                objects.chains.insert(self.names.chain(PortChain::Firewall), self.firewall());
            }
        }
    }

    /// Returns the rules that let only the source ranges use the load-balancer addresses.
    fn firewall(&self) -> Vec<Rule> {
        let language = self.language();
        let returns = |condition| rule([condition, vec![Expression::Verdict(Verdict::Return)]]);
        let ranges = &self.port.source_ranges;
        let mut rules: Vec<Rule> =
            ranges.iter().map(|range| returns(language.is_in(Side::Source, *range))).collect();
        // If the node itself is in a source range, its packets may have a load-balancer address as
        // their source.
        let node = &self.context.host.masquerade_addresses;
        if node.iter().any(|address| ranges.iter().any(|range| range.contains(address))) {
            let addresses = self.port.frontends.iter().filter(|one| one.kind == FrontendKind::LoadBalancer);
            rules.extend(addresses.map(|one| returns(language.is_in(Side::Source, one.address.into()))));
        }
        rules.push(rule([vec![Expression::Verdict(Verdict::Drop)]]));
        rules
    }

    fn facts(&self, kind: FrontendKind) -> Vec<u8> {
        let mut list = Vec::new();
        user_data::add_comment(&mut list, &self.port.name.to_string());
        let facts = Facts {
            internal_policy: self.port.internal_policy,
            external_policy: self.port.external_policy,
            any_endpoints: self.port.endpoints.any,
            external: kind != FrontendKind::ClusterIp,
            affinity_seconds: self.port.affinity_seconds.unwrap_or(0),
        };
        user_data::add(&mut list, FACTS, &facts.bytes());
        list
    }
}

/// The facts about a service port in a frontend's element, for those who read the kernel's tables.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Facts {
    pub(super) internal_policy: TrafficPolicy,
    pub(super) external_policy: TrafficPolicy,
    pub(super) any_endpoints: bool,
    /// True if the frontend can be dialled from outside.
    pub(super) external: bool,
    /// The timeout of session affinity. 0: there is none.
    pub(super) affinity_seconds: u32,
}

impl Facts {
    fn bytes(self) -> Vec<u8> {
        let local = |policy| policy == TrafficPolicy::Local;
        let all =
            [local(self.internal_policy), local(self.external_policy), self.any_endpoints, self.external];
        let flags = all.into_iter().enumerate().map(|(bit, set)| u8::from(set) << bit).sum();
        padded([&[flags][..], &self.affinity_seconds.to_be_bytes()])
    }

    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let [flags, _, _, _, seconds @ ..] = bytes else { return None };
        let has = |bit: u8| flags >> bit & 1 == 1;
        let policy = |bit| if has(bit) { TrafficPolicy::Local } else { TrafficPolicy::Cluster };
        Some(Self {
            internal_policy: policy(0),
            external_policy: policy(1),
            any_endpoints: has(2),
            external: has(3),
            affinity_seconds: u32::from_be_bytes(seconds.try_into().ok()?),
        })
    }
}
