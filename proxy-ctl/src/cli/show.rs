//! `status`, `services` and `backends`: they work on the pins, whether or not a controller runs.

use std::{
    collections::HashSet,
    io::Write as _,
    path::{Path, PathBuf},
};

use nix::net::if_::if_indextoname;

use super::{
    args::{BackendsArgs, Output, OutputArgs, ServicesArgs, StatusArgs},
    table,
    views::{
        self, BackendView, CounterView, EndpointView, FormerView, FrontendKind, FrontendView, HookView,
        Policy, ServiceView, StatusView, TableView,
    },
};
use crate::{
    dataplane::{
        Usage,
        ebpf::{
            self,
            status::{BackendState, EndpointState, FrontendState, Pinned, ServiceState},
        },
    },
    leftovers,
    model::objects::Protocol,
    process::record::{Interface, Record},
};

const DEFAULT_BPFFS: &str = "/sys/fs/bpf";

pub(super) fn bpffs(flag: Option<PathBuf>) -> PathBuf {
    flag.unwrap_or_else(|| PathBuf::from(DEFAULT_BPFFS))
}

enum Found {
    Tables(Box<Pinned>),
    /// A controller has begun, and has not made all tables yet.
    Starting(u32),
    Nothing,
}

fn pinned(bpffs: &Path) -> anyhow::Result<Found> {
    let error = match Pinned::open(bpffs) {
        Ok(pinned) => return Ok(Found::Tables(Box::new(pinned))),
        Err(error) => error,
    };
    match (error, ebpf::status::controller(bpffs)) {
        (error, Some(process)) if error.is_missing_tables() => Ok(Found::Starting(process)),
        (ebpf::Error::NotThere(_), None) => Ok(Found::Nothing),
        (error, _) => Err(error.into()),
    }
}

/// The tables, if they are there; says so if they only will be.
fn tables(bpffs: &Path) -> anyhow::Result<Option<Box<Pinned>>> {
    Ok(match pinned(bpffs)? {
        Found::Tables(pinned) => Some(pinned),
        Found::Starting(process) => {
            // Nobody is left to tell if stderr is gone.
            let _ = writeln!(
                std::io::stderr(),
                "proxy-ctl (process {process}) is starting: nothing is programmed yet"
            );
            None
        }
        Found::Nothing => None,
    })
}

pub(super) fn print<T: serde::Serialize>(
    output: OutputArgs,
    value: &T,
    text: impl FnOnce() -> String,
) -> anyhow::Result<()> {
    match output.output {
        Output::Json => table::print_json(value),
        Output::Table => Ok(table::print(&text())?),
    }
}

pub(super) fn services(args: &ServicesArgs, bpffs: &Path) -> anyhow::Result<()> {
    let Some(pinned) = tables(bpffs)? else {
        let nothing: Vec<ServiceView> = Vec::new();
        return print(args.output, &nothing, || views::services(&nothing));
    };
    let backends = pinned.backends()?;
    let terminating: HashSet<u32> =
        backends.iter().filter(|backend| backend.terminating).map(|backend| backend.id).collect();
    let terminating = |id| terminating.contains(&id);
    let mut services: Vec<ServiceView> =
        pinned.services()?.into_iter().map(|service| service_view(service, terminating)).collect();
    if let Some(wanted) = &args.name {
        services.retain(|service| service.matches(wanted));
        if services.is_empty() {
            anyhow::bail!("{wanted} is not served on this node; `proxy-ctl services` lists what is");
        }
    }
    print(args.output, &services, || views::services(&services))
}

pub(super) fn backends(args: &BackendsArgs, bpffs: &Path) -> anyhow::Result<()> {
    let backends: Vec<BackendView> = match tables(bpffs)? {
        Some(pinned) => pinned.backends()?.into_iter().map(backend_view).collect(),
        None => Vec::new(),
    };
    print(args.output, &backends, || views::backends(&backends))
}

pub(super) fn status(args: &StatusArgs, bpffs: &Path) -> anyhow::Result<()> {
    let pinned = match pinned(bpffs)? {
        Found::Tables(pinned) => Some(pinned),
        Found::Starting(_) | Found::Nothing => None,
    };
    let record = Record::read(bpffs);
    // It leaves its record once it has loaded its programs.
    let speaks = |process: &u32| record.as_ref().is_some_and(|record| record.pid == *process);
    let starting = ebpf::status::controller(bpffs).filter(|process| !speaks(process));
    let interfaces = record.as_ref().map(|record| record.interfaces.clone()).unwrap_or_default();
    let keeps = record.as_ref().map(Record::keeps).unwrap_or_default();
    let mut status = StatusView::new(record, pinned.is_some(), starting);
    status.former_kube_proxy = FormerView::new(&leftovers::find(&keeps));
    if let Some(pinned) = pinned {
        status.hooks = pinned.links()?.iter().map(|link| hook_view(link, &interfaces)).collect();
        status.hooks.sort_unstable();
        let Usage { tables, reasons, .. } = pinned.usage()?;
        status.tables = tables
            .into_iter()
            .map(|table| TableView {
                name: table.name.to_owned(),
                used: table.used,
                capacity: table.capacity,
                bytes: table.bytes,
            })
            .collect();
        status.counters = reasons
            .into_iter()
            .map(|reason| CounterView { reason: reason.name.to_owned(), count: reason.count })
            .collect();
    }
    print(args.output, &status, || status.text())
}

fn state(terminating: bool) -> &'static str {
    if terminating { "terminating" } else { "active" }
}

