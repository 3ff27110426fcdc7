//! [`Model`] keeps what the sources have reported, and the desired state that follows from it.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map},
    mem,
    net::SocketAddr,
    num::NonZeroI64,
    sync::Arc,
};

use ipnet::IpNet;
use rustc_hash::{FxHashMap, FxHashSet};

use super::{
    Update,
    claims::{Claim, Claimant, Conflict, Rank},
    desired::{Changes, DesiredPort, ServicePortName},
    names::NameInterner,
    objects::{EndpointSlice, HealthCheck, IpFamily, Node, ObjectName, Service},
    resolve::{self, Owners},
    topology::NodeTopology,
};

/// The Services and EndpointSlices as the sources reported them, and the desired state as of the
/// last [`Model::take_changes`].
///
/// The cost of an update follows what it touches, not what is known.
#[derive(Debug)]
pub struct Model {
    node_name: Arc<str>,
    node: Option<Node>,
    serves_external_ips: bool,
    /// The address and port at which this process dials the API server, if they are known.
    server: Option<SocketAddr>,
    services: FxHashMap<ObjectName, Box<KnownService>>,
    /// The Service of every slice, in the slice's namespace.
    slices: FxHashMap<ObjectName, Arc<str>>,
    /// The ranges, by the name of their ServiceCIDR. `None` if no source has listed any.
    service_cidrs: Option<BTreeMap<Arc<str>, Vec<IpNet>>>,
    owners: Owners,
    names: NameInterner,
    /// The health checks of the Services with a `healthCheckNodePort`.
    health_checks: FxHashMap<ObjectName, HealthCheck>,
    changed_health_checks: BTreeSet<ObjectName>,
    health_checks_computed: u64,
    touched: BTreeMap<ObjectName, Families>,
    triggers: Vec<(IpFamily, NonZeroI64)>,
    ports_computed: u64,
}

/// Everything about one Service name. Slices may come before their Service and outlive it.
#[derive(Debug, Default)]
struct KnownService {
    service: Option<Service>,
    /// The slices, sorted by name.
    slices: Vec<EndpointSlice>,
    /// The desired service ports, sorted by name.
    desired: Vec<Arc<DesiredPort>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Families {
    ipv4: bool,
    ipv6: bool,
}

impl Families {
    const BOTH: Self = Self { ipv4: true, ipv6: true };

    fn only(family: IpFamily) -> Self {
        Self { ipv4: family == IpFamily::Ipv4, ipv6: family == IpFamily::Ipv6 }
    }

    fn contain(self, family: IpFamily) -> bool {
        match family {
            IpFamily::Ipv4 => self.ipv4,
            IpFamily::Ipv6 => self.ipv6,
        }
    }
}

impl Model {
    /// Creates a model for this node, whose endpoints are local.
    pub fn new(node_name: impl Into<Arc<str>>) -> Self {
        Self {
            node_name: node_name.into(),
            node: None,
            serves_external_ips: true,
            server: None,
            services: FxHashMap::default(),
            slices: FxHashMap::default(),
            service_cidrs: None,
            owners: Owners::default(),
            names: NameInterner::default(),
            health_checks: FxHashMap::default(),
            changed_health_checks: BTreeSet::new(),
            health_checks_computed: 0,
            touched: BTreeMap::new(),
            triggers: Vec::new(),
            ports_computed: 0,
        }
    }

    /// Makes the model ignore `externalIPs` of Services.
    pub fn without_external_ips(self) -> Self {
        Self { serves_external_ips: false, ..self }
    }

    /// Makes a service port at this address keep its last endpoints while it has none.
    ///
    /// `server` is the address and port at which this process dials the API server. If a Service
    /// has them, the process serves them to itself. A single API server that restarts first removes
    /// itself from the endpoints, and nobody could hear of the new ones.
    pub fn keeping_endpoints_of(self, server: Option<SocketAddr>) -> Self {
        Self { server, ..self }
    }

    /// Takes in an update of a source. Many updates can be taken in before one
    /// [`Model::take_changes`].
    pub fn update(&mut self, update: Update) {
        match update {
            Update::ReplaceServices(services) => self.replace_services(services),
            Update::ApplyService(service) => self.apply_service(service),
            Update::DeleteService(name) => self.delete_service(&name),
            Update::ReplaceSlices(slices) => self.replace_slices(slices),
            Update::ApplySlice(slice) => self.apply_slice(slice),
            Update::DeleteSlice(name) => self.delete_slice(&name),
            Update::ReplaceServiceCidrs(all) => {
                self.service_cidrs = Some(all.into_iter().map(|one| (one.name, one.ranges)).collect());
            }
            Update::ApplyServiceCidr(one) => {
                self.service_cidrs.get_or_insert_default().insert(one.name, one.ranges);
            }
            Update::DeleteServiceCidr(name) => {
                self.service_cidrs.get_or_insert_default().remove(&name);
            }
            Update::Node(node) => self.set_node(node),
        }
    }

