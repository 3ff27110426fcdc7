//! Ends UDP flows whose endpoint is gone. The kernel would translate their packets to it for as
//! long as the client goes on sending.
//!
//! The wrapper [`WithConntrack`] does this for all netfilter modes, whose own code knows nothing of
//! it. Mode userspace needs no wrapper: its flows lead to listeners, and it uses [`StaleFlows`]
//! itself. Mode ebpf opens no flow in conntrack. Its wrapper ends the flows that the rules of a
//! former proxy have opened, until conntrack has no translated UDP flow.
//!
//! It works like kube-proxy's (pkg/proxy/conntrack/cleanup.go), with three differences:
//!
//! - Flows of service ports without endpoints, and of service ports that are gone, are ended too.
//! - A change that takes no endpoint away ends no flow, and lists none.
//! - Flows to a node port are ended on the node's own addresses only.
//!
//! TCP and SCTP flows are not ended, because their clients notice by themselves. But when a mode
//! starts, it ends TCP connections that nobody answers. These are connections that began before the
//! mode served, and connections to a process of mode userspace that has ended.

mod stale_flows;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use nix::sys::socket::AddressFamily;
use rustc_hash::{FxHashMap, FxHashSet};

pub(super) use self::stale_flows::{Repliers, StaleFlows};
use super::{
    Applied, Dataplane, Error, Known, MetricFamily, PacketMode, Programmed, Snapshot, UnservedField, Usage,
};
use crate::{
    model::{
        desired::{Changes, DesiredPort, ServicePortName},
        node::Host,
        objects::{IpFamily, Protocol},
    },
    sys::{CallError, net::conntrack::Conntrack},
};

pub(super) const fn address_family(family: IpFamily) -> AddressFamily {
    match family {
        IpFamily::Ipv4 => AddressFamily::Inet,
        IpFamily::Ipv6 => AddressFamily::Inet6,
    }
}

