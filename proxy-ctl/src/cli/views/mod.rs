//! The forms in which tables and JSON show what is programmed. The JSON forms are a contract:
//! from the first release on, fields are added, never renamed.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use serde::Serialize;

use super::{
    service_filter::ServiceFilter,
    table::{bytes, table},
    xdp::{self, WorkloadInterfaces, XdpView},
};
use crate::{
    cleanup::{Found, Part},
    config::{Keyword, duration},
    model::{
        mode::Mode,
        node::Encapsulation,
        objects::{Algorithm, Forwarding},
    },
    modes::{MapUsage, OtherProgram, ReasonUsage},
    process::record::{InterfaceRecord, Record, SourceRecord, UnservedFieldRecord},
};

/// A service port in one IP family.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ServiceView {
    pub(super) namespace: String,
    pub(super) name: String,
    /// The port's name. It is empty if the Service has one unnamed port.
    pub(super) port: String,
    pub(super) protocol: &'static str,
    pub(super) family: &'static str,
    /// The index in the map `services`.
    pub(super) id: u32,
    pub(super) policy: Policy,
    pub(super) algorithm: Algorithm,
    pub(super) forwarding: Forwarding,
    /// The encapsulation, if direct server return is used.
    pub(super) encapsulation: Option<Encapsulation>,
    pub(super) frontends: Vec<FrontendView>,
    /// The endpoints of scope cluster. Clients in the cluster get them at external addresses and at
    /// node ports. The next two fields count the endpoints for the ClusterIP and for clients from
    /// outside.
    pub(super) endpoints: Vec<EndpointView>,
    pub(super) internal_endpoints: usize,
    pub(super) external_endpoints: usize,
    /// The secondary mode, if it serves this port because the active mode cannot.
    pub(super) delegated_to: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum FrontendKind {
    /// An address for clients in the cluster.
    ClusterIp,
    /// An external address or the address of a load balancer.
    External,
    NodePort,
}

#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub(super) struct FrontendView {
    pub(super) kind: FrontendKind,
    /// The address. `None` stands for every address of the node.
    pub(super) address: Option<IpAddr>,
    pub(super) port: u16,
}

impl FrontendView {
    fn text(&self) -> String {
        match self.address {
            Some(address) => SocketAddr::new(address, self.port).to_string(),
            None => format!("node port {}", self.port),
        }
    }
}

#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub(super) struct EndpointView {
    pub(super) address: IpAddr,
    pub(super) port: u16,
    pub(super) local: bool,
    pub(super) state: &'static str,
}

/// The clients that get endpoints of this node only.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Policy {
    Cluster,
    InternalLocal,
    ExternalLocal,
    Local,
}

impl Policy {
    /// Returns the policy. The arguments are true if the policy is Local for clients of the cluster
    /// IP, and for clients from outside.
    pub(super) fn of(internal_is_local: bool, external_is_local: bool) -> Self {
        match (internal_is_local, external_is_local) {
            (false, false) => Self::Cluster,
            (true, false) => Self::InternalLocal,
            (false, true) => Self::ExternalLocal,
            (true, true) => Self::Local,
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Cluster => "Cluster",
            Self::InternalLocal => "internal Local",
            Self::ExternalLocal => "external Local",
            Self::Local => "Local",
        }
    }
}

impl ServiceView {
    /// Returns true if the mode does not know to which Service the port belongs.
    fn is_unnamed(&self) -> bool {
        self.namespace.is_empty()
    }

    fn title(&self) -> String {
        let Self { namespace, name, port, .. } = self;
        if self.is_unnamed() {
            name.clone()
        } else if port.is_empty() {
            format!("{namespace}/{name}")
        } else {
            format!("{namespace}/{name}:{port}")
        }
    }