    pub fn apply_service(&mut self, mut service: Service) {
        if !self.serves_external_ips {
            service.external_ips.clear();
        }
        normalize(&mut service);
        self.names.intern_service(&mut service);
        let known = self.services.entry(service.name.clone()).or_default();
        if known.service.as_ref() == Some(&service) {
            return;
        }
        let name = service.name.clone();
        let previous = known.service.replace(service.clone());
        if let Some(previous) = previous {
            self.withdraw_claims(&previous);
        }
        self.add_claims(&service);
        self.touch(&name, Families::BOTH);
    }

    pub fn delete_service(&mut self, name: &ObjectName) {
        if let Some(service) = self.services.get_mut(name).and_then(|known| known.service.take()) {
            self.withdraw_claims(&service);
            self.touch(name, Families::BOTH);
        }
    }

    /// Takes in a list of Services. Every Service that is not in `services` is gone.
    pub fn replace_services(&mut self, services: Vec<Service>) {
        let listed: FxHashSet<&ObjectName> = services.iter().map(|service| &service.name).collect();
        let known = self.services.iter().filter(|(_, known)| known.service.is_some());
        let gone: Vec<_> =
            known.map(|(name, _)| name).filter(|name| !listed.contains(name)).cloned().collect();
        for name in gone {
            self.delete_service(&name);
        }
        for service in services {
            self.apply_service(service);
        }
    }

    pub fn apply_slice(&mut self, mut slice: EndpointSlice) {
        self.names.intern_slice(&mut slice);
        slice.ports.shrink_to_fit();
        slice.endpoints.shrink_to_fit();
        if self.slices.get(&slice.name).is_some_and(|service| *service != slice.service) {
            self.delete_slice(&slice.name);
        }
        let service = slice_service(&slice.name, &slice.service);
        let known = self.services.entry(service.clone()).or_default();
        let mut families = Families::only(slice.family);
        let trigger = slice.triggered.map(|triggered| (slice.family, triggered));
        match known.slices.binary_search_by(|known| known.name.cmp(&slice.name)) {
            Ok(index) => {
                let known = &mut known.slices[index];
                if *known == slice {
                    return;
                }
                let previous = mem::replace(known, slice);
                if !families.contain(previous.family) {
                    families = Families::BOTH;
                }
            }
            Err(index) => {
                self.slices.insert(slice.name.clone(), Arc::clone(&slice.service));
                known.slices.reserve_exact(1);
                known.slices.insert(index, slice);
            }
        }
        self.triggers.extend(trigger);
        self.touch(&service, families);
    }

    pub fn delete_slice(&mut self, name: &ObjectName) {
        let Some(service) = self.slices.remove(name) else { return };
        let service = slice_service(name, &service);
        let Some(known) = self.services.get_mut(&service) else { return };
        if let Ok(index) = known.slices.binary_search_by(|slice| slice.name.cmp(name)) {
            let slice = known.slices.remove(index);
            self.touch(&service, Families::only(slice.family));
        }
    }

    /// Takes in a list of slices. Every slice that is not in `slices` is gone.
    pub fn replace_slices(&mut self, slices: Vec<EndpointSlice>) {
        let listed: FxHashSet<&ObjectName> = slices.iter().map(|slice| &slice.name).collect();
        let gone: Vec<_> = self.slices.keys().filter(|name| !listed.contains(name)).cloned().collect();
        for name in gone {
            self.delete_slice(&name);
        }
        for slice in slices {
            self.apply_slice(slice);
        }
    }

    /// Returns the sorted ranges that service addresses are allocated from, or `None` if no source
    /// has listed them.
    pub fn service_cidrs(&self) -> Option<Vec<IpNet>> {
        let mut ranges: Vec<IpNet> = self.service_cidrs.as_ref()?.values().flatten().copied().collect();
        ranges.sort_unstable();
        ranges.dedup();
        Some(ranges)
    }

    /// Sets the own Node. Its zone decides which endpoints are used.
    pub fn set_node(&mut self, node: Option<Node>) {
        let previous = mem::replace(&mut self.node, node);
        let before = previous.and_then(|node| node.zone);
        let now = self.node.as_ref().and_then(|node| node.zone.clone());
        if before == now {
            return;
        }
        let zones: Vec<Arc<str>> = before.into_iter().chain(now).collect();
        let concerned = |slice: &EndpointSlice| {
            let hints = slice.endpoints.iter().filter_map(|endpoint| endpoint.hints.as_ref());
            hints.flat_map(|hints| &hints.zones).any(|zone| zones.contains(zone))
        };
        let mut touched = Vec::new();
        for (name, known) in &self.services {
            for slice in known.slices.iter().filter(|slice| concerned(slice)) {
                touched.push((name.clone(), Families::only(slice.family)));
            }
        }
        for (name, families) in touched {
            self.touch(&name, families);
        }
    }

