//! Leaves to the node the ClusterIPs at which it listens itself, as NodeLocal DNSCache does at the
//! address of kube-dns. Packets of such a frontend must reach the node's own socket. Under
//! kube-proxy, rules without connection tracking achieve that.
//!
//! The frontend is withheld from the maps while two things hold. The node has the address on an
//! interface other than `kube-ipvs0`, and a socket is bound to exactly that address and port.
//! Before and after that, the frontend is served like any other.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use nix::sys::socket::AddressFamily;

use crate::{
    model::{
        desired::{Changes, DesiredPort, Frontend, FrontendKind, ServicePortName},
        node::Host,
        objects::Protocol,
    },
    modes::{
        Applied, Dataplane, Effect, Error, EventQuery, EventStream, FlowQuery, FlowSnapshot, Known,
        MetricFamily, PacketMode, Programmed, Snapshot, UnservedField, Usage, port_set::PortSet, unserved,
    },
    sys::{
        CallError,
        net::socket_diag::{SocketDiag, Transport},
    },
};

/// The protocol and the bound address of a socket that listens, or that receives datagrams of any
/// peer.
type Listener = (Protocol, SocketAddr);

type Listeners = BTreeSet<Listener>;

/// Returns the listeners of this network namespace at one of `addresses`.
///
/// Sockets that are bound to every address do not count: a program that serves the node, such as
/// sshd, does not mean an address of Services.
pub(super) fn listeners_at(addresses: &BTreeSet<IpAddr>) -> Result<Listeners, CallError> {
    let mut found = Listeners::new();
    if addresses.is_empty() {
        return Ok(found);
    }
    let diag = SocketDiag::open()?;
    // A socket of IPv6 may be bound to an IPv4-mapped address.
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        for (protocol, transport) in [(Protocol::Tcp, Transport::Tcp), (Protocol::Udp, Transport::Udp)] {
            let bound = diag.listening(family, transport)?.into_iter();
            let bound = bound.map(|at| SocketAddr::new(at.ip().to_canonical(), at.port()));
            found.extend(bound.filter(|at| addresses.contains(&at.ip())).map(|at| (protocol, at)));
        }
    }
    Ok(found)
}

type Look = Box<dyn Fn(&BTreeSet<IpAddr>) -> Result<Listeners, CallError> + Send>;

/// A dataplane that is not given the frontends that the node listens at.
pub(super) struct LeftToNode {
    inner: Box<dyn Dataplane>,
    look: Look,
    /// The node as `set_host` described it last; `None` before the first call.
    host: Option<Host>,
    /// The ClusterIPs that the node has itself, as `inner` got them last.
    own_cluster_ips: BTreeSet<IpAddr>,
    /// All desired service ports.
    ports: PortSet,
    /// The ClusterIPs in `ports` that the node has itself.
    own_now: BTreeSet<IpAddr>,
    left: Listeners,
    /// The service ports that `inner` does not have yet as `left` demands.
    pending: BTreeSet<ServicePortName>,
    has_synced: bool,
    /// True if a service port at an address of the node has come, gone or changed since listeners
    /// were last listed.
    is_touched: bool,
    /// Why the last attempt to list listeners failed; `None` if it succeeded.
    failure: Option<String>,
    /// True if `left`, or a service port that it concerns, has changed since the last
    /// [`Dataplane::take_waiting`].
    told_is_old: bool,
    /// The exceptions that `inner` reported last.
    waiting: BTreeMap<ServicePortName, Vec<UnservedField>>,
}

impl LeftToNode {
    pub(super) fn new(inner: Box<dyn Dataplane>) -> Self {
        Self::with(inner, Box::new(listeners_at))
    }

    fn with(inner: Box<dyn Dataplane>, look: Look) -> Self {
        Self {
            inner,
            look,
            host: None,
            own_cluster_ips: BTreeSet::new(),
            ports: PortSet::default(),
            own_now: BTreeSet::new(),
            left: Listeners::new(),
            pending: BTreeSet::new(),
            has_synced: false,
            is_touched: false,
            failure: None,
            told_is_old: false,
            waiting: BTreeMap::new(),
        }
    }

    fn is_left(&self, protocol: Protocol, frontend: &Frontend) -> bool {
        frontend.kind == FrontendKind::ClusterIp
            && self.left.contains(&(protocol, SocketAddr::new(frontend.address, frontend.port)))
    }