    /// Returns the policy, followed by algorithm, forwarding and encapsulation if they are not the
    /// default, and by the secondary mode if it serves the port.
    fn policy_and_choices(&self) -> String {
        let algorithm = (self.algorithm != Algorithm::default()).then(|| self.algorithm.word());
        let forwarding = (self.forwarding != Forwarding::default()).then(|| self.forwarding.word());
        let encapsulation =
            self.encapsulation.filter(|one| *one != Encapsulation::default()).map(Keyword::word);
        let all = [Some(self.policy.text()), algorithm, forwarding, encapsulation];
        let secondary = self.delegated_to.map(|mode| format!("by mode {mode}"));
        let all = all.into_iter().flatten().map(str::to_owned).chain(secondary);
        all.collect::<Vec<_>>().join(", ")
    }

    pub(super) fn matches(&self, wanted: &ServiceFilter) -> bool {
        wanted.matches(&self.namespace, &self.name, &self.port)
    }
}

const NOTHING_SERVED: &str = "No services are programmed. Start the controller with `proxy-ctl run --manifests DIR` or with a kubeconfig; \
     `proxy-ctl status` tells whether one runs.\n";

/// The note below services in mode ipvs.
const UNNAMED: &str = "Listed by address: IPVS keeps no names of Services.\n";

pub(super) fn services(services: &[ServiceView]) -> String {
    if services.is_empty() {
        return NOTHING_SERVED.to_owned();
    }
    let rows = services.iter().map(|service| {
        let local = service.endpoints.iter().filter(|endpoint| endpoint.local).count();
        let frontends: Vec<_> = service.frontends.iter().map(FrontendView::text).collect();
        [
            service.title(),
            service.protocol.to_owned(),
            frontends.join("\n"),
            format!("{local}/{}", service.endpoints.len()),
            service.policy_and_choices(),
        ]
    });
    let mut text = table(["SERVICE", "PROTOCOL", "FRONTENDS", "LOCAL/ALL ENDPOINTS", "POLICY"], rows);
    if services.iter().any(ServiceView::is_unnamed) {
        text.push_str(UNNAMED);
    }
    text
}

#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub(super) struct BackendView {
    pub(super) id: u32,
    pub(super) address: IpAddr,
    pub(super) port: u16,
    pub(super) protocol: &'static str,
    pub(super) state: &'static str,
    pub(super) local: bool,
    /// The number of service ports that use it.
    pub(super) services: u32,
    /// The number of connections of this node. `None` if they are not counted.
    pub(super) connections: Option<u64>,
}

pub(super) fn backends(backends: &[BackendView]) -> String {
    if backends.is_empty() {
        return "No service has an endpoint. `proxy-ctl services` shows what is served.\n".to_owned();
    }
    let rows = backends.iter().map(|backend| {
        [
            backend.address.to_string(),
            backend.port.to_string(),
            backend.protocol.to_owned(),
            backend.state.to_owned(),
            if backend.local { "yes" } else { "no" }.to_owned(),
            backend.services.to_string(),
            backend.connections.map_or_else(|| "-".to_owned(), |connections| connections.to_string()),
        ]
    });
    table(["ADDRESS", "PORT", "PROTOCOL", "STATE", "LOCAL", "SERVICES", "CONNECTIONS"], rows)
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct StatusView {
    /// The active mode. `None` if nothing is programmed.
    pub(super) mode: Option<String>,
    pub(super) reasons: Vec<String>,
    /// The reason why the mode replaces the one that was asked for.
    pub(super) fallback: Option<String>,
    pub(super) node: Option<String>,
    pub(super) controller: ControllerView,
    pub(super) sources: Option<Vec<SourceRecord>>,
    pub(super) hooks: Vec<HookView>,
    /// The interfaces of workloads without packet programs, each as "name: reason".
    pub(super) unattached: Vec<String>,
    /// The state of XDP on uplinks. Empty without `ebpf.xdp`.
    pub(super) xdp: Vec<XdpView>,
    /// The number of workload interfaces, by whether XDP forwards packets to them. `None` without
    /// `ebpf.xdp`.
    pub(super) workload_interfaces: Option<WorkloadInterfaces>,
    /// The seconds for which everything is served without a controller. 0: nothing is translated
    /// any more. `None`: there is no end.
    pub(super) withdraws_in: Option<u64>,
    pub(super) maps: Vec<MapUsage>,
    pub(super) counters: Vec<ReasonUsage>,
    pub(super) former_kube_proxy: FormerView,
    /// The fields of Services that are not served as asked, by service port.
    pub(super) unserved_fields: Vec<UnservedFieldRecord>,
    /// The things that the caller may not read, each with the reason.
    pub(super) unreadable: Vec<String>,
}

/// The rules that another kube-proxy has left on this node.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct FormerView {
    pub(super) left: Vec<Part>,
    /// The service ports that are not served, each with the reason. The rules stay because of them.
    pub(super) blocked_by: Vec<String>,
    /// The reasons why there may be more rules than were found.
    pub(super) unknown: Vec<String>,
}

