//! Ends UDP flows whose endpoint is gone: the kernel would translate their packets to it as long as the client goes on sending.
//! The one cleaner of all modes that stand on netfilter, and around them: they know nothing of it.
//!
//! As kube-proxy's (pkg/proxy/conntrack/cleanup.go), with three differences. Flows of service ports without endpoints, and of
//! service ports that are gone, are ended too. A change that takes no endpoint away ends no flow, and reads none. Flows to a node port
//! are ended on the node's own addresses only. TCP and SCTP flows are never ended: their clients notice by themselves.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use nix::sys::socket::AddressFamily;
use prometheus_client::metrics::MetricType;
use rustc_hash::{FxHashMap, FxHashSet};

use super::{Applied, Dataplane, Error, Host, MetricFamily, Programmed, Snapshot, Unsupported, Usage};
use crate::{
    model::{
        desired::{Changes, DesiredPort, FrontendKind, ServicePortName},
        objects::{IpFamily, Protocol},
    },
    sys::{
        CallError,
        conntrack::{Conntrack, UdpFlow},
    },
};

/// What is dialled; without an address: the node port on each of the node's addresses.
type Dialled = (Option<IpAddr>, u16);

/// Endpoints whose flows go on.
type Repliers = FxHashSet<SocketAddr>;

/// What has changed of UDP service ports since flows were ended last. Pure.
#[derive(Debug, Default)]
struct StaleFlows {
    /// UDP service ports as they are served.
    served: FxHashMap<ServicePortName, Arc<DesiredPort>>,
    pending: FxHashMap<(IpFamily, Dialled), Repliers>,
}

impl StaleFlows {
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
        for frontend in before.iter().flat_map(|before| dialled(before)) {
            self.pending.entry((port.name.family, frontend)).or_default();
        }
        for frontend in dialled(port) {
            self.pending.insert((port.name.family, frontend), repliers.clone());
        }
    }

    fn remove(&mut self, name: &ServicePortName) {
        if let Some(before) = self.served.remove(name) {
            for frontend in dialled(&before) {
                self.pending.insert((name.family, frontend), Repliers::default());
            }
        }
    }

    fn resync(&mut self, desired: &[Arc<DesiredPort>]) {
        let names: FxHashSet<&ServicePortName> = desired.iter().map(|port| &port.name).collect();
        let gone: Vec<_> = self.served.keys().filter(|name| !names.contains(name)).cloned().collect();
        gone.iter().for_each(|name| self.remove(name));
        desired.iter().for_each(|port| self.change(port));
    }

    fn families(&self) -> BTreeSet<IpFamily> {
        self.pending.keys().map(|(family, _)| *family).collect()
    }

    fn is_stale(&self, family: IpFamily, flow: &UdpFlow, node_addresses: &BTreeSet<IpAddr>) -> bool {
        let (address, port) = (flow.destination.ip(), flow.destination.port());
        let of_address = self.pending.get(&(family, (Some(address), port)));
        let of_node_port =
            || self.pending.get(&(family, (None, port))).filter(|_| node_addresses.contains(&address));
        of_address.or_else(of_node_port).is_some_and(|repliers| !repliers.contains(&flow.replier))
    }
}

/// Every endpoint that still serves, whether new flows reach it or not.
fn repliers(port: &DesiredPort) -> Repliers {
    let all = port.endpoints.all.iter().chain(&port.endpoints.unused);
    all.map(|endpoint| SocketAddr::new(endpoint.address, endpoint.port)).collect()
}

/// Whether flows that were served before no longer are. Without endpoints clients were refused, and their flows with them.
fn takes_away(before: &DesiredPort, now: &DesiredPort, repliers_now: &Repliers) -> bool {
    let repliers_before = repliers(before);
    repliers_before.is_empty() != repliers_now.is_empty()
        || !repliers_before.is_subset(repliers_now)
        || before.frontends != now.frontends
}

fn dialled(port: &DesiredPort) -> impl Iterator<Item = Dialled> {
    port.frontends.iter().map(|frontend| match frontend.kind {
        FrontendKind::NodePort => (None, frontend.port),
        FrontendKind::ClusterIp | FrontendKind::ExternalIp | FrontendKind::LoadBalancer => {
            (Some(frontend.address), frontend.port)
        }
    })
}

/// A mode whose flows connection tracking knows, and the end of those that are stale after each write.
pub(super) struct WithConntrack {
    inner: Box<dyn Dataplane>,
    stale: StaleFlows,
    node_addresses: BTreeSet<IpAddr>,
    ended: BTreeMap<IpFamily, u64>,
}

impl WithConntrack {
    pub(super) fn new(inner: Box<dyn Dataplane>) -> Self {
        let ended = IpFamily::ALL.into_iter().map(|family| (family, 0)).collect();
        Self { inner, stale: StaleFlows::default(), node_addresses: BTreeSet::new(), ended }
    }

    /// What fails stays pending for the next write.
    fn end_stale_flows(&mut self) {
        if self.stale.pending.is_empty() {
            return;
        }
        match self.try_end_stale_flows() {
            Ok(()) => self.stale.pending.clear(),
            Err(error) => tracing::warn!(
                %error,
                "UDP flows to endpoints that are gone could not be ended; it is tried again with the next change"
            ),
        }
    }