    /// Returns the port without the frontends that are left to the node.
    fn served(&self, port: &Arc<DesiredPort>) -> Arc<DesiredPort> {
        let is_left = |frontend: &Frontend| self.is_left(port.name.protocol, frontend);
        if self.left.is_empty() || !port.frontends.iter().any(is_left) {
            return Arc::clone(port);
        }
        let frontends = port.frontends.iter().filter(|frontend| !is_left(frontend)).cloned().collect();
        Arc::new(DesiredPort { frontends, ..DesiredPort::clone(port) })
    }

    fn note(&mut self, port: &Arc<DesiredPort>) {
        if let Some(host) = &self.host {
            let own = cluster_ips(port).filter(|address| host.addresses.contains(address));
            self.own_now.extend(own);
        }
        let before = self.ports.insert(Arc::clone(port));
        self.is_touched |= self.is_at_own_address(port);
        let leaves = |address| self.own_now.contains(&address) && cluster_ips(port).all(|ip| ip != address);
        if before.is_some_and(|before| cluster_ips(&before).any(leaves)) {
            self.is_touched = true;
            self.find_own();
        }
    }

    fn forget(&mut self, name: &ServicePortName) {
        let Some(before) = self.ports.remove(name) else { return };
        if self.is_at_own_address(&before) {
            self.is_touched = true;
            self.find_own();
        }
    }

    fn is_at_own_address(&self, port: &DesiredPort) -> bool {
        cluster_ips(port).any(|address| self.own_now.contains(&address))
    }

    /// Finds the ClusterIPs that the node has itself among all service ports.
    fn find_own(&mut self) {
        let Some(host) = &self.host else { return };
        let all = self.ports.iter().flat_map(|port| cluster_ips(port));
        self.own_now = all.filter(|address| host.addresses.contains(address)).collect();
    }

    /// Lists the listeners, and notes the service ports for which something has changed.
    ///
    /// If they cannot be listed, the last list stays in force, so that no Service waits for it.
    fn look(&mut self) {
        let listed = match self.own_now.is_empty() {
            true => Ok(Listeners::new()),
            false => (self.look)(&self.own_now),
        };
        let left = match listed {
            Ok(left) => left,
            Err(error) => return self.warn_once(error.to_string()),
        };
        self.failure = None;
        let differing: BTreeSet<IpAddr> =
            self.left.symmetric_difference(&left).map(|(_, at)| at.ip()).collect();
        self.left = left;
        if !differing.is_empty() {
            self.told_is_old = true;
            let is_concerned = |port: &&Arc<DesiredPort>| cluster_ips(port).any(|ip| differing.contains(&ip));
            self.pending.extend(self.ports.iter().filter(is_concerned).map(|port| port.name.clone()));
        }
    }

    fn warn_once(&mut self, error: String) {
        if self.failure.as_ref() != Some(&error) {
            tracing::warn!(
                error,
                "the sockets at ClusterIPs that this node has itself cannot be listed: Services with these addresses are \
                 served as if nobody listened, or as at the last look"
            );
            self.failure = Some(error);
        }
    }

    /// Lists the listeners anew by [`look`](Self::look) if a change may concern them. The garbage
    /// collection does that once a second anyway.
    fn look_if_touched(&mut self) {
        if mem::take(&mut self.is_touched) {
            self.told_is_old |= !self.left.is_empty();
            self.look();
        }
    }

    /// Calls `write` while `inner` counts the ClusterIPs as the node's own that are so before or
    /// after it.
    ///
    /// Otherwise a client of a withheld frontend would be refused at such an address. An error of
    /// `set_host` holds no Service back.
    fn write(
        &mut self,
        host_is_new: bool,
        write: impl FnOnce(&mut Self) -> Result<Applied, Error>,
    ) -> Result<Applied, Error> {
        let own = self.own_now.clone();
        let before = self.tell_host(host_is_new, self.own_cluster_ips.union(&own).copied().collect());
        let written = write(self);
        let after = self.tell_host(false, own);
        let mut applied = written?;
        applied += before?;
        applied += after?;
        Ok(applied)
    }

    fn tell_host(&mut self, is_new: bool, own_cluster_ips: BTreeSet<IpAddr>) -> Result<Applied, Error> {
        let Some(host) = &self.host else { return Ok(Applied::default()) };
        if !is_new && own_cluster_ips == self.own_cluster_ips {
            return Ok(Applied::default());
        }
        let applied =
            self.inner.set_host(&Host { own_cluster_ips: own_cluster_ips.clone(), ..host.clone() })?;
        self.own_cluster_ips = own_cluster_ips;
        Ok(applied)
    }