impl FormerView {
    pub(super) fn new(found: &Found, blocked_by: Vec<String>) -> Self {
        let unknown = found.problems.iter().map(ToString::to_string).collect();
        Self { left: found.parts.clone(), blocked_by, unknown }
    }

    /// Returns a line about the rules. `None` if there is nothing to say.
    pub(super) fn text(&self) -> Option<String> {
        let left: Vec<String> = self.left.iter().map(Part::to_string).collect();
        let mut text = left.join(", ");
        if !self.blocked_by.is_empty() {
            text.push_str(&format!(
                "; they stay because these are not served: {}",
                self.blocked_by.join(", ")
            ));
        }
        if !self.unknown.is_empty() {
            text.push_str(if left.is_empty() { "not known: " } else { "; not all is known: " });
            text.push_str(&self.unknown.join("; "));
        }
        Some(text).filter(|text| !text.is_empty())
    }
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct ControllerView {
    /// True if a controller runs. `None` if the caller may not find out.
    pub(super) running: Option<bool>,
    /// True if the controller is starting, so that what is programmed is a predecessor's.
    pub(super) starting: bool,
    pub(super) pid: Option<u32>,
}

/// A hook with a program. Hooks are sorted by interface. Those of the cgroup have no interface and
/// come first.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub(super) struct HookView {
    pub(super) interface: Option<String>,
    pub(super) name: String,
    /// The role: `workload` or `uplink`. `None` for a cgroup, or if no controller has recorded a
    /// role.
    pub(super) role: Option<String>,
    /// The reason why the interface has that role.
    pub(super) reason: Option<String>,
    /// The kind: `cgroup`, `tcx`, `clsact` or `xdp`. The name of an `xdp` hook is the mode of XDP.
    pub(super) kind: String,
    /// The programs of others at the same hook, in the order in which they run.
    pub(super) others: Vec<OtherProgram>,
}

impl HookView {
    fn rows_of_others(&self) -> impl Iterator<Item = [String; 4]> + '_ {
        self.others.iter().map(|other| {
            let name = if other.name.is_empty() { "without a name" } else { &other.name };
            let position = if other.is_before { "before the proxy's" } else { "after the proxy's" };
            [name, self.interface.as_deref().unwrap_or("-"), other.hook, position].map(str::to_owned)
        })
    }
}