    /// Returns this node's Node, as last reported.
    pub fn node(&self) -> Option<&Node> {
        self.node.as_ref()
    }

    /// Returns true if something was updated since the last [`Model::take_changes`].
    pub fn has_changes(&self) -> bool {
        !self.touched.is_empty()
    }

    /// Returns what all updates since the last call have changed, in the order of names. Each
    /// service port is named once, as it is now.
    pub fn take_changes(&mut self) -> Changes {
        let mut changes = Changes::default();
        for (name, families) in mem::take(&mut self.touched) {
            self.resolve(&name, families, &mut changes);
            self.resolve_health_check(&name);
            if self.services.get(&name).is_some_and(|known| {
                known.service.is_none() && known.slices.is_empty() && known.desired.is_empty()
            }) {
                self.services.remove(&name);
            }
        }
        changes
    }

    /// Returns the time at which the change was triggered ([`EndpointSlice::triggered`]) for each
    /// update of a slice that made it different since the last call.
    pub fn take_triggers(&mut self) -> Vec<(IpFamily, NonZeroI64)> {
        mem::take(&mut self.triggers)
    }

    /// Returns everything to be served, as of the last [`Model::take_changes`], in the order of
    /// names.
    pub fn desired(&self) -> Vec<Arc<DesiredPort>> {
        let mut desired: Vec<_> = self.services.values().flat_map(|known| &known.desired).cloned().collect();
        desired.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        desired
    }

    /// Returns the frontends that several service ports claim now. A ClusterIP has precedence, then
    /// a node port, then the older Service, then the first by namespace, name and port.
    pub fn conflicts(&self) -> Vec<Conflict> {
        self.owners.claims.conflicts()
    }

    /// Returns how many frontends have become contested since the last call, or have other
    /// claimants.
    pub fn take_new_conflicts(&mut self) -> usize {
        self.owners.claims.take_new_conflicts()
    }

    /// Returns how many conflicts were computed since the start.
    pub fn conflicts_computed(&self) -> u64 {
        self.owners.claims.conflicts_computed()
    }

    /// Returns what load balancers are to be answered now, for each Service for which
    /// [`Model::take_changes`] has changed it since the last call. `None` means that they do not
    /// ask for this Service any more.
    pub fn take_health_checks(&mut self) -> Vec<(ObjectName, Option<HealthCheck>)> {
        let changed = mem::take(&mut self.changed_health_checks).into_iter();
        changed.map(|name| (name.clone(), self.health_checks.get(&name).cloned())).collect()
    }

    /// Returns how many times a service port was computed since the start, which is the work that
    /// updates have made.
    pub fn ports_computed(&self) -> u64 {
        self.ports_computed
    }

    /// Returns how many times a health check was computed since the start.
    pub fn health_checks_computed(&self) -> u64 {
        self.health_checks_computed
    }

    fn resolve_health_check(&mut self, name: &ObjectName) {
        let Some(known) = self.services.get(name) else { return };
        let port = known.service.as_ref().and_then(|service| service.health_check_node_port);
        let check = port.map(|port| {
            self.health_checks_computed += 1;
            let ready = |family| local_ready(&known.slices, family, &self.node_name);
            let local_ready = IpFamily::ALL.into_iter().map(ready).max().unwrap_or(0);
            HealthCheck { service: name.clone(), port, local_ready }
        });
        if self.health_checks.get(name) != check.as_ref() {
            self.changed_health_checks.insert(name.clone());
            match check {
                Some(check) => self.health_checks.insert(name.clone(), check),
                None => self.health_checks.remove(name),
            };
        }
    }