    /// Writes the service ports for which something has changed because a listener came or went.
    fn write_pending(&mut self) -> Result<Applied, Error> {
        if self.pending.is_empty() || !self.has_synced {
            return Ok(Applied::default());
        }
        let ports = self.pending.iter().filter_map(|name| self.ports.get(name));
        let changed = ports.map(|port| self.served(port)).collect();
        let applied = self.inner.apply(&Changes { changed, removed: Vec::new() })?;
        self.pending.clear();
        Ok(applied)
    }

    /// Returns the frontends that are left to the node, for people.
    fn told(&self) -> impl Iterator<Item = (ServicePortName, UnservedField)> {
        let ports = self.ports.iter().filter(|port| self.is_at_own_address(port));
        ports.filter_map(|port| {
            let is_left = |frontend: &&Frontend| self.is_left(port.name.protocol, frontend);
            let left = port.frontends.iter().filter(is_left);
            let at: Vec<String> =
                left.map(|one| SocketAddr::new(one.address, one.port).to_string()).collect();
            let instead =
                format!("left to this node, which has the address and listens there: {}", at.join(", "));
            let field = unserved::field(FrontendKind::ClusterIp);
            let told = UnservedField { field, effect: Effect::LeftToNode, instead: instead.into() };
            (!at.is_empty()).then(|| (port.name.clone(), told))
        })
    }
}

fn cluster_ips(port: &DesiredPort) -> impl Iterator<Item = IpAddr> {
    let of_kind = port.frontends.iter().filter(|frontend| frontend.kind == FrontendKind::ClusterIp);
    of_kind.map(|frontend| frontend.address)
}

impl Programmed for LeftToNode {
    fn snapshot(&self) -> Result<Snapshot, Error> {
        self.inner.snapshot()
    }

    fn usage(&self) -> Result<Usage, Error> {
        self.inner.usage()
    }

    fn flows(&self, query: &FlowQuery<'_>) -> Result<Option<Vec<FlowSnapshot>>, Error> {
        self.inner.flows(query)
    }

    fn watch(&self, query: EventQuery) -> Result<Option<Box<dyn EventStream>>, Error> {
        self.inner.watch(query)
    }

    fn metrics(&self) -> Result<Vec<MetricFamily>, Error> {
        self.inner.metrics()
    }
}

impl Dataplane for LeftToNode {
    fn apply(&mut self, changes: &Changes) -> Result<Applied, Error> {
        changes.removed.iter().for_each(|name| self.forget(name));
        changes.changed.iter().for_each(|port| self.note(port));
        self.look_if_touched();
        self.write(false, |this| {
            for name in changes.changed.iter().map(|port| &port.name).chain(&changes.removed) {
                this.pending.remove(name);
            }
            let mut applied = this.write_pending()?;
            let changed = changes.changed.iter().map(|port| this.served(port)).collect();
            applied += this.inner.apply(&Changes { changed, removed: changes.removed.clone() })?;
            Ok(applied)
        })
    }

    fn resync(&mut self, desired: &[Arc<DesiredPort>]) -> Result<Applied, Error> {
        self.ports = desired.iter().cloned().collect();
        self.find_own();
        self.told_is_old |= !self.left.is_empty();
        self.look();
        self.write(false, |this| {
            let served: Vec<_> = desired.iter().map(|port| this.served(port)).collect();
            let applied = this.inner.resync(&served)?;
            this.pending.clear();
            this.has_synced = true;
            Ok(applied)
        })
    }

    fn set_host(&mut self, host: &Host) -> Result<Applied, Error> {
        self.host = Some(host.clone());
        self.find_own();
        self.look();
        self.write(true, Self::write_pending)
    }

    fn collect_garbage(&mut self) -> Result<(), Error> {
        self.look();
        let followed = self.write(false, Self::write_pending);
        self.inner.collect_garbage()?;
        followed.map(drop)
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
        let of_inner = self.inner.take_waiting();
        if !mem::take(&mut self.told_is_old) && of_inner.is_none() {
            return None;
        }
        self.waiting = of_inner.unwrap_or_else(|| mem::take(&mut self.waiting));
        let mut all = self.waiting.clone();
        for (name, told) in self.told() {
            all.entry(name).or_default().push(told);
        }
        Some(all)
    }