impl StatusView {
    /// Returns the status without what is read from the kernel. `programmed` is the mode that is
    /// found on the node. `starting` is a process that has begun but left no record yet.
    pub(super) fn new(record: Option<Record>, programmed: Option<Mode>, starting: Option<u32>) -> Self {
        let alive = record.as_ref().is_some_and(Record::is_alive);
        let running = alive || starting.is_some();
        let pid = starting.or_else(|| record.as_ref().filter(|_| alive).map(|record| record.pid));
        let mode = record.as_ref().map(|record| record.mode.clone());
        Self {
            mode: mode.filter(|_| running).or_else(|| programmed.map(|mode| mode.name().to_owned())),
            reasons: record.as_ref().map(|record| record.reasons.clone()).unwrap_or_default(),
            fallback: record.as_ref().and_then(|record| record.fallback.clone()),
            node: record.as_ref().map(|record| record.node.clone()),
            controller: ControllerView { running: Some(running), starting: starting.is_some(), pid },
            unserved_fields: record.as_ref().map(|record| record.unserved_fields.clone()).unwrap_or_default(),
            unattached: record.iter().filter(|_| alive).flat_map(unattached).collect(),
            sources: record.filter(|_| alive).map(|record| record.sources),
            hooks: Vec::new(),
            xdp: Vec::new(),
            workload_interfaces: None,
            withdraws_in: None,
            maps: Vec::new(),
            counters: Vec::new(),
            former_kube_proxy: FormerView::default(),
            unreadable: Vec::new(),
        }
    }

    /// Notes that the caller may not read something. If no controller was found, it is then unknown
    /// whether one runs.
    pub(super) fn unreadable(&mut self, what: String) {
        self.unreadable.push(what);
        self.controller.running = self.controller.running.filter(|running| *running);
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, value: &str| text.push_str(&format!("{name:<12}{value}\n"));
        let no_mode = if self.unreadable.is_empty() {
            "none: nothing of proxy-ctl is programmed on this node"
        } else {
            "not known"
        };
        line("mode", self.mode.as_deref().unwrap_or(no_mode));
        for what in &self.unreadable {
            line("not read", what);
        }
        if let Some(fallback) = &self.fallback {
            line("fallback", fallback);
        }
        for (index, reason) in self.reasons.iter().enumerate() {
            line(if index == 0 { "because" } else { "" }, reason);
        }
        if let Some(node) = &self.node {
            line("node", node);
        }
        match (self.controller.running, self.controller.pid) {
            (None, _) => line("controller", "not known"),
            (Some(true), Some(pid)) if self.controller.starting => {
                line("controller", &format!("starting, pid {pid}"));
            }
            (Some(true), Some(pid)) => line("controller", &format!("running, pid {pid}")),
            (Some(true), None) => line("controller", "running"),
            (Some(false), _) if self.mode.is_some() => {
                line(
                    "controller",
                    "not running; what is programmed goes on working, but changes are not followed",
                );
            }
            (Some(false), _) => line("controller", "not running; start it with `proxy-ctl run`"),
        }
        match self.withdraws_in {
            Some(0) => {
                line("lease", "has ended: nothing is translated before a controller has listed everything")
            }
            Some(left) => {
                let left = duration::format(Duration::from_secs(left));
                line("lease", &format!("without a controller, translation ends in {left}"));
            }
            None => {}
        }
        for source in self.sources.iter().flatten() {
            let connected = match (&source.problem, source.connected) {
                (_, true) => "connected".to_owned(),
                (None, false) => "not connected".to_owned(),
                (Some(problem), false) => format!("not connected ({problem})"),
            };
            line("source", &format!("{}: {connected}, {} objects", source.name, source.objects));
        }
        for interface in &self.unattached {
            line("unattached", interface);
        }
        if let Some(former) = self.former_kube_proxy.text() {
            line("kube-proxy", &format!("rules of another kube-proxy: {former}"));
        }
        self.tables_text(&mut text);
        text
    }