    fn resolve(&mut self, name: &ObjectName, families: Families, changes: &mut Changes) {
        let Some(known) = self.services.get_mut(name) else { return };
        let here = NodeTopology {
            node: &self.node_name,
            zone: self.node.as_ref().and_then(|node| node.zone.as_deref()),
        };
        let before = mem::take(&mut known.desired);
        let mut now = Vec::new();
        for (service, port) in
            known.service.iter().flat_map(|service| service.ports.iter().map(move |port| (service, port)))
        {
            for family in IpFamily::ALL.into_iter().filter(|family| resolve::serves(service, *family)) {
                let name = resolve::port_name(service, port, family);
                let previous = named(&before, &name);
                if let Some(previous) = previous
                    && !families.contain(family)
                {
                    now.push(Arc::clone(previous));
                    continue;
                }
                self.ports_computed += 1;
                let mut port = resolve::desired_port(name, service, port, &known.slices, &self.owners, here);
                if let Some(previous) = previous
                    && port.endpoints.all.is_empty()
                    && port.frontends.iter().any(|of| Some((of.address, of.port).into()) == self.server)
                {
                    port.endpoints = previous.endpoints.clone();
                }
                match previous {
                    Some(previous) if **previous == port => now.push(Arc::clone(previous)),
                    _ => {
                        let port = Arc::new(port);
                        changes.changed.push(Arc::clone(&port));
                        now.push(port);
                    }
                }
            }
        }
        let gone = before.iter().filter(|port| named(&now, &port.name).is_none());
        changes.removed.extend(gone.map(|port| port.name.clone()));
        now.shrink_to_fit();
        known.desired = now;
    }

    fn add_claims(&mut self, service: &Service) {
        for_each_claim(service, |claim, rank, claimant| {
            for other in self.owners.claims.add(claim, rank, claimant) {
                touch(&mut self.touched, &other.service, Families::only(claim.family()));
            }
        });
        for other in self.owners.addresses.add(service) {
            self.touch(&other, Families::BOTH);
        }
    }

    fn withdraw_claims(&mut self, service: &Service) {
        for_each_claim(service, |claim, rank, claimant| {
            for other in self.owners.claims.withdraw(claim, rank, claimant) {
                touch(&mut self.touched, &other.service, Families::only(claim.family()));
            }
        });
        for other in self.owners.addresses.remove(service) {
            self.touch(&other, Families::BOTH);
        }
    }

    fn touch(&mut self, service: &ObjectName, families: Families) {
        touch(&mut self.touched, service, families);
    }
}

fn touch(touched: &mut BTreeMap<ObjectName, Families>, service: &ObjectName, families: Families) {
    match touched.entry(service.clone()) {
        btree_map::Entry::Vacant(vacant) => {
            vacant.insert(families);
        }
        btree_map::Entry::Occupied(mut occupied) => {
            let all = occupied.get_mut();
            all.ipv4 |= families.ipv4;
            all.ipv6 |= families.ipv6;
        }
    }
}

/// Finds a service port in `ports`, which are in the order of names.
fn named<'a>(ports: &'a [Arc<DesiredPort>], name: &ServicePortName) -> Option<&'a Arc<DesiredPort>> {
    ports.binary_search_by(|port| port.name.cmp(name)).ok().map(|index| &ports[index])
}

fn slice_service(slice: &ObjectName, service: &Arc<str>) -> ObjectName {
    ObjectName { namespace: Arc::clone(&slice.namespace), name: Arc::clone(service) }
}

/// Sorts the ports by their identity, keeps each once, and frees spare memory.
fn normalize(service: &mut Service) {
    service.ports.sort_by(|a, b| (&a.name, a.protocol).cmp(&(&b.name, b.protocol)));
    service.ports.dedup_by(|b, a| (&a.name, a.protocol) == (&b.name, b.protocol));
    service.ports.shrink_to_fit();
    service.cluster_ips.shrink_to_fit();
    service.external_ips.shrink_to_fit();
    service.load_balancer_ips.shrink_to_fit();
    service.proxied_load_balancer_ips.shrink_to_fit();
    service.source_ranges.shrink_to_fit();
}

fn for_each_claim(service: &Service, mut claim: impl FnMut(Claim, Rank, &Arc<Claimant>)) {
    for port in &service.ports {
        let claimant = Arc::new(Claimant {
            created: service.created,
            service: service.name.clone(),
            port: Arc::clone(&port.name),
            protocol: port.protocol,
        });
        for family in IpFamily::ALL.into_iter().filter(|family| resolve::serves(service, *family)) {
            for frontend in resolve::frontends(service, port, family) {
                claim(Claim::new(&frontend, port.protocol), Rank::of(frontend.kind), &claimant);
            }
        }
    }
}

/// Returns the number of addresses of this family with a ready endpoint on the node.
fn local_ready(slices: &[EndpointSlice], family: IpFamily, node: &str) -> usize {
    let of_family = slices.iter().filter(|slice| slice.family == family && !slice.ports.is_empty());
    let endpoints = of_family.flat_map(|slice| &slice.endpoints);
    let here = endpoints.filter(|endpoint| endpoint.ready && endpoint.node.as_deref() == Some(node));
    here.map(|endpoint| endpoint.address).collect::<BTreeSet<_>>().len()
}