    fn packet_mode(&mut self) -> Option<&mut dyn PacketMode> {
        self.inner.packet_mode()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    };

    use super::*;
    use crate::{
        model::{
            Model,
            test_support::{port, service},
        },
        modes::ErrorKind,
    };

    const CLUSTER_IP: &str = "10.96.0.10";

    /// Records what the dataplane below got, and what it is to refuse.
    #[derive(Default)]
    struct Notes {
        /// The port numbers of each service port's frontends.
        frontends: BTreeMap<String, Vec<u16>>,
        own_cluster_ips: BTreeSet<IpAddr>,
        /// For each change of service ports, true if the ClusterIP was the node's own.
        was_own: Vec<bool>,
        refuses: bool,
        refuses_host: bool,
    }

    struct Inner(Arc<Mutex<Notes>>);

    impl Inner {
        fn note(&self, ports: &[Arc<DesiredPort>]) -> Result<Applied, Error> {
            let mut notes = self.0.lock().unwrap();
            if notes.refuses {
                return Err(Error::new(ErrorKind::Other, "refused"));
            }
            let is_own = notes.own_cluster_ips.contains(&CLUSTER_IP.parse().unwrap());
            notes.was_own.push(is_own);
            for port in ports {
                let numbers = port.frontends.iter().map(|frontend| frontend.port).collect();
                notes.frontends.insert(port.name.port.to_string(), numbers);
            }
            Ok(Applied::default())
        }
    }

    impl Programmed for Inner {
        fn snapshot(&self) -> Result<Snapshot, Error> {
            Ok(Snapshot::default())
        }

        fn usage(&self) -> Result<Usage, Error> {
            Ok(Usage::default())
        }
    }

    impl Dataplane for Inner {
        fn apply(&mut self, changes: &Changes) -> Result<Applied, Error> {
            self.note(&changes.changed)
        }

        fn resync(&mut self, desired: &[Arc<DesiredPort>]) -> Result<Applied, Error> {
            self.note(desired)
        }

        fn set_host(&mut self, host: &Host) -> Result<Applied, Error> {
            let mut notes = self.0.lock().unwrap();
            if notes.refuses_host {
                return Err(Error::new(ErrorKind::Other, "no room for addresses"));
            }
            notes.own_cluster_ips.clone_from(&host.own_cluster_ips);
            Ok(Applied::default())
        }

        fn collect_garbage(&mut self) -> Result<(), Error> {
            Ok(())
        }

        fn unserved_fields(&self, _port: &DesiredPort) -> Vec<UnservedField> {
            Vec::new()
        }
    }

    /// A Service with the ports 53 and 9153 at an address that the node has.
    struct Fixture {
        dataplane: LeftToNode,
        notes: Arc<Mutex<Notes>>,
        listeners: Arc<Mutex<Listeners>>,
        /// True if listeners cannot be listed.
        fails: Arc<AtomicBool>,
    }

    fn host(addresses: &[&str]) -> Host {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        Host { addresses, ..Host::default() }
    }

    impl Fixture {
        fn new() -> Self {
            let (notes, listeners): (Arc<Mutex<Notes>>, Arc<Mutex<Listeners>>) = Default::default();
            let (known, fails) = (Arc::clone(&listeners), Arc::new(AtomicBool::new(false)));
            let may_fail = Arc::clone(&fails);
            let look = move |_: &BTreeSet<IpAddr>| match may_fail.load(Ordering::SeqCst) {
                true => Err(CallError::new("sendto", nix::Error::ENOENT.into())),
                false => Ok(known.lock().unwrap().clone()),
            };
            let mut dataplane = LeftToNode::with(Box::new(Inner(Arc::clone(&notes))), Box::new(look));
            let mut model = Model::new("node");
            let ports = vec![port("dns", 53), port("metrics", 9153)];
            model.apply_service(service("kube-system/kube-dns", &[CLUSTER_IP]).ports(ports));
            dataplane.set_host(&host(&[CLUSTER_IP, "192.0.2.1"])).unwrap();
            dataplane.resync(&model.take_changes().changed).unwrap();
            Self { dataplane, notes, listeners, fails }
        }

        fn listen(&self, at: &[&str]) {
            let at = at.iter().map(|at| (Protocol::Tcp, at.parse().unwrap()));
            *self.listeners.lock().unwrap() = at.collect();
        }