fn service_view(service: ServiceState, terminating: impl Fn(u32) -> bool) -> ServiceView {
    let ServiceState { id, name, frontends, cluster, internal, external, .. } = service;
    // Sets list their endpoints in the same order. Nobody comes from outside where no frontend lets them.
    let is_external = frontends.iter().any(|frontend| frontend.external);
    let policy = Policy::of(internal == cluster, !is_external || external == cluster);
    // What clients of the cluster get: with a cluster IP only, that is the internal set.
    let shown = if cluster.is_empty() { &internal } else { &cluster };
    let endpoint = |endpoint: &EndpointState| EndpointView {
        address: endpoint.address.ip(),
        port: endpoint.address.port(),
        local: endpoint.local,
        state: state(terminating(endpoint.backend)),
    };
    let mut frontends: Vec<_> = frontends.into_iter().map(frontend_view).collect();
    frontends.sort_unstable();
    ServiceView {
        namespace: name.service.namespace.to_string(),
        name: name.service.name.to_string(),
        port: name.port.to_string(),
        protocol: name.protocol.name(),
        family: name.family.name(),
        id,
        policy,
        frontends,
        endpoints: shown.iter().map(endpoint).collect(),
        internal_endpoints: internal.len(),
        external_endpoints: external.len(),
    }
}

fn frontend_view(frontend: FrontendState) -> FrontendView {
    let kind = match (frontend.address, frontend.external) {
        (None, _) => FrontendKind::NodePort,
        (Some(_), true) => FrontendKind::External,
        (Some(_), false) => FrontendKind::ClusterIp,
    };
    FrontendView { kind, address: frontend.address, port: frontend.port }
}

fn backend_view(backend: BackendState) -> BackendView {
    BackendView {
        id: backend.id,
        address: backend.address.ip(),
        port: backend.address.port(),
        protocol: backend.protocol.map_or("unknown", Protocol::name),
        state: state(backend.terminating),
        local: backend.local,
        services: backend.uses,
    }
}

/// `cgroup_connect4`, `3_ingress`, or `3_clsact` for both directions.
fn hook_view(link: &str, interfaces: &[Interface]) -> HookView {
    let (place, hook) = link.split_once('_').unwrap_or(("", link));
    let (name, kind) = match (place, hook) {
        ("cgroup", hook) => (hook, "cgroup"),
        (_, "clsact") => ("ingress, egress", "clsact"),
        (_, hook) => (hook, "tcx"),
    };
    let index: Option<u32> = place.parse().ok();
    let known = interfaces.iter().find(|interface| Some(interface.index) == index);
    let here = |index: u32| if_indextoname(index).ok().and_then(|name| name.into_string().ok());
    HookView {
        name: name.to_owned(),
        interface: index.map(|index| match known {
            Some(known) => known.name.clone(),
            None => here(index).unwrap_or_else(|| format!("number {index}")),
        }),
        role: known.map(|known| known.role.clone()),
        kind: kind.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::model::{
        desired::ServicePortName,
        objects::{IpFamily, ObjectName},
    };

    fn endpoint(address: &str, local: bool, backend: u32) -> EndpointState {
        EndpointState { address: address.parse::<SocketAddr>().unwrap(), local, backend }
    }

    fn web(internal: Vec<EndpointState>, external: Vec<EndpointState>) -> ServiceState {
        ServiceState {
            id: 7,
            name: ServicePortName {
                service: ObjectName::new("default", "web"),
                port: "http".into(),
                protocol: Protocol::Tcp,
                family: IpFamily::Ipv4,
            },
            frontends: vec![
                FrontendState { address: None, port: 30080, external: true },
                FrontendState { address: Some([10, 96, 0, 1].into()), port: 80, external: false },
            ],
            cluster: vec![endpoint("10.1.0.1:8080", true, 1), endpoint("10.1.0.2:8080", false, 2)],
            internal,
            external,
            any_endpoints: true,
            affinity_seconds: 0,
        }
    }

    #[test]
    fn a_service_with_local_policy_for_outside_clients() {
        let all = web(Vec::new(), Vec::new()).cluster;
        let view = service_view(web(all, vec![endpoint("10.1.0.1:8080", true, 1)]), |id| id == 2);
        assert_eq!(view.policy, Policy::ExternalLocal);
        assert_eq!((view.endpoints.len(), view.internal_endpoints, view.external_endpoints), (2, 2, 1));
        assert_eq!(view.endpoints[1].state, "terminating");
        assert_eq!(view.frontends[0].kind, FrontendKind::ClusterIp);
        assert_eq!(view.frontends[1].kind, FrontendKind::NodePort);
    }

    #[test]
    fn a_service_that_nobody_dials_from_outside_has_no_policy_for_them() {
        let all = web(Vec::new(), Vec::new()).cluster;
        let mut service = web(all, Vec::new());
        service.frontends.retain(|frontend| !frontend.external);
        assert_eq!(service_view(service, |_| false).policy, Policy::Cluster);
    }

    #[test]
    fn hooks_are_named_for_people() {
        let of_socket = hook_view("cgroup_connect4", &[]);
        assert_eq!((of_socket.name.as_str(), of_socket.kind.as_str()), ("connect4", "cgroup"));
        assert_eq!(of_socket.interface, None);
        let of_loopback = hook_view("1_ingress", &[]);
        assert_eq!(of_loopback.interface.as_deref(), Some("lo"));
        assert_eq!(of_loopback.kind, "tcx");
        let uplink = Interface { index: 7, name: "eth0".into(), role: "uplink".into() };
        let of_uplink = hook_view("7_egress", &[uplink]);
        assert_eq!(
            (of_uplink.interface.as_deref(), of_uplink.role.as_deref()),
            (Some("eth0"), Some("uplink"))
        );
        assert_eq!(hook_view("1_clsact", &[]).kind, "clsact");
    }
}