    fn tables_text(&self, text: &mut String) {
        let mut part = |rows: usize, part: String| {
            if rows > 0 {
                text.push('\n');
                text.push_str(&part);
            }
        };
        let (delegated, unserved_fields): (Vec<_>, Vec<_>) =
            self.unserved_fields.iter().partition(|field| field.is_delegated());
        let unserved_fields: BTreeSet<_> = unserved_fields.into_iter().map(unserved_row).collect();
        part(
            unserved_fields.len(),
            table(["NOT SERVED AS ASKED", "FIELD", "EFFECT", "INSTEAD"], unserved_fields),
        );
        let delegated = delegated_rows(&delegated);
        part(delegated.len(), table(["DELEGATED", "FIELD", "HOW"], delegated));
        let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
        let hooks = self.hooks.iter().map(|hook| {
            let [interface, role, reason] = [&hook.interface, &hook.role, &hook.reason].map(or_dash);
            [hook.name.clone(), interface, role, hook.kind.clone(), reason]
        });
        part(
            self.hooks.len(),
            table(["HOOK", "INTERFACE", "ROLE", "ATTACHED BY", "THAT ROLE BECAUSE"], hooks),
        );
        let others: Vec<_> = self.hooks.iter().flat_map(HookView::rows_of_others).collect();
        part(others.len(), table(["PROGRAM OF ANOTHER", "INTERFACE", "HOOK", "RUNS"], others));
        part(self.xdp.len(), xdp::text("XDP", &self.xdp));
        let pods = self.workload_interfaces.as_ref().map(WorkloadInterfaces::text);
        part(pods.iter().len(), pods.unwrap_or_default());
        // The storage of sockets has no capacity: an entry lives and dies with its socket.
        let sized: Vec<_> = self.maps.iter().filter(|of| of.capacity > 0).collect();
        let maps = sized.iter().map(|of| {
            let full = format!("{:.1} %", of.used as f64 * 100.0 / of.capacity as f64);
            [of.name.to_owned(), of.used.to_string(), of.capacity.to_string(), full, bytes(of.bytes)]
        });
        part(sized.len(), table(["MAP", "USED", "CAPACITY", "FULL", "MEMORY"], maps));
        let counted: Vec<_> = self.counters.iter().filter(|counter| counter.count > 0).collect();
        let counters = counted.iter().map(|counter| [counter.name.to_owned(), counter.count.to_string()]);
        part(counted.len(), table(["REASON", "COUNT"], counters));
    }
}

/// Returns a line for each interface that the controller cannot attach packet programs to.
fn unattached(record: &Record) -> impl Iterator<Item = String> {
    let line = |of: &InterfaceRecord| Some(format!("{}: {}", of.name, of.unattached.as_ref()?));
    record.interfaces.iter().filter_map(line)
}

/// Returns a row of the table. Both IP families of a service port give the same row.
fn unserved_row(one: &UnservedFieldRecord) -> [String; 4] {
    let UnservedFieldRecord { field, effect, instead, .. } = one;
    let effect = match effect.as_str() {
        "notServed" => "not served",
        "partlyServed" => "partly served",
        _ => "served differently",
    };
    [service_port(one), field.clone(), effect.to_owned(), instead.clone()]
}

fn service_port(UnservedFieldRecord { namespace, name, port, .. }: &UnservedFieldRecord) -> String {
    let port = if port.is_empty() { String::new() } else { format!(":{port}") };
    format!("{namespace}/{name}{port}")
}

/// Returns a row for each service port. If many have the same field, one row counts them.
fn delegated_rows(fields: &[&UnservedFieldRecord]) -> Vec<[String; 3]> {
    const MOST_NAMED: usize = 10;
    let mut service_ports: BTreeMap<[&str; 2], BTreeSet<String>> = BTreeMap::new();
    for one in fields {
        let key = [one.field.as_str(), one.instead.as_str()];
        service_ports.entry(key).or_default().insert(service_port(one));
    }
    let mut rows = Vec::new();
    for ([field, how], names) in service_ports {
        let names = match names.len() {
            0..=MOST_NAMED => Vec::from_iter(names),
            many => vec![format!("{many} service ports")],
        };
        rows.extend(names.into_iter().map(|name| [name, field.to_owned(), how.to_owned()]));
    }
    rows
}

#[cfg(test)]
mod tests;