        /// Returns the port numbers of the frontends that the dataplane below has.
        fn served(&self) -> Vec<u16> {
            self.notes.lock().unwrap().frontends.values().flatten().copied().collect()
        }

        fn told(&mut self) -> Option<Vec<String>> {
            let told = self.dataplane.take_waiting()?;
            Some(told.values().flatten().map(|one| one.instead.to_string()).collect())
        }
    }

    #[test]
    fn what_the_node_listens_at_is_left_to_it_and_nothing_else() {
        let mut fixture = Fixture::new();
        assert_eq!(fixture.served(), [53, 9153]);
        fixture.listen(&["10.96.0.10:53", "10.96.0.10:8080"]);
        fixture.dataplane.collect_garbage().unwrap();
        assert_eq!(fixture.served(), [9153]);
        let told = fixture.told().unwrap();
        assert!(told.len() == 1 && told[0].contains("10.96.0.10:53"), "{told:?}");
        assert_eq!(fixture.told(), None, "nothing has changed");
        fixture.listen(&[]);
        fixture.dataplane.collect_garbage().unwrap();
        assert_eq!((fixture.served(), fixture.told()), (vec![53, 9153], Some(Vec::new())));
    }

    /// Before or after the change, a client would otherwise be refused as at an unknown port.
    #[test]
    fn an_address_is_the_nodes_own_for_as_long_as_a_frontend_is_withheld() {
        let mut fixture = Fixture::new();
        fixture.listen(&["10.96.0.10:53"]);
        fixture.dataplane.collect_garbage().unwrap();
        fixture.notes.lock().unwrap().was_own.clear();
        fixture.dataplane.set_host(&host(&["192.0.2.1"])).unwrap();
        assert_eq!(fixture.served(), [53, 9153]);
        assert_eq!(fixture.notes.lock().unwrap().was_own, [true], "while it is published again");
        assert!(fixture.notes.lock().unwrap().own_cluster_ips.is_empty());
        fixture.dataplane.set_host(&host(&[CLUSTER_IP])).unwrap();
        assert_eq!(fixture.served(), [9153], "with the address, at once");
        assert_eq!(fixture.notes.lock().unwrap().was_own, [true, true]);
    }

    #[test]
    fn what_could_not_be_written_is_written_by_the_next_look() {
        let mut fixture = Fixture::new();
        fixture.listen(&["10.96.0.10:53"]);
        fixture.notes.lock().unwrap().refuses = true;
        fixture.dataplane.collect_garbage().unwrap_err();
        assert_eq!(fixture.served(), [53, 9153]);
        fixture.notes.lock().unwrap().refuses = false;
        fixture.dataplane.collect_garbage().unwrap();
        assert_eq!(fixture.served(), [9153]);
    }

    /// `set_host` fails, for example, if the node has more addresses than there is room for, or if
    /// an interface takes no program.
    #[test]
    fn services_are_written_although_the_host_is_refused() {
        let mut fixture = Fixture::new();
        fixture.notes.lock().unwrap().refuses_host = true;
        fixture.dataplane.set_host(&host(&["192.0.2.1"])).unwrap_err();
        fixture.notes.lock().unwrap().frontends.clear();
        let mut model = Model::new("node");
        model.apply_service(service("default/web", &["10.96.0.20"]).ports(vec![port("web", 80)]));
        let changed = model.take_changes().changed;
        let changes = Changes { changed: changed.clone(), removed: Vec::new() };
        drop(fixture.dataplane.apply(&changes));
        assert_eq!(fixture.served(), [80]);
        fixture.notes.lock().unwrap().frontends.clear();
        drop(fixture.dataplane.resync(&changed));
        assert_eq!(fixture.served(), [80]);
    }

    #[test]
    fn services_are_written_although_listeners_cannot_be_listed() {
        let mut fixture = Fixture::new();
        fixture.listen(&["10.96.0.10:53"]);
        fixture.dataplane.collect_garbage().unwrap();
        fixture.fails.store(true, Ordering::SeqCst);
        let mut model = Model::new("node");
        let ports = vec![port("dns", 53), port("metrics", 9154)];
        model.apply_service(service("kube-system/kube-dns", &[CLUSTER_IP]).ports(ports));
        let changed = model.take_changes().changed;
        fixture.dataplane.apply(&Changes { changed, removed: Vec::new() }).unwrap();
        assert_eq!(fixture.served(), [9154], "what is known of listeners stays");
    }
}