/// Returns true if netfilter translates the destination of a connection that it knows, of any
/// protocol, and `is_one` accepts that destination. A connection that has ended counts for some
/// time.
pub(super) fn has_translated_connections(is_one: impl Fn(SocketAddr) -> bool) -> Result<bool, CallError> {
    let conntrack = Conntrack::open()?;
    for family in IpFamily::ALL {
        if conntrack.has_translated(address_family(family), &is_one)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns true if conntrack has a UDP flow whose destination netfilter has translated.
fn translates_datagrams() -> Result<bool, CallError> {
    let conntrack = Conntrack::open()?;
    for family in IpFamily::ALL {
        let flows = conntrack.udp_flows(address_family(family))?;
        if flows.iter().any(|flow| flow.destination != flow.replier) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Endpoints whose flows go on.
type Endpoints = FxHashSet<SocketAddr>;

impl Repliers for Endpoints {
    fn has(&self, replier: SocketAddr) -> bool {
        self.contains(&replier)
    }
}

/// Changes of UDP service ports since flows were ended last. This type is pure.
#[derive(Debug, Default)]
struct UdpPorts {
    /// UDP service ports as they are served.
    served: FxHashMap<ServicePortName, Arc<DesiredPort>>,
    stale: StaleFlows<Endpoints>,
}

impl UdpPorts {
    fn change(&mut self, port: &Arc<DesiredPort>) {
        if port.name.protocol != Protocol::Udp {
            return;
        }
        let before = self.served.insert(port.name.clone(), Arc::clone(port));
        let repliers = repliers(port);
        if before
            .as_ref()
            .is_some_and(|before| Arc::ptr_eq(before, port) || !takes_away(before, port, &repliers))
        {
            return;
        }
        // Another service port may have taken a frontend over in the same step.
        for frontend in before.iter().flat_map(|before| &before.frontends) {
            self.stale.else_answered_by(port.name.family, frontend, Endpoints::default());
        }
        for frontend in &port.frontends {
            self.stale.answered_by(port.name.family, frontend, repliers.clone());
        }
    }

    fn remove(&mut self, name: &ServicePortName) {
        let Some(before) = self.served.remove(name) else { return };
        for frontend in &before.frontends {
            self.stale.answered_by(name.family, frontend, Endpoints::default());
        }
    }

    fn resync(&mut self, desired: &[Arc<DesiredPort>]) {
        let names: FxHashSet<&ServicePortName> = desired.iter().map(|port| &port.name).collect();
        let gone: Vec<_> = self.served.keys().filter(|name| !names.contains(name)).cloned().collect();
        gone.iter().for_each(|name| self.remove(name));
        desired.iter().for_each(|port| self.change(port));
    }
}

/// Returns every endpoint that still serves, whether new flows reach it or not.
fn repliers(port: &DesiredPort) -> Endpoints {
    let all = port.endpoints.all.iter().chain(&port.endpoints.unused);
    all.map(|endpoint| SocketAddr::new(endpoint.address, endpoint.port)).collect()
}

fn to_tcp_frontends(desired: &[Arc<DesiredPort>]) -> StaleFlows<Endpoints> {
    let mut flows = StaleFlows::default();
    for port in desired.iter().filter(|port| port.name.protocol == Protocol::Tcp) {
        for frontend in &port.frontends {
            flows.answered_by(port.name.family, frontend, Endpoints::default());
        }
    }
    flows
}

/// Returns true if some flows must be ended, because an endpoint or a frontend is gone. All flows
/// must be ended when the first endpoint comes or the last one goes: without endpoints, clients are
/// refused, and so are flows that conntrack knows.
fn takes_away(before: &DesiredPort, now: &DesiredPort, repliers_now: &Endpoints) -> bool {
    let repliers_before = repliers(before);
    repliers_before.is_empty() != repliers_now.is_empty()
        || !repliers_before.is_subset(repliers_now)
        || before.frontends != now.frontends
}

/// The period for which flows are ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Until {
    /// Flows are always ended, because the mode opens them.
    Forever,
    /// Flows are ended until none is left, because only a former proxy's rules have opened them.
    NoneIsTranslated,
    Over,
}

/// Wraps a mode whose flows connection tracking knows, and ends the flows that are stale after each
/// write.
pub(super) struct WithConntrack {
    inner: Box<dyn Dataplane>,
    udp: UdpPorts,
    node_addresses: BTreeSet<IpAddr>,
    /// Addresses by which the node masquerades. Listeners of mode userspace are at them too.
    own: Vec<IpAddr>,
    until: Until,
    has_started: bool,
}

impl WithConntrack {
    pub(super) fn new(inner: Box<dyn Dataplane>) -> Self {
        let (udp, node_addresses, own, has_started) = Default::default();
        Self { inner, udp, node_addresses, own, until: Until::Forever, has_started }
    }

    /// Wraps a mode that itself opens no flow that netfilter translates.
    pub(super) fn of_former_proxy(inner: Box<dyn Dataplane>) -> Self {
        Self { until: Until::NoneIsTranslated, ..Self::new(inner) }
    }

    /// Ends flows after `change` of what is served.
    fn follow(&mut self, change: impl FnOnce(&mut UdpPorts)) {
        if self.until == Until::Over {
            return;
        }
        change(&mut self.udp);
        let has_looked = self.udp.stale.end(&self.node_addresses);
        // After an error, the next change ends the flows.
        if has_looked && self.until == Until::NoneIsTranslated && matches!(translates_datagrams(), Ok(false))
        {
            self.until = Until::Over;
            self.udp.served.clear();
        }
    }
}

impl Programmed for WithConntrack {
    fn snapshot(&self) -> Result<Snapshot, Error> {
        self.inner.snapshot()
    }

    fn usage(&self) -> Result<Usage, Error> {
        self.inner.usage()
    }

    fn metrics(&self) -> Result<Vec<MetricFamily>, Error> {
        let mut families = self.inner.metrics()?;
        if self.until != Until::Forever {
            // The wrapper of a secondary mode reports these metric families.
            return Ok(families);
        }
        families.extend(reconciler_families(&self.udp.stale));
        Ok(families)
    }
}

impl Dataplane for WithConntrack {
    fn apply(&mut self, changes: &Changes) -> Result<Applied, Error> {
        let applied = self.inner.apply(changes)?;
        self.follow(|udp| {
            changes.removed.iter().for_each(|name| udp.remove(name));
            changes.changed.iter().for_each(|port| udp.change(port));
        });
        Ok(applied)
    }

    fn resync(&mut self, desired: &[Arc<DesiredPort>]) -> Result<Applied, Error> {
        let applied = self.inner.resync(desired)?;
        self.follow(|udp| udp.resync(desired));
        if self.until == Until::Forever && !self.has_started {
            self.has_started = to_tcp_frontends(desired).end_unanswered(&self.node_addresses, &self.own);
        }
        Ok(applied)
    }

    fn set_host(&mut self, host: &Host) -> Result<Applied, Error> {
        self.node_addresses.clone_from(&host.node_port_addresses);
        self.own.clone_from(&host.masquerade_addresses);
        self.inner.set_host(host)
    }

    fn collect_garbage(&mut self) -> Result<(), Error> {
        self.inner.collect_garbage()
    }

    fn drain(&mut self) -> Result<bool, Error> {
        self.inner.drain()
    }

    fn invalidate(&mut self, known: Known) {
        self.inner.invalidate(known);
    }

    fn unserved_fields(&self, port: &DesiredPort) -> Vec<UnservedField> {
        self.inner.unserved_fields(port)
    }

    fn take_waiting(&mut self) -> Option<BTreeMap<ServicePortName, Vec<UnservedField>>> {
        self.inner.take_waiting()
    }

    fn packet_mode(&mut self) -> Option<&mut dyn PacketMode> {
        self.inner.packet_mode()
    }
}

fn reconciler_families<R>(flows: &StaleFlows<R>) -> [MetricFamily; 2] {
    [
        MetricFamily::of_families(
            "kubeproxy_conntrack_reconciler_deleted_entries",
            "Cumulative conntrack flows deleted by conntrack reconciler",
            flows.ended.iter().map(|(family, ended)| (*family, *ended)),
        ),
        MetricFamily::histograms_of_families(
            "kubeproxy_conntrack_reconciler_sync_duration_seconds",
            "Time that one search for stale UDP flows took, with ending them",
            flows.took.iter().map(|(family, took)| (*family, took.clone())),
        ),
    ]
}

/// Returns a sample of each metric family.
#[cfg(test)]
pub(super) fn sample_metrics() -> Vec<MetricFamily> {
    let flows = StaleFlows::<Endpoints>::default();
    flows.took.values().for_each(|took| took.observe(0.001));
    reconciler_families(&flows).into()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{
        model::{
            Model,
            objects::{EndpointPort, IpFamily, ServicePort},
            test_support::{remote, service, slice, target},
        },
        sys::net::conntrack::TrackedFlow,
    };

    /// Returns `default/dns` with these endpoints: 10.96.0.10:53/UDP and node port 30053.
    fn dns(endpoints: &[&str]) -> Arc<DesiredPort> {
        let mut dns = service("default/dns", &["10.96.0.10"]);
        let port = 53;
        dns.ports =
            vec![ServicePort { name: "".into(), protocol: Protocol::Udp, port, node_port: Some(30_053) }];
        let mut model = Model::new("node");
        model.apply_service(dns);
        let slice = slice("default/dns-1", "dns", endpoints.iter().map(|one| remote(one)).collect());
        model.apply_slice(slice.ports(vec![EndpointPort { protocol: Protocol::Udp, ..target("", 80) }]));
        Arc::clone(&model.take_changes().changed[0])
    }

    fn flow(destination: &str, replier: &str) -> TrackedFlow {
        TrackedFlow::new(destination.parse().unwrap(), replier.parse().unwrap())
    }

    fn is_stale(udp: &UdpPorts, destination: &str, replier: &str) -> bool {
        let node = BTreeSet::from(["192.0.2.1".parse().unwrap()]);
        udp.stale.is_stale(IpFamily::Ipv4, &flow(destination, replier), &node)
    }

    #[rstest]
    #[case::endpoint_is_gone(&["10.1.0.1", "10.1.0.2"], &["10.1.0.2"], "10.96.0.10:53", "10.1.0.1:80", true)]
    #[case::endpoint_stays(&["10.1.0.1", "10.1.0.2"], &["10.1.0.2"], "10.96.0.10:53", "10.1.0.2:80", false)]
    #[case::no_endpoint_is_left(&["10.1.0.1"], &[], "10.96.0.10:53", "10.1.0.1:80", true)]
    #[case::the_first_endpoint(&[], &["10.1.0.1"], "10.96.0.10:53", "10.96.0.10:53", true)]
    #[case::node_port(&["10.1.0.1"], &["10.1.0.2"], "192.0.2.1:30053", "10.1.0.1:80", true)]
    #[case::node_port_of_another_node(&["10.1.0.1"], &["10.1.0.2"], "192.0.2.2:30053", "192.0.2.2:30053", false)]
    #[case::another_port(&["10.1.0.1"], &["10.1.0.2"], "10.96.0.10:54", "10.1.0.1:80", false)]
    fn flows_after_a_change(
        #[case] before: &[&str],
        #[case] now: &[&str],
        #[case] destination: &str,
        #[case] replier: &str,
        #[case] expected: bool,
    ) {
        let mut udp = UdpPorts::default();
        udp.change(&dns(before));
        udp.stale.forget();
        udp.change(&dns(now));
        assert_eq!(is_stale(&udp, destination, replier), expected);
    }

    #[test]
    fn further_endpoints_end_no_flow_and_read_none() {
        let mut udp = UdpPorts::default();
        udp.change(&dns(&["10.1.0.1"]));
        udp.stale.forget();
        udp.change(&dns(&["10.1.0.1", "10.1.0.2"]));
        assert!(udp.stale.is_empty());
    }

    #[test]
    fn a_service_port_that_is_gone_keeps_no_flow() {
        let mut udp = UdpPorts::default();
        let dns = dns(&["10.1.0.1"]);
        udp.resync(&[Arc::clone(&dns)]);
        udp.stale.forget();
        udp.resync(&[Arc::clone(&dns)]);
        assert!(udp.stale.is_empty(), "nothing has changed");
        udp.resync(&[]);
        assert!(is_stale(&udp, "10.96.0.10:53", "10.1.0.1:80"));
        // Another service port takes the frontend over in the same step.
        udp.change(&dns);
        assert!(!is_stale(&udp, "10.96.0.10:53", "10.1.0.1:80"));
    }
}