    fn try_end_stale_flows(&mut self) -> Result<(), CallError> {
        let conntrack = Conntrack::open()?;
        for family in self.stale.families() {
            let kernels = match family {
                IpFamily::Ipv4 => AddressFamily::Inet,
                IpFamily::Ipv6 => AddressFamily::Inet6,
            };
            let flows = conntrack.udp_flows(kernels)?;
            let mut ended = 0;
            for flow in flows.iter().filter(|flow| self.stale.is_stale(family, flow, &self.node_addresses)) {
                ended += u64::from(conntrack.remove(kernels, flow)?);
            }
            if ended > 0 {
                tracing::debug!(ended, family = family.name(), "stale UDP flows ended");
            }
            *self.ended.entry(family).or_default() += ended;
        }
        Ok(())
    }
}

impl Programmed for WithConntrack {
    fn snapshot(&self) -> Result<Snapshot, Error> {
        self.inner.snapshot()
    }

    fn usage(&self) -> Result<Usage, Error> {
        self.inner.usage()
    }
}

impl Dataplane for WithConntrack {
    fn apply(&mut self, changes: &Changes) -> Result<Applied, Error> {
        let applied = self.inner.apply(changes)?;
        changes.removed.iter().for_each(|name| self.stale.remove(name));
        changes.changed.iter().for_each(|port| self.stale.change(port));
        self.end_stale_flows();
        Ok(applied)
    }

    fn resync(&mut self, desired: &[Arc<DesiredPort>]) -> Result<Applied, Error> {
        let applied = self.inner.resync(desired)?;
        self.stale.resync(desired);
        self.end_stale_flows();
        Ok(applied)
    }

    fn set_host(&mut self, host: &Host) -> Result<Applied, Error> {
        self.node_addresses.clone_from(&host.node_port_addresses);
        self.inner.set_host(host)
    }

    fn renew_lease(&mut self) -> Result<(), Error> {
        self.inner.renew_lease()
    }

    fn collect_garbage(&mut self) -> Result<(), Error> {
        self.inner.collect_garbage()
    }

    fn retire(&mut self) -> Result<bool, Error> {
        self.inner.retire()
    }

    fn metrics(&self) -> Result<Vec<MetricFamily>, Error> {
        let mut families = self.inner.metrics()?;
        let samples = self.ended.iter().map(|(family, ended)| {
            let labels: super::Labels = Arc::new([("ip_family", Arc::from(family.name()))]);
            (labels, *ended)
        });
        families.push(MetricFamily {
            name: "kubeproxy_conntrack_reconciler_deleted_entries",
            help: "Cumulative conntrack flows deleted by conntrack reconciler",
            kind: MetricType::Counter,
            samples: samples.collect(),
        });
        Ok(families)
    }

    fn min_interval(&self, configured: Duration) -> Duration {
        self.inner.min_interval(configured)
    }

    fn supports(&self, port: &DesiredPort) -> Vec<Unsupported> {
        self.inner.supports(port)
    }

    fn take_without_room(&mut self) -> Option<BTreeMap<ServicePortName, Vec<Unsupported>>> {
        self.inner.take_without_room()
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::model::{
        Model,
        objects::{EndpointPort, ServicePort},
        test_support::{remote, service, slice, target},
    };

    /// `default/dns`: 10.96.0.10:53/UDP and node port 30053, with these endpoints.
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

    fn flow(destination: &str, replier: &str) -> UdpFlow {
        UdpFlow::new(destination.parse().unwrap(), replier.parse().unwrap())
    }

    fn is_stale(stale: &StaleFlows, destination: &str, replier: &str) -> bool {
        let node = BTreeSet::from(["192.0.2.1".parse().unwrap()]);
        stale.is_stale(IpFamily::Ipv4, &flow(destination, replier), &node)
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
        let mut stale = StaleFlows::default();
        stale.change(&dns(before));
        stale.pending.clear();
        stale.change(&dns(now));
        assert_eq!(is_stale(&stale, destination, replier), expected);
    }

    #[test]
    fn further_endpoints_end_no_flow_and_read_none() {
        let mut stale = StaleFlows::default();
        stale.change(&dns(&["10.1.0.1"]));
        stale.pending.clear();
        stale.change(&dns(&["10.1.0.1", "10.1.0.2"]));
        assert!(stale.pending.is_empty());
    }

    #[test]
    fn a_service_port_that_is_gone_keeps_no_flow() {
        let mut stale = StaleFlows::default();
        let dns = dns(&["10.1.0.1"]);
        stale.resync(&[Arc::clone(&dns)]);
        stale.pending.clear();
        stale.resync(&[Arc::clone(&dns)]);
        assert!(stale.pending.is_empty(), "nothing has changed");
        stale.resync(&[]);
        assert!(is_stale(&stale, "10.96.0.10:53", "10.1.0.1:80"));
        // The frontend is another service port's in the same step.
        stale.change(&dns);
        assert!(!is_stale(&stale, "10.96.0.10:53", "10.1.0.1:80"));
    }
}
